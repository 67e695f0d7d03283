# Made from book/E_kernels_in_practice.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Few queries, many keys: programs share the keys, and what they find is merged.

Derived in appendix E, "Kernels in practice" (book/E_kernels_in_practice.ipynb).
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnlib.checks import as_autocast, refuse_bad_inputs, require_scale, require_window
from attnlib.flash.tiles import narrow_window
from attnlib.flash_triton.attention import prepare, refusal
from attnlib.flash_triton.blocks import heads_of, load_block, matrix_of, tl, triton
from attnlib.flash_triton.launch import capability_of, interpreted, launch, mask_of, padded
from attnlib.flash_triton.visible import LOG2E, hide, rest_of_scale


@triton.jit
def split_step(
    q, query_at, key, value, mask, window, at, maximum, total, accumulator, scale,
    BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Takes one block of keys and values into the running softmax of a tile of rows.

    Source: chapter 15, eq-raw-maximum; chapter 13, eq-online-step.
    """
    to_base_2 = rest_of_scale(scale, MASK)
    k = load_block(key, at, BLOCK_K, q.shape[1], True)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    key_at = at + tl.arange(0, BLOCK_K)[None, :]
    scores = hide(scores, query_at, key_at, mask, window, scale, CAUSAL, MASK)
    raised = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(raised == float("-inf"), 0.0, raised) * to_base_2
    weights = tl.exp2(scores * to_base_2 - shift[:, None])
    decay = tl.exp2(maximum * to_base_2 - shift)
    total = total * decay + tl.sum(weights, 1)
    v = load_block(value, at, BLOCK_K, accumulator.shape[1], True)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
    return raised, total, accumulator


@triton.jit
def split_kernel(
    query, key, value, mask, window, parts, levels,
    heads, group, queries, keys, splits, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile of rows for one share of the keys.

    `heads` are those of keys and values; `group` heads of the query share each of them, and
    their queries are the rows of one matrix.

    Source: appendix E, eq-split-range, eq-group-rows.
    """
    rows = group * queries
    split = tl.program_id(0) % splits
    tiles = tl.cdiv(rows, ROWS)
    index = tl.program_id(0) // splits // tiles
    row = tl.program_id(0) // splits % tiles * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(row, rows - 1)[:, None]  # what hangs over repeats the last row
    head, query_at = index * group + real // queries, real % queries
    query = matrix_of(query, head, heads * group, queries, D_K)  # a matrix for each row
    mask = matrix_of(mask, head, heads * group, queries, keys)
    key = matrix_of(key, index, heads, keys, D_K)
    value = matrix_of(value, index, heads, keys, D_V)

    column = tl.arange(0, PADDED_K)[None, :]
    down = tl.cast(query_at, tl.int64) * query.row
    q = tl.load(query.pointer + down + column * query.column, mask=column < D_K, other=0.0)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, PADDED_V), tl.float32)
    before = 0
    blocks = tl.cdiv(keys, BLOCK_K)
    if window is not None:  # the first query sees the earliest key
        before = tl.maximum(keys - queries - window + 1, 0) // BLOCK_K
        blocks -= before
    first = split * blocks // splits * BLOCK_K
    end = (split + 1) * blocks // splits * BLOCK_K
    for at in range(before * BLOCK_K + first, before * BLOCK_K + end, BLOCK_K):
        maximum, total, accumulator = split_step(
            q, query_at, key, value, mask, window, at, maximum, total, accumulator, scale,
            BLOCK_K, CAUSAL, MASK,
        )  # fmt: skip

    # A row that saw no key here gets 0/1 = 0, and as its log-sum-exp −inf + log2(1) = −inf.
    total = tl.where(total == 0.0, 1.0, total)
    level = (maximum * rest_of_scale(scale, MASK) + tl.log2(total)) / LOG2E
    place = (tl.cast(index, tl.int64) * rows + row) * splits + split
    column = tl.arange(0, PADDED_V)[None, :]
    inside = (row < rows)[:, None] & (column < D_V)
    part = accumulator / total[:, None]
    tl.store(parts + place[:, None] * D_V + column, part, mask=inside)
    tl.store(levels + place, level, mask=row < rows)


@triton.jit
def merge_kernel(
    parts, levels, output, lse, heads, queries, splits,
    D_V: tl.constexpr, PADDED_V: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one query, from those of all shares of the keys.

    Source: appendix E, eq-split-merge.
    """
    index, query_at = tl.program_id(0) // queries, tl.program_id(0) % queries
    first = tl.cast(tl.program_id(0), tl.int64) * splits
    split = tl.arange(0, SPLITS)
    level = tl.load(levels + first + split, mask=split < splits, other=float("-inf"))
    maximum = tl.max(level)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)  # if no share saw a key
    total = tl.sum(tl.exp(level - shift))
    total = tl.where(total == 0.0, 1.0, total)
    column = tl.arange(0, PADDED_V)[None, :]
    u = tl.zeros((PADDED_V,), tl.float32)
    for start in range(0, splits, STEP):
        share = start + tl.arange(0, STEP)
        taken = tl.load(levels + first + share, mask=share < splits, other=float("-inf"))
        inside = (share < splits)[:, None] & (column < D_V)
        place = (first + share)[:, None] * D_V + column
        part = tl.load(parts + place, mask=inside, other=0.0)
        u += tl.sum(tl.exp(taken - shift)[:, None] * part, 0)

    output = matrix_of(output, index, heads, queries, D_V)
    column = tl.arange(0, PADDED_V)
    at = output.pointer + tl.cast(query_at, tl.int64) * output.row + column * output.column
    merged = (u / total).to(output.pointer.dtype.element_ty)
    tl.store(at, merged, mask=column < D_V)
    tl.store(lse + tl.program_id(0), maximum + tl.log(total))


def split_setting(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Keys of a block, warps and stages of `split_kernel`, for every compute capability.

    Args:
        dim: the larger one of d_k and d_v, at most 256.
        dtype: of the inputs.

    Source: chapter 15, eq-registers, eq-shared-memory.
    """
    if interpreted():  # small blocks let short examples have several
        return dict(BLOCK_K=16, num_warps=1, num_stages=1)
    if dtype == torch.float32:  # multiplied without tensor cores, out of registers
        return dict(BLOCK_K=16, num_warps=4, num_stages=2)
    return dict(BLOCK_K=32 if dim > 128 else 64, num_warps=4, num_stages=3)


def multiprocessors_of(tensor: Tensor) -> int:
    """How many the GPU of a tensor has; 8 in the interpreter.

    Source: appendix E, eq-split-time.
    """
    if interpreted():
        return 8
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


@lru_cache
def choose_splits(programs: int, blocks: int, multiprocessors: int) -> int:
    """The fewest shares that take at most a tenth longer than the best number of them.

    Args:
        programs: how many there would be without a split.
        blocks: of keys, for one head.
        multiprocessors: of the GPU.

    Source: appendix E, eq-split-time.
    """
    tried = range(1, max(1, min(blocks, multiprocessors)) + 1)
    times = [-(-programs * s // multiprocessors) * -(-blocks // s) for s in tried]
    return next(s for s, t in zip(tried, times, strict=True) if t <= 1.1 * min(times))


def run_split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    splits: int | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of 4-D tensors whose last stride is 1.

    Source: appendix E, eq-split-merge, eq-group-rows.
    """
    batch, all_heads, queries, d_k = query.shape
    heads, keys, d_v = value.shape[1:]
    group = all_heads // max(1, heads)
    rows = group * queries
    setting = split_setting(max(d_k, d_v), query.dtype)
    tile = 16 if rows <= 16 else 32
    programs, blocks = batch * heads * -(-rows // tile), -(-keys // setting["BLOCK_K"])
    window = narrow_window(window, queries, keys, causal)
    if window is not None:
        blocks -= max(keys - queries - window + 1, 0) // setting["BLOCK_K"]
    if splits is None:
        splits = choose_splits(programs, blocks, multiprocessors_of(query))
    parts = query.new_empty(batch, heads, rows, splits, d_v, dtype=torch.float32)
    levels = query.new_empty(batch, heads, rows, splits, dtype=torch.float32)
    output = query.new_empty(batch, all_heads, queries, d_v)
    lse = query.new_empty(batch, all_heads, queries, dtype=torch.float32)
    given, kind = mask_of(mask, query)
    shared = dict(parts=parts, levels=levels, queries=queries, splits=splits)
    shared |= dict(D_V=d_v, PADDED_V=padded(d_v))
    launch(
        split_kernel, programs * splits, query.device, **shared, **setting,
        query=heads_of(query), key=heads_of(key), value=heads_of(value), mask=given,
        window=window, heads=heads, group=group, keys=keys, scale=scale,
        D_K=d_k, PADDED_K=padded(d_k), ROWS=tile, CAUSAL=causal, MASK=kind,
    )  # fmt: skip
    launch(
        merge_kernel, batch * all_heads * queries, query.device, **shared,
        output=heads_of(output), lse=lse, heads=all_heads,
        SPLITS=triton.next_power_of_2(splits), STEP=16,
    )  # fmt: skip
    return output, lse


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Refuses what requires a gradient, where one would be recorded.

    Raises:
        ValueError: names the tensor.

    Source: appendix E.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            expected = f"{name}: expected a tensor that requires no gradient"
            advice = "use torch.no_grad(), or flash_attention_triton, which has one"
            raise ValueError(f"{expected}, got one that does; {advice}")


def flash_decoding_triton(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*grouped keys d_k"],
    value: Float[Tensor, "*grouped keys d_v"],
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    splits: int | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> (
    Float[Tensor, "*batch queries d_v"]
    | tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]
):
    """Attention of few queries over many keys, on a GPU, forward only.

    The keys of each head are split over programs, and a second kernel merges what they
    find. Any number of shares gives the same numbers to round-off. A given number gives the
    same bits for the same M, whatever else is in the batch; the number that is chosen
    depends on it.

    Args:
        query: shape (..., N, d_k), float16, bfloat16 or float32, d_k ≤ 256. N is small.
        key: shape (..., M, d_k).
        value: shape (..., M, d_v), d_v ≤ 256.
        mask: broadcasts to (..., N, M) and is not expanded in memory if there are at most
            two leading dimensions; boolean, True = may attend, or floating, added to the
            scores.
        causal: query i sees the keys up to i + M - N only; composes with any mask.
        window: query i sees the keys less than window tokens from i + M - N only; composes
            with both. Keys before all windows are not read.
        scale: factor on the scores; `None` means 1/√d_k.
        splits: shares of the keys, at least 1; `None` chooses by the multiprocessors.
        enable_gqa: whether keys and values may have fewer heads than the query, a divisor
            of its number: neighboring heads of the query then share one.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        Output (..., N, d_v), and on request the log-sum-exp (..., N) in float32. A query
        that may attend to nothing gets 0, and -inf.

    Raises:
        RuntimeError: no Triton or no GPU that these kernels can use.
        TypeError: a wrong or a mixed dtype, or window is no integer.
        ValueError: a wrong rank, mismatched shapes or devices, more than 256 features,
            heads that do not divide, no share, window below 1, or a tensor that requires a
            gradient.

    Source: appendix E, eq-split-merge, eq-split-range, eq-group-rows.
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    refuse_bad_inputs(query, key, value, mask, enable_gqa)
    require_window(window)
    require_scale(scale)
    refuse_gradients(query=query, key=key, value=value, mask=mask)
    if error := refusal(query, value, mask):
        raise error
    if not interpreted() and capability_of(query) < 80:
        raise RuntimeError("query: expected a GPU of compute capability 8.0 or higher")
    if splits is not None and splits < 1:
        raise ValueError(f"splits: expected at least 1, got {splits}")
    leading, dtype = query.shape[:-2], query.dtype
    *inputs, scale = prepare(query, key, value, mask, scale)
    output, lse = run_split(*inputs, causal, scale, splits, window)
    output = output.reshape(*leading, *output.shape[-2:]).to(dtype)
    return (output, lse.reshape(*leading, lse.shape[-1])) if return_lse else output
