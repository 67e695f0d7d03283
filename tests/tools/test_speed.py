"""The tables of speed, put into the pages that have their marks."""

import pytest

from bookkit.chapters import BookError, read_chapters
from bookkit.speed import pages
from tiny_book import write

TABLES = {"speed": "| new |", "devices": "| many |", "hopper": "| compiled |"}
DEVICES = "<!-- devices -->\n\n| many |\n<!-- /devices -->\n"
MARKED = "Before.\n\n<!-- hopper -->\nold\n<!-- /hopper -->\n\nAfter."


def engineers(root, text="<!-- speed -->\nold\n<!-- /speed -->\n" + DEVICES):
    path = root / "book" / "engineers.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_marked_places_are_filled(root):
    """In the page for engineers, and in a text cell; other chapters are not touched."""
    page, chapter = engineers(root), root / "book" / "03_third.ipynb"
    write(chapter, "# Third", MARKED)
    found = pages(root, TABLES)
    assert set(found) == {page, chapter}
    assert found[page] == "<!-- speed -->\n\n| new |\n<!-- /speed -->\n" + DEVICES
    chapter.write_text(found[chapter], encoding="utf-8")
    cells = [cell.source for cell in read_chapters(root)[-1].text_cells]
    assert cells[-1] == MARKED.replace("old", "\n| compiled |")
    assert pages(root, TABLES)[chapter] == found[chapter]  # twice gives no diff


def test_engineers_must_have_the_marks(root):
    engineers(root, "no table")
    with pytest.raises(BookError, match="expected one <!-- speed -->"):
        pages(root, TABLES)
    engineers(root, "<!-- speed -->\n<!-- /speed -->\n")
    with pytest.raises(BookError, match="expected one <!-- devices -->"):
        pages(root, TABLES)
