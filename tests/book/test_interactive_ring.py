"""The ring to step through, the figure to touch of chapter 24, by the package's rule."""

import re
from functools import cache

import pytest
import torch

from attnlib.parallel import shard_positions
from attnlib.parallel.places import Rule, hops_needed

RING, TOKENS = "#ring-steps", 32
READ = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const path = e => e.getAttribute("d");
    const box = e => [e.className.baseVal, ...["x", "y", "width", "height"].map(
        name => +e.getAttribute(name))];
    const rows = all("tbody tr", e => e).filter(row => !row.hidden);
    const texts = css => rows.map(row => row.querySelector(css).textContent);
    return {
        now: all(".this path", path), past: all(".map .past path", path),
        later: path(figure.querySelector(".later")),
        queries: all(".rows-band rect", box), keys: all(".cols-band rect", box),
        of: texts(".of").map(Number), pairs: texts(".pairs").map(Number),
        bars: rows.map(row => [...row.querySelectorAll("path")].map(path)),
        say: figure.querySelector(".say").textContent, ...figure.dataset,
    };
}"""
SET = """(figure, [ranks, order, causal, window]) => {
    const { elements } = figure.querySelector("form");
    Object.assign(elements.ranks, {value: ranks});
    Object.assign(elements.order, {value: order});
    Object.assign(elements.causal, {checked: causal});
    Object.assign(elements.window, {value: window});
    figure.querySelector("form").dispatchEvent(new Event("input"));
}"""


def drawn(path):
    """The pairs of a query and a key that a path covers, each once."""
    pairs = [
        (int(y) // 9, int(x) // 9 + k)
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v9h-\d+z", path)
        for k in range(int(width) // 9)
    ]
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def owners(boxes, along):
    """Of each token, the rank whose color a band has there."""
    found = [None] * TOKENS
    for name, *box in boxes:
        first, length = int(box[along]) // 9, int(box[along + 2]) // 9
        found[first : first + length] = [int(name.removeprefix("k"))] * length
    return found


@cache
def steps_of(ranks, order, causal, window):
    """By the package: the pairs of each step and rank, and who holds which tokens."""
    rule = Rule(causal, window)
    shards = torch.stack([shard_positions(TOKENS, ranks, r, order) for r in range(ranks)])
    places = torch.stack([shards, torch.zeros_like(shards)], dim=1)
    steps = []
    for t in range(hops_needed(rule, places, places, pieces=TOKENS) + 1):
        steps.append([])
        for r in range(ranks):
            s = (r - t) % ranks
            i, j = rule.allowed(places[r], places[s]).nonzero().T
            ends = shards[r][i].tolist(), shards[s][j].tolist()
            steps[-1].append(set(zip(*ends, strict=True)))
    return steps, shards.tolist()


def assert_ring(read, ranks, order, causal, window, step):
    steps, shards = steps_of(ranks, order, causal, window)
    hops = len(steps) - 1
    step = min(step, hops)
    assert (int(read["hops"]), int(read["step"])) == (hops, step)
    for r in range(ranks):
        assert drawn(read["now"][r]) == steps[step][r]
        assert drawn(read["past"][r]) == set().union(*(s[r] for s in steps[:step]))
    assert not any(read["now"][ranks:] + read["past"][ranks:])
    later = [pairs for row in steps[step + 1 :] for pairs in row]
    assert drawn(read["later"]) == set().union(*later)

    queries, keys = owners(read["queries"], 1), owners(read["keys"], 0)
    for r in range(ranks):
        assert all(queries[i] == r for i in shards[r])
        assert all(keys[j] == r for j in shards[(r - step) % ranks])
    assert read["of"] == [(r - step) % ranks for r in range(ranks)]

    work = torch.tensor([[len(pairs) for pairs in row] for row in steps])
    slowest = work.amax(dim=1)
    assert read["pairs"] == work[step].tolist()
    so, share = (work[:t].sum() / (ranks * slowest[:t].sum()) for t in (step + 1, hops + 1))
    assert float(read["so"]) == pytest.approx(so.item())
    assert float(read["share"]) == pytest.approx(share.item())
    *_, first, second = re.findall(r"[\d.]+(?= %)", read["say"])
    shown = pytest.approx([100 * so.item(), 100 * share.item()], abs=0.0501)
    assert [float(first), float(second)] == shown
    assert read["say"].startswith(f"After {step} of {hops} hop")
    who = read["say"].split(":")[1].split(".")[0]
    waits = (work[step] < slowest[step]).nonzero().flatten().tolist()
    assert [int(r) for r in re.findall(r"\d+", who)] == waits
    assert ("nobody computes" in who) == (slowest[step] == 0)

    long = (slowest * 200 / slowest.sum()).tolist()
    for r, (past, now, rest, _) in enumerate(read["bars"]):
        for bars, times in zip(
            (past, now, rest), (range(step), [step], range(step + 1, hops + 1)), strict=True
        ):
            found = re.findall(r"M([\d.]+) 2h([\d.]+)v11h-[\d.]+z", bars)
            parts = {t: (work[t, r] / slowest[t]).item() for t in times if work[t, r]}
            at = [(sum(long[:t]), long[t] * part) for t, part in parts.items()]
            assert len(found) == len(at)
            for bar, expected in zip(found, at, strict=True):
                assert [float(x) for x in bar] == pytest.approx(expected, abs=0.06)


@pytest.mark.thorough("ring_steps", "places")
def test_ring_against_the_package(open_page):
    page = open_page("ring_steps")
    figure = page.locator(RING)
    assert_ring(figure.evaluate(READ), 4, "contiguous", True, 32, 2)
    names = "start over", "back", "next step"
    start, back, on = (page.get_by_role("button", name=name) for name in names)
    for ranks in (2, 4):
        for order in ("contiguous", "zigzag", "striped"):
            for causal, window in ((True, 32), (True, 5), (False, 2)):
                choice = ranks, order, causal, window
                start.evaluate("button => button.click()")
                figure.evaluate(SET, choice)
                for step in range(ranks + 1):  # the last step is not gone beyond
                    assert_ring(figure.evaluate(READ), *choice, step)
                    on.evaluate("button => button.click()")
                hops = len(steps_of(*choice)[0]) - 1
                back.evaluate("button => button.click()")
                assert_ring(figure.evaluate(READ), *choice, max(0, hops - 1))


def test_the_share_at_the_end_is_the_chapter_s(open_page):
    """Contiguous, (P c + 1) / ((2 P - 1) c + 1); zigzag and without a mask, all."""
    figure = open_page("ring_steps").locator(RING)
    for ranks in (2, 4, 8):
        c = TOKENS // ranks
        for order, causal, share in (
            ("contiguous", True, (TOKENS + 1) / ((2 * ranks - 1) * c + 1)),
            ("striped", True, (TOKENS + 1) / (ranks * (c + 1))),
            ("zigzag", True, 1),
            ("contiguous", False, 1),
        ):
            figure.evaluate(SET, [ranks, order, causal, 32])
            assert float(figure.evaluate(READ)["share"]) == pytest.approx(share)


def test_ring_by_keyboard(open_page):
    page = open_page("ring_steps")
    figure = page.locator(RING)
    page.get_by_role("button", name="next step").press("Enter")
    assert_ring(figure.evaluate(READ), 4, "contiguous", True, 32, 3)
    page.get_by_label("window w").press("ArrowLeft")
    assert_ring(figure.evaluate(READ), 4, "contiguous", True, 31, 3)
    page.get_by_label("contiguous").press("ArrowRight")
    assert_ring(figure.evaluate(READ), 4, "zigzag", True, 31, 3)
