"""The feed-forward network: PyTorch's parts, dropout, and what it refuses."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlib import FeedForwardNetwork


@pytest.mark.parametrize("activation", [torch.relu, F.gelu, torch.tanh])
@pytest.mark.parametrize("bias", [True, False])
def test_equal_to_torch(activation, bias):
    first, second = (
        nn.Linear(6, 10, bias=bias).double(),
        nn.Linear(10, 6, bias=bias).double(),
    )
    network = FeedForwardNetwork.from_torch(first, second, activation)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(network(x), second(activation(first(x))), rtol=0, atol=1e-12)
    assert len(list(network.parameters())) == (4 if bias else 2)


def test_dropout_acts_on_the_hidden_features_in_training_only():
    torch.manual_seed(0)
    network = FeedForwardNetwork(4, 1000, dropout=0.5)
    x = torch.randn(3, 4)
    with torch.no_grad():
        network.linear_2.W.fill_(1.0)
        network.linear_2.b.zero_()
        kept = F.relu(network.linear_1(x)).sum(dim=1)
        assert not torch.allclose(network(x)[:, 0], kept)
        torch.testing.assert_close(network(x)[:, 0], kept, rtol=0.2, atol=0)  # on average
        network.eval()
        torch.testing.assert_close(network(x)[:, 0], kept)


def test_default_width_and_pickling():
    network = FeedForwardNetwork(6)
    assert network.linear_1.W.shape == (6, 24) and network.linear_2.W.shape == (
        24,
        6,
    )
    x = torch.randn(2, 6)
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))


REFUSED = {
    "no hidden features": (
        lambda: FeedForwardNetwork(4, 0),
        "out_features: expected at least 1, got 0",
    ),
    "dropout": (
        lambda: FeedForwardNetwork(4, dropout=2.0),
        "dropout: expected a probability between 0 and 1, got 2.0",
    ),
    "a wrong width": (
        lambda: FeedForwardNetwork(4)(torch.randn(2, 5)),
        "input: expected at least 1 dimensions, the last of 4 features, got shape (2, 5)",
    ),
    "two layers that do not fit": (
        lambda: FeedForwardNetwork.from_torch(nn.Linear(4, 8), nn.Linear(8, 5)),
        "linear_2: expected a weight of shape (4, 8), got (5, 8)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message, as_shipped):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message
