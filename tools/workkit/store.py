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

from filelock import FileLock, Timeout

from bookkit.grammar import only_python

CAPTION = re.compile(r"# (?:attnlib/([\w/]+)\.py: yours, (\w+)|Exercise (\w+\.\d+): yours)")
WAIT = 30  # seconds
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


def read_own(path: Path) -> tuple[dict[str, Any], bool]:
    """What a file of ours says, and whether it is damaged; no file says nothing."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, False
    except ValueError:
        return {}, True
    except OSError as error:
        raise SystemExit(f"{path} can't be read: {error.strerror}") from None
    return (kept, False) if isinstance(kept, dict) else ({}, True)


def put_aside(path: Path) -> str:
    """Keeps a damaged file under another name; returns what is to be said of it."""
    aside = path.with_name(f"{path.stem}-damaged-{time.time_ns()}{path.suffix}")
    os.replace(path, aside)
    return f"yours/{path.name} was damaged, and is kept as yours/{aside.name}."


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Waits until no other run writes in the folder; a run that dies holds nothing."""
    path = folder / "yours" / "lock"
    lock = FileLock(path, timeout=WAIT, is_singleton=True)  # again within itself: at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise SystemExit(f"another run is writing in {path.parent}") from None
    except OSError as error:
        raise SystemExit(f"{path.parent} can't be written: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


class Store:
    """The answers of a folder, by name; each is the source of its cell."""

    def __init__(self, folder: Path, blanks: dict[str, str]) -> None:
        self.folder, self.blanks = folder, blanks  # untouched cells, by name
        self.path = folder / "yours" / "answers.json"
        self.kept: dict[str, dict[str, str]] = read_own(self.path)[0]
        self.told: list[str] = []  # what was wrong with a file, or stands twice

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Reads the answers again and writes them, while no other run does."""
        with only_one(self.folder):
            self.kept, damaged = read_own(self.path)
            if damaged:
                self.told.append(
                    f"{put_aside(self.path)} Your answers are read from the notebooks."
                )
            yield
            write_whole(self.path, json.dumps(self.kept, indent=1, ensure_ascii=False))

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

    def collect(self, homes: dict[str, str], put_back: bool = True) -> int:
        """Takes the answers from the notebooks; returns how many it put back into them.

        Args:
            homes: the notebook of each name; its cells in another one, such as a copy,
                count only where that one is missing.
            put_back: whether to write answers into cells that are blank again. A notebook
                that is open has an editor, which writes it.
        """
        read = {
            p: read_json(p, None) for p in sorted((self.folder / "book").glob("*.ipynb"))
        }
        there, found = {path.name for path in read}, {}
        for path, notebook in read.items():
            if not is_notebook(notebook):
                self.told.append(f"book/{path.name} can't be read: is it whole?")
                continue
            for name, cell in named_cells(notebook):
                home = homes.get(name, path.name)
                if name in self.blanks and (home == path.name or home not in there):
                    found.setdefault(name, []).append((path, cell))
        for name, cells in found.items():
            self.take(name, ["".join(cell["source"]) for _, cell in cells])
        if not put_back:
            return 0
        empty = {
            name
            for name, cells in found.items()
            if all(self.untouched(name, "".join(cell["source"])) for _, cell in cells)
        }
        blank = [
            (path, name, cell)
            for name, cells in found.items()
            for path, cell in cells
            if name in self.answers and name in empty
        ]
        before = {path: read_json(path, None) for path in {path for path, _, _ in blank}}
        unchanged = {path for path, old in before.items() if old == read[path]}
        for _, name, cell in blank:
            cell["source"] = self.answers[name].splitlines(keepends=True)
        for path in unchanged:  # since it was read
            text = json.dumps(read[path], indent=1, ensure_ascii=False)
            write_whole(path, text + "\n")
        return sum(path in unchanged for path, _, _ in blank)

    def take(self, name: str, sources: list[str]) -> None:
        """What a notebook says; of several answers the kept one, or else the last."""
        written = [s for s in dict.fromkeys(sources) if not self.untouched(name, s)]
        if len(written) > 1:
            symbol, now = name.rpartition(".")[2], self.kept.get(name, {}).get("now")
            counts = "the one that ran last" if now in written else "the last"
            self.told.append(
                f"Two cells are the answer of `{symbol}`: {counts} counts; empty the other."
            )
            if now in written:
                return
        for source in written[-1:]:
            self.put(name, source, seen=True)


def is_notebook(notebook: Any) -> bool:
    return isinstance(notebook, dict) and isinstance(notebook.get("cells"), list)


def named_cells(notebook: dict[str, Any], kind: str = "code") -> Iterator[tuple[str, dict]]:
    """The cells that answer something, with the name of what they answer."""
    for cell in notebook["cells"]:
        name = name_of("".join(cell.get("source", "")))
        if name is not None and (cell.get("cell_type") == "code") == (kind == "code"):
            yield name, cell


def bare(source: str) -> str:
    """The source without what changes nothing: blank lines, spaces at the ends of lines."""
    lines = (line.rstrip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


def lost(folder: Path, data: dict[str, dict], answers: dict[str, str]) -> list[str]:
    """What is to be said of answers that no notebook holds, or another cell does."""
    read = {p.name: cells_of(p) for p in sorted((folder / "book").glob("*.ipynb"))}
    homes = homes_of(data)
    there = {
        name
        for file, cells in read.items()
        for name in map(name_of, cells or [])
        if homes.get(name) == file or homes.get(name) not in read
    }
    said = [*elsewhere(folder, homes), *not_code(folder, homes)]
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


def homes_of(data: dict[str, dict]) -> dict[str, str]:
    """The notebook in which each definition and exercise is answered."""
    return {
        name: known["file"]
        for known in data.values()
        for name in [*known["blanks"], *(e["number"] for e in known["exercises"])]
    }


def elsewhere(folder: Path, homes: dict[str, str]) -> list[str]:
    """What is to be said of notebooks that are copies, and count no more."""
    said = []
    for path in sorted((folder / "book").glob("*.ipynb")):
        names = {*map(name_of, cells_of(path) or [])} & homes.keys()
        beside = [n for n in names if homes[n] != path.name]
        if any((folder / "book" / homes[name]).exists() for name in beside):
            home = homes[min(beside)]
            said.append(f"book/{path.name} does not count: book/{home} does.")
    return said


def not_code(folder: Path, homes: dict[str, str]) -> list[str]:
    """What is to be said of answers in cells that do not run."""
    said = []
    for file in sorted({*homes.values()}):
        notebook = read_json(folder / "book" / file, None)
        for name, cell in named_cells(notebook, "other") if is_notebook(notebook) else ():
            kind = cell.get("cell_type")
            said.append(
                f"The answer of `{name.rpartition('.')[2] if name[0].isalpha() else name}` "
                f"in book/{file} is a {kind} cell: make it a code cell."
            )
    return said


def cells_of(path: Path) -> list[str] | None:
    """The sources of a notebook's code cells; None if it can't be read."""
    notebook = read_json(path, None)
    if not is_notebook(notebook):
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
