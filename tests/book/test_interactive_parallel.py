"""The figures to touch of chapters 23 to 25, in a browser, against the package."""

import re
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from attnlib import parallel
from attnlib.parallel import shard_positions
from attnlib.parallel.places import Rule, hops_needed
from touch import boxes, close, costly, numbers

# Chapter 23: who holds what

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
    assert (" piece of " in read.say) == (away == 1)


@costly("settings/who_holds")
def test_holds_against_the_package(open_figure):
    figure = open_figure("who_holds")
    told = {ranks: parallel.run(collectives, ranks, ranks) for ranks in (4, 3, 2)}
    assert_holds(figure, told[4], "gather", 4, False, 1)
    for ranks, way, name in product(told, WAYS, ("forward", "backward")):
        figure.set(way=way, ranks=ranks, **{"pass": name})
        assert figure.read(last="[name=rank]@max").last == [str(ranks - 1)]
        for rank in range(ranks):
            figure.set(rank=rank)
            assert_holds(figure, told[ranks], way, ranks, name == "backward", rank)


# Chapter 24: the ring, step by step

LENGTH = 32  # tokens


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
    found = [None] * LENGTH
    for name, *box in rows:
        first, length = (int(edge) // 9 for edge in box)
        found[first : first + length] = [int(name.removeprefix("k"))] * length
    return found


@cache
def steps_of(ranks, order, causal, window):
    """By the package: the pairs of each step and rank, and who holds which tokens."""
    rule = Rule(causal, window)
    shards = torch.stack([shard_positions(LENGTH, ranks, r, order) for r in range(ranks)])
    places = torch.stack([shards, torch.zeros_like(shards)], dim=1)
    steps = []
    for t in range(hops_needed(rule, places, places, pieces=LENGTH) + 1):
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


@costly("settings/ring_steps")
def test_ring_against_the_package(open_figure):
    figure = open_figure("ring_steps")
    assert_ring(figure, 4, "contiguous", True, 32, 2)
    masks = (True, 32), (True, 5), (False, 2)
    orders = "contiguous", "zigzag", "striped"
    for ranks, order, (causal, window) in product((2, 4), orders, masks):
        figure.click("[data-do='0']")
        figure.set(ranks=ranks, order=order, causal=causal, window=window)
        choice = ranks, order, causal, window
        for step in range(ranks + 1):  # the last step is not gone beyond
            assert_ring(figure, *choice, step)
            figure.click("[data-do='1']")
        hops = len(steps_of(*choice)[0]) - 1
        assert_ring(figure.click("[data-do='-1']"), *choice, max(0, hops - 1))


def test_the_share_at_the_end_is_the_chapter_s(open_figure):
    """Contiguous, (P c + 1) / ((2 P - 1) c + 1); zigzag and without a mask, all."""
    figure = open_figure("ring_steps")
    for ranks in (2, 4, 8):
        c = LENGTH // ranks
        for order, causal, share in (
            ("contiguous", True, (LENGTH + 1) / ((2 * ranks - 1) * c + 1)),
            ("striped", True, (LENGTH + 1) / (ranks * (c + 1))),
            ("zigzag", True, 1),
            ("contiguous", False, 1),
        ):
            read = figure.set(ranks=ranks, order=order, causal=causal).read()
            assert read.share == pytest.approx(share)


# Chapter 25: sixteen ranks

RANKS, TEXTS, TOKENS, HEADS, WIDTH = 16, 16, 8192, 32, 4096
AXES = {"data": "copies", "context": "context", "tensor": "tensor"}


def ends(part):
    return part[0].item(), len(part)


def assert_mesh(figure, context, tensor, rank):
    """The rank's place, parts and groups are those of a mesh in PyTorch's order."""
    read = figure.read(
        **{"has": ".has@x,width", "also": ".also@x,width", "in_MB": ".sent"},
        **{"buttons": ".mesh button@aria-pressed,data-in", "talks": ".with"},
    )
    data = RANKS // (context * tensor)
    grid = torch.arange(RANKS).view(data, context, tensor)  # as init_device_mesh does
    a, b, e = (grid == rank).nonzero()[0].tolist()
    groups = {"copies": grid[:, :, e], "context": grid[a, :, e], "tensor": grid[a, b]}
    own = torch.arange(TEXTS).tensor_split(data)[a]
    tokens = torch.arange(TOKENS).chunk(context)[b]
    mine = torch.arange(HEADS).chunk(tensor)[e]
    now = mine.tensor_split(context)[b]
    columns = torch.arange(4 * WIDTH).chunk(tensor)[e]
    parts = {"own": own, "tokens": tokens, "mine": mine, "now": now, "columns": columns}
    for name, part in parts.items():
        assert getattr(read, name) == [*ends(part)], name
    for (name, ranks), said in zip(groups.items(), read.talks, strict=True):
        others = [r for r in ranks.flatten().tolist() if r != rank]
        assert getattr(read, name) == numbers(said) == others
    for r, (pressed, within) in enumerate(read.buttons):
        assert pressed == str(r == rank).lower()
        assert within.split() == [
            n for n, group in AXES.items() if r in getattr(read, group)
        ]

    rows, copies = len(own) * len(tokens), data * context
    sent = [
        (copies - 1) / copies * 12 * WIDTH**2 / tensor,
        bytes_by_heads(context, len(tokens), len(mine), WIDTH // HEADS) * len(own),
        2 * 2 * (tensor - 1) / tensor * rows * WIDTH,
    ]
    close(read.sent, sent, 1)
    close(read.in_MB, [x / 1e6 for x in sent], 0.0501)
    wholes = TEXTS, TOKENS, HEADS, 4 * WIDTH, HEADS
    shown = zip((own, tokens, now, columns, mine), wholes, strict=True)
    bars = [[272 * x / whole for x in ends(part)] for part, whole in shown]
    close(read.has + read.also, [[72 + left, width] for left, width in bars], 0.051)
    told = [rank, data, context, tensor]
    for part in (own, tokens, columns, now):
        told += dict.fromkeys(part[[0, -1]].tolist())
    assert numbers(read.say.replace(",", "")) == told


def bytes_by_heads(ranks, shard, heads, d_k):
    """Numbers that a rank sends for one text: eq-exchange-bytes with a byte a number."""
    return (ranks - 1) / ranks * 2 * shard * d_k * (heads + heads)


def traded(rank, heads):
    x = torch.zeros(1, heads, 3, 4, dtype=torch.float64)
    with parallel.Traffic() as traffic:
        parallel.head_attention(x, x, x)
    return traffic.by_name["all_to_all"]


def test_the_numbers_traded_are_counted():
    for ranks in (2, 4):
        expected = 8 * bytes_by_heads(ranks, 3, 4, 4)
        assert parallel.run(traded, ranks, 4) == [expected] * ranks


def test_mesh_against_the_cuts(open_figure):
    figure = open_figure("rank_mesh")
    assert_mesh(figure, 2, 2, 5)
    for context, tensor in product((1, 2, 4), repeat=2):
        figure.set(context=context, tensor=tensor)
        for rank in (0, 6, 11, 15):
            chosen = figure.click(f".mesh button[aria-label='rank {rank}']")
            assert_mesh(chosen, context, tensor, rank)
