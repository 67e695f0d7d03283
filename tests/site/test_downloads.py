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
def printed(site, browser, tmp_path_factory) -> PdfReader:
    out = tmp_path_factory.mktemp("pdf") / "book.pdf"
    pdf.make(browser, out, site, [CHAPTER])
    return PdfReader(out)


@pytest.fixture(scope="module")
def words(printed) -> list[str]:
    """The text of each page, without its number."""
    texts = [page.extract_text() for page in printed.pages]
    return [re.sub(rf"^{i}\n|\n{i}$", "", text) for i, text in enumerate(texts, 1)]


def titles(outline, depth=0):
    for entry in outline:
        if isinstance(entry, list):
            yield from titles(entry, depth + 1)
        else:
            yield depth, entry.title


def test_bookmarks_lead_through_the_book(printed):
    found = list(titles(printed.outline))
    top = [title for depth, title in found if depth == 0]
    title = "8 Feed-forward network"
    assert top == ["Attention, derived", title, "Solutions"]
    assert any(depth == 1 and "Exercises" in title for depth, title in found)


def test_the_contents_name_the_pages(printed, words):
    for entry in printed.outline:
        if isinstance(entry, list) or entry.title == "Attention, derived":
            continue
        page = printed.get_destination_page_number(entry)
        line = rf"{re.escape(entry.title)}\s+{page + 1}\b"
        assert re.search(line, words[0]), entry.title
        assert words[page].startswith(entry.title)


def test_solutions_stand_at_the_end_and_are_pointed_to(words):
    first = next(i for i, text in enumerate(words) if text.startswith("Solutions"))
    solution = re.compile(r"^# Solution (8\.\d)", re.MULTILINE)
    assert not solution.search("\n".join(words[:first]))
    numbers = solution.findall("\n".join(words[first:]))
    assert numbers
    for number in numbers:
        pointed = re.search(rf"Solution {number}, page (\d+)", "\n".join(words[:first]))
        assert f"Solution {number}" in words[int(pointed[1]) - 1]


def test_code_and_formulas_are_whole(printed, words):
    text = "\n".join(words)
    without_spaces = "".join(text.split())
    module = ROOT / "attnlib" / "feed_forward.py"
    lines = [line for line in module.read_text("utf-8").splitlines() if line.strip()]
    code = [line for line in lines if line.strip().startswith(("def ", "return ", "self."))]
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
