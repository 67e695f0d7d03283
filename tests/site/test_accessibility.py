"""The site for everyone: axe finds nothing serious, and the keyboard is enough."""

import pytest
from axe_playwright_python.sync_playwright import Axe

from frame import BOOK, CHAPTERS, FRAME, PAGES, source_of
from site_browser import serve

LIVE = [
    name
    for name in CHAPTERS
    if 'class=\\"interactive\\"' in (BOOK / f"{name}.ipynb").read_text("utf-8")
]
# Formulas are read from their MathML; what is drawn, hidden from it, only takes time.
EMPTY = """() => document.querySelectorAll("mjx-container > svg").forEach(
  (drawing) => drawing.replaceChildren())"""
ONLY = {"resultTypes": ["violations"]}  # what passes is not described, in half the time
SETTLED = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))"


@pytest.fixture(scope="module")
def address(site):
    with serve(site) as served:
        yield served


@pytest.fixture
def visit(address, browser):
    """Open a page in a new context, with its formulas drawn."""
    contexts = []

    def show(name, width=1440):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}))
        page = contexts[-1].new_page()
        page.goto(f"{address}/{name}.html")
        page.evaluate("() => window.MathJax?.startup?.promise")
        return page

    yield show
    for context in contexts:
        context.close()


@pytest.mark.costly("axe/{page}", *FRAME, source_of)
@pytest.mark.parametrize("page", [*PAGES, "404", "search"])
def test_axe_finds_nothing_serious(visit, page):
    page, found = visit(page), []
    page.evaluate(EMPTY)
    ways = [("light", 1440), ("dark", 360), ("light", 360), ("dark", 1440)]
    for theme, width in ways:
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(SETTLED)
        for rule in Axe().run(page, options=ONLY).response["violations"]:
            if rule["impact"] in {"serious", "critical"}:
                places = [node["target"] for node in rule["nodes"]]
                found.append(f"{width} {theme} {rule['id']}: {places[:5]}")
    assert not found, "\n".join(found)


# ── with the keyboard alone ──────────────────────────────────────────────────────────

# Where the focus is, whether it can be seen there, and whether something marks it: an
# outline, or in a drawing the ring around a handle.
FOCUS = """() => {
  const at = document.activeElement, box = at.getBoundingClientRect();
  const style = getComputedStyle(at), ring = at.querySelector(".ring");
  return {
    name: `${at.tagName} ${at.ariaLabel ?? at.textContent.trim().slice(0, 40)}`,
    body: at === document.body,
    seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight
      && style.visibility === "visible",
    marked: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0
      || ring !== null && parseFloat(getComputedStyle(ring).strokeWidth) > 2,
  };
}"""


def focused(page, selector):
    return page.locator(selector).first.evaluate("e => e === document.activeElement")


def test_tab_goes_through_a_page_and_can_be_followed(visit):
    page, stops = visit("intro"), []
    for _ in range(200):
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUS)
        if stop["body"]:
            break
        stops.append(stop)
    assert stop["body"], "the focus does not come back"
    assert len(stops) > 20
    assert not [stop["name"] for stop in stops if not (stop["seen"] and stop["marked"])]


def test_tab_does_not_stop_at_a_formula_unless_it_scrolls(visit):
    page = visit(CHAPTERS[0], 180)  # on a phone, a formula is broken instead
    formulas = page.locator("mjx-container")
    reached = formulas.evaluate_all(
        "all => all.map(f => [f.tabIndex === 0, f.scrollWidth > f.clientWidth"
        " && getComputedStyle(f).overflowX === 'auto'])"
    )
    assert all(stops == scrolls for stops, scrolls in reached)
    assert 0 < sum(stops for stops, _ in reached) < len(reached) / 2


def test_skip_link_leads_to_the_text(visit):
    page = visit("intro")
    page.keyboard.press("Tab")
    assert focused(page, ".skip-link")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.id === 'main'")


def test_contents_on_a_phone(visit):
    page = visit("intro", 360)
    assert not page.locator(".contents").is_visible()
    for key in ("Tab", "Tab", "Enter"):
        page.keyboard.press(key)
    assert focused(page, ".contents a.current")
    assert page.locator(".menu-button").get_attribute("aria-expanded") == "true"
    page.keyboard.press("Escape")
    assert focused(page, ".menu-button")
    page.locator(".contents").wait_for(state="hidden")
    for key in ("Space", "Tab", "Enter"):  # the page after the first
        page.keyboard.press(key)
    page.wait_for_url(f"**/{PAGES[1]}.html")


def test_theme_and_search(visit):
    page = visit("intro")
    page.locator(".theme-button").focus()
    theme = "() => document.documentElement.dataset.theme"
    before = page.evaluate(theme)
    page.keyboard.press("Space")
    assert page.evaluate(theme) != before
    page.keyboard.press("Control+k")
    assert focused(page, "input[name=q]")
    page.keyboard.type("softmax")
    page.keyboard.press("Enter")
    page.locator("#search-results a").first.wait_for()
    for _ in range(40):
        page.keyboard.press("Tab")
        if focused(page, "#search-results a"):
            break
    assert focused(page, "#search-results a")  # which need not be the first of them
    target = page.evaluate("document.activeElement.getAttribute('href')")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/{target.split('#')[0].split('?')[0]}*")


# Of radio buttons with one name, Tab reaches the one that is chosen; arrows choose.
CONTROLS = "button, input:not([type=radio]:not(:checked)), summary, a[href], [tabindex='0']"
STATE = """figure => figure.innerHTML
  + [...figure.querySelectorAll("input")].map((input) => input.value + input.checked)"""
KEYS = {"button": ["Enter"], "checkbox": ["Space"]}  # any other answers to an arrow


@pytest.mark.costly("keys/{page}", *FRAME, source_of)
@pytest.mark.parametrize("page", LIVE)
def test_interactive_figures(visit, page):
    """Tab reaches every control in turn and leaves again; each one answers to a key."""
    page, silent = visit(page), set()
    figure = page.locator("figure.interactive")
    figure.evaluate("f => { f.parentElement.tabIndex = -1; f.parentElement.focus(); }")
    controls = figure.locator(CONTROLS).locator("visible=true")
    kinds = controls.evaluate_all("all => all.map(e => e.type ?? e.tagName)")
    assert kinds
    for index, kind in enumerate(kinds):
        page.keyboard.press("Tab")
        control = controls.nth(index)
        assert control.evaluate("e => e === document.activeElement"), index
        assert page.evaluate(FOCUS)["marked"], index
        if control.get_attribute("aria-pressed") == "true":
            continue  # it is on already
        before = figure.evaluate(STATE)
        for key in KEYS.get(kind, ("ArrowRight", "ArrowLeft")):  # one end has no way on
            page.keyboard.press(key)
            if figure.evaluate(STATE) != before:
                break
        else:
            silent.add(control.inner_text())
    assert silent <= {"start over", "back"}  # at the start there is no way back
    page.keyboard.press("Tab")
    assert not figure.evaluate("f => f.contains(document.activeElement)")
