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
    mistakes = named(known["mistakes"], notes, name)
    labels = known["blanks"][name]["labels"]

    def size(note: dict) -> tuple[int, int]:
        crashed = note["kind"] == "raised"
        return crashed, len(str(note.get("inputs", ""))) + len(str(note.get("compared", "")))

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
    bad = [n for n in reliable(notes) if n["kind"] in BAD]
    return [[n["key"], n["kind"], n.get("digits", [])] for n in bad]


def named(mistakes: list[dict], notes: list[dict], name: str) -> list[str]:
    """The sentences of the mistakes that compute what the reader's definition computes."""
    sure = [n for n in reliable(notes) if name in n["uses"]]
    bad = defaultdict(list)
    for note in sure:
        if note["kind"] in BAD:
            bad[note["key"]].append([note["kind"], note.get("digits", [])])
    fine = {n["key"] for n in sure if n["kind"] == "passed"} - bad.keys()
    told = []
    for mistake in mistakes:
        if name not in mistake["blanks"]:
            continue
        theirs = defaultdict(list)
        for key, *rest in mistake["signature"]:
            theirs[key].append(rest)
        if not bad or fine & theirs.keys():
            continue
        if all(alike(theirs.get(key), values) for key, values in bad.items()):
            told.append(mistake["mistake"])
    return list(dict.fromkeys(told))


def equations_held(known: dict[str, Any], notes: list[dict]) -> dict[str, bool]:
    """Of each equation whether everything that checks it passes."""
    held = {}
    for label in known["equations"]:
        about = [n for n in notes if label in n["labels"]]
        held[label] = bool(about) and all(n["kind"] == "passed" for n in about)
    return held


def exercises_done(notes: list[dict]) -> dict[str, dict]:
    return {n["exercise"]: n for n in notes if "exercise" in n}
