"""The figures to touch of chapters 7 to 9, in a browser, against the package."""

import math
import re

import nbformat
import numpy as np
import pytest
import torch

from attnlib import FeedForwardNetwork, LayerNorm
from touch import ROOT, close, numbers, points, tensor

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
    three = {name: f".{name}@cx,cy" for name in ("px", "pc", "py")}
    read = figure.read(table="tbody td", dots=".dots circle@cx,cy", **three)
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
        assert assert_sphere(figure.press(button), token).py == normalized
    figure.keys("ArrowRight", at="Feature 1")
    assert assert_sphere(figure, [0.6, 1.5, 1]).py != normalized
    for stage in (0.5, 1, 1.5, 2):
        assert_sphere(figure.fill("Other tokens", stage), [0.6, 1.5, 1], stage)
    said = figure.control("Other tokens").get_attribute("aria-valuetext")
    assert said == "on the circle"
    assert_sphere(figure.fill("Turn", -90), [0.6, 1.5, 1], 2, turn=-90)
    for number in (1, 2, 3):
        figure.fill(f"Feature {number}", -2)
    read = assert_sphere(figure, [-2, -2, -2], 2, turn=-90)
    assert read.say.startswith("All features are equal")
    assert_sphere(figure.press("reset"), [1, 3, 2])


# Chapter 8: kinks


def assert_kinks(figure):
    """The chain and the words are those of the package's network with these numbers."""
    read = figure.read(chain=".chain@d", handles=".h@transform", cells="tbody td")
    w, kink, v = (tensor(read.network[name]) for name in ("w", "kink", "v"))
    network = FeedForwardNetwork(1, d_ff=3).double()
    state = {"linear_1.W": w[None], "linear_1.b": -w * kink, "linear_2.W": v[:, None]}
    network.load_state_dict(state | {"linear_2.b": torch.zeros(1)})

    def y(x):
        with torch.no_grad():
            return network(tensor(x)[:, None])[:, 0].numpy()

    x, height = ((points(read.chain) - [120, 150]) / [60, -50]).T
    close(height, y(x), 2e-3)
    bent = [-2, *sorted(set(kink[w * v != 0].tolist())), 4]
    close(x, bent, 2e-3)
    in_view = np.clip(150 - 50 * y(kink.tolist()), 14, 286)
    close(read.handles, np.column_stack([120 + 60 * kink, in_view]), 0.06)
    for k in range(3):
        w_k, v_k, at, change = read.cells[4 * k : 4 * k + 4]
        close([w_k, v_k], [w[k], v[k]], 1e-6)
        close(at.replace("none", "0"), kink[k] * (w[k] != 0), 1e-6)
        close(change, abs(w[k]) * v[k], 0.006)
    met = int(np.isclose(y([0.0, 1.0, 2.0]), [0, 1, 0]).sum())
    said = "All three rings are met." if met == 3 else f"{met} of 3 rings"
    slopes, found, _ = read.say.partition(said)
    assert found
    close(slopes, np.diff(y(bent)) / np.diff(bent), 0.0051)
    return read.network["kink"]


def test_kinks_are_those_of_the_network(open_figure):
    figure = open_figure("kinks")
    assert_kinks(figure)
    for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowRight"):
        moved = assert_kinks(figure.keys(key, at="kink 2"))
    assert moved == [0, 1.5, 2]
    for name, value in (("v 3", 1.5), ("w 3", -2), ("w 1", 0), ("v 2", 0.75)):
        assert_kinks(figure.fill(name, value))
    assert assert_kinks(figure.drag(figure.place(".h1 .ring"), (0, 0)))[0] == -1.75
    assert assert_kinks(figure.press("reset")) == [0, 1, 2]
    for k in (1, 2, 3):
        said = figure.control(f"kink {k}").get_attribute("aria-valuetext")
        assert said.startswith("kink at ")


# Chapter 9: what may follow "there", and a temperature


def assert_temperature(figure, T):
    """What is shown at temperature T, against torch."""
    read = figure.read(logit=".s", chance=".a", bars=".t b@width", draws=".draws")
    logits = tensor(read.logits)
    P = torch.softmax(logits / T, dim=0)
    close(read.logit, logits, 0.0051)
    close(read.chance, P, 0.0051)
    close(read.bars, 100 * P, 0.0051)
    uniforms = tensor(read.uniforms)
    chosen = (uniforms[:, None] >= P.cumsum(0)[:-1]).sum(1)
    assert read.draws == ["".join(read.names[i] for i in chosen)]
    assert f"The space has the probability {P[0]:.2f}" in read.say
    return read


def test_temperature_from_likeliest_to_all_alike(open_figure):
    figure, different = open_figure("temperature"), []
    read = assert_temperature(figure, 1.0)
    (cell,) = (
        cell
        for cell in nbformat.read(ROOT / "book/09_transformer.ipynb", as_version=4).cells
        if "logits = tiny(there)" in cell.source
    )
    printed = cell.outputs[0].text  # the last row is what follows
    assert numbers(re.search(r"\[([^\[\]]+)\]\]\)", printed)[1]) == read.logits
    for log10 in (-1, -0.3, 0.3, 1):
        (draws,) = assert_temperature(figure.fill("Temperature T", log10), 10**log10).draws
        different.append(len(set(draws)))
    assert different == sorted(different) and different[0] == 1 < different[-1]
    assert_temperature(figure.keys("Home", at="Temperature T"), 0.1)
