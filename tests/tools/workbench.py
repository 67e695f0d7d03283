"""A reader at the workbook: answers are written, checks are run, cells are read."""

import json
import os
import subprocess
import sys

from tiny_book import ROOT
from workkit.store import name_of


def check(folder, *words, **more):
    command = [sys.executable, folder / "check.py", *map(str, words)]
    env = (
        os.environ
        | {"ATTNLIB_BOOK": str(ROOT / "attnlib"), "PYTHONPATH": ""}
        | {n: str(v) for n, v in more.items()}
    )
    options = {"capture_output": True, "encoding": "utf-8"}
    return subprocess.run(command, env=env, cwd=folder, **options)


def write(folder, answers):
    """As a reader does: into the notebooks."""
    for path in (folder / "book").glob("*.ipynb"):
        notebook = json.loads(path.read_text("utf-8"))
        names = {name_of("".join(cell["source"])): cell for cell in notebook["cells"]}
        for name in answers.keys() & names.keys():
            names[name]["source"] = answers[name]
        if answers.keys() & names.keys():
            path.write_text(json.dumps(notebook), encoding="utf-8")


def sources(folder, key):
    """The code of a chapter's notebook, or of all, cell by cell."""
    paths = sorted((folder / "book").glob(f"{key}_*.ipynb"))
    cells = [c for p in paths for c in json.loads(p.read_text("utf-8"))["cells"]]
    return ["".join(c["source"]) for c in cells]


def cell_of(folder, name):
    return next((s for s in sources(folder, "*") if name_of(s) == name), None)
