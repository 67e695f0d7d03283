# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The forward kernel: the running softmax of one block of queries.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

from attnlib.flash_triton.blocks import (
    load_block,
    matrix_of,
    place_of,
    store_block,
    tl,
    triton,
)
from attnlib.flash_triton.visible import LOG2E, hide, key_range, rest_of_scale, window_range


@triton.jit
def forward_step(
    q, key, value, mask, window, at, query_at, maximum, total, accumulator, scale,
    BLOCK_K: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one block of keys and values into the running softmax of a block of queries.

    Args:
        q: the queries, (BLOCK_Q, PADDED_K).
        key, value, mask: matrices of this head.
        window: how many keys a query sees, see `hide`; or `None`.
        at: the first key of the block.
        query_at: position of each query.
        maximum: of the scores so far, before `rest_of_scale`, (BLOCK_Q,).
        total: sum of the weights so far, (BLOCK_Q,).
        accumulator: weighted sum of the values so far, (BLOCK_Q, PADDED_V).
        scale: the factor on the scores, positive.
        CUT: whether keys of the tile may be hidden, by a mask or because there are no more.
        EVEN: whether the keys fill their last block.

    Returns:
        The new maximum, total and accumulator.

    Source: chapter 15, eq-raw-maximum; chapter 13, eq-online-step.
    """
    to_base_2 = rest_of_scale(scale, MASK)
    k = load_block(key, at, BLOCK_K, q.shape[1], CUT and not EVEN)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CUT:
        key_at = at + tl.arange(0, BLOCK_K)
        scores = hide(
            scores, query_at[:, None], key_at[None, :], mask, window, scale, CAUSAL, MASK
        )
    raised = tl.maximum(maximum, tl.max(scores, 1))
    # So far nothing was seen: subtract 0, since −inf − (−inf) is not a number.
    shift = tl.where(raised == float("-inf"), 0.0, raised) * to_base_2
    weights = tl.exp2(scores * to_base_2 - shift[:, None])
    decay = tl.exp2(maximum * to_base_2 - shift)
    total = total * decay + tl.sum(weights, 1)
    v = load_block(value, at, BLOCK_K, accumulator.shape[1], CUT and not EVEN)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
    return raised, total, accumulator


@triton.jit
def forward_walk(
    q, key, value, mask, window, first, last, query_at, maximum, total, accumulator, scale,
    BLOCK_K: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the blocks of keys from `first` to `last` in, at least one.

    There is one, and the compiler has to see that. Otherwise it can't tell that nothing but
    products writes to the accumulator, and lets every product wait for the one before.

    Source: chapter 15, eq-key-range; chapter 13, eq-online-step.
    """
    for place in range(0, tl.maximum(last - first, BLOCK_K), BLOCK_K):
        maximum, total, accumulator = forward_step(
            q, key, value, mask, window, first + place, query_at, maximum, total,
            accumulator, scale, BLOCK_K, CUT, EVEN, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    return maximum, total, accumulator


@triton.jit
def forward_kernel(
    query, key, value, mask, window, output, lse, heads, queries, keys, together, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries; GROUP heads share keys and values.

    Source: chapter 15, eq-grid, eq-key-range; chapter 13, eq-lse.
    """
    blocks = tl.cdiv(queries, BLOCK_Q)
    index, turn = place_of(tl.program_id(0), blocks, together)
    start = (blocks - 1 - turn) * BLOCK_Q  # late first: what starts last should be short
    query = matrix_of(query, index, heads, queries, D_K)
    key = matrix_of(key, index // GROUP, heads // GROUP, keys, D_K)
    value = matrix_of(value, index // GROUP, heads // GROUP, keys, D_V)
    mask = matrix_of(mask, index, heads, queries, keys)
    output = matrix_of(output, index, heads, queries, D_V)

    q = load_block(query, start, BLOCK_Q, PADDED_K, True)
    query_at = start + tl.arange(0, BLOCK_Q)
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    accumulator = tl.zeros((BLOCK_Q, PADDED_V), tl.float32)

    whole, end = key_range(start, queries, keys, BLOCK_Q, BLOCK_K, CAUSAL)
    first = 0
    if window is not None:
        first, end = window_range(
            start, end, queries, keys, window, BLOCK_Q, BLOCK_K, CAUSAL
        )
    if MASK != "none" or window is not None:  # it may cut any tile
        maximum, total, accumulator = forward_walk(
            q, key, value, mask, window, first, end, query_at, maximum, total, accumulator,
            scale, BLOCK_K, True, EVEN, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    else:
        if whole > 0:
            maximum, total, accumulator = forward_walk(
                q, key, value, mask, window, 0, whole, query_at, maximum, total,
                accumulator, scale, BLOCK_K, False, EVEN, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        left = end - whole if CAUSAL or not EVEN else 0
        if left > 0:
            maximum, total, accumulator = forward_walk(
                q, key, value, mask, window, whole, end, query_at, maximum, total,
                accumulator, scale, BLOCK_K, True, EVEN, CAUSAL, MASK, PRECISION,
            )  # fmt: skip

    # A query that saw nothing gets 0/1 = 0, and as its log-sum-exp −inf + log2(1) = −inf.
    total = tl.where(total == 0.0, 1.0, total)
    store_block(output, accumulator / total[:, None], start, BLOCK_Q, PADDED_V)
    log_total = (maximum * rest_of_scale(scale, MASK) + tl.log2(total)) / LOG2E
    row = tl.cast(index, tl.int64) * queries
    tl.store(lse + row + query_at, log_total, mask=query_at < queries)
