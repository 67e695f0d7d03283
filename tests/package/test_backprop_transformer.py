"""A language model trained without autograd: optimizers, dropout, the same steps."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import attnlib
from attnlib.backprop import (
    SGD,
    Adam,
    CrossEntropy,
    FeedForwardNetwork,
    LanguageModel,
    Projection,
    cast,
    gradient_check,
)
from drawn import normal, torch_copy

SETTINGS = [
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (SGD, torch.optim.SGD, {"lr": 0.0, "momentum": 0.5}),
    (Adam, torch.optim.Adam, {}),
    (Adam, torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-2}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.0)}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), SETTINGS)
def test_the_same_steps_as_torch(ours, theirs, options):
    layer = FeedForwardNetwork(4, 6, rng=np.random.default_rng(3))
    module = torch_copy(layer, attnlib.FeedForwardNetwork(4, 6).double())
    rates = {"lr": 1e-3, **options}
    optimizer = ours(layer, **options)
    torch_optimizer = theirs(module.parameters(), **rates)
    for step in range(30):
        x, target = normal(2, 5, 4, seed=step)
        layer.backward(2 * (layer.forward(x.numpy()) - target.numpy()))
        torch_optimizer.zero_grad()
        ((module(x) - target) ** 2).sum().backward()
        optimizer.lr = torch_optimizer.param_groups[0]["lr"] = rates["lr"] / (1 + step)
        optimizer.step()
        torch_optimizer.step()
    for name, array in layer.parameters().items():
        expected = module.get_parameter(name).detach()
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("make_optimizer", [lambda x: SGD(x, 0.1, 0.9), Adam])
def test_parameters_change_in_place_and_keep_their_dtype(make_optimizer):
    layer = cast(Projection(3, 2, rng=np.random.default_rng(0)), np.float32)
    weight, start = layer.W, layer.W.copy()
    optimizer = make_optimizer(layer)
    for _ in range(2):
        layer.backward(np.ones_like(layer.forward(np.ones((4, 3), np.float32))))
        gradient = layer.gradients()["W"].copy()
        optimizer.step()
    assert layer.W is weight and weight.dtype == np.float32
    assert not np.array_equal(weight, start)
    np.testing.assert_array_equal(layer.gradients()["W"], gradient)


SIZES = {"vocab_size": 7, "context_length": 5, "embed_dim": 8, "num_heads": 2}
MODEL = LanguageModel(**SIZES, num_layers=2, rng=np.random.default_rng(4))


def test_twenty_steps_as_with_autograd():
    model = copy.deepcopy(MODEL)
    twin = torch_copy(MODEL, attnlib.LanguageModel(**SIZES, num_layers=2).double())
    optimizer, theirs = (
        Adam(model, 3e-3),
        torch.optim.Adam(twin.parameters(), 3e-3),
    )
    cross_entropy, losses = CrossEntropy(), []
    for batch in np.random.default_rng(0).integers(0, 7, (20, 4, 6)):
        loss = cross_entropy.forward(model.forward(batch[:, :-1]), batch[:, 1:])
        model.backward(cross_entropy.backward())
        optimizer.step()
        batch = torch.tensor(batch)
        logits = twin(batch[:, :-1])
        expected = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        assert abs(loss - expected.item()) < 1e-11
        losses.append(loss)
    assert len(set(losses)) == 20


def test_dropout_follows_train_and_eval_and_has_its_gradients():
    sizes = {**SIZES, "embed_dim": 4, "num_layers": 1, "d_ff": 3}
    model = LanguageModel(**sizes, dropout=0.3, rng=np.random.default_rng(0))
    network = model.blocks[0].feed_forward
    network.linear_1.b += 3 * np.sign(network.linear_1.b)  # far from kinks
    ids = np.array([[0, 3, 3], [4, 1, 0]])
    assert len(gradient_check(model, ids, step=1e-4)) == 20
    assert not np.array_equal(model.forward(ids), model.forward(ids))
    model.eval()
    np.testing.assert_array_equal(model.forward(ids), model.forward(ids))


def test_first_numbers():
    model = LanguageModel(100, 50, 64, 4, 1, rng=np.random.default_rng(6))
    for table in (model.token_embedding.weight, model.positions):
        assert abs(table.std() * 8 - 1) < 0.05  # rows of length 1
    one, two = (block.attention.q_proj.W for block in MODEL.blocks)
    assert not np.array_equal(one, two)
