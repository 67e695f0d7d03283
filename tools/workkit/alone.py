"""Which definitions are wrong: each that does not pass is tried among ours.

Where something fails, several may stand behind it, some of them not yet written, some on
loan, some of earlier chapters. Among ours, a definition can only fail by its own fault; and
just so the kept mistakes were entered, so that their numbers can be compared.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from workkit.jobs import blame_end, run, small_tests
from workkit.naming import BAD, judge
from workkit.package import book_answer, texts_of, write_package
from workkit.workbook import Workbook


class Among:
    """The reader's definitions of a chapter, any of them, among ours for all the others."""

    def __init__(self, book: Workbook, key: str) -> None:
        self.book, self.known = book, book.data[key]
        names = [name for known in book.data.values() for name in known["blanks"]]
        found = {name: book_answer(name) for name in names}
        self.ours = {name: text for name, text in found.items() if text}
        self.complete = len(self.ours) == len(names)
        self.cells = [cell for cell in self.known["cells"] if "exercise" not in cell]

    def run(self, names: list[str]) -> dict:
        """What happened in the cells with the reader's `names`."""
        given = self.ours | {name: self.book.store.answers[name] for name in names}
        with tempfile.TemporaryDirectory() as made:
            shutil.copytree(self.book.folder / "attnlib", Path(made, "attnlib"))
            write_package(Path(made), texts_of(self.book.data, given)[0])
            known = self.known | {"cells": self.cells}
            return run(self.book, known, given, names, package=made)

    def judged(self, names: list[str]) -> dict[str, dict]:
        """What is found of each."""
        ran, blanks = self.run(names), self.known["blanks"]
        notes = ran["notes"]
        if len(names) == 1:  # ours pass: whatever fails does so by its fault
            notes = [n | {"uses": names} if n["kind"] in BAD else n for n in notes]
        states = {name: "written" if name in names else "lent" for name in blanks}
        found = judge(self.known, notes, states)
        blame_end(ran, found)
        return {name: found[name] for name in names}


def sort_out(book: Workbook, key: str, blanks: dict[str, dict], notes: list[dict]) -> None:
    """Puts in `blanks` what is found among ours of those that did not pass.

    Of all that are written, where something failed for which none of them is blamed.
    """
    written = {name for name in blanks if book.state_of(name) == "written"}
    bad = [n for n in notes if n["kind"] in BAD and "exercise" not in n]
    lost = any(not written & {*note["uses"]} for note in bad)
    left = [
        name
        for name in blanks
        if name in written - book.problems.keys()
        and (lost or blanks[name]["state"] in ("failed", "waits"))
    ]
    if not left or not (among := Among(book, key)).complete:
        return
    print("What doesn't pass is tried among ours …", file=sys.stderr, flush=True)
    doubt = [name for name in left if blanks[name]["state"] == "failed"]
    right: set[str] = set()
    while left:
        for name in doubt:
            found = among.judged([name])
            if found[name]["state"] == "passed":
                right.add(name)
            else:
                blanks |= found
                left.remove(name)
        seen = among.judged(left) if left else {}
        doubt = [n for n in left if seen[n]["state"] != "passed" and n not in right]
        if not doubt:  # all pass, or each passes alone and not together
            blanks |= seen
            return


def quickly(book: Workbook, key: str, name: str) -> dict:
    """What is found of one definition, by its small tests if it has some."""
    state = book.state_of(name)
    if name in book.problems:
        return {"state": "failed", "problem": book.problems[name]}
    if state != "written" or not (among := Among(book, key)).complete:
        return {"state": state if state != "written" else "waits"}
    if name in small_tests(book.folder):
        among.cells = []
    return among.judged([name])[name]
