"""Which cells of a chapter its checks need."""

from __future__ import annotations

import ast
import re

from bookkit.grammar import CHECKS
from bookkit.stage import touched, used


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def is_check(source: str) -> bool:
    return any(CHECKS.match(line) for line in source.splitlines())


def needed(sources: list[str]) -> set[int]:
    """The cells that the checks need: those that define or change what they use."""
    imported = set()
    for source in sources:
        for node in filter(is_import, ast.walk(ast.parse(source))):
            imported |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    uses = [used(source) - imported for source in sources]
    makes = [touched(source) - imported for source in sources]
    chosen = {i for i, source in enumerate(sources) if is_check(source)}
    chosen |= {
        i for i, s in enumerate(sources) if re.match(r"# (The checks? of|attnlib/)", s)
    }
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
