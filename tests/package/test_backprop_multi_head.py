"""Backward through several heads: three judges, planted mistakes, what is refused."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlib
from attnlib.backprop import (
    SGD,
    Adam,
    LanguageModel,
    Layer,
    MultiHeadAttention,
    Projection,
    ScaledDotProductAttention,
    TransformerBlock,
    cast,
    complex_step,
    gradient_check,
    relative_error,
)
from attnlib.backprop.multi_head import EachHead, merge_heads, split_heads

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.standard_normal(shape)


def torch_copy(ours, theirs):
    """The PyTorch namesake with our numbers, in float64."""
    for name, array in ours.parameters().items():
        theirs.get_parameter(name).data = torch.tensor(array)
    return theirs


EMPTY_ROW = np.array([[True, True, False], [False, False, False], [True, False, True]])
PER_HEAD = RNG.random((2, 2, 3, 3)) < 0.6
ADDED = np.where(RNG.random((2, 1, 3, 3)) < 0.7, draw(2, 1, 3, 3), -np.inf)
CAUSAL = {"causal": True}
CASES = {
    "self": ({}, [draw(3, 4)], None),
    "batch": ({}, [draw(2, 3, 4)], None),
    "two leading dimensions": ({}, [draw(2, 2, 3, 4)], None),
    "keys of their own": ({}, [draw(2, 3, 4), draw(2, 5, 4)], None),
    "keys and values": ({}, [draw(2, 3, 4), draw(2, 5, 4), draw(2, 5, 4)], None),
    "one token": ({}, [draw(1, 1, 4)], None),
    "one key": ({}, [draw(3, 4), draw(1, 4)], None),
    "no bias": ({"bias": False}, [draw(3, 4)], None),
    "one head of four": ({"num_heads": 1}, [draw(3, 4)], None),
    "four heads of one": ({"num_heads": 4}, [draw(3, 4)], None),
    "causal": ({"attention": CAUSAL}, [draw(2, 3, 4)], None),
    "causal, more keys": ({"attention": CAUSAL}, [draw(2, 4), draw(5, 4)], None),
    "causal, more queries": ({"attention": CAUSAL}, [draw(5, 4), draw(2, 4)], None),
    "empty row": ({}, [draw(2, 3, 4)], EMPTY_ROW),
    "mask for each head": ({}, [draw(2, 3, 4)], PER_HEAD),
    "added": ({}, [draw(2, 3, 4)], ADDED),
    "list of heads": ({"attention": [{"scale": 0.3}, CAUSAL]}, [draw(2, 3, 4)], PER_HEAD),
    "list, one mask": ({"attention": [{"scale": 0.3}, CAUSAL]}, [draw(2, 3, 4)], EMPTY_ROW),
    "list, added": ({"attention": [CAUSAL, {"scale": 2.0}]}, [draw(2, 3, 4)], ADDED),
}


def make(library, options, **more):
    """The layer from `attnlib` or `attnlib.backprop`, its heads made there too."""
    options = {"num_heads": 2, **options, **more}
    heads = options.pop("attention", None)
    one = library.ScaledDotProductAttention
    if isinstance(heads, list):
        heads = [one(**head) for head in heads]
    elif heads is not None:
        heads = one(**heads)
    return library.MultiHeadAttention(4, attention=heads, **options)


def given_gradients(layer, d_output):
    return [d for d in layer.backward(d_output) if d is not None]


each_case = pytest.mark.parametrize(
    ("options", "inputs", "mask"), CASES.values(), ids=CASES
)


@each_case
def test_multi_head_equal_to_autograd(options, inputs, mask):
    ours = make(attnlib.backprop, options, rng=np.random.default_rng(1))
    theirs = torch_copy(ours, make(attnlib, options).double())
    output, weights = ours.forward(*inputs, mask=mask)
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected, their_weights = theirs(
        *tensors, mask=None if mask is None else torch.tensor(mask)
    )
    np.testing.assert_allclose(output, expected.detach(), rtol=0, atol=1e-12)
    for a, b in zip(weights, their_weights, strict=True):
        np.testing.assert_allclose(a, b.detach(), rtol=0, atol=1e-12)
    d_output = draw(*output.shape)
    found = [*given_gradients(ours, d_output), *ours.gradients().values()]
    parameters = [theirs.get_parameter(name) for name in ours.parameters()]
    judged = torch.autograd.grad(expected, [*tensors, *parameters], torch.tensor(d_output))
    for a, b in zip(found, judged, strict=True):
        assert a.shape == tuple(b.shape)
        assert relative_error(a, b.numpy()) < 1e-11


@pytest.mark.parametrize("case", ["keys and values", "mask for each head", "list of heads"])
def test_multi_head_equal_to_finite_differences(case):
    """The slowest judge; the other two hear every case."""
    options, inputs, mask = CASES[case]
    layer = make(attnlib.backprop, options, rng=np.random.default_rng(1))
    errors = gradient_check(layer, *inputs, mask=mask)
    assert len(errors) == len(inputs) + (4 if options.get("bias") is False else 8)


@each_case
def test_multi_head_equal_to_complex_steps(options, inputs, mask, as_shipped):
    layer = make(attnlib.backprop, options, rng=np.random.default_rng(1))
    d_output = draw(*layer.forward(*inputs, mask=mask)[0].shape)
    found = [*given_gradients(layer, d_output), *layer.gradients().values()]
    analytic = cast(copy.deepcopy(layer), complex)
    inputs = [x.astype(complex) for x in inputs]

    def of_input(i):
        def moved(z):
            arrays = [*inputs[:i], z, *inputs[i + 1 :]]
            return d_output * analytic.forward(*arrays, mask=mask)[0]

        return moved

    def of_parameter(array):
        def moved(z):
            start = array.copy()
            array[...] = z
            output = analytic.forward(*inputs, mask=mask)[0]
            array[...] = start
            return d_output * output

        return moved

    exact = [complex_step(of_input(i), x.real) for i, x in enumerate(inputs)]
    for array in analytic.parameters().values():
        exact.append(complex_step(of_parameter(array), array.real))
    for a, b in zip(found, exact, strict=True):
        assert relative_error(a, b) < 1e-12


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5), st.integers(1, 5))
def test_any_sizes(heads, d_k, queries, keys):
    layer = MultiHeadAttention(heads * d_k, heads, rng=np.random.default_rng(2))
    query, key = draw(2, queries, heads * d_k), draw(2, keys, heads * d_k)
    output, weights = layer.forward(query, key)
    assert output.shape == query.shape and len(weights) == heads
    assert weights[0].shape == (2, queries, keys)
    d_query, d_key, d_value = layer.backward(draw(*output.shape))
    assert d_query.shape == query.shape and d_key.shape == key.shape and d_value is None


def test_split_and_merge_are_inverse_and_the_heads_blocks_of_columns():
    x = draw(2, 5, 12)
    np.testing.assert_array_equal(merge_heads(split_heads(x, 3)), x)
    np.testing.assert_array_equal(split_heads(x, 3)[:, 1], x[..., 4:8])


# Mistakes that a multi-head layer invites.


class ForgetsTheKeys(MultiHeadAttention):
    def backward(self, d_output):
        d_query, _, _ = super().backward(d_output)
        d_heads = split_heads(self.out_proj.backward(d_output), self.num_heads)
        _, d_k, _ = self.attention.backward(d_heads)
        return d_query - self.k_proj.backward(merge_heads(d_k)), None, None


class SplitsByReshape(MultiHeadAttention):
    def backward(self, d_output):
        d = self.out_proj.backward(d_output)
        heads = d.reshape(*d.shape[:-2], self.num_heads, d.shape[-2], -1)
        d_q, d_k, d_v = (merge_heads(d) for d in self.attention.backward(heads))
        d_query = self.q_proj.backward(d_q) + self.k_proj.backward(d_k)
        return d_query + self.v_proj.backward(d_v), None, None


class SkipsTheOutputProjection(MultiHeadAttention):
    def backward(self, d_output):
        super().backward(d_output)
        d_heads = split_heads(d_output, self.num_heads)
        d_q, d_k, d_v = (merge_heads(d) for d in self.attention.backward(d_heads))
        d_query = self.q_proj.backward(d_q) + self.k_proj.backward(d_k)
        return d_query + self.v_proj.backward(d_v), None, None


@pytest.mark.parametrize(
    "mistake", [ForgetsTheKeys, SplitsByReshape, SkipsTheOutputProjection]
)
def test_planted_mistakes_are_found(mistake):
    with pytest.raises(AssertionError, match="query: the gradient is wrong"):
        gradient_check(mistake(4, 2, rng=RNG), draw(3, 4))


# The contract of a layer.


def test_backward_twice_and_inputs_untouched():
    layer = MultiHeadAttention(4, 2, rng=RNG)
    x, d_output = draw(2, 3, 4), draw(2, 3, 4)
    before = x.copy(), d_output.copy()
    output, weights = layer.forward(x)
    kept = [output.copy(), *(w.copy() for w in weights)]
    first, gradients = layer.backward(d_output)[0], layer.gradients()
    again = layer.backward(d_output)[0]
    np.testing.assert_array_equal(first, again)
    for name, gradient in layer.gradients().items():
        np.testing.assert_array_equal(gradient, gradients[name])
    for a, b in zip([output, *weights], kept, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(d_output, before[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_dtype_is_kept(dtype):
    layer = cast(TransformerBlock(4, 2, dropout=0.2, rng=RNG), dtype)
    output = layer.forward(draw(2, 3, 4).astype(dtype))
    d_input = layer.backward(np.ones((2, 3, 4), dtype))
    arrays = [output, d_input, *layer.gradients().values()]
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}


def test_attention_can_be_a_class_an_instance_or_a_list():
    class Mean(Layer):
        """Every query gets the mean of the values."""

        def forward(self, query, key, value, mask=None):
            mean = value.mean(axis=-2, keepdims=True)
            output = np.broadcast_to(mean, query.shape).copy()
            self.remember(output, shapes=(query.shape, key.shape))
            return output, None

        def backward(self, d_output):
            query, key = self.recall(d_output)["shapes"]
            mean = d_output.sum(axis=-2, keepdims=True) / key[-2]
            return np.zeros(query), np.zeros(key), np.broadcast_to(mean, key).copy()

    x = draw(3, 4)
    assert MultiHeadAttention(4, 2, Mean, rng=RNG).forward(x)[1] is None
    assert MultiHeadAttention(4, 2, [Mean(), Mean()], rng=RNG).forward(x)[1] is None
    for heads in (Mean, Mean(), [Mean(), ScaledDotProductAttention()]):
        layer = MultiHeadAttention(4, 2, heads, rng=RNG)
        assert max(gradient_check(layer, x).values()) < 1e-9
    _, weights = layer.forward(x)
    assert weights[0] is None and weights[1].shape == (3, 3)


def test_a_head_with_parameters_reports_their_gradients():
    class Scaled(ScaledDotProductAttention):
        """The output times a learned number."""

        def __init__(self):
            super().__init__()
            self.gain = np.array([1.5])

        def forward(self, query, key, value, mask=None):
            self._unscaled, weights = super().forward(query, key, value, mask)
            return self.gain * self._unscaled, weights

        def backward(self, d_output):
            self._gradients = {"gain": np.array([(d_output * self._unscaled).sum()])}
            return super().backward(self.gain * d_output)

    layer = MultiHeadAttention(4, 2, [Scaled(), Scaled()], rng=RNG)
    names = list(gradient_check(layer, draw(3, 4)))
    assert names[-2:] == ["attention.0.gain", "attention.1.gain"]


def test_one_generator_decides_about_everything_random():
    def block():
        return TransformerBlock(4, 2, dropout=0.5, rng=np.random.default_rng(3))

    def model():
        rng = np.random.default_rng(3)
        return LanguageModel(5, 4, 4, 2, 1, dropout=0.5, rng=rng)

    for make, x in ((block, draw(3, 4)), (model, np.arange(4))):
        np.testing.assert_array_equal(make().forward(x), make().forward(x))


def test_a_block_passes_its_mask_on():
    block, x = TransformerBlock(4, 2, rng=RNG), draw(3, 4)
    before = block.forward(x, np.tri(3, dtype=bool))
    x[2] = draw(4)  # nobody but the last token sees it
    after = block.forward(x, np.tri(3, dtype=bool))
    np.testing.assert_allclose(before[:2], after[:2], rtol=0, atol=1e-14)


REFUSED = {
    "embed_dim": (lambda: MultiHeadAttention(6, 4), ValueError, "embed_dim: .* 4, got 6"),
    "no heads": (lambda: MultiHeadAttention(6, 0), ValueError, "embed_dim: "),
    "no attention": (lambda: MultiHeadAttention(4, 2, "x"), TypeError, "attention: "),
    "half a list of heads": (
        lambda: MultiHeadAttention(4, 2, [ScaledDotProductAttention(), "x"]),
        TypeError,
        "attention: expected a Layer with a backward",
    ),
    "too few": (
        lambda: MultiHeadAttention(4, 2, [ScaledDotProductAttention()]),
        ValueError,
        "attention: expected 2 instances, one a head, got 1",
    ),
    "backward first": (
        lambda: MultiHeadAttention(4, 2).backward(draw(3, 4)),
        RuntimeError,
        "MultiHeadAttention: call forward before backward",
    ),
    "heads first": (
        lambda: EachHead([ScaledDotProductAttention()]).backward(draw(1, 3, 4)),
        RuntimeError,
        "EachHead: call forward before backward",
    ),
    "block first": (
        lambda: TransformerBlock(4, 2).backward(draw(3, 4)),
        RuntimeError,
        "TransformerBlock: call forward before backward",
    ),
    "model first": (
        lambda: LanguageModel(5, 4, 4, 2, 1).backward(draw(3, 5)),
        RuntimeError,
        "LanguageModel: call forward before backward",
    ),
    "integers": (
        lambda: MultiHeadAttention(4, 2).forward(np.ones((3, 4), int)),
        TypeError,
        "query: expected a floating-point array, got int64",
    ),
    "another dtype": (
        lambda: MultiHeadAttention(4, 2).forward(draw(3, 4), draw(3, 4).astype("f4")),
        TypeError,
        "key: expected float64 as the parameters, got float32",
    ),
    "values of another width": (
        lambda: MultiHeadAttention(4, 2).forward(draw(3, 4), None, draw(3, 5)),
        ValueError,
        "value: expected at least 2 dimensions, the last of 4 features",
    ),
    "one dimension": (
        lambda: MultiHeadAttention(4, 2).forward(draw(4)),
        ValueError,
        "query: expected at least 2 dimensions",
    ),
    "a mask with three dimensions": (
        lambda: MultiHeadAttention(4, 2).forward(draw(3, 4), mask=np.ones((1, 3, 3), bool)),
        ValueError,
        "mask: expected 2 dimensions .* or 4 .*, got shape",
    ),
    "a mask of integers": (
        lambda: MultiHeadAttention(4, 2).forward(draw(3, 4), mask=np.ones((3, 3), int)),
        TypeError,
        "mask: expected a boolean array",
    ),
    "not a mask": (
        lambda: MultiHeadAttention(4, 2).forward(draw(3, 4), mask="causal"),
        ValueError,
        "mask: ",
    ),
    "too long": (
        lambda: LanguageModel(5, 4, 4, 2, 1).forward(np.zeros(5, int)),
        ValueError,
        "ids: expected at most context_length = 4 tokens",
    ),
    "no tokens": (
        lambda: LanguageModel(5, 4, 4, 2, 1).forward(np.array(3)),
        ValueError,
        "ids: ",
    ),
    "ids as numbers": (
        lambda: LanguageModel(5, 4, 4, 2, 1).forward(np.zeros(3)),
        TypeError,
        "ids: expected an array of integers, got float64",
    ),
    "one word without a dimension": (
        lambda: LanguageModel(5, 4, 4, 2, 1).forward(np.array(3)),
        ValueError,
        r"ids: expected at most context_length = 4 tokens in the last dimension, got \(\)",
    ),
    "unknown word": (
        lambda: LanguageModel(5, 4, 4, 2, 1).forward(np.array([5])),
        IndexError,
        "ids: expected integers from 0 to 4",
    ),
    "no layers": (
        lambda: LanguageModel(5, 4, 4, 2, 0),
        ValueError,
        "num_layers: expected at least 1, got 0",
    ),
    "lr": (lambda: SGD(Projection(2, 2), lr=-1.0), ValueError, r"lr: .* got -1"),
    "lr NaN": (lambda: Adam(Projection(2, 2), lr=np.nan), ValueError, "lr: .* got nan"),
    "momentum": (
        lambda: SGD(Projection(2, 2), momentum=1.0),
        ValueError,
        r"momentum: expected a number in \[0, 1\), got 1",
    ),
    "betas": (
        lambda: Adam(Projection(2, 2), betas=(0.9, 1.0)),
        ValueError,
        "betas: ",
    ),
    "step first": (
        lambda: Adam(Projection(2, 2)).step(),
        RuntimeError,
        "Projection: no gradient of W, b: call backward first",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message, as_shipped):
    with pytest.raises(error, match=message):
        call()


def test_a_wrong_gradient_is_refused():
    model = LanguageModel(5, 4, 4, 2, 1, rng=RNG)
    model.forward(np.zeros((2, 3), int))
    with pytest.raises(ValueError, match=r"d_output: expected shape \(2, 3, 5\)"):
        model.backward(draw(2, 3, 4))
    with pytest.raises(TypeError, match="d_output: expected float64, got float32"):
        model.backward(draw(2, 3, 5).astype(np.float32))
