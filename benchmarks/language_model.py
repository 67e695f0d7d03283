"""Time of LanguageModel beside PyTorch's encoder with the same work, for inference.

PyTorch's side is an embedding, positions, `nn.TransformerEncoder` with a causal mask, a
norm and the product with the embedding's table. Its layers have the weights of ours, and
the two must agree before anything is timed. Recorded are medians, and the median of ratios
round by round, above 1 where ours is slower.

    python benchmarks/language_model.py    writes results/language_model.json
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib import LanguageModel, TransformerBlock

VOCABULARY, WIDTH, HEADS, LAYERS = 96, 128, 4, 4
SHAPES = ((1, 32), (1, 128), (8, 128), (1, 512))  # batch, tokens


def contestants(batch: int, tokens: int) -> dict[str, Callable[[], Tensor]]:
    """Both models on the same ids, with the same weights."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options)
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
    ours = LanguageModel(VOCABULARY, tokens, WIDTH, HEADS, LAYERS).eval()
    for block, theirs in zip(ours.blocks, encoder.layers, strict=True):
        copied = TransformerBlock.from_torch(theirs)
        copied.attention.attention = block.attention.attention  # the causal heads
        block.load_state_dict(copied.state_dict())
    table, positions, norm = ours.token_embedding.weight, ours.positions, ours.norm
    ids = torch.randint(VOCABULARY, (batch, tokens))
    mask = nn.Transformer.generate_square_subsequent_mask(tokens)

    def by_pytorch() -> Tensor:
        x = F.embedding(ids, table) + positions
        x = encoder(x, mask=mask, is_causal=True)
        x = F.layer_norm(x, (WIDTH,), norm.gamma, norm.beta)
        return F.linear(x, table)

    torch.testing.assert_close(ours(ids), by_pytorch(), rtol=0, atol=1e-4)
    return {"ours": lambda: ours(ids), "theirs": by_pytorch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    rows = []
    for batch, tokens in SHAPES:
        with torch.no_grad():
            times = time_in_turn(contestants(batch, tokens), rounds)
        row: dict[str, float] = {"batch": batch, "tokens": tokens, "width": WIDTH}
        row |= {f"{name}_ms": round(statistics.median(ms), 3) for name, ms in times.items()}
        pairs = zip(times["ours"], times["theirs"], strict=True)
        row["ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
        rows.append(row)
        print(row, flush=True)
    shape = {"heads": HEADS, "layers": LAYERS, "vocabulary": VOCABULARY}
    write_record("language_model", {**shape, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
