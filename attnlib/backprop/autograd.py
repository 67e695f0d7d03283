# Made from book/D_back_inside_pytorch.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The backward passes by hand as functions for PyTorch's autograd, for study and for tests.

Call them by `apply`, with the arguments of `forward` after `ctx`. Each can be
differentiated twice.

Derived in appendix D, "Back inside PyTorch" (book/D_back_inside_pytorch.ipynb).
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from attnlib.checks import refuse_bad_inputs
from attnlib.masks import Mask, apply_mask
from attnlib.scaled_dot_product import masked_softmax


class AttentionFunction(Function):
    """softmax(QKᵀ/√d_k + mask) V with the six steps of chapter 10 as its backward.

    Source: appendix D; chapter 10, eq-value-backward, eq-weights-backward,
    eq-softmax-backward, eq-scaling-backward, eq-query-backward, eq-key-backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Mask | None = None,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries keys"]]:
        """Output (..., N, d_v) and weights (..., N, M), both with a gradient.

        Args:
            ctx: where autograd keeps what backward needs.
            query: shape (..., N, d_k).
            key: shape (..., M, d_k).
            value: shape (..., M, d_v).
            mask: as for `BaseAttention`; one that is added may be learned.

        Raises:
            TypeError, ValueError: see `refuse_bad_inputs`.
        """
        refuse_bad_inputs(query, key, value, mask)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = masked_softmax(scores if mask is None else apply_mask(scores, mask))
        ctx.save_for_backward(query, key, value, weights)
        ctx.mask_shape = None if mask is None else mask.shape
        return weights @ value, weights

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, grad_returned: Tensor) -> tuple:
        """The gradients of query, key and value, and of a mask that asks for one.

        The mask is added after the scale, so it gets the gradient of the scaled scores,
        summed over the dimensions along which it was broadcast.
        """
        query, key, value, weights = ctx.saved_tensors
        d_value = weights.transpose(-2, -1) @ d_output
        grad_weights = d_output @ value.transpose(-2, -1) + grad_returned
        mean = (grad_weights * weights).sum(dim=-1, keepdim=True)
        grad_scaled = weights * (grad_weights - mean)
        asked = any(ctx.needs_input_grad[3:])  # which is shorter where no mask was given
        grad_mask = grad_scaled.sum_to_size(ctx.mask_shape) if asked else None
        grad_scores = grad_scaled / math.sqrt(query.shape[-1])
        return grad_scores @ key, grad_scores.transpose(-2, -1) @ query, d_value, grad_mask


class ProjectionFunction(Function):
    """input · W + b with the three gradients of chapter 11 as its backward.

    Source: appendix D; chapter 11, eq-projection-backward-weight,
    eq-projection-backward-bias, eq-projection-backward-input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Float[Tensor, "*batch in_features"],
        W: Float[Tensor, "in_features out_features"],
        b: Float[Tensor, " out_features"],
    ) -> Float[Tensor, "*batch out_features"]:
        """Output (..., out_features) of input (..., in_features)."""
        ctx.save_for_backward(input, W)
        return input @ W + b

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of input, W and b."""
        input, W = ctx.saved_tensors
        tall, grad_tall = input.reshape(-1, W.shape[0]), d_output.reshape(-1, W.shape[1])
        return d_output @ W.T, tall.T @ grad_tall, grad_tall.sum(dim=0)


class LayerNormFunction(Function):
    """(input - μ) / √(σ² + ε) · γ + β with the three-term gradient as its backward.

    Source: appendix D; chapter 11, eq-layer-norm-backward,
    eq-layer-norm-backward-parameters.
    """

    @staticmethod
    def normalized(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The normalized tokens (..., d_model), and 1 / √(σ² + ε) of each (..., 1)."""
        centered = input - input.mean(dim=-1, keepdim=True)
        inverse = ((centered**2).mean(dim=-1, keepdim=True) + eps).rsqrt()
        return centered * inverse, inverse

    @staticmethod
    def forward(
        ctx: Any,
        input: Float[Tensor, "*batch d_model"],
        gamma: Float[Tensor, " d_model"],
        beta: Float[Tensor, " d_model"],
        eps: float = 1e-5,
    ) -> Float[Tensor, "*batch d_model"]:
        """Output of the shape of input (..., d_model)."""
        ctx.save_for_backward(input, gamma)
        ctx.eps = eps
        return LayerNormFunction.normalized(input, eps)[0] * gamma + beta

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple:
        """The gradients of input, gamma and beta, and none of eps."""
        input, gamma = ctx.saved_tensors
        x_hat, inverse = LayerNormFunction.normalized(input, ctx.eps)
        g, d_model = d_output * gamma, len(gamma)
        along = (g * x_hat).mean(dim=-1, keepdim=True)
        grad_input = inverse * (g - g.mean(dim=-1, keepdim=True) - along * x_hat)
        grad_gamma = (d_output * x_hat).reshape(-1, d_model).sum(dim=0)
        return grad_input, grad_gamma, d_output.reshape(-1, d_model).sum(dim=0), None


class ReLUFunction(Function):
    """max(0, z), entry by entry; its derivative at 0 is taken to be 0.

    Source: appendix D; chapter 11, eq-relu-backward.
    """

    @staticmethod
    def forward(ctx: Any, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Output of the shape of input."""
        output = input.clamp(min=0)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Tensor:
        """The gradient of input."""
        (output,) = ctx.saved_tensors
        return d_output * (output > 0)


class EmbeddingFunction(Function):
    """Rows of a table, with scatter-add as its backward.

    Source: appendix D; chapter 11, eq-embedding-backward.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Float[Tensor, "vocab embed_dim"], ids: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embed_dim"]:
        """Rows (..., embed_dim) of ids of any shape."""
        ctx.save_for_backward(ids)
        ctx.vocab_size = len(weight)
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, None]:
        """The gradient of the table, and none of ids."""
        (ids,) = ctx.saved_tensors
        rows = d_output.reshape(-1, d_output.shape[-1])
        grad_weight = rows.new_zeros(ctx.vocab_size, rows.shape[1])
        return grad_weight.index_add(0, ids.flatten(), rows), None


class CrossEntropyFunction(Function):
    """The mean over the tokens of -ln p, with (p - y) / n as its backward.

    Source: appendix D; chapter 11, eq-cross-entropy-logits, eq-cross-entropy-backward.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "*batch vocab"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, ""]:
        """The loss of logits (..., V) and the numbers of the right words (...)."""
        ctx.save_for_backward(logits, targets)
        right = logits.gather(-1, targets[..., None])[..., 0]
        return (logits.logsumexp(dim=-1) - right).mean()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        """The gradient of the logits, and none of targets."""
        logits, targets = ctx.saved_tensors
        right = torch.nn.functional.one_hot(targets, logits.shape[-1])
        return grad_loss * (logits.softmax(dim=-1) - right) / targets.numel(), None
