# Made from book/14_flash_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Attention in tiles for a batch: what runs on any device, forward and backward.

Derived in chapter 14, "Flash attention" (book/14_flash_attention.ipynb).
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

LOG2E = math.log2(math.e)
BlockSize = int | tuple[int, int]  # queries and keys in a tile


def block_sizes(
    block_size: BlockSize | None,
    matrices: int,
    queries: int,
    causal: bool,
    window: int | None = None,
) -> tuple[int, int]:
    """Queries and keys in a tile.

    Args:
        block_size: one number for both, or two; `None` chooses sizes that suit a CPU's
            cache.
        matrices: number of score matrices, batch times heads.
        queries: number of queries N.
        causal: whether half of each tile on the diagonal is computed for nothing.
        window: how many keys a query sees, which many queries share only in part.

    Raises:
        TypeError: not integers.
        ValueError: a size below 1.

    Source: chapter 14, eq-fast-memory, eq-tiled-intensity.
    """
    if block_size is None:
        keys = 256 if matrices >= 4 else 512
        rows = 2**20 // (max(matrices, 1) * keys)
        most = max(queries // (8 if causal else 4), 128)
        if window is not None:
            most = min(most, max(window // 2, 128))
        return min(max(rows, 128), 1024, most), keys
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2 or not all(isinstance(size, int) for size in sizes):
        expected = "expected an integer, or a pair of them, queries and keys"
        raise TypeError(f"block_size: {expected}, got {block_size!r}")
    if min(sizes) < 1:
        raise ValueError(f"block_size: expected at least 1, got {block_size}")
    return sizes


def row_blocks(queries: int, size: int) -> Iterator[slice]:
    """The blocks of queries, one after the other.

    Source: chapter 14, eq-tiled-traffic.
    """
    for start in range(0, queries, size):
        yield slice(start, min(start + size, queries))


def narrow_window(window: int | None, queries: int, keys: int, causal: bool) -> int | None:
    """The window; `None` if it is so wide that it hides nothing.

    Source: chapter 14; chapter 18 for windows.
    """
    if window is None:
        return None
    return window if window < (keys if causal else max(queries, keys)) else None


def visible_tiles(
    rows: slice,
    queries: int,
    keys: int,
    causal: bool,
    size: int,
    window: int | None = None,
) -> Iterator[tuple[slice, bool]]:
    """The blocks of keys that some query of a block sees, each with whether it is partial.

    Args:
        rows: the block of queries, without rows.stop, as everywhere in Python.
        queries: number of queries N.
        keys: number of keys M.
        causal: whether query i sees the keys up to i + M - N only.
        size: the most keys in a block.
        window: whether query i sees the keys less than so many from i + M - N only.

    Source: chapter 14, eq-tile-visible; chapter 18 for windows.
    """
    begin, whole, cut, seen = 0, 0, keys, keys
    at, end = (i + keys - queries for i in (rows.start, rows.stop))
    if causal:  # all see key cut, too: with it, the cut keys are as many as the queries
        cut, seen = at, end
    if window is not None:  # the first query sees the earliest key, the last one the latest
        begin, whole = at - window + 1, end - window
        cut, seen = min(cut, at + window), min(seen, end + window - 1)
    begin, whole, cut, seen = (max(0, min(keys, x)) for x in (begin, whole, cut, seen))
    if whole >= cut:  # no key is seen by all
        whole = cut = begin
    for start, stop, partial in (
        (begin, whole, True),
        (whole, cut, False),
        (cut, seen, True),
    ):
        for first in range(start, stop, size):
            yield slice(first, min(first + size, stop)), partial


def product(
    a: Float[Tensor, "matrices m k"],
    b: Float[Tensor, "matrices k n"],
    buffer: Float[Tensor, " size"],
) -> Float[Tensor, "matrices m n"]:
    """a @ b, written to the beginning of a buffer.

    Source: chapter 14.
    """
    shape = (*a.shape[:2], b.shape[2])
    return torch.bmm(a, b, out=buffer[: math.prod(shape)].view(shape))


def mask_tile(mask: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of a mask for a tile; dimensions of size 1 stay.

    Source: chapter 14.
    """
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if mask.dim() > 0 and mask.shape[-1] > 1:
        mask = mask[..., cols]
    return mask


def apply_mask_(scores: Tensor, mask: Tensor) -> None:
    """Applies the part of a mask to a tile of scores in base 2, in place.

    Source: chapter 14, eq-exp2; chapter 1, eq-mask-boolean, eq-mask-additive.
    """
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    else:
        added = (LOG2E * mask.to(scores.dtype)).clamp_(min=torch.finfo(scores.dtype).min)
        scores += added.masked_fill_(mask == -torch.inf, -torch.inf)


class TiledAttention:
    """One attention cut into tiles: what its forward and its backward have in common.

    Args:
        query, key, value, mask: as for `flash_attention`; leading dimensions are flattened,
            and anything shorter than float32 becomes float32.
        causal, scale, block_size, window: likewise.

    Source: chapter 14, eq-tiled-traffic, eq-tile-visible, eq-exp2.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        block_size: BlockSize | None,
        window: int | None = None,
    ) -> None:
        self.leading, self.dtype = query.shape[:-2], query.dtype
        self.q, self.k, self.v = (self.flat(x, 2) for x in (query, key, value))
        self.mask, self.causal, self.scale = mask, causal, scale
        matrices, self.queries, _ = self.q.shape
        self.keys = self.k.shape[1]
        self.window = narrow_window(window, self.queries, self.keys, causal)
        rows, cols = block_sizes(block_size, matrices, self.queries, causal, self.window)
        self.rows = max(1, min(rows, self.queries))
        self.cols = max(1, min(cols, self.keys))
        self.buffer = self.q.new_empty(matrices * self.rows * self.cols)

    def flat(self, x: Tensor, own: int) -> Tensor:
        """The leading dimensions as one, in float32 at least; the last `own` ones stay."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.reshape(math.prod(self.leading), *x.shape[x.dim() - own :])

    def unflat(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `flat`."""
        return x.view(*self.leading, *x.shape[1:]).to(dtype)

    def scores(self, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """For a block of queries, the keys and the masked scores of each tile, in base 2.

        The scores of all tiles are the same memory: be done with one before the next.
        """
        edges = (self.causal, self.cols, self.window)
        q = self.q[:, rows] * (self.scale * LOG2E)
        shift = self.keys - self.queries
        for cols, partial in visible_tiles(rows, self.queries, self.keys, *edges):
            s = product(q, self.k[:, cols].transpose(1, 2), self.buffer)
            if self.mask is not None:
                part = mask_tile(self.mask, rows, cols)
                apply_mask_(s.view(*self.leading, *s.shape[1:]), part)
            if partial:
                hidden = self.hidden(s, rows.start + shift - cols.start)
                s.masked_fill_(hidden, -torch.inf)
            yield cols, s

    def hidden(self, s: Tensor, behind: int) -> Tensor:
        """Which pairs of a tile lie ahead, or outside of the window.

        Its first key lies `behind` tokens behind its first query.
        """
        pairs = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device)
        if self.window is None:
            return pairs.triu(behind + 1)
        ahead = pairs.triu(behind + (1 if self.causal else self.window))
        return ahead | pairs.tril(behind - self.window)

    def bounded(self) -> Tensor | None:
        """For each matrix, (matrices, 1, 1), whether eq-sum-bound spares it the maximum.

        `None` where nobody asks: on a GPU, which would have to be waited for; under a mask
        that is added; for few queries, where it costs more than the maximum.
        """
        added = self.mask is not None and self.mask.dtype != torch.bool
        few = self.queries < 4 * (self.q.shape[-1] + self.v.shape[-1])
        if added or few or self.v.device.type != "cpu" or not self.v.numel():
            return None
        q, k = (x.norm(dim=-1).amax(dim=-1) for x in (self.q, self.k))
        most, least = torch.ones_like(q), torch.ones_like(q)
        for cols in row_blocks(self.keys, self.cols):
            sizes = self.v[:, cols].abs()
            most = torch.maximum(most, sizes.amax(dim=(1, 2)))
            least = torch.minimum(least, sizes.amin(dim=(1, 2)))
        bound = abs(self.scale) * LOG2E * q * k  # eq-score-bound
        reach = -math.log2(torch.finfo(q.dtype).tiny) - 1  # 125 in float32
        fits = bound + torch.maximum(self.keys * most, 1 / least).log2() <= reach
        return fits[:, None, None]

    def forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output (..., N, d_v), log-sum-exp (..., N); m and l in base 2 (..., N)."""
        output = self.v.new_empty(len(self.q), self.queries, self.v.shape[-1])
        tops, totals = (self.q.new_empty(len(self.q), self.queries, 1) for _ in range(2))
        bounded = self.bounded()
        easy = bounded is not None and bool(bounded.all())
        # A finite start: even where all scores are -inf, it can be subtracted from them.
        start = torch.full_like(tops[:, :1], torch.finfo(tops.dtype).min)
        if bounded is not None:
            start.masked_fill_(bounded, 0.0)
        for rows in row_blocks(self.queries, self.rows):
            u = torch.zeros_like(output[:, rows])
            total = torch.zeros_like(u[..., :1])
            top = start.expand_as(total)
            for cols, s in self.scores(rows):
                if not easy:
                    old, top = top, torch.maximum(top, s.amax(dim=-1, keepdim=True))
                    if bounded is not None:  # a level of 0 stays: 2^0 changes no bit
                        top = torch.where(bounded, old, top)
                    factor = torch.exp2(old - top)
                    u *= factor
                    total *= factor
                    s -= top
                total += s.exp2_().sum(dim=-1, keepdim=True)
                u.baddbmm_(s, self.v[:, cols])
            output[:, rows] = u / total.masked_fill(total == 0, 1.0)
            tops[:, rows], totals[:, rows] = top, total
        empty = totals == 0
        totals.masked_fill_(empty, 1.0)
        lse = ((tops + totals.log2()) / LOG2E).masked_fill_(empty, -torch.inf)
        rows = [self.unflat(x[..., 0], x.dtype) for x in (lse, tops, totals)]
        return self.unflat(output, self.dtype), *rows

    def backward(
        self,
        output: Tensor,
        tops: Tensor,
        totals: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor,
        grad_mask: Tensor | None,
    ) -> list[Tensor]:
        """Gradients of query, key and value; that of the mask is added to grad_mask."""
        output, grad_output = self.flat(output, 2), self.flat(grad_output, 2)
        tops, totals = (self.flat(x, 1)[..., None] for x in (tops, totals))
        # eq-flash-delta
        delta = (grad_output * output).sum(dim=-1) - self.flat(grad_lse, 1)
        level = tops + totals.log2()  # log-sum-exp; where m is huge, l is lost in it,
        rest = totals * torch.exp2(tops - level)  # and kept here
        delta = delta[..., None] / rest
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (self.q, self.k, self.v))
        second = torch.empty_like(self.buffer)
        width = max(self.k.shape[-1], self.v.shape[-1])
        small = self.q.new_empty(len(self.q) * self.cols * width)
        for rows in row_blocks(self.queries, self.rows):
            q, grad_o = self.q[:, rows], grad_output[:, rows] / rest[:, rows]
            grad_q_rows = q.new_zeros(q.shape)
            for cols, s in self.scores(rows):
                p = s.sub_(level[:, rows]).exp2_()
                grad_v[:, cols] += product(p.transpose(1, 2), grad_o, small)
                grad_s = product(grad_o, self.v[:, cols].transpose(1, 2), second)
                grad_s.sub_(delta[:, rows]).mul_(p)
                if grad_mask is not None:
                    part = mask_tile(grad_mask, rows, cols)
                    part += self.unflat(grad_s, part.dtype).sum_to_size(part.shape)
                grad_q_rows.baddbmm_(grad_s, self.k[:, cols])
                grad_k[:, cols] += product(grad_s.transpose(1, 2), q, small)
            grad_q[:, rows] = grad_q_rows
        gradients = (grad_q.mul_(self.scale), grad_k.mul_(self.scale), grad_v)
        return [self.unflat(d, self.dtype) for d in gradients]
