"""The interactive figure of chapter 10, in a real browser, against attnlib.backprop."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from attnlib.backprop import ScaledDotProductAttention

STATIC = Path(__file__).parents[2] / "book" / "_static"
FRAGMENT = (STATIC / "backward_graph.html").read_text(encoding="utf-8")
FIGURE = "#backward-graph"
NAMES = ["dO", "dV", "dP", "dS", "dQK", "dQ", "dK"]


def open_figure(browser, fragment, width=760):
    page = browser.new_page(viewport={"width": width, "height": 900})
    problems = []
    page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
    page.on("request", lambda request: problems.append(f"request: {request.url}"))
    page.set_content(f'<!doctype html><meta charset="utf-8"><body>{fragment}')
    assert problems == []
    return page


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
def test_each_loss_has_the_gradients_of_the_package(browser, choice, d_output):
    page = open_figure(browser, FRAGMENT)
    page.check(f"{FIGURE} input[value='{choice}']")
    found = json.loads(page.locator(FIGURE).get_attribute("data-gradients"))
    cells = page.locator(f"{FIGURE} tbody td").evaluate_all("a => a.map(e => e.innerHTML)")
    for (name, want), cell in zip(expected(page, d_output).items(), cells, strict=True):
        assert np.allclose(found[name], want, rtol=0, atol=1e-12), name
        assert np.allclose(numbers(cell), want, rtol=0, atol=6e-4), name
    page.close()


def test_steps_reveal_one_gradient_after_the_other(browser):
    page = open_figure(browser, FRAGMENT, width=340)
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
    assert page.evaluate("document.documentElement.scrollWidth") <= 340
    page.close()


def test_without_scripts_the_last_step_stands_there(browser):
    assert len(FRAGMENT.encode()) < 15_000
    live = open_figure(browser, FRAGMENT)
    still = open_figure(browser, re.sub(r"<script>.*?</script>", "", FRAGMENT, flags=re.S))
    for css in ("tbody td", ".say", "text"):
        one, two = (p.locator(f"{FIGURE} {css}").all_inner_texts() for p in (live, still))
        assert one == two, css
    classes = "all => all.map(e => e.getAttribute('class'))"
    for css in (".back", ".node", "tbody tr"):
        one, two = (
            [c or "" for c in p.locator(f"{FIGURE} {css}").evaluate_all(classes)]
            for p in (live, still)
        )
        assert one == two, css
    assert not still.locator(f"{FIGURE} button").first.is_visible()
    live.close()
    still.close()
