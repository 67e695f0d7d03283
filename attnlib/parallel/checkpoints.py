# Made from book/25_heads_layers_copies.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Checkpoints that a crash can't halve, written and read by any number of ranks.

It is called on each rank of a group of `torch.distributed`, by all of them.

Derived in chapter 25, "Heads, layers, copies" (book/25_heads_layers_copies.ipynb).
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from attnlib.parallel.heads import agree_after
from attnlib.parallel.ring import ring_of


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
        step: how many steps have been done; more than at the last checkpoint.
        model, optimizer: as they are on this rank.
        keep: how many of the last checkpoints to keep, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: on every rank: the ranks disagree about step or keep, keep is below 1,
            there is a checkpoint of this step or a later one, or some rank does not see
            the folder of the others.

    Source: chapter 25; the documentation of torch.distributed.checkpoint.
    """
    folder, first = Path(folder), ring_of(None)[0] == 0
    partial, done = folder / f"partial-{step:08d}", folder / f"step-{step:08d}"

    def begin() -> list[object]:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        if first:
            refuse_old_step(folder, step)
            for left in (done, *folder.glob("partial-*")):  # cut off in writing
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        return [step, keep]

    def find() -> list[object]:
        if not partial.is_dir():
            raise ValueError(f"folder: expected one that all ranks see, got {folder}")
        return []

    def end() -> list[object]:
        if first:
            flush(partial)
            os.replace(partial, done)
            flush(folder)
            for old in finished(folder)[:-keep]:
                os.replace(folder / f"step-{old:08d}", partial)  # no more a whole one
                shutil.rmtree(partial)
        return []

    agree_after("save_checkpoint", begin)
    agree_after("save_checkpoint", find)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=partial)
    agree_after("save_checkpoint", list)  # all parts are written
    agree_after("save_checkpoint", end)
    return done


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Reads the last whole checkpoint into model and optimizer; returns its step, or 0.

    The ranks may be others, and more or fewer, than those that wrote it; or one process
    without a group.

    Source: chapter 25; the documentation of torch.distributed.checkpoint.
    """
    rank, ranks = ring_of(None)
    last = finished(folder)[-1:] if rank == 0 else []
    if ranks > 1:
        found = [last]
        dist.broadcast_object_list(found, src=0)
        (last,) = found
    if not last:
        return 0
    weights, state = get_state_dict(model, optimizer)
    path = Path(folder, f"step-{last[0]:08d}")
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return last[0]


def finished(folder: str | Path) -> list[int]:
    """The steps of which a folder has whole checkpoints, in order.

    Source: chapter 25.
    """
    found = Path(folder).glob("step-*/.metadata")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def refuse_old_step(folder: Path, step: int) -> None:
    """Refuses a step that would not become the last: another run has written here.

    Source: chapter 25.
    """
    if any(last >= step for last in finished(folder)):
        expected = f"expected more than {finished(folder)[-1]}, the last in {folder}"
        raise ValueError(f"step: {expected}, got {step}")


def flush(folder: Path) -> None:
    """Waits until a folder's new names are on the disk, where the system can do so.

    Source: chapter 25.
    """
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
