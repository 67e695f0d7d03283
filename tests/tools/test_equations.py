"""The page of equations, on a tiny book."""

import os
import subprocess
import sys

from tiny_book import BASE, OTHER, ROOTS, TOOLS, code, write


def call_equations(root, *options):
    command = [sys.executable, TOOLS, "equations", "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=os.environ)


def test_a_page_that_is_out_of_date_is_told_and_written(root):
    """What stands on it, the page of the book tells: test_chapters.py."""
    text = "# First\n\n$$\nb |x|.\n$$ (eq-b)\n\n<!-- eq-b | a paper | attnlib.base.half -->"
    write(root / "book/01_first.ipynb", text, BASE, ROOTS, OTHER)
    (root / "tests").mkdir()
    check = 'x = """\n# checks eq-z\n"""\n# checks eq-b\nassert 1\n'
    (root / "tests/test_it.py").write_text(check)
    assert "out of date" in call_equations(root, "--check").stderr
    assert call_equations(root).returncode == 0
    page = (root / "book/equations.md").read_text(encoding="utf-8")
    said = "Source: a paper. Code: `attnlib.base.half`. Checked in: `tests/test_it.py`."
    assert page.endswith(f"{{eq}}`eq-b` {said}\n\n$$\nb |x|\n$$\n")
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
