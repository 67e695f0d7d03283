"""The reader's package: what comes filled in and the reader's cells, by the book's tangle.

An answer that can't be taken, such as one with a syntax error, leaves the blank in its
place, so that the rest can still be imported; what is wrong with it is told.

The book's own package, where it is installed, gives answers and loans.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

from bookkit.chapters import BookError, Chapter, write_text
from bookkit.grammar import Cell
from bookkit.modules import read_modules
from bookkit.tangle import assembled
from workkit.slips import plainly


def read_data(folder: Path) -> dict[str, dict[str, Any]]:
    """What the workbook knows of each chapter, by its key, `01` or `A`."""
    paths = sorted((folder / "data" / "chapters").glob("*.json"))
    found = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    return {chapter["key"]: chapter for chapter in found}


def blanks_of(data: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The untouched cells, of definitions and of exercises, by name."""
    blanks = {n: b["source"] for c in data.values() for n, b in c["blanks"].items()}
    return blanks | {
        e["number"]: e["source"] for c in data.values() for e in c["exercises"]
    }


def in_two(source: str) -> tuple[list[str], str]:
    """The imports of an answer, which belong to the top of the module, and the rest."""
    nodes = ast.parse(source).body
    if not nodes:
        raise SyntaxError("there is nothing but comments")
    lines = source.split("\n")[: nodes[-1].end_lineno]
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    gone = {i for n in imports for i in range(n.lineno - 1, n.end_lineno)}
    kept = [line for i, line in enumerate(lines) if i not in gone and i > 0]
    return [ast.unparse(n) for n in imports], "\n".join(kept).strip("\n")


def refusal(name: str, source: str) -> str:
    """Why an answer can't be taken as it stands; empty if it can."""
    symbol = name.rpartition(".")[2]
    try:
        defined = {getattr(node, "name", "") for node in ast.parse(source).body}
        in_two(source)
    except SyntaxError as error:
        return f"{name}: line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
    if symbol not in defined:
        return f"{name}: the cell no longer defines {symbol}"
    return ""


def chapters_of(
    data: dict[str, dict[str, Any]], answers: dict[str, str], problems: dict[str, str]
) -> list[Chapter]:
    """The chapters as far as the tangle looks at them."""
    chapters: list[Chapter] = []
    heads: dict[str, Any] = {}  # the first cell of each module, which has its imports
    for known in data.values():
        cells = [Cell(cell_type="markdown", id="title", source=f"# {known['title']}")]
        for number, piece in enumerate(known["package"]):
            module, name = piece["module"], piece.get("blank")
            text = piece.get("text", "")
            if name:
                text = known["blanks"][name]["source"].partition("\n")[2]
                if name in answers and name not in problems:
                    imports, text = in_two(answers[name])
                    heads[module].source += "".join(f"\n{line}" for line in imports)
            cell = Cell(cell_type="code", id=f"c{number}", metadata={"blank": name or ""})
            cell.source = f"# attnlib/{module}.py\n{text}"
            heads.setdefault(module, cell)
            cells.append(cell)
        path = Path("book") / known["file"]
        chapters.append(Chapter(path, SimpleNamespace(cells=cells)))
    return chapters


def texts_of(
    data: dict[str, dict[str, Any]], answers: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The files of the package, and what is wrong with answers that are not in them."""
    problems = {n: said for n, a in answers.items() if (said := refusal(n, a))}
    while True:
        chapters = chapters_of(data, answers, problems)
        try:
            modules = read_modules(chapters).values()
            plain = {m.file: assembled(m, Path(), lambda text, *_: text) for m in modules}
            return plain, problems
        except BookError as error:
            place = re.match(r"(book/\S+), cell (c\d+)", str(error))
            found = [c for c in chapters if place and c.file == place[1]]
            cells = [x for c in found for x in c.cells if x.id == place[2]]
            name = cells[0].metadata.get("blank") if cells else ""
            if not name or name in problems:
                raise
            said = plainly(data, name, answers[name], str(error).partition(": ")[2])
            problems[name] = f"{name}: {said}"


def write_package(folder: Path, texts: dict[str, str]) -> list[str]:
    """Writes the modules that changed, and says which."""
    changed = []
    for file, text in texts.items():
        path = folder / file
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            changed.append(file)
    return changed


def book_folder() -> Path | None:
    """Where the book's own attnlib is installed, if it is."""
    if named := os.environ.get("ATTNLIB_BOOK"):
        return Path(named)
    try:
        found = importlib.metadata.distribution("attnlib")
    except importlib.metadata.PackageNotFoundError:
        return None
    if origin := found.read_text("direct_url.json"):
        url = json.loads(origin)["url"]
        local = Path(url2pathname(unquote(urlparse(url).path))) / "attnlib"
        if url.startswith("file:") and local.is_dir():
            return local
    folder = Path(str(found.locate_file("attnlib")))
    return folder if folder.is_dir() else None


def book_answer(name: str) -> str | None:
    """The book's definition of a blank, from its installed package."""
    module, _, symbol = name.rpartition(".")
    path = (book_folder() or Path("nowhere")) / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return None
    source = path.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if getattr(node, "name", "") == symbol:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines = source.splitlines()[first - 1 : node.end_lineno]
            return (
                f"# attnlib/{module.replace('.', '/')}.py: yours, {symbol}\n"
                + "\n".join(lines)
            )
    return None
