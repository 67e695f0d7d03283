"""An error, as it is told: its own words, or those of the process that raised it."""

from __future__ import annotations

import ast
import functools
import linecache
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary

from workkit import ranks

YOURS = "yours to write"
UNKNOWN = re.compile(r"name '(\w+)' is not defined")
FRAME = re.compile(
    r'^  File "(.+)", line (\d+), in (.+)\n(?:    (.+)\n)?(?:[ ~^]+\n)?', re.M
)
FIRST = re.compile(r"^rank (\d+) raised\n", re.MULTILINE)
THEN = re.compile(r"^rank (\d+) then raised (.+)$", re.MULTILINE)


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
    if word := ranks.left_word():
        return no_end(word)
    if type(error).__name__ == "RankError":
        return raised_there(str(error))
    return Raised(
        type(error).__name__, str(error), traceback.extract_tb(error.__traceback__)
    )


def no_end(word: list[list]) -> Raised:
    """That ranks wait, or compute, without end."""
    seconds, ranks.PATIENCE[0] = ranks.PATIENCE[0], ranks.PATIENCE[-1]
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
        if ranks.in_package(f.filename)
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
