# Made from book/25_heads_layers_copies.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Checkpoints that a crash can't halve, written and read by any number of ranks.

It is called on each rank of a group of `torch.distributed`, by all of them.

Derived in chapter 25, "Heads, layers, copies" (book/25_heads_layers_copies.ipynb).
"""

import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attnlib.checks import require_count
from attnlib.parallel.collectives import agree_after, rank_and_size

SUMS = "SHA256SUMS"  # the last file of a checkpoint, which sha256sum --check reads, too
RUN = "run.pt"  # all that is no tensor dealt out
HELD: dict[Path, FileLock] = {}  # folders of this process, until it ends


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    schedule: LRScheduler | None = None,
    settings: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Writes model and optimizer, each rank its part, so that a crash leaves none halved.

    The parts go to a folder of another name, which gets its own, step-…, by one renaming
    when all of them are on the disk, with a checksum of each. The first writing claims
    `folder`, see `claim_folder`.

    Args:
        folder: where checkpoints are kept, the same for all ranks.
        step: how many steps have been done, more than at the last checkpoint.
        model, optimizer: as they are on this rank.
        schedule: of the rate of learning, if there is one.
        settings: what else the steps depend on, by name: `load_checkpoint` compares it.
        keep: how many of the last checkpoints to keep, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        TypeError: what can't be kept: settings that are not numbers or words, or lists or
            dictionaries of those; an optimizer with lists of tensors, as LBFGS.
        ValueError: the ranks disagree about step, keep or settings; keep is below 1; the
            optimizer has a parameter that is not the model's; there is a checkpoint of this
            step or a later one; the folder can't be written, is in use by another run, or
            is not seen by some rank. With several ranks everything is a ValueError, and on
            every rank.

    Source: chapter 25, eq-resume; the documentation of torch.distributed.checkpoint.
    """
    first, partial, done = rank_and_size(None)[0] == 0, Path(), Path()
    tensors: dict[str, Tensor] = {}

    def begin() -> list[object]:
        nonlocal partial, done, tensors
        require_count("step", step, least=0)
        require_count("keep", keep)
        refuse_not_trained(model, optimizer)
        tensors, told = state_of(model, optimizer)
        told |= {"step": step, "schedule": schedule and schedule.state_dict()}
        run = as_bytes(told | {"settings": dict(settings or {})})
        partial, done = (Path(folder, f"{name}-{step:08d}") for name in ("partial", "step"))
        if first:
            clear_for(partial, done, step)
            write(partial / RUN, run)
        return [step, keep, sorted((settings or {}).items())]

    def finish() -> list[object]:
        if first:
            flush(partial)
            os.replace(partial, done)
            flush(Path(folder))
            for old in finished(folder)[:-keep]:
                os.replace(Path(folder, f"step-{old:08d}"), partial)  # no more a whole one
                shutil.rmtree(partial)
        return []

    claim_folder(folder)
    agree_after("save_checkpoint", begin)
    agree_after("save_checkpoint", lambda: refuse_unseen(partial))
    dcp.save({"model": model.state_dict(), "optimizer": tensors}, checkpoint_id=partial)
    agree_after("save_checkpoint", list)  # all parts are written
    found = digests(partial)
    agree_after("save_checkpoint", lambda: seal(partial, found))
    agree_after("save_checkpoint", finish)
    return done


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    schedule: LRScheduler | None = None,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Reads the last whole checkpoint into model and optimizer; returns its step, or 0.

    The ranks may be others, and more or fewer, than those that wrote it; or one process
    without a group. The optimizer gets all that it had, its rate of learning too, and
    gradients are dropped. A checkpoint whose files are not those that were written is put
    aside with a warning, under the name damaged-…, and the one before is read. Another
    number of heads is not noticed, unless `settings` tells it: the parameters have the same
    shapes.

    Args:
        folder, model, optimizer, schedule, settings: as `save_checkpoint` had them.

    Raises:
        ValueError: on every rank: parameters, optimizer, its groups, schedule or settings
            are other ones than the checkpoint's; or all checkpoints are damaged.

    Source: chapter 25, eq-resume; the documentation of torch.distributed.checkpoint.
    """
    agree_after("load_checkpoint", lambda: refuse_not_trained(model, optimizer) or [])
    if (path := newest(Path(folder))) is None:
        return 0
    told = torch.load(path / RUN, map_location="cpu", weights_only=True)
    weights, given = model.state_dict(), dict(settings or {})
    tensors: dict[str, Tensor] = {}

    def fits() -> list[object]:
        kept = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        there = {n[6:]: of for n, of in kept.items() if n.startswith("model.")}
        there = {n: (tuple(of.size), of.properties.dtype) for n, of in there.items()}
        here = {n: (tuple(x.shape), x.dtype) for n, x in weights.items()}
        own = state_of(model, optimizer)[1] | {"schedule": schedule, "settings": given}
        refuse_other_run(path, facts_of(told, there), facts_of(own, here))
        parameters = dict(model.named_parameters())
        for name, of in kept.items():
            if name.startswith("optimizer."):
                name = name.removeprefix("optimizer.")
                like = parameters[name.rpartition(".")[0]].detach()
                own = like.shape == of.size  # or it is a number, as of steps
                like = like if own else torch.empty(of.size)
                tensors[name] = torch.empty_like(like, dtype=of.properties.dtype)
        return []

    agree_after("load_checkpoint", fits)
    dcp.load({"model": weights, "optimizer": tensors}, checkpoint_id=path)
    give_state(told, tensors, optimizer)
    optimizer.zero_grad()
    if schedule:
        schedule.load_state_dict(told["schedule"])
    return told["step"]


def claim_folder(folder: str | Path, wait: float = 10.0) -> None:
    """Makes a folder of checkpoints this run's own, until its first rank has ended.

    Args:
        folder: it is made where it is missing.
        wait: seconds to wait for another run, which may be about to end.

    Raises:
        ValueError: on every rank: it can't be written, or another run has it.

    Source: chapter 25.
    """

    def claim() -> list[object]:
        path = Path(folder).absolute()
        if rank_and_size(None)[0] or path in HELD:
            return []
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path / ".lock", timeout=wait)
            lock.acquire()
        except Timeout:
            raise ValueError(f"folder: another run has {folder}") from None
        except OSError as error:
            raise ValueError(f"folder: can't write in {folder}: {error.strerror}") from None
        HELD[path] = lock
        return []

    agree_after("claim_folder", claim)


def finished(folder: str | Path) -> list[int]:
    """The steps of which a folder has checkpoints that were written to the end, in order.

    Source: chapter 25, eq-resume.
    """
    found = (path.parent.name[5:] for path in Path(folder).glob(f"step-*/{SUMS}"))
    return sorted(int(step) for step in found if step.isdigit())


def newest(folder: Path) -> Path | None:
    """The last checkpoint that is as it was written; damaged ones are put aside.

    Source: chapter 25.
    """
    rank, ranks = rank_and_size(None)
    told = [finished(folder)]
    if ranks > 1:
        dist.broadcast_object_list(told, src=0)  # what the first rank sees

    def put_aside(path: Path, wrong: list[str]) -> list[object]:
        if rank == 0:
            aside = path.with_name(path.name.replace("step", "damaged"))
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
            what = f"{path} is damaged ({', '.join(wrong)}), and is now {aside.name}"
            warnings.warn(f"{what}; the checkpoint before it is read", stacklevel=5)
        return []

    for step in reversed(told[0]):
        path = folder / f"step-{step:08d}"
        if not (wrong := damaged(path)):
            return path
        claim_folder(folder)
        agree_after("load_checkpoint", lambda p=path, w=wrong: put_aside(p, w))
    if told[0]:
        raise ValueError(f"folder: every checkpoint in {folder} is damaged")
    return None


def damaged(path: Path) -> list[str]:
    """The files of a checkpoint that are not as they were written; the same on all ranks.

    Source: chapter 25.
    """
    found = digests(path)
    lines = (path / SUMS).read_text("utf-8", errors="replace").splitlines()
    told = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    wrong = [n for n in found.keys() | told.keys() if found.get(n) != told.get(n)]
    if RUN not in told:
        wrong.append(SUMS)
    return sorted(wrong)


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint but SUMS itself; each rank reads some of them.

    Source: chapter 25.
    """
    rank, ranks = rank_and_size(None)
    own = {}
    for file in sorted(path.iterdir())[rank::ranks]:
        try:
            with file.open("rb") as opened:
                own[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            own[file.name] = str(error)
    every = [own] * ranks
    if ranks > 1:
        dist.all_gather_object(every, own)
    return {n: digest for part in every for n, digest in part.items() if n != SUMS}


def clear_for(partial: Path, done: Path, step: int) -> None:
    """Makes an empty folder for the parts; what was cut off in writing goes.

    Source: chapter 25.
    """
    refuse_old_step(partial.parent, step)
    for left in (done, *partial.parent.glob("partial-*")):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)


def seal(path: Path, found: Mapping[str, str]) -> list[object]:
    """Writes the checksums of a checkpoint, on the first rank.

    Source: chapter 25.
    """
    if rank_and_size(None)[0] == 0:
        lines = (f"{digest}  {name}\n" for name, digest in sorted(found.items()))
        write(path / SUMS, "".join(lines).encode())
    return []


def state_of(model: nn.Module, optimizer: Optimizer) -> tuple[dict, dict]:
    """What an optimizer has: tensors, by names of parameters; and the rest, in plain words.

    Source: chapter 25.
    """
    names = {x: name for name, x in model.named_parameters()}
    tensors, numbers, groups = {}, {}, []
    for group in optimizer.param_groups:
        if any(x not in names for x in group["params"]):
            raise ValueError("optimizer: expected one made of the model's parameters")
        groups.append(group | {"params": [names[x] for x in group["params"]]})
    for x, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor | int | float | None):
                got = type(value).__name__
                raise TypeError(f"optimizer: can't keep {key!r}, a {got} of tensors")
            kept = tensors if isinstance(value, Tensor) else numbers
            kept[f"{names[x]}.{key}"] = value
    kind = type(optimizer).__name__
    return tensors, {"optimizer": kind, "groups": groups, "numbers": numbers}


def give_state(
    told: Mapping[str, Any], tensors: Mapping[str, Tensor], optimizer: Optimizer
) -> None:
    """Gives an optimizer what `state_of` has found, on whatever ranks.

    Source: chapter 25.
    """
    order = [name for group in told["groups"] for name in group["params"]]
    place = {name: i for i, name in enumerate(order)}
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*tensors.items(), *told["numbers"].items()):
        of, _, key = name.rpartition(".")
        state.setdefault(place[of], {})[key] = value
    groups = [g | {"params": [place[n] for n in g["params"]]} for g in told["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def as_bytes(told: Mapping[str, Any]) -> bytes:
    """The bytes of what can be read again; raises what PyTorch says where it can't.

    Source: chapter 25.
    """
    kept = io.BytesIO()
    torch.save(told, kept)
    try:
        torch.load(io.BytesIO(kept.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(f"settings, schedule: can't be kept: {error}") from None
    return kept.getvalue()


def write(path: Path, content: bytes) -> None:
    """Writes a file, and waits until it is on the disk.

    Source: chapter 25.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def refuse_not_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses what is no model, or no optimizer.

    Source: chapter 25.
    """
    pairs = (("model", model, nn.Module), ("optimizer", optimizer, Optimizer))
    for name, given, kind in pairs:
        if not isinstance(given, kind):
            got = type(given).__name__
            raise TypeError(f"{name}: expected {kind.__name__}, got {got}")


def refuse_old_step(folder: Path, step: int) -> None:
    """Refuses a step that would not become the last.

    Source: chapter 25.
    """
    if any(last >= step for last in finished(folder)):
        expected = f"expected more than {finished(folder)[-1]}, the last in {folder}"
        raise ValueError(f"step: {expected}, got {step}")


def refuse_unseen(path: Path) -> list[object]:
    """Refuses a folder that this rank does not see.

    Source: chapter 25.
    """
    if not path.is_dir():
        raise ValueError(f"folder: expected one that all ranks see, got {path.parent}")
    return []


def facts_of(
    told: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, object]:
    """What must be the same when a run goes on, by the names that a refusal tells.

    Source: chapter 25.
    """
    facts = {f"settings: {name}": value for name, value in told["settings"].items()}
    schedule = "none" if told["schedule"] is None else "one"
    facts |= {"optimizer": told["optimizer"], "schedule": schedule}
    facts |= {f"model: {name}": shape for name, shape in shapes.items()}
    groups = enumerate(told["groups"])
    return facts | {f"optimizer: group {i}": group["params"] for i, group in groups}


def refuse_other_run(
    path: Path, kept: Mapping[str, object], given: Mapping[str, object]
) -> None:
    """Refuses what is not as the run had it that wrote a checkpoint.

    Source: chapter 25.
    """
    for name in kept | given:
        there, here = kept.get(name), given.get(name)
        if there != here:
            raise ValueError(f"{name}: expected {there!r} as in {path}, got {here!r}")


def flush(folder: Path) -> None:
    """Waits until a folder's new names are on the disk, where the system can do so.

    Source: chapter 25.
    """
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
