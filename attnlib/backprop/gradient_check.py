# Made from book/10_backward_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Gradients without any derivation, to compare a backward with.

Derived in chapter 10, "Backward through attention" (book/10_backward_attention.ipynb).
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from attnlib.backprop.base import Layer


def finite_differences(
    function: Callable[[np.ndarray], Any], array: np.ndarray, step: float = 1e-3
) -> np.ndarray:
    """The gradient of a function by differences of fourth order, entry by entry.

    Args:
        function: of an array like the one given, which it may return; if its result is an
            array, the gradient is that of the sum.
        array: where to take the gradient, float64; not written to.
        step: h; the error is of the order of h⁴ plus 1e-16/h.

    Returns:
        An array of the same shape.

    Source: chapter 10, eq-five-point.
    """
    moved, gradient = array.copy(), np.zeros_like(array)
    for index in np.ndindex(array.shape):
        values = []
        for steps in (-2, -1, 1, 2):
            moved[index] = array[index] + steps * step
            values.append(np.copy(function(moved)))
        moved[index] = array[index]
        difference = (values[0] - values[3]) + 8 * (values[2] - values[1])
        gradient[index] = np.sum(difference) / (12 * step)
    return gradient


def complex_step(
    function: Callable[[np.ndarray], Any], array: np.ndarray, step: float = 1e-30
) -> np.ndarray:
    """The gradient of an analytic function to the last digit, from its imaginary part.

    Args:
        function: as in `finite_differences`, and made of operations that are analytic and
            accept complex arrays: no absolute value, no maximum that matters.
        array: where to take the gradient, float64; not written to.
        step: h; nothing is subtracted, so it may be as small as one likes.

    Returns:
        An array of the same shape.

    Source: chapter 10, eq-complex-step.
    """
    moved, gradient = array.astype(np.complex128), np.zeros_like(array)
    for index in np.ndindex(array.shape):
        moved[index] = array[index] + 1j * step
        gradient[index] = np.sum(function(moved)).imag / step
        moved[index] = array[index]
    return gradient


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of two arrays, relative to their largest entry.

    Where all entries are below 1e-3, it is relative to 1e-3: a gradient that should be 0
    may be 1e-15.

    Source: chapter 10, eq-relative-error.
    """
    size = max(np.abs(found).max(initial=1e-3), np.abs(expected).max(initial=1e-3))
    return float(np.abs(found - expected).max(initial=0.0) / size)


def what_differs(found: np.ndarray, expected: np.ndarray) -> str:
    """How an array of the expected shape differs from what is expected, in words.

    A transposed matrix and a constant factor are recognized; of anything else it says where
    the difference is largest: `at (0, 2) it is 3, expected 4`.

    Source: chapter 10, eq-relative-error.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    square = found.ndim == 2 and found.T.shape == expected.shape
    if square and relative_error(found.T, expected) < 1e-6:
        return "it is the transpose of what is expected"
    if found.size > 1 and expected.any():
        factor = np.vdot(expected, found) / np.vdot(expected, expected)
        if abs(factor - 1) > 1e-3 and relative_error(found, factor * expected) < 1e-6:
            return f"it is {factor:.4g} times what is expected"
    index = np.unravel_index(np.abs(found - expected).argmax(), found.shape)
    place = f"at {tuple(map(int, index))} " if index else ""
    for digits in range(3, 18):  # as many as it takes to tell the two apart
        seen, wanted = (f"{x[index]:.{digits}g}" for x in (found, expected))
        if seen != wanted:
            break
    return f"{place}it is {seen}, expected {wanted}"


def differentiable(layer: Layer, inputs: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """The arrays with a gradient: inputs, by their names in forward, then parameters.

    Raises:
        TypeError: one of them is floating point, but not float64.

    Source: chapter 10, eq-five-point.
    """
    names = inspect.signature(layer.forward).parameters
    arrays = {
        name: array
        for name, array in zip(names, inputs, strict=False)
        if isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)
    }
    arrays |= layer.parameters()
    for name, array in arrays.items():
        if array.dtype != np.float64:
            raise TypeError(f"{name}: expected float64, got {array.dtype}")
    return arrays


def run_copy(
    layer: Layer, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Layer, Any]:
    """A copy of the layer that has run forward, and the output.

    Source: chapter 10, eq-five-point.
    """
    layer = copy.deepcopy(layer)
    layer.forget()  # an earlier forward is none of this run's
    output = layer.forward(*inputs, **options)
    return layer, output[0] if isinstance(output, tuple) else output


def gradient_check(
    layer: Layer,
    *inputs: Any,
    step: float = 1e-3,
    tolerance: float = 1e-8,
    seed: int = 0,
    **options: Any,
) -> dict[str, float]:
    """Compares every gradient that a layer computes with finite differences.

    The loss is a sum of the entries of the output with random weights. Where forward gives
    a tuple, the output is its first entry; where it gives a single number, that is the
    loss, and backward is called without arguments. Every forward runs in a fresh copy of
    the layer, so that dropout drops the same entries each time and the layer stays as it
    is.

    Args:
        layer: its parameters in float64.
        inputs: of forward; float64, or without a gradient: integers, booleans, `None`.
        step: h of `finite_differences`.
        tolerance: the largest relative error allowed.
        seed: of the weights in the loss.
        options: keyword arguments of forward, such as a mask.

    Returns:
        The relative error of each input, by its name in forward, and of each parameter.

    Raises:
        AssertionError: a gradient is wrong; says which, by how much, and what differs.
        TypeError: an input or a parameter is floating point, but not float64.

    Source: chapter 10, eq-five-point, eq-relative-error.
    """
    layer, inputs = copy.deepcopy(layer), tuple(map(copy.deepcopy, inputs))
    arrays = differentiable(layer, inputs)
    ran, output = run_copy(layer, inputs, options)
    if np.ndim(output) == 0:
        weights, found = 1.0, ran.backward()
    else:
        weights = np.random.default_rng(seed).standard_normal(output.shape)
        found = ran.backward(weights)
    found = found if isinstance(found, tuple) else (found,)
    found = [gradient for gradient in found if gradient is not None]
    found += ran.gradients().values()
    if len(found) != len(arrays):
        names = f"{len(arrays)}, those of {', '.join(arrays)}"
        raise AssertionError(f"backward gives {len(found)} gradients, expected {names}")

    errors = {}
    for (name, array), gradient in zip(arrays.items(), found, strict=True):
        if np.shape(gradient) != array.shape:
            shapes = f"shape {np.shape(gradient)}, the array has {array.shape}"
            raise AssertionError(f"{name}: the gradient has {shapes}")

        def loss(moved: np.ndarray, array: np.ndarray = array) -> Any:
            array[...] = moved
            return weights * run_copy(layer, inputs, options)[1]

        start = array.copy()
        expected = finite_differences(loss, start, step)
        array[...] = start
        errors[name] = relative_error(gradient, expected)
        if not errors[name] <= tolerance:  # so that NaN fails too
            wrong = f"{name}: the gradient is wrong, by {errors[name]:.1e}"
            raise AssertionError(f"{wrong}: {what_differs(gradient, expected)}")
    return errors
