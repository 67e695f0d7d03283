# Made from book/14_flash_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The tiles as operators of PyTorch, with their shapes, gradients, batches and FLOPs.

Derived in chapter 14, "Flash attention" (book/14_flash_attention.ipynb).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.flop_counter import register_flop_formula

from attnlib.flash.tiles import TiledAttention, block_sizes, mask_tile, row_blocks
from attnlib.masks import apply_mask, causal_mask, window_mask

# An operator of a notebook must not take the place of the package's.
NAMESPACE = __name__.partition(".")[0]


@torch.library.custom_op(
    f"{NAMESPACE}::flash_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
    "float scale, int[]? block_size, int? window=None) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    block_size: list[int] | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (..., N, d_v), log-sum-exp (..., N), m and l in base 2 (..., N): an operator.

    PyTorch exports, compiles and counts an operator as a whole, without looking into it.

    Source: chapter 14, eq-tiled-traffic, eq-tile-visible, eq-exp2, eq-sum-bound.
    """
    sizes = None if block_size is None else tuple(block_size)
    inputs = (query, key, value, mask, causal, scale, sizes, window)
    return TiledAttention(*inputs).forward()


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
    "bool causal, float scale, int[]? block_size, int? window=None) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
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
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, if `mask_too`, of the mask, else an empty one.

    Source: chapter 14, eq-recompute, eq-flash-delta, eq-flash-gradients.
    """
    sizes = None if block_size is None else tuple(block_size)
    attention = TiledAttention(query, key, value, mask, causal, scale, sizes, window)
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
        return *gradients, grad_mask if mask_too else None, None, None, None, None


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
        mask_too, causal, scale, block_size, window = ctx.options
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
            seen = plain_rows(part, rows, queries, causal, scale, window)
            here = (query[..., rows, :], key, value)
            weighted = (grad_output[..., rows, :], grad_lse[..., rows])
            first = functools.partial(gradients_of, seen)
            _, again = torch.func.vjp(first, *here, *weighted)
            q, k, v, grad_o, grad_l = again((seconds[0][..., rows, :], *seconds[1:3]))
            of_rows.append((q, grad_o, grad_l[..., None]))
            of_keys = [total + x for total, x in zip(of_keys, (k, v), strict=True)]
        if not of_rows:  # no queries, so nothing changes with anything
            return None, *of_keys, *[None] * 11
        q, grad_o, grad_l = (
            torch.cat(parts, dim=-2) for parts in zip(*of_rows, strict=True)
        )
        unneeded = (None,) * 4
        return q, *of_keys, *unneeded, grad_o, grad_l[..., 0], *unneeded, None


flash_forward.register_autograd(
    FlashFunction.backward, setup_context=FlashFunction.setup_context
)


def plain_rows(
    mask: Tensor | None,
    rows: slice,
    queries: int,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of a block of queries as a function, without tiles.

    Source: chapter 14, eq-recompute.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        scores = (scale * query) @ key.mT
        if causal:
            past = causal_mask(queries, key.shape[-2], query.device)[rows]
            scores = apply_mask(scores, past)
        if window is not None:
            near = window_mask(queries, key.shape[-2], window, query.device)[rows]
            scores = apply_mask(scores, near)
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
