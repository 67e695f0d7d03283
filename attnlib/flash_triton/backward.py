# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The backward kernels: two numbers for each query, then a walk along keys or queries.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

from attnlib.flash_triton.blocks import (
    add_block,
    load_block,
    matrix_of,
    place_of,
    store_block,
    tl,
    triton,
)
from attnlib.flash_triton.visible import LOG2E, hide, key_range, rest_of_scale, window_range


@triton.jit
def statistics_kernel(
    output, grad_output, lse, grad_lse, level, delta, heads, queries,
    D_V: tl.constexpr, PADDED_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Two numbers for each query: log-sum-exp to base 2, and D_i = dO_i · O_i − dlse_i.

    `level` and `delta` have rows filled up to a multiple of ROWS, so that the kernels below
    can read them without a check. Where there is no query, or one that sees no key, the
    level is +inf: weights exp2(s − inf) = 0 follow, without a mask.

    Source: chapter 14, eq-flash-delta.
    """
    tl.static_assert(ROWS % BLOCK_Q == 0)
    blocks = tl.cdiv(queries, ROWS) * (ROWS // BLOCK_Q)
    index = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_Q
    output = matrix_of(output, index, heads, queries, D_V)
    grad_output = matrix_of(grad_output, index, heads, queries, D_V)
    o = load_block(output, start, BLOCK_Q, PADDED_V, True)
    grad_o = load_block(grad_output, start, BLOCK_Q, PADDED_V, True)

    query_at = start + tl.arange(0, BLOCK_Q)
    row = tl.cast(index, tl.int64) * queries
    inside = query_at < queries
    total = tl.load(lse + row + query_at, mask=inside, other=float("-inf"))
    change = tl.load(grad_lse + row + query_at, mask=inside, other=0.0)
    d = tl.sum(o.to(tl.float32) * grad_o.to(tl.float32), 1) - change
    base_2 = total * LOG2E
    empty = base_2 == float("-inf")  # it has nothing to pass on, whatever comes in
    row = tl.cast(index, tl.int64) * (blocks * BLOCK_Q)
    tl.store(level + row + query_at, tl.where(empty, float("inf"), base_2))
    tl.store(delta + row + query_at, tl.where(empty, 0.0, d))


@triton.jit
def query_step(
    q, grad_o, key, value, mask, window, at, query_at, level, delta, grad_q, scale,
    BLOCK_K: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the share of one block of keys and values to dQ of a block of queries.

    Source: chapter 14, eq-recompute, eq-flash-delta, eq-flash-gradients.
    """
    k = load_block(key, at, BLOCK_K, q.shape[1], CUT and not EVEN)
    v = load_block(value, at, BLOCK_K, grad_o.shape[1], CUT and not EVEN)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CUT:
        key_at = at + tl.arange(0, BLOCK_K)
        scores = hide(
            scores, query_at[:, None], key_at[None, :], mask, window, scale, CAUSAL, MASK
        )
    weights = tl.exp2(scores * rest_of_scale(scale, MASK) - level[:, None])
    grad_weights = tl.dot(grad_o, tl.trans(v), input_precision=PRECISION)
    grad_scores = weights * (grad_weights - delta[:, None])
    return tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=PRECISION)


@triton.jit
def key_walk(
    q, grad_o, key, value, mask, window, first, last, query_at, level, delta, grad_q, scale,
    BLOCK_K: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the shares of the blocks of keys from `first` to `last`, at least one.

    Source: chapter 15, eq-key-range.
    """
    for place in range(0, tl.maximum(last - first, BLOCK_K), BLOCK_K):  # as `forward_walk`
        grad_q = query_step(
            q, grad_o, key, value, mask, window, first + place, query_at, level, delta,
            grad_q, scale, BLOCK_K, CUT, EVEN, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    return grad_q


@triton.jit
def query_gradient_kernel(
    query, key, value, mask, window, grad_output, level, delta, grad_query,
    heads, queries, keys, together, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head: the forward kernel's walk along the keys.

    Source: chapter 15, eq-two-walks; chapter 14, eq-flash-gradients.
    """
    tl.static_assert(ROWS % BLOCK_Q == 0)  # or a block would end beyond level and delta
    blocks = tl.cdiv(queries, BLOCK_Q)
    index, turn = place_of(tl.program_id(0), blocks, together)
    start = (blocks - 1 - turn) * BLOCK_Q
    query = matrix_of(query, index, heads, queries, D_K)
    key = matrix_of(key, index // GROUP, heads // GROUP, keys, D_K)
    value = matrix_of(value, index // GROUP, heads // GROUP, keys, D_V)
    mask = matrix_of(mask, index, heads, queries, keys)
    grad_output = matrix_of(grad_output, index, heads, queries, D_V)
    grad_query = matrix_of(grad_query, index, heads, queries, D_K)

    q = load_block(query, start, BLOCK_Q, PADDED_K, True)
    grad_o = load_block(grad_output, start, BLOCK_Q, PADDED_V, True)
    query_at = start + tl.arange(0, BLOCK_Q)
    row = tl.cast(index, tl.int64) * (tl.cdiv(queries, ROWS) * ROWS)
    level = tl.load(level + row + query_at)
    delta = tl.load(delta + row + query_at)
    grad_q = tl.zeros((BLOCK_Q, PADDED_K), tl.float32)

    whole, end = key_range(start, queries, keys, BLOCK_Q, BLOCK_K, CAUSAL)
    first = 0
    if window is not None:
        first, end = window_range(
            start, end, queries, keys, window, BLOCK_Q, BLOCK_K, CAUSAL
        )
    if MASK != "none" or window is not None:
        grad_q = key_walk(
            q, grad_o, key, value, mask, window, first, end, query_at, level, delta, grad_q,
            scale, BLOCK_K, True, EVEN, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    else:
        if whole > 0:
            grad_q = key_walk(
                q, grad_o, key, value, mask, window, 0, whole, query_at, level, delta,
                grad_q, scale, BLOCK_K, False, EVEN, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        left = end - whole if CAUSAL or not EVEN else 0
        if left > 0:
            grad_q = key_walk(
                q, grad_o, key, value, mask, window, whole, end, query_at, level, delta,
                grad_q, scale, BLOCK_K, True, EVEN, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
    store_block(grad_query, grad_q * scale, start, BLOCK_Q, PADDED_K)


@triton.jit
def query_range(
    start, queries, keys,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which queries a block of keys meets: before `seen` none sees any of the keys, from
    `whole` on all see all. Both are multiples of BLOCK_Q.

    In dK and dV, keys beyond the last need no check: each row is its own sum, and theirs
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
def seeing_queries(
    start, seen, queries, keys, window, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Of the queries from `seen` on, those to which a window shows a block of keys.

    Source: chapter 15; chapter 18 for windows.
    """
    shift = queries - keys  # key j is token j + N − M of the queries
    if not CAUSAL:
        seen = tl.maximum(start + shift - window + 1, 0) // BLOCK_Q * BLOCK_Q
    behind = tl.minimum(start + BLOCK_K, keys) + shift
    return seen, tl.minimum(tl.maximum(behind - 1 + window, 0), queries)


@triton.jit
def key_value_step(
    k, v, query, grad_output, mask, window, at, key_at, level, delta, grad_query, grad_k,
    grad_v, scale, BLOCK_Q: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    WITH_QUERY: tl.constexpr,
):  # fmt: skip
    """Adds the share of one block of queries to dK and dV of a block of keys.

    If WITH_QUERY, also the share of these keys to dQ in the main memory, without the scale.

    Scores and weights are formed transposed, (keys, queries), as the products PᵀdO and
    dSᵀQ need them.

    Source: chapter 14, eq-recompute, eq-flash-delta, eq-flash-gradients.
    """
    query_at = at + tl.arange(0, BLOCK_Q)
    q = load_block(query, at, BLOCK_Q, k.shape[1], not EVEN)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if CUT:
        scores = hide(
            scores, query_at[None, :], key_at[:, None], mask, window, scale, CAUSAL, MASK
        )
    level = tl.load(level + query_at)
    weights = tl.exp2(scores * rest_of_scale(scale, MASK) - level[None, :])
    grad_o = load_block(grad_output, at, BLOCK_Q, v.shape[1], not EVEN)
    grad_v = tl.dot(weights.to(grad_o.dtype), grad_o, grad_v, input_precision=PRECISION)
    grad_weights = tl.dot(v, tl.trans(grad_o), input_precision=PRECISION)
    delta = tl.load(delta + query_at)
    grad_scores = (weights * (grad_weights - delta[None, :])).to(q.dtype)
    grad_k = tl.dot(grad_scores, q, grad_k, input_precision=PRECISION)
    if WITH_QUERY:
        share = tl.dot(tl.trans(grad_scores), k, input_precision=PRECISION)
        add_block(grad_query, share, at, BLOCK_Q, k.shape[1])
    return grad_k, grad_v


@triton.jit
def key_value_walk(
    k, v, query, grad_output, mask, window, start, level, delta, grad_query, grad_k, grad_v,
    scale, BLOCK_Q: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, WITH_QUERY: tl.constexpr,
):  # fmt: skip
    """Adds the shares of all queries of one head to dK and dV of a block of keys.

    Source: chapter 15, eq-query-range.
    """
    queries, keys = mask.rows, mask.width
    key_at = start + tl.arange(0, k.shape[0])
    seen, whole = query_range(start, queries, keys, BLOCK_Q, k.shape[0], CAUSAL)
    end = queries
    if window is not None:
        seen, end = seeing_queries(
            start, seen, queries, keys, window, BLOCK_Q, k.shape[0], CAUSAL
        )
    if MASK != "none" or window is not None:
        whole = end  # it may cut any tile
    elif WITH_QUERY and not EVEN:  # in dQ, keys beyond the last would count
        whole = tl.where(start + k.shape[0] > keys, queries, whole)
    if CAUSAL or MASK != "none" or window is not None or (WITH_QUERY and not EVEN):
        cut = whole - seen
        if cut > 0:
            for place in range(0, tl.maximum(cut, BLOCK_Q), BLOCK_Q):
                grad_k, grad_v = key_value_step(
                    k, v, query, grad_output, mask, window, seen + place, key_at, level,
                    delta, grad_query, grad_k, grad_v, scale, BLOCK_Q, True, EVEN, CAUSAL,
                    MASK, PRECISION, WITH_QUERY,
                )  # fmt: skip
    if whole < end:
        for place in range(0, tl.maximum(end - whole, BLOCK_Q), BLOCK_Q):
            grad_k, grad_v = key_value_step(
                k, v, query, grad_output, mask, window, whole + place, key_at, level,
                delta, grad_query, grad_k, grad_v, scale, BLOCK_Q, False, EVEN, CAUSAL,
                MASK, PRECISION, WITH_QUERY,
            )  # fmt: skip
    return grad_k, grad_v


@triton.jit
def key_value_gradient_kernel(
    query, key, value, mask, window, grad_output, level, delta,
    grad_query, grad_key, grad_value,
    heads, queries, keys, together, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    WITH_QUERY: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one head: walks along the queries that see them.

    Those are of GROUP heads. If WITH_QUERY, each tile is also added to `grad_query`, in
    float32 and without the scale; EVEN then says that queries and keys fill their blocks.

    Source: chapter 15, eq-two-walks; chapter 14, eq-flash-gradients.
    """
    tl.static_assert(ROWS % BLOCK_Q == 0)
    blocks = tl.cdiv(keys, BLOCK_K)
    shared, turn = place_of(tl.program_id(0), blocks, together)
    start = turn * BLOCK_K  # early keys first: under a causal mask, most queries see them
    key = matrix_of(key, shared, heads // GROUP, keys, D_K)
    value = matrix_of(value, shared, heads // GROUP, keys, D_V)
    grad_key = matrix_of(grad_key, shared, heads // GROUP, keys, D_K)
    grad_value = matrix_of(grad_value, shared, heads // GROUP, keys, D_V)

    k = load_block(key, start, BLOCK_K, PADDED_K, True)
    v = load_block(value, start, BLOCK_K, PADDED_V, True)
    grad_k = tl.zeros((BLOCK_K, PADDED_K), tl.float32)
    grad_v = tl.zeros((BLOCK_K, PADDED_V), tl.float32)
    for index in range(shared * GROUP, shared * GROUP + GROUP):
        row = tl.cast(index, tl.int64) * (tl.cdiv(queries, ROWS) * ROWS)
        grad_k, grad_v = key_value_walk(
            k, v,
            matrix_of(query, index, heads, queries, D_K),
            matrix_of(grad_output, index, heads, queries, D_V),
            matrix_of(mask, index, heads, queries, keys),
            window, start, level + row, delta + row,
            matrix_of(grad_query, index, heads, tl.cdiv(queries, ROWS) * ROWS, D_K),
            grad_k, grad_v, scale, BLOCK_Q, EVEN, CAUSAL, MASK, PRECISION, WITH_QUERY,
        )  # fmt: skip
    store_block(grad_key, grad_k * scale, start, BLOCK_K, PADDED_K)
    store_block(grad_value, grad_v, start, BLOCK_K, PADDED_V)
