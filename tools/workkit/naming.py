"""From what happened in the checks to what the reader is told: who, where, which mistake.

A failing assertion counts against the latest definition that stands behind it, unless an
earlier one behind it has failed already: then the later one waits. What raises an error
counts against the latest of those that were running. A mistake is named where every number
that came is one that this mistake gives, and every assertion that passed passes with it,
too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

BAD = ("failed", "raised")
BREAKS = ("unwritten", "skipped", "raised")
MOST = 16  # assertions that are kept of a mistake; of a quarter of them all the digits


def judge(
    known: dict[str, Any], notes: list[dict], states: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """For each blank of a chapter: its state and, where it failed, why.

    `states` says of a blank whether it is "to do", "lent" or "written".
    """
    order, notes = list(known["blanks"]), with_owners(notes)
    failing: dict[str, list[dict]] = defaultdict(list)
    passing: set[str] = set()
    begun: dict[str, str] = {}  # what is left of a class of which some is written
    for note in notes:
        mine = [name for name in order if name in note["uses"]]
        if note["kind"] in BAD and mine:
            ran = [name for name in mine if name in note.get("running", [])]
            failing[(ran or mine)[-1]].append(note)
        elif note["kind"] == "passed":
            passing.update(mine)
        elif note["kind"] == "unwritten" and note.get("running"):
            begun[note["running"][-1]] = note["came"].partition(": ")[2]
    found: dict[str, dict[str, Any]] = {}
    failed: set[str] = set()
    for name in order:
        own = [n for n in failing[name] if not failed & set(n["uses"])]
        if states[name] != "written":
            found[name] = {"state": states[name]}
        elif own:
            who, why = blamed(known, notes, name, own, states)
            failed.add(who)
            found[name] = {"state": "waits", "for": [who]}
            found[who] = {"state": "failed"} | why
        elif failing[name]:
            found[name] = {"state": "waits", "for": sorted(failed)}
        elif name in begun:
            found[name] = {"state": "failed", "problem": begun[name]}
        elif name in passing:
            found[name] = {"state": "passed"}
        else:
            missing = [o for o in order if states[o] == "to do"]
            found[name] = {"state": "waits", "for": missing}
    return found


def with_owners(notes: list[dict]) -> list[dict]:
    """A failure behind which no definition seems to stand has those of the one before it.

    What a definition did to its input, say, shows in a line that does not name it.
    """
    found, before = [], {}
    for note in notes:
        lost = note["kind"] in BAD and not note["uses"] and "exercise" not in note
        found.append(note | {"uses": before.get(note["cell"], [])} if lost else note)
        if note["uses"]:
            before[note["cell"]] = note["uses"]
    return found


def blamed(
    known: dict, notes: list[dict], name: str, own: list[dict], states: dict[str, str]
) -> tuple[str, dict]:
    """Whose mistake it is: that of the latest definition, or a known one of an earlier."""
    behind = set.intersection(*(set(note["uses"]) for note in own))
    behind = {n for n in behind - {name} if states[n] == "written"}
    order = [name, *(n for n in reversed(known["blanks"]) if n in behind)]
    reasons = [(who, reason(known, notes, who, own)) for who in order]
    return next(((who, why) for who, why in reasons if why["mistakes"]), reasons[0])


def reason(known: dict, notes: list[dict], name: str, own: list[dict]) -> dict[str, Any]:
    """The assertion to show, its equation, and the mistake if it is known."""
    order = list(known["blanks"])
    later = set(order[order.index(name) + 1 :])
    mistakes = named(known["mistakes"], notes, name, own, later)
    labels = known["blanks"][name]["labels"]

    def size(note: dict) -> int:
        return len(str(note.get("inputs", ""))) + len(str(note.get("compared", "")))

    def differs(note: dict) -> bool:
        return len(set(note.get("compared", []))) > 1  # NaN is not NaN

    clear = [note for note in own if differs(note) or note["kind"] == "raised"] or own
    here = [note for note in clear if note["cell"] == clear[0]["cell"]]
    first = min(list(filter(differs, here)) or here, key=size)
    near = [label for label in first["labels"] if label in labels] or first["labels"]
    return {"note": first, "labels": near[:2], "mistakes": mistakes, "others": len(own) - 1}


def equations_held(known: dict, notes: list[dict], blanks: dict) -> dict[str, bool]:
    """Of each equation whether everything that checks it passes on the reader's code.

    What no code of this chapter's reader stands behind is theirs when the chapter is: it
    may count, as chapter 3 does, what our definition of an earlier chapter saves.
    """
    states = {name: found["state"] for name, found in blanks.items()}
    all_passed = all(state == "passed" for state in states.values())
    done = {name for name, state in states.items() if state in ("passed", "lent")}
    held = {}
    for label in known["equations"]:
        about = [n for n in notes if label in n["labels"]]
        counts = [n for n in about if n["uses"] or not all_passed]
        right = bool(about) and all(n["kind"] == "passed" for n in counts)
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
    """What is kept of a run: each assertion that failed, how often, and digits of some."""
    bad: dict[str, list[dict]] = defaultdict(list)
    for note in notes:
        if note["kind"] in BAD:
            bad[note["key"]].append(note)
    kept = []
    for key, found in list(bad.items())[:MOST]:
        some = [n.get("digits", []) for n in found[:2]]
        if len(kept) >= MOST / 4:  # shape, sum and size will do
            some = [[" ".join(d.split(" ")[:3]) for d in some[0]]]
        kept.append([key, found[0]["kind"], len(found), *some])
    return kept


def alike(a: Any, b: Any) -> bool:
    """Whether two digits, or lists of them, are those of one value, on any machine."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if a == b:
        return True
    if " " in str(a) and " " in str(b):
        parts = zip(a.split(" "), b.split(" "))  # noqa: B905, the first of a few
        return all(alike(x, y) for x, y in parts)
    try:
        return math.isclose(float(a), float(b), rel_tol=2e-3, abs_tol=1e-6)
    except (TypeError, ValueError):
        return False


def hit(theirs: list[Any] | None, found: list[dict], whole: bool) -> bool:
    """Whether what failed here is what a mistake makes fail, with its digits.

    In a cell that was broken off, less may have failed.
    """
    if (
        theirs is None
        or theirs[0] != found[0]["kind"]
        or (whole and theirs[1] != len(found))
    ):
        return False
    pairs = zip(theirs[2:], found)  # noqa: B905, the first two
    return all(alike(a, n.get("digits", [])) for a, n in pairs if a)


def named(
    mistakes: list[dict], notes: list[dict], name: str, own: list[dict], later: set[str]
) -> list[str]:
    """The sentences of the mistakes that compute what the reader's definition computes.

    Of `own`, what only this definition can be blamed for, all that came before anything
    else broke off must be what the mistake makes of it; if that is nothing, half of it.
    Of several such mistakes, those that explain most of all that failed. What stands on a
    definition that comes `later` may hold all the same: that one may be written otherwise.
    """
    sure = {id(note) for note in reliable(notes)}
    passed = [n for n in notes if name in n["uses"] and n["kind"] == "passed"]
    fine = {n["key"] for n in passed if not later & set(n["uses"])}
    fine -= {note["key"] for note in notes if note["kind"] in BAD}
    behind = [n for n in notes if name in n["uses"] and n["kind"] in BAD]
    mine = {note["key"] for note in own}
    must = {note["key"] for note in own if id(note) in sure}
    told = []
    for mistake in (m for m in mistakes if name in m["blanks"]):
        theirs = {key: rest for key, *rest in mistake["signature"]}
        found = hits(theirs, behind, notes)
        explained = found & mine
        about = mine if len(theirs) < MOST else mine & theirs.keys()
        same = must & about <= explained and 2 * len(explained) >= len(about)
        if explained and same and not fine & theirs.keys():
            told.append((len(found), mistake["mistake"]))
    most = max((count for count, _ in told), default=0)
    return list(dict.fromkeys(said for count, said in told if count == most))


def hits(theirs: dict[str, list], behind: list[dict], notes: list[dict]) -> set[str]:
    """The assertions that failed as they do with a mistake."""
    broken = {note["cell"] for note in notes if note["kind"] in BREAKS}
    bad: dict[str, list[dict]] = defaultdict(list)
    for note in behind:
        bad[note["key"]].append(note)
    return {
        key
        for key, found in bad.items()
        if hit(theirs.get(key), found, found[0]["cell"] not in broken)
    }
