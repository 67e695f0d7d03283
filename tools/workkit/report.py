"""What the reader is told after a check, in words; a grader is told the same as JSON."""

from __future__ import annotations

import textwrap
from typing import Any

from workkit.workbook import Workbook, called

COUNTED = {2: "two", 3: "three", 4: "four"}
MOST = 2  # how many times our time a reader's code may take
SIGNS = {"passed": "✓", "failed": "✗", "waits": "…", "to do": "·", "lent": "~"}


def in_words(book: Workbook, result: dict[str, Any]) -> str:
    """The report of one chapter."""
    known = book.data[result["chapter"]]
    where = called(known["key"])
    lines = [
        f"{where[0].upper()}{where[1:]}: {known['title']}",
        *result["said"],
        "",
    ]
    for name, found in result["blanks"].items():
        lines += of_one(book, known, name, found)
    for number, note in result["exercises"].items():
        sign = {"passed": "✓", "failed": "✗"}.get(note["kind"], "·")
        title = next(e["title"] for e in known["exercises"] if e["number"] == number)
        said = f": {note['came']}" if note["kind"] == "failed" else ""
        lines.append(f"{sign} Exercise {number}, {title}{said}")
        lines += [part for text in told(note.get("mistakes", [])) for part in folded(text)]
    held, all_ = sum(result["equations"].values()), len(result["equations"])
    lines += ["", f"{held} of {all_} equations hold on your code."]
    if result.get("ratio"):
        lines.append(f"{pace(result['ratio'])}.")
    if step := next_step(book, known["key"]):
        lines.append(f"Next: {step}")
    return "\n".join(lines)


def of_one(book: Workbook, known: dict, name: str, found: dict) -> list[str]:
    """What is said of a definition."""
    symbol = known["blanks"][name]["symbol"]
    lines = [f"{SIGNS[found['state']]} {symbol}{summary(known, found)}"]
    if found["state"] == "failed":
        lines += [part for line in detail(known, found) for part in folded(line)]
        lines.append(f"    Stuck? python check.py hint {book.short(name)}")
    return lines


def times_as_long(mine: float, ours: float) -> float:
    """A ratio of seconds; what is too short to tell is alike."""
    return (mine + 0.1) / (ours + 0.1)


def pace(ratio: float) -> str:
    told = f"The checks take {ratio:.1f} times as long as with ours"
    return told if ratio <= MOST else f"{told}; more than {MOST} times is too slow"


def folded(line: str) -> list[str]:
    """A line under its definition: no wider than a page, words kept whole."""
    indent = " " * (len(line) - len(line.lstrip()) + 6)
    how = {"break_long_words": False, "break_on_hyphens": False, "width": 84}
    return textwrap.wrap(f"    {line}", subsequent_indent=indent, **how)


def summary(known: dict, found: dict[str, Any]) -> str:
    symbols = [n.rpartition(".")[2] for n in found.get("for", [])]
    return {
        "passed": "",
        "failed": " does not pass yet",
        "to do": ": not yet written",
        "lent": ": ours, on loan",
        "waits": f" waits for {', '.join(symbols) or 'the rest'}",
    }[found["state"]]


def detail(known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Why a definition failed: the mistake, the equation, the input, the numbers."""
    if "problem" in found:
        return [found["problem"]]
    note, lines = found["note"], []
    lines += told(found["mistakes"])
    numbers = [known["equations"].get(label, [label])[0] for label in found["labels"]]
    about = f"Equation {', '.join(numbers)}: " if numbers else ""
    broke = note.get("story") and "this cell of the chapter could not run:"
    lines.append(f"{about}{broke or 'this should hold:'}")
    lines += [f"  {line}" for line in note["text"].splitlines()]
    lines += [f"  {said}" for said in note.get("differs", [])]
    for name, value in list(note.get("inputs", {}).items())[:4]:
        lines.append(f"  with {name} = {value}")
    if note.get("compared"):
        lines.append(f"  left:  {note['compared'][0]}")
        lines.append(f"  right: {note['compared'][1]}")
    if note.get("message") or note.get("came"):
        lines.append(f"  {note.get('message') or note['came']}")
    if note.get("place"):
        lines.append(f"  {note['place']}")
    if found["others"]:
        lines.append(f"  and {found['others']} more like it")
    return lines


def told(mistakes: list[str]) -> list[str]:
    """The mistake, or those that give the same numbers."""
    if len(mistakes) < 2:
        return [f"These are the numbers of a known mistake: {m}" for m in mistakes]
    first, *others = mistakes[:4]
    count = COUNTED.get(len(mistakes), "several")
    return [
        f"These are the numbers of {count} known mistakes, which no check tells apart.",
        f"Either: {first}",
        *(f"or: {other}" for other in others),
    ]


def next_step(book: Workbook, at: str = "") -> str:
    """What does not pass in the first chapter that has such, as an order.

    There, one that failed comes first, and then what is not written: others may wait. What
    failed in the chapter where the reader is `at` comes before all; the chapters of a path
    that was chosen come before the others.
    """
    path = [key for key in book.state.get("path", "").split() if key in book.data]
    keys = [*path, *book.data]
    here = at and any(name in book.state["failed"] for name in book.data[at]["blanks"])
    for key in [at, *keys] if here else keys:
        known = book.data[key]
        left = [
            name
            for name in known["blanks"]
            if not book.passes(name) and book.state_of(name) != "lent"
        ]
        if left:
            failed = [name for name in left if name in book.state["failed"]]
            asked = [name for name in left if book.state_of(name) == "to do"]
            name = [*failed, *asked, *left][0]
            blank = known["blanks"][name]
            if not failed and not asked:
                how = f"python check.py {key.lstrip('0')}"
                return f"{how}, as `{blank['symbol']}` has not passed as it stands now."
            where = f"book/{known['file']} ({called(key)}, {blank['minutes']} minutes)"
            return f"{'mend' if failed else 'write'} `{blank['symbol']}` in {where}."
    return ""


def graded(book: Workbook, result: dict[str, Any]) -> dict[str, Any]:
    """The same for a grader: a point for each definition, equation and exercise."""
    known = book.data[result["chapter"]]
    tests = []
    for name, found in result["blanks"].items():
        said = "\n".join(detail(known, found)) if found["state"] == "failed" else ""
        tests.append(
            entry("definition", name, found["state"] == "passed", said or found["state"])
        )
    for label, ok in result["equations"].items():
        tests.append(entry("equation", label, ok, known["equations"][label][0]))
    for number, note in result["exercises"].items():
        tests.append(entry("exercise", number, note["kind"] == "passed", note["came"]))
    if ratio := result.get("ratio"):
        tests.append(entry("time", "time", ratio <= MOST, pace(ratio)))
    score = sum(test["score"] for test in tests)
    total = {"chapter": result["chapter"], "score": score, "max_score": len(tests)}
    used = {
        "lent": sorted(book.state["lent"]),
        "answers_seen": sorted(book.state["answers"]),
    }
    return total | used | {"hints": book.state["hints"], "tests": tests}


def entry(kind: str, name: str, passed: bool, said: str) -> dict[str, Any]:
    base = {"kind": kind, "name": name, "score": int(passed), "max_score": 1}
    return base | {"output": "" if passed else said}
