"""What a chapter builds on: definitions of earlier chapters, if they still pass."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from workkit import definitions

if TYPE_CHECKING:
    from workkit.checking import Workbook

UNWRITTEN = re.compile(r"NotImplementedError: ([\w.]+): this is yours to write")


def digest(source: str) -> str:
    """Of a text that passed: blank lines and spaces at the ends of lines do not count."""
    lines = (line.rstrip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def passes(book: Workbook, name: str) -> bool:
    """Whether what is written now is what passed."""
    kept = book.state["passed"].get(name)
    if name in book.problems:
        return False
    mine = book.store.answers.get(name)
    return bool(kept) and (kept is True or mine is None or kept == digest(mine))


def called(key: str) -> str:
    return f"chapter {key.lstrip('0')}" if key.isdigit() else f"appendix {key}"


def before(book: Workbook, key: str) -> dict[str, str]:
    """The definitions of the chapters before this one, each with its chapter."""
    keys = list(book.data)[: list(book.data).index(key)]
    return {name: k for k in keys for name in book.data[k]["blanks"]}


def unsound(book: Workbook, key: str) -> dict[str, str]:
    """Earlier definitions that are written but not what passed, and why."""
    found = {}
    for name in before(book, key):
        if book.state_of(name) != "written" or passes(book, name):
            continue
        if name in book.problems:
            found[name] = "can't be taken as it stands"
        elif name in book.state["passed"]:
            found[name] = "has changed since it passed"
        elif name in book.state["failed"]:
            found[name] = "does not pass"
    return found


def warnings(book: Workbook, key: str) -> list[str]:
    """What is to be said of earlier chapters before anything else."""
    chapter, lines = before(book, key), []
    for name, why in unsound(book, key).items():
        key = chapter[name]
        told = f"`{definitions.called(book, name)}` ({called(key)}) {why}"
        lines.append(f"{told}: run python check.py {key.lstrip('0')} first.")
    return lines


def wait_for(book: Workbook, key: str, notes: list[dict], blanks: dict[str, dict]) -> None:
    """What stands on an earlier definition that is not there, or not sound, waits for it.

    A definition whose numbers are those of a known mistake is told so all the same.
    """
    shaky = [*unsound(book, key)]
    gone = [n for n in before(book, key) if n in book.problems or not has(book, n)]
    own = {n.rpartition(".")[2] for n, found in blanks.items() if found["state"] == "to do"}
    for name, found in blanks.items():
        mine = [n for n in notes if n["kind"] == "unwritten" and name in n["uses"]]
        asked = {missing(note) for note in mine} - own
        absent = [n for n in gone if n.rpartition(".")[2] in asked]
        if absent and found["state"] in ("passed", "waits"):
            blanks[name] = {"state": "waits", "for": absent}
        elif shaky and "note" in found and not found["mistakes"]:
            blanks[name] = {"state": "waits", "for": shaky}


def has(book: Workbook, name: str) -> bool:
    return book.state_of(name) != "to do"


def missing(note: dict[str, Any]) -> str:
    """The definition whose blank raised."""
    match = UNWRITTEN.match(note.get("came", ""))
    return match[1].partition(".")[0] if match else ""
