"""Time of one attention forward pass against the number of tokens.

Four ways of attention; the layers of chapters 2 and 3 with the parts of a layer; and a
mask before and after softmax. All are paired: each round times them in turn, so that a
change of the machine's speed meets them all, and the median over the rounds is recorded.

    python benchmarks/attention_cost.py    writes results/attention_cost.json
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record
from torch.nn import functional as F

from attnlib import (
    CausalAttention,
    ScaledDotProductAttention,
    SelfAttention,
    causal_mask,
)

HEADS, FEATURES = 8, 64
WIDTH = 768  # d_in = d_out of the layers
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


def layers(tokens: int) -> dict[str, Callable[[], object]]:
    """The two layers, the two parts of the first, and a mask before or after softmax."""
    torch.manual_seed(0)
    plain, causal = SelfAttention(WIDTH, WIDTH), CausalAttention(WIDTH, WIDTH)
    x, scores = torch.randn(tokens, WIDTH), torch.randn(tokens, tokens)
    maps = plain.W_query, plain.W_key, plain.W_value
    q, k, v = (linear(x) for linear in maps)
    allowed = causal_mask(tokens)
    forbidden = ~allowed

    def mask_after() -> torch.Tensor:
        weights = torch.softmax(scores, dim=-1) * allowed
        return weights / weights.sum(dim=-1, keepdim=True)

    return {
        "projections_ms": lambda: [linear(x) for linear in maps],
        "attention_ms": lambda: plain.attention(q, k, v),
        "self_ms": lambda: plain(x, return_weights=True),
        "causal_ms": lambda: causal(x, return_weights=True),
        "mask_before_ms": lambda: torch.softmax(
            scores.masked_fill(forbidden, -torch.inf), dim=-1
        ),
        "mask_after_ms": mask_after,
    }


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each contestant over alternating rounds."""
    times = time_in_turn(calls, rounds)
    return {name: round(statistics.median(ms), 4) for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rows, layer_rows = [], []
    with torch.inference_mode():
        for tokens in TOKENS:
            for made, calls in ((rows, contestants), (layer_rows, layers)):
                made.append({"tokens": tokens, **measure(calls(tokens), rounds)})
                print(made[-1], flush=True)
    record = {
        "what": f"forward, batch 1, {HEADS} heads of {FEATURES}, float32",
        "rounds": rounds,
        "rows": rows,
        "layers_what": f"forward, batch 1, d_in = d_out = {WIDTH}, float32",
        "layers": layer_rows,
    }
    write_record("attention_cost", record)


if __name__ == "__main__":
    main()
