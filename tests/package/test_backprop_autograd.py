"""The formulas of the backward passes as functions of PyTorch."""

import inspect

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import attnlib
from attnlib.backprop import Projection
from attnlib.backprop import autograd as functions

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.standard_normal(shape)


EMPTY_ROW = np.array([[True, True, False], [False, False, False], [True, False, True]])


def leaf(*shape):
    return torch.tensor(draw(*shape), requires_grad=True)


ADDED = np.where(RNG.random((2, 3, 3)) < 0.7, draw(2, 3, 3), -np.inf)


def attend(mask=None):
    mask = None if mask is None else torch.tensor(mask)
    return lambda *qkv: functions.AttentionFunction.apply(*qkv, mask)


IDS = torch.tensor([[1, 0, 1], [4, 4, 1]])
CHAIN = [leaf(3, 4), leaf(4, 6), leaf(6), leaf(6, 4), leaf(4)]
with torch.no_grad():
    CHAIN[2] += 3 * CHAIN[2].sign()  # far from the kinks
QKV, X = (leaf(2, 3, 4), leaf(2, 5, 4), leaf(2, 5, 2)), leaf(2, 3, 4)
project = functions.ProjectionFunction.apply


def feed_forward(x, W_1, b_1, W_2, b_2):
    return project(functions.ReLUFunction.apply(project(x, W_1, b_1)), W_2, b_2)


FUNCTIONS = {
    "attention": (attend(), *QKV),
    "attention, no batch": (attend(), leaf(1, 4), leaf(2, 4), leaf(2, 3)),
    "boolean": (attend(EMPTY_ROW), X, X, X),
    "added": (attend(ADDED), X, X, X),
    **{
        f"a learned mask {shape}": (functions.AttentionFunction.apply, *QKV, leaf(*shape))
        for shape in ((2, 3, 5), (3, 5), (2, 1, 5), (3, 1), (5,), ())
    },
    "projection": (project, X, leaf(4, 5), leaf(5)),
    "one token": (project, leaf(4), leaf(4, 5), leaf(5)),
    "layer norm": (functions.LayerNormFunction.apply, X, leaf(4), leaf(4)),
    "norm of one token": (functions.LayerNormFunction.apply, leaf(4), leaf(4), leaf(4)),
    "embedding": (lambda E: functions.EmbeddingFunction.apply(E, IDS), leaf(5, 2)),
    "cross-entropy": (
        *(lambda z: functions.CrossEntropyFunction.apply(z, IDS), leaf(2, 3, 5)),
    ),
    "feed-forward": (feed_forward, *CHAIN),
}


@pytest.mark.parametrize("case", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_pass_gradcheck_and_gradgradcheck(case):
    function, *inputs = case
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_functions_are_equal_to_the_modules():
    x, g, b, W, ids = leaf(2, 3, 4), leaf(4), leaf(4), leaf(4, 4), IDS % 4
    mask, logits = torch.tensor(EMPTY_ROW), x.flatten(0, 1)
    attention = attnlib.ScaledDotProductAttention()
    pairs = [
        (functions.LayerNormFunction.apply(x, g, b, 0.1), F.layer_norm(x, (4,), g, b, 0.1)),
        (project(x, W, b), x @ W + b),
        (functions.ReLUFunction.apply(x), x.relu()),
        (functions.ReLUFunction.apply(x - x.detach()), (x - x.detach()).relu()),  # kinks
        (functions.EmbeddingFunction.apply(W, ids), F.embedding(ids, W)),
        (
            functions.CrossEntropyFunction.apply(x, ids),
            F.cross_entropy(logits, ids.flatten()),
        ),
        *zip(attend(EMPTY_ROW)(x, x, x), attention(x, x, x, mask), strict=True),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        weights = torch.tensor(draw(*ours.shape))
        gradients = [
            torch.autograd.grad(y, [x, g, b, W], weights, True, materialize_grads=True)
            for y in (ours, theirs)
        ]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)
    names = list(inspect.signature(functions.ProjectionFunction.forward).parameters)
    assert names == ["ctx", "input", *Projection(2, 2).parameters()]


@pytest.mark.parametrize("shape", [(2, 3, 3), (3, 3), (2, 1, 3), (1, 3)])
def test_a_learned_mask_gets_the_gradient_of_the_scaled_scores(shape):
    """That of autograd, also where a pair is forbidden and where a row is empty."""
    x, mask = leaf(2, 3, 4), leaf(*shape)
    with torch.no_grad():
        mask[..., -1, 0] = -torch.inf
        if len(shape) == 3:
            mask[0] = -torch.inf
    weights = torch.tensor(draw(2, 3, 4))
    ours, _ = functions.AttentionFunction.apply(x, x, x, mask)
    theirs, _ = attnlib.ScaledDotProductAttention()(x, x, x, mask)
    found = torch.autograd.grad(ours, [x, mask], weights)
    expected = torch.autograd.grad(theirs, [x, mask], weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found[1].shape == shape and (found[1][mask == -torch.inf] == 0).all()


def test_a_mask_that_asks_for_no_gradient_gets_none():
    for mask in (EMPTY_ROW, ADDED, None):
        output, _ = attend(mask)(X, X, X)
        d_mask = output.grad_fn.apply(torch.ones_like(output), torch.zeros(2, 3, 3))[3]
        assert d_mask is None


def test_attention_function_refuses_bad_input(as_shipped):
    with pytest.raises(ValueError, match="key: expected d_k = 4 features"):
        functions.AttentionFunction.apply(leaf(3, 4), leaf(3, 5), leaf(3, 4))
