# Made from book/25_heads_layers_copies.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Layers that are split by columns and rows, and models whose parameters are dealt out.

It is called on each rank of a group of `torch.distributed`, by all of them.

Derived in chapter 25, "Heads, layers, copies" (book/25_heads_layers_copies.ipynb).
"""

import math
import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
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

from attnlib.feed_forward import FeedForwardNetwork
from attnlib.parallel.collectives import agree_after, world
from attnlib.parallel.heads import Group
from attnlib.projection import Projection
from attnlib.transformer import LanguageModel


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
                dealt = nn.Parameter(dealt, requires_grad=parameter.requires_grad)
                layer.register_parameter(key, dealt)

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
    count = require_projection("module", module).W.shape[1 if what == "columns" else 0]
    if count % mesh.size():
        raise ValueError(
            f"module: expected a number of {what} that {mesh.size()} ranks divide, "
            f"got {count}"
        )


def require_projection(name: str, module: nn.Module) -> Projection:
    """Returns a projection whose W is a parameter, which can be dealt out.

    Raises:
        TypeError: another module, as one around a projection, or a W made of others.

    Source: chapter 25.
    """
    if not isinstance(module, Projection):
        got = type(module).__name__
        raise TypeError(f"{name}: expected a Projection, got a {got}")
    if "W" not in dict(module.named_parameters(recurse=False)):
        raise TypeError(f"{name}: expected a Projection whose W is a parameter")
    return module


def split_layers(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Deals out the heads and the hidden features of each block to the ranks of a mesh.

    Args:
        model: the same on each rank; it is changed, and rank 0's weights are taken. Its
            dropout is 0.
        mesh: of one dimension, with P ranks.

    Returns:
        The model. All ranks give it the same tokens and get the same logits. An optimizer
        is made afterwards: the parameters are others. Its gradients lie on one mesh or
        another, which `torch.nn.utils.clip_grad_norm_` refuses: see `clip_gradients`.

    Raises:
        ValueError: on every rank: not a `LanguageModel`, or with another feed-forward
            network or another layer in place of a projection, with dropout or a list of
            heads; P does not divide the heads, those of keys or the hidden features; or
            the ranks' models differ in shape.

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
    broadcast_first(model, mesh)
    return model


def broadcast_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all ranks of a mesh the weights of its first, but for what is split over it.

    Source: chapter 25.
    """
    for x in model.parameters():
        if not isinstance(x, DTensor):
            dist.broadcast(x.data, group=mesh.get_group(), group_src=0)
        elif x.device_mesh != mesh:
            dist.broadcast(x.to_local(), group=mesh.get_group(), group_src=0)


def refuse_other_model(model: nn.Module) -> list[object]:
    """Refuses what is no `LanguageModel`; returns what all ranks must share of it.

    Source: chapter 25.
    """
    if not isinstance(model, LanguageModel):
        got = type(model).__name__
        raise TypeError(f"model: expected a LanguageModel, got a {got}")
    learned = [
        f"{name} {tuple(x.shape)} {x.dtype}{' frozen' * (not x.requires_grad)}"
        for name, x in model.named_parameters()
    ]
    return [*learned, re.sub(r" at 0x\w+", "", str(model))]  # a group has another address


def refuse_unsplit_block(block: nn.Module, ranks: int) -> None:
    """Refuses a block whose heads or hidden features can't be dealt out.

    Source: chapter 25.
    """
    attention, network = block.attention, block.feed_forward
    if not isinstance(network, FeedForwardNetwork):
        got = type(network).__name__
        raise TypeError(f"model: expected blocks with a FeedForwardNetwork, got a {got}")
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        require_projection(f"model: attention.{name}", getattr(attention, name))
    for name in ("linear_1", "linear_2"):
        require_projection(f"model: feed_forward.{name}", getattr(network, name))
    counts = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
    for name, count in (counts | {"d_ff": network.linear_1.W.shape[1]}).items():
        if count % ranks:
            raise ValueError(f"{name}: expected a multiple of {ranks} ranks, got {count}")
    if ranks == 1:
        return
    if isinstance(attention.attention, nn.ModuleList):
        raise ValueError("model: expected one attention for all heads, got a list")
    if any(True for _ in attention.attention.parameters()):
        got = type(attention.attention).__name__
        raise ValueError(f"model: expected an attention without parameters, got a {got}")
    dropouts = block.dropout, network.dropout, getattr(attention.attention, "dropout", 0)
    if any(dropouts):
        raise ValueError(f"dropout: expected 0, got {max(dropouts)}")


def share_copies(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Deals out parameters, gradients and optimizer state of copies: PyTorch's FSDP2.

    Each rank keeps a part of every parameter. A block gathers its own before it computes;
    after the backward pass its gradients are averaged over the ranks, and each rank keeps
    that of its part.

    Args:
        model: a `LanguageModel`, perhaps after `split_layers`; it is changed, and rank 0's
            weights are taken. An optimizer is made afterwards: the parameters are others.
        mesh: of one dimension: all ranks that have a copy and texts, or parts of texts, of
            their own.

    Source: chapter 25, eq-weighted-mean; Zhao et al. (2023).
    """
    agree_after("share_copies", lambda: refuse_other_model(model), mesh.get_group())
    broadcast_first(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def clip_gradients(model: nn.Module, longest: int | float) -> float:
    """Shortens the gradient of the whole model where it is too long; on all ranks alike.

    What is dealt out is added up over its ranks, what is whole on each counts once. A
    length that is not finite stays, and so do the gradients.

    Args:
        model: after backward; dealt out by `split_layers`, `share_copies`, both or none.
        longest: the length that the gradient may have, above 0.

    Returns:
        The length that it had.

    Raises:
        ValueError: longest is not a positive number.

    Source: chapter 25, exercise 25.3.
    """
    if not (isinstance(longest, int | float) and longest > 0):
        raise ValueError(f"longest: expected a positive number, got {longest!r}")
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    squares: dict[object, Tensor] = {}  # one collective for each mesh
    for gradient in gradients:
        mesh, own = getattr(gradient, "device_mesh", None), gradient.detach().square().sum()
        squares[mesh] = squares[mesh] + own if mesh in squares else own
    whole = (x.full_tensor() if isinstance(x, DTensor) else x for x in squares.values())
    length = float(sum(whole)) ** 0.5
    if longest < length < math.inf:
        for gradient in gradients:
            gradient.detach().mul_(longest / length)
    return length


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
    count = torch.tensor(losses.numel(), dtype=torch.float64, device=losses.device)
    sums = torch.stack([losses.detach().double().sum(), count])
    dist.all_reduce(sums, group=group)
    total, tokens = sums.unbind()
    if not tokens:
        raise ValueError("losses: expected a token on some rank, got none")
    loss = (losses * (ranks / tokens.item())).sum()
    return loss, (total / tokens).to(losses.dtype)
