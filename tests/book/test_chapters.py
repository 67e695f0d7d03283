"""The book agrees with itself: chapters, package, equations, figures and citations."""

import ast
import copy
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bookkit.chapters import read_chapters
from bookkit.modules import read_modules
from bookkit.normalize import normalize

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
CHAPTERS = read_chapters(ROOT)
MODULES = read_modules(CHAPTERS)
HOME = {
    (module.dotted, name): chapter.called
    for module in MODULES.values()
    for chapter, body in zip(module.chapters, module.bodies, strict=True)
    for statement in body
    for name in statement.names
}
PACKAGES = ["attnlib", "attnlib.backprop", "attnlib.parallel"]

each_chapter = pytest.mark.parametrize(
    "chapter", CHAPTERS, ids=lambda chapter: chapter.name
)
each_numbered = pytest.mark.parametrize(
    "chapter", [c for c in CHAPTERS if not c.is_appendix], ids=lambda chapter: chapter.name
)
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=lambda m: m.name)

FORBIDDEN = {
    "a path": r"(?<!\w)/(home|work|tmp|root|Users|usr|opt|var|content)\b|"
    r"site-packages|\b[A-Z]:\\",
    "a memory address": r"0x[0-9a-fA-F]{6,}",
    "a warning": r"Warning",
}
LINES = 46  # of a function: about 40, and some tolerance


def public_names():
    """What `attnlib` exports; nothing while there are no chapters to export it from."""
    packages = [importlib.import_module(name) for name in PACKAGES if CHAPTERS]
    return [
        f"{package.__name__}.{name}" for package in packages for name in package.__all__
    ]


def tool(*command):
    """Run a command at the repository's root; its output explains a failure."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_at_least_one_chapter():
    assert CHAPTERS


# The package is what the chapters make, and the code is in order.


def test_modules_are_as_in_their_chapters():
    tool("tools", "tangle", "--check")


def test_equations_page_is_up_to_date():
    tool("tools", "equations", "--check")


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_passes(command):
    tool("-m", "ruff", *command.split(), "--output-format", "concise", ".")


@pytest.mark.parametrize("name", public_names())
def test_public_name_says_its_chapter(name):
    package, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(package), last)
    text = thing.__doc__ or ""  # not inspect.getdoc, which takes the docstring of a parent
    assert len(text) >= 60, f"{name} needs a docstring of substance"
    if inspect.ismodule(thing):
        place = r"\bchapters? \d+|\bappendix [A-Z]\b"
        assert re.search(place, text, re.IGNORECASE), f"{name}: which chapter?"
    else:
        place = HOME[thing.__module__, last]
        assert re.search(rf"\b{place}\b", text), f"the docstring of {name}: {place!r}?"
    pages = [path.read_text(encoding="utf-8") for path in BOOK.glob("api_*.md")]
    assert any(re.search(rf":: {name}\b", page) for page in pages), f"{name}: on no page"


@each_module
def test_public_definitions_have_docstrings(module):
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for index, body in enumerate(module.bodies):
        for node in (s.node for s in body if isinstance(s.node, definitions)):
            if not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                assert len(text) >= 20, f"{module.where(index)}: {node.name}: no docstring"


@each_module
def test_functions_are_short(module):
    """From `def` to its end, its docstring not counted, a function has at most LINES lines.

    Functions and methods count each for itself; one inside another counts for both.
    """
    for index, body in enumerate(module.bodies):
        for node in (node for s in body for node in ast.walk(s.node)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    lines -= node.body[0].end_lineno - node.body[0].lineno + 1
                where = f"{module.where(index)}: {node.name}"
                assert lines <= LINES, f"{where} has {lines} lines, split it"


# Every chapter is stored as `tools/bookkit/execute.py` writes it.


@each_chapter
def test_chapter_ran_from_top_to_bottom(chapter):
    counts = [cell.execution_count for cell in chapter.code_cells]
    assert counts, f"{chapter.file} has no code"
    message = "run: python tools execute"
    assert all(counts) and counts == sorted(counts), message  # what kept its own may repeat


@each_chapter
def test_chapter_is_normalized(chapter):
    stored = chapter.path.read_text(encoding="utf-8")
    again = copy.deepcopy(chapter)
    normalize(again)
    message = f"run: python tools execute --normalize {chapter.name}"
    assert again.text == stored, message  # also fails for a format that is not ours


@each_chapter
def test_outputs_do_not_depend_on_the_machine(chapter):
    for cell in chapter.code_cells:
        for output in cell.outputs:
            where = chapter.where(cell)
            assert output.get("name") != "stderr", (
                f"{where} writes to stderr: {output.text}"
            )
            data = output.get("data", {})
            kept = {
                kind: data[kind] for kind in data if kind not in ("image/png", "image/jpeg")
            }
            said = [output.get("text"), output.get("evalue"), output.get("traceback"), kept]
            text = json.dumps(said, ensure_ascii=False).replace("\\\\", "\\")
            for what, pattern in FORBIDDEN.items():
                found = re.search(pattern, text)
                assert not found, f"{where} prints {what}: {text[found.start() :][:60]}"


# Figures, exercises and citations are complete.


def figures(chapter):
    for cell in chapter.code_cells:
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        if any(kind.startswith("image/") for kind in kinds):
            yield cell


@each_chapter
def test_figures_have_name_caption_and_alt_text(chapter):
    for cell in figures(chapter):
        where = chapter.where(cell)
        given = cell.metadata.get("mystnb", {})
        figure, alt = given.get("figure", {}), given.get("image", {}).get("alt", "")
        caption, name = figure.get("caption", ""), figure.get("name", "")
        assert re.fullmatch(r"fig-[a-z0-9-]+", name), f"{where}: figure name {name!r}"
        assert 20 <= len(caption) <= 600, f"{where}: caption of {len(caption)} characters"
        assert 20 <= len(alt) <= 600, f"{where}: alt text of {len(alt)} characters"
        assert alt.strip() != caption.strip(), f"{where}: alt text repeats the caption"


def test_figure_names_are_unique():
    names = [
        cell.metadata.get("mystnb", {}).get("figure", {}).get("name")
        for chapter in CHAPTERS
        for cell in figures(chapter)
    ]
    assert len(names) == len(set(names)), sorted(names)


@each_chapter
def test_drawings_in_html_are_described(chapter):
    """An <svg> is an image, or a group of things to move, and has a label to read aloud."""
    for cell in chapter.code_cells:
        for output in cell.outputs:
            html = output.get("data", {}).get("text/html", "")
            for tag, inside in re.findall(r"(<svg\b[^>]*>)(.*?)</svg>", html, re.DOTALL):
                where = f"{chapter.where(cell)}: {tag}"
                if 'aria-hidden="true"' in tag:  # an ornament
                    continue
                assert re.search(r'role="(img|group)"', tag), f'{where} needs role="img"'
                label = re.search(r'aria-label="([^"]{10,})"', tag)
                title = re.search(r"<title\b[^>]*>[^<]{10,}</title>", inside)
                assert label or title, f"{where} needs an aria-label or a <title>"
                for name in re.findall(r'aria-labelledby="([^"]*)"', tag):
                    for target in name.split():
                        assert f'id="{target}"' in html, f"{where}: no element is {target}"


@each_numbered
def test_every_exercise_has_a_hidden_solution(chapter):
    asked = re.findall(r"^### Exercise (\S+?):? ", chapter.prose + " ", re.MULTILINE)
    solved = [(cell, cell.exercise) for cell in chapter.code_cells if cell.exercise]
    assert asked == [f"{chapter.number}.{i + 1}" for i in range(len(asked))], asked
    assert 3 <= len(asked) <= 5, f"{chapter.file} has {len(asked)} exercises"
    assert list(dict.fromkeys(name for _, name in solved)) == asked, (
        "solutions and exercises"
    )
    for cell, _ in solved:
        where = chapter.where(cell)
        assert "hide-cell" in cell.metadata.get("tags", []), f"{where}: tag it hide-cell"


def test_citations_and_bibliography_agree():
    pages = {path.name: path.read_text(encoding="utf-8") for path in BOOK.glob("*.md")}
    pages |= {chapter.path.name: chapter.prose for chapter in CHAPTERS}
    cited = {}
    for page, text in pages.items():
        for keys in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", text):
            cited |= {key.strip(): page for key in keys.split(",")}
    bibliography = (BOOK / "references.bib").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\s*@(?!string|comment|preamble)\w+\{([^,\s]+),", bibliography, re.M
    )
    assert len(listed) == len(set(listed)), "a key stands twice in references.bib"
    missing = {key: page for key, page in cited.items() if key not in listed}
    assert not missing, f"cited, but not in references.bib: {missing}"
    assert not set(listed) - set(cited), f"never cited: {sorted(set(listed) - set(cited))}"
