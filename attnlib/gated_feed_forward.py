# Made from book/21_llama.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The gated feed-forward network: what one projection says, if another lets it through.

Derived in chapter 21, "Llama" (book/21_llama.ipynb).
"""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.checks import require_sizes
from attnlib.feed_forward import Activation
from attnlib.projection import Projection


class GatedFeedForward(nn.Module):
    """(silu(x W_gate) ⊙ (x W_up)) W_down, on each token by itself; known as SwiGLU.

    Args:
        d_model: features of a token.
        d_ff: number of hidden features; `None` means 8/3 · d_model, rounded, which makes
            as many parameters as 4 · d_model do without a gate.
        activation: the bend of the gate, entry by entry.
        bias: whether the three projections have a bias.

    Attributes:
        gate_proj, up_proj: `Projection(d_model, d_ff)`.
        down_proj: `Projection(d_ff, d_model)`.

    Raises:
        TypeError: d_model or d_ff is no whole number.
        ValueError: d_model or d_ff below 1.

    Source: chapter 21, eq-gated-feed-forward, eq-gated-width; Shazeer (2020).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: Activation = F.silu,
        bias: bool = False,
    ) -> None:
        super().__init__()
        require_sizes(d_model=d_model)
        d_ff = round(8 * d_model / 3) if d_ff is None else d_ff
        self.gate_proj = Projection(d_model, d_ff, bias)
        self.up_proj = Projection(d_model, d_ff, bias)
        self.down_proj = Projection(d_ff, d_model, bias)
        self.activation = activation

    def forward(
        self, input: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """Output of the shape of input (..., d_model).

        Raises:
            TypeError: input is not floating point, or not of the dtype of the weights.
            ValueError: input has not d_model features, or is on another device.
        """
        hidden = self.activation(self.gate_proj(input)) * self.up_proj(input)
        return self.down_proj(hidden)
