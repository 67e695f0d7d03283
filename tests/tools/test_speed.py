"""The tables of speed, put into the pages that have their marks."""

import pytest

from bookkit.chapters import BookError, read_chapters
from bookkit.speed import pages
from bookkit.speed_tables import hopper
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


KERNEL = {
    **{
        "capability": 90,
        "dim": 128,
        "warps": 4,
        "descriptors": False,
        "specialized": False,
    },
    **{"persistent": False, "threads": 128, "registers": 255, "spill_stores": 8},
    **{"spill_loads": 4, "shared": 2048, "async": 32, "bulk": 0, "barrier_wait": 1},
    **{"barrier": 12, "register_shares": []},
}


def test_what_is_compiled_for_hopper():
    """What is refused, and what changes nothing, say so."""
    roles = {"specialized": True}
    given = [
        KERNEL,
        KERNEL | roles,
        {**KERNEL, **roles, "threads": 96, "registers": 80, "register_shares": [8, 99]},
        {**KERNEL, **roles, "refused": "Words"},
        KERNEL | {"persistent": True},
        KERNEL | {"dim": 64},
    ]
    lines = hopper({"kernels": given}).splitlines()
    assert lines[2:] == [
        "| 9.0 | 4 alike | addresses | 128 | 255 | 12 | 2 | 32 | 0 | 1 | 12 |",
        "| 9.0 | 4 with roles | addresses | as alike |  |  |  |  |  |  |  |",
        "| 9.0 | 4 with roles | addresses | 96 | 80 (8 to 99) | 12 | 2 | 32 | 0 | 1 | 12 |",
        "| 9.0 | 4 with roles | addresses | refused |  |  |  |  |  |  |  |",
    ]
