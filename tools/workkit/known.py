"""Which kept mistake computes what the reader's definition computes.

A mistake is named where every number that came is one that this mistake gives, and every
assertion that passed passes with it, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

BAD = ("failed", "raised")
BREAKS = ("unwritten", "skipped", "raised")
MOST = 16  # assertions that are kept of a mistake; of a quarter of them all the digits


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
