"""A workbook in which our own answers are written, and mistaken ones tried."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bookkit.chapters import BookError, read_chapters
from bookkit.modules import read_modules
from bookkit.stage import in_a_fork, used
from editions.blanks import read_blanks
from editions.reflow import answers_of, reflow
from editions.workbook import write_workbook
from workkit import runner
from workkit.package import read_data, texts_of, write_package


class Bench:
    """A workbook in which our own answers are written, and mistaken ones tried."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        # In a fork, as it imports attnlib, which each run is to import for itself.
        said = in_a_fork(lambda: str(len(write_workbook(root, folder, None))))
        if not said.isdigit():
            raise BookError(f"the workbook cannot be written: {said}")
        self.data = read_data(folder)
        chapters, blanks = read_chapters(root), read_blanks(root)
        modules = read_modules(chapters)
        self.ours: dict[str, str] = {}
        for chapter in chapters:
            self.ours |= answers_of(reflow(chapter, modules, blanks))

    def try_out(self, key: str, entered: dict[str, str], then: Any = None) -> Any:
        """The notes of the checks with these answers in place of ours, from a fork."""
        answers = self.ours | entered
        cells = [
            cell | {"source": answers.get(cell.get("blank", ""), cell["source"])}
            for cell in self.data[key]["cells"]
            if then or "exercise" not in cell
        ]
        owner = {b["symbol"]: name for name, b in self.data[key]["blanks"].items()}

        def work() -> str:
            with tempfile.TemporaryDirectory() as made:
                place = Path(made)
                shutil.copytree(self.folder / "attnlib", place / "attnlib")
                write_package(place, texts_of(self.data, answers)[0])
                for name in ("book", "benchmarks"):
                    os.symlink(self.folder / name, place / name)
                runner.prepare(place, place, draws=True)
                return json.dumps(runner.run(cells, owner, lambda *_: None, then))

        said = in_a_fork(work)
        return json.loads(said) if said.startswith("[") else None

    def try_answers(self, key: str, answers: list[tuple[str, str]]) -> list[Any]:
        """What the checks of exercises say to answers, each in a fork of one run."""
        if not answers:
            return []
        cells = {c["exercise"]: c for c in self.data[key]["cells"] if "exercise" in c}
        answers = [(n, f"# Exercise {n}: yours\n{source}") for n, source in answers]
        for number, source in answers:
            cells[number].setdefault("names", []).extend(used(source))

        def then(tracer: Any) -> list[str]:
            def said(number: str, source: str) -> str:
                runner.exercise(tracer, cells[number] | {"source": source})
                note = tracer.notes[-1]
                return json.dumps([[number, note["kind"], note["came"]], note["returns"]])

            return [in_a_fork(partial(said, *answer)) for answer in answers]

        told = self.try_out(key, {}, then) or []
        return [json.loads(t) if t.startswith("[") else [["", "ended", t]] for t in told]
