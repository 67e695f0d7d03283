"""The book to take along: the ZIP of the site, and the PDF."""

import os
import re
from pathlib import Path
from zipfile import ZipFile

import pytest
from pypdf import PdfReader

from editions import offline_zip, pdf

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "08_feed_forward"
PART, TITLE = "Part III · The block", "8 Feed-forward network"
ON_PAGE = r",\s+page[ \xa0](\d+)"  # the number in the line of its word


def test_the_same_site_gives_the_same_zip(tmp_path):
    for number, folder in enumerate(("one", "two")):
        for name in ("index.html", "_static/book.css") if number else ("_static/book.css",):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
            os.utime(path, (1e9 + number, 1e9 + number))
    (tmp_path / "one/index.html").write_text("index.html")  # made last
    (tmp_path / "one/.buildinfo").write_text("differs")
    for folder in ("one", "two"):
        offline_zip.pack(tmp_path / f"{folder}.zip", tmp_path / folder)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    assert ZipFile(tmp_path / "one.zip").namelist() == ["_static/book.css", "index.html"]


def test_the_unpacked_zip_opens_from_its_index(site, browser, tmp_path):
    offline_zip.pack(tmp_path / "book.zip", site)
    ZipFile(tmp_path / "book.zip").extractall(tmp_path / "book")
    page, failed = browser.new_page(), []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.goto((tmp_path / "book" / "index.html").as_uri())
    page.click(f".contents a[href='{CHAPTER}.html']")
    page.wait_for_url(f"**/{CHAPTER}.html")
    page.evaluate("() => MathJax.startup.promise")
    assert page.locator("mjx-container svg").count() > 10
    page.close()
    assert not failed


@pytest.fixture(scope="module")
def printed(site, browser, tmp_path_factory):
    out = tmp_path_factory.mktemp("pdf") / "book.pdf"
    pdf.make(browser, out, site, [CHAPTER])
    return PdfReader(out)


@pytest.fixture(scope="module")
def words(printed):
    """The text of each page, without its number."""
    texts = [page.extract_text() for page in printed.pages]
    return [re.sub(rf"^{i}\n|\n{i}$", "", text) for i, text in enumerate(texts, 1)]


def starts(words, title):
    """The text before the page that begins with a title, and from there on."""
    first = next(i for i, text in enumerate(words) if text.startswith(title))
    return "\n".join(words[:first]), "\n".join(words[first:])


def entries(outline, depth=0):
    for entry in outline:
        if isinstance(entry, list):
            yield from entries(entry, depth + 1)
        else:
            yield depth, entry.title, entry


def test_bookmarks_lead_through_parts_chapters_and_sections(printed):
    found = [(depth, title) for depth, title, _ in entries(printed.outline)]
    top = [title for depth, title in found if depth == 0]
    assert top == ["Attention, derived", PART, "Listings", "Solutions"]
    assert [title for depth, title in found if depth == 1] == [TITLE] * 3
    assert any(depth == 2 and "Exercises" in title for depth, title in found)
    assert (2, "Solution 8.1") in found


def test_the_contents_name_the_pages(printed, words):
    for wanted in (TITLE, "Listings", "Solutions"):
        places = [entry for _, title, entry in entries(printed.outline) if title == wanted]
        page = printed.get_destination_page_number(places[0])
        assert re.search(rf"{re.escape(wanted)}\s+{page + 1}\b", words[0]), wanted
        assert words[page].removeprefix(f"{PART}\n").startswith(wanted)


def test_folded_listings_stand_at_the_end_and_are_pointed_to(words):
    chapter, _ = starts(words, "Listings")
    folded = "class FeedForwardNetwork(FeedForwardNetwork):"  # goes on with from_torch
    assert folded not in chapter
    lines = re.findall(rf"(attnlib/\w+\.py) · \d+ lines: [^·]+?{ON_PAGE}", chapter)
    assert lines
    for title, page in lines:
        assert title in words[int(page) - 1]
    assert folded in words[int(lines[0][1]) - 1]


def test_a_folded_check_is_one_line(words):
    text = "\n".join(words)
    assert re.search(r"^Checked: \(8\.\d\)", text, re.MULTILINE)
    assert not re.search(r"^# checks [\w, -]+: ", text, re.MULTILINE)


def test_solutions_stand_at_the_end_and_are_pointed_to(words):
    before, after = starts(words, "Solutions")
    solution = re.compile(r"^# Solution (8\.\d)", re.MULTILINE)
    assert not solution.search(before)
    numbers = solution.findall(after)
    assert numbers
    for number in numbers:
        pointed = re.search(rf"Solution {number}{ON_PAGE}", before)
        assert f"Solution {number}" in words[int(pointed[1]) - 1]


def test_code_and_formulas_are_whole(printed, words):
    text = "\n".join(words)
    without_spaces = "".join(text.split())
    module = (ROOT / "attnlib" / "feed_forward.py").read_text("utf-8")
    code = re.findall(r"^ *(?:def |return |self\.).*", module, re.MULTILINE)
    assert code
    assert not [line for line in code if "".join(line.split()) not in without_spaces]
    assert "(8.1)" in text and not re.search(r"\\(frac|mathsf|operatorname)", text)


def test_links_between_pages_lead_inside_the_book(printed):
    """To what is printed here; a link to a chapter that is left out has no target."""
    links = [
        annotation.get_object()
        for page in printed.pages
        for annotation in page.get("/Annots", [])
    ]
    inside = [link["/Dest"] for link in links if "/Dest" in link]
    assert set(inside) <= set(printed.named_destinations)
    assert f"/{CHAPTER}" in inside and any("equation-eq-" in name for name in inside)
