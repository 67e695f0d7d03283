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
    as_autocast,
    refuse_bad_inputs,
    require_flag,
    require_probability,
    require_window,
)
from attnlib.fused import attend_fused, fused_attention
from attnlib.masks import Mask, windowed


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
    weights = torch.softmax(scores.masked_fill(nothing_allowed, 0.0), dim=-1)
    return weights.masked_fill(nothing_allowed, 0.0)


def masked_weights(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    mask: Mask | None,
    causal: bool,
) -> Float[Tensor, "*batch queries keys"]:
    """`masked_softmax` of the masked scores QKᵀ; the query comes scaled.

    Source: chapter 1, eq-attention, eq-mask-boolean, eq-mask-additive.
    """
    # In as few passes over the scores as without a mask: the product adds it by itself, and
    # empty rows are found in the mask, which is most often smaller than the scores.
    queries, keys = query.shape[-2], key.shape[-2]
    added = added_mask(query, keys, mask, causal)
    if added is None or keys == 0:
        return torch.softmax(query @ key.mT, dim=-1)
    empty = None
    if mask is not None or queries > keys:  # else each query may attend to some key
        empty = added.amax(dim=-1, keepdim=True) == -torch.inf
        added = added.masked_fill(empty, 0.0)
    leading = query.shape[:-2]
    added = added.expand(*leading, queries, keys)
    q, k, a = (x.reshape(math.prod(leading), *x.shape[-2:]) for x in (query, key, added))
    weights = torch.softmax(torch.baddbmm(a, q, k.mT), dim=-1).view(added.shape)
    if empty is None:
        return weights
    some = (~empty).to(weights.dtype)  # a product is faster than to fill where it is empty
    if weights.requires_grad:  # the gradient of softmax needs what it has returned
        return weights * some
    return weights.mul_(some)


def added_mask(
    query: Float[Tensor, "*batch queries d_k"], keys: int, mask: Mask | None, causal: bool
) -> Float[Tensor, "..."] | None:
    """A mask, and the causal one, as numbers to add to the scores; -inf forbids a pair.

    Source: chapter 1, eq-mask-additive, eq-causal-allowed.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = 1 - mask.to(query.dtype).reciprocal()  # 1 - 1/0 is -inf; faster than where
    if not causal:
        return mask
    queries = query.shape[-2]
    future = query.new_full((queries, keys), -torch.inf).triu(keys - queries + 1)
    return future if mask is None else mask + future


class ScaledDotProductAttention(BaseAttention):
    """Attention(Q, K, V) = softmax(QKᵀ/√d_k) V, with masks and dropout on the weights.

    Args:
        dropout: probability in [0, 1] of dropping a weight, in training mode only. The
            returned weights are those before dropout: their rows sum to 1.
        causal: let each query see only keys up to its own position, aligned bottom
            right; composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.
        window: let each query see only keys that are less than so many tokens away, see
            `window_mask`; `None` means all. Composes with causal and with any mask.

    Raises:
        TypeError: `dropout` is no number, `causal` no truth value, or `window` no integer.
        ValueError: `dropout` lies outside [0, 1], or `window` is below 1.

    Source: chapter 1, eq-attention; Vaswani et al. (2017), eq. 1.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.dropout = require_probability("dropout", dropout)
        self.causal = require_flag("causal", causal)
        self.scale, self.window = scale, require_window(window)

    def forward(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Mask | None = None,
        need_weights: bool = True,
    ) -> tuple[
        Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries keys"] | None
    ]:
        """Output (..., N, d_v), weights (..., N, M); see `BaseAttention.forward`.

        Without need_weights the weights are `None`, and unless some of them are to be
        dropped, `fused_attention` computes the same output without storing them.
        """
        if not need_weights and not (self.training and self.dropout):
            options = {"causal": self.causal, "window": self.window, "scale": self.scale}
            return fused_attention(query, key, value, mask, **options), None
        query, key, value, mask = as_autocast(query, key, value, mask)
        refuse_bad_inputs(query, key, value, mask)
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        sizes = (query.shape[-2], key.shape[-2])
        mask = windowed(mask, *sizes, self.window, query.device)
        weights = masked_weights(scale * query, key, mask, self.causal)
        output = F.dropout(weights, self.dropout, self.training) @ value
        return output, weights if need_weights else None

    def attend_groups(
        self,
        query: Float[Tensor, "*batch heads queries d_k"],
        key: Float[Tensor, "*batch kv_heads keys d_k"],
        value: Float[Tensor, "*batch kv_heads keys d_v"],
        mask: Mask | None = None,
    ) -> Float[Tensor, "*batch heads queries d_v"] | None:
        """Output (..., H, N, d_v) by PyTorch's function, unless weights are dropped."""
        if self.training and self.dropout:
            return None
        query, key, value, mask = as_autocast(query, key, value, mask)
        options = {"causal": self.causal, "window": self.window, "scale": self.scale}
        return attend_fused(query, key, value, mask, **options)
