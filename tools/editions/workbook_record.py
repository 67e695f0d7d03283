"""What the workbook keeps of a chapter's mistakes, and what a chapter still owes it.

`book/workbook/NN_name.json` has a line for each mistake, and a hash of the code that the
checks run: where that has changed, the digits may have. `owed` tells it in a second.
"""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bookkit.chapters import BookError, Chapter, read_chapters, write_text
from bookkit.grammar import marks_of, only_python
from bookkit.mistakes import Fault, read_faults
from bookkit.modules import Module, read_modules
from bookkit.stage import used
from editions.blanks import REFUSALS, Blank, read_blanks, read_given, without_answer
from editions.reflow import Piece, Shown, answers_of, pieces_of, reflow
from editions.workbook_data import cells_to_run, exercises_of
from workkit.cells import needed


@dataclass(eq=False)
class Book:
    """What the workbook is made from."""

    chapters: list[Chapter]
    modules: dict[str, Module]
    blanks: dict[str, Blank]

    def shown(self, chapter: Chapter) -> list[Shown]:
        return reflow(self.named(chapter), self.modules, self.blanks)

    def pieces(self, chapter: Chapter) -> dict[int, list[Piece]]:
        return pieces_of(self.named(chapter), self.modules, self.blanks)

    def named(self, chapter: Chapter) -> Chapter:
        """The one that the modules name, of another reading."""
        return next(c for c in self.chapters if c.key == chapter.key)


@cache
def read_book(root: Path) -> Book:
    chapters = read_chapters(root)
    return Book(chapters, read_modules(chapters), read_blanks(root))


def record_file(root: Path, chapter: Chapter) -> Path:
    return root / "book" / "workbook" / f"{chapter.name}.json"


def read_record(root: Path, chapter: Chapter) -> dict[str, Any]:
    path = record_file(root, chapter)
    empty = {"checks": "", "mistakes": []}
    return json.loads(path.read_text("utf-8")) if path.exists() else empty


def write_record(root: Path, chapter: Chapter, record: dict[str, Any]) -> None:
    """A mistake in a line: one that changes rewrites no other."""
    lines = ",\n".join(json.dumps(m, ensure_ascii=False) for m in record["mistakes"])
    text = f'{{"checks": "{record["checks"]}", "mistakes": [\n{lines}\n]}}\n'
    write_text(record_file(root, chapter), text)


def entered(faults: list[Fault], ours: dict[str, str]) -> list[tuple[Fault, dict]]:
    """The mistakes of equations that a reader can make, each with what they write then.

    One that is kept for two equations is entered once.
    """
    found: list[tuple[Fault, dict]] = []
    for fault in faults:
        mine = dict(ours)
        for old, new in fault.changes:
            hits = [name for name, text in mine.items() if text.count(old) == 1]
            if len(hits) == 1:
                mine[hits[0]] = mine[hits[0]].replace(old, new)
        changed = {name: text for name, text in mine.items() if text != ours[name]}
        if changed and changed not in [other for _, other in found]:
            found.append((fault, changed))
    return found


def digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def seal(fault: Fault, line: dict[str, Any]) -> str:
    """A hash of what is entered, and of what came of it."""
    return digest([fault.changes, fault.answer, line["blanks"], line["signature"]])


def checks_of(root: Path, chapter: Chapter) -> str:
    """A hash of the code that the checks run, with our answers in it.

    What earlier chapters define is not in it: of this chapter's digits, its author can
    tell only what this chapter does.
    """
    shown, faults = read_book(root).shown(chapter), read_faults(root, chapter)
    answers = answers_of(shown)
    cells = cells_to_run(shown, exercises_of(chapter))
    for cell in cells:
        cell["source"] = answers.get(cell.get("blank", ""), cell["source"])
        given = [f.answer for f in faults if f.subject == cell.get("exercise")]
        cell["names"] = sorted(set().union(*map(used, given)))
    return digest([code_of(cells[i]["source"]) for i in sorted(needed(cells))])


def code_of(source: str) -> list[str]:
    """The lines that a check may depend on: no docstrings, of comments only the labels."""
    source, kept = only_python(source), []
    constants = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    words = {n for c in constants for n in range(c.lineno, c.end_lineno + 1)}
    for number, line in enumerate(source.split("\n"), 1):
        comment = line.lstrip().startswith("#") and not marks_of(line)
        if line.strip() and not comment and number not in words:
            kept.append(line.rstrip())
    return kept


def owed(root: Path, chapter: Chapter) -> list[str]:
    """What a change of a chapter leaves to be done for the workbook, a sentence each."""
    try:
        book = read_book(root)
    except BookError as error:
        return [str(error)]
    said = [*unasked(root, book, chapter), *miscounted(root, book)]
    ours = answers_of(book.shown(chapter))
    return [*said, *(stale(root, chapter, ours) if ours else [])]


def unasked(root: Path, book: Book, chapter: Chapter) -> list[str]:
    """Definitions that the workbook neither asks for nor says to be given."""
    given, found = read_given(root), []
    for piece in (piece for made in book.pieces(chapter).values() for piece in made):
        module = piece.module.name.replace("/", ".")
        node = piece.statement and piece.statement.node
        defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if module in given or piece.blank or not defines:
            continue
        name = f"{module}.{piece.names[0]}"
        if name not in given and not piece.names[0].startswith(REFUSALS):
            where = "in book/workbook/blanks.toml, or its name under `given`"
            found.append(f"a blank and a hint for {name} {where}")
    return found


def stale(root: Path, chapter: Chapter, ours: dict[str, str]) -> list[str]:
    """That the record of the chapter's mistakes, or of some of them, is not of now."""
    faults, record = read_faults(root, chapter), read_record(root, chapter)
    tried = [f for f, _ in entered(faults, ours)] + [f for f in faults if f.answer]
    mine = {(f.subject, f.mistake): f for f in tried}
    lines = {(m["subject"], m["mistake"]): m for m in record["mistakes"]}
    good = {
        n for n in mine.keys() & lines if lines[n].get("seal") == seal(mine[n], lines[n])
    }
    told = "the record of the workbook's mistakes"
    program = f"run python tools workbook_mistakes {chapter.key}"
    if mine and record["checks"] != checks_of(root, chapter):
        return [f"{told}: {program}"]
    bad = sorted({subject for subject, _ in (mine.keys() | lines.keys()) - good})
    return [f"{told} in {subject}: {program} --only {subject}" for subject in bad]


@cache
def miscounted(root: Path, book: Book) -> list[str]:
    """That the page of the workbook counts otherwise."""
    every = [made for c in book.chapters for made in book.pieces(c).values()]
    asked = [piece for made in every for piece in made if piece.blank]
    lines = round(sum(without_answer(p.blank, p.text)[1] for p in asked), -1)
    hours = round(sum(piece.blank.minutes for piece in asked) / 60)
    told = f"{len(asked)} definitions, about {lines} lines, some {hours} hours"
    there = (root / "book" / "workbook.md").read_text("utf-8")
    return [] if told in there else [f"counts on the page book/workbook.md: {told}"]
