# Made from book/01_scaled_dot_product.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""What every attention is.

Derived in chapter 1, "Scaled dot-product attention" (book/01_scaled_dot_product.ipynb).
"""

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from attnlib.masks import Mask


class BaseAttention(nn.Module, ABC):
    """What every attention of this package is: a module with this `forward`.

    A subclass that has a causal mode sets `causal` on the instance; it is then aligned
    bottom right (see `causal_mask`) and composes with any mask. So does one that lets a
    query see a window of keys only, with `window` (see `window_mask`).
    `attnlib.testing.check_attention` tests whether a class keeps the whole contract.

    A subclass whose `forward` has an argument `need_weights` may leave them out, and then
    be faster, where it gets False; others are never given it.

    `neutral` names the options that change the numbers, each with the value that changes
    nothing. Models that have been trained look them up on the instance, and refuse other
    values than theirs. A subclass with one more adds it, and one that declares nothing is
    asked for these: `neutral = BaseAttention.neutral | {"slope": 0.0}`.

    Source: chapter 1; the contract, appendix A.
    """

    neutral: ClassVar[dict[str, Any]] = {
        "causal": False,
        "window": None,
        "scale": None,
        "dropout": 0.0,
        "softcap": None,
    }
    causal: bool = False
    window: int | None = None
    takes_need_weights: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.takes_need_weights = "need_weights" in inspect.signature(cls.forward).parameters
        if "forward" in vars(cls) and "attend_groups" not in vars(cls):
            cls.attend_groups = BaseAttention.attend_groups  # a parent's knows another

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
        mask: Mask | None = None,
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

    def attend_groups(
        self,
        query: Float[Tensor, "*batch heads queries d_k"],
        key: Float[Tensor, "*batch kv_heads keys d_k"],
        value: Float[Tensor, "*batch kv_heads keys d_v"],
        mask: Mask | None = None,
    ) -> Float[Tensor, "*batch heads queries d_v"] | None:
        """Output of heads that share keys and values, for who need not copy these.

        Returns:
            Output (..., H, N, d_v), where as many neighboring heads of query share each
            head of key and value; or `None`, and the heads are then repeated.

        Source: chapter 18, eq-grouped-heads.
        """
        return None


def apply_attention(
    attention: BaseAttention,
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Mask | None,
    need_weights: bool,
) -> tuple[Float[Tensor, "*batch queries d_v"], Tensor | None]:
    """Output and weights of an attention, which hears of it if nobody needs the weights.

    Source: chapter 5.
    """
    if need_weights or not attention.takes_need_weights:
        return attention(query, key, value, mask)
    return attention(query, key, value, mask, need_weights=False)
