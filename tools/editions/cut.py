"""A cell of the story without the definitions that the reader writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from nbformat.v4 import new_code_cell

from bookkit.grammar import Cell
from editions.blanks import Blank


def split(cell: Cell, shown_as: dict[str, Any]) -> Iterator[Any]:
    """The cell without the definitions that the reader writes, and where these come."""
    source = cell.source
    nodes = ast.parse(cell.python).body
    cut = [n for n in nodes if getattr(n, "name", None) in shown_as]
    cut = [n for n in cut if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    if not cut:
        yield cell
        return
    lines = source.split("\n")
    first = min([cut[0].lineno, *(d.lineno for d in cut[0].decorator_list)]) - 1
    before = "\n".join(lines[:first]).strip()
    if any(node.lineno <= first for node in nodes):
        above = new_code_cell(before, id=f"{cell.id}-before", metadata=cell.metadata)
        yield Cell(above)
    for node in cut:
        yield shown_as[node.name]
    rest = [adapter(node.name, shown_as[node.name].blank) for node in cut]
    gone = {i for n in cut for i in range(n.lineno - 1, n.end_lineno)}
    kept = [text for i, text in enumerate(lines) if i >= first and i not in gone]
    rest += ["\n".join(kept).strip("\n")]
    after = "\n\n".join(part for part in rest if part.strip())
    if after:
        made = new_code_cell(after, id=cell.id, metadata=cell.metadata)
        made.outputs, made.execution_count = cell.outputs, cell.execution_count
        yield Cell(made)


def adapter(name: str, blank: Blank) -> str:
    """Code by which the story finds the reader's definition under its own name."""
    if blank.story:
        yours = f"Yours = {blank.symbol}\n\n\n" if name == blank.symbol else ""
        parts = {n.name: n for n in ast.parse(blank.story).body}
        own = ast.get_source_segment(blank.story, parts[name]) if name in parts else None
        return yours + (own or blank.story.strip("\n"))
    same = name == blank.symbol
    return "" if same else f"{name} = {blank.symbol}  # the story's name for yours"
