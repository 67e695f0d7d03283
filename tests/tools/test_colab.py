"""The notebooks for Colab: read as files, and compared with the site.

tests/site/test_notebooks_alone.py runs them, and looks at them in JupyterLab.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from importlib import metadata
from itertools import chain, pairwise
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from IPython.core.inputtransformer2 import TransformerManager
from jinja2 import Environment, FileSystemLoader
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import build_book
from address import address
from bookkit.chapters import BookError, Chapter, read_chapters
from bookkit.grammar import CHAPTER
from editions import colab, offline_zip, pdf, workbook
from editions.colab import edition, write_editions
from editions.plain import Plain
from editions.setup_cell import needed_files
from release import versions
from tiny_book import ROOT, refused

ACTIONS = {
    "GITHUB_REPOSITORY": "Owner/book",
    "GITHUB_SHA": "0123456789" * 4,
    "GITHUB_REF_TYPE": "branch",
    "GITHUB_REF_NAME": "main",
}
PUBLISHED = address(ACTIONS)
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
FILES = [entry["file"] for part in TOC["parts"] for entry in part["chapters"]]
NAMES = [name for name in FILES if CHAPTER.match(name)]
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])+)\]\((https://owner\.github\.io/book/[^)]*)\)")

each_chapter = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def editions(site, tmp_path_factory):
    """Where the notebooks are, with an address and without."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("published", "local")}
    write_editions(ROOT, folders["published"], PUBLISHED)
    write_editions(ROOT, folders["local"], None)
    return folders


@pytest.fixture(scope="module")
def plain(site):
    return Plain(ROOT, PUBLISHED.site)


@cache
def read(folder, name):
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


def markdown(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@cache
def original(name):
    return nbformat.read(ROOT / "book" / f"{name}.ipynb", as_version=4)


@cache
def article(site, name):
    text = (site / f"{name}.html").read_text("utf-8")
    return BeautifulSoup(text, "html.parser").article


# ── all notebooks ────────────────────────────────────────────────────────────────────


def test_the_site_offers_a_notebook_of_every_chapter(editions, site, tmp_path):
    """Those that are made again, byte for byte."""
    write_editions(ROOT, tmp_path, address())
    for folder in (*editions.values(), tmp_path, site / "notebooks"):
        assert sorted(path.stem for path in folder.glob("*.ipynb")) == NAMES
    for path in tmp_path.iterdir():
        assert (site / "notebooks" / path.name).read_bytes() == path.read_bytes()


SPHINX = {
    "a role": r"\{[\w:+-]+\}`",
    "a directive": r"^\s*(:{3,}|[`~]{3,}\{)",
    "a label of an equation": r"\beq-[a-z]|\$\$[ \t]*\(",
    "a target": r"^\([\w-]+\)=",
    "a comment": r"<!--|^%+ ",
    "a substitution": r"\{\{ *\w+ *\}\}",
    "a label": r"\]\(#|\bfig-[a-z]|\bcell-\d\d-",
    "a key of the bibliography": r"\b[a-z]+(?:19|20)\d\d[a-z]+\b",
    "a file of the book": r"\]\([\w/.-]+\.(?:md|ipynb)|\bmystnb\b",
}


@each_chapter
def test_a_notebook_stands_alone(editions, name):
    """It is valid, without Sphinx, and reads only what its first cell has written."""
    notebook = read(editions["published"], name)
    nbformat.validate(notebook)
    first, *cells = notebook.cells
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in cells:
        text = LINK.sub(r"\1", cell.source)  # an address may have a label in it
        for what, pattern in SPHINX.items():
            found = re.search(pattern, text, re.MULTILINE)
            assert not found, f"{cell.id}: {what}: {found[0]}"
    for cell in code(notebook)[1:]:
        found = re.search(r"""["'](\.\./|_static/|/)[^"']*["']""", cell.source)
        assert not found, f"{cell.id} reads {found[0]}"
        for file in re.findall(r'"attnlib-files/([^"]+)"', cell.source):
            assert f'files["{file}"] = ' in first.source


# ── the same as the site ─────────────────────────────────────────────────────────────


@each_chapter
def test_equations_and_references_are_those_of_the_site(editions, site, name):
    """Numbers, and the same text to the same place, in order; also of citations."""
    eqno = article(site, name).select("div.math[id] > .eqno")
    shown = [re.search(r"\((.+)\)", number.get_text())[1] for number in eqno]
    *texts, closing = markdown(read(editions["published"], name))
    text = "\n\n".join(texts)
    assert re.findall(r"\\tag\{(.*?)\}", text) == shown
    assert len(shown) == len(set(shown)) and (shown or not name[0].isdigit())
    shown = []
    for link in article(site, name).select("a.reference.internal[href*='#']"):
        if link.find_parent(class_="page-jumps"):
            continue
        page, _, anchor = link["href"].partition("#")
        shown.append(
            (link.get_text(), f"{PUBLISHED.site}{page or f'{name}.html'}#{anchor}")
        )
    links = [(said.replace("*", ""), url) for said, url in LINK.findall(text)]
    assert [link for link in links if "#" in link[1]] == shown
    home = f"{PUBLISHED.site}{name}.html"
    assert LINK.findall(closing) == [("*Attention, derived*", home)]


@each_chapter
def test_without_an_address_the_text_is_the_same(editions, name):
    published, local = (markdown(read(editions[kind], name)) for kind in editions)
    assert not any("](http" in text and "github.io" in text for text in local)
    assert [LINK.sub(r"\1", text) for text in published] == local


@each_chapter
def test_figures_have_the_captions_of_the_site(editions, site, name):
    shown = [
        (number.find_parent("figure").img["alt"], number.get_text().strip())
        for number in article(site, name).select("figure .caption-number")
    ]
    cells = read(editions["local"], name).cells
    found = []
    for above, cell in pairwise(cells):
        if match := re.match(r"\*\*(Figure [\dA-Z.]+)\.\*\* .+", cell.source):
            kinds = {kind for output in above.outputs for kind in output.get("data", {})}
            assert "image/png" in kinds, f"{cell.id} is not below its figure"
            found.append((cell.source.split("\n\n")[-2], match[1]))
    assert found == shown


def test_cited_works_are_listed(editions):
    closing = read(editions["local"], "01_scaled_dot_product").cells[-1].source
    assert "Ashish Vaswani, Noam Shazeer" in closing
    assert "He" not in re.findall(r"Kaiming (\w+)", closing), "chapter 1 cites no He"


@each_chapter
def test_code_is_that_of_the_chapter(editions, name):
    """Apart from the places of files, numbers of equations, and titles of folded cells."""
    before = {cell.id: cell for cell in code(original(name))}
    after = [cell for cell in code(read(editions["local"], name)) if cell.id in before]
    assert [cell.id for cell in after] == list(before)
    for cell in after:
        old, new = before[cell.id].source.splitlines(), cell.source.splitlines()
        changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        if changed and changed[0][1].startswith("# @title "):
            line, title = changed.pop(0)
            assert line is old[0] and cell.metadata.jupyter.source_hidden, line
            assert title.split()[2] in line.replace("# ", "", 1).split(), (line, title)
        for line, _ in changed:
            assert re.search(r'eq-|"_static/|"\.\./', line), line
        at_home = before[cell.id].metadata
        closed = "jupyter" in at_home or "remove-input" in at_home.get("tags", [])
        assert ("jupyter" in cell.metadata) == closed, cell.id
        if not before[cell.id].source.startswith("# Solution"):
            assert cell.outputs == before[cell.id].outputs


# ── exercises ────────────────────────────────────────────────────────────────────────


@each_chapter
def test_exercises_have_room_for_an_answer(editions, name):
    cells = read(editions["local"], name).cells
    text = "\n".join(cell.source for cell in original(name).cells)
    asked = re.findall(r"^### Exercise (\w+\.\d+)", text, re.MULTILINE)
    assert [c.id for c in cells if c.source == "# Your turn"] == [
        f"your-turn-{number.replace('.', '-')}" for number in asked
    ]
    titles = []
    for above, cell in pairwise(cells):
        if cell.source.startswith("# @title Solution"):
            titles.append(re.search(r"\w+\.\d+", cell.source)[0])
            assert cell.metadata.cellView == "form"
            assert cell.metadata.jupyter.source_hidden
            assert not cell.outputs and cell.execution_count is None
            assert above.source == "# Your turn" or titles[-1] in titles[:-1]
        if cell.source == "# Your turn":
            text = above.cell_type == "markdown" and "### Exercise" in above.source
            assert (above.cell_type == "code" or text) and not cell.metadata
    assert list(dict.fromkeys(titles)) == asked


# ── the first cell ───────────────────────────────────────────────────────────────────


class Machine:
    """Where a setup cell runs: what is installed, and what it asks pip for."""

    def __init__(self, monkeypatch, folder, version=None, origin=None):
        self.asked = []

        def distribution(name):
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return SimpleNamespace(version=version, read_text=lambda file: origin)

        monkeypatch.setattr(metadata, "distribution", distribution)
        monkeypatch.chdir(folder)

    def run(self, folder, name=NAMES[0]):
        source = read(folder, name).cells[0].source
        self.asked.clear()
        shell = SimpleNamespace(run_line_magic=lambda name, line: self.asked.append(line))
        names = {"get_ipython": lambda: shell}
        exec(TransformerManager().transform_cell(source), names)
        installs = [line for line in self.asked if line.startswith("install")]
        return [re.sub(r"{(\w+)}", lambda m: str(names[m[1]]), line) for line in installs]


VERSION = versions(ROOT)["attnlib/__init__.py"]
HERE = json.dumps({"url": PUBLISHED.archive})
OTHER = json.dumps({"url": PUBLISHED.archive.replace("0123", "3210")})
INSTALLED = {  # version, direct_url.json, and whether it is installed again
    "nothing": (None, None, True),
    "an older one": ("0.0.9", None, True),
    "from a wheel": (VERSION, '{"url": "file:///attnlib.whl"}', False),
    "from the index": (VERSION, None, False),
    "this commit": (VERSION, HERE, False),
    "another commit": (VERSION, OTHER, True),
}


@pytest.mark.parametrize(("version", "origin", "again"), INSTALLED.values(), ids=INSTALLED)
def test_setup_installs_this_commit(
    editions, monkeypatch, tmp_path, version, origin, again
):
    asked = Machine(monkeypatch, tmp_path, version, origin).run(editions["published"])
    wanted = f'install --quiet "attnlib @ {PUBLISHED.archive}" matplotlib'
    assert asked == ([wanted] if again else [])


def test_setup_without_an_address_installs_a_wheel_or_the_version(
    editions, monkeypatch, tmp_path
):
    machine, local = Machine(monkeypatch, tmp_path), editions["local"]
    assert machine.run(local) == [f'install --quiet "attnlib=={VERSION}" matplotlib']
    wheel = tmp_path / f"attnlib-{VERSION}-py3-none-any.whl"
    wheel.touch()
    (tmp_path / "attnlib-9.9-py3-none-any.whl").touch()
    assert machine.run(local) == [f'install --quiet "{wheel}" matplotlib']
    assert not Machine(monkeypatch, tmp_path, VERSION).run(local)


LIBRARIES = {
    "16_rotary_positions": [],
    "21_llama": ["safetensors", "tokenizers", "gguf", "transformers"],
    "22_inside_transformers": ["safetensors", "tokenizers", "gguf", "transformers"],
    "27_smaller_cache": ["safetensors", "tokenizers", "gguf"],
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_setup_installs_the_libraries_of_the_chapter(editions, monkeypatch, tmp_path, name):
    published = editions["published"]
    asked = Machine(monkeypatch, tmp_path, VERSION, HERE).run(published, name)
    assert re.findall(r'"(\w+)>=', "\n".join(asked)) == LIBRARIES[name]
    asked = Machine(monkeypatch, tmp_path, "9999.0").run(published, name)
    assert ">=" not in "\n".join(asked), "what is here stays"


@each_chapter
def test_setup_is_on_top_and_writes_the_files(editions, monkeypatch, tmp_path, name):
    notebook = read(editions["published"], name)
    first = notebook.cells[0]
    assert first.source.startswith("# @title Setup: run this cell first\n")
    assert first.metadata.cellView == "form" and first.metadata.jupyter.source_hidden
    assert sum("%pip" in cell.source for cell in notebook.cells) == 1
    Machine(monkeypatch, tmp_path, VERSION).run(editions["published"], name)
    text = "\n".join(cell.source for cell in code(original(name)))
    read_by_chapter = set(re.findall(r'"(_static/[^"]+|\.\./[^"]+)"', text))
    assert read_by_chapter or not name[0].isdigit()
    there = [path for path in tmp_path.rglob("*") if path.is_file()]
    needed = [ROOT / "book" / file for file in read_by_chapter]
    written, wanted = ({p.name: p.read_bytes() for p in of} for of in (there, needed))
    assert written == wanted


# ── what the chapters do not have today ──────────────────────────────────────────────


@each_chapter
def test_only_a_chapter_with_kernels_asks_for_a_gpu(editions, name):
    uses = any(re.search("^import triton", c.source, re.M) for c in code(original(name)))
    notebook = read(editions["local"], name)
    assert ("accelerator" in notebook.metadata) == uses
    assert ("The free T4 has 7.5" in notebook.cells[2].source) == uses


TURNED = {
    "{term}`query`": r"\[query\]\(\S+/glossary.html#term-query\)",
    "{term}`questions <query>`": r"\[questions\]\(\S+/glossary.html#term-query\)",
    "{doc}`notation`": r"\[Notation\]\(\S+/notation.html\)",
    "{ref}`here <fig-masks>`": r"\[here\]\(\S+/01_scaled_dot_product.html#fig-masks\)",
    "[a table](notation.md)": r"\[a table\]\(\S+/notation.html\)",
    "[a place](#here)": r"\[a place\]\(\S+/15_x.html#here\)",
    "[far](https://a.org)": r"\[far\]\(https://a.org\)",
    ":::{note}\nA *b*.\n\nC\n:::": r"> \*\*Note.\*\*\n>\n> A \*b\*.\n>\n> C",
    "```{admonition} On a T4\nA\n```\n\nB": r"> \*\*On a T4.\*\*\n>\n> A\n\nB",
    "A\n\n<!-- x | y\n -->\n\nB": r"A\n\nB",
}


@pytest.mark.parametrize("text", TURNED)
def test_other_syntax_is_turned(plain, text):
    assert re.fullmatch(TURNED[text], plain.markdown(text, "15_x", "here"))


REFUSED = [
    "{abbr}`x`",
    "{eq}`eq-that-is-missing`",
    "{cite:p}`nobody1900`",
    "$$\nx\n$$ (eq-that-is-missing)",
    "$$\nx\n$$ (other)",
    ":::{table}\n| a |\n:::",
    "```{figure} a.png\n```",
    "(target)=\n# Heading",
    "% a comment",
    "![a picture](_static/page.png)",
    "a note[^1]",
]


def chapter(*cells):
    for number, cell in enumerate(cells):
        cell.id = f"c{number}"
    return Chapter(ROOT / "book" / "15_x.ipynb", new_notebook(cells=cells))


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_turned_is_refused(plain, text):
    with pytest.raises(BookError, match=r"book/15_x\.ipynb, cell c1: .*"):
        edition(chapter(new_markdown_cell("# T"), new_markdown_cell(text)), plain, "")


def test_a_file_that_is_missing_is_refused():
    with pytest.raises(BookError, match=r"no file _static/missing\.json"):
        needed_files(chapter(new_code_cell('open("_static/missing.json")')))


TOOLS = [colab, offline_zip, pdf, workbook]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_the_site_is_built_if_it_is_missing(tool, monkeypatch, tmp_path):
    called = []
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(build_book.subprocess, "run", lambda c: called.append(c) or failed)
    assert refused(tool, tmp_path, str(tmp_path / "out")) == "the book does not build"
    assert called == [[sys.executable, str(tmp_path / "tools" / "build_book.py")]]
    assert not (tmp_path / "out").exists()
    done = tmp_path / "_build" / "html" / ".sources"
    done.parent.mkdir(parents=True)
    done.touch()
    build_book.build_if_missing(tmp_path)
    assert len(called) == 1


def test_the_numbers_are_those_of_the_site_just_built(site, monkeypatch, tmp_path):
    done = SimpleNamespace(returncode=0)  # here it builds nothing, so none can be found
    monkeypatch.setattr(build_book.subprocess, "run", lambda *args, **options: done)
    monkeypatch.setattr(sys, "argv", ["build_book.py", "--into", str(tmp_path)])
    with pytest.raises(
        BookError, match="the book is not built: run python tools build_book"
    ):
        build_book.main()


@pytest.mark.parametrize("newer", [False, True])
def test_a_new_order_of_pages_has_all_read_again(newer, tmp_path):
    read = tmp_path / ".doctrees" / "environment.pickle"
    read.parent.mkdir()
    read.touch()
    seconds = (ROOT / "_toc.yml").stat().st_mtime + (-1 if newer else 1)
    os.utime(read, (seconds, seconds))
    build_book.forget_if_reordered(tmp_path)
    assert read.exists() is not newer


# ── the address ──────────────────────────────────────────────────────────────────────


def test_the_address_comes_from_the_environment():
    assert PUBLISHED.repository == "https://github.com/Owner/book"
    assert PUBLISHED.site == "https://owner.github.io/book/"
    assert PUBLISHED.edit("a/b.md") == "https://github.com/Owner/book/edit/main/a/b.md"
    assert PUBLISHED.releases == "https://github.com/Owner/book/releases/latest"
    assert PUBLISHED.colab("01_x") == (
        "https://colab.research.google.com/github/Owner/book/blob/colab/01_x.ipynb"
    )
    tag = address(ACTIONS | {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": "v1"})
    assert tag.edit("a.md") is None
    own = address(ACTIONS | {"GITHUB_REPOSITORY": "Owner/owner.github.io"})
    assert own.site == "https://owner.github.io/"
    assert address({}) is None
    assert address(ACTIONS | {"GITHUB_SERVER_URL": "https://git.example.org"}) is None
    for name in ("GITHUB_REPOSITORY", "GITHUB_SHA"):  # half an address
        with pytest.raises(ValueError, match="whole commit"):
            address(ACTIONS | {name: "short"})


def test_no_other_file_knows_the_address():
    """One place: nothing else reads GitHub's variables, or names a repository."""
    rooms = (ROOT / "tools").rglob("*.*"), (ROOT / "book").rglob("*.*")
    files = chain(ROOT.glob("*.*"), *rooms)
    for path in files:
        if path.suffix in {".py", ".yml", ".toml", ".md", ".html", ".js", ".cff"}:
            text = path.read_text("utf-8")
            said = re.findall(r"GITHUB_[A-Z]+|https://colab[^\s\"]*|\w+\.github\.io", text)
            assert not said or path.name == "address.py", (path, said)


def links_of(published, page, suffix):
    """The links of a page's template, by name; what it does not use is left out."""
    templates = Environment(loader=FileSystemLoader(ROOT / "book" / "_templates"))
    shown = templates.get_template("layout.html").render(
        pagename=page,
        page_source_suffix=suffix,
        published=published,
        pathto=lambda target, resource=False: target,
        toctree=lambda **options: "",
    )
    links = BeautifulSoup(shown, "html.parser").select(".chapter-links a")
    return {link.get_text(): link["href"] for link in links}


def test_buttons_of_a_chapter():
    download = {"Download notebook": "notebooks/01_x.ipynb"}
    assert links_of(None, "01_x", ".ipynb") == download
    assert links_of(PUBLISHED, "01_x", ".ipynb") == download | {
        "Open in Colab": PUBLISHED.colab("01_x"),
        "Edit": "https://github.com/Owner/book/edit/main/book/01_x.ipynb",
        "Repository": PUBLISHED.repository,
    }
    tag = address(ACTIONS | {"GITHUB_REF_TYPE": "tag"})
    assert "Edit" not in links_of(tag, "01_x", ".ipynb")
    assert not links_of(PUBLISHED, "intro", ".md")


@each_chapter
def test_the_site_has_the_buttons_of_its_address(site, name):
    links = article(site, name).select(".chapter-links a")
    shown = {link.get_text(): link["href"] for link in links}
    assert shown == links_of(address(), name, ".ipynb")


def test_chapters_of_the_toc_are_those_of_the_folder():
    assert [chapter.name for chapter in read_chapters(ROOT)] == NAMES
