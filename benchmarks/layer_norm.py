"""Time of layer normalization as multiples of the time of a copy.

Three ways: written out operation by operation, LayerNorm, and nn.LayerNorm. The copy goes
into memory that is there; a clone, timed with them, asks for memory as they do. All on one
thread: a second one adds its waiting to the short operations, and little to the speed.

python benchmarks/layer_norm.py    writes results/layer_norm.json
"""

import argparse
import statistics

import torch
from paired import time_in_turn, write_record
from torch import nn

from attnlib import LayerNorm

SHAPES = ((512, 512), (4096, 768), (16384, 768))  # tokens, features


def written_out(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    """The equation, operation by operation, as chapter 7 first has it."""
    mu = x.mean(dim=-1, keepdim=True)
    variance = ((x - mu) ** 2).mean(dim=-1, keepdim=True)
    return (x - mu) / torch.sqrt(variance + norm.eps) * norm.gamma + norm.beta


def measure(tokens: int, features: int, rounds: int) -> dict[str, float]:
    """Median milliseconds, and median ratios to the copy, over alternating rounds."""
    torch.manual_seed(0)
    x, target = torch.randn(tokens, features), torch.empty(tokens, features)
    ours, theirs = LayerNorm(features), nn.LayerNorm(features)
    calls = {
        "copy": lambda: target.copy_(x),
        "clone": lambda: x.clone(),
        "written": lambda: written_out(x, ours),
        "ours": lambda: ours(x),
        "theirs": lambda: theirs(x),
    }
    times = time_in_turn(calls, rounds)
    row = {f"{name}_ms": round(statistics.median(ms), 4) for name, ms in times.items()}
    for name in ("clone", "written", "ours", "theirs"):
        pairs = zip(times[name], times["copy"], strict=True)
        row[f"{name}_to_copy"] = round(statistics.median(a / b for a, b in pairs), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for tokens, features in SHAPES:
            measured = measure(tokens, features, rounds)
            rows.append({"tokens": tokens, "features": features, **measured})
            print(rows[-1], flush=True)
    record = {"rounds": rounds, "rows": rows}
    write_record("layer_norm", record)


if __name__ == "__main__":
    main()
