"""The built site: read as files, and seen by a real browser.

Every page is opened twice, once from a server and once as a file on disk.
"""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

from bookkit.grammar import CAPTION, CHAPTER
from build_book import is_current, sources
from site_browser import serve

ROOT = Path(__file__).resolve().parents[2]
MAX_PAGE_BYTES = 500_000  # without MathJax


def pages_of_toc():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    entries = [entry for part in toc["parts"] for entry in part["chapters"]]
    nested = [[entry, *entry.get("sections", [])] for entry in entries]
    return [toc["root"], *(entry["file"] for group in nested for entry in group)]


PAGES = pages_of_toc()
CHAPTERS = [page for page in PAGES if CHAPTER.match(page)]
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS)
each_origin = pytest.mark.parametrize("origin", ["served", "file"])


def code_cells(chapter):
    """(id, source, tags) of every code cell of a chapter."""
    notebook = json.loads((ROOT / "book" / f"{chapter}.ipynb").read_text("utf-8"))
    return [
        (
            f"cell-{chapter.partition('_')[0]}-{cell['id']}",
            "".join(cell["source"]),
            cell["metadata"].get("tags", []),
        )
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.fixture(scope="module")
def soups(site):
    """Every page, parsed."""
    return {
        name: BeautifulSoup((site / f"{name}.html").read_text("utf-8"), "html.parser")
        for name in [*PAGES, "search", "index", "404"]
    }


# ── read as files ────────────────────────────────────────────────────────────────────


def test_every_internal_link_resolves(site, soups):
    ids = {
        name: [tag["id"] for tag in soup.find_all(id=True)] for name, soup in soups.items()
    }
    broken = []
    for name, soup in soups.items():
        assert len(ids[name]) == len(set(ids[name])), name
        for tag in soup.find_all(["a", "link", "img", "script"]):
            url = urlsplit(tag.get("href") or tag.get("src") or "#")
            if url.scheme in {"http", "https", "mailto", "data"}:
                continue
            path, anchor = unquote(url.path), unquote(url.fragment)
            target = Path(path).stem if path else name
            if path and not (site / path).is_file():
                broken.append(f"{name}: no file {path}")
            elif anchor and anchor not in ids.get(target, [anchor]):
                broken.append(f"{name}: no place #{anchor} in {target}")
    assert not broken, "\n".join(broken)


def test_every_image_says_what_it_shows(soups):
    images = [(name, img) for name, soup in soups.items() for img in soup.find_all("img")]
    assert images
    for name, img in images:
        alt = img.get("alt", "").strip()
        # without an alternative text Sphinx writes the file's name there
        assert alt and not re.search(r"\.(png|svg)$", alt), f"{name}: {img.get('src')}"


@each_chapter
def test_package_cells_carry_their_file_name(chapter, soups):
    expected = []
    for label, source, _ in code_cells(chapter):
        first, _, listing = source.partition("\n")
        if match := CAPTION.fullmatch(first):
            file = f"attnlib/{match[1]}.py"
            expected.append((label, None if match[2] else file, listing.strip()))
            if match[2]:
                line = soups[chapter].find(id=label).select_one("summary").get_text()
                assert file in line and match[2] in line
    assert expected or not chapter[0].isdigit()  # an appendix may have none
    shown = []
    for listing in soups[chapter].select(".package-listing"):
        caption = listing.select_one(".package-caption")
        code = listing.select_one("pre").get_text().strip()
        shown.append((listing["id"], caption and caption.get_text(), code))
    assert shown == expected


@each_chapter
def test_the_line_of_a_folded_check_names_all_its_equations(chapter, soups):
    numbers = {}  # by label
    for tag in soups[chapter].select("[id^=equation-eq-] .eqno"):
        label = tag.find_parent(id=True)["id"].removeprefix("equation-")
        numbers[label] = int(re.search(r"\d+(?=\))", tag.get_text())[0])
    for name, source, _ in code_cells(chapter):
        marks = re.findall(r"^# (?:checks|illustrates) ([\w, -]+)", source, re.M)
        summary = soups[chapter].find(id=name).select_one("summary") if marks else None
        if not (summary and "Checked" in summary.get_text()):
            continue
        shown, span = set(), r"\((?:\w+\.)?(\d+)\)(?: to \((?:\w+\.)?(\d+)\))?"
        for first, last in re.findall(span, summary.get_text()):
            shown |= {*range(int(first), int(last or first) + 1)}
        assert shown == {numbers[label] for label in ", ".join(marks).split(", ")}, name


def test_the_contents_list_the_pages_below_a_page(soups):
    below = [page for page in PAGES if page.startswith("api_")]
    for page in ("api", *below):
        links = soups[page].select(".contents .toctree-l2 > a.internal")
        files = [a["href"].removesuffix(".html") for a in links]
        assert [page if f == "#" else f for f in files if f[1:].find("#") < 0] == below


@each_chapter
def test_every_cell_can_be_linked_to(chapter, soups):
    ids = {tag["id"] for tag in soups[chapter].select(".cell[id]")}
    assert ids == {
        cell for cell, _, tags in code_cells(chapter) if "remove-cell" not in tags
    }


def test_neighbors(soups):
    """Previous and next follow the table of contents, and none leads nowhere."""
    around = [None, *(f"{page}.html" for page in PAGES), None]
    for page, before, after in zip(PAGES, around, around[2:], strict=False):
        for name, target in (("prev", before), ("next", after)):
            link = soups[page].select_one(f".prev-next .{name}")
            assert (link and link["href"]) == target, (page, name)


# ── seen by a browser ────────────────────────────────────────────────────────────────

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
  const cramped = [...document.querySelectorAll("mjx-container")].filter(
    (e) => innerWidth > 1000 && e.scrollWidth > e.clientWidth + 1);
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
        self.page.wait_for_function(shown, arg=theme, timeout=5000)

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


def check_weight(reader, site):
    paths = reader.page.evaluate(LOADED)
    images = reader.page.locator("img[src$='.png']").count()
    assert sum(path.endswith(".png") for path in paths) == images
    sizes = {path: (site / path).stat().st_size for path in paths}
    assert sum(sizes.values()) < MAX_PAGE_BYTES, sizes


def test_what_is_read_aloud_does_not_widen_the_page(readers):
    """In a font for mathematics that is wider than what is seen, as some are."""
    reader = readers["served"]
    reader.open(f"{CHAPTERS[0]}.html", 360)
    reader.page.add_style_tag(content="mjx-assistive-mml math { padding-right: 400px }")
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_site_is_built_again_when_a_file_comes_changes_or_goes(tmp_path):
    book, built = tmp_path / "book", tmp_path / "_build" / ".sources"
    for path in (book / "one.md", book / "two.md", built, tmp_path / ".gitignore"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("_build\n", encoding="utf-8")

    def build(second):
        built.write_text("\n".join(sources(tmp_path)), "utf-8")
        os.utime(built, (second, second))

    def current():
        return is_current(built, tmp_path)

    build(time.time() + 9)
    assert not current()  # without Git
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    build(time.time() - 9)
    assert not current()
    build(time.time() + 9)
    assert current()
    (book / "__pycache__").mkdir()  # written by Python, no page
    assert current()
    (book / "two.md").unlink()
    assert not current()
    build(time.time() + 9)
    assert current()
    (book / "new.md").touch()
    assert not current()
    (book / "new.md").rename(book / "two.md")
    build(time.time() + 9)
    assert current()
    (book / "two.md").rename(book / "three.md")  # as old as before
    assert not current()


@pytest.mark.costly(
    *("page/{page}", "book/{page}.*", "book/_static/book.*", "book/_static/*.svg"),
    *("book/_templates/*", "_config.yml", "_toc.yml", "tools/sphinx_ext/*.py"),
    *("book/references.bib", "requirements.txt"),
)
@pytest.mark.parametrize("page", [*PAGES, "search", "404"])
def test_page(readers, site, page):
    """In all four ways; as a file, where only loading could differ, in one."""
    readers["file"].look(page, ("dark", 360))
    reader = readers["served"]
    reader.look(page, ("light", 1440), ("dark", 360), ("light", 360), ("dark", 1440))
    if page in CHAPTERS:
        if page[0].isdigit():  # an appendix asks nothing
            check_solutions_open(reader, page)
        check_weight(reader, site)


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
def test_search_finds_softmax(readers, origin):
    reader = readers[origin]
    reader.open("intro.html")
    reader.page.fill("input[name=q]", "softmax")
    reader.page.press("input[name=q]", "Enter")
    found = reader.page.locator("#search-results a[href^='01_scaled_dot_product.html']")
    found.first.wait_for(timeout=5000)
    assert not reader.problems, "\n".join(reader.problems)


def test_contents_open_on_a_phone(readers):
    reader = readers["served"]
    reader.open(f"{CHAPTERS[0]}.html", 360)
    link = reader.page.locator(f".contents a[href='{CHAPTERS[1]}.html']")
    assert not link.is_visible()
    reader.page.click(".menu-button")
    link.click()
    reader.page.wait_for_url(f"**/{CHAPTERS[1]}.html")
