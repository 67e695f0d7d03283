"""Time of the heads that plug in, beside plain scaled dot-product attention.

Forward, and forward with backward, in float32. The calls are timed in turn, and the medians
of the ratios round by round are recorded.

    python benchmarks/heads.py    writes results/heads.json
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record

from attnlib import (
    BaseAttention,
    LearnedBiasAttention,
    PhysicsGuidedAttention,
    ScaledDotProductAttention,
)

BATCH, HEADS, TOKENS, FEATURES = 4, 8, 512, 64


def contestants(backward: bool) -> dict[str, Callable[[], None]]:
    """Each head as a call on the same inputs."""
    torch.manual_seed(0)
    shape = (BATCH, HEADS, TOKENS, FEATURES)
    inputs = [torch.randn(shape, requires_grad=backward) for _ in range(3)]
    guided = PhysicsGuidedAttention()
    guided.guide(torch.rand(TOKENS))
    heads = {
        "plain": ScaledDotProductAttention(),
        "causal": ScaledDotProductAttention(causal=True),
        "learned": LearnedBiasAttention(HEADS, max_distance=16),
        "guided": guided,
    }

    def run(head: BaseAttention) -> None:
        with torch.set_grad_enabled(backward):
            output, _ = head(*inputs)
            if backward:
                torch.autograd.grad(output.sum(), [*inputs, *head.parameters()])

    return {name: lambda head=head: run(head) for name, head in heads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    rows = []
    for name, backward in (("forward", False), ("forward+backward", True)):
        times = time_in_turn(contestants(backward), rounds)
        row: dict[str, str | float] = {"pass": name}
        for head in ("causal", "learned", "guided"):
            pairs = zip(times[head], times["plain"], strict=True)
            row[head] = round(statistics.median(a / b for a, b in pairs), 3)
        rows.append(row)
        print(rows[-1], flush=True)
    shape = {"batch": BATCH, "heads": HEADS, "tokens": TOKENS, "features": FEATURES}
    write_record("heads", {**shape, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
