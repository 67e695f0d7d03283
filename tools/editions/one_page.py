"""The whole book as one page of HTML, for paper.

Links between pages become links inside the one page. What the site folds away is a line
here, too; listings of the package and solutions stand whole at the end, and the line names
the page.
"""

import re
from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag

TITLE = "Attention, derived"


def parse(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text("utf-8"), "html.parser")


def contents(site: Path) -> list[tuple[str, str, str, int]]:
    """(page, title, part, depth) of every page, in order, as 404.html lists them."""
    found, part = [], ""
    for tag in parse(site / "404.html").select(".all-pages .caption, .all-pages a"):
        if tag.name == "p":
            part = tag.get_text()
        else:
            name = tag["href"].removesuffix(".html")
            depth = len(tag.find_parents("ul"))  # 2: a page below a page
            found.append((name, tag.get_text(), part, depth))
    return found


def place(name: str, anchor: str = "") -> str:
    """The id, in the one document, of a page or of a place on it."""
    return f"{name}--{anchor}" if anchor else name


def page_of(target: str) -> str:
    return f'<span class="page-of" data-target="{target}">000</span>'


def section_of(name: str, site: Path, pages: set[str]) -> tuple[Tag, list[Tag], list[Tag]]:
    """A page's text for the one document, and the listings and solutions out of it."""
    article = parse(site / f"{name}.html").article
    for tag in article.select("script, nav, .headerlink"):
        tag.decompose()
    kept = {id(tag) for tag in article.select("figure.interactive, figure.interactive *")}
    for tag in article.find_all(id=True):
        if id(tag) not in kept:  # whose style names its ids
            tag["id"] = place(name, tag["id"])
    for tag in article.find_all(src=True) + article.find_all(srcset=True):
        key = "src" if tag.has_attr("src") else "srcset"
        tag[key] = (site / tag[key]).as_uri()
    for link in article.find_all("a", href=True):
        url = urlsplit(link["href"])
        target = Path(url.path).stem or name
        if not url.scheme and target in pages:
            link["href"] = f"#{place(target, unquote(url.fragment))}"
    for docs in article.select("details.docs"):  # an open listing stands whole
        docs.summary.decompose()
        docs.unwrap()
    listings, solutions = take_folded(article)
    for details in article.find_all("details"):
        details["open"] = ""  # hints, and the long proofs
    return article, listings, solutions


def take_folded(article: Tag) -> tuple[list[Tag], list[Tag]]:
    """The folded listings and the solutions; of each folded cell its line stays."""
    listings, solutions = [], []
    for details in article.select(".cell > details"):
        cell, line = details.parent, details.summary.get_text().strip().split("\n")[0]
        if "solution" in cell["class"]:
            title = line = re.search(r"Solution \w+\.\d+", cell.get_text())[0]
            target = title.lower().replace(" ", "-")
            cell.replace_with(folded(line, target))
            details.summary.decompose()
            details.unwrap()
            solutions += [heading(title, target), cell]
        elif "package-listing" in cell["class"]:
            target = f"listing-{cell['id']}"
            details.replace_with(folded(line, target))
            whole = parse_fragment('<div class="cell package-listing"></div>')
            whole.append(details.select_one(".cell_input"))
            title = re.split(r" · \d+ lines: ", line)[0]
            listings += [heading(title, target), whole]
        else:
            details.replace_with(folded(line))
    return listings, solutions


def folded(line: str, target: str = "") -> Tag:
    """The line of a folded cell; with a target, where the whole of it stands."""
    text = escape(line)
    if target:
        text = f'<a href="#{target}">{text}</a>, page\u00a0{page_of(target)}'  # in one line
    return parse_fragment(f'<p class="folded">{text}</p>')


def heading(title: str, target: str) -> Tag:
    return parse_fragment(f'<h3 id="{target}">{escape(title)}</h3>')


def parse_fragment(html: str) -> Tag:
    return BeautifulSoup(html, "html.parser").contents[0].extract()


def document(site: Path, only: list[str] | None = None) -> str:
    """The book as one page of HTML."""
    listed = [entry for entry in contents(site) if not only or entry[0] in only]
    pages = {name for name, *_ in listed}
    entries, sections, part = [], [], ""
    back: dict[str, list[str]] = {"Listings": [], "Solutions": []}
    for name, title, its_part, depth in listed:
        top = ""
        if its_part != part:
            entries.append(f'<li class="part">{escape(its_part)}</li>')
            top = f'<p class="part" role="heading" aria-level="1">{escape(its_part)}</p>'
        part = its_part
        line = f"{escape(title)} {page_of(name)}"
        entries.append(f'<li class="depth-{depth}"><a href="#{name}">{line}</a></li>')
        article, *taken = section_of(name, site, pages)
        if depth == 1:  # with its number; a page below a page is called by its heading
            article.h1.string = title
        for tag in article.select("h1, h2, h3, h4"):  # the bookmarks: below those of parts
            tag["aria-level"] = int(tag.name[1]) + depth - (not part)
        sections.append(f'<section id="{name}">{top}{article.decode_contents()}</section>')
        for found, tags in zip(back.values(), taken, strict=True):
            found += [f"<h2>{escape(title)}</h2>", *map(str, tags)] if tags else []
    for title, found in back.items():
        name = title.lower()
        entries.append(f'<li><a href="#{name}">{title} {page_of(name)}</a></li>')
        sections.append(f'<section id="{name}"><h1>{title}</h1>{"".join(found)}</section>')
    scripts = parse(site / "index.html").find_all("script")
    config = next(script for script in scripts if "MathJax =" in script.get_text())
    static = (site / "_static").as_uri()
    style = Path(__file__).with_name("pdf.css").read_text("utf-8")
    return f"""<!DOCTYPE html><html lang="en" data-theme="light"><head>
<meta charset="utf-8"><title>{TITLE}</title><link rel="stylesheet" href="{static}/book.css">
<style>{style}</style>{config}
<script defer src="{static}/mathjax/tex-svg-full.js"></script></head><body><main><article>
<section class="cover"><h1>{TITLE}</h1><p class="sub">The book and the package attnlib</p>
<ul class="contents-list">{"".join(entries)}</ul></section>{"".join(sections)}
</article></main></body></html>"""
