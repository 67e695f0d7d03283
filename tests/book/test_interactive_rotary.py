"""The turning arms, the figure to touch of chapter 16, in a browser, by the package."""

import json

import pytest
import torch

from attnlib import RotaryPositions
from touch import press

READ = """figure => {
    const end = line => [line.x2.baseVal.value - line.x1.baseVal.value,
        line.y1.baseVal.value - line.y2.baseVal.value].map(x => x / 40);
    const {places, rule, score} = figure.dataset, dot = figure.querySelector(".pt");
    return {
        places: JSON.parse(places), rule, score: +score,
        query: [...figure.querySelectorAll(".q")].map(end),
        key: [...figure.querySelectorAll(".k")].map(end),
        dot: [dot.cx.baseVal.value, dot.cy.baseVal.value],
        curve: figure.querySelector(".c").getAttribute("d").slice(1).split("L")
            .map(point => point.split(" ").map(Number)),
        said: figure.querySelector(".say").textContent,
    };
}"""


def assert_turned(page, places, rule=None):
    """Arms, curve and words are those of a head with six features and base 1000."""
    read = page.locator("#rotary").first.evaluate(READ)
    assert (read["places"], read["rule"]) == (list(places), rule or "")
    trained = RotaryPositions(6, 1000.0, interleaved=True)
    factor = 4.0 if rule else 1.0
    turn = RotaryPositions(6, 1000.0, interleaved=True, scaling=rule, factor=factor)
    key = torch.tensor([[1.0, 0, 1, 0, 1, 0]], dtype=torch.float64)
    query = trained(key, -3)  # it looks three places back
    m, n = places
    for name, found, place in (("query", query, m), ("key", key, n)):
        arms = torch.tensor(read[name], dtype=torch.float64).flatten()
        torch.testing.assert_close(arms, turn(found, place)[0], rtol=0, atol=2e-3)
    score = (turn(query, m) * turn(key, n)).sum().item()
    assert read["score"] == pytest.approx(score, abs=1e-4)
    assert f"score {score:.2f}".replace("-", "\u2212") in read["said"]
    assert read["dot"] == pytest.approx([165 + 4 * (m - n), 70 - 20 * score], abs=0.06)
    for x, y in read["curve"][::20]:
        distance = round((x - 165) / 4)
        at = (turn(query, distance) * key).sum().item()
        assert y == pytest.approx(70 - 20 * at, abs=0.06)


def test_arms_turn_with_their_places(open_page):
    page = open_page("rotary")
    assert_turned(page, (9, 4))
    press(page, "both one on", times=3)
    assert_turned(page, (12, 7))
    press(page, "both one back")
    assert_turned(page, (11, 6))
    page.get_by_label("Place of the query").fill("2")
    assert_turned(page, (2, 6))
    said = page.locator("#rotary .say").text_content()
    assert "the query 4 before it" in said
    press(page, "linear")
    assert_turned(page, (2, 6), "linear")
    page.get_by_label("Place of the query").fill("18")  # four times as far
    assert_turned(page, (18, 6), "linear")
    score = json.loads(page.locator("#rotary").get_attribute("data-score"))
    assert score > 2.9
    press(page, "NTK")
    assert_turned(page, (18, 6), "ntk")
    press(page, "as trained")
    page.get_by_label("Place of the key").focus()
    page.keyboard.press("End")
    assert_turned(page, (18, 40))
    press(page, "both one on")  # 40 is the last place
    assert_turned(page, (18, 40))
