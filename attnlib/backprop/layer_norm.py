# Made from book/11_backward_layers.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Layer normalization with its backward by hand, in NumPy.

Derived in chapter 11, "Backward through the layers" (book/11_backward_layers.ipynb).
"""

import numpy as np
from jaxtyping import Float

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import refuse_bad_tokens, require_eps, require_sizes
from attnlib.backprop.projection import sum_tokens


class LayerNorm(Layer):
    """(input - μ) / √(σ² + ε) · γ + β, with μ and σ² over the features of each token.

    Args:
        d_model: features of a token.
        eps: ε, added to the variance inside the root.

    Attributes:
        gamma: γ, shape (d_model,), 1 at the start.
        beta: β, shape (d_model,), 0 at the start.

    Raises:
        TypeError: d_model is no whole number.
        ValueError: d_model below 1, or eps below 0.

    Source: chapter 11, eq-layer-norm-backward, eq-layer-norm-backward-parameters;
    chapter 7, eq-layer-norm; Ba et al. (2016).
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        require_sizes(d_model=d_model)
        self.eps = require_eps(eps)
        self.gamma = np.ones(d_model)
        self.beta = np.zeros(d_model)

    def forward(
        self, input: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """Output of the shape of input (..., d_model).

        Raises:
            TypeError: input is not floating point, or not of the dtype of the parameters.
            ValueError: input has not d_model features.
        """
        refuse_bad_tokens("input", input, len(self.gamma), self.gamma)
        # As in chapter 7: in float16 the squares of a few hundred would overflow.
        wide = np.result_type(input, np.float32)
        centered = input - input.mean(axis=-1, keepdims=True, dtype=wide)
        variance = (centered**2).mean(axis=-1, keepdims=True)
        inverse = 1 / np.sqrt(variance + self.eps)
        normalized = centered * inverse
        output = normalized * self.gamma + self.beta
        if input.dtype == np.float16:
            output = output.astype(np.float16)
        self.remember(output, normalized=normalized, inverse=inverse)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """The gradient of the input; those of γ and β are in `gradients()`.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        cache = self.recall(d_output)
        normalized, d_model = cache["normalized"], len(self.gamma)
        grad_gamma = sum_tokens((d_output * normalized).reshape(-1, d_model))
        self._gradients = {
            "gamma": grad_gamma.astype(d_output.dtype, copy=False),
            "beta": sum_tokens(d_output.reshape(-1, d_model)),
        }
        g = d_output * self.gamma
        along = (g * normalized).mean(axis=-1, keepdims=True)
        grad_input = g - g.mean(axis=-1, keepdims=True) - along * normalized
        return (grad_input * cache["inverse"]).astype(d_output.dtype, copy=False)
