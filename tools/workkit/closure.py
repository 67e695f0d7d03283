"""Which cells of a chapter its checks need."""

from __future__ import annotations

import ast
from types import ModuleType
from typing import Any

from bookkit.grammar import CHECKS, only_python
from bookkit.stage import touched, used


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def imported(cells: list[dict]) -> set[str]:
    """The modules that cells import."""
    trees = [ast.parse(only_python(cell["source"])) for cell in cells]
    imports = [n for tree in trees for n in ast.walk(tree) if is_import(n)]
    names = {n.module or "" for n in imports if isinstance(n, ast.ImportFrom)}
    return names | {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}


def attributes(tree: ast.AST, namespace: dict[str, Any]) -> set[str]:
    """The names of attributes, but for what belongs to another library's module."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    owners = [namespace.get(getattr(n.value, "id", "")) for n in nodes]
    theirs = [isinstance(o, ModuleType) and "attnlib" not in o.__name__ for o in owners]
    return {n.attr for n, other in zip(nodes, theirs, strict=True) if not other}


def set_by(node: ast.stmt) -> set[str]:
    """What a loop counts with: its values before the loop do not matter."""
    if not isinstance(node, ast.For):
        return set()
    read = {n.id for n in ast.walk(node.iter) if isinstance(n, ast.Name)}
    return {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)} - read


def caught(node: ast.stmt) -> set[str]:
    """Names of errors that it catches: they are gone when it has run."""
    handlers = [n for n in ast.walk(node) if isinstance(n, ast.ExceptHandler)]
    return {n.name for n in handlers if n.name}


def is_check(source: str) -> bool:
    return any(CHECKS.match(line) for line in source.splitlines())


def needed(cells: list[dict]) -> set[int]:
    """The cells that checks and exercises need: they define or change what those use."""
    sources = [only_python(cell["source"]) for cell in cells]
    imported = set()
    for source in sources:
        for node in filter(is_import, ast.walk(ast.parse(source))):
            imported |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    uses = [used(source) - imported for source in sources]
    makes = [touched(source) - imported for source in sources]
    chosen = {i for i, source in enumerate(sources) if is_check(source)}
    chosen |= {i for i, source in enumerate(sources) if source.startswith("# attnlib/")}
    for index, cell in enumerate(cells):
        if "exercise" in cell:  # what its check needs, and its answer
            chosen.add(index)
            uses[index] |= set(cell["checks"]) | set(cell.get("names", []))
    while True:
        more = {
            i
            for last in chosen
            for i in range(last)
            if i not in chosen and makes[i] & uses[last]
        }
        if not more:
            return chosen
        chosen |= more
