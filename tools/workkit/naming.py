"""From what happened in the checks to what the reader is told: who, where, which mistake.

A failing assertion counts against the latest definition that stands behind it, unless an
earlier one behind it has failed already: then the later one waits. A mistake is named where
every number that came is one that this mistake gives, and every assertion that passed
passes with it, too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from workkit.values import alike

BAD = ("failed", "raised")
BREAKS = ("unwritten", "skipped", "raised")


def judge(
    known: dict[str, Any], notes: list[dict], states: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """For each blank of a chapter: its state and, where it failed, why.

    `states` says of a blank whether it is "to do", "lent" or "written".
    """
    order = list(known["blanks"])
    failing: dict[str, list[dict]] = defaultdict(list)
    passing: set[str] = set()
    open_ones: set[str] = set()
    for note in notes:
        mine = [name for name in order if name in note["uses"]]
        if note["kind"] in BAD and mine:
            failing[mine[-1]].append(note)
        elif note["kind"] == "passed":
            passing.update(mine)
        elif note["kind"] == "unwritten":
            open_ones.update(mine)
    found: dict[str, dict[str, Any]] = {}
    failed: set[str] = set()
    for name in order:
        own = [n for n in failing[name] if not failed & set(n["uses"])]
        if states[name] != "written":
            found[name] = {"state": states[name]}
        elif own:
            failed.add(name)
            found[name] = {"state": "failed"} | reason(known, notes, name, own)
        elif failing[name]:
            found[name] = {"state": "waits", "for": sorted(failed)}
        elif name in passing:
            found[name] = {"state": "passed"}
        else:
            missing = [o for o in order if states[o] == "to do"]
            found[name] = {"state": "waits", "for": missing}
    return found


def reason(known: dict, notes: list[dict], name: str, own: list[dict]) -> dict[str, Any]:
    """The assertion to show, its equation, and the mistake if it is known."""
    mistakes = named(known["mistakes"], notes, name, own)
    labels = known["blanks"][name]["labels"]

    def size(note: dict) -> tuple[bool, bool, int]:
        crashed, shows = note["kind"] == "raised", bool(note.get("compared"))
        return (
            crashed,
            not shows,
            len(str(note.get("inputs", ""))) + len(str(note.get("compared", ""))),
        )

    first = min(own, key=size)
    near = [label for label in first["labels"] if label in labels] or first["labels"]
    return {"note": first, "labels": near[:2], "mistakes": mistakes, "others": len(own) - 1}


def reliable(notes: list[dict]) -> list[dict]:
    """The notes of each cell up to the first statement that broke off."""
    broken: set[str] = set()
    kept = []
    for note in notes:
        if note["cell"] not in broken:
            kept.append(note)
        if note["kind"] in BREAKS:
            broken.add(note["cell"])
    return kept


def signature(notes: list[dict]) -> list[list[Any]]:
    """What is kept of a run with a mistake: each assertion that failed, with its digits."""
    bad = [n for n in notes if n["kind"] in BAD]
    return [[n["key"], n["kind"], n.get("digits", [])] for n in bad]


def named(mistakes: list[dict], notes: list[dict], name: str, own: list[dict]) -> list[str]:
    """The sentences of the mistakes that compute what the reader's definition computes.

    Of `own`, what only this definition can be blamed for, all that came before anything
    else broke off must be what the mistake makes of it; if that is nothing, half of it.
    """
    sure = {id(note) for note in reliable(notes)}
    fine = {n["key"] for n in notes if name in n["uses"] and n["kind"] == "passed"}
    bad, kept = defaultdict(list), defaultdict(bool)
    for note in own:
        bad[note["key"]].append([note["kind"], note.get("digits", [])])
        kept[note["key"]] |= id(note) in sure
    told = []
    for mistake in (m for m in mistakes if name in m["blanks"]):
        theirs = defaultdict(list)
        for key, *rest in mistake["signature"]:
            theirs[key].append(rest)
        hits = {key for key, values in bad.items() if alike(theirs.get(key), values)}
        must = {key for key in bad if kept[key]}
        if (
            must <= hits
            and 2 * len(hits) >= len(bad)
            and not (fine - bad.keys()) & theirs.keys()
        ):
            told.append((len(hits), mistake["mistake"]))
    most = max((hits for hits, _ in told), default=0)
    return list(dict.fromkeys(said for hits, said in told if hits == most))


def equations_held(known: dict, notes: list[dict], blanks: dict) -> dict[str, bool]:
    """Of each equation whether everything that checks it passes on the reader's code.

    One that no code of the reader's stands behind is theirs when the chapter is.
    """
    states = {name: found["state"] for name, found in blanks.items()}
    all_passed = all(state == "passed" for state in states.values())
    done = {name for name, state in states.items() if state in ("passed", "lent")}
    held = {}
    for label in known["equations"]:
        about = [n for n in notes if label in n["labels"]]
        right = bool(about) and all(n["kind"] == "passed" for n in about)
        held[label] = right and (all_passed or any(done & set(n["uses"]) for n in about))
    return held


def exercises_done(known: dict[str, Any], notes: list[dict]) -> dict[str, dict]:
    """What the checks said to each exercise, and of which mistake they say that."""
    found = {n["exercise"]: n for n in notes if "exercise" in n}
    for number, note in found.items():
        said = [number, note["kind"], note["came"]]
        told = [m for m in known["mistakes"] if m["signature"][:1] == [said]]
        closer = [m for m in told if alike(m["signature"][1:], [note["returns"]])]
        note["mistakes"] = [m["mistake"] for m in closer or told]
        if note["kind"] != "failed":
            note["mistakes"] = []
    return found
