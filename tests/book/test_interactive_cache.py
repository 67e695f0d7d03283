"""The figure to touch of chapter 17, in a real browser, against the chapter's formulas."""

import pytest

CACHE = "#cache-cost"
V, D, LAYERS, SPEED = 50257, 768, 12, 50e9  # of the model, and bytes a second
READ = """figure => {
    const texts = css => [...figure.querySelectorAll(css)].map(e => +e.textContent);
    const widths = [...figure.querySelectorAll(".t b")].map(e => parseFloat(e.style.width));
    return {mib: texts(".mib"), flops: texts(".f"), ms: texts(".ms")[0], s: texts(".s")[0],
        widths, say: figure.querySelector(".say").textContent};
}"""
SET = """(figure, [n, b]) => {
    const form = figure.querySelector("form");
    Object.assign(form.elements.n, {value: n});
    Object.assign(form.elements.b, {value: b});
    form.dispatchEvent(new Event("input"));
}"""


def assert_cost(read, n, batch):
    """What the table, the bars and the sentence have to show."""
    parameters = 4 * (12 * LAYERS * D**2 + V * D)
    cached = 2 * 4 * batch * LAYERS * n * D
    step = batch * (LAYERS * (24 * D**2 + 4 * n * D) + 2 * V * D) / 1e9
    seconds = (parameters + cached) / SPEED
    assert read["mib"] == pytest.approx([parameters / 2**20, cached / 2**20], rel=0.01)
    assert read["flops"] == pytest.approx([n * step, step], rel=0.02)
    assert read["ms"] == pytest.approx(1e3 * seconds, rel=0.01)
    assert read["s"] == pytest.approx(batch / seconds, rel=0.01)
    share = 100 * cached / (parameters + cached)
    assert read["widths"] == pytest.approx([100 - share, share], abs=0.01)
    ratio = float(read["say"].split("are ")[1].split(" of")[0])
    assert ratio == pytest.approx(cached / parameters, rel=0.01, abs=0.006)
    assert ("nearly free" in read["say"]) == (cached < parameters / 2)
    assert ("as much as" in read["say"]) == (cached >= 2 * parameters)


def test_cache_cost_against_the_formulas(open_page):
    figure = open_page("cache_cost").locator(CACHE)
    assert_cost(figure.evaluate(READ), 1024, 1)
    for n in range(6, 14):
        for batch in (0, 2, 4, 7):
            figure.evaluate(SET, [n, batch])
            assert_cost(figure.evaluate(READ), 2**n, 2**batch)


def test_cache_cost_by_keyboard(open_page):
    page = open_page("cache_cost")
    page.get_by_label("texts B").press("ArrowRight")
    assert_cost(page.locator(CACHE).evaluate(READ), 1024, 2)
