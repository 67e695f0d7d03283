"""Folds imports, types and the sections of docstrings in a listing that stands open.

The folded lines stand in a ``<details>`` within the code, which needs no script; its
``<summary>`` ends as a docstring does, or begins as the function does. Copying leaves the
summary out (``copybutton_exclude`` in ``_config.yml``).
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx

from bookkit.folds import Fold, folds_of

# The caption of a listing that stands open, and the code below it; in its HTML, as Pygments
# writes it, no tag goes from one line to the next.
OPEN = re.compile(r'(<p class="package-caption">.*?<pre>)(.*?)(?=</pre>)', re.DOTALL)


def folded(html: str) -> str:
    """The code of a listing with its folds."""
    lines = html.split("\n")
    for fold in reversed(folds_of(unescape(re.sub(r"<[^>]+>", "", html)))):
        inside = "\n".join(lines[fold.start : fold.end])
        details = f'<details class="docs">{summary(fold)}{inside}\n</details>'
        lines[fold.start : fold.end + 1] = [
            details + "".join(lines[fold.end : fold.end + 1])
        ]
    return "\n".join(lines)


def summary(fold: Fold) -> str:
    """The line in place of a fold: what is in it, and how it ends, while it is closed."""
    said = f'<span class="what">{escape(fold.line)}</span>'
    if fold.code:
        code = highlight(fold.code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
        return f'<summary><span class="short">{code.rstrip()}  </span>{said}</summary>'
    said = " " * fold.indent + said
    ends = f' <span class="sd">{escape(fold.ends)}</span>' if fold.ends else ""
    return f"<summary>{said}{ends}</summary>"


def fold_listings(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Fold imports, types and docstrings of a page's open listings."""
    body = context.get("body", "")
    context["body"] = OPEN.sub(lambda match: match[1] + folded(match[2]), body)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("html-page-context", fold_listings)
    return {"version": "1"}
