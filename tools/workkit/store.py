"""The reader's answers: read from the notebooks, kept beside them, never lost.

A cell is known by its first line, `# attnlib/masks.py: yours, causal_mask` or
`# Exercise 3.1: yours`. What it says is kept in yours/answers.json, and everything that it
has said before in yours/history.jsonl. A cell that is blank again, as after unpacking the
workbook anew, gets its answer back; `check.py reset NAME` empties one.

An answer in another cell, and a notebook that is missing, are told.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bookkit.grammar import only_python

CAPTION = re.compile(r"# (?:attnlib/([\w/]+)\.py: yours, (\w+)|Exercise (\w+\.\d+): yours)")
WAIT, STALE = 30, 120  # seconds
MISSING = "is missing: the stored answers are checked;"
BROKEN = "can't be read: is it whole? The stored answers are checked;"


def name_of(source: str) -> str | None:
    """`masks.causal_mask` or `3.1`, by the first line of a cell."""
    match = CAPTION.match(source)
    if not match:
        return None
    module, symbol, number = match.groups()
    return number or f"{module.replace('/', '.')}.{symbol}"


def write_whole(path: Path, text: str) -> None:
    """Writes beside the old file and then takes its place: an interruption leaves one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(text, encoding="utf-8", newline="\n")
    for attempt in range(20):  # on Windows another program may be reading the old one
        try:
            os.replace(beside, path)
            return
        except PermissionError:
            time.sleep(0.05 * attempt)
    os.replace(beside, path)


def read_json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Waits until no other run writes in the folder."""
    path, start = folder / "yours" / "lock", time.time()
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except (FileExistsError, PermissionError):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE:  # left by one that died
                    path.unlink()
            if time.time() - start > WAIT:
                raise SystemExit(
                    f"another run is writing here; if not, delete {path}"
                ) from None
            time.sleep(0.1)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class Store:
    """The answers of a folder, by name; each is the source of its cell."""

    def __init__(self, folder: Path, blanks: dict[str, str]) -> None:
        self.folder, self.blanks = folder, blanks  # untouched cells, by name
        self.path = folder / "yours" / "answers.json"
        self.kept: dict[str, dict[str, str]] = read_json(self.path, {})
        self.unread: list[str] = []  # notebooks that are not whole

    @property
    def answers(self) -> dict[str, str]:
        now = {name: kept["now"] for name, kept in self.kept.items()}
        return {name: text for name, text in now.items() if not self.untouched(name, text)}

    def untouched(self, name: str, source: str) -> bool:
        return not source.strip() or bare(source) == bare(self.blanks.get(name, ""))

    def put(self, name: str, source: str, seen: bool = False) -> None:
        """Keeps an answer; `seen` if the notebook's file says it."""
        kept = self.kept.setdefault(name, {"now": "", "seen": ""})
        if seen:
            if source == kept["seen"] or self.untouched(name, source):
                return
            kept["seen"] = source
        if source != kept["now"]:
            if kept["now"]:
                self.remember(name, kept["now"])
            kept["now"] = source

    def remember(self, name: str, source: str) -> None:
        line = json.dumps({"name": name, "until": round(time.time()), "source": source})
        path = self.folder / "yours" / "history.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(line + "\n")

    def reset(self, name: str) -> None:
        self.put(name, self.blanks[name])
        self.kept[name]["seen"] = ""

    def collect(self) -> int:
        """Takes the answers from all notebooks; returns how many it put back into them."""
        back = 0
        for path in sorted((self.folder / "book").glob("*.ipynb")):
            notebook = read_json(path, None)
            if not isinstance(notebook, dict) or "cells" not in notebook:
                self.unread.append(f"book/{path.name}")
                continue
            here = 0
            for cell in notebook["cells"]:
                source = "".join(cell.get("source", ""))
                name = name_of(source) if cell.get("cell_type") == "code" else None
                if name is None or name not in self.blanks:
                    continue
                self.put(name, source, seen=True)
                if self.untouched(name, source) and name in self.answers:
                    cell["source"] = self.answers[name].splitlines(keepends=True)
                    here += 1
            if here:
                write_whole(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
            back += here
        self.save()
        return back

    def save(self) -> None:
        write_whole(self.path, json.dumps(self.kept, indent=1, ensure_ascii=False))


def bare(source: str) -> str:
    """The source without what changes nothing: blank lines, spaces at the ends of lines."""
    lines = (line.rstrip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


def lost(folder: Path, data: dict[str, dict], answers: dict[str, str]) -> list[str]:
    """What is to be said of answers that no notebook holds, or another cell does."""
    read = {p.name: cells_of(p) for p in sorted((folder / "book").glob("*.ipynb"))}
    there = {name_of(source) for cells in read.values() for source in cells or []}
    said = []
    for known in data.values():
        tasks = [*known["blanks"], *(e["number"] for e in known["exercises"])]
        kept = [name for name in tasks if name in answers and name not in there]
        cells = read.get(known["file"])
        if cells is None and kept:
            broken = known["file"] in read
            said.append(f"book/{known['file']} {BROKEN if broken else MISSING}".strip())
            said[-1] += f" copy it back from data/notebooks/{known['file']}."
        if cells is None:
            continue
        pristine = cells_of(folder / "data" / "notebooks" / known["file"]) or []
        others = [c for c in cells if c not in pristine]
        for name, blank in known["blanks"].items():
            if name in there and name in answers:
                continue
            line = blank["source"].partition("\n")[0]
            if any(defines(c, name) for c in others):
                again = "" if name in there else ": put that line back as its first"
                said.append(
                    f"`{blank['symbol']}` is defined in another cell; what counts is the "
                    f"cell that begins with `{line}`{again}."
                )
            elif name in kept:
                said.append(
                    f"The cell of `{blank['symbol']}`, which begins with `{line}`, is no "
                    f"longer in book/{known['file']}: the stored answer is checked."
                )
    return said


def cells_of(path: Path) -> list[str] | None:
    """The sources of a notebook's code cells; None if it can't be read."""
    notebook = read_json(path, None)
    if not isinstance(notebook, dict) or "cells" not in notebook:
        return None
    cells = [c for c in notebook["cells"] if c.get("cell_type") == "code"]
    return ["".join(cell.get("source", "")) for cell in cells]


def defines(source: str, name: str) -> bool:
    """Whether a cell defines what another cell should."""
    symbol = name.rpartition(".")[2]
    if name_of(source) == name or symbol not in source:
        return False
    try:
        nodes = ast.parse(only_python(source)).body
    except SyntaxError:
        return False
    return any(getattr(node, "name", "") == symbol for node in nodes)
