"""The figures to touch of chapters 16 to 19, in a browser, against the package."""

from itertools import product

import pytest
import torch

from attnlib import PagedCache, RotaryPositions
from touch import boxes, close, numbers, points

# Chapter 16: arms that turn with their places


def assert_turned(figure, places, rule=""):
    """Arms, curve and words are those of a head with six features and base 1000."""
    arms = {"query": ".q@x1,y1,x2,y2", "key": ".k@x1,y1,x2,y2"}
    read = figure.read(dot=".pt@cx,cy", curve=".c@d", **arms)
    assert (read.places, read.rule) == (list(places), rule)
    trained = RotaryPositions(6, 1000.0, interleaved=True)
    scaling = {"scaling": rule, "factor": 4.0} if rule else {}
    turn = RotaryPositions(6, 1000.0, interleaved=True, **scaling)
    key = torch.tensor([[1.0, 0, 1, 0, 1, 0]], dtype=torch.float64)
    query = trained(key, -3)  # it looks three places back
    m, n = places
    for found, features, place in ((read.query, query, m), (read.key, key, n)):
        ends = points(found)
        turned = (ends[1::2] - ends[::2]) / [40, -40]
        close(turned, turn(features, place)[0], 2e-3)
    score = (turn(query, m) * turn(key, n)).sum().item()
    assert read.score == pytest.approx(score, abs=1e-4)
    assert f"score {score:.2f}".replace("-", "\u2212") in read.say
    close(read.dot, [165 + 4 * (m - n), 70 - 20 * score], 0.06)
    for x, y in points(read.curve)[::20]:
        at = (turn(query, round((x - 165) / 4)) * key).sum()
        close([y], [70 - 20 * at], 0.06)
    return read


def test_arms_turn_with_their_places(open_figure):
    figure = open_figure("rotary")
    assert_turned(figure, (9, 4))
    assert_turned(figure.press("both one on", times=3), (12, 7))
    assert_turned(figure.press("both one back"), (11, 6))
    read = assert_turned(figure.fill("Place of the query", 2), (2, 6))
    assert "the query 4 before it" in read.say
    assert_turned(figure.press("linear, 4 times"), (2, 6), "linear")
    read = assert_turned(figure.fill("Place of the query", 18), (18, 6), "linear")
    assert read.score > 2.9  # four times as far
    assert_turned(figure.press("NTK-aware, 4 times"), (18, 6), "ntk")
    figure.press("as trained")
    assert_turned(figure.keys("End", at="Place of the key"), (18, 40))
    assert_turned(figure.press("both one on"), (18, 40))  # 40 is the last place


# Chapter 17: what a cache costs

V, D, LAYERS, SPEED = 50257, 768, 12, 50e9  # of the model, and bytes a second


def assert_cost(figure, n, batch):
    """The table, the bars and the sentence, by the chapter's formulas."""
    read = figure.read(mib=".mib", flops=".f", ms=".ms", s=".s", widths=".t b@width")
    parameters = 4 * (12 * LAYERS * D**2 + V * D)
    cached = 2 * 4 * batch * LAYERS * n * D
    step = batch * (LAYERS * (24 * D**2 + 4 * n * D) + 2 * V * D) / 1e9
    seconds = (parameters + cached) / SPEED
    share = 100 * cached / (parameters + cached)
    mib = [parameters / 2**20, cached / 2**20]
    assert numbers(read.mib) == pytest.approx(mib, rel=0.01)
    assert numbers(read.flops) == pytest.approx([n * step, step], rel=0.02)
    assert numbers(read.ms) == pytest.approx([1e3 * seconds], rel=0.01)
    assert numbers(read.s) == pytest.approx([batch / seconds], rel=0.01)
    close(read.widths, [100 - share, share], 0.01)
    ratio = numbers(read.say)[0]
    assert ratio == pytest.approx(cached / parameters, rel=0.01, abs=0.006)
    assert ("nearly free" in read.say) == (cached < parameters / 2)
    assert ("as much as" in read.say) == (cached >= 2 * parameters)


def test_cache_cost(open_figure):
    figure = open_figure("cache_cost")
    assert_cost(figure, 1024, 1)
    for n, batch in product(range(6, 14), (0, 1, 4, 7)):
        assert_cost(figure.set(n=n, b=batch), 2**n, 2**batch)


# Chapter 18: fewer keys

HEADS = 8


def cells(paths):
    return {(x // 16, y // 16) for x, y, *_ in boxes(paths)}


def assert_fewer(figure, t, w, group):
    """The pictures, the table and the sentence; a cell is a column and a row."""
    read = figure.read(
        **{"row": ".row@d", "before": ".before@d", "squares": ".kept@d"},
        **{"scores": ".s", "counts": ".k", "places": ".places"},
    )
    seen = {i: [j for j in range(i + 1) if i - w < j <= i] for i in range(t + 1)}
    assert cells(read.row) == {(j, t) for j in seen[t]}
    assert cells(read.before) == {(j, i) for i in range(t) for j in seen[i]}
    kept = {(a, j) for j in seen[t] for a in range(0, HEADS, group)}
    assert cells(read.squares) == kept
    assert numbers(read.scores) == [len(seen[t]), t + 1]
    assert numbers(read.counts) == [len(kept), HEADS * (t + 1)]
    ring = {j % w: str(j) for j in seen[t]}
    assert len(ring) == len(seen[t])
    assert read.places == [" ".join(ring.get(place, "–") for place in range(w))]
    everything = len(kept) == HEADS * (t + 1)
    assert ("everything is kept" in read.say) == everything
    assert everything or f"{len(kept)} squares are kept instead of" in read.say
    assert f"Token {t} sees" in read.say


def test_fewer_keys(open_figure):
    figure = open_figure("fewer_keys")
    assert_fewer(figure, 8, 4, 4)
    for t, w, power in product((0, 1, 5, 11), (1, 3, 4, 12), range(4)):
        assert_fewer(figure.set(t=t, w=w, g=power), t, w, 2**power)


# Chapter 19: memory in pages

ENDS = (5, 11, 2, 8)


def assert_pages(figure, z, steps):
    """What the package does, given the same tokens in turn."""
    paths = {name: f"path.{name}@d" for name in "abcd"}
    read = figure.read(n="td.n", tables="td.p", edges=".edge@d", **paths)
    cache, token = PagedCache(64 // z, z), torch.zeros(1, 1)
    talks = [cache.open() for _ in ENDS]
    for step in range(steps):
        for talk, end in zip(talks, ENDS, strict=True):
            if step < end:
                cache.append(talk, token, token)
    assert numbers(read.n) == list(cache.lengths.values())
    assert [numbers(table) for table in read.tables] == list(cache.tables.values())
    for talk, path in zip(talks, (read.a, read.b, read.c, read.d), strict=True):
        drawn = [x // 19 + y // 19 * 16 for x, y, *_ in boxes(path)]
        table = cache.tables[talk]
        assert drawn == [table[j // z] * z + j % z for j in range(cache.lengths[talk])]
    taken, tokens = cache.pages - len(cache.unused), sum(cache.lengths.values())
    empty = taken * z - tokens
    assert (read.taken, read.empty) == (taken, empty)
    assert numbers(read.say) == [taken, 64 // z, empty, 16, 64 - tokens]
    assert read.edges[0].count("M") == 64 // z - 4


def test_pages(open_figure):
    figure = open_figure("pages")
    assert_pages(figure, 4, 11)
    for size, steps in product((1, 2, 3, 4), (1, 2, 6, 11)):
        assert_pages(figure.set(z=size, t=steps), 2**size, steps)
