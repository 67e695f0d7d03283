"""Multi-head attention forward and backward: by hand in NumPy, and by PyTorch's autograd.

python benchmarks/multi_head_backward.py   writes results/multi_head_backward.json
"""

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from paired import time_in_turn, write_record
from torch import nn

import attnlib
from attnlib.backprop import MultiHeadAttention, cast, softmax, softmax_backward
from attnlib.backprop.multi_head import split_heads

BATCH, TOKENS, EMBED_DIM, HEADS = 8, 256, 256, 8


def whole_layers(
    ours: MultiHeadAttention, x: np.ndarray, d_output: np.ndarray
) -> dict[str, Callable[[], object]]:
    """Self-attention forward and backward, with the same weights, in three libraries."""
    theirs = attnlib.MultiHeadAttention(EMBED_DIM, HEADS)
    for name, array in ours.parameters().items():
        theirs.get_parameter(name).data = torch.tensor(array)
    module = nn.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True)
    x_torch = torch.tensor(x, requires_grad=True)
    d_torch = torch.tensor(d_output)

    def by_hand() -> None:
        ours.forward(x)
        ours.backward(d_output)

    def by_autograd(layer: Callable[[], torch.Tensor]) -> None:
        layer().backward(d_torch)

    return {
        "numpy": by_hand,
        "attnlib": lambda: by_autograd(lambda: theirs(x_torch)[0]),
        "nn": lambda: by_autograd(lambda: module(x_torch, x_torch, x_torch)[0]),
        "nn_no_weights": lambda: by_autograd(
            lambda: module(x_torch, x_torch, x_torch, need_weights=False)[0]
        ),
    }


def parts_of_ours(
    ours: MultiHeadAttention, x: np.ndarray, d_output: np.ndarray
) -> dict[str, Callable[[], object]]:
    """The pieces of the layer in NumPy, forward and backward, each on its real arrays."""
    ours.forward(x)
    ours.backward(d_output)
    d_heads = split_heads(d_output, HEADS)
    kept = ours.attention.recall(d_heads)
    q, k, v, weights = (kept[name] for name in ("query", "key", "value", "weights"))
    scores = q @ k.swapaxes(-1, -2)
    layers = (ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj)

    def products() -> None:
        q @ k.swapaxes(-1, -2)
        weights @ v
        weights.swapaxes(-1, -2) @ d_heads
        d_heads @ v.swapaxes(-1, -2)
        scores @ k
        scores.swapaxes(-1, -2) @ q

    return {
        "projections": lambda: [layer.forward(x) for layer in layers],
        "projections backward": lambda: [layer.backward(d_output) for layer in layers],
        "products of attention": products,
        "softmax": lambda: softmax(scores),
        "softmax backward": lambda: softmax_backward(scores, weights),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    x, d_output = rng.standard_normal((2, BATCH, TOKENS, EMBED_DIM), dtype=np.float32)
    ours = cast(MultiHeadAttention(EMBED_DIM, HEADS, rng=rng), np.float32)

    times = time_in_turn(whole_layers(ours, x, d_output), rounds)
    record = {
        "rounds": rounds,
        "numpy": np.__version__,
        "shape": [BATCH, TOKENS, EMBED_DIM],
        "heads": HEADS,
        "ms": {name: round(statistics.median(ms), 2) for name, ms in times.items()},
    }
    record["ratio"] = {
        name: round(
            statistics.median(a / b for a, b in zip(times["numpy"], ms, strict=True)), 2
        )
        for name, ms in times.items()
        if name != "numpy"
    }
    parts = time_in_turn(parts_of_ours(ours, x, d_output), rounds)
    record["parts_ms"] = {
        name: round(statistics.median(ms), 2) for name, ms in parts.items()
    }
    print(record)
    write_record("multi_head_backward", record)


if __name__ == "__main__":
    main()
