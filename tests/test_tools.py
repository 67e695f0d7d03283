"""The tools of tools/, tried on tiny books."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import chapters
import execute
import normalize
import tangle

TOOLS = Path(tangle.__file__).parent

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


@pytest.mark.parametrize("path", sorted(TOOLS.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 150


def test_each_program_has_its_line():
    lines = (TOOLS / "README.md").read_text(encoding="utf-8").splitlines()
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert sorted(named) == sorted(path.name for path in TOOLS.glob("*.py"))


# tangle


def test_a_module_reads_as_if_written_by_hand(root):
    assert (
        (root / "attnlib/base.py").read_text(encoding="utf-8")
        == '''\
# Made by tools/tangle.py from book/01_first.ipynb; see CONTRIBUTING.md.
"""What comes first.

Derived in chapter 1, "First" (book/01_first.ipynb).
"""

import math


def half(x):
    return x / 2


# A comment that belongs to root.
def root(x):
    return math.sqrt(half(x))
'''
    )
    assert (
        (root / "attnlib/deep/other.py").read_text(encoding="utf-8")
        == '''\
# Made by tools/tangle.py from book/01_first.ipynb; see CONTRIBUTING.md.
"""What builds on it.

In two paragraphs.

Derived in chapter 1, "First" (book/01_first.ipynb).
"""

from attnlib.base import root

LIMIT = 3
STEP = 1


class Other:
    def go(self, half_of):
        return root(half_of) + LIMIT
'''
    )


def test_only_changed_modules_are_written(root, capsys):
    capsys.readouterr()
    edit(root / "book/01_first.ipynb", "x / 2", "0.5 * x")
    assert run(tangle, root) == 0
    written = [line for line in capsys.readouterr().out.splitlines() if "written" in line]
    assert written == ["attnlib/base.py: written"]


def test_a_module_edited_by_hand_is_stale(root, capsys):
    edit(root / "attnlib/base.py", "x / 2", "x / 3")
    assert run(tangle, root, "--check") == 1
    out = capsys.readouterr().out
    assert "attnlib/base.py differs from book/01_first.ipynb: cell c1\n" in out
    assert "-    return x / 2\n+    return x / 3" in out
    assert "make chapters" in out and "tools/tangle.py --update" in out
    assert "x / 3" in (root / "attnlib/base.py").read_text(), "--check wrote a file"


def test_check_names_a_missing_and_a_foreign_module(root, capsys):
    (root / "attnlib/later.py").rename(root / "attnlib/foreign.py")
    assert run(tangle, root, "--check") == 1
    out = capsys.readouterr().out
    assert "attnlib/later.py is missing, book/02_second.ipynb makes it" in out
    assert "attnlib/foreign.py: no chapter makes it" in out
    assert "__init__" not in out


def test_update_brings_an_edit_back_to_its_cell_alone(root, capsys):
    chapter, other = root / "book/01_first.ipynb", root / "book/02_second.ipynb"
    edit(chapter, "x / 2", "x/2")  # not as ruff would have it, and not touched for that
    before, untouched = chapter.read_text(encoding="utf-8"), other.read_bytes()
    edit(root / "attnlib/base.py", "math.sqrt(half(x))", "half(x) ** 0.5 + math.pi")
    assert run(tangle, root, "--update") == 0
    after = before.replace("math.sqrt(half(x))", "half(x) ** 0.5 + math.pi")
    assert chapter.read_text(encoding="utf-8") == after
    assert other.read_bytes() == untouched
    assert "cell c3: updated; execute the chapter again" in capsys.readouterr().out
    assert run(tangle, root, "--check") == 0


def test_update_keeps_what_else_a_cell_holds(root):
    path = root / "book/01_first.ipynb"
    chapter = chapters.read_chapters(root)[0]
    cell = chapter.cells[1]
    cell.execution_count = 7
    cell.outputs = [new_output("stream", text="kept\n")]
    cell.metadata = {"tags": ["kept"]}
    chapter.write()
    edit(root / "attnlib/base.py", "x / 2", "x * 0.5")
    assert run(tangle, root, "--update") == 0
    cell.source = cell.source.replace("x / 2", "x * 0.5")
    assert path.read_text(encoding="utf-8") == chapter.text


def test_update_and_tangle_are_inverse(root):
    """Many edits at once; the module is then as it was edited, and its chapter makes it."""
    module = root / "attnlib/deep/other.py"
    edited = '''\
# Made by tools/tangle.py from book/01_first.ipynb; see CONTRIBUTING.md.
"""What builds on it, better.

Derived in chapter 1, "First" (book/01_first.ipynb).
"""

import os
from typing import Any

from attnlib.base import half, root

# Now with a reason.
LIMIT = 4


def added(x: Any) -> str:
    return os.fspath(half(x))


class Other:
    """A docstring."""

    def go(self, half_of):
        return root(half_of) + LIMIT
'''
    module.write_text(edited, encoding="utf-8")
    assert run(tangle, root, "--update") == 0
    assert module.read_text(encoding="utf-8") == edited
    cell = sources(root)["c4"]
    assert cell.startswith(
        '# attnlib/deep/other.py\n"""What builds on it, better."""\n\nimport os\n'
    )
    assert "attnlib.base" not in cell and "Derived" not in cell and "STEP" not in cell
    assert "# Now with a reason.\nLIMIT = 4" in cell
    module.unlink()
    assert run(tangle, root) == 0
    assert module.read_text(encoding="utf-8") == edited


def test_update_places_new_renamed_and_removed_definitions(root, capsys):
    text = (root / "attnlib/base.py").read_text(encoding="utf-8")
    text = text.replace("def half(x):", "def twice(x):\n    return 2 * x\n\n\ndef half(x):")
    text = text.replace("def root(x):", "def square_root(x):")
    text += "\n\ndef last(x):\n    return x\n"
    (root / "attnlib/base.py").write_text(text, encoding="utf-8")
    edit(root / "attnlib/deep/other.py", "root(half_of)", "square_root(half_of)")
    edit(root / "attnlib/deep/other.py", "import root", "import square_root")
    assert run(tangle, root, "--update") == 0
    cells = sources(root)
    assert "def twice" in cells["c1"] and "def half" in cells["c1"]
    assert "def square_root" in cells["c3"] and "def last" in cells["c3"]
    edit(root / "attnlib/deep/other.py", "square_root(half_of)", "half_of")
    kept = (
        (root / "attnlib/base.py").read_text(encoding="utf-8").partition("# A comment")[0]
    )
    (root / "attnlib/base.py").write_text(kept, encoding="utf-8")
    assert run(tangle, root, "--update") == 0
    assert sources(root)["c3"] == "# attnlib/base.py"
    assert "cell c3: updated, empty now: delete it" in capsys.readouterr().out


def test_an_update_that_cannot_be_tangled_writes_nothing(root):
    before = (root / "book/01_first.ipynb").read_bytes()
    edit(root / "attnlib/base.py", "x / 2", "x / unknown")
    edit(root / "attnlib/deep/other.py", "LIMIT = 3", "LIMIT = 5")
    assert "cell c1: unknown is neither defined" in refused(tangle, root, "--update")
    assert (root / "book/01_first.ipynb").read_bytes() == before


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            [BASE, "# attnlib/base.py\nimport os"],
            "cell c2: move `import os` to the module's first",
        ),
        ([BASE + "\n\n\nimport os"], "cell c1: move `import os`"),
        (
            ["# attnlib/base.py\nimport os"],
            'cell c1: a module starts with """a docstring"""',
        ),
        (["# attnlib/base.py\n'''Quotes.'''"], "cell c1: a module starts with"),
        (
            [BASE, "# attnlib/base.py\nhalf = 3"],
            "cell c2: half is already defined in .*cell c1",
        ),
        (
            [BASE, '# attnlib/b.py\n"""B."""\nhalf = 3'],
            "c2: half is already defined in .*c1",
        ),
        (
            [BASE, "# attnlib/base.py\nx = np.pi"],
            "cell c2: np is neither defined .*cell c1",
        ),
        ([BASE, "# attnlib/base.py\ndef f(:"], "cell c2: not Python"),
        ([BASE, "# attnlib/base.py\nx = 1; y = 2"], "cell c2: two statements on one line"),
        (
            [BASE, "# attnlib/base.py\nx = 1\n# Tail."],
            "cell c2: move this comment .*# Tail.",
        ),
        (
            [BASE, "# attnlib/Base.py\nx = 1"],
            r"cell c2: the caption '# attnlib/Base.py' should",
        ),
        ([BASE, "# attnlib/base\nx = 1"], "cell c2: the caption"),
        (
            [
                '# attnlib/a.py\n"""A."""\ndef a():\n    return b()',
                '# attnlib/b.py\n"""B."""\ndef b():\n    return a()',
            ],
            "import each other: attnlib/.*→",
        ),
        ([LATER], "cell c1: `from attnlib.base import half`: write"),
        ([LATER.replace("attnlib.base", "attnlib")], "write `from attnlib.<module>"),
        ([LATER.replace("attnlib.base", ".base")], "write `from attnlib.<module>"),
        ([BASE, LATER], "cell c2: .*names of the same chapter are imported automatically"),
    ],
)
def test_tangle_refuses(tmp_path, cells, message):
    write(tmp_path / "book/01_first.ipynb", "# First", *cells)
    with pytest.raises(chapters.BookError, match=message):
        run(tangle, tmp_path)
    assert not (tmp_path / "attnlib").exists()


@pytest.mark.parametrize(
    ("name", "cells", "message"),
    [
        (
            "02_b",
            ["# B", BASE.partition("\n")[0] + "\nimport os"],
            "02_b.ipynb, cell c1: move `import os` to the module's first cell",
        ),
        (
            "02_b",
            ["# B", f"{BASE.partition(chr(10))[0]}\ndef half(x):\n    return x"],
            "02_b.ipynb, cell c1: half is already defined in book/01_a.ipynb, cell c1",
        ),
        ("00_b", ["# B", LATER], "attnlib/base.py comes later, in chapter 1"),
        (
            "02_b",
            ["# B", LATER.replace("half", "third")],
            "attnlib/base.py does not define third",
        ),
        ("01_b", ["# B"], "01_a.ipynb and book/01_b.ipynb have the same number"),
        ("02_b", ["## B", '# attnlib/b.py\n"""B."""'], "02_b.ipynb: no title"),
    ],
)
def test_tangle_refuses_a_second_chapter(tmp_path, name, cells, message):
    write(tmp_path / "book/01_a.ipynb", "# A", BASE)
    write(tmp_path / f"book/{name}.ipynb", *cells)
    assert message in refused(tangle, tmp_path)


def test_a_later_chapter_may_add_to_a_module(tmp_path, capsys):
    """What it adds stands behind what was there, and edits go back to its own cell."""
    first, second = tmp_path / "book/01_a.ipynb", tmp_path / "book/02_b.ipynb"
    write(first, "# A", BASE)
    write(second, "# B", "from attnlib.base import half", ROOTS)
    assert run(tangle, tmp_path) == 0
    made = (tmp_path / "attnlib/base.py").read_text(encoding="utf-8")
    places = 'Derived in chapter 1, "A" (book/01_a.ipynb), and in chapter 2, "B"'
    assert places in made and made.index("def half") < made.index("def root")
    before = first.read_bytes()
    edit(tmp_path / "attnlib/base.py", "math.sqrt(half(x))", "math.sqrt(x)")
    assert run(tangle, tmp_path, "--update") == 0
    assert "02_b.ipynb, cell c2: updated" in capsys.readouterr().out
    assert "math.sqrt(x)" in second.read_text(encoding="utf-8")
    assert first.read_bytes() == before


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    write(tmp_path / "book/01_a.ipynb", "# A")
    (tmp_path / "book/02_b.ipynb").write_text("{")
    assert "book/02_b.ipynb: not a notebook" in refused(tangle, tmp_path)


def test_a_local_name_or_an_own_import_needs_no_import(tmp_path):
    """`half` is a parameter in one function, and another package's in the other module."""
    local = '# attnlib/a.py\n"""A."""\n\n\ndef f(half):\n    return [half for _ in "ab"]'
    own = '# attnlib/b.py\n"""B."""\n\nfrom math import sqrt as half\n\ng = half'
    write(tmp_path / "book/01_first.ipynb", "# First", local, own, BASE)
    assert run(tangle, tmp_path) == 0
    for name in "ab":
        assert "attnlib.base" not in (tmp_path / f"attnlib/{name}.py").read_text("utf-8")


def test_help_and_exit_status_on_the_command_line(root):
    def call(*options):
        command = [
            sys.executable,
            str(TOOLS / "tangle.py"),
            "--root",
            str(root),
            *options,
        ]
        return subprocess.run(command, capture_output=True, encoding="utf-8")

    assert "--update" in call("--help").stdout
    assert call("--check").returncode == 0
    edit(root / "book/01_first.ipynb", "x / 2", "x / two")
    failed = call("--check")
    assert failed.returncode == 1
    assert "cell c1: two is neither" in failed.stderr and "Traceback" not in failed.stderr


# execute and normalize


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


def test_notebooks_are_stored_in_one_format(root):
    write(root / "book/01_first.ipynb", "# √")
    stored = (root / "book/01_first.ipynb").read_bytes().decode("utf-8")
    assert stored.startswith(
        '{\n "cells": [\n  {\n   "cell_type": "markdown",\n   "id": "c0"'
    )
    assert stored.endswith('"nbformat": 4,\n "nbformat_minor": 5\n}\n')
    assert "# √" in stored and "\r" not in stored


def test_an_unknown_chapter_is_refused(root):
    assert "no chapter 07; there are: 01_first, 02_second" in refused(
        execute, root, "07", "01"
    )


def test_what_has_changed_is_found(root):
    """By Git, with outputs and all; where there is no Git, it is said and not guessed."""
    write(root / "book/01_first.ipynb", "# First")
    write(root / "book/02_second.ipynb", "# Second")
    outside = execute.select(chapters.read_chapters(root), [], root)
    assert len(outside) == 2
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    done = subprocess.run(
        [sys.executable, TOOLS / "execute.py", "--root", root, "changed"],
        env=env,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 1 and "no way to tell what has changed" in done.stderr
    for command in (["init"], ["add", "."], ["commit", "-m", "Two chapters"]):
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *command], cwd=root, check=True, capture_output=True)
    assert execute.changed(root) == set()
    write(root / "book/02_second.ipynb", "# Second, changed")
    (found,) = execute.select(chapters.read_chapters(root), ["changed"], root)
    assert found.name == "02_second"


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
    imports = '# attnlib/deep/base.py\n"""A."""\n\nimport math'
    long = "## " + "long " * 30
    write(
        tmp_path / "book/01_a.ipynb",
        *[code("1"), "# Why 1/√d_k?", "text", code("1"), imports],
        *[
            "# attnlib/deep/base.py\nclass MaskedSoftmax:\n    x = 1",
            code("1"),
            "(tgt)=\n## More",
        ],
        *["```\n# no heading\n```", "## More", code("1"), long, code("1")],
    )
    assert run(execute, tmp_path, "--normalize") == 0
    ids = list(sources(tmp_path, "01_a"))
    assert ids[:-2] == [
        *["cell-2", "why-1-d-k", "why-1-d-k-2", "why-1-d-k-3", "deep-base-imports"],
        *["masked-softmax", "why-1-d-k-4", "more", "more-2", "more-3", "more-4"],
    ]
    assert ids[-2].startswith("long-long") and ids[-1] == ids[-2] + "-2"
    assert all(len(name) <= 64 for name in ids)


def test_an_exported_definition_has_its_name_before_a_heading(tmp_path):
    """Its link in the API is then that of the name, whatever the text above is called."""
    masked = '# attnlib/base.py\n"""A."""\n\n\nclass MaskedSoftmax:\n    x = 1'
    write(tmp_path / "book/01_a.ipynb", "# A", "## Masked softmax", masked)
    assert run(execute, tmp_path, "--normalize") == 0
    assert list(sources(tmp_path, "01_a")) == ["a", "masked-softmax-2", "masked-softmax"]


# equations


def call_equations(root, *options):
    command = [
        sys.executable,
        str(TOOLS / "equations.py"),
        "--root",
        str(root),
        *options,
    ]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=os.environ)


def test_the_page_lists_every_equation(root):
    write(
        root / "book/01_first.ipynb",
        "# First\n\n$$ a $$\n\n$$\nb |x|\n$$ (eq-b)\n\n"
        "<!-- eq-b | a paper | attnlib.base.half -->",
        BASE,
        ROOTS,
        OTHER,
        code("# checks eq-b, eq-c: two of them\nassert True"),
        code("assert 1  # checks eq-b"),
    )
    write(
        root / "book/02_second.ipynb",
        "# Second",
        LATER,
        "$$ c . $$ (eq-c)\n<!-- eq-c | here | -->",
    )
    (root / "book/api_first.md").write_text(".. autofunction:: attnlib.base.half\n")
    (root / "tests").mkdir()
    (root / "tests/test_it.py").write_text(
        'x = """\n# checks eq-z\n"""\n# checks eq-c\nassert 1\n'
    )
    assert "out of date" in call_equations(root, "--check").stderr
    assert call_equations(root).returncode == 0
    page = (root / "book/equations.md").read_text(encoding="utf-8")
    assert (
        page.partition("## ")[2]
        == """\
[1. First](01_first.ipynb)

{eq}`eq-b` Source: a paper. Code: {py:obj}`~attnlib.base.half`. Checked in \
{ref}`chapter 1 <cell-01-c4>`, {ref}`chapter 1 (2) <cell-01-c5>`.

$$
b |x|
$$

## [2. Second](02_second.ipynb)

{eq}`eq-c` Source: here. Checked in {ref}`chapter 1 <cell-01-c4>`, `tests/test_it.py`.

$$
c
$$
"""
    )
    assert call_equations(root, "--check").returncode == 0


def test_every_mistake_with_an_equation_is_listed(root):
    write(
        root / "book/01_first.ipynb",
        "# First\n\n$$ a $$ (eq-twice)\n<!-- eq-twice | here | -->",
        "$$ a $$ (eq-twice)\n\nNo comment.",
        "$$ a $$ (eq-other)\n<!-- eq-wrong | here | -->\n\n"
        "$$ a $$ (eq-empty)\n<!-- eq-empty || -->",
        "$$ a $$ (eq-code)\n"
        "<!-- eq-code | here | attnlib.base.half, attnlib.base.nothing -->",
        "$$ a $$ (Energy)\n<!-- Energy | here | -->",
        BASE,
        code("# checks eq-twice, eq-other, eq-empty\nassert True"),
        code("# checks eq-code, eq-unheard\nprint('assert')"),
    )
    (root / "book/02_second.ipynb").unlink()
    failed = call_equations(root)
    assert failed.returncode == 1 and not (root / "book/equations.md").exists()
    assert failed.stderr.splitlines() == [
        "Energy: no check says `# checks Energy`",
        "book/01_first.ipynb, cell c1: eq-twice: after it, write "
        "<!-- eq-twice | source | symbol -->",
        "book/01_first.ipynb, cell c2: eq-empty: after it, write "
        "<!-- eq-empty | source | symbol -->",
        "book/01_first.ipynb, cell c2: eq-other: the comment after it is about eq-wrong",
        "book/01_first.ipynb, cell c3: eq-code: there is no attnlib.base.nothing",
        "book/01_first.ipynb, cell c4: Energy: "
        "a label is eq-name: lower case, digits and hyphens",
        "book/01_first.ipynb, cell c7: checks eq-code, eq-unheard, but has no assert",
        "eq-twice: the label of 2 equations",
        "eq-unheard: no equation has it, see {ref}`chapter 1 <cell-01-c7>`",
    ]
