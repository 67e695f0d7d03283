"""The home page, and what pages say of themselves, with and without a public address."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from bs4 import BeautifulSoup
from PIL import Image

import attnlib
from art import home_picture
from site_browser import serve

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "book" / "_static"
ADDRESS = {"GITHUB_REPOSITORY": "Owner/a-book", "GITHUB_SHA": "0123456789" * 4}
SITE = "https://owner.github.io/a-book/"
CONFIGURATION = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
project = "A book"
extensions = ["sphinx_ext.page"]
templates_path = [{str(ROOT / "book" / "_templates")!r}]
html_theme, root_doc, html_title = "basic", "intro", "A book"
html_additional_pages = {{"404": "404.html"}}
"""
TOC = ".. toctree::\n   :caption: Part\n\n   on\n"
LONG = "Some <words>. " * 12 + "More of it. " * 9
PAGES = {
    "intro": f"A book\n======\n\nWhat it *is*.\n\n{TOC}",
    "on": f"On & on\n=======\n\n.. note:: no.\n\n{LONG}",
}


def build(folder, **environment):
    """A tiny site with this book's frame, built anew into the same folder."""
    for name, text in PAGES.items():
        (folder / f"{name}.rst").write_text(text)
    (folder / "conf.py").write_text(CONFIGURATION)
    known = {key: v for key, v in os.environ.items() if not key.startswith("GITHUB_")}
    command = [sys.executable, "-m", "sphinx", "-q", str(folder), str(folder / "html")]
    subprocess.run(command, check=True, env=known | environment)
    return folder / "html"


either = pytest.mark.parametrize("known", [True, False])


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """What was built with the address, and again without it."""
    folder, found = tmp_path_factory.mktemp("site"), {}
    for known in (True, False):
        out = build(folder, **(ADDRESS if known else {}))
        files = [*out.glob("*.html"), *out.glob("*.xml")]
        found[known] = {path.name: path.read_text("utf-8") for path in files}
    return found


def head(html):
    """What the head of a page says, by name."""
    found = {}
    for tag in BeautifulSoup(html, "html.parser").head.find_all(["meta", "link", "base"]):
        name = tag.get("property") or tag.get("name") or tag.get("rel", ["base"])[0]
        found[name] = tag.get("content") or tag.get("href")
    return found


def test_with_an_address_a_page_says_where_it_is(sites):
    intro, on = head(sites[True]["intro.html"]), head(sites[True]["on.html"])
    assert (intro["canonical"], intro["og:url"]) == (SITE, SITE)
    assert on["canonical"] == on["og:url"] == f"{SITE}on.html"
    for page in (intro, on):
        assert page["og:image"] == f"{SITE}_static/card.png"
        assert page["twitter:card"] == "summary_large_image"
    links = BeautifulSoup(sites[True]["on.html"], "html.parser").select(".colophon a")
    newest = "https://github.com/Owner/a-book/releases/latest"
    assert [a["href"] for a in links] == [newest]


def test_without_an_address_nothing_points_to_one(sites):
    assert "sitemap.xml" not in sites[False]  # nor is one left from the build before
    pointer = r"og:(url|image)|canonical|<base|github|https?://(?!www.w3)"
    for name, html in sites[False].items():
        assert not re.search(pointer, html), name


@either
def test_a_link_has_a_title_and_a_description(sites, known):
    intro, on = head(sites[known]["intro.html"]), head(sites[known]["on.html"])
    assert intro["og:title"] == intro["og:site_name"] == "A book"
    assert (intro["og:type"], on["og:type"]) == ("website", "article")
    assert intro["description"] == intro["og:description"] == "What it is."
    assert on["og:title"] == "On & on"
    assert on["description"] == LONG[:191]
    assert "og:title" not in head(sites[known]["404.html"])
    assert sites[known]["index.html"] == sites[known]["intro.html"]


def test_the_sitemap_lists_the_pages(sites):
    found = re.findall(r"<loc>(.*?)</loc>", sites[True]["sitemap.xml"])
    assert found == [SITE, f"{SITE}on.html"]


@either
def test_404_leads_back_from_any_depth(sites, known, tmp_path, browser):
    """Served as the answer to a missing page, under the name of the repository."""
    at = tmp_path / ("a-book" if known else ".")
    for name in ("intro.html", "on.html"):
        at.mkdir(exist_ok=True)
        (at / name).write_text(sites[known][name])
    missing = at / "some/deep/page.html" if known else at / "page.html"
    missing.parent.mkdir(parents=True, exist_ok=True)
    missing.write_text(sites[known]["404.html"])
    page = browser.new_page()
    with serve(tmp_path) as address:
        page.goto(f"{address}/{missing.relative_to(tmp_path).as_posix()}")
        links = page.locator(".all-pages a")
        assert links.all_inner_texts() == ["Introduction", "On & on"]
        links.last.click()
        page.wait_for_url(f"{address}/{'a-book/' if known else ''}on.html")
    page.close()


# ── the home page ────────────────────────────────────────────────────────────────────


def test_the_picture_shows_what_attnlib_computes():
    weights = home_picture.attend()
    for name, places in (("home", home_picture.WIDE), ("home_narrow", home_picture.NARROW)):
        drawn = home_picture.picture(weights, places)
        stored = (STATIC / f"{name}.svg").read_text("utf-8")
        assert stored == drawn, "run python tools home_picture --card"
    shown = [f"{weight:.3f}" for weight in weights[home_picture.HE].tolist()]
    assert shown == ["0.003", "0.003", "0.983", "0.003", "0.003", "0.003"]
    layout = (ROOT / "book/_templates/layout.html").read_text("utf-8")
    for text in ((ROOT / "book/intro.md").read_text("utf-8"), layout):
        assert " ".join(home_picture.WORDS) in text and "0.983" in text


def test_the_card_has_the_size_that_previews_expect():
    with Image.open(STATIC / "card.png") as card:
        assert card.size == (1200, 630)
    assert (STATIC / "card.png").stat().st_size < 150_000


def test_four_doors(site):
    home = BeautifulSoup((site / "index.html").read_text("utf-8"), "html.parser")
    told = [door.get_text() for door in home.select(".doors li a strong")]
    assert told == ["Start reading", "Run it", "Use it", "Write it"]


@pytest.mark.parametrize("page", ["index", "02_self_attention", "engineers"])
def test_the_contents_mark_the_core(site, page):
    def of_chapters(links):
        return {link["href"][:2] for link in links}

    home = BeautifulSoup((site / "index.html").read_text("utf-8"), "html.parser")
    (core,) = (li for li in home.select(".doors li") if "The core" in li.get_text())
    contents = BeautifulSoup((site / f"{page}.html").read_text("utf-8"), "html.parser")
    marked = of_chapters(contents.select(".contents a.core"))
    listed = of_chapters(core.select("a"))
    assert len(listed) == 9
    assert marked == listed ^ ({"02", "#"} if page.startswith("02") else set())


def test_the_page_of_the_package_lists_every_public_name(site):
    page = BeautifulSoup((site / "api.html").read_text("utf-8"), "html.parser")
    rows = [row.find_all("td") for row in page.select("table.names tbody tr")]
    shown = {name.get_text() for name, _, _ in rows}
    public = [*attnlib.__all__, *(f"backprop.{n}" for n in attnlib.backprop.__all__)]
    assert len(shown) == len(rows)
    assert set(public) - {"testing", "hf"} <= shown  # modules
    assert {"testing.check_attention", "hf.register"} <= shown
    for name, what, place in rows:
        assert urlsplit(name.a["href"]).path.startswith("api_"), name
        assert len(what.get_text()) > 10, name
        key = re.fullmatch(r"chapter (\d+)|appendix ([A-Z])", place.get_text())
        assert place.a["href"].startswith(key[2] or f"{int(key[1]):02}"), name
