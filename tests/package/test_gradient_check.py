"""The check of gradients finds planted mistakes, and says where they are."""

import copy

import numpy as np
import pytest

from attnlib.backprop import (
    CrossEntropy,
    FeedForwardNetwork,
    Projection,
    ScaledDotProductAttention,
    SiLU,
    complex_step,
    finite_differences,
    gradient_check,
    relative_error,
    softmax,
)
from attnlib.backprop.gradient_check import what_differs
from drawn import draw, refuses

RNG = np.random.default_rng(0)


QKV = [x.numpy() for x in draw(d_k=3, d_v=5)]
ALLOWED = RNG.random((4, 6)) < 0.6


class Mistaken(ScaledDotProductAttention):
    """Backward as in the chapter, with one mistake."""

    mistake = ""

    def backward(self, d_output):
        kept = self.recall(d_output)
        query, key, value, weights = (
            kept[name] for name in ("query", "key", "value", "weights")
        )
        if self.mistake == "mask ignored in backward":
            weights = softmax(kept["scale"] * query @ key.swapaxes(-2, -1))
        d_weights = d_output @ value.swapaxes(-2, -1)
        mean = (d_weights * weights).sum(axis=-1, keepdims=True)
        if self.mistake == "forgotten sum in softmax":
            mean = 0.0
        d_scores = weights * (d_weights - mean)
        if self.mistake != "missing scale":
            d_scores = d_scores * kept["scale"]
        gradients = (
            d_scores @ key,
            d_scores.swapaxes(-2, -1) @ query,
            weights.swapaxes(-2, -1) @ d_output,
        )
        if self.mistake == "a wrong shape":
            return gradients[0], gradients[1].swapaxes(-2, -1), gradients[2]
        if self.mistake == "not a number":
            gradients[2][0, 0] = np.nan
        return gradients[:2] if self.mistake == "a gradient too few" else gradients


MISTAKES = {
    "missing scale": "query: the gradient is wrong, by 4.2e-01: it is 1.732 times what is",
    "forgotten sum in softmax": "query: the gradient is wrong, by ",
    "mask ignored in backward": "query: the gradient is wrong, by ",
    "not a number": "value: the gradient is wrong, by nan: at (0, 0) it is nan, expected ",
    "a wrong shape": "key: the gradient has shape (3, 6), the array has (6, 3)",
    "a gradient too few": "backward gives 2 gradients, expected 3, those of query, key,",
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.items(), ids=MISTAKES)
def test_gradient_check_finds(mistake, message, as_shipped):
    layer = Mistaken()
    gradient_check(layer, *QKV, mask=ALLOWED)
    layer.mistake = mistake
    with refuses(f"{message}…", AssertionError):
        gradient_check(layer, *QKV, mask=ALLOWED)


def test_gradient_check_of_other_inputs(as_shipped):
    """A mask, which gets no gradient, one array given three times, and a loss."""
    with pytest.raises(AssertionError, match=r"3 gradients, expected 4, those of .*mask"):
        gradient_check(ScaledDotProductAttention(), *QKV, RNG.random((4, 6)))
    assert max(gradient_check(ScaledDotProductAttention(), X, X, X).values()) < 1e-9
    loss, targets = CrossEntropy(), np.array([1, 0, 0, 1])
    assert list(gradient_check(loss, X, targets)) == ["logits"]
    with refuses("logits: the gradient is wrong, by …: it is 4 times…", AssertionError):
        gradient_check(SummedLoss(), X, targets)


class SummedLoss(CrossEntropy):
    def backward(self):
        return 4 * super().backward()


class TooLarge(Projection):
    def backward(self, d_output):
        d_input = super().backward(d_output)
        self._gradients["W"] = 1.002 * self._gradients["W"]
        return d_input


class NotSummed(Projection):
    def backward(self, d_output):
        d_input = super().backward(d_output)
        self._gradients["b"] = d_output
        return d_input


X, NAMES = RNG.standard_normal((4, 2)), ["linear_1.W", "linear_1.b", "linear_2.W"]


def test_gradient_check_covers_the_parameters_of_all_parts():
    layer = FeedForwardNetwork(2, 3, activation=SiLU())
    before = copy.deepcopy(layer.parameters())
    errors = gradient_check(layer, X)
    assert list(errors) == ["input", *NAMES, "linear_2.b"]
    assert layer.linear_1._cache is None  # the check worked on a copy
    for name, array in layer.parameters().items():
        np.testing.assert_array_equal(array, before[name])
    for made, words in (
        (TooLarge, "W: the gradient is wrong, by 2.0e-03: it is 1.002 times…"),
        (NotSummed, "b: the gradient has shape (4, 2), the array has (2,)"),
    ):
        layer.linear_2 = made(3, 2)
        with refuses(f"linear_2.{words}", AssertionError):
            gradient_check(layer, X)


def test_parameters_and_gradients_have_the_same_keys():
    assert ScaledDotProductAttention().parameters() == {}
    assert ScaledDotProductAttention().gradients() == {}
    layer = FeedForwardNetwork(2, 3)
    layer._kept = np.ones(2)  # what begins with an underscore is no parameter
    assert list(layer.parameters()) == [*NAMES, "linear_2.b"]
    assert layer.parameters()["linear_1.W"] is layer.linear_1.W
    with refuses("Projection: no gradient of W, b: call backward first", RuntimeError):
        layer.gradients()
    layer.backward(layer.forward(X))
    assert list(layer.gradients()) == list(layer.parameters())


SQUARE = np.arange(9.0).reshape(3, 3)
MOVED = SQUARE + np.array([[0, 0, 0], [0, 0, 1e-6], [0, 0, 0]])
DIFFERS = {
    "transposed": (SQUARE.T, SQUARE, "it is the transpose of what is expected"),
    "a factor": (-2 * SQUARE, SQUARE, "it is -2 times what is expected"),
    "a small factor": (0 * SQUARE, SQUARE, "it is 0 times what is expected"),
    "a factor of two": (2 * SQUARE[0], SQUARE[0], "it is 2 times what is expected"),
    "hardly a factor": (1.0008 * SQUARE, SQUARE, "at (2, 2) it is 8.01, expected 8"),
    "no factor": (np.arange(3.0), np.array([0, 1, 3]), "at (2,) it is 2, expected 3"),
    "three digits": (np.array(2.71828), 3.0, "it is 2.72, expected 3"),
    "the last digit": (
        *(np.array(0.1 + 0.2), 0.3),
        "it is 0.30000000000000004, expected 0.29999999999999999",
    ),
    "one entry": (MOVED, SQUARE, "at (1, 2) it is 5.000001, expected 5"),
    "nothing expected": (np.ones(2), np.zeros(2), "at (0,) it is 1, expected 0"),
    "a number": (np.float64(3), 4.0, "it is 3, expected 4"),
    "not a number": (np.array([1, np.nan]), np.ones(2), "at (1,) it is nan, expected 1"),
    "equal": (SQUARE, SQUARE, "at (0, 0) it is 0, expected 0"),
}


@pytest.mark.parametrize(("found", "expected", "words"), DIFFERS.values(), ids=DIFFERS)
def test_what_differs(found, expected, words, as_shipped):
    assert what_differs(found, expected) == words


def test_a_function_may_return_its_own_argument():
    """A part of it, too: it is moved on before the four values are taken together."""
    x = RNG.standard_normal((2, 3))
    for function in (lambda x: x, lambda x: x.T, lambda x: x[:1]):
        expected = np.zeros_like(x)
        function(expected)[...] = 1.0
        for gradient in (finite_differences(function, x), complex_step(function, x)):
            assert relative_error(gradient, expected) < 1e-10


def test_differences_and_steps_leave_the_array_alone():
    x = RNG.standard_normal((2, 3))
    before = x.copy()
    for gradient in (finite_differences(np.sin, x), complex_step(np.sin, x)):
        assert relative_error(gradient, np.cos(x)) < 1e-10
        np.testing.assert_array_equal(x, before)
    assert relative_error(np.array([1e-9]), np.array([0.0])) == pytest.approx(1e-6)
    assert relative_error(np.ones(0), np.ones(0)) == 0
