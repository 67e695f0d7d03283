# Made from book/19_split_and_paged.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Split attention: the keys of one query in shares, and the same bits in any company.

Derived in chapter 19, "Split and paged" (book/19_split_and_paged.ipynb).
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from attnlib.checks import (
    as_autocast,
    positive_scale,
    refuse_bad_inputs,
    require_count,
    require_scale,
)
from attnlib.masks import Mask, apply_mask, both_masks, causal_mask
from attnlib.online_softmax import SoftmaxState, finite, merge_states, nonzero, row_maximum


def sum_by_halves(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*rest"]:
    """The sum along a dimension, added in an order that its size alone decides.

    Source: chapter 19, eq-sum-by-halves.
    """
    if x.shape[dim] == 0:
        return x.sum(dim)
    while (size := x.shape[dim]) > 1:
        half = size // 2
        halves = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        odd = x.narrow(dim, 2 * half, size % 2)
        x = torch.cat([halves, odd], dim) if size % 2 else halves
    return x.squeeze(dim)


def split_state(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Tensor | None,
    scale: float,
) -> SoftmaxState:
    """The state of some keys, in float32 at least; the bits of a row are its own affair.

    Every operation here works number by number, but for sums, whose order is written down,
    and the maximum, which has none.

    Source: chapter 19, eq-batch-invariant, eq-sum-by-halves; chapter 13, eq-block-output.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    products = query[..., :, None, :] * key[..., None, :, :]  # (..., N, keys, d_k)
    scores = sum_by_halves(products, -1) * scale
    if mask is not None:
        scores = apply_mask(scores, mask)
    maximum = row_maximum(scores)
    weights = torch.exp(scores - finite(maximum)[..., None])
    total = sum_by_halves(weights, -1)
    products = weights[..., :, :, None] * value[..., None, :, :]  # (..., N, keys, d_v)
    output = sum_by_halves(products, -2) / nonzero(total)[..., None]
    return SoftmaxState(maximum, total, output)


def merge_splits(
    query: Float[Tensor, "*batch queries d_k"],
    d_v: int,
    splits: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    scale: float,
) -> SoftmaxState:
    """The state of all keys: that of no keys, then one share after the other.

    Shares at the end in which a row sees nothing leave its bits as they are.

    Source: chapter 19, eq-fixed-split; chapter 13, eq-online-output.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.new_zeros(query.shape[:-1], dtype=dtype)
    nothing = query.new_zeros((*rows.shape, d_v), dtype=dtype)
    state = SoftmaxState(rows - torch.inf, rows, nothing)
    for key, value, mask in splits:
        state = merge_states(state, split_state(query, key, value, mask, scale))
    return state


def split_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Mask | None = None,
    *,
    split_size: int,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> (
    Float[Tensor, "*batch queries d_v"]
    | tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]
):
    """softmax(QKᵀ/√d_k) V, the keys in shares of a fixed size; for few queries.

    Any split_size gives the same to round-off. One split_size gives a query the same bits,
    whatever else is in the batch, however many queries there are, and whether keys that it
    does not see stand behind the others; but `torch.compile` may fuse operations, and round
    otherwise. It takes N · split_size · (d_k + d_v) numbers for each matrix.

    Args:
        query: shape (..., N, d_k).
        key: shape (..., M, d_k).
        value: shape (..., M, d_v).
        mask: broadcasts to (..., N, M); boolean, True = may attend, or floating, added to
            the scores.
        split_size: keys in a share; the last share is filled up.
        causal: query i sees the keys up to i + M - N only; composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        Output (..., N, d_v), and on request the log-sum-exp (..., N), in float32 at least;
        0 and -inf where a query may attend to nothing.

    Raises:
        TypeError: a tensor of the wrong or a mixed dtype, or split_size is no whole number.
        ValueError: a wrong rank, mismatched shapes or devices, or split_size below 1.

    Source: chapter 19, eq-fixed-split, eq-batch-invariant; Dao et al. (2023).
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    refuse_bad_inputs(query, key, value, mask)
    require_count("split_size", split_size)
    query, scale = positive_scale(query, require_scale(scale))
    (queries, _), (keys, d_v) = query.shape[-2:], value.shape[-2:]
    past = query.new_ones(1, keys, dtype=torch.bool)  # a column for each key
    if causal:
        past = causal_mask(queries, keys, query.device)
    mask = both_masks(mask, past)
    spare = -keys % split_size
    key, value = (F.pad(x, (0, 0, 0, spare)) for x in (key, value))
    mask = F.pad(mask, (0, spare), value=0 if mask.dtype == torch.bool else -torch.inf)
    splits = zip(
        key.split(split_size, dim=-2),
        value.split(split_size, dim=-2),
        mask.split(split_size, dim=-1),
        strict=True,
    )
    state = merge_splits(query, d_v, splits if keys else (), scale)
    output = state.output.to(query.dtype)
    return (output, state.lse) if return_lse else output
