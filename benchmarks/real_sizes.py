"""How large the numbers of a trained model are: its stream, and the scores of its heads.

python benchmarks/real_sizes.py      writes results/real_sizes.json
"""

import argparse
import math

import torch
from paired import write_record
from smollm2 import english, smollm2
from torch import Tensor

from attnlib.base import repeat_heads

LIMITS = {
    name: math.log(torch.finfo(getattr(torch, name)).max) for name in ("float16", "float32")
}


def sizes(stream: Tensor) -> dict[str, float]:
    """Root mean squares of tokens, and the largest feature, of a stream (n, d)."""
    each = stream.square().mean(dim=-1).sqrt()
    found = {
        "first": each[0],
        "median": each[1:].median(),
        "feature": stream[1:].abs().max(),
    }
    return {name: round(value.item(), 2) for name, value in found.items()}


def score_sizes(query: Tensor, key: Tensor) -> dict[str, float]:
    """Of all rows of the heads' scores that are seen: their maxima, and who overflows."""
    key = repeat_heads(key, query.shape[-3] // key.shape[-3])
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    highest, lse = scores.amax(dim=-1), scores.logsumexp(dim=-1)
    over = {name: (lse > limit).double().mean().item() for name, limit in LIMITS.items()}
    return {
        "highest": round(highest.max().item(), 1),
        "lowest_maximum": round(highest.min().item(), 1),
        **{f"over_{name}": round(share, 4) for name, share in over.items()},
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    model, tokenizer, name = smollm2()
    ids, said = english(tokenizer, options.tokens)
    stream, scores = [], []

    def note_stream(module, args):
        stream.append(sizes(args[0]))

    def note_scores(module, args, named):
        query, key = [*args, *named.values()][:2]
        scores.append(score_sizes(query, key))

    for block in model.blocks:
        block.register_forward_pre_hook(note_stream)
        block.attention.attention.register_forward_pre_hook(note_scores, with_kwargs=True)
    model.norm.register_forward_pre_hook(note_stream)
    model(ids)
    for read, rows in enumerate(stream):
        print(f"{read} blocks read:", rows)
    for block, row in enumerate(scores):
        print(f"block {block}:", row)
    write_record("real_sizes", {"model": name, **said, "stream": stream, "scores": scores})


if __name__ == "__main__":
    main()
