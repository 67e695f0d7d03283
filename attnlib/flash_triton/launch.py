# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""What starts the kernels: their arguments by name, their grids, room for the results.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from attnlib.flash.tiles import narrow_window
from attnlib.flash_triton.backward import (
    key_value_gradient_kernel,
    query_gradient_kernel,
    statistics_kernel,
)
from attnlib.flash_triton.blocks import Heads, heads_of, triton
from attnlib.flash_triton.forward import forward_kernel
from attnlib.flash_triton.settings import Kernel, choose_setting


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on the CPU.

    Source: chapter 15.
    """
    return not isinstance(forward_kernel, triton.JITFunction)


def capability_of(tensor: Tensor) -> int:
    """Compute capability of the GPU that holds a tensor, 90 for 9.0; 0 if interpreted.

    Source: chapter 15.
    """
    if interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def cache_of(tensor: Tensor) -> int:
    """Bytes of the cache that all multiprocessors share; those of an H100 if interpreted.

    Source: chapter 15, eq-grid.
    """
    if not tensor.is_cuda:
        return 50 * 2**20
    return torch.cuda.get_device_properties(tensor.device).L2_cache_size


def precision_of(dtype: torch.dtype) -> str:
    """How products of float32 are taken, as the user has set it for PyTorch's own.

    "ieee" exactly; "tf32x3" by three products on tensor cores, which drop 13 bits of their
    factors, "tf32" by one. Numbers of 16 bits have no choice.

    Source: chapter 15.
    """
    if dtype != torch.float32:
        return "ieee"
    try:
        chosen = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer names, which know no "high"
        newer = torch.backends.cuda.matmul.fp32_precision
        chosen = "medium" if newer == "tf32" else "highest"
    return {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}[chosen]


def launch(kernel: Any, programs: int, device: torch.device, **arguments: Any) -> None:
    """Starts a kernel on the GPU that holds its tensors; does nothing for no programs.

    Each power is that of a·b − c, in one instruction, rounded once, if a multiplication and
    an addition may be fused. Whether they are by default depends on Triton's version.

    Source: chapter 15.
    """
    if programs > 0:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[(programs,)](**arguments, enable_fp_fusion=True)


def padded(width: int) -> int:
    """The columns of a block: a power of two, and at least the 16 that a product takes.

    Source: chapter 15.
    """
    return max(16, triton.next_power_of_2(width))


def mask_of(mask: Tensor | None, query: Tensor) -> tuple[Heads, str]:
    """A mask with its strides, and its kind; in place of none, what is never read.

    Source: chapter 15, eq-strides.
    """
    if mask is None:
        return Heads(query, 0, 0, 0, 1), "none"
    return heads_of(mask), "boolean" if mask.dtype == torch.uint8 else "additive"


def arguments_of(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> dict[str, Any]:
    """What all three kernels take, by name, and what this one is compiled for.

    Source: chapter 15, eq-grid, eq-registers, eq-shared-memory.
    """
    batch, heads, queries, d_k = query.shape
    shared, keys, d_v = value.shape[1:]
    setting = choose_setting(kernel, max(d_k, d_v), query.dtype, capability_of(query))
    full_keys = keys > 0 and keys % setting.keys == 0
    full_queries = queries % setting.queries == 0
    even = {"key_value_gradient": full_queries, "all_gradients": full_queries and full_keys}
    group = heads // max(1, shared)
    # Under a causal mask, so many pairs go together as half of the cache has room for:
    # their keys and values if queries own a block, else their queries and their gradients.
    pairs, together = batch * heads, 1
    if kernel in even:
        pairs = batch * shared
    walked = group * queries if kernel in even else keys
    if causal:
        room = cache_of(query) // 2 // (max(1, walked * (d_k + d_v)) * query.element_size())
        together = max(1, min(pairs, room))
    given, kind = mask_of(mask, query)
    return dict(
        query=heads_of(query), key=heads_of(key), value=heads_of(value), mask=given,
        window=narrow_window(window, queries, keys, causal),
        heads=heads, queries=queries, keys=keys, together=together, scale=scale,
        D_K=d_k, D_V=d_v, PADDED_K=padded(d_k), PADDED_V=padded(d_v), GROUP=group,
        BLOCK_Q=setting.queries, BLOCK_K=setting.keys,
        EVEN=even.get(kernel, full_keys), CAUSAL=causal, MASK=kind,
        PRECISION=precision_of(query.dtype),
        num_warps=setting.warps, num_stages=setting.stages,
    )  # fmt: skip


def room_like(tensor: Tensor, tokens: int, width: int) -> Tensor:
    """Room for (batch, heads, tokens, width), with the tensor's order in memory.

    Source: chapter 15, eq-strides.
    """
    batch, heads = tensor.shape[:2]
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return tensor.new_empty(batch, heads, tokens, width)


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of 4-D tensors whose last stride is 1.

    Source: chapter 15, eq-grid.
    """
    batch, heads, queries, _ = query.shape
    output = room_like(query, queries, value.shape[-1])
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    given = arguments_of("forward", query, key, value, mask, causal, scale, window)
    programs = batch * heads * -(-queries // given["BLOCK_Q"])
    results = {"output": heads_of(output), "lse": lse}
    launch(forward_kernel, programs, query.device, **given, **results)
    return output, lse


# The two numbers for each query have rows filled up to a multiple of this, the largest
# block of queries.
STATISTICS_ROWS = 128


def run_statistics(
    output: Tensor, grad_output: Tensor, lse: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp to base 2 and D of every query, rows filled up.

    Source: chapter 14, eq-flash-delta.
    """
    batch, heads, queries, width = output.shape
    rows = -(-queries // STATISTICS_ROWS) * STATISTICS_ROWS
    level, delta = lse.new_empty(2, batch, heads, rows).unbind()
    launch(
        statistics_kernel,
        batch * heads * (rows // 64),
        output.device,
        output=heads_of(output), grad_output=heads_of(grad_output),
        lse=lse, grad_lse=grad_lse.contiguous(), level=level, delta=delta,
        heads=heads, queries=queries, D_V=width, PADDED_V=padded(width),
        ROWS=STATISTICS_ROWS, BLOCK_Q=64,
    )  # fmt: skip
    return level, delta


def run_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    grad_output: Tensor,
    statistics: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
    needed: tuple[bool, bool],
    window: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dQ if `needed[0]`, dK and dV if `needed[1]`; both in one walk along the queries.

    In that walk the sums of dQ have any order. Where the user wants the same bits every
    time, by PyTorch's switch, dQ has a walk of its own, along the keys.

    Source: chapter 15, eq-two-walks.
    """
    batch, heads, queries, d_k = query.shape
    shared_heads, keys, d_v = value.shape[1:]
    one_walk = all(needed) and not torch.are_deterministic_algorithms_enabled()
    grad_query = grad_key = grad_value = None
    inputs = (query, key, value, mask, causal, scale, window)
    level, delta = statistics
    shared = {"grad_output": heads_of(grad_output), "level": level, "delta": delta}
    shared["ROWS"] = STATISTICS_ROWS
    if needed[0]:
        grad_query = room_like(query, queries, d_k)
    if needed[0] and not one_walk:
        given = arguments_of("query_gradient", *inputs) | shared
        programs = batch * heads * -(-queries // given["BLOCK_Q"])
        results = {"grad_query": heads_of(grad_query)}
        launch(query_gradient_kernel, programs, query.device, **given, **results)
    if needed[1]:
        grad_key = room_like(key, keys, d_k)
        grad_value = room_like(value, keys, d_v)
        given = arguments_of("all_gradients" if one_walk else "key_value_gradient", *inputs)
        given |= shared | {"WITH_QUERY": one_walk}
        programs = batch * shared_heads * -(-keys // given["BLOCK_K"])
        results = {"grad_key": heads_of(grad_key), "grad_value": heads_of(grad_value)}
        # In place of no sums stands something that is never touched.
        results["grad_query"] = Heads(level, 0, 0, 0, 1)
        if one_walk:
            sums = level.new_zeros(*level.shape, d_k)  # as many rows, in whole blocks
            results["grad_query"] = heads_of(sums)
        launch(key_value_gradient_kernel, programs, query.device, **given, **results)
        if one_walk:
            torch.mul(sums[:, :, :queries], scale, out=grad_query)
    return grad_query, grad_key, grad_value
