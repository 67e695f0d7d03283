"""What of the package is left to the reader of the workbook, and what comes filled in.

`book/workbook/blanks.toml` names the definitions that are left out, in the order of the
book: what to do, minutes, two hints, and under `shown` what the story calls the same thing.
Of a function, what teaches nothing stays: refusals, the calls that hand arguments on, and
the way past the formula, such as PyTorch's fused function. Of a class, the methods named in
GIVEN stay whole.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from bookkit.chapters import BookError

GIVEN = {"from_torch", "from_linear", "extra_repr", "_apply", "_load_from_state_dict"}
GIVEN |= {
    "vmap",
    "setup_context",
    "flat",
    "unflat",
    "_public",
    "_held",
    "__init_subclass__",
}
PLUMBING = re.compile(
    r"refuse_|require_|as_autocast|under_autocast|^super$|fused_attention|^with_batch$"
)
ASKS = 'raise NotImplementedError("{}: this is yours to write")'


@dataclass
class Blank:
    """A definition that the reader writes."""

    name: str  # masks.causal_mask
    minutes: int
    todo: str
    hints: list[str]
    shown: list[str] = field(default_factory=list)  # its names in the story
    story: str = ""  # code that makes of the reader's what the story means by that name
    given: list[str] = field(default_factory=list)  # methods that stay
    lines: int = 0  # that it takes; 0 means as many as ours

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0].replace(".", "/")

    @property
    def symbol(self) -> str:
        return self.name.rpartition(".")[2]


def read_blanks(root: Path) -> dict[str, Blank]:
    path = root / "book" / "workbook" / "blanks.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("blank", [])
    blanks = {}
    for table in tables:
        blank = Blank(**table)
        if blank.name in blanks:
            raise BookError(f"{path.name}: {blank.name} stands there twice")
        if len(blank.hints) != 2:
            raise BookError(f"{path.name}: {blank.name} needs two hints")
        blanks[blank.name] = blank
    return blanks


def without_answer(blank: Blank, source: str) -> str:
    """The definition with its signature, its docstring and the plumbing, and a blank."""
    (node,) = ast.parse(source).body
    lines = source.split("\n")
    functions = [node] if isinstance(node, ast.FunctionDef) else []
    if isinstance(node, ast.ClassDef):
        stay = GIVEN | set(blank.given)
        parts = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        functions = [n for n in parts if n.name not in stay]
    removed, told = 0, blank.lines
    for function in reversed(functions):
        runs = runs_of(function)
        for index, (first, last) in reversed(list(enumerate(runs))):
            start, end = first.lineno - 1, last.end_lineno
            while lines[start - 1].lstrip().startswith("#"):
                start -= 1
            owner = blank.symbol if function is node else f"{blank.symbol}.{function.name}"
            indent = " " * first.col_offset
            ask = ASKS.format(owner) if index == 0 else "..."
            about = f"{indent}# Yours: about {count(told or end - start)}."
            removed += end - start
            lines[start:end] = [about, f"{indent}{ask}"]
    if not removed:
        raise BookError(f"blanks.toml: nothing of {blank.name} can be left out")
    blank.lines = told or removed
    return "\n".join(lines)


def count(lines: int) -> str:
    return "1 line" if lines == 1 else f"{lines} lines"


def runs_of(function: ast.FunctionDef) -> list[tuple[ast.stmt, ast.stmt]]:
    """Statements of the body that follow each other and are left to the reader."""
    stays, needed = set(), set()
    for index, statement in reversed(list(enumerate(function.body))):
        made = names_of(statement, ast.Store)
        later = set().union(*(names_of(s, ast.Load) for s in function.body[index + 1 :]))
        handed = isinstance(statement, ast.Assign) and made & needed  # to a refusal
        if is_plumbing(statement, made & later) or handed:
            stays.add(statement)
            needed |= names_of(statement, ast.Load)
    left = [s for s in function.body if s not in stays]
    if all(trivial(s) for s in left):
        return []  # nothing but `self.scale = scale`
    runs: list[tuple[ast.stmt, ast.stmt]] = []
    for before, statement in zip([None, *function.body], function.body, strict=False):
        if statement in left:
            joins = before in left
            runs[-1 if joins else len(runs) :] = [
                (runs[-1][0] if joins else statement, statement)
            ]
    return runs


def names_of(node: ast.AST, context: type) -> set[str]:
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, context)}


def is_plumbing(statement: ast.stmt, results: set[str]) -> bool:
    """Whether a statement refuses or hands on; one that computes `results` does more."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True  # the docstring
    raises = any(isinstance(n, ast.Raise) for n in ast.walk(statement)) and not results
    return raises or any(PLUMBING.search(n) for n in names_of(statement, ast.Load))


def trivial(statement: ast.stmt) -> bool:
    """`self.scale = scale`, or `pass`."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
        targets = {ast.unparse(target) for target in statement.targets}
        return targets == {f"self.{statement.value.id}"}
    return isinstance(statement, ast.Pass)
