"""Where everything stands that a chapter refers to, as a file for the other editions.

`_build/references.json` has, for each role and target of MyST, the text and the place on
the site, and for each cited work what a citation and the list of works say of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pybtex.backends.markdown import Backend
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

Place = dict[str, Any]


def places(env: BuildEnvironment) -> Iterator[Place]:
    """Equations, figures, labels, terms and pages: role and target, text, place."""
    for page, kinds in env.toc_fignumbers.items():
        for kind, numbers in kinds.items():
            form = env.config.numfig_format.get(kind, "(%s)")  # the last: an equation
            role = "numref" if kind in env.config.numfig_format else "eq"
            for anchor, number in numbers.items():
                text = form % ".".join(map(str, number))
                yield place(role, anchor.removeprefix("equation-"), text, page, anchor)
    std = env.domaindata["std"]
    for label, (page, anchor, title) in std["labels"].items():
        yield place("ref", label, title, page, anchor)
    for term, (page, anchor) in std["terms"].items():
        yield place("term", term, term, page, anchor)
    for page, title in env.titles.items():
        yield place("doc", page, title.astext(), page, "")


def place(role: str, target: str, text: str, page: str, anchor: str) -> Place:
    at = f"{page}.html#{anchor}" if anchor else f"{page}.html"
    return {"for": [role, target], "text": str(text), "at": at}  # titles may be lazy


def works(env: BuildEnvironment) -> dict[str, dict[str, str]]:
    """The cited works by their keys, in the order of the bibliography."""
    return {
        citation.key: {
            "at": f"bibliography.html#{citation.citation_id}",
            "authors": authors(citation.entry.persons["author"]),
            "year": citation.entry.fields["year"],
            "entry": " ".join(citation.formatted_entry.text.render(Backend()).split()),
        }
        for citation in env.domaindata["cite"]["citations"]
    }


def authors(persons: list[Any]) -> str:
    # rich names: without the braces that keep a company's name in one piece
    names = [person.rich_prelast_names + person.rich_last_names for person in persons]
    last = [" ".join(map(str, parts)) for parts in names]
    return f"{last[0]} *et al.*" if len(last) > 2 else " and ".join(last)


def write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        found = {"places": list(places(app.env)), "works": works(app.env)}
        text = json.dumps(found, indent=1, ensure_ascii=False)
        Path(app.outdir).with_name("references.json").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write)
    return {"version": "1"}
