# Made from book/21_llama.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""RMS normalization with its backward by hand, in NumPy.

Derived in chapter 21, "Llama" (book/21_llama.ipynb).
"""

import numpy as np
from jaxtyping import Float

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import refuse_bad_tokens as refuse_bad_array
from attnlib.backprop.checks import require_eps, require_sizes
from attnlib.backprop.projection import sum_tokens


class RMSNormLayer(Layer):
    """input / √(mean(input²) + ε) · γ, with the mean over the features of each token.

    Args:
        d_model: features of a token.
        eps: ε, added to the mean square inside the root.

    Attributes:
        gamma: γ, shape (d_model,), 1 at the start.

    Raises:
        TypeError: d_model is no whole number.
        ValueError: d_model below 1, or eps below 0.

    Source: chapter 21, eq-rms-norm, eq-rms-norm-backward; Zhang and Sennrich (2019).
    """

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        require_sizes(d_model=d_model)
        self.eps = require_eps(eps)
        self.gamma = np.ones(d_model)

    def forward(
        self, input: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """Output of the shape of input (..., d_model).

        Raises:
            TypeError: input is not floating point, or not of the dtype of gamma.
            ValueError: input has not d_model features.
        """
        refuse_bad_array("input", input, len(self.gamma), self.gamma)
        wide = input.astype(np.result_type(input, np.float32), copy=False)
        inverse = 1 / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + self.eps)
        normalized = wide * inverse
        output = normalized * self.gamma
        if input.dtype == np.float16:
            output = output.astype(np.float16)
        self.remember(output, normalized=normalized, inverse=inverse)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*batch d_model"]
    ) -> Float[np.ndarray, "*batch d_model"]:
        """The gradient of the input; that of γ is in `gradients()`.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        cache = self.recall(d_output)
        normalized, d_model = cache["normalized"], len(self.gamma)
        grad_gamma = sum_tokens((d_output * normalized).reshape(-1, d_model))
        self._gradients = {"gamma": grad_gamma.astype(d_output.dtype, copy=False)}
        g = d_output * self.gamma
        along = (g * normalized).mean(axis=-1, keepdims=True)
        grad_input = (g - along * normalized) * cache["inverse"]
        return grad_input.astype(d_output.dtype, copy=False)
