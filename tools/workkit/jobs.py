"""The process in which checks run, with limits.

Where it is ended before its end, that counts against the definition that was running.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bookkit.grammar import only_python
from workkit.naming import SMALL
from workkit.store import read_json
from workkit.workbook import Workbook

SECONDS = 180  # for one cell
MEGABYTES = 12_000


def run(
    book: Workbook,
    known: dict,
    answers: dict[str, str],
    tested: Iterable[str] = (),
    **more: Any,
) -> dict:
    """What happened in the chapter's cells with these answers.

    The small tests of those `tested` come first; `more` is for the job.
    """
    small = small_tests(book.folder)
    cells = [
        {"id": f"{SMALL}{name}", "tests": name, "source": small[name]}
        for name in tested
        if name in small
    ]
    for cell in known["cells"]:
        name = cell.get("blank") or cell.get("exercise", "")
        given = answers | (book.store.answers if "exercise" in cell else {})
        if name in given and name not in book.problems:
            cell = cell | {"source": parsed(given[name])}
        cells.append(cell)
    owner = {blank["symbol"]: name for name, blank in known["blanks"].items()}
    job = {"folder": str(book.folder), "cells": cells, "owner": owner}
    job |= {"seconds": SECONDS, "megabytes": MEGABYTES}
    return run_job(job | more)


def small_tests(folder: Path) -> dict[str, str]:
    """Of each definition that has some, a cell that tries it by itself."""
    text = (folder / "small_tests.py").read_text(encoding="utf-8")
    found = {}
    for part in f"\n{text}".split("\n# ")[2:]:  # the first is for the linter
        name, _, tests = part.partition("\n")
        module, _, symbol = name.rpartition(".")
        head = ["import math", "import numpy as np", "import torch"]
        head += [f"from attnlib.{module} import {symbol}", "torch.manual_seed(0)"]
        lines = [f"    {line}" for line in (*head, *tests.strip().splitlines())]
        found[name] = "\n".join(["def small_tests():", *lines, "small_tests()"])
    return found


def run_job(job: dict[str, Any], hear: Callable[[str], None] = str) -> dict[str, Any]:
    """Runs a job of `runner.py`: its notes, and in `ended` what broke it off.

    `hear` is called with each line that it prints, when it comes.
    """
    with tempfile.TemporaryDirectory() as made:
        task, out = Path(made, "job.json"), Path(made, "result.json")
        task.write_text(json.dumps(job), encoding="utf-8")
        program = Path(__file__).with_name("runner.py")
        command = [sys.executable, str(program), str(task), str(out)]
        status, last = listen(command, Path(made, "errors"), hear)
        found = read_json(out, {"notes": [], "cell": "the start", "done": False})
        trace_file = out.with_suffix(".trace")
        trace = trace_file.read_text("utf-8") if trace_file.exists() else ""
    found["trace"], found["ended"] = trace, ""
    found.setdefault("seconds", 0.0)
    if not found["done"]:
        why = f"status {status}: {last}" if last else f"status {status}"
        found["ended"] = f"the process ended in {found['cell']}, {why}"
        if "Timeout" in trace:
            limit = found["limit"]
            found["ended"] = f"no end after {limit} seconds: is there a loop without end?"
    return found


def listen(command: list[str], errors: Path, hear: Callable) -> tuple[int, str]:
    """Status of a process, and the last line of its errors; it ends where we are ended."""
    options = {"encoding": "utf-8", "errors": "replace", "stdout": subprocess.PIPE}
    with (
        open(errors, "w", encoding="utf-8") as file,
        subprocess.Popen(command, stderr=file, **options) as child,
    ):
        try:
            for line in child.stdout:
                hear(line.rstrip("\n"))
        except BaseException:
            child.kill()
            raise
    said = errors.read_text(encoding="utf-8", errors="replace").strip()
    return child.returncode, " ".join(said.splitlines()[-1:])


def blame_end(run: dict, blanks: dict[str, dict]) -> None:
    """A run that was ended counts against the definition that was running."""
    if not run["ended"]:
        return
    inside = [n for n in blanks if run.get("cell") == f"{SMALL}{n}"]
    inside = inside or [n for n in blanks if f'"<{n}>"' in run["trace"]]
    inside = inside or [
        n for n in blanks if blanks[n]["state"] not in ("to do", "lent", "passed")
    ]
    for name in inside[:1]:
        line = re.search(rf'"<{re.escape(name)}>", line (\d+)', run["trace"])
        where = f", in line {line[1]} of your cell" if line else ""
        what, asks, guess = run["ended"].partition(": is there")
        problem = f"{name}: {what}{where}{asks}{guess}"
        blanks[name] = {"state": "failed", "problem": problem}
        failed = [n for n, found in blanks.items() if found["state"] == "failed"]
        for found in blanks.values():
            if found["state"] == "waits" and not {*found["for"]} & {*failed}:
                found["for"] = [name]


def parsed(source: str) -> str:
    """A cell, or code that says why it is none."""
    try:
        ast.parse(only_python(source))
    except SyntaxError as error:
        return f"raise AssertionError({f'line {error.lineno}: {error.msg}'!r})"
    return source
