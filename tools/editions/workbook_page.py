"""The cells of a notebook of the workbook, and what stands beside the notebooks."""

from __future__ import annotations

import re
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from bookkit.chapters import Chapter
from bookkit.grammar import Cell
from editions.blanks import count
from editions.plain import Plain
from editions.reflow import Shown, source_of

FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}}
SETUP = """\
# Setup of the workbook: run this cell first. `workbook.check()` then runs the checks of
# this chapter on what you wrote, and `workbook.hint("…")` gives a hint.
import os
import sys
from pathlib import Path

if "google.colab" in sys.modules:  # the folder lies on your drive
    from google.colab import drive

    drive.mount("/content/drive")
    os.chdir("/content/drive/MyDrive/{folder}/book")
sys.path[:0] = [str(Path("..").resolve()), str(Path("../tools").resolve())]
from workkit.notebook import begin

workbook = begin("{key}")"""
BEGIN = """\
**Workbook.** Run the cell above first, then the others from the top. In this chapter you \
write {names}. Until {each} is written, the cells that need it raise an error that \
names it; all others run."""
TURN = """\
### Your turn: `{symbol}`

*About {minutes} minutes, {lines}.* {todo}

{formulas}Write it in the next cell, in place of the line that raises, and run \
that cell: it is then part of your package. Stuck? `workbook.hint("{symbol}")` gives \
the first hint."""
CHECK = """\
## Is it right?

The next cell runs the checks of this chapter on your code, in a process of its own. Save \
the notebook first, if you changed cells without running them."""


def cells_of(
    chapter: Chapter, shown: list[Shown], known: dict[str, Any], plain: Plain | None
) -> list[NotebookNode]:
    """The notebook's cells: the story, the blanks, the checks."""
    setup = SETUP.format(folder="attnlib-workbook", key=chapter.key)
    cells = [new_code_cell(setup, id="workbook-setup", metadata=FOLDED)]
    if known["blanks"]:
        names = ", ".join(
            f"`{b['symbol']}` ({b['minutes']} minutes)" for b in known["blanks"].values()
        )
        each = "one of them" if len(known["blanks"]) > 1 else "it"
        begin = BEGIN.format(names=" and ".join(names.rsplit(", ", 1)), each=each)
        cells.append(new_markdown_cell(begin, id="workbook-begin"))
    asked: set[str] = set()
    for at, part in enumerate(shown):
        cell, source = part.cell, part.cell.source
        if part.pieces:
            cells += piece_cells(part, known, f"package-{at}")
        elif cell.cell_type == "markdown":
            text = source
            if plain:
                text = plain.markdown(source, chapter.name, chapter.where(cell))
                text = re.sub(r"\A# +", f"# {chapter.number} ", text)
            cells.append(new_markdown_cell(text, id=cell.id))
        elif number := cell.exercise:
            if number not in asked:
                asked.add(number)
                id = f"exercise-{number.replace('.', '-')}"
                found = [e for e in known["exercises"] if e["number"] == number]
                cells.append(new_code_cell(found[0]["source"], id=id))
        else:
            cells += story_cells(chapter, cell, plain)
    if known["blanks"]:
        cells.append(new_markdown_cell(CHECK, id="workbook-is-it-right"))
        cells.append(new_code_cell("workbook.check()", id="workbook-check"))
    return cells


def piece_cells(part: Shown, known: dict[str, Any], id: str) -> list[NotebookNode]:
    """A cell of the package: filled in and folded, or a blank with what to do."""
    blank, source = part.pieces[0].blank, source_of(part, answered=False)
    if not blank:
        return [new_code_cell(source, id=id, metadata=FOLDED)]
    found = known["blanks"][blank.name]
    here = [known["equations"][n] for n in found["labels"] if n in known["equations"]]
    formulas = "".join(f"$$\n{f} \\tag{{{n.strip('()')}}}\n$$\n\n" for n, f in here[:3])
    lines = count(found["lines"])
    text = TURN.format(**found | {"lines": lines, "formulas": formulas})
    return [new_markdown_cell(text, id=f"{id}-task"), new_code_cell(source, id=id)]


def story_cells(chapter: Chapter, cell: Cell, plain: Plain | None) -> list[NotebookNode]:
    """A code cell of the story with its results, and the caption of its figure."""
    source = plain.code(cell.source) if plain else cell.source
    made = new_code_cell(source, id=cell.id, metadata={} if cell.is_open else FOLDED)
    made.outputs, made.execution_count = cell.outputs, cell.execution_count
    return plain.captioned(made, chapter, cell) if plain else [made]
