# Made from book/01_scaled_dot_product.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""What every attention is.

Derived in chapter 1, "Scaled dot-product attention" (book/01_scaled_dot_product.ipynb), and
in chapter 18, "Fewer keys" (book/18_fewer_keys.ipynb).
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnlib.checks import NEUTRAL, fitting
from attnlib.masks import Mask, one_mask


class BaseAttention(nn.Module):
    """What every attention of this package is: a module with this `forward`.

    A subclass writes `attend`, for inputs that fit and one mask of numbers; or, if it never
    forms the weights, `attend_without_weights`. Both may be there. A subclass may also
    write `forward(query, key, value, mask=None)` itself, and then does all this on its own.
    `attnlib.testing.check_attention` tests whether a class keeps the whole contract.

    A subclass that has a causal mode sets `causal` on the instance; it is then aligned
    bottom right (see `causal_mask`) and composes with any mask. So does one that lets a
    query see a window of keys only, with `window` (see `window_mask`).

    `neutral` names the options that change the numbers, each with the value that changes
    nothing. Models that have been trained look them up on the instance, and refuse other
    values than theirs. A subclass with one more adds it, and one that declares nothing is
    asked for these: `neutral = BaseAttention.neutral | {"slope": 0.0}`.

    Source: chapter 1; the contract, appendix A.
    """

    causal: bool = False
    window: int | None = None
    neutral: ClassVar[dict[str, Any]] = NEUTRAL

    def forward(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None = None,
        need_weights: bool = True,
        enable_gqa: bool = False,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], Tensor | None]:
        """Attends from N queries to M keys and mixes their values.

        Query, key and value are finite, where a mask forbids them too: a forbidden value
        is multiplied by the weight 0, and a NaN or ∞ there may make the output NaN.

        Args:
            query: shape (..., N, d_k), usually (batch, heads, N, d_k).
            key: shape (..., M, d_k), leading dimensions as in query.
            value: shape (..., M, d_v), leading dimensions as in key.
            mask: broadcasts to (..., N, M); boolean, True = may attend, or floating,
                finite or -∞, added to the scores. `None` allows every pair.
            need_weights: whether to return the weights. Without them, most attentions are
                faster, and the output is the same.
            enable_gqa: whether heads may share keys and values, as in PyTorch's function:
                query (..., H, N, d_k), key and value (..., H_kv, M, d), of which each
                serves the H / H_kv heads of queries that follow each other.

        Returns:
            Output (..., N, d_v) and weights (..., N, M), or `None` for the weights
            where nobody needs them, or the method never forms them. A query that may
            attend to nothing gets output, weights and gradients 0.

        Raises:
            TypeError: a tensor of the wrong or a mixed dtype; see `as_autocast`.
            ValueError: a wrong rank, mismatched shapes or mixed devices.
        """
        query, key, value, mask = fitting(query, key, value, mask, enable_gqa)
        if not need_weights or type(self).attend is BaseAttention.attend:
            output = self.attend_without_weights(query, key, value, mask)
            if output is not None:
                return output, None
        if key.shape[:-2] != query.shape[:-2]:  # heads that share keys and values
            key, value = repeat_shared(query, key, value)
        empty = None
        if mask is not None or self.causal or self.window is not None:
            mask, empty = one_mask(query, key, mask, self.causal, self.window)
        attend = in_float32(self.attend) if query.dtype == torch.float16 else self.attend
        output, weights = attend(query, key, value, mask)
        if empty is not None:  # some queries may attend to nothing
            output = output.masked_fill(empty, 0.0)
            weights = None if weights is None else weights.masked_fill(empty, 0.0)
        return output, weights if need_weights else None

    def attend(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Float[Tensor, "..."] | None,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], Tensor | None]:
        """Output and weights of inputs that fit; the mask is added to the scores.

        The mask has causal, window and what was given in it, broadcasts to (..., N, M), and
        lets every query attend to some key: `forward` sees to the others.
        """
        raise NotImplementedError(f"{type(self).__name__}: write attend")

    def attend_without_weights(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None,
    ) -> Float[Tensor, "*batch queries d_v"] | None:
        """The output, for who need not form the weights; `None` leaves it to `attend`.

        The inputs fit. The mask is as it was given, so that causal, window, queries that
        may attend to nothing, and heads that share keys are for this method to see to.
        """
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "attend" in own and "attend_without_weights" not in own:
            # A parent's would not know what is new here.
            cls.attend_without_weights = BaseAttention.attend_without_weights
        if "forward" in own:
            cls.forward = plugged_in(own["forward"])

    def extra_repr(self) -> str:
        """What `print` shows: the arguments of the constructor that the object keeps."""
        names = inspect.signature(type(self)).parameters
        return ", ".join(f"{n}={getattr(self, n)!r}" for n in names if hasattr(self, n))


def in_float32(attend: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
    """`attend` for float16, whose scores may be larger than its largest number, 65504.

    Source: chapter 1; the contract, appendix A.
    """

    def wide(*inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(inputs[0].device.type, enabled=False):
            output, weights = attend(*(x if x is None else x.float() for x in inputs))
        return output.half(), None if weights is None else weights.half()

    return wide


def plugged_in(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A subclass's own `forward`, called as `BaseAttention.forward` is.

    Of the options it gets those that it names. Heads that share keys are repeated for one
    that does not name `enable_gqa`.

    Source: the contract, appendix A.
    """
    known = inspect.signature(forward).parameters
    if {"need_weights", "enable_gqa"} <= set(known):
        return forward

    @wraps(forward)
    def called(
        self: BaseAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: Any,
        need_weights: bool = True,
        enable_gqa: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if "need_weights" in known and len(others) < 2:  # else it stands among these
            options["need_weights"] = need_weights
        if enable_gqa and key.dim() > 2 and query.shape[-3] != key.shape[-3]:
            key, value = repeat_shared(query, key, value)
        output, weights = forward(self, query, key, value, *others, **options)
        return output, weights if need_weights else None

    return called


def repeat_heads(
    x: Float[Tensor, "*batch kv_heads keys d"], times: int
) -> Float[Tensor, "*batch heads keys d"]:
    """Each head of keys or values, `times` times in a row: one for each that shares it.

    Source: chapter 18, eq-grouped-heads.
    """
    return x.repeat_interleave(times, dim=-3)


def repeat_shared(
    query: Float[Tensor, "*batch heads queries d_k"],
    key: Float[Tensor, "*batch kv_heads keys d_k"],
    value: Float[Tensor, "*batch kv_heads keys d_v"],
) -> tuple[Float[Tensor, "*batch heads keys d_k"], Float[Tensor, "*batch heads keys d_v"]]:
    """Keys and values, repeated until each head of queries has its own.

    Source: chapter 18, eq-grouped-heads.
    """
    times = query.shape[-3] // key.shape[-3]
    return repeat_heads(key, times), repeat_heads(value, times)
