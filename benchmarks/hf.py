"""A forward pass of models of `transformers`, with our attention, beside theirs.

A small Llama with random weights, whose heads share keys, reads texts of several lengths:
with our `FlashAttention`, with PyTorch's function ("sdpa") and with the library's own way
in Python ("eager"). With a padded text, every way gets a mask. The calls take turns.

    python benchmarks/hf.py             writes results/hf.json
    python benchmarks/hf.py --small     two short lengths, writes nothing
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers
from paired import time_in_turn, write_record
from torch import Tensor

from attnlib import FlashAttention, hf

WAYS = ("attnlib", "sdpa", "eager")
SIZES = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
LENGTHS = (1, 64, 256, 1024, 2048)


@torch.inference_mode()
def forward(
    model: transformers.PreTrainedModel, ids: Tensor, real: Tensor, way: str
) -> Tensor:
    """Logits of the last token; to set a name costs microseconds, for each way alike."""
    model.set_attn_implementation(way)
    output = model(ids, attention_mask=real, use_cache=False, logits_to_keep=1)
    return output.logits


def measure(lengths: tuple[int, ...], rounds: int) -> list[dict[str, float | int | bool]]:
    """For each length, with and without padding: milliseconds, and ratios to sdpa."""
    hf.register("attnlib", FlashAttention())
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=max(lengths))
    model = transformers.LlamaForCausalLM(config).eval()
    rows = []
    for tokens in lengths:
        ids = torch.randint(1, SIZES["vocab_size"], (2, tokens))
        for padded in (False, True) if tokens > 1 else (False,):
            real = torch.ones_like(ids)
            real[1, : tokens // 4] = not padded
            calls: dict[str, Callable[[], Tensor]] = {
                way: partial(forward, model, ids, real, way) for way in WAYS
            }
            logits = {way: call() for way, call in calls.items()}
            for way in WAYS:
                torch.testing.assert_close(logits[way], logits["sdpa"], rtol=0, atol=1e-3)
            times = time_in_turn(calls, rounds)
            row = {"tokens": tokens, "padded": padded}
            for way in WAYS:
                ratios = [a / b for a, b in zip(times[way], times["sdpa"], strict=True)]
                row[f"{way}_ms"] = round(statistics.median(times[way]), 3)
                row[f"{way}_over_sdpa"] = round(statistics.median(ratios), 3)
            rows.append(row)
            print(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="short, and writes nothing")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    if options.small:
        measure((1, 64), rounds=3)
        return
    rows = measure(LENGTHS, options.rounds)
    record = {"transformers": transformers.__version__, "sizes": SIZES, "batch": 2}
    write_record("hf", {**record, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
