# Made from book/31_chosen_keys.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Attention to chosen keys: which blocks of keys a query reads, and how they are found.

Derived in chapter 31, "Chosen keys" (book/31_chosen_keys.ipynb).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from attnlib.base import BaseAttention, repeat_shared
from attnlib.checks import require_count, require_flag, require_scale
from attnlib.flash.tiles import mask_tile, row_blocks
from attnlib.linear import require_beside, unrounded
from attnlib.masks import Mask, one_mask
from attnlib.scaled_dot_product import ScaledDotProductAttention

BlockScore = Callable[[Tensor, Tensor], Tensor]


def in_blocks(
    x: Float[Tensor, "*batch keys d"], size: int
) -> Float[Tensor, "*batch blocks size d"]:
    """Keys or values in blocks of consecutive ones; zeros fill the last.

    Source: chapter 31, eq-block-weight.
    """
    missing = -x.shape[-2] % size
    full = F.pad(x, (0, 0, 0, missing)) if missing else x  # to pad by 0 would copy
    return full.unflatten(-2, (-1, size))


def mean_scores(
    query: Float[Tensor, "*batch queries d_k"],
    blocks: Float[Tensor, "*batch blocks size d_k"],
) -> Float[Tensor, "*batch queries blocks"]:
    """The mean score of each block: log-sum-exp minus log(size) is at least this.

    Args:
        query: with the scale in it.
        blocks: the keys.

    Source: chapter 31, eq-mean-score; Lu et al. (2025).
    """
    return query @ blocks.mean(dim=-2).mT


def box_scores(
    query: Float[Tensor, "*batch queries d_k"],
    blocks: Float[Tensor, "*batch blocks size d_k"],
) -> Float[Tensor, "*batch queries blocks"]:
    """What no score of a block exceeds, by the least and largest number of each feature.

    Args:
        query: with the scale in it.
        blocks: the keys.

    Source: chapter 31, eq-box-score; Tang et al. (2024).
    """
    low, high = blocks.amin(dim=-2), blocks.amax(dim=-2)
    return query.clamp(min=0) @ high.mT + query.clamp(max=0) @ low.mT


def choose_blocks(
    scores: Float[Tensor, "*batch queries blocks"],
    mask: Float[Tensor, "*shared queries blocks size"],
    keep: int,
) -> Int[Tensor, "*batch queries kept"]:
    """The blocks that each query reads: those that it sees in part, then the best.

    Args:
        scores: of the blocks; ∞ is the largest number.
        mask: added to the scores of keys; -∞ hides one.
        keep: how many.

    Raises:
        ValueError: a query sees more blocks in part.

    Source: chapter 31, eq-chosen-output.
    """
    seen = mask > -torch.inf
    partly = seen.any(dim=-1) & ~seen.all(dim=-1)  # what is hidden in them must not decide
    scores = scores.clamp(max=torch.finfo(scores.dtype).max)  # ∞ beside -∞ is no number
    rank = (scores + mask.amax(dim=-1)).masked_fill(partly, torch.inf)
    keep = min(keep, rank.shape[-1])
    if (partly.sum(dim=-1) > keep).any():
        least = int(partly.sum(dim=-1).max())
        wanted = f"at least {least}, the blocks that a query sees in part"
        raise ValueError(f"keep: expected {wanted}, got {keep}")
    return rank.topk(keep, dim=-1).indices


def with_first(score: BlockScore) -> BlockScore:
    """A score by which the first block is chosen before all that are seen whole.

    Args:
        score: of blocks, as `box_scores`.

    Source: chapter 31, eq-chosen-output; Yuan et al. (2025).
    """

    def scored(query: Tensor, blocks: Tensor) -> Tensor:
        first = torch.tensor([0], device=query.device)
        return score(query, blocks).index_fill(-1, first, torch.inf)

    return scored


def take_blocks(
    blocks: Float[Tensor, "*batch blocks size d"],
    chosen: Int[Tensor, "*batch queries kept"],
) -> Float[Tensor, "*batch queries keys d"]:
    """The rows of the chosen blocks, for each query.

    Source: chapter 31, eq-chosen-output.
    """
    heads = blocks.reshape(-1, *blocks.shape[-3:])
    head = torch.arange(len(heads), device=blocks.device)[:, None, None]
    rows = heads[head, chosen.reshape(-1, *chosen.shape[-2:])]  # copies whole blocks
    rows = rows.flatten(-3, -2)
    return rows.reshape(*chosen.shape[:-1], *rows.shape[-2:])


def attend_chosen(
    query: Float[Tensor, "*batch queries d_k"],
    keys: Float[Tensor, "*batch blocks size d_k"],
    values: Float[Tensor, "*batch blocks size d_v"],
    mask: Float[Tensor, "*shared queries blocks size"],
    chosen: Int[Tensor, "*batch queries kept"],
) -> Float[Tensor, "*batch queries d_v"]:
    """Attention of each query to the keys of its blocks, and to no others.

    Source: chapter 31, eq-chosen-output.
    """
    mask = mask.expand(*chosen.shape[:-1], *mask.shape[-2:])
    mask = torch.take_along_dim(mask, chosen[..., None], dim=-2).flatten(-2)
    scores = (query[..., None, :] @ take_blocks(keys, chosen).mT).squeeze(-2) + mask
    weights = torch.softmax(scores, dim=-1)
    return (weights[..., None, :] @ take_blocks(values, chosen)).squeeze(-2)


class ChosenAttention(BaseAttention):
    """Attention in which a query reads the blocks of keys that promise most.

    With blocks enough for all keys it is scaled dot-product attention. The weights are
    never formed. What is hidden from a query decides nothing for it.

    Args:
        block: keys of a block; the first begins with key 0.
        keep: blocks that a query reads, among them those that it sees in part.
        score: `score(query, blocks)` of blocks, as `box_scores`; the query has the scale.
        causal: whether a query sees no later keys; bottom right, see `causal_mask`.
        scale: factor on the scores; `None` means 1/√d_k.

    Raises:
        TypeError, ValueError: block or keep below 1; a flag or a scale that is none; when
            it is called, a mask by which a query sees more than keep blocks in part, or a
            score's answer of another dtype or shape.

    Source: chapter 31, eq-chosen-output; Tang et al. (2024); Yuan et al. (2025).
    """

    def __init__(
        self,
        block: int = 16,
        keep: int = 16,
        score: BlockScore = box_scores,
        causal: bool = False,
        scale: float | Tensor | None = None,
    ) -> None:
        super().__init__()
        self.block, self.keep = require_count("block", block), require_count("keep", keep)
        self.score, self.causal = score, require_flag("causal", causal)
        self.scale = require_scale(scale)

    def read(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Float[Tensor, "*batch queries d_v"]:
        """What queries get that have the scale; the last of them sees every key."""
        added, empty = one_mask(query, key, mask, self.causal)
        if added is None:
            added = query.new_zeros(())
        added = added.expand(*added.shape[:-2], query.shape[-2], key.shape[-2])
        added = F.pad(added, (0, -key.shape[-2] % self.block), value=-torch.inf)
        added = added.unflatten(-1, (-1, self.block))
        keys, values = in_blocks(key, self.block), in_blocks(value, self.block)
        scores = self.score(query, keys)
        require_beside(query, "score", scores, (*query.shape[:-1], keys.shape[-3]))
        chosen = choose_blocks(scores, added, self.keep)
        output = attend_chosen(query, keys, values, added, chosen)
        return output if empty is None else output.masked_fill(empty, 0.0)

    def attend_without_weights(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> Tensor:
        """See `BaseAttention`; 64 queries at a time, since each takes keys of its own."""
        if key.shape[:-2] != query.shape[:-2]:
            key, value = repeat_shared(query, key, value)
        n, m, dtype = query.shape[-2], key.shape[-2], query.dtype
        wide = torch.promote_types(dtype, torch.float32)
        query, key, value = (x.to(wide) for x in (query, key, value))
        query = query * (query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        outputs = [value.new_zeros(*query.shape[:-2], 0, value.shape[-1])]
        for rows in row_blocks(n, 64):
            seen = max(m - n + rows.stop, 0) if self.causal else m  # no later key is read
            part, shown = query[..., rows, :], slice(0, seen)
            given = None if mask is None else mask_tile(mask, rows, shown)
            if seen == 0:
                outputs.append(value.new_zeros(*part.shape[:-1], value.shape[-1]))
            else:
                rest = key[..., shown, :], value[..., shown, :], given
                with unrounded(query.device):
                    outputs.append(self.read(part, *rest))
        return torch.cat(outputs, dim=-2).to(dtype)


def index_scores(
    query: Float[Tensor, "*batch heads queries d"],
    key: Float[Tensor, "*batch keys d"],
    weight: Float[Tensor, "*batch heads queries"],
) -> Float[Tensor, "*batch queries keys"]:
    """What an indexer says of each pair: how much the query wants the key.

    Args:
        query: of the indexer's heads.
        key: one for all heads.
        weight: of each head, for each query.

    Raises:
        TypeError, ValueError: a weight of another dtype, shape or device.

    Source: chapter 31, eq-index-score; DeepSeek-AI (2025).
    """
    require_beside(query, "weight", weight, query.shape[:-1])
    products = torch.relu(query @ key.unsqueeze(-3).mT)
    return (weight.unsqueeze(-1) * products).sum(dim=-3)


def indexer_loss(
    scores: Float[Tensor, "*batch queries keys"],
    weights: Float[Tensor, "*batch queries keys"],
) -> Float[Tensor, ""]:
    """How far the softmax of an indexer's scores is from attention's weights.

    The cross entropy, in nats, as a mean over the queries. The weights get no gradient.

    Args:
        scores: -∞ where a key is hidden.
        weights: of attention, with the sum 1 in each row.

    Raises:
        ValueError: weights of another shape.

    Source: chapter 31, eq-indexer-loss; DeepSeek-AI (2025).
    """
    require_beside(scores, "weights", weights, scores.shape)
    logs = torch.log_softmax(scores, dim=-1)
    wanted = weights.detach()
    return -(wanted * logs.masked_fill(wanted == 0, 0.0)).sum(dim=-1).mean()


def three_branches(
    query: Float[Tensor, "*batch tokens d_k"],
    key: Float[Tensor, "*batch tokens d_k"],
    value: Float[Tensor, "*batch tokens d_v"],
    gates: Float[Tensor, "*batch tokens 3"],
    block: int = 16,
    keep: int = 16,
    window: int = 64,
) -> Float[Tensor, "*batch tokens d_v"]:
    """Causal attention to means of blocks, to chosen blocks and to the newest keys.

    A query sees the mean of a block when all of it has been read; before the first, this
    branch gives 0.

    Args:
        gates: what each token takes of the three, in this order.
        block, keep: see `ChosenAttention`; blocks are chosen by their mean scores.
        window: how many keys the last branch sees, the token's own among them.

    Raises:
        TypeError, ValueError: gates of another dtype, shape or device; fewer queries than
            keys; a size below 1.

    Source: chapter 31, eq-three-branches; Yuan et al. (2025), with means for their network.
    """
    require_beside(query, "gates", gates, (*query.shape[:-1], 3))
    require_beside(query, "key", key, query.shape)
    chosen = ChosenAttention(block, keep, mean_scores, causal=True)
    near = ScaledDotProductAttention(causal=True, window=window)
    means, content = (in_blocks(x, block).mean(dim=-2) for x in (key, value))
    place = torch.arange(query.shape[-2], device=query.device)[:, None]
    whole = (torch.arange(means.shape[-2], device=query.device) + 1) * block <= place + 1
    coarse, _ = ScaledDotProductAttention()(query, means, content, whole)
    rows = coarse, chosen(query, key, value)[0], near(query, key, value)[0]
    return sum(gates[..., i, None] * row for i, row in enumerate(rows))
