"""How far the reader is: a line, a page, and which milestones are reached."""

from __future__ import annotations

from pathlib import Path

from workkit import earlier
from workkit.checking import Workbook
from workkit.milestones import MILESTONES, reached
from workkit.report import next_step
from workkit.store import write_whole


def chapter_line(book: Workbook, key: str) -> tuple[int, int, int, int, int, int]:
    """Of definitions, equations and exercises: how many are done, of how many."""
    known, state = book.data[key], book.state
    numbers = [exercise["number"] for exercise in known["exercises"]]
    return (
        sum(earlier.passes(book, name) for name in known["blanks"]),
        len(known["blanks"]),
        sum(state["equations"].get(label, False) for label in known["equations"]),
        len(known["equations"]),
        sum(state["exercises"].get(number, False) for number in numbers),
        len(numbers),
    )


def line(book: Workbook) -> str:
    rows = [chapter_line(book, key) for key in book.data]
    total = [sum(column) for column in zip(*rows, strict=True)]
    lent = sum(book.state_of(name) == "lent" for name in book.state["lent"])
    borrowed = f", {lent} on loan from us" if lent else ""
    seen = f", {len(book.state['answers'])} answers seen" if book.state["answers"] else ""
    minutes = round(book.state.get("minutes", 0))
    told = (
        f"{total[0]} of {total[1]} definitions{borrowed}{seen}, {total[2]} of {total[3]} "
        f"equations, {total[4]} of {total[5]} exercises, "
        f"{sum(reached(book).values())} of {len(MILESTONES)} milestones, "
        f"{minutes // 60} h {minutes % 60} min."
    )
    step = next_step(book)
    return f"{told}\nNext: {step}" if step else f"{told}\nAll of it is yours."


def write_page(book: Workbook) -> Path:
    """PROGRESS.md, anew."""
    lines = [
        "# Your workbook",
        "",
        line(book).replace("\n", "\n\n"),
        "",
        "## Milestones",
        "",
    ]
    for name, done in reached(book).items():
        mark, text = "x" if done else " ", MILESTONES[name].text
        lines.append(f"- [{mark}] {text}: `python check.py milestone {name}`")
    lines += ["", "## Chapters", "", "| | Chapter | Definitions | Equations | Exercises |"]
    lines.append("|---|---|---|---|---|")
    for key, known in book.data.items():
        a, b, c, d, e, f = chapter_line(book, key)
        if b + d + f:
            done = "✓" if (a, e) == (b, f) and b + f else ""
            parts = [done, f"{key} {known['title']}", f"{a} of {b}", f"{c} of {d}"]
            lines.append(f"| {' | '.join(parts)} | {e} of {f} |")
    path = book.folder / "PROGRESS.md"
    write_whole(path, "\n".join(lines) + "\n")
    return path
