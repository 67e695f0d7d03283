# Made from book/04_projection.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The linear layer output = input · W + b, with W stored as the formula has it.

Derived in chapter 4, "Projection" (book/04_projection.ipynb).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.checks import (
    refuse_bad_tokens,
    refuse_other_module,
    require_sizes,
)


class Projection(nn.Module):
    """A linear layer, output = input · W + b, that acts on each token by itself.

    Args:
        in_features: features of an input token.
        out_features: features of an output token.
        bias: whether b is added.

    Attributes:
        W: shape (in_features, out_features), the transpose of `nn.Linear`'s weight.
        b: shape (out_features,), or `None`.
        in_features, out_features: the numbers of features.

    Raises:
        TypeError: a number of features that is no whole number.
        ValueError: a number of features below 1.

    Source: chapter 4, eq-projection, eq-uniform-variance.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        require_sizes(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.W = nn.Parameter(torch.empty(in_features, out_features))
        self.b = nn.Parameter(torch.empty(out_features)) if bias else None
        bound = 1 / math.sqrt(in_features)  # as nn.Linear draws its own
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, input: Float[Tensor, "*batch in_features"]
    ) -> Float[Tensor, "*batch out_features"]:
        """Output (..., out_features) of input (..., in_features).

        Raises:
            TypeError: input is not floating point, or not of the dtype of the weights.
            ValueError: input has not in_features features, or is on another device.
        """
        try:
            output = F.linear(input, self.W.T, self.b)  # input @ W + b in one step
            if output.is_nested or output.is_complex() or output.device != self.W.device:
                raise TypeError("input: PyTorch takes it in silence")
            return output
        except Exception:
            refuse_bad_tokens("input", input, self.W.shape[0], self.W)
            raise

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "Projection":
        """A projection with a copy of the weights of an `nn.Linear`; frozen ones stay so.

        Raises:
            TypeError: no `nn.Linear`, or one with a forward of its own.
            ValueError: its weight is no parameter, but made anew at each call.
        """
        refuse_other_module("linear", linear, nn.Linear)
        projection = cls(linear.in_features, linear.out_features, linear.bias is not None)
        projection.to(linear.weight.device, linear.weight.dtype)
        with torch.no_grad():
            projection.W.copy_(linear.weight.T)
            if projection.b is not None:
                projection.b.copy_(linear.bias)
        projection.W.requires_grad_(linear.weight.requires_grad)
        if projection.b is not None:
            projection.b.requires_grad_(linear.bias.requires_grad)
        return projection

    def extra_repr(self) -> str:
        """What `print` shows of the layer, as for `nn.Linear`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.b is not None}"
