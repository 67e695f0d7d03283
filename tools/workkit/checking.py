"""Checks of a chapter: the job for the runner, the limits, and what came of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from workkit import earlier, elsewhere, libraries, naming
from workkit.ours import book_answer
from workkit.package import blanks_of, read_data, texts_of, write_package
from workkit.process import blame_end, parsed, run_job
from workkit.returns import told_of_none
from workkit.store import Store, only_one, read_json, write_whole

SECONDS = 180  # for one cell
MEGABYTES = 12_000


class Workbook:
    """The reader's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = read_data(folder)
        self.state_file = folder / "yours" / "progress.json"
        self.state: dict[str, Any] = read_json(self.state_file, {})
        for name in (
            "passed",
            "failed",
            "lent",
            "hints",
            "answers",
            "equations",
            "exercises",
            "milestones",
            "days",
        ):
            self.state.setdefault(name, {})
        self.store = Store(folder, blanks_of(self.data))
        self.problems: dict[str, str] = {}
        self.asides: list[str] = []  # what is to be said before the answer to a word

    def save(self) -> None:
        write_whole(self.state_file, json.dumps(self.state, indent=1))

    def state_of(self, name: str) -> str:
        if name in self.store.answers:
            return "written"
        return "lent" if name in self.state["lent"] else "to do"

    def answers(self) -> dict[str, str]:
        """The reader's, and ours where they are lent."""
        lent = {n: book_answer(n) for n in self.state["lent"] if self.state_of(n) == "lent"}
        asked = {name for known in self.data.values() for name in known["blanks"]}
        mine = {n: a for n, a in self.store.answers.items() if n in asked}
        return {n: a for n, a in lent.items() if a} | mine

    def sync(self) -> list[str]:
        """Takes the answers from the notebooks and writes the package anew."""
        said = []
        with only_one(self.folder):
            if back := self.store.collect():
                what = "answer of yours was" if back == 1 else "answers of yours were"
                said.append(
                    f"{back} {what} put back into the notebooks; to empty a cell, use "
                    "python check.py reset NAME."
                )
            said += elsewhere.lost(self.folder, self.data, self.store.answers)
            told = " ".join(said)  # of one that held answers, more is said already
            unread = [name for name in self.store.unread if name not in told]
            said += [f"{name} can't be read: is it whole?" for name in unread]
            texts, self.problems = texts_of(self.data, self.answers())
            write_package(self.folder, texts)
        return said

    def check(self, key: str) -> dict[str, Any]:
        """Runs the checks of a chapter, and keeps what passed."""
        known = self.data[key]
        synced = self.sync()  # before the warnings, which are of what it read
        said = earlier.warnings(self, key) + synced
        states = {name: self.state_of(name) for name in known["blanks"]}
        if names := libraries.absent(known):
            return libraries.unchecked(key, known, states, names)
        run = self.run(known, self.answers())
        blanks = naming.judge(known, run["notes"], states)
        for name, problem in self.problems.items():
            if name in blanks:
                blanks[name] = {"state": "failed", "problem": problem}
        blame_end(run, blanks)
        earlier.wait_for(self, key, run["notes"], blanks)
        held = naming.equations_held(known, run["notes"], blanks)
        done = naming.exercises_done(known, run["notes"])
        for name, found in blanks.items():
            for kept in ("passed", "failed"):
                self.state[kept].pop(name, None)
            if found["state"] == "passed":
                self.state["passed"][name] = earlier.digest(self.store.answers[name])
            elif found["state"] == "failed":
                self.state["failed"][name] = True
                told_of_none(found, name, self.store.answers.get(name, ""))
        self.state["equations"] |= {label: ok for label, ok in held.items()}
        solved = {n: note["kind"] == "passed" for n, note in done.items()}
        self.state["exercises"] |= solved
        self.clock()
        self.save()
        result = {"chapter": key, "blanks": blanks, "equations": held, "exercises": done}
        return result | {"said": said, "ended": run["ended"], "seconds": run["seconds"]}

    def run(self, known: dict, answers: dict[str, str], seconds: int = SECONDS) -> dict:
        """What happened in the chapter's cells with these answers."""
        cells = []
        for cell in known["cells"]:
            name = cell.get("blank") or cell.get("exercise", "")
            given = answers | (self.store.answers if "exercise" in cell else {})
            if name in given and name not in self.problems:
                cell = cell | {"source": parsed(given[name])}
            cells.append(cell)
        owner = {blank["symbol"]: name for name, blank in known["blanks"].items()}
        job = {"folder": str(self.folder), "cells": cells, "owner": owner}
        job |= {"seconds": seconds, "megabytes": MEGABYTES}
        return run_job(job)

    def time_ratio(self, key: str) -> float:
        """How long the checks take with the reader's code, over how long with ours."""
        known, mine = self.data[key], self.answers()
        ours = {n: text for n in known["blanks"] if (text := book_answer(n))}
        if len(ours) < len(known["blanks"]):
            return 0.0
        both = []
        try:
            for answers in (mine, mine | ours):
                write_package(self.folder, texts_of(self.data, answers)[0])
                both.append(self.run(known, answers)["seconds"])
        finally:  # also when it is stopped: ours is not to stay in the package
            self.sync()
        return (both[0] + 0.1) / (both[1] + 0.1)  # what is too short to tell is alike

    def clock(self) -> None:
        """Adds the time since the last sign of work, unless it was a pause."""
        now = time.time()
        gap = now - self.state.get("last", now)
        self.state["minutes"] = self.state.get("minutes", 0) + (
            gap / 60 if gap < 1200 else 2
        )
        self.state["last"] = now
