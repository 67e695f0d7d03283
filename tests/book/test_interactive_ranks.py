"""Who holds what, the figure to touch of chapter 23, by the package in processes."""

import numpy as np
import pytest
import torch

from attnlib import parallel
from touch import boxes, close, numbers

WAYS = "gather", "scatter", "exchange", "shift", "reduce"


def collectives(rank, ranks):
    """Each of the five, forward and backward: from which ranks each square has come.

    Square s of rank r is four or more equal numbers, 2 to the power r: a sum tells of what
    it is made.
    """
    each, found = 12 // ranks, {}
    row = torch.full((12,), 2.0**rank, dtype=torch.float64)
    calls = {
        "gather": (row[:each], parallel.all_gather),
        "scatter": (row, parallel.reduce_scatter),
        "exchange": (row, lambda x: parallel.all_to_all(x, 0, 0)),
        "shift": (row[:each], parallel.shift),
        "reduce": (row, parallel.all_reduce),
    }
    for name, (x, call) in calls.items():
        x = x.clone().requires_grad_()
        with parallel.Traffic() as forward:
            y = call(x)
        with parallel.Traffic() as backward:
            y.backward(torch.full_like(y, 2.0**rank))
        values = y.detach(), x.grad
        assert all((v.view(-1, each) == v[::each, None]).all() for v in values)
        sums = [v[::each].long().tolist() for v in values]
        found[name] = *sums, forward.bytes, backward.bytes
    return found


def squares(paths, x):
    """From which ranks a square has come, by rank and column, as its stripes tell."""
    found = {}
    for k, path in enumerate(paths):
        for left, top, _, high in boxes(path):
            place = top // 30, (left - x) // 30
            found.setdefault(place, []).append((k, top % 30, high))
    for stripes in found.values():
        ranks, tops, highs = zip(*stripes, strict=True)
        assert list(ranks) == sorted(set(ranks))
        close(list(tops), 26 * np.arange(len(ranks)) / len(ranks), 0.06)
        close(list(highs), [26 / len(ranks)] * len(ranks), 0.06)
    return {place: sum(2**k for k, *_ in stripes) for place, stripes in found.items()}


def assert_holds(figure, told, way, ranks, back, rank):
    """What a rank has after is the package's; what it had before are its own squares."""
    read = figure.read(
        **{"left": ".left path@d", "right": ".right path@d", "sends": ".bytes"},
        **{"lines": ".lines path@class,d", "now": "tr.now input@value"},
    )
    left, right = squares(read.left, 0), squares(read.right, 194)
    before, after = (right, left) if back else (left, right)
    assert all(code == 2**r for (r, _), code in before.items())
    sent = numbers(read.sends[WAYS.index(way)])
    for r, found in enumerate(told):
        forward, backward, *counts = found[way]
        mine = [code for (q, _), code in sorted(after.items()) if q == r]
        assert mine == (backward if back else forward)
        start = [code for (q, _), code in sorted(before.items()) if q == r]
        assert len(start) == len(forward if back else backward)
        assert counts == sent * 2
    assert read.now == [way]
    assert {(r, s) for r, s, _ in read.after} == set(after)

    # the lines into the result of a rank: one from each square of which it is made
    ends = []
    for name, path in read.lines:
        t, a, s, b = numbers(path)
        one, two = (a // 30, (t - 26) // 30), (b // 30, (s - 194) // 30)
        start, end = (two, one) if back else (one, two)
        assert end[0] == rank and start in before
        assert name.split()[1] == f"k{start[0]:.0f}"
        assert ("home" in name) == (start[0] == rank)
        ends.append((start, end))
    assert len(set(ends)) == len(ends)
    for end, code in after.items():
        if end[0] == rank:
            assert sum(2 ** start[0] for start, to in ends if to == end) == code
    away = sum(start[0] != rank for start, _ in ends)
    assert numbers(read.say) == [rank, away, 96 // ranks, *sent]


@pytest.mark.costly(
    "figure/who_holds", "book/_static/who_holds.html", "book/_static/touch.html"
)
def test_holds_against_the_package(open_figure):
    figure = open_figure("who_holds")
    for ranks in (4, 3, 2):
        told = parallel.run(collectives, ranks, ranks)
        if ranks == 4:
            assert_holds(figure, told, "gather", 4, False, 1)
        for way in WAYS:
            for name in ("forward", "backward"):
                figure.set(way=way, ranks=ranks, **{"pass": name})
                for rank in range(ranks):
                    figure.set(rank=rank)
                    assert_holds(figure, told, way, ranks, name == "backward", rank)


def test_holds_by_keyboard(open_figure):
    figure = open_figure("who_holds")
    figure.keys("ArrowRight", at="rank r")
    assert figure.read().say.startswith("What rank 2 gets is made of 3 pieces")
    figure.keys("ArrowDown", at="all-gather")
    assert figure.read(now="tr.now input@value").now == ["scatter"]
    figure.root.get_by_label("2", exact=True).check()
    assert figure.read().say.startswith("What rank 1 gets is made of 1 piece of")
