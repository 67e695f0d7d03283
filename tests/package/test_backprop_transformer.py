"""A language model trained without autograd: optimizers, gradients, learning."""

import copy
import pickle

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
    relative_error,
)

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.standard_normal(shape)


def torch_copy(ours, theirs):
    """The PyTorch namesake with our numbers, in float64."""
    for name, array in ours.parameters().items():
        theirs.get_parameter(name).data = torch.tensor(array)
    return theirs


# Optimizers.

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
        x, target = draw(5, 4), draw(5, 4)
        layer.backward(2 * (layer.forward(x) - target))
        torch_optimizer.zero_grad()
        ((module(torch.tensor(x)) - torch.tensor(target)) ** 2).sum().backward()
        optimizer.lr = torch_optimizer.param_groups[0]["lr"] = rates["lr"] / (1 + step)
        optimizer.step()
        torch_optimizer.step()
    for name, array in layer.parameters().items():
        expected = module.get_parameter(name).detach()
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("make_optimizer", [lambda x: SGD(x, 0.1, 0.9), Adam])
def test_parameters_change_in_place_and_keep_their_dtype(make_optimizer):
    layer = cast(Projection(3, 2, rng=RNG), np.float32)
    weight, start = layer.W, layer.W.copy()
    optimizer = make_optimizer(layer)
    for _ in range(2):
        layer.backward(np.ones_like(layer.forward(np.ones((4, 3), np.float32))))
        gradient = layer.gradients()["W"].copy()
        optimizer.step()
    assert layer.W is weight and weight.dtype == np.float32
    assert not np.array_equal(weight, start)
    np.testing.assert_array_equal(layer.gradients()["W"], gradient)


# The language model.

SIZES = {"vocab_size": 7, "context_length": 5, "embed_dim": 8, "num_heads": 2}
MODEL = LanguageModel(**SIZES, num_layers=2, rng=np.random.default_rng(4))


def torch_model(model):
    twin = attnlib.LanguageModel(**SIZES, num_layers=len(model.blocks)).double()
    assert {name for name, _ in twin.named_parameters()} == set(model.parameters())
    return torch_copy(model, twin)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 2, 1), (1, 5)])
def test_model_equal_to_autograd(shape):
    ids = RNG.integers(0, 4, shape)  # of 7 words: some twice, some never
    model, twin = copy.deepcopy(MODEL), torch_model(MODEL)
    logits, expected = model.forward(ids), twin(torch.tensor(ids))
    np.testing.assert_allclose(logits, expected.detach(), rtol=0, atol=1e-12)
    d_logits = draw(*logits.shape)
    for _ in range(2):  # backward twice gives the same
        model.backward(d_logits)
    names = list(model.parameters())
    parameters = [twin.get_parameter(name) for name in names]
    judged = torch.autograd.grad(expected, parameters, torch.tensor(d_logits))
    for name, theirs in zip(names, judged, strict=True):
        assert relative_error(model.gradients()[name], theirs.numpy()) < 1e-11, name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_model_equal_to_finite_differences(dropout):
    sizes = {**SIZES, "embed_dim": 4, "num_layers": 1, "d_ff": 3}
    model = LanguageModel(**sizes, dropout=dropout, rng=np.random.default_rng(0))
    for network in [block.feed_forward for block in model.blocks]:
        network.linear_1.b += 3 * np.sign(network.linear_1.b)  # far from kinks
    ids = np.array([[0, 3, 3], [4, 1, 0]])
    assert len(gradient_check(model, ids, step=1e-4)) == 20


def test_forgetting_a_use_of_the_table_or_of_the_positions_is_found():
    class Untied(LanguageModel):
        def backward(self, d_output):
            super().backward(d_output)
            x = self.recall(d_output)["x"]
            one_use = np.einsum("bnv,bnd->vd", d_output, x)
            self.token_embedding._gradients["weight"] = one_use

    class FirstSequenceOnly(LanguageModel):
        def backward(self, d_output):
            super().backward(d_output)
            self._gradients["positions"] *= 0.5

    sizes = {**SIZES, "embed_dim": 4, "num_layers": 1, "d_ff": 2}
    for mistake, name in ((Untied, "token_embedding"), (FirstSequenceOnly, "positions")):
        model = mistake(**sizes, rng=np.random.default_rng(0))
        model.blocks[0].feed_forward.linear_1.b += 5
        with pytest.raises(AssertionError, match=f"{name}.*: the gradient is wrong"):
            gradient_check(model, np.array([[0, 3, 3]]))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda m: SGD(m, 0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (lambda m: Adam(m, 3e-3), lambda p: torch.optim.Adam(p, 3e-3)),
    ],
)
def test_twenty_steps_as_with_autograd(ours, theirs):
    model, twin = copy.deepcopy(MODEL), torch_model(MODEL)
    optimizer, torch_optimizer = ours(model), theirs(twin.parameters())
    cross_entropy, text = CrossEntropy(), RNG.integers(0, 7, (20, 4, 6))
    losses = []
    for batch in text:
        loss = cross_entropy.forward(model.forward(batch[:, :-1]), batch[:, 1:])
        model.backward(cross_entropy.backward())
        optimizer.step()
        batch = torch.tensor(batch)
        logits = twin(batch[:, :-1])
        expected = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        torch_optimizer.zero_grad()
        expected.backward()
        torch_optimizer.step()
        assert abs(loss - expected.item()) < 1e-11  # the issue asks for 1e-9
        losses.append(loss)
    assert len(set(losses)) == 20


def test_model_is_causal_and_learns_a_batch_by_heart():
    model = LanguageModel(**SIZES, num_layers=1, rng=np.random.default_rng(5))
    ids = np.random.default_rng(6).integers(0, 7, (2, 6))
    logits = model.forward(ids[:, :-1])
    for length in (1, 3):
        np.testing.assert_allclose(
            model.forward(ids[:, :length]), logits[:, :length], rtol=0, atol=1e-12
        )
    optimizer, cross_entropy = Adam(model, 0.02), CrossEntropy()
    for _ in range(150):
        loss = cross_entropy.forward(model.forward(ids[:, :-1]), ids[:, 1:])
        model.backward(cross_entropy.backward())
        optimizer.step()
    assert loss < 0.05


def test_dropout_follows_train_and_eval_and_the_model_can_be_stored():
    model = LanguageModel(**SIZES, num_layers=2, dropout=0.5, rng=RNG)
    ids = np.arange(5)
    assert not np.array_equal(model.forward(ids), model.forward(ids))
    model.eval()
    np.testing.assert_array_equal(model.forward(ids), model.forward(ids))
    stored = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(stored.forward(ids), model.forward(ids))


def test_first_numbers():
    model = LanguageModel(100, 50, 64, 4, 1, rng=np.random.default_rng(6))
    for table in (model.token_embedding.weight, model.positions):
        assert abs(table.std() * 8 - 1) < 0.05  # rows of length 1
    same = LanguageModel(100, 50, 64, 4, 1, rng=np.random.default_rng(6))
    for a, b in zip(model.parameters().values(), same.parameters().values(), strict=True):
        np.testing.assert_array_equal(a, b)
    blocks = LanguageModel(**SIZES, num_layers=2, rng=RNG).blocks
    assert not np.array_equal(blocks[0].attention.q_proj.W, blocks[1].attention.q_proj.W)
