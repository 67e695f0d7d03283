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
from attnlib.checks import as_autocast, refuse_bad_inputs, require_flag, require_probability
from attnlib.masks import Mask, apply_mask, causal_mask


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


class ScaledDotProductAttention(BaseAttention):
    """Attention(Q, K, V) = softmax(QKᵀ/√d_k) V, with masks and dropout on the weights.

    Args:
        dropout: probability in [0, 1] of dropping a weight, in training mode only. The
            returned weights are those before dropout: their rows sum to 1.
        causal: let each query see only keys up to its own position, aligned bottom
            right; composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.

    Raises:
        TypeError: `dropout` is no number, or `causal` no truth value.
        ValueError: `dropout` lies outside [0, 1].

    Source: chapter 1, eq-attention; Vaswani et al. (2017), eq. 1.
    """

    def __init__(
        self, dropout: float = 0.0, causal: bool = False, scale: float | None = None
    ) -> None:
        super().__init__()
        self.dropout = require_probability("dropout", dropout)
        self.causal = require_flag("causal", causal)
        self.scale = scale

    def forward(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Mask | None = None,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries keys"]]:
        """Output (..., N, d_v), weights (..., N, M); see `BaseAttention.forward`."""
        query, key, value, mask = as_autocast(query, key, value, mask)
        refuse_bad_inputs(query, key, value, mask)
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        scores = (scale * query) @ key.transpose(-2, -1)
        if self.causal:
            allowed = causal_mask(query.shape[-2], key.shape[-2], query.device)
            scores = apply_mask(scores, allowed)
        if mask is not None:
            scores = apply_mask(scores, mask)
        masked = self.causal or mask is not None  # only a mask can empty a row
        weights = masked_softmax(scores) if masked else torch.softmax(scores, dim=-1)
        output = F.dropout(weights, self.dropout, self.training) @ value
        return output, weights
