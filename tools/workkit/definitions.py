"""Finding the definition that a reader names, and its shortest name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from workkit import earlier

if TYPE_CHECKING:
    from workkit.checking import Workbook


def blank(book: Workbook, name: str) -> tuple[str, dict, dict]:
    """A blank by its whole name, or its last part: name, chapter, itself.

    Of several with the same last part, the first that does not pass yet.
    """
    every = [
        (n, known, b) for known in book.data.values() for n, b in known["blanks"].items()
    ]
    found = [one for one in every if name == one[0]]
    found = found or [one for one in every if name == one[2]["symbol"]]
    if not found:
        raise SystemExit(unknown(book, name, every))
    open_ones = [one for one in found if not earlier.passes(book, one[0])]
    taken = (open_ones or found)[0]
    if others := [n for n, _, _ in found if n != taken[0]]:
        said = f"This is {taken[0]}, {earlier.called(taken[1]['key'])}"
        book.asides.append(f"{said}; for the other, say {' or '.join(others)}.")
    return taken


def unknown(book: Workbook, name: str, every: list[tuple[str, dict, dict]]) -> str:
    """That there is no such definition, and which are near."""
    names = {b["symbol"].lower(): b["symbol"] for _, _, b in every}
    names |= {n.lower(): n for n, _, _ in every if "." in name}
    if near := difflib.get_close_matches(name.lower(), names, 1, 0.6):
        return f"There is no definition {name}: did you mean `{names[near[0]]}`?"
    begun = next((k for n, k, _ in every if not earlier.passes(book, n)), every[-1][1])
    there = ", ".join(f"`{b['symbol']}`" for b in begun["blanks"].values())
    here = earlier.called(begun["key"])
    return f"There is no definition {name}; those of {here} are {there}."


def called(book: Workbook, name: str) -> str:
    """The last part of a name where no other definition has it, else all of it."""
    last = [b["symbol"] for known in book.data.values() for b in known["blanks"].values()]
    symbol = name.rpartition(".")[2]
    return symbol if last.count(symbol) == 1 else name
