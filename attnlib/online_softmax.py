# Made from book/13_online_softmax.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Softmax-weighted means block by block: partial results that can be merged.

Derived in chapter 13, "Online softmax" (book/13_online_softmax.ipynb), and in chapter 18,
"Fewer keys" (book/18_fewer_keys.ipynb).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnlib.checks import refuse_bad_block


class SoftmaxState(NamedTuple):
    """What is kept of the keys read so far: (m, l, O), for each query.

    The state of no keys at all, or of masked ones only, is (-inf, 0, 0).

    For autograd, `maximum` is a constant, a level of reference. `output` and `lse`, which
    do not depend on it, have the right gradients; `total` by itself has not.

    Args:
        maximum: m, shape (..., N), the largest score.
        total: l, shape (..., N), the sum of exp(score - m).
        output: O, shape (..., N, d_v), the attention output; 0 where no key is allowed.

    Source: chapter 13, eq-block-max, eq-block-sum, eq-block-output, eq-lse.
    """

    maximum: Float[Tensor, "*batch queries"]
    total: Float[Tensor, "*batch queries"]
    output: Float[Tensor, "*batch queries d_v"]

    @property
    def lse(self) -> Float[Tensor, "*batch queries"]:
        """Log-sum-exp of the scores, eq-lse, shape (..., N); -inf if no key is allowed."""
        return self.maximum + nonzero(self.total).log()


def nonzero(total: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The total, with 1 in place of 0: what one may divide by, and take the logarithm of.

    Source: chapter 13, the convention for a row in which everything is masked.
    """
    return total.masked_fill(total == 0, 1.0)


def finite(maximum: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The maximum, with 0 in place of -inf: what one may subtract from a score.

    Source: chapter 13, the convention for a row in which everything is masked.
    """
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def row_maximum(
    scores: Float[Tensor, "*batch queries keys"],
) -> Float[Tensor, "*batch queries"]:
    """The largest score of each row, a constant for autograd; -inf if there is no key.

    Source: chapter 13, eq-block-max.
    """
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    return scores.detach().amax(dim=-1)


def prepare_block(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and values of a block in the dtype to compute in.

    Args:
        scores: shape (..., N, keys).
        value: shape (..., keys, d_v), leading dimensions of scores.

    Returns:
        Both in the dtype of the scores, but float32 for anything shorter.

    Raises:
        TypeError, ValueError: see `refuse_bad_block`.

    Source: chapter 13, the contract of a block.
    """
    refuse_bad_block(scores, value)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return scores.to(dtype), value.to(dtype)


def block_state(
    scores: Float[Tensor, "*batch queries keys"], value: Float[Tensor, "*batch keys d_v"]
) -> SoftmaxState:
    """The state of one block of keys.

    Args:
        scores: scaled and masked scores, shape (..., N, keys); -inf forbids a pair. There
            may be no keys.
        value: the values of these keys, shape (..., keys, d_v).

    Returns:
        Maximum, total and output, in the dtype of the scores, but at least in float32.

    Raises:
        TypeError: not floating point.
        ValueError: wrong rank or mismatched shapes.

    Source: chapter 13, eq-block-max, eq-block-sum, eq-block-output.
    """
    scores, value = prepare_block(scores, value)
    maximum = row_maximum(scores)
    weights = torch.exp(scores - finite(maximum)[..., None])
    total = weights.sum(dim=-1)
    return SoftmaxState(maximum, total, weights @ value / nonzero(total)[..., None])


def refuse_unlike(a: SoftmaxState, b: SoftmaxState) -> None:
    """Refuses two states of which some part has another shape than the outputs ask for.

    Raises:
        ValueError: the shapes of the two states do not fit.

    Source: chapter 13.
    """
    for name, state in (("a", a), ("b", b)):
        rows = a.output.shape[:-1]
        expected = [tuple(shape) for shape in (rows, rows, a.output.shape)]
        got = [tuple(part.shape) for part in state]
        if got != expected:
            shapes = ", got ".join("{}, {} and {}".format(*s) for s in (expected, got))
            raise ValueError(f"{name}: expected shapes {shapes}")


def merge_states(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state of the keys of two states together.

    Associative, commutative, and with (-inf, 0, 0) as identity.

    Args:
        a: the state of some keys.
        b: the state of other keys for the same queries.

    Returns:
        The state that one block with all these keys would have.

    Raises:
        ValueError: the shapes of the two states do not fit.

    Source: chapter 13, eq-online-max, eq-online-sum, eq-online-output; Dao et al. (2022).
    """
    refuse_unlike(a, b)
    maximum = torch.maximum(a.maximum, b.maximum).detach()
    shift = finite(maximum)
    total_a = a.total * torch.exp(a.maximum - shift)
    total_b = b.total * torch.exp(b.maximum - shift)
    total = total_a + total_b
    # Divided first, the two factors are shares: no product exceeds the outputs.
    share_a, share_b = total_a / nonzero(total), total_b / nonzero(total)
    output = share_a[..., None] * a.output + share_b[..., None] * b.output
    return SoftmaxState(maximum, total, output)


def online_attention(blocks: Iterable[tuple[Tensor, Tensor]]) -> SoftmaxState:
    """Attention in one pass over blocks of keys, each of which is forgotten after its use.

    Args:
        blocks: pairs (scores, value) as for `block_state`, all for the same queries; at
            least one. A generator may compute the scores of a block when it is asked.

    Returns:
        The state of all keys: its `output` is the attention output, its `lse` the one
        number for each query that the weights can be recomputed from.

    Raises:
        TypeError: not floating point.
        ValueError: no block, wrong rank or mismatched shapes.

    Source: chapter 13, eq-online-max, eq-online-step, eq-running-output.
    """
    maximum, total, output = torch.tensor(-torch.inf, device="cpu"), 0.0, 0.0
    for scores, value in blocks:
        scores, value = prepare_block(scores, value)
        shape = (*scores.shape[:-1], value.shape[-1])
        if isinstance(output, Tensor) and output.shape != shape:
            before = tuple(output.shape)
            raise ValueError(f"blocks: expected outputs {before} as before, got {shape}")
        old, maximum = maximum, torch.maximum(maximum, row_maximum(scores))
        shift = finite(maximum)
        factor = torch.exp(old - shift)
        weights = torch.exp(scores - shift[..., None])
        total = factor * total + weights.sum(dim=-1)
        output = factor[..., None] * output + weights @ value
    if not isinstance(total, Tensor):
        raise ValueError("blocks: expected at least one block, got none")
    return SoftmaxState(maximum, total, output / nonzero(total)[..., None])


def merge_outputs(
    a: tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]],
    b: tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]],
) -> tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]:
    """Attention over two sets of keys, from the results for each of them.

    Gradients pass through outputs and log-sum-exps alike.

    Args:
        a: output (..., N, d_v) and log-sum-exp (..., N) of the scores for some keys; a
            query that may attend to none of them has output 0 and log-sum-exp -inf.
        b: the same for other keys and the same queries.

    Returns:
        Output and log-sum-exp for all these keys, in the wider dtype of the two: to merge
        many half-precision outputs, keep the log-sum-exps in float32.

    Raises:
        ValueError: the shapes of the two do not fit.

    Source: chapter 13, eq-lse-merge.
    """
    states = (SoftmaxState(lse, torch.ones_like(lse), output) for output, lse in (a, b))
    merged = merge_states(*states)
    return merged.output, merged.lse


def add_sink(
    output: Float[Tensor, "*batch queries d_v"],
    lse: Float[Tensor, "*batch queries"],
    sink: Float[Tensor, "..."],
) -> tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]:
    """Attention with one more score in the denominator, whose value is 0.

    Args:
        output: shape (..., N, d_v), of attention without a sink, such as `flash_attention`.
        lse: its log-sum-exp (..., N); -inf where a query may attend to nothing.
        sink: the score, one for all, or (heads, 1) with one for each head; the same for
            all queries. It gets a gradient if it needs one; -inf is no sink.

    Returns:
        Output and log-sum-exp with the sink, of the dtypes that they had.

    Raises:
        ValueError: another shape of sink.

    Source: chapter 18, eq-sink.
    """
    each = (*lse.shape[:-1], 1)  # the same for all queries
    sizes = zip(reversed(sink.shape), reversed(each), strict=False)
    if sink.dim() > lse.dim() or any(size not in (1, most) for size, most in sizes):
        raise ValueError(
            f"sink: expected one number, or (heads, 1), for lse {tuple(lse.shape)}, "
            f"got shape {tuple(sink.shape)}"
        )
    nothing = torch.zeros_like(output), sink.to(lse.dtype).expand(lse.shape)
    merged, total = merge_outputs((output, lse), nothing)
    return merged.to(output.dtype), total
