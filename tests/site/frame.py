"""The pages of the site, and what the looks of one depend on."""

import re
from pathlib import Path

import yaml

from bookkit.chapters import read_chapters
from bookkit.grammar import CHAPTER

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
# What stands around every page; of the pages, where each stands.
FRAME = ("book/_static/*.css", "book/_static/*.js", "book/_templates/*", "_config.yml")
FRAME += ("_toc.yml", "book/references.bib", "tools/sphinx_ext/*.py")
FRAME += ("tools/site_browser.py",)


def pages_of_toc():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    entries = [entry for part in toc["parts"] for entry in part["chapters"]]
    nested = [[entry, *entry.get("sections", [])] for entry in entries]
    return [toc["root"], *(entry["file"] for group in nested for entry in group)]


PAGES = pages_of_toc()
CHAPTERS = [page for page in PAGES if CHAPTER.match(page)]


BY_NAME = {chapter.name: chapter for chapter in read_chapters(ROOT)}


def code_cells(name):
    """(id, source, tags) of every code cell of a chapter."""
    chapter = BY_NAME[name]
    return [
        (f"cell-{chapter.key}-{cell.id}", cell.source, cell.metadata.get("tags", []))
        for cell in chapter.code_cells
    ]


def source_of(page: str, **_: str) -> str:
    """What a page is made from: its text, the pictures and figures that this names.

    A page of the package shows docstrings.
    """
    found = [path for path in BOOK.glob(f"{page}.*") if path.suffix in (".md", ".ipynb")]
    names = {name for path in found for name in re.findall(r"_static/[\w.-]+", text(path))}
    found += [BOOK / name for name in names if (BOOK / name).is_file()]
    if page.startswith("api"):
        found += (ROOT / "attnlib").rglob("*.py")
    return "\n".join(map(text, sorted(found)))


def text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")
