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


def each(name, values):
    return pytest.mark.parametrize(name, values, ids=lambda value: value.name)


each_chapter = each("chapter", CHAPTERS)
each_numbered = each("chapter", [c for c in CHAPTERS if not c.is_appendix])
each_module = each("module", MODULES.values())

FORBIDDEN = {
    "a path": r"(?<!\w)/(home|work|tmp|root|Users|usr|opt|var|content)\b|"
    r"site-packages|\b[A-Z]:\\",
    "a memory address": r"0x[0-9a-fA-F]{6,}",
    "a warning": r"Warning",
}
LINES = 46  # of a function: about 40, and some tolerance


# The package is what the chapters make, and the code is in order.


@pytest.mark.parametrize(
    "command",
    [
        "tools tangle --check",
        "tools equations --check",
        "tools speed --check",
        "-m ruff check --output-format concise .",
        "-m ruff format --check --output-format concise .",
    ],
)
def test_what_is_written_by_tools_is_up_to_date(command):
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr


PACKAGES = [importlib.import_module(f"attnlib{x}") for x in ("", ".backprop", ".parallel")]
API = "".join(path.read_text(encoding="utf-8") for path in BOOK.glob("api_*.md"))


@pytest.mark.parametrize(
    "name",
    [f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__],
)
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
    assert re.search(rf":: {name}\b", API), f"{name}: on no page"


@each_module
def test_definitions_have_docstrings_and_functions_are_short(module):
    """From `def` to its end, its docstring not counted, a function has at most LINES lines.

    Functions and methods count each for itself; one inside another counts for both.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for index, body in enumerate(module.definitions):
        for statement in body:
            for node in ast.walk(statement.node):
                if not isinstance(node, (*functions, ast.ClassDef)):
                    continue
                where, text = f"{module.where(index)}: {node.name}", ast.get_docstring(node)
                if node is statement.node and not node.name.startswith("_"):
                    assert len(text or "") >= 20, f"{where}: no docstring"
                said = node.body[0].end_lineno - node.body[0].lineno + 1 if text else 0
                lines = node.end_lineno - node.lineno + 1 - said
                short = lines <= LINES or isinstance(node, ast.ClassDef)
                assert short, f"{where} has {lines} lines, split it"


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
            name, said = output.get("name"), output.get("text")
            assert name != "stderr", f"{where} writes to stderr: {said}"
            data = output.get("data", {})
            data = {kind: data[kind] for kind in data if not kind.startswith("image/")}
            said = [said, output.get("evalue"), output.get("traceback"), data]
            text = json.dumps(said, ensure_ascii=False).replace("\\\\", "\\")
            for what, pattern in FORBIDDEN.items():
                found = re.search(pattern, text)
                assert not found, f"{where} prints {what}: {text[found.start() :][:60]}"


# Figures, exercises and citations are complete.


def test_figures_have_a_name_of_their_own_caption_and_alt_text():
    names = []
    cells = (
        (chapter.where(cell), cell) for chapter in CHAPTERS for cell in chapter.code_cells
    )
    for where, cell in cells:
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        if not any(kind.startswith("image/") for kind in kinds):
            continue
        given = cell.metadata.get("mystnb", {})
        figure, alt = given.get("figure", {}), given.get("image", {}).get("alt", "")
        caption = figure.get("caption", "")
        names.append(figure.get("name", ""))
        assert re.fullmatch(r"fig-[a-z0-9-]+", names[-1]), f"{where}: name {names[-1]!r}"
        assert 20 <= len(caption) <= 600, f"{where}: caption of {len(caption)} characters"
        assert 20 <= len(alt) <= 600, f"{where}: alt text of {len(alt)} characters"
        assert alt.strip() != caption.strip(), f"{where}: alt text repeats the caption"
    assert names and len(names) == len(set(names)), sorted(names)


DARKNESS = re.compile(r"\b(dark|pale|light|bright)(er|est)\b|\b(dark|pale)\b", re.I)


def seen(figure):
    """The words of a figure to touch, without script, style and what a program says."""
    return re.sub(r"<(style|script|samp).*?</\1>|<[^>]*>", " ", figure, flags=re.S)


def test_no_word_says_how_dark_a_mark_is():
    """What is dark on a light page is bright on a dark one."""
    texts = {p.name: seen(p.read_text("utf-8")) for p in BOOK.glob("_static/*.html")}
    for chapter in CHAPTERS:
        texts |= {chapter.where(cell): cell.source for cell in chapter.text_cells}
        texts |= {chapter.where(c): str(c.metadata) for c in chapter.code_cells}
    found = {
        where: said[0] for where, text in texts.items() if (said := DARKNESS.search(text))
    }
    assert not found
    assert DARKNESS.search(seen("<p>Pale: those of before.</p>"))
    assert not DARKNESS.search(seen("<samp>The brightest is the sun.</samp>"))
    assert not DARKNESS.search(seen("<style>.dark { color: red }</style>in the light of"))


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
