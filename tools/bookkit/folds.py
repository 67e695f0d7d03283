"""What of a listing that stands open is folded: imports, types, parts of docstrings.

The first paragraph of a docstring stays in view; the rest, its details and its sections,
`Args:` and the others of SECTIONS, is one line, so that the code is not far from the name
of the class. The line of the imports names those of the package itself. A signature of
several lines is shown without its types.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, takewhile

SECTIONS = {
    "Args": "arguments",
    "Attributes": "attributes",
    "Returns": "result",
    "Raises": "errors",
    "Source": "source",
}
SECTION = re.compile(rf"\s*({'|'.join(SECTIONS)}):(?: |$)")
IMPORTS = ast.Import | ast.ImportFrom
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTIONS
WIDEST = 80  # of a short signature, beside which there is a word


@dataclass
class Fold:
    """Lines of a listing that are folded."""

    start: int  # the first one, counted from 0
    end: int  # behind the last one
    indent: int
    line: str  # what stands in their place, in words
    ends: str = ""  # and behind it: the quotes that end a docstring
    code: str = ""  # and before it: a signature without its types


def folds_of(source: str) -> list[Fold]:
    """The folds of a listing, from its top to its end.

    Raises:
        SyntaxError: it is not Python.
    """
    tree, lines = ast.parse(source), source.split("\n")
    nodes = [n for n in ast.walk(tree) if isinstance(n, DOCUMENTED)]
    documented = [n.body[0] for n in nodes if ast.get_docstring(n, clean=False)]
    found = [fold_of(lines, said.lineno - 1, said.end_lineno) for said in documented]
    found += [fold_of_types(lines, n) for n in nodes if isinstance(n, FUNCTIONS)]
    found.append(fold_of_imports(lines, tree))
    return sorted(filter(None, found), key=lambda fold: fold.start)


def fold_of_imports(lines: list[str], tree: ast.Module) -> Fold | None:
    """The fold of the imports with which a module begins, if there are several."""
    others = dropwhile(lambda n: not isinstance(n, IMPORTS), tree.body)
    imports = list(takewhile(lambda n: isinstance(n, IMPORTS), others))
    if len(imports) < 2:
        return None
    start, end = imports[0].lineno - 1, imports[-1].end_lineno
    count = sum(bool(line.strip()) for line in lines[start:end])
    ours = [n for n in imports if (getattr(n, "module", "") or "").startswith("attnlib")]
    names = ", ".join(alias.name for n in ours for alias in n.names)
    return Fold(start, end, 0, f"{count} lines: imports{names and '; of attnlib '}{names}")


def fold_of_types(lines: list[str], node: ast.FunctionDef) -> Fold | None:
    """The fold of a signature of several lines, if it has types and is shorter without."""
    start, end = node.lineno - 1, node.body[0].lineno - 1
    while end > start and not lines[end - 1].rstrip().endswith(":"):
        end -= 1  # comments above the body
    indent = len(lines[start]) - len(lines[start].lstrip())
    short = short_signature(lines[start].split("(")[0], node.args)
    if end - start <= short.count("\n") + 1 or not any(types_of(node.args)):
        return None
    return Fold(start, end, indent, "types", code=short)


def types_of(arguments: ast.arguments) -> Iterator[ast.expr | None]:
    """The type of each argument."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            yield argument.annotation


def short_signature(opening: str, arguments: ast.arguments) -> str:
    """`def name(a, b=1):`, its arguments on lines of their own if one is too short."""
    bare = copy.deepcopy(arguments)
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    inside = ast.unparse(bare).replace("'", '"')
    line, indent = f"{opening}({inside}):", re.match(" *", opening)[0]
    if len(line) <= WIDEST:
        return line
    within = textwrap.indent(textwrap.fill(inside, WIDEST - len(indent)), f"{indent}    ")
    return f"{opening}(\n{within}\n{indent}):"


def fold_of(lines: list[str], first: int, end: int) -> Fold | None:
    """The fold of the docstring in these lines, if it has more than its first paragraph."""
    start = next((i for i in range(first, end) if not lines[i].strip()), end)
    if start == end:
        return None
    sections = list(sections_of(lines, first, end))
    indent = len(lines[first]) - len(lines[first].lstrip())
    count = sum(bool(line.strip(' "')) for line in lines[start:end])
    what = ["details"] if not sections or lines[start + 1] != lines[sections[0][0]] else []
    what += [SECTIONS[name] for _, name in sections]
    return Fold(
        start, end, indent, f"{count} line{'s' * (count > 1)}: {', '.join(what)}", '"""'
    )


def sections_of(lines: list[str], first: int, end: int) -> Iterator[tuple[int, str]]:
    """Where the sections of a docstring begin, with the name of each."""
    for index in range(first + 1, end):
        if match := SECTION.match(lines[index]):
            yield index, match[1]


def lines_in_view(source: str) -> int:
    """How many lines of a listing a reader sees before any fold is opened."""
    shown = sum(f.start - f.end + f.code.count("\n") + 1 for f in folds_of(source))
    return len(source.split("\n")) + shown
