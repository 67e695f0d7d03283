"""What a page loads: MathJax from the site itself, and only the files that it needs."""

from __future__ import annotations

import importlib.util
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r'<div class="highlight"><pre>.*?</pre>', re.DOTALL)
PLAIN = re.compile(r'<span class="(?:n|o|p|w)">([^<]*)</span>')
SCRIPTS = {  # of the installed packages; the book's own, in book/_static, are all loaded
    "_static/documentation_options.js",
    "_static/doctools.js",
    "_static/sphinx_highlight.js",
    "_static/clipboard.min.js",
    "_static/copybutton.js",
    "_static/mathjax/tex-svg-full.js",
}


def load_only_needed(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Keep pages light: the book's own files, SCRIPTS, and no markup without effect."""

    def needed(file: Any) -> bool:
        name = str(getattr(file, "filename", file) or "")
        if not name:  # inline: the configuration of MathJax
            return "MathJax" in file.attributes.get("body", "")
        return name in SCRIPTS or Path(app.srcdir, name).is_file()

    for files in ("css_files", "script_files"):
        context[files] = [file for file in context[files] if needed(file)]
    if "body" in context:  # names and punctuation have no color of their own
        thinner = partial(PLAIN.sub, r"\1")
        context["body"] = CODE.sub(lambda code: thinner(code[0]), context["body"])
    context["root_title"] = app.env.titles[app.config.root_doc].astext()


def copy_mathjax(app: Sphinx) -> None:
    """Put MathJax, one file, into the site."""
    package = importlib.util.find_spec("sphinx-mathjax-offline")
    if package is None or not package.submodule_search_locations:
        raise ImportError("sphinx-mathjax-offline is missing: it holds the site's MathJax")
    source = Path(package.submodule_search_locations[0], "static", "mathjax")
    target = Path(app.outdir, "_static", "mathjax")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source / "tex-svg-full.js", target)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("builder-inited", copy_mathjax)
    app.connect("html-page-context", load_only_needed, priority=900)
    return {"version": "1"}
