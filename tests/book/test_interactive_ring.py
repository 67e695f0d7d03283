"""The ring to step through, the figure to touch of chapter 24, by the package's rule."""

import re
from functools import cache

import pytest
import torch

from attnlib.parallel import shard_positions
from attnlib.parallel.places import Rule, hops_needed
from touch import boxes, close, numbers

TOKENS = 32


def drawn(paths):
    """The pairs of a query and a key that paths cover, each once."""
    pairs = []
    for x, y, width, height in boxes(paths):
        assert height == 9
        pairs += [(y // 9, x // 9 + k) for k in range(int(width) // 9)]
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def owners(rows):
    """Of each token, the rank whose color a band has there."""
    found = [None] * TOKENS
    for name, *box in rows:
        first, length = (int(edge) // 9 for edge in box)
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


def assert_ring(figure, ranks, order, causal, window, step):
    rows = "tbody tr:not([hidden])"
    read = figure.read(
        **{"now": ".this path@d", "past": ".map .past path@d", "later": ".map .later@d"},
        **{"of": f"{rows} .of", "pairs": f"{rows} .pairs", "bars": f"{rows} path@d"},
        queries=".rows-band rect@class,y,height",
        keys=".cols-band rect@class,x,width",
    )
    steps, shards = steps_of(ranks, order, causal, window)
    hops = len(steps) - 1
    step = min(step, hops)
    assert (read.hops, read.step) == (hops, step)
    for r in range(ranks):
        assert drawn(read.now[r]) == steps[step][r]
        assert drawn(read.past[r]) == set().union(*(s[r] for s in steps[:step]))
    assert not any(read.now[ranks:] + read.past[ranks:])
    later = [pairs for row in steps[step + 1 :] for pairs in row]
    assert drawn(read.later) == set().union(*later)

    queries, keys = owners(read.queries), owners(read.keys)
    for r in range(ranks):
        assert all(queries[i] == r for i in shards[r])
        assert all(keys[j] == r for j in shards[(r - step) % ranks])
    assert numbers(read.of) == [(r - step) % ranks for r in range(ranks)]

    work = torch.tensor([[len(pairs) for pairs in row] for row in steps])
    slowest = work.amax(dim=1)
    assert numbers(read.pairs) == work[step].tolist()
    so, share = (work[:t].sum() / (ranks * slowest[:t].sum()) for t in (step + 1, hops + 1))
    close([read.so, read.share], [so, share], 1e-6)
    close(re.findall(r"[\d.]+(?= %)", read.say), [100 * so, 100 * share], 0.0501)
    assert read.say.startswith(f"After {step} of {hops} hop")
    who = read.say.split(":")[1].split(".")[0]
    assert numbers(who) == (work[step] < slowest[step]).nonzero().flatten().tolist()
    assert ("nobody computes" in who) == (slowest[step] == 0)

    long = slowest * 200 / slowest.sum()
    start = long.cumsum(0) - long
    for r in range(ranks):
        phases = range(step), [step], range(step + 1, hops + 1)
        for bars, times in zip(read.bars[4 * r : 4 * r + 3], phases, strict=True):
            parts = [
                [start[t], 2, long[t] * work[t, r] / slowest[t], 11]
                for t in times
                if work[t, r]
            ]
            close(boxes(bars), parts, 0.06)


@pytest.mark.costly(
    "figure/ring_steps", "book/_static/ring_steps.html", "book/_static/touch.html"
)
def test_ring_against_the_package(open_figure):
    figure = open_figure("ring_steps")
    assert_ring(figure, 4, "contiguous", True, 32, 2)
    for ranks in (2, 4):
        for order in ("contiguous", "zigzag", "striped"):
            for causal, window in ((True, 32), (True, 5), (False, 2)):
                figure.click("[data-do='0']")
                figure.set(ranks=ranks, order=order, causal=causal, window=window)
                choice = ranks, order, causal, window
                for step in range(ranks + 1):  # the last step is not gone beyond
                    assert_ring(figure, *choice, step)
                    figure.click("[data-do='1']")
                hops = len(steps_of(*choice)[0]) - 1
                figure.click("[data-do='-1']")
                assert_ring(figure, *choice, max(0, hops - 1))


def test_the_share_at_the_end_is_the_chapter_s(open_figure):
    """Contiguous, (P c + 1) / ((2 P - 1) c + 1); zigzag and without a mask, all."""
    figure = open_figure("ring_steps")
    for ranks in (2, 4, 8):
        c = TOKENS // ranks
        for order, causal, share in (
            ("contiguous", True, (TOKENS + 1) / ((2 * ranks - 1) * c + 1)),
            ("striped", True, (TOKENS + 1) / (ranks * (c + 1))),
            ("zigzag", True, 1),
            ("contiguous", False, 1),
        ):
            figure.set(ranks=ranks, order=order, causal=causal)
            assert figure.read().share == pytest.approx(share)


def test_ring_by_keyboard(open_figure):
    figure = open_figure("ring_steps")
    figure.root.get_by_role("button", name="next step").press("Enter")
    assert_ring(figure, 4, "contiguous", True, 32, 3)
    figure.keys("ArrowLeft", at="window w")
    assert_ring(figure, 4, "contiguous", True, 31, 3)
    figure.keys("ArrowRight", at="contiguous")
    assert_ring(figure, 4, "zigzag", True, 31, 3)
