"""What of an open listing is folded: imports, types, and the sections of docstrings."""

import re
from html import unescape

import pytest
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from bookkit.chapters import read_chapters
from bookkit.folds import folds_of, lines_in_view
from editions.one_page import section_of
from sphinx_ext.listing import folded
from tiny_book import ROOT

LISTING = '''"""A module."""


class Pair:
    """Two numbers.

    They may be equal.

    Args:
        a: the first.
        b: the second,
            as large as you like.

    Source: chapter 1.
    """

    def sum(self):
        """Their sum: a + b."""
        return self.a + self.b

    def half(self, text="""
        Args:
        """):
        """Half of it.

        Returns:
            A number below Args: or above."""
        return """
        Raises:
        """


def nothing():
    """Nothing.

    Written in words, it raises: never. Examples:
    """
'''


def test_the_sections_of_docstrings_are_folded():
    first, second, third = folds_of(LISTING)
    assert (first.start, first.end, first.indent) == (5, 15, 4)
    assert first.line == "6 lines: details, arguments, source"
    assert (second.start, second.end, second.indent) == (24, 27, 8)
    assert second.line == "2 lines: result"
    assert third.line == "1 line: details"
    assert lines_in_view(LISTING) == len(LISTING.split("\n")) - 9 - 2 - 2
    assert lines_in_view("x = 1\ny = 2") == 2


def test_imports_are_folded_and_those_of_the_package_named():
    imports = "import math\n\nimport torch\nfrom torch import (\n    Tensor,\n    nn,\n)"
    (fold,) = folds_of(f'"""A module."""\n\n{imports}\n\nx = 1\n')
    assert (fold.start, fold.end, fold.indent, fold.ends) == (2, 9, 0, "")
    assert fold.line == "6 lines: imports"
    (fold,) = folds_of(f"{imports}\nfrom attnlib.checks import a, b\nimport attnlib.c")
    assert fold.line == "8 lines: imports; of attnlib a, b"
    assert folds_of("import math\nx = 1\nimport os\nimport re") == []


TYPED = """class Pair:
    @kept
    def sum(
        self,
        first: Float[Tensor, "n"],
        second: str = "all",
        *others: int,
        scale: float | None = None,
        **more: Any,
    ) -> Float[Tensor, "n"]:
        # a comment
        return first
"""


def test_a_signature_of_several_lines_is_shown_without_its_types():
    (fold,) = folds_of(TYPED)
    assert (fold.start, fold.end, fold.line) == (2, 10, "types")
    short = '    def sum(self, first, second="all", *others, scale=None, **more):'
    assert fold.code == short
    assert lines_in_view(TYPED) == len(TYPED.split("\n")) - 7
    (summary,) = re.findall("(?s)<summary>(.*?)</summary>", folded(html_of(TYPED)))
    assert text_of(summary) == f"{short}  types"
    assert folds_of("def f(a: int, b: int) -> int:\n    return a\n") == []


def test_a_long_signature_is_broken_and_one_without_types_is_left():
    names = [f"argument_{letter}" for letter in "abcdefgh"]
    typed = "".join(f"    {name}: int,\n" for name in names)
    (fold,) = folds_of(f"def f(\n{typed}):\n    pass\n")
    first, second = ", ".join(names[:6]), ", ".join(names[6:])
    assert fold.code == f"def f(\n    {first},\n    {second}\n):"
    assert folds_of(f"def f(\n{typed.replace(': int', '')}):\n    pass\n") == []


def test_one_line_is_one_line():
    (fold,) = folds_of('def f():\n    """F.\n\n    Source: chapter 2.\n    """\n')
    assert fold.line == "1 line: source"


def html_of(source):
    return re.search(
        "<pre>(.*)</pre>", highlight(source, PythonLexer(), HtmlFormatter()), re.DOTALL
    )[1]


def text_of(html):
    return unescape(re.sub("<[^>]+>", "", html))


def test_a_fold_stands_within_the_code_and_says_what_is_in_it():
    html = folded(html_of(LISTING))
    inside = re.findall(
        '<details class="docs"><summary>(.*?)</summary>(.*?)</details>', html, 16
    )
    said = [text_of(line) for line, _ in inside]
    assert said == [
        '    6 lines: details, arguments, source """',
        '        2 lines: result """',
        '    1 line: details """',
    ]
    lines = LISTING.split("\n")
    folds = [lines[5:15], lines[24:27], lines[34:37]]
    assert [text_of(code) for _, code in inside] == ["\n".join(f) + "\n" for f in folds]
    for part in re.split("</?details[^>]*>", html):  # no element reaches across an edge
        assert part.count("<span") == part.count("</span>")


@pytest.mark.parametrize("chapter", read_chapters(ROOT), ids=lambda c: c.name)
def test_no_line_of_a_listing_is_lost(chapter):
    """What is left without the lines of the folds is the code."""
    for cell in chapter.code_cells:
        if cell.module:
            source = cell.source.partition("\n")[2].strip("\n") + "\n"
            html = re.sub("(?s)<summary>.*?</summary>", "", folded(html_of(source)))
            assert text_of(html) == source, chapter.where(cell)


def test_on_paper_an_open_listing_stands_whole(tmp_path):
    pre = f"<pre>{folded(html_of(LISTING))}</pre>"
    (tmp_path / "page.html").write_text(f"<article>{pre}</article>", encoding="utf-8")
    article, *_ = section_of("page", tmp_path, set())
    assert article.get_text() == LISTING
