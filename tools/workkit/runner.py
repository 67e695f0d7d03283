"""Runs a chapter's checks, or a milestone, on the reader's code, in a process of its own.

    python runner.py JOB.json RESULT.json

A job names the folder, the chapter's cells with the answers in them, and the limits. What
has happened is written after every cell, so that a crash or a loop without end leaves what
was found before it, and the cell in which it came.
"""

from __future__ import annotations

import ast
import builtins
import faulthandler
import json
import math
import os
import sys
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bookkit.grammar import only_python
from bookkit.stage import used
from workkit.cells import is_check, is_import, needed
from workkit.errors import watch_ranks
from workkit.naming import SMALL
from workkit.tracing import Tracer
from workkit.values import digits

SOON = 20  # seconds for the small tests of a definition, which take one


def main() -> None:
    if len(sys.argv) != 3:
        print(__doc__)
        return
    text, out = Path(sys.argv[1]).read_text("utf-8"), Path(sys.argv[2])
    job, draws = json.loads(text), "pyplot" in text
    limit_memory(job["megabytes"])
    prepare(Path(job["folder"]), Path(job.get("package", job["folder"])), draws)
    result: dict[str, Any] = {"done": False}
    with open(out.with_suffix(".trace"), "w", encoding="utf-8") as trace:

        def tell(name: str, notes: list, seconds: float) -> None:
            limit = min(SOON if name.startswith(SMALL) else math.inf, job["seconds"])
            result.update(cell=name, notes=notes, seconds=seconds, limit=limit)
            out.write_text(json.dumps(result), encoding="utf-8")
            faulthandler.dump_traceback_later(limit, exit=True, file=trace)

        if "milestone" in job:
            from workkit import trials  # which imports the reader's package

            result["notes"] = trials.attempt(job["milestone"], tell)
        else:
            run(job["cells"], job["owner"], tell)
        faulthandler.cancel_dump_traceback_later()
        out.write_text(json.dumps(result | {"done": True}), encoding="utf-8")


def prepare(folder: Path, package: Path, draws: bool) -> None:
    """A process like the kernel of a notebook, but one that draws nothing.

    The attnlib that it imports is the one in `package`.
    """
    for name, value in (("TRITON_INTERPRET", "1"), ("OMP_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    if draws:  # otherwise it would start half a second later
        from matplotlib import pyplot as plt

        plt.switch_backend("agg")
        plt.show = lambda *_, **__: plt.close("all")
    os.chdir(folder / "book")
    sys.path.insert(0, str(package))
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def limit_memory(megabytes: int) -> None:
    """Where the system can: elsewhere a huge tensor is refused by PyTorch itself."""
    try:
        import resource
    except ImportError:  # Windows
        return
    size = megabytes * 2**20
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard in (resource.RLIM_INFINITY, -1) or size < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


def run(cells: list[dict], owner: dict[str, str], tell: Any, then: Any = None) -> Any:
    """The notes of all cells that the checks need; `tell` hears before and after each.

    `then` is called before the exercises, in their place.
    """
    watch_ranks(cells)
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    tracer = Tracer(module.__dict__, owner)
    chosen = needed(cells) | {i for i, cell in enumerate(cells) if "tests" in cell}
    tell("the imports", tracer.notes, 0.0)
    start = 0.0
    for index, cell in enumerate(cells):
        source, blank = cell["source"], cell.get("blank") or cell.get("tests")
        if cell.get("exercise"):
            continue
        if index not in chosen:
            imports = [n for n in ast.parse(only_python(source)).body if is_import(n)]
            source = "\n".join(ast.unparse(n) for n in imports)
        if source:
            tell(cell["id"], tracer.notes, start)
            before = time.process_time()
            tracer.run_cell(cell["id"], source, blank)
            start += time.process_time() - before if is_check(source) else 0
    if then:
        return then(tracer)
    for cell in (c for c in cells if c.get("exercise")):
        tell(cell["id"], tracer.notes, start)
        exercise(tracer, cell)
    tell("the end", tracer.notes, start)
    return tracer.notes


def exercise(tracer: Tracer, cell: dict) -> None:
    """An answer to an exercise: right if its checks were called and none refused it."""
    before = len(tracer.notes)
    uses = used(only_python(cell["source"]))
    returned: list[Any] = []

    def note_return(frame: FrameType, event: str, value: Any) -> None:
        """What the reader's own functions return: it tells answers apart."""
        code = frame.f_code
        mine = code.co_filename == f"<{cell['id']}>" and code.co_name != "<module>"
        if event == "return" and mine and len(returned) < 3:
            returned.append(digits(value))

    sys.setprofile(note_return)
    try:
        tracer.run_cell(cell["id"], cell["source"])
    finally:
        sys.setprofile(None)
    notes = tracer.notes[before:]
    del tracer.notes[before:]
    bad = [n for n in notes if n["kind"] != "passed"]
    kind = "passed" if not bad and set(cell["checks"]) <= uses else "failed"
    if not uses:
        kind = "unwritten"
    said = bad[0].get("came") or bad[0].get("message", "") if bad else ""
    if not bad and kind == "failed":
        said = f"try it with {', '.join(sorted(set(cell['checks']) - uses))}"
    found = {"kind": kind, "exercise": cell["exercise"], "came": said, "key": cell["id"]}
    found["returns"] = returned
    tracer.notes.append(found | {"cell": cell["id"], "labels": [], "uses": [], "text": ""})


if __name__ == "__main__":
    main()
