"""Letters have one line of book/notation.md; terms come not before they are explained."""

from pathlib import Path

import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from bookkit.chapters import Chapter, read_chapters
from bookkit.notation import (
    formulas_of,
    read_glossary,
    read_notation,
    said_early,
    unexplained,
)

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = read_chapters(ROOT)
LINES = list(read_notation((ROOT / "book" / "notation.md").read_text(encoding="utf-8")))
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)


@each_chapter
def test_every_letter_has_one_meaning_in_a_chapter(chapter):
    assert unexplained(formulas_of(chapter), chapter.number, LINES) == {}


PAGE = r"""
| $X$, $x_i$ | tokens | | |
| $d_k$ | features | | |
| $x_t$ | in chapters 2 and 3: another | | |
"""


@pytest.mark.parametrize(
    ("formula", "number", "wrong"),
    [
        (r"X \, x_{ij} + \frac{1}{d_k} \text{word}", 1, {}),
        (r"\hat x_i", 1, {("\\hatx", "i"): 0}),
        (r"W X", 1, {("W", ""): 0}),
        (r"x_i", 2, {}),
    ],
)
def test_the_check_finds_a_letter_that_is_not_there(formula, number, wrong):
    lines = list(read_notation(PAGE))
    found = unexplained([formula], number, lines)
    assert {symbol: len(lines) for symbol, lines in found.items()} == wrong


def test_the_check_finds_a_letter_with_two_meanings():
    twice = list(read_notation(PAGE + "| $x_j$ | places | | |\n"))
    assert len(unexplained(["x_m"], 1, twice)["x", "m"]) == 2


def test_no_term_is_used_before_it_is_explained():
    text = (ROOT / "book" / "glossary.md").read_text(encoding="utf-8")
    found = list(said_early(CHAPTERS, read_glossary(text)))
    assert [(c.name, term, sentence) for c, term, sentence in found] == []


@pytest.mark.parametrize(
    ("texts", "wrong"),
    [
        (["Many tiles.", "A tile."], ["Many tiles."]),
        (["None here. The *tile* is new. Tiles, then."], []),
        (["First a tile of chapter 3. A tile."], []),
        (["`tile` and $tile$", "A tile."], ["A tile."]),
        (["A *tile*.", "A tile."], []),
        (["", "", "A tile."], []),
    ],
)
def test_the_check_finds_a_word_that_comes_too_early(texts, wrong):
    pages = [new_notebook(cells=[new_markdown_cell(text)]) for text in texts]
    chapters = [Chapter(Path(f"0{n}_x.ipynb"), page) for n, page in enumerate(pages, 1)]
    glossary = read_glossary("tile\n  A part of a matrix. Chapters 3 and 4.\n")
    assert [sentence for *_, sentence in said_early(chapters, glossary)] == wrong
