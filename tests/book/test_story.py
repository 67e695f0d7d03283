"""A chapter carries its reader: what is open on the page, and what is one click away."""

import ast
from pathlib import Path

import pytest

from bookkit.chapters import read_chapters

ROOT = Path(__file__).resolve().parents[2]
SHARE, LONGEST = 0.15, 40  # of the open code; lines
CHAPTERS = [c for c in read_chapters(ROOT) if not c.is_appendix]
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)


def lines(cell):
    return sum(bool(line.strip()) for line in cell.source.splitlines())


@each_chapter
def test_the_package_keeps_out_of_the_way(chapter):
    shown = [cell for cell in chapter.code_cells if cell.is_open]
    listings = [cell for cell in shown if cell.module]
    for cell in listings:
        assert lines(cell) <= LONGEST, f"{chapter.where(cell)}: {lines(cell)} lines"
    share = sum(map(lines, listings)) / sum(map(lines, shown))
    assert share <= SHARE, f"{share:.0%} of the open code is the package's"


def names_of(cell):
    """What a cell defines, and what it uses, at its top level or inside."""
    nodes = list(ast.walk(ast.parse(cell.python)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    made |= {
        alias.asname or alias.name
        for n in nodes
        if hasattr(n, "names")
        for alias in (n.names if isinstance(n, ast.Import | ast.ImportFrom) else [])
    }
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return made | stored, {n.id for n in names if isinstance(n.ctx, ast.Load)}


@each_chapter
def test_nothing_open_needs_what_is_folded(chapter):
    """A reader of the open code alone finds every name that it uses."""
    seen, hidden = set(), {}
    for cell in chapter.code_cells:
        made, used = names_of(cell)
        if cell.is_open:
            missing = {name: hidden[name] for name in used & hidden.keys() - seen - made}
            assert not missing, f"{chapter.where(cell)} uses what is folded: {missing}"
            seen |= made
        elif not cell.module:  # a listing's caption names what it defines
            hidden.update(dict.fromkeys(made, cell.id))


@each_chapter
def test_a_picture_comes_before_the_first_equation(chapter):
    for cell in chapter.cells:
        if "figure" in cell.metadata.get("mystnb", {}) or "<img" in cell.source:
            return
        labels = [e.label for e in cell.equations if e.label]
        if labels:
            raise AssertionError(f"{labels[0]} comes before any picture")


@pytest.fixture(scope="module")
def page(browser):
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    yield page
    page.close()


ONLY_FOLDED = """() => {
  const words = (text) => new Set(text.match(/[a-z]{6,}/gi));
  const open = words(document.body.innerText);
  const folds = [...document.querySelectorAll(".cell details:not([open]) pre")];
  return [...words(folds.map((pre) => pre.textContent).join(" "))]
    .find((word) => !open.has(word));
}"""


def test_a_search_opens_the_fold_that_alone_has_the_word(site, page):
    address = (site / f"{CHAPTERS[0].name}.html").as_uri()
    page.goto(address)
    word = page.evaluate(ONLY_FOLDED)
    page.goto(f"{address}?highlight={word}")
    page.locator("details[open] .highlighted").first.wait_for()
