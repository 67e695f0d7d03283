"""Processes that a check starts: each ends itself after a while, and says where it stood.

Where one rank does not call a collective, the others would wait for it without end.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import traceback
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from workkit.closure import imported

STUCK = 97  # the status of a process that has ended itself
PATIENCE = [18.0, 6.0]  # seconds: for the first that has no end, and for those after it
PIPE: list[int] = []  # in which they leave word: its end to read, and its end to write


def starts_processes(cells: list[dict]) -> bool:
    return "torch.distributed" in imported(cells)


def watch_ranks(cells: list[dict]) -> None:
    """If they start processes: each that joins a group will end itself after a while.

    They are copies of this one, in which no GPU may have been used: here none is seen.
    """
    if not starts_processes(cells):
        return
    import torch.distributed as dist

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    PIPE[:] = os.pipe()
    os.set_blocking(PIPE[0], False)
    if not hasattr(dist.init_process_group, "watched"):
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
    begun = [n for n, frame in enumerate(frames) if frame.name == "_bootstrap"]
    frames = frames[begun[-1] :] if begun else frames  # before it are those of the parent
    waits = any(Path(f.filename).parts[-3:-1] == ("torch", "distributed") for f in frames)
    worked = time.clock_gettime(time.pthread_getcpuclockid(main))
    waits = waits or worked < PATIENCE[0] / 20
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
