"""The built site, read as files."""

import os
import re
import subprocess
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from bookkit.grammar import CAPTION
from build_book import is_current, sources
from frame import CHAPTERS, PAGES, code_cells
from sphinx_ext import narrow

each_chapter = pytest.mark.parametrize("chapter", CHAPTERS)


@pytest.fixture(scope="module")
def soups(site):
    """Every page, parsed."""
    return {
        name: BeautifulSoup((site / f"{name}.html").read_text("utf-8"), "html.parser")
        for name in [*PAGES, "search", "index", "404"]
    }


def test_each_plot_that_can_be_cut_is(soups):
    """A figure that is renamed, or no longer found, would scroll again in silence."""
    found = [source for soup in soups.values() for source in soup.select("figure source")]
    assert {source.find_parent("figure")["id"] for source in found} == {*narrow.CUTS}


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
            more = re.match(r"class (\w+)\(\1\):", listing.strip())
            caption = f"{file}more of {more[1]}" if more else file
            expected.append((label, None if match[2] else caption, listing.strip()))
            if match[2]:
                line = soups[chapter].find(id=label).select_one("summary").get_text()
                assert file in line and match[2] in line
    assert expected or not chapter[0].isdigit()  # an appendix may have none
    shown = []
    for listing in soups[chapter].select(".package-listing"):
        caption = listing.select_one(".package-caption")
        code = listing.select_one("pre")
        for line in code.select("summary"):  # of a fold, not of the code
            line.decompose()
        text = code.get_text().strip()
        shown.append((listing["id"], caption and caption.get_text(), text))
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


def test_the_button_that_copies_shows_lines_and_no_square(site, browser):
    page = browser.new_page()
    page.goto((site / f"{CHAPTERS[0]}.html").as_uri())
    behind, lines, color = page.locator(".copybtn svg").first.evaluate(
        "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).stroke,"
        " getComputedStyle(e.parentElement).color]"
    )
    assert behind == "rgba(0, 0, 0, 0)" and lines == color  # light or dark, as the page is
    page.close()
