"""Answers that stand where they do not count, and notebooks that are not there."""

from __future__ import annotations

import ast
from pathlib import Path

from bookkit.grammar import only_python
from workkit.store import name_of, read_json

MISSING = "is missing: the stored answers are checked;"
BROKEN = "can't be read: is it whole? The stored answers are checked;"


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
