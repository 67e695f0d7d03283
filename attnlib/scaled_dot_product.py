# Made from book/01_scaled_dot_product.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Scaled dot-product attention, and the masked softmax that it is made of.

Derived in chapter 1, "Scaled dot-product attention" (book/01_scaled_dot_product.ipynb).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from attnlib.base import BaseAttention
from attnlib.checks import (
    require_flag,
    require_probability,
    require_scale,
    require_window,
)
from attnlib.fused import attend_fused
from attnlib.masks import Mask


def masked_softmax(
    scores: Float[Tensor, "*batch keys"],
) -> Float[Tensor, "*batch keys"]:
    """Softmax over the last dimension; a row in which every score is -inf becomes 0.

    Args:
        scores: any shape; -inf marks a key that must not be attended to.

    Returns:
        Weights of the same shape: each row sums to 1, or is 0 where nothing is allowed.
        The gradient of such a row is 0, never NaN.

    Source: chapter 1, eq-softmax, eq-softmax-shift.
    """
    nothing_allowed = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing_allowed, 0.0), dim=-1)  # pretend
    return weights.masked_fill(nothing_allowed, 0.0)  # and take it back


class ScaledDotProductAttention(BaseAttention):
    """Attention(Q, K, V) = softmax(QKᵀ/√d_k) V, with masks and dropout on the weights.

    Args:
        dropout: probability in [0, 1] of dropping a weight, in training mode only. The
            returned weights are those before dropout: their rows sum to 1.
        causal: let each query see only keys up to its own position, aligned bottom
            right; composes with any mask.
        scale: factor on the scores, a number, or a tensor that broadcasts to the query,
            such as a parameter; `None` means 1/√d_k.
        window: let each query see only keys that are less than so many tokens away, see
            `window_mask`; `None` means all. Composes with causal and with any mask.

    Raises:
        TypeError: `dropout` or `scale` is no number, `causal` no truth value, or `window`
            no integer.
        ValueError: `dropout` lies outside [0, 1], `scale` is not finite, or `window` is
            below 1.

    Source: chapter 1, eq-attention; Vaswani et al. (2017), eq. 1.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | Tensor | None = None,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.dropout = require_probability("dropout", dropout)
        self.causal = require_flag("causal", causal)
        self.scale, self.window = require_scale(scale), require_window(window)

    def attend(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Float[Tensor, "..."] | None,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries keys"]]:
        """Output (..., N, d_v), weights (..., N, M); see `BaseAttention.attend`."""
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        scores = (scale * query) @ key.mT  # 1 compare
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1)  # 2 weigh
        output = F.dropout(weights, self.dropout, self.training) @ value  # 3 mix
        return output, weights

    def attend_without_weights(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None,
    ) -> Float[Tensor, "*batch queries d_v"] | None:
        """The output by PyTorch's function, unless weights are to be dropped."""
        if self.training and self.dropout:
            return None
        options = {"causal": self.causal, "window": self.window, "scale": self.scale}
        return attend_fused(query, key, value, mask, **options)
