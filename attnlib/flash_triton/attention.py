# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Flash attention on a GPU: the kernels as a function with a gradient, and as a backend.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from attnlib.checks import as_autocast, refuse_bad_inputs
from attnlib.flash import BACKENDS, Backend
from attnlib.flash_triton.blocks import triton
from attnlib.flash_triton.launch import (
    capability_of,
    interpreted,
    run_backward,
    run_forward,
    run_statistics,
)

OLDEST_TRITON = (3, 3)  # the first whose kernels take and return named tuples


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
    def backward(
        ctx: Any, grad_output: Tensor, grad_lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Two numbers for each query first, then the gradients that are wanted."""
        *tensors, output, lse = ctx.saved_tensors
        if lse.numel() == 0:  # no query, so nothing changes with a key
            return *map(torch.zeros_like, tensors[:3]), None, None, None
        grad_output = with_unit_stride(grad_output)
        statistics = run_statistics(output, grad_output, lse, grad_lse)
        needed = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3]))
        gradients = run_backward(
            *tensors, grad_output, statistics, ctx.causal, ctx.scale, needed
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


def suits(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> bool:
    """Whether `FlashAttention` should take these kernels by itself.

    Source: chapter 15.
    """
    return query.is_cuda and refusal(query, value, mask) is None


BACKENDS["triton"] = Backend(flash_attention_triton, suits)
