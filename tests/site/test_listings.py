"""Imports and docstrings of a listing fold, by mouse, by keyboard, without scripts."""

import pytest

from frame import BY_NAME, FRAME, source_of
from site_browser import serve

CHAPTER, CLASS = "04_projection", "projection"
LISTING = f"[id='cell-04-{CLASS}'] .cell_input"
SOURCE = next(c.source for c in BY_NAME[CHAPTER].code_cells if c.id == CLASS)
CODE = SOURCE.partition("\n")[2].lstrip("\n")


@pytest.fixture(scope="module")
def address(site):
    with serve(site) as served:
        yield served


@pytest.fixture
def visit(address, browser):
    contexts = []

    def show(**options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.goto(f"{address}/{CHAPTER}.html")
        return page

    yield show
    for context in contexts:
        context.close()


def is_closed(page):
    """Whether the class's docstring shows its start, one line, and how it ends."""
    listing = page.locator(LISTING)
    line = listing.locator("summary").nth(1)
    shown = listing.locator("pre").inner_text()
    assert "acts on each token by itself" in shown and "def forward" in shown
    return "Args:" not in shown and line.inner_text().rstrip().endswith('source """')


# A word that is nowhere on the page but in the folds of its open listings.
ONLY_THERE = """() => {
  const words = (text) => new Set(text.match(/[a-z]{6,}/gi));
  const article = document.querySelector("article").cloneNode(true);
  const docs = [...article.querySelectorAll("details.docs")];
  const folded = words(docs.map((fold) => fold.textContent).join(" "));
  docs.forEach((fold) => fold.remove());
  const other = article.textContent.toLowerCase();
  return [...folded].find((word) => !other.includes(word.toLowerCase()));
}"""
each_way = pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "none"])
SIZES = [(theme, width) for theme in ("light", "dark") for width in (390, 1440)]


@pytest.mark.costly("docstrings/{scripts}", *FRAME, lambda **_: source_of(CHAPTER))
@each_way
def test_a_docstring_folds_by_mouse_and_by_keyboard(visit, scripts):
    page = visit(java_script_enabled=scripts)
    line = page.locator(f"{LISTING} summary").nth(1)
    for turn in (line.click, lambda: line.press("Enter"), lambda: line.press("Space")):
        closed = is_closed(page)
        turn()
        assert is_closed(page) is not closed
        shown = page.locator(f"{LISTING} pre").inner_text()
        assert closed is ("in_features: features of an input token." in shown)
        assert (
            '""" ' not in line.inner_text() and ('"""' in line.inner_text()) is not closed
        )
        page.mouse.move(0, 0)


@pytest.mark.costly("docstrings/looks", *FRAME, lambda **_: source_of(CHAPTER))
def test_a_fold_is_a_line_of_the_code(visit):
    """As high as its neighbors, no wider than the listing, marked by the focus."""
    for theme, width in SIZES:
        page = visit(viewport={"width": width, "height": 900}, color_scheme=theme)
        listing, line = page.locator(LISTING), page.locator(f"{LISTING} summary").nth(1)
        height = "pre => parseFloat(getComputedStyle(pre).lineHeight)"
        high = listing.locator("pre").evaluate(height)
        box, around = line.bounding_box(), listing.bounding_box()
        assert box["height"] < 1.6 * high
        assert box["x"] >= around["x"]
        what = line.locator(".what").bounding_box()
        assert what["x"] + what["width"] <= around["x"] + around["width"]
        line.focus()
        outline = "e => getComputedStyle(e).outlineStyle"
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")
        assert line.evaluate(outline) != "none"
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide == width


@pytest.mark.costly("docstrings/copied", *FRAME, lambda **_: source_of(CHAPTER))
def test_the_button_copies_the_whole_listing(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    for state in ("closed", "open"):
        page.locator(f"{LISTING} .highlight").hover()
        page.locator(f"{LISTING} .copybtn").click()
        page.locator(f"{LISTING} .copybtn.success").wait_for()
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied.rstrip("\n") == CODE, state
        page.locator(f"{LISTING} .copybtn:not(.success)").wait_for()
        for line in page.locator(f"{LISTING} summary").all():
            line.click()


@pytest.mark.costly("docstrings/found", *FRAME, lambda **_: source_of(CHAPTER))
def test_a_search_opens_the_docstring_and_paper_shows_its_line(visit):
    page = visit()
    page.goto(f"{page.url}?highlight={page.evaluate(ONLY_THERE)}")
    page.locator(f"{LISTING} details[open] .highlighted").first.wait_for()
    page = visit()
    page.emulate_media(media="print")
    assert is_closed(page) and page.locator(f"{LISTING} summary").nth(1).is_visible()
