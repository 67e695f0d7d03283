"""What autodoc needs to show attnlib's docstrings well."""

import re
from typing import Any

from sphinx.application import Sphinx

from bookkit.grammar import LABEL
from bookkit.normalize import slug


def keep_returns_whole(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Keep napoleon from reading "Weights: each row …" as a type and a text."""
    for i, line in enumerate(lines[:-1]):
        if line.strip() == "Returns:" and ":" in lines[i + 1]:
            text = lines[i + 1].lstrip()
            lines[i + 1] = lines[i + 1].replace(text, f":{text}")  # the type is empty


def link_sources(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Make links of the place and the equations that a docstring names as its source."""

    def link(match: re.Match[str]) -> str:
        key = f"{int(match[1]):02}" if match[1] else match[2]
        return f":ref:`{match[0]} <cell-{key}-{slug(obj.__name__)}>`"

    for i, line in enumerate(lines):
        if line.startswith("Source:"):
            lines[i] = re.sub(r"\bchapter (\d+)|\bappendix ([A-Z])", link, line, count=1)
        lines[i] = re.sub(rf"(?<!`)\b{LABEL}", r":eq:`\g<0>`", lines[i])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above, the first before napoleon."""
    app.connect("autodoc-process-docstring", keep_returns_whole, priority=100)
    app.connect("autodoc-process-docstring", link_sources)
    return {"version": "1"}
