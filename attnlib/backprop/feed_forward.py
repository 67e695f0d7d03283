# Made from book/11_backward_layers.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The feed-forward network with its backward by hand, in NumPy.

Derived in chapter 11, "Backward through the layers" (book/11_backward_layers.ipynb).
"""

import numpy as np
from jaxtyping import Float

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import require_floating, require_sizes
from attnlib.backprop.dropout import Dropout
from attnlib.backprop.projection import Projection


class ReLU(Layer):
    """max(0, z), entry by entry; its derivative at 0 is taken to be 0.

    Its output is kept, not copied: leave it unchanged between forward and backward.

    Source: chapter 11, eq-relu-backward.
    """

    def forward(self, input: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Output of the shape of input.

        Raises:
            TypeError: input is not a floating-point array.
        """
        require_floating("input", input)
        output = np.maximum(input, 0)
        self.remember(output, rectified=output)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*shape"]
    ) -> Float[np.ndarray, "*shape"]:
        """The gradient of the input: d_output where the output is positive, otherwise 0.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        rectified = self.recall(d_output)["rectified"]
        return d_output * (rectified > 0)


class FeedForwardNetwork(Layer):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, on each token by itself.

    Args:
        d_model: features of a token.
        d_ff: number of hidden features; `None` means 4 · d_model.
        dropout: probability in [0, 1] of dropping a hidden feature, in training only.
        activation: a `Layer` without parameters that acts entry by entry; `None` means
            `ReLU()`.
        rng: where the first weights and dropout take their random numbers from.

    Attributes:
        linear_1: `Projection(d_model, d_ff)`.
        activation, dropout: layers, in this order.
        linear_2: `Projection(d_ff, d_model)`.

    Raises:
        TypeError: d_model or d_ff is no whole number.
        ValueError: d_model or d_ff below 1, or dropout outside [0, 1].

    Source: chapter 11, eq-feed-forward-backward; chapter 8, eq-feed-forward.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        activation: Layer | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        require_sizes(d_model=d_model)
        rng = np.random.default_rng() if rng is None else rng
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.linear_1 = Projection(d_model, d_ff, rng=rng)
        self.activation = ReLU() if activation is None else activation
        self.dropout = Dropout(dropout, rng)
        self.linear_2 = Projection(d_ff, d_model, rng=rng)

    def forward(
        self, input: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """Output of the shape of input (..., d_model).

        Raises:
            TypeError: input is not floating point, or not of the dtype of the weights.
            ValueError: input has not d_model features.
        """
        hidden = self.activation.forward(self.linear_1.forward(input))
        return self.linear_2.forward(self.dropout.forward(hidden))

    def backward(
        self, d_output: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """The gradient of the input; those of the parameters are in `gradients()`.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        grad_hidden = self.dropout.backward(self.linear_2.backward(d_output))
        return self.linear_1.backward(self.activation.backward(grad_hidden))
