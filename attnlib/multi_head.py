# Made from book/05_multi_head.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Multi-head attention: several attentions side by side, each in its own subspace.

Derived in chapter 5, "Multi-head attention" (book/05_multi_head.ipynb), and in chapter 16,
"Rotary positions" (book/16_rotary_positions.ipynb), and in chapter 17, "A cache"
(book/17_cache.ipynb).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnlib.base import BaseAttention
from attnlib.checks import (
    CacheLike,
    explained,
    refuse_ambiguous_mask,
    refuse_bad_positions,
    refuse_hidden_padding,
    refuse_other_module,
    require_count,
    require_kv_heads,
    require_rotary,
    require_sizes,
    require_window_kept,
)
from attnlib.masks import Mask
from attnlib.projection import Projection
from attnlib.scaled_dot_product import ScaledDotProductAttention


def split_heads(
    x: Float[Tensor, "*batch tokens embed_dim"], num_heads: int
) -> Float[Tensor, "*batch heads tokens d_k"]:
    """Tokens (..., n, embed_dim) as heads (..., num_heads, n, embed_dim / num_heads).

    Source: chapter 5, eq-head-blocks.
    """
    x = x.unflatten(-1, (num_heads, -1))  # (..., tokens, heads, d_k)
    return x.transpose(-3, -2)  # (..., heads, tokens, d_k)


def merge_heads(
    x: Float[Tensor, "*batch heads tokens d_k"],
) -> Float[Tensor, "*batch tokens embed_dim"]:
    """The inverse of `split_heads`: the heads side by side, which is Concat.

    Source: chapter 5, eq-multi-head.
    """
    return x.transpose(-3, -2).flatten(-2)


# What makes the heads: a class, one attention for all, or one for each.
AttentionLike = type[BaseAttention] | BaseAttention | Sequence[BaseAttention]
# What turns heads (..., tokens, d_k) by the positions of their tokens, see chapter 16.
Rotary = Callable[..., Tensor]


class MultiHeadAttention(nn.Module):
    """Concat(head_1, …, head_h) W^O, head_i = Attention(X_Q W_i^Q, X_K W_i^K, X_V W_i^V).

    Args:
        embed_dim: features of a token, d_model; divisible by num_heads, or d_k is given.
        num_heads: number of heads h; each has embed_dim / num_heads features.
        attention: what a head is, see `make_heads`; `None` means the scaled dot product.
        bias: whether the four projections have a bias.
        rotary: what turns queries and keys by their positions, such as `RotaryPositions`
            of chapter 16, called as rotary(x, positions); `None` means that nothing does.
        num_kv_heads: number of heads of keys and values, a divisor of num_heads; as many
            heads of queries share each, see chapter 18. `None` means num_heads.
        d_k: features of a head; `None` means embed_dim / num_heads.

    Attributes:
        q_proj, out_proj: `Projection` layers, embed_dim to num_heads · d_k and back.
        k_proj, v_proj: as q_proj, but with fewer columns if heads share keys and values.
        attention: one `BaseAttention`, or a `HeadList` with one for each head.
        rotary: as given.

    Raises:
        TypeError: a size is no whole number, attention is not what `make_heads` takes, or
            rotary can't be called.
        ValueError: see `head_sizes`, or a wrong number of heads.

    Source: chapter 5, eq-multi-head, eq-head-i; Vaswani et al. (2017), section 3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: AttentionLike | None = None,
        bias: bool = True,
        rotary: Rotary | None = None,
        num_kv_heads: int | None = None,
        *,
        d_k: int | None = None,
    ) -> None:
        super().__init__()
        d_k, num_kv_heads = head_sizes(embed_dim, num_heads, num_kv_heads, d_k)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_kv_heads
        self.q_proj = Projection(embed_dim, num_heads * d_k, bias)
        self.k_proj = Projection(embed_dim, num_kv_heads * d_k, bias)
        self.v_proj = Projection(embed_dim, num_kv_heads * d_k, bias)
        self.out_proj = Projection(num_heads * d_k, embed_dim, bias)
        self.attention = make_heads(attention, num_heads)
        self.rotary = require_rotary(rotary)

    @explained
    def forward(
        self,
        query: Float[Tensor, "*batch queries embed_dim"],
        key: Float[Tensor, "*batch keys embed_dim"] | None = None,
        value: Float[Tensor, "*batch keys embed_dim"] | None = None,
        mask: Mask | None = None,
        need_weights: bool = True,
        **parts: Any,
    ) -> tuple[Float[Tensor, "*batch queries embed_dim"], list[Tensor | None] | None]:
        """Attends from N queries to M keys, with every head.

        Args:
            query: tokens (..., N, embed_dim), usually (batch, N, embed_dim).
            key: tokens (..., M, embed_dim); `None` means the query: self-attention.
            value: tokens (..., M, embed_dim); `None` means the key.
            mask: (N, M), or 4-D broadcasting to (batch, heads, N, M), which needs tokens
                with a batch; boolean, True = may attend, or floating, added to the scores.
            need_weights: whether to return the weights; without, heads such as the scaled
                dot product do not form them, and are faster.
            parts: `cache` and `positions` of later chapters, see `place_heads`.

        Returns:
            Output (..., N, embed_dim), and a list with the weights (..., N, M) of each
            head; `None` for a head that never forms them, and in place of the list if
            none does or nobody needs them.

        Raises:
            TypeError: a tensor of the wrong or a mixed dtype.
            ValueError: wrong shapes, a mask of neither 2 nor 4 dimensions; see also
                `place_heads`.
        """
        key = query if key is None else key
        value = key if value is None else value
        if mask is not None:
            refuse_ambiguous_mask(mask, query)
        q = split_heads(self.q_proj(query), self.num_heads)  # (..., h, N, d_k)
        k = split_heads(self.k_proj(key), self.num_kv_heads)  # (..., h, M, d_k)
        v = split_heads(self.v_proj(value), self.num_kv_heads)
        if parts or self.rotary is not None:  # positions and a cache, chapters 16 and 17
            q, k, v, mask = place_heads(self, q, k, v, mask, key is query, **parts)
        heads, weights = self.attention(
            q, k, v, mask, need_weights=need_weights, enable_gqa=True
        )
        weights = list(weights.unbind(dim=-3)) if isinstance(weights, Tensor) else weights
        return self.out_proj(merge_heads(heads)), weights

    def extra_repr(self) -> str:
        """What `print` shows besides the projections and the heads."""
        shared = self.num_kv_heads != self.num_heads
        kv_heads = f", num_kv_heads={self.num_kv_heads}" if shared else ""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{kv_heads}"

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """A copy of PyTorch's layer, frozen where it is; see `mask_from_torch` for masks.

        Raises:
            TypeError: no `nn.MultiheadAttention`, or one with a forward of its own.
            ValueError: the layer is not batch first, has keys or values of another size,
                adds keys, or makes a weight anew at each call.
        """
        refuse_other_module("module", module, nn.MultiheadAttention)
        if not module.batch_first:
            raise ValueError(
                "module: expected batch_first=True, since the copy reads (batch, tokens, "
                "features); if what you pass has that order, set module.batch_first = True"
            )
        same_size = module.in_proj_weight is not None
        if not same_size or module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                "module: expected kdim and vdim of embed_dim, add_bias_kv=False and "
                f"add_zero_attn=False, got {module}"
            )
        bias = module.in_proj_bias is not None
        heads = ScaledDotProductAttention(module.dropout)
        made = cls(module.embed_dim, module.num_heads, heads, bias)
        made.to(module.in_proj_weight.device, module.in_proj_weight.dtype)
        with torch.no_grad():
            projections = (made.q_proj, made.k_proj, made.v_proj)
            for index, projection in enumerate(projections):
                projection.W.copy_(module.in_proj_weight.chunk(3)[index].T)
                projection.W.requires_grad_(module.in_proj_weight.requires_grad)
                if bias:
                    projection.b.copy_(module.in_proj_bias.chunk(3)[index])
                    projection.b.requires_grad_(module.in_proj_bias.requires_grad)
        made.out_proj = Projection.from_linear(module.out_proj)
        return made.train(module.training)


def make_heads(
    attention: AttentionLike | None, num_heads: int
) -> "BaseAttention | HeadList":
    """One attention for all heads, or a list with one for each.

    Args:
        attention: a subclass of `BaseAttention`, an instance, a list of num_heads
            instances, or `None` for the scaled dot product. A subclass is made with
            `num_heads` if it asks for it, and without other arguments.
        num_heads: number of heads.

    Raises:
        TypeError: something else, or a subclass that needs arguments.
        ValueError: a list of another length.

    Source: chapter 5.
    """
    wanted = "attention: expected a BaseAttention subclass, an instance, or a list of them"
    if attention is None:
        return ScaledDotProductAttention()
    if isinstance(attention, BaseAttention):
        return attention
    if isinstance(attention, type) and issubclass(attention, BaseAttention):
        asks = "num_heads" in inspect.signature(attention).parameters
        try:
            return attention(num_heads=num_heads) if asks else attention()
        except TypeError as error:
            raise TypeError(
                "attention: expected an instance, or a class that needs no argument but "
                f"num_heads; {attention.__name__} gives: {error}"
            ) from error
    if not isinstance(attention, list | tuple | nn.ModuleList):
        raise TypeError(f"{wanted}, got {attention!r}")
    if len(attention) != num_heads:
        count = len(attention)
        raise ValueError(
            f"attention: expected {num_heads} instances, one a head, got {count}"
        )
    for head in attention:
        if not isinstance(head, BaseAttention):
            raise TypeError(f"{wanted}, got a list with {head!r}")
    return HeadList(attention)


class HeadList(nn.ModuleList):
    """One attention for each head, called as one for all is.

    Source: chapter 5.
    """

    def forward(
        self,
        query: Float[Tensor, "*batch heads queries d_k"],
        key: Float[Tensor, "*batch kv_heads keys d_k"],
        value: Float[Tensor, "*batch kv_heads keys d_v"],
        mask: Mask | None = None,
        need_weights: bool = True,
        enable_gqa: bool = False,
    ) -> tuple[Float[Tensor, "*batch heads queries d_v"], list[Tensor | None] | None]:
        """The outputs in one tensor, the weights in a list; see `BaseAttention.forward`."""
        outputs, per_head = [], []
        times = len(self) // key.shape[-3]  # 1, or more if heads share keys
        for h, attention in enumerate(self):
            q = query[..., h : h + 1, :, :]
            k, v = (x[..., h // times : h // times + 1, :, :] for x in (key, value))
            own = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1
            part = mask[:, h : h + 1] if own else mask
            output, weights = attention(q, k, v, part, need_weights=need_weights)
            outputs.append(output)
            per_head.append(None if weights is None else weights.squeeze(-3))
        formed = any(weights is not None for weights in per_head)
        return torch.cat(outputs, dim=-3), per_head if formed else None


def head_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int | None, d_k: int | None
) -> tuple[int, int]:
    """Features of a head, and number of heads of keys and values, if they are possible.

    Raises:
        TypeError: one of these is no whole number.
        ValueError: one is below 1, embed_dim is not divisible by num_heads without a d_k,
            or num_heads not by num_kv_heads.

    Source: chapter 5, eq-head-blocks; chapter 18 for num_kv_heads, 21 for d_k.
    """
    whole = {"embed_dim": embed_dim, "num_heads": num_heads}
    whole |= {} if d_k is None else {"d_k": d_k}
    for name, size in whole.items():
        require_count(name, size, least=0)
    if num_heads < 1 or (d_k is None and embed_dim % num_heads):
        raise ValueError(
            f"embed_dim: expected a multiple of num_heads = {num_heads}, got {embed_dim}"
        )
    require_sizes(**whole)
    d_k = embed_dim // num_heads if d_k is None else d_k
    return d_k, require_kv_heads(num_kv_heads, num_heads)


# What PyTorch's layer is called with, and what says the same here.
WORDS_OF_TORCH = {
    "attn_mask": "; a mask of PyTorch's is mask=mask_from_torch(attn_mask)",
    "key_padding_mask": "; that is mask=mask_from_torch(key_padding_mask=...)",
    "is_causal": "; heads with causal=True are: attention=FlashAttention(causal=True)",
    "average_attn_weights": "; the weights are a list: torch.stack(weights).mean(dim=0)",
}


def text_of_ranks(attention: nn.Module, tokens: int) -> tuple[Tensor, int] | None:
    """Where this process's tokens stand in a text that several share, and its length.

    `None` where the heads see what this process has, as nearly always.

    Source: chapter 24, eq-zigzag.
    """
    heads = attention[0] if isinstance(attention, nn.ModuleList) else attention
    ask = getattr(heads, "text_of_ranks", None)
    return None if ask is None else ask(tokens)


def refuse_other_parts(others: dict[str, Any]) -> None:
    """Refuses what is no part of a call, and says what PyTorch's words are here.

    Raises:
        TypeError: there is one.

    Source: chapter 17.
    """
    for name in others:
        advice = WORDS_OF_TORCH.get(name, "")
        raise TypeError(f"{name}: expected mask, need_weights, cache or positions{advice}")


def turn_heads(
    rotary: Rotary,
    q: Float[Tensor, "*batch heads queries d_k"],
    k: Float[Tensor, "*batch kv_heads keys d_k"],
    positions: Int[Tensor, "..."] | int | None,
    own_keys: bool,
) -> tuple[
    Float[Tensor, "*batch heads queries d_k"], Float[Tensor, "*batch kv_heads keys d_k"]
]:
    """Queries and keys, turned by their positions; see `place_heads`.

    Source: chapter 16, eq-rotary-score.
    """
    if positions is None:
        return rotary(q, k.shape[-2] - q.shape[-2]), rotary(k, 0)
    if isinstance(positions, Tensor) and positions.dim() > 1:
        positions = positions.unsqueeze(-2)  # the same for all heads
    if own_keys and q.shape[-2] == 1:  # one call, as most of a step's time goes to calls
        both = rotary(torch.cat([q, k], dim=-3), positions)
        return both[..., : q.shape[-3], :, :], both[..., q.shape[-3] :, :, :]
    return rotary(q, positions), rotary(k, positions if own_keys else 0)


def places_of(
    layer: "MultiHeadAttention",
    q: Float[Tensor, "*batch heads queries d_k"],
    positions: Int[Tensor, "..."] | int | None,
    own_keys: bool,
    cache: CacheLike | None,
) -> Int[Tensor, "..."] | int | None:
    """The positions as given, or as a cache or heads of several ranks tell them.

    Raises:
        TypeError, ValueError: see `place_heads`.

    Source: chapter 17, eq-cached-attention; chapter 24, eq-zigzag.
    """
    tokens = q.select(-3, 0)  # (..., queries, d_k): all heads have the same places
    refuse_bad_positions(positions, tokens, rotary=layer.rotary is not None)
    text = text_of_ranks(layer.attention, q.shape[-2])
    if not own_keys and (cache is not None or text is not None):
        why = "a cache" if text is None else "a text that several ranks share"
        raise ValueError(f"key: expected None beside rotary and {why}")
    if text is not None and cache is not None:
        raise ValueError("cache: expected None beside rotary where ranks share the text")
    if positions is None and text is not None:
        return text[0].to(q.device)
    return len(cache) if positions is None and cache is not None else positions


def place_heads(
    layer: "MultiHeadAttention",
    q: Float[Tensor, "*batch heads queries d_k"],
    k: Float[Tensor, "*batch kv_heads new d_k"],
    v: Float[Tensor, "*batch kv_heads new d_v"],
    mask: Mask | None,
    own_keys: bool,
    *,
    cache: CacheLike | None = None,
    positions: Int[Tensor, "..."] | int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
    """Queries and keys at their positions; keys, values and mask of all that a cache holds.

    Args:
        layer: whose heads these are.
        q, k, v: as projected and split.
        mask: see `MultiHeadAttention.forward`.
        own_keys: whether the keys are made of the tokens of the queries.
        cache: a `KVCache` that holds the keys and values of the tokens before these,
            and gets theirs; M then counts all that it holds. The heads must be causal,
            or the mask must be. A `WindowCache` is for heads with a window.
        positions: for rotary only: where the queries stand, integers (N,) or
            (..., N), or the first of N in a row. In self-attention the keys stand
            there, too, otherwise at 0 to M - 1. `None` means the last N of M places,
            or what heads say that share a text with other processes.
        others: no part of a call; refused by name.

    Raises:
        TypeError: positions that are no integers; another part.
        ValueError: a cache that is full, holds other sequences or forgets what a head sees,
            positions without rotary, or rotary with a cache and keys of their own; or with
            either of them, where several processes share the text.

    Source: chapter 17, eq-cached-attention; chapter 16, eq-rotary-score.
    """
    refuse_other_parts(others)
    if layer.rotary is not None or positions is not None:
        positions = places_of(layer, q, positions, own_keys, cache)
        q, k = turn_heads(layer.rotary, q, k, positions, own_keys)
    if cache is not None:
        require_window_kept(layer.attention, cache)
        refuse_hidden_padding(cache, "mask", mask)
        k, v = cache.append(k, v)
        if mask is not None and k.shape[-2] < len(cache) == mask.shape[-1]:
            mask = mask[..., len(cache) - k.shape[-2] :]  # the others are forgotten
    return q, k, v, mask
