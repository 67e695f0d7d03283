"""The reader's folder: what is written in it, and what of that passes."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from workkit.package import blanks_of, book_answer, read_data, texts_of, write_package
from workkit.store import Store, homes_of, lost, only_one, put_aside, read_own, write_whole

KEPT = ("passed", "failed", "lent", "hints", "answers", "equations", "exercises")
KEPT += ("milestones", "days")  # dictionaries in progress.json, by name


class Workbook:
    """The reader's folder.

    Args:
        folder: where it is.
        in_kernel: whether a notebook runs this, whose editor alone then writes notebooks.
    """

    def __init__(self, folder: Path, in_kernel: bool = False) -> None:
        self.folder, self.in_kernel = folder, in_kernel
        self.data = read_data(folder)
        self.state_file = folder / "yours" / "progress.json"
        self.state: dict[str, Any] = {name: {} for name in KEPT}
        self.state |= read_own(self.state_file)[0]
        self.before = copy.deepcopy(self.state)
        self.store = Store(folder, blanks_of(self.data))
        self.problems: dict[str, str] = {}
        self.asides: list[str] = []  # what is to be said before the answer to a word

    def save(self) -> None:
        """Writes what has changed here, beside what another run has written since."""
        with only_one(self.folder):
            now, damaged = read_own(self.state_file)
            if damaged:
                self.asides.append(put_aside(self.state_file))
            self.state = merged(now, self.before, self.state)
            write_whole(self.state_file, json.dumps(self.state, indent=1))
        self.before = copy.deepcopy(self.state)

    def state_of(self, name: str) -> str:
        if name in self.store.answers:
            return "written"
        return "lent" if name in self.state["lent"] else "to do"

    def passes(self, name: str) -> bool:
        """Whether what is written now is what passed."""
        kept = self.state["passed"].get(name)
        if name in self.problems:
            return False
        mine = self.store.answers.get(name)
        return bool(kept) and (kept is True or mine is None or kept == digest(mine))

    def find(self, name: str) -> tuple[str, dict, dict]:
        """A blank by its whole name, or its last part: name, chapter, itself.

        Of several with the same last part, the first that does not pass yet.
        """
        every = [(n, k, b) for k in self.data.values() for n, b in k["blanks"].items()]
        found = [one for one in every if name == one[0]]
        found = found or [one for one in every if name == one[2]["symbol"]]
        if not found:
            raise SystemExit(self.unknown(name, every))
        open_ones = [one for one in found if not self.passes(one[0])]
        taken = (open_ones or found)[0]
        if others := [n for n, _, _ in found if n != taken[0]]:
            said = f"This is {taken[0]}, {called(taken[1]['key'])}"
            self.asides.append(f"{said}; for the other, say {' or '.join(others)}.")
        return taken

    def unknown(self, name: str, every: list[tuple[str, dict, dict]]) -> str:
        """That there is no such definition, and which are near."""
        names = {b["symbol"].lower(): b["symbol"] for _, _, b in every}
        names |= {n.lower(): n for n, _, _ in every if "." in name}
        if near := difflib.get_close_matches(name.lower(), names, 1, 0.6):
            return f"There is no definition {name}: did you mean `{names[near[0]]}`?"
        begun = next((k for n, k, _ in every if not self.passes(n)), every[-1][1])
        there = ", ".join(f"`{b['symbol']}`" for b in begun["blanks"].values())
        here = called(begun["key"])
        return f"There is no definition {name}; those of {here} are {there}."

    def short(self, name: str) -> str:
        """The last part of a name where no other definition has it, else all of it."""
        last = [b["symbol"] for k in self.data.values() for b in k["blanks"].values()]
        symbol = name.rpartition(".")[2]
        return symbol if last.count(symbol) == 1 else name

    def answers(self) -> dict[str, str]:
        """The reader's, and ours where they are lent."""
        lent = {n: book_answer(n) for n in self.state["lent"] if self.state_of(n) == "lent"}
        asked = {name for known in self.data.values() for name in known["blanks"]}
        mine = {n: a for n, a in self.store.answers.items() if n in asked}
        return {n: a for n, a in lent.items() if a} | mine

    def sync(self) -> list[str]:
        """Takes the answers from the notebooks and writes the package anew."""
        said = []
        with self.store.changing():
            if back := self.store.collect(homes_of(self.data), not self.in_kernel):
                what = "answer of yours was" if back == 1 else "answers of yours were"
                said.append(
                    f"{back} {what} put back into the notebooks; to empty a cell, use "
                    "python check.py reset NAME."
                )
            said += lost(self.folder, self.data, self.store.answers)
            told = " ".join(said)  # of one that held answers, more is said already
            said += [x for x in self.store.told if x.partition(" ")[0] not in told]
            self.store.told = []
            texts, self.problems = texts_of(self.data, self.answers())
            write_package(self.folder, texts)
        return said

    def clock(self) -> None:
        """Adds the time since the last sign of work, unless it was a pause."""
        now = time.time()
        gap = now - self.state.get("last", now)
        self.state["minutes"] = self.state.get("minutes", 0) + (
            gap / 60 if gap < 1200 else 2
        )
        self.state["last"] = now


def merged(theirs: dict[str, Any], before: dict[str, Any], mine: dict[str, Any]) -> dict:
    """What another run has written, with what has changed here since `before`."""
    made = copy.deepcopy(theirs)
    for key, value in mine.items():
        old = before.get(key)
        if not isinstance(value, dict):
            made[key] = value if value != old else made.get(key, value)
            continue
        into = made.setdefault(key, {})
        for gone in (old or {}).keys() - value.keys():
            into.pop(gone, None)
        into |= {k: v for k, v in value.items() if k not in (old or {}) or old[k] != v}
    return made


def digest(source: str) -> str:
    """Of a text that passed: blank lines and spaces at the ends of lines do not count."""
    lines = (line.rstrip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def called(key: str) -> str:
    return f"chapter {key.lstrip('0')}" if key.isdigit() else f"appendix {key}"
