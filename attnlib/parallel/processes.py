# Made from book/23_many_processes.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""`run` calls a function in several processes of this machine, with the group made.

A rank that raises, dies or does not come in time is named, and no process is left behind.

Derived in chapter 23, "Many processes" (book/23_many_processes.ipynb).
"""

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

Report = tuple[float, str, Any]  # when, "done", "raised" or "late", and what

GRACE = 1.0  # seconds that the other ranks have to report, after the first failure


class RankError(RuntimeError):
    """What `run` raises: some ranks raised, died, or did not come.

    Attributes:
        ranks: those at fault, as far as can be told, in order.

    Source: chapter 23.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message, list(ranks))
        self.ranks = list(ranks)

    def __str__(self) -> str:
        return str(self.args[0])


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: int | float = 60.0,
    start: str | None = None,
) -> list[Any]:
    """Calls `function(rank, *args)` in each of `ranks` processes, which form a group.

    Args:
        function: called with the rank first. Spawned processes must be able to import it;
            with forked ones it may be defined in a notebook.
        ranks: how many processes P; args: handed to each of them.
        timeout: seconds for all of it. A rank that has not returned by then is named.
        start: "fork" or "spawn". None: fork on Linux, unless CUDA or backward on a machine
            with a GPU has been used, whose threads would be missing; otherwise spawn.

    Returns:
        What the ranks returned, in their order. It is pickled on the way.

    Raises:
        ValueError: not a positive number of ranks or seconds, an unknown start, or a
            function that spawned processes cannot import.
        RuntimeError: this process is a rank itself, and would be copied as one.
        RankError: a rank raised, died or did not return in time. None is left behind, nor
            what the ranks have started, unless that has left their process group.

    Source: chapter 23. The group is of gloo, on this machine's CPU, with one thread a rank.
    """
    context = mp.get_context(checked_start(function, ranks, timeout, start))
    deadline, pipes, processes = time.monotonic() + timeout, [], []
    with TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                pipes.append(here)
                inputs = (there, str(Path(folder, "ranks")), rank, ranks, deadline)
                process = context.Process(target=rank_main, args=(*inputs, function, args))
                processes.append(process)
                process.start()
                there.close()
            reports = collect(pipes, deadline)
            dismiss(pipes, processes, all(kind == "done" for _, kind, _ in reports))
        finally:
            end(processes)
            for pipe in pipes:
                pipe.close()
    refuse_failed_ranks(reports, [process.exitcode for process in processes], timeout)
    return [pickle.loads(what) for _, _, what in reports]


def checked_start(
    function: Callable[..., Any], ranks: int, timeout: int | float, start: str | None
) -> str:
    """How processes start; raises ValueError where they cannot, or are not wanted right.

    Source: chapter 23.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks: expected a positive integer, got {ranks!r}")
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout: expected a positive number of seconds, got {timeout}")
    if start not in (None, "fork", "spawn"):
        raise ValueError(f'start: expected "fork", "spawn" or None, got {start!r}')
    if start is None:
        forked = sys.platform == "linux" and not torch.cuda.is_initialized()
        start = "fork" if forked and not backward_has_threads() else "spawn"
    if start == "fork" and dist.is_initialized():
        raise RuntimeError("run: this process is a rank of a group; call it outside of one")
    if start == "spawn":
        name = getattr(function, "__qualname__", repr(function))
        own = getattr(function, "__module__", None) == "__main__"
        in_file = not own or hasattr(sys.modules["__main__"], "__file__")
        if not in_file or "<locals>" in name or "<lambda>" in name:
            raise ValueError(
                f"function: spawned processes import it, got {name} of a notebook or of "
                "another function; write it into a file. They are forked instead on Linux "
                'where no GPU is in use, as with CUDA_VISIBLE_DEVICES=""'
            )
    return start


def backward_has_threads() -> bool:
    """Whether backward has started threads here, which it does where there is a GPU.

    A forked process lacks them, and PyTorch refuses to go backward in it.

    Source: chapter 23.
    """
    with suppress(OSError):
        names = Path(os.sep, "proc", "self", "task").glob("*/comm")
        return any(name.read_text().startswith("pt_autograd") for name in names)
    return False


def dismiss(
    pipes: Sequence[Connection], processes: Sequence[BaseProcess], orderly: bool
) -> None:
    """Lets the ranks go, and gives them a moment; nobody leaves before all have reported.

    Source: chapter 23.
    """
    for pipe in pipes:
        with suppress(OSError):
            pipe.send("go")
    until = time.monotonic() + GRACE * orderly
    for process in processes:
        wait([process.sentinel], max(0.0, until - time.monotonic()))


def end(processes: Sequence[BaseProcess]) -> None:
    """Kills what is left of the ranks, and what they have started.

    Source: chapter 23.
    """
    started = [process for process in processes if process.pid]
    for process in started:
        if hasattr(os, "killpg"):
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in started:
        process.join()


def collect(pipes: Sequence[Connection], deadline: float) -> list[Report]:
    """One report of each rank, or of those that came before the time was up.

    A process that ends without a report has "died"; one that says nothing is "silent".

    Source: chapter 23.
    """
    reports: list[Report | None] = [None] * len(pipes)
    until = deadline + GRACE
    while None in reports:
        open_pipes = [p for p, r in zip(pipes, reports, strict=True) if r is None]
        ready = wait(open_pipes, max(0.0, until - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                reports[rank] = pipe.recv()
            except (EOFError, OSError):
                reports[rank] = time.monotonic(), "died", None
            if reports[rank][1] != "done":
                until = min(until, time.monotonic() + GRACE)
    silent = time.monotonic(), "silent", None
    return [silent if report is None else report for report in reports]


def refuse_failed_ranks(
    reports: Sequence[Report], codes: Sequence[int | None], timeout: int | float
) -> None:
    """Raises RankError where a rank raised, died or did not return in time.

    The fault is laid on the ranks that died; else on the first that raised; else on those
    that were late without waiting for the others.

    Source: chapter 23.
    """
    kinds = [kind for _, kind, _ in reports]
    bad = [rank for rank, kind in enumerate(kinds) if kind != "done"]
    if not bad:
        return
    dead = [rank for rank in bad if kinds[rank] == "died"]
    raised = sorted((r for r in bad if kinds[r] == "raised"), key=lambda r: reports[r][0])
    lines = [f"rank {r} died (exit code {codes[r]})" for r in dead]
    if not dead:
        lines += [f"rank {r} raised\n{reports[r][2]}".rstrip() for r in raised[:1]]
    for r in raised if dead else raised[1:]:
        lines.append(f"rank {r} then raised {reports[r][2].splitlines()[-1]}")
    if dead or raised:
        ranks = dead or [r for r in raised if reports[r][2] == reports[raised[0]][2]]
        raise RankError("\n".join(lines), sorted(ranks))
    waiting = [r for r in bad if kinds[r] == "late" and reports[r][2][1]]
    missing = [r for r in bad if r not in waiting] or bad
    for rank in missing + [r for r in waiting if r not in missing]:
        where = reports[rank][2][0] if kinds[rank] == "late" else "silent"
        verb = "waits in" if rank in waiting else "did not come:"
        lines.append(f"rank {rank} {verb} {where}")
    lines += [f"rank {r} had returned" for r, kind in enumerate(kinds) if kind == "done"]
    raise RankError(f"after {timeout} s\n" + "\n".join(lines), missing)


def rank_main(
    pipe: Connection,
    file: str,
    rank: int,
    ranks: int,
    deadline: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """What a process of `run` does: joins the group, calls, reports, waits for the others.

    It leads a process group: what it starts ends with it, and an interrupt at the keyboard
    reaches the caller alone.

    Source: chapter 23.
    """
    if hasattr(os, "fork"):
        os.setpgid(0, 0)
        os.register_at_fork(after_in_child=pipe.close)  # its end is to tell of this one's
    lock = threading.Lock()

    def report(kind: str, what: Any) -> None:
        with lock:
            pipe.send((time.monotonic(), kind, what))

    main, of = threading.main_thread().ident, getattr(function, "__code__", None)
    of = of.co_filename if of else ""
    threading.Thread(target=watch, args=(main, of, deadline, report), daemon=True).start()
    torch.set_num_threads(1)
    try:
        patience = timedelta(seconds=max(1.0, deadline - time.monotonic()) + 60)
        store = dist.FileStore(file, ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=patience
        )
        kind, what = "done", pickle.dumps(function(rank, *args))
    except BaseException:
        kind, what = "raised", traceback.format_exc()
    report(kind, what)
    with suppress(EOFError, OSError):
        pipe.recv()


def watch(
    main: int,
    file: str,
    deadline: float,
    report: Callable[[str, tuple[str, bool]], None],
) -> None:
    """Ends this process with its parent; says at the deadline where its rank stands.

    Source: chapter 23.
    """
    parent = parent_process()
    sentinels = [parent.sentinel] if parent else []
    while (left := deadline - time.monotonic()) > 0:
        if wait(sentinels, left):
            leave()
    frames = traceback.extract_stack(sys._current_frames()[main])
    places = [Path(frame.filename) for frame in frames]
    inside = any(place.parts[-3:-1] == ("torch", "distributed") for place in places)
    inside |= ".wait(" in (frames[-1].line or "")  # of a request, which leaves no frame
    at = next((f for f in reversed(frames) if f.filename == file), frames[-1])
    report("late", (f"{at.name}, line {at.lineno}", inside))
    wait(sentinels, 3 * GRACE)  # the caller ends us before
    leave()


def leave() -> None:
    """Ends this rank at once, and what it has started.

    Source: chapter 23.
    """
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
