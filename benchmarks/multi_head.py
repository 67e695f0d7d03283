"""Time of MultiHeadAttention against nn.MultiheadAttention, side by side.

Ours, PyTorch's with the weights of each head (the same work) and PyTorch's without weights
(a fused kernel) are timed in turn in every round; the medians of the ratios round by round
are recorded. The forward pass alone is in evaluation mode and without gradients, where
PyTorch's layer takes a path made for inference.

    python benchmarks/multi_head.py    writes results/multi_head.json
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record
from torch import nn

from attnlib import MultiHeadAttention

SHAPES = ((8, 512, 512, 8), (1, 2048, 768, 12))  # batch, tokens, width, heads


def contestants(
    batch: int, tokens: int, width: int, heads: int, backward: bool
) -> dict[str, Callable[[], None]]:
    """The calls to compare, with the same weights on the same float32 input."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(width, heads, batch_first=True).train(backward)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(batch, tokens, width, requires_grad=backward)

    def run(forward: Callable[[], torch.Tensor], module: nn.Module) -> None:
        with torch.set_grad_enabled(backward):
            output = forward()
            if backward:
                torch.autograd.grad(output.sum(), [x, *module.parameters()])

    with_weights = {"need_weights": True, "average_attn_weights": False}
    return {
        "ours": lambda: run(lambda: ours(x)[0], ours),
        "ours_fused": lambda: run(lambda: ours(x, need_weights=False)[0], ours),
        "theirs": lambda: run(lambda: theirs(x, x, x, **with_weights)[0], theirs),
        "fused": lambda: run(lambda: theirs(x, x, x, need_weights=False)[0], theirs),
    }


def measure(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds; median ratios of ours to theirs, with weights and without."""
    times = time_in_turn(calls, rounds)

    def ratio(ours: str, theirs: str) -> float:
        pairs = zip(times[ours], times[theirs], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    medians = {f"{name}_ms": round(statistics.median(ms), 2) for name, ms in times.items()}
    return {
        **medians,
        "ratio": ratio("ours", "theirs"),
        "ratio_fused": ratio("ours_fused", "fused"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    rows = []
    for shape in SHAPES:
        named = dict(zip(("batch", "tokens", "width", "heads"), shape, strict=True))
        for name, backward in (("forward", False), ("forward+backward", True)):
            measured = measure(contestants(*shape, backward=backward), rounds)
            rows.append({**named, "pass": name, **measured})
            print(rows[-1], flush=True)
    record = {"rounds": rounds, "rows": rows}
    write_record("multi_head", record)


if __name__ == "__main__":
    main()
