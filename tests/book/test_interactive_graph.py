"""The interactive figure of chapter 10, in a real browser, against attnlib.backprop."""

import json

import numpy as np
import pytest

from attnlib.backprop import ScaledDotProductAttention

FIGURE = "#backward-graph"
NAMES = ["dO", "dV", "dP", "dS", "dQK", "dQ", "dK"]


def expected(page, d_output):
    """The gradients of the figure's own inputs, by the package."""
    figure = page.locator(FIGURE)
    names = ("query", "keys", "values")
    q, k, v = (json.loads(figure.get_attribute(f"data-{name}")) for name in names)
    q, k, v = np.array([q], float), np.array(k, float), np.array(v, float)
    layer, dO = ScaledDotProductAttention(), np.array([d_output], float)
    _, P = layer.forward(q, k, v)
    dQ, dK, dV = layer.backward(dO)
    dP = dO @ v.T
    dS = P * (dP - (dP * P).sum())
    return dict(zip(NAMES, (dO, dV, dP, dS, dS / np.sqrt(q.size), dQ, dK), strict=True))


def numbers(cell):
    text = cell.replace("\u2212", "-").replace("<br>", "\n")
    return [[float(x) for x in line.split()] for line in text.split("\n")]


@pytest.mark.parametrize(
    ("choice", "d_output"),
    [("[1,0]", [1, 0]), ("[0,1]", [0, 1]), ("[1,1]", [1, 1])],
)
def test_each_loss_has_the_gradients_of_the_package(open_page, choice, d_output):
    page = open_page("backward_graph")
    page.check(f"{FIGURE} input[value='{choice}']")
    found = json.loads(page.locator(FIGURE).get_attribute("data-gradients"))
    cells = page.locator(f"{FIGURE} tbody td").evaluate_all("a => a.map(e => e.innerHTML)")
    for (name, want), cell in zip(expected(page, d_output).items(), cells, strict=True):
        assert np.allclose(found[name], want, rtol=0, atol=1e-12), name
        assert np.allclose(numbers(cell), want, rtol=0, atol=6e-4), name


def test_steps_reveal_one_gradient_after_the_other(open_page):
    page = open_page("backward_graph")
    page.click(f"{FIGURE} button[data-do='0']")
    for step in range(7):
        shown = page.locator(f"{FIGURE} tbody td").evaluate_all(
            "all => all.filter(e => getComputedStyle(e).visibility == 'visible').length"
        )
        assert shown == step + 1
        assert page.locator(f"{FIGURE} .back.now").count() == 1
        page.keyboard.press("Tab")
        page.focus(f"{FIGURE} button[data-do='1']")
        page.keyboard.press("Enter")
