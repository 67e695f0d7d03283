"""What autodoc needs to show attnlib's docstrings well, and the tables of all names."""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bookkit.grammar import LABEL
from bookkit.normalize import slug

ENTRY = re.compile(
    r"^(?:Derived|Explained) in \[\]\((\w+)\.ipynb\)|^\.\. auto(\w+):: ([\w.]+)",
    re.MULTILINE,
)
TABLE = """
.. list-table::
   :header-rows: 1
   :class: names

   * - Name
     - What it is
     - Derived in
"""
ROW = """
   * - :py:{kind}:`{short} <{name}>`
     - {sentence}
     - :doc:`{place} <{chapter}>`
"""


class Names(SphinxDirective):
    """``.. names:: page``: a row for each name documented there."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path, text, chapter = self.env.doc2path(self.arguments[0]), TABLE, ""
        self.env.note_dependency(path)
        for match in ENTRY.finditer(Path(path).read_text(encoding="utf-8")):
            if match[1]:
                chapter = match[1]
                continue
            thing = resolve_name(match[3])
            self.env.note_dependency(inspect.getfile(thing))
            start = " ".join(inspect.getdoc(thing).partition("\n\n")[0].split())
            key = chapter.partition("_")[0].lstrip("0")
            text += ROW.format(
                kind={"module": "mod", "function": "func"}.get(match[2], match[2]),
                short=match[3].removeprefix("attnlib."),
                name=match[3],
                sentence=re.match(r".*?[.:](?= |$)|.*", start)[0].rstrip(".:"),
                place=f"chapter {key}" if key.isdigit() else f"appendix {key}",
                chapter=chapter,
            )
        return self.parse_text_to_nodes(text)


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
    """Connect what stands above, the first function before napoleon."""
    app.add_directive("names", Names)
    app.connect("autodoc-process-docstring", keep_returns_whole, priority=100)
    app.connect("autodoc-process-docstring", link_sources)
    return {"version": "1"}
