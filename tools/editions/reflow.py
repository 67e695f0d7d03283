"""The cells of a chapter in the order in which a reader of the workbook writes them.

In the book, the story shows a short version of each definition, and the package's own comes
later. In the workbook the reader writes the package's own where the story first shows it;
what it needs of the same chapter comes before it, and of two that need each other, the
first in the book. The story then uses the reader's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nbformat.v4 import new_code_cell

from bookkit.chapters import Chapter
from bookkit.grammar import Cell
from bookkit.modules import Module
from bookkit.statements import Statement
from editions.blanks import Blank, without_answer
from editions.cut import split


@dataclass(eq=False)
class Piece:
    """Statements of a module that the workbook shows as one cell."""

    module: Module
    order: tuple[int, int]  # cell and statement in the book, for the tangle
    text: str
    statement: Statement | None = None  # none for a docstring and imports
    blank: Blank | None = None
    needs: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        return self.statement.names if self.statement else []


@dataclass
class Shown:
    """A cell of the workbook: of the story, or of the package with its pieces."""

    cell: Cell
    pieces: list[Piece] = field(default_factory=list)


def pieces_of(
    chapter: Chapter, modules: dict[str, Module], blanks: dict[str, Blank]
) -> dict[int, list[Piece]]:
    """By cell of the book; what continues a class is part of the class."""
    found: dict[int, list[Piece]] = {}
    for module in modules.values():
        dotted = module.name.replace("/", ".")
        for index, cell in enumerate(module.cells):
            if module.chapters[index] is not chapter:
                continue
            at = chapter.cells.index(cell)
            made = found.setdefault(at, [])
            if index == 0:
                imports = "\n".join(s.text for s in module.imports)
                made.append(
                    Piece(module, (at, 0), f"{module.docstring}\n{imports}".strip())
                )
            for number, s in enumerate(module.definitions[index], start=1):
                name = f"{dotted}.{s.names[0]}" if s.names else ""
                text, blank = s.text.strip("\n"), blanks.get(name)
                if blank and (later := added_later(module, s, chapter)):
                    blank = replace(blank, given=[*blank.given, *later])
                made.append(Piece(module, (at, number), text, s, blank, s.uses))
    return found


def added_later(module: Module, whole: Statement, chapter: Chapter) -> list[str]:
    """The methods that later chapters add to a class: its reader does not know them yet."""
    more = module.continuations(whole)
    names = [n for at, s in more if module.chapters[at] is not chapter for n in s.names]
    return [name.rpartition(".")[2] for name in names]


def reflow(
    chapter: Chapter, modules: dict[str, Module], blanks: dict[str, Blank]
) -> list[Shown]:
    """The chapter's cells in the workbook's order; the blanks still hold our answers."""
    pieces = pieces_of(chapter, modules, blanks)
    everything = [p for made in pieces.values() for p in made]
    owner = {name: p for p in everything for name in p.names}
    shown_as = {p.blank.symbol: p for p in everything if p.blank and not p.blank.toy}
    shown_as |= {name: p for p in everything if p.blank for name in p.blank.shown}
    done: set[Piece] = set()
    out: list[Shown] = []

    def place(piece: Piece) -> None:
        if piece in done:
            return
        done.add(piece)
        heads = [p for p in everything if p.module is piece.module and not p.statement]
        needs = {owner[n] for n in piece.needs if n in owner}
        needs = {p for p in needs if p.order < piece.order or not p.needs & {*piece.names}}
        needs |= {p for p in everything if extends(piece, p)}
        for needed in [*heads, *sorted(needs, key=lambda p: p.order)]:
            place(needed)
        last = out[-1].pieces if out else []
        joins = last and not piece.blank and not last[-1].blank
        if joins and last[-1].module is piece.module and last[-1].order < piece.order:
            last.append(piece)
        else:
            out.append(Shown(Cell(new_code_cell()), [piece]))

    for index, cell in enumerate(chapter.cells):
        if index in pieces:
            for piece in pieces[index]:
                place(piece)
                if piece.blank and piece.blank.story and not piece.blank.shown:
                    text = f"{piece.blank.symbol} = Yours  # from here on, yours"
                    again = new_code_cell(text, id=f"{cell.id}-again")
                    out.append(Shown(Cell(again)))
        elif cell.cell_type == "code" and not cell.module:
            for part in split(cell, shown_as):
                if isinstance(part, Piece):
                    place(part)
                else:
                    out.append(Shown(part))
        else:
            out.append(Shown(cell))
    return out


def extends(piece: Piece, other: Piece) -> bool:
    """Whether a piece goes on with a name that another has made, as `+=` does."""
    same = piece.module is other.module and {*piece.names} & {*other.names}
    return bool(same) and other.order < piece.order


def source_of(shown: Shown, answered: bool) -> str:
    """A cell of the package as the reader sees it, or with our answer."""
    parts, piece = [], shown.pieces[0]
    for p in shown.pieces:
        blank = p.blank and not answered
        parts.append(without_answer(p.blank, p.text)[0] if blank else p.text)
    what = f"yours, {piece.blank.symbol}" if piece.blank else "given"
    return f"# attnlib/{piece.module.name}.py: {what}\n" + "\n\n\n".join(parts)


def answers_of(shown: list[Shown]) -> dict[str, str]:
    """Our own cells of what the reader writes."""
    asked = [s for s in shown if s.pieces and s.pieces[0].blank]
    return {s.pieces[0].blank.name: source_of(s, answered=True) for s in asked}
