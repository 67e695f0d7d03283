# Made from book/24_ring_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Places: who holds which tokens, who may see whom, and in which step they meet.

Derived in chapter 24, "Ring attention" (book/24_ring_attention.ipynb).
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor

from attnlib.flash.tiles import mask_tile, row_blocks
from attnlib.masks import both_masks


def ranges(places: Int[Tensor, "*ranks two tokens"]) -> Int[Tensor, "*ranks 2 two"]:
    """The lowest and the highest of the positions, and of the documents, of some tokens.

    Source: chapter 24, eq-rule.
    """
    return torch.stack(places.aminmax(dim=-1), dim=-2)


class Rule(NamedTuple):
    """Which query may see which key: by their places in the text, not by where they are.

    A token has two numbers, its position and its document, as a column of `places`.

    Args:
        causal: whether a query sees the keys up to its own position only.
        window: whether it sees those less than so many positions away only.

    Source: chapter 24, eq-rule.
    """

    causal: bool = False
    window: int | None = None

    def allowed(
        self, queries: Int[Tensor, "2 queries"], keys: Int[Tensor, "2 keys"]
    ) -> Bool[Tensor, "queries keys"]:
        """Pair by pair, True = may attend."""
        ahead = queries[0, :, None] - keys[0]
        allowed = queries[1, :, None] == keys[1]
        if self.causal:
            allowed &= ahead >= 0
        if self.window is not None:
            allowed &= ahead.abs() < self.window
        return allowed

    def verdict(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """By the `ranges` of two sets, (..., 2, 2): whether no pair may attend, or all may.

        Both are False where the ranges do not tell.
        """
        least = queries[..., 0, :] - keys[..., 1, :]  # of position and document: how far
        most = queries[..., 1, :] - keys[..., 0, :]  # a query is ahead of a key
        never = (least[..., 1] > 0) | (most[..., 1] < 0)
        always = (least[..., 1] == 0) & (most[..., 1] == 0)
        least, most = least[..., 0], most[..., 0]
        if self.causal:
            never, always = never | (most < 0), always & (least >= 0)
        if self.window is not None:
            never = never | (least >= self.window) | (most <= -self.window)
            always = always & (least > -self.window) & (most < self.window)
        return never, always


ORDERS = ("contiguous", "zigzag", "striped")


def shard_positions(
    tokens: int, ranks: int, rank: int, order: str = "zigzag"
) -> Int[Tensor, " shard"]:
    """The places in the whole text of the tokens that one rank holds.

    Args:
        tokens: number of tokens of the whole text, a multiple of ranks, and of 2 · ranks
            in the order "zigzag".
        ranks: number of ranks P.
        rank: which of them.
        order: "contiguous", one piece after the other; "zigzag", of 2P pieces the one with
            the number of the rank, and the one as far from the end; "striped", every P-th
            token.

    Returns:
        tokens / ranks positions: `x[..., positions, :]` is the shard of this rank.

    Raises:
        ValueError: an unknown order, a rank out of range, or tokens that can't be shared
            equally.

    Source: chapter 24, eq-balance, eq-zigzag; Brandon et al. (2023) for stripes.
    """
    if order not in ORDERS:
        expected = ", ".join(map(repr, ORDERS))
        raise ValueError(f"order: expected one of {expected}, got {order!r}")
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1}, got {rank}")
    pieces = 2 * ranks if order == "zigzag" and ranks > 1 else ranks
    if tokens % pieces:
        raise ValueError(f"tokens: expected a multiple of {pieces}, got {tokens}")
    text = torch.arange(tokens, device="cpu")
    if order == "striped":
        return text[rank::ranks]
    if pieces == ranks:
        return text.chunk(ranks)[rank] if tokens else text
    first, last = (text.view(pieces, -1)[i] for i in (rank, pieces - 1 - rank))
    return torch.cat([first, last])


def hops_needed(
    rule: Rule,
    queries: Int[Tensor, "ranks 2 queries"],
    keys: Int[Tensor, "ranks 2 keys"],
    pieces: int = 8,
) -> int:
    """How often the keys are passed on, so that every query has met all that it sees.

    Args:
        rule: which query may see which key.
        queries: position and document of the queries of all ranks.
        keys: the same of their keys.
        pieces: into how many pieces a shard is cut to be looked at.

    Returns:
        A number below that of the ranks, the same on each of them.

    Source: chapter 24, eq-ring, eq-window-hops.
    """
    ranks, most = len(keys), [min(pieces, x.shape[-1]) for x in (queries, keys)]
    if 0 in most:
        return 0
    q, k = (
        torch.stack([ranges(part) for part in x.tensor_split(count, dim=-1)])
        for x, count in zip((queries, keys), most, strict=True)
    )
    met = []  # for each rank, which ranks see one of its keys
    for owner in range(ranks):
        never, _ = rule.verdict(q[:, None], k[:, owner, None])
        met.append((~never).flatten(0, 1).any(dim=0))
    owner, reader = torch.stack(met).nonzero(as_tuple=True)
    hops = (reader - owner) % ranks
    return int(hops.max()) if hops.numel() else 0


TILE = 1024  # queries and keys that are computed at once, at most
MIXED = 256  # likewise, where some pairs may attend and some may not


class RingPlan(NamedTuple):
    """What a rank computes in each step of the ring, tile by tile.

    Args:
        rule: which query may see which key.
        queries: position and document of this rank's queries, a row for each that it has.
        keys: position and document of the keys of all ranks.
        hops: how often the keys are passed on.
        rank: the rank.
        group: its group; `None` if nothing travels.
        scale: factor on the scores.
        device: where the masks of tiles are needed.

    Source: chapter 24, eq-ring, eq-rule.
    """

    rule: Rule
    queries: Int[Tensor, "2 queries"]
    keys: Int[Tensor, "ranks 2 keys"]
    hops: int
    rank: int
    group: dist.ProcessGroup | None
    scale: float
    device: torch.device

    def tiles(
        self, step: int, mask: Tensor | None
    ) -> Iterator[tuple[slice, slice, Tensor | None, Tensor]]:
        """Tiles of which a pair may attend: rows, columns, mask, and whose columns it has.

        The keys are those of the rank so many hops behind. The mask of a tile is `None` if
        all may attend. The last is the positions of its keys, which are columns of `mask`.
        """
        keys = self.keys[(self.rank - step) % len(self.keys)]
        left = list(product(*(row_blocks(x.shape[-1], TILE) for x in (self.queries, keys))))
        while left:
            row, col = left.pop()
            q, k = self.queries[:, row], keys[:, col]
            never, always = self.rule.verdict(ranges(q), ranges(k))
            if never:
                continue
            if not always and max(q.shape[-1], k.shape[-1]) > MIXED:
                left += product(halves(row), halves(col))
                continue
            part = None if mask is None else columns(mask, row, k[0])
            if not always:
                seen = self.rule.allowed(q, k)
                if not seen.any():
                    continue
                part = both_masks(part, seen.to(self.device))
            yield row, col, part, k[0]


def halves(part: slice) -> list[slice]:
    """Two slices in the place of one, or the same one if it has no more than MIXED tokens.

    Source: chapter 24, eq-zigzag.
    """
    if part.stop - part.start <= MIXED:
        return [part]
    middle = (part.start + part.stop + 1) // 2
    return [slice(part.start, middle), slice(middle, part.stop)]


def columns(mask: Tensor, rows: slice, positions: Int[Tensor, " keys"]) -> Tensor:
    """The part of a mask for some queries, and the keys at some positions of the text.

    Source: chapter 24, eq-rule.
    """
    mask = mask_tile(mask, rows, slice(None))
    if mask.dim() > 0 and mask.shape[-1] > 1:
        mask = mask[..., positions.to(mask.device)]
    return mask
