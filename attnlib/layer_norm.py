# Made from book/07_layer_norm.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Layer normalization: each token to mean 0 and variance 1, then a learned scale.

Derived in chapter 7, "Layer normalization" (book/07_layer_norm.ipynb).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.checks import (
    copy_parameter,
    refuse_bad_tokens,
    refuse_other_module,
    require_sizes,
)


class LayerNorm(nn.Module):
    """(input - μ) / √(σ² + ε) · γ + β, with μ and σ² over the features of each token.

    Args:
        d_model: features of a token.
        eps: ε, added to the variance inside the root.

    Attributes:
        gamma: γ, shape (d_model,), 1 at the start.
        beta: β, shape (d_model,), 0 at the start.
        d_model: the number of features.

    Raises:
        TypeError: d_model is no whole number.
        ValueError: d_model below 1, or eps below 0.

    Source: chapter 7, eq-layer-norm, eq-layer-norm-statistics; Ba et al. (2016).
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        require_sizes(d_model=d_model)
        if not eps >= 0:
            raise ValueError(f"eps: expected a number of at least 0, got {eps}")
        self.d_model, self.eps = d_model, eps
        self.gamma = nn.Parameter(torch.ones(d_model))
        self.beta = nn.Parameter(torch.zeros(d_model))

    def forward(
        self, input: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """Output of the shape and dtype of input (..., d_model).

        Raises:
            TypeError: input is not floating point, or not of the dtype of gamma.
            ValueError: input has not d_model features, or is on another device.
        """
        like = input if self.gamma is None else self.gamma
        refuse_bad_tokens("input", input, self.d_model, like)
        return F.layer_norm(input, (self.d_model,), self.gamma, self.beta, self.eps)

    @classmethod
    def from_torch(cls, module: nn.LayerNorm) -> "LayerNorm":
        """A copy of PyTorch's layer; a gamma or beta that it has not is `None`.

        Raises:
            TypeError: no `nn.LayerNorm`, or one with a forward of its own.
            ValueError: the layer normalizes over more than the last dimension, or its
                weight or bias is no parameter.
        """
        refuse_other_module("module", module, nn.LayerNorm)
        if len(module.normalized_shape) != 1:
            shape = tuple(module.normalized_shape)
            raise ValueError(f"module: expected one normalized dimension, got {shape}")
        norm = cls(module.normalized_shape[0], module.eps)
        norm.gamma, norm.beta = map(copy_parameter, (module.weight, module.bias))
        return norm

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"d_model={self.d_model}, eps={self.eps}"
