"""Backward through attention: three judges, planted mistakes, the promises of a layer."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlib
from attnlib.backprop import (
    Dropout,
    ScaledDotProductAttention,
    complex_step,
    gradient_check,
    relative_error,
    softmax,
    softmax_backward,
)

RNG = np.random.default_rng(0)


def draw(*leading, queries=4, keys=6, d_k=3, d_v=5, rng=RNG):
    """Query, key, value and d_output."""
    shapes = ((queries, d_k), (keys, d_k), (keys, d_v), (queries, d_v))
    return [rng.standard_normal((*leading, *shape)) for shape in shapes]


def by_autograd(options, query, key, value, d_output, mask):
    """Output, weights and gradients of chapter 1's module, by PyTorch."""
    tensors = [torch.tensor(x, requires_grad=True) for x in (query, key, value)]
    mask = None if mask is None else torch.tensor(mask)
    output, weights = attnlib.ScaledDotProductAttention(**options)(*tensors, mask)
    gradients = torch.autograd.grad((torch.tensor(d_output) * output).sum(), tensors)
    return output.detach(), weights.detach(), [gradient.numpy() for gradient in gradients]


ALLOWED = RNG.random((2, 3, 4, 6)) < 0.6
ALLOWED[0, 1, 2] = False  # a query that may attend to nothing
ADDED = np.where(ALLOWED, RNG.standard_normal((2, 3, 4, 6)), -np.inf)

CASES = {
    "one sequence": (draw(), None, {}),
    "batch and heads": (draw(2, 3), None, {}),
    "one token": (draw(2, queries=1, keys=1), None, {}),
    "one query": (draw(queries=1), None, {"causal": True}),
    "no keys": (draw(2, keys=0), None, {}),
    "no queries": (draw(2, queries=0), None, {}),
    "causal": (draw(2, keys=4), None, {"causal": True}),
    "causal, N < M": (draw(2), None, {"causal": True}),
    "causal, N > M": (draw(2, queries=6, keys=4), None, {"causal": True}),
    "scale": (draw(), None, {"scale": 0.3}),
    "no scale": (draw(), None, {"scale": 0.0}),
    "boolean mask": (draw(2, 3), ALLOWED, {}),
    "mask for all heads": (draw(2, 3), ALLOWED[:, :1], {}),
    "padding": (draw(2, 3), np.arange(6) < 4, {}),
    "nothing allowed": (draw(2), np.zeros((4, 6), dtype=bool), {}),
    "additive mask": (draw(2, 3), ADDED, {}),
    "additive mask for all queries": (draw(2), RNG.standard_normal(6), {}),
    "both masks": (draw(2, 3), ALLOWED, {"causal": True}),
}
each_case = pytest.mark.parametrize(
    ("arrays", "mask", "options"), CASES.values(), ids=CASES
)


@each_case
def test_equal_to_autograd(arrays, mask, options):
    output, weights, gradients = by_autograd(options, *arrays, mask)
    layer = ScaledDotProductAttention(**options)
    ours = layer.forward(*arrays[:3], mask)
    np.testing.assert_allclose(ours[0], output, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours[1], weights, rtol=0, atol=1e-12)
    for found, expected in zip(layer.backward(arrays[3]), gradients, strict=True):
        assert found.shape == expected.shape and np.isfinite(found).all()
        assert relative_error(found, expected) < 1e-10


@each_case
def test_equal_to_finite_differences(arrays, mask, options):
    layer = ScaledDotProductAttention(**options)
    errors = gradient_check(layer, *arrays[:3], mask=mask)
    assert list(errors) == ["query", "key", "value"] and max(errors.values()) < 1e-9


@each_case
def test_equal_to_complex_steps(arrays, mask, options, as_shipped):
    *inputs, d_output = arrays
    layer, used = ScaledDotProductAttention(**options), ScaledDotProductAttention(**options)
    layer.forward(*inputs, mask)
    for place, found in enumerate(layer.backward(d_output)):

        def function(x, place=place):
            moved = [array + 0j for array in inputs]
            moved[place] = x
            return d_output * used.forward(*moved, mask)[0]

        assert relative_error(found, complex_step(function, inputs[place])) < 1e-12


@given(
    st.lists(st.integers(0, 2), max_size=2).map(tuple),
    st.tuples(*[st.integers(1, 4)] * 4),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape(leading, sizes, causal, seed):
    rng = np.random.default_rng(seed)
    queries, keys, d_k, d_v = sizes
    arrays = draw(*leading, queries=queries, keys=keys, d_k=d_k, d_v=d_v, rng=rng)
    mask = rng.random((queries, keys)) < 0.7
    options = {"causal": causal}
    _, _, gradients = by_autograd(options, *arrays, mask)
    layer = ScaledDotProductAttention(**options)
    layer.forward(*arrays[:3], mask)
    for found, expected in zip(layer.backward(arrays[3]), gradients, strict=True):
        assert relative_error(found, expected) < 1e-10


def test_scores_of_ten_thousand():
    query, key, value, d_output = (1e3 * x for x in draw())
    layer = ScaledDotProductAttention()
    output, weights = layer.forward(query, key, value)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-12)
    assert np.isfinite(output).all()
    assert all(np.isfinite(gradient).all() for gradient in layer.backward(d_output))


# Softmax and its backward.


def test_softmax_equal_to_torch():
    scores = 5 * RNG.standard_normal((3, 4, 6))
    expected = torch.softmax(torch.tensor(scores), dim=-1)
    np.testing.assert_allclose(softmax(scores), expected, rtol=0, atol=1e-12)
    before = scores.copy()
    softmax(scores)
    assert (scores == before).all()  # not written to


def test_softmax_backward_is_the_jacobian():
    scores, d_weights = RNG.standard_normal(6), RNG.standard_normal(6)
    weights = softmax(scores)
    jacobian = np.diag(weights) - np.outer(weights, weights)
    found = softmax_backward(d_weights, weights)
    np.testing.assert_allclose(found, d_weights @ jacobian, rtol=0, atol=1e-12)
    assert abs(found.sum()) < 1e-12


def test_gradient_of_an_additive_mask():
    query, key, value, d_output = draw(2)
    added = torch.tensor(RNG.standard_normal(6), requires_grad=True)
    tensors = [torch.tensor(x) for x in (query, key, value)]
    output, weights = attnlib.ScaledDotProductAttention()(*tensors, added)
    (expected,) = torch.autograd.grad((torch.tensor(d_output) * output).sum(), added)
    d_weights = d_output @ value.swapaxes(-2, -1)
    found = softmax_backward(d_weights, weights.detach().numpy()).sum(axis=(0, 1))
    assert relative_error(found, expected.numpy()) < 1e-12


# Dropout.


def test_dropout_acts_in_training_only():
    query, key, value, d_output = draw(2)
    layer = ScaledDotProductAttention(0.5, rng=np.random.default_rng(1))
    plain = ScaledDotProductAttention()
    expected, weights = plain.forward(query, key, value)
    output, same_weights = layer.forward(query, key, value)
    assert not np.allclose(output, expected) and (weights == same_weights).all()
    assert not np.allclose(layer.backward(d_output)[2], plain.backward(d_output)[2])
    assert layer.eval() is layer and not layer.dropout.training
    np.testing.assert_array_equal(layer.forward(query, key, value)[0], expected)
    for a, b in zip(layer.backward(d_output), plain.backward(d_output), strict=True):
        np.testing.assert_array_equal(a, b)
    assert layer.train().dropout.training


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_dropout_gradients(probability):
    query, key, value, _ = draw(2)
    layer = ScaledDotProductAttention(probability, rng=np.random.default_rng(2))
    assert max(gradient_check(layer, query, key, value, mask=ALLOWED[:, 0]).values()) < 1e-9
    state = layer.dropout.rng.bit_generator.state
    gradient_check(layer, query, key, value)
    assert layer.dropout.rng.bit_generator.state == state  # the layer stays as it was


def test_dropout_keeps_the_mean():
    x = np.ones(100_000)
    layer = Dropout(0.3, np.random.default_rng(3))
    y = layer.forward(x)
    assert set(np.unique(y)) == {0.0, 1 / 0.7} and abs(y.mean() - 1) < 0.01
    np.testing.assert_array_equal(layer.backward(x), y)
    again = Dropout(0.3, np.random.default_rng(3)).forward(x)
    np.testing.assert_array_equal(again, y)


# The promises of a layer.


def test_backward_twice_is_the_same_and_keeps_the_cache():
    query, key, value, d_output = draw(2, 3)
    layer = ScaledDotProductAttention(0.3, rng=np.random.default_rng(4))
    inputs = [x.copy() for x in (query, key, value, d_output)]
    layer.forward(query, key, value, ALLOWED)
    cache = copy.deepcopy(layer._cache)
    first, second = layer.backward(d_output), layer.backward(d_output)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    for name, kept in cache.items():
        np.testing.assert_array_equal(layer._cache[name], kept)
    for a, b in zip((query, key, value, d_output), inputs, strict=True):
        np.testing.assert_array_equal(a, b)  # inputs are never written to
    linear = layer.backward(2 * d_output)
    for a, b in zip(first, linear, strict=True):
        np.testing.assert_allclose(2 * a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [None, ALLOWED, ADDED.astype(np.float32)])
def test_float32_stays_float32(mask):
    arrays = [x.astype(np.float32) for x in draw(2, 3)]
    layer = ScaledDotProductAttention(0.2, causal=True, scale=np.float64(0.5))
    results = [*layer.forward(*arrays[:3], mask), *layer.backward(arrays[3])]
    assert {x.dtype for x in results} == {np.dtype(np.float32)}


def test_memory_held_is_counted_once():
    query, key, value, _ = draw(2, 3)
    layer = ScaledDotProductAttention()
    assert layer.cache_bytes() == 0
    layer.forward(query, key, value)
    layer.forward(query, key, value)  # replaces what the first has kept
    weights = 2 * 3 * 4 * 6 * 8
    assert layer.cache_bytes() == query.nbytes + key.nbytes + value.nbytes + weights
    layer.forward(query, query, query)
    assert layer.cache_bytes() == query.nbytes + 2 * 3 * 4 * 4 * 8
    whole = RNG.standard_normal((4, 9))  # three views keep one array alive
    layer.forward(whole[:, :3], whole[:, 3:6], whole[:, 6:])
    assert layer.cache_bytes() == whole.nbytes + 4 * 4 * 8
    dropping = ScaledDotProductAttention(0.3)
    dropping.forward(query, key, value)
    assert dropping.cache_bytes() == query.nbytes + key.nbytes + value.nbytes + 3 * weights


Q, K, V, D = draw(2)


def after_forward(d_output):
    layer = ScaledDotProductAttention()
    layer.forward(Q, K, V)
    return layer.backward(d_output)


REFUSED = {
    "backward first": (
        lambda: ScaledDotProductAttention().backward(D),
        RuntimeError,
        "ScaledDotProductAttention: call forward before backward",
    ),
    "a gradient of the wrong shape": (
        lambda: after_forward(D[0]),
        ValueError,
        "d_output: expected shape (2, 4, 5) as the output, got (4, 5)",
    ),
    "a gradient of integers": (
        lambda: after_forward(np.ones(D.shape, dtype=int)),
        TypeError,
        "d_output: expected a floating-point array, got int64",
    ),
    "a gradient of another dtype": (
        lambda: after_forward(D.astype(np.float32)),
        TypeError,
        "d_output: expected float64, got float32",
    ),
    "no gradient": (
        lambda: after_forward(None),
        TypeError,
        "d_output: expected a floating-point array, got NoneType",
    ),
    "integers": (
        lambda: ScaledDotProductAttention().forward(np.ones((4, 3), dtype=int), K, V),
        TypeError,
        "query: expected a floating-point array, got int64",
    ),
    "a list for the query": (
        lambda: ScaledDotProductAttention().forward([[1.0]], K, V),
        TypeError,
        "query: expected a floating-point array, got list",
    ),
    "a list": (
        lambda: ScaledDotProductAttention().forward(Q, [[1.0]], V),
        TypeError,
        "key: expected a floating-point array, got list",
    ),
    "mixed dtypes": (
        lambda: ScaledDotProductAttention().forward(Q, K, V.astype(np.float32)),
        TypeError,
        "value: expected float64, got float32",
    ),
    "rank 1": (
        lambda: ScaledDotProductAttention().forward(Q[0, 0], K, V),
        ValueError,
        "query: expected at least 2 dimensions (tokens, features), got shape (3,)",
    ),
    "another batch": (
        lambda: ScaledDotProductAttention().forward(Q, K[:1], V),
        ValueError,
        "key: expected leading dimensions (2,) as query, got shape (1, 6, 3)",
    ),
    "mismatched d_k": (
        lambda: ScaledDotProductAttention().forward(Q, K[..., :2], V),
        ValueError,
        "key: expected d_k = 3 features as query, got shape (2, 6, 2)",
    ),
    "no features": (
        lambda: ScaledDotProductAttention().forward(Q[..., :0], K[..., :0], V),
        ValueError,
        "key: expected d_k ≥ 1, got shape (2, 6, 0)",
    ),
    "mismatched lengths": (
        lambda: ScaledDotProductAttention().forward(Q, K, V[:, :5]),
        ValueError,
        "value: expected 6 tokens as key, got shape (2, 5, 5)",
    ),
    "a mask of integers": (
        lambda: ScaledDotProductAttention().forward(Q, K, V, np.ones((4, 6), dtype=int)),
        TypeError,
        "mask: expected a boolean array (True = may attend) or a float64 array that is "
        "added to the scores, got int64",
    ),
    "a mask of another dtype": (
        lambda: ScaledDotProductAttention().forward(Q, K, V, np.ones(6, np.float32)),
        TypeError,
        "mask: expected a boolean array (True = may attend) or a float64 array that is "
        "added to the scores, got float32",
    ),
    "a mask of a wrong shape": (
        lambda: ScaledDotProductAttention().forward(Q, K, V, np.ones((6, 4), dtype=bool)),
        ValueError,
        "mask: expected a shape that broadcasts to that of the scores, (2, 4, 6), "
        "got (6, 4)",
    ),
    "a mask of too many dimensions": (
        lambda: ScaledDotProductAttention().forward(Q, K, V, np.ones((1, 1, 4, 6)) > 0),
        ValueError,
        "mask: expected a shape that broadcasts to that of the scores, (2, 4, 6), "
        "got (1, 1, 4, 6)",
    ),
    "a probability of 1.5": (
        lambda: ScaledDotProductAttention(1.5),
        ValueError,
        "dropout: expected a probability between 0 and 1, got 1.5",
    ),
    "no probability": (
        lambda: Dropout(float("nan")),
        ValueError,
        "dropout: expected a probability between 0 and 1, got nan",
    ),
    "dropout of integers": (
        lambda: Dropout(0.5).forward(np.ones(3, dtype=int)),
        TypeError,
        "input: expected a floating-point array, got int64",
    ),
    "a gradient check in float32": (
        lambda: gradient_check(Dropout(0.0), np.ones(3, np.float32)),
        TypeError,
        "input: expected float64, got float32",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message, as_shipped):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_no_torch_in_backprop():
    from pathlib import Path

    folder = Path(attnlib.__file__).parent / "backprop"
    for path in set(folder.glob("*.py")) - {folder / "autograd.py"}:  # the way to PyTorch
        text = path.read_text(encoding="utf-8")
        imports = [line for line in text.splitlines() if "import" in line.split()]
        assert not [line for line in imports if "torch" in line], path.name
        ours = [line for line in imports if "attnlib" in line]
        assert all(line.startswith("from attnlib.backprop") for line in ours), path.name
        assert not [line for line in ours if "autograd" in line], path.name
