"""The networks, plain and gated: PyTorch's parts, dropout, and what they refuse."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlib import FeedForwardNetwork, GatedFeedForward, backprop
from drawn import close, each_refused, normal


@pytest.mark.parametrize("activation", [torch.relu, F.gelu, torch.tanh])
@pytest.mark.parametrize("bias", [True, False])
def test_equal_to_torch(activation, bias):
    first, second = (nn.Linear(*n, bias=bias).double() for n in ((6, 10), (10, 6)))
    network = FeedForwardNetwork.from_torch(first, second, activation)
    x = normal(2, 5, 6)
    close(network(x), second(activation(first(x))))
    assert len(list(network.parameters())) == (4 if bias else 2)


@pytest.mark.parametrize("bend", [F.silu, partial(F.gelu, approximate="tanh")])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 4, 3), (0, 3)])
def test_gated_by_the_formula(shape, bias, bend):
    options = {} if bend is F.silu else {"activation": bend}
    network, x = GatedFeedForward(3, 5, bias=bias, **options).double(), normal(*shape)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    parts = (network.gate_proj, network.up_proj, network.down_proj)
    gate, up, down = (lambda x, p=p: x @ p.W + (p.b if bias else 0) for p in parts)
    close(network(x), down(bend(gate(x)) * up(x)))


def test_dropout_acts_on_the_hidden_features_in_training_only():
    torch.manual_seed(0)
    network = FeedForwardNetwork(4, 1000, dropout=0.5)
    x = torch.randn(3, 4)
    with torch.no_grad():
        network.linear_2.W.fill_(1.0)
        network.linear_2.b.zero_()
        kept = F.relu(network.linear_1(x)).sum(dim=1)
        assert not torch.allclose(network(x)[:, 0], kept)
        close(network(x)[:, 0], kept, rtol=0.2, atol=0)  # on average
        network.eval()
        torch.testing.assert_close(network(x)[:, 0], kept)


@pytest.mark.parametrize("d_model", [3, 4, 5, 7, 768])  # 32 / 3 and 40 / 3 are rounded
def test_the_width_by_default(d_model):
    """Four times as wide; the gated network has as many weights."""
    gated, plain = GatedFeedForward(d_model), FeedForwardNetwork(d_model)
    assert plain.linear_1.W.shape == plain.linear_2.W.T.shape == (d_model, 4 * d_model)
    assert gated.gate_proj.out_features == round(8 * d_model / 3)
    by_hand = backprop.GatedFeedForwardLayer(d_model)
    assert {name: p.shape for name, p in by_hand.parameters().items()} == {
        name: p.shape for name, p in gated.named_parameters()
    }


VALUES = {
    "out_features: expected at least 1, got 0": lambda: FeedForwardNetwork(4, 0),
    "out_features: expected at least 1, got -1": lambda: GatedFeedForward(4, -1),
    "input: …, the last of 4 features, got shape (2, 5)": lambda: FeedForwardNetwork(4)(
        torch.ones(2, 5)
    ),
    "input: …, the last of 3 features, got shape (2, 5)": lambda: GatedFeedForward(3, 5)(
        torch.ones(2, 5)
    ),
    "linear_2: expected a weight of shape (4, 8), got (5, 8)": lambda: (
        FeedForwardNetwork.from_torch(nn.Linear(4, 8), nn.Linear(8, 5))
    ),
}
test_values = each_refused(ValueError, VALUES)
