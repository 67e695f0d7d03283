"""What is still owed for a chapter, on a tiny book: a line for each debt, and none else."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import owed
from tiny_book import code, edit, run, write

FAULTS = """
[[equation]]
label = "eq-a"
mistake = "Wrong."
changes = []

[[exercise]]
number = "1.1"
kind = "misunderstanding"
mistake = "Wrong."
answer = ""

[[exercise]]
number = "1.1"
kind = "shortcut"
mistake = "Wrong."
answer = ""
"""
NOTATION = "| $x_i$ | tokens |\n| $y$ | in chapter 1: output |\n"
GLOSSARY = "tile\n  A part of a matrix. Chapter 3.\n"
BUILD = "build the book to see how many screens are left (in Chromium)"


@pytest.fixture
def said(root, monkeypatch, capsys):
    """What is said of the first chapter, which owes nothing but a look at its page."""
    text = "# First\n\n$$ y = x_i $$ (eq-a)\n\n$$ x_i $$\n\n### Exercise 1.1: Halve"
    write(root / "book/01_first.ipynb", text, code("1"))
    write(root / "book/02_second.ipynb", "# A tile")
    for name, page in {
        "faults/01_first.toml": FAULTS,
        "notation.md": NOTATION,
        "glossary.md": GLOSSARY,
    }.items():
        (root / "book" / name).parent.mkdir(exist_ok=True)
        (root / "book" / name).write_text(page, encoding="utf-8")
    monkeypatch.setattr(owed.workbook_mistakes, "owed", lambda *_: [])

    def told():
        capsys.readouterr()
        assert run(owed, root, "01") == 0
        head, *lines = capsys.readouterr().out.strip().split("\n  ")
        assert head == "Still owed:"
        return lines

    return told


CHAPTER, KEPT = "01_first.ipynb", "faults/01_first.toml"
OWED = {
    "an equation without a mistake": (
        (CHAPTER, "eq-a", "eq-b"),
        [
            "book/faults/01_first.toml: keep a mistake for eq-b",
            "book/faults/01_first.toml: there is no eq-a any more",
        ],
    ),
    "an exercise without a shortcut": (
        (KEPT, "shortcut", "misunderstanding"),
        ["book/faults/01_first.toml: keep a shortcut for 1.1"],
    ),
    "a letter without a line": (
        ("notation.md", "in chapter 1", "in chapter 2"),
        ["book/notation.md: no line explains $y$ in chapter 1"],
    ),
    "a letter with two lines": (
        ("notation.md", "| tokens |", "| tokens |\n| $x_i$ | places |"),
        ["book/notation.md: 2 lines explain $x_{i}$ in chapter 1"],
    ),
    "a word that comes too early": (
        (CHAPTER, "Halve", "Halve a tile"),
        ["book/01_first.ipynb: 'tile' comes before its chapter: Halve a tile"],
    ),
}


@pytest.mark.parametrize(("change", "lines"), OWED.values(), ids=OWED)
def test_a_debt_is_a_line(root, said, change, lines):
    file, old, new = change
    edit(root / "book" / file, old, new)
    assert said() == [*lines, BUILD]


def test_what_the_workbook_owes_is_said(root, said, monkeypatch):
    def ours(where, chapter):
        assert (where, chapter.name) == (root, "01_first")
        return ["a blank"]

    monkeypatch.setattr(owed.workbook_mistakes, "owed", ours)
    assert said() == ["a blank", BUILD]


def test_the_screens_that_are_left(root, said, monkeypatch):
    site, opened = root / "_build" / "html", []
    page = SimpleNamespace(goto=opened.append, evaluate=lambda script: None)
    browser = SimpleNamespace(new_page=lambda: page)
    monkeypatch.setattr(owed, "find_chromium", lambda: "chromium")
    monkeypatch.setattr(owed, "launched", lambda: nullcontext(browser))
    monkeypatch.setattr(owed, "is_current", lambda *of: of == (site / ".sources", root))
    monkeypatch.setattr(owed, "screens", lambda page: 23.25)
    assert said() == ["book/01_first.ipynb: 1.8 of 25 screens are left"]
    assert opened == [(site / "01_first.html").as_uri()]
    monkeypatch.setattr(owed, "find_chromium", lambda: None)
    assert said() == [BUILD]


def test_where_no_chapter_is_meant_nothing_is_said(root, said, monkeypatch, capsys):
    monkeypatch.setattr(owed, "select", lambda *_: [])
    assert run(owed, root, "changed") == 0
    assert not capsys.readouterr().out
