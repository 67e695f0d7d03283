"""What is said of frequent slips: an unknown name, a function without `return`."""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from typing import Any

from bookkit.grammar import only_python
from bookkit.stage import touched
from workkit.cells import is_import

NEITHER = re.compile(r"(\w+) is neither defined in (\S+) nor imported")


def plainly(data: dict[str, dict[str, Any]], name: str, source: str, complaint: str) -> str:
    """The complaint of the tangle, as a reader can use it."""
    match = NEITHER.search(complaint)
    if not match:
        return complaint
    unknown, tree = match[1], ast.parse(source)
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == unknown]
    where = f"line {min(n.lineno for n in uses)}: " if uses else ""
    return f"{where}`{unknown}`{advice(data, name, tree, unknown)}"


def advice(data: dict, name: str, tree: ast.Module, unknown: str) -> str:
    """A near name, or where the unknown one is known."""
    known = next(chapter for chapter in data.values() if name in chapter["blanks"])
    module = name.rpartition(".")[0].replace(".", "/")
    if near := difflib.get_close_matches(unknown, own_names(tree), 1, 0.75):
        return f": did you mean `{near[0]}`?"
    before = list(data.values())[: list(data).index(known["key"])]
    for other, text in (piece for chapter in before for piece in pieces_of(chapter)):
        if unknown in defined(text, imports=False) and other != module:
            line = f"from attnlib.{other.replace('/', '.')} import {unknown}"
            return f": import it in this cell: {line}"
    story = "\n".join(map(only_python, story_of(known)))
    for node in filter(is_import, ast.walk(ast.parse(story))):
        for alias in node.names:
            if (alias.asname or alias.name) == unknown:
                return f": import it in this cell: {ast.unparse(node)}"
    if unknown in touched(story):
        return " belongs to the story; the package doesn't have it"
    made = (piece for chapter in data.values() for piece in pieces_of(chapter))
    there = [name for other, text in made if other == module for name in defined(text)]
    if near := difflib.get_close_matches(unknown, [*there, *dir(builtins)], 1, 0.75):
        return f": did you mean `{near[0]}`?"
    return f" is neither in attnlib/{module}.py nor imported: import it in this cell"


def own_names(tree: ast.Module) -> list[str]:
    """Arguments and variables of an answer."""
    found = [n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)]
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return found + [n.id for n in names if isinstance(n.ctx, ast.Store)]


def pieces_of(known: dict) -> list[tuple[str, str]]:
    """What a chapter adds to the package: module and text."""
    blanks = {name: blank["source"] for name, blank in known["blanks"].items()}
    return [
        (piece["module"], blanks.get(piece.get("blank"), piece.get("text", "")))
        for piece in known["package"]
    ]


def defined(text: str, imports: bool = True) -> list[str]:
    """What a piece of a module defines or imports."""
    found = []
    for node in ast.parse(text).body:
        if is_import(node):
            found += [a.asname or a.name for a in node.names if imports]
        elif isinstance(node, ast.Assign):
            found += [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif hasattr(node, "name"):
            found.append(node.name)
    return found


def story_of(known: dict) -> list[str]:
    """The cells of a chapter that are no part of the package and no answer."""
    cells = (c for c in known["cells"] if not c.get("blank") and "exercise" not in c)
    return [c["source"] for c in cells if not c["source"].startswith("# attnlib/")]


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
