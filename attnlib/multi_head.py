# Made from book/05_multi_head.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Multi-head attention: several attentions side by side, each in its own subspace.

Derived in chapter 5, "Multi-head attention" (book/05_multi_head.ipynb), and in chapter 18,
"Fewer keys" (book/18_fewer_keys.ipynb).
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnlib.base import BaseAttention, apply_attention
from attnlib.checks import (
    CacheLike,
    refuse_ambiguous_mask,
    refuse_bad_positions,
    refuse_bad_tokens,
    require_kv_heads,
    require_rotary,
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
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


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


def make_heads(
    attention: AttentionLike | None, num_heads: int
) -> BaseAttention | nn.ModuleList:
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
    return nn.ModuleList(attention)


def attend_each(
    attentions: nn.ModuleList,
    query: Float[Tensor, "*batch heads queries d_k"],
    key: Float[Tensor, "*batch kv_heads keys d_k"],
    value: Float[Tensor, "*batch kv_heads keys d_v"],
    mask: Tensor | None,
    need_weights: bool,
) -> tuple[Float[Tensor, "*batch heads queries d_v"], list[Tensor | None] | None]:
    """One attention for each head; the outputs in one tensor, the weights in a list.

    Source: chapter 5.
    """
    outputs, per_head = [], []
    times = query.shape[-3] // key.shape[-3]  # 1, or more if heads share keys
    for h, attention in enumerate(attentions):
        q = query[..., h : h + 1, :, :]
        k, v = (x[..., h // times : h // times + 1, :, :] for x in (key, value))
        own = mask is not None and mask.dim() == 4 and mask.shape[1] > 1
        part = mask[:, h : h + 1] if own else mask
        output, weights = apply_attention(attention, q, k, v, part, need_weights)
        outputs.append(output)
        per_head.append(None if weights is None else weights.squeeze(-3))
    formed = any(weights is not None for weights in per_head)
    return torch.cat(outputs, dim=-3), per_head if formed else None


def turn_heads(
    rotary: Rotary,
    q: Float[Tensor, "*batch heads queries d_k"],
    k: Float[Tensor, "*batch kv_heads keys d_k"],
    positions: Int[Tensor, "..."] | int | None,
    own_keys: bool,
    held: int | None,
) -> tuple[
    Float[Tensor, "*batch heads queries d_k"], Float[Tensor, "*batch kv_heads keys d_k"]
]:
    """Queries and keys, turned by their positions; see `MultiHeadAttention.forward`.

    Source: chapter 16, eq-rotary-score.
    """
    if held is not None:  # by a cache
        if not own_keys:
            raise ValueError("key: expected None beside rotary and a cache")
        positions = held if positions is None else positions
    if positions is None:
        return rotary(q, k.shape[-2] - q.shape[-2]), rotary(k, 0)
    if isinstance(positions, Tensor) and positions.dim() > 1:
        positions = positions.unsqueeze(-2)  # the same for all heads
    if own_keys and q.shape[-2] == 1:  # one call, as most of a step's time goes to calls
        both = rotary(torch.cat([q, k], dim=-3), positions)
        return both[..., : q.shape[-3], :, :], both[..., q.shape[-3] :, :, :]
    return rotary(q, positions), rotary(k, positions if own_keys else 0)


class MultiHeadAttention(nn.Module):
    """Concat(head_1, …, head_h) W^O, head_i = Attention(X_Q W_i^Q, X_K W_i^K, X_V W_i^V).

    Args:
        embed_dim: features of a token, d_model; divisible by num_heads.
        num_heads: number of heads h; each has embed_dim / num_heads features.
        attention: what a head is, see `make_heads`; `None` means the scaled dot product.
        bias: whether the four projections have a bias.
        rotary: what turns queries and keys by their positions, such as `RotaryPositions`
            of chapter 16, called as rotary(x, positions); `None` means that nothing does.
        num_kv_heads: number of heads of keys and values, a divisor of num_heads; as many
            heads of queries share each, see chapter 18. `None` means num_heads.

    Attributes:
        q_proj, out_proj: `Projection(embed_dim, embed_dim)` layers.
        k_proj, v_proj: the same, but with fewer columns if heads share keys and values.
        attention: one `BaseAttention`, or an `nn.ModuleList` with one for each head.
        rotary: as given.

    Raises:
        TypeError: attention is not what `make_heads` takes, or rotary can't be called.
        ValueError: embed_dim is not divisible by num_heads, num_heads not by num_kv_heads,
            or a wrong number of heads.

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
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads = {num_heads}, "
                f"got {embed_dim}"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = require_kv_heads(num_kv_heads, num_heads)
        kv_dim = self.num_kv_heads * (embed_dim // num_heads)
        self.q_proj = Projection(embed_dim, embed_dim, bias)
        self.k_proj = Projection(embed_dim, kv_dim, bias)
        self.v_proj = Projection(embed_dim, kv_dim, bias)
        self.out_proj = Projection(embed_dim, embed_dim, bias)
        self.attention = make_heads(attention, num_heads)
        self.rotary = require_rotary(rotary)

    def extra_repr(self) -> str:
        """What `print` shows besides the projections and the heads."""
        shared = self.num_kv_heads != self.num_heads
        kv_heads = f", num_kv_heads={self.num_kv_heads}" if shared else ""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{kv_heads}"

    def forward(
        self,
        query: Float[Tensor, "*batch queries embed_dim"],
        key: Float[Tensor, "*batch keys embed_dim"] | None = None,
        value: Float[Tensor, "*batch keys embed_dim"] | None = None,
        mask: Mask | None = None,
        need_weights: bool = True,
        cache: CacheLike | None = None,
        positions: Int[Tensor, "..."] | int | None = None,
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
            cache: a `KVCache` that holds the keys and values of the tokens before these,
                and gets theirs; M then counts all that it holds. The heads must be causal,
                or the mask must be. A `WindowCache` is for heads with a window.
            positions: for rotary only: where the queries stand, integers (N,) or
                (..., N), or the first of N in a row. In self-attention the keys stand
                there, too, otherwise at 0 to M - 1. `None` means the last N of M places.

        Returns:
            Output (..., N, embed_dim), and a list with the weights (..., N, M) of each
            head; `None` for a head that never forms them, and in place of the list if
            none does or nobody needs them.

        Raises:
            TypeError: a tensor of the wrong or a mixed dtype.
            ValueError: wrong shapes, a mask of neither 2 nor 4 dimensions, a cache that is
                full, holds other sequences or forgets what a head sees, positions without
                rotary, or rotary with a cache and keys of their own.
        """
        key = query if key is None else key
        value = key if value is None else value
        refuse_bad_tokens("query", query, self.embed_dim, self.q_proj.W, dims=2)
        for name, x in (("key", key), ("value", value)):
            if x is not query:
                refuse_bad_tokens(name, x, self.embed_dim, self.q_proj.W, dims=2)
        refuse_ambiguous_mask(mask, query)
        q = split_heads(self.q_proj(query), self.num_heads)
        k = split_heads(self.k_proj(key), self.num_kv_heads)
        v = split_heads(self.v_proj(value), self.num_kv_heads)
        if self.rotary is not None or positions is not None:
            refuse_bad_positions(positions, query, rotary=self.rotary is not None)
            held = None if cache is None else len(cache)
            q, k = turn_heads(self.rotary, q, k, positions, key is query, held)
        if cache is not None:
            require_window_kept(self.attention, cache)
            k, v, mask = append_heads(cache, k, v, mask)
        shared = self.num_kv_heads < self.num_heads
        attend = attend_shared if shared else apply_attention
        if isinstance(self.attention, BaseAttention):
            output, weights = attend(self.attention, q, k, v, mask, need_weights)
            per_head = None if weights is None else list(weights.unbind(dim=-3))
        else:
            output, per_head = attend_each(self.attention, q, k, v, mask, need_weights)
        return self.out_proj(merge_heads(output)), per_head if need_weights else None

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """A copy of PyTorch's layer; see `mask_from_torch` for its masks.

        Raises:
            ValueError: the layer is not batch first, has keys or values of another size,
                or adds keys.
        """
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
                if bias:
                    projection.b.copy_(module.in_proj_bias.chunk(3)[index])
        made.out_proj = Projection.from_linear(module.out_proj)
        return made.train(module.training)


def repeat_heads(
    x: Float[Tensor, "*batch kv_heads keys d"], times: int
) -> Float[Tensor, "*batch heads keys d"]:
    """Each head of keys or values, `times` times in a row: one for each that shares it.

    Source: chapter 18, eq-grouped-heads.
    """
    return x.repeat_interleave(times, dim=-3)


def attend_shared(
    attention: BaseAttention,
    query: Float[Tensor, "*batch heads queries d_k"],
    key: Float[Tensor, "*batch kv_heads keys d_k"],
    value: Float[Tensor, "*batch kv_heads keys d_v"],
    mask: Mask | None,
    need_weights: bool,
) -> tuple[Float[Tensor, "*batch heads queries d_v"], Tensor | None]:
    """Output and weights of heads that share keys, which are repeated only if need be.

    Source: chapter 18, eq-grouped-heads.
    """
    if not need_weights:
        output = attention.attend_groups(query, key, value, mask)
        if output is not None:
            return output, None
    times = query.shape[-3] // key.shape[-3]
    key, value = repeat_heads(key, times), repeat_heads(value, times)
    return apply_attention(attention, query, key, value, mask, need_weights)


def append_heads(
    cache: CacheLike,
    k: Float[Tensor, "*batch kv_heads new d_k"],
    v: Float[Tensor, "*batch kv_heads new d_v"],
    mask: Mask | None,
) -> tuple[Tensor, Tensor, Mask | None]:
    """Keys and values that a cache returns, and the columns of the mask for them.

    Source: chapter 17, eq-cached-attention; chapter 18, eq-window-visible.
    """
    k, v = cache.append(k, v)
    if mask is not None and k.shape[-2] < len(cache) == mask.shape[-1]:
        mask = mask[..., len(cache) - k.shape[-2] :]  # the others are forgotten
    return k, v, mask
