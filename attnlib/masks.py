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
    i, j = (torch.arange(n, device=device) for n in (queries, keys))
    return j <= i[:, None] + (keys - queries)


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


def both_masks(mask: Mask | None, allowed: Bool[Tensor, "queries keys"]) -> Mask:
    """A mask, or none, that forbids as well what a boolean one forbids.

    Source: chapter 1, eq-mask-boolean.
    """
    if mask is None:
        return allowed
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, -torch.inf)


def one_mask(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    mask: Mask | None,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Float[Tensor, "..."] | None, Bool[Tensor, "..."] | None]:
    """One mask of numbers to add to the scores, and which queries may attend to nothing.

    Args:
        query: shape (..., N, d_k).
        key: shape (..., M, d_k).
        mask: broadcasts to (..., N, M); boolean, True = may attend, or floating.
        causal, window: what is forbidden as well, see `causal_mask` and `window_mask`.

    Returns:
        The mask, or `None` if it allows every pair: -inf forbids one, but in rows that
        forbid all, which are 0. And where these rows are, (..., N or 1, 1), or `None` if
        there are none.

    Source: chapter 1, eq-mask-additive, eq-causal-allowed; chapter 18 for windows.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    added = mask
    if causal and queries > 1:  # a single one is the last, which sees every key
        added = both_masks(added, causal_mask(queries, keys, query.device))
    if window is not None and window < max(queries, keys):  # else it hides nothing
        added = both_masks(added, window_mask(queries, keys, window, query.device))
    if added is not None and added.dtype == torch.bool:
        added = 1 - added.to(query.dtype).reciprocal()  # 1 - 1/0 is -inf; faster than where
    if added is None or keys == 0 or (mask is None and queries <= keys):
        return added, None  # without a mask of its own, each query sees itself
    empty = added.amax(dim=-1, keepdim=True) == -torch.inf
    return added.masked_fill(empty, 0.0), empty


def padding_mask(
    lengths: Tensor | list[int] | tuple[int, ...],
    max_length: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys are words and not padding, for sequences padded at the end.

    Args:
        lengths: number of words of each sequence, (batch,).
        max_length: number of keys; `None` means the largest of the lengths, which a
            program on a GPU has to wait for.
        device: where to make the mask; `None` means where the lengths are.

    Returns:
        Boolean mask of shape (batch, 1, 1, max_length), True = may attend.

    Raises:
        TypeError: lengths that are not whole numbers.
        ValueError: not a list of lengths, or a length below 0 or above max_length. Lengths
            on a GPU, or while `torch.compile` traces, are not looked at if there is a
            max_length: they count as 0 and as max_length there.

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
    if max_length is None:
        max_length = int(lengths.max()) if lengths.numel() else 0
    at_hand = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    if at_hand and ((lengths > max_length) | (lengths < 0)).any():
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
            floating, added to the scores. That of one sequence without a batch,
            (num_heads, N, M), is for a batch of one: give the layer `tokens[None]`.
        key_padding_mask: (batch, M), likewise, or (M,) for tokens without a batch.
        num_heads: number of heads, needed for an attn_mask of three dimensions.

    Returns:
        A mask of 2 or 4 dimensions, boolean with True = may attend if both are boolean,
        otherwise floating; `None` if both are `None`.

    Raises:
        TypeError: a mask that is neither boolean nor floating.
        ValueError: a mask of another number of dimensions, one for each head that num_heads
            does not divide, or masks that do not fit together.

    Source: chapter 5.
    """
    given = {
        "attn_mask": (attn_mask, (2, 3)),
        "key_padding_mask": (key_padding_mask, (1, 2)),
    }
    for name, (mask, dims) in given.items():
        refuse_foreign_mask(name, mask, dims)
    masks = [attn_mask, key_padding_mask]
    if attn_mask is not None and attn_mask.dim() == 3:
        if num_heads < 1 or len(attn_mask) % num_heads:
            got = f"got shape {tuple(attn_mask.shape)}"
            raise ValueError(f"attn_mask: expected a multiple of {num_heads} heads, {got}")
        masks[0] = attn_mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:  # of one sequence (1, M), of a batch (batch, 1, 1, M)
        batched = key_padding_mask.dim() == 2
        masks[1] = key_padding_mask[:, None, None] if batched else key_padding_mask[None]
    masks = [mask for mask in masks if mask is not None]
    if len(masks) == 2:
        refuse_unlike_masks(*masks)
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


def refuse_foreign_mask(name: str, mask: Tensor | None, dims: tuple[int, int]) -> None:
    """Refuses a mask that `nn.MultiheadAttention` would not take either.

    Args:
        name: the argument's name, for the message.
        mask: expected boolean or floating, or `None`.
        dims: the numbers of dimensions that it may have.

    Raises:
        TypeError, ValueError: it is something else.

    Source: chapter 5.
    """
    if mask is None:
        return
    known = isinstance(mask, Tensor) and (
        mask.dtype == torch.bool or mask.is_floating_point()
    )
    if not known:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"{name}: expected a boolean tensor (True = blocked) or a floating-point one "
            f"that is added to the scores, got {got}"
        )
    if mask.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        got = f"got shape {tuple(mask.shape)}"
        raise ValueError(f"{name}: expected {wanted} dimensions, {got}")


def refuse_unlike_masks(attn_mask: Tensor, padding: Tensor) -> None:
    """Refuses two masks, as `mask_from_torch` has made them, of different keys or batches.

    Raises:
        ValueError: another number of keys, another batch, or one with a mask for each head
            and one without a batch.

    Source: chapter 5.
    """
    if padding.shape[-1] != attn_mask.shape[-1]:
        raise ValueError(
            f"key_padding_mask: expected {attn_mask.shape[-1]} keys as attn_mask, "
            f"got {padding.shape[-1]}"
        )
    if attn_mask.dim() == 2:
        return
    batch = "no" if padding.dim() == 2 else len(padding)
    if batch != len(attn_mask):
        raise ValueError(
            f"key_padding_mask: expected a batch of {len(attn_mask)} as attn_mask has for "
            f"each head, got {batch}"
        )
