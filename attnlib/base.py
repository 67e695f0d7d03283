"""The contract that every attention keeps, and the checks that refuse bad input.

Derived in chapter 1, "Scaled dot-product attention" (book/01_scaled_dot_product.ipynb).
"""

import inspect
from abc import ABC, abstractmethod
from numbers import Real

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


def causal_mask(
    queries: int, keys: int | None = None, device: torch.device | str | None = None
) -> Bool[Tensor, "queries keys"]:
    """Which keys each query may see: True on and below the bottom-right diagonal.

    Args:
        queries: number of queries N.
        keys: number of keys M; `None` means as many as queries.
        device: where to make the mask.

    Returns:
        Boolean mask of shape (N, M), True = may attend. The last query sees every key.

    Source: chapter 1, eq-causal-allowed.
    """
    keys = queries if keys is None else keys
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return everything.tril(diagonal=keys - queries)


class BaseAttention(nn.Module, ABC):
    """What every attention of this package is: a module with this `forward`.

    A subclass that has a causal mode sets `causal` on the instance; it is then aligned
    bottom right (see `causal_mask`) and composes with any mask.
    `attnlib.testing.check_attention` tests whether a class keeps the whole contract.

    Source: the contract of chapter 1.
    """

    causal: bool = False

    def extra_repr(self) -> str:
        """What `print` shows: the arguments of the constructor that the object keeps."""
        names = inspect.signature(type(self)).parameters
        return ", ".join(f"{n}={getattr(self, n)!r}" for n in names if hasattr(self, n))

    @abstractmethod
    def forward(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    ) -> tuple[
        Float[Tensor, "*batch queries d_v"],
        Float[Tensor, "*batch queries keys"] | None,
    ]:
        """Attends from N queries to M keys and mixes their values.

        Query, key and value are finite, where a mask forbids them too: a forbidden value
        is multiplied by the weight 0, and a NaN or ∞ there may make the output NaN.

        Args:
            query: shape (..., N, d_k), usually (batch, heads, N, d_k).
            key: shape (..., M, d_k), leading dimensions as in query.
            value: shape (..., M, d_v), leading dimensions as in query.
            mask: broadcasts to (..., N, M); boolean, True = may attend, or floating,
                finite or -∞, added to the scores. `None` allows every pair.

        Returns:
            Output (..., N, d_v) and weights (..., N, M), or `None` for the weights
            where the method never forms them. A query that may attend to nothing
            gets output, weights and gradients 0.

        Raises:
            TypeError: a tensor of the wrong or a mixed dtype; see `as_autocast`.
            ValueError: a wrong rank, mismatched shapes or mixed devices.
        """


def check_mask(mask: Tensor, query: Tensor, keys: int) -> None:
    """Refuses a mask of a wrong dtype, device or shape, before any arithmetic.

    Args:
        mask: expected to broadcast to the scores' shape (..., N, M).
        query: shape (..., N, d_k).
        keys: number of keys M.

    Raises:
        TypeError: not a tensor, or a dtype that is neither boolean nor that of query.
        ValueError: a shape that does not broadcast to the scores', or another device.

    Source: the contract of chapter 1.
    """
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, query.dtype):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            "mask: expected a boolean tensor (True = may attend) or a "
            f"{query.dtype} tensor that is added to the scores, got {got}"
        )
    if mask.device != query.device:
        raise ValueError(
            f"mask: expected device {query.device} as query, got {mask.device}"
        )
    scores_shape = (*query.shape[:-1], keys)
    if not broadcasts(mask.shape, scores_shape):
        raise ValueError(
            "mask: expected a shape that broadcasts to that of the scores, "
            f"{scores_shape}, got {tuple(mask.shape)}"
        )


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be repeated to fill the other.

    Source: the contract of chapter 1.
    """
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, full) for size, full in sizes)


def check_inputs(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> None:
    """Refuses what an attention can't compute, before any arithmetic.

    Args:
        query: expected (..., N, d_k), floating point.
        key: expected (..., M, d_k), dtype, device and leading dimensions of query.
        value: expected (..., M, d_v), likewise.
        mask: expected to broadcast to (..., N, M), boolean or of the dtype of query.

    Raises:
        TypeError: not a tensor, not floating point, or a mixed dtype.
        ValueError: wrong rank, mismatched shapes or mixed devices.

    Source: the contract of chapter 1.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a floating-point tensor, got {got}")
        got = f"got shape {tuple(tensor.shape)}"
        if tensor.dim() < 2:
            raise ValueError(
                f"{name}: expected at least 2 dimensions (tokens, features), {got}"
            )
        if tensor.shape[:-2] != query.shape[:-2]:
            leading = tuple(query.shape[:-2])
            raise ValueError(
                f"{name}: expected leading dimensions {leading} as query, {got}"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: expected {query.dtype} as query, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(
                f"{name}: expected device {query.device} as query, got {tensor.device}"
            )
    if key.shape[-1] != query.shape[-1] or key.shape[-1] == 0:
        expected = (
            f"d_k = {query.shape[-1]} features as query" if query.shape[-1] else "d_k ≥ 1"
        )
        raise ValueError(f"key: expected {expected}, got shape {tuple(key.shape)}")
    if value.shape[-2] != key.shape[-2]:
        expected = f"{key.shape[-2]} tokens as key"
        raise ValueError(f"value: expected {expected}, got shape {tuple(value.shape)}")
    if mask is not None:
        check_mask(mask, query, keys=key.shape[-2])


def check_probability(name: str, value: float) -> float:
    """Returns `value` if it is a probability.

    Args:
        name: the argument's name, for the message.
        value: expected in [0, 1].

    Raises:
        TypeError: `value` is no number, or a truth value, which Python takes for 0 or 1.
        ValueError: `value` lies outside [0, 1] or is NaN.

    Source: the contract of chapter 1.
    """
    expected = f"{name}: expected a probability between 0 and 1, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(expected)
    if not 0.0 <= value <= 1.0:
        raise ValueError(expected)
    return value


def check_flag(name: str, value: bool) -> bool:
    """Returns `value` if it is a truth value, not a number put in its place.

    Args:
        name: the argument's name, for the message.
        value: expected True or False.

    Raises:
        TypeError: `value` is anything else.

    Source: the contract of chapter 1.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; for some, such as "meta", there is none.

    Source: the contract of chapter 1.
    """
    known = torch.amp.is_autocast_available(device.type)
    return known and torch.is_autocast_enabled(device.type)


def as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as autocast gives them to `F.scaled_dot_product_attention`.

    Args:
        tensors: query, key, value and mask; the device of the first one counts.

    Returns:
        Within `torch.autocast`, every floating-point tensor but float64 in autocast's
        dtype; all else, and everything outside of autocast, as it came.

    Source: the contract of chapter 1.
    """
    if not isinstance(tensors[0], Tensor) or not under_autocast(tensors[0].device):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    cast = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in cast else x for x in tensors
    )
