# Made from book/31_chosen_keys.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Masks and scores as programs: functions of the places of query and key, tile by tile.

Derived in chapter 31, "Chosen keys" (book/31_chosen_keys.ipynb).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnlib.base import BaseAttention, repeat_shared
from attnlib.checks import broadcasts, require_count, require_flag, require_scale
from attnlib.flash.tiles import mask_tile, row_blocks
from attnlib.linear import unrounded
from attnlib.masks import Mask, apply_mask
from attnlib.online_softmax import online_attention

MaskProgram = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreProgram = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def places_of(query: Tensor, rows: slice, cols: slice) -> tuple[Tensor, ...]:
    """The numbers of batch, head, query and key of a tile, to be broadcast.

    Source: chapter 31, eq-program.
    """
    batch, heads = (torch.arange(size, device=query.device) for size in query.shape[:2])
    queries, keys = (
        torch.arange(x.start, x.stop, device=query.device) for x in (rows, cols)
    )
    return batch[:, None, None, None], heads[:, None, None], queries[:, None], keys


def answer(
    name: str, said: Tensor, dtype: torch.dtype, query: Tensor, key: Tensor
) -> Tensor:
    """What a program has said of a tile, if it has this dtype and fits the scores.

    Raises:
        TypeError, ValueError: no tensor, another dtype, or a shape that does not fit.

    Source: chapter 31, eq-program.
    """
    if not isinstance(said, Tensor) or said.dtype != dtype:
        got = said.dtype if isinstance(said, Tensor) else type(said).__name__
        raise TypeError(f"{name}: expected a tensor of {dtype} from it, got {got}")
    scores = (*query.shape[:-1], key.shape[-2])
    if not broadcasts(said.shape, scores):
        got = f"got {tuple(said.shape)}"
        raise ValueError(f"{name}: expected a shape from it that fits {scores}, {got}")
    return said.expand(scores)


def refuse_bad_places(query: Tensor, key: Tensor) -> None:
    """Refuses queries and keys whose places cannot be numbered.

    Raises:
        ValueError: more dimensions than four, or more queries than keys.

    Source: chapter 31, eq-program.
    """
    if query.dim() > 4:
        wanted = "expected at most (batch, heads, tokens, features)"
        raise ValueError(f"query: {wanted}, got shape {tuple(query.shape)}")
    if query.shape[-2] > key.shape[-2]:
        wanted = f"expected at most {key.shape[-2]} tokens, as the last has the last key"
        raise ValueError(f"query: {wanted}, got {query.shape[-2]}")


class ProgramAttention(BaseAttention):
    """Attention whose mask and scores are programs, read tile by tile, with a backward.

    A program gets the numbers of batch, head, query and key as tensors that broadcast to
    (batch, heads, queries, keys), so that those for PyTorch's FlexAttention run here, if
    they work number by number. The last query has the number of the last key. Tiles that
    are hidden whole are not computed; the others are kept for backward. What a program
    has been made from gets its gradient. The weights are never formed.

    Args:
        mask_mod: `mask_mod(batch, head, query, key)`, True where a key may be seen.
        score_mod: `score_mod(score, batch, head, query, key)`, the score to use instead;
            finite, where a key is hidden, too.
        causal: whether a query sees no later keys; bottom right, see `causal_mask`.
        scale: factor on the scores, before the program; `None` means 1/√d_k.
        block_size: queries and keys of a tile.

    Raises:
        TypeError, ValueError: a block size below 1; a flag or a scale that is none; when
            it is called, with a program, more dimensions than four or more queries than
            keys, or an answer of another dtype or shape from a program.

    Source: chapter 31, eq-program; Dong et al. (2024).
    """

    neutral: ClassVar[dict[str, Any]] = BaseAttention.neutral | {
        "mask_mod": None,
        "score_mod": None,
    }

    def __init__(
        self,
        mask_mod: MaskProgram | None = None,
        score_mod: ScoreProgram | None = None,
        causal: bool = False,
        scale: float | Tensor | None = None,
        block_size: int = 128,
    ) -> None:
        super().__init__()
        self.mask_mod, self.score_mod = mask_mod, score_mod
        self.causal, self.scale = require_flag("causal", causal), require_scale(scale)
        self.block_size = require_count("block_size", block_size)

    def tile(
        self, query: Tensor, key: Tensor, mask: Mask | None, rows: slice, cols: slice
    ) -> Float[Tensor, "batch heads rows cols"] | None:
        """The scores of a tile, or `None` if all of it is hidden; rows are places."""
        places, allowed = places_of(query, rows, cols), query.new_ones((), dtype=torch.bool)
        if self.causal:
            allowed = places[3] <= places[2]
        if self.mask_mod is not None:
            said = self.mask_mod(*places)
            allowed = allowed & answer("mask_mod", said, torch.bool, query, key)
        if not allowed.any():
            return None
        scores = query @ key.mT
        if self.score_mod is not None:
            said = self.score_mod(scores, *places)
            scores = answer("score_mod", said, scores.dtype, query, key)
        scores = scores.masked_fill(~allowed, -torch.inf)
        return scores if mask is None else apply_mask(scores, mask)

    def read(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, rows: slice
    ) -> Float[Tensor, "batch heads rows d_v"]:
        """What the queries at these places get, which have the scale."""
        tiles = []
        for cols in row_blocks(key.shape[-2], self.block_size):
            part = None if mask is None else mask_tile(mask, slice(None), cols)
            scores = self.tile(query, key[..., cols, :], part, rows, cols)
            if scores is not None:
                tiles.append((scores, value[..., cols, :]))
        if not tiles:
            return value.new_zeros(*query.shape[:-1], value.shape[-1])
        return online_attention(tiles).output

    def attend_without_weights(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Tensor:
        """See `BaseAttention`; a block of queries at a time."""
        if key.shape[:-2] != query.shape[:-2]:
            key, value = repeat_shared(query, key, value)
        shape, dtype = (*query.shape[:-1], value.shape[-1]), query.dtype
        if self.mask_mod is not None or self.score_mod is not None:
            refuse_bad_places(query, key)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        wide = torch.promote_types(dtype, torch.float32)
        query, key, value = (
            x[(None,) * (4 - x.dim())].to(wide) for x in (query, key, value)
        )
        query, before = query * scale, key.shape[-2] - query.shape[-2]
        outputs = [value.new_zeros(*query.shape[:-2], 0, value.shape[-1])]
        for rows in row_blocks(query.shape[-2], self.block_size):
            part = None if mask is None else mask_tile(mask, rows, slice(None))
            places = slice(rows.start + before, rows.stop + before)
            with unrounded(query.device):
                outputs.append(self.read(query[..., rows, :], key, value, part, places))
        return torch.cat(outputs, dim=-2).to(dtype).reshape(shape)
