"""The figure to touch of appendix E, in a real browser, against the package's rule."""

import math

import pytest

from attnlib.flash_triton import choose_splits

SPLIT = "#split-keys"
BLOCKS = (16, 32, 64, 128, 256, 512)
ALL = 132  # multiprocessors

READ = """figure => {
    const texts = css => [...figure.querySelectorAll(css)].map(e => +e.textContent);
    const path = css => figure.querySelector(css).getAttribute("d");
    const count = css => (path(css).match(/M/g) || []).length;
    return {S: texts(".S"), P: texts(".P"), W: texts(".W"), T: texts(".T"),
        busy: count(".busy"), part: count(".part"), room: count(".room"),
        say: figure.querySelector(".say").textContent};
}"""
SET = """(figure, [p, t, s]) => {
    const form = figure.querySelector("form");
    Object.assign(form.elements.p, {value: p});
    Object.assign(form.elements.t, {value: t});
    Object.assign(form.elements.s, {value: s});
    form.dispatchEvent(new Event("input"));
}"""


def assert_split(read, programs, blocks, shares):
    """What the table and the squares have to show."""
    best = choose_splits(programs, blocks, ALL)
    three = (shares, 1, best)
    waves = [math.ceil(programs * s / ALL) for s in three]
    assert read["S"] == [shares, best]
    assert read["P"] == [programs * s for s in three]
    assert read["W"] == waves
    tiles = [w * math.ceil(blocks / s) for w, s in zip(waves, three, strict=True)]
    assert read["T"] == tiles
    last = programs * shares - ALL * (waves[0] - 1)  # programs of the last wave
    assert (read["busy"], read["room"]) == (last, ALL)
    assert read["part"] == (ALL - last if waves[0] > 1 else 0)
    assert f"{last} of {ALL} multiprocessors" in read["say"]
    assert f"{tiles[0]} tiles" in read["say"]


@pytest.mark.thorough("split_keys", "split")
def test_split_keys_against_the_rule(open_page):
    figure = open_page("split_keys").locator(SPLIT)
    assert_split(figure.evaluate(READ), 8, 128, 1)
    for programs in (1, 8, 33, 100, 132, 200):
        for stop in (0, 3, 5):
            for shares in (1, 5, 16, 17, 132):
                figure.evaluate(SET, [programs, stop, shares])
                assert_split(figure.evaluate(READ), programs, BLOCKS[stop], shares)


def test_split_keys_by_keyboard(open_page):
    page = open_page("split_keys")
    page.get_by_label("shares S").press("ArrowRight")
    assert_split(page.locator(SPLIT).evaluate(READ), 8, 128, 2)
