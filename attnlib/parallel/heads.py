# Made from book/25_heads_layers_copies.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Attention split by heads: ranks that hold tokens trade them for heads, and back.

It is called on each rank of a group of `torch.distributed`, by all of them.

Derived in chapter 25, "Heads, layers, copies" (book/25_heads_layers_copies.ipynb).
"""

import torch
import torch.distributed as dist
from jaxtyping import Float, Num
from torch import Tensor

from attnlib.base import BaseAttention, repeat_heads
from attnlib.checks import as_autocast, require_flag, require_scale, require_window
from attnlib.flash.attention import FlashAttention, flash_attention
from attnlib.masks import Mask
from attnlib.online_softmax import add_sink
from attnlib.parallel.collectives import (
    agree_after,
    all_gather,
    all_to_all,
    rank_and_size,
)
from attnlib.parallel.ring import WithGroup, refuse_bad_shard

Group = dist.ProcessGroup | None


def refuse_uneven(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    sink: Tensor | None,
    group: Group = None,
) -> list[object]:
    """Refuses heads that can't be dealt out evenly; returns what all ranks must share.

    Source: chapter 25, eq-heads-for-tokens.
    """
    ranks = rank_and_size(group)[1]
    refuse_bad_shard(query, key, value, mask, sink, group)
    if ranks > 1 and query.dim() < 3:
        shape = tuple(query.shape)
        raise ValueError(f"query: expected (..., heads, tokens, d), got shape {shape}")
    heads, kv_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key))
    if heads % ranks or ranks > 1 > heads:
        raise ValueError(
            f"query: expected a number of heads that {ranks} ranks divide, got {heads}"
        )
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"key: expected a multiple or a divisor of {ranks} ranks as the number of "
            f"heads, got {kv_heads}"
        )
    learns = torch.is_grad_enabled()
    return [
        f"{x.dtype} {tuple(x.shape)}{' with gradient' * (learns and x.requires_grad)}"
        if isinstance(x, Tensor)
        else f"{x}"
        for x in (query, key, value, mask, sink)
    ]


def heads_for_tokens(
    x: Num[Tensor, "*batch heads shard d"], group: Group = None
) -> Num[Tensor, "*batch own_heads tokens d"]:
    """All heads of a P-th of the tokens, in exchange for a P-th of the heads of all.

    Source: chapter 25, eq-heads-for-tokens.
    """
    return all_to_all(x, split_dim=-3, concat_dim=-2, group=group)


def tokens_for_heads(
    x: Num[Tensor, "*batch own_heads tokens d"], group: Group = None
) -> Num[Tensor, "*batch heads shard d"]:
    """The inverse of `heads_for_tokens`, and its gradient.

    Source: chapter 25, eq-heads-for-tokens.
    """
    return all_to_all(x, split_dim=-2, concat_dim=-3, group=group)


def mask_for_heads(mask: Mask, query: Tensor, group: Group = None) -> Mask:
    """The mask of a rank's heads and all queries, for that of its queries and all heads.

    Args:
        mask: broadcasts to (..., h, N, n): this rank's queries against the whole text.
        query: this rank's, (..., h, N, d_k).
        group: the P ranks; `None` means all.

    Returns:
        Broadcasts to (..., h / P, P · N, n).

    Source: chapter 25, eq-heads-for-tokens.
    """
    (heads, tokens), boolean = query.shape[-3:-1], mask.dtype == torch.bool
    mask = mask[(None,) * (2 - mask.dim())]
    rows = mask.shape[-2]
    mask = mask.view(torch.uint8) if boolean else mask  # as it travels
    if mask.dim() > 2 and mask.shape[-3] == heads:
        mask = heads_for_tokens(mask, group)
    else:
        mask = all_gather(mask, -2, group)
    if rows < tokens:  # one row for all queries of a rank, such as where keys are padding
        if not mask.requires_grad and torch.equal(mask, mask[..., :1, :].expand_as(mask)):
            mask = mask[..., :1, :]
        else:
            mask = mask.repeat_interleave(tokens, -2)
    return mask.view(torch.bool) if boolean else mask


def head_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*shared keys d_k"],
    value: Float[Tensor, "*shared keys d_v"],
    *,
    causal: bool = False,
    window: int | None = None,
    sink: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    group: Group = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's tokens to those of all ranks, each rank doing some heads.

    Output and gradients are those of `flash_attention` for the whole text, for the tokens
    of this rank, which are the r-th piece of it. Outside of a process group it is attention
    on one rank.

    Args:
        query: this rank's queries (..., h, N, d_k); P divides h. All shapes are the same on
            all ranks.
        key: its keys (..., h_kv, M, d_k); h_kv divides h, and P divides it or it P.
        value: its values (..., h_kv, M, d_v).
        causal, window, scale: as for `flash_attention`, by the places in the whole text.
        sink: a score without a key, see `add_sink`; its gradient is this rank's part.
        mask: this rank's queries against the whole text, broadcasts to (..., h, N, P · M).
            Composes with all the others; a rank then holds n² of its entries, or as many
            for each of its heads.
        group: the P ranks; `None` means all.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        Output (..., h, N, d_v) of this rank's tokens, and on request the log-sum-exp
        (..., h, N), in float32 at least.

    Raises:
        TypeError, ValueError: on every rank: tensors that do not fit, a number of heads
            that the ranks do not divide, or ranks that disagree.

    Source: chapter 25, eq-heads-for-tokens; Jacobs et al. (2023).
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    ranks = rank_and_size(group)[1]

    def check() -> list[object]:
        options = require_flag("causal", causal), require_window(window), scale, return_lse
        return [*refuse_uneven(query, key, value, mask, sink, group), *options]

    agree_after("head_attention", check, group)
    if ranks > 1:
        times = max(1, ranks // key.shape[-3])
        key, value = repeat_heads(key, times), repeat_heads(value, times)
        mask = mask if mask is None else mask_for_heads(mask, query, group)
        query, key, value = (heads_for_tokens(x, group) for x in (query, key, value))
    if key.shape[:-2] != query.shape[:-2]:
        times = query.shape[-3] // key.shape[-3]  # after the exchange: less sent
        key, value = repeat_heads(key, times), repeat_heads(value, times)
    if sink is None and not return_lse:
        attention = FlashAttention(causal, scale, window=window)
        output, _ = attention(query, key, value, mask)
        return tokens_for_heads(output, group) if ranks > 1 else output
    options = {"causal": causal, "window": window, "scale": scale}
    output, lse = flash_attention(query, key, value, mask, **options, return_lse=True)
    if ranks > 1:
        output = tokens_for_heads(output, group)
        lse = all_to_all(lse, split_dim=-1, concat_dim=-2, group=group)
    if sink is not None:
        output, lse = add_sink(output, lse, sink)
    return (output, lse) if return_lse else output


class HeadAttention(WithGroup, BaseAttention):
    """`head_attention` as an attention to plug in, for a text that the ranks share.

    Outside of a process group, and on one rank, it is attention as any other. In a
    `LanguageModel`, or a layer with rotary positions, it tells where its tokens stand.

    Args:
        causal, scale, window, group: as for `head_attention`.

    Raises:
        TypeError: causal is not a truth value, or a wrong window.
        ValueError: a window below 1.

    Source: chapter 25, eq-heads-for-tokens.
    """

    def __init__(
        self,
        causal: bool = False,
        scale: float | None = None,
        *,
        window: int | None = None,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.causal, self.scale = require_flag("causal", causal), require_scale(scale)
        self.window, self.group = require_window(window), group

    def forward(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None = None,
        need_weights: bool = True,
        enable_gqa: bool = True,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], None]:
        """Output (..., N, d_v) of this rank's queries, and `None`; see `head_attention`."""
        if not enable_gqa:
            self.refuse_shared(query, key, value)
        options = {"causal": self.causal, "window": self.window, "scale": self.scale}
        options |= {"mask": mask, "group": self.group}
        return head_attention(query, key, value, **options), None
