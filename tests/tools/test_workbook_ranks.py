"""Checks of the workbook that start processes: what a rank raised, and who waits."""

import json
import sys

import pytest

from bookkit.stage import in_a_fork
from workkit import checking, runner
from workkit.errors import PATIENCE
from workkit.report import detail

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are copies here")

OWNER = {"early": "a.early", "late": "a.late"}
HEAD = """
import torch
import torch.distributed as dist
from attnlib.parallel import run
"""
EARLY = "def early(x):\n    dist.all_reduce(x)\n    return x"
LATE = "def late(x):\n    return early(x) + 1"
WORK = "def work(rank):\n    return late(torch.ones(2) * rank).sum().item()"
CHECK = "# checks eq-sum: all of them\nassert run(work, 2) == [4, 4]"


def happened(early=EARLY, late=LATE):
    """The notes of a check, in a process that is spared after."""
    cells = [{"id": "head", "source": HEAD}]
    cells += [{"id": "a.early", "source": early, "blank": "a.early"}]
    cells += [{"id": "a.late", "source": late, "blank": "a.late"}]
    cells += [{"id": "check", "source": f"{WORK}\n\n\n{CHECK}"}]

    def work():
        PATIENCE[:] = [8.0, 8.0]
        return json.dumps(runner.run(cells, OWNER, lambda *_: None))

    return [n for n in json.loads(in_a_fork(work)) if n["cell"] == "check"]


def lines_of(note):
    found = {"note": note, "mistakes": [], "labels": [], "others": 0}
    return "\n".join(detail({"blanks": {}, "equations": {}}, found))


def test_what_a_rank_raises_is_told_with_the_readers_line():
    assert [note["kind"] for note in happened()] == ["passed"]
    (note,) = happened(early=EARLY.replace("(x)\n    return", "(y)\n    return"))
    assert note["kind"] == "raised" and note["came"] == "NameError: name 'y' is not defined"
    assert note["place"] == "in line 2 of your a.early: dist.all_reduce(y)"
    assert [n for n in note["running"] if n in OWNER.values()] == ["a.late", "a.early"]
    for line, kind, came in (
        (
            'raise NotImplementedError("late: this is yours to write")',
            *("unwritten", "NotImplementedError: late: this is yours to write"),
        ),
        ("assert x.sum() < 0, 'no'\n    return early(x)", "failed", "no"),
    ):
        (note,) = happened(late=f"def late(x):\n    {line}")
        assert (note["kind"], note["came"]) == (kind, came)


@pytest.mark.costly("workbook-ranks")
def test_a_rank_that_others_wait_for_is_told_in_a_sentence():
    """And not after the minute that `run` would take."""
    alone = EARLY.replace("    dist", "    if not x.any():\n        return x\n    dist")
    (note,) = happened(early=alone)
    told = "No end: rank 1 still waits for another after 8 seconds: does every rank call "
    assert note["came"] == f"{told}the same collectives, in the same order?"
    assert note["place"].startswith("in line 2 of your a.late: return early(x)")
    assert "this should hold:" in lines_of(note) and "a.early" in note["running"]
    loop = LATE.replace("return", "while x.any():\n        pass\n    return")
    (note,) = happened(late=loop)
    told = "No end: rank 1 still computes after 8 seconds: is there a loop without end?"
    assert note["came"] == told and "waits" not in str(note["digits"])


def test_a_system_without_copies_is_told_in_one_line(monkeypatch):
    cells = [{"id": "head", "source": HEAD}]
    known = {"cells": cells, "blanks": {}, "exercises": [], "equations": {}}
    assert checking.absent(known) == []
    monkeypatch.setattr(checking.sys, "platform", "darwin")
    names = checking.absent(known)
    (said,) = checking.unchecked("23", known, {}, names)["said"]
    assert said.startswith(
        "The checks of chapter 23 start copies of a process: they run on"
    )
    assert checking.absent(known | {"cells": []}) == []
