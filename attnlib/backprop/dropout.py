# Made from book/10_backward_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Dropout with its backward by hand: the smallest layer.

Derived in chapter 10, "Backward through attention" (book/10_backward_attention.ipynb).
"""

import numpy as np
from jaxtyping import Float

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import require_floating


class Dropout(Layer):
    """Sets entries to 0 at random and divides the others by 1 - p, in training only.

    Args:
        probability: p in [0, 1], of dropping an entry.
        rng: where the random numbers come from; `None` makes a generator of its own.

    Raises:
        ValueError: the probability lies outside [0, 1].

    Source: chapter 10, eq-dropout-backward; chapter 3, eq-dropout.
    """

    def __init__(self, probability: float, rng: np.random.Generator | None = None) -> None:
        if not 0.0 <= probability <= 1.0:
            expected = "expected a probability between 0 and 1"
            raise ValueError(f"dropout: {expected}, got {probability}")
        self.probability = float(probability)  # one of NumPy has a dtype
        self.rng = np.random.default_rng() if rng is None else rng

    def forward(self, input: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """The input times factors of 0 or 1/(1 - p); itself where nothing is dropped.

        Raises:
            TypeError: input is not a floating-point array.
        """
        require_floating("input", input)
        factors = None
        if self.training and self.probability > 0:
            kept = self.rng.random(input.shape) >= self.probability
            factors = kept.astype(input.real.dtype)
            factors /= max(1 - self.probability, np.finfo(factors.dtype).tiny)
        output = input if factors is None else input * factors
        self.remember(output, factors=factors)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*shape"]
    ) -> Float[np.ndarray, "*shape"]:
        """The gradient of the input: d_output times the same factors.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        factors = self.recall(d_output)["factors"]
        return d_output if factors is None else d_output * factors
