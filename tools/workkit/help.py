"""Hints, answers and loans: a step at a time, and each of them noted for the reader."""

from __future__ import annotations

import json
import re
from urllib.error import URLError
from urllib.request import urlopen

from workkit.package import book_answer
from workkit.store import name_of, write_whole
from workkit.workbook import Workbook

NO_BOOK = (
    "the book's package is not installed: pip install attnlib, or see the chapter's page"
)


def hint(book: Workbook, word: str) -> str:
    """The first hint, at the second call the second."""
    name, _, blank = book.find(word)
    count = book.state["hints"].get(name, 0)
    if count >= len(blank["hints"]):
        last = "Those were the hints. "
        short = book.short(name)
        return f"{last}{blank['hints'][-1]}\nOur answer: check.py answer {short}"
    book.state["hints"][name] = count + 1
    book.save()
    return f"Hint {count + 1} of {len(blank['hints'])}: {blank['hints'][count]}"


def answer(book: Workbook, word: str) -> str:
    """Our answer, once the hints have been read."""
    name, known, blank = book.find(word)
    if book.state["hints"].get(name, 0) < len(blank["hints"]):
        return f"First the hints: {hint(book, name)}"
    found = book_answer(name) or from_site(book, name, known)
    if found is None:
        return NO_BOOK
    book.state["answers"][name] = True
    book.save()
    return f"{found}\n\n# Noted, for you alone: this one you have seen."


def from_site(book: Workbook, name: str, known: dict) -> str | None:
    """The definition as the chapter's notebook on the site has it."""
    site = json.loads((book.folder / "data" / "site.json").read_text("utf-8"))["site"]
    if not site:
        return None
    try:
        with urlopen(f"{site}notebooks/{known['file']}", timeout=20) as page:
            cells = json.load(page)["cells"]
    except (URLError, ValueError, TimeoutError):
        return None
    symbol = name.rpartition(".")[2]
    for cell in cells:
        source = "".join(cell["source"])
        module = name.rpartition(".")[0].replace(".", "/")
        found = re.search(
            rf"^(class|def) {symbol}\b[\s\S]*?(?=^\S(?!\s*->)|\Z)", source, re.M
        )
        if found and f"attnlib/{module}.py" in source.partition("\n")[0]:
            return found[0].rstrip()
    return None


def lend(book: Workbook, word: str) -> str:
    """Ours stand in for what does not pass, up to a chapter."""
    if word not in book.data:
        return "lend up to which chapter? For example: check.py lend 3"
    new = []
    for key, known in book.data.items():
        for name in known["blanks"]:
            if key <= word and name not in book.state["passed"]:
                if book_answer(name) is None:
                    return NO_BOOK
                if name not in book.store.answers:
                    new.append(name)
    book.state["lent"] |= dict.fromkeys(new, True)
    book.save()
    book.sync()
    return f"{len(new)} definitions are ours until you write them; they count as lent."


def give_back(book: Workbook, _: str) -> str:
    count = len(book.state["lent"])
    book.state["lent"] = {}
    book.save()
    book.sync()
    return f"{count} definitions are given back."


def reset(book: Workbook, word: str) -> str:
    """Empties the cell of a definition, or of an exercise such as 3.1."""
    name = word if word in book.store.blanks else book.find(word)[0]
    book.sync()
    with book.store.changing():
        book.store.reset(name)
    for path in (book.folder / "book").glob("*.ipynb"):
        notebook = json.loads(path.read_text("utf-8"))
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and name_of(source) == name:
                cell["source"] = book.store.blanks[name].splitlines(keepends=True)
                text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
                write_whole(path, text)
    for kept in ("passed", "failed"):
        book.state[kept].pop(name, None)
    book.save()
    book.sync()
    return f"{name} is empty again; what it held is in yours/history.jsonl."


ACTIONS = {
    "hint": hint,
    "answer": answer,
    "lend": lend,
    "return": give_back,
    "reset": reset,
}
