"""Say what a contributor still owes for chapters, a line each; nothing if nothing.

A mistake of each equation and exercise, kept in book/faults; a line of book/notation.md for
each symbol; no term before its chapter in book/glossary.md; what the workbook needs; and
how many screens of the page are left. Chapters are called by number or name; `changed` are
those that differ from the last commit. The tests hold all this, here it is only said.
"""

from collections.abc import Iterator
from pathlib import Path

from bookkit.chapters import Chapter, parser, read_chapters, run
from bookkit.execute import select
from bookkit.mistakes import read_faults, wanted
from bookkit.notation import (
    formulas_of,
    read_glossary,
    read_notation,
    said_early,
    unexplained,
)
from build_book import is_current
from editions import workbook_mistakes
from site_browser import SCREENS, find_chromium, launched, screens


def mistakes(root: Path, chapter: Chapter) -> Iterator[str]:
    kept = {(fault.subject, fault.kind) for fault in read_faults(root, chapter)}
    file = f"book/faults/{chapter.name}.toml"
    for subject, kind in sorted(wanted(chapter) - kept):
        what = "mistake" if kind == "equation" else kind
        yield f"{file}: keep a {what} for {subject}"
    for subject, _ in sorted(kept - wanted(chapter)):
        yield f"{file}: there is no {subject} any more"


def letters(root: Path, chapter: Chapter) -> Iterator[str]:
    lines = list(read_notation((root / "book" / "notation.md").read_text("utf-8")))
    found = unexplained(formulas_of(chapter), chapter.number, lines)
    for (letter, below), its in found.items():
        symbol = f"${letter}_{{{below}}}$" if below else f"${letter}$"
        what = f"{len(its)} lines explain" if its else "no line explains"
        yield f"book/notation.md: {what} {symbol} in {chapter.called}"


def words(root: Path, chapter: Chapter, chapters: list[Chapter]) -> Iterator[str]:
    glossary = read_glossary((root / "book" / "glossary.md").read_text("utf-8"))
    for where, term, sentence in said_early(chapters, glossary):
        if where is chapter:
            yield f"{chapter.file}: '{term}' comes before its chapter: {sentence.strip()}"


def room(root: Path, chapters: list[Chapter]) -> Iterator[str]:
    """How many screens of each page are left, if the site is that of now."""
    site = root / "_build" / "html"
    if not (is_current(site / ".sources", root) and find_chromium()):
        yield "build the book to see how many screens are left (in Chromium)"
        return
    with launched() as browser:
        page = browser.new_page()
        for chapter in chapters:
            page.goto((site / f"{chapter.name}.html").as_uri())
            page.evaluate("() => MathJax.startup.promise")
            left = SCREENS - screens(page)
            yield f"{chapter.file}: {left:.1f} of {SCREENS} screens are left"


def owed(root: Path, chosen: list[Chapter], chapters: list[Chapter]) -> Iterator[str]:
    for chapter in chosen:
        yield from mistakes(root, chapter)
        yield from letters(root, chapter)
        yield from words(root, chapter, chapters)
        yield from workbook_mistakes.owed(root, chapter)
    if chosen:
        yield from room(root, chosen)


def main() -> int:
    options = parser(__doc__)
    about = "01, or changed (all)"
    options.add_argument("chapters", nargs="*", metavar="chapter", help=about)
    args = options.parse_args()
    chapters = read_chapters(args.root)
    chosen = select(chapters, args.chapters, args.root)
    if lines := list(owed(args.root, chosen, chapters)):
        print("\nStill owed:", *lines, sep="\n  ")
    return 0


if __name__ == "__main__":
    run(main)
