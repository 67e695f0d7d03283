# Made from book/23_many_processes.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Collectives: what every rank calls and all of them complete, with their gradients.

Rank r of P holds a tensor of its own. The loss is the sum of the ranks' losses, so that the
pairing of a list of tensors, one a rank, is the sum of the ranks' pairings; the backward of
each collective is its transpose, which is a collective again. Every function checks first
that the ranks ask for the same, and refuses on all of them where they do not.

Derived in chapter 23, "Many processes" (book/23_many_processes.ipynb).
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


def world(group: ProcessGroup | None = None) -> tuple[ProcessGroup, int, int]:
    """The group, this rank in it, and its number of ranks.

    Raises:
        RuntimeError: there is no group.
        ValueError: this rank is not in it.

    Source: chapter 23.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "group: no process group; call this in attnlib.parallel.run, or under torchrun "
            "after torch.distributed.init_process_group"
        )
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group: rank {dist.get_rank()} is not in the group")
    return group, rank, dist.get_world_size(group)


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """Rank and number of ranks; (0, 1) where no process group was made.

    Raises:
        ValueError: this process does not belong to the group.

    Source: chapter 23.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return world(group)[1:]


def agree(
    what: str,
    facts: Sequence[object],
    group: ProcessGroup | None = None,
    problem: str = "",
) -> None:
    """Raises the same error on every rank, unless all ask for the same without a problem.

    Args:
        what: the operation, for the message.
        facts: what must be equal on all ranks; compared as text.
        problem: what this rank has found wrong by itself, or nothing.

    Raises:
        ValueError: the ranks disagree, or some rank has a problem; it says which and what.

    Two numbers of each rank travel; the texts follow only where something is wrong.

    Source: chapter 23.
    """
    group, _, ranks = world(group)
    mine = f"{what}({', '.join(map(str, facts))})"
    code = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7], "big")
    device = "cpu" if "gloo" in str(dist.get_backend(group)) else "cuda"
    own = torch.tensor([code, bool(problem)], device=device)
    codes = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(codes, own, group)
    if all(torch.equal(other, codes[0]) for other in codes) and not problem:
        return
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, (mine, problem), group)
    if any(problem for _, problem in said):
        lines = [f"rank {r}: {problem}" for r, (_, problem) in enumerate(said) if problem]
        if len(lines) == ranks and len({problem for _, problem in said}) == 1:
            lines = [said[0][1]]
        raise ValueError(f"{what}: " + "; ".join(lines))
    lines = [f"rank {r} has {text}" for r, (text, _) in enumerate(said)]
    raise ValueError(f"{what}: the ranks disagree: " + "; ".join(lines))


def agree_after(
    what: str, check: Callable[[], Sequence[object]], group: ProcessGroup | None = None
) -> None:
    """Raises on every rank what is wrong on one, so that no rank waits for another.

    Args:
        what: the operation, for the message.
        check: looks at what this rank has; raises, or returns what must be the same on
            each rank.
        group: the ranks; None for all. With one rank, or without a group, `check` is
            called, and what it raises is raised.

    Raises:
        ValueError: on every rank: `check` raised on some rank, or the ranks disagree.

    Source: chapter 23.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        check()
        return
    facts: Sequence[object] = ()
    problem = ""
    try:
        facts = check()
    except Exception as error:  # whatever it is, the others must not wait
        problem = str(error) or type(error).__name__
    agree(what, facts, group, problem)


def refuse_other_device(name: str, x: Tensor, group: ProcessGroup | None) -> None:
    """Refuses a tensor on a device between whose ranks the group does not carry.

    Raises:
        ValueError: it is on another device.

    Source: chapter 23.
    """
    backend = str(dist.get_backend(group))
    carried = {"gloo": "cpu", "nccl": "cuda"}
    devices = [device for carrier, device in carried.items() if carrier in backend]
    if devices and x.device.type not in devices:
        expected = f"expected device {' or '.join(devices)} as the group"
        raise ValueError(f"{name}: {expected}, got {x.device}")


def agree_on(
    what: str,
    x: Tensor,
    group: ProcessGroup,
    *facts: object,
    divided: int | None = None,
    summed: bool = False,
) -> None:
    """Refuses, on every rank, tensors that do not go together; see `agree`.

    Args:
        x: this rank's tensor.
        facts: what else must be equal.
        divided: a dimension whose length the number of ranks must divide.
        summed: whether tensors are added up; a sum of booleans would be their "or".

    Source: chapter 23.
    """

    def check() -> list[object]:
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
        refuse_other_device("x", x, group)
        if summed and x.dtype == torch.bool:
            raise TypeError("x: expected numbers, which can be added up, got torch.bool")
        shape, ranks = tuple(x.shape), dist.get_world_size(group)
        for dim in facts:
            if isinstance(dim, int) and not -x.ndim <= dim < x.ndim:
                raise ValueError(f"dim: expected a dimension of shape {shape}, got {dim}")
        if divided is not None and x.shape[divided] % ranks:
            raise ValueError(
                f"x: expected a length divisible by {ranks} ranks in dimension {divided}, "
                f"got shape {shape}"
            )
        return [shape, x.dtype, *["with gradient"] * x.requires_grad, *facts]

    agree_after(what, check, group)


class Traffic:
    """Counts what leaves this rank while it is entered: `bytes`, `messages`, and by name.

    The bytes of a collective are those that its definition asks of a rank, with P ranks and
    V bytes in the whole: (P - 1)/P V for all_gather, reduce_scatter and all_to_all, twice
    that for all_reduce. A library may send more: gloo makes its reduce_scatter out of an
    all_reduce. Those of a shift are counted as they are posted; `agree` is not counted.

    Source: eq-volume-gather, eq-volume-reduce, chapter 23.
    """

    active: ClassVar[list["Traffic"]] = []

    def __init__(self) -> None:
        self.bytes, self.messages = 0, 0
        self.by_name: dict[str, int] = {}

    def __enter__(self) -> "Traffic":
        Traffic.active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Traffic.active.remove(self)


def sent(name: str, count: int, messages: int) -> None:
    """Adds bytes and messages of this rank to every Traffic that is entered.

    Source: chapter 23.
    """
    for traffic in Traffic.active:
        traffic.bytes += count
        traffic.messages += messages
        traffic.by_name[name] = traffic.by_name.get(name, 0) + count


def post_shift(
    tensors: Sequence[Tensor], hops: int = 1, group: ProcessGroup | None = None
) -> Callable[[], tuple[Tensor, ...]]:
    """Begins a shift without a gradient, and returns a function that waits for its end.

    The tensors must not be written until it has returned, and not be dropped.

    Args:
        tensors: of the same shapes and dtypes on all ranks; this is not checked here.
        hops: how many ranks on, around the ring; negative for back.

    Returns:
        A function; what it returns are the tensors of the rank `hops` before this one.

    Source: eq-shift-transpose, chapter 23.
    """
    group, rank, ranks = world(group)
    if hops % ranks == 0:
        return lambda: tuple(x.clone() for x in tensors)
    out = [x.detach().contiguous() for x in tensors]
    into = [torch.empty_like(x) for x in out]
    to = dist.get_global_rank(group, (rank + hops) % ranks)
    source = dist.get_global_rank(group, (rank - hops) % ranks)
    posts = [dist.P2POp(dist.isend, x, to, group) for x in out]
    posts += [dist.P2POp(dist.irecv, x, source, group) for x in into]
    requests = dist.batch_isend_irecv(posts)
    sent("shift", sum(x.nbytes for x in out), len(out))

    def arrived(_keep: Sequence[Tensor] = out) -> tuple[Tensor, ...]:
        for request in requests:
            request.wait()
        return tuple(into)

    return arrived


class AllGather(Function):
    """Everyone gets everything; backward is ReduceScatter.

    Source: eq-gather-transpose, chapter 23.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        agree_on("all_gather", x, group, dim)
        ctx.dim, ctx.group = dim, group
        ranks = dist.get_world_size(group)
        parts = [x.new_empty(x.shape) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group)
        sent("all_gather", (ranks - 1) * x.nbytes, ranks - 1)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ReduceScatter.apply(grad, ctx.dim, ctx.group), None, None


class ReduceScatter(Function):
    """The sum over the ranks, a piece for each; backward is AllGather.

    Source: eq-gather-transpose, chapter 23.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        agree_on("reduce_scatter", x, group, dim, divided=dim, summed=True)
        ctx.dim, ctx.group = dim, group
        ranks = dist.get_world_size(group)
        parts = [part.contiguous() for part in x.tensor_split(ranks, dim)]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts, group=group)
        sent("reduce_scatter", (ranks - 1) * total.nbytes, ranks - 1)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllGather.apply(grad, ctx.dim, ctx.group), None, None


class AllToAll(Function):
    """Piece s of rank r becomes piece r of rank s; backward is its inverse.

    Source: eq-exchange-transpose, chapter 23.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup
    ) -> Tensor:
        agree_on("all_to_all", x, group, split_dim, concat_dim, divided=split_dim)
        ctx.dims, ctx.group = (concat_dim, split_dim), group
        ranks = dist.get_world_size(group)
        out = torch.stack(x.tensor_split(ranks, split_dim)).contiguous()  # (P, …)
        into = torch.empty_like(out)
        dist.all_to_all_single(into, out, group=group)
        sent("all_to_all", (ranks - 1) * out[0].nbytes, ranks - 1)
        return torch.cat(into.unbind(), concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(grad, *ctx.dims, ctx.group), None, None, None


class Shift(Function):
    """To the rank some hops on, from the one as many before; backward is the way back.

    Source: eq-shift-transpose, chapter 23.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, hops: int, group: ProcessGroup) -> Tensor:
        agree_on("shift", x, group, f"hops={hops}")
        ctx.hops, ctx.group = hops, group
        return post_shift((x,), hops, group)()[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Shift.apply(grad, -ctx.hops, ctx.group), None, None


def as_recorded(x: Tensor) -> Tensor:
    """x, or x without its need of a gradient where none is recorded, as under `no_grad`.

    A rank that will not go backward is then told from one that waits for it there.

    Source: chapter 23.
    """
    return x.detach() if isinstance(x, Tensor) and not torch.is_grad_enabled() else x


def all_gather(x: Tensor, dim: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """The tensors of all ranks, one after the other along `dim`, on every rank.

    Args:
        x: this rank's piece, of the same shape, dtype and need of a gradient on all ranks.
        dim: along which the pieces are joined.
        group: None for all ranks.

    Raises:
        ValueError: on every rank, where the ranks disagree.

    Source: eq-gather-transpose, chapter 23.
    """
    return AllGather.apply(as_recorded(x), dim, world(group)[0])


def reduce_scatter(x: Tensor, dim: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """This rank's piece, along `dim`, of the sum of the tensors of all ranks.

    Args:
        x: as for `all_gather`; the number of ranks divides its length in `dim`.

    Source: eq-gather-transpose, chapter 23.
    """
    return ReduceScatter.apply(as_recorded(x), dim, world(group)[0])


def all_to_all(
    x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup | None = None
) -> Tensor:
    """Cuts x along one dimension, gives each rank its piece, joins what came along another.

    Args:
        x: as for `all_gather`; the number of ranks divides its length in `split_dim`.

    Source: eq-exchange-transpose, chapter 23.
    """
    return AllToAll.apply(as_recorded(x), split_dim, concat_dim, world(group)[0])


def shift(x: Tensor, hops: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """The tensor of the rank `hops` before this one, around the ring.

    Args:
        x: as for `all_gather`.
        hops: negative for the ranks after this one.

    Source: eq-shift-transpose, chapter 23.
    """
    return Shift.apply(as_recorded(x), hops, world(group)[0])


class Replicate(Function):
    """One tensor that all ranks hold, used by each in its own way; backward is AddUp.

    Source: eq-replicate-transpose, chapter 23.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        agree_on("replicate", x, group)
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AddUp.apply(grad, ctx.group), None


class AddUp(Function):
    """One tensor that all ranks hold, the sum of what each had; backward is Replicate.

    Source: eq-replicate-transpose, chapter 23.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        agree_on("add_up", x, group, summed=True)
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        ranks = dist.get_world_size(group)
        sent("all_reduce", 2 * (ranks - 1) * x.nbytes // ranks, 2 * (ranks - 1))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Replicate.apply(grad, ctx.group), None


def replicate(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """One tensor that all ranks hold; from here on each rank's copy is its own.

    Forward, nothing travels. Backward, the gradients of the copies are added up.

    Source: eq-replicate-transpose, chapter 23.
    """
    return Replicate.apply(as_recorded(x), world(group)[0])


def add_up(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of the tensors of all ranks, as one tensor that all of them hold.

    What is computed from it is the same on all ranks and counts once: backward, each rank
    gets the gradient as it is, and nothing travels.

    Source: eq-replicate-transpose, chapter 23.
    """
    return AddUp.apply(as_recorded(x), world(group)[0])


def all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of the tensors of all ranks, a copy for each, which counts on each.

    `replicate(add_up(x))`: it is its own transpose. If the loss made from it is the same on
    all ranks and should count once, take `add_up`.

    Source: eq-reduce-transpose, chapter 23.
    """
    return replicate(add_up(x, group), group)


def rank_gradients(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    group: ProcessGroup | None = None,
    step: float = 1e-6,
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of this rank's inputs by backward, and by central differences.

    The loss is the sum over the ranks of ⟨y, w⟩, with fixed weights w and y what the
    function returns. For the differences, one number of one rank changes at a time, and all
    ranks compute.

    Args:
        function: of this rank's inputs; calls collectives. Returns one tensor.
        inputs: float64, of as many numbers on each rank.

    Raises:
        ValueError: on every rank, where the inputs of one are not so.

    Source: eq-pairing-ranks, chapter 23; eq-central-difference, chapter 10.
    """
    group, rank, ranks = world(group)
    others = [x.dtype for x in inputs if x.dtype != torch.float64]
    problem = f"inputs: expected torch.float64, got {others[0]}" if others else ""
    agree("rank_gradients", [x.numel() for x in inputs], group, problem)
    copies = (x.detach().clone(memory_format=torch.contiguous_format) for x in inputs)
    inputs = tuple(x.requires_grad_() for x in copies)
    out = function(*inputs)
    draw = torch.Generator().manual_seed(rank)
    weight = torch.randn(out.shape, generator=draw, dtype=out.dtype).to(out.device)
    exact = list(torch.autograd.grad(out, inputs, weight, allow_unused=True))
    exact = [
        torch.zeros_like(x) if g is None else g for x, g in zip(inputs, exact, strict=True)
    ]

    def loss() -> Tensor:
        total = (function(*inputs) * weight).sum()
        dist.all_reduce(total, group=group)
        return total

    near = [torch.zeros_like(x) for x in inputs]
    with torch.no_grad():
        for owner in range(ranks):
            for x, slope in zip(inputs, near, strict=True):
                for i in range(x.numel()):
                    old, move = x.view(-1)[i].item(), step * (rank == owner)
                    x.view(-1)[i] = old + move
                    above = loss()
                    x.view(-1)[i] = old - move
                    rise = above - loss()
                    x.view(-1)[i] = old
                    if rank == owner:
                        slope.view(-1)[i] = rise / (2 * step)
    return exact, near
