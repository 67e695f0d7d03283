"""The token on the circle, the figure to touch of chapter 21, by the package."""

import numpy as np
import pytest

from attnlib.backprop import LayerNorm, RMSNormLayer

READ = """figure => {
    const {token, gradient} = figure.dataset;
    const ends = css => { const l = figure.querySelector(css); return [l.x2.baseVal.value
        - l.x1.baseVal.value, l.y1.baseVal.value - l.y2.baseVal.value].map(v => v / 18); };
    return {token: JSON.parse(token), gradient: JSON.parse(gradient), out: ends(".out"),
        into: ends(".into"), say: figure.querySelector(".say").textContent,
        cells: [...figure.querySelectorAll("td")].map(e => e.textContent)};
}"""


def assert_normed(page, token, gradient):
    read = page.locator("#rms-circle").first.evaluate(READ)
    assert (read["token"], read["gradient"]) == (token, gradient)
    x, g, layer = np.array(token), np.array(gradient), RMSNormLayer(2, eps=0.0)
    y = layer.forward(x)
    dx = layer.backward(g)
    rows = x, y, LayerNorm(2, eps=0.0).forward(x), g, dx
    shown = [float(text.replace("\u2212", "-")) for text in read["cells"]]
    assert np.allclose(shown, np.concatenate(rows), rtol=0, atol=0.0051)
    assert np.allclose(read["into"], g, rtol=0, atol=0.006)
    assert np.allclose(read["out"], dx, rtol=0, atol=0.006)
    assert read["say"] == f"s = {np.sqrt(x @ x / 2):.2f}, and dx · x = 0.00."


@pytest.fixture
def page(open_page):
    return open_page("rms_circle")


def test_the_example_of_the_chapter(page):
    assert_normed(page, [1.0, 7.0], [5.0, 0.0])
    read = page.locator("#rms-circle").first.evaluate(READ)
    assert read["cells"][-2:] == ["0.98", "\u22120.14"]


def test_by_keyboard(page):
    token = page.get_by_role("slider", name="Token")
    for _ in range(4):
        token.press("ArrowLeft")
    token.press("Shift+ArrowDown")
    assert_normed(page, [-1.0, 5.0], [5.0, 0.0])
    page.get_by_label("Gradient, feature 2").press("ArrowLeft")
    assert_normed(page, [-1.0, 5.0], [5.0, -0.5])
    page.get_by_role("button", name="halve").click()
    assert_normed(page, [-0.5, 2.5], [5.0, -0.5])
    page.get_by_role("button", name="reset").click()
    assert_normed(page, [1.0, 7.0], [5.0, 0.0])


def test_a_token_without_a_direction(page):
    token = page.get_by_role("slider", name="Token")
    for key, times in (("ArrowLeft", 2), ("ArrowDown", 14)):
        for _ in range(times):
            token.press(key)
    said = page.locator("#rms-circle .say").text_content()
    assert said.startswith("A token of length 0 has no direction")
