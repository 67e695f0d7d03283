"""What of a listing that stands open is folded on the page: the sections of its docstrings.

The first paragraphs of a docstring stay in view; from its first section on, `Args:` or
another of SECTIONS, it is one line, so that the code is not far from the class's name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

SECTIONS = {
    "Args": "arguments",
    "Attributes": "attributes",
    "Returns": "result",
    "Raises": "errors",
    "Source": "source",
}
SECTION = re.compile(rf"\s*({'|'.join(SECTIONS)}):(?: |$)")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Fold:
    """Lines of a listing that are folded, the last with the quotes that end a docstring."""

    start: int  # the first one, counted from 0
    end: int  # behind the last one
    indent: int
    line: str  # what stands in their place, before the closing quotes


def folds_of(source: str) -> list[Fold]:
    """The folds of a listing, from its top to its end.

    Raises:
        SyntaxError: it is not Python.
    """
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, DOCUMENTED)]
    documented = [n.body[0] for n in nodes if ast.get_docstring(n, clean=False)]
    lines = source.split("\n")
    found = (fold_of(lines, said.lineno - 1, said.end_lineno) for said in documented)
    return sorted(filter(None, found), key=lambda fold: fold.start)


def fold_of(lines: list[str], first: int, end: int) -> Fold | None:
    """The fold of the docstring in these lines, if it has a section."""
    sections = list(sections_of(lines, first, end))
    if not sections:
        return None
    start, indent = sections[0][0], len(lines[first]) - len(lines[first].lstrip())
    count = sum(bool(line.strip(' "')) for line in lines[start:end])
    while not lines[start - 1].strip():
        start -= 1
    what = ", ".join(SECTIONS[name] for _, name in sections)
    return Fold(start, end, indent, f"{count} line{'s' * (count > 1)}: {what}")


def sections_of(lines: list[str], first: int, end: int) -> Iterator[tuple[int, str]]:
    """Where the sections of a docstring begin, with the name of each."""
    for index in range(first + 1, end):
        if match := SECTION.match(lines[index]):
            yield index, match[1]


def lines_in_view(source: str) -> int:
    """How many lines of a listing a reader sees before any fold is opened."""
    folds = folds_of(source)
    return len(source.split("\n")) - sum(fold.end - fold.start - 1 for fold in folds)
