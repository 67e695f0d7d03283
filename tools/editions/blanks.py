"""What of the package is left to the reader of the workbook, and what comes filled in.

`book/workbook/blanks.toml` names the definitions that are left out, in the order of the
book: what to do, minutes, two hints, and under `shown` what the story calls the same thing;
under `toy`, whether what it calls by the same name is another thing, and stays.
Of a function, what teaches nothing stays: refusals, the calls that hand arguments on, and
the way past the formula, such as PyTorch's fused function. Of a class, the methods named in
GIVEN stay whole.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bookkit.chapters import BookError
from editions.runs import handed_on, runs_of

REFUSALS = "refuse_", "require_"  # how the names of what refuses begin
GIVEN = {"from_torch", "from_linear", "extra_repr", "_load_from_state_dict"}
GIVEN |= {
    "vmap",
    "setup_context",
    "flat",
    "unflat",
    "_public",
    "_held",
    "__init_subclass__",
}
ASKS = 'raise NotImplementedError("{}: this is yours to write")'


@dataclass
class Blank:
    """A definition that the reader writes."""

    name: str  # masks.causal_mask
    minutes: int
    todo: str
    hints: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # its names in the story
    toy: bool = False  # the story's definition of its name is another thing, and stays
    story: str = ""  # code that makes of the reader's what the story means by that name
    given: list[str] = field(default_factory=list)  # methods, or beginnings, that stay
    lines: int = 0  # that it takes; 0 means as many as ours

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0].replace(".", "/")

    @property
    def symbol(self) -> str:
        return self.name.rpartition(".")[2]


def read_blanks(root: Path) -> dict[str, Blank]:
    blanks = {}
    for table in read_settings(root).get("blank", []):
        blank = Blank(**table)
        if blank.name in blanks:
            raise BookError(f"blanks.toml: {blank.name} stands there twice")
        if len(blank.hints) != 2:
            raise BookError(f"blanks.toml: {blank.name} needs two hints")
        blanks[blank.name] = blank
    return blanks


def read_given(root: Path) -> set[str]:
    """Definitions, and whole modules, that no reader is asked for."""
    return set(read_settings(root)["given"])


def read_settings(root: Path) -> dict[str, Any]:
    path = root / "book" / "workbook" / "blanks.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def without_answer(blank: Blank, source: str) -> tuple[str, int]:
    """The definition with its signature, its docstring and the plumbing, and a blank.

    And about how many lines belong there.
    """
    (node,) = ast.parse(source).body
    lines = source.split("\n")
    functions = [node] if isinstance(node, ast.FunctionDef) else []
    if isinstance(node, ast.ClassDef):
        stay = GIVEN | set(blank.given)
        parts = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        functions = [n for n in parts if n.name not in stay]
    removed = 0
    for function in reversed(functions):
        runs = runs_of(function, blank.given)
        for index, (first, last) in reversed(list(enumerate(runs))):
            start, end = first.lineno - 1, last.end_lineno
            while lines[start - 1].lstrip().startswith("#"):
                start -= 1
            owner = blank.symbol if function is node else f"{blank.symbol}.{function.name}"
            indent = " " * first.col_offset
            asks = [ASKS.format(owner)] if index == 0 else []
            asks += [f"{name} = ..." for name in handed_on(function, first, last)]
            about = f"# Yours: about {count(blank.lines or end - start)}."
            removed += end - start
            lines[start:end] = [f"{indent}{line}" for line in [about, *(asks or ["..."])]]
    if not removed:
        raise BookError(f"blanks.toml: nothing of {blank.name} can be left out")
    return "\n".join(lines), blank.lines or removed


def count(lines: int) -> str:
    return "1 line" if lines == 1 else f"{lines} lines"
