"""Time of one attention forward pass against the number of tokens.

Four ways, paired: each round times all of them in turn, so that a change of the
machine's speed meets them all, and the median over the rounds is recorded.

    python benchmarks/attention_cost.py    writes results/attention_cost.json
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record
from torch.nn import functional as F

from attnlib import ScaledDotProductAttention

HEADS, FEATURES = 8, 64
TOKENS = (128, 256, 512, 1024, 2048, 4096)


def contestants(tokens: int) -> dict[str, Callable[[], object]]:
    """The calls to compare, all on the same float32 inputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, tokens, FEATURES) for _ in range(3))
    plain, causal = ScaledDotProductAttention(), ScaledDotProductAttention(causal=True)
    fused = F.scaled_dot_product_attention
    return {
        "attnlib_ms": lambda: plain(q, k, v),
        "attnlib_causal_ms": lambda: causal(q, k, v),
        "sdpa_ms": lambda: fused(q, k, v),
        "sdpa_causal_ms": lambda: fused(q, k, v, is_causal=True),
    }


def measure(tokens: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each contestant over alternating rounds."""
    calls = contestants(tokens)
    times = time_in_turn(calls, rounds)
    return {name: round(statistics.median(ms), 4) for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rows = []
    with torch.inference_mode():
        for tokens in TOKENS:
            rows.append({"tokens": tokens, **measure(tokens, rounds)})
            print(rows[-1], flush=True)
    record = {
        "what": f"forward, batch 1, {HEADS} heads of {FEATURES}, float32",
        "rounds": rounds,
        "rows": rows,
    }
    write_record("attention_cost", record)


if __name__ == "__main__":
    main()
