"""The soft lookup, the figure to touch of chapter 1, in a browser, against torch."""

import json
import re

import pytest
import torch

FIGURE = "#soft-lookup"


def attribute(page, name):
    return json.loads(page.locator(FIGURE).first.get_attribute(f"data-{name}"))


def texts(page, selector):
    found = page.locator(f"{FIGURE} {selector}").all_text_contents()
    return [text.strip() for text in found]


READ = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const number = e => parseFloat(e.textContent.replace("\u2212", "-"));
    const {query, keys, values, weights, output, temperature = 1} = figure.dataset;
    return {
        query, keys, values, weights, output, temperature,
        scoresPrinted: all(".s", number),
        weightsPrinted: all(".a", number),
        bars: all(".t b", e => parseFloat(e.style.width)),
        thickness: all(".keys .w", e => Number(e.getAttribute("stroke-width"))),
        place: figure.querySelector(".o").getAttribute("transform"),
    };
}"""


def assert_right(page):
    """The numbers kept, the numbers printed and the picture agree with torch."""
    read = page.locator(FIGURE).first.evaluate(READ)
    query, keys, values, weights, output = (
        torch.tensor(json.loads(read[name]), dtype=torch.float64)
        for name in ("query", "keys", "values", "weights", "output")
    )
    scores = keys @ query / 2**0.5
    want = torch.softmax(scores / float(read["temperature"]), dim=0)
    middle = [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", read["place"])]
    place = [(middle[0] - 160) / 50, (106 - middle[1]) / 50]
    for got, expected, atol in (
        (weights, want, 1e-9),
        (weights.sum(), torch.ones(()), 1e-9),
        (output, want @ values, 1e-9),
        (read["scoresPrinted"], scores, 0.0051),
        (read["weightsPrinted"], want, 0.0051),
        (read["bars"], 100 * want, 0.0051),
        (read["thickness"], 0.6 + 9 * want, 0.051),
        (place, want @ values, 0.0025),
    ):
        got = torch.as_tensor(got, dtype=torch.float64)
        assert torch.allclose(got, expected.double(), rtol=0, atol=atol)
    assert inside_hull(output, values)


def inside_hull(point, corners, tolerance=1e-9):
    """True where point lies in the convex hull: no direction separates it."""
    angles = torch.linspace(0, 2 * torch.pi, 721, dtype=torch.float64)
    directions = torch.stack([angles.cos(), angles.sin()])
    reach = (corners @ directions).max(dim=0).values
    return bool((point @ directions <= reach + tolerance).all())


def centre(page, selector):
    box = page.locator(f"{FIGURE} {selector}").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def set_temperature(page, log10):
    page.get_by_role("slider", name="Temperature T").fill(str(log10))


def test_keys_and_values_are_drawn_where_the_data_say(open_page):
    page = open_page("soft_lookup")
    circles = page.locator(f"{FIGURE} circle.k").evaluate_all(
        "all => all.map(c => [c.cx.baseVal.value, c.cy.baseVal.value])"
    )
    squares = page.locator(f"{FIGURE} rect.v").evaluate_all(
        "all => all.map(r => [r.x.baseVal.value + 6, r.y.baseVal.value + 6])"
    )
    circles = [((x - 160) / 46, (136 - y) / 46) for x, y in circles]
    squares = [((x - 160) / 50, (106 - y) / 50) for x, y in squares]
    for drawn, name in ((circles, "keys"), (squares, "values")):
        want = torch.tensor(attribute(page, name))
        assert torch.allclose(torch.tensor(drawn), want, rtol=0, atol=0.002), name


def test_dragging_the_query_onto_a_key(open_page):
    page = open_page("soft_lookup")
    before = attribute(page, "weights")
    page.mouse.move(*centre(page, ".q .ring"))
    page.mouse.down()
    for index in (3, 0, 2):
        page.mouse.move(*centre(page, f"circle.k >> nth={index}"), steps=3)
        assert_right(page)
        weights = attribute(page, "weights")
        assert weights != before
        assert max(range(5), key=weights.__getitem__) == index
        key = torch.tensor(attribute(page, "keys")[index])
        assert torch.allclose(torch.tensor(attribute(page, "query")), key, atol=0.011)
    page.mouse.move(-50, -50)  # outside: the query stops at the edge
    assert attribute(page, "query") == [-3.2, 2.7]
    page.mouse.up()
    held = attribute(page, "query")
    page.mouse.move(*centre(page, ".q .ring"))
    page.mouse.move(*centre(page, ".keys"), steps=20)
    assert attribute(page, "query") == held
    page.mouse.click(*centre(page, ".keys"))  # a click moves it there
    assert attribute(page, "query") == pytest.approx([0, 0], abs=0.02)


def test_touch(open_page):
    page = open_page("soft_lookup", width=390, height=600, has_touch=True, is_mobile=True)
    page.touchscreen.tap(*centre(page, "circle.k >> nth=1"))
    assert texts(page, ".say")[0].startswith("k₂ gets")
    assert_right(page)

    touch = page.context.new_cdp_session(page)

    def send(kind, *points):
        points = [{"x": x, "y": y} for x, y in points]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    x, y = centre(page, "circle.k >> nth=1")
    goal_x, goal_y = centre(page, "circle.k >> nth=3")
    send("touchStart", (x, y))
    for part in (0.25, 0.5, 0.75, 1):
        send("touchMove", (x + part * (goal_x - x), y + part * (goal_y - y)))
    send("touchEnd")
    key = attribute(page, "keys")[3]
    assert attribute(page, "query") == pytest.approx(key, abs=0.03)
    assert page.evaluate("scrollY") == 0  # the finger moved the query, not the page
    assert_right(page)


def test_keyboard_and_buttons(open_page):
    page = open_page("soft_lookup")
    assert_right(page)
    handle = page.get_by_role("slider", name="Query q")
    handle.focus()
    for key, want in (
        ("ArrowLeft", [1.3, 0.9]),
        ("ArrowUp", [1.3, 1.0]),
        ("Shift+ArrowRight", [1.8, 1.0]),
        ("ArrowDown", [1.8, 0.9]),
    ):
        page.keyboard.press(key)
        assert attribute(page, "query") == pytest.approx(want)
        assert_right(page)
    assert handle.get_attribute("aria-valuetext") == "q = (1.80, 0.90)"
    press = page.get_by_role("button", name="reset").click
    press()
    assert attribute(page, "query") == [1.4, 0.9]

    one = attribute(page, "weights")
    page.get_by_role("button", name="double q").click()
    double = attribute(page, "weights")
    assert_right(page)
    press()
    half = torch.tensor(attribute(page, "query")) @ torch.tensor(attribute(page, "keys")).T
    want = torch.softmax(half / 2**0.5 / 0.5, dim=0)  # q at half the temperature
    assert torch.allclose(torch.tensor(double), want, atol=1e-6)

    page.get_by_role("button", name="turn q").click()
    turned = attribute(page, "weights")
    assert_right(page)
    order = sorted(range(5), key=one.__getitem__)
    assert sorted(range(5), key=turned.__getitem__) == order[::-1]
    page.get_by_role("button", name="halve q").click()
    assert attribute(page, "query") == [-0.7, -0.45]


def test_temperature(open_page):
    page = open_page("soft_lookup")
    set_temperature(page, -1.3)
    assert float(page.locator(FIGURE).get_attribute("data-temperature")) < 0.051
    assert_right(page)
    assert attribute(page, "weights")[0] > 0.999
    assert texts(page, ".say") == [
        "Almost a dictionary lookup: k₁ gets 1.00, so o is nearly v₁."
    ]
    set_temperature(page, 0.7)
    assert float(page.locator(FIGURE).get_attribute("data-temperature")) == 5
    assert_right(page)
    page.mouse.click(*centre(page, ".keys"))
    assert texts(page, ".say")[0].startswith(("Almost the mean", "All keys score the same"))
    assert attribute(page, "weights") == pytest.approx([0.2] * 5, abs=0.01)
    page.get_by_role("button", name="reset").click()
    assert texts(page, "output") == ["1.00"]
    assert_right(page)


def test_extremes_are_finite(open_page):
    page = open_page("soft_lookup")
    set_temperature(page, -1.3)
    page.locator(f"{FIGURE} .q").focus()
    for key in ["Shift+ArrowRight"] * 4 + ["Shift+ArrowUp"] * 4:
        page.keyboard.press(key)
    assert attribute(page, "query") == [3.2, 2.7]
    assert_right(page)
    for _ in range(9):
        page.get_by_role("button", name="halve q").click()
    assert_right(page)
