# flash_triton.split.split_step
@triton.jit
def split_step(
    q, query_at, key, value, mask, window, at, maximum, total, accumulator, scale,
    BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    rest = rest_of_scale(scale, MASK)
    k = load_block(key, at, BLOCK_K, q.shape[1], True)
    v = load_block(value, at, BLOCK_K, accumulator.shape[1], True)
    s = tl.trans(tl.dot(k, tl.trans(q), input_precision="ieee"))
    columns = (at + tl.arange(0, BLOCK_K))[None, :]
    s = hide(s, query_at, columns, mask, window, scale, CAUSAL, MASK)
    top = tl.maximum(maximum, tl.max(s, axis=1))
    level = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2((s - level[:, None]) * rest)
    factor = tl.exp2((maximum - level) * rest)
    mixed = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return top, factor * total + tl.sum(p, axis=1), factor[:, None] * accumulator + mixed


# flash_triton.split.split_kernel
@triton.jit
def split_kernel(
    query, key, value, mask, window, parts, levels,
    heads, group, queries, keys, splits, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    of_group = real // queries
    query_at = real - of_group * queries
    head = of_group + group * index
    query = matrix_of(query, head, heads * group, queries, D_K)
    mask = matrix_of(mask, head, heads * group, queries, keys)
    key = matrix_of(key, index, heads, keys, D_K)
    value = matrix_of(value, index, heads, keys, D_V)
    column = tl.arange(0, PADDED_K)[None, :]
    down = tl.cast(query_at, tl.int64) * query.row
    q = tl.load(query.pointer + down + column * query.column, mask=column < D_K, other=0.0)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, PADDED_V), tl.float32)
    blocks = (keys + BLOCK_K - 1) // BLOCK_K
    before = 0
    if window is not None:
        before = tl.maximum(keys - queries - window + 1, 0) // BLOCK_K
        blocks -= before
    first = BLOCK_K * (before + blocks * split // splits)
    end = tl.minimum(BLOCK_K * (before + (blocks * split + blocks) // splits), keys)
    for at in range(first, end, BLOCK_K):
        maximum, total, accumulator = split_step(
            q, query_at, key, value, mask, window, at, maximum, total, accumulator, scale,
            BLOCK_K, CAUSAL, MASK,
        )  # fmt: skip
    seen = total > 0
    level = maximum * (rest_of_scale(scale, MASK) / LOG2E)
    level = tl.where(seen, level + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    place = (tl.cast(index, tl.int64) * rows + row) * splits + split
    column = tl.arange(0, PADDED_V)[None, :]
    inside = (row < rows)[:, None] & (column < D_V)
    part = tl.where(seen[:, None], accumulator / tl.where(seen, total, 1.0)[:, None], 0.0)
    tl.store(parts + place[:, None] * D_V + column, part, mask=inside)
    tl.store(levels + place, level, mask=row < rows)


# flash_triton.split.merge_kernel
@triton.jit
def merge_kernel(
    parts, levels, output, lse, heads, queries, splits,
    D_V: tl.constexpr, PADDED_V: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED_V)
    maximum = tl.max(tl.load(levels + first + split, split < splits, float("-inf")))
    shift = tl.where(maximum > float("-inf"), maximum, 0.0)
    total = 0.0
    u = tl.zeros((PADDED_V,), tl.float32)
    for share in range(0, splits):
        weight = tl.exp(tl.load(levels + first + share) - shift)
        part = tl.load(parts + (first + share) * D_V + column, mask=column < D_V, other=0.0)
        total += weight
        u += weight * part
    total = tl.where(total > 0, total, 1.0)
    output = matrix_of(output, index, heads, queries, D_V)
    at = output.pointer + tl.cast(query_at, tl.int64) * output.row + column * output.column
    merged = (u / total).to(output.pointer.dtype.element_ty)
    tl.store(at, merged, mask=column < D_V)
    tl.store(lse + tl.program_id(0), maximum + tl.log(total))


# flash_triton.split.choose_splits
@lru_cache
def choose_splits(programs, blocks, multiprocessors):
    times = {}
    for shares in range(1, max(1, min(blocks, multiprocessors)) + 1):
        waves = (programs * shares + multiprocessors - 1) // multiprocessors
        times[shares] = waves * ((blocks + shares - 1) // shares)
    least = min(times.values())
    return min(shares for shares, time in times.items() if time <= 1.1 * least)
