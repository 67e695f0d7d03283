"""Backward through the layers: three judges, planted mistakes, torch's namesakes."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import attnlib
from attnlib.backprop import (
    CrossEntropy,
    Embedding,
    FeedForwardNetwork,
    Layer,
    LayerNorm,
    Projection,
    ReLU,
    cast,
    complex_step,
    gradient_check,
    relative_error,
)

RNG = np.random.default_rng(0)


class Residual(Layer):
    """x + F(x)."""

    def __init__(self, layer):
        self.layer = layer

    def forward(self, input):
        output = input + self.layer.forward(input)
        self.remember(output)
        return output

    def backward(self, d_output):
        return d_output + self.layer.backward(d_output)


def away_from_kinks(network, x):
    """Inputs whose hidden numbers are all further from 0 than differences reach."""
    while x.size and np.abs(network.linear_1.forward(x)).min() < 0.02:
        x = RNG.standard_normal(x.shape)
    return x


def torch_ffn(x, W_1, b_1, W_2, b_2):
    return torch.relu(x @ W_1 + b_1) @ W_2 + b_2


NORM, NETWORK = LayerNorm(4, eps=1e-3), FeedForwardNetwork(4, 5, rng=RNG)
NORM.gamma, NORM.beta = RNG.standard_normal((2, 4))
LEADING = {
    "one token": (),
    "tokens": (3,),
    "batch": (2, 3),
    "batch and heads": (2, 2, 2),
    "one of one": (1, 1),
    "no tokens": (2, 0),
}
CASES = {}
for _shape, _leading in LEADING.items():
    _x = RNG.standard_normal((*_leading, 4))
    _far = away_from_kinks(NETWORK, _x)
    _ids = RNG.integers(0, 3, _leading)  # of 7 words: some twice, some never
    _logits = 3 * RNG.standard_normal((*_leading, 7))
    _made = {
        "projection": (Projection(4, 3, rng=RNG), [_x], lambda x, W, b: x @ W + b),
        "square projection": (Projection(4, 4, rng=RNG), [_x], lambda x, W, b: x @ W + b),
        "no bias": (Projection(4, 3, bias=False, rng=RNG), [_x], lambda x, W: x @ W),
        "layer norm": (NORM, [_x], lambda x, g, b: F.layer_norm(x, (4,), g, b, 1e-3)),
        "ReLU": (ReLU(), [_x + 0.1 * np.sign(_x)], torch.relu),
        "feed-forward": (NETWORK, [_far], torch_ffn),
        "residual": (Residual(NETWORK), [_far], lambda x, *a: x + torch_ffn(x, *a)),
        "embedding": (Embedding(7, 4, RNG), [_ids], lambda E, ids=_ids: E[ids]),
    }
    if _x.size:
        _made["cross-entropy"] = (
            CrossEntropy(),
            [_logits, np.array(_ids)],
            lambda z, ids=_ids: F.cross_entropy(
                z.reshape(-1, 7), torch.tensor(ids).reshape(-1)
            ),
        )
    CASES |= {f"{name}, {_shape}": case for name, case in _made.items()}
each_case = pytest.mark.parametrize(
    ("layer", "inputs", "theirs"), CASES.values(), ids=CASES
)


def run(layer, inputs, seed=0):
    """Output, the weights of the loss, and all gradients of a copy of the layer."""
    layer = copy.deepcopy(layer)
    output = layer.forward(*inputs)
    if np.ndim(output) == 0:
        weights, d_input = 1.0, layer.backward()
    else:
        weights = np.random.default_rng(seed).standard_normal(output.shape)
        d_input = layer.backward(weights)
    first = [] if d_input is None else [d_input]
    return output, weights, [*first, *layer.gradients().values()]


def floats(layer, inputs):
    return [a for a in (*inputs, *layer.parameters().values()) if a.dtype == np.float64]


@each_case
def test_equal_to_autograd(layer, inputs, theirs):
    output, weights, found = run(layer, inputs)
    tensors = [torch.tensor(array, requires_grad=True) for array in floats(layer, inputs)]
    expected = theirs(*tensors)
    np.testing.assert_allclose(output, expected.detach(), rtol=0, atol=1e-12)
    loss = (expected * torch.tensor(weights)).sum()
    for a, b in zip(found, torch.autograd.grad(loss, tensors), strict=True):
        assert a.shape == tuple(b.shape) and a.dtype == np.float64
        assert relative_error(a, b.numpy()) < 1e-11


@each_case
def test_equal_to_finite_differences(layer, inputs, theirs):
    errors = gradient_check(layer, *inputs)
    assert len(errors) == len(floats(layer, inputs)) and max(errors.values()) < 1e-9


def with_array(layer, name, array):
    """A copy of the layer with another array as the parameter of this name."""
    layer = owner = copy.deepcopy(layer)
    *parts, last = name.split(".")
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, last, array)
    return layer


@each_case
def test_equal_to_complex_steps(layer, inputs, theirs, as_shipped):
    _, weights, found = run(layer, inputs)
    functions = [
        (array, lambda z, name=name: weights * with_array(layer, name, z).forward(*inputs))
        for name, array in layer.parameters().items()
    ]
    if inputs[0].dtype == np.float64:
        other = copy.deepcopy(layer)
        first = (inputs[0], lambda z: weights * other.forward(z, *inputs[1:]))
        functions.insert(0, first)
    for gradient, (array, function) in zip(found, functions, strict=True):
        assert relative_error(gradient, complex_step(function, array)) < 1e-12


# A mistake in each layer is found.


class Transposed(Projection):
    def backward(self, d_output):
        d_input = super().backward(d_output)
        self._gradients["W"] = self._gradients["W"].T
        return d_input


class Unsummed(Projection):
    def backward(self, d_output):
        d_input = super().backward(d_output)
        self._gradients["b"] = d_output
        return d_input


class SummedOverTheBatchOnly(Projection):
    def backward(self, d_output):
        d_input = super().backward(d_output)
        self._gradients["b"] = d_output.sum(axis=0)
        return d_input


class FirstTokenOnly(Projection):
    def backward(self, d_output):
        d_input = super().backward(d_output)
        self._gradients["b"] = d_output.reshape(-1, d_output.shape[-1])[0]
        return d_input


class WeightNotTransposed(Projection):
    def backward(self, d_output):
        super().backward(d_output)
        return d_output @ self.W


class NoResidualBranch(Residual):
    def backward(self, d_output):
        return self.layer.backward(d_output)


class OnlyTheResidualBranch(Residual):
    def backward(self, d_output):
        self.layer.backward(d_output)
        return d_output


class WithoutTheMean(LayerNorm):
    def backward(self, d_output):
        mean = (d_output * self.gamma).mean(axis=-1, keepdims=True)
        cache = self.recall(d_output)
        return super().backward(d_output) + mean * cache["inverse"]


class WithoutTheDeviation(LayerNorm):
    def backward(self, d_output):
        super().backward(d_output)
        g, inverse = d_output * self.gamma, self.recall(d_output)["inverse"]
        return (g - g.mean(axis=-1, keepdims=True)) * inverse


class LastUseOnly(Embedding):
    def backward(self, d_output):
        ids = self.recall(d_output)["ids"]
        self._gradients = {"weight": np.zeros_like(self.weight)}
        self._gradients["weight"][ids] += d_output


class NotAveraged(CrossEntropy):
    def backward(self):
        return super().backward() * self.recall()["targets"].size


X = away_from_kinks(NETWORK, RNG.standard_normal((2, 3, 4)))
IDS = np.array([[2, 0, 2], [2, 6, 0]])
LOGITS = RNG.standard_normal((2, 3, 7))
PLANTED = {
    "transposed dW": (Transposed(4, 4, rng=RNG), [X], "W: the gradient is wrong"),
    "unsummed bias": (Unsummed(4, 4, rng=RNG), [X], "b: the gradient has shape"),
    "summed over the batch only": (
        SummedOverTheBatchOnly(4, 4, rng=RNG),
        [X],
        "b: the gradient has shape",
    ),
    "one token's bias": (FirstTokenOnly(4, 4, rng=RNG), [X], "b: the gradient is wrong"),
    "W not transposed": (
        WeightNotTransposed(4, 4, rng=RNG),
        [X],
        "input: the gradient is wrong",
    ),
    "missing residual branch": (
        NoResidualBranch(NETWORK),
        [X],
        "input: the gradient is wrong",
    ),
    "nothing but the residual branch": (
        OnlyTheResidualBranch(NETWORK),
        [X],
        "input: the gradient is wrong",
    ),
    "layer norm without the mean": (
        WithoutTheMean(4),
        [X],
        "input: the gradient is wrong",
    ),
    "layer norm without the deviation": (
        WithoutTheDeviation(4),
        [X],
        "input: the gradient is wrong",
    ),
    "a row used twice": (LastUseOnly(7, 4, RNG), [IDS], "weight: the gradient is wrong"),
    "not averaged": (NotAveraged(), [LOGITS, IDS], "logits: the gradient is wrong"),
}


@pytest.mark.parametrize(("layer", "inputs", "message"), PLANTED.values(), ids=PLANTED)
def test_planted_mistakes_are_found(layer, inputs, message):
    with pytest.raises(AssertionError, match=message):
        gradient_check(layer, *inputs)


# Each layer and its namesake in PyTorch.


def copy_parameters(ours, theirs):
    for name, array in ours.parameters().items():
        theirs.get_parameter(name).data = torch.tensor(array)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Projection(4, 3, rng=RNG), attnlib.Projection(4, 3)),
        (Projection(4, 3, False, RNG), attnlib.Projection(4, 3, False)),
        (NORM, attnlib.LayerNorm(4, 1e-3)),
        (FeedForwardNetwork(4, rng=RNG), attnlib.FeedForwardNetwork(4)),
        (FeedForwardNetwork(4, 5, rng=RNG), attnlib.FeedForwardNetwork(4, 5)),
        (Embedding(4, 3, RNG), torch.nn.Embedding(4, 3)),
    ],
)
def test_the_same_names_shapes_and_numbers_as_the_namesake(ours, theirs):
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert {name: array.shape for name, array in ours.parameters().items()} == shapes
    copy_parameters(ours, theirs)
    x = IDS % 4 if isinstance(ours, Embedding) else X
    output = theirs(torch.tensor(x))
    np.testing.assert_allclose(ours.forward(x), output.detach(), rtol=0, atol=1e-12)
    weights = RNG.standard_normal(output.shape)
    (output * torch.tensor(weights)).sum().backward()
    ours.backward(weights)
    for name, gradient in ours.gradients().items():
        expected = theirs.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-11)


def test_first_weights():
    projection = Projection(100, 1000, rng=np.random.default_rng(1))
    for array in projection.parameters().values():
        assert np.abs(array).max() <= 0.1
        assert abs(array.std() / (0.1 / math.sqrt(3)) - 1) < 0.05
    weight = Embedding(1000, 50, np.random.default_rng(1)).weight
    assert abs(weight.mean()) < 0.02 and abs(weight.std() - 1) < 0.02
    assert not np.array_equal(Projection(3, 3).W, Projection(3, 3).W)
    a, b = (FeedForwardNetwork(3, rng=np.random.default_rng(2)) for _ in range(2))
    assert all(map(np.array_equal, a.parameters().values(), b.parameters().values()))


# What is particular to a layer.


def test_relu_at_the_kink_and_not_a_number():
    layer = ReLU()
    output = layer.forward(np.array([-1.0, -0.0, 0.0, 1.0, np.nan]))
    np.testing.assert_array_equal(output, [0, 0, 0, 1, np.nan])
    np.testing.assert_array_equal(layer.backward(np.full(5, 3.0))[:4], [0, 0, 0, 3])


def test_a_network_is_four_times_as_wide_inside():
    shapes = [array.shape for array in FeedForwardNetwork(6).parameters().values()]
    assert shapes == [(6, 24), (24,), (24, 6), (6,)]


def test_activation_can_be_another_layer():
    class Tanh(Layer):
        def forward(self, input):
            output = np.tanh(input)
            self.remember(output, tanh=output)
            return output

        def backward(self, d_output):
            return d_output * (1 - self.recall(d_output)["tanh"] ** 2)

    network = FeedForwardNetwork(4, 5, activation=Tanh(), rng=RNG)
    assert max(gradient_check(network, X).values()) < 1e-9
    assert list(network.parameters()) == list(NETWORK.parameters())


def test_dropout_acts_on_the_hidden_features_in_training_only():
    network = FeedForwardNetwork(4, 50, dropout=0.5, rng=np.random.default_rng(3))
    hidden = np.maximum(network.linear_1.forward(X), 0).reshape(6, 50)
    network.forward(X)
    dropped = network.linear_2.recall(np.ones((2, 3, 4)))["tall"]
    assert set(np.unique(dropped[hidden > 0] / hidden[hidden > 0]).round(9)) == {0.0, 2.0}
    network.eval().forward(X)
    kept = network.linear_2.recall(np.ones((2, 3, 4)))["tall"]
    np.testing.assert_array_equal(kept, hidden)


def test_gradient_check_with_dropout():
    for seed in range(20):
        network = FeedForwardNetwork(4, 5, dropout=0.4, rng=np.random.default_rng(seed))
        x = away_from_kinks(network, X[0])
        assert max(gradient_check(network, x).values()) < 1e-9


@given(st.integers(1, 8), st.sampled_from([0.0, 1e-5, 0.1]), st.integers(0, 99))
def test_layer_norm_gradient_is_tangent(d, eps, seed):
    rng = np.random.default_rng(seed)
    x, g = rng.standard_normal((2, 5, d))
    if d == 1:
        eps = 1e-5  # one feature has no deviation
    norm = LayerNorm(d, eps)
    x_hat = norm.forward(x)
    dx = norm.backward(g)
    np.testing.assert_allclose(dx.sum(axis=-1), 0, atol=1e-6)
    s2 = x.var(axis=-1) + eps
    along = (g * x_hat).sum(axis=-1) * eps / s2**1.5
    np.testing.assert_allclose((dx * x_hat).sum(axis=-1), along, rtol=1e-6, atol=1e-6)


def test_layer_norm_of_equal_features():
    norm = LayerNorm(4)
    np.testing.assert_array_equal(norm.forward(np.full((2, 4), 7.0)), 0)
    g = RNG.standard_normal((2, 4))
    expected = (g - g.mean(axis=-1, keepdims=True)) / math.sqrt(1e-5)
    np.testing.assert_allclose(norm.backward(g), expected, rtol=1e-12)


def test_layer_norm_of_float16_takes_its_statistics_in_float32():
    x = (300 * RNG.standard_normal((4, 64))).astype(np.float16)
    g = RNG.standard_normal((4, 64)).astype(np.float16)
    low, exact = cast(LayerNorm(64), np.float16), LayerNorm(64)
    assert low.forward(x).dtype == low.backward(g).dtype == np.float16
    assert relative_error(low.forward(x), exact.forward(x.astype(float))) < 2e-3
    assert (
        relative_error(300 * low.backward(g), 300 * exact.backward(g.astype(float))) < 2e-3
    )
    for name, gradient in low.gradients().items():
        assert gradient.dtype == np.float16
        assert relative_error(gradient, exact.gradients()[name]) < 5e-3


def test_projection_of_tokens_that_are_not_contiguous():
    projection = Projection(4, 3, rng=RNG)
    turned = np.asfortranarray(RNG.standard_normal((5, 2, 4))).swapaxes(0, 1)
    weights = np.broadcast_to(RNG.standard_normal(3), (2, 5, 3))
    projection.forward(turned)
    d_input = projection.backward(weights)
    np.testing.assert_allclose(d_input, weights @ projection.W.T, rtol=0, atol=1e-12)
    expected = np.einsum("bna,bnc->ac", turned, weights)
    np.testing.assert_allclose(projection.gradients()["W"], expected, rtol=0, atol=1e-12)


def test_embedding_adds_up_what_a_row_was_used_for():
    layer = Embedding(5, 2, RNG)
    layer.forward(np.array([3, 1, 3, 3], dtype=np.uint8))
    assert layer.backward(np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]])) is None
    expected = [[0, 0], [3, 4], [0, 0], [13, 16], [0, 0]]
    np.testing.assert_array_equal(layer.gradients()["weight"], expected)


def test_cross_entropy_of_large_logits():
    loss = CrossEntropy()
    assert loss.forward(np.array([[0.0, 1e4], [1e4, 0.0]]), np.array([0, 0])) == 5e3
    np.testing.assert_array_equal(loss.backward(), [[-0.5, 0.5], [0, 0]])
    assert loss.forward(np.array([[0.0, 0.0, -np.inf]]), np.array([1])) == math.log(2)
    np.testing.assert_array_equal(loss.backward(), [[0.5, -0.5, 0]])


# The promises of every layer.


@each_case
def test_backward_twice_and_nothing_is_written_to(layer, inputs, theirs):
    layer, before = copy.deepcopy(layer), copy.deepcopy(inputs)
    output = layer.forward(*inputs)
    kept_output = np.copy(output)
    arguments = [np.ones_like(output)] if np.ndim(output) else []
    for array in (*inputs, *arguments, *layer.parameters().values()):
        array.flags.writeable = False
    first = layer.backward(*arguments)
    gradients = copy.deepcopy(layer.gradients())
    if isinstance(first, np.ndarray):
        kept = first.copy()
        first[...] = np.nan  # what the caller does with it is no matter
        np.testing.assert_array_equal(layer.backward(*arguments), kept)
    else:
        layer.backward(*arguments)
    assert list(gradients) == list(layer.gradients()) == list(layer.parameters())
    for name, gradient in layer.gradients().items():
        np.testing.assert_array_equal(gradient, gradients[name])
    np.testing.assert_array_equal(output, kept_output)
    for array, original in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array, original)
        array.flags.writeable = True


@each_case
def test_float32_stays_float32(layer, inputs, theirs):
    _, _, exact = run(layer, inputs)
    light = cast(copy.deepcopy(layer), np.float32)
    inputs = [a.astype(np.float32) if a.dtype == np.float64 else a for a in inputs]
    output = light.forward(*inputs)
    weights = np.random.default_rng(0).standard_normal(np.shape(output)).astype(np.float32)
    d_input = light.backward(weights) if np.ndim(output) else light.backward()
    found = [*([] if d_input is None else [d_input]), *light.gradients().values()]
    assert output.dtype == np.float32
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == np.float32 and relative_error(a, b) < 1e-5


def test_parameters_are_live_and_a_step_lowers_the_loss():
    network, loss = FeedForwardNetwork(4, 8, rng=np.random.default_rng(5)), CrossEntropy()
    x, targets = X.reshape(6, 4), np.arange(6) % 4
    losses = []
    for _ in range(50):
        losses.append(float(loss.forward(network.forward(x), targets)))
        network.backward(loss.backward())
        for name, array in network.parameters().items():
            array -= 0.3 * network.gradients()[name]
    assert losses[-1] < losses[0] / 2
    assert np.shares_memory(network.parameters()["linear_1.W"], network.linear_1.W)


@each_case
def test_pickling(layer, inputs, theirs):
    again = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(again.forward(*inputs), run(layer, inputs)[0])


def test_memory_is_counted():
    n, d, d_ff, V = 10, 4, 6, 7
    x, ids = RNG.standard_normal((n, d)), np.arange(n) % V
    held = [
        (Projection(d, 5), [x], n * d),
        (LayerNorm(d), [x], n * (d + 1)),
        (FeedForwardNetwork(d, d_ff), [x], n * (d + d_ff)),
        (FeedForwardNetwork(d, d_ff, dropout=0.1), [x], n * (d + 3 * d_ff)),
        (Residual(FeedForwardNetwork(d, d_ff)), [x], n * (d + d_ff)),
        (Embedding(V, d), [ids], n),
        (CrossEntropy(), [RNG.standard_normal((n, V)), ids], n * (V + 1)),
    ]
    for layer, inputs, numbers in held:
        layer.forward(*inputs)
        assert layer.cache_bytes() == 8 * numbers, type(layer).__name__
