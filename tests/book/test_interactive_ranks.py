"""Who holds what, the figure to touch of chapter 23, by the package in processes."""

import json
import re

import pytest
import torch

from attnlib import parallel

HOLDS, WAYS = "#who-holds", ("gather", "scatter", "exchange", "shift", "reduce")
READ = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const path = e => e.getAttribute("d");
    return {
        left: all(".left path", path), right: all(".right path", path),
        lines: all(".lines path", e => [e.className.baseVal, path(e)]),
        sends: all(".bytes", e => +e.textContent),
        now: all("tr.now input", e => e.value),
        say: figure.querySelector(".say").textContent, ...figure.dataset,
    };
}"""
SET = """(figure, [way, ranks, pass, rank]) => {
    const [which, form] = figure.querySelectorAll("form");
    Object.assign(which.elements.way, {value: way});
    Object.assign(form.elements.ranks, {value: ranks});
    Object.assign(form.elements.pass, {value: pass});
    form.dispatchEvent(new Event("input"));
    Object.assign(form.elements.rank, {value: rank});
    form.dispatchEvent(new Event("input"));
}"""


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


def squares(paths, x, ranks):
    """From which ranks a square has come, by rank and column, as its stripes tell."""
    found = {}
    for k, path in enumerate(paths):
        for left, top, high in re.findall(r"M(\d+) ([\d.]+)h26v([\d.]+)h-26z", path):
            place = int(float(top) // 30), (int(left) - x) // 30
            found.setdefault(place, []).append((k, float(top) % 30, float(high)))
    for stripes in found.values():
        assert [k for k, *_ in stripes] == sorted({k for k, *_ in stripes})
        tops = [26 * i / len(stripes) for i in range(len(stripes))]
        assert [top for _, top, _ in stripes] == pytest.approx(tops, abs=0.06)
        assert all(
            high == pytest.approx(26 / len(stripes), abs=0.06) for *_, high in stripes
        )
    return {place: sum(2**k for k, *_ in stripes) for place, stripes in found.items()}


def assert_holds(read, told, way, ranks, back, rank):
    """What a rank has after is the package's; what it had before are its own squares."""
    left, right = squares(read["left"], 0, ranks), squares(read["right"], 194, ranks)
    before, after = (right, left) if back else (left, right)
    assert all(code == 2**r for (r, _), code in before.items())
    for r, found in enumerate(told):
        forward, backward, *counts = found[way]
        mine = [code for (q, _), code in sorted(after.items()) if q == r]
        assert mine == (backward if back else forward)
        start = [code for (q, _), code in sorted(before.items()) if q == r]
        assert len(start) == len(forward if back else backward)
        assert counts == [int(read["sends"][WAYS.index(way)])] * 2
    assert read["now"] == [way]
    assert {(r, s) for r, s, _ in json.loads(read["after"])} == set(after)

    # the lines into the result of a rank: one from each square of which it is made
    ends = []
    for name, path in read["lines"]:
        t, a, s, b = (
            float(n) for n in re.findall(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)", path)[0]
        )
        one, two = (int(a // 30), int(t - 26) // 30), (int(b // 30), int(s - 194) // 30)
        start, end = (two, one) if back else (one, two)
        assert end[0] == rank and start in before
        assert name.split()[1] == f"k{start[0]}"
        assert ("home" in name) == (start[0] == rank)
        ends.append((start, end))
    assert len(set(ends)) == len(ends)
    for end, code in after.items():
        if end[0] == rank:
            assert sum(2 ** start[0] for start, to in ends if to == end) == code
    away = sum(start[0] != rank for start, _ in ends)
    numbers = [int(number) for number in re.findall(r"\d+", read["say"])]
    assert numbers == [rank, away, 96 // ranks, read["sends"][WAYS.index(way)]]


@pytest.mark.thorough("who_holds", "collectives")
def test_holds_against_the_package(open_page):
    figure = open_page("who_holds").locator(HOLDS)
    first = figure.evaluate(READ)
    for ranks in (4, 3, 2):
        told = parallel.run(collectives, ranks, ranks)
        if ranks == 4:
            assert_holds(first, told, "gather", 4, False, 1)
        for way in WAYS:
            for name in ("forward", "backward"):
                for rank in range(ranks):
                    figure.evaluate(SET, [way, ranks, name, rank])
                    read = figure.evaluate(READ)
                    assert_holds(read, told, way, ranks, name == "backward", rank)


def test_holds_by_keyboard(open_page):
    page = open_page("who_holds")
    read = lambda: page.locator(HOLDS).evaluate(READ)  # noqa: E731
    page.get_by_label("rank r").press("ArrowRight")
    assert read()["say"].startswith("What rank 2 gets is made of 3 pieces")
    page.get_by_label("all-gather").press("ArrowDown")
    assert read()["now"] == ["scatter"]
    page.get_by_label("2", exact=True).check()
    assert read()["say"].startswith("What rank 1 gets is made of 1 piece of")
