# Made from book/14_flash_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Attention in tiles for a batch: what runs on any device, forward and backward.

Derived in chapter 14, "Flash attention" (book/14_flash_attention.ipynb).
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

LOG2E = math.log2(math.e)
BlockSize = int | tuple[int, int]  # queries and keys in a tile


class Fastest(NamedTuple):
    """What a processor computes fastest; all give the same but for rounding.

    Args:
        power_: e^x or 2^x, in place.
        factor: what turns an exponent of e into one of that base: 1 or log₂ e.
        linear: a @ b.T of two matrices in float32; `None` where `torch.bmm` is as fast.

    Source: chapter 14, eq-exp2.
    """

    power_: Callable[[Tensor], Tensor]
    factor: float
    linear: Callable[[Tensor, Tensor], Tensor] | None


def onednn_linear(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T by oneDNN, which PyTorch keeps for layers, not by its library for products.

    Source: chapter 14.
    """
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def clearly_faster(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether the best of twenty calls takes a tenth less time than that of the other.

    Source: chapter 14.
    """
    times = []
    for _ in range(20):
        for call in (one, other):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return min(times[::2]) < 0.9 * min(times[1::2])


@functools.cache
def fastest() -> Fastest:
    """Measures it, in a few milliseconds, once in a process: each call has the same bits.

    Source: chapter 14, eq-exp2.
    """
    shapes = ((256, 256), (256, 256), (256, 64))
    x, p, q = (torch.ones(s, dtype=torch.float32, device="cpu") for s in shapes)
    linear = None
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # not in every build of PyTorch
        by_linear = functools.partial(onednn_linear, q, q)
        if clearly_faster(by_linear, lambda: torch.mm(q, q.T, out=p)):
            linear = onednn_linear
    if clearly_faster(lambda: torch.exp(x, out=p), lambda: torch.exp2(x, out=p)):
        return Fastest(torch.exp_, 1.0, linear)
    return Fastest(torch.exp2_, LOG2E, linear)


def block_sizes(
    block_size: BlockSize | None, queries: int, causal: bool
) -> tuple[int, int]:
    """Queries and keys in a tile.

    Args:
        block_size: one number for both, or two; `None` chooses sizes that suit a CPU's
            cache.
        queries: number of queries N.
        causal: whether half of each tile on the diagonal is computed for nothing.

    Raises:
        TypeError: not integers.
        ValueError: a size below 1.

    Source: chapter 14, eq-fast-memory, eq-tiled-intensity.
    """
    if block_size is None:
        most = max(queries // (8 if causal else 2), min(queries // 2, 256), 128)
        return min(512 * torch.get_num_threads(), most), 512
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


def visible_tiles(
    rows: slice, queries: int, keys: int, causal: bool, size: int
) -> Iterator[tuple[slice, bool]]:
    """The blocks of keys that some query of a block sees, each with whether it is partial.

    Args:
        rows: the block of queries, without rows.stop, as everywhere in Python.
        queries: number of queries N.
        keys: number of keys M.
        causal: whether query i sees the keys up to i + M - N only.
        size: the most keys in a block.

    Source: chapter 14, eq-tile-visible.
    """
    cut = seen = keys
    if causal:  # all see key cut, too: with it, the cut keys are as many as the queries
        cut = max(0, min(keys, rows.start + keys - queries))
        seen = max(0, min(keys, rows.stop + keys - queries))
    for start, stop, partial in ((0, cut, False), (cut, seen, causal)):
        for first in range(start, stop, size):
            yield slice(first, min(first + size, stop)), partial


def linear_for(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What is faster than `torch.bmm` for a @ b: something for one large matrix, if at all.

    Source: chapter 14.
    """
    large = len(a) == 1 and a[0].numel() >= 2**14 and b.numel() > 0
    suits = large and a.dtype == torch.float32 and a.device.type == "cpu"
    return fastest().linear if suits else None


def product(
    a: Float[Tensor, "matrices m k"],
    b: Float[Tensor, "matrices k n"],
    buffer: Float[Tensor, " size"],
) -> Float[Tensor, "matrices m n"]:
    """a @ b, written to the beginning of a buffer, unless something else is faster.

    Source: chapter 14.
    """
    if linear := linear_for(a, b):
        return linear(a[0], b[0].mT)[None]
    shape = (*a.shape[:2], b.shape[2])
    return torch.bmm(a, b, out=buffer[: math.prod(shape)].view(shape))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b in place.

    Source: chapter 14.
    """
    if linear := linear_for(a, b):
        total += linear(a[0], b[0].mT)
    else:
        total.baddbmm_(a, b)


def mask_tile(mask: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of a mask for a tile; dimensions of size 1 stay.

    Source: chapter 14.
    """
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if mask.dim() > 0 and mask.shape[-1] > 1:
        mask = mask[..., cols]
    return mask


def apply_mask_(scores: Tensor, mask: Tensor, factor: float) -> None:
    """Applies the part of a mask to a tile of scores, in place; added, it has a factor.

    Source: chapter 14, eq-exp2; chapter 1, eq-mask-boolean, eq-mask-additive.
    """
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    else:
        added = (factor * mask.to(scores.dtype)).clamp_(min=torch.finfo(scores.dtype).min)
        scores += added.masked_fill_(mask == -torch.inf, -torch.inf)


class Group(NamedTuple):
    """Matrices that share tiles.

    Args:
        which: their places in the flattened batch.
        leading: their leading dimensions.
        mask: the mask that they have, or a tensor of its shape.

    Source: chapter 14.
    """

    which: slice
    leading: tuple[int, ...]
    mask: Tensor | None


class TiledAttention:
    """One attention cut into tiles: what its forward and its backward have in common.

    Args:
        query, key, value, mask: as for `flash_attention`; leading dimensions are flattened,
            and anything shorter than float32 becomes float32.
        causal, scale, block_size: likewise.

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
    ) -> None:
        self.leading, self.dtype = query.shape[:-2], query.dtype
        self.q, self.k, self.v = (self.flat(x, 2) for x in (query, key, value))
        self.mask, self.causal, self.scale = mask, causal, scale
        self.power_, self.factor, _ = fastest()
        matrices, self.queries, _ = self.q.shape
        self.keys = self.k.shape[1]
        rows, cols = block_sizes(block_size, self.queries, causal)
        self.rows = max(1, min(rows, self.queries))
        self.cols = max(1, min(cols, self.keys))
        # On a CPU a large tile belongs to one matrix; small ones are computed together.
        large = self.rows * self.cols >= 2**16 * torch.get_num_threads()
        self.alone = large and self.q.device.type == "cpu"
        together = 1 if self.alone else matrices
        self.buffer = self.q.new_empty(together * self.rows * self.cols)

    def flat(self, x: Tensor, own: int) -> Tensor:
        """The leading dimensions as one, in float32 at least; the last `own` ones stay."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.reshape(math.prod(self.leading), *x.shape[x.dim() - own :])

    def unflat(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `flat`."""
        return x.view(*self.leading, *x.shape[1:]).to(dtype)

    def groups(self, mask: Tensor | None) -> Iterator[Group]:
        """The matrices that share tiles: each alone, or all of them."""
        if not self.alone:
            yield Group(slice(None), self.leading, mask)
            return
        if mask is not None:
            mask = torch.atleast_2d(mask)
            mask = mask.expand(*self.leading, *mask.shape[-2:])
        for number, index in enumerate(itertools.product(*map(range, self.leading))):
            part = None if mask is None else mask[index]
            yield Group(slice(number, number + 1), (1,), part)

    def scores(self, group: Group, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """For a block of queries, the keys and the masked scores of each tile, in its base.

        The scores of all tiles are the same memory: be done with one before the next.
        """
        q = self.q[group.which, rows] * (self.scale * self.factor)
        shift = self.keys - self.queries
        tiles = visible_tiles(rows, self.queries, self.keys, self.causal, self.cols)
        for cols, partial in tiles:
            s = product(q, self.k[group.which, cols].mT, self.buffer)
            if group.mask is not None:
                part = mask_tile(group.mask, rows, cols)
                apply_mask_(s.view(*group.leading, *s.shape[1:]), part, self.factor)
            if partial:
                pairs = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device)
                s.masked_fill_(pairs.triu(rows.start + shift - cols.start + 1), -torch.inf)
            yield cols, s

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
        """Output (..., N, d_v), log-sum-exp (..., N); m and l in the base (..., N)."""
        output = self.v.new_empty(len(self.q), self.queries, self.v.shape[-1])
        tops, totals = (self.q.new_empty(len(self.q), self.queries, 1) for _ in range(2))
        bounded = self.bounded()
        # A finite start: even where all scores are -inf, it can be subtracted from them.
        start = torch.full_like(tops[:, :1], torch.finfo(tops.dtype).min)
        if bounded is not None:
            start.masked_fill_(bounded, 0.0)
        blocks = row_blocks(self.queries, self.rows)
        for group, rows in itertools.product(self.groups(self.mask), blocks):
            here = (group.which, rows)
            u = torch.zeros_like(output[here])
            total = torch.zeros_like(u[..., :1])
            top = start[group.which].expand_as(total)
            flat = None if bounded is None else bounded[group.which]
            easy = flat is not None and bool(flat.all())
            for cols, s in self.scores(group, rows):
                if not easy:
                    old, top = top, torch.maximum(top, s.amax(dim=-1, keepdim=True))
                    if flat is not None:  # a level of 0 stays: e^0 changes no bit
                        top = torch.where(flat, old, top)
                    factor = self.power_(old - top)
                    u *= factor
                    total *= factor
                    s -= top
                total += self.power_(s).sum(dim=-1, keepdim=True)
                add_product(u, s, self.v[group.which, cols])
            output[here] = u / total.masked_fill(total == 0, 1.0)
            tops[here], totals[here] = top, total
        empty = totals == 0
        totals.masked_fill_(empty, 1.0)
        lse = (tops / self.factor + totals.log()).masked_fill_(empty, -torch.inf)
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
        level = tops + self.factor * totals.log()  # where m is huge, l is lost in it,
        rest = totals * self.power_(tops - level)  # and kept here
        delta = delta[..., None] / rest
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (self.q, self.k, self.v))
        second = torch.empty_like(self.buffer)
        blocks = list(row_blocks(self.queries, self.rows))
        for group, of_mask in zip(
            self.groups(self.mask), self.groups(grad_mask), strict=True
        ):
            some = group.which
            for rows in blocks:
                q, grad_o = self.q[some, rows], grad_output[some, rows] / rest[some, rows]
                for cols, s in self.scores(group, rows):
                    p = self.power_(s.sub_(level[some, rows]))
                    add_product(grad_v[some, cols], p.mT, grad_o)
                    grad_s = product(grad_o, self.v[some, cols].mT, second)
                    grad_s.sub_(delta[some, rows]).mul_(p)
                    if of_mask.mask is not None:
                        part = mask_tile(of_mask.mask, rows, cols)
                        wide = grad_s.view(*group.leading, *grad_s.shape[1:])
                        part += wide.to(part.dtype).sum_to_size(part.shape)
                    add_product(grad_q[some, rows], grad_s, self.k[some, cols])
                    add_product(grad_k[some, cols], grad_s.mT, q)
        gradients = (grad_q.mul_(self.scale), grad_k.mul_(self.scale), grad_v)
        return [self.unflat(d, self.dtype) for d in gradients]
