"""One sitting: what comes before *What we built* is one path, and stands by itself.

What is behind the exercises, in *Further*, nobody needs who has not been told so: names,
which is shown by running a chapter from its top, numbered equations, and terms.
"""

import re
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from bookkit.chapters import read_chapters

ROOT = Path(__file__).resolve().parents[2]
WORDS = 2000  # of a path, half an hour
CHAPTERS = {c.key: c for c in read_chapters(ROOT) if not c.is_appendix}
each_chapter = pytest.mark.parametrize("key", CHAPTERS)

BUILT, FURTHER = "\n## What we built", "\n## Further"
# What is not read in passing: folded answers, comments, formulas on their own, tables.
ASIDE = re.compile(
    r"<details>.*?</details>|<!--.*?-->|^\$\$.*?\$\$.*?$|^[:|].*?$",
    re.DOTALL | re.MULTILINE,
)
INLINE = re.compile(r"\$[^$]+\$|\{[a-z:]+\}`[^`]*`")  # each reads as one word
EMPHASIS = re.compile(r"(?<![*\w])\*([^*\n]+)\*(?![*\w])")


def parts_of(prose):
    """The path, what comes between, and what is behind the exercises."""
    path, built, rest = prose.partition(BUILT)
    between, further, behind = rest.partition(FURTHER)
    return path, built + between, further + behind


def count_words(text):
    return len(re.findall(r"[\w'’-]*\w", INLINE.sub("x", ASIDE.sub("", text))))


def terms():
    text = (ROOT / "book" / "glossary.md").read_text(encoding="utf-8")
    return re.findall(r"^(?! |```|#)(\S.*)$", text, re.MULTILINE)


def labels_in(text):
    return set(re.findall(r"^\$\$ \((eq-[\w-]+)\)", text, re.MULTILINE))


def terms_in(text, known):
    """The terms that are introduced here, in italics."""
    marked = {found.lower() for found in EMPHASIS.findall(text)}
    return {term for term in known if term.lower() in marked}


def silent(text, labels, known):
    """What a path takes from behind without a word of it, in the paragraph that does."""
    found = set()
    for paragraph in text.split("\n\n"):
        if "urther" in paragraph:
            continue
        found |= {label for label in labels if f"{{eq}}`{label}`" in paragraph}
        words = INLINE.sub("x", ASIDE.sub("", paragraph))
        found |= {t for t in known if re.search(rf"\b{re.escape(t)}s?\b", words, re.I)}
    return found


def needed(chapters, key):
    """What the path of a chapter takes from behind any exercises, its own or others'."""
    known, labels, told, behind = terms(), set(), set(), set()
    for chapter in chapters.values():
        labels |= labels_in(parts_of(chapter)[2])
    for name, chapter in chapters.items():  # in their order: a term may be told again
        path, _, further = parts_of(chapter)
        told |= terms_in(path, known)
        behind = (behind | terms_in(further, known)) - told
        if name == key:
            return silent(path, labels, behind)
    raise KeyError(key)


@each_chapter
def test_a_chapter_has_its_order(key):
    headings = re.findall(r"^## (.+)$", CHAPTERS[key].prose, re.MULTILINE)
    assert headings[-3:] == ["What we built", "Exercises", "Further"]


@each_chapter
def test_a_path_has_few_words(key):
    assert count_words(parts_of(CHAPTERS[key].prose)[0]) <= WORDS


def unnamed(cells, key):
    """The sections of Further that are no question, or that *What we built* leaves out.

    It leads to a section by a link to a cell of code, a figure or an equation there.
    """
    heading, anchors, built = "", {}, ""
    for cell in cells:
        for text in re.split(r"^(?=##)", cell.source, flags=re.MULTILINE):
            if cell.cell_type == "markdown" and text.startswith("##"):
                heading = text.partition("\n")[0]
            if heading == BUILT.strip():
                built += text
            if heading == FURTHER.strip() or (heading.startswith("### ") and anchors):
                anchors.setdefault(heading, []).extend(labels_in(text))
                figure = cell.metadata.get("mystnb", {}).get("figure", {}).get("name", "")
                anchors[heading] += [figure, f"cell-{key}-{cell.id}"]
    del anchors[FURTHER.strip()]
    led = set(re.findall(r"<([\w-]+)>`|\{eq\}`([\w-]+)`", built))
    led = {anchor for pair in led for anchor in pair if anchor}
    return [h for h, found in anchors.items() if h[-1] != "?" or not led & set(found)]


@each_chapter
def test_each_section_behind_is_a_question_and_named_before(key):
    assert unnamed(CHAPTERS[key].cells, key) == []


def test_a_section_that_is_not_named_is_seen():
    texts = ("## What we built\n\n{ref}`why <cell-01-a>`", "## Further\n\n### Why?")
    cells = [new_markdown_cell(text) for text in texts]
    cells += [new_code_cell("1", id="a"), new_markdown_cell("### How?")]
    cells += [new_code_cell("2", id="b"), new_markdown_cell("### So")]
    assert unnamed(cells, "01") == ["### How?", "### So"]


@each_chapter
def test_a_path_needs_nothing_from_behind(key):
    prose = {name: chapter.prose for name, chapter in CHAPTERS.items()}
    assert needed(prose, key) == set()


def test_what_a_path_needs_is_seen():
    first = "# One\n\nOf *masks*.\n\n## What we built\n\n## Exercises\n\n## Further\n\n"
    first += "A *softmax*, and\n\n$$\nx\n$$ (eq-x)\n"
    cites = "# Two\n\nBy {eq}`eq-x` a softmax grows.\n\n## What we built\n"
    named = "# Two\n\nBy {eq}`eq-x` (further) a softmax grows.\n\n## What we built\n"
    again = "# Two\n\nA *softmax* grows.\n\n## What we built\n"
    assert needed({"01": first, "02": cites}, "02") == {"eq-x", "softmax"}
    assert needed({"01": first, "02": named}, "02") == set()
    assert needed({"01": first, "02": again}, "02") == set()


def ways():
    """The ways through of the home page: minutes, and keys of their chapters."""
    text = (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
    text = text.partition("## Three ways through\n")[2].partition("\n## ")[0]
    for line in re.findall(r"^- \*\*(.+)$", text, re.MULTILINE):
        yield int(re.search(r"(\d+) minutes", line)[1]), re.findall(r"\((\d\d)_", line)


def allowed_and_needed(key):
    """The minutes that a chapter allows for its path, and the chapters that it needs."""
    prose = CHAPTERS[key].prose
    needs = re.search(r"\*You need\* (.*?)\. \*You will", prose)[1].partition(";")[0]
    spans = re.findall(r"\b(\d+)(?: to (\d+))?", re.sub(r"\$.*?\$", "", needs))
    found = {f"{n:02}" for a, b in spans for n in range(int(a), int(b or a) + 1)}
    return int(re.search(r"\*Allow\* (\d+) minutes", prose)[1]), found - {key}


def lacking(keys, before):
    """What the chapters of a way need that does not stand before them."""
    needs = [
        allowed_and_needed(key)[1] - {*before, *keys[:i]} for i, key in enumerate(keys)
    ]
    return set().union(*needs)


def test_a_way_through_has_all_that_it_needs():
    (core_minutes, core), *others = ways()
    assert len(others) == 2 and set(core) <= CHAPTERS.keys()
    assert lacking(core, []) == set()
    assert lacking(["18", "10"], core) == {"10", "13", "16"}, "a way with holes"
    for minutes, keys in ((core_minutes, core), *others):
        assert minutes == sum(allowed_and_needed(key)[0] for key in keys)
        assert lacking(keys, core) == set()


def test_what_is_not_read_in_passing_is_not_counted():
    aside = (
        "<details>\na b\n</details>\n\n$$\nx\n$$ (eq-x)\n\n<!-- a | b | c -->\n| a | b |"
    )
    assert count_words(aside) == 0
    assert count_words("The weight $p_1 = 2$ of {eq}`eq-x` isn't 3.") == 7
