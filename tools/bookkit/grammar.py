"""How a chapter is written, and its cells taken apart: what each says of what it is."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CHAPTER = re.compile(r"\d\d_|[A-Z]_")  # how the name of a chapter starts, or an appendix's
LABEL = r"eq-[a-z0-9-]*[a-z0-9]"
# $$ … $$ (label), and what stands below: <!-- label | source | symbols -->
EQUATION = re.compile(r"\$\$(.+?)\$\$(?:[ \t]*\(([^()\n]+)\))?", re.DOTALL)
COMMENT = re.compile(r"\s*<!--([^|>]*)\|([^|>]*)\|([^|>]*)-->")

# The first lines of cells, which say what a cell is; the site folds those with a sentence.
CAPTION = re.compile(r"# attnlib/((?:[a-z][a-z0-9_]*/)*[a-z][a-z0-9_]*)\.py(?:: +(.+))?\s*")
CHECKS = re.compile(rf"# (checks|illustrates) ({LABEL}(?:, {LABEL})*)(?:: +(.+))?")
SOLUTION = re.compile(r"# Solution (\w+\.\d+)")
CLOSED = {"hide-cell", "hide-input", "remove-cell", "remove-input"}  # tags


def only_python(source: str) -> str:
    """The source of a cell without what only IPython understands."""
    return re.sub(r"^[%!].*", "pass", source, flags=re.MULTILINE)


@dataclass
class Equation:
    """A formula of the text; with a label, it has a number, and a comment below it."""

    formula: str
    label: str
    about: str  # the label that the comment names
    source: str
    symbols: list[str]


class Cell(dict):
    """A cell as nbformat has it, which also knows what it is; any of it may be empty."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @property
    def caption(self) -> re.Match[str] | None:
        first = self.source.partition("\n")[0]
        return CAPTION.fullmatch(first) if self.cell_type == "code" else None

    @property
    def module(self) -> str:
        """`backprop/softmax` of a listing with caption `# attnlib/backprop/softmax.py`."""
        return self.caption[1] if self.caption else ""

    @property
    def exercise(self) -> str:
        """The number of the exercise that it solves."""
        match = SOLUTION.match(self.source) if self.cell_type == "code" else None
        return match[1] if match else ""

    @property
    def sentence(self) -> str:
        """What a listing or a check says is in it: the site and Jupyter then fold it."""
        match = self.caption or CHECKS.fullmatch(self.source.partition("\n")[0])
        return (match and match[match.re.groups]) or ""

    @property
    def is_open(self) -> bool:
        return not self.sentence and not CLOSED & set(self.metadata.get("tags", []))

    @property
    def python(self) -> str:
        """Its source without what only IPython understands."""
        return only_python(self.source)

    @property
    def definitions(self) -> list[str]:
        """The names of its classes and functions; `X.method` where it continues a class."""
        nodes = ast.parse(self.python).body
        found = [n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        return [name for n in found for name in continuing(n) or [n.name]]

    @property
    def checks(self) -> list[tuple[str, str]]:
        return marks_of(self.python) if self.cell_type == "code" else []

    @property
    def labels(self) -> list[str]:
        """The equations that it checks."""
        return [label for _, label in self.checks]

    @property
    def equations(self) -> list[Equation]:
        return list(equations_of(self.source)) if self.cell_type == "markdown" else []


def continuing(node: ast.stmt) -> list[str]:
    """What `class X(X):` adds to the class X of an earlier cell: the names `X.method`."""
    if not isinstance(node, ast.ClassDef):
        return []
    if not any(getattr(base, "id", "") == node.name for base in node.bases):
        return []
    return [f"{node.name}.{getattr(part, 'name', '')}" for part in node.body]


def marks_of(python: str) -> list[tuple[str, str]]:
    """The labels that the comments of some code name, each with `checks` or `illustrates`.

    Raises:
        SyntaxError: it is not Python.
    """
    if not CHECKS.search(python):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(python).readline)
    comments = [CHECKS.match(t.string) for t in tokens if t.type == tokenize.COMMENT]
    return [(m[1], label) for m in comments if m for label in m[2].split(", ")]


def equations_of(text: str) -> Iterator[Equation]:
    for match in EQUATION.finditer(text):
        formula = re.sub(r"\s*(?<!\\)[.,;]?\s*$", "", match[1]).strip()
        label = match[2] or ""
        comment = COMMENT.match(text, match.end())
        said = comment.groups() if comment else (label, "", "")
        about, source, symbols = (part.strip() for part in said)
        wanted = [symbol.strip() for symbol in symbols.split(",") if symbol.strip()]
        yield Equation(formula, label, about, source, wanted)


def with_numbers(text: str, number: Callable[[str], str]) -> str:
    """The text with numbers in its formulas, in place of the labels behind them."""

    def tagged(match: re.Match[str]) -> str:
        if not match[2]:
            return match[0]
        return f"$${match[1].rstrip()} \\tag{{{number(match[2])}}}\n$$"

    return EQUATION.sub(tagged, text)
