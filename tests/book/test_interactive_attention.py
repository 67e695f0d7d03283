"""The figures to touch of chapters 1 to 3, in a browser, against the package."""

import numpy as np
import pytest
import torch

from attnlib import ScaledDotProductAttention, causal_mask
from touch import close, numbers, tensor

# Chapter 1: a soft lookup


@pytest.fixture
def figure(open_figure):
    return open_figure("soft_lookup")


def assert_right(figure):
    """The numbers kept, the numbers printed and the picture agree with torch."""
    read = figure.read(
        **{"scores": ".s", "printed": ".a", "bars": ".t b@width", "place": ".o@transform"},
        thickness=".keys .w@stroke-width",
    )
    names = "query", "keys", "values"
    query, keys, values = (tensor(getattr(read, name)) for name in names)
    scores = keys @ query / 2**0.5
    weights = torch.softmax(scores / getattr(read, "temperature", 1), dim=0)
    output = weights @ values
    close(read.weights, weights, 1e-9)
    close(read.output, output, 1e-9)
    close(read.scores, scores, 0.0051)
    close(read.printed, weights, 0.0051)
    close(read.bars, 100 * weights, 0.0051)
    close(read.thickness, 0.6 + 9 * weights, 0.051)
    x, y = numbers(read.place)
    close([(x - 160) / 50, (106 - y) / 50], output, 0.0025)
    return read


def test_keys_and_values_are_drawn_where_the_data_say(figure):
    read = figure.read(circles="circle.k@cx,cy", squares="rect.v@x,y")
    circles, squares = (np.array(x, float) for x in (read.circles, read.squares))
    close((circles - [160, 136]) / [46, -46], read.keys, 0.002)
    close((squares - [154, 100]) / [50, -50], read.values, 0.002)


def test_dragging_the_query_onto_a_key(figure):
    mouse, before = figure.page.mouse, figure.read().weights
    mouse.move(*figure.place(".q .ring"))
    mouse.down()
    for index in (3, 0, 2):
        mouse.move(*figure.place(f"circle.k >> nth={index}"), steps=3)
        read = assert_right(figure)
        assert read.weights != before
        assert max(range(5), key=read.weights.__getitem__) == index
        close(read.query, read.keys[index], 0.011)
    mouse.move(-50, -50)  # outside: the query stops at the edge
    assert figure.read().query == [-3.2, 2.7]
    mouse.up()
    mouse.move(*figure.place(".q .ring"))
    mouse.move(*figure.place(".keys"), steps=20)
    assert figure.read().query == [-3.2, 2.7]
    mouse.click(*figure.place(".keys"))  # a click moves it there
    close(figure.read().query, [0, 0], 0.02)


def test_touch(open_figure):
    phone = {"width": 390, "height": 600, "has_touch": True, "is_mobile": True}
    figure = open_figure("soft_lookup", **phone)
    start, goal = (figure.place(f"circle.k >> nth={index}") for index in (1, 3))
    figure.page.touchscreen.tap(*start)
    assert assert_right(figure).say.startswith("k₂ gets")
    touch = figure.page.context.new_cdp_session(figure.page)

    def send(kind, *points):
        points = [{"x": x, "y": y} for x, y in points]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    send("touchStart", start)
    for place in np.linspace(start, goal, 5)[1:].tolist():
        send("touchMove", place)
    send("touchEnd")
    read = assert_right(figure)
    close(read.query, read.keys[3], 0.03)
    assert figure.page.evaluate("scrollY") == 0  # the finger moved the query, not the page


def test_keyboard(figure):
    assert_right(figure)
    for key, query in (
        ("ArrowLeft", [1.3, 0.9]),
        ("ArrowUp", [1.3, 1.0]),
        ("Shift+ArrowRight", [1.8, 1.0]),
        ("ArrowDown", [1.8, 0.9]),
    ):
        read = assert_right(figure.keys(key, at="Query q"))
        assert read.query == pytest.approx(query)
    said = figure.control("Query q").get_attribute("aria-valuetext")
    assert said == "q = (1.80, 0.90)"
    assert figure.press("reset").read().query == [1.4, 0.9]
    assert_right(figure.fill("Temperature T", -1.3))
    figure.keys(*["Shift+ArrowRight"] * 4, *["Shift+ArrowUp"] * 4, at="Query q")
    assert assert_right(figure).query == [3.2, 2.7]
    assert_right(figure.press("halve q", times=9))


def test_q_doubled_and_turned(figure):
    for button, query in (
        ("double q", [2.8, 1.8]),
        ("halve q", [1.4, 0.9]),
        ("turn q by 180 degrees", [-1.4, -0.9]),
        ("halve q", [-0.7, -0.45]),
    ):
        assert assert_right(figure.press(button)).query == query


def test_temperature(figure):
    read = assert_right(figure.fill("Temperature T", -1.3))
    assert read.temperature < 0.051 and read.weights[0] > 0.999
    assert read.say == "Almost a dictionary lookup: k₁ gets 1.00, so o is nearly v₁."
    assert assert_right(figure.fill("Temperature T", 0.7)).temperature == 5
    figure.page.mouse.click(*figure.place(".keys"))
    read = assert_right(figure)
    assert read.say.startswith(("Almost the mean", "All keys score the same"))
    close(read.weights, [0.2] * 5, 0.01)
    assert_right(figure.press("reset"))
    assert figure.read(shown="output").shown == ["1.00"]


# Chapter 2: bank in its sentence


def assert_bank(figure):
    """Weights and context vector are the package's; so is what is printed."""
    read = figure.read(printed=".a")
    words = read.words | {"bank": read.bank}
    x = tensor([words[word] for word in read.sentence.split()])
    context, weights = ScaledDotProductAttention()(x, x, x)
    close(read.weights, weights[2], 1e-9)
    close(read.context, context[2], 1e-9)
    close(read.printed, weights[2], 0.0051)
    close(read.say.replace("\u2212", ""), context[2].abs(), 0.0051)
    return read


def test_bank_moves_by_mouse_by_keys_and_by_its_own_context(open_figure):
    figure = open_figure("bank_river")
    assert assert_bank(figure).sentence == "the river bank flooded"
    for money in (0.33, 0.08, 0.02, 0.01, 0.0):  # the numbers that the chapter tells
        assert round(assert_bank(figure).context[1], 2) == money
        figure.press("attend again")
    read = assert_bank(figure.press("other sentence"))
    assert read.sentence == "the savings bank closed" and read.bank == [1, 1, 0]
    assert [round(number, 3) for number in read.context] == [0.366, 1.173, 0.154]
    handle = figure.root.locator(".q")
    handle.focus()
    assert assert_bank(figure.keys("ArrowRight", "Shift+ArrowDown")).bank == [1.1, 0.5, 0]
    figure.press("reset")
    figure.drag(figure.place(".plane", 150, 162), figure.place(".plane", 150, 12))
    figure.root.get_by_role("button", name="other sentence").focus()
    close(assert_bank(figure).bank, [1, 2.5, 0], 0.02)
    figure.press("other sentence")
    handle.focus()  # far up, it gives itself most of its weight
    read = assert_bank(figure.keys(*["Shift+ArrowUp"] * 3))
    assert read.bank == [1, 2.5, 0] and round(read.weights[2], 2) == 0.91


# Chapter 3: what leaks


def weigh(x, mask, divide):
    if divide:
        return ScaledDotProductAttention()(x, x, x, mask)[1]
    return ScaledDotProductAttention()(x, x, x)[1] * mask


def assert_leaks(figure):
    """Weights and moves are the package's; outputs before the word are told apart."""
    read = figure.read(printed=".m", marked=".m@class", filled=".c")
    x, mask = tensor(read.x), torch.tensor(read.mask) == 1
    replaced = x.clone()
    replaced[read.token] = tensor(read.other)
    weights = weigh(x, mask, read.divide)
    moves = weigh(replaced, mask, read.divide) @ replaced - weights @ x
    moves = moves.abs().amax(dim=-1)
    close(read.weights, weights, 1e-9)
    close(read.moves, moves, 1e-9)
    close(read.printed, moves, 0.0051)
    assert [text != "" for text in read.filled] == mask.flatten().tolist()
    leaks = [i for i in range(read.token) if moves[i] > 1e-12]
    assert [i for i in range(5) if "leak" in read.marked[i].split()] == leaks
    assert ("A leak" in read.say) == bool(leaks)
    return read, leaks


def test_a_hole_a_missing_mask_and_a_missing_division_leak(open_figure):
    figure, causal = open_figure("leak_grid"), causal_mask(5).int().tolist()
    read, leaks = assert_leaks(figure)
    assert read.mask == causal and not leaks
    for leaking in ([1], []):
        hole = figure.press("may river, word 2, see flooded, word 3?")
        assert assert_leaks(hole)[1] == leaking
    read, leaks = assert_leaks(figure.press("mask after softmax, not divided"))
    assert read.mask == causal and leaks == [1]  # as the chapter says
    figure.press("no mask")
    figure.root.locator('[data-token="4"]').focus()
    read, leaks = assert_leaks(figure.keys("Enter"))
    assert read.token == 4 and leaks == [0, 1, 2, 3]
    figure.press("causal mask")
    for token in range(5):  # whatever word is replaced, the past stays
        read, leaks = assert_leaks(figure.click(f'[data-token="{token}"]'))
        assert read.moves[:token] == [0] * token and not leaks
