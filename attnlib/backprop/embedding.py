# Made from book/11_backward_layers.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The table of tokens with its backward by hand, in NumPy.

Derived in chapter 11, "Backward through the layers" (book/11_backward_layers.ipynb).
"""

import numpy as np
from jaxtyping import Float, Integer

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import require_ids, require_sizes


class Embedding(Layer):
    """Row t of a learned table for each token with number t.

    Args:
        vocab_size: number of rows V.
        embed_dim: features of a token.
        rng: where the first table comes from, normal numbers of variance 1; `None` makes a
            generator of its own.

    Attributes:
        weight: the table E, shape (vocab_size, embed_dim).

    Raises:
        TypeError: a size that is no whole number.
        ValueError: a size below 1.

    Source: chapter 11, eq-embedding-backward.
    """

    def __init__(
        self, vocab_size: int, embed_dim: int, rng: np.random.Generator | None = None
    ) -> None:
        require_sizes(vocab_size=vocab_size, embed_dim=embed_dim)
        rng = np.random.default_rng() if rng is None else rng
        self.weight = rng.standard_normal((vocab_size, embed_dim))

    def forward(
        self, ids: Integer[np.ndarray, "*batch"]
    ) -> Float[np.ndarray, "*batch embed_dim"]:
        """Rows (..., embed_dim) of ids of any shape.

        Raises:
            IndexError: a number outside the vocabulary.
            TypeError: ids is not an array of integers.
        """
        require_ids("ids", ids, len(self.weight))
        output = self.weight[ids]
        self.remember(output, ids=ids)
        return output

    def backward(self, d_output: Float[np.ndarray, "*batch embed_dim"]) -> None:
        """Nothing is returned, since ids have no gradient; the table's is in `gradients()`.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        ids = self.recall(d_output)["ids"]
        wide = np.result_type(d_output, np.float32)  # in float16, 2048 + 1 is 2048
        grad_weight = np.zeros(self.weight.shape, wide)
        np.add.at(grad_weight, ids, d_output)
        self._gradients = {"weight": grad_weight.astype(d_output.dtype, copy=False)}
