"""Loss of SmolLM2 on English, by the bits in which its cache keeps keys and values.

python benchmarks/few_bits.py        writes results/few_bits.json
"""

import argparse

import torch
from paired import write_record
from smollm2 import english, smollm2
from torch import Tensor
from torch.nn import functional as F

from attnlib import KVCache, Llama, QuantizedCache


class ByToken(QuantizedCache):
    """Keys, too, are cut token by token."""

    along = -1, -1


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
    model, tokenizer, name = smollm2()
    ids, said = english(tokenizer, options.tokens)
    record = {"model": name, **said, "piece": options.piece, "rows": []}

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
