"""Time of one attention forward pass against the number of tokens.

Four ways, paired: each round times all of them in turn, so that a change of the
machine's speed meets them all, and the median over the rounds is recorded.

    python benchmarks/attention_cost.py    writes results/attention_cost.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe
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
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # untimed: what the one before left in caches and allocator is gone
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
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
        "machine": describe(),
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / "attention_cost.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
