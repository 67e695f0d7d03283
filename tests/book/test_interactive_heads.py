"""The figures to touch of chapters 4 to 6, in a browser, against the package."""

import math

import numpy as np
import torch

from attnlib import ScaledDotProductAttention
from touch import close, numbers, tensor


def drawn(points, unit):
    """Where points of the plane stand in a drawing of 320 units."""
    return 160 + unit * np.asarray(points) * [1, -1]


# Chapter 4: a grid and its image

GRID = [[(t, -1), (t, 1), (-1, t), (1, t)] for t in (-1, -0.5, 0, 0.5, 1)]


def assert_grid(figure, rows):
    """Lines, arrows, token and words are those of the matrix, by torch."""
    read = figure.read(
        **{"lines": ".m@d", "arrows": ".arrow@d", "handles": ".h@transform", "cells": "td"},
        **{"token": ".x:not(path)@cx,cy", "image": ".z@cx,cy"},
    )
    W, token = tensor(rows), tensor([0.5, 1.0])
    close(read.lines, drawn(tensor(GRID) @ W, 75), 0.06)
    close(read.arrows, drawn(torch.stack([torch.zeros(2, 2), W], dim=1), 75), 0.06)
    close(read.handles, drawn(W, 75), 0.06)
    close(read.token, drawn(token, 75), 0.06)
    close(read.image, drawn(token @ W, 75), 0.06)
    close(read.cells, torch.stack([*W, token, token @ W]), 0.006)
    rank, det = torch.linalg.matrix_rank(W).item(), torch.linalg.det(W)
    assert read.say.startswith(f"Rank {rank}:")
    if rank == 2:
        assert f" {det.abs():.2f} times" in read.say
        assert ("turned over" in read.say) == (det < 0).item()


def test_grid_follows_its_rows(open_figure):
    figure = open_figure("grid_image")
    for name, rows in (
        ("identity", [[1.0, 0.0], [0.0, 1.0]]),
        ("quarter turn", [[0.0, 1.0], [-1.0, 0.0]]),
        ("rank 1", [[1.0, 0.5], [-0.6, -0.3]]),
        ("reset", [[1.0, 0.4], [-0.5, 0.9]]),
    ):
        assert_grid(figure.press(name), rows)
    for key, row in (
        ("ArrowLeft", [-0.55, 0.9]),
        ("Shift+ArrowDown", [-0.55, 0.4]),
        ("Shift+ArrowRight", [-0.05, 0.4]),
        ("ArrowUp", [-0.05, 0.45]),
    ):
        assert_grid(figure.keys(key, at="Row 2 of W"), [[1.0, 0.4], row])
    left, middle = figure.place("svg", 85, 160), figure.place("svg", 160, 160)
    turned_over = figure.drag(figure.place("svg", 235, 130), left)
    assert_grid(turned_over, [[-1.0, 0.0], [-0.05, 0.45]])
    assert_grid(figure.drag(left, middle), [[0.0, 0.0], [-0.05, 0.45]])


# Chapter 5: what one mixture of two numbers tells


def assert_plane(figure, pair, *shares):
    """The lines hold the pairs with its mixtures; the guess is the least-squares one."""
    read = figure.read(
        **{"at": ".pt@transform", "guess": ".guess@transform", "error": ".u@x1,y1,x2,y2"},
        **{"lines": ".l:not(.off)@d", "directions": ".d:not(.off)@d"},
    )
    pair, heads = tensor(pair), tensor([[share, 0.9 - share] for share in shares])
    guess = torch.linalg.pinv(heads, rtol=1e-6) @ (heads @ pair)
    close(read.at, drawn(pair, 25), 0.12)
    close(read.guess, drawn(guess, 25), 0.12)
    close(read.error, drawn([guess.tolist(), pair.tolist()], 25), 0.12)
    for head, line, way in zip(heads, read.lines, read.directions, strict=True):
        ends = (tensor(numbers(line)).view(2, 2) - 160) / tensor([25, -25])
        close(ends @ head, (head @ pair).expand(2), 0.02)
        assert (ends[0] - ends[1]).norm() > 20
        x, y = tensor(numbers(way))[2:] - 160
        close(x * head[1], -y * head[0], 0.1)
    assert f"{(heads @ pair)[0]:.2f}".replace("-", "\u2212") in read.say
    return read.say


def test_plane_measures_one_direction_a_head(open_figure):
    figure = open_figure("two_numbers")
    said = assert_plane(figure, [3.0, 5.0], 0.6)
    assert "The best guess is (4.4, 2.2), at the distance 3.1." in said
    figure.root.locator(".pt").focus()
    for key, pair in (
        ("ArrowLeft", [2.9, 5.0]),
        ("Shift+ArrowDown", [2.9, 4.0]),
        ("Shift+ArrowRight", [3.9, 4.0]),
        ("ArrowUp", [3.9, 4.1]),
    ):
        assert_plane(figure.keys(key), pair, 0.6)
    first, second = (f"weight of a in head {head}" for head in (1, 2))
    for share in (0.0, 0.45, 0.9):
        assert_plane(figure.fill(first, share), pair, share)
    figure.control("a second head").check()
    assert "cross at one point, (3.9, 4.1)" in assert_plane(figure, pair, 0.9, 0.2)
    said = assert_plane(figure.fill(second, 0.9), pair, 0.9, 0.9)
    assert "the second adds nothing" in said
    assert_plane(figure.press("reset"), [3.0, 5.0], 0.6)
    assert_plane(figure.fill(second, 0.5), [3.0, 5.0], 0.6, 0.5)  # which calls that head
    figure.press("reset")
    down, outside = figure.place("svg", 110, 210), (2000, -500)
    assert_plane(figure.drag(figure.place("svg", 235, 35), down), [-2.0, -2.0], 0.6)
    assert_plane(figure.drag(down, outside), [6.0, 6.0], 0.6)


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
    sliders = figure.root.locator("input")
    assert_prior(figure, TEXT)
    assert_prior(figure.press("no prior"), [0.0] * 4)
    sliders.nth(2).fill("1.5")
    assert_prior(figure, [0.0, 0.0, 1.5, 0.0])
    assert_prior(figure.press("add ½ to every b"), [0.5, 0.5, 2.0, 0.5])
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
    assert_prior(figure.press("as in the text"), TEXT)
    figure.press("add ½ to every b", times=9)  # the sliders' ends hold
    assert max(figure.read().bias[2:]) <= 3
