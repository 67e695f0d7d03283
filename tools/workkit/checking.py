"""Checks of a chapter: the job for the runner, the limits, and what came of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workkit import naming
from workkit.package import blanks_of, book_answer, read_data, texts_of, write_package
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
        for name in ("passed", "lent", "hints", "answers", "equations", "exercises", "days"):
            self.state.setdefault(name, {})
        self.store = Store(folder, blanks_of(self.data))
        self.problems: dict[str, str] = {}

    def save(self) -> None:
        write_whole(self.state_file, json.dumps(self.state, indent=1))

    def blank(self, name: str) -> tuple[str, dict, dict]:
        """A blank by its whole name or its last part: name, chapter, itself."""
        for known in self.data.values():
            for full, blank in known["blanks"].items():
                if name in (full, blank["symbol"]):
                    return full, known, blank
        every = [b["symbol"] for known in self.data.values() for b in known["blanks"].values()]
        raise SystemExit(f"{name}: not in this workbook; there are: {', '.join(every)}")

    def state_of(self, name: str) -> str:
        if name in self.store.answers:
            return "written"
        return "lent" if name in self.state["lent"] else "to do"

    def answers(self) -> dict[str, str]:
        """The reader's, and ours where they are lent."""
        lent = {n: book_answer(n) for n in self.state["lent"] if self.state_of(n) == "lent"}
        mine = {n: a for n, a in self.store.answers.items() if "." in n and not n[0].isdigit()}
        mine = {n: a for n, a in mine.items() if n in self.store.blanks}
        return {n: a for n, a in lent.items() if a} | mine

    def sync(self) -> list[str]:
        """Takes the answers from the notebooks and writes the package anew."""
        said = []
        with only_one(self.folder):
            if back := self.store.collect():
                said.append(f"{back} of your answers were put back into the notebooks.")
            said += self.store.problems
            texts, self.problems = texts_of(self.data, self.answers())
            write_package(self.folder, texts)
        return said

    def check(self, key: str) -> dict[str, Any]:
        """Runs the checks of a chapter, and keeps what passed."""
        known = self.data[key]
        said = self.sync()
        run = self.run(known, self.answers())
        states = {name: self.state_of(name) for name in known["blanks"]}
        blanks = naming.judge(known, run["notes"], states)
        for name, problem in self.problems.items():
            if name in blanks:
                blanks[name] = {"state": "failed", "problem": problem}
        self.blame_end(run, blanks)
        held = naming.equations_held(known, run["notes"])
        done = naming.exercises_done(run["notes"])
        for name, found in blanks.items():
            self.state["passed"].pop(name, None)
            if found["state"] == "passed":
                self.state["passed"][name] = True
        self.state["equations"] |= {label: ok for label, ok in held.items()}
        solved = {n: note["kind"] == "passed" for n, note in done.items()}
        self.state["exercises"] |= solved
        self.clock()
        self.save()
        result = {"chapter": key, "blanks": blanks, "equations": held, "exercises": done}
        return result | {"said": said, "ended": run["ended"], "seconds": run["seconds"]}

    def blame_end(self, run: dict, blanks: dict[str, dict]) -> None:
        """A run that was ended counts against the definition that was running."""
        if not run["ended"]:
            return
        inside = [n for n in blanks if f'"<{n}>"' in run["trace"]] or [
            n for n in blanks if blanks[n]["state"] not in ("to do", "lent", "passed")
        ]
        for name in inside[:1]:
            line = re.search(rf'"<{re.escape(name)}>", line (\d+)', run["trace"])
            where = f", in line {line[1]} of your cell" if line else ""
            blanks[name] = {"state": "failed", "problem": f"{name}: {run['ended']}{where}"}

    def run(self, known: dict, answers: dict[str, str], seconds: int = SECONDS) -> dict:
        """What happened in the chapter's cells with these answers."""
        cells = []
        for cell in known["cells"]:
            name = cell.get("blank") or cell.get("exercise", "")
            given = answers | (self.store.answers if "exercise" in cell else {})
            if name in given and name not in self.problems:
                cell = cell | {"source": given[name]}
            cells.append(cell)
        owner = {blank["symbol"]: name for name, blank in known["blanks"].items()}
        job = {"folder": str(self.folder), "cells": cells, "owner": owner}
        job |= {"seconds": seconds, "megabytes": MEGABYTES}
        with tempfile.TemporaryDirectory() as made:
            task, out = Path(made, "job.json"), Path(made, "result.json")
            task.write_text(json.dumps(job), encoding="utf-8")
            program = Path(__file__).with_name("runner.py")
            command = [sys.executable, str(program), str(task), str(out)]
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace"
            )
            found = read_json(out, {"notes": [], "cell": "the start", "done": False})
            trace_file = out.with_suffix(".trace")
            trace = trace_file.read_text("utf-8") if trace_file.exists() else ""
        found["trace"], found["ended"] = trace, ""
        found.setdefault("seconds", 0.0)
        if not found["done"]:
            last = (done.stderr or "").strip().splitlines()[-1:]
            found["ended"] = f"the process ended in {found['cell']}: {' '.join(last)}"
            if "Timeout" in trace:
                found["ended"] = f"no end after {seconds} seconds: is there a loop without end?"
        return found

    def clock(self) -> None:
        """Adds the time since the last sign of work, unless it was a pause."""
        now = time.time()
        gap = now - self.state.get("last", now)
        self.state["minutes"] = self.state.get("minutes", 0) + (gap / 60 if gap < 1200 else 2)
        self.state["last"] = now
