"""Processes that a check starts: each ends itself after a while, and says where it stood.

Where one rank does not call a collective, the others would wait for it without end.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import traceback
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

STUCK = 97  # the status of a process that has ended itself
PATIENCE = [15.0, 4.0]  # seconds: for the first that has no end, and for those after it
PIPE: list[int] = []  # in which they leave word: its end to read, and its end to write


def watch_ranks() -> None:
    """From here on, each process that joins a group ends itself after a while.

    It is a copy of this one: a function of a check is none that another could import.
    """
    import torch.distributed as dist
    from torch import multiprocessing

    PIPE[:] = os.pipe()
    os.set_blocking(PIPE[0], False)
    if sys.platform == "darwin":  # where `run` would begin with an empty one
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda *_: fork
    if dist.is_available() and not hasattr(dist.init_process_group, "watched"):
        dist.init_process_group = watched(dist.init_process_group)


def watched(join: Any) -> Any:
    """The function by which a process joins a group, with a clock that begins there."""

    @functools.wraps(join)
    def joined(*args: Any, **options: Any) -> Any:
        if parent_process():
            about = options.get("rank", 0), threading.main_thread().ident
            end = threading.Timer(PATIENCE[0], give_up, about)
            end.daemon = True
            end.start()
        return join(*args, **options)

    joined.watched = True
    return joined


def give_up(rank: int, main: int) -> None:
    """Ends this process, if it is in the function that it was started for."""
    frames = traceback.extract_stack(sys._current_frames()[main])
    waits = any(Path(f.filename).parts[-3:-1] == ("torch", "distributed") for f in frames)
    mine = [f for f in frames if in_cell(f.filename) or in_package(f.filename)]
    if len(mine) < 2:  # it has returned, and what has started it waits for the others
        return
    lines = [[f.filename, f.lineno, f.name, (f.line or "")[:100]] for f in mine[-8:]]
    os.write(PIPE[1], f"{json.dumps([rank, waits, lines])}\n".encode())
    os._exit(STUCK)


def in_cell(file: str) -> bool:
    return file.startswith("<") and not file.startswith("<frozen")


def in_package(file: str) -> bool:
    return "attnlib" in Path(file).parts[-3:-1]


def left_word() -> list[list]:
    """What processes have left word of since the last call, by rank.

    Rank, whether it waits for others, and the lines where it stands, the innermost last.
    """
    try:
        said = os.read(PIPE[0], 2**16) if PIPE else b""
    except BlockingIOError:
        return []
    return sorted(json.loads(line) for line in said.splitlines())
