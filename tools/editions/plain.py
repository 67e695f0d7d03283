"""A chapter without Sphinx: what its roles and labels stand for, as the site has it.

The numbers are those of the environment that Sphinx stores when it builds the site.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

from pybtex.backends.markdown import Backend

from bookkit.chapters import BookError
from bookkit.grammar import EQUATION, LABEL

COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
ROLE = re.compile(r"\{([a-z]+(?::[a-z]+)?)\}`(?:([^`<]*?)\s*<)?([^`<>]+)>?`")
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)\s]*)\)")  # to a place in the book
BOXES = "admonition|attention|caution|hint|important|note|tip|warning"
BOX = re.compile(rf"^(:{{3,}}|`{{3,}})\{{({BOXES})\}} *(.*)\n([\s\S]*?)^\1$", re.MULTILINE)
LEFT = re.compile(  # what is not turned: directives, targets, comments, notes, pictures
    r"^[ \t]*(?::::|```\{|~~~\{|\([\w-]+\)=|% ).*"
    r"|\{[a-z:-]+\}`|\$\$[ \t]*\(|<!--|\[\^|!\[",
    re.MULTILINE,
)


class Plain:
    """What turns the Markdown of a chapter into Markdown that any notebook shows."""

    def __init__(self, built: Path, site: str | None) -> None:
        stored = built / "_build" / ".doctrees" / "environment.pickle"
        if not stored.is_file():
            raise BookError("the book is not built: run python tools build_book")
        env = pickle.loads(stored.read_bytes())
        self.site = site
        self.places = places(env)
        cited = env.domaindata["cite"]["citations"]
        self.citations = {citation.key: citation for citation in cited}

    def link(self, text: str, target: str) -> str:
        """A link to a page of the site; where its address is unknown, the text alone."""
        return f"[{text}]({self.site}{target})" if self.site else text

    def markdown(self, source: str, page: str, where: str) -> str:
        """Markdown without Sphinx; what can't be turned is a BookError."""

        def relative(match: re.Match[str]) -> str:
            path, mark, anchor = match[2].partition("#")
            path = re.sub(r"\.(md|ipynb)$", "", path) or page
            return self.link(match[1], f"{path}.html{mark}{anchor}")

        def tag(match: re.Match[str]) -> str:
            if not match[2]:
                return match[0]
            number = self.number(match[2]).strip("()")
            return f"$${match[1].rstrip()} \\tag{{{number}}}\n$$"

        try:
            text = EQUATION.sub(tag, source)
            text = COMMENT.sub("", text)
            text = BOX.sub(box, text)
            text = LINK.sub(relative, text)
            text = ROLE.sub(self.role, text).strip()
        except KeyError as error:
            raise BookError(f"{where}: the site has no {error}; build it again") from error
        if left := LEFT.search(text):
            raise BookError(f"{where}: editions/plain.py can't turn {left[0]!r} into text")
        return text

    def code(self, source: str) -> str:
        """Code whose comments and docstrings name equations by number."""
        return re.sub(rf"\b{LABEL}", lambda match: self.number(match[0]), source)

    def number(self, label: str) -> str:
        return self.places["eq", label][0]

    def role(self, match: re.Match[str]) -> str:
        kind, said, target = match.groups()
        if kind.startswith("cite:"):
            return self.cite(kind, target)
        text, place = self.places[kind, target.lower() if kind == "term" else target]
        return self.link(said or (target if kind == "term" else text), place)

    def cite(self, kind: str, keys: str) -> str:
        """`Vaswani *et al.* [2017]` or, in parentheses, `[Vaswani *et al.*, 2017]`."""
        made = []
        for key in keys.split(","):
            citation = self.citations[key.strip()]
            place = f"bibliography.html#{citation.citation_id}"
            who = authors(citation.entry.persons["author"])
            year = citation.entry.fields["year"]
            if kind == "cite:t":
                made.append(f"{who} [{self.link(year, place)}]")
            else:
                made.append(self.link(f"{who}, {year}", place))
        return ", ".join(made) if kind == "cite:t" else f"[{', '.join(sorted(made))}]"

    def references(self, sources: str) -> list[str]:
        """The entries of the bibliography that the sources cite."""
        roles = re.findall(r"\{cite:[tp]\}`([^`]+)`", sources)
        keys = {key.strip() for names in roles for key in names.split(",")}
        cited = [self.citations[key] for key in self.citations if key in keys]
        texts = [citation.formatted_entry.text.render(Backend()) for citation in cited]
        return [" ".join(text.split()) for text in texts]


def places(env: Any) -> dict[tuple[str, str], tuple[str, str]]:
    """For a role and its target, the text and the place on the site."""
    found = {}
    for page, kinds in env.toc_fignumbers.items():
        for kind, numbers in kinds.items():
            form = env.config.numfig_format.get(kind, "(%s)")  # the last: an equation
            role = "numref" if kind in env.config.numfig_format else "eq"
            for anchor, number in numbers.items():
                text = form % ".".join(map(str, number))
                key = anchor.removeprefix("equation-")
                found[role, key] = text, f"{page}.html#{anchor}"
    std = env.domaindata["std"]
    for label, (page, anchor, title) in std["labels"].items():
        found["ref", label] = title, f"{page}.html#{anchor}"
    for term, (page, anchor) in std["terms"].items():
        found["term", term] = term, f"{page}.html#{anchor}"
    for page, title in env.titles.items():
        found["doc", page] = title.astext(), f"{page}.html"
    return found


def authors(persons: list[Any]) -> str:
    # rich names: without the braces that keep a company's name in one piece
    names = [person.rich_prelast_names + person.rich_last_names for person in persons]
    last = [" ".join(map(str, parts)) for parts in names]
    return f"{last[0]} *et al.*" if len(last) > 2 else " and ".join(last)


def box(match: re.Match[str]) -> str:
    """An admonition as a quotation with its title."""
    kind, title, body = match[2], match[3], match[4]
    text = f"**{title if kind == 'admonition' else kind.capitalize()}.**\n\n{body.strip()}"
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())
