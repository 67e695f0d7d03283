"""Time of the turns beside that of the four projections, against the number of tokens.

A layer with 12 heads of 64 features, float32; queries and keys are turned as the layer does
it, by the sines and cosines that `RotaryPositions` keeps. Both are timed in turn; the
median of the ratios is recorded.

    python benchmarks/rotary.py    writes results/rotary.json
"""

import argparse
import statistics

import torch
from paired import time_in_turn, write_record
from torch import Tensor

from attnlib import MultiHeadAttention, RotaryPositions
from attnlib.multi_head import split_heads

HEADS, WIDTH, TOKENS = 12, 768, (16, 128, 1024)


def row(tokens: int, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    rotary, layer = RotaryPositions(WIDTH // HEADS), MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(1, tokens, WIDTH)
    parts = layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj
    query, key = (split_heads(part(x), HEADS) for part in parts[:2])

    def project() -> list[Tensor]:
        return [part(x) for part in parts]

    def turn() -> tuple[Tensor, Tensor]:
        return rotary(query), rotary(key)

    calls = {"projections_ms": project, "turns_ms": turn}
    times = time_in_turn(calls, rounds)
    pairs = zip(times["turns_ms"], times["projections_ms"], strict=True)
    found = {name: round(statistics.median(ms), 3) for name, ms in times.items()}
    share = statistics.median(turns / projections for turns, projections in pairs)
    return {"tokens": tokens, **found, "share": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    with torch.no_grad():
        rows = [row(tokens, rounds) for tokens in TOKENS]
    for found in rows:
        print(found)
    write_record("rotary", {"heads": HEADS, "width": WIDTH, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
