"""The mistakes in book/faults/ are caught, and the tool that plants them tells no lies."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from chapters import read_chapters
from equations import equations
from mistakes import KINDS, read_faults

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = read_chapters(ROOT)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)
SAMPLE = {"03_causal_attention"}  # what is tried even where nothing has changed


def git_says_changed():
    """The names of the files below book/ that differ from the last commit."""
    command = ["git", "status", "--porcelain", "--no-renames", "book", "attnlib"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    return {Path(line[3:].strip('"')).stem for line in done.stdout.splitlines()}


@each_chapter
def test_each_equation_and_exercise_has_mistakes(chapter):
    faults = read_faults(ROOT, chapter)
    kept = {(fault.subject, fault.kind) for fault in faults}
    text = "\n".join(c.source for c in chapter.cells if c.cell_type == "markdown")
    asked = re.findall(r"^### Exercise (\w+\.\d+):", text, re.MULTILINE)
    wanted = {(equation.label, "equation") for equation in equations(chapter, [])}
    wanted |= {(number, kind) for number in asked for kind in KINDS}
    assert wanted - kept == set(), "keep a mistake for each, in book/faults/"
    assert kept - wanted == set(), "there is no such equation or exercise"
    for fault in faults:
        said = fault.mistake
        assert said.endswith(".") and 20 <= len(said) <= 160, f"a sentence: {said}"
    assert len({str(fault) for fault in faults}) == len(faults), "one stands there twice"


@pytest.mark.skipif(sys.platform != "linux", reason="mistakes are planted in forks")
@each_chapter
def test_mistakes_are_caught(chapter, request):
    thorough = request.config.getoption("--thorough")
    if not thorough and chapter.name not in SAMPLE | git_says_changed():
        pytest.skip("unchanged; --thorough tries every chapter")
    done = plant(ROOT, chapter.name)
    assert done.returncode == 0, done.stdout


def plant(root, name):
    tool = [sys.executable, str(ROOT / "tools" / "faults.py"), "--root", str(root), name]
    return subprocess.run(tool, capture_output=True, encoding="utf-8")


# The tool, on a chapter of its own.

HALVES = (
    new_markdown_cell(
        "# Halves\n\n$$ h $$ (eq-half)\n<!-- eq-half | here | attnlib.Projection -->"
    ),
    new_code_cell("def half(x):\n    return x / 2"),
    new_code_cell("def other(x):\n    return 3 * x\n\n\nseen = []"),
    new_code_cell("seen.append(half(4))"),
    new_code_cell("# checks eq-half\nassert half(3) == 1.5 and seen == [2]"),
    new_markdown_cell("### Exercise 1.1: Halve"),
    new_code_cell(
        'def check(f):\n    assert f(2) == 1, f"got {f(2)}"\n    assert f(3) > 1'
    ),
    new_code_cell("# Solution 1.1\ncheck(half)"),
)
HALF = """
[[equation]]
label = "eq-half"
mistake = "Half is a third."
changes = [["x / 2", "{}"]]
"""
ANSWER = """
[[exercise]]
number = "1.1"
kind = "shortcut"
mistake = "It knows two."
answer = "check(lambda x: {})"
"""


@pytest.fixture
def book(tmp_path):
    """A chapter, and a way to keep a mistake for it and plant that."""
    folder = tmp_path / "book" / "faults"
    folder.mkdir(parents=True)
    nbformat.write(new_notebook(cells=list(HALVES)), folder.parent / "01_halves.ipynb")

    def try_out(toml):
        (folder / "01_halves.toml").write_text(toml, encoding="utf-8")
        done = plant(tmp_path, "01")
        return done.stdout + done.stderr

    return try_out


UNRUN = "eq-half: none of the cells that check it runs attnlib.Projection"


def test_a_mistake_that_is_caught_is_not_told(book):
    assert book(HALF.format("x / 3")).startswith(UNRUN)
    assert book(ANSWER.format("x")).startswith(UNRUN)


NOT_CAUGHT = {
    "equal": (HALF.format("0.5 * x"), "passed"),
    "a crash": (HALF.format("x / None"), "TypeError, line 2: unsupported operand"),
    "the end": (HALF.format("exit()"), "SystemExit, line 2"),
    "found twice": (
        HALF.replace("x / 2", "half(").format("x"),
        "found 3 times instead of once: half(",
    ),
    "stale": (HALF.replace("x / 2", "gone").format("x"), "found 0 times"),
    "after the check": (
        HALF.replace("x / 2", "f(2) == 1,").format("f(2) == 2,"),
        "no cell that checks it comes after the change",
    ),
    "a right answer": (ANSWER.format("x / 2"), "passed"),
    "refused without a word": (ANSWER.format("x / 2 if x == 2 else 0"), "caught: "),
    "an answer that crashes": (ANSWER.format("x / 0"), "ZeroDivisionError, line 1"),
    "no exercise": (ANSWER.replace("1.1", "1.2"), "starts with # Solution 1.2"),
    "an odd key": (HALF + "colour = 1\n", "01_halves.toml: what is colour?"),
    "an odd kind": (ANSWER.replace("shortcut", "joke"), "what is joke?"),
    "no mistake": ('[[equation]]\nlabel = "eq-half"\n', "01_halves.toml: 'mistake'"),
    "not TOML": ("label = ", "01_halves.toml: Invalid value"),
}


@pytest.mark.parametrize(("toml", "told"), NOT_CAUGHT.values(), ids=NOT_CAUGHT)
def test_what_is_not_caught_is_told(book, toml, told):
    assert told in book(toml)
