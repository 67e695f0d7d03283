"""Checks of a chapter: what they need, and what came of them.

What stands on an earlier chapter waits for it, where it can't be tried among ours.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

from workkit.alone import sort_out
from workkit.cells import imported, starts_processes
from workkit.jobs import blame_end, run
from workkit.naming import equations_held, exercises_done, judge
from workkit.package import book_answer, texts_of, write_package
from workkit.report import times_as_long
from workkit.slips import told_of_none
from workkit.workbook import Workbook, called, digest

UNWRITTEN = re.compile(r"NotImplementedError: ([\w.]+): this is yours to write")
SOME = ("safetensors", "tokenizers", "transformers", "gguf")
GET = "python -m pip install -r requirements.txt"
FORK = "a system that can copy a process"


def check(book: Workbook, key: str) -> dict[str, Any]:
    """Runs the checks of a chapter, and keeps what passed."""
    known = book.data[key]
    synced = book.sync()  # before the warnings, which are of what it read
    said = warnings(book, key) + synced
    states = {name: book.state_of(name) for name in known["blanks"]}
    if names := absent(known):
        return unchecked(key, known, states, names)
    written = [name for name, state in states.items() if state == "written"]
    ran = run(book, known, book.answers(), written)
    blanks = judge(known, ran["notes"], states)
    for name, problem in book.problems.items():
        if name in blanks:
            blanks[name] = {"state": "failed", "problem": problem}
    blame_end(ran, blanks)
    wait_for(book, key, ran["notes"], blanks)
    sort_out(book, key, blanks, ran["notes"])
    held = equations_held(known, ran["notes"], blanks)
    done = exercises_done(known, ran["notes"])
    for name, found in blanks.items():
        for kept in ("passed", "failed"):
            book.state[kept].pop(name, None)
        if found["state"] == "passed":
            book.state["passed"][name] = digest(book.store.answers[name])
        elif found["state"] == "failed":
            book.state["failed"][name] = True
            told_of_none(found, name, book.store.answers.get(name, ""))
    book.state["equations"] |= {label: ok for label, ok in held.items()}
    solved = {n: note["kind"] == "passed" for n, note in done.items()}
    book.state["exercises"] |= solved
    book.clock()
    book.save()
    result = {"chapter": key, "blanks": blanks, "equations": held, "exercises": done}
    return result | {"said": said, "ended": ran["ended"], "seconds": ran["seconds"]}


def time_ratio(book: Workbook, key: str) -> float:
    """How long the checks take with the reader's code, over how long with ours."""
    known, mine = book.data[key], book.answers()
    ours = {n: text for n in known["blanks"] if (text := book_answer(n))}
    if len(ours) < len(known["blanks"]):
        return 0.0
    both = []
    try:
        for answers in (mine, mine | ours):
            write_package(book.folder, texts_of(book.data, answers)[0])
            both.append(run(book, known, answers)["seconds"])
    finally:  # also when it is stopped: ours is not to stay in the package
        book.sync()
    return times_as_long(*both)


def before(book: Workbook, key: str) -> dict[str, str]:
    """The definitions of the chapters before this one, each with its chapter."""
    keys = list(book.data)[: list(book.data).index(key)]
    return {name: k for k in keys for name in book.data[k]["blanks"]}


def unsound(book: Workbook, key: str) -> dict[str, str]:
    """Earlier definitions that are written but not what passed, and why."""
    found = {}
    for name in before(book, key):
        if book.state_of(name) != "written" or book.passes(name):
            continue
        if name in book.problems:
            found[name] = "can't be taken as it stands"
        elif name in book.state["passed"]:
            found[name] = "has changed since it passed"
        elif name in book.state["failed"]:
            found[name] = "does not pass"
    return found


def warnings(book: Workbook, key: str) -> list[str]:
    """What is to be said of earlier chapters before anything else."""
    chapter, lines = before(book, key), []
    for name, why in unsound(book, key).items():
        key = chapter[name]
        told = f"`{book.short(name)}` ({called(key)}) {why}"
        lines.append(f"{told}: run python check.py {key.lstrip('0')} first.")
    return lines


def wait_for(book: Workbook, key: str, notes: list[dict], blanks: dict[str, dict]) -> None:
    """What stands on an earlier definition that is not there, or not sound, waits for it.

    A definition whose numbers are those of a known mistake is told so all the same.
    """
    shaky = [*unsound(book, key)]
    gone = [
        n for n in before(book, key) if n in book.problems or book.state_of(n) == "to do"
    ]
    own = {n.rpartition(".")[2] for n, found in blanks.items() if found["state"] == "to do"}
    for name, found in blanks.items():
        mine = [n for n in notes if n["kind"] == "unwritten" and name in n["uses"]]
        asked = {missing(note) for note in mine} - own
        absent = [n for n in gone if n.rpartition(".")[2] in asked]
        if absent and found["state"] in ("passed", "waits"):
            blanks[name] = {"state": "waits", "for": absent}
        elif shaky and "note" in found and not found["mistakes"]:
            blanks[name] = {"state": "waits", "for": shaky}


def missing(note: dict[str, Any]) -> str:
    """The definition whose blank raised."""
    match = UNWRITTEN.match(note.get("came", ""))
    return match[1].partition(".")[0] if match else ""


def absent(known: dict[str, Any]) -> list[str]:
    """The libraries that the cells of a chapter import and that are not here, and FORK."""
    wanted = {name.partition(".")[0] for name in imported(known["cells"])}
    lacking = [name for name in SOME if name in wanted and find_spec(name) is None]
    copied = sys.platform == "linux" or not starts_processes(known["cells"])
    return lacking if copied else [*lacking, FORK]


def asked(key: str, names: list[str]) -> str:
    """One line for the reader."""
    if FORK in names:
        where = "they run on Linux, or on Windows in WSL"
        return f"The checks of {called(key)} start copies of a process: {where}"
    *most, last = names
    list_, is_ = (f"{', '.join(most)} and {last}", "are") if most else (last, "is")
    where = called(key)
    needs = f"{where[0].upper()}{where[1:]} needs {list_}, which {is_} not installed"
    return f"{needs}: {GET}"


def unchecked(key: str, known: dict[str, Any], states: dict[str, str], names: list) -> dict:
    """What a check says that could not be made: everything waits, and nothing is kept."""
    blanks = {
        name: {"state": "waits", "for": names} if state == "written" else {"state": state}
        for name, state in states.items()
    }
    left = {"kind": "unwritten", "came": f"waits for {names[0]}"}
    exercises = {exercise["number"]: left for exercise in known["exercises"]}
    equations = dict.fromkeys(known["equations"], False)
    said = [asked(key, names)]
    made = {"chapter": key, "blanks": blanks, "equations": equations, "said": said}
    return made | {"exercises": exercises, "ended": "", "seconds": 0.0}
