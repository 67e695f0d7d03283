# Made from book/01_scaled_dot_product.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Masks: which query may attend to which key.

Derived in chapter 1, "Scaled dot-product attention" (book/01_scaled_dot_product.ipynb), and
in chapter 5, "Multi-head attention" (book/05_multi_head.ipynb).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# True = may attend, or numbers that are added to the scores; broadcasts to the scores.
Mask = Bool[Tensor, "..."] | Float[Tensor, "..."]


def causal_mask(
    queries: int, keys: int | None = None, device: torch.device | str | None = None
) -> Bool[Tensor, "queries keys"]:
    """Which keys each query may see: True on and below the bottom-right diagonal.

    Args:
        queries: number of queries N.
        keys: number of keys M; `None` means as many as queries.
        device: where to make the mask.

    Returns:
        Boolean mask of shape (N, M), True = may attend. The last query sees every key.

    Source: chapter 1, eq-causal-allowed.
    """
    keys = queries if keys is None else keys
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return everything.tril(diagonal=keys - queries)


def window_mask(
    queries: int, keys: int, window: int, device: torch.device | str | None = None
) -> Bool[Tensor, "queries keys"]:
    """Which keys are near each query: True where they are less than `window` tokens apart.

    Args:
        queries: number of queries N, which are the last of the tokens, as in `causal_mask`.
        keys: number of keys M.
        window: a query sees itself and window - 1 tokens on each side; with `causal_mask`
            beside it, the last `window` tokens, itself among them.
        device: where to make the mask.

    Returns:
        Boolean mask of shape (N, M), True = may attend.

    Source: chapter 1, eq-causal-allowed; chapter 18 for windows.
    """
    i = torch.arange(queries, device=device)[:, None] + (keys - queries)
    j = torch.arange(keys, device=device)
    return (i - j).abs() < window


def windowed(
    mask: Mask | None,
    queries: int,
    keys: int,
    window: int | None,
    device: torch.device | str | None = None,
) -> Mask | None:
    """A mask, or none, that forbids as well what lies outside of a window, if there is one.

    Source: chapter 1, eq-causal-allowed; chapter 18 for windows.
    """
    if window is None:
        return mask
    return both_masks(mask, window_mask(queries, keys, window, device))


def both_masks(mask: Mask | None, allowed: Bool[Tensor, "queries keys"]) -> Mask:
    """A mask, or none, that forbids as well what a boolean one forbids.

    Source: chapter 1, eq-mask-boolean.
    """
    if mask is None:
        return allowed
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, -torch.inf)


def apply_mask(
    scores: Float[Tensor, "*batch queries keys"],
    mask: Mask,
) -> Float[Tensor, "*batch queries keys"]:
    """Scores with a mask applied; the scores that came in are not changed.

    Args:
        scores: shape (..., N, M).
        mask: broadcasts to the scores; boolean (True = may attend) or added to them.

    Returns:
        Masked scores of the same shape; a forbidden pair is -inf.

    Source: chapter 1, eq-mask-boolean, eq-mask-additive.
    """
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask


def padding_mask(
    lengths: Tensor | list[int] | tuple[int, ...],
    max_length: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys are words and not padding, for sequences padded at the end.

    Args:
        lengths: number of words of each sequence, (batch,).
        max_length: number of keys; `None` means the largest of the lengths.
        device: where to make the mask; `None` means where the lengths are.

    Returns:
        Boolean mask of shape (batch, 1, 1, max_length), True = may attend.

    Raises:
        TypeError: lengths that are not whole numbers.
        ValueError: not a list of lengths, or a length below 0 or above max_length.

    Source: chapter 5; the contract, appendix A.
    """
    lengths = torch.as_tensor(lengths)
    whole = not (lengths.is_floating_point() or lengths.dtype == torch.bool)
    if not whole and lengths.numel():  # an empty list is floating point to PyTorch
        raise TypeError(f"lengths: expected whole numbers, got {lengths.tolist()}")
    if lengths.dim() != 1:
        raise ValueError(
            f"lengths: expected one number for each sequence, got {lengths.tolist()}"
        )
    longest = int(lengths.max()) if lengths.numel() else 0
    max_length = longest if max_length is None else max_length
    if longest > max_length or (lengths < 0).any():
        raise ValueError(
            f"lengths: expected numbers between 0 and max_length = {max_length}, "
            f"got {lengths.tolist()}"
        )
    positions = torch.arange(max_length, device=device or lengths.device)
    return (positions < lengths.to(positions.device)[:, None])[:, None, None, :]


def mask_from_torch(
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    num_heads: int = 1,
) -> Tensor | None:
    """The mask of `MultiHeadAttention` for the two masks of `nn.MultiheadAttention`.

    Args:
        attn_mask: (N, M) or (batch · num_heads, N, M); boolean, True = blocked, or
            floating, added to the scores.
        key_padding_mask: (batch, M), likewise.
        num_heads: number of heads, needed for an attn_mask of three dimensions.

    Returns:
        A mask of 2 or 4 dimensions, boolean with True = may attend if both are boolean,
        otherwise floating; `None` if both are `None`.

    Source: chapter 5.
    """
    masks = []
    if attn_mask is not None:
        per_head = attn_mask.dim() == 3
        masks.append(attn_mask.unflatten(0, (-1, num_heads)) if per_head else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    if all(mask.dtype == torch.bool for mask in masks):
        allowed = [~mask for mask in masks]
        return allowed[0] & allowed[-1] if allowed else None
    dtype = next(mask.dtype for mask in masks if mask.dtype != torch.bool)
    additive = [
        torch.zeros_like(m, dtype=dtype).masked_fill(m, -torch.inf)
        if m.dtype == torch.bool
        else m
        for m in masks
    ]
    return additive[0] + additive[1] if len(additive) == 2 else additive[0]
