"""What a grader is told after a check, as JSON."""

from __future__ import annotations

from typing import Any

from workkit.checking import Workbook
from workkit.report import MOST, detail, pace


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
