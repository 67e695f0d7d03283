"""The figure to touch of chapter 18, in a real browser, against the chapter's formulas."""

import re

FEWER = "#fewer-keys-figure"
HEADS = 8
READ = """figure => {
    const texts = css => [...figure.querySelectorAll(css)].map(e => e.textContent);
    const path = css => figure.querySelector(css).getAttribute("d");
    return {scores: texts(".s").map(Number), kept: texts(".k").map(Number),
        places: texts(".places")[0].split(" "), say: texts(".say")[0],
        before: path(".before"), row: path(".row"), squares: path(".kept")};
}"""
SET = """(figure, [t, w, g]) => {
    const form = figure.querySelector("form");
    Object.assign(form.elements.t, {value: t});
    Object.assign(form.elements.w, {value: w});
    Object.assign(form.elements.g, {value: g});
    form.dispatchEvent(new Event("input"));
}"""


def cells(path):
    """Column and row of each square of a path."""
    return {(int(x) // 16, int(y) // 16) for x, y in re.findall(r"M(\d+) (\d+)h", path)}


def assert_shown(read, t, w, group):
    """What the pictures, the table and the sentence have to show."""
    seen = {i: [j for j in range(i + 1) if i - w < j <= i] for i in range(t + 1)}
    assert cells(read["row"]) == {(j, t) for j in seen[t]}
    assert cells(read["before"]) == {(j, i) for i in range(t) for j in seen[i]}
    kept = {(a, j) for j in seen[t] for a in range(0, HEADS, group)}
    assert cells(read["squares"]) == kept
    assert read["scores"] == [len(seen[t]), t + 1]
    assert read["kept"] == [len(kept), HEADS * (t + 1)]
    assert len(read["places"]) == w
    for place, token in enumerate(read["places"]):
        there = [j for j in seen[t] if j % w == place]
        assert token == (str(there[0]) if there else "–") and len(there) <= 1
    everything = len(kept) == HEADS * (t + 1)
    assert ("everything is kept" in read["say"]) == everything
    assert everything or f"{len(kept)} squares are kept instead of" in read["say"]
    assert f"Token {t} sees" in read["say"]


def test_fewer_keys_against_the_formulas(open_page):
    figure = open_page("fewer_keys").locator(FEWER)
    assert_shown(figure.evaluate(READ), 8, 4, 4)
    for t in (0, 1, 5, 11):
        for w in (1, 3, 4, 12):
            for power in range(4):
                figure.evaluate(SET, [t, w, power])
                assert_shown(figure.evaluate(READ), t, w, 2**power)


def test_fewer_keys_by_keyboard(open_page):
    page = open_page("fewer_keys")
    page.get_by_label("window w").press("ArrowRight")
    assert_shown(page.locator(FEWER).evaluate(READ), 8, 5, 4)
