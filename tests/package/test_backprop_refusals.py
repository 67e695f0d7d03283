"""Backward through the layers: what is refused, and in which words."""

import numpy as np
import pytest
import torch

from attnlib.backprop import (
    CrossEntropy,
    Embedding,
    FeedForwardNetwork,
    LayerNorm,
    Projection,
    ReLU,
)

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4))
IDS = np.array([[2, 0, 2], [2, 6, 0]])
LOGITS = RNG.standard_normal((2, 3, 7))


def ran(layer, *inputs):
    layer.forward(*inputs)
    return layer


REFUSED = {
    "no features": (
        lambda: Projection(0, 4),
        ValueError,
        "in_features: expected at least 1, got 0",
    ),
    "no output": (
        lambda: Projection(4, 0),
        ValueError,
        "out_features: expected at least 1, got 0",
    ),
    "a norm of nothing": (
        lambda: LayerNorm(0),
        ValueError,
        "d_model: expected at least 1, got 0",
    ),
    "a negative eps": (
        lambda: LayerNorm(4, eps=-1.0),
        ValueError,
        "eps: expected a number of at least 0, got -1.0",
    ),
    "no hidden features": (
        lambda: FeedForwardNetwork(4, 0),
        ValueError,
        "out_features: expected at least 1, got 0",
    ),
    "dropout": (
        lambda: FeedForwardNetwork(4, dropout=2.0),
        ValueError,
        "dropout: expected a probability between 0 and 1, got 2.0",
    ),
    "no words": (
        lambda: Embedding(0, 4),
        ValueError,
        "vocab_size: expected at least 1, got 0",
    ),
    "a wrong width": (
        lambda: Projection(4, 3).forward(np.ones((2, 5))),
        ValueError,
        "input: expected at least 1 dimensions, the last of 4 features, got shape (2, 5)",
    ),
    "a wrong width for the norm": (
        lambda: LayerNorm(4).forward(np.ones((2, 5))),
        ValueError,
        "input: expected at least 1 dimensions, the last of 4 features, got shape (2, 5)",
    ),
    "a number": (
        lambda: Projection(4, 3).forward(np.array(1.0)),
        ValueError,
        "input: expected at least 1 dimensions, the last of 4 features, got shape ()",
    ),
    "integers": (
        lambda: Projection(4, 3).forward(np.ones((2, 4), dtype=int)),
        TypeError,
        "input: expected a floating-point array, got int64",
    ),
    "integers for ReLU": (
        lambda: ReLU().forward(np.ones(3, dtype=int)),
        TypeError,
        "input: expected a floating-point array, got int64",
    ),
    "a list": (
        lambda: LayerNorm(2).forward([1.0, 2.0]),
        TypeError,
        "input: expected a floating-point array, got list",
    ),
    "a tensor": (
        lambda: LayerNorm(2).forward(torch.ones(2)),
        TypeError,
        "input: expected a floating-point array, got Tensor",
    ),
    "a mixed dtype": (
        lambda: LayerNorm(4).forward(np.ones((2, 4), dtype=np.float32)),
        TypeError,
        "input: expected float64 as the parameters, got float32",
    ),
    "backward first": (
        lambda: Projection(4, 3).backward(np.ones((2, 3))),
        RuntimeError,
        "Projection: call forward before backward",
    ),
    "loss backward first": (
        lambda: CrossEntropy().backward(),
        RuntimeError,
        "CrossEntropy: call forward before backward",
    ),
    "gradients first": (
        lambda: ran(Projection(4, 3), X).gradients(),
        RuntimeError,
        "Projection: no gradient of W, b: call backward first",
    ),
    "a gradient of the wrong shape": (
        lambda: ran(FeedForwardNetwork(4), X).backward(X[0]),
        ValueError,
        "d_output: expected shape (2, 3, 4) as the output, got (3, 4)",
    ),
    "an integer gradient": (
        lambda: ran(LayerNorm(4), X).backward(np.ones(X.shape, dtype=int)),
        TypeError,
        "d_output: expected a floating-point array, got int64",
    ),
    "floating ids": (
        lambda: Embedding(7, 4).forward(np.ones(3)),
        TypeError,
        "ids: expected an array of integers, got float64",
    ),
    "a list of ids": (
        lambda: Embedding(7, 4).forward([1, 2]),
        TypeError,
        "ids: expected an array of integers, got list",
    ),
    "boolean ids": (
        lambda: Embedding(7, 4).forward(np.ones(3, dtype=bool)),
        TypeError,
        "ids: expected an array of integers, got bool",
    ),
    "an unknown word": (
        lambda: Embedding(7, 4).forward(np.array([3, 7])),
        IndexError,
        "ids: expected integers from 0 to 6, got 3 to 7",
    ),
    "a word from the end": (
        lambda: Embedding(7, 4).forward(np.array([-1, 3])),
        IndexError,
        "ids: expected integers from 0 to 6, got -1 to 3",
    ),
    "an unknown target": (
        lambda: CrossEntropy().forward(LOGITS, IDS + 1),
        IndexError,
        "targets: expected integers from 0 to 6, got 1 to 7",
    ),
    "a missing target": (
        lambda: CrossEntropy().forward(LOGITS, IDS[:, :2]),
        ValueError,
        "targets: expected shape (2, 3) as the tokens of logits, got (2, 2)",
    ),
    "integer logits": (
        lambda: CrossEntropy().forward(np.ones((2, 3, 7), dtype=int), IDS),
        TypeError,
        "logits: expected a floating-point array, got int64",
    ),
    "no token": (
        lambda: CrossEntropy().forward(np.ones((0, 7)), np.ones(0, dtype=int)),
        ValueError,
        "logits: expected at least one token, got shape (0, 7)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message, as_shipped):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
