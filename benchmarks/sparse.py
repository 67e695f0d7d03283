"""What SmolLM2 loses if its queries read chosen blocks of keys, and what a choice costs.

For queries in the second half of a long English text: the share of attention's weight that
lies outside of the keys that are read, by how they are chosen, as a mean over all heads.
Then the loss of the model, and the time of one query beside all keys.

python benchmarks/sparse.py                 writes results/sparse.json
python benchmarks/sparse.py --part time     measures this part anew
"""

import argparse
import json
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from paired import time_in_turn, write_record
from smollm2 import english, smollm2
from torch import Tensor
from torch.nn import functional as F

from attnlib import Llama, ScaledDotProductAttention
from attnlib.masks import causal_mask
from attnlib.sparse import (
    ChosenAttention,
    attend_chosen,
    box_scores,
    choose_blocks,
    in_blocks,
    mean_scores,
    with_first,
)

BLOCK = 16
KEPT = (4, 8, 16, 32)
KEYS = (4, 16, 64, 256)
LENGTHS = [2**i for i in range(10, 17)]


def newest(query: Tensor, blocks: Tensor) -> Tensor:
    """A score that is higher, the later the block."""
    places = torch.arange(blocks.shape[-3], dtype=query.dtype)
    return places.expand(*query.shape[:-1], -1)


def weights_themselves(query: Tensor, blocks: Tensor) -> Tensor:
    """Log-sum-exp of each block, for which all scores are computed."""
    return (query.unsqueeze(-3) @ blocks.mT).logsumexp(dim=-1).mT


def drawn(query: Tensor, blocks: Tensor) -> Tensor:
    return torch.rand(*query.shape[:-1], blocks.shape[-3])


SCORES = {
    "best": weights_themselves,
    "box": box_scores,
    "mean": mean_scores,
    "box, first": with_first(box_scores),
    "mean, first": with_first(mean_scores),
    "newest": newest,
    "newest, first": with_first(newest),
    "drawn": drawn,
}


class Recording(ScaledDotProductAttention):
    """Adds the queries, with the scale in them, and the keys of each call to a list."""

    def __init__(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(causal=True)
        self.kept = kept

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.kept.append((query * query.shape[-1] ** -0.5, key))
        return super().attend(query, key, value, mask)


def logits_of(model: Llama, ids: Tensor) -> Tensor:
    x = model.token_embedding(ids)
    for block in model.blocks:
        x = block(x)
    return model.logits(model.norm(x))


def lost_by_heads(query: Tensor, key: Tensor) -> dict[str, dict[int, Tensor]]:
    """The mean share of the weight of each head outside of what is chosen, each way."""
    half = query.shape[-2] // 2
    query, blocks = query[..., half:, :], in_blocks(key, BLOCK)
    mask = 1 - causal_mask(half, 2 * half).to(query.dtype).reciprocal()
    weights = torch.softmax(query @ key.mT + mask, dim=-1)
    shares, parts = (x.unflatten(-1, (-1, BLOCK)) for x in (weights, mask))
    lost: dict[str, dict[int, Tensor]] = {}
    for name, score in SCORES.items():
        ranks = score(query, blocks)
        for keep in KEPT:
            chosen = choose_blocks(ranks, parts, keep)
            kept = shares.sum(dim=-1).gather(-1, chosen).sum(dim=-1)
            lost.setdefault(name, {})[keep] = 1 - kept.mean(dim=-1)
    places = torch.arange(2 * half, dtype=query.dtype)
    orders = {"largest": weights, "newest": places, "drawn": torch.rand(weights.shape)}
    for name, order in orders.items():  # single keys
        order = order.expand(weights.shape).masked_fill(mask < 0, -torch.inf)
        kept = weights.gather(-1, order.topk(max(KEYS), dim=-1).indices).cumsum(dim=-1)
        for keys in KEYS:
            lost.setdefault(f"{name} keys", {})[keys] = 1 - kept[..., keys - 1].mean(dim=-1)
    return lost


@torch.inference_mode()
def measure_lost(model: Llama, ids: Tensor) -> dict:
    heads: list[tuple[Tensor, Tensor]] = []
    for block in model.blocks:
        block.attention.attention = Recording(heads)
    logits_of(model, ids)
    torch.manual_seed(0)
    lost = [lost_by_heads(query, key) for query, key in heads]
    rows = {}
    for name, numbers in lost[0].items():
        rows[name] = [
            [number, *spread(torch.cat([head[name][number].flatten() for head in lost]))]
            for number in numbers
        ]
        print(name, rows[name], flush=True)
    return {"block": BLOCK, "rows": rows}


def spread(lost: Tensor) -> list[float]:
    """Mean, and the least and largest of the heads."""
    return [round(x.item(), 3) for x in (lost.mean(), lost.min(), lost.max())]


def attend_masked(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, chosen: Tensor
) -> Tensor:
    """`attend_chosen` by all scores and a mask: faster here, for texts that are short."""
    kept = torch.zeros(*chosen.shape[:-1], keys.shape[-3], dtype=torch.bool)
    mask = mask.masked_fill(~kept.scatter(-1, chosen, True)[..., None], -torch.inf)
    scores = query @ keys.flatten(-3, -2).mT + mask.flatten(-2)
    return torch.softmax(scores, dim=-1) @ values.flatten(-3, -2)


@torch.inference_mode()
def measure_loss(model: Llama, ids: Tensor) -> dict:
    inputs = torch.randn(3, 2, 200, 8)
    options = {"block": 16, "keep": 4, "causal": True}
    by_keys = ChosenAttention(**options)(*inputs)[0]
    with patch("attnlib.sparse.attend_chosen", attend_masked):
        torch.testing.assert_close(ChosenAttention(**options)(*inputs)[0], by_keys)
        return {"rows": losses(model, ids)}


def losses(model: Llama, ids: Tensor) -> list:
    """How each choice is called, its blocks, and the loss in the second half."""
    half, rows = len(ids) // 2, []
    ways = [(name, keep) for name in list(SCORES)[:-1] for keep in KEPT]
    for name, keep in [("all", len(ids)), *ways]:
        for block in model.blocks:
            heads = ChosenAttention(BLOCK, keep, SCORES.get(name, box_scores), causal=True)
            block.attention.attention = heads
        logits = logits_of(model, ids)
        loss = F.cross_entropy(logits[half:-1], ids[half + 1 :]).item()
        rows.append([name, keep, round(loss, 3)])
        print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def time_of(m: int) -> dict:
    """Milliseconds of one query in 9 heads of 64: all m keys, and 16 blocks of 16."""
    query, key, value = (torch.randn(1, 9, n, 64) for n in (1, m, m))
    keys, values = in_blocks(key, BLOCK), in_blocks(value, BLOCK)
    low, high = keys.amin(dim=-2), keys.amax(dim=-2)
    scaled, mask = query / 8, torch.zeros(1, m // BLOCK, BLOCK)
    softmax, door = ScaledDotProductAttention(), ChosenAttention(BLOCK, 16)

    def choose() -> Tensor:
        scores = scaled.clamp(min=0) @ high.mT + scaled.clamp(max=0) @ low.mT
        return choose_blocks(scores, mask, 16)

    def read(chosen: Tensor) -> Tensor:
        return attend_chosen(scaled, keys, values, mask, chosen)

    chosen = choose()

    calls = {
        "all": lambda: softmax(query, key, value, need_weights=False)[0],
        "chosen": lambda: read(choose()),
        "reading": lambda: read(chosen),
        "boxes anew": lambda: door(query, key, value)[0],
    }
    torch.testing.assert_close(calls["chosen"](), calls["boxes anew"]())
    times = time_in_turn(calls, 21)
    return {"keys": m, **{name: round(median(each), 3) for name, each in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--part", choices=["lost", "loss", "time"])
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / "sparse.json"
    record = json.loads(path.read_text("utf-8")) if options.part else {}
    model, tokenizer, name = smollm2()
    ids, said = english(tokenizer, options.tokens)
    record |= {"model": name, **said}
    if options.part in (None, "lost"):
        record["lost"] = measure_lost(model, ids)
    if options.part in (None, "loss"):
        record["loss"] = measure_loss(model, ids)
    if options.part in (None, "time"):
        record["time"] = [time_of(m) for m in LENGTHS]
    write_record("sparse", record)


if __name__ == "__main__":
    main()
