"""Write book/workbook/NN_name.json: what each kept mistake computes in the checks.

A mistake of `book/faults/` can be made by a reader of the workbook if it changes a
definition that the reader writes, or answers an exercise. It is entered as the answer, the
checks run as for a reader, and the digits of every assertion that fails are kept: by them,
and by nothing else, the workbook knows the mistake again. --check only compares.

`python tools workbook_mistakes 01`; it takes about a minute for a chapter, on Linux.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, Chapter, parser, read_chapters, run, write_text
from bookkit.execute import select
from bookkit.mistakes import Fault, read_faults
from bookkit.modules import read_modules
from bookkit.stage import in_a_fork
from editions.blanks import read_blanks
from editions.reflow import reflow, source_of
from editions.workbook import write_workbook
from workkit import runner
from workkit.naming import signature
from workkit.package import read_data, texts_of, write_package


class Bench:
    """A workbook in which our own answers are written, and mistaken ones tried."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        # In a fork, as it imports attnlib, which each run is to import for itself.
        in_a_fork(lambda: str(len(write_workbook(root, folder, None))))
        self.data = read_data(folder)
        chapters, blanks = read_chapters(root), read_blanks(root)
        modules = read_modules(chapters)
        self.ours: dict[str, str] = {}
        for chapter in chapters:
            for part in reflow(chapter, modules, blanks):
                if part.pieces and part.pieces[0].blank:
                    self.ours[part.pieces[0].blank.name] = source_of(part, answered=True)

    def entered(self, chapter: Chapter, fault: Fault) -> dict[str, str]:
        """What a reader with this mistake writes; nothing if the mistake is not theirs."""
        mine, changed = self.data[chapter.key]["blanks"], {}
        for old, new in fault.changes:
            hits = [n for n in mine if (changed.get(n) or self.ours[n]).count(old) == 1]
            if len(hits) == 1:
                changed[hits[0]] = (changed.get(hits[0]) or self.ours[hits[0]]).replace(
                    old, new
                )
        return changed

    def try_out(self, key: str, entered: dict[str, str], then: Any = None) -> Any:
        """The notes of the checks with these answers in place of ours, from a fork."""
        answers = self.ours | entered
        cells = [
            cell | {"source": answers.get(cell.get("blank", ""), cell["source"])}
            for cell in self.data[key]["cells"]
            if "exercise" not in cell
        ]
        owner = {b["symbol"]: name for name, b in self.data[key]["blanks"].items()}

        def work() -> str:
            with tempfile.TemporaryDirectory() as made:
                place = Path(made)
                shutil.copytree(self.folder / "attnlib", place / "attnlib")
                write_package(place, texts_of(self.data, answers)[0])
                for name in ("book", "benchmarks"):
                    os.symlink(self.folder / name, place / name)
                runner.prepare(place)
                return json.dumps(runner.run(cells, owner, lambda *_: None, then))

        said = in_a_fork(work)
        return json.loads(said) if said.startswith("[") else None

    def try_answers(self, key: str, answers: list[tuple[str, str]]) -> list[Any]:
        """What the checks of exercises say to answers, each in a fork of one run."""
        cells = {c["exercise"]: c for c in self.data[key]["cells"] if "exercise" in c}

        def then(tracer: Any) -> list[str]:
            def said(number: str, source: str) -> str:
                runner.exercise(tracer, cells[number] | {"source": source})
                note = tracer.notes[-1]
                return json.dumps([number, note["kind"], note["came"]])

            return [in_a_fork(partial(said, *answer)) for answer in answers]

        told = self.try_out(key, {}, then) or []
        return [json.loads(t) if t.startswith("[") else ["", "ended", t] for t in told]


def mistakes_of(bench: Bench, chapter: Chapter) -> list[dict[str, Any]]:
    """Each mistake that a reader can make, with the digits of what it makes fail."""
    faults = read_faults(bench.root, chapter)
    tried = [f for f in faults if f.kind != "equation"]
    answers = [(f.subject, f"# Exercise {f.subject}: yours\n{f.answer}") for f in tried]
    digits = {
        str(f): ([], [d])
        for f, d in zip(tried, bench.try_answers(chapter.key, answers), strict=True)
    }
    seen: list[dict] = []  # one that is kept for two equations is tried once
    for fault in faults:
        entered = bench.entered(chapter, fault) if fault.kind == "equation" else {}
        if entered and entered not in seen:
            seen.append(entered)
            notes = bench.try_out(chapter.key, entered) or []
            digits[str(fault)] = sorted(entered), signature(notes)[:60]
    found = []
    for fault in (f for f in faults if str(f) in digits):
        blanks, kept = digits[str(fault)]
        made = {"subject": fault.subject, "mistake": fault.mistake}
        found.append(made | {"blanks": blanks, "signature": kept})
        caught = any(kind != "passed" for _, kind, _ in kept)
        print(
            f"{'caught' if caught else 'NOT SEEN':9} {fault}", file=sys.stderr, flush=True
        )
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("chapters", nargs="+", help="such as 01")
    options.add_argument("--check", action="store_true", help="only compare, write nothing")
    args = options.parse_args()
    import torch
    from matplotlib import pyplot  # noqa: F401

    torch.set_num_threads(1)
    stale = []
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(args.root.resolve(), Path(made))
        for chapter in select(read_chapters(args.root), args.chapters, args.root):
            found = {"mistakes": mistakes_of(bench, chapter)}
            text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
            path = args.root / "book" / "workbook" / f"{chapter.name}.json"
            if args.check and (not path.exists() or path.read_text("utf-8") != text):
                stale.append(path.name)
            elif not args.check:
                write_text(path, text)
    if stale:
        raise BookError(f"stale: {', '.join(stale)}; run python tools workbook_mistakes")
    return 0


if __name__ == "__main__":
    run(main)
