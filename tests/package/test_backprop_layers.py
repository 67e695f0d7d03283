"""Backward by hand, layer by layer: two judges, and the promises of every layer."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import attnlib
from attnlib import backprop
from attnlib.backprop import (
    CrossEntropy,
    Embedding,
    FeedForwardNetwork,
    LayerNorm,
    Projection,
    ReLU,
    RMSNormLayer,
    SiLU,
    cast,
    complex_step,
    gradient_check,
    relative_error,
)
from drawn import normal, refuses

RNG = np.random.default_rng(0)


def array(*shape, seed=0):
    return normal(*shape, seed=seed).numpy()


class Case(NamedTuple):
    """What makes a layer and its namesake in PyTorch, and the inputs of both."""

    layers: Callable
    inputs: list
    mask: np.ndarray | None = None


class Mean(torch.nn.Module):
    def forward(self, logits, targets):
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def of(name, *sizes, theirs=None, heads=(), **options):
    """Makes the layer of this name and its namesake.

    When a test runs, so that the constructor belongs to it; with parameters away from
    their start, and those of hidden features away from kinks.
    """

    def layers():
        made = []
        for library in (backprop, attnlib):
            parts = [library.ScaledDotProductAttention(**head) for head in heads]
            more = {"attention": parts if len(parts) > 1 else parts[0]} if parts else {}
            namesake = library is attnlib and theirs
            made.append((namesake or getattr(library, name))(*sizes, **options, **more))
        for i, parameter in enumerate(made[0].parameters().values()):
            parameter[...] = 0.4 * array(*parameter.shape, seed=50 + i)
            if parameter.shape == (5,):
                parameter += 3 * np.sign(parameter)
        return made

    return layers


ALLOWED = array(2, 2, 4, 6, seed=1) < 0.4
ALLOWED[0, 1, 2] = False  # a query that may attend to nothing
ADDED = np.where(ALLOWED, array(2, 2, 4, 6, seed=2), -np.inf)
IDS = np.array([[2, 0, 2], [2, 6, 0]])  # of 7 words: some twice, some never
EMPTY_ROW = np.array([[True, True, False], [False, False, False], [True, False, True]])
CAUSAL, SCALE = {"causal": True}, {"scale": 0.3}
ATTENTION, HEADS = "ScaledDotProductAttention", "MultiHeadAttention"
GATED = "GatedFeedForwardLayer"
SIZES = {"vocab_size": 7, "context_length": 5, "embed_dim": 4, "num_heads": 2, "d_ff": 5}


def qkv(*leading, queries=4, keys=6):
    shapes = ((queries, 3), (keys, 3), (keys, 5))
    return [array(*leading, *shape, seed=i) for i, shape in enumerate(shapes)]


CASES = {
    "one query": Case(of(ATTENTION, **CAUSAL), qkv(queries=1)),
    "no keys": Case(of(ATTENTION), qkv(2, keys=0)),
    "no queries": Case(of(ATTENTION), qkv(2, queries=0)),
    "causal, N < M": Case(of(ATTENTION, **CAUSAL), qkv(2)),
    "causal, N > M": Case(of(ATTENTION, **CAUSAL), qkv(2, queries=6, keys=4)),
    "no scale": Case(of(ATTENTION, scale=0.0), qkv()),
    "boolean mask": Case(of(ATTENTION, **SCALE), qkv(2, 2), ALLOWED),
    "mask for all heads": Case(of(ATTENTION), qkv(2, 2), ALLOWED[:, :1]),
    "padding": Case(of(ATTENTION), qkv(2, 2), np.arange(6) < 4),
    "nothing allowed": Case(of(ATTENTION), qkv(2), np.zeros((4, 6), dtype=bool)),
    "additive mask": Case(of(ATTENTION), qkv(2, 2), ADDED),
    "both masks": Case(of(ATTENTION, **CAUSAL), qkv(2, 2), ALLOWED),
    "heads": Case(of(HEADS, 4, 2), [array(2, 2, 3, 4)]),
    "keys": Case(of(HEADS, 4, 2), [array(2, 3, 4), array(2, 5, 4, seed=1)]),
    "keys and values": Case(
        of(HEADS, 4, 2), [array(3, 4), array(5, 4, seed=1), array(5, 4, seed=2)]
    ),
    "one head, one token": Case(of(HEADS, 4, 1), [array(1, 1, 4)]),
    "no bias": Case(of(HEADS, 4, 4, bias=False), [array(3, 4)]),
    "causal heads": Case(of(HEADS, 4, 2, heads=[CAUSAL]), [array(2, 4), array(5, 4)]),
    "empty row": Case(of(HEADS, 4, 2), [array(2, 3, 4)], EMPTY_ROW),
    "mask for each head": Case(of(HEADS, 4, 2), [array(2, 4, 4)], ALLOWED[..., :4]),
    "list of heads": Case(
        of(HEADS, 4, 2, heads=[SCALE, CAUSAL]), [array(2, 4, 4)], ALLOWED[..., :4]
    ),
    "list, one mask": Case(
        of(HEADS, 4, 2, heads=[SCALE, CAUSAL]), [array(2, 3, 4)], EMPTY_ROW
    ),
    "list, added": Case(
        of(HEADS, 4, 2, heads=[CAUSAL, SCALE]), [array(2, 4, 4)], ADDED[:, :1, :, :4]
    ),
    "block": Case(of("TransformerBlock", 4, 2, 5), [array(2, 3, 4)], np.tri(3, dtype=bool)),
    "model": Case(of("LanguageModel", **SIZES, num_layers=2), [IDS]),
    "one text": Case(of("LanguageModel", **SIZES, num_layers=1), [np.arange(5) // 2]),
}
for _shape in ((), (3,), (2, 3), (1, 1), (2, 0)):
    _x, _ids = array(*_shape, 4), RNG.integers(0, 3, _shape)
    _made = {
        "projection": Case(of("Projection", 4, 3), [_x]),
        "square projection": Case(of("Projection", 4, 4), [_x]),
        "projection without bias": Case(of("Projection", 4, 3, bias=False), [_x]),
        "layer norm": Case(of("LayerNorm", 4, 1e-3), [_x]),
        "RMS norm": Case(of("RMSNormLayer", 4, 0.1, theirs=attnlib.RMSNorm), [_x]),
        "ReLU": Case(of("ReLU", theirs=torch.nn.ReLU), [_x + 0.1 * np.sign(_x)]),
        "SiLU": Case(of("SiLU", theirs=torch.nn.SiLU), [_x]),
        "network": Case(of("FeedForwardNetwork", 4, 5), [_x]),
        "gated": Case(of(GATED, 4, 6, theirs=attnlib.GatedFeedForward), [_x]),
        "gated, bias": Case(
            of(GATED, 4, 6, bias=True, theirs=attnlib.GatedFeedForward), [_x]
        ),
        "embedding": Case(of("Embedding", 7, 4, theirs=torch.nn.Embedding), [_ids]),
    }
    if _x.size:
        _logits, _mean = 3 * array(*_shape, 7), of("CrossEntropy", theirs=Mean)
        _made["cross-entropy"] = Case(_mean, [_logits, np.array(_ids)])
    CASES |= {f"{name}, {_shape}": case for name, case in _made.items()}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def given_back(layer, inputs, mask=None):
    """The outputs, the numbers of the loss of the first, and all gradients."""
    options = {} if mask is None else {"mask": mask}
    outputs = tree_leaves(layer.forward(*inputs, **options))
    weights = array(*outputs[0].shape, seed=9).astype(outputs[0].dtype)
    found = layer.backward(weights) if weights.shape else weights * layer.backward()
    found = [d for d in tree_leaves(found) if d is not None]
    return outputs, weights, [*found, *layer.gradients().values()]


@each_case
def test_equal_to_autograd(case):
    """Names, shapes and numbers are those of the namesake."""
    ours, theirs = case.layers()
    outputs, weights, found = given_back(ours, case.inputs, case.mask)
    parameters = {name: torch.tensor(a) for name, a in ours.parameters().items()}
    inputs = [torch.tensor(x) for x in case.inputs]
    leaves = [x for x in (*inputs, *parameters.values()) if x.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    assert {n: p.shape for n, p in theirs.double().named_parameters()} == {
        name: p.shape for name, p in parameters.items()
    }
    options = {} if case.mask is None else {"mask": torch.tensor(case.mask)}
    expected = tree_leaves(functional_call(theirs, parameters, tuple(inputs), options))
    for a, b in zip(outputs, expected, strict=False):  # a module may give its weights
        np.testing.assert_allclose(a, b.detach(), rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(expected[0], leaves, torch.tensor(weights))
    for a, b in zip(found, gradients, strict=True):
        assert a.shape == b.shape and a.dtype == np.float64
        assert relative_error(a, b.numpy()) < 1e-11


@given(
    st.lists(st.integers(0, 2), max_size=2).map(tuple),
    *(st.integers(1, 4), st.integers(1, 4), st.booleans()),
)
def test_attention_of_any_shape(leading, queries, keys, causal):
    layers, mask = of(ATTENTION, causal=causal), array(queries, keys, seed=3) < 0.5
    test_equal_to_autograd(Case(layers, qkv(*leading, queries=queries, keys=keys), mask))


@each_case
def test_equal_to_complex_steps(case, as_shipped):
    layer, _ = case.layers()
    _, weights, found = given_back(layer, case.inputs, case.mask)
    cast(layer, complex)
    inputs = [x + 0j if x.dtype == np.float64 else x for x in case.inputs]
    options = {} if case.mask is None else {"mask": case.mask}

    def output(z, moved):
        start, moved[...] = moved.copy(), z
        first = tree_leaves(layer.forward(*inputs, **options))[0]
        moved[...] = start
        return weights * first

    arrays = [x for x in (*inputs, *layer.parameters().values()) if x.dtype == complex]
    for gradient, x in zip(found, arrays, strict=True):
        exact = complex_step(lambda z, x=x: output(z, x), x.real)
        assert relative_error(gradient, exact) < 1e-12


@each_case
def test_backward_twice_and_nothing_is_written_to(case):
    """And the same once more, by a copy that was pickled."""
    layer, inputs = case.layers()[0], copy.deepcopy(case.inputs)
    for x in (*inputs, *layer.parameters().values()):
        x.flags.writeable = False
    copied = pickle.loads(pickle.dumps(layer))
    outputs, weights, found = given_back(layer, inputs, case.mask)
    kept = copy.deepcopy((outputs, found))
    weights.flags.writeable = False
    own = len(layer.parameters())
    for gradient in found[: len(found) - own]:
        gradient[...] = np.nan  # what the caller does with it is no matter
    again = layer.backward(weights) if weights.shape else weights * layer.backward()
    again = [d for d in tree_leaves(again) if d is not None]
    again += layer.gradients().values()
    assert list(layer.gradients()) == list(layer.parameters())
    pickled, _, theirs = given_back(copied, inputs, case.mask)
    for results in ([*outputs, *again], [*pickled, *theirs]):
        for a, b in zip(results, [*kept[0], *kept[1]], strict=True):
            np.testing.assert_array_equal(a, b)


@each_case
def test_float32_stays_float32(case):
    def light(x):
        return x.astype(np.float32) if x is not None and x.dtype == np.float64 else x

    layer, _ = case.layers()
    *_, exact = given_back(layer, case.inputs, case.mask)
    cast(layer, np.float32)
    inputs = [light(x) for x in case.inputs]
    outputs, _, found = given_back(layer, inputs, light(case.mask))
    assert {x.dtype for x in (*outputs, *found)} == {np.dtype(np.float32)}
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# What is particular to a layer.

X = array(2, 3, 4)


def test_first_weights():
    projection = Projection(100, 1000, rng=np.random.default_rng(1))
    for parameter in projection.parameters().values():
        assert np.abs(parameter).max() <= 0.1
        assert abs(parameter.std() / (0.1 / math.sqrt(3)) - 1) < 0.05
    weight = Embedding(1000, 50, np.random.default_rng(1)).weight
    assert abs(weight.mean()) < 0.02 and abs(weight.std() - 1) < 0.02
    assert not np.array_equal(Projection(3, 3).W, Projection(3, 3).W)
    for network in (FeedForwardNetwork, backprop.GatedFeedForwardLayer):
        a, b = (network(3, rng=np.random.default_rng(2)) for _ in range(2))
        assert all(map(np.array_equal, a.parameters().values(), b.parameters().values()))
    assert FeedForwardNetwork(3).linear_1.W.shape == (3, 12)


def test_relu_at_the_kink_and_not_a_number():
    layer = ReLU()
    output = layer.forward(np.array([-1.0, -0.0, 0.0, 1.0, np.nan]))
    np.testing.assert_array_equal(output, [0, 0, 0, 1, np.nan])
    np.testing.assert_array_equal(layer.backward(np.full(5, 3.0))[:4], [0, 0, 0, 3])


def test_activation_can_be_another_layer():
    plain = FeedForwardNetwork(4, 5, activation=SiLU(), rng=RNG)
    gated = backprop.GatedFeedForwardLayer(4, 6, ReLU(), rng=RNG)
    for network in (plain, gated):
        gradient_check(network, X)
    assert isinstance(gated.activation, ReLU)


def test_dropout_acts_on_the_hidden_features_in_training_only():
    network = FeedForwardNetwork(4, 50, dropout=0.5, rng=np.random.default_rng(3))
    hidden = np.maximum(network.linear_1.forward(X), 0).reshape(6, 50)
    network.forward(X)
    dropped = network.linear_2.recall(np.ones((2, 3, 4)))["tall"]
    assert set(np.unique(dropped[hidden > 0] / hidden[hidden > 0]).round(9)) == {0.0, 2.0}
    network.eval().forward(X)
    kept = network.linear_2.recall(np.ones((2, 3, 4)))["tall"]
    np.testing.assert_array_equal(kept, hidden)


def test_layer_norm_of_equal_features():
    norm, g = LayerNorm(4), array(2, 4)
    np.testing.assert_array_equal(norm.forward(np.full((2, 4), 7.0)), 0)
    expected = (g - g.mean(axis=-1, keepdims=True)) / math.sqrt(1e-5)
    np.testing.assert_allclose(norm.backward(g), expected, rtol=1e-12)


@pytest.mark.parametrize("norm", [LayerNorm, backprop.RMSNormLayer])
def test_norms_of_float16_take_their_statistics_in_float32(norm):
    x = (1000 * array(4, 64)).astype(np.float16)  # whose squares overflow
    g = array(4, 64, seed=1).astype(np.float16)
    low, exact = cast(norm(64), np.float16), norm(64)
    pairs = [(low.forward(x), exact.forward(x.astype(float)))]
    pairs.append((1000 * low.backward(g), 1000 * exact.backward(g.astype(float))))
    pairs += zip(low.gradients().values(), exact.gradients().values(), strict=True)
    for found, expected in pairs:
        assert found.dtype == np.float16 and relative_error(found, expected) < 5e-3


def test_numbers_that_are_not_contiguous_and_short_integers():
    projection = Projection(4, 3, rng=RNG)
    turned = np.asfortranarray(array(5, 2, 4)).swapaxes(0, 1)
    weights = np.broadcast_to(array(3), (2, 5, 3))
    projection.forward(turned)
    d_input = projection.backward(weights)
    np.testing.assert_allclose(d_input, weights @ projection.W.T, rtol=0, atol=1e-12)
    expected = np.einsum("bna,bnc->ac", turned, weights)
    np.testing.assert_allclose(projection.gradients()["W"], expected, rtol=0, atol=1e-12)
    layer = Embedding(5, 2, RNG)
    layer.forward(np.array([3, 1, 3, 3], dtype=np.uint8))
    assert layer.backward(np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]])) is None
    expected = [[0, 0], [3, 4], [0, 0], [13, 16], [0, 0]]
    np.testing.assert_array_equal(layer.gradients()["weight"], expected)


def test_cross_entropy_of_large_logits():
    loss = CrossEntropy()
    assert loss.forward(np.array([[0.0, 1e4], [1e4, 0.0]]), np.array([0, 0])) == 5e3
    np.testing.assert_array_equal(loss.backward(), [[-0.5, 0.5], [0, 0]])
    both = loss.forward(np.array([[1e4, 0.0], [0.0, 0.0]]), np.array([0, 1]))
    assert both == math.log(2) / 2
    assert loss.forward(np.array([[0.0, 0.0, -np.inf]]), np.array([1])) == math.log(2)
    np.testing.assert_array_equal(loss.backward(), [[0.5, -0.5, 0]])


def test_silu_at_the_ends(as_shipped):
    z = np.array([-1e4, -50.0, -1.0, 0.0, 1.0, 50.0, 1e4])
    layer = SiLU()
    with np.errstate(all="raise", under="ignore"):
        output, slope = layer.forward(z), layer.backward(np.ones(7))
    tensor = torch.tensor(z, requires_grad=True)
    expected = F.silu(tensor)
    (wanted,) = torch.autograd.grad(expected.sum(), tensor)
    np.testing.assert_allclose(output, expected.detach(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-12)


def test_memory_is_counted():
    n, d, d_ff, V = 10, 4, 6, 7
    x, ids = array(n, d), np.arange(n) % V
    for layer, inputs, numbers in (
        (Projection(d, 5), [x], n * d),
        (LayerNorm(d), [x], n * (d + 1)),
        (FeedForwardNetwork(d, d_ff), [x], n * (d + d_ff)),
        (FeedForwardNetwork(d, d_ff, dropout=0.1), [x], n * (d + 3 * d_ff)),
        (Embedding(V, d), [ids], n),
        (CrossEntropy(), [array(n, V), ids], n * (V + 1)),
    ):
        layer.forward(*inputs)
        assert layer.cache_bytes() == 8 * numbers, type(layer).__name__


# ── one layer in two places ──────────────────────────────────────────────────────────

TWICE = {
    "Projection": (lambda: Projection(4, 4), X),
    "ReLU": (ReLU, X),
    "SiLU": (SiLU, X),
    "Dropout": (lambda: backprop.Dropout(0.5), X),
    "LayerNorm": (lambda: LayerNorm(4), X),
    "RMSNormLayer": (lambda: backprop.RMSNormLayer(4), X),
    "FeedForwardNetwork": (lambda: FeedForwardNetwork(4, 5), X),
    "GatedFeedForwardLayer": (lambda: backprop.GatedFeedForwardLayer(4, 5), X),
    "MultiHeadAttention": (lambda: backprop.MultiHeadAttention(4, 2), X),
    "TransformerBlock": (lambda: backprop.TransformerBlock(4, 2, 5), X),
    "Embedding": (lambda: Embedding(7, 4), IDS),
    "LanguageModel": (lambda: backprop.LanguageModel(7, 5, 4, 2, 1), IDS),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_layer_used_twice_is_refused_at_the_second_backward(name):
    make, first = TWICE[name]
    layer, second = make(), np.flip(first).copy()
    outputs = [layer.forward(x) for x in (first, second)]
    d_output = np.ones_like(outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0])
    layer.backward(d_output)
    last = {key: x.copy() for key, x in layer.gradients().items()}
    with pytest.raises(RuntimeError, match=r"^\w+: expected one backward after"):
        layer.backward(d_output)
    layer.forward(second)  # its turn: any number of backwards
    for _ in range(2):
        layer.backward(d_output)
    for key, gradient in layer.gradients().items():
        if name != "Dropout":
            np.testing.assert_allclose(gradient, last[key], atol=1e-12)


def test_one_projection_after_itself():
    layer = Projection(4, 4)
    layer.W[...] = np.eye(4)  # so that what comes second is equal to what came first
    layer.forward(layer.forward(X))
    with pytest.raises(RuntimeError, match=r"^Projection: expected one backward after"):
        layer.backward(layer.backward(array(*X.shape, seed=1)))


def test_a_head_that_two_blocks_share():
    heads = backprop.ScaledDotProductAttention()
    blocks = [backprop.TransformerBlock(4, 2, 5, heads) for _ in range(2)]
    blocks[1].forward(blocks[0].forward(X))
    with pytest.raises(RuntimeError, match=r"^ScaledDotProductAttention: expected one"):
        blocks[0].backward(blocks[1].backward(X))


def test_predictions_between_the_steps_are_no_second_use():
    layer = Projection(4, 3)
    for _ in range(2):
        for _ in range(3):
            output = layer.forward(X)
        layer.backward(output)


def test_a_gradient_check_is_no_second_use():
    class Doubled(Projection):
        def backward(self, d_output):
            super().backward(d_output)
            return super().backward(d_output)

    layer = Doubled(4, 3)
    layer.forward(X)
    gradient_check(layer, X)


def test_a_cast_forgets_what_forward_has_kept():
    layer = Projection(4, 3)
    output = layer.forward(X)
    with pytest.raises(RuntimeError, match=r"^Projection: call forward before backward"):
        cast(layer, np.float64).backward(output)
    layer.forward(X)
    for _ in range(2):
        layer.backward(output)


# ── numbers of NumPy as options ──────────────────────────────────────────────────────


NUMBERS = {
    "eps": lambda n: LayerNorm(4, eps=n(1e-5)),
    "eps of the RMS norm": lambda n: backprop.RMSNormLayer(4, eps=n(1e-5)),
    "dropout": lambda n: FeedForwardNetwork(4, 5, dropout=n(0.5), rng=rng(1)),
    "dropout of a block": lambda n: backprop.TransformerBlock(
        4, 2, 5, dropout=n(0.25), rng=rng(1)
    ),
    "scale": lambda n: backprop.MultiHeadAttention(
        4, 2, backprop.ScaledDotProductAttention(scale=n(0.3)), rng=rng(1)
    ),
    "sizes": lambda n: backprop.TransformerBlock(
        *(4, 2, 5) if n is float else map(np.int64, (4, 2, 5)), rng=rng(1)
    ),
}


def rng(seed):
    return np.random.default_rng(seed)


def test_sums_of_float16_go_on_beyond_2048():
    """There 2048 + 1 is 2048: a sum one by one would stop."""
    n = 4096
    ones = np.ones((n, 3), np.float16)
    layers = {"b": Projection(3, 3), "beta": LayerNorm(3), "gamma": RMSNormLayer(3)}
    for name, layer in layers.items():
        layer = cast(layer, np.float16)
        layer.forward(ones)
        layer.backward(ones)
        found = layer.gradients()[name]
        assert found.dtype == np.float16 and np.all(found == n), name
    table = cast(Embedding(2, 3), np.float16)
    table.forward(np.zeros(n, int))
    table.backward(ones)
    assert table.gradients()["weight"].tolist() == [[n] * 3, [0] * 3]
    columns = np.zeros((n, 2), np.float16, order="F")  # whose rows are not in one piece
    assert np.allclose(backprop.softmax(columns.T), 1 / n, rtol=1e-3)
    loss = CrossEntropy().forward(columns.T, np.zeros(2, int))
    assert loss.dtype == np.float16 and abs(loss - math.log(n)) < 0.01


def test_positions_of_many_short_texts_in_float16():
    model, found = cast(backprop.LanguageModel(2, 1, 4, 2, 1, rng=rng(0)), np.float16), []
    for texts in (1, 4096):
        logits = model.forward(np.zeros((texts, 1), int))
        model.backward(np.broadcast_to(np.float16([0.1, 0]), logits.shape))
        found.append(model.gradients()["positions"] / np.float16(texts))
    assert relative_error(*found) < 0.01


@pytest.mark.parametrize("kind", [backprop.SGD, backprop.Adam])
def test_steps_in_float16_are_finite_and_those_of_float64(kind):
    """A row without gradient has v = 0, and ε = 10⁻⁸ is 0 in float16."""
    found = []
    for dtype in (np.float64, np.float16):
        table = cast(Embedding(3, 2, rng(0)), dtype)
        optimizer = kind(table, lr=0.1)
        for _ in range(4):
            output = table.forward(np.array([0, 1]))
            table.backward(np.full_like(output, 1e-4))
            optimizer.step()
        assert table.weight.dtype == dtype
        found.append(table.weight.astype(float))
    assert np.allclose(*found, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_an_option_of_numpy_changes_no_dtype(name, dtype, number, as_shipped):
    """Neither that of the output and the gradients nor their numbers."""
    x, found = X.astype(dtype), []
    for kind in (float, lambda value: number(value)):
        made = NUMBERS[name]
        layer = cast(made(float if kind is float else kind), dtype)
        output = layer.forward(x)
        output = output[0] if isinstance(output, tuple) else output
        d_input = layer.backward(output)
        d_input = d_input[0] if isinstance(d_input, tuple) else d_input
        arrays = [output, d_input, *layer.gradients().values()]
        assert {array.dtype for array in arrays} == {np.dtype(dtype)}
        found.append(arrays)
    exact = number is np.float64
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0 if exact else 1e-2)


STEPS = {
    "lr": lambda layer, n: backprop.SGD(layer, n(0.1)),
    "momentum": lambda layer, n: backprop.SGD(layer, 0.1, n(0.3)),
    "lr of Adam": lambda layer, n: backprop.Adam(layer, n(0.1)),
    "betas": lambda layer, n: backprop.Adam(layer, betas=(n(0.9), n(0.99))),
    "eps": lambda layer, n: backprop.Adam(layer, eps=n(1e-8)),
}


@pytest.mark.parametrize("name", [*STEPS, "lr, changed"])
def test_a_rate_of_numpy_gives_the_same_steps(name, as_shipped):
    found = []
    for number in (float, np.float64):
        layer = cast(Projection(4, 4, rng=rng(1)), np.float32)
        optimizer = STEPS.get(name, STEPS["lr of Adam"])(layer, number)
        for step in range(3):
            if name == "lr, changed":
                optimizer.lr = number(0.1 / (step + 1))
            layer.forward(X.astype(np.float32))
            layer.backward(np.ones_like(X, np.float32))
            optimizer.step()
        found.append(layer.parameters())
    for key, array in found[0].items():
        assert found[1][key].dtype == np.float32
        rounded = 1e-6 if name == "lr, changed" else 0  # a number of float64 is kept
        np.testing.assert_allclose(array, found[1][key], rtol=rounded, atol=rounded)


WHOLE = {
    "in_features": lambda n: Projection(n, 2),
    "out_features": lambda n: Projection(2, n),
    "d_model": LayerNorm,
    "d_model ": backprop.RMSNormLayer,
    " d_model": FeedForwardNetwork,
    " d_model ": backprop.GatedFeedForwardLayer,
    "vocab_size": lambda n: Embedding(n, 2),
    "embed_dim": lambda n: backprop.MultiHeadAttention(n, 2),
    "num_heads": lambda n: backprop.MultiHeadAttention(4, n),
    "embed_dim ": lambda n: backprop.TransformerBlock(n, 2),
    "context_length": lambda n: backprop.LanguageModel(7, n, 4, 2, 1),
    "num_layers": lambda n: backprop.LanguageModel(7, 5, 4, 2, n),
}


@pytest.mark.parametrize("name", WHOLE)
def test_sizes_are_whole_numbers(name, as_shipped):
    for size in (4.0, True, "4", None):
        with refuses(f"{name.strip()}: expected a whole number, got {size!r}", TypeError):
            WHOLE[name](size)
