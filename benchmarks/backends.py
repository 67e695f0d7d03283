"""Time of the back ends of FlashAttention on a CPU, over PyTorch's own function.

For every number of tokens the three are called in turn; recorded are the medians of the
ratios round by round, above 1 where the back end is slower. `FASTEST` in chapter 14 follows
this record. The calls hold what surrounds the arithmetic: checks of the input, conversions.
"bare" is a module that does nothing but call PyTorch's function.

    python benchmarks/backends.py    writes results/backends.json
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib import FlashAttention, ScaledDotProductAttention

HEADS, FEATURES = 8, 64
SHAPES = ((1, 1), (16, 16), (64, 64), (256, 256), (1024, 1024), (2048, 2048), (1, 4096))


class Bare(nn.Module):
    """What any module costs: PyTorch's function, called by one."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


def contestants(queries: int, keys: int, causal: bool) -> dict[str, Callable[[], object]]:
    """Calls on the same inputs, without gradients."""
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, queries, FEATURES)
    key, value = torch.randn(2, 1, HEADS, keys, FEATURES)
    auto = FlashAttention(causal)
    tiles = FlashAttention(causal, backend="torch")
    plain = ScaledDotProductAttention(causal=causal)
    square = causal and queries > 1  # PyTorch aligns top left: a lone query sees all here
    bare = Bare(square)
    return {
        "auto": lambda: auto(query, key, value),
        "tiles": lambda: tiles(query, key, value),
        "plain": lambda: plain(query, key, value),
        "bare": lambda: bare(query, key, value),
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=square),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    rows = []
    for queries, keys in SHAPES:
        for causal in (False, True):
            few = rounds if queries * keys < 10**6 else max(rounds // 8, 5)
            with torch.no_grad():
                times = time_in_turn(contestants(queries, keys, causal), few)
            row: dict[str, object] = {"queries": queries, "keys": keys, "causal": causal}
            row["sdpa_ms"] = round(statistics.median(times["sdpa"]), 4)
            for name in ("auto", "bare", "tiles", "plain"):
                pairs = zip(times[name], times["sdpa"], strict=True)
                row[name] = round(statistics.median(a / b for a, b in pairs), 3)
            rows.append(row)
            print(row, flush=True)
    shape = {"heads": HEADS, "features": FEATURES}
    write_record("backends", {**shape, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
