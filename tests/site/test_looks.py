"""Every page of the site in a real browser: from a server, and as a file on disk."""

import numpy as np
import pytest
from PIL import Image

from bookkit.grammar import EQUATION
from frame import BY_NAME, CHAPTERS, FRAME, PAGES, code_cells, source_of
from site_browser import SCREENS, screens, serve
from sphinx_ext import narrow

MAX_PAGE_BYTES = 500_000  # without MathJax
PATIENCE = 15_000  # milliseconds, on a busy machine
SITTING = 15  # screens of 1440 × 1000, at most, before *What we built*; the goal is 12
IN_FORM = [page for page in CHAPTERS if "\n## Further" in BY_NAME[page].prose]
each_origin = pytest.mark.parametrize("origin", ["served", "file"])


# What one look at a page finds wrong, whatever the width and the theme.
LOOK = r"""async () => {
  const problems = [];
  const missing = () => [...document.images].filter((i) => !i.complete || !i.naturalWidth);
  for (let wait = 0; missing().length && wait < 2000; wait += 20)
    await new Promise((done) => setTimeout(done, 20));  // another width, another picture
  for (const image of missing()) problems.push("no picture: " + image.currentSrc);
  const cut = (text) => text.trim().replace(/\s+/g, " ").slice(0, 80);
  for (const math of document.querySelectorAll(".math"))
    if (!math.querySelector("mjx-container svg"))
      problems.push("not rendered: " + cut(math.textContent));
    else if (!math.querySelector("mjx-assistive-mml math")?.textContent.trim())
      problems.push("a formula that can't be read aloud: " + math.id);
  for (const error of document.querySelectorAll("[data-mml-node=merror], mjx-merror"))
    problems.push("math error: " + cut(error.closest(".math")?.textContent ?? ""));
  const prose = document.querySelector("article").cloneNode(true);
  for (const other of prose.querySelectorAll("pre, code, script, style, .math, .sig"))
    other.remove();
  const dollars = prose.textContent.match(/\$[^$\s][^$]*\$|\\\(|\\\[/);
  if (dollars) problems.push("math left as text: " + cut(dollars[0]));
  const late = () => document.documentElement.scrollWidth > innerWidth;
  for (let frame = 0; late() && frame < 5; frame++)  // laid out anew for another width
    await new Promise(requestAnimationFrame);
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) {
    const out = [...document.querySelectorAll("article *")].filter(
      (e) => e.getBoundingClientRect().right > innerWidth + 1);
    const names = out.slice(0, 3).map((e) => `${e.tagName}.${e.className}`);
    problems.push(`the page is ${wide} pixels wide: ${names}`);
  }
  const own = innerWidth > 1000 ? "" : innerWidth >= 390 ? "div.math > " : "none ";
  const cramped = [...document.querySelectorAll(own + "mjx-container")].filter(
    (e) => e.scrollWidth > e.clientWidth + 1);
  if (innerWidth <= 640) for (const plot of document.querySelectorAll("figure picture"))
    if (!plot.querySelector("img").currentSrc.endsWith("_narrow.png") ||
        plot.parentElement.scrollWidth > plot.parentElement.clientWidth)
      problems.push("a plot is not stacked: " + plot.closest("figure").id);
  for (const lines of document.querySelectorAll(".printed-lines pre"))
    if (innerWidth <= 640 && lines.scrollWidth > lines.clientWidth + 1)
      problems.push("lines do not wrap: " + cut(lines.textContent));
  const edges = new Set([...document.querySelectorAll("section > div.math > .eqno")].map(
    (e) => Math.round(e.getBoundingClientRect().right)));
  if (edges.size > 1) problems.push("numbers of equations end at " + [...edges]);
  for (const math of cramped)
    problems.push("a formula wider than its column: " + cut(math.textContent));
  const fields = [...document.querySelectorAll("input[name=q]")];
  if (fields.length !== 1) problems.push(fields.length + " search fields");
  if (document.querySelectorAll("h1").length !== 1) problems.push("not one h1");
  const bright = (color) => {
    const [r, g, b] = color.match(/[\d.]+/g).map(Number);
    return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
  };
  const style = getComputedStyle(document.body);
  const paper = bright(style.backgroundColor), ink = bright(style.color);
  const dark = document.documentElement.dataset.theme === "dark";
  if (dark ? paper > 0.15 || ink < 0.7 : paper < 0.9 || ink > 0.3)
    problems.push(`paper ${paper} and ink ${ink} with dark=${dark}`);
  for (const image of document.querySelectorAll("article img"))
    if ((getComputedStyle(image).filter === "none") === dark)
      problems.push("picture in the wrong theme: " + image.src);
  return problems;
}"""

# What arrived for this page, MathJax aside, in bytes.
LOADED = """() => [...performance.getEntriesByType("navigation"),
  ...performance.getEntriesByType("resource")]
  .map((entry) => decodeURI(new URL(entry.name).pathname.slice(1)))
  .filter((path) => !path.includes("/mathjax/"))"""


class Reader:
    """A browser page with what it has asked for and complained about."""

    def __init__(self, page, root):
        self.page, self.root, self.problems = page, root, []
        page.on("request", lambda request: self.note_request(request.url))
        page.on("requestfailed", self.note_failure)
        page.on("response", self.note_response)
        page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        page.on("console", self.note_console)

    def note_request(self, url):
        if not url.startswith((self.root, "data:")):
            self.problems.append(f"left the site: {url}")

    def note_failure(self, request):
        if request.failure != "net::ERR_ABORTED":  # the page was left while it loaded
            self.problems.append(f"failed: {request.url}")

    def note_response(self, response):
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")

    def note_console(self, message):
        if message.type in {"error", "warning"}:
            self.problems.append(f"console: {message.text}")

    def open(self, path, width=1440):
        self.problems.clear()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.goto(f"{self.root}/{path}")
        self.page.evaluate("() => window.MathJax?.startup?.promise")

    def theme(self):
        return self.page.evaluate("() => document.documentElement.dataset.theme")

    def wait_for_theme(self, theme):
        shown = "(theme) => document.documentElement.dataset.theme === theme"
        self.page.wait_for_function(shown, arg=theme, timeout=PATIENCE)

    def look(self, page, *ways):
        """Open a page in the first way; the others come while it is being read."""
        self.page.emulate_media(color_scheme=ways[0][0])
        self.open(f"{page}.html", ways[0][1])
        for theme, width in ways:
            self.page.emulate_media(color_scheme=theme)
            self.wait_for_theme(theme)
            self.page.set_viewport_size({"width": width, "height": 900})
            found = self.page.evaluate(LOOK)
            self.problems += [f"{width} {theme}: {problem}" for problem in found]
        assert not self.problems, "\n".join(self.problems)


@pytest.fixture(scope="module")
def readers(site, browser):
    """A light reader of the served site, and a dark one of the files."""
    with (
        serve(site) as address,
        browser.new_context(color_scheme="light") as light,
        browser.new_context(color_scheme="dark") as dark,
    ):
        yield {
            "served": Reader(light.new_page(), address),
            "file": Reader(dark.new_page(), site.as_uri()),
        }


def check_solutions_open(reader, chapter):
    expected = sum(
        "hide-cell" in tags and source.startswith("# Solution")
        for _, source, tags in code_cells(chapter)
    )
    solutions = reader.page.locator(".cell.solution details")
    assert solutions.count() == expected > 0
    for solution in solutions.all():
        code, summary = solution.locator("pre").first, solution.locator("summary")
        assert not code.is_visible()
        assert summary.inner_text().strip() == "Show solution"
        summary.click()
        assert code.is_visible()
        assert code.inner_text().startswith("# Solution")
        assert summary.inner_text().strip() == "Hide solution"


def check_length_and_marks(page, chapter):
    """On a wide screen; each mark at an equation opens the cell that checks it."""
    assert screens(page) <= SCREENS, "of 1440 × 1000"
    places = page.eval_on_selector_all(
        ".eq-mark", "all => all.map(a => a.getAttribute('href'))"
    )
    labels = [match[2] for match in EQUATION.finditer(BY_NAME[chapter].prose) if match[2]]
    assert len(places) == len(labels)
    for place in sorted({place for place in places if place.startswith("#")}):
        page.evaluate("place => { location.hash = place; }", place)
        code = page.locator(f"[id='{place[1:]}'] pre").first
        code.wait_for(state="visible", timeout=PATIENCE)


def check_weight(reader, site):
    paths = reader.page.evaluate(LOADED)
    images = reader.page.locator("img[src$='.png']").count()
    images += reader.page.locator("figure source").count()  # for the narrow ways
    assert sum(path.endswith(".png") for path in {*paths}) == images
    sizes = {path: (site / path).stat().st_size for path in paths}
    assert sum(sizes.values()) < MAX_PAGE_BYTES, sizes


def plot_of(*columns, width=200, height=60):
    """A white plot with a black box at these columns."""
    pixels = np.full((height, width, 3), 255, np.uint8)
    for left, right in columns:
        pixels[10:50, left:right] = 0
    return Image.fromarray(pixels)


def test_panels_are_stacked_where_nothing_is_drawn():
    made = np.asarray(narrow.stacked(plot_of((20, 90), (110, 150)), [0.5]))
    assert made.shape == (40 + 4 + 40, 70, 3)  # without margins, a gap between them
    assert not made[:40].any() and not made[44:, :40].any()
    assert (made[40:44] == 255).all() and (made[44:, 40:] == 255).all()
    near = narrow.stacked(plot_of((20, 97), (103, 150)), [0.49])
    assert near.size == (77, 84)  # other fonts may move the panels a little
    with pytest.raises(ValueError, match=r"something is drawn at 0\.5"):
        narrow.stacked(plot_of((20, 150)), [0.5])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("short", ""),
        ("x" * 45, ""),
        ("a wrong answer fails: " + "expected 1, got 2, " * 3, "printed-lines"),
        ("tokens   ours   theirs\n" + "    10    1.25   " + "1.5 " * 9, "printed-table"),
        ("&lt;" * 20, ""),
    ],
)
def test_what_is_printed_wraps_unless_it_is_a_table(text, kind):
    start = '<div class="output stream '
    html = f'{start}notranslate"><div class="highlight"><pre><span></span>{text}</pre>'
    wanted = html.replace(start, f"{start}{kind} ") if kind else html
    assert narrow.OUTPUT.sub(narrow.printed, html) == wanted


def test_what_is_read_aloud_does_not_widen_the_page(readers):
    """In a font for mathematics that is wider than what is seen, as some are."""
    reader = readers["served"]
    reader.open(f"{CHAPTERS[0]}.html", 360)
    reader.page.add_style_tag(content="mjx-assistive-mml math { padding-right: 400px }")
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.costly("page/{page}", *FRAME, source_of)
@pytest.mark.parametrize("page", [*PAGES, "search", "404"])
def test_page(readers, site, page):
    """In all four ways; as a file, where only loading could differ, in one."""
    readers["file"].look(page, ("dark", 360))
    reader = readers["served"]
    reader.look(page, ("light", 1440), ("dark", 360), ("light", 360), ("dark", 1440))
    if page in CHAPTERS:
        if page[0].isdigit():  # an appendix asks nothing
            check_length_and_marks(reader.page, page)  # with the solutions closed
            check_solutions_open(reader, page)
        check_weight(reader, site)


@pytest.mark.costly("path/{page}", *FRAME, source_of)
@pytest.mark.parametrize("page", IN_FORM)
def test_a_path_is_read_in_one_sitting(readers, page):
    reader = readers["served"]
    reader.open(f"{page}.html")
    end = reader.page.locator("h2", has_text="What we built").bounding_box()["y"]
    assert end / 1000 <= SITTING, "screens of 1440 × 1000"


@each_origin
def test_chosen_theme_is_remembered(readers, browser, origin):
    with browser.new_context(color_scheme="dark") as context:
        reader = Reader(context.new_page(), readers[origin].root)
        reader.open("intro.html")
        reader.wait_for_theme("dark")
        reader.page.click(".theme-button")
        reader.wait_for_theme("light")
        # Chromium writes localStorage in its own time: a page opened at once may miss it.
        for _ in range(20):
            reader.open(f"{CHAPTERS[0]}.html")
            if reader.theme() == "light":
                break
        assert reader.theme() == "light", "the choice is forgotten"
        assert not reader.problems, "\n".join(reader.problems)


@each_origin
def test_search_leads_to_the_number_of_an_equation(readers, origin):
    reader = readers[origin]
    reader.open("search.html?q=(1.11)")
    reader.page.wait_for_url("**/01_scaled_dot_product.html#equation-*", timeout=PATIENCE)
    reader.open("search.html?q=xqzzy")
    told = reader.page.locator("#search-results .search-summary")
    told.get_by_text("an equation by its number").wait_for(timeout=PATIENCE)


@each_origin
def test_search_finds_softmax(readers, origin):
    reader = readers[origin]
    reader.open("intro.html")
    reader.page.fill("input[name=q]", "softmax")
    reader.page.press("input[name=q]", "Enter")
    found = reader.page.locator("#search-results a[href^='01_scaled_dot_product.html']")
    found.first.wait_for(timeout=PATIENCE)
    assert not reader.problems, "\n".join(reader.problems)
