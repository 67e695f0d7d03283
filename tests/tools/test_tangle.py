"""Chapters to modules and back, on a tiny book; all modules: test_chapters.py."""

import re
import subprocess
import sys

import pytest
from nbformat.v4 import new_output

from bookkit import chapters, tangle
from bookkit.modules import read_modules
from bookkit.normalize import normalize
from editions.blanks import Blank, without_answer
from editions.reflow import pieces_of
from tiny_book import BASE, LATER, ROOTS, TOOLS, edit, refused, run, sources, write


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
    assert "make chapters" in out and "python tools tangle --update" in out
    assert "x / 3" in (root / "attnlib/base.py").read_text(), "--check wrote a file"


def test_check_names_a_missing_and_a_foreign_module(root, capsys):
    (root / "attnlib/later.py").rename(root / "attnlib/foreign.py")
    assert run(tangle, root, "--check") == 1
    out = capsys.readouterr().out
    assert "attnlib/later.py is missing, book/02_second.ipynb makes it" in out
    assert "attnlib/foreign.py: no chapter makes it" in out
    assert "__init__" not in out


def test_update_brings_an_edit_back_to_its_cell_alone(root, capsys):
    """What else it holds stays, and so does what ruff would have otherwise elsewhere."""
    chapter, other = root / "book/01_first.ipynb", root / "book/02_second.ipynb"
    edit(chapter, "x / 2", "x/2")
    first = chapters.read_chapters(root)[0]
    cell = first.cells[3]
    cell.execution_count, cell.metadata = 7, {"tags": ["kept"]}
    cell.outputs = [new_output("stream", text="kept\n")]
    first.write()
    before, untouched = chapter.read_text(encoding="utf-8"), other.read_bytes()
    edit(root / "attnlib/base.py", "math.sqrt(half(x))", "half(x) ** 0.5 + math.pi")
    assert run(tangle, root, "--update") == 0
    after = before.replace("math.sqrt(half(x))", "half(x) ** 0.5 + math.pi")
    assert chapter.read_text(encoding="utf-8") == after
    assert other.read_bytes() == untouched
    assert "cell c3: updated; execute the chapter again" in capsys.readouterr().out
    assert run(tangle, root, "--check") == 0


def test_update_and_tangle_are_inverse(root):
    """Many edits at once; the module is then as it was edited, and its chapter makes it."""
    module = root / "attnlib/deep/other.py"
    edited = '''\
# Made from book/01_first.ipynb by tools/bookkit; see CONTRIBUTING.md.
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


MORE = "# attnlib/base.py\n"  # the caption of a further cell
A, B = '# attnlib/a.py\n"""A."""\n', '# attnlib/b.py\n"""B."""\n'
BAD = LATER.partition("from")[0] + "from {} import half"
REFUSED = [
    ([BASE, MORE + "import os"], "cell c2: move `import os` to the module's first"),
    ([BASE + "\n\n\nimport os"], "cell c1: move `import os`"),
    ([MORE + "import os"], 'cell c1: a module starts with """a docstring"""'),
    ([MORE + "'''Quotes.'''"], "cell c1: a module starts with"),
    ([BASE, MORE + "half = 3"], "cell c2: half is already defined in .*cell c1"),
    ([BASE, B + "half = 3"], "c2: half is already defined in .*c1"),
    ([BASE, MORE + "x = np.pi"], "cell c2: np is neither defined .*cell c1"),
    ([BASE, MORE + "def f(:"], "cell c2: not Python"),
    ([BASE, MORE + "x = 1; y = 2"], "cell c2: two statements on one line"),
    ([BASE, MORE + "x = 1\n# Tail."], "cell c2: move this comment .*# Tail."),
    ([BASE, "# attnlib/Base.py\nx = 1"], "c2: the caption '# attnlib/Base.py' should"),
    ([BASE, "# attnlib/base\nx = 1"], "cell c2: the caption"),
    ([A + "a = lambda: b", B + "b = lambda: a"], "import each other: attnlib/.*→"),
    ([LATER], "cell c1: `from attnlib.base import half`: write"),
    ([BAD.format("attnlib")], "write `from attnlib.<module>"),
    ([BAD.format(".base")], "write `from attnlib.<module>"),
    ([BASE, LATER], "cell c2: .*names of the same chapter are imported automatically"),
]


@pytest.mark.parametrize(("cells", "message"), REFUSED)
def test_tangle_refuses(tmp_path, cells, message):
    write(tmp_path / "book/01_first.ipynb", "# First", *cells)
    with pytest.raises(chapters.BookError, match=message):
        run(tangle, tmp_path)
    assert not (tmp_path / "attnlib").exists()


BESIDE = [
    ("02_b", ["# B", MORE + "import os"], "02_b.ipynb, cell c1: move `import os`"),
    ("02_b", ["# B", MORE + "half = 2"], "half is already defined in book/01_a.ipynb, ce"),
    ("02_b", ["# B", LATER.replace("half", "third")], "base.py does not define third"),
    ("02_b", ["## B", A], "02_b.ipynb: no title"),
    ("00_b", ["# B", LATER], "attnlib/base.py comes later, in chapter 1"),
    ("01_b", ["# B"], "01_a.ipynb and book/01_b.ipynb have the same number"),
]


@pytest.mark.parametrize(("name", "cells", "message"), BESIDE)
def test_tangle_refuses_beside_another_chapter(tmp_path, name, cells, message):
    write(tmp_path / "book/01_a.ipynb", "# A", BASE)
    write(tmp_path / f"book/{name}.ipynb", *cells)
    assert message in refused(tangle, tmp_path)


def test_tangle_refuses_what_is_no_notebook(root):
    (root / "book/02_second.ipynb").write_text("{")
    assert "book/02_second.ipynb: not a notebook" in refused(tangle, root)


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


PAIR = '''# attnlib/pair.py
"""Two numbers."""

import math


class Pair(dict):
    """A docstring."""

    size = 2

    def first(self):
        return self["a"]'''
MORE_OF_PAIR = '''# attnlib/pair.py: adds its length
class Pair(Pair):
    # Of both numbers.
    def length(self):
        """Their root of squares."""
        return math.hypot(self.first(), self["b"])

    @classmethod
    def of(cls, a, b):
        return cls(a=a, b=b)'''
LAST_OF_PAIR = """# attnlib/pair.py
class Pair(Pair):
    def __repr__(self):
        return f"{self.first()} and {self['b']}\""""
WHOLE_PAIR = '''

class Pair(dict):
    """A docstring."""

    size = 2

    def first(self):
        return self["a"]

    # Of both numbers.
    def length(self):
        """Their root of squares."""
        return math.hypot(self.first(), self["b"])

    @classmethod
    def of(cls, a, b):
        return cls(a=a, b=b)

    def __repr__(self):
        return f"{self.first()} and {self['b']}"


def pair(x):
    return Pair.of(x, x)
'''
MAKER = "# attnlib/pair.py\ndef pair(x):\n    return Pair.of(x, x)"


@pytest.fixture
def pairs(tmp_path):
    """A class that a later cell continues, and a later chapter."""
    write(tmp_path / "book/01_a.ipynb", "# A", PAIR, "Text.", MORE_OF_PAIR, MAKER)
    write(tmp_path / "book/02_b.ipynb", "# B", LAST_OF_PAIR)
    assert run(tangle, tmp_path) == 0
    return tmp_path


def test_a_class_goes_on_in_later_cells(pairs):
    """In the module it is one; in the notebook, a subclass of the same name."""
    made = (pairs / "attnlib/pair.py").read_text(encoding="utf-8")
    assert made.endswith(WHOLE_PAIR) and made.count("class ") == 1
    assert 'Derived in chapter 1, "A" (book/01_a.ipynb), and in chapter 2' in made
    there, here = {}, {}
    exec(made, there)
    for source in (PAIR, MORE_OF_PAIR, MAKER, LAST_OF_PAIR):
        exec(source, here)
    for names in (there, here):
        two = names["pair"](3)
        assert repr(two) == "3 and 3" and round(two.length(), 3) == 4.243
    cells = [c for one in chapters.read_chapters(pairs) for c in one.code_cells]
    own = ["Pair"], ["Pair.length", "Pair.of"], ["pair"], ["Pair.__repr__"]
    assert [cell.definitions for cell in cells] == [*own]


EDITS = [  # an edit of the module, and the cells that it changes
    ('["a"]', '["b"]', {"01_a c1"}),
    ("math.hypot(self.first(),", "math.hypot(1.0,", {"01_a c3"}),
    ("# Of both", "# Of these", {"01_a c3"}),
    (" and {", " or {", {"02_b c1"}),
    ("Pair.of(x, x)", "Pair.of(x, 2 * x)", {"01_a c4"}),
    ("    def first", "    def zero(self):\n        pass\n\n    def first", {"01_a c1"}),
    ("    @classm", "    def zero(self):\n        pass\n\n    @classm", {"01_a c3"}),
    ("    def __repr__", "    def __str__", {"02_b c1"}),
    ("def pair", "def two():\n    return 2\n\n\ndef pair", {"01_a c1"}),
    ("def pair", "def double", {"01_a c4"}),
]


@pytest.mark.parametrize(("old", "new", "changed"), EDITS)
def test_an_edit_of_a_continued_class_goes_to_its_cell(pairs, old, new, changed):
    before = {n: sources(pairs, n) for n in ("01_a", "02_b")}
    edit(pairs / "attnlib/pair.py", old, new)
    edited = (pairs / "attnlib/pair.py").read_text(encoding="utf-8")
    assert run(tangle, pairs, "--update") == 0
    after = {name: sources(pairs, name) for name in before}
    found = {f"{n} {c}" for n in before for c in before[n] if before[n][c] != after[n][c]}
    assert found == changed
    if "def two" not in new:  # which goes to a cell that others follow
        assert (pairs / "attnlib/pair.py").read_text(encoding="utf-8") == edited


def test_who_reads_cells_knows_a_continued_class(pairs):
    """Cells are named after its methods; the workbook's reader writes the class at once."""
    book = chapters.read_chapters(pairs)
    names = [cell.id for c in map(normalized, book) for cell in c.code_cells]
    assert names == ["pair", "pair-length", "pair-2", "pair-repr"]
    blank = Blank("pair.Pair", 5, "Write it.", ["One.", "Two."], given=["of"])
    found = pieces_of(book[0], read_modules(book), {"pair.Pair": blank})
    whole = next(p for made in found.values() for p in made if p.blank)
    assert whole.text == WHOLE_PAIR.strip("\n").partition("\n\n\n")[0]
    asked, _ = without_answer(whole.blank, whole.text)
    assert 'raise NotImplementedError("Pair.first' in asked and asked.count("Yours") == 2
    assert "return cls(a=a, b=b)" in asked and "def __repr__" in asked
    assert not any(pieces_of(book[1], read_modules(book), {"pair.Pair": blank}).values())


def normalized(chapter):
    normalize(chapter)
    return chapter


def test_a_continuation_that_lost_its_methods_is_to_be_deleted(pairs, capsys):
    text = (pairs / "attnlib/pair.py").read_text(encoding="utf-8")
    kept, _, rest = text.partition("    # Of both")
    kept += "    def __repr__" + rest.partition("    def __repr__")[2]
    kept = kept.replace("Pair.of(x, x)", "Pair(a=x, b=x)")
    (pairs / "attnlib/pair.py").write_text(kept, encoding="utf-8")
    assert run(tangle, pairs, "--update") == 0
    assert "cell c3: updated, empty now: delete it" in capsys.readouterr().out
    assert (pairs / "attnlib/pair.py").read_text(encoding="utf-8") == kept


GOES_ON = "# attnlib/pair.py\nclass Pair(Pair):\n    "
METHOD = "def f(self):\n        return 1"
MISUSED = [
    (GOES_ON + '"""Again."""\n\n    ' + METHOD, "docstring already"),
    (GOES_ON + "unit = 1", "it holds methods only, not `unit = 1`"),
    (GOES_ON + "pass", "it holds methods only, not `pass`"),
    (GOES_ON.replace("(Pair)", "(Pair, dict)") + METHOD, "without other bases"),
    (GOES_ON.replace("(Pair)", "(dict, Pair)") + METHOD, "without other bases"),
    (GOES_ON.replace("(Pair)", "(Pair, metaclass=type)") + METHOD, "without other bases"),
    (GOES_ON.replace("class", "@final\nclass") + METHOD, "decorators"),
    (GOES_ON.replace("class", "# Why.\nclass") + METHOD, "comments above it"),
    (GOES_ON + METHOD + "\n\n\nx = 1", "give it a cell of its own"),
    (GOES_ON + METHOD.replace("f(", "first("), "the class already has first"),
    (GOES_ON + METHOD.replace("f(", "size("), "the class already has size"),
    (GOES_ON + METHOD.replace("f(", "of("), "the class already has of"),
    (GOES_ON + METHOD.replace("1", "super().first()"), "super().first is Pair's own in"),
    (GOES_ON + METHOD.replace("self", "self, n=size"), "it uses size"),
    (GOES_ON.replace("Pair", "Other") + METHOD, "no earlier cell .* defines a class Other"),
    (GOES_ON.replace("Pair", "math") + METHOD, "no earlier cell .* defines a class math"),
    (GOES_ON.replace("(Pair)", "(dict)") + METHOD, "is already defined .*`class Pair.Pair"),
]


@pytest.mark.parametrize(("cell", "message"), MISUSED)
def test_tangle_refuses_a_wrong_continuation(tmp_path, cell, message):
    write(tmp_path / "book/01_a.ipynb", "# A", PAIR, MORE_OF_PAIR, cell)
    message = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(chapters.BookError, match=f"01_a.ipynb, cell c3: .*{message}"):
        run(tangle, tmp_path)
    assert not (tmp_path / "attnlib").exists()


def test_a_continuation_comes_after_its_class_and_in_its_module(tmp_path):
    other = GOES_ON.replace("pair.py", 'other.py\n"""Other."""\n\n') + METHOD
    for cells in ([PAIR.partition("class")[0], GOES_ON + METHOD, PAIR], [PAIR, other]):
        cells = [cells[0], cells[1], *(MORE + c[19:] for c in cells[2:])]
        write(tmp_path / "book/01_a.ipynb", "# A", *cells)
        assert "c2: class Pair is continued: no earlier cell" in refused(tangle, tmp_path)


def test_a_local_name_or_an_own_import_needs_no_import(tmp_path):
    """`half` is a parameter in one function, and another package's in the other module."""
    local = '# attnlib/a.py\n"""A."""\n\n\ndef f(half):\n    return [half for _ in "ab"]'
    own = '# attnlib/b.py\n"""B."""\n\nfrom math import sqrt as half\n\ng = half'
    write(tmp_path / "book/01_first.ipynb", "# First", local, own, BASE)
    assert run(tangle, tmp_path) == 0
    for name in "ab":
        assert "attnlib.base" not in (tmp_path / f"attnlib/{name}.py").read_text("utf-8")


def test_exit_status_on_the_command_line(root):
    command = [sys.executable, TOOLS, "tangle", "--root", root, "--check"]
    assert subprocess.run(command).returncode == 0
    edit(root / "book/01_first.ipynb", "x / 2", "x / two")
    failed = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert failed.returncode == 1
    assert "cell c1: two is neither" in failed.stderr and "Traceback" not in failed.stderr


SHARED = {"CHAPTER", "LABEL", "Cell", "Equation"}
SHARED |= {"continuing", "marks_of", "only_python", "with_numbers"}


def test_a_cell_is_taken_apart_in_one_place():
    """The patterns of grammar.py are its own; what travels with the workbook needs some."""
    for path in {*TOOLS.rglob("*.py")} - {*(TOOLS / "workkit").iterdir()}:
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"bookkit\.grammar import ([\w, ]+|\([^)]+\))", text)
        names = {name for line in lines for name in re.findall(r"\w+", line)}
        assert names <= SHARED and "import grammar" not in text, (path, names - SHARED)
