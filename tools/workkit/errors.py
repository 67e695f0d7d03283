"""What ended a statement: an error of this process, or of one that a check has started.

Each of those ends itself after a while, and says where it stood: where one rank does not
call a collective, the others would wait for it without end.
"""

from __future__ import annotations

import ast
import functools
import json
import linecache
import os
import re
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from workkit.cells import starts_processes

YOURS = "yours to write"
UNKNOWN = re.compile(r"name '(\w+)' is not defined")
FRAME = re.compile(
    r'^  File "(.+)", line (\d+), in (.+)\n(?:    (.+)\n)?(?:[ ~^]+\n)?', re.M
)
FIRST = re.compile(r"^rank (\d+) raised\n", re.MULTILINE)
THEN = re.compile(r"^rank (\d+) then raised (.+)$", re.MULTILINE)
STUCK = 97  # the status of a process that has ended itself
PATIENCE = [18.0, 6.0]  # seconds: for the first that has no end, and for those after it
PIPE: list[int] = []  # in which they leave word: its end to read, and its end to write


@dataclass
class Raised:
    """An error, of this process or of one that it has started."""

    name: str  # such as ValueError
    said: str
    frames: list[FrameSummary]
    stuck: str = ""  # of a process without an end, what it does

    def kind(self, lost: set[str]) -> str:
        """What it is for the notes; `lost` names what a statement would have made."""
        if self.name == "NotImplementedError" and YOURS in self.said:
            return "unwritten"
        missing = UNKNOWN.match(self.said) if self.name == "NameError" else None
        if missing and missing[1] in lost:
            return "skipped"
        return "failed" if self.name == "AssertionError" else "raised"


def raised(error: BaseException) -> Raised:
    """The error; where another process raised it, or had no end, that one's."""
    if word := left_word():
        return no_end(word)
    if type(error).__name__ == "RankError":
        return raised_there(str(error))
    return Raised(
        type(error).__name__, str(error), traceback.extract_tb(error.__traceback__)
    )


def no_end(word: list[list]) -> Raised:
    """That ranks wait, or compute, without end."""
    seconds, PATIENCE[0] = PATIENCE[0], PATIENCE[-1]
    chosen = [one for one in word if not one[1]] or word
    waiting = chosen[0][1]
    who = "rank " if len(chosen) == 1 else "ranks "
    who += " and ".join(str(rank) for rank, _, _ in chosen)
    verb = "wait" if waiting else "compute"
    said = f"{who} still {verb}{'s' * (len(chosen) == 1)}"
    said += " for another" * waiting + f" after {seconds:.0f} seconds: "
    said += "does every rank call the same collectives, in the same order?" * waiting
    said += "is there a loop without end?" * (not waiting)
    frames = [FrameSummary(f, n, at, line=line) for f, n, at, line in chosen[0][2]]
    return Raised("No end", said, frames, verb)


def raised_there(text: str) -> Raised:
    """What `run` tells of the ranks that raised: the error of the lowest of them."""
    first = FIRST.search(text)
    if not first:
        return Raised("RankError", text, [])
    others = {int(rank): said for rank, said in THEN.findall(text)}
    block = THEN.split(text[first.end() :])[0]
    places = list(FRAME.finditer(block))
    frames = [
        FrameSummary(p[1], int(p[2]), p[3], line=p[4] or linecache.getline(p[1], int(p[2])))
        for p in places
    ]
    own = block[places[-1].end() :].strip() if places else block.strip()
    name, _, said = others.get(min([int(first[1]), *others]), own).partition(": ")
    return Raised(name.rpartition(".")[2], said, frames)


def running(frames: list[FrameSummary]) -> list[str]:
    """The cells, or the definitions of the package, where these frames stand."""
    return [
        defined_at(f.filename, f.lineno or 0)
        if in_package(f.filename)
        else f.filename.strip("<>")
        for f in frames
    ]


@functools.cache
def defined_at(file: str, line: int) -> str:
    """The package's definition that has this line, such as masks.apply_mask."""
    path = Path(file).with_suffix("").parts
    module = path[len(path) - path[::-1].index("attnlib") :]
    tree = ast.parse("".join(linecache.getlines(file)))
    there = [n for n in tree.body if n.lineno <= line <= (n.end_lineno or 0)]
    return ".".join([*module, *(getattr(n, "name", "") for n in there)])


def place_of(error: BaseException, cells: Iterable[str] = ()) -> str:
    """The last line that was running in the reader's cells, or in the package."""
    return place_in(traceback.extract_tb(error.__traceback__), cells)


def place_in(frames: list[traceback.FrameSummary], cells: Iterable[str] = ()) -> str:
    """The same, of the lines that were running."""
    frames = frames[::-1]
    for frame in frames:
        if (name := frame.filename.strip("<>")) in cells:
            return f"in line {frame.lineno} of your {name}: {frame.line}"
    for frame in frames:
        if "attnlib" in Path(frame.filename).parts[-3:]:
            file = frame.filename[frame.filename.rindex("attnlib") :]
            return f"in line {frame.lineno} of {file}: {frame.line}"
    return ""


def raised_in(node: ast.stmt, error: BaseException, file: str) -> str:
    """The lines of the statement that raised, within a larger one."""
    inner: list[ast.stmt] = [node]
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file and frame.lineno:
            here = [n for n in inside(node) if n.lineno <= frame.lineno <= last_of(n)]
            inner = here or inner
    first, last = inner[-1].lineno, last_of(inner[-1])
    return textwrap.dedent("".join(linecache.getlines(file)[first - 1 : last])).strip()


def inside(node: ast.AST) -> list[ast.stmt]:
    """The statement and those within it, the innermost last."""
    return [n for n in ast.walk(node) if isinstance(n, ast.stmt)]


def last_of(node: ast.stmt) -> int:
    """The last line of a statement, or of its head where it has others within."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return max(node.lineno, body[0].lineno - 1)
    return node.end_lineno or node.lineno


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
