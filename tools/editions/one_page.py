"""The whole book as one page of HTML, for paper.

Links between pages become links inside the one page, what is folded away is open, and the
solutions stand at the end.
"""

from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag

from bookkit.grammar import SOLUTION

TITLE = "Attention, derived"


def parse(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text("utf-8"), "html.parser")


def contents(soup: BeautifulSoup) -> list[tuple[str, str, str]]:
    """(page, title, part) of every page, in order, as the site's contents list them."""
    found, part = [], ""
    for tag in soup.select("nav.contents .caption, nav.contents .toctree-l1 > a"):
        if tag.name == "p":
            part = tag.get_text()
        else:
            name = tag["href"].removesuffix(".html").removeprefix("#") or "intro"
            found.append((name, tag.get_text(), part))
    return found


def place(name: str, anchor: str = "") -> str:
    """The id, in the one document, of a page or of a place on it."""
    return f"{name}--{anchor}" if anchor else name


def page_of(target: str) -> str:
    return f'<span class="page-of" data-target="{target}">000</span>'


def section_of(name: str, site: Path, pages: set[str]) -> tuple[Tag, list[Tag]]:
    """A page's text for the one document, and the solutions taken out of it."""
    article = parse(site / f"{name}.html").article
    for tag in article.select("script, nav, .headerlink, .tag_hide-input > details"):
        tag.decompose()
    for details in article.find_all("details"):
        details["open"] = ""
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
    return article, take_solutions(article)


def take_solutions(article: Tag) -> list[Tag]:
    """The solutions, each replaced by a line that says where it stands."""
    taken = []
    for cell in article.select(".cell.solution"):
        number = SOLUTION.search(cell.get_text())[1]
        target = f"solution-{number}"
        line = f'<p class="solution-link"><a href="#{target}">Solution {number}</a>, page '
        cell.replace_with(parse_fragment(f"{line}{page_of(target)}</p>"))
        cell.summary.decompose()
        cell.details.unwrap()
        heading = f'<h3 id="{target}">Solution {number}</h3>'
        taken += [parse_fragment(heading), cell]
    return taken


def parse_fragment(html: str) -> Tag:
    return BeautifulSoup(html, "html.parser").contents[0].extract()


def document(site: Path, only: list[str] | None = None) -> str:
    """The book as one page of HTML."""
    index = parse(site / "index.html")
    listed = [entry for entry in contents(index) if not only or entry[0] in only]
    pages = {name for name, _, _ in listed}
    entries, sections, solutions, part = [], [], [], ""
    for name, title, its_part in listed:
        if its_part != part:
            entries.append(f'<li class="part">{escape(its_part)}</li>')
        part = its_part
        line = f"{escape(title)} {page_of(name)}"
        entries.append(f'<li><a href="#{name}">{line}</a></li>')
        article, taken = section_of(name, site, pages)
        article.h1.string = title
        sections.append(f'<section id="{name}">{article.decode_contents()}</section>')
        if taken:
            solutions += [f"<h2>{escape(title)}</h2>", *map(str, taken)]
    entries.append(f'<li><a href="#solutions">Solutions {page_of("solutions")}</a></li>')
    config = next(s for s in index.find_all("script") if "MathJax =" in s.get_text())
    static = (site / "_static").as_uri()
    style = Path(__file__).with_name("pdf.css").read_text("utf-8")
    return f"""<!DOCTYPE html><html lang="en" data-theme="light"><head>
<meta charset="utf-8"><title>{TITLE}</title><link rel="stylesheet" href="{static}/book.css">
<style>{style}</style>{config}
<script defer src="{static}/mathjax/tex-svg-full.js"></script></head><body><main><article>
<section class="cover"><h1>{TITLE}</h1><p class="sub">The book and the package attnlib</p>
<ul class="contents-list">{"".join(entries)}</ul></section>{"".join(sections)}
<section id="solutions"><h1>Solutions</h1>{"".join(solutions)}</section>
</article></main></body></html>"""
