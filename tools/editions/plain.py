"""A chapter without Sphinx: what its roles and labels stand for, as the site has it.

Numbers, places and cited works are those that `sphinx_ext/references.py` wrote when it was
built.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from bookkit.chapters import BookError, Chapter
from bookkit.grammar import LABEL, with_numbers

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


IN_WORDS = "<details>\n<summary>The figure in words</summary>\n\n{}\n\n</details>"


class Plain:
    """What turns the Markdown of a chapter into Markdown that any notebook shows."""

    def __init__(self, built: Path, site: str | None) -> None:
        stored = built / "_build" / "references.json"
        if not stored.is_file():
            raise BookError("the book is not built: run python tools build_book")
        found = json.loads(stored.read_text(encoding="utf-8"))
        self.site, self.works = site, found["works"]
        self.places = {tuple(place["for"]): place for place in found["places"]}

    def link(self, text: str, target: str) -> str:
        """A link to a page of the site; where its address is unknown, the text alone."""
        return f"[{text}]({self.site}{target})" if self.site else text

    def markdown(self, source: str, page: str, where: str) -> str:
        """Markdown without Sphinx; what can't be turned is a BookError."""

        def relative(match: re.Match[str]) -> str:
            path, mark, anchor = match[2].partition("#")
            path = re.sub(r"\.(md|ipynb)$", "", path) or page
            return self.link(match[1], f"{path}.html{mark}{anchor}")

        try:
            text = with_numbers(source, lambda label: self.number(label).strip("()"))
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

    def captioned(
        self, made: NotebookNode, chapter: Chapter, cell: NotebookNode
    ) -> list[NotebookNode]:
        """What a code cell became, with the caption of its figure if it shows one."""
        shown = cell.metadata.get("mystnb", {})
        if "figure" not in shown:
            return [made]
        name, caption = shown["figure"]["name"], shown["figure"]["caption"]
        number = self.places["numref", name]["text"]
        caption = self.markdown(caption, chapter.name, chapter.where(cell))
        text = f"**{number}.** {caption}\n\n{IN_WORDS.format(shown['image']['alt'])}"
        return [made, new_markdown_cell(text, id=name)]

    def number(self, label: str) -> str:
        return self.places["eq", label]["text"]

    def role(self, match: re.Match[str]) -> str:
        kind, said, target = match.groups()
        if kind.startswith("cite:"):
            return self.cite(kind, target)
        place = self.places[kind, target.lower() if kind == "term" else target]
        return self.link(said or (target if kind == "term" else place["text"]), place["at"])

    def cite(self, kind: str, keys: str) -> str:
        """`Vaswani *et al.* [2017]` or, in parentheses, `[Vaswani *et al.*, 2017]`."""
        made = []
        for key in keys.split(","):
            work = self.works[key.strip()]
            who, year = work["authors"], work["year"]
            if kind == "cite:t":
                made.append(f"{who} [{self.link(year, work['at'])}]")
            else:
                made.append(self.link(f"{who}, {year}", work["at"]))
        return ", ".join(made) if kind == "cite:t" else f"[{', '.join(sorted(made))}]"

    def references(self, sources: str) -> list[str]:
        """The entries of the bibliography that the sources cite."""
        roles = re.findall(r"\{cite:[tp]\}`([^`]+)`", sources)
        keys = {key.strip() for names in roles for key in names.split(",")}
        return [work["entry"] for key, work in self.works.items() if key in keys]


def box(match: re.Match[str]) -> str:
    """An admonition as a quotation with its title."""
    kind, title, body = match[2], match[3], match[4]
    text = f"**{title if kind == 'admonition' else kind.capitalize()}.**\n\n{body.strip()}"
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())
