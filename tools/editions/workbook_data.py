"""What the workbook knows of a chapter besides its notebook: for checks and the tangle."""

from __future__ import annotations

import re
from typing import Any

from bookkit.chapters import Chapter
from editions.blanks import Blank, without_answer
from editions.plain import Plain
from editions.reflow import Shown, pieces_of, source_of

LABEL = re.compile(r"\beq-[a-z0-9-]*[a-z0-9]")


def describe(chapter: Chapter, shown: list[Shown], plain: Plain | None) -> dict[str, Any]:
    """What the checks and the reports know of a chapter."""
    exercises = exercises_of(chapter)
    numbered = {
        e.label: [plain.number(e.label) if plain else e.label, e.formula]
        for e in chapter.equations
    }
    asked = [part for part in shown if part.pieces and part.pieces[0].blank]
    return {
        "key": chapter.key,
        "title": chapter.title,
        "file": chapter.path.name,
        "cells": cells_to_run(shown, exercises),
        "blanks": {part.pieces[0].blank.name: about(part) for part in asked},
        "exercises": exercises,
        "equations": numbered,
    }


def cells_to_run(shown: list[Shown], exercises: list[dict]) -> list[dict[str, Any]]:
    """What the checks run: the story, the package, and each exercise once."""
    cells: list[dict[str, Any]] = []
    left = {e["number"]: e for e in exercises}
    for at, part in enumerate(shown):
        cell, source = part.cell, part.cell.source
        if part.pieces:
            blank, source = part.pieces[0].blank, source_of(part, answered=False)
            made = (
                {"id": blank.name, "blank": blank.name} if blank else {"id": f"given-{at}"}
            )
            cells.append(made | {"source": source})
        elif number := cell.exercise:
            if task := left.pop(number, None):
                made = {"id": f"exercise {number}", "exercise": number}
                cells.append(made | {name: task[name] for name in ("source", "checks")})
        elif cell.cell_type == "code":
            cells.append({"id": cell.id, "source": source})
    return cells


def about(part: Shown) -> dict[str, Any]:
    """A blank as the workbook knows it."""
    (piece,), source = part.pieces, source_of(part, answered=False)
    blank = piece.blank
    return {
        "source": source,
        "symbol": blank.symbol,
        "minutes": blank.minutes,
        "lines": without_answer(blank, piece.text)[1],
        "todo": blank.todo,
        "hints": blank.hints,
        "labels": LABEL.findall(source),
    }


def exercises_of(chapter: Chapter) -> list[dict[str, Any]]:
    """The exercises, each by the first cell that solves it."""
    found: dict[str, dict[str, Any]] = {}
    for cell in chapter.code_cells:
        if (number := cell.exercise) and number not in found:
            found[number] = exercise(number, cell.source, chapter)
    return [*found.values()]


def exercise(number: str, solution: str, chapter: Chapter) -> dict[str, Any]:
    """An exercise: its title, minutes, and what its answer is to be tried with."""
    text = chapter.prose
    heading = re.search(rf"^### Exercise {re.escape(number)}: (.+)$", text, re.MULTILINE)
    minutes = re.search(r"(\d+) minutes", text[heading.end() :]) if heading else None
    checks = sorted(set(re.findall(r"\b(?:check|expect)_\w+(?=\()", solution)))
    calls = ", ".join(f"{name}(…)" for name in checks)
    return {
        "number": number,
        "title": heading[1] if heading else number,
        "minutes": int(minutes[1]) if minutes else 10,
        "checks": checks,
        "source": f"# Exercise {number}: yours\n# When you have an answer, try it: {calls}",
    }


def package_of(chapter: Chapter, modules: dict, blanks: dict[str, Blank]) -> list[dict]:
    """The pieces of the modules in the book's order, for the tangle."""
    found: list[dict] = []
    before = (0, 0)  # where the next statement of the same text stands
    for _, pieces in sorted(pieces_of(chapter, modules, blanks).items()):
        for piece in pieces:
            made: dict[str, Any] = {"module": piece.module.name}
            if piece.blank:
                found.append(made | {"blank": piece.blank.name})
            elif piece.text:
                plain = piece.statement.text if piece.statement else f"{piece.text}\n"
                goes_on = (
                    piece.order[1] > 1 and "text" in found[-1] and before == piece.order
                )
                if goes_on:
                    found[-1]["text"] += f"\n{plain}"
                else:
                    found.append(made | {"text": plain.strip("\n")})
                before = piece.order[0], piece.order[1] + 1
    return found
