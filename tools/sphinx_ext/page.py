"""What the pages tell machines: assistive technology, previews of links, search engines.

With the site's address known (tools/address.py), every page names its own address and the
picture that a link to it shows, 404.html works from any depth, and there is a sitemap.
Plots weigh a third of what they do in the notebooks.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx

from address import address

LONGEST = 200  # characters of a description
SIGNATURE = re.compile(r'(<span class="sig-paren">\(</span>)\s*<dl>(.*?)</dl>', re.DOTALL)
# Roles that Sphinx writes and that ARIA does not have, or not there.
ROLES = re.compile(r' role="(?:doc-biblioentry|list|heading)"|role="list" ')


def accessible(html: str) -> str:
    """Sphinx's HTML without its invalid roles, and without lists that define nothing."""

    def lines(match: re.Match[str]) -> str:
        inside = match[2].replace("<dd>", '<span class="sig-line">')
        return match[1] + inside.replace("</dd>", "</span>")

    return ROLES.sub("", SIGNATURE.sub(lines, html))


def description(doctree: nodes.document | None) -> str:
    """The first paragraph of a page, cut at the end of a sentence or of a word."""
    section = doctree and next(iter(doctree.findall(nodes.section)), None)
    paragraphs = [p for p in section or [] if isinstance(p, nodes.paragraph) and p.astext()]
    text = " ".join(paragraphs[0].astext().split()) if paragraphs else ""
    if len(text) <= LONGEST:
        return text
    start = text[:LONGEST]
    sentence = start.rfind(". ") + 1
    return start[:sentence] if sentence > 60 else start[: start.rfind(" ")] + " …"


def tell(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give the templates what they need."""
    published = context["published"] = app.config.published
    toctree = context["toctree"]
    home = Path(app.env.doc2path(app.config.root_doc)).read_text(encoding="utf-8")
    context["toctree"] = lambda **options: with_core(
        accessible(toctree(**options)), home, page
    )
    context["body"] = with_jumps(accessible(context.get("body", "")), context)
    context["description"] = description(doctree)
    if published:
        context["page_address"] = page_address(app, page)
        context["card_address"] = f"{published.site}_static/card.png"
        context["site_path"] = urlsplit(published.site).path


def with_jumps(body: str, context: dict[str, Any]) -> str:
    """The page, with its sections folded under the title, or the letters of a glossary."""
    if terms := re.findall(r'<dt id="(term-(\w)[^"]*)"', body):
        first = {letter.upper(): term for term, letter in reversed(terms)}
        links = [f'<a href="#{first[letter]}">{letter}</a>' for letter in sorted(first)]
        jumps = f'<nav class="letters" aria-label="Letters">{" ".join(links)}</nav>'
    elif context.get("display_toc"):
        jumps = f"<summary>On this page</summary>{context['toc']}"
        jumps = f'<details class="page-jumps">{jumps}</details>'
    else:
        return body
    return body.replace("</h1>", f"</h1>{jumps}", 1)


def with_core(contents: str, home: str, page: str) -> str:
    """The contents with the chapters marked that the home page lists as the core."""
    line = re.search(r"^- \*\*The core\*\*.*$", home, re.MULTILINE)
    for name in re.findall(r"\((\w+)\.ipynb\)", line[0] if line else ""):
        link = ' href="#">' if name == page else f' href="{name}.html">'
        contents = contents.replace(f'"{link}', f' core"{link}', 1)
    return contents


def page_address(app: Sphinx, page: str) -> str:
    at_root = page == app.config.root_doc
    return app.config.published.site + ("" if at_root else f"{page}.html")


def finish(app: Sphinx, error: Exception | None) -> None:
    """The first page is also index.html; with the address known, the sitemap."""
    if error or app.builder.name != "html":
        return
    out = Path(app.outdir)
    shutil.copyfile(out / f"{app.config.root_doc}.html", out / "index.html")
    sitemap = out / "sitemap.xml"
    sitemap.unlink(missing_ok=True)
    if app.config.published:
        pages = [page_address(app, page) for page in sorted(app.env.found_docs)]
        places = "".join(f"<url><loc>{escape(page)}</loc></url>\n" for page in pages)
        namespace = "http://www.sitemaps.org/schemas/sitemap/0.9"
        sitemap.write_text(
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<urlset xmlns="{namespace}">\n{places}</urlset>\n',
            encoding="utf-8",
        )


def number_equations(app: Sphinx, error: Exception | None) -> None:
    """Where each number of an equation stands, for the search."""
    if error or app.builder.name != "html":
        return
    numbers = {
        ".".join(map(str, number)): f"{page}.html#{anchor}"
        for page, kinds in app.env.toc_fignumbers.items()
        for anchor, number in kinds.get("displaymath", {}).items()
    }
    text = f"const EQUATIONS = {json.dumps(numbers, indent=0)};\n"
    Path(app.outdir, "_static", "equations.js").write_text(text, encoding="utf-8")


def lighten_plots(app: Sphinx, error: Exception | None) -> None:
    """Store the plots of the site with 256 colors, which for lines and type are plenty."""
    for path in [] if error else Path(app.outdir, "_images").glob("*.png"):
        with Image.open(path) as picture:
            if picture.mode != "P":
                dpi = picture.info.get("dpi", (150, 150))
                fewer = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
                fewer.save(path, optimize=True, dpi=dpi)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above, after those of book.py."""
    # With another address, all pages are written anew.
    app.add_config_value("published", lambda config: address(), "html")
    app.connect("html-page-context", tell, priority=910)
    app.connect("build-finished", finish, priority=910)
    app.connect("build-finished", number_equations)
    app.connect("build-finished", lighten_plots)
    return {"version": "1"}
