# Made from book/25_heads_layers_copies.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Attention split by heads: ranks that hold tokens trade them for heads, and back.

It is called on each rank of a group of `torch.distributed`, by all of them.

Derived in chapter 25, "Heads, layers, copies" (book/25_heads_layers_copies.ipynb).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from attnlib.base import BaseAttention
from attnlib.checks import require_flag, require_window
from attnlib.flash.attention import flash_attention
from attnlib.masks import Mask
from attnlib.multi_head import repeat_heads
from attnlib.parallel.collectives import agree, all_to_all, world

Group = dist.ProcessGroup | None


def agree_after(
    what: str, check: Callable[[], Sequence[object]], group: Group = None
) -> None:
    """Raises on every rank what is wrong on one, so that no rank waits for another.

    Args:
        what: the operation, for the message.
        check: looks at what this rank has; raises TypeError or ValueError, or returns what
            must be the same on each rank.
        group: the ranks; `None` means all.

    Raises:
        ValueError: `check` raised on some rank, or the ranks disagree.

    Source: chapter 25.
    """
    facts: Sequence[object] = ()
    problem = ""
    try:
        facts = check()
    except (TypeError, ValueError) as error:
        problem = str(error)
    agree(what, facts, group, problem)


def refuse_uneven(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> list[object]:
    """Refuses heads that can't be dealt out evenly; returns what all ranks must share.

    Source: chapter 25, eq-heads-for-tokens.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: expected a floating-point tensor, got {got}")
        if x.dim() < 3:
            shape = tuple(x.shape)
            raise ValueError(f"{name}: expected (..., heads, tokens, d), got shape {shape}")
        if x.dtype != query.dtype or x.device != query.device:
            raise TypeError(
                f"{name}: expected {query.dtype} on {query.device} as query, got "
                f"{x.dtype} on {x.device}"
            )
        if x.shape[:-3] != query.shape[:-3] or x.shape[-2] != query.shape[-2]:
            raise ValueError(
                f"{name}: expected the batch and the tokens of query, "
                f"{tuple(query.shape)}, got {tuple(x.shape)}"
            )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads % ranks:
        raise ValueError(
            f"query: expected a number of heads that {ranks} ranks divide, got {heads}"
        )
    if key.shape[-3] != value.shape[-3] or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"key: expected as many heads as value, a divisor of {heads}, got {kv_heads} "
            f"and {value.shape[-3]}"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"key: expected a multiple or a divisor of {ranks} ranks as the number of "
            f"heads, got {kv_heads}"
        )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key: expected {query.shape[-1]} features as query, got {key.shape[-1]}"
        )
    return [tuple(x.shape) for x in (query, key, value)] + [query.dtype]


def heads_for_tokens(
    x: Float[Tensor, "*batch heads shard d"], group: Group = None
) -> Float[Tensor, "*batch own_heads tokens d"]:
    """All heads of a P-th of the tokens, in exchange for a P-th of the heads of all.

    Source: chapter 25, eq-heads-for-tokens.
    """
    return all_to_all(x, split_dim=-3, concat_dim=-2, group=group)


def tokens_for_heads(
    x: Float[Tensor, "*batch own_heads tokens d"], group: Group = None
) -> Float[Tensor, "*batch heads shard d"]:
    """The inverse of `heads_for_tokens`, and its gradient.

    Source: chapter 25, eq-heads-for-tokens.
    """
    return all_to_all(x, split_dim=-2, concat_dim=-3, group=group)


def head_attention(
    query: Float[Tensor, "*batch heads shard d_k"],
    key: Float[Tensor, "*batch kv_heads shard d_k"],
    value: Float[Tensor, "*batch kv_heads shard d_v"],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    group: Group = None,
) -> Float[Tensor, "*batch heads shard d_v"]:
    """Attention of this rank's tokens to those of all ranks, each rank doing some heads.

    Args:
        query: shape (..., h, n / P, d_k): rank r has tokens r · n / P and following. P
            divides h.
        key: shape (..., h_kv, n / P, d_k); h_kv divides h, and P divides it or it P.
        value: shape (..., h_kv, n / P, d_v).
        causal, window, scale: as for `flash_attention`, by the places in the whole text.
        group: the P ranks; `None` means all.

    Returns:
        Output (..., h, n / P, d_v) of this rank's tokens.

    Raises:
        ValueError: on every rank: tensors that do not fit, a number of heads that the
            ranks do not divide, or ranks that disagree.
        RuntimeError: there is no group.

    Source: chapter 25, eq-heads-for-tokens; Jacobs et al. (2023).
    """

    _, _, ranks = world(group)

    def check() -> list[object]:
        options = require_flag("causal", causal), require_window(window), scale
        return [*refuse_uneven(query, key, value, ranks), *options]

    agree_after("head_attention", check, group)
    times = max(1, ranks // key.shape[-3])
    key, value = repeat_heads(key, times), repeat_heads(value, times)
    q, k, v = (heads_for_tokens(x, group) for x in (query, key, value))
    times = q.shape[-3] // k.shape[-3]
    k, v = repeat_heads(k, times), repeat_heads(v, times)  # after the exchange: less sent
    output = flash_attention(q, k, v, causal=causal, window=window, scale=scale)
    return tokens_for_heads(output, group)


class HeadAttention(BaseAttention):
    """`head_attention` as an attention to plug in, for tokens dealt out to the ranks.

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
        self.causal, self.scale = require_flag("causal", causal), scale
        self.window, self.group = require_window(window), group

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadAttention":
        """A copy for another block; the group is the same."""
        return type(self)(self.causal, self.scale, window=self.window, group=self.group)

    def forward(
        self,
        query: Float[Tensor, "*batch heads shard d_k"],
        key: Float[Tensor, "*batch kv_heads shard d_k"],
        value: Float[Tensor, "*batch kv_heads shard d_v"],
        mask: Mask | None = None,
    ) -> tuple[Float[Tensor, "*batch heads shard d_v"], None]:
        """Output (..., h, n / P, d_v) and `None`; a mask is refused."""
        if mask is not None:
            raise ValueError("mask: expected None, since a rank has a part of the tokens")
        options = {"causal": self.causal, "window": self.window, "scale": self.scale}
        return head_attention(query, key, value, group=self.group, **options), None

    def attend_groups(
        self,
        query: Float[Tensor, "*batch heads shard d_k"],
        key: Float[Tensor, "*batch kv_heads shard d_k"],
        value: Float[Tensor, "*batch kv_heads shard d_v"],
        mask: Mask | None = None,
    ) -> Float[Tensor, "*batch heads shard d_v"]:
        """Output (..., h, n / P, d_v), where heads share keys and values."""
        return self(query, key, value, mask)[0]


class TokensBefore:
    """In the place of a cache: says where this rank's tokens stand, and keeps nothing.

    `LanguageModel` counts positions from the length of its caches. A rank that has tokens
    from place `start` on gives it one of these for each block, and its attention gets the
    keys of the others from the ranks that have them.

    Args:
        start: how many tokens of the text stand on the ranks before.

    Source: chapter 25, eq-heads-for-tokens.
    """

    def __init__(self, start: int) -> None:
        self.start, self.capacity = start, 2**62

    def __len__(self) -> int:
        return self.start

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they came."""
        return key, value

    def truncate(self, length: int) -> None:
        """Nothing is kept, so there is nothing to forget."""
