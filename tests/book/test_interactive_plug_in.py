"""The figures to touch of chapters 6 and 7, in a real browser, against the package."""

import json
import math

import pytest
import torch

from attnlib import LayerNorm, ScaledDotProductAttention
from touch import press, tensor

# Chapter 6: the prior times the softmax


PRIOR = "#prior-bias"
READ_PRIOR = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const width = e => parseFloat(e.style.width), number = e => parseFloat(e.textContent);
    const {values, bias, weights, output} = figure.dataset;
    return {
        values, bias, weights, output, scores: all(".t:not(.p) b", width),
        bars: all(".p b", width), priors: all(".o", number), printed: all(".w", number),
    };
}"""


def assert_prior(page, bias):
    """Bars, numbers and the numbers kept are those of attention with this bias."""
    read = page.locator(PRIOR).first.evaluate(READ_PRIOR)
    kept = tensor([json.loads(read["bias"])])[0]
    bias = tensor([bias])[0]
    scores = torch.tensor([2.0, 4.0, 1.0, 1.0], dtype=torch.float64).log()
    values = torch.tensor(json.loads(read["values"]), dtype=torch.float64)
    attend = ScaledDotProductAttention()
    query, key = torch.ones(1, 1, dtype=torch.float64), scores[:, None]
    output, weights = attend(query, key, values[:, None], bias)
    for got, expected, atol in (
        (kept, bias, 1e-9),
        (json.loads(read["weights"]), weights[0], 1e-9),
        (float(read["output"]), output[0, 0], 1e-9),
        (read["bars"], 100 * weights[0], 1e-3),
        (read["scores"], 100 * scores.softmax(dim=0), 1e-9),
        (read["printed"], weights[0], 5.1e-4),
        (read["priors"], bias.exp(), 5.1e-3),
    ):
        got = torch.as_tensor(got, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=0, atol=atol)


TEXT = [math.log(2), None, math.log(3), 0.0]


def test_prior_by_slider_button_and_keyboard(open_page):
    page = open_page("prior")
    assert_prior(page, TEXT)
    press(page, "no prior")
    assert_prior(page, [0.0] * 4)
    sliders = page.locator(f"{PRIOR} input")
    sliders.nth(2).fill("1.5")
    assert_prior(page, [0.0, 0.0, 1.5, 0.0])
    press(page, "add ½")
    assert_prior(page, [0.5, 0.5, 2.0, 0.5])
    sliders.nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert_prior(page, [0.5, 0.55, 2.0, 0.5])
    page.keyboard.press("Home")
    assert_prior(page, [0.5, None, 2.0, 0.5])
    assert sliders.nth(1).get_attribute("aria-valuetext") == "minus infinity, forbidden"
    say = page.locator(f"{PRIOR} .say")
    assert say.text_content().startswith("Key 2 is forbidden.")
    for key in range(4):
        sliders.nth(key).fill("-3")
    assert_prior(page, [None] * 4)
    assert say.text_content().startswith("Every key is forbidden")
    press(page, "as in the text")
    assert_prior(page, TEXT)
    for _ in range(9):  # the sliders' ends hold
        press(page, "add ½")
    assert max(json.loads(page.locator(PRIOR).get_attribute("data-bias"))[2:]) <= 3


# Chapter 7: a plane, then a circle


SPHERE = "#plane-sphere"
READ_SPHERE = """figure => {
    const number = e => parseFloat(e.textContent.replace("\u2212", "-"));
    const at = e => ["cx", "cy"].map(name => Number(e.getAttribute(name)));
    return {
        token: JSON.parse(figure.dataset.token), cloud: JSON.parse(figure.dataset.cloud),
        stage: Number(figure.dataset.stage), turn: Number(figure.dataset.turn),
        table: [...figure.querySelectorAll("tbody tr")].map(
            row => [...row.cells].slice(1).map(number)),
        points: [".px", ".pc", ".py"].map(css => at(figure.querySelector(css))),
        dots: [...figure.querySelectorAll(".dots circle")].map(at),
    };
}"""


def drawn_at(tokens, turn):
    """Where tokens of three features are drawn, looked at from 35° above the plane."""
    basis = tensor([[1.0, -1, 0], [1, 1, -2], [1, 1, 1]])
    a, b, up = (tokens @ (basis / basis.norm(dim=1, keepdim=True)).T).unbind(dim=-1)
    turn, slope = math.radians(turn), math.radians(35)
    side = a * math.cos(turn) - b * math.sin(turn)
    away = a * math.sin(turn) + b * math.cos(turn)
    height = math.cos(slope) * up + math.sin(slope) * away
    return torch.stack([170 + 30 * side, 195 - 30 * height], dim=-1)


def assert_sphere(page, token, stage=0.0, turn=30):
    """Table, points and dots are those of LayerNorm, and of the mean taken off."""
    read = page.locator(SPHERE).first.evaluate(READ_SPHERE)
    assert read["token"] == pytest.approx(token) and read["turn"] == turn
    assert read["stage"] == pytest.approx(stage)
    norm = LayerNorm(3, eps=0.0).double()
    tokens = tensor([token, *read["cloud"]])
    centered = tokens - tokens.mean(dim=1, keepdim=True)
    normalized = norm(tokens).detach().nan_to_num(0.0)
    three = torch.stack([tokens[0], centered[0], normalized[0]])
    table = torch.cat(
        [three, three.mean(dim=1)[:, None], three.norm(dim=1)[:, None]], dim=1
    )
    torch.testing.assert_close(tensor(read["table"]), table.T, rtol=0, atol=0.0051)
    first, second = (tokens, centered) if stage <= 1 else (centered, normalized)
    moved = torch.lerp(first, second, stage if stage <= 1 else stage - 1)[1:]
    for got, want in ((read["points"], three), (read["dots"], moved)):
        want = drawn_at(want, turn)
        torch.testing.assert_close(tensor(got), want, rtol=0, atol=0.051)


def test_sphere_by_slider_button_and_keyboard(open_page):
    page = open_page("plane_sphere")
    assert_sphere(page, [1, 3, 2])
    blue = page.locator(f"{SPHERE} .py")
    before = blue.evaluate("e => e.outerHTML")
    for button, token in (
        ("add 1 to all", [2, 4, 3]),
        ("add 1 to all", [3, 5, 4]),
        ("add 1 to all", [3, 5, 4]),  # the sliders' ends hold
        ("take 1 from all", [2, 4, 3]),
        ("take 1 from all", [1, 3, 2]),
        ("halve", [0.5, 1.5, 1]),
    ):
        press(page, button)
        assert_sphere(page, token)
        assert blue.evaluate("e => e.outerHTML") == before
    page.get_by_role("slider", name="Feature 1").focus()
    page.keyboard.press("ArrowRight")
    assert_sphere(page, [0.6, 1.5, 1])
    assert blue.evaluate("e => e.outerHTML") != before
    others = page.get_by_role("slider", name="Other tokens")
    for stage in (0.5, 1, 1.5, 2):
        others.fill(str(stage))
        assert_sphere(page, [0.6, 1.5, 1], stage)
    assert others.get_attribute("aria-valuetext") == "on the circle"
    page.get_by_role("slider", name="Turn").fill("-90")
    assert_sphere(page, [0.6, 1.5, 1], 2, turn=-90)
    for number, value in ((1, -2), (2, -2), (3, -2)):
        page.get_by_role("slider", name=f"Feature {number}").fill(str(value))
    assert_sphere(page, [-2, -2, -2], 2, turn=-90)
    say = page.locator(f"{SPHERE} .say").text_content()
    assert say.startswith("All features are equal")
    press(page, "reset")
    assert_sphere(page, [1, 3, 2])
