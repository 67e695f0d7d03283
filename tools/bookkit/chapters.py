"""What the tools share: chapters are read here, and written in one stable format.

nbformat is imported where a notebook is read or written: its import takes two seconds, and
the programs of the workbook, which need cells only, start without it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bookkit.grammar import CHAPTER, Cell, Equation

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]


class BookError(Exception):
    """A mistake in the book; the message tells its author where it is and what to do."""


@dataclass(eq=False)
class Chapter:
    """One notebook of the book."""

    path: Path
    notebook: NotebookNode

    def __post_init__(self) -> None:
        self.notebook.cells = [Cell(cell) for cell in self.notebook.cells]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def file(self) -> str:
        return f"book/{self.path.name}"

    @property
    def key(self) -> str:
        """`05` of a chapter, `A` of an appendix."""
        return self.name.partition("_")[0]

    @property
    def number(self) -> int | str:
        return int(self.key) if self.key.isdigit() else self.key

    @property
    def is_appendix(self) -> bool:
        return not self.key.isdigit()

    @property
    def called(self) -> str:
        return f"{'appendix' if self.is_appendix else 'chapter'} {self.number}"

    @property
    def cells(self) -> list[Cell]:
        return self.notebook.cells

    @property
    def code_cells(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.cell_type == "code"]

    @property
    def text_cells(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.cell_type == "markdown"]

    @property
    def prose(self) -> str:
        return "\n\n".join(cell.source for cell in self.text_cells)

    @property
    def equations(self) -> list[Equation]:
        """The numbered ones."""
        return [e for cell in self.text_cells for e in cell.equations if e.label]

    @property
    def title(self) -> str:
        if found := re.search(r"^# +(.+?) *$", self.prose, re.MULTILINE):
            return found[1]
        raise BookError(f"{self.file}: no title, a markdown heading that starts with '# '")

    @property
    def text(self) -> str:
        """The notebook as it is stored: same content, same bytes."""
        import nbformat

        book = self.notebook
        book.nbformat, book.nbformat_minor = 4, 5
        text = nbformat.writes(book, version=4)  # keys sorted, indent 1, √ as it is
        return text.rstrip("\n") + "\n"

    def where(self, cell: Cell) -> str:
        return f"{self.file}, cell {cell.id}"

    def write(self) -> None:
        write_text(self.path, self.text)


def read_chapters(root: Path) -> list[Chapter]:
    """The chapters of the book, in order; the appendices come last."""
    chapters: list[Chapter] = []
    for path in sorted((root / "book").glob("*.ipynb")):
        if not CHAPTER.match(path.name):
            continue
        if chapters and chapters[-1].key == path.name.partition("_")[0]:
            raise BookError(
                f"{chapters[-1].file} and book/{path.name} have the same number"
            )
        chapters.append(read_chapter(path))
    return chapters


def read_chapter(path: Path) -> Chapter:
    import nbformat

    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except (ValueError, nbformat.ValidationError) as error:
        raise BookError(f"book/{path.name}: not a notebook: {error}") from error
    chapter = Chapter(path, notebook)
    for cell in chapter.code_cells:
        first, where = cell.source.partition("\n")[0], chapter.where(cell)
        if re.match(r"#+\s*attnlib/", first) and not cell.module:
            fault = f"the caption {first!r} should read '# attnlib/<module>.py'"
            raise BookError(f"{where}: {fault}")
    return chapter


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every tool has: its module docstring as help, and --root."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--root", type=Path, default=ROOT, help="the repository (this one)")
    return made


def run(main: Callable[[], int]) -> None:
    """Run a tool; a mistake in the book ends it with a message, not with a traceback."""
    for stream in (sys.stdout, sys.stderr):  # chapters hold √, a Windows pipe may not
        stream.reconfigure(encoding="utf-8")
    try:
        sys.exit(main())
    except BookError as error:
        sys.exit(str(error))
