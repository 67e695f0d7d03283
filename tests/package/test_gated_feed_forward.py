"""The gated network: forward as in PyTorch, backward as by autograd and differences."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attnlib import FeedForwardNetwork, GatedFeedForward, backprop
from attnlib.backprop import complex_step, gradient_check

F64 = torch.float64
PARTS = ("gate_proj", "up_proj", "down_proj")


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (0, 3)])
def test_numbers_and_gradients_are_those_of_autograd(shape, bias):
    torch.manual_seed(0)
    network = GatedFeedForward(3, 5, bias=bias).double()
    x, weight = rows(*shape).requires_grad_(), rows(*shape, seed=1)
    gate, up, down = ((p.W, p.b if bias else 0) for p in map(network.get_submodule, PARTS))
    z = x @ gate[0] + gate[1]
    expected = (z * torch.sigmoid(z) * (x @ up[0] + up[1])) @ down[0] + down[1]
    assert torch.allclose(network(x), expected, rtol=0, atol=1e-12)
    by_hand = backprop.GatedFeedForwardLayer(3, 5, bias=bias)
    for part in PARTS:
        mine, theirs = getattr(by_hand, part), network.get_submodule(part)
        for name, parameter in theirs.named_parameters():
            setattr(mine, name, parameter.detach().numpy())
    assert np.allclose(
        by_hand.forward(x.detach().numpy()), expected.detach().numpy(), rtol=0, atol=1e-12
    )
    found = {"input": by_hand.backward(weight.numpy())} | by_hand.gradients()
    named = {"input": x} | dict(network.named_parameters())
    assert found.keys() == named.keys()
    wanted = torch.autograd.grad(expected, tuple(named.values()), weight)
    for (name, grad), other in zip(named.items(), wanted, strict=True):
        assert found[name].shape == grad.shape
        assert np.allclose(found[name], other.numpy(), rtol=0, atol=1e-12), name


def test_differences_agree():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4))
    gradient_check(backprop.SiLU(), x)
    gradient_check(backprop.GatedFeedForwardLayer(4, 6, bias=True, rng=rng), x)
    gradient_check(backprop.GatedFeedForwardLayer(4, 6, backprop.ReLU(), rng=rng), x)


def test_silu_at_the_ends(as_shipped):
    z = np.array([-1e4, -50.0, -1.0, 0.0, 1.0, 50.0, 1e4])
    layer = backprop.SiLU()
    with np.errstate(all="raise", under="ignore"):
        output, slope = layer.forward(z), layer.backward(np.ones(7))
    tensor = torch.tensor(z, requires_grad=True)
    expected = F.silu(tensor)
    (wanted,) = torch.autograd.grad(expected.sum(), tensor)
    assert np.allclose(output, expected.detach().numpy(), rtol=0, atol=1e-12)
    assert np.allclose(slope, wanted.numpy(), rtol=0, atol=1e-12)
    near = z[1:-1]
    assert np.allclose(complex_step(backprop.SiLU().forward, near), slope[1:-1], atol=1e-12)


def test_another_bend():
    torch.manual_seed(0)
    network = GatedFeedForward(4, 6, activation=partial(F.gelu, approximate="tanh"))
    x = torch.randn(3, 4)
    hidden = F.gelu(x @ network.gate_proj.W, approximate="tanh") * (x @ network.up_proj.W)
    assert torch.allclose(network(x), hidden @ network.down_proj.W, rtol=0, atol=1e-6)


@pytest.mark.parametrize("d_model", [3, 48, 768])
def test_the_width_by_default_has_as_many_parameters(d_model):
    def count(network):
        return sum(p.numel() for p in network.parameters() if p.dim() == 2)

    gated, plain = GatedFeedForward(d_model), FeedForwardNetwork(d_model)
    assert gated.gate_proj.out_features == round(8 * d_model / 3)
    assert count(gated) == count(plain)
    by_hand = backprop.GatedFeedForwardLayer(d_model)
    assert {n: p.shape for n, p in by_hand.parameters().items()} == {
        n: tuple(p.shape) for n, p in gated.named_parameters()
    }


def test_what_does_not_fit(as_shipped):
    with pytest.raises(ValueError, match="out_features: expected at least 1, got 0"):
        GatedFeedForward(3, 0)
    with pytest.raises(ValueError, match="input: expected at least 1 dimensions"):
        GatedFeedForward(3, 5)(torch.ones(2, 4))
    with pytest.raises(TypeError, match="input: expected a floating-point array"):
        backprop.SiLU().forward(np.arange(3))
