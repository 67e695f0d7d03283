"""What a reader can do with a verdict: see both answers side by side, or contradict it."""

from __future__ import annotations

import ast
import difflib
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from bookkit.grammar import only_python
from workkit.alone import Among, quickly
from workkit.help import NO_BOOK
from workkit.package import book_answer
from workkit.report import of_one, pace, times_as_long
from workkit.store import write_whole
from workkit.workbook import Workbook

CHECK = "## The check"  # what stands above it is the reader's


def code_of(source: str) -> list[str]:
    """The lines of a definition, all laid out in one way, without what is only read."""
    tree = ast.parse(only_python(source))
    for node in ast.walk(tree):
        described = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if described and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def compare(book: Workbook, word: str) -> str:
    """Of a definition that has passed: lines, time and text, beside ours."""
    book.sync()
    name, known, _ = book.find(word)
    if not book.passes(name) or name not in book.store.answers:
        how = f"python check.py {known['key'].lstrip('0')}"
        return f"{book.short(name)} has not passed as it stands now: {how} comes first."
    if not (among := Among(book, known["key"])).complete:
        return NO_BOOK
    print("Both are timed …", file=sys.stderr, flush=True)
    mine, ours = (among.run(names)["seconds"] for names in ([name], []))
    texts = [code_of(text) for text in (book.store.answers[name], book_answer(name) or "")]
    counts = " and ".join(str(len(text)) for text in texts)
    lines = [f"{name}: {counts} lines, yours and ours, without docstrings and comments."]
    lines.append(f"{pace(times_as_long(mine, ours))}.")
    if texts[0] == texts[1]:
        return "\n".join([*lines, "The two are the same, line by line."])
    both = [*difflib.unified_diff(*texts, n=1000, lineterm="")][3:]
    return "\n".join([*lines, "Yours stands behind -, ours behind +:", "", *both])


def disagree(book: Workbook, word: str) -> str:
    """Puts what is needed to judge a verdict into one file, and sends it nowhere."""
    book.sync()
    name, known, _ = book.find(word)
    if name not in book.store.answers:
        return f"{book.short(name)} is not written yet."
    found = quickly(book, known["key"], name)
    path = book.folder / "yours" / f"disagree_{name}.md"
    said = f"# {name}: is this verdict right?\n\nWhat I think, and why:\n\n\n"
    if path.exists():  # what the reader has written stays
        said = path.read_text(encoding="utf-8").partition(CHECK)[0]
    page = [said + CHECK, "", "```", *of_one(book, known, name, found), "```", ""]
    page += ["## My definition", "", "```python", book.store.answers[name], "```", ""]
    page += ["## Where", "", *(f"- {line}" for line in versions()), ""]
    write_whole(path, "\n".join(page))
    where = path.relative_to(book.folder).as_posix()
    return f"{where} has your cell and the verdict. Say why, and give it to who can judge."


def versions() -> list[str]:
    """Of what decides about numbers here."""
    found = [f"Python {platform.python_version()}, {platform.platform()}"]
    for package in ("torch", "numpy", "attnlib"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} is not installed")
    return found
