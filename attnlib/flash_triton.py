# Made by tools/tangle.py from book/15_flash_on_gpu.ipynb; see CONTRIBUTING.md.
"""Flash attention on a GPU: the tiles as kernels in Triton, forward and backward.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from attnlib.checks import as_autocast, refuse_bad_inputs
from attnlib.flash import BACKENDS, Backend

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton here: the kernels below are then functions nobody calls
    triton = tl = SimpleNamespace(jit=lambda kernel: kernel, constexpr=lambda value: value)

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(x · LOG2E)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
OLDEST_TRITON = (3, 3)  # the first whose kernels take and return named tuples


class Heads(NamedTuple):
    """A matrix for every (batch, head) pair, as a kernel takes it.

    Args:
        pointer: the tensor; in the kernel, the address of its first entry.
        batch, head, row, column: its strides.

    Source: chapter 15, eq-strides.
    """

    pointer: Any
    batch: Any
    head: Any
    row: Any
    column: Any


class Matrix(NamedTuple):
    """One of these matrices: address of its first entry, two strides, and its size.

    Source: chapter 15, eq-strides.
    """

    pointer: Any
    row: Any
    column: Any
    rows: Any
    width: Any


@triton.jit
def matrix_of(heads, index, count, rows, width):
    """The matrix of one (batch, head) pair; `index` counts the pairs, `count` the heads.

    Source: chapter 15, eq-strides.
    """
    batch = tl.cast(index // count, tl.int64)  # 64 bits: a tensor may pass 2³¹ entries
    head = tl.cast(index % count, tl.int64)
    pointer = heads.pointer + batch * heads.batch + head * heads.head
    return Matrix(pointer, heads.row, heads.column, rows, width)


@triton.jit
def tile_of(matrix, start, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Addresses of rows start … start + ROWS, (ROWS, PADDED), and which are inside.

    Source: chapter 15, eq-strides.
    """
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    down = tl.cast(start + rows, tl.int64) * matrix.row  # strides may be large
    across = tl.cast(columns, tl.int64) * matrix.column
    pointers = matrix.pointer + down + across
    inside = (start + rows < matrix.rows) & (columns < matrix.width)
    return pointers, inside


@triton.jit
def load_tile(matrix, start, ROWS: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr):
    """Rows start … start + ROWS of a matrix, filled up with zeros.

    Args:
        matrix: a Matrix.
        start: the first row.
        ROWS: rows of the tile.
        PADDED: columns of the tile, at least those of the matrix.
        CHECK: whether the tile may reach below the last row.

    Returns:
        Tile of shape (ROWS, PADDED).

    Source: chapter 15, eq-strides.
    """
    pointers, inside = tile_of(matrix, start, ROWS, PADDED)
    if CHECK or matrix.width < PADDED:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:  # nothing to check: the fastest loads
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(matrix, tile, start, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Writes a tile to rows start … of a matrix, rounded to the matrix's dtype.

    Source: chapter 15, eq-strides.
    """
    pointers, inside = tile_of(matrix, start, ROWS, PADDED)
    tl.store(pointers, tile.to(matrix.pointer.dtype.element_ty), mask=inside)


@triton.jit
def hide(scores, query_at, key_at, mask, scale, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Scores with −inf where a query may not see a key, plus an additive mask.

    An additive mask must not be scaled, so that the scale comes first, and the mask is
    added in base 2; what is finite in it stays finite. `rest_of_scale` says what is left.

    Args:
        scores: tile of dot products, before the scale.
        query_at: position of each query, (rows, 1); or (1, rows) if the tile is transposed.
        key_at: position of each key, (1, columns), or (columns, 1).
        mask: the N×M matrix of this head. Without a mask, only its size counts.
        scale: the factor on the scores, which an additive mask needs.
        CAUSAL: whether query i sees key j only if j ≤ i + M − N.
        MASK: "none", "boolean" or "additive".

    Returns:
        Tile of the shape of `scores`.

    Source: chapter 15; chapter 1, eq-mask-boolean, eq-mask-additive; chapter 3.
    """
    last = mask.width - 1
    if CAUSAL:  # one comparison an entry, whatever the reason
        last = tl.minimum(query_at + mask.width - mask.rows, last)
    seen = key_at <= last
    if MASK != "none":
        row = tl.cast(query_at, tl.int64) * mask.row
        column = tl.cast(key_at, tl.int64) * mask.column
        inside = seen & (query_at < mask.rows)
        entries = tl.load(mask.pointer + row + column, mask=inside, other=0)
        if MASK == "boolean":
            seen = seen & (entries != 0)
        else:
            added = entries.to(tl.float32) * LOG2E
            too_low = (added == float("-inf")) & (entries != float("-inf"))
            scores = scores * (scale * LOG2E) + tl.where(too_low, LOWEST, added)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def rest_of_scale(scale, MASK: tl.constexpr):
    """What takes scores to base 2 after `hide`, which with an additive mask has done it.

    Source: chapter 15, eq-raw-maximum.
    """
    return 1.0 if MASK == "additive" else scale * LOG2E


@triton.jit
def key_range(
    start, queries, keys,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which keys a block of queries meets: below `whole` all see all, from `end` none.

    `whole` is a multiple of BLOCK_K: up to it, only a mask makes a check necessary. `end`
    is at least BLOCK_K, so that the loop runs at least once, as the compiler then knows.
    Otherwise it can't tell that nothing but products writes to the accumulator, and lets
    every product wait for the one before. A tile that no query sees changes nothing.

    Source: chapter 15, eq-key-range.
    """
    whole = keys
    end = keys
    if CAUSAL:  # query i sees i + M − N + 1 keys; there may be none
        whole = tl.minimum(tl.maximum(start + 1 + keys - queries, 0), keys)
        last = tl.minimum(start + BLOCK_Q, queries)
        end = last + keys - queries
    return whole // BLOCK_K * BLOCK_K, tl.maximum(end, BLOCK_K)


@triton.jit
def forward_step(
    q, key, value, mask, at, whole, query_at, maximum, total, accumulator, scale,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Takes one tile of keys and values into the running softmax of a block of queries.

    Args:
        q: the queries, (BLOCK_Q, PADDED_K).
        key, value, mask: matrices of this head.
        at: the first key of the tile.
        whole: up to this key, all queries see all keys.
        query_at: position of each query.
        maximum: of the scores so far, before `rest_of_scale`, (BLOCK_Q,).
        total: sum of the weights so far, (BLOCK_Q,).
        accumulator: weighted sum of the values so far, (BLOCK_Q, PADDED_V).
        scale: the factor on the scores, positive.
        EVEN: whether the keys fill their last tile.

    Returns:
        The new maximum, total and accumulator.

    Source: chapter 15, eq-raw-maximum; chapter 13, eq-online-step.
    """
    to_base_2 = rest_of_scale(scale, MASK)
    k = load_tile(key, at, BLOCK_K, q.shape[1], not EVEN)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASK != "none" or ((CAUSAL or not EVEN) and at >= whole):
        key_at = at + tl.arange(0, BLOCK_K)
        scores = hide(scores, query_at[:, None], key_at[None, :], mask, scale, CAUSAL, MASK)
    raised = tl.maximum(maximum, tl.max(scores, 1))
    # So far nothing was seen: subtract 0, since −inf − (−inf) is not a number.
    shift = tl.where(raised == float("-inf"), 0.0, raised) * to_base_2
    weights = tl.exp2(scores * to_base_2 - shift[:, None])
    decay = tl.exp2(maximum * to_base_2 - shift)
    total = total * decay + tl.sum(weights, 1)
    v = load_tile(value, at, BLOCK_K, accumulator.shape[1], not EVEN)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
    return raised, total, accumulator


@triton.jit
def forward_kernel(
    query, key, value, mask, output, lse, heads, queries, keys, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one block of queries of one head.

    Source: chapter 15, eq-grid, eq-key-range; chapter 13, eq-lse.
    """
    blocks = tl.cdiv(queries, BLOCK_Q)
    index = tl.program_id(0) // blocks
    # Late queries first: under a causal mask they take longest, and what starts last
    # should be short.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    query = matrix_of(query, index, heads, queries, D_K)
    key = matrix_of(key, index, heads, keys, D_K)
    value = matrix_of(value, index, heads, keys, D_V)
    mask = matrix_of(mask, index, heads, queries, keys)
    output = matrix_of(output, index, heads, queries, D_V)

    q = load_tile(query, start, BLOCK_Q, PADDED_K, True)
    query_at = start + tl.arange(0, BLOCK_Q)
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    accumulator = tl.zeros((BLOCK_Q, PADDED_V), tl.float32)

    whole, end = key_range(start, queries, keys, BLOCK_Q, BLOCK_K, CAUSAL)
    for at in range(0, end, BLOCK_K):
        maximum, total, accumulator = forward_step(
            q, key, value, mask, at, whole, query_at, maximum, total, accumulator, scale,
            BLOCK_K, EVEN, CAUSAL, MASK,
        )  # fmt: skip

    # A query that saw nothing gets 0/1 = 0, and as its log-sum-exp −inf + log2(1) = −inf.
    total = tl.where(total == 0.0, 1.0, total)
    store_tile(output, accumulator / total[:, None], start, BLOCK_Q, PADDED_V)
    log_total = (maximum * rest_of_scale(scale, MASK) + tl.log2(total)) / LOG2E
    row = tl.cast(index, tl.int64) * queries
    tl.store(lse + row + query_at, log_total, mask=query_at < queries)


class Tiles(NamedTuple):
    """How a kernel cuts its work: sides of a tile, warps that share it, loads in flight.

    Source: chapter 15, eq-registers, eq-shared-memory.
    """

    queries: int
    keys: int
    warps: int
    stages: int


Kernel = Literal["forward", "query_gradient", "key_value_gradient"]

# By compute capability (from), kernel, and the larger head dimension (up to), for 16-bit
# numbers. Those for 80 keep below 99 KB of shared memory: 86, 89 and 120 have no more.
TILES: dict[tuple[int, Kernel, int], Tiles] = {
    (80, "forward", 64): Tiles(128, 64, 4, 3),
    (80, "forward", 128): Tiles(128, 32, 4, 3),
    (80, "forward", 256): Tiles(64, 32, 4, 2),
    (80, "query_gradient", 64): Tiles(64, 64, 4, 2),
    (80, "query_gradient", 128): Tiles(64, 32, 4, 2),
    (80, "query_gradient", 256): Tiles(32, 32, 4, 1),
    (80, "key_value_gradient", 64): Tiles(32, 64, 4, 3),
    (80, "key_value_gradient", 128): Tiles(32, 64, 4, 2),
    (80, "key_value_gradient", 256): Tiles(16, 32, 4, 1),
    (90, "forward", 64): Tiles(128, 64, 4, 3),
    (90, "forward", 128): Tiles(128, 128, 8, 2),
    (90, "forward", 256): Tiles(128, 32, 8, 2),
    (90, "query_gradient", 64): Tiles(128, 64, 8, 3),
    (90, "query_gradient", 128): Tiles(128, 64, 8, 2),
    (90, "query_gradient", 256): Tiles(128, 32, 8, 1),
    (90, "key_value_gradient", 64): Tiles(64, 128, 8, 3),
    (90, "key_value_gradient", 128): Tiles(64, 128, 8, 2),
    (90, "key_value_gradient", 256): Tiles(32, 64, 8, 1),
    (100, "forward", 64): Tiles(128, 128, 8, 3),
    (100, "forward", 128): Tiles(128, 128, 8, 2),
    (100, "forward", 256): Tiles(128, 32, 8, 2),
    (100, "query_gradient", 64): Tiles(128, 64, 8, 3),
    (100, "query_gradient", 128): Tiles(128, 64, 8, 2),
    (100, "query_gradient", 256): Tiles(128, 32, 8, 1),
    (100, "key_value_gradient", 64): Tiles(64, 128, 8, 3),
    (100, "key_value_gradient", 128): Tiles(64, 128, 8, 2),
    (100, "key_value_gradient", 256): Tiles(64, 64, 8, 1),
}

# float32 numbers are multiplied without tensor cores, out of registers: small tiles.
TILES_FLOAT32 = {
    64: Tiles(32, 32, 4, 1),
    128: Tiles(32, 32, 8, 1),
    256: Tiles(16, 16, 8, 1),
}

# The interpreter has no such limits; small tiles let short examples have several.
TILES_INTERPRETED = Tiles(32, 32, 1, 1)


def choose_tiles(kernel: Kernel, dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """The tiles of a kernel.

    Args:
        kernel: which one.
        dim: the larger one of d_k and d_v, at most 256.
        dtype: of the inputs.
        capability: compute capability of the GPU, 90 for 9.0; 0 in the interpreter.

    Source: chapter 15, eq-registers, eq-shared-memory.
    """
    if capability == 0:
        return TILES_INTERPRETED
    limit = min(limit for limit in TILES_FLOAT32 if dim <= limit)
    if dtype == torch.float32:
        return TILES_FLOAT32[limit]
    # Capability 120 is a smaller machine than 90 and 100, though its number is larger.
    known = [first for first, _, _ in TILES if first <= capability < 120]
    return TILES[max(known, default=80), kernel, limit]


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on the CPU.

    Source: chapter 15.
    """
    return not isinstance(forward_kernel, triton.JITFunction)


def capability_of(tensor: Tensor) -> int:
    """Compute capability of the GPU that holds a tensor, 90 for 9.0; 0 if interpreted.

    Source: chapter 15.
    """
    if interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def launch(kernel: Any, programs: int, device: torch.device, *args: Any, **options: Any):
    """Starts a kernel on the GPU that holds its tensors; does nothing for no programs.

    Source: chapter 15.
    """
    if programs > 0:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[(programs,)](*args, **options)


def padded(width: int) -> int:
    """The columns of a tile: a power of two, and at least the 16 that a product takes.

    Source: chapter 15.
    """
    return max(16, triton.next_power_of_2(width))


def options_of(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> dict[str, Any]:
    """What a kernel is compiled for.

    Source: chapter 15, eq-registers, eq-shared-memory.
    """
    d_k, d_v = query.shape[-1], value.shape[-1]
    tiles = choose_tiles(kernel, max(d_k, d_v), query.dtype, capability_of(query))
    walked, step = key.shape[2], tiles.keys
    if kernel == "key_value_gradient":
        walked, step = query.shape[2], tiles.queries
    kind = "none"
    if mask is not None:
        kind = "boolean" if mask.dtype == torch.uint8 else "additive"
    return {
        **{"D_K": d_k, "D_V": d_v, "PADDED_K": padded(d_k), "PADDED_V": padded(d_v)},
        **{"BLOCK_Q": tiles.queries, "BLOCK_K": tiles.keys},
        **{"EVEN": walked > 0 and walked % step == 0, "CAUSAL": causal, "MASK": kind},
        **{"num_warps": tiles.warps, "num_stages": tiles.stages},
    }


def heads_of(tensor: Tensor) -> Heads:
    """A 4-D tensor with its strides.

    Source: chapter 15, eq-strides.
    """
    return Heads(tensor, *tensor.stride())


def mask_of(mask: Tensor | None, query: Tensor) -> Heads:
    """A mask with its strides; if there is none, something that is never read.

    Source: chapter 15, eq-strides.
    """
    return Heads(query, 0, 0, 0, 1) if mask is None else heads_of(mask)


def empty_like_query(query: Tensor, tokens: int, width: int) -> Tensor:
    """Room for (batch, heads, tokens, width), with the query's order in memory.

    Source: chapter 15, eq-strides.
    """
    batch, heads = query.shape[:2]
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, tokens, width)


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of 4-D tensors whose last stride is 1.

    Source: chapter 15, eq-grid.
    """
    batch, heads, queries, _ = query.shape
    output = empty_like_query(query, queries, value.shape[-1])
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    options = options_of("forward", query, key, value, mask, causal)
    launch(
        forward_kernel,
        batch * heads * -(-queries // options["BLOCK_Q"]),
        query.device,
        *map(heads_of, (query, key, value)),
        mask_of(mask, query),
        heads_of(output),
        *(lse, heads, queries, key.shape[2], scale),
        **options,
    )
    return output, lse


@triton.jit
def statistics_kernel(
    output, d_output, lse, d_lse, shift, delta, heads, queries,
    D_V: tl.constexpr, PADDED_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Two numbers for each query: log-sum-exp to base 2, and D_i = dO_i · O_i − dlse_i.

    `shift` and `delta` have rows filled up to a multiple of ROWS, so that the kernels below
    can read them without a check. Where there is no query, or one that sees no key, the
    shift is +inf: weights exp2(s − inf) = 0 follow, without a mask.

    Source: chapter 14, eq-flash-delta.
    """
    tl.static_assert(ROWS % BLOCK_Q == 0)
    blocks = tl.cdiv(queries, ROWS) * (ROWS // BLOCK_Q)
    index = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_Q
    output = matrix_of(output, index, heads, queries, D_V)
    d_output = matrix_of(d_output, index, heads, queries, D_V)
    o = load_tile(output, start, BLOCK_Q, PADDED_V, True)
    do = load_tile(d_output, start, BLOCK_Q, PADDED_V, True)

    query_at = start + tl.arange(0, BLOCK_Q)
    row = tl.cast(index, tl.int64) * queries
    inside = query_at < queries
    total = tl.load(lse + row + query_at, mask=inside, other=float("-inf"))
    change = tl.load(d_lse + row + query_at, mask=inside, other=0.0)
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) - change
    level = total * LOG2E
    empty = level == float("-inf")  # it has nothing to pass on, whatever comes in
    row = tl.cast(index, tl.int64) * (blocks * BLOCK_Q)
    tl.store(shift + row + query_at, tl.where(empty, float("inf"), level))
    tl.store(delta + row + query_at, tl.where(empty, 0.0, d))


@triton.jit
def query_step(
    q, do, key, value, mask, at, whole, query_at, shift, d, dq, scale,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Adds the share of one tile of keys and values to dQ of a block of queries.

    Source: chapter 14, eq-recompute, eq-flash-delta, eq-flash-gradients.
    """
    k = load_tile(key, at, BLOCK_K, q.shape[1], not EVEN)
    v = load_tile(value, at, BLOCK_K, do.shape[1], not EVEN)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASK != "none" or ((CAUSAL or not EVEN) and at >= whole):
        key_at = at + tl.arange(0, BLOCK_K)
        scores = hide(scores, query_at[:, None], key_at[None, :], mask, scale, CAUSAL, MASK)
    weights = tl.exp2(scores * rest_of_scale(scale, MASK) - shift[:, None])
    d_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
    d_scores = weights * (d_weights - d[:, None])
    return tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def query_gradient_kernel(
    query, key, value, mask, d_output, shift, delta, d_query,
    heads, queries, keys, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head: the forward kernel's walk along the keys.

    Source: chapter 15, eq-two-walks; chapter 14, eq-flash-gradients.
    """
    tl.static_assert(ROWS % BLOCK_Q == 0)  # or a block would end beyond shift and delta
    blocks = tl.cdiv(queries, BLOCK_Q)
    index = tl.program_id(0) // blocks
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    query = matrix_of(query, index, heads, queries, D_K)
    key = matrix_of(key, index, heads, keys, D_K)
    value = matrix_of(value, index, heads, keys, D_V)
    mask = matrix_of(mask, index, heads, queries, keys)
    d_output = matrix_of(d_output, index, heads, queries, D_V)
    d_query = matrix_of(d_query, index, heads, queries, D_K)

    q = load_tile(query, start, BLOCK_Q, PADDED_K, True)
    do = load_tile(d_output, start, BLOCK_Q, PADDED_V, True)
    query_at = start + tl.arange(0, BLOCK_Q)
    row = tl.cast(index, tl.int64) * (tl.cdiv(queries, ROWS) * ROWS)
    total = tl.load(shift + row + query_at)
    d = tl.load(delta + row + query_at)
    dq = tl.zeros((BLOCK_Q, PADDED_K), tl.float32)

    whole, end = key_range(start, queries, keys, BLOCK_Q, BLOCK_K, CAUSAL)
    for at in range(0, end, BLOCK_K):
        dq = query_step(
            q, do, key, value, mask, at, whole, query_at, total, d, dq, scale,
            BLOCK_K, EVEN, CAUSAL, MASK,
        )  # fmt: skip
    store_tile(d_query, dq * scale, start, BLOCK_Q, PADDED_K)


@triton.jit
def query_range(
    start, queries, keys,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which queries a block of keys meets: before `seen` none sees any of the keys, from
    `whole` on all see all. Both are multiples of BLOCK_Q.

    Keys beyond the last need no check: each row of dK and dV is its own sum, and theirs
    are not stored. There is at least one query.

    Source: chapter 15, eq-query-range.
    """
    seen = 0
    whole = 0
    if CAUSAL:  # key j is seen by the queries i ≥ j + N − M
        seen = tl.maximum(start + queries - keys, 0) // BLOCK_Q * BLOCK_Q
        last_key = tl.minimum(start + BLOCK_K, keys) - 1
        whole = tl.cdiv(tl.maximum(last_key + queries - keys, 0), BLOCK_Q) * BLOCK_Q
    return seen, whole


@triton.jit
def key_value_step(
    k, v, query, d_output, mask, at, whole, key_at, shift, delta, dk, dv, scale,
    BLOCK_Q: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Adds the share of one tile of queries to dK and dV of a block of keys.

    Scores and weights are formed transposed, (keys, queries), as the products PᵀdO and
    dSᵀQ need them.

    Source: chapter 14, eq-recompute, eq-flash-delta, eq-flash-gradients.
    """
    query_at = at + tl.arange(0, BLOCK_Q)
    q = load_tile(query, at, BLOCK_Q, k.shape[1], not EVEN)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    if MASK != "none" or (CAUSAL and at < whole):
        scores = hide(scores, query_at[None, :], key_at[:, None], mask, scale, CAUSAL, MASK)
    total = tl.load(shift + query_at)
    weights = tl.exp2(scores * rest_of_scale(scale, MASK) - total[None, :])
    do = load_tile(d_output, at, BLOCK_Q, v.shape[1], not EVEN)
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
    d_weights = tl.dot(v, tl.trans(do), input_precision="ieee")
    d = tl.load(delta + query_at)
    d_scores = weights * (d_weights - d[None, :])
    dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def key_value_gradient_kernel(
    query, key, value, mask, d_output, shift, delta, d_key, d_value,
    heads, queries, keys, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one head: walks along the queries.

    Source: chapter 15, eq-two-walks; chapter 14, eq-flash-gradients.
    """
    tl.static_assert(ROWS % BLOCK_Q == 0)
    blocks = tl.cdiv(keys, BLOCK_K)
    index = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_K
    query = matrix_of(query, index, heads, queries, D_K)
    key = matrix_of(key, index, heads, keys, D_K)
    value = matrix_of(value, index, heads, keys, D_V)
    mask = matrix_of(mask, index, heads, queries, keys)
    d_output = matrix_of(d_output, index, heads, queries, D_V)
    d_key = matrix_of(d_key, index, heads, keys, D_K)
    d_value = matrix_of(d_value, index, heads, keys, D_V)
    row = tl.cast(index, tl.int64) * (tl.cdiv(queries, ROWS) * ROWS)

    k = load_tile(key, start, BLOCK_K, PADDED_K, True)
    v = load_tile(value, start, BLOCK_K, PADDED_V, True)
    key_at = start + tl.arange(0, BLOCK_K)
    dk = tl.zeros((BLOCK_K, PADDED_K), tl.float32)
    dv = tl.zeros((BLOCK_K, PADDED_V), tl.float32)

    seen, whole = query_range(start, queries, keys, BLOCK_Q, BLOCK_K, CAUSAL)
    # At least once, as in `key_range`.
    for place in range(0, tl.maximum(queries - seen, BLOCK_Q), BLOCK_Q):
        dk, dv = key_value_step(
            k, v, query, d_output, mask, seen + place, whole, key_at,
            shift + row, delta + row, dk, dv, scale, BLOCK_Q, EVEN, CAUSAL, MASK,
        )  # fmt: skip
    store_tile(d_key, dk * scale, start, BLOCK_K, PADDED_K)
    store_tile(d_value, dv, start, BLOCK_K, PADDED_V)


# The two numbers for each query have rows filled up to a multiple of this, the largest
# block of queries.
STATISTICS_ROWS = 128


def run_statistics(
    output: Tensor, d_output: Tensor, lse: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp to base 2 and D of every query, rows filled up.

    Source: chapter 14, eq-flash-delta.
    """
    batch, heads, queries, width = output.shape
    rows = -(-queries // STATISTICS_ROWS) * STATISTICS_ROWS
    shift, delta = lse.new_empty(2, batch, heads, rows).unbind()
    launch(
        statistics_kernel,
        batch * heads * (rows // 64),
        output.device,
        *map(heads_of, (output, d_output)),
        *(lse, d_lse.contiguous(), shift, delta, heads, queries),
        **{"D_V": width, "PADDED_V": padded(width), "ROWS": STATISTICS_ROWS, "BLOCK_Q": 64},
    )
    return shift, delta


def run_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    d_output: Tensor,
    statistics: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dQ along the keys if `needed[0]`; dK and dV along the queries if `needed[1]`.

    Source: chapter 15, eq-two-walks.
    """
    batch, heads, queries, d_k = query.shape
    keys = key.shape[2]
    d_query = d_key = d_value = None
    shared = (*map(heads_of, (query, key, value)), mask_of(mask, query), heads_of(d_output))
    sizes = (heads, queries, keys, scale)
    inputs = (query, key, value, mask, causal)
    if needed[0]:
        d_query = empty_like_query(query, queries, d_k)
        gradients = (heads_of(d_query),)
        options = {"ROWS": STATISTICS_ROWS, **options_of("query_gradient", *inputs)}
        programs = batch * heads * -(-queries // options["BLOCK_Q"])
        arguments = (*shared, *statistics, *gradients, *sizes)
        launch(query_gradient_kernel, programs, query.device, *arguments, **options)
    if needed[1]:
        d_key = empty_like_query(key, keys, d_k)
        d_value = empty_like_query(value, keys, value.shape[-1])
        gradients = (heads_of(d_key), heads_of(d_value))
        options = {"ROWS": STATISTICS_ROWS, **options_of("key_value_gradient", *inputs)}
        programs = batch * heads * -(-keys // options["BLOCK_K"])
        arguments = (*shared, *statistics, *gradients, *sizes)
        launch(key_value_gradient_kernel, programs, query.device, *arguments, **options)
    return d_query, d_key, d_value


class TritonFunction(Function):
    """Output and log-sum-exp of 4-D tensors, with the backward kernels as its gradient.

    Source: chapter 15; chapter 14, eq-flash-gradients.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Runs the forward kernel and keeps what the backward needs: no N×M matrix."""
        *tensors, ctx.causal, ctx.scale = inputs
        output, lse = run_forward(*tensors, ctx.causal, ctx.scale)
        ctx.save_for_backward(*tensors, output, lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        """Two numbers for each query first, then the gradients that are wanted."""
        *tensors, output, lse = ctx.saved_tensors
        if lse.numel() == 0:  # no query, so nothing changes with a key
            return *map(torch.zeros_like, tensors[:3]), None, None, None
        d_output = with_unit_stride(d_output)
        statistics = run_statistics(output, d_output, lse, d_lse)
        needed = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3]))
        gradients = run_backward(
            *tensors, d_output, statistics, ctx.causal, ctx.scale, needed
        )
        return *gradients, None, None, None


def four_dimensional(tensor: Tensor) -> Tensor:
    """The tensor as (batch, heads, tokens, dim), a view wherever strides allow it.

    Source: chapter 15, eq-strides.
    """
    shape = tensor.shape
    batch, heads = math.prod(shape[:-3]), math.prod(shape[-3:-2])
    return tensor.reshape(batch, heads, *shape[-2:])


def with_unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself if a row's entries are neighbors in memory, else a copy.

    Source: chapter 15, eq-strides.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def refusal(query: Tensor, value: Tensor, mask: Tensor | None) -> Exception | None:
    """Why the kernels can't compute something; `None` if they can.

    Args:
        query: expected float16, bfloat16 or float32, d_k ≤ 256, and on a GPU of NVIDIA.
        value: expected d_v ≤ 256.
        mask: expected not to require a gradient.

    Source: chapter 15.
    """
    if isinstance(triton, SimpleNamespace):
        return RuntimeError("expected the package triton, which is not installed")
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        least = ".".join(map(str, OLDEST_TRITON))
        return RuntimeError(f"expected triton {least} or newer, got {triton.__version__}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return TypeError(f"query: expected float16, bfloat16 or float32, got {query.dtype}")
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[-1] > 256:
            expected = f"{name}: expected at most 256 features"
            return ValueError(f"{expected}, got shape {tuple(tensor.shape)}")
    if mask is not None and mask.requires_grad:
        return ValueError("mask: expected one that requires no gradient, got one that does")
    if interpreted():
        return None
    if not query.is_cuda:
        expected = f"query: expected a tensor on a GPU, got device {query.device}"
        advice = "for the interpreter set TRITON_INTERPRET=1 before the import"
        return RuntimeError(f"{expected}; {advice}")
    if torch.version.hip is not None:  # is_cuda, but another machine
        found = f"got one of AMD, with ROCm {torch.version.hip}"
        return RuntimeError(f"query: expected a GPU of NVIDIA, {found}")
    if capability_of(query) < 80:
        expected = "query: expected a GPU of compute capability 8.0 or higher"
        found = torch.cuda.get_device_capability(query.device)
        return RuntimeError(f"{expected}, got {found}")
    return None


def flash_attention_triton(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> (
    Float[Tensor, "*batch queries d_v"]
    | tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]
):
    """Attention on a GPU that never forms the N×M scores, forward or backward.

    Strides are respected: a transposed view is read where it lies, as long as the features
    of a token are neighbors in memory. The backward uses no atomic additions: the same
    inputs give the same bits. The gradients can be taken once. Where all scores of a query
    are so large, or a mask so low, that float32 can't tell them apart (finfo.min for every
    key), the output is right, but its gradients are not.

    Args:
        query: shape (..., N, d_k), float16, bfloat16 or float32, d_k ≤ 256.
        key: shape (..., M, d_k).
        value: shape (..., M, d_v), d_v ≤ 256.
        mask: broadcasts to (..., N, M) and is never expanded in memory if there are at most
            two leading dimensions; boolean, True = may attend, or floating, added to the
            scores. It gets no gradient.
        causal: query i sees the keys up to i + M - N only; composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        Output (..., N, d_v), and on request the log-sum-exp (..., N) in float32, through
        which gradients flow; -inf where a query may attend to nothing, whose output and
        gradients are 0.

    Raises:
        RuntimeError: no Triton from 3.3 on, or no GPU of NVIDIA of compute capability 8.0
            or higher.
        TypeError: a wrong or a mixed dtype.
        ValueError: a wrong rank, mismatched shapes or devices, more than 256 features, or
            a mask that requires a gradient.

    Source: chapter 15, eq-raw-maximum, eq-two-walks; chapter 14.
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    refuse_bad_inputs(query, key, value, mask)
    if error := refusal(query, value, mask):
        raise error
    leading, dtype = query.shape[:-2], query.dtype
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if scale <= 0:  # the maximum is taken before the scale: only right if positive
        query, scale = query * scale, 1.0
    if dtype == torch.bfloat16 and interpreted():  # whose bfloat16 products are wrong
        query, key, value = query.float(), key.float(), value.float()
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask = four_dimensional(mask.expand(*leading, query.shape[-2], key.shape[-2]))
    inputs = [with_unit_stride(four_dimensional(tensor)) for tensor in (query, key, value)]
    output, lse = TritonFunction.apply(*inputs, mask, causal, scale)
    output = output.reshape(*leading, *output.shape[-2:]).to(dtype)
    return (output, lse.reshape(*leading, lse.shape[-1])) if return_lse else output


def suits(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `FlashAttention` should take these kernels by itself.

    Source: chapter 15.
    """
    return query.is_cuda and refusal(query, value, mask) is None


BACKENDS["triton"] = Backend(flash_attention_triton, suits)
