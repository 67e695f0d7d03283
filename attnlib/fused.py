# Made from book/B_beside_pytorch.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""PyTorch's own attention under the contract, for whoever needs no weights.

Derived in appendix B, "Beside PyTorch" (book/B_beside_pytorch.ipynb).
"""

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from attnlib.checks import (
    as_autocast,
    positive_scale,
    refuse_bad_inputs,
    require_scale,
    require_window,
)
from attnlib.masks import Mask, both_masks, causal_mask, window_mask


def four_dimensional(tensor: Tensor) -> Tensor:
    """The tensor as (batch, heads, tokens, dim), a view wherever strides allow it.

    Source: appendix B; chapter 15, eq-strides.
    """
    shape = tensor.shape
    batch, heads = math.prod(shape[:-3]), math.prod(shape[-3:-2])
    return tensor.reshape(batch, heads, *shape[-2:])


def fused_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Mask | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | Tensor | None = None,
) -> Float[Tensor, "*batch queries d_v"]:
    """softmax(QKᵀ/√d_k) V by `F.scaled_dot_product_attention`, which stores no weights.

    PyTorch aligns a causal mask top left, refuses it beside another mask, and leaves it to
    the device what a query gets that may attend to nothing. Here the contract holds.

    Args:
        query: shape (..., N, d_k).
        key: shape (..., M, d_k).
        value: shape (..., M, d_v).
        mask: broadcasts to (..., N, M); boolean, True = may attend, or floating, added to
            the scores.
        causal: query i sees the keys up to i + M - N only; composes with any mask. An N × M
            mask is formed only beside another one, or where 1 < N < M.
        window: query i sees the keys less than window tokens from i + M - N only, for which
            several queries need an N × M mask; composes with causal and any mask.
        scale: factor on the scores; `None` means 1/√d_k.

    Returns:
        Output (..., N, d_v); 0, with gradients 0, where a query may attend to nothing.

    Raises:
        TypeError: a tensor of the wrong or a mixed dtype, or window is no integer.
        ValueError: a wrong rank, mismatched shapes or devices, or window is below 1.

    Source: appendix B; eq-attention of chapter 1.
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    refuse_bad_inputs(query, key, value, mask)
    options = {"window": require_window(window), "scale": require_scale(scale)}
    return attend_fused(query, key, value, mask, causal=causal, **options)


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | Tensor | None,
) -> Tensor:
    """`fused_attention` of what has been looked at already, where heads may share keys.

    PyTorch's function spares the weights only with tensors, and masks, of four dimensions.

    Source: appendix B.
    """
    if scale is not None:
        query, scale = positive_scale(query, scale)
    leading = query.shape[:-2]
    if mask is not None and mask.dim() > 2:
        whole = mask.expand(*leading, *mask.shape[-2:]) if len(leading) > 2 else mask
        mask = four_dimensional(whole)
    if len(leading) != 2:
        four = (four_dimensional(x) for x in (query, key, value))
        output = attend_fused(*four, mask, causal=causal, window=window, scale=scale)
        return output.reshape(*leading, *output.shape[-2:])
    if window is not None:
        key, value, mask = within_window(query, key, value, mask, window)
    queries, keys = query.shape[-2], key.shape[-2]
    attend = F.scaled_dot_product_attention
    if query.shape[1] != key.shape[1]:  # heads of query share those of key
        if mask is None and queries == 1:  # each sees every key: rows of one head, faster
            rows = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
            return attend(rows, key, value, scale=scale).flatten(1, 2).unsqueeze(2)
        attend = partial(attend, enable_gqa=True)
    if mask is None and (not causal or queries == 1):  # the last query sees every key
        return attend(query, key, value, scale=scale)
    if mask is None and queries == keys:
        return attend(query, key, value, is_causal=True, scale=scale)
    if mask is None and queries > keys:  # the first ones see nothing, the rest a square
        seeing = query[..., queries - keys :, :]
        output = attend(seeing, key, value, is_causal=True, scale=scale)
        return F.pad(output, (0, 0, queries - keys, 0))
    if causal:
        mask = both_masks(mask, causal_mask(queries, keys, query.device))
    if mask.dim() < 2:  # which PyTorch's function does not repeat
        mask = mask.expand(1, keys)
    forbidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    empty = forbidden.all(dim=-1, keepdim=True)
    mask = mask.masked_fill(empty, mask.dtype == torch.bool)  # nobody is to divide by 0
    return attend(query, key, value, attn_mask=mask, scale=scale).masked_fill(empty, 0.0)


def within_window(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values without those before all windows, and a mask that hides the others.

    One query needs no mask, only the last keys: decoding with a window reads these alone.

    Source: appendix B; chapter 18.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    first = max(0, keys - queries - window + 1)
    key, value = key[..., first:, :], value[..., first:, :]
    if mask is not None and mask.dim() > 0 and mask.shape[-1] > 1:
        mask = mask[..., first:]
    if window < max(queries, keys - first):  # else it hides nothing
        mask = both_masks(mask, window_mask(queries, keys - first, window, query.device))
    return key, value, mask
