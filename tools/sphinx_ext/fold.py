"""What a page shows as one line, and the mark at each equation that leads to its check.

- A listing whose caption says what it adds, ``# attnlib/<module>.py: a sentence``, is
  folded; the line shows file, number of lines and the sentence.
- So is a check with a sentence, ``# checks eq-name, eq-other: a sentence``; the line shows
  the numbers of the equations. Its outputs stay in view.
- Any other cell with the tag ``hide-input`` shows its first comment; a long setup is one
  line, too.
- Behind an equation's number stands a link to the first assertion that checks it.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from bookkit.chapters import ROOT, read_chapters
from bookkit.equations import find_checks
from bookkit.grammar import LABEL, Cell

NUMBER = re.compile(
    r'(<div class="math[^>]*id="equation-([\w-]+)">\s*<span class="eqno">\([\w.]+\))'
)
MARKS = {
    "checks": ("✓", "Checked"),
    "illustrates": ("≈", "Illustrated"),
    "": ("≔", "Defined; used"),
}


def fold(shown: nodes.container, cell: Cell) -> None:
    """Make one line of a cell that says what it holds."""
    first, _, rest = cell.source.partition("\n")
    line = ""
    if cell.sentence and cell.module:
        lines = sum(bool(text.strip()) for text in rest.splitlines())
        line = f"attnlib/{cell.module}.py · {lines} lines: {cell.sentence}"
    elif cell.sentence:
        line = f"{MARKS[cell.checks[0][0]][1]}: {', '.join(cell.labels)}: {cell.sentence}"
        shown["classes"].append("aside")
    elif shown.get("hide_mode") == "input" and first.startswith("# "):
        line = first.removeprefix("# ")
        shown["classes"].append("aside")
    elif first == "# Setup" and rest.count("\n") > 10:
        line = "Setup: what the cells below use"
        shown["classes"].append("aside")
    if line:
        shown["hide_mode"], shown["prompt_show"], shown["prompt_hide"] = "input", line, line


def in_ranges(numbers: set[tuple[Any, ...]]) -> str:
    """(10.6) to (10.8), (10.10): in their order, three or more in a row by their ends."""
    rows: list[list[tuple[Any, ...]]] = []
    for number in sorted(numbers, key=lambda number: (isinstance(number[0], str), number)):
        if rows and (*rows[-1][-1][:-1], rows[-1][-1][-1] + 1) == number:
            rows[-1].append(number)
        else:
            rows.append([number])
    shown = [[f"({'.'.join(map(str, number))})" for number in row] for row in rows]
    return ", ".join(
        f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(row) for row in shown
    )


def letter_appendices(app: Sphinx, env: Any) -> list[str]:
    """Figures and equations of an appendix count from 1, behind its letter."""
    for page in env.toc_fignumbers:
        letter, _, rest = page.partition("_")
        if rest and letter.isupper():
            for numbers in env.toc_fignumbers[page].values():
                for place, anchor in enumerate(sorted(numbers, key=numbers.get), start=1):
                    numbers[anchor] = (letter, place)
    return []


def name_equations(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """In the lines of checks, numbers in place of labels."""
    numbers = {
        anchor.removeprefix("equation-"): number
        for kinds in app.env.toc_fignumbers.values()
        for kind, found in kinds.items()
        if kind == "displaymath"
        for anchor, number in found.items()
    }
    for node in doctree.findall(
        lambda n: isinstance(n, nodes.Element) and "prompt_show" in n
    ):
        for prompt in ("prompt_show", "prompt_hide"):
            node[prompt] = re.sub(
                rf"{LABEL}(, {LABEL})*",
                lambda m: in_ranges({numbers[label] for label in m[0].split(", ")}),
                node[prompt],
            )


def find_marks(app: Sphinx) -> None:
    """For each label, the kind of its check and the place of it."""
    chapters = read_chapters(ROOT)
    links = find_checks(chapters, ROOT, [])
    pages = {chapter.key: chapter.name for chapter in chapters}
    cells = [cell for chapter in chapters for cell in chapter.code_cells]
    said = [check for cell in cells for check in cell.checks]
    illustrated = {label for kind, label in said if kind == "illustrates"}
    app.config.marks = {}
    for equation in (e for chapter in chapters for e in chapter.equations):
        places = re.findall(r"<(cell-(\w+?)-[^>]+)>", " ".join(links[equation.label]))
        if places:
            kind = "" if equation.source.startswith("definition") else "checks"
            if equation.label in illustrated:
                kind = "illustrates"
            app.config.marks[equation.label] = kind, pages[places[0][1]], places[0][0]


def mark_equations(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Behind the number of each equation, a link to its check."""

    def mark(match: re.Match[str]) -> str:
        if match[2] not in app.config.marks:
            return match[1]
        kind, where, cell = app.config.marks[match[2]]
        sign, word = MARKS[kind]
        place = f"#{cell}" if where == page else f"{where}.html#{cell}"
        said = f"{word} by running code"
        return f'{match[1]}<a class="eq-mark" href="{place}" title="{said}">{sign}</a>'

    context["body"] = NUMBER.sub(mark, context.get("body", ""))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.add_config_value("marks", {}, "")
    app.connect("builder-inited", find_marks)
    app.connect("env-get-updated", letter_appendices, priority=900)  # when all are counted
    app.connect("doctree-resolved", name_equations)
    app.connect("html-page-context", mark_equations, priority=905)
    return {"version": "1"}
