"""A tiny book for each test of a tool, and a workbook of the whole one."""

import shutil

import pytest

from bookkit import tangle
from bookkit.grammar import SOLUTION
from editions.reflow import answers_of
from editions.workbook import write_workbook
from editions.workbook_record import read_book
from tiny_book import BASE, LATER, OTHER, ROOT, ROOTS, code, run, write


@pytest.fixture
def root(tmp_path):
    """A book of two chapters and its package."""
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 92\n")
    (tmp_path / "attnlib").mkdir()
    (tmp_path / "attnlib/__init__.py").touch()
    write(
        tmp_path / "book/01_first.ipynb",
        "# First\n\nWords.",
        BASE,
        code("1 + 1"),
        ROOTS,
        OTHER,
    )
    write(tmp_path / "book/02_second.ipynb", "# Second", LATER)
    assert run(tangle, tmp_path) == 0
    return tmp_path


@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workbook")
    write_workbook(ROOT, folder, None)
    return folder


@pytest.fixture
def folder(untouched, tmp_path):
    """A workbook to write in."""
    return shutil.copytree(untouched, tmp_path / "workbook")


@pytest.fixture(scope="session")
def ours():
    """Our own cells, as answers."""
    book, found = read_book(ROOT), {}
    for chapter in book.chapters:
        found |= answers_of(book.shown(chapter))
    for cell in (cell for c in book.chapters for cell in c.code_cells):
        if solved := SOLUTION.match(cell.source):
            start = f"# Exercise {solved[1]}: yours"
            found[solved[1]] = f"{found.get(solved[1], start)}\n{cell.source}"
    return found
