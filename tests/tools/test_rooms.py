"""Each program has its line, what names one names it right, and no import goes round."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter

import pytest

from tiny_book import ROOT, TOOLS


def imports_of(path):
    """The files of workkit that one imports, also in a function or for its types."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    names = {n.module for n in found}
    names |= {
        f"{n.module}.{a.name}" for n in found for a in n.names if n.module == "workkit"
    }
    return {name.partition(".")[2] for name in names if name.startswith("workkit.")}


def test_what_travels_with_the_workbook_imports_in_no_circle():
    files = {path.stem: imports_of(path) for path in (TOOLS / "workkit").glob("*.py")}
    assert {"workbook", "cells"} <= set(TopologicalSorter(files).static_order())


def test_each_program_has_its_line():
    lines = (TOOLS / "README.md").read_text(encoding="utf-8").splitlines()
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert sorted(named) == sorted(path.name for path in TOOLS.rglob("*.py"))


PROGRAMS = [
    path
    for path in sorted(TOOLS.rglob("*.py"))
    if "\nif __name__" in path.read_text("utf-8")
    and path.stem not in {"__main__", "build_book"}  # which have no --help
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_by_its_path_too(path):
    run = subprocess.run([sys.executable, path, "--help"], capture_output=True, cwd="/")
    assert run.returncode == 0, run.stderr.decode()


def test_every_room_of_the_tests_is_run():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    files = (ROOT / "tests").rglob("test_*.py")
    rooms = {file.parent.relative_to(ROOT).as_posix() for file in files}
    assert {"book", *rooms} == set(named)


NAMING = ["Makefile", "*.md", ".*.yaml", ".ci/run", ".github/workflows/*.yml", "book/*.md"]
NAMING += ["tools/**/*.py", "tests/**/*.py", "benchmarks/*.py"]


def test_programs_and_files_that_are_named_exist():
    paths = [path for pattern in NAMING for path in ROOT.glob(pattern)]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    files = set(re.findall(r"\b(?:tools|tests|benchmarks)/[\w/]+\.\w+", text))
    missing = {file for file in files if not (ROOT / file).exists()}
    elsewhere = {"tests/test_it.py", "tests/test_three.py", "tests/test_numbers.py"}
    elsewhere |= {"tests/room/test_a.py"}
    elsewhere |= {f"tools/room/{name}.py" for name in ("show", "all", "help")}
    assert missing <= elsewhere  # in tiny houses
    listed = subprocess.run([sys.executable, TOOLS], capture_output=True, encoding="utf-8")
    programs = re.findall(r"\w+", listed.stderr.partition("of: ")[2])
    called = set(re.findall(r"(?:python\"?|\$\(RUN\)) tools (\w+)", text))
    assert "tangle" in called and called <= {"NAME", *programs}
