"""A tiny book for each test of a tool."""

import pytest

from bookkit import tangle
from tiny_book import BASE, LATER, OTHER, ROOTS, code, run, write


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
