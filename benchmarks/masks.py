"""Time of a mask on plain attention, over the same call without one.

For every number of tokens the calls are timed in turn, without gradients; recorded are the
medians of the ratios round by round.

    python benchmarks/masks.py    writes results/masks.json
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record

from attnlib import ScaledDotProductAttention

HEADS, FEATURES = 8, 64
TOKENS = (128, 512, 1024, 2048)


def contestants(tokens: int) -> dict[str, Callable[[], object]]:
    """Plain attention without a mask, causal, and with masks of three kinds."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, tokens, FEATURES)
    plain, causal = ScaledDotProductAttention(), ScaledDotProductAttention(causal=True)
    allowed = torch.rand(tokens, tokens) < 0.5
    padding = torch.arange(tokens) < tokens * 3 // 4
    added = torch.randn(tokens, tokens)
    return {
        "none": lambda: plain(q, k, v),
        "causal": lambda: causal(q, k, v),
        "boolean": lambda: plain(q, k, v, allowed),
        "padding": lambda: plain(q, k, v, padding),
        "added": lambda: plain(q, k, v, added),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    rows = []
    for tokens in TOKENS:
        with torch.inference_mode():
            times = time_in_turn(contestants(tokens), rounds)
        none = times.pop("none")
        row = {"tokens": tokens, "none_ms": round(statistics.median(none), 4)}
        for name, own in times.items():
            ratios = (a / b for a, b in zip(own, none, strict=True))
            row[name] = round(statistics.median(ratios), 3)
        rows.append(row)
        print(row, flush=True)
    write_record("masks", {"heads": HEADS, "features": FEATURES, "rows": rows})


if __name__ == "__main__":
    main()
