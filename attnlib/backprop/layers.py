# Made from book/11_backward_layers.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The layers of a transformer beside attention, with their backward by hand, in NumPy.

Derived in chapter 11, "Backward through the layers" (book/11_backward_layers.ipynb).
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from attnlib.backprop.layer import Dropout, Layer, check_floating


def check_sizes(**sizes: int) -> None:
    """Refuses a number of features, or of words, below 1.

    Args:
        sizes: by the names of the arguments.

    Raises:
        ValueError: one of them is below 1.

    Source: chapter 11; the same words as in chapter 4.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def check_tokens(
    input: Any, features: int, parameter: np.ndarray, name: str = "input", dims: int = 1
) -> None:
    """Refuses what a layer can't take: a wrong dtype or a wrong number of features.

    A complex input, or a complex parameter, passes: that is a complex step.

    Args:
        input: expected (..., features).
        features: the size of its last dimension.
        parameter: of the layer; the input should have its precision.
        name: the argument's name, for the message.
        dims: the least number of dimensions.

    Raises:
        TypeError: not a floating-point array, or of another precision.
        ValueError: too few dimensions, or a last one of another size.

    Source: chapter 11; the same words as in chapter 4.
    """
    check_floating(name, input)
    if input.real.dtype != parameter.real.dtype:
        expected = f"expected {parameter.real.dtype} as the parameters"
        raise TypeError(f"{name}: {expected}, got {input.dtype}")
    if input.ndim < dims or input.shape[-1] != features:
        expected = f"expected at least {dims} dimensions, the last of {features} features"
        raise ValueError(f"{name}: {expected}, got shape {input.shape}")


def check_ids(name: str, ids: Any, size: int) -> None:
    """Refuses what does not number the words of a vocabulary.

    Args:
        name: the argument's name, for the message.
        ids: expected integers from 0 to size - 1.
        size: of the vocabulary.

    Raises:
        IndexError: a number outside the vocabulary; NumPy would count negative ones
            from the end.
        TypeError: not an array of integers.

    Source: chapter 11; chapter 9 for the words.
    """
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        got = ids.dtype if isinstance(ids, np.ndarray) else type(ids).__name__
        raise TypeError(f"{name}: expected an array of integers, got {got}")
    if ids.size and not 0 <= ids.min() <= ids.max() < size:
        expected = f"expected integers from 0 to {size - 1}"
        raise IndexError(f"{name}: {expected}, got {ids.min()} to {ids.max()}")


def cast(layer: Layer, dtype: Any) -> Layer:
    """The same layer, with its parameters and those of its parts converted to a dtype.

    The arrays are new ones: make an optimizer afterwards.

    Args:
        layer: changed in place.
        dtype: such as `np.float32`.

    Source: chapter 11.
    """
    for name, array in vars(layer).items():
        if isinstance(array, np.ndarray):
            setattr(layer, name, array.astype(dtype))
    for part in layer.parts().values():
        cast(part, dtype)
    return layer


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
        check_sizes(in_features=in_features, out_features=out_features)
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
        check_tokens(input, in_features, self.W)
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
        d_tall = d_output.reshape(-1, out_features)
        self._gradients = {"W": tall.T @ d_tall}
        if self.b is not None:
            self._gradients["b"] = d_tall.sum(axis=0)
        d_input = d_tall @ self.W.T
        return d_input.reshape(*d_output.shape[:-1], in_features)


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
        check_floating("input", input)
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
        d_hidden = self.dropout.backward(self.linear_2.backward(d_output))
        return self.linear_1.backward(self.activation.backward(d_hidden))


class LayerNorm(Layer):
    """(input - μ) / √(σ² + ε) · γ + β, with μ and σ² over the features of each token.

    Args:
        d_model: features of a token.
        eps: ε, added to the variance inside the root.

    Attributes:
        gamma: γ, shape (d_model,), 1 at the start.
        beta: β, shape (d_model,), 0 at the start.

    Raises:
        ValueError: d_model below 1, or eps below 0.

    Source: chapter 11, eq-layer-norm-backward, eq-layer-norm-backward-parameters;
    chapter 7, eq-layer-norm; Ba et al. (2016).
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        check_sizes(d_model=d_model)
        if not eps >= 0:
            raise ValueError(f"eps: expected a number of at least 0, got {eps}")
        self.eps = eps
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
        check_tokens(input, len(self.gamma), self.gamma)
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
        normalized, tokens = cache["normalized"], tuple(range(d_output.ndim - 1))
        self._gradients = {
            "gamma": (d_output * normalized).sum(axis=tokens, dtype=d_output.dtype),
            "beta": d_output.sum(axis=tokens),
        }
        g = d_output * self.gamma
        along = (g * normalized).mean(axis=-1, keepdims=True)
        d_input = g - g.mean(axis=-1, keepdims=True) - along * normalized
        return (d_input * cache["inverse"]).astype(d_output.dtype, copy=False)


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
        ValueError: a size below 1.

    Source: chapter 11, eq-embedding-backward.
    """

    def __init__(
        self, vocab_size: int, embed_dim: int, rng: np.random.Generator | None = None
    ) -> None:
        check_sizes(vocab_size=vocab_size, embed_dim=embed_dim)
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
        check_ids("ids", ids, len(self.weight))
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
        d_weight = np.zeros_like(self.weight)
        np.add.at(d_weight, ids, d_output)
        self._gradients = {"weight": d_weight}


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
        check_floating("logits", logits)
        if logits.ndim < 1 or logits.size == 0:
            raise ValueError(
                f"logits: expected at least one token, got shape {logits.shape}"
            )
        check_ids("targets", targets, logits.shape[-1])
        if targets.shape != logits.shape[:-1]:
            expected = f"expected shape {logits.shape[:-1]} as the tokens of logits"
            raise ValueError(f"targets: {expected}, got {targets.shape}")
        shifted = logits - logits.max(axis=-1, keepdims=True)
        right = np.take_along_axis(shifted, targets[..., None], axis=-1)
        exponentials = np.exp(shifted)
        total = exponentials.sum(axis=-1, keepdims=True)
        loss = np.mean(np.log(total) - right)
        self.remember(loss, probabilities=exponentials / total, targets=targets)
        return loss

    def backward(self) -> Float[np.ndarray, "*batch vocab"]:
        """The gradient of the logits: softmax, less 1 at the right word, over all tokens.

        Raises:
            RuntimeError: there was no forward yet.
        """
        cache = self.recall()
        targets, d_logits = cache["targets"][..., None], cache["probabilities"].copy()
        right = np.take_along_axis(d_logits, targets, axis=-1)
        np.put_along_axis(d_logits, targets, right - 1, axis=-1)
        d_logits /= targets.size
        return d_logits
