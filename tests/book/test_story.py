"""A chapter carries its reader: what is open on the page, and what is one click away."""

import ast
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from bookkit.chapters import Chapter, read_chapters
from bookkit.folds import lines_in_view
from bookkit.modules import read_modules

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 40  # lines of an open listing that are in view
ALL = read_chapters(ROOT)
CHAPTERS = [c for c in ALL if not c.is_appendix]
MODULES = read_modules(ALL).values()
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)

# What a chapter leads to: it stands open in a listing of the package.
CENTRAL = {
    "01": "ScaledDotProductAttention",
    "02": "SelfAttention",
    "03": "CausalAttention",
    "04": "Projection",
    "05": "MultiHeadAttention padding_mask",
    "06": "LearnedBiasAttention",
    "07": "LayerNorm",
    "08": "FeedForwardNetwork",
    "09": "TransformerBlock LanguageModel sample",
    "10": "softmax_backward ScaledDotProductAttention",
    "11": "Projection FeedForwardNetwork LayerNorm",
    "12": "MultiHeadAttention SGD Adam",
    "13": "merge_states",
    "14": "TiledAttention.forward FlashAttention",
    "15": "forward_step",
    "16": "rotate RotaryPositions",
    "17": "KVCache",
    "18": "WindowCache LatentAttention",
    "19": "PagedCache",
    "20": "names_of Into GPT2",
    "21": "LlamaAttention LlamaBlock Llama",
    "22": "with_sink",
    "23": "AllGather",
    "24": "RingFunction",
    "25": "heads_for_tokens tokens_for_heads SplitColumns SplitRows",
    "26": "acceptance residual judge NgramDraft",
    "27": "quantize QuantizedCache",
    "28": "Pages Server",
    "29": "LinearAttention GatedLinearAttention",
    "30": "corrections delta_rule GatedDeltaAttention",
    "31": "box_scores choose_blocks attend_chosen ChosenAttention",
}


def open_listings(chapter):
    return [cell for cell in chapter.code_cells if cell.is_open and cell.module]


def too_long(chapter):
    """The open listings that fill more than a screen, docstrings folded."""
    found = {
        c.id: lines_in_view(c.source.partition("\n")[2]) for c in open_listings(chapter)
    }
    return {name: lines for name, lines in found.items() if lines > LONGEST}


def told_twice(chapter, modules):
    """What open code of the story defines, and the package in the chapter's modules."""
    ours = {
        name for module in modules if chapter in module.chapters for name in module.names
    }
    story = [c for c in chapter.code_cells if c.is_open and not c.module]
    return ours & {name.partition(".")[0] for cell in story for name in cell.definitions}


def standing_open(chapter):
    """What the open listings define, not only continue."""
    return {name for cell in open_listings(chapter) for name in cell.definitions}


@each_chapter
def test_an_open_listing_can_be_seen_at_once(chapter):
    assert too_long(chapter) == {}


@each_chapter
def test_what_a_chapter_leads_to_stands_open(chapter):
    assert {*CENTRAL[chapter.key].split()} <= standing_open(chapter)


def lines_of(cells):
    return sum(len(cell.source.splitlines()) - 1 for cell in cells)  # without its file


def test_half_of_the_package_stands_open():
    """But for chapters of kernels, and of machinery for many requests, guests and ranks."""
    told = [c for c in CHAPTERS if c.key not in {"15", "19", "22", "23", "24", "25"}]
    every = sum(lines_of(cell for cell in c.code_cells if cell.module) for c in told)
    opened = sum(lines_of(open_listings(c)) for c in told)
    assert every < 2 * opened, f"{opened} of {every} lines"


@each_chapter
def test_nothing_stands_twice(chapter):
    found = told_twice(chapter, MODULES)
    assert not found, f"{sorted(found)}: once in the story, once in the package"


def test_the_table_names_chapters():
    assert CENTRAL.keys() <= {chapter.key for chapter in CHAPTERS}


HEAD = '# attnlib/twice.py{}\n"""A module."""\n\n\n'
CLASS = 'class Twice:\n    """A class.\n\n    Args:\n{}    """\n\n    x = 1{}'
SHORT = HEAD.format("") + CLASS.format("        x: it.\n" * 50, "")
LONG = HEAD.format("") + CLASS.format("", "\n    x = 1" * 40)


def planted(*sources):
    """A chapter of these cells."""
    cells = [new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)]
    return Chapter(Path("01_planted.ipynb"), new_notebook(cells=cells))


def test_a_long_listing_is_seen():
    assert too_long(planted(SHORT)) == {}
    assert too_long(planted(LONG)) == {"c0": 48}
    assert too_long(planted(LONG.replace(".py", ".py: adds much", 1))) == {}


def test_a_second_definition_is_seen():
    for other, found in (
        ("class Twice:\n    pass", {"Twice"}),
        ("def Twice():\n    pass", {"Twice"}),
        ("class Twice(Twice):\n    def f(self):\n        pass", {"Twice"}),
        ("class Once:\n    pass", set()),
    ):
        chapter = planted(SHORT, other)
        assert told_twice(chapter, read_modules([chapter]).values()) == found
        chapter.cells[1].metadata["tags"] = ["hide-cell"]
        assert told_twice(chapter, read_modules([chapter]).values()) == set()


def test_a_central_class_that_is_folded_or_only_continued_is_seen():
    folded = SHORT.replace(".py", ".py: adds all", 1)
    more = "# attnlib/twice.py\nclass Twice(Twice):\n    def f(self):\n        pass"
    assert standing_open(planted(SHORT)) == {"Twice"}
    assert "Twice" not in standing_open(planted(folded, more))


def names_of(cell):
    """What a cell defines, and what it uses, at its top level or inside."""
    nodes = list(ast.walk(ast.parse(cell.python)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    made |= {
        alias.asname or alias.name
        for n in nodes
        if hasattr(n, "names")
        for alias in (n.names if isinstance(n, ast.Import | ast.ImportFrom) else [])
    }
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return made | stored, {n.id for n in names if isinstance(n.ctx, ast.Load)}


@each_chapter
def test_nothing_open_needs_what_is_folded(chapter):
    """A reader of the open code alone finds every name that it uses."""
    seen, hidden = set(), {}
    for cell in chapter.code_cells:
        made, used = names_of(cell)
        if cell.is_open:
            missing = {name: hidden[name] for name in used & hidden.keys() - seen - made}
            assert not missing, f"{chapter.where(cell)} uses what is folded: {missing}"
            seen |= made
        elif not cell.module:  # a listing's caption names what it defines
            hidden.update(dict.fromkeys(made, cell.id))


@each_chapter
def test_a_picture_comes_before_the_first_equation(chapter):
    for cell in chapter.cells:
        if "figure" in cell.metadata.get("mystnb", {}) or "<img" in cell.source:
            return
        labels = [e.label for e in cell.equations if e.label]
        if labels:
            raise AssertionError(f"{labels[0]} comes before any picture")


@pytest.fixture(scope="module")
def page(browser):
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    yield page
    page.close()


ONLY_FOLDED = """() => {
  const words = (text) => new Set(text.match(/[a-z]{6,}/gi));
  const open = words(document.body.innerText);
  const folds = [...document.querySelectorAll(".cell details:not([open]) pre")];
  return [...words(folds.map((pre) => pre.textContent).join(" "))]
    .find((word) => !open.has(word));
}"""


def test_a_search_opens_the_fold_that_alone_has_the_word(site, page):
    address = (site / f"{CHAPTERS[0].name}.html").as_uri()
    page.goto(address)
    word = page.evaluate(ONLY_FOLDED)
    page.goto(f"{address}?highlight={word}")
    page.locator("details[open] .highlighted").first.wait_for()
