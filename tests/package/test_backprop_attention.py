"""Backward through attention: softmax, dropout, memory; test_backprop_layers judges it."""

from pathlib import Path

import numpy as np
import pytest
import torch

import attnlib
from attnlib.backprop import (
    Dropout,
    ScaledDotProductAttention,
    gradient_check,
    softmax,
    softmax_backward,
)
from drawn import draw

RNG = np.random.default_rng(0)
Q, K, V = (x.numpy() for x in draw(2))
D_OUTPUT = RNG.standard_normal((2, 4, 3))


@pytest.mark.parametrize("size", [5, 1e4])
def test_softmax_and_its_backward_are_those_of_torch(size):
    scores, d_weights = size * RNG.standard_normal((2, 3, 4, 6))
    before, given = scores.copy(), torch.tensor(scores, requires_grad=True)
    weights, expected = softmax(scores), torch.softmax(given, dim=-1)
    np.testing.assert_allclose(weights, expected.detach(), rtol=0, atol=1e-12)
    (expected,) = torch.autograd.grad(expected, given, torch.tensor(d_weights))
    found = softmax_backward(d_weights, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert (scores == before).all()  # not written to


# Dropout.


def test_dropout_acts_in_training_only():
    layer = ScaledDotProductAttention(0.5, rng=np.random.default_rng(1))
    plain = ScaledDotProductAttention()
    expected, weights = plain.forward(Q, K, V)
    output, same_weights = layer.forward(Q, K, V)
    assert not np.allclose(output, expected) and (weights == same_weights).all()
    assert not np.allclose(layer.backward(D_OUTPUT)[2], plain.backward(D_OUTPUT)[2])
    assert layer.eval() is layer and not layer.dropout.training
    np.testing.assert_array_equal(layer.forward(Q, K, V)[0], expected)
    for a, b in zip(layer.backward(D_OUTPUT), plain.backward(D_OUTPUT), strict=True):
        np.testing.assert_array_equal(a, b)
    assert layer.train().dropout.training


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_dropout_gradients(probability):
    layer = ScaledDotProductAttention(probability, rng=np.random.default_rng(2))
    gradient_check(layer, Q, K, V, mask=RNG.random((4, 6)) < 0.6)
    state = layer.dropout.rng.bit_generator.state
    gradient_check(layer, Q, K, V)
    assert layer.dropout.rng.bit_generator.state == state  # the layer stays as it was


def test_dropout_keeps_the_mean():
    x = np.ones(100_000)
    layer = Dropout(0.3, np.random.default_rng(3))
    y = layer.forward(x)
    assert set(np.unique(y)) == {0.0, 1 / 0.7} and abs(y.mean() - 1) < 0.01
    for _ in range(2):
        np.testing.assert_array_equal(layer.backward(x), y)
    again = Dropout(0.3, np.random.default_rng(3)).forward(x)
    np.testing.assert_array_equal(again, y)


def test_memory_held_is_counted_once():
    layer = ScaledDotProductAttention()
    assert layer.cache_bytes() == 0
    layer.forward(Q, K, V)
    layer.forward(Q, K, V)  # replaces what the first has kept
    weights = 2 * 4 * 6 * 8
    assert layer.cache_bytes() == Q.nbytes + K.nbytes + V.nbytes + weights
    layer.forward(Q, Q, Q)
    assert layer.cache_bytes() == Q.nbytes + 2 * 4 * 4 * 8
    whole = RNG.standard_normal((4, 9))  # three views keep one array alive
    layer.forward(whole[:, :3], whole[:, 3:6], whole[:, 6:])
    assert layer.cache_bytes() == whole.nbytes + 4 * 4 * 8
    dropping = ScaledDotProductAttention(0.3)
    dropping.forward(Q, K, V)
    assert dropping.cache_bytes() == Q.nbytes + K.nbytes + V.nbytes + 3 * weights


def test_no_torch_in_backprop():
    folder = Path(attnlib.__file__).parent / "backprop"
    for path in set(folder.glob("*.py")) - {folder / "autograd.py"}:  # the way to PyTorch
        text = path.read_text(encoding="utf-8")
        imports = [line for line in text.splitlines() if "import" in line.split()]
        assert not [line for line in imports if "torch" in line], path.name
        ours = [line for line in imports if "attnlib" in line]
        assert all(line.startswith("from attnlib.backprop") for line in ours), path.name
        assert not [line for line in ours if "autograd" in line], path.name
