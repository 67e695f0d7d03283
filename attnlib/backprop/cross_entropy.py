# Made from book/11_backward_layers.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The loss of a language model with its backward by hand, in NumPy.

Derived in chapter 11, "Backward through the layers" (book/11_backward_layers.ipynb).
"""

import numpy as np
from jaxtyping import Float, Integer

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import require_floating, require_ids


class CrossEntropy(Layer):
    """The mean over the tokens of -ln p, where p = softmax(logits) at the right word.

    Source: chapter 11, eq-cross-entropy-logits, eq-cross-entropy-backward.
    """

    def forward(
        self,
        logits: Float[np.ndarray, "*batch vocab"],
        targets: Integer[np.ndarray, "*batch"],
    ) -> np.inexact:
        """The loss, a single number of the dtype of the logits.

        Args:
            logits: shape (..., V).
            targets: numbers of the right words, the leading shape of the logits.

        Raises:
            IndexError: a target outside the vocabulary.
            TypeError: logits is not floating point, or targets are not integers.
            ValueError: targets has another shape, or there is no token.
        """
        require_floating("logits", logits)
        if logits.ndim < 1 or logits.size == 0:
            raise ValueError(
                f"logits: expected at least one token, got shape {logits.shape}"
            )
        require_ids("targets", targets, logits.shape[-1])
        if targets.shape != logits.shape[:-1]:
            expected = f"expected shape {logits.shape[:-1]} as the tokens of logits"
            raise ValueError(f"targets: {expected}, got {targets.shape}")
        shifted = logits - logits.max(axis=-1, keepdims=True)
        right = np.take_along_axis(shifted, targets[..., None], axis=-1)
        exponentials = np.exp(shifted)
        wide = np.result_type(logits, np.float32)  # float16 has no 2049
        total = exponentials.sum(axis=-1, keepdims=True, dtype=wide)
        loss = np.mean(np.log(total) - right).astype(logits.dtype)
        probabilities = (exponentials / total).astype(logits.dtype, copy=False)
        self.remember(loss, probabilities=probabilities, targets=targets)
        return loss

    def backward(self) -> Float[np.ndarray, "*batch vocab"]:
        """The gradient of the logits: softmax, less 1 at the right word, over all tokens.

        Raises:
            RuntimeError: there was no forward yet.
        """
        cache = self.recall()
        targets, grad_logits = cache["targets"][..., None], cache["probabilities"].copy()
        right = np.take_along_axis(grad_logits, targets, axis=-1)
        np.put_along_axis(grad_logits, targets, right - 1, axis=-1)
        grad_logits /= targets.size
        return grad_logits
