# Made from book/21_llama.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""RMS normalization: each token to a mean square of 1, then a learned scale.

Derived in chapter 21, "Llama" (book/21_llama.ipynb).
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


class RMSNorm(nn.Module):
    """input / √(mean(input²) + ε) · γ, with the mean over the features of each token.

    Args:
        d_model: features of a token.
        eps: ε, added to the mean square inside the root.

    Attributes:
        gamma: γ, shape (d_model,), 1 at the start.
        d_model: the number of features.

    Raises:
        TypeError: d_model is no whole number.
        ValueError: d_model below 1, or eps below 0.

    Source: chapter 21, eq-rms-norm; Zhang and Sennrich (2019).
    """

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        require_sizes(d_model=d_model)
        if not eps >= 0:
            raise ValueError(f"eps: expected a number of at least 0, got {eps}")
        self.d_model, self.eps = d_model, eps
        self.gamma = nn.Parameter(torch.ones(d_model))

    def forward(
        self, input: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """Output of the shape and dtype of input (..., d_model).

        The squares are added in float32 at least; the scale acts in the dtype of input.

        Raises:
            TypeError: input is not floating point, or not of the dtype of gamma.
            ValueError: input has not d_model features, or is on another device.
        """
        like = input if self.gamma is None else self.gamma
        refuse_bad_tokens("input", input, self.d_model, like)
        # Widened here, as PyTorch 2.5 squares float16 in float16: 300² is infinite there.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        normalized = F.rms_norm(wide, (self.d_model,), None, self.eps).to(input.dtype)
        return normalized if self.gamma is None else normalized * self.gamma

    @classmethod
    def from_torch(cls, module: nn.RMSNorm) -> "RMSNorm":
        """A copy of PyTorch's layer; without a weight there, gamma is `None`.

        Raises:
            TypeError: no `nn.RMSNorm`, or one with a forward of its own.
            ValueError: the layer normalizes over more than the last dimension, has no eps
                of its own, or a weight that is no parameter.
        """
        refuse_other_module("module", module, nn.RMSNorm)
        if len(module.normalized_shape) != 1:
            shape = tuple(module.normalized_shape)
            raise ValueError(f"module: expected one normalized dimension, got {shape}")
        if module.eps is None:
            raise ValueError("module: expected an eps, got None: one for each dtype")
        norm = cls(module.normalized_shape[0], module.eps)
        norm.gamma = copy_parameter(module.weight)
        return norm

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"d_model={self.d_model}, eps={self.eps}"
