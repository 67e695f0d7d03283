# Made from book/21_llama.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The gated feed-forward network with its backward by hand, in NumPy.

Derived in chapter 21, "Llama" (book/21_llama.ipynb).
"""

import numpy as np
from jaxtyping import Float

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import require_floating
from attnlib.backprop.checks import require_sizes as require_array_sizes
from attnlib.backprop.projection import Projection as ArrayProjection  # not PyTorch's


class SiLU(Layer):
    """z σ(z), entry by entry, with σ(z) = 1 / (1 + e^(-z)).

    Source: chapter 21, eq-silu, eq-silu-backward.
    """

    def forward(self, input: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Output of the shape of input.

        Raises:
            TypeError: input is not a floating-point array.
        """
        require_floating("input", input)
        share = (1 + np.tanh(input / 2)) / 2  # σ(z), without a power that overflows
        output = input * share
        self.remember(output, z=input, share=share)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*shape"]
    ) -> Float[np.ndarray, "*shape"]:
        """The gradient of the input.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        cache = self.recall(d_output)
        z, share = cache["z"], cache["share"]
        return d_output * share * (1 + z * (1 - share))


class GatedFeedForwardLayer(Layer):
    """(silu(x W_gate) ⊙ (x W_up)) W_down, on each token by itself; known as SwiGLU.

    Args:
        d_model: features of a token.
        d_ff: number of hidden features; `None` means 8/3 · d_model, rounded.
        activation: a `Layer` without parameters that acts entry by entry; `None` means
            `SiLU()`.
        bias: whether the three projections have a bias.
        rng: where the first weights take their random numbers from.

    Attributes:
        gate_proj, up_proj: `Projection(d_model, d_ff)`.
        activation: a layer.
        down_proj: `Projection(d_ff, d_model)`.

    Raises:
        TypeError: d_model or d_ff is no whole number.
        ValueError: d_model or d_ff below 1.

    Source: chapter 21, eq-gated-feed-forward, eq-gated-backward; Shazeer (2020).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: Layer | None = None,
        bias: bool = False,
        rng: np.random.Generator | None = None,
    ) -> None:
        require_array_sizes(d_model=d_model)
        rng = np.random.default_rng() if rng is None else rng
        d_ff = round(8 * d_model / 3) if d_ff is None else d_ff
        self.gate_proj = ArrayProjection(d_model, d_ff, bias, rng)
        self.up_proj = ArrayProjection(d_model, d_ff, bias, rng)
        self.activation = SiLU() if activation is None else activation
        self.down_proj = ArrayProjection(d_ff, d_model, bias, rng)

    def forward(
        self, input: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """Output of the shape of input (..., d_model).

        Raises:
            TypeError: input is not floating point, or not of the dtype of the weights.
            ValueError: input has not d_model features.
        """
        gate = self.activation.forward(self.gate_proj.forward(input))
        up = self.up_proj.forward(input)
        output = self.down_proj.forward(gate * up)
        self.remember(output, gate=gate, up=up)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """The gradient of the input; those of the parameters are in `gradients()`.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        cache = self.recall(d_output)
        grad_hidden = self.down_proj.backward(d_output)
        grad_gate = self.activation.backward(grad_hidden * cache["up"])
        grad_input = self.gate_proj.backward(grad_gate)
        return grad_input + self.up_proj.backward(grad_hidden * cache["gate"])
