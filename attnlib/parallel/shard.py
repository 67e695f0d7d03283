# Made from book/25_heads_layers_copies.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Heads, layers, copies: attention that is split by heads, layers that are split by columns
and rows, and models whose parameters and texts are dealt out.

It is called on each rank of a group of `torch.distributed`, by all of them.

Derived in chapter 25, "Heads, layers, copies" (book/25_heads_layers_copies.ipynb).
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    parallelize_module,
)

from attnlib.base import BaseAttention
from attnlib.checks import require_flag, require_window
from attnlib.feed_forward import FeedForwardNetwork
from attnlib.flash.attention import flash_attention
from attnlib.masks import Mask
from attnlib.multi_head import repeat_heads
from attnlib.parallel.collectives import agree, all_to_all, world
from attnlib.projection import Projection
from attnlib.transformer import LanguageModel

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


class SplitColumns(ParallelStyle):
    """A `Projection` of which each rank has some columns of W and as many entries of b.

    The input is the same on each rank; the output is this rank's features.

    Raises:
        TypeError: the module is not a `Projection`.
        ValueError: a number of columns that the ranks do not divide.

    Source: chapter 25, eq-split-columns; Shoeybi et al. (2019), section 3.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        refuse_unsplittable(module, device_mesh, "columns")

        def take(inputs: tuple[Tensor, ...]) -> Tensor:
            return whole_on(inputs[0], device_mesh, Replicate())

        return split_projection(module, device_mesh, Shard(1), Shard(0), take, Shard(-1))


class SplitRows(ParallelStyle):
    """A `Projection` of which each rank has some rows of W; b is added once.

    The input is this rank's features; the outputs are added up, by one all-reduce, and are
    the same on each rank.

    Raises:
        TypeError: the module is not a `Projection`.
        ValueError: a number of rows that the ranks do not divide.

    Source: chapter 25, eq-split-rows; Shoeybi et al. (2019), section 3.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        refuse_unsplittable(module, device_mesh, "rows")

        def take(inputs: tuple[Tensor, ...]) -> Tensor:
            return whole_on(inputs[0], device_mesh, Shard(-1))

        return split_projection(
            module, device_mesh, Shard(0), Replicate(), take, Replicate()
        )


def whole_on(x: Tensor, mesh: DeviceMesh, placement: Shard | Replicate) -> DTensor:
    """A rank's part as the whole, unless it is one already.

    Source: chapter 25.
    """
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def split_projection(
    module: Projection,
    mesh: DeviceMesh,
    of_W: Shard,
    of_b: Shard | Replicate,
    take: Callable[[tuple[Tensor, ...]], Tensor],
    give: Shard | Replicate,
) -> nn.Module:
    """The projection with its parameters dealt out; see `SplitColumns` and `SplitRows`.

    Source: chapter 25, eq-split-columns, eq-split-rows.
    """

    def partition(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
        for key, placement in (("W", of_W), ("b", of_b)):
            parameter = getattr(layer, key)
            if parameter is not None:
                dealt = distribute_tensor(parameter.data, mesh, [placement])
                layer.register_parameter(key, nn.Parameter(dealt))

    return distribute_module(
        module,
        mesh,
        partition,
        lambda layer, inputs, mesh: take(inputs),
        lambda layer, output, mesh: output.redistribute(mesh, [give]).to_local(),
    )


def refuse_unsplittable(module: nn.Module, mesh: DeviceMesh, what: str) -> None:
    """Refuses what is no projection, or one that can't be dealt out evenly.

    Source: chapter 25.
    """
    if not isinstance(module, Projection):
        raise TypeError(f"module: expected a Projection, got a {type(module).__name__}")
    count = module.W.shape[1 if what == "columns" else 0]
    if count % mesh.size():
        raise ValueError(
            f"module: expected a number of {what} that {mesh.size()} ranks divide, "
            f"got {count}"
        )


def split_layers(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Deals out the heads and the hidden features of each block to the ranks of a mesh.

    Args:
        model: the same on each rank; it is changed, and rank 0's weights are taken. Its
            dropout is 0.
        mesh: of one dimension, with P ranks.

    Returns:
        The model. All ranks give it the same tokens and get the same logits.

    Raises:
        ValueError: on every rank: not a `LanguageModel`, or with another feed-forward
            network, with dropout or a list of heads; P does not divide the heads, those of
            keys or the hidden features; or the ranks' models differ in shape.

    Source: chapter 25, eq-split-columns, eq-split-rows; Shoeybi et al. (2019).
    """

    def check() -> list[object]:
        shapes = refuse_other_model(model)
        for block in model.blocks:
            refuse_unsplit_block(block, mesh.size())
        return shapes

    agree_after("split_layers", check, mesh.get_group())
    if mesh.size() == 1:
        return model
    same = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    plan = {part: PrepareModuleInput(**same) for part in ("attention", "feed_forward")}
    plan |= {f"attention.{name}_proj": SplitColumns() for name in "qkv"}
    plan |= {"attention.out_proj": SplitRows()}
    plan |= {"feed_forward.linear_1": SplitColumns(), "feed_forward.linear_2": SplitRows()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
        block.attention.num_heads //= mesh.size()  # of this rank
        block.attention.num_kv_heads //= mesh.size()
    for parameter in model.parameters():  # of those that stay whole, rank 0's
        if not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, group=mesh.get_group(), group_src=0)
    return model


def refuse_other_model(model: nn.Module) -> list[object]:
    """Refuses what is no `LanguageModel`; returns the names and shapes of its parameters.

    Source: chapter 25.
    """
    if not isinstance(model, LanguageModel):
        got = type(model).__name__
        raise TypeError(f"model: expected a LanguageModel, got a {got}")
    return [(name, *x.shape, x.dtype) for name, x in model.named_parameters()]


def refuse_unsplit_block(block: nn.Module, ranks: int) -> None:
    """Refuses a block whose heads or hidden features can't be dealt out.

    Source: chapter 25.
    """
    attention, network = block.attention, block.feed_forward
    if not isinstance(network, FeedForwardNetwork):
        got = type(network).__name__
        raise TypeError(f"model: expected blocks with a FeedForwardNetwork, got a {got}")
    counts = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
    for name, count in (counts | {"d_ff": network.linear_1.out_features}).items():
        if count % ranks:
            raise ValueError(f"{name}: expected a multiple of {ranks} ranks, got {count}")
    if ranks > 1 and isinstance(attention.attention, nn.ModuleList):
        raise ValueError("model: expected one attention for all heads, got a list")
    if ranks > 1 and (block.dropout or network.dropout):
        raise ValueError(f"dropout: expected 0, got {block.dropout or network.dropout}")


def share_copies(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Deals out parameters, gradients and optimizer state of copies: PyTorch's FSDP2.

    Each rank keeps a part of every parameter. A block gathers its own before it computes;
    after the backward pass its gradients are averaged over the ranks, and each rank keeps
    that of its part.

    Args:
        model: a `LanguageModel`, perhaps after `split_layers`; it is changed.
        mesh: of one dimension: all ranks that have a copy and texts, or parts of texts, of
            their own.

    Source: chapter 25, eq-weighted-mean; Zhao et al. (2023).
    """
    agree_after("share_copies", lambda: refuse_other_model(model), mesh.get_group())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def token_mean(
    losses: Float[Tensor, "..."], group: Group = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """What a rank differentiates if gradients are averaged, and the mean over all tokens.

    Args:
        losses: of this rank's tokens, of any number, also none.
        group: the ranks whose gradients are averaged; `None` means all.

    Returns:
        Loss whose gradients, averaged over the ranks, are those of the mean over all
        tokens of all ranks; and this mean, without a gradient.

    Raises:
        ValueError: no rank has a token.

    Source: chapter 25, eq-weighted-mean.
    """
    _, _, ranks = world(group)

    def check() -> list[object]:
        if not isinstance(losses, Tensor) or not losses.is_floating_point():
            got = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
            raise TypeError(f"losses: expected a floating-point tensor, got {got}")
        return [losses.dtype]

    agree_after("token_mean", check, group)
    sums = torch.stack([losses.detach().sum(), losses.new_tensor(losses.numel())])
    sums = sums.double()
    dist.all_reduce(sums, group=group)
    total, tokens = sums.unbind()
    if not tokens:
        raise ValueError("losses: expected a token on some rank, got none")
    return losses.sum() * (ranks / tokens.item()), (total / tokens).to(losses.dtype)


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: int = 2,
) -> Path:
    """Writes model and optimizer, each rank its part, so that a crash leaves none halved.

    The parts go to a folder of another name, which gets its own, step-…, by one renaming
    when all of them are on the disk.

    Args:
        folder: where checkpoints are kept, the same for all ranks.
        step: how many steps have been done.
        model, optimizer: as they are on this rank.
        keep: how many of the last checkpoints to keep.

    Returns:
        The checkpoint's folder.

    Source: chapter 25; the documentation of torch.distributed.checkpoint.
    """
    agree("save_checkpoint", [step, keep])
    folder, first = Path(folder), dist.get_rank() == 0
    partial, done = folder / f"partial-{step:08d}", folder / f"step-{step:08d}"
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        for cut_off in folder.glob("partial-*"):
            shutil.rmtree(cut_off)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=partial)
    dist.barrier()  # all parts are written
    if first:
        shutil.rmtree(done, ignore_errors=True)  # if this step is written once more
        os.replace(partial, done)
        flush(folder)
        for old in finished(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return done


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Reads the last whole checkpoint into model and optimizer; returns its step, or 0.

    The ranks may be others, and more or fewer, than those that wrote it.

    Source: chapter 25; the documentation of torch.distributed.checkpoint.
    """
    found = [finished(folder)[-1:] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    if not found[0]:
        return 0
    (last,) = found[0]
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=last)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(last.name.removeprefix("step-"))


def finished(folder: str | Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first.

    Source: chapter 25.
    """
    found = sorted(Path(folder).glob("step-*"))
    return [path for path in found if (path / ".metadata").is_file()]


def flush(folder: Path) -> None:
    """Waits until a folder's new names are on the disk, where the system can do so.

    Source: chapter 25.
    """
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
