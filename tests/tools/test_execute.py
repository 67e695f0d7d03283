"""Chapters run in place and normalized, on a tiny book."""

import difflib
import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_output

from bookkit import chapters, execute, normalize
from tiny_book import BASE, ROOT, ROOTS, TOOLS, code, refused, run, sources, write


def test_chapters_run_in_place_twice_without_a_diff(root, capsys):
    """The one slow test: a chapter that runs, and one that breaks, each two times."""
    path, broken = root / "book/01_first.ipynb", root / "book/02_second.ipynb"
    checks = (
        "import os, pathlib, sys\n"
        "from attnlib.base import half as packaged\n"
        "print(pathlib.Path.cwd().name, os.environ['PYTHONHASHSEED'])\n"
        "print('a', flush=True); print('b', flush=True)\n"
        "packaged(3)  "
    )
    write(path, "# First", BASE, ROOTS, code(checks, tags=[], extra=1))
    write(
        broken,
        "# Second",
        code("fine = 1"),
        code("a = 1\nb = 2\nc = 3\nassert a == b, 'no'"),
    )
    before = broken.read_bytes()
    assert run(execute, root) == 1
    out = capsys.readouterr().out
    assert "01_first … 4 cells, " in out
    assert (
        "02_second … not written\nbook/02_second.ipynb, cell c2 failed:\n    a = 1\n" in out
    )
    assert "assert a == b" in out and out.endswith("AssertionError: no\n")
    assert "\x1b" not in out
    assert broken.read_bytes() == before

    cell = nbformat.read(path, as_version=4).cells[-1]
    assert [o.get("text") or o.data["text/plain"] for o in cell.outputs] == [
        "book 0\na\nb\n",
        "1.5",
    ]
    assert cell.execution_count == 3 and cell.metadata == {}
    first = path.read_bytes()
    assert run(execute, root, "01") == 0
    assert path.read_bytes() == first


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has ports alone")
def test_a_kernel_has_sockets_of_its_own(root):
    """When a chapter is run and when it is tested: a port may be another's by then."""
    asked = "from ipykernel.kernelapp import IPKernelApp as App\n"
    asked += 'assert App.instance().transport == "ipc"'
    write(root / "book/01_first.ipynb", "# First", code(asked))
    assert run(execute, root, "01") == 0
    shutil.copy(ROOT / "book" / "conftest.py", root / "book")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q"]
    done = subprocess.run(
        [*command, "-c", ROOT / "pyproject.toml", root / "book" / "01_first.ipynb"],
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_an_unknown_chapter_is_refused(root):
    assert "no chapter 07; there are: 01_first, 02_second" in refused(
        execute, root, "07", "01"
    )


def commit(root):
    for command in (["init"], ["add", "."], ["commit", "-m", "Two chapters"]):
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *command], cwd=root, check=True, capture_output=True)


def test_what_has_changed_is_found(root):
    """By Git, with outputs and all; where there is no Git, it is said and not guessed."""
    write(root / "book/01_first.ipynb", "# First")
    write(root / "book/02_second.ipynb", "# Second")
    outside = execute.select(chapters.read_chapters(root), [], root)
    assert len(outside) == 2
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    done = subprocess.run(
        [sys.executable, TOOLS, "execute", "--root", root, "changed"],
        env=env,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 1 and "no way to tell what has changed" in done.stderr
    commit(root)
    assert execute.changed(root) == set()
    write(root / "book/02_second.ipynb", "# Second, changed")
    (found,) = execute.select(chapters.read_chapters(root), ["changed"], root)
    assert found.name == "02_second"


def test_a_cell_that_is_put_in_changes_no_other(root):
    """Neither their execution counts nor their ids, though Jupyter has counted anew."""
    path = root / "book/01_first.ipynb"
    commit(root)
    write(path, "# First", code("1 + 1"), code("2"), code("print(3)"), "## More", code("4"))
    run(execute, root, "01")
    commit(root)
    before = path.read_text(encoding="utf-8").splitlines()
    chapter = chapters.read_chapters(root)[0]
    for cell in chapter.code_cells:
        cell.execution_count = 57
    added = [code("5 + 5"), code("print(6)")]
    chapter.notebook.cells[3:3] = added
    chapter.write()
    run(execute, root, "01")
    lines = path.read_text(encoding="utf-8").splitlines()
    steps = [line for line in difflib.ndiff(before, lines) if line[0] in "+-?"]
    assert {line[0] for line in steps} == {"+"}
    cells = chapters.read_chapters(root)[0].code_cells
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 3, 3, 4]
    assert [cell.id[-2:] for cell in cells] == ["-2", "-3", "-5", "-6", "-4", "-2"]


def test_normalizing_keeps_what_the_reader_needs(root):
    hidden = code("x", tags=["hide-input"], collapsed=True, execution={"iopub": "a time"})
    image = {
        "metadata": {"image/png": {"width": 3, "dpi": 9}, "text/plain": {}, "other": 1}
    }
    hidden.outputs = [
        new_output("stream", name="stdout", text="a\n"),
        new_output("stream", name="stdout", text="b\n"),
        new_output("stream", name="stderr", text="c\n"),
        new_output("display_data", {"image/png": "aGk="}, **image),
    ]
    figure = {"figure": {"name": "fig-a"}}
    write(root / "book/01_first.ipynb", "# First\n\n", hidden, code("y \n", mystnb=figure))
    assert run(execute, root, "--normalize", "01") == 0
    chapter = chapters.read_chapters(root)[0]
    assert chapter.notebook.metadata == normalize.METADATA
    heading, hidden, shown = chapter.cells
    assert (heading.source, shown.source) == ("# First", "y")
    assert hidden.metadata == {"tags": ["hide-input"], "jupyter": {"source_hidden": True}}
    assert shown.metadata == {"mystnb": figure}
    assert [output.get("text") for output in hidden.outputs] == ["a\nb\n", "c\n", None]
    assert hidden.outputs[2].metadata == {"image/png": {"width": 3}}
    before = chapter.text
    normalize.normalize(chapter)
    assert chapter.text == before


def test_ids_are_readable_and_unique(tmp_path):
    """A definition has its name before a heading does: links of the API lead to it."""
    module = '# attnlib/deep/base.py\n"""A."""\n\nimport math'
    masked = "# attnlib/deep/base.py\nclass MaskedSoftmax:\n    x = 1"
    cells = {
        "cell-2": code("1"),
        "why-1-d-k": "# Why 1/√d_k?",
        "why-1-d-k-2": "text",
        "why-1-d-k-3": code("1"),
        "deep-base-imports": module,
        "masked-softmax-2": "## Masked softmax",
        "masked-softmax": masked,
        "masked-softmax-3": code("1"),
        "more": "(tgt)=\n## More",
        "more-2": "```\n# no heading\n```",
        "more-3": "## More",
        "more-4": code("1"),
        "long-" * 11 + "lon": "## " + "long " * 30,
        "long-" * 11 + "lon-2": code("1"),
    }
    write(tmp_path / "book/01_a.ipynb", *cells.values())
    assert run(execute, tmp_path, "--normalize") == 0
    assert list(sources(tmp_path, "01_a")) == list(cells)
