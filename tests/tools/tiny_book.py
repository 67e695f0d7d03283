"""A book of two chapters on which the tools are tried."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from bookkit import chapters

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


BASE = '''# attnlib/base.py
"""What comes first."""

import math


def half(x):
    return x / 2'''
ROOTS = """# attnlib/base.py
# A comment that belongs to root.
def root(x):
    return math.sqrt(half(x))"""
OTHER = '''# attnlib/deep/other.py
"""What builds on it.

In two paragraphs.
"""

LIMIT = 3
STEP = 1


class Other:
    def go(self, half_of):
        return root(half_of) + LIMIT'''
LATER = '''# attnlib/later.py
"""What comes later."""

from attnlib.base import half


def quarter(x):
    return half(half(x))'''


def code(source, **metadata):
    return new_code_cell(source, metadata=metadata)


def write(path, *cells):
    """A chapter of these cells; a string with a caption is code, any other is markdown."""
    made = [
        cell
        if not isinstance(cell, str)
        else (new_code_cell if cell.startswith("# attnlib/") else new_markdown_cell)(cell)
        for cell in cells
    ]
    for index, cell in enumerate(made):
        cell.id = f"c{index}"
    chapters.Chapter(path, new_notebook(cells=made)).write()


def run(tool, root, *options):
    """A tool's exit status, run in this process."""
    old, sys.argv = sys.argv, ["tool", "--root", str(root), *options]
    try:
        return tool.main()
    finally:
        sys.argv = old


def refused(tool, root, *options):
    """The message of a tool that refuses the book."""
    with pytest.raises(chapters.BookError) as error:
        run(tool, root, *options)
    return str(error.value)


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (old, text)
    path.write_text(text.replace(old, new), encoding="utf-8", newline="\n")


def sources(root, name="01_first"):
    notebook = nbformat.read(root / f"book/{name}.ipynb", as_version=4)
    return {cell.id: cell.source for cell in notebook.cells}
