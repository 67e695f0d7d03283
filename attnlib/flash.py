# Made from book/14_flash_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Flash attention: exact attention in tiles, with memory linear in the number of tokens.

Derived in chapter 14, "Flash attention" (book/14_flash_attention.ipynb).
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.flop_counter import register_flop_formula

from attnlib.base import BaseAttention
from attnlib.checks import as_autocast, refuse_bad_inputs, require_flag
from attnlib.fused import attend_fused
from attnlib.masks import Mask, apply_mask, causal_mask

LOG2E = math.log2(math.e)
BlockSize = int | tuple[int, int]  # queries and keys in a tile


def block_sizes(
    block_size: BlockSize | None, matrices: int, queries: int, causal: bool
) -> tuple[int, int]:
    """Queries and keys in a tile.

    Args:
        block_size: one number for both, or two; `None` chooses sizes that suit a CPU's
            cache.
        matrices: number of score matrices, batch times heads.
        queries: number of queries N.
        causal: whether half of each tile on the diagonal is computed for nothing.

    Raises:
        TypeError: not integers.
        ValueError: a size below 1.

    Source: chapter 14, eq-fast-memory, eq-tiled-intensity.
    """
    if block_size is None:
        keys = 256 if matrices >= 4 else 512
        rows = 2**20 // (max(matrices, 1) * keys)
        most = max(queries // (8 if causal else 4), 128)
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
        matrices, self.queries, _ = self.q.shape
        self.keys = self.k.shape[1]
        rows, cols = block_sizes(block_size, matrices, self.queries, causal)
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
        q = self.q[:, rows] * (self.scale * LOG2E)
        shift = self.keys - self.queries
        tiles = visible_tiles(rows, self.queries, self.keys, self.causal, self.cols)
        for cols, partial in tiles:
            s = product(q, self.k[:, cols].transpose(1, 2), self.buffer)
            if self.mask is not None:
                part = mask_tile(self.mask, rows, cols)
                apply_mask_(s.view(*self.leading, *s.shape[1:]), part)
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


# An operator of a notebook must not take the place of the package's.
NAMESPACE = __name__.partition(".")[0]


@torch.library.custom_op(
    f"{NAMESPACE}::flash_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
    "float scale, int[]? block_size) -> (Tensor, Tensor, Tensor, Tensor)",
)
def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    block_size: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (..., N, d_v), log-sum-exp (..., N), m and l in base 2 (..., N): an operator.

    PyTorch exports, compiles and counts an operator as a whole, without looking into it.

    Source: chapter 14, eq-tiled-traffic, eq-tile-visible, eq-exp2, eq-sum-bound.
    """
    sizes = None if block_size is None else tuple(block_size)
    return TiledAttention(query, key, value, mask, causal, scale, sizes).forward()


@flash_forward.register_fake
def forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors like those of `flash_forward`, which is all that a graph asks for.

    Source: chapter 14.
    """
    rows, wide = query.shape[:-1], torch.promote_types(query.dtype, torch.float32)
    numbers = (query.new_empty(rows, dtype=wide) for _ in range(3))
    return query.new_empty(*rows, value.shape[-1]), *numbers


@torch.library.custom_op(
    f"{NAMESPACE}::flash_backward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor output, "
    "Tensor top, Tensor total, Tensor grad_output, Tensor grad_lse, bool mask_too, "
    "bool causal, float scale, int[]? block_size) -> (Tensor, Tensor, Tensor, Tensor)",
)
def flash_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    top: Tensor,
    total: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor,
    mask_too: bool,
    causal: bool,
    scale: float,
    block_size: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, if `mask_too`, of the mask, else an empty one.

    Source: chapter 14, eq-recompute, eq-flash-delta, eq-flash-gradients.
    """
    sizes = None if block_size is None else tuple(block_size)
    attention = TiledAttention(query, key, value, mask, causal, scale, sizes)
    grad_mask = torch.zeros_like(mask) if mask_too else None
    kept = (output, top, total, grad_output, grad_lse)
    gradients = attention.backward(*kept, grad_mask)
    return *gradients, grad_mask if mask_too else query.new_empty(0)


@flash_backward.register_fake
def backward_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors like those of `flash_backward`.

    Source: chapter 14.
    """
    grad_mask = torch.empty_like(mask) if others[5] else query.new_empty(0)
    return *(x.new_empty(x.shape) for x in (query, key, value)), grad_mask


def with_batch(x: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """A tensor of `torch.vmap` with its batch in front, and ones up to rank + 1 dimensions.

    Source: chapter 14.
    """
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size, *[1] * (rank + 1 - x.dim()), *x.shape[1:])


@register_flop_formula(flash_forward._opoverload.overloadpacket)
def forward_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """FLOPs of `flash_forward` by the shapes: two products, as if nothing were masked.

    Source: chapter 1, eq-attention-flops.
    """
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@register_flop_formula(flash_backward._opoverload.overloadpacket)
def backward_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """FLOPs of `flash_backward` by the shapes: five products, three of them d_k wide.

    Source: chapter 14, eq-recompute, eq-flash-gradients.
    """
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


@flash_forward.register_vmap
def forward_batched(info: Any, dims: tuple, *inputs: Any) -> tuple[tuple, tuple]:
    """`flash_forward` of a batch: leading dimensions are free, so it is one more.

    Source: chapter 14.
    """
    ranks = [x.dim() - (d is not None) for x, d in zip(inputs[:3], dims[:3], strict=True)]
    ranks.append(ranks[0])  # a mask broadcasts to the scores
    tensors = [
        None if x is None else with_batch(x, dim, info.batch_size, rank)
        for x, dim, rank in zip(inputs[:4], dims, ranks, strict=False)
    ]
    return flash_forward(*tensors, *inputs[4:]), (0, 0, 0, 0)


@flash_backward.register_vmap
def backward_batched(info: Any, dims: tuple, *inputs: Any) -> tuple[tuple, tuple]:
    """`flash_backward` of a batch; a mask that all share gets a gradient from each.

    Source: chapter 14.
    """
    ranks = [
        0 if x is None else x.dim() - (dim is not None)
        for x, dim in zip(inputs[:9], dims, strict=False)
    ]
    wide = [*ranks[:3], ranks[0], *ranks[4:]]
    tensors = [
        None if x is None else with_batch(x, dim, info.batch_size, rank)
        for x, dim, rank in zip(inputs[:9], dims, wide, strict=False)
    ]
    *gradients, grad_mask = flash_backward(*tensors, *inputs[9:])
    if not inputs[9]:
        return (*gradients, grad_mask), (0, 0, 0, None)
    own = grad_mask.shape[grad_mask.dim() - ranks[3] :]
    return (*gradients, grad_mask.reshape(info.batch_size, *own)), (0, 0, 0, 0)


class FlashFunction(Function):
    """Attention in tiles for autograd, with a backward that computes the tiles again.

    Source: chapter 14, eq-recompute, eq-flash-delta, eq-flash-gradients.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `flash_forward`."""
        return flash_forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Keeps the inputs, the output and two numbers for each query."""
        attended, _, top, total = output
        ctx.options = inputs[4:]
        ctx.save_for_backward(*inputs[:4], attended, top, total)
        ctx.mark_non_differentiable(top, total)

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor, grad_lse: Tensor, *others: Any
    ) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value and mask."""
        mask_too = ctx.needs_input_grad[3]
        options = (mask_too, *ctx.options)
        *gradients, grad_mask = FlashGradients.apply(
            *ctx.saved_tensors, grad_output, grad_lse, *options
        )
        return *gradients, grad_mask if mask_too else None, None, None, None


class FlashGradients(Function):
    """The backward of `FlashFunction`, which can be differentiated again.

    Source: chapter 14, eq-flash-gradients.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `flash_backward`."""
        return flash_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Keeps what the gradients came from; output, m and l follow from the rest."""
        ctx.save_for_backward(*inputs[:4], *inputs[7:9])
        ctx.options = inputs[9:]

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiates plain attention twice, one block of queries after the other."""
        query, key, value, mask, grad_output, grad_lse = ctx.saved_tensors
        mask_too, causal, scale, block_size = ctx.options
        if mask_too:
            raise NotImplementedError(
                "mask: expected one that needs no gradient where a gradient is "
                "differentiated again; ScaledDotProductAttention can do both"
            )
        matrices, queries = math.prod(query.shape[:-2]), query.shape[-2]
        sizes = block_size or block_sizes(None, matrices, queries, causal)
        of_rows: list[tuple[Tensor, ...]] = []
        of_keys = [torch.zeros_like(x) for x in (key, value)]
        for rows in row_blocks(queries, sizes[0]):
            part = None if mask is None else mask_tile(mask, rows, slice(None))
            seen = plain_rows(part, rows, queries, causal, scale)
            here = (query[..., rows, :], key, value)
            weighted = (grad_output[..., rows, :], grad_lse[..., rows])
            first = functools.partial(gradients_of, seen)
            _, again = torch.func.vjp(first, *here, *weighted)
            q, k, v, grad_o, grad_l = again((seconds[0][..., rows, :], *seconds[1:3]))
            of_rows.append((q, grad_o, grad_l[..., None]))
            of_keys = [total + x for total, x in zip(of_keys, (k, v), strict=True)]
        if not of_rows:  # no queries, so nothing changes with anything
            return None, *of_keys, *[None] * 10
        q, grad_o, grad_l = (
            torch.cat(parts, dim=-2) for parts in zip(*of_rows, strict=True)
        )
        unneeded = (None,) * 4
        return q, *of_keys, *unneeded, grad_o, grad_l[..., 0], *unneeded


flash_forward.register_autograd(
    FlashFunction.backward, setup_context=FlashFunction.setup_context
)


def plain_rows(
    mask: Tensor | None, rows: slice, queries: int, causal: bool, scale: float
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of a block of queries as a function, without tiles.

    Source: chapter 14, eq-recompute.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        scores = (scale * query) @ key.mT
        if causal:
            past = causal_mask(queries, key.shape[-2], query.device)[rows]
            scores = apply_mask(scores, past)
        if mask is not None:
            scores = apply_mask(scores, mask)
        empty = (scores == -torch.inf).all(dim=-1)
        scores = scores.masked_fill(empty[..., None], 0.0)
        weights = torch.softmax(scores, dim=-1).masked_fill(empty[..., None], 0.0)
        wide = torch.promote_types(scores.dtype, torch.float32)
        lse = scores.to(wide).logsumexp(dim=-1).masked_fill(empty, -torch.inf)
        return weights @ value, lse

    return attend


def gradients_of(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, as a function of all that they depend on.

    Source: chapter 14.
    """
    _, pull = torch.func.vjp(function, query, key, value)
    return pull((grad_output, grad_lse))


def flash_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Mask | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_size: BlockSize | None = None,
    return_lse: bool = False,
) -> (
    Float[Tensor, "*batch queries d_v"]
    | tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]
):
    """softmax(QKᵀ/√d_k) V without ever holding more than a tile of the scores.

    Memory beyond inputs and output is linear in the number of tokens, also for the
    gradients, and for those of a gradient, which a mask does not get. A mask that
    broadcasts is not expanded. The sum of weighted values is divided last: where the number
    of keys times the largest value passes the range of float32 (float64 for such inputs),
    the output overflows.

    Args:
        query: shape (..., N, d_k).
        key: shape (..., M, d_k).
        value: shape (..., M, d_v).
        mask: broadcasts to (..., N, M); boolean, True = may attend, or floating, added
            to the scores, and then with a gradient if it needs one; numbers below
            finfo.min / log₂e, but for -inf, count as that.
        causal: query i sees the keys up to i + M - N only; composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.
        block_size: queries and keys in a tile, as one number or two; `None` chooses.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        Output (..., N, d_v), and on request the log-sum-exp (..., N), in float32 at least;
        -inf where a query may attend to nothing, whose output and gradients are 0.

    Raises:
        TypeError: a tensor of the wrong or a mixed dtype, or a wrong block_size.
        ValueError: a wrong rank, mismatched shapes or devices, or block_size below 1.

    Source: chapter 14, eq-tiled-traffic, eq-tile-visible, eq-exp2, eq-sum-bound;
    Dao et al. (2022).
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    refuse_bad_inputs(query, key, value, mask)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if block_size is not None:
        block_size = list(block_sizes(block_size, matrices=1, queries=1, causal=causal))
    # A graph takes the operator, which has the same gradient; torch.func the Function.
    attend = flash_forward if torch.compiler.is_compiling() else FlashFunction.apply
    output, lse, *_ = attend(query, key, value, mask, causal, scale, block_size)
    return (output, lse) if return_lse else output


class Backend(NamedTuple):
    """A way to compute flash attention.

    Args:
        attention: called as `flash_attention` is, without a block_size, with inputs that
            have been looked at.
        suits: called with query, key, value, mask and causal; whether "auto" may choose it
            for them.

    Source: chapter 14.
    """

    attention: Callable[..., Any]
    suits: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], bool]


def fused_suits(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> bool:
    """Whether PyTorch's function computes it without an N × M matrix.

    It forms the weights where keys and values differ in width or a mask needs a gradient,
    and on a GPU in float64. A causal mask must be formed beside another one, or where the
    queries are neither one nor as many as the keys.

    Source: chapter 14.
    """
    if query.is_cuda and query.dtype == torch.float64:
        return False
    if query.shape[-1] != value.shape[-1] or (mask is not None and mask.requires_grad):
        return False
    square = query.shape[-2] == key.shape[-2] or query.shape[-2] == 1
    return not causal or (mask is None and square)


BACKENDS = {
    "torch": Backend(flash_attention, lambda *inputs: True),
    "fused": Backend(attend_fused, fused_suits),
}
# What "auto" asks, in this order. On a CPU PyTorch's function is as fast as the tiles for
# thousands of tokens and faster for few (benchmarks/results/backends.json); on a GPU no
# record compares the kernels yet.
FASTEST = ("fused", "triton", "torch")


class FlashAttention(BaseAttention):
    """`flash_attention` as an attention to plug in; it never forms the weights.

    Args:
        causal: let each query see only keys up to its own position, aligned bottom
            right; composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.
        block_size: queries and keys in a tile, as one number or two; `None` chooses.
        backend: "torch", the tiles of this chapter; "fused", PyTorch's own function, see
            `fused_attention`; another name in `BACKENDS`, such as "triton", the kernels of
            the next chapter; or "auto": "torch" if there is a block_size, otherwise the
            first of `FASTEST` that suits the tensors. A gradient can be differentiated
            again with "torch" only.

    Raises:
        TypeError: causal is not a truth value, or a wrong block_size.
        ValueError: an unknown backend, block_size below 1, or a block_size for a backend
            that chooses its own.

    Source: chapter 14; Dao et al. (2022).
    """

    def __init__(
        self,
        causal: bool = False,
        scale: float | None = None,
        block_size: BlockSize | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if backend not in ("auto", *BACKENDS):
            expected = ", ".join(map(repr, ("auto", *BACKENDS)))
            raise ValueError(f"backend: expected one of {expected}, got {backend!r}")
        block_sizes(block_size, matrices=1, queries=1, causal=causal)
        if block_size is not None and backend not in ("auto", "torch"):
            expected = f"expected None, since {backend!r} chooses its own tiles"
            raise ValueError(f"block_size: {expected}, got {block_size!r}")
        self.causal, self.scale = require_flag("causal", causal), scale
        self.block_size, self.backend = block_size, backend

    def forward(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Mask | None = None,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], None]:
        """Output (..., N, d_v) and `None`; see `BaseAttention.forward`."""
        query, key, value, mask = as_autocast(query, key, value, mask)
        refuse_bad_inputs(query, key, value, mask)
        backend = self.backend if self.block_size is None else "torch"
        if backend == "auto":
            inputs = (query, key, value, mask, self.causal)
            fit = (name for name in FASTEST if name in BACKENDS)
            backend = next(name for name in fit if BACKENDS[name].suits(*inputs))
        options = {"causal": self.causal, "scale": self.scale}
        if backend == "torch":
            options["block_size"] = self.block_size
        output = BACKENDS[backend].attention(query, key, value, mask, **options)
        return output, None
