# Made from book/08_feed_forward.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The feed-forward network: two projections of each token with a bend between them.

Derived in chapter 8, "Feed-forward network" (book/08_feed_forward.ipynb).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.checks import require_probability, require_sizes
from attnlib.projection import Projection

Activation = Callable[[Tensor], Tensor]  # acts entry by entry


class FeedForwardNetwork(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, on each token by itself.

    Args:
        d_model: features of a token.
        d_ff: number of hidden features; `None` means 4 · d_model.
        dropout: probability in [0, 1] of dropping a hidden feature, in training only.
        activation: the function between the projections, entry by entry; ReLU unless
            another is given.

    Attributes:
        linear_1: `Projection(d_model, d_ff)`.
        linear_2: `Projection(d_ff, d_model)`.

    Raises:
        TypeError: d_model or d_ff is no whole number, or dropout is no number.
        ValueError: d_model or d_ff below 1, or dropout outside [0, 1].

    Source: chapter 8, eq-feed-forward; Vaswani et al. (2017), eq. 2.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        activation: Activation = torch.relu,
    ) -> None:
        super().__init__()
        require_sizes(d_model=d_model)
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.linear_1 = Projection(d_model, d_ff)
        self.linear_2 = Projection(d_ff, d_model)
        self.dropout = require_probability("dropout", dropout)
        self.activation = activation

    def forward(
        self, input: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """Output of the shape of input (..., d_model).

        Raises:
            TypeError: input is not floating point, or not of the dtype of the weights.
            ValueError: input has not d_model features, or is on another device.
        """
        hidden = self.activation(self.linear_1(input))
        return self.linear_2(F.dropout(hidden, self.dropout, self.training))

    @classmethod
    def from_torch(
        cls,
        linear_1: nn.Linear,
        linear_2: nn.Linear,
        activation: Activation = torch.relu,
    ) -> "FeedForwardNetwork":
        """A network with copies of two `nn.Linear`.

        Raises:
            TypeError: see `Projection.from_linear`.
            ValueError: see there; or the second does not map back what the first maps.
        """
        first, second = map(Projection.from_linear, (linear_1, linear_2))
        there, back = tuple(linear_1.weight.shape), tuple(linear_2.weight.shape)
        if there != back[::-1]:
            raise ValueError(
                f"linear_2: expected a weight of shape {there[::-1]}, got {back}"
            )
        network = cls(*there[::-1], activation=activation)
        network.linear_1, network.linear_2 = first, second
        return network
