"""Loss of SmolLM2 beyond the length that its file names, by the scaling of its positions.

A long English text is read from its beginning, with the speeds of the model and with each
rule of chapter 16. Since a text is harder in some places than in others, the model also
reads the last of these tokens alone, as many as its length, behind the text's first one.

    python benchmarks/real_positions.py      writes results/real_positions.json
"""

import argparse
import time
from typing import Any

import torch
from paired import write_record
from smollm2 import english, smollm2
from torch import Tensor
from torch.nn import functional as F

from attnlib import KVCache, Llama, RotaryPositions

PIECE, FACTOR = 512, 2.0
RULES = ("yarn", "ntk", "llama3", "linear")


def turn_by(model: Llama, rotary: RotaryPositions) -> None:
    """Gives all blocks of a model other positions."""
    model.positions = rotary
    for block in model.blocks:
        block.attention.rotary = rotary


@torch.inference_mode()
def losses_of(model: Llama, ids: Tensor, start: int, stop: int, label: str) -> Tensor:
    """The losses of tokens `start` + 1 to `stop`, read from `start` on in pieces.

    The first token of the text stands for token `start`.
    """
    part = torch.cat([ids[:1], ids[start + 1 : stop + 1]])
    caches = [KVCache(stop - start) for _ in model.blocks]
    losses, begun = [], time.perf_counter()
    for inputs, targets in zip(part[:-1].split(PIECE), part[1:].split(PIECE), strict=True):
        logits = model(inputs, cache=caches)
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        seconds = time.perf_counter() - begun
        print(f"{label}: {len(caches[0])} tokens read, {seconds:.0f} s", flush=True)
    return torch.cat(losses)


def means(losses: Tensor, size: int) -> list[float]:
    """Means of stretches of `size` tokens."""
    return [round(part.mean().item(), 3) for part in losses.split(size)]


def repeated(ids: Tensor, size: int, within: int) -> list[float]:
    """The share of tokens, by stretch, that end ten tokens which stood before.

    Only those count that stood there first among the first tokens, up to `within`.
    """
    first, again = {}, [False] * len(ids)
    for place, run in enumerate(ids.unfold(0, 10, 1).tolist(), 9):
        again[place] = first.setdefault(tuple(run), place) < min(place, within)
    return means(torch.tensor(again[1:]).double(), size)


def readings(model: Llama, ids: Tensor, length: int, size: int) -> dict[str, Any]:
    """Mean losses by stretch, of each way to read."""
    last, own, found = len(ids) - 1, model.positions, {}
    model.context_length = last
    found["none"] = means(losses_of(model, ids, 0, last, "none"), size)
    late = losses_of(model, ids, last - length, last, "alone")
    found["alone"] = means(late, size)
    for rule in RULES:
        scaled = {"scaling": rule, "factor": FACTOR, "original_length": length}
        turn_by(model, RotaryPositions(own.d_k, own.base, own.interleaved, **scaled))
        found[rule] = means(losses_of(model, ids, 0, last, rule), size)
        print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10240, help="whole stretches")
    parser.add_argument("--stretch", type=int, default=1024)
    parser.add_argument("--length", type=int, help="instead of the model's own")
    options = parser.parse_args()
    model, tokenizer, name = smollm2()
    ids, said = english(tokenizer, options.tokens + 1)
    length = options.length or model.context_length
    record = {"model": name, **said, "length": length, "base": model.positions.base}
    record |= {"stretch": options.stretch, "factor": FACTOR}
    for word, within in (("repeated", len(ids)), ("of_the_start", len(ids) - 1 - length)):
        record[word] = repeated(ids, options.stretch, within)
    record["losses"] = readings(model, ids, length, options.stretch)
    write_record("real_positions", record)


if __name__ == "__main__":
    main()
