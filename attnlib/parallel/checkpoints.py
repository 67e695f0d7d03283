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

from attnlib.parallel.collectives import agree


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
