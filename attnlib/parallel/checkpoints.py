# Made from book/25_heads_layers_copies.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Checkpoints that a crash can't halve, written and read by any number of ranks.

It is called on each rank of a group of `torch.distributed`, by all of them.

Derived in chapter 25, "Heads, layers, copies" (book/25_heads_layers_copies.ipynb).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from attnlib.checks import require_count
from attnlib.parallel.collectives import agree_after, rank_and_size


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
        step: how many steps have been done, more than at the last checkpoint.
        model, optimizer: as they are on this rank.
        keep: how many of the last checkpoints to keep, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: on every rank: the ranks disagree about step or keep, keep is below 1,
            there is a checkpoint of this step or a later one, the folder can't be written,
            or some rank does not see that of the others.

    Source: chapter 25, eq-resume; the documentation of torch.distributed.checkpoint.
    """
    first, partial, done = rank_and_size(None)[0] == 0, Path(), Path()

    def begin() -> list[object]:
        nonlocal partial, done
        require_count("step", step, least=0)
        require_count("keep", keep)
        refuse_not_trained(model, optimizer)
        partial, done = (Path(folder, f"{name}-{step:08d}") for name in ("partial", "step"))
        if first:
            refuse_old_step(Path(folder), step)
            for left in (done, *Path(folder).glob("partial-*")):  # cut off in writing
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        return [step, keep]

    def find() -> list[object]:
        if not partial.is_dir():
            raise ValueError(f"folder: expected one that all ranks see, got {folder}")
        return []

    def finish() -> list[object]:
        if first:
            flush(partial)
            os.replace(partial, done)
            flush(Path(folder))
            for old in finished(folder)[:-keep]:
                os.replace(Path(folder, f"step-{old:08d}"), partial)  # no more a whole one
                shutil.rmtree(partial)
        return []

    agree_after("save_checkpoint", begin)
    agree_after("save_checkpoint", find)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=partial)
    agree_after("save_checkpoint", list)  # all parts are written
    agree_after("save_checkpoint", finish)
    return done


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Reads the last whole checkpoint into model and optimizer; returns its step, or 0.

    The ranks may be others, and more or fewer, than those that wrote it; or one process
    without a group. The optimizer, of the same kind, gets all that it had, its rate of
    learning too, and gradients are dropped. Another number of heads is not noticed: the
    parameters have the same shapes.

    Raises:
        ValueError: on every rank: the model has other parameters than the checkpoint.

    Source: chapter 25, eq-resume; the documentation of torch.distributed.checkpoint.
    """
    rank, ranks = rank_and_size(None)
    found: list[int] = []

    def look() -> list[object]:
        refuse_not_trained(model, optimizer)
        if rank == 0:
            found.extend(finished(folder)[-1:])
        return []

    agree_after("load_checkpoint", look)
    if ranks > 1:
        dist.broadcast_object_list(told := [found], src=0)
        (found,) = told
    if not found:
        return 0
    path = Path(folder, f"step-{found[0]:08d}")
    optimizer.zero_grad()  # with a gradient there, no state would be read
    weights, state = get_state_dict(model, optimizer)
    agree_after("load_checkpoint", lambda: refuse_other_parameters(path, weights))
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return found[0]


def finished(folder: str | Path) -> list[int]:
    """The steps of which a folder has whole checkpoints, in order.

    `.metadata` is what torch.distributed.checkpoint writes last.

    Source: chapter 25, eq-resume.
    """
    found = (path.parent.name[5:] for path in Path(folder).glob("step-*/.metadata"))
    return sorted(int(step) for step in found if step.isdigit())


def refuse_not_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses what is no model, or no optimizer.

    Source: chapter 25.
    """
    pairs = (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer))
    for name, given, kind in pairs:
        if not isinstance(given, kind):
            got = type(given).__name__
            raise TypeError(f"{name}: expected {kind.__name__}, got {got}")


def refuse_old_step(folder: Path, step: int) -> None:
    """Refuses a step that would not become the last: another run has written here.

    Source: chapter 25.
    """
    if any(last >= step for last in finished(folder)):
        expected = f"expected more than {finished(folder)[-1]}, the last in {folder}"
        raise ValueError(f"step: {expected}, got {step}")


def refuse_other_parameters(path: Path, weights: dict[str, Any]) -> list[object]:
    """Refuses a model whose parameters are not those of a checkpoint.

    Source: chapter 25.
    """
    kept = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    there = {
        name.removeprefix("model."): (tuple(x.size), x.properties.dtype)
        for name, x in kept.items()
        if name.startswith("model.")
    }
    here = {name: (tuple(x.shape), x.dtype) for name, x in weights.items()}
    for name in sorted(there.keys() | here.keys()):
        if here.get(name) != there.get(name):
            expected = f"expected {name} as in {path}, {there.get(name)}"
            raise ValueError(f"model: {expected}, got {here.get(name)}")
    return []


def flush(folder: Path) -> None:
    """Waits until a folder's new names are on the disk, where the system can do so.

    Source: chapter 25.
    """
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
