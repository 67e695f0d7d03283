# Made from book/10_backward_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The refusals of bad input, in NumPy; attnlib.checks has those of PyTorch.

Derived in chapter 10, "Backward through attention" (book/10_backward_attention.ipynb).
"""

from numbers import Integral
from typing import Any

import numpy as np


def require_floating(name: str, array: Any, dtype: np.dtype | None = None) -> None:
    """Refuses what has no gradient, and what would change the dtype of a result.

    Args:
        name: the argument's name, for the message.
        array: expected floating point (or complex, as in a complex step).
        dtype: the one expected; `None` allows any of them.

    Raises:
        TypeError: not a NumPy array, integers or booleans, or another dtype.

    Source: chapter 10, the contract of a layer.
    """
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.inexact):
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: expected a floating-point array, got {got}")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {array.dtype}")


def refuse_bad_mask(mask: np.ndarray, query: np.ndarray, keys: int) -> None:
    """Refuses a mask of a wrong dtype or shape.

    Args:
        mask: expected to broadcast to the scores' shape (..., N, M).
        query: shape (..., N, d_k).
        keys: number of keys M.

    Raises:
        TypeError: not an array, or neither boolean nor of the dtype of query.
        ValueError: a shape that does not broadcast to the scores'.

    Source: chapter 10; the contract, appendix A.
    """
    dtype = query.real.dtype
    if not isinstance(mask, np.ndarray) or mask.dtype not in (np.bool_, dtype):
        got = mask.dtype if isinstance(mask, np.ndarray) else type(mask).__name__
        raise TypeError(
            "mask: expected a boolean array (True = may attend) or a "
            f"{dtype} array that is added to the scores, got {got}"
        )
    shape = (*query.shape[:-1], keys)
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > len(shape) or any(size not in (1, full) for size, full in sizes):
        expected = f"expected a shape that broadcasts to that of the scores, {shape}"
        raise ValueError(f"mask: {expected}, got {mask.shape}")


def refuse_bad_inputs(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray | None = None
) -> None:
    """Refuses what an attention can't compute, with the words of chapter 1.

    Args:
        query: expected (..., N, d_k), floating point.
        key: expected (..., M, d_k), dtype and leading dimensions of query.
        value: expected (..., M, d_v), likewise.
        mask: expected to broadcast to (..., N, M), boolean or of the dtype of query.

    Raises:
        TypeError: not an array, not floating point, or a mixed dtype.
        ValueError: wrong rank or mismatched shapes.

    Source: chapter 10; the contract, appendix A.
    """
    require_floating("query", query)
    for name, array in (("query", query), ("key", key), ("value", value)):
        require_floating(name, array, query.dtype)
        got = f"got shape {array.shape}"
        if array.ndim < 2:
            raise ValueError(
                f"{name}: expected at least 2 dimensions (tokens, features), {got}"
            )
        if array.shape[:-2] != query.shape[:-2]:
            leading = query.shape[:-2]
            raise ValueError(
                f"{name}: expected leading dimensions {leading} as query, {got}"
            )
    if key.shape[-1] != query.shape[-1] or key.shape[-1] == 0:
        expected = (
            f"d_k = {query.shape[-1]} features as query" if query.shape[-1] else "d_k ≥ 1"
        )
        raise ValueError(f"key: expected {expected}, got shape {key.shape}")
    if value.shape[-2] != key.shape[-2]:
        expected = f"{key.shape[-2]} tokens as key"
        raise ValueError(f"value: expected {expected}, got shape {value.shape}")
    if mask is not None:
        refuse_bad_mask(mask, query, keys=key.shape[-2])


def require_whole(**sizes: int) -> None:
    """Refuses sizes that are no whole numbers, even if they are equal to one.

    Args:
        sizes: by the names of the arguments.

    Raises:
        TypeError: one of them is no whole number, or a truth value.

    Source: chapter 10.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{name}: expected a whole number, got {size!r}")


def require_sizes(**sizes: int) -> None:
    """Refuses a number of features, or of words, that is none, or below 1.

    Args:
        sizes: by the names of the arguments.

    Raises:
        TypeError: one of them is no whole number, or a truth value.
        ValueError: one of them is below 1.

    Source: chapter 10; the same words as in chapter 4.
    """
    require_whole(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def refuse_bad_tokens(
    name: str, x: Any, features: int, parameter: np.ndarray, dims: int = 1
) -> None:
    """Refuses what a layer can't take: a wrong dtype or a wrong number of features.

    A complex input, or a complex parameter, passes: that is a complex step.

    Args:
        name: the argument's name, for the message.
        x: expected (..., features).
        features: the size of its last dimension.
        parameter: of the layer; the input should have its precision.
        dims: the least number of dimensions.

    Raises:
        TypeError: not a floating-point array, or of another precision.
        ValueError: too few dimensions, or a last one of another size.

    Source: chapter 10; the same words as in chapter 4.
    """
    require_floating(name, x)
    if x.real.dtype != parameter.real.dtype:
        expected = f"expected {parameter.real.dtype} as the parameters"
        raise TypeError(f"{name}: {expected}, got {x.dtype}")
    if x.ndim < dims or x.shape[-1] != features:
        expected = f"expected at least {dims} dimensions, the last of {features} features"
        raise ValueError(f"{name}: {expected}, got shape {x.shape}")


def require_ids(name: str, ids: Any, size: int) -> None:
    """Refuses what does not number the words of a vocabulary.

    Args:
        name: the argument's name, for the message.
        ids: expected integers from 0 to size - 1.
        size: of the vocabulary.

    Raises:
        IndexError: a number outside the vocabulary; NumPy would count negative ones
            from the end.
        TypeError: not an array of integers.

    Source: chapter 10; chapter 9 for the words.
    """
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        got = ids.dtype if isinstance(ids, np.ndarray) else type(ids).__name__
        raise TypeError(f"{name}: expected an array of integers, got {got}")
    if ids.size and not 0 <= ids.min() <= ids.max() < size:
        expected = f"expected integers from 0 to {size - 1}"
        raise IndexError(f"{name}: {expected}, got {ids.min()} to {ids.max()}")


def require_rate(name: str, value: float, below: float = np.inf) -> float:
    """Returns `value` as Python's float if it is not negative and not too large.

    One of NumPy has a dtype, and would make float32 arrays float64.

    Raises:
        ValueError: not in [0, below).

    Source: chapter 10.
    """
    if not 0 <= value < below:
        raise ValueError(f"{name}: expected a number in [0, {below:g}), got {value}")
    return float(value)


def require_eps(eps: float) -> float:
    """Returns ε as Python's float, see `require_rate`, if it is not negative.

    Raises:
        ValueError: below 0, or not a number.

    Source: chapter 10.
    """
    if not eps >= 0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps}")
    return float(eps)
