"""Time of a projection against the number of tokens, beside nn.Linear.

Both hold the same weights, 4096 by 4096 in float32, which are 64 MiB: more than a processor
keeps near, so that they come from memory in every call. Median milliseconds, calls in turn.

    python benchmarks/projection_cost.py    writes results/projection_cost.json
"""

import argparse
import statistics

import torch
from paired import time_in_turn, write_record
from torch import nn

from attnlib import Projection

FEATURES = 4096
TOKENS = (1, 4, 16, 64, 256, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    linear = nn.Linear(FEATURES, FEATURES)
    projection = Projection.from_linear(linear)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, FEATURES)
        calls = {"ours_ms": lambda x=x: projection(x), "theirs_ms": lambda x=x: linear(x)}
        with torch.inference_mode():
            times = time_in_turn(calls, rounds)
        medians = {name: round(statistics.median(ms), 3) for name, ms in times.items()}
        rows.append({"tokens": tokens, **medians})
        print(rows[-1], flush=True)
    write_record("projection_cost", {"features": FEATURES, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
