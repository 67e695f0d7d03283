"""What the workbook knows of a chapter besides its notebook: for checks and the tangle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bookkit.chapters import Chapter
from editions.blanks import Blank, without_answer
from editions.plain import Plain
from editions.reflow import Shown, pieces_of, source_of

LABEL = re.compile(r"\beq-[a-z0-9-]*[a-z0-9]")


def describe(
    chapter: Chapter,
    shown: list[Shown],
    package: list[dict],
    plain: Plain | None,
    root: Path,
) -> dict[str, Any]:
    """What the workbook knows of a chapter besides its notebook."""
    blanks, cells, exercises = {}, [], []
    for at, part in enumerate(shown):
        cell, source = part.cell, part.cell.source
        if part.pieces:
            blank = part.pieces[0].blank
            source = source_of(part, answered=False)
            name = f"{blank.name if blank else f'given-{at}'}"
            cells.append({"id": name, "source": source})
            if blank:
                cells[-1]["blank"] = blank.name
                blanks[blank.name] = about(blank, source)
        elif number := cell.exercise:
            if number not in [e["number"] for e in exercises]:
                exercises.append(exercise(number, source, chapter))
                id = f"exercise {number}"
                checks = exercises[-1]["checks"]
                asked = {"id": id, "source": exercises[-1]["source"], "exercise": number}
                cells.append(asked | {"checks": checks})
        elif cell.cell_type == "code":
            cells.append({"id": cell.id, "source": source})
    numbered = {
        e.label: [plain.number(e.label) if plain else e.label, e.formula]
        for e in chapter.equations
    }
    kept = root / "book" / "workbook" / f"{chapter.name}.json"
    mistakes = json.loads(kept.read_text("utf-8"))["mistakes"] if kept.exists() else []
    return {
        "key": chapter.key,
        "title": chapter.title,
        "file": chapter.path.name,
        "cells": cells,
        "blanks": blanks,
        "exercises": exercises,
        "equations": numbered,
        "package": package,
        "mistakes": mistakes,
    }


def about(blank: Blank, source: str) -> dict[str, Any]:
    """A blank as the workbook knows it."""
    return {
        "source": source,
        "symbol": blank.symbol,
        "minutes": blank.minutes,
        "lines": blank.counted,
        "todo": blank.todo,
        "hints": blank.hints,
        "labels": LABEL.findall(source),
    }


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
                without_answer(piece.blank, piece.text)  # counts its lines
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
