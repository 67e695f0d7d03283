"""The mistakes in book/faults/ are caught, and the tool that plants them tells no lies."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from bookkit.chapters import read_chapters
from bookkit.faults import patched
from bookkit.mistakes import read_faults, wanted
from bookkit.stage import Stage

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = read_chapters(ROOT)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)


@each_chapter
def test_each_equation_and_exercise_has_mistakes(chapter):
    faults = read_faults(ROOT, chapter)
    kept = {(fault.subject, fault.kind) for fault in faults}
    assert wanted(chapter) - kept == set(), "keep a mistake for each, in book/faults/"
    assert kept - wanted(chapter) == set(), "there is no such equation or exercise"
    for fault in faults:
        said = fault.mistake
        assert said.endswith(".") and 20 <= len(said) <= 160, f"a sentence: {said}"
    assert len({str(fault) for fault in faults}) == len(faults), "one stands there twice"


@each_chapter
def test_what_a_mistake_changes_is_in_the_chapter(chapter):
    for fault in read_faults(ROOT, chapter):
        if fault.kind == "equation":
            patched(Stage(chapter), fault)  # refuses what does not stand there once


@pytest.mark.skipif(sys.platform != "linux", reason="mistakes are planted in forks")
@pytest.mark.costly(
    "mistakes/{chapter.name}",
    "tools/bookkit/faults.py",
    "book/{chapter.name}.ipynb#code",
    "book/faults/{chapter.name}.toml",
)
@pytest.mark.parametrize(
    "chapter", [c for c in CHAPTERS if read_faults(ROOT, c)], ids=lambda c: c.name
)
def test_mistakes_are_caught(chapter):
    done = plant(ROOT, chapter.name)
    assert done.returncode == 0, done.stdout


def plant(root, name, *options):
    tool = [sys.executable, ROOT / "tools", "faults", "--root", str(root), name, *options]
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
mistake = "{0}."
changes = [["{1}", "{2}"]]
"""
ANSWER = """
[[exercise]]
number = "1.1"
kind = "shortcut"
mistake = "{0}."
answer = "check(lambda x: {1})"
"""
UNRUN = "eq-half: none of the cells that check it runs attnlib.Projection"


@pytest.fixture
def book(tmp_path):
    """A chapter, and a way to keep mistakes for it and plant them."""
    folder = tmp_path / "book" / "faults"
    folder.mkdir(parents=True)
    nbformat.write(new_notebook(cells=list(HALVES)), folder.parent / "01_halves.ipynb")

    def try_out(toml, *options):
        (folder / "01_halves.toml").write_text(toml, encoding="utf-8")
        done = plant(tmp_path, "01", *options)
        return done.stdout + done.stderr

    return try_out


PLANTED = {
    "a third": (HALF, "x / 2", "x / 3", ""),
    "itself": (ANSWER, "x", ""),
    "equal": (HALF, "x / 2", "0.5 * x", "passed"),
    "a crash": (HALF, "x / 2", "x / None", "TypeError, line 2: unsupported operand"),
    "the end": (HALF, "x / 2", "exit()", "SystemExit, line 2"),
    "after the check": (
        HALF, "f(2) == 1,", "f(2) == 2,", "no cell that checks it comes after the change"
    ),
    "a right answer": (ANSWER, "x / 2", "passed"),
    "refused without a word": (ANSWER, "x / 2 if x == 2 else 0", "caught: "),
    "an answer that crashes": (ANSWER, "x / 0", "ZeroDivisionError, line 1"),
}  # fmt: skip


def test_what_is_not_caught_is_told(book):
    """And what is caught is not; all are planted in one run."""
    kept = [form.format(name, *rest[:-1]) for name, (form, *rest) in PLANTED.items()]
    said = book("".join(kept))
    assert UNRUN in said
    told = {
        name: found[1]
        for name in PLANTED
        if (found := re.search(rf"^[\w.-]+: {name}\.\n +(.*)", said, re.MULTILINE))
    }
    assert told.keys() == {name for name, (*_, why) in PLANTED.items() if why}
    for name, why in told.items():
        assert PLANTED[name][-1] in why, name


def test_some_are_planted_alone(book):
    """By subject or by words, with what each took; what names none is told."""
    kept = HALF.format("A third", "x / 2", "x / 3") + HALF.format(
        "A half", "x / 2", "2 / x"
    )
    kept += ANSWER.format("Itself", "x") + ANSWER.format("Twice", "2 * x")
    said = book(kept, "--only", "1.1", "third")
    told = re.findall(r"^(\d/\d) +\d+\.\d s  caught  (.*)\.$", said, re.MULTILINE)
    assert told == [
        ("1/3", "eq-half: A third"),
        ("2/3", "1.1: Itself"),
        ("3/3", "1.1: Twice"),
    ]
    assert "no mistake is kept for 1.2" in book(kept, "--only", "third", "1.2")


def test_what_an_earlier_cell_calls_is_run_before_the_check(tmp_path):
    """A listing may be split: what it calls is then defined in a cell behind the change."""
    folder = tmp_path / "book" / "faults"
    folder.mkdir(parents=True)
    cells = [
        new_markdown_cell("# Halves\n\n$$ h $$ (eq-half)\n<!-- eq-half | here | whole -->"),
        new_code_cell("def whole(x):\n    return half(x) + half(x)"),
        new_code_cell("extra = 0"),
        new_code_cell("def half(x):\n    return x / 2 + extra"),
        new_code_cell("# checks eq-half\nassert whole(3) == 3"),
    ]
    nbformat.write(new_notebook(cells=cells), folder.parent / "01_halves.ipynb")
    mistake = HALF.format("One more", "extra = 0", "extra = 1")
    (folder / "01_halves.toml").write_text(mistake, encoding="utf-8")
    assert "all 1 mistakes caught" in plant(tmp_path, "01").stdout


REFUSED = {
    "found twice": (
        HALF.format("", "half(", "x"), "found 3 times instead of once: half("
    ),
    "stale": (HALF.format("", "gone", "x"), "found 0 times"),
    "no exercise": (
        ANSWER.format("", "x").replace("1.1", "1.2"), "starts with # Solution 1.2"
    ),
    "an odd key": (
        HALF.format("", "x", "y") + "colour = 1\n", "01_halves.toml: what is colour?"
    ),
    "an odd kind": (ANSWER.replace("shortcut", "joke"), "what is joke?"),
    "no mistake": ('[[equation]]\nlabel = "eq-half"\n', "01_halves.toml: 'mistake'"),
    "not TOML": ("label = ", "01_halves.toml: Invalid value"),
}  # fmt: skip


@pytest.mark.parametrize(("toml", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_planted_is_refused(book, toml, told):
    assert told in book(toml)
