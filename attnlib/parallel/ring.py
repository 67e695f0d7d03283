# Made from book/24_ring_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Ring attention: keys travel from rank to rank, states merge.

Derived in chapter 24, "Ring attention" (book/24_ring_attention.ipynb).
"""

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from attnlib.base import BaseAttention
from attnlib.checks import (
    as_autocast,
    broadcasts,
    positive_scale,
    refuse_bad_inputs,
    refuse_bad_mask,
    require_flag,
    require_scale,
    require_window,
)
from attnlib.flash.operators import flash_backward, flash_forward
from attnlib.flash.tiles import LOG2E, mask_tile
from attnlib.masks import Mask
from attnlib.online_softmax import add_sink, merge_outputs
from attnlib.parallel.collectives import (
    agree_after,
    all_gather,
    post_shift,
    rank_and_size,
    refuse_other_device,
)
from attnlib.parallel.places import RingPlan, Rule, hops_needed, shard_positions

Places = Tensor | tuple[Tensor, Tensor]  # a number for each token; or for queries and keys


class RingFunction(Function):
    """Attention whose keys travel: output and log-sum-exp, both in float32 at least.

    Source: chapter 24, eq-ring, eq-ring-gradients; Liu et al. (2023).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        plan: RingPlan,
    ) -> tuple[Tensor, Tensor]:
        """Merges the state of every tile into that of its queries."""
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*query.shape[:-1], value.shape[-1])
        output = query.new_zeros(shape, dtype=wide)
        lse = query.new_full(shape[:-1], -torch.inf, dtype=wide)

        def attend(k: Tensor, v: Tensor, rows: slice, cols: slice, seen: Any) -> Any:
            tile = (query[..., rows, :], k[..., cols, :], v[..., cols, :])
            tile = (*(x.to(wide) for x in tile), seen)
            return flash_forward(*tile, False, plan.scale, None)[:2]

        k, v = key, value
        for step in range(plan.hops + 1):
            # Posted first: the next keys travel while these are used.
            arrived = post_shift((k, v), 1, plan.group) if step < plan.hops else None
            for rows, cols, seen, _ in plan.tiles(step, mask):
                old = output[..., rows, :], lse[..., rows]
                new = merge_outputs(old, attend(k, v, rows, cols, seen))
                output[..., rows, :], lse[..., rows] = new
            if arrived is not None:
                k, v = arrived()
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, mask, output, lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor, grad_lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The keys travel again, and the gradients of the keys with them, then home."""
        query, key, value, mask, output, lse = ctx.saved_tensors
        plan, wide = ctx.plan, output.dtype
        mask_too = ctx.needs_input_grad[3]
        grad_q = torch.zeros_like(query, dtype=wide)
        grad_mask = torch.zeros_like(mask) if mask_too else None
        # The level of the weights is final: no tile has to know of the others.
        top = (lse * LOG2E).clamp(min=torch.finfo(wide).min)
        one = torch.ones_like(top)

        def gradients(
            k: Tensor, v: Tensor, rows: slice, cols: slice, seen: Any, positions: Tensor
        ) -> list[Tensor]:
            tile = (query[..., rows, :], k[..., cols, :], v[..., cols, :])
            kept = (output[..., rows, :], top[..., rows], one[..., rows])
            came = (grad_output[..., rows, :], grad_lse[..., rows])
            inputs = (*(x.to(wide) for x in tile), seen, *kept, *came, mask_too)
            *parts, part_mask = flash_backward(*inputs, False, plan.scale, None)
            if mask_too:
                add_to_mask(grad_mask, part_mask, rows, positions)
            return parts

        (k, v), added = (key, value), None
        for step in range(plan.hops + 1):
            arrived = post_shift((k, v), 1, plan.group) if step < plan.hops else None
            grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (key, value))
            for rows, cols, *where in plan.tiles(step, mask):
                parts = gradients(k, v, rows, cols, *where)
                grad_q[..., rows, :] += parts[0]
                grad_k[..., cols, :] += parts[1]
                grad_v[..., cols, :] += parts[2]
            if added is not None:  # what the ranks before have added for these keys
                for total, x in zip((grad_k, grad_v), added(), strict=True):
                    total += x
            if arrived is not None:
                added = post_shift((grad_k, grad_v), 1, plan.group)
                k, v = arrived()
        if plan.hops:  # home, to the rank whose keys they are
            grad_k, grad_v = post_shift((grad_k, grad_v), -plan.hops, plan.group)()
        grads = (grad_q, grad_k, grad_v)
        return *(x.to(query.dtype) for x in grads), grad_mask, None


def add_to_mask(
    total: Tensor, part: Tensor, rows: slice, positions: Int[Tensor, " keys"]
) -> None:
    """Adds the gradient of a mask's part for a tile to that of the whole mask.

    Source: chapter 24, eq-ring-gradients.
    """
    where = mask_tile(total, rows, slice(None))
    if where.dim() > 0 and where.shape[-1] > 1:
        part = part.sum_to_size(*where.shape[:-1], len(positions))
        where.index_add_(-1, positions.to(where.device), part.to(where.dtype))
    else:
        where += part.sum_to_size(where.shape)


def refuse_bad_shard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    sink: Tensor | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Refuses a shard that can't be attended to.

    Raises:
        TypeError, ValueError: see `refuse_bad_inputs`.

    Source: chapter 24; the contract, appendix A.
    """
    size = rank_and_size(group)[1]
    refuse_bad_inputs(query, key, value, enable_gqa=True)
    if size > 1:
        refuse_other_device("query", query, group)
    if mask is not None:
        refuse_bad_mask(mask, query, keys=size * key.shape[-2])
    if sink is None:
        return
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        got = sink.dtype if isinstance(sink, Tensor) else repr(sink)
        raise TypeError(f"sink: expected a floating-point tensor, got {got}")
    if not broadcasts(sink.shape, query.shape[:-1]):
        expected = f"expected a shape that broadcasts to {tuple(query.shape[:-1])}"
        raise ValueError(f"sink: {expected}, got {tuple(sink.shape)}")


def sharing(query: Tensor, key: Tensor) -> int:
    """How many heads of queries share one of keys; 1 if they have none or do not fit.

    Source: chapter 24; chapter 18, eq-grouped-heads.
    """
    heads, kv_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key))
    fits = query.dim() == key.dim() and kv_heads and heads % kv_heads == 0
    return max(1, heads // kv_heads) if fits else 1


def refuse_bad_places(name: str, given: Any, tokens: tuple[int, int]) -> None:
    """Refuses what is not one whole number for each of the queries and of the keys.

    Args:
        name: "positions" or "documents".
        given: `None`; one number for each token of this rank; or two such rows, for the
            queries and for the keys.
        tokens: how many queries and keys this rank has.

    Raises:
        TypeError: not whole numbers.
        ValueError: not one number for each token.

    Source: chapter 24, eq-rule.
    """
    if given is None:
        return
    pair = both(given)
    if len(pair) != 2:
        raise ValueError(f"{name}: expected one tensor or two, got {len(pair)}")
    for row, what, count in zip(pair, ("query", "key"), tokens, strict=True):
        whole = isinstance(row, Tensor) and row.dtype in (torch.int64, torch.int32)
        if not whole:
            got = row.dtype if isinstance(row, Tensor) else repr(row)
            raise TypeError(f"{name}: expected a tensor of int64 or int32, got {got}")
        if row.shape != (count,):
            raise ValueError(
                f"{name}: expected shape ({count},), one number for each token of {what}, "
                f"got {tuple(row.shape)}"
            )


def refuse_bad_options(
    places: dict[str, Any], tokens: tuple[int, int], causal: Any, window: Any, scale: Any
) -> None:
    """Refuses positions, documents, flags, windows and scales that are none.

    Raises:
        TypeError, ValueError: see `ring_attention`.

    Source: chapter 24, eq-rule.
    """
    require_flag("causal", causal)
    require_window(window)
    require_scale(scale)
    for name, given in places.items():
        refuse_bad_places(name, given, tokens)


def both(given: Places) -> tuple[Tensor, Tensor]:
    """A row for the queries and one for the keys, which may be the same.

    Source: chapter 24, eq-rule.
    """
    return given if isinstance(given, tuple | list) else (given, given)


def gather_places(
    positions: Places | None,
    documents: Places | None,
    tokens: tuple[int, int],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Position and document of the queries, and of the keys, of all ranks: (P, 2, tokens).

    Source: chapter 24, eq-rule.
    """
    rank, size = rank_and_size(group)
    plain = [torch.arange(size * n, device="cpu").view(size, -1) for n in tokens]
    plain[0] += size * (tokens[1] - tokens[0])  # the last query is the last token
    if positions is None and documents is None:
        return [torch.stack([x, torch.zeros_like(x)], dim=1) for x in plain]
    at = [x[rank] for x in plain] if positions is None else both(positions)
    of = [torch.zeros_like(x) for x in at] if documents is None else both(documents)
    pairs = zip(at, of, strict=True)
    mine = torch.cat([torch.stack([y.to(device).long() for y in x]) for x in pairs], dim=1)
    every = mine[None] if size == 1 else all_gather(mine[None], 0, group)
    return list(every.cpu().split(tokens, dim=-1))


def refuse_bad_keys(
    mask: Mask | None, rule: Rule, keys: Int[Tensor, "ranks 2 keys"]
) -> None:
    """Refuses keys whose places can't be those in the whole text.

    Raises:
        ValueError: the rule asks for positions, and two keys of a document have the same;
            or there is a mask, whose columns are the text, and the positions of all keys
            are not 0, 1, ... each once.

    Source: chapter 24, eq-rule.
    """
    at, of = (x.flatten() - x.min() if x.numel() else x.flatten() for x in keys.unbind(1))
    places = keys[:, 0].flatten().sort().values
    if mask is not None and not torch.equal(
        places, torch.arange(len(places), device="cpu")
    ):
        raise ValueError(
            f"positions: expected each of 0 to {len(places) - 1} once among the keys of "
            "all ranks, since they are columns of mask"
        )
    pairs = (of * (len(at) and 1 + at.max()) + at).sort().values
    if rule != Rule() and (pairs[1:] == pairs[:-1]).any():
        raise ValueError(
            "positions: expected each place of a document once among the keys of all "
            "ranks, got one twice; they are places in the whole text, not in the shard"
        )


def facts_of(**given: object) -> list[str]:
    """What all ranks must have alike: of tensors, dtype, shape and need of a gradient.

    Source: chapter 24.
    """
    told = []
    for name, x in given.items():
        fact = "given" if isinstance(x, tuple | list) else x
        fact = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else fact
        told.append(f"{name} = {fact}")
    travel = [given[name] for name in ("query", "key", "value", "mask")]
    needed = [isinstance(x, Tensor) and x.requires_grad for x in travel]
    return [*told, f"requires_grad = {torch.is_grad_enabled() and any(needed)}"]


def fold_heads(query: Tensor, heads: int) -> Tensor:
    """Heads that share keys as more rows of one head.

    Source: chapter 24; chapter 18, eq-grouped-heads.
    """
    return query if heads == 1 else query.unflatten(-3, (-1, heads)).flatten(-3, -2)


def fold_mask(mask: Mask | None, query: Tensor, heads: int) -> Mask | None:
    """The mask for what `fold_heads` returns.

    Source: chapter 24; chapter 18, eq-grouped-heads.
    """
    if mask is None or heads == 1 or mask.dim() < 2:
        return mask
    mask = mask[None] if mask.dim() == 2 else mask
    if mask.shape[-3] == 1 == mask.shape[-2]:
        return mask
    mask = mask.unflatten(-3, (-1, 1 if mask.shape[-3] == 1 else heads))
    return mask.expand(*mask.shape[:-3], heads, query.shape[-2], -1).flatten(-3, -2)


def ring_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*shared keys d_k"],
    value: Float[Tensor, "*shared keys d_v"],
    positions: Places | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Places | None = None,
    sink: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    return_lse: bool = False,
) -> (
    Float[Tensor, "*batch queries d_v"]
    | tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries"]]
):
    """Attention of a text that is spread over ranks, each of which calls it with its part.

    The output, and every gradient, are those of `flash_attention` for the whole text, for
    the tokens of this rank. Nobody holds more than a few shards of keys, and never the
    scores. Outside of a process group it is attention on one rank.

    All ranks have to go backward: one without a loss takes `(output * 0).sum()`.

    Args:
        query: this rank's queries (..., N, d_k); all shapes are the same on all ranks.
        key: its keys (..., M, d_k); as many heads as query, or a divisor of that, and
            neighboring heads of query then share one.
        value: its values (..., M, d_v), leading dimensions of key.
        positions: the places of its tokens in the whole text, whole numbers (N,), or two
            such rows, for the queries and the keys; see `shard_positions`. `None`: the
            ranks hold one piece after the other, and the last query is the last token.
        causal: a query sees the keys up to its own position only.
        window: it sees those less than so many positions away only.
        documents: the number of the document of each token, likewise; a query sees the
            keys of its own only. `None`: all belong together.
        sink: a score without a key, see `add_sink`; its gradient is this rank's part.
        mask: this rank's queries against the whole text, broadcasts to (..., N, P · M):
            column p is for the key at position p. Composes with all the others.
        scale: factor on the scores; `None` means 1/√d_k.
        group: the ranks; `None` means all processes.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        Output (..., N, d_v), and on request the log-sum-exp (..., N), in float32 at least.

    Raises:
        TypeError, ValueError: what one rank refuses, or the ranks disagree about; raised on
            every one of them.

    Source: chapter 24, eq-ring, eq-ring-gradients, eq-rule; Liu et al. (2023).
    """
    query, key, value, mask = as_autocast(query, key, value, mask)
    rank = rank_and_size(group)[0]

    given = {"query": query, "key": key, "value": value, "sink": sink, "mask": mask}
    places = {"positions": positions, "documents": documents}
    options = {"causal": causal, "window": window, "scale": scale}

    def check() -> list[str]:
        refuse_bad_shard(query, key, value, mask, sink, group)
        refuse_bad_options(places, (query.shape[-2], key.shape[-2]), **options)
        return facts_of(**given, **places, **options)

    agree_after("ring_attention", check, group)
    tokens, heads = (query.shape[-2], key.shape[-2]), sharing(query, key)
    queries, keys = gather_places(positions, documents, tokens, query.device, group)
    rule = Rule(causal, window)
    if positions is not None:
        refuse_bad_keys(mask, rule, keys)
    rows, hops = queries[rank].repeat(1, heads), hops_needed(rule, queries, keys)
    query, scale = positive_scale(query, scale)
    plan = RingPlan(rule, rows, keys, hops, rank, group, scale, query.device)
    mask = fold_mask(mask, query, heads)
    output, lse = RingFunction.apply(fold_heads(query, heads), key, value, mask, plan)
    lse = lse.view(query.shape[:-1])
    output = output.view(*lse.shape, value.shape[-1])
    if sink is not None:
        output, lse = add_sink(output, lse, sink)
    return (output.to(query.dtype), lse) if return_lse else output.to(query.dtype)


class WithGroup:
    """What an attention of several ranks has besides: a group that copies share.

    What fits and what does not, the ranks find out together, so that none waits for one
    that has stopped: such an attention does the whole in its `forward`.

    Source: chapter 24.
    """

    group: dist.ProcessGroup | None
    order: str = "contiguous"

    def text_of_ranks(self, tokens: int) -> tuple[Int[Tensor, " tokens"], int] | None:
        """Where this rank's tokens stand in the text, and how many all ranks have of it.

        `None` on one rank. `MultiHeadAttention` and `LanguageModel` ask for it.
        """
        rank, size = rank_and_size(self.group)
        if size == 1:
            return None
        whole = size * tokens
        return shard_positions(whole, size, rank, self.order), whole

    def refuse_shared(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuses, on every rank, heads that share keys: for `enable_gqa=False`.

        Raises:
            TypeError, ValueError: see `refuse_bad_inputs`.
        """

        def check() -> list[object]:
            refuse_bad_inputs(query, key, value)
            return []

        agree_after("enable_gqa=False", check, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WithGroup":
        """A copy, as for each block of a model, of everything but the group."""
        memo[id(self.group)] = self.group
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(deepcopy(self.__dict__, memo))
        return twin


class RingAttention(WithGroup, BaseAttention):
    """`ring_attention` as an attention to plug in: the text is spread over the ranks.

    Outside of a process group, and on one rank, it is attention as any other. In a
    `LanguageModel`, or a layer with rotary positions, it tells where its tokens stand.

    Args:
        causal: let each query see only keys up to its own position; composes with any mask.
        scale: factor on the scores; `None` means 1/√d_k.
        window: let each query see only keys less than so many positions away.
        order: which tokens of the text a rank holds, see `shard_positions`; if there are
            fewer queries than keys, they are the last tokens, shared out in this order.
        group: the ranks; `None` means all processes.

    Raises:
        TypeError: causal is not a truth value, or a wrong window.
        ValueError: an unknown order, or a window below 1.

    Source: chapter 24; Liu et al. (2023).
    """

    def __init__(
        self,
        causal: bool = False,
        scale: float | None = None,
        *,
        window: int | None = None,
        order: str = "contiguous",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        shard_positions(0, 1, 0, order)
        self.causal, self.scale = require_flag("causal", causal), require_scale(scale)
        self.window, self.order, self.group = require_window(window), order, group

    def positions(self, queries: int, keys: int) -> tuple[Tensor, Tensor] | None:
        """Where this rank's queries and keys stand in the whole text."""
        rank, size = rank_and_size(self.group)
        if self.order == "contiguous" or size == 1:
            return None
        mine, theirs = (
            shard_positions(size * count, size, rank, self.order)
            for count in (queries, keys)
        )
        return mine + size * (keys - queries), theirs

    def forward(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None = None,
        need_weights: bool = True,
        enable_gqa: bool = True,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], None]:
        """Output (..., N, d_v) of this rank's queries, and `None`; see `ring_attention`."""
        if not enable_gqa:
            self.refuse_shared(query, key, value)
        shapes, places = [getattr(x, "shape", ()) for x in (query, key)], None
        if min(map(len, shapes)) > 1:  # what is not so is refused below
            places = self.positions(shapes[0][-2], shapes[1][-2])
        options = {"causal": self.causal, "window": self.window, "scale": self.scale}
        options |= {"mask": mask, "group": self.group}
        return ring_attention(query, key, value, places, **options), None
