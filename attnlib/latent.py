# Made from book/18_fewer_keys.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Latent attention: the keys and values of all heads, made of one row a token.

Derived in chapter 18, "Fewer keys" (book/18_fewer_keys.ipynb).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnlib.checks import (
    CacheLike,
    refuse_ambiguous_mask,
    refuse_bad_positions,
    refuse_bad_tokens,
    refuse_hidden_padding,
    require_sizes,
    require_window_kept,
)
from attnlib.masks import Mask
from attnlib.multi_head import merge_heads, split_heads
from attnlib.projection import Projection
from attnlib.rotary import RotaryPositions
from attnlib.scaled_dot_product import ScaledDotProductAttention


def blocks_of(
    up: Float[Tensor, "d_latent embed_dim"], num_heads: int
) -> Float[Tensor, "d_latent heads d_k"]:
    """The matrix of each head, out of one for all.

    Source: chapter 18, eq-latent.
    """
    return up.unflatten(-1, (num_heads, -1))


def plain_heads(
    query: Float[Tensor, "*batch heads queries d_q"],
    c: Float[Tensor, "*batch keys d_latent"],
    r: Float[Tensor, "*batch keys d_rotary"],
    up_k: Float[Tensor, "d_latent embed_dim"],
    up_v: Float[Tensor, "d_latent embed_dim"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of each head, the keys and values made of what is kept.

    Source: chapter 18, eq-latent, eq-latent-score.
    """
    heads = query.shape[-3]
    k, v = split_heads(c @ up_k, heads), split_heads(c @ up_v, heads)
    r = r.unsqueeze(-3).expand(*k.shape[:-1], -1)
    return query, torch.cat([k, r], dim=-1), v


def absorbed_heads(
    query: Float[Tensor, "*batch heads queries d_q"],
    c: Float[Tensor, "*batch keys d_latent"],
    r: Float[Tensor, "*batch keys d_rotary"],
    up_k: Float[Tensor, "d_latent embed_dim"],
    up_v: Float[Tensor, "d_latent embed_dim"],
) -> tuple[Tensor, Tensor, Tensor]:
    """The same scores with what is kept as the one key, and value, that all heads share.

    What comes out of attention is still to be multiplied by each head's block of up_v.

    Source: chapter 18, eq-absorbed-score, eq-absorbed-output.
    """
    heads, d_r = query.shape[-3], r.shape[-1]
    q, q_r = query[..., :-d_r], query[..., -d_r:]
    q = torch.einsum("...hnd,chd->...hnc", q, blocks_of(up_k, heads))
    k, v = torch.cat([c, r], dim=-1).unsqueeze(-3), c.unsqueeze(-3)  # one for all heads
    return torch.cat([q, q_r], dim=-1), k, v


class LatentAttention(nn.Module):
    """Causal attention of many heads, their keys and values made of one row a token.

    A token is kept as `d_latent` numbers, of which every head makes its key and its value,
    and `d_rotary` that turn with its position, a further part of the key of all heads.

    Args:
        embed_dim: features of a token; divisible by num_heads.
        num_heads: number of heads.
        d_latent: numbers kept of a token, from which keys and values are made.
        d_rotary: numbers kept that turn, even; the queries of each head have as many more.
        base: of `RotaryPositions`.

    Attributes:
        q_proj, q_rotary_proj: queries, and their parts that turn, `Projection` layers.
        down_proj, k_rotary_proj: from a token to what is kept of it.
        k_up_proj, v_up_proj: from there to the keys and values of all heads.
        out_proj: output projection.

    Raises:
        ValueError: embed_dim not divisible by num_heads, a size below 1, an
            odd d_rotary.

    Source: chapter 18, eq-latent, eq-latent-score, eq-absorb-when; DeepSeek-AI (2024),
    section 2.1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        d_latent: int,
        d_rotary: int,
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        require_sizes(num_heads=num_heads, d_latent=d_latent)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads = {num_heads}, "
                f"got {embed_dim}"
            )
        self.rotary = RotaryPositions(d_rotary, base)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.d_latent, self.d_rotary = d_latent, d_rotary
        self.q_proj = Projection(embed_dim, embed_dim, bias=False)
        self.q_rotary_proj = Projection(embed_dim, num_heads * d_rotary, bias=False)
        self.down_proj = Projection(embed_dim, d_latent, bias=False)
        self.k_rotary_proj = Projection(embed_dim, d_rotary, bias=False)
        self.k_up_proj = Projection(d_latent, embed_dim, bias=False)
        self.v_up_proj = Projection(d_latent, embed_dim, bias=False)
        self.out_proj = Projection(embed_dim, embed_dim, bias=False)
        scale = (embed_dim // num_heads + d_rotary) ** -0.5
        self.attention = ScaledDotProductAttention(causal=True, scale=scale)

    def forward(
        self,
        x: Float[Tensor, "*batch tokens embed_dim"],
        mask: Mask | None = None,
        need_weights: bool = True,
        cache: CacheLike | None = None,
        positions: Int[Tensor, "..."] | int | None = None,
        absorb: bool | None = None,
    ) -> tuple[Float[Tensor, "*batch tokens embed_dim"], list[Tensor] | None]:
        """Attends from N tokens to themselves and the tokens before them.

        Args:
            x: tokens (..., N, embed_dim), usually (batch, N, embed_dim).
            mask, need_weights: as for `MultiHeadAttention`.
            cache: a `KVCache` with what is kept of the tokens before these, as one head
                with keys (..., 1, M, d_latent) and values (..., 1, M, d_rotary); it gets
                theirs.
            absorb: whether to attend to what is kept itself, without making keys and values
                of it; `None` chooses what takes fewer FLOPs.
            positions: where the tokens stand, integers (N,) or (batch, N), or the first of
                N in a row; `None` means behind those in the cache. Sequences of different
                length need theirs, and a mask that hides what stands in front of them.

        Returns:
            Output of the shape of x, and a list with the weights (..., N, M) of each head;
            `None` if nobody needs them.

        Raises:
            TypeError: a tensor of the wrong or a mixed dtype.
            ValueError: wrong shapes, a mask of neither 2 nor 4 dimensions, or a cache that
                is full, holds other sequences or forgets.
        """
        refuse_bad_tokens("x", x, self.embed_dim, self.q_proj.W, dims=2)
        refuse_ambiguous_mask(mask, x)
        if cache is not None:
            require_window_kept(self.attention, cache)
            refuse_hidden_padding(cache, "positions", positions)
            refuse_hidden_padding(cache, "mask", mask)
        if positions is None:
            positions = 0 if cache is None else len(cache)
        refuse_bad_positions(positions, x)
        each = positions  # of each head
        if isinstance(positions, Tensor) and positions.dim() > 1:
            each = positions.unsqueeze(-2)
        q = split_heads(self.q_proj(x), self.num_heads)
        q_r = self.rotary(split_heads(self.q_rotary_proj(x), self.num_heads), each)
        c, r = self.down_proj(x), self.rotary(self.k_rotary_proj(x), positions)
        if cache is not None:
            c, r = (y.squeeze(-3) for y in cache.append(c.unsqueeze(-3), r.unsqueeze(-3)))
        if absorb is None:
            widths = 1 / q.shape[-1] - 1 / self.d_latent
            absorb = 1 / x.shape[-2] - 1 / c.shape[-2] > widths
        up_k, up_v = self.k_up_proj.W, self.v_up_proj.W
        make = absorbed_heads if absorb else plain_heads
        q, k, v = make(torch.cat([q, q_r], dim=-1), c, r, up_k, up_v)
        o, weights = self.attention(q, k, v, mask, need_weights, enable_gqa=absorb)
        if absorb:
            o = torch.einsum("...hnc,chd->...hnd", o, blocks_of(up_v, self.num_heads))
        per_head = None if weights is None else list(weights.unbind(dim=-3))
        return self.out_proj(merge_heads(o)), per_head
