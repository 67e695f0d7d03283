# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Flash attention on a GPU: the kernels as a function with a gradient, and as a backend.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from attnlib.checks import (
    as_autocast,
    positive_scale,
    refuse_bad_inputs,
    require_scale,
    require_window,
)
from attnlib.flash.attention import BACKENDS, Backend
from attnlib.flash_triton.blocks import triton
from attnlib.flash_triton.launch import (
    capability_of,
    interpreted,
    room_like,
    run_backward,
    run_forward,
    run_statistics,
)
from attnlib.fused import four_dimensional

OLDEST_TRITON = (3, 3)  # the first whose kernels take and return named tuples
OLDEST_TRITON_75 = (3, 4)  # the first that multiplies float16 for 7.5, a T4


# An operator of a notebook must not take the place of the package's.
NAMESPACE = __name__.partition(".")[0]


triton_forward = torch.library.custom_op(
    f"{NAMESPACE}::triton_forward",
    run_forward,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
    "float scale, int? window=None) -> (Tensor, Tensor)",
)


@triton_forward.register_fake
def forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """Empty tensors like those of `triton_forward`, in the same order in memory.

    Source: chapter 15, eq-strides.
    """
    output = room_like(query, query.shape[2], value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    f"{NAMESPACE}::triton_backward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor output, "
    "Tensor lse, Tensor grad_output, Tensor grad_lse, bool causal, float scale, "
    "bool of_query, bool of_keys, int? window=None) -> (Tensor, Tensor, Tensor)",
)
def triton_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor,
    causal: bool,
    scale: float,
    of_query: bool,
    of_keys: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers for each query first, then the gradients that are wanted, or empty ones.

    Source: chapter 15, eq-two-walks; chapter 14, eq-flash-gradients.
    """
    inputs = (query, key, value, mask)
    if lse.numel() == 0:  # no query, so nothing changes with a key
        gradients = [torch.zeros_like(x) for x in inputs[:3]]
    else:
        statistics = run_statistics(output, grad_output, lse, grad_lse)
        options = (causal, scale, (of_query, of_keys), window)
        gradients = run_backward(*inputs, grad_output, statistics, *options)
    return tuple(query.new_empty(0) if g is None else g for g in gradients)


@triton_backward.register_fake
def backward_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors like those of `triton_backward`.

    Source: chapter 15, eq-strides.
    """
    asked = (others[6], others[7], others[7])
    return tuple(
        room_like(x, *x.shape[2:]) if wanted else query.new_empty(0)
        for x, wanted in zip((query, key, value), asked, strict=True)
    )


def keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Keeps what the backward needs: no N×M matrix.

    Source: chapter 14, eq-recompute.
    """
    ctx.options = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *output)


def gradients(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value, where they are needed.

    Source: chapter 14, eq-flash-gradients.
    """
    needed = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3]))
    grad_output = with_unit_stride(grad_output)
    causal, scale, window = ctx.options
    found = triton_backward(
        *ctx.saved_tensors, grad_output, grad_lse, causal, scale, *needed, window
    )
    asked = (needed[0], needed[1], needed[1])
    wanted = (g if x else None for g, x in zip(found, asked, strict=True))
    return *wanted, None, None, None, None


triton_forward.register_autograd(gradients, setup_context=keep)


class TritonFunction(Function):
    """Output and log-sum-exp of 4-D tensors, with the backward kernels as its gradient.

    Source: chapter 15; chapter 14, eq-flash-gradients.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """As `triton_forward`."""
        return triton_forward(*inputs)

    setup_context = staticmethod(keep)
    backward = staticmethod(once_differentiable(gradients))

    @staticmethod
    def vmap(info: Any, dims: tuple, *inputs: Any) -> tuple[tuple, tuple]:
        """The tensors of a batch are as many more matrices."""
        size, options = info.batch_size, inputs[4:]
        wide = [
            x
            if x is None
            else x.expand(size, *x.shape)
            if dim is None
            else x.movedim(dim, 0)
            for x, dim in zip(inputs[:4], dims, strict=False)
        ]
        flat = [x if x is None else x.flatten(0, 1) for x in wide]
        results = TritonFunction.apply(*flat, *options)
        return tuple(x.unflatten(0, (size, -1)) for x in results), (0, 0)


def with_unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself if a row's entries are neighbors in memory, else a copy.

    Source: chapter 15, eq-strides.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def old_triton(oldest: tuple[int, int], where: str = "") -> Exception | None:
    """Says that Triton is older than this; `None` if it is not.

    Source: chapter 15.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) >= oldest:
        return None
    expected = f"expected triton {'.'.join(map(str, oldest))} or newer{where}"
    return RuntimeError(f"{expected}, got {triton.__version__}")


def refusal_on_75(query: Tensor, value: Tensor) -> Exception | None:
    """Why a GPU of 7.5, whose tensor cores Triton leaves aside, can't; `None` if it can.

    Source: chapter 15.
    """
    where = ' on a GPU of compute capability 7.5; backend="torch" has tiles for all'
    if query.dtype == torch.bfloat16:
        return TypeError(f"query: expected float16 or float32, got {query.dtype}{where}")
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[-1] > 128:  # no tile is small enough for 64 KB of shared memory
            expected = f"{name}: expected at most 128 features"
            return ValueError(f"{expected}, got shape {tuple(tensor.shape)}{where}")
    return old_triton(OLDEST_TRITON_75, where)


def refusal(query: Tensor, value: Tensor, mask: Tensor | None) -> Exception | None:
    """Why the kernels can't compute something; `None` if they can.

    Args:
        query: expected float16, bfloat16 or float32, d_k ≤ 256, and on a GPU of NVIDIA. One
            of compute capability 7.5 takes no bfloat16, and d_k ≤ 128.
        value: expected d_v ≤ 256, or 128.
        mask: expected not to require a gradient.

    Source: chapter 15.
    """
    if isinstance(triton, SimpleNamespace):
        return RuntimeError("expected the package triton, which is not installed")
    if error := old_triton(OLDEST_TRITON):
        return error
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
    if capability_of(query) < 75:
        expected = "query: expected a GPU of compute capability 7.5 or higher"
        found = torch.cuda.get_device_capability(query.device)
        return RuntimeError(f"{expected}, got {found}")
    return refusal_on_75(query, value) if capability_of(query) < 80 else None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
    """Query, key, value and mask with four dimensions, and a positive scale.

    Source: chapter 15, eq-strides, eq-raw-maximum.
    """
    # The kernels take the maximum before they scale: only right if it is positive.
    query, scale = positive_scale(query, scale)
    if query.dtype == torch.bfloat16 and interpreted():  # whose products of it are wrong
        query, key, value = query.float(), key.float(), value.float()
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        shape = (*query.shape[:-1], key.shape[-2])
        mask = four_dimensional(mask.expand(shape))
    q, k, v = (with_unit_stride(four_dimensional(x)) for x in (query, key, value))
    return q, k, v, mask, scale


def flash_attention_triton(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*shared keys d_k"],
    value: Float[Tensor, "*shared keys d_v"],
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | Tensor | None = None,
    return_lse: bool = False,
    enable_gqa: bool = False,
) -> (
    Float[Tensor, "*batch queries d_v"]
    | tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]
):
    """Attention on a GPU that never forms the N×M scores, forward or backward.

    Strides are respected: a transposed view is read where it lies, as long as the features
    of a token are neighbors in memory. The backward adds to the query's gradient in float32
    and in any order, so that its last bits may differ from run to run; after
    `torch.use_deterministic_algorithms(True)` the same inputs give the same bits, for seven
    products of matrices instead of five. The gradients can be taken once. float32 is
    multiplied as `torch.set_float32_matmul_precision` says: exactly, or on tensor cores.
    Where all scores of a query are so large, or a mask so low, that float32 can't tell them
    apart (finfo.min for every key), the output is right, but its gradients are not.

    Args:
        query: shape (..., N, d_k), float16, bfloat16 or float32, d_k ≤ 256.
        key: shape (..., M, d_k).
        value: shape (..., M, d_v), d_v ≤ 256.
        mask: broadcasts to (..., N, M) and is never expanded in memory if there are at most
            two leading dimensions; boolean, True = may attend, or floating, added to the
            scores. It gets no gradient.
        causal: query i sees the keys up to i + M - N only; composes with any mask.
        window: query i sees the keys less than window tokens from i + M - N only; composes
            with both. Tiles outside of it are skipped.
        scale: factor on the scores; `None` means 1/√d_k.
        return_lse: whether to return the log-sum-exp of the scores too.
        enable_gqa: whether heads may share keys and values, as in PyTorch's function: query
            (..., H, N, d_k), key and value (..., H_kv, M, d), of which each serves the
            H / H_kv heads of queries that follow each other.

    Returns:
        Output (..., N, d_v), and on request the log-sum-exp (..., N) in float32, through
        which gradients flow; -inf where a query may attend to nothing, whose output and
        gradients are 0.

    Raises:
        RuntimeError: no Triton from 3.3 on, or no GPU of NVIDIA of compute capability 7.5
            or higher. 7.5, as a T4 has it, takes Triton from 3.4 on, d_k and d_v ≤ 128,
            and no bfloat16.
        TypeError: a wrong or a mixed dtype, or window is no integer.
        ValueError: a wrong rank, mismatched shapes or devices, heads that can't share, more
            than 256 features, window below 1, or a mask that requires a gradient.

    Source: chapter 15, eq-raw-maximum, eq-two-walks; chapter 14.
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    refuse_bad_inputs(query, key, value, mask, enable_gqa)
    options = {"window": require_window(window), "scale": require_scale(scale)}
    output, lse = attend_kernels(
        query, key, value, mask, causal=causal, **options, return_lse=True
    )
    return (output, lse) if return_lse else output


def attend_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    scale: float | Tensor | None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention_triton` of what has been looked at already, heads sharing keys.

    Source: chapter 15.
    """
    if error := refusal(query, value, mask):
        raise error
    leading, dtype = query.shape[:-2], query.dtype
    *inputs, scale = prepare(query, key, value, mask, scale)
    # A graph takes the operator, which has the same gradient; torch.func the Function.
    attend = triton_forward if torch.compiler.is_compiling() else TritonFunction.apply
    output, lse = attend(*inputs, causal, scale, window)
    output = output.reshape(*leading, *output.shape[-2:]).to(dtype)
    return (output, lse.reshape(*leading, lse.shape[-1])) if return_lse else output


def suits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None = None,
) -> bool:
    """Whether `FlashAttention` should take these kernels by itself.

    Not for float32, whose products take no tensor cores, until somebody has measured it.

    Source: chapter 15.
    """
    wide = query.dtype == torch.float32
    able = query.is_cuda and not wide and refusal(query, value, mask) is None
    return able and capability_of(query) >= 80  # below, only PyTorch's has tensor cores


BACKENDS["triton"] = Backend(attend_kernels, suits, grouped=True)
