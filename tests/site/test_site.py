"""The built site: read as files, and seen by a real browser.

Every page is opened twice, once from a server and once as a file on disk, each time at
two widths, in light and in dark.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

import attnlib
from bookkit.grammar import CAPTION, CHAPTER, EQUATION
from build_book import is_current, sources
from frame import FRAME, source_of
from site_browser import SCREENS, screens, serve

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1440, 360)
ORIGINS = ("served", "file")
MAX_PAGE_BYTES = 500_000  # without MathJax


def pages_of_toc() -> list[str]:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    entries = [entry for part in toc["parts"] for entry in part["chapters"]]
    nested = [[entry, *entry.get("sections", [])] for entry in entries]
    return [toc["root"], *(entry["file"] for group in nested for entry in group)]


PAGES = pages_of_toc()
CHAPTERS = [page for page in PAGES if CHAPTER.match(page)]


def code_cells(chapter: str) -> list[tuple[str, str, list[str]]]:
    """(id, source, tags) of every code cell of a chapter."""
    notebook = json.loads((ROOT / "book" / f"{chapter}.ipynb").read_text("utf-8"))
    return [
        (cell["id"], "".join(cell["source"]), cell["metadata"].get("tags", []))
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.fixture(scope="module")
def soups(site: Path) -> dict[str, BeautifulSoup]:
    """Every page, parsed."""
    return {
        name: BeautifulSoup((site / f"{name}.html").read_text("utf-8"), "html.parser")
        for name in [*PAGES, "search", "index", "404"]
    }


# ── read as files ────────────────────────────────────────────────────────────────────


def test_every_internal_link_resolves(site: Path, soups: dict[str, BeautifulSoup]) -> None:
    anchors = {
        name: {tag["id"] for tag in soup.find_all(id=True)} for name, soup in soups.items()
    }
    broken = []
    for name, soup in soups.items():
        attributes = {"a": "href", "link": "href", "img": "src", "script": "src"}
        for tag in soup.find_all(list(attributes)):
            url = urlsplit(tag.get(attributes[tag.name]) or "#")
            if url.scheme in {"http", "https", "mailto", "data"}:
                continue
            path, anchor = unquote(url.path), unquote(url.fragment)
            target = Path(path).stem if path else name
            if path and not (site / path).is_file():
                broken.append(f"{name}: no file {path}")
            elif anchor and target in anchors and anchor not in anchors[target]:
                broken.append(f"{name}: no place #{anchor} in {target}")
    assert not broken, "\n".join(broken)


def test_every_image_says_what_it_shows(soups: dict[str, BeautifulSoup]) -> None:
    images = [(name, img) for name, soup in soups.items() for img in soup.find_all("img")]
    assert images
    silent = [
        f"{name}: {img.get('src')}"
        for name, img in images
        # without an alternative text Sphinx writes the file's name there
        if not img.get("alt", "").strip() or re.search(r"\.(png|svg)$", img["alt"])
    ]
    assert not silent, "\n".join(silent)


def test_ids_are_unique(soups: dict[str, BeautifulSoup]) -> None:
    for name, soup in soups.items():
        ids = [tag["id"] for tag in soup.find_all(id=True)]
        assert len(ids) == len(set(ids)), (name, {i for i in ids if ids.count(i) > 1})


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_package_cells_carry_their_file_name(
    chapter: str, soups: dict[str, BeautifulSoup]
) -> None:
    expected = []
    for cell_id, source, _ in code_cells(chapter):
        first, _, listing = source.partition("\n")
        if match := CAPTION.fullmatch(first):
            label = f"cell-{chapter.partition('_')[0]}-{cell_id}"
            file = f"attnlib/{match[1]}.py"
            expected.append((label, "folded" if match[2] else file, listing.strip()))
            if match[2]:
                line = soups[chapter].find(id=label).select_one("summary").get_text()
                assert file in line and match[2] in line
    assert expected or not chapter[0].isdigit()  # an appendix may have none
    shown = [
        (
            listing["id"],
            caption.get_text()
            if (caption := listing.select_one(".package-caption"))
            else "folded",
            listing.select_one("pre").get_text().strip(),
        )
        for listing in soups[chapter].select(".package-listing")
    ]
    assert shown == expected


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_line_of_a_folded_check_names_all_its_equations(
    chapter: str, soups: dict[str, BeautifulSoup]
) -> None:
    soup, key = soups[chapter], chapter.partition("_")[0]
    numbers = {}  # by label
    for tag in soup.select("[id^=equation-eq-] .eqno"):
        label = tag.find_parent(id=True)["id"].removeprefix("equation-")
        numbers[label] = re.search(r"\d+(?=\))", tag.get_text())[0]
    for name, source, _ in code_cells(chapter):
        marks = re.findall(r"^# (?:checks|illustrates) ([\w, -]+)", source, re.M)
        summary = soup.find(id=f"cell-{key}-{name}").select_one("summary")
        if not (marks and summary and "Checked" in summary.get_text()):
            continue
        shown = set()
        for first, last in re.findall(
            r"\((?:\w+\.)?(\d+)\)(?: to \((?:\w+\.)?(\d+)\))?", summary.get_text()
        ):
            shown |= set(range(int(first), int(last or first) + 1))
        here = set(", ".join(marks).split(", "))
        assert shown == {int(numbers[label]) for label in here}, name


def test_the_page_of_the_package_lists_every_public_name(
    soups: dict[str, BeautifulSoup],
) -> None:
    rows = [row.find_all("td") for row in soups["api"].select("table.names tbody tr")]
    shown = {name.get_text(): name.a["href"] for name, _, _ in rows}
    public = [*attnlib.__all__, *(f"backprop.{n}" for n in attnlib.backprop.__all__)]
    assert len(shown) == len(rows)
    assert set(public) - {"testing", "hf"} <= set(shown)  # modules
    assert {"testing.check_attention", "hf.register"} <= set(shown)
    for name, what, place in rows:
        assert urlsplit(name.a["href"]).path.startswith("api_"), name
        assert len(what.get_text()) > 10, name
        key = re.fullmatch(r"chapter (\d+)|appendix ([A-Z])", place.get_text())
        assert place.a["href"].startswith(key[2] or f"{int(key[1]):02}"), name


def test_the_contents_list_the_pages_below_a_page(soups: dict[str, BeautifulSoup]) -> None:
    below = [page for page in PAGES if page.startswith("api_")]
    for page in ("api", *below):
        links = soups[page].select(".contents .toctree-l2 > a.internal")
        files = [a["href"].removesuffix(".html") for a in links]
        assert [page if f == "#" else f for f in files if f[1:].find("#") < 0] == below


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_cell_can_be_linked_to(chapter: str, soups: dict[str, BeautifulSoup]) -> None:
    ids = {tag["id"] for tag in soups[chapter].select(".cell[id]")}
    expected = {
        f"cell-{chapter.partition('_')[0]}-{cell_id}"
        for cell_id, _, tags in code_cells(chapter)
        if "remove-cell" not in tags
    }
    assert ids == expected


def test_neighbors(soups: dict[str, BeautifulSoup]) -> None:
    """Previous and next follow the table of contents, and none leads nowhere."""
    for i, page in enumerate(PAGES):
        links = {
            name: soups[page].select_one(f".prev-next .{name}") for name in ("prev", "next")
        }
        expected = {"prev": PAGES[i - 1] if i else None, "next": None}
        if i + 1 < len(PAGES):
            expected["next"] = PAGES[i + 1]
        for name, target in expected.items():
            href = links[name]["href"] if links[name] else None
            assert href == (f"{target}.html" if target else None), (page, name)


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

    def __init__(self, page, root: str) -> None:
        self.page, self.root = page, root
        self.problems: list[str] = []
        page.on("request", lambda request: self.note_request(request.url))
        page.on("requestfailed", self.note_failure)
        page.on("response", self.note_response)
        page.on("pageerror", lambda error: self.note("script", str(error)))
        page.on("console", self.note_console)

    def note(self, what: str, text: str) -> None:
        self.problems.append(f"{what}: {text}")

    def note_request(self, url: str) -> None:
        if not url.startswith((self.root, "data:")):
            self.note("left the site", url)

    def note_failure(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left while it loaded
            self.note("failed", request.url)

    def note_response(self, response) -> None:
        if response.status >= 400:
            self.note(str(response.status), response.url)

    def note_console(self, message) -> None:
        if message.type in {"error", "warning"}:
            self.note("console", message.text)

    def open(self, path: str, width: int = 1440) -> None:
        self.problems.clear()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.goto(f"{self.root}/{path}")
        self.page.evaluate("() => window.MathJax?.startup?.promise")

    def look(self, where: str) -> None:
        self.problems += [f"{where}: {found}" for found in self.page.evaluate(LOOK)]

    def theme(self) -> str:
        return self.page.evaluate("() => document.documentElement.dataset.theme")

    def wait_for_theme(self, theme: str) -> None:
        shown = "(theme) => document.documentElement.dataset.theme === theme"
        self.page.wait_for_function(shown, arg=theme, timeout=5000)


@pytest.fixture(scope="module")
def readers(site: Path, browser) -> Iterator[dict[str, Reader]]:
    """A light reader of the served site, and a dark one of the files."""
    with serve(site) as address:
        light = browser.new_context(color_scheme="light")
        dark = browser.new_context(color_scheme="dark")
        yield {
            "served": Reader(light.new_page(), address),
            "file": Reader(dark.new_page(), site.as_uri()),
        }
        light.close()
        dark.close()


def check_solutions_open(reader: Reader, chapter: str) -> None:
    expected = sum(
        "hide-cell" in tags and source.startswith("# Solution")
        for _, source, tags in code_cells(chapter)
    )
    assert expected
    solutions = reader.page.locator(".cell.solution details")
    assert solutions.count() == expected
    for solution in solutions.all():
        code = solution.locator("pre").first
        assert not code.is_visible()
        summary = solution.locator("summary")
        assert summary.inner_text().strip() == "Show solution"
        summary.click()
        assert code.is_visible()
        assert code.inner_text().startswith("# Solution")
        assert summary.inner_text().strip() == "Hide solution"


def check_length_and_marks(reader: Reader, chapter: str) -> None:
    """On a wide screen; each mark at an equation opens the cell that checks it."""
    page = reader.page
    assert screens(page) <= SCREENS, "of 1440 × 1000"
    places = page.eval_on_selector_all(
        ".eq-mark", "all => all.map(a => a.getAttribute('href'))"
    )
    assert len(places) == sum(bool(match[2]) for match in EQUATION.finditer(text(chapter)))
    for place in sorted({place for place in places if place.startswith("#")}):
        page.evaluate("place => { location.hash = place; }", place)
        code = page.locator(f"[id='{place[1:]}'] pre").first
        code.wait_for(state="visible", timeout=5000)


def text(chapter: str) -> str:
    notebook = json.loads((ROOT / "book" / f"{chapter}.ipynb").read_text("utf-8"))
    cells = notebook["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def check_weight(reader: Reader, site: Path) -> None:
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


@pytest.mark.costly("page/{page}", *FRAME, source_of)
@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("page", [*PAGES, "search", "404"])
def test_page(readers: dict[str, Reader], site: Path, origin: str, page: str) -> None:
    reader = readers[origin]
    ways = [("light", 1440), ("dark", 360), ("light", 360), ("dark", 1440)]
    if origin == "file":  # where only loading could differ
        ways = ways[1:2]
    reader.page.emulate_media(color_scheme=ways[0][0])
    reader.open(f"{page}.html", ways[0][1])
    for theme, width in ways:  # the second one comes while the page is being read
        reader.page.emulate_media(color_scheme=theme)
        reader.wait_for_theme(theme)
        reader.page.set_viewport_size({"width": width, "height": 900})
        reader.look(f"{width} {theme}")
    assert not reader.problems, "\n".join(reader.problems)
    if page in CHAPTERS and origin == "served":  # while it is open
        if page[0].isdigit():  # an appendix asks nothing
            check_solutions_open(reader, page)
            check_length_and_marks(reader, page)
        check_weight(reader, site)


@pytest.mark.parametrize("origin", ORIGINS)
def test_chosen_theme_is_remembered(
    readers: dict[str, Reader], browser, origin: str
) -> None:
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


@pytest.mark.parametrize("origin", ORIGINS)
def test_search_finds_softmax(readers: dict[str, Reader], origin: str) -> None:
    reader = readers[origin]
    reader.open("intro.html")
    reader.page.fill("input[name=q]", "softmax")
    reader.page.press("input[name=q]", "Enter")
    found = reader.page.locator("#search-results a[href^='01_scaled_dot_product.html']")
    found.first.wait_for(timeout=5000)
    assert not reader.problems, "\n".join(reader.problems)


def test_contents_open_on_a_phone(readers: dict[str, Reader]) -> None:
    reader = readers["served"]
    reader.open(f"{CHAPTERS[0]}.html", 360)
    link = reader.page.locator(f".contents a[href='{CHAPTERS[1]}.html']")
    assert not link.is_visible()
    reader.page.click(".menu-button")
    link.click()
    reader.page.wait_for_url(f"**/{CHAPTERS[1]}.html")
