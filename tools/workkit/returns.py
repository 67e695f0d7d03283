"""A function that says nothing in the end: the most frequent slip of all."""

from __future__ import annotations

import ast
from typing import Any


def told_of_none(found: dict[str, Any], name: str, source: str) -> None:
    """Where None came and the definition can end without `return`, the note says so."""
    note = found.get("note", {})
    none = "NoneType" in note.get("came", "") or "None" in note.get("compared", [])
    if none and (function := without_return(name.rpartition(".")[2], source)):
        note["message"] = f"`{function}` returned None: is there a `return`?"


def without_return(symbol: str, source: str) -> str:
    """A function of the definition that promises a value and can end without one."""
    try:
        nodes = ast.parse(source).body
    except SyntaxError:
        return ""
    for node in (n for n in nodes if getattr(n, "name", "") == symbol):
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        for part in (p for p in parts if isinstance(p, ast.FunctionDef)):
            inner = {n for n in ast.walk(part) if isinstance(n, ast.Yield | ast.YieldFrom)}
            promised = part.returns and ast.unparse(part.returns) != "None"
            if promised and not inner and runs_out(part.body):
                return part.name if part is node else f"{symbol}.{part.name}"
    return ""


def runs_out(body: list[ast.stmt]) -> bool:
    """Whether the end of these statements can be reached, or a return without a value."""
    if not body:
        return True
    last = body[-1]
    if isinstance(last, ast.Return):
        return last.value is None
    if isinstance(last, ast.If):
        return runs_out(last.body) or runs_out(last.orelse)
    if isinstance(last, ast.With):
        return runs_out(last.body)
    if isinstance(last, ast.Try):
        if last.finalbody and not runs_out(last.finalbody):
            return False
        ends = [last.orelse or last.body, *(h.body for h in last.handlers)]
        return any(map(runs_out, ends))
    if isinstance(last, ast.Match):
        return any(runs_out(case.body) for case in last.cases)
    if isinstance(last, ast.While):
        endless = isinstance(last.test, ast.Constant) and bool(last.test.value)
        return not endless
    return not isinstance(last, ast.Raise)
