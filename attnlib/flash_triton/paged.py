# Made from book/19_split_and_paged.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Pages in a kernel: the keys are read where they lie, through the table.

Derived in chapter 19, "Split and paged" (book/19_split_and_paged.ipynb).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnlib.checks import (
    positive_scale,
    require_count,
    require_scale,
    require_window,
)
from attnlib.flash_triton.attention import refusal
from attnlib.flash_triton.blocks import heads_of, matrix_of, tl, triton
from attnlib.flash_triton.launch import capability_of, interpreted, launch, padded
from attnlib.flash_triton.split import refuse_gradients, split_setting
from attnlib.flash_triton.visible import LOG2E
from attnlib.paged import PagedCache, PageTable, table_of


@triton.jit
def load_tokens(
    heads, head, table, token, end, PAGE: tl.constexpr, D, PADDED: tl.constexpr
):
    """Rows of these tokens, (tokens, PADDED), from their pages; 0 from `end` on.

    Args:
        heads: the pages as Heads: a page is a batch, a place in it a row.
        head: which of the heads.
        table: address of the sequence's first page number.
        token: their numbers in the sequence, (tokens,).
        end: the first token that is not read.
        PAGE: tokens in a page.
        D: features.
        PADDED: columns of the result.

    Source: chapter 19, eq-page-place.
    """
    inside = token < end
    page = tl.load(table + token // PAGE, mask=inside, other=0)
    column = tl.arange(0, PADDED)[None, :]
    at = tl.cast(page, tl.int64) * heads.batch + tl.cast(token % PAGE, tl.int64) * heads.row
    at = heads.pointer + tl.cast(head, tl.int64) * heads.head + at
    pointers = at[:, None] + column * heads.column
    return tl.load(pointers, mask=inside[:, None] & (column < D), other=0.0)


@triton.jit
def paged_step(
    q, own, last, window, keys, values, head, table, at, end, maximum, total, accumulator,
    to_base_2, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Takes one block of tokens into the running softmax of a tile of rows.

    Source: chapter 15, eq-raw-maximum; chapter 13, eq-online-step.
    """
    token = at + tl.arange(0, BLOCK_K)
    k = load_tokens(keys, head, table, token, end, PAGE, D_K, q.shape[1])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    seen = (token < end)[None, :] & (token[None, :] <= last)
    seen &= tl.abs(own - token[None, :]) < window
    scores = tl.where(seen, scores, float("-inf"))
    raised = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(raised == float("-inf"), 0.0, raised) * to_base_2
    weights = tl.exp2(scores * to_base_2 - shift[:, None])
    decay = tl.exp2(maximum * to_base_2 - shift)
    total = total * decay + tl.sum(weights, 1)
    v = load_tokens(values, head, table, token, end, PAGE, D_V, accumulator.shape[1])
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
    return raised, total, accumulator


@triton.jit
def paged_kernel(
    query, keys, values, table, lengths, parts, levels,
    heads, group, queries, most, splits, split_size, window, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile of rows for one share of a sequence's tokens.

    Source: chapter 19, eq-page-place, eq-fixed-split; appendix E, eq-group-rows.
    """
    rows = group * queries
    split = tl.program_id(0) % splits
    tiles = tl.cdiv(rows, ROWS)
    index = tl.program_id(0) // splits // tiles
    row = tl.program_id(0) // splits % tiles * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(row, rows - 1)[:, None]  # what hangs over repeats the last row
    query_at = real % queries
    query = matrix_of(query, index * group + real // queries, heads * group, queries, D_K)
    table += tl.cast(index // heads, tl.int64) * most
    length = tl.load(lengths + index // heads)

    column = tl.arange(0, PADDED_K)[None, :]
    down = tl.cast(query_at, tl.int64) * query.row
    q = tl.load(query.pointer + down + column * query.column, mask=column < D_K, other=0.0)
    own = query_at + length - queries  # where a row stands
    last = own if CAUSAL else length - 1  # that it sees
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, PADDED_V), tl.float32)
    start, end = split * split_size, tl.minimum((split + 1) * split_size, length)
    behind = length - queries + 1 - window - start  # tokens that no row sees
    start += tl.maximum(behind, 0) // BLOCK_K * BLOCK_K  # blocks begin where they did
    for at in range(start, end, BLOCK_K):
        maximum, total, accumulator = paged_step(
            q, own, last, window, keys, values, index % heads, table, at, end, maximum,
            total, accumulator, scale * LOG2E, D_K, D_V, BLOCK_K, PAGE,
        )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)  # then the log-sum-exp is −inf
    level = (maximum * (scale * LOG2E) + tl.log2(total)) / LOG2E
    place = (tl.cast(index, tl.int64) * rows + row) * splits + split
    column = tl.arange(0, PADDED_V)[None, :]
    inside = (row < rows)[:, None] & (column < D_V)
    part = accumulator / total[:, None]
    tl.store(parts + place[:, None] * D_V + column, part, mask=inside)
    tl.store(levels + place, level, mask=row < rows)


@triton.jit
def fold_kernel(
    parts, levels, output, lse, splits, D_V: tl.constexpr, PADDED_V: tl.constexpr
):  # fmt: skip
    """Merges the shares of one row, one after the other: empty ones change no bit.

    Source: chapter 19, eq-fixed-split; chapter 13, eq-lse-merge.
    """
    first = tl.cast(tl.program_id(0), tl.int64) * splits
    column = tl.arange(0, PADDED_V)
    maximum = tl.load(levels + first)
    total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    u = tl.load(parts + first * D_V + column, mask=column < D_V, other=0.0)
    for split in range(1, splits):
        level = tl.load(levels + first + split)
        part = tl.load(parts + (first + split) * D_V + column, mask=column < D_V, other=0.0)
        raised = tl.maximum(maximum, level)
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        old, new = tl.exp(maximum - shift), tl.exp(level - shift)
        total = total * old + new
        u = u * old + part * new
        maximum = raised
    total = tl.where(total == 0.0, 1.0, total)  # then the log-sum-exp is −inf
    tl.store(lse + tl.program_id(0), maximum + tl.log(total))
    u = u / total
    place = output + tl.cast(tl.program_id(0), tl.int64) * D_V + column
    tl.store(place, u.to(output.dtype.element_ty), mask=column < D_V)


def run_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: PageTable,
    causal: bool,
    scale: float,
    split_size: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, d_v) and log-sum-exp (B, H, N), in the order of rows, for a query
    (B, H, N, d_k) and pages (P, page_size, H_kv, d).

    Source: chapter 19, eq-page-place, eq-fixed-split.
    """
    batch, all_heads, queries, d_k = query.shape
    size, heads, d_v = values.shape[1:]
    group = all_heads // max(1, heads)
    rows = group * queries
    setting = split_setting(max(d_k, d_v), query.dtype)
    exact = query.dtype == torch.float32  # multiplied out of registers
    tile = 16 if rows <= 16 or exact else 32
    most = table.pages.shape[1]
    splits = max(1, -(-most * size // split_size))
    parts = query.new_empty(batch, heads, rows, splits, d_v, dtype=torch.float32)
    levels = query.new_empty(batch, heads, rows, splits, dtype=torch.float32)
    output = query.new_empty(batch, all_heads, queries, d_v)
    lse = query.new_empty(batch, all_heads, queries, dtype=torch.float32)
    shared = dict(parts=parts, levels=levels, splits=splits)
    shared |= dict(D_V=d_v, PADDED_V=padded(d_v))
    launch(
        paged_kernel, batch * heads * -(-rows // tile) * splits, query.device, **shared,
        query=heads_of(query), keys=heads_of(keys.transpose(1, 2)),
        values=heads_of(values.transpose(1, 2)), table=table.pages.contiguous(),
        lengths=table.lengths.contiguous(), heads=heads, group=group, queries=queries,
        most=most, split_size=split_size, scale=scale, D_K=d_k, PADDED_K=padded(d_k),
        window=2**30 if window is None else min(window, 2**30), ROWS=tile, PAGE=size,
        CAUSAL=causal, **setting,
    )  # fmt: skip
    shared |= dict(output=output, lse=lse)
    launch(fold_kernel, batch * heads * rows, query.device, **shared)
    return output, lse


def paged_attention_triton(
    query: Float[Tensor, "batch *heads queries d_k"],
    cache: PagedCache,
    sequences: Sequence[int] | PageTable,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    split_size: int = 256,
    return_lse: bool = False,
    enable_gqa: bool = False,
) -> (
    Float[Tensor, "batch *heads queries d_v"]
    | tuple[
        Float[Tensor, "batch *heads queries d_v"], Float[Tensor, "batch *heads queries"]
    ]
):
    """`paged_attention` on a GPU: keys and values are read where they lie.

    Programs share the tokens of a sequence, split_size each; as their number does not
    depend on the batch, a query has the same bits, whatever else is in it.

    Args:
        query: float16, bfloat16 or float32, N small, d_k ≤ 256; else as there.
        cache, sequences, causal, window, scale, return_lse, enable_gqa: as there;
            d_v ≤ 256, and at most one dimension of heads.
        split_size: tokens of a program.

    Returns:
        Output (B, ..., N, d_v), on request the log-sum-exp (B, ..., N), in float32.

    Raises:
        RuntimeError: no Triton or no GPU that these kernels can use.
        TypeError, ValueError: as there; or more than 256 features, or a gradient.

    Source: chapter 19, eq-page-place, eq-fixed-split; Kwon et al. (2023).
    """
    table = table_of(cache, sequences, query, enable_gqa)
    require_count("split_size", split_size)
    require_window(window)
    refuse_gradients(query=query)
    if type(cache).read is not PagedCache.read:
        got = type(cache).__name__
        raise TypeError(f"cache: expected a PagedCache with all pages in full, got {got}")
    keys, values = cache.keys, cache.values
    if keys.dim() > 4:
        wanted = "at most one dimension of heads"
        raise ValueError(f"cache: expected {wanted}, got pages {tuple(keys.shape)}")
    if error := refusal(query, values, None):
        raise error
    if not interpreted() and capability_of(query) < 80:
        raise RuntimeError("query: expected a GPU of compute capability 8.0 or higher")
    shape, dtype = query.shape, query.dtype
    query, scale = positive_scale(query, require_scale(scale))
    if dtype == torch.bfloat16 and interpreted():  # whose products of it are wrong
        query, keys, values = query.float(), keys.float(), values.float()
    if keys.dim() == 3:
        query, keys, values = query[:, None], keys[:, :, None], values[:, :, None]
    output, lse = run_paged(query, keys, values, table, causal, scale, split_size, window)
    output = output.reshape(*shape[:-1], values.shape[-1]).to(dtype)
    return (output, lse.reshape(shape[:-1])) if return_lse else output
