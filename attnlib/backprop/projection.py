# Made from book/11_backward_layers.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The linear layer output = input · W + b with its backward by hand, in NumPy.

Derived in chapter 11, "Backward through the layers" (book/11_backward_layers.ipynb).
"""

import math

import numpy as np
from jaxtyping import Float

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import refuse_bad_tokens, require_sizes


def sum_tokens(x: Float[np.ndarray, "tokens features"]) -> Float[np.ndarray, "features"]:
    """The sum over the tokens, in the dtype of x, added up in float32 at least.

    In float16, 2048 + 1 is 2048: a sum of ones would end there.

    Source: chapter 11, eq-projection-backward-bias.
    """
    return x.sum(axis=0, dtype=np.result_type(x, np.float32)).astype(x.dtype, copy=False)


class Projection(Layer):
    """output = input · W + b, on each token by itself.

    Args:
        in_features: features of an input token.
        out_features: features of an output token.
        bias: whether b is added.
        rng: where the first weights come from; `None` makes a generator of its own.

    Attributes:
        W: shape (in_features, out_features).
        b: shape (out_features,), or `None`.

    Raises:
        TypeError: a number of features that is no whole number.
        ValueError: a number of features below 1.

    Source: chapter 11, eq-projection-backward-weight, eq-projection-backward-bias,
    eq-projection-backward-input, eq-projection-backward-batch.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        rng: np.random.Generator | None = None,
    ) -> None:
        require_sizes(in_features=in_features, out_features=out_features)
        rng = np.random.default_rng() if rng is None else rng
        bound = 1 / math.sqrt(in_features)  # as in chapter 4
        self.W = rng.uniform(-bound, bound, (in_features, out_features))
        self.b = rng.uniform(-bound, bound, out_features) if bias else None

    def forward(
        self, input: Float[np.ndarray, "*batch in_features"]
    ) -> Float[np.ndarray, "*batch out_features"]:
        """Output (..., out_features) of input (..., in_features), which is kept.

        Raises:
            TypeError: input is not floating point, or not of the dtype of the weights.
            ValueError: input has not in_features features.
        """
        in_features, out_features = self.W.shape
        refuse_bad_tokens("input", input, in_features, self.W)
        tall = input.reshape(-1, in_features)  # all tokens below each other
        output = tall @ self.W
        if self.b is not None:
            output = output + self.b
        output = output.reshape(*input.shape[:-1], out_features)
        self.remember(output, tall=tall)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*batch out_features"]
    ) -> Float[np.ndarray, "*batch in_features"]:
        """The gradient of the input; those of the parameters are in `gradients()`.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        tall = self.recall(d_output)["tall"]
        in_features, out_features = self.W.shape
        grad_tall = d_output.reshape(-1, out_features)
        self._gradients = {"W": tall.T @ grad_tall}
        if self.b is not None:
            self._gradients["b"] = sum_tokens(grad_tall)
        grad_input = grad_tall @ self.W.T
        return grad_input.reshape(*d_output.shape[:-1], in_features)
