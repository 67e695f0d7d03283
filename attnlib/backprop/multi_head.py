# Made from book/12_backward_network.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Multi-head attention with its backward by hand, in NumPy.

Derived in chapter 12, "A network without autograd" (book/12_backward_network.ipynb).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from attnlib.backprop.attention import Mask, ScaledDotProductAttention
from attnlib.backprop.base import Layer
from attnlib.backprop.checks import refuse_bad_tokens, require_whole
from attnlib.backprop.projection import Projection


def split_heads(
    x: Float[np.ndarray, "*batch tokens embed_dim"], num_heads: int
) -> Float[np.ndarray, "*batch heads tokens d_k"]:
    """Tokens (..., n, embed_dim) as heads (..., num_heads, n, embed_dim / num_heads).

    Source: chapter 12, eq-split-backward; chapter 5, eq-head-blocks.
    """
    d_k = x.shape[-1] // num_heads
    return x.reshape(*x.shape[:-1], num_heads, d_k).swapaxes(-3, -2)


def merge_heads(
    x: Float[np.ndarray, "*batch heads tokens d_k"],
) -> Float[np.ndarray, "*batch tokens embed_dim"]:
    """The inverse of `split_heads`: the heads side by side, which is Concat.

    Source: chapter 12, eq-concat-backward; chapter 5, eq-multi-head.
    """
    side_by_side = x.swapaxes(-3, -2)
    *leading, heads, d_k = side_by_side.shape
    return side_by_side.reshape(*leading, heads * d_k)


class MultiHeadAttention(Layer):
    """Concat(head_1, …, head_h) W^O, head_i = Attention(X_Q W_i^Q, X_K W_i^K, X_V W_i^V).

    Args:
        embed_dim: features of a token, d_model; divisible by num_heads.
        num_heads: number of heads h; each has embed_dim / num_heads features.
        attention: what a head is, see `make_heads`; `None` means the scaled dot product.
        bias: whether the four projections have a bias.
        rng: where the first weights come from; `None` makes a generator of its own.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: layers `Projection(embed_dim, embed_dim)`.
        attention: one layer for all heads.

    Raises:
        TypeError: a size is no whole number, or attention not what `make_heads` takes.
        ValueError: embed_dim is not divisible by num_heads, or a wrong number of heads.

    Source: chapter 12, eq-output-projection-backward, eq-split-backward,
    eq-concat-backward, eq-self-attention-backward.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: type[Layer] | Layer | Sequence[Layer] | None = None,
        bias: bool = True,
        rng: np.random.Generator | None = None,
    ) -> None:
        require_whole(embed_dim=embed_dim, num_heads=num_heads)
        if num_heads < 1 or embed_dim % num_heads:
            expected = f"expected a multiple of num_heads = {num_heads}"
            raise ValueError(f"embed_dim: {expected}, got {embed_dim}")
        rng = np.random.default_rng() if rng is None else rng
        self.num_heads = num_heads
        self.q_proj = Projection(embed_dim, embed_dim, bias, rng)
        self.k_proj = Projection(embed_dim, embed_dim, bias, rng)
        self.v_proj = Projection(embed_dim, embed_dim, bias, rng)
        self.out_proj = Projection(embed_dim, embed_dim, bias, rng)
        self.attention = make_heads(attention, num_heads)

    def forward(
        self,
        query: Float[np.ndarray, "*batch queries embed_dim"],
        key: Float[np.ndarray, "*batch keys embed_dim"] | None = None,
        value: Float[np.ndarray, "*batch keys embed_dim"] | None = None,
        mask: Mask | None = None,
    ) -> tuple[
        Float[np.ndarray, "*batch queries embed_dim"], list[np.ndarray | None] | None
    ]:
        """Output (..., N, embed_dim), and a list with the weights (..., N, M) of each head.

        As in chapter 5, a head that never forms them has `None`, and if none does, there is
        `None` in place of the list.

        Args:
            query: tokens (..., N, embed_dim).
            key: tokens (..., M, embed_dim); `None` means the query: self-attention.
            value: tokens (..., M, embed_dim); `None` means the key.
            mask: (N, M), or 4-D broadcasting to (batch, heads, N, M); boolean, True =
                may attend, or floating, added to the scores.

        Raises:
            TypeError: an array of the wrong or a mixed dtype.
            ValueError: wrong shapes, or a mask of neither 2 nor 4 dimensions.
        """
        kept = {"shared_key": key is None, "shared_value": value is None}
        key = query if key is None else key
        value = key if value is None else value
        inputs = {"query": query, "key": key, "value": value}
        for name, x in inputs.items():
            refuse_bad_tokens(name, x, len(self.q_proj.W), self.q_proj.W, dims=2)
        if mask is not None and np.ndim(mask) not in (2, 4):
            expected = "expected 2 dimensions (queries, keys) or 4 (batch, heads, …)"
            raise ValueError(f"mask: {expected}, got shape {np.shape(mask)}")
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = [
            split_heads(projection.forward(x), self.num_heads)
            for projection, x in zip(projections, inputs.values(), strict=True)
        ]
        output, weights = self.attention.forward(*heads, mask)
        if isinstance(weights, np.ndarray):
            weights = list(np.moveaxis(weights, -3, 0))
        output = self.out_proj.forward(merge_heads(output))
        self.remember(output, **kept)
        return output, weights

    def backward(
        self, d_output: Float[np.ndarray, "*batch queries embed_dim"]
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """The gradients of query, key and value, of the shapes of the inputs.

        An input that was left out has `None`: it was another one, whose gradient holds the
        sum. So self-attention gives (d_query, None, None).

        Args:
            d_output: the gradient of the output (..., N, embed_dim).

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        kept = self.recall(d_output)
        grad_heads = split_heads(self.out_proj.backward(d_output), self.num_heads)
        grad_q, grad_k, grad_v = map(merge_heads, self.attention.backward(grad_heads))
        d_query, d_key = self.q_proj.backward(grad_q), self.k_proj.backward(grad_k)
        d_value = self.v_proj.backward(grad_v)
        if kept["shared_value"]:
            d_key, d_value = d_key + d_value, None
        if kept["shared_key"]:
            d_query, d_key = d_query + d_key, None
        return d_query, d_key, d_value


class EachHead(Layer):
    """A different attention for each head, as one attention of all heads.

    Args:
        heads: the attentions, each a `Layer` with the forward and backward of
            `ScaledDotProductAttention`.

    Source: chapter 12, eq-split-backward.
    """

    def __init__(self, heads: Sequence[Layer]) -> None:
        self.heads = list(heads)

    def parts(self) -> dict[str, Layer]:
        """The attentions, by the numbers of their heads."""
        return {str(h): head for h, head in enumerate(self.heads)}

    def forward(
        self,
        query: Float[np.ndarray, "*batch heads queries d_k"],
        key: Float[np.ndarray, "*batch heads keys d_k"],
        value: Float[np.ndarray, "*batch heads keys d_v"],
        mask: Mask | None = None,
    ) -> tuple[
        Float[np.ndarray, "*batch heads queries d_v"], list[np.ndarray | None] | None
    ]:
        """Output (..., heads, N, d_v), a list of each head's weights, or `None` if none.

        Args:
            query: shape (..., heads, N, d_k).
            key: shape (..., heads, M, d_k).
            value: shape (..., heads, M, d_v).
            mask: (N, M), or 4-D broadcasting to (batch, heads, N, M).

        Raises:
            TypeError, ValueError: what the attentions refuse.
        """
        outputs, weights = [], []
        for h, head in enumerate(self.heads):
            own = mask
            if mask is not None and mask.ndim == 4:
                own = mask[:, h if mask.shape[1] > 1 else 0]
            q, k, v = (x[..., h, :, :] for x in (query, key, value))
            output, of_head = head.forward(q, k, v, own)
            outputs.append(output)
            weights.append(of_head)
        output = np.stack(outputs, axis=-3)
        self.remember(output)
        formed = any(of_head is not None for of_head in weights)
        return output, weights if formed else None

    def backward(
        self, d_output: Float[np.ndarray, "*batch heads queries d_v"]
    ) -> tuple[
        Float[np.ndarray, "*batch heads queries d_k"],
        Float[np.ndarray, "*batch heads keys d_k"],
        Float[np.ndarray, "*batch heads keys d_v"],
    ]:
        """The gradients of query, key and value.

        Raises:
            RuntimeError: there was no forward yet.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        self.recall(d_output)
        per_head = [
            head.backward(d_output[..., h, :, :]) for h, head in enumerate(self.heads)
        ]
        d_query, d_key, d_value = (
            np.stack(d, axis=-3) for d in zip(*per_head, strict=True)
        )
        return d_query, d_key, d_value


def make_heads(
    attention: type[Layer] | Layer | Sequence[Layer] | None, num_heads: int
) -> Layer:
    """One attention of all heads, whatever was given.

    Args:
        attention: a class that can be made without arguments, an instance, a list of
            num_heads instances, or `None` for the scaled dot product.
        num_heads: number of heads.

    Raises:
        TypeError: something else.
        ValueError: a list of another length.

    Source: chapter 12; chapter 5 for the words.
    """
    if attention is None:
        return ScaledDotProductAttention()
    if isinstance(attention, type) and issubclass(attention, Layer):
        return attention()
    if isinstance(attention, Layer):
        return attention
    if not isinstance(attention, list | tuple) or not all(
        isinstance(head, Layer) for head in attention
    ):
        wanted = "attention: expected a Layer with a backward, its class, or a list of them"
        raise TypeError(f"{wanted}, got {attention!r}")
    if len(attention) != num_heads:
        count = len(attention)
        raise ValueError(
            f"attention: expected {num_heads} instances, one a head, got {count}"
        )
    return EachHead(attention)
