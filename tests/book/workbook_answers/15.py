# flash_triton.visible.key_range
@triton.jit
def key_range(
    start, queries, keys,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    most = keys
    fewest = keys
    if CAUSAL:
        more = keys - queries
        fewest = start + more + 1
        fewest = tl.where(fewest < 0, 0, tl.where(fewest > keys, keys, fewest))
        most = tl.where(start + BLOCK_Q < queries, start + BLOCK_Q, queries) + more
    return fewest - fewest % BLOCK_K, tl.where(most < BLOCK_K, BLOCK_K, most)


# flash_triton.forward.forward_step
@triton.jit
def forward_step(
    q, key, value, mask, window, at, query_at, maximum, total, accumulator, scale,
    BLOCK_K: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rest = rest_of_scale(scale, MASK)
    k = load_block(key, at, BLOCK_K, q.shape[1], CUT and not EVEN)
    v = load_block(value, at, BLOCK_K, accumulator.shape[1], CUT and not EVEN)
    s = tl.trans(tl.dot(k, tl.trans(q), input_precision=PRECISION))
    if CUT:
        columns = (at + tl.arange(0, BLOCK_K))[None, :]
        s = hide(s, query_at[:, None], columns, mask, window, scale, CAUSAL, MASK)
    top = tl.maximum(maximum, tl.max(s, axis=1))
    level = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2((s - level[:, None]) * rest)
    factor = tl.exp2((maximum - level) * rest)
    mixed = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return top, factor * total + tl.sum(p, axis=1), factor[:, None] * accumulator + mixed


# flash_triton.backward.query_step
@triton.jit
def query_step(
    q, grad_o, key, value, mask, window, at, query_at, level, delta, grad_q, scale,
    BLOCK_K: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rest = rest_of_scale(scale, MASK)
    v = load_block(value, at, BLOCK_K, grad_o.shape[1], CUT and not EVEN)
    k = load_block(key, at, BLOCK_K, q.shape[1], CUT and not EVEN)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CUT:
        columns = at + tl.arange(0, BLOCK_K)[None, :]
        s = hide(s, query_at[:, None], columns, mask, window, scale, CAUSAL, MASK)
    p = tl.exp2(rest * s - level[:, None])
    d_p = tl.trans(tl.dot(v, tl.trans(grad_o), input_precision=PRECISION))
    d_s = p * d_p - p * delta[:, None]
    return grad_q + tl.dot(d_s.to(k.dtype), k, input_precision=PRECISION)


# flash_triton.backward.key_value_step
@triton.jit
def key_value_step(
    k, v, query, grad_output, mask, window, at, key_at, level, delta, grad_query, grad_k,
    grad_v, scale, BLOCK_Q: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    WITH_QUERY: tl.constexpr,
):  # fmt: skip
    rest = rest_of_scale(scale, MASK)
    rows = at + tl.arange(0, BLOCK_Q)
    levels, deltas = tl.load(level + rows), tl.load(delta + rows)
    q = load_block(query, at, BLOCK_Q, k.shape[1], not EVEN)
    d_o = load_block(grad_output, at, BLOCK_Q, v.shape[1], not EVEN)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CUT:
        s = hide(s, rows[:, None], key_at[None, :], mask, window, scale, CAUSAL, MASK)
    p = tl.exp2(rest * s - levels[:, None])
    d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
    d_s = (p * (d_p - deltas[:, None])).to(q.dtype)
    d_v = tl.dot(tl.trans(p.to(d_o.dtype)), d_o, input_precision=PRECISION)
    d_k = tl.dot(tl.trans(d_s), q, input_precision=PRECISION)
    if WITH_QUERY:
        share = tl.dot(d_s, k, input_precision=PRECISION)
        add_block(grad_query, share, at, BLOCK_Q, k.shape[1])
    return grad_k + d_k, grad_v + d_v
