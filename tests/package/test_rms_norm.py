"""RMS normalization: forward as in PyTorch, backward as by autograd and differences."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlib import RMSNorm, backprop
from attnlib.backprop import cast, gradient_check

F64 = torch.float64


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def norm_of(width, eps=1e-6):
    norm = RMSNorm(width, eps).double()
    with torch.no_grad():
        norm.gamma.copy_(rows(width, seed=1))
    return norm


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 1), (2, 2, 3, 7), (0, 4)])
@pytest.mark.parametrize("eps", [0.1, 1e-6])
def test_numbers_and_gradients_are_those_of_pytorch(shape, eps):
    norm, x = norm_of(shape[-1], eps), rows(*shape).requires_grad_()
    expected = F.rms_norm(x, shape[-1:], norm.gamma, eps)
    assert torch.allclose(norm(x), expected, rtol=0, atol=1e-12)
    weight = rows(*shape, seed=2)
    wanted = torch.autograd.grad(expected, (x, norm.gamma), weight)
    by_hand = backprop.RMSNormLayer(shape[-1], eps)
    by_hand.gamma = norm.gamma.detach().numpy()
    output = by_hand.forward(x.detach().numpy())
    assert np.allclose(output, expected.detach().numpy(), rtol=0, atol=1e-12)
    grad_input = by_hand.backward(weight.numpy())
    for found, grad in zip((grad_input, by_hand.gradients()["gamma"]), wanted, strict=True):
        assert found.shape == grad.shape
        assert np.allclose(found, grad.numpy(), rtol=0, atol=1e-10)


def test_differences_agree():
    layer = backprop.RMSNormLayer(4, eps=0.3)
    layer.gamma = rows(4).numpy()
    gradient_check(layer, rows(2, 3, 4, seed=3).numpy())


def test_a_second_derivative():
    assert torch.autograd.gradgradcheck(norm_of(3), rows(2, 3).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_do_not_overflow_in_half_precision(dtype):
    norm = RMSNorm(8).to(dtype)
    x = (1000 * rows(4, 8)).to(dtype)
    expected = F.rms_norm(x.double(), (8,), eps=1e-6)
    assert norm(x).dtype == dtype
    assert torch.allclose(norm(x).double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_numpy_keeps_the_dtype(dtype):
    layer = cast(backprop.RMSNormLayer(8), dtype)
    x = (1000 * rows(4, 8).numpy()).astype(dtype)
    output = layer.forward(x)
    grad = layer.backward(np.ones_like(output))
    assert output.dtype == grad.dtype == layer.gradients()["gamma"].dtype == dtype
    assert np.allclose((output.astype(float) ** 2).mean(-1), 1, atol=0.01)


def test_from_torch():
    theirs = nn.RMSNorm(5, eps=0.2, dtype=F64)
    nn.init.normal_(theirs.weight)
    x = rows(3, 5)
    assert torch.allclose(RMSNorm.from_torch(theirs)(x), theirs(x), rtol=0, atol=1e-12)
    bare = RMSNorm.from_torch(nn.RMSNorm(5, eps=0.2, elementwise_affine=False))
    assert torch.equal(bare.gamma, torch.ones(5))
    with pytest.raises(ValueError, match=r"one normalized dimension, got \(2, 3\)"):
        RMSNorm.from_torch(nn.RMSNorm((2, 3), eps=0.2))
    with pytest.raises(ValueError, match="module: expected an eps, got None"):
        RMSNorm.from_torch(nn.RMSNorm(5))


@pytest.mark.parametrize("kind", [RMSNorm, backprop.RMSNormLayer])
def test_arguments_that_do_not_fit(kind):
    with pytest.raises(ValueError, match="d_model: expected at least 1, got 0"):
        kind(0)
    with pytest.raises(ValueError, match=r"eps: expected a number of at least 0, got nan"):
        kind(3, float("nan"))


def test_inputs_that_do_not_fit(as_shipped):
    with pytest.raises(ValueError, match="input: expected at least 1 dimensions"):
        RMSNorm(3)(torch.ones(2, 4))
    with pytest.raises(TypeError, match=r"input: expected torch\.float32"):
        RMSNorm(3)(rows(2, 3))
    with pytest.raises(ValueError, match="input: expected at least 1 dimensions"):
        backprop.RMSNormLayer(3).forward(np.ones((2, 4)))
    layer = backprop.RMSNormLayer(3)
    with pytest.raises(RuntimeError, match="call forward before backward"):
        layer.backward(np.ones((2, 3)))
    layer.forward(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"d_output: expected shape \(2, 3\)"):
        layer.backward(np.ones((3, 2)))
