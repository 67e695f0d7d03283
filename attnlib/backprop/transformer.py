# Made from book/12_backward_network.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The transformer of chapter 9 with its backward by hand, in NumPy.

Derived in chapter 12, "A network without autograd" (book/12_backward_network.ipynb).
"""

import numpy as np
from jaxtyping import Float, Integer

from attnlib.backprop.attention import Mask, ScaledDotProductAttention
from attnlib.backprop.base import Layer
from attnlib.backprop.checks import require_sizes
from attnlib.backprop.dropout import Dropout
from attnlib.backprop.embedding import Embedding
from attnlib.backprop.feed_forward import FeedForwardNetwork
from attnlib.backprop.layer_norm import LayerNorm
from attnlib.backprop.multi_head import MultiHeadAttention
from attnlib.backprop.projection import sum_tokens


class TransformerBlock(Layer):
    """y = x + MultiHead(norm_1(x)), then output = y + FFN(norm_2(y)): pre-norm.

    Args:
        embed_dim: features of a token; divisible by num_heads.
        num_heads: number of heads.
        d_ff: hidden features of the feed-forward network; `None` means 4 · embed_dim.
        attention: what a head is, see `make_heads`; `None` means the scaled dot product
            with this dropout, not causal.
        dropout: probability in [0, 1] of dropping an entry of what is added to x, a hidden
            feature or, if attention is `None`, a weight; in training only.
        rng: where the first weights and dropout take their random numbers from.

    Attributes:
        norm_1, attention, norm_2, feed_forward: `LayerNorm`, `MultiHeadAttention`,
            `LayerNorm` and `FeedForwardNetwork`.

    Raises:
        TypeError: a size is no whole number, or attention not what `make_heads` takes.
        ValueError: embed_dim not divisible by num_heads, or dropout outside [0, 1].

    Source: chapter 12, eq-block-backward; chapter 9, eq-pre-norm.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        d_ff: int | None = None,
        attention: Layer | None = None,
        dropout: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        require_sizes(embed_dim=embed_dim)
        rng = np.random.default_rng() if rng is None else rng
        if attention is None:
            attention = ScaledDotProductAttention(dropout, rng=rng)
        self.norm_1, self.norm_2 = LayerNorm(embed_dim), LayerNorm(embed_dim)
        self.attention = MultiHeadAttention(embed_dim, num_heads, attention, rng=rng)
        self.feed_forward = FeedForwardNetwork(embed_dim, d_ff, dropout, rng=rng)
        self.dropout_1, self.dropout_2 = Dropout(dropout, rng), Dropout(dropout, rng)

    def forward(
        self,
        x: Float[np.ndarray, "*batch tokens embed_dim"],
        mask: Mask | None = None,
    ) -> Float[np.ndarray, "*batch tokens embed_dim"]:
        """Output of the shape of x.

        Args:
            x: tokens (..., n, embed_dim).
            mask: as for `MultiHeadAttention`.

        Raises:
            TypeError, ValueError: x or mask is not what the parts take.
        """
        attended, _ = self.attention.forward(self.norm_1.forward(x), mask=mask)
        y = x + self.dropout_1.forward(attended)
        processed = self.feed_forward.forward(self.norm_2.forward(y))
        output = y + self.dropout_2.forward(processed)
        self.remember(output)
        return output

    def backward(
        self, d_output: Float[np.ndarray, "*batch tokens embed_dim"]
    ) -> Float[np.ndarray, "*batch tokens embed_dim"]:
        """The gradient of x; those of the parameters are in `gradients()`.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        self.recall(d_output)
        grad_processed = self.dropout_2.backward(d_output)
        grad_y = d_output + self.norm_2.backward(self.feed_forward.backward(grad_processed))
        grad_attended, _, _ = self.attention.backward(self.dropout_1.backward(grad_y))
        return grad_y + self.norm_1.backward(grad_attended)


class LanguageModel(Layer):
    """Chapter 9's language model, pre-norm, with learned positions and a tied table.

    Args:
        vocab_size: number of different tokens V.
        context_length: the most tokens that it can see.
        embed_dim, num_heads, d_ff, dropout: as for `TransformerBlock`.
        num_layers: number of blocks.
        rng: where the first weights and dropout take their random numbers from.

    Attributes:
        token_embedding: `Embedding`; its table also makes the logits.
        positions: what is added at each position, (context_length, embed_dim).
        blocks: the blocks, each a `TransformerBlock` with causal attention.
        norm: `LayerNorm` after the last block.

    The parameters have the names of `attnlib.LanguageModel`, and the same shapes.

    Raises:
        TypeError: a size is no whole number.
        ValueError: a size below 1, embed_dim not divisible by num_heads, or dropout
            outside [0, 1].

    Source: chapter 12, eq-tied-backward, eq-positions-backward; chapter 9, eq-next-token,
    eq-tied-logits.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        require_sizes(context_length=context_length, num_layers=num_layers)
        rng = np.random.default_rng() if rng is None else rng
        self.token_embedding = Embedding(vocab_size, embed_dim, rng)
        self.positions = rng.standard_normal((context_length, embed_dim))
        # As in chapter 9: tokens and positions start with length 1.
        self.token_embedding.weight *= embed_dim**-0.5
        self.positions *= embed_dim**-0.5
        self.dropout = Dropout(dropout, rng)
        self.blocks = []
        for _ in range(num_layers):
            heads = ScaledDotProductAttention(dropout, causal=True, rng=rng)
            block = TransformerBlock(embed_dim, num_heads, d_ff, heads, dropout, rng)
            self.blocks.append(block)
        self.norm = LayerNorm(embed_dim)

    def parts(self) -> dict[str, Layer]:
        """The layers that this one is made of, the blocks by number."""
        blocks = {f"blocks.{i}": block for i, block in enumerate(self.blocks)}
        return super().parts() | blocks

    def forward(
        self, ids: Integer[np.ndarray, "*batch tokens"]
    ) -> Float[np.ndarray, "*batch tokens vocab_size"]:
        """Logits (..., n, V) of the next token at each position.

        Args:
            ids: tokens (..., n) as integers below vocab_size, n at most context_length.

        Raises:
            IndexError: a number outside the vocabulary.
            TypeError: ids is not an array of integers.
            ValueError: more tokens than context_length, or no dimension of tokens.
        """
        if np.ndim(ids) < 1 or np.shape(ids)[-1] > len(self.positions):
            expected = f"expected at most context_length = {len(self.positions)} tokens in"
            raise ValueError(f"ids: {expected} the last dimension, got {np.shape(ids)}")
        embedded = self.token_embedding.forward(ids)
        x = self.dropout.forward(embedded + self.positions[: embedded.shape[-2]])
        for block in self.blocks:
            x = block.forward(x)
        x = self.norm.forward(x)
        logits = x @ self.token_embedding.weight.T
        self.remember(logits, x=x)
        return logits

    def backward(self, d_output: Float[np.ndarray, "*batch tokens vocab_size"]) -> None:
        """Nothing is returned, since ids have no gradient; see `gradients()`.

        Args:
            d_output: the gradient of the logits.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        x = self.recall(d_output)["x"]
        embed_dim, tokens = x.shape[-1], x.shape[-2]
        grad_x = self.norm.backward(d_output @ self.token_embedding.weight)
        for block in reversed(self.blocks):
            grad_x = block.backward(grad_x)
        grad_x = self.dropout.backward(grad_x)
        grad_positions = np.zeros_like(self.positions)
        over_texts = sum_tokens(grad_x.reshape(-1, tokens * embed_dim))
        grad_positions[:tokens] = over_texts.reshape(tokens, embed_dim)
        self._gradients = {"positions": grad_positions}
        self.token_embedding.backward(grad_x)
        # The table is used twice: what the logits send back is added to the gradient.
        grad_logits = d_output.reshape(-1, d_output.shape[-1])
        grad_table = self.token_embedding.gradients()["weight"]
        grad_table += grad_logits.T @ x.reshape(-1, embed_dim)
