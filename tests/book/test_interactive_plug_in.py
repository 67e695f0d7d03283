"""The figures to touch of chapters 6 and 7, in a real browser, against the package."""

import math

import pytest
import torch

from attnlib import LayerNorm, ScaledDotProductAttention
from touch import close, tensor

# Chapter 6: the prior times the softmax

TEXT = [math.log(2), -math.inf, math.log(3), 0.0]


def assert_prior(figure, bias):
    """Bars, numbers and the numbers kept are those of attention with this bias."""
    read = figure.read(
        **{"scores": ".t:not(.p) b@width", "bars": ".p b@width"},
        **{"priors": ".o", "printed": ".w"},
    )
    bias, scores = tensor(bias), tensor([2, 4, 1, 1]).log()
    values = tensor(read.values)[:, None]
    output, (weights,) = ScaledDotProductAttention()(
        torch.ones_like(values[:1]), scores[:, None], values, bias[None]
    )
    close(read.bias, bias, 1e-9)
    close(read.weights, weights, 1e-9)
    close([read.output], output, 1e-9)
    close(read.bars, 100 * weights, 1e-3)
    close(read.scores, 100 * scores.softmax(dim=0), 1e-9)
    close(read.printed, weights, 5.1e-4)
    close(read.priors, bias.exp(), 5.1e-3)
    return read


def test_prior_by_slider_button_and_keyboard(open_figure):
    figure = open_figure("prior")
    assert_prior(figure, TEXT)
    figure.press("no prior")
    assert_prior(figure, [0.0] * 4)
    sliders = figure.root.locator("input")
    sliders.nth(2).fill("1.5")
    assert_prior(figure, [0.0, 0.0, 1.5, 0.0])
    figure.press("add ½ to every b")
    assert_prior(figure, [0.5, 0.5, 2.0, 0.5])
    sliders.nth(1).press("ArrowRight")
    assert_prior(figure, [0.5, 0.55, 2.0, 0.5])
    sliders.nth(1).press("Home")
    read = assert_prior(figure, [0.5, -math.inf, 2.0, 0.5])
    assert sliders.nth(1).get_attribute("aria-valuetext") == "minus infinity, forbidden"
    assert read.say.startswith("Key 2 is forbidden.")
    for key in range(4):
        sliders.nth(key).fill("-3")
    read = assert_prior(figure, [-math.inf] * 4)
    assert read.say.startswith("Every key is forbidden")
    figure.press("as in the text")
    assert_prior(figure, TEXT)
    figure.press("add ½ to every b", times=9)  # the sliders' ends hold
    assert max(figure.read().bias[2:]) <= 3


# Chapter 7: a plane, then a circle


def drawn_at(tokens, turn):
    """Where tokens of three features are drawn, looked at from 35° above the plane."""
    basis = tensor([[1.0, -1, 0], [1, 1, -2], [1, 1, 1]])
    a, b, up = (tokens @ (basis / basis.norm(dim=1, keepdim=True)).T).unbind(dim=-1)
    turn, slope = math.radians(turn), math.radians(35)
    side = a * math.cos(turn) - b * math.sin(turn)
    away = a * math.sin(turn) + b * math.cos(turn)
    height = math.cos(slope) * up + math.sin(slope) * away
    return torch.stack([170 + 30 * side, 195 - 30 * height], dim=-1)


def assert_sphere(figure, token, stage=0.0, turn=30):
    """Table, points and dots are those of LayerNorm, and of the mean taken off."""
    points = {name: f".{name}@cx,cy" for name in ("px", "pc", "py")}
    read = figure.read(table="tbody td", dots=".dots circle@cx,cy", **points)
    assert read.token == pytest.approx(token) and read.turn == turn
    assert read.stage == pytest.approx(stage)
    tokens = tensor([token, *read.cloud])
    centered = tokens - tokens.mean(dim=1, keepdim=True)
    normalized = LayerNorm(3, eps=0.0).double()(tokens).detach().nan_to_num(0.0)
    three = torch.stack([tokens[0], centered[0], normalized[0]])
    table = torch.stack([*three.T, three.mean(dim=1), three.norm(dim=1)])
    close(read.table, table, 0.0051)
    first, second = (tokens, centered) if stage <= 1 else (centered, normalized)
    moved = torch.lerp(first, second, stage if stage <= 1 else stage - 1)[1:]
    close(read.px + read.pc + read.py, drawn_at(three, turn), 0.051)
    close(read.dots, drawn_at(moved, turn), 0.051)
    return read


def test_sphere_by_slider_button_and_keyboard(open_figure):
    figure = open_figure("plane_sphere")
    normalized = assert_sphere(figure, [1, 3, 2]).py
    for button, token in (
        ("add 1 to all", [2, 4, 3]),
        ("add 1 to all", [3, 5, 4]),
        ("add 1 to all", [3, 5, 4]),  # the sliders' ends hold
        ("take 1 from all", [2, 4, 3]),
        ("take 1 from all", [1, 3, 2]),
        ("halve", [0.5, 1.5, 1]),
    ):
        figure.press(button)
        assert assert_sphere(figure, token).py == normalized
    figure.keys("ArrowRight", at="Feature 1")
    assert assert_sphere(figure, [0.6, 1.5, 1]).py != normalized
    for stage in (0.5, 1, 1.5, 2):
        figure.fill("Other tokens", stage)
        assert_sphere(figure, [0.6, 1.5, 1], stage)
    said = figure.control("Other tokens").get_attribute("aria-valuetext")
    assert said == "on the circle"
    figure.fill("Turn", -90)
    assert_sphere(figure, [0.6, 1.5, 1], 2, turn=-90)
    for number in (1, 2, 3):
        figure.fill(f"Feature {number}", -2)
    read = assert_sphere(figure, [-2, -2, -2], 2, turn=-90)
    assert read.say.startswith("All features are equal")
    figure.press("reset")
    assert_sphere(figure, [1, 3, 2])
