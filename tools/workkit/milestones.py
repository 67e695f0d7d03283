"""Milestones: which are reached, what the next one needs, and trying one."""

from __future__ import annotations

import re
from typing import NamedTuple

from workkit import definitions, final
from workkit.checking import MEGABYTES, SECONDS, Workbook
from workkit.earlier import called
from workkit.process import run_job
from workkit.report import folded


class Milestone(NamedTuple):
    """What is reached, with which chapters, and how long a trial takes."""

    text: str
    chapters: str
    time: str


MILESTONES = {
    "attention": Milestone(
        "Your attention keeps the contract: `check_attention` passes", "01", "a second"
    ),
    "english": Milestone(
        "Your transformer writes English", "01 04 05 07 08 09", "a minute"
    ),
    "backward": Milestone(
        "Your backward trains a network without autograd", "10 11 12", "ten seconds"
    ),
    "tiles": Milestone("Your tiles give what plain attention gives", "14", "seconds"),
    "kernel": Milestone("Your kernel equals the oracle", "15", "seconds"),
    "final": Milestone(
        "Your package, installed, passes the package's own tests", "", "some minutes"
    ),
}


def reached(book: Workbook) -> dict[str, bool]:
    return {name: book.state["milestones"].get(name, False) for name in MILESTONES}


def show(book: Workbook, name: str) -> int:
    """Tries the one that is named; then all, which are reached, and what is next."""
    if name and name not in MILESTONES:
        print(f"which milestone is {name}? There are {', '.join(MILESTONES)}.")
        return 2
    good = attempt(book, name) if name else not book.sync()
    print()
    for one, done in reached(book).items():
        print(f"{'✓' if done else '·'} {one:10} {MILESTONES[one].text}")
    print(f"\n{next_one(book)}")
    return 0 if good or not name else 1


def next_one(book: Workbook) -> str:
    """How to try the first that is not reached."""
    for name, done in reached(book).items():
        if not done:
            first = wanting(book, name)
            how = f"python check.py milestone {name}, which takes {MILESTONES[name].time}."
            return f"Next, {name}: {first}\nThen: {how}" if first else f"Next: {how}"
    return "All of them are reached."


def attempt(book: Workbook, name: str) -> bool:
    """Tries a milestone on the reader's own package, and keeps whether it is reached."""
    for said in book.sync():
        print(said)
    if refused := wanting(book, name):
        print(f"Not tried. {refused}")
        return False
    why = final.problems(book) if name == "final" else problems(book, name)
    book.state["milestones"][name] = not why
    book.clock()
    book.save()
    if why:
        lines = [part for line in why for part in folded(line)]
        print("\n".join(["", "Not reached:", *lines]))
    else:
        print(f"\nReached: {MILESTONES[name].text}")
    return not why


def wanting(book: Workbook, name: str) -> str:
    """What is still to be written or given back, or to be mended before it is tried."""
    if name == "final":
        return final.wanting(book)
    states = {
        n: book.state_of(n)
        for key in MILESTONES[name].chapters.split()
        for n in book.data[key]["blanks"]
    }
    for state, said in (("to do", "First write"), ("lent", "Ours stand in for")):
        found = [n for n, is_ in states.items() if is_ == state]
        if found:
            _, known, blank = definitions.blank(book, found[0])
            more = f" and {len(found) - 1} more" if found[1:] else ""
            where = f"`{blank['symbol']}` ({called(known['key'])}){more}"
            lent = "; a milestone takes your own." if state == "lent" else "."
            return f"{said} {where}{lent}"
    return next((p for n, p in book.problems.items() if n in states), "")


def problems(book: Workbook, name: str) -> list[str]:
    """Why a trial failed, in a process with limits; what it shows is printed."""
    job = {"folder": str(book.folder), "milestone": name}
    job |= {"seconds": SECONDS, "megabytes": MEGABYTES}
    run = run_job(job, lambda line: print(line, flush=True))
    if not run["ended"]:
        return [line for line in run["notes"] if line]
    inside = re.search(r'(attnlib[\\/][^"]*)", line (\d+)', run["trace"])
    where = [f"in line {inside[2]} of {inside[1]}"] if inside else []
    return [run["ended"], *where]
