# Made from book/10_backward_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Scaled dot-product attention with its backward by hand, in NumPy.

Derived in chapter 10, "Backward through attention" (book/10_backward_attention.ipynb).
"""

import math

import numpy as np
from jaxtyping import Bool, Float

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import refuse_bad_inputs
from attnlib.backprop.dropout import Dropout

# True = may attend, or numbers that are added to the scores; broadcasts to the scores.
Mask = Bool[np.ndarray, "..."] | Float[np.ndarray, "..."]


def softmax(scores: Float[np.ndarray, "*batch keys"]) -> Float[np.ndarray, "*batch keys"]:
    """Softmax over the last dimension; a row in which every score is -inf becomes 0.

    Args:
        scores: any shape; -inf marks a key that must not be attended to.

    Returns:
        Weights of the same shape and dtype: each row sums to 1, or is 0 where nothing is
        allowed.

    Source: chapter 10, the softmax of chapter 1, eq-softmax-shift.
    """
    top = scores.real.max(axis=-1, keepdims=True, initial=-np.inf)
    top[top == -np.inf] = 0.0  # an empty row: e^(-inf - 0) = 0 everywhere
    weights = scores - top
    np.exp(weights, out=weights)
    wide = np.result_type(weights, np.float32)  # float16 has no 2049
    total = weights.sum(axis=-1, keepdims=True, dtype=wide)
    total[total == 0] = 1.0
    weights /= total
    return weights


def apply_mask(
    scores: Float[np.ndarray, "*batch queries keys"],
    mask: Mask,
) -> None:
    """Applies a mask to the scores in place.

    Args:
        scores: shape (..., N, M); a forbidden pair becomes -inf.
        mask: broadcasts to the scores; boolean (True = may attend) or added to them.

    Source: chapter 10, the masks of chapter 1, eq-mask-boolean, eq-mask-additive.
    """
    if mask.dtype == np.bool_:
        np.copyto(scores, -np.inf, where=~mask)
    else:
        scores += mask


def softmax_backward(
    d_weights: Float[np.ndarray, "*batch keys"], weights: Float[np.ndarray, "*batch keys"]
) -> Float[np.ndarray, "*batch keys"]:
    """The gradient of the scores, from that of the weights and the weights themselves.

    Args:
        d_weights: dP, the gradient of the weights.
        weights: P, as `softmax` gave them.

    Returns:
        dS = P ⊙ (dP - rowsum(dP ⊙ P)), of the same shape. Each row sums to 0; where a
        weight is 0, and so in an empty row, the gradient is 0.

    Source: chapter 10, eq-softmax-backward.
    """
    mean = np.einsum("...j,...j->...", d_weights, weights)
    grad_scores = d_weights - mean[..., None]
    grad_scores *= weights
    return grad_scores


class ScaledDotProductAttention(Layer):
    """Attention(Q, K, V) = softmax(QKᵀ/√d_k) V, and its backward.

    Args:
        dropout: probability in [0, 1] of dropping a weight, in training only. The returned
            weights are those before dropout: their rows sum to 1.
        causal: let each query see only keys up to its own position, aligned bottom right;
            composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.
        rng: where dropout takes its random numbers from.

    Attributes:
        dropout: the layer `Dropout`.

    Raises:
        ValueError: the probability lies outside [0, 1].

    Source: chapter 10, eq-value-backward, eq-weights-backward, eq-softmax-backward,
    eq-scaling-backward, eq-query-backward, eq-key-backward, eq-mask-backward,
    eq-dropout-backward.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.dropout = Dropout(dropout, rng)
        self.causal = causal
        self.scale = scale

    def forward(
        self,
        query: Float[np.ndarray, "*batch queries d_k"],
        key: Float[np.ndarray, "*batch keys d_k"],
        value: Float[np.ndarray, "*batch keys d_v"],
        mask: Mask | None = None,
    ) -> tuple[
        Float[np.ndarray, "*batch queries d_v"], Float[np.ndarray, "*batch queries keys"]
    ]:
        """Output (..., N, d_v) and weights (..., N, M), which are kept: don't change them.

        Args:
            query: shape (..., N, d_k).
            key: shape (..., M, d_k).
            value: shape (..., M, d_v).
            mask: broadcasts to (..., N, M); boolean, True = may attend, or floating, added
                to the scores. `None` allows every pair.

        Raises:
            TypeError: an array of the wrong or a mixed dtype.
            ValueError: a wrong rank or mismatched shapes.
        """
        refuse_bad_inputs(query, key, value, mask)
        queries, keys = query.shape[-2], key.shape[-2]
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else float(self.scale)
        scores = (scale * query) @ key.swapaxes(-2, -1)
        if self.causal:
            apply_mask(scores, np.tri(queries, keys, keys - queries, dtype=bool))
        if mask is not None:
            apply_mask(scores, mask)
        weights = softmax(scores)
        dropped = self.dropout.forward(weights)
        output = dropped @ value
        self.remember(
            output,
            query=query,
            key=key,
            value=value,
            weights=weights,
            dropped=dropped,
            scale=scale,
        )
        return output, weights

    def backward(
        self, d_output: Float[np.ndarray, "*batch queries d_v"]
    ) -> tuple[
        Float[np.ndarray, "*batch queries d_k"],
        Float[np.ndarray, "*batch keys d_k"],
        Float[np.ndarray, "*batch keys d_v"],
    ]:
        """The gradients of query, key and value; a mask gets none.

        That of an added mask is the gradient of the scores, `softmax_backward` of d_output
        times the transpose of value, if nothing was dropped, summed over what the mask was
        repeated over.

        Args:
            d_output: the gradient of the output (..., N, d_v).

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        kept = self.recall(d_output)
        d_value = kept["dropped"].swapaxes(-2, -1) @ d_output  # ①
        grad_weights = d_output @ kept["value"].swapaxes(-2, -1)  # ②
        grad_weights = self.dropout.backward(grad_weights)
        grad_scores = softmax_backward(grad_weights, kept["weights"])  # ③
        grad_scores *= kept["scale"]  # ④
        d_query = grad_scores @ kept["key"]  # ⑤
        d_key = grad_scores.swapaxes(-2, -1) @ kept["query"]  # ⑥
        return d_query, d_key, d_value
