# Made from book/14_flash_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Flash attention: exact attention in tiles, with memory linear in the number of tokens.

Derived in chapter 14, "Flash attention" (book/14_flash_attention.ipynb).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnlib.base import BaseAttention, repeat_shared
from attnlib.checks import (
    as_autocast,
    positive_scale,
    refuse_bad_inputs,
    require_flag,
    require_scale,
    require_window,
)
from attnlib.flash.operators import FlashFunction, flash_forward
from attnlib.flash.tiles import BlockSize, block_sizes, narrow_window
from attnlib.fused import attend_fused
from attnlib.masks import Mask


def flash_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Mask | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | Tensor | None = None,
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
        window: query i sees the keys less than window tokens from i + M - N only; composes
            with both. Tiles outside of it are skipped.
        scale: factor on the scores; `None` means 1/√d_k.
        block_size: queries and keys in a tile, as one number or two; `None` chooses.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        Output (..., N, d_v), and on request the log-sum-exp (..., N), in float32 at least;
        -inf where a query may attend to nothing, whose output and gradients are 0.

    Raises:
        TypeError: a tensor of the wrong or a mixed dtype, or a wrong block_size or window.
        ValueError: a wrong rank, mismatched shapes or devices, or block_size or window
            below 1.

    Source: chapter 14, eq-tiled-traffic, eq-tile-visible, eq-exp2, eq-sum-bound;
    Dao et al. (2022).
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    refuse_bad_inputs(query, key, value, mask)
    options = {"window": require_window(window), "scale": require_scale(scale)}
    options |= {"causal": causal, "block_size": block_size}
    output, lse = attend_tiles(query, key, value, mask, **options, return_lse=True)
    return (output, lse) if return_lse else output


def attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    scale: float | Tensor | None,
    block_size: BlockSize | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of what has been looked at already.

    Source: chapter 14.
    """
    query, scale = positive_scale(query, scale)
    if block_size is not None:
        block_size = list(block_sizes(block_size, matrices=1, queries=1, causal=causal))
    # A graph takes the operator, which has the same gradient; torch.func the Function.
    attend = flash_forward if torch.compiler.is_compiling() else FlashFunction.apply
    options = (causal, scale, block_size, window)
    output, lse, *_ = attend(query, key, value, mask, *options)
    return (output, lse) if return_lse else output


class Backend(NamedTuple):
    """A way to compute flash attention.

    Args:
        attention: called with query, key, value, mask, and by name causal, window and
            scale, of inputs that have been looked at.
        suits: called with query, key, value, mask, causal and window; whether "auto" may
            choose it for them.
        grouped: whether heads of query may share those of key and value.

    Source: chapter 14.
    """

    attention: Callable[..., Any]
    suits: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, int | None], bool]
    grouped: bool = False


def fused_suits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None = None,
) -> bool:
    """Whether PyTorch's function computes it without an N × M matrix.

    It forms the weights where keys and values differ in width or a mask needs a gradient,
    and on a GPU in float64. A causal mask must be formed beside another one, or where the
    queries are neither one nor as many as the keys; and for a window, unless it hides
    nothing or there is one query, which sees the last keys.

    Source: chapter 14.
    """
    if query.is_cuda and query.dtype == torch.float64:
        return False
    if query.shape[-1] != value.shape[-1] or (mask is not None and mask.requires_grad):
        return False
    queries, keys = query.shape[-2], key.shape[-2]
    if queries > 1 and narrow_window(window, queries, keys, causal) is not None:
        return False
    square = queries == keys or queries == 1
    return not causal or (mask is None and square)


BACKENDS = {
    "torch": Backend(attend_tiles, lambda *inputs: True),
    "fused": Backend(attend_fused, fused_suits, grouped=True),
}
# What "auto" asks, in this order. On a CPU PyTorch's function is as fast as the tiles for
# thousands of tokens and faster for few (benchmarks/results/backends.json); on an H200 it
# chose cuDNN, which was faster than our kernels (benchmarks/results/flash_gpu.json).
FASTEST = ("fused", "triton", "torch")


class FlashAttention(BaseAttention):
    """`flash_attention` as an attention to plug in; it never forms the weights.

    Args:
        causal: let each query see only keys up to its own position, aligned bottom
            right; composes with any mask.
        scale: factor on the scores, a number or a tensor that broadcasts to the query;
            `None` means 1/√d_k.
        block_size: queries and keys in a tile, as one number or two; `None` chooses.
        backend: "torch", the tiles of this chapter; "fused", PyTorch's own function, see
            `fused_attention`; another name in `BACKENDS`, such as "triton", the kernels of
            the next chapter; or "auto": "torch" if there is a block_size, otherwise the
            first of `FASTEST` that suits the tensors. A gradient can be differentiated
            again with "torch" only.
        window: let each query see only keys that are less than so many tokens away, see
            `window_mask`; `None` means all. Composes with causal and with any mask.

    Raises:
        TypeError: causal is not a truth value, or a wrong scale, block_size or window.
        ValueError: an unknown backend, block_size or window below 1, or a block_size for a
            backend that chooses its own.

    Source: chapter 14; Dao et al. (2022).
    """

    def __init__(
        self,
        causal: bool = False,
        scale: float | Tensor | None = None,
        block_size: BlockSize | None = None,
        backend: str = "auto",
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        if backend not in ("auto", *BACKENDS):
            expected = ", ".join(map(repr, ("auto", *BACKENDS)))
            raise ValueError(f"backend: expected one of {expected}, got {backend!r}")
        block_sizes(block_size, matrices=1, queries=1, causal=causal)
        if block_size is not None and backend not in ("auto", "torch"):
            expected = f"expected None, since {backend!r} chooses its own tiles"
            raise ValueError(f"block_size: {expected}, got {block_size!r}")
        self.causal, self.scale = require_flag("causal", causal), require_scale(scale)
        self.block_size, self.backend = block_size, backend
        self.window = require_window(window)

    def attend_without_weights(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None,
    ) -> Float[Tensor, "*batch queries d_v"]:
        """Output (..., N, d_v); see `BaseAttention.attend_without_weights`."""
        backend = self.choose(query, key, value, mask)
        options = {"causal": self.causal, "window": self.window, "scale": self.scale}
        if backend == "torch":
            options["block_size"] = self.block_size
        if key.shape[:-2] != query.shape[:-2] and not BACKENDS[backend].grouped:
            key, value = repeat_shared(query, key, value)
        return BACKENDS[backend].attention(query, key, value, mask, **options)

    def choose(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> str:
        """The name of the back end for these tensors."""
        if self.block_size is not None:
            return "torch"
        if self.backend != "auto":
            return self.backend
        inputs = (query, key, value, mask, self.causal, self.window)
        for backend in FASTEST:  # of which the last, "torch", suits everything
            if backend in BACKENDS and BACKENDS[backend].suits(*inputs):
                break
        return backend
