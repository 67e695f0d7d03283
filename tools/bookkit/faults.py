"""Plant the mistakes that are kept in book/faults/, and say which no check catches.

A mistake in an equation is caught if a cell with `# checks <label>` raises AssertionError,
a wrong answer to an exercise if its check raises one that says something.

The chapter runs once. A mistake is planted in a fork, before the first cell that it
changes; of the cells that follow, only those run that the check needs. They must pass
without the mistake, which is seen once for all mistakes in the same cells. A label whose
comment names code must have a cell among those that check it in which that code runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, Chapter, parser, read_chapters, run
from bookkit.execute import select
from bookkit.mistakes import Fault, read_faults
from bookkit.stage import Calls, Stage, prepare


def patched(stage: Stage, fault: Fault) -> dict[int, str]:
    """The cells that a fault changes, by index, with their new source."""
    new: dict[int, str] = {}
    for old, text in fault.changes:
        now = {**dict(enumerate(stage.sources)), **new}
        times = {index: source.count(old) for index, source in now.items()}
        if sum(times.values()) != 1:
            count = sum(times.values())
            raise BookError(f"{fault}\n  found {count} times instead of once: {old}")
        index = max(times, key=times.__getitem__)
        new[index] = now[index].replace(old, text)
    return new


def judge(
    stage: Stage, fault: Fault, unchanged: Callable[..., str]
) -> tuple[int, Callable[[], str]]:
    """The cell before which a fault is planted, and what then says why it is not caught."""
    if fault.kind != "equation":
        found = [cell.exercise for cell in stage.cells]
        if fault.subject not in found:
            raise BookError(f"{fault}\n  no cell starts with # Solution {fault.subject}")
        first = found.index(fault.subject)
        return first, lambda: unless_caught(stage.attempt_code(fault.answer))
    changes = patched(stage, fault)
    return min(changes), lambda: unless_seen(stage, fault.subject, changes, unchanged)


def unless_caught(said: str) -> str:
    """Empty if an exercise's check has refused an answer, in words."""
    return "" if re.match("caught: .", said) else said


def unless_seen(
    stage: Stage, label: str, changes: dict[int, str], unchanged: Callable[..., str]
) -> str:
    """Empty if a cell that checks the label catches the change; otherwise what happened."""
    first, told = min(changes), []
    for target in range(first, len(stage.cells)):
        if label in stage.cells[target].labels:
            said = stage.attempt(first, target, changes, set(changes))
            if said.startswith("caught"):
                said = unchanged(first, target, frozenset(changes))
                if said == "passed":
                    return ""
                said = f"without the mistake: {said}"
            told.append(f"cell {stage.cells[target].id}: {said}")
    return "\n  ".join(told) or "no cell that checks it comes after the change"


def act(
    chapter: Chapter, faults: list[Fault], tell: Callable[[str], None]
) -> Iterator[str]:
    """Runs the chapter with each mistake planted in its turn; yields what is wrong."""
    stage = Stage(chapter)
    unchanged = cache(lambda first, target, cells: stage.attempt(first, target, {}, cells))
    plans = [(fault, *judge(stage, fault, unchanged)) for fault in faults]
    unrun = {(e.label, symbol) for e in chapter.equations for symbol in e.symbols}
    done = 0
    for index, source in enumerate(stage.sources):
        for fault, find in ((fault, find) for fault, at, find in plans if at == index):
            start, done = time.perf_counter(), done + 1
            said = find()
            took = f"{done}/{len(plans)} {time.perf_counter() - start:5.1f} s"
            tell(f"{took}  {'NOT CAUGHT' if said else 'caught'}  {fault}")
            if said:
                yield f"{fault}\n  {said}"
        wanted = {pair for pair in unrun if pair[0] in stage.cells[index].labels}
        with Calls() if wanted else contextlib.nullcontext(set()) as names:
            stage.run(stage.cells[index].id, source)
        names |= set(re.findall(r"\b[A-Z][A-Z_\d]+\b", source))  # constants are not called
        unrun -= {pair for pair in wanted if pair[1].rpartition(".")[2] in names}
    for label, symbol in sorted(unrun):
        yield f"{label}: none of the cells that check it runs {symbol}"


def chosen(faults: list[Fault], words: list[str]) -> list[Fault]:
    """Those of a subject, or with some words in their sentence; all, if none is named."""
    found = {w: [f for f in faults if w == f.subject or w in f.mistake] for w in words}
    if missing := [word for word, its in found.items() if not its]:
        raise BookError(f"no mistake is kept for {', '.join(missing)}")
    return [f for f in faults if not words or any(f in its for its in found.values())]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("chapter", help="such as 01")
    about = "labels, exercises, or parts of a mistake's sentence"
    options.add_argument("--only", nargs="+", default=[], metavar="WHAT", help=about)
    args = options.parse_args()
    (chapter,) = select(read_chapters(args.root), [args.chapter], args.root)
    faults = chosen(read_faults(args.root, chapter), args.only)
    prepare(chapter)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        tell = partial(print, flush=True, file=sys.stderr)
        problems = list(act(chapter, faults, tell))
    print("\n".join(problems) or f"{chapter.name}: all {len(faults)} mistakes caught")
    return 1 if problems else 0


if __name__ == "__main__":
    run(main)
