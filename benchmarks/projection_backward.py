"""The gradient of a projection's weights: one product for each sequence, or one for all.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/projection_backward.py
writes results/projection_backward.json
"""

import argparse
import statistics

import numpy as np
from paired import time_in_turn, write_record

TOKENS, FEATURES = 2048, 256  # in all sequences together; of the input and of the output
SEQUENCES = (2, 8, 32, 128)


def measure(sequences: int, rounds: int) -> dict[str, float]:
    """Median milliseconds, and the median ratio, over alternating rounds."""
    rng = np.random.default_rng(0)
    shape = (sequences, TOKENS // sequences, FEATURES)
    x = rng.standard_normal(shape, dtype=np.float32)
    d_output = rng.standard_normal(shape, dtype=np.float32)
    tall, d_tall = x.reshape(TOKENS, FEATURES), d_output.reshape(TOKENS, FEATURES)
    calls = {
        "batched": lambda: (x.swapaxes(-1, -2) @ d_output).sum(axis=0),
        "flat": lambda: tall.T @ d_tall,
    }
    times = time_in_turn(calls, rounds)
    row = {f"{name}_ms": round(statistics.median(ms), 4) for name, ms in times.items()}
    pairs = zip(times["batched"], times["flat"], strict=True)
    row["batched_to_flat"] = round(statistics.median(a / b for a, b in pairs), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    rows = []
    for sequences in SEQUENCES:
        measured = measure(sequences, rounds)
        rows.append({"sequences": sequences, "tokens": TOKENS // sequences, **measured})
        print(rows[-1], flush=True)
    record = {"rounds": rounds, "features": FEATURES, "numpy": np.__version__, "rows": rows}
    write_record("projection_backward", record)


if __name__ == "__main__":
    main()
