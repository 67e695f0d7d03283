# Made from book/09_transformer.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The transformer: blocks of attention and feed-forward, and a language model of them.

Derived in chapter 9, "The transformer" (book/09_transformer.ipynb), and in chapter 17, "A
cache" (book/17_cache.ipynb).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.checks import (
    CacheLike,
    refuse_hidden_padding,
    refuse_other_module,
    require_caches,
    require_causal,
    require_count,
    require_ids,
    require_padding,
    require_probability,
    require_room,
    require_sizes,
)
from attnlib.feed_forward import Activation, FeedForwardNetwork
from attnlib.generation import stream
from attnlib.layer_norm import LayerNorm
from attnlib.masks import Mask
from attnlib.multi_head import (
    AttentionLike,
    MultiHeadAttention,
    Rotary,
    text_of_ranks,
)
from attnlib.scaled_dot_product import ScaledDotProductAttention


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward network, each beside a residual path.

    With norm_first, y = x + MultiHead(norm_1(x)) and output = y + FFN(norm_2(y));
    without, y = norm_1(x + MultiHead(x)) and output = norm_2(y + FFN(y)).

    Args:
        embed_dim: features of a token; divisible by num_heads.
        num_heads: number of heads.
        d_ff: hidden features of the feed-forward network; `None` means 4 · embed_dim.
        attention: what a head is, see `make_heads`; `None` means the scaled dot product
            with this dropout, not causal.
        dropout: probability in [0, 1] of dropping an entry of what is added to x or a
            hidden feature, in training mode only. It drops weights only if attention is
            `None`: heads that you pass bring their own dropout, or have none.
        norm_first: whether the norms stand before the sub-layers or after the sums.
        activation: of the feed-forward network.
        heads: `rotary`, `num_kv_heads` and what else `MultiHeadAttention` takes by name.

    Attributes:
        attention, feed_forward: `MultiHeadAttention` and `FeedForwardNetwork`.
        norm_1, norm_2: `LayerNorm(embed_dim)`.

    Raises:
        TypeError: a size is no whole number, attention is not what `make_heads` takes, or
            heads not what `MultiHeadAttention` does.
        ValueError: embed_dim not divisible by num_heads, num_heads not by num_kv_heads, or
            dropout outside [0, 1].

    Source: chapter 9, eq-pre-norm and eq-post-norm; Vaswani et al. (2017), section 3.1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        d_ff: int | None = None,
        attention: AttentionLike | None = None,
        dropout: float = 0.0,
        norm_first: bool = True,
        activation: Activation = torch.relu,
        **heads: Any,
    ) -> None:
        super().__init__()
        require_sizes(embed_dim=embed_dim)
        self.dropout = require_probability("dropout", dropout)
        if attention is None:
            attention = ScaledDotProductAttention(dropout)
        self.norm_1, self.norm_2 = LayerNorm(embed_dim), LayerNorm(embed_dim)
        self.attention = MultiHeadAttention(embed_dim, num_heads, attention, **heads)
        self.feed_forward = FeedForwardNetwork(embed_dim, d_ff, dropout, activation)
        self.norm_first = norm_first

    def forward(
        self,
        x: Float[Tensor, "*batch tokens embed_dim"],
        mask: Mask | None = None,
        return_weights: bool = False,
        **parts: Any,
    ) -> (
        Float[Tensor, "*batch tokens embed_dim"]
        | tuple[Float[Tensor, "*batch tokens embed_dim"], list[Tensor | None] | None]
    ):
        """Output of the shape of x, on request with the attention weights of each head.

        Args:
            x: tokens (..., n, embed_dim).
            mask: as for `MultiHeadAttention`: True = may attend, 2-D or 4-D.
            return_weights: whether to return (output, weights), weights as there.
            parts: `cache` of the tokens before these, and `positions` for rotary, as there.

        Raises:
            TypeError, ValueError: x, mask, cache or positions is not what the parts take.
        """
        options = {"mask": mask, "need_weights": return_weights, **parts}
        if self.norm_first:
            attended, weights = self.attention(self.norm_1(x), **options)
            y = x + self.drop(attended)
            output = y + self.drop(self.feed_forward(self.norm_2(y)))
        else:
            attended, weights = self.attention(x, **options)
            y = self.norm_1(x + self.drop(attended))
            output = self.norm_2(y + self.drop(self.feed_forward(y)))
        return (output, weights) if return_weights else output

    def drop(self, x: Tensor) -> Tensor:
        """Dropout, in training mode only."""
        return F.dropout(x, self.dropout) if self.training else x

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer) -> "TransformerBlock":
        """A copy of PyTorch's layer; see `mask_from_torch` for its masks.

        Parameters that are frozen stay so, and a part stays in training mode or out of it.

        Raises:
            TypeError: no `nn.TransformerEncoderLayer`, or a subclass with a forward or a
                part of it of its own; or such a part.
            ValueError: its attention is not what `MultiHeadAttention.from_torch` takes, or
                the dropouts beside the residual paths differ.
        """
        refuse_other_module("layer", layer, nn.TransformerEncoderLayer)
        activation = copy.deepcopy(layer.activation)  # which may have parameters
        block = cls(
            layer.self_attn.embed_dim,
            layer.self_attn.num_heads,
            dropout=require_same_dropout(layer.dropout1, layer.dropout2),
            norm_first=layer.norm_first,
            activation=activation,
        )
        block.norm_1 = LayerNorm.from_torch(layer.norm1)
        block.norm_2 = LayerNorm.from_torch(layer.norm2)
        block.attention = MultiHeadAttention.from_torch(layer.self_attn)
        block.feed_forward = FeedForwardNetwork.from_torch(
            layer.linear1, layer.linear2, activation
        )
        block.feed_forward.dropout = require_same_dropout(layer.dropout)
        block.train(layer.dropout1.training)
        block.attention.train(layer.self_attn.training)
        block.feed_forward.train(layer.dropout.training)
        return block


def require_same_dropout(*layers: nn.Dropout) -> float:
    """The probability of dropouts of PyTorch that must be alike.

    Raises:
        TypeError: one is another module.
        ValueError: they differ, in the probability or in being in training mode.

    Source: chapter 9.
    """
    for layer in layers:
        refuse_other_module("dropout", layer, nn.Dropout)
    found = sorted({(layer.p, layer.training) for layer in layers})
    if len(found) > 1:
        got = " and ".join(f"{p} with training={training}" for p, training in found)
        raise ValueError(
            f"layer: expected dropout1 and dropout2 of one probability and mode, got {got}"
        )
    return layers[0].p


class LanguageModel(nn.Module):
    """A decoder-only transformer: logits of each token given the ones before it.

    Args:
        vocab_size: number of different tokens.
        context_length: the most tokens that it can see.
        embed_dim, num_heads, d_ff, norm_first, activation, num_kv_heads: as for
            `TransformerBlock`.
        num_layers: number of blocks.
        attention: what a head is, see `make_heads`; it must have causal=True. Each block
            gets a copy of its own. `None` means the causal scaled dot product with this
            dropout.
        dropout: as for `TransformerBlock`, and of an entry of token plus position. It
            drops weights only if attention is `None`: heads that you pass bring their own
            dropout, or have none, as `FlashAttention(causal=True)`.
        positions: "learned" or "sinusoidal", which are added to the tokens, or "rotary",
            or a module such as `RotaryPositions`, which turn queries and keys in every
            block; see chapter 16.

    Attributes:
        token_embedding: `nn.Embedding`; its weight also makes the logits.
        positions: what is added at each position, (context_length, embed_dim), or the
            module that turns.
        blocks: the blocks, each a `TransformerBlock`.
        norm: `LayerNorm` after the last block if norm_first, otherwise the identity.

    Raises:
        TypeError: a size is no whole number, or attention not what `make_heads` takes.
        ValueError: a size below 1, attention that is not causal, or unknown positions.

    Source: chapter 9, eq-next-token and eq-tied-logits; Radford et al. (2019).
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        d_ff: int | None = None,
        attention: AttentionLike | None = None,
        dropout: float = 0.0,
        norm_first: bool = True,
        activation: Activation = torch.relu,
        positions: str | nn.Module = "learned",
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        require_sizes(vocab_size=vocab_size, context_length=context_length)
        require_sizes(embed_dim=embed_dim, num_heads=num_heads, num_layers=num_layers)
        if attention is None:
            attention = ScaledDotProductAttention(dropout, causal=True)
        rotary = turning_positions(positions, embed_dim // num_heads)
        options = {"rotary": rotary, "num_kv_heads": num_kv_heads}
        options |= {"norm_first": norm_first, "activation": activation}
        self.blocks = nn.ModuleList(
            TransformerBlock(
                embed_dim, num_heads, d_ff, copy.deepcopy(attention), dropout, **options
            )
            for _ in range(num_layers)
        )
        require_causal(self.blocks[0].attention.attention)
        self.context_length, self.dropout = context_length, dropout
        self.token_embedding = nn.Embedding(vocab_size, embed_dim)
        nn.init.normal_(self.token_embedding.weight, std=embed_dim**-0.5)
        self.norm = LayerNorm(embed_dim) if norm_first else nn.Identity()
        size = context_length, embed_dim
        self.positions = added_positions(positions, *size) if rotary is None else rotary

    def forward(
        self,
        ids: Int[Tensor, "*batch tokens"],
        return_weights: bool = False,
        cache: Sequence[CacheLike] | None = None,
        padding: Int[Tensor, " batch"] | Sequence[int] | None = None,
        last: int | None = None,
    ) -> (
        Float[Tensor, "*batch shown vocab_size"]
        | tuple[Float[Tensor, "*batch shown vocab_size"], list[list[Tensor | None] | None]]
    ):
        """Logits of the next token at each position, on request with all the weights.

        Args:
            ids: tokens (..., n) as integers below vocab_size, n at most context_length.
            return_weights: whether to return (logits, weights), the weights being a list
                with those of each block.
            cache: a `KVCache` for each block, with the tokens before these; n counts those
                and these together.
            padding: how many columns at the front of each sequence of the batch, (batch,),
                hold no token; those in the cache are counted, too. Neither fits heads that
                share the text with other processes, such as `RingAttention`.
            last: of how many tokens at the end to return the logits; `None` means all.

        Raises:
            IndexError: an id outside the vocabulary (raised by PyTorch).
            TypeError: ids, padding or last are not integers, or cache is not a list of
                caches.
            ValueError: more tokens than context_length, or no dimension of tokens; a cache
                that is full or holds other sequences; a padding below 0; last out of range.
        """
        places, parts = self.find_places(ids, cache, padding)
        x = self.token_embedding(ids)  # (..., n, d)
        if isinstance(self.positions, Tensor):  # otherwise the blocks turn
            x = x + self.positions[places]
        x = F.dropout(x, self.dropout) if self.training else x
        per_block = []
        for block, options in zip(self.blocks, parts, strict=True):
            x = block(x, return_weights=return_weights, **options)  # (..., n, d)
            if return_weights:
                x, weights = x
                per_block.append(weights)
        if last is not None:
            x = x[..., -require_count("last", last, most=ids.shape[-1]) :, :]
        logits = self.logits(self.norm(x))  # (..., n, V)
        return (logits, per_block) if return_weights else logits

    def logits(
        self, x: Float[Tensor, "*batch embed_dim"]
    ) -> Float[Tensor, "*batch vocab_size"]:
        """Logits of what the last block and the norm have made, by the tokens' table."""
        return F.linear(x, self.token_embedding.weight)

    def find_places(
        self,
        ids: Int[Tensor, "*batch tokens"],
        cache: Sequence[CacheLike] | None,
        padding: Int[Tensor, " batch"] | Sequence[int] | None,
    ) -> tuple[Tensor | slice, list[dict[str, Any]]]:
        """Which rows of a table of positions these tokens have, and each block's parts.

        Raises:
            TypeError, ValueError: see `forward`.
        """
        require_ids(ids, self.context_length)
        start, parts = 0, [{} for _ in self.blocks]
        if cache is not None:
            start = require_caches(cache, len(parts), ids, self.longest)
            refuse_hidden_padding(cache[0], "padding", padding)
            parts = [{"cache": held} for held in cache]
        end = start + ids.shape[-1]
        places, shared = slice(start, end), {"positions": start}
        if padding is not None:
            places, mask = padded_places(require_padding(padding, ids), start, end)
            shared = {"positions": places, "mask": mask}
        if (text := self.text_of_ranks(ids, cache, padding)) is not None:
            places, shared = text, {"positions": text}
        if isinstance(self.positions, Tensor):  # which is added; otherwise the blocks turn
            del shared["positions"]
        return places, [shared | own for own in parts]

    def text_of_ranks(
        self,
        ids: Int[Tensor, "*batch tokens"],
        cache: Sequence[CacheLike] | bool | None,
        padding: Int[Tensor, " batch"] | Sequence[int] | None,
    ) -> Int[Tensor, " tokens"] | None:
        """Where these tokens stand in a text that several ranks share; see chapter 24.

        Raises:
            ValueError: more tokens on all ranks than context_length; a cache or padding.
        """
        text = text_of_ranks(self.blocks[0].attention.attention, ids.shape[-1])
        if text is None:
            return None
        if cache or padding is not None:
            what = "cache, padding: expected None"
            raise ValueError(f"{what}, since several ranks share the text")
        if text[1] > self.longest:
            expected = f"expected at most context_length = {self.longest} tokens"
            raise ValueError(f"ids: {expected} on all ranks together, got {text[1]}")
        return text[0].to(ids.device)

    def start_writing(
        self,
        ids: Int[Tensor, "*batch tokens"],
        length: int,
        cache: bool | Sequence[CacheLike],
        padding: Int[Tensor, " batch"] | Sequence[int] | None,
    ) -> tuple[Sequence[CacheLike] | None, Int[Tensor, " batch"] | None]:
        """The caches and the padding of a text that is to be continued, if it can be.

        Raises:
            TypeError, ValueError: see `generate`.
        """
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids: expected a tensor, got {type(ids).__name__}")
        if ids.dim() not in (1, 2) or not ids.shape[-1]:
            raise ValueError(
                "ids: expected (tokens,) or (batch, tokens) with at least one token, "
                f"got shape {tuple(ids.shape)}"
            )
        require_ids(ids, ids.shape[-1])
        require_count("length", length, least=0)
        if self.text_of_ranks(ids, cache, padding) is not None:
            raise ValueError("ids: expected the whole text, and several ranks share it")
        read = ids.shape[-1] + max(0, length - 1)  # the last token drawn is not read
        if padding is not None:
            padding = require_padding(padding, ids, least=1)
        if cache is False:
            return None, padding
        if cache is True:
            from attnlib.cache import KVCache  # chapter 17, which comes later

            cache = [KVCache(read) for _ in self.blocks]
        require_room(cache, len(self.blocks), ids, read, self.longest)
        return cache, padding

    def last_logits(
        self,
        ids: Int[Tensor, "*batch tokens"],
        cache: Sequence[CacheLike] | None,
        padding: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "*batch vocab_size"]:
        """Logits after the last token, from the tokens that a cache does not hold."""
        cut = max(0, ids.shape[-1] - self.context_length)  # what is no longer seen
        known = cut if cache is None else len(cache[0])
        front = None if padding is None else (padding - cut).clamp(min=0)
        return self(ids[..., known:], cache=cache, padding=front, last=1)[..., -1, :]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Follows to another device or dtype, where the sinusoids are written anew.

        No file has them, so that `to_empty` would leave what was in memory before.
        """
        super()._apply(fn, recurse)
        if isinstance(self._buffers.get("positions"), Tensor):
            write_sinusoids(self.positions)
        return self

    def generate(
        self,
        ids: Int[Tensor, "*batch tokens"],
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        cache: bool | Sequence[CacheLike] = False,
        padding: Int[Tensor, " batch"] | Sequence[int] | None = None,
        **choice: Any,
    ) -> Int[Tensor, "*batch more_tokens"]:
        """The given tokens, continued by `length` drawn ones, or fewer if all have ended.

        Args:
            ids: the start, (n,) or (batch, n), at least one token.
            length: the most tokens to draw, at least 0, each by `sample`.
            temperature, top_k, generator: see `sample`.
            cache, padding: see `stream`.
            choice: what else `stream` takes: `top_p`, `min_p`, `repetition_penalty`,
                `presence_penalty`, `bias`, `stop` and `tokenizer`.

        Returns:
            Texts of one length: one that has ended is filled with the token that ended it.

        Raises:
            TypeError, ValueError: see `stream`.
        """
        choice |= {"temperature": temperature, "top_k": top_k, "generator": generator}
        drawn = stream(self, ids, length, cache=cache, padding=padding, **choice)
        return torch.cat([ids, *(token[..., None] for token in drawn)], dim=-1)

    @property
    def longest(self) -> int:
        """The most tokens of a text with caches: context_length, or any number.

        Nothing ends a text whose positions turn, and whose heads see a window only.
        """
        heads = self.blocks[0].attention.attention
        each = heads if isinstance(heads, nn.ModuleList) else [heads]
        near = all(head.window is not None for head in each)
        free = near and not isinstance(self.positions, Tensor)
        return 2**62 if free else self.context_length


# What makes positions that turn queries and keys, by name, from the features of a head.
# Chapter 16 adds "rotary".
ROTARY: dict[str, Callable[[int], Rotary]] = {}


def turning_positions(positions: str | nn.Module, d_k: int) -> nn.Module | None:
    """What turns queries and keys of d_k features in every block; `None` if nothing does.

    Source: chapter 9; chapter 16, eq-rotary-score.
    """
    if isinstance(positions, str) and positions in ROTARY:
        return ROTARY[positions](d_k)
    return positions if isinstance(positions, nn.Module) else None


def added_positions(positions: str, tokens: int, embed_dim: int) -> Tensor:
    """The table that is added to the tokens, with rows of length 1 as theirs.

    Raises:
        ValueError: unknown positions.

    Source: chapter 9, eq-sinusoidal.
    """
    if positions == "learned":
        return nn.Parameter(torch.randn(tokens, embed_dim) * embed_dim**-0.5)
    if positions == "sinusoidal":
        table = torch.empty(tokens, embed_dim)
        return nn.Buffer(write_sinusoids(table), persistent=False)
    wanted = ", ".join(map(repr, ("learned", "sinusoidal", *ROTARY)))
    raise ValueError(
        f"positions: expected one of {wanted}, or a module that turns, got {positions!r}"
    )


def write_sinusoids(table: Tensor) -> Tensor:
    """The table with sinusoids of length 1 written into it, where it is in memory.

    Source: chapter 9, eq-sinusoidal, eq-position-dot.
    """
    tokens, embed_dim = table.shape
    with torch.device("cpu"):  # some devices have no float64
        exact = sinusoidal_positions(tokens, embed_dim, torch.float64)
    return table.copy_(exact * (embed_dim / 2) ** -0.5)


def sinusoidal_positions(
    tokens: int, embed_dim: int, dtype: torch.dtype | None = None
) -> Float[Tensor, "tokens embed_dim"]:
    """Row t holds sin(ω_i t) and cos(ω_i t) in columns 2i and 2i + 1.

    The angular frequencies are ω_i = 10000^(-2i / embed_dim), in radians per token.

    Args:
        tokens: number of positions, counted from 0.
        embed_dim: number of columns, even.
        dtype: of the table, computed in float64; `None` means PyTorch's default.

    Raises:
        ValueError: embed_dim is odd.

    Source: chapter 9, eq-sinusoidal; Vaswani et al. (2017), section 3.5.
    """
    if embed_dim % 2:
        raise ValueError(f"embed_dim: expected an even number, got {embed_dim}")
    position = torch.arange(tokens, dtype=torch.float64)
    omega = 10000 ** (-torch.arange(0, embed_dim, 2, dtype=torch.float64) / embed_dim)
    angle = position[:, None] * omega  # (tokens, embed_dim / 2)
    table = torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1).flatten(1)
    return table.to(dtype or torch.get_default_dtype())


def padded_places(
    padding: Int[Tensor, " batch"], start: int, end: int
) -> tuple[Int[Tensor, "batch new"], Tensor]:
    """Where the columns start to end - 1 stand in each sequence, and which are keys.

    Args:
        padding: how many columns at the front of each sequence hold no token.
        start, end: the first column that is read now, and the one after the last.

    Returns:
        Positions (batch, n), counted from the first token of each sequence, 0 before it;
        and a mask (batch, 1, 1, end), True where a column holds a token.

    Source: chapter 17, eq-padded-position.
    """
    columns = torch.arange(end, device=padding.device)
    places = columns - padding[:, None]  # (batch, end), negative before the first token
    return places[:, start:].clamp(min=0), (places >= 0)[:, None, None, :]
