"""Linear attention beside softmax attention: whole texts, one token more, and training.

Causal heads on a CPU: PyTorch's function by `ScaledDotProductAttention`, and a state by
`LinearAttention`, with pieces of several sizes. Then small models that differ only in their
attention, trained on the same batches of Python's own documentation.

python benchmarks/linear.py        writes results/linear.json
"""

import argparse
import math
from functools import partial
from statistics import median

import torch
from paired import time_in_turn, write_record
from torch.nn import functional as F
from train_text import SYMBOLS, load_text

from attnlib import LanguageModel, ScaledDotProductAttention
from attnlib.linear import GatedLinearAttention, LinearAttention, StateCache

HEADS, WIDTH = 4, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
SIZE = {"context_length": 256, "embed_dim": 128, "num_heads": 4, "num_layers": 3}
STEPS, BATCH, PEAK = 400, 12, 2e-3


@torch.inference_mode()
def whole_texts(rounds: int) -> list[dict]:
    """Milliseconds for all tokens of a text, with a state in pieces, and with softmax."""
    rows = []
    for n in LENGTHS:
        q, k, v = torch.randn(3, 1, HEADS, n, WIDTH)
        ways = {"softmax": ScaledDotProductAttention(causal=True)}
        ways |= {f"{p}": LinearAttention(causal=True, piece=p) for p in (16, 64, 256)}
        calls = {
            name: partial(way, q, k, v, need_weights=False) for name, way in ways.items()
        }
        times = time_in_turn(calls, rounds)
        rows.append({"tokens": n} | {name: round(median(times[name]), 2) for name in ways})
        print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def one_more(rounds: int) -> list[dict]:
    """Microseconds of one more token: keys and values of a text are read, or a state."""
    rows = []
    for n in LENGTHS:
        k, v = torch.randn(2, 1, HEADS, n, WIDTH)
        q = torch.randn(1, HEADS, 1, WIDTH)
        softmax = ScaledDotProductAttention(causal=True)
        layer, cache = GatedLinearAttention(HEADS * WIDTH, HEADS), StateCache()
        layer(torch.randn(1, n, HEADS * WIDTH), cache=cache)
        state = cache.state
        calls = {
            "softmax": partial(softmax, q, k, v, need_weights=False),
            "state": partial(step, q, q, F.pad(q, (0, 1), value=1.0), state),
        }
        times = time_in_turn(calls, 20 * rounds)
        row = {name: round(1e3 * median(times[name])) for name in calls}
        rows.append(
            {
                "tokens": n,
                **row,
                "cache_bytes": k.nbytes + v.nbytes,
                "state_bytes": cache.nbytes,
            }
        )
        print(rows[-1], flush=True)
    return rows


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> None:
    """One token by the recurrence itself."""
    state = state + k.mT @ v
    sums = q @ state
    sums[..., :-1] / sums[..., -1:]


def model_of(kind: str, places: str) -> LanguageModel:
    torch.manual_seed(0)
    heads = LinearAttention(causal=True) if kind == "linear" else None
    positions = "rotary" if places == "rotary" else "learned"
    model = LanguageModel(len(SYMBOLS), **SIZE, attention=heads, positions=positions)
    if places == "none":
        model.positions.requires_grad_(False).zero_()
    if kind == "gated":
        for block in model.blocks:
            block.attention = GatedLinearAttention(SIZE["embed_dim"], SIZE["num_heads"])
    return model


def loss_after(model: LanguageModel, steps: int) -> float:
    """Loss on text that was not learned from, in nats a symbol."""
    learn, test = load_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95))
    n = model.context_length
    drawn = torch.Generator().manual_seed(1)
    for number in range(steps):
        share = min((number + 1) / 80, 1) * (1 + math.cos(math.pi * number / steps)) / 2
        optimizer.param_groups[0]["lr"] = PEAK * share
        starts = torch.randint(len(learn) - n, (BATCH,), generator=drawn).tolist()
        ids = torch.stack([learn[s : s + n + 1] for s in starts])
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        ids = test[: len(test) // (n + 1) * (n + 1)].view(-1, n + 1)[:96]
        loss = F.cross_entropy(
            model.eval()(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        )
    return round(loss.item(), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.manual_seed(0)
    record = {"heads": HEADS, "width": WIDTH, "texts": whole_texts(options.rounds)}
    record["one_more"] = one_more(options.rounds)
    record["training"] = {"steps": options.steps, "batch": BATCH, **SIZE, "loss": []}
    for kind, places in (
        *(("softmax", "learned"), ("softmax", "rotary"), ("linear", "learned")),
        *(("linear", "rotary"), ("gated", "learned"), ("gated", "none")),
    ):
        loss = loss_after(model_of(kind, places), options.steps)
        record["training"]["loss"].append([kind, places, loss])
        print(kind, places, loss, flush=True)
    write_record("linear", record)


if __name__ == "__main__":
    main()
