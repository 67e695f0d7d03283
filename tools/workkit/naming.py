"""From what happened in the checks to what the reader is told: who, where, which mistake.

A failing assertion counts against the latest definition of the reader's that stands behind
it, unless an earlier one behind it has failed already: then the later one waits. What
raises an error counts against the latest of those that were running. None passes beside an
assertion that fails with it; `alone.py` then tries each among ours. A mistake is named
where exactly that failed which this mistake makes fail, with its numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

BAD = ("failed", "raised")
SMALL = "small tests of "  # how the names of their cells begin
MOST = 16  # assertions that are kept of a mistake; of a quarter of them all the digits
NOISE = 1e-6  # of the size of an array: so far its entries differ between machines
NOTHING = 1e-10  # what is smaller, and stands alone, is rounding


def judge(
    known: dict[str, Any], notes: list[dict], states: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """For each blank of a chapter: its state and, where it failed, why.

    `states` says of a blank whether it is "to do", "lent" or "written".
    """
    order, notes = list(known["blanks"]), with_owners(notes)
    failing: dict[str, list[dict]] = defaultdict(list)
    beside: dict[str, set[str]] = defaultdict(set)  # who is blamed for what failed with it
    passing: set[str] = set()
    begun: dict[str, str] = {}  # what is left of a class of which some is written
    for note in notes:
        mine = [n for n in order if n in note["uses"] and states[n] == "written"]
        if note["kind"] in BAD and mine:
            ran = [name for name in mine if name in note.get("running", [])]
            who = (ran or mine)[-1]
            failing[who].append(note)
            for name in mine:
                beside[name].add(who)
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
            failed.add(name)
            found[name] = {"state": "failed"} | reason(known, notes, name, own)
        elif failing[name]:
            found[name] = {"state": "waits", "for": sorted(failed)}
        elif beside[name]:
            found[name] = {"state": "waits", "for": sorted(beside[name])}
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


def reason(known: dict, notes: list[dict], name: str, own: list[dict]) -> dict[str, Any]:
    """The assertion to show, its equation, and the mistake if it is known."""
    mistakes = named([m for m in known["mistakes"] if name in m["blanks"]], notes)
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


def signature(notes: list[dict]) -> list[list[Any]]:
    """What is kept of a run: each assertion that failed, how often, and digits of some."""
    kept = []
    for key, found in kept_of(notes).items():
        some = [n.get("digits", []) for n in found[:2]]
        if len(kept) >= MOST / 4:  # shape, sum and size will do
            some = [[" ".join(d.split(" ")[:3]) for d in some[0]]]
        kept.append([key, found[0]["kind"], len(found), *some])
    return kept


def kept_of(notes: list[dict]) -> dict[str, list[dict]]:
    """The first assertions of the chapter that failed, each with its notes."""
    bad: dict[str, list[dict]] = defaultdict(list)
    for note in notes:
        if note["kind"] in BAD and not note["cell"].startswith(SMALL):
            bad[note["key"]].append(note)
    return dict(list(bad.items())[:MOST])


def alike(a: Any, b: Any) -> bool:
    """Whether two digits, or lists of them, are those of one value, on any machine."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if a == b:
        return True
    mine, theirs = str(a).split(" "), str(b).split(" ")
    size = number(mine[2]) if len(mine) > 2 else math.nan  # shape, sum, size, entries
    floor = NOTHING if math.isnan(size) else max(NOISE * size, NOTHING)
    pairs = zip(mine, theirs)  # noqa: B905, the first of a few
    return all(x == y or near(number(x), number(y), floor) for x, y in pairs)


def near(x: float, y: float, floor: float) -> bool:
    return math.isclose(x, y, rel_tol=2e-3, abs_tol=floor)


def number(text: str) -> float:
    """What a text says, or NaN, which is near nothing."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def named(mistakes: list[dict], notes: list[dict]) -> list[str]:
    """The sentences of the mistakes in definitions that make fail what failed.

    All of that and nothing else, as often and with the same digits, of which there must be
    some.
    """
    kept = kept_of(notes)
    told = []
    for mistake in (m for m in mistakes if m["blanks"]):
        theirs = {key: rest for key, *rest in mistake["signature"]}
        digits = any(any(some) for _, _, *pairs in theirs.values() for some in pairs)
        same = digits and theirs.keys() == kept.keys()
        if same and all(hit(theirs[key], found) for key, found in kept.items()):
            told.append(mistake["mistake"])
    return list(dict.fromkeys(told))


def hit(theirs: list[Any], found: list[dict]) -> bool:
    """Whether an assertion fails as it does with a mistake."""
    kind, often, *digits = theirs
    pairs = zip(digits, found)  # noqa: B905, the first two
    same = all(alike(a, n.get("digits", [])) for a, n in pairs if a)
    return (kind, often) == (found[0]["kind"], len(found)) and same
