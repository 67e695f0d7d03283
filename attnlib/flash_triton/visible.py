# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Who sees whom: masks in a tile of scores, and the keys that a block of queries meets.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

import math

import torch

from attnlib.flash_triton.blocks import tl, triton

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(x · LOG2E)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def hide(
    scores, query_at, key_at, mask, window, scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Scores with −inf where a query may not see a key, plus an additive mask.

    An additive mask must not be scaled, so that the scale comes first, and the mask is
    added in base 2; what is finite in it stays finite. `rest_of_scale` says what is left.

    Args:
        scores: tile of dot products, before the scale.
        query_at: position of each query, (rows, 1); or (1, rows) if the tile is transposed.
        key_at: position of each key, (1, columns), or (columns, 1).
        mask: the N×M matrix of this head. Without a mask, only its size counts.
        window: query i sees key j only if it is less than so far from i + M − N; `None`
            for all, which compiles to nothing.
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
    elif window is not None:
        last = tl.minimum(query_at + mask.width - mask.rows + window - 1, last)
    seen = key_at <= last
    if window is not None:
        seen = seen & (key_at > query_at + mask.width - mask.rows - window)
    if MASK != "none":
        down = tl.cast(query_at, tl.int64) * mask.row
        across = tl.cast(key_at, tl.int64) * mask.column
        inside = seen & (query_at < mask.rows)
        entries = tl.load(mask.pointer + down + across, mask=inside, other=0)
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
    is at least BLOCK_K, so that there is a tile. One that no query sees changes nothing.
    With a window, see `window_range`.

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
def window_range(
    start, end, queries, keys, window, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """The keys of `key_range` that a window leaves: from `first`, a multiple of BLOCK_K.

    The first query sees the earliest key, and the last one the latest. There is a tile.

    Source: chapter 15; chapter 18 for windows.
    """
    at = start + keys - queries
    first = tl.maximum(at - window + 1, 0) // BLOCK_K * BLOCK_K
    if not CAUSAL:
        behind = tl.minimum(start + BLOCK_Q, queries) + keys - queries
        end = tl.minimum(end, behind + window - 1)
    return first, tl.maximum(end, first + BLOCK_K)
