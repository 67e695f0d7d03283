"""The interactive figures of chapters 1 and 13, in a real browser, against torch."""

import json
import re
from pathlib import Path

import pytest
import torch

STATIC = Path(__file__).parents[1] / "book" / "_static"
FRAGMENT = (STATIC / "soft_lookup.html").read_text(encoding="utf-8")
FIGURE = "#soft-lookup"
ROW_FRAGMENT = (STATIC / "online_softmax.html").read_text(encoding="utf-8")
ROW = "#running-row"


@pytest.fixture
def open_page(browser):
    """Open the fragment as a page of its own; fail on an error or a request."""
    contexts, problems = [], []

    def show(width=760, height=900, copies=1, fragment=FRAGMENT, **options):
        context = browser.new_context(
            viewport={"width": width, "height": height}, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
        page.on("request", lambda request: problems.append(f"request: {request.url}"))
        page.set_content(
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            + '<body style="margin: 10px">'
            + fragment * copies
        )
        return page

    yield show
    for context in contexts:
        context.close()
    assert problems == []


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


def assert_right(page, exact=True):
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
        (weights, want, 1e-9 if exact else 5e-5),
        (weights.sum(), torch.ones(()), 1e-9 if exact else 2e-4),
        (output, want @ values, 1e-9 if exact else 5e-5),
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
    page.locator(f"{FIGURE} input").fill(str(log10))


def test_static_figure_is_right_and_the_script_changes_nothing(open_page):
    assert len(FRAGMENT.encode()) < 15_000
    static = open_page(fragment=re.sub(r"<script>.*?</script>", "", FRAGMENT, flags=re.S))
    assert static.locator(f"{FIGURE}.live").count() == 0
    assert not static.locator(f"{FIGURE} input").is_visible()
    assert_right(static, exact=False)
    live = open_page()
    assert_right(live)
    for selector in (".s", ".a", ".say", ".qt", ".ot", "text"):
        assert texts(static, selector) == texts(live, selector)
    marks = (("keys .w", "x1 y1 x2 y2"), ("vals .w", "x1 y1 x2 y2"), ("keys .qa", "x2 y2"))
    for selector, names in marks:
        script = f"all => all.map(e => '{names}'.split(' ').map(n => +e.getAttribute(n)))"
        one, two = (
            torch.tensor(p.locator(f"{FIGURE} .{selector}").evaluate_all(script))
            for p in (static, live)
        )
        assert torch.allclose(one, two, rtol=0, atol=0.051), selector


def test_keys_and_values_are_drawn_where_the_data_say(open_page):
    page = open_page()
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
    page = open_page()
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
    page.mouse.move(*centre(page, ".keys"))
    assert attribute(page, "query") == held
    page.mouse.click(*centre(page, ".keys"))  # a click moves it there
    assert attribute(page, "query") == pytest.approx([0, 0], abs=0.02)


def test_touch(open_page):
    page = open_page(width=390, height=600, has_touch=True, is_mobile=True)
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
    page = open_page()
    handle = page.locator(f"{FIGURE} .q")
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
    page = open_page()
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
    page = open_page()
    set_temperature(page, -1.3)
    page.locator(f"{FIGURE} .q").focus()
    for key in ["Shift+ArrowRight"] * 4 + ["Shift+ArrowUp"] * 4:
        page.keyboard.press(key)
    assert attribute(page, "query") == [3.2, 2.7]
    assert_right(page)
    for _ in range(9):
        page.get_by_role("button", name="halve q").click()
    assert_right(page)


SMALL_TEXT = """figure => [...figure.querySelectorAll("text, p, span, i, sub, button")]
    .filter(e => e.textContent.trim() && e.getClientRects().length)
    .map(e => {
        const svg = e.closest("svg"), wide = svg && svg.getBoundingClientRect().width;
        const scale = svg ? wide / svg.viewBox.baseVal.width : 1;
        return [e.textContent, parseFloat(getComputedStyle(e).fontSize) * scale];
    }).filter(([, size]) => size < 12)"""


def test_fits(open_page):
    page = open_page()
    page.locator(f"{FIGURE} .q").focus()
    for _ in range(6):
        page.keyboard.press("Shift+ArrowRight")  # the query at the right edge
    for width in (300, 320, 390, 560, 600, 760, 1200):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(FIGURE).evaluate(SMALL_TEXT) == [], f"small at {width} px"
        if width < 540:  # a thumb's target
            assert page.locator(f"{FIGURE} .q").bounding_box()["width"] >= 44


def test_two_copies_and_a_second_run(open_page):
    page = open_page(copies=2)
    assert page.locator(f"{FIGURE}.live").count() == 2
    page.get_by_role("button", name="turn q").first.click()
    queries = page.locator(FIGURE).evaluate_all("all => all.map(f => f.dataset.query)")
    assert queries == ["[-1.4,-0.9]", "[1.4,0.9]"]
    page.evaluate(re.search(r"<script>(.*?)</script>", FRAGMENT, flags=re.S)[1])
    page.get_by_role("button", name="reset").first.click()
    assert attribute(page, "query") == [1.4, 0.9]


def test_names_for_those_who_cannot_see_it(open_page):
    page = open_page()
    for svg in page.locator(f"{FIGURE} svg").all():
        ids = svg.get_attribute("aria-labelledby").split()
        assert all(svg.locator(f"#{name}").text_content() for name in ids)
    assert page.get_by_role("slider", name="Query q").get_attribute("tabindex") == "0"
    assert page.get_by_role("slider", name="Temperature T").count() == 1
    assert page.locator(f"{FIGURE} [aria-live]").count() == 1


# Chapter 13: a row that settles


READ_ROW = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const number = text => text === "\u2212\u221e" ? null : +text.replace("\u2212", "-");
    const at = name => e => e[name].baseVal.value;
    const height = e => parseFloat(e.getAttribute("d").split(" ")[1]);
    const {scores, values, order, masked, step, trace} = figure.dataset;
    return {
        scores, values, order, masked, step, trace,
        table: all("tbody tr", e => [...e.cells].slice(1).map(c => number(c.innerText))),
        names: all("tbody th", e => e.textContent),
        labels: all(".blk text", e => e.textContent),
        bars: all(".key .s", e => [at("y")(e), at("height")(e)]),
        weights: all(".key .e", at("height")),
        bases: all(".key .e", e => at("y")(e) + at("height")(e)),
        dots: all(".key .v", at("cy")),
        sizes: all(".key .v", at("r")),
        crosses: all(".key .c", e => e.getClientRects().length > 0),
        levels: all(".blk .m", height),
        shown: all(".blk .m", e => e.getClientRects().length > 0),
        outputs: all(".blk .o", height),
        band: all(".band", e => [at("x")(e), at("width")(e)])[0],
    };
}"""


def tensor(rows):
    """Rows of numbers, with None for minus infinity."""
    return torch.tensor(
        [[-torch.inf if x is None else x for x in row] for row in rows], dtype=torch.float64
    )


def assert_row(page, step, order=(0, 1, 2, 3), masked=(1,)):
    """The table, the picture and the numbers kept are those of torch's softmax."""
    read = page.locator(ROW).first.evaluate(READ_ROW)
    order, masked = list(order), list(masked)
    scores, values = tensor(json.loads(read["scores"])), tensor(json.loads(read["values"]))
    scores[masked] = -torch.inf
    scores, values = scores[order].flatten(), values[order].flatten()
    want = []
    for keys in (0, 3, 6, 9, 12):
        seen = torch.cat([scores[:keys], torch.tensor([-torch.inf], dtype=torch.float64)])
        lse, top = torch.logsumexp(seen, dim=0), seen.max()
        o = (torch.exp(scores[:keys] - lse) * values[:keys]).nan_to_num(0.0).sum()
        want.append([top, torch.exp(lse - top).nan_to_num(0.0), o, lse])
    want = torch.tensor(want, dtype=torch.float64)

    def close(found, expected, atol):
        found = torch.as_tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)

    if read["trace"]:  # kept by the script alone
        assert json.loads(read["order"]) == order and int(read["step"]) == step
        assert json.loads(read["masked"]) == [b in masked for b in range(4)]
        close(tensor(json.loads(read["trace"])), want[:, :3], 1e-9)
    names = [f"block {block + 1}" for block in order]
    assert read["names"] == ["start", *names] and read["labels"] == names
    close(tensor(read["table"])[: step + 1], want[: step + 1], 0.0051)
    hidden = page.locator(f"{ROW} tbody td:visible").count()
    assert hidden == 4 * (step + 1)  # what is not read yet does not show

    forbidden, count = scores == -torch.inf, 3 * step
    height = scores.masked_fill(forbidden, 0.0)
    close([y for y, _ in read["bars"]], 96 - 22 * height.clamp(min=0), 0.051)
    close([h for _, h in read["bars"]], 22 * height.abs(), 0.051)
    assert read["crosses"] == forbidden.tolist()
    top, total, _, lse = want[step]
    weights = torch.exp(scores - top).nan_to_num(0.0)
    weights[count:] = 0.0
    close(weights.sum(), total, 1e-9)
    close(read["weights"], 56 * weights, 0.051)
    close(read["bases"], torch.full((12,), 206.0), 0.11)
    close(read["dots"], 316 - 7.5 * values, 0.051)
    close(read["sizes"], 3 + 7 * (weights / total.clamp(min=1e-9)).sqrt(), 0.051)
    assert read["shown"] == [k < step and bool(want[k + 1, 0].isfinite()) for k in range(4)]
    for k in range(step):
        if read["shown"][k]:
            close(read["levels"][k], 96 - 22 * want[k + 1, 0], 0.051)
        close(read["outputs"][k], 316 - 7.5 * want[k + 1, 2], 0.051)
    assert read["band"] == ([34 + 75 * (step - 1), 75] if step else [34, 0])


def press(page, name, times=1):
    for _ in range(times):
        page.get_by_role("button", name=name).click()


def said(page):
    return page.locator(f"{ROW} .say").text_content()


def test_row_is_right_without_the_script_and_the_script_changes_nothing(open_page):
    assert len(ROW_FRAGMENT.encode()) < 15_000
    bare = re.sub(r"<script>.*?</script>", "", ROW_FRAGMENT, flags=re.S)
    static, live = open_page(fragment=bare), open_page(fragment=ROW_FRAGMENT)
    assert static.locator(f"{ROW}.live").count() == 0
    assert not static.locator(f"{ROW} .ctl").is_visible()
    for page in (static, live):
        assert_row(page, 4)
    assert said(static) == said(live)
    marks = (
        "all => all.map(e => [...e.attributes].map(a => a.name + a.value).sort().join())"
    )
    for selector in ("svg rect", "svg circle", "svg .m", "svg .o", "tbody tr", "tbody td"):
        one, two = (
            p.locator(f"{ROW} {selector}").evaluate_all(marks) for p in (static, live)
        )
        clean = [
            [re.sub(r"class(,|$)", r"\1", mark).strip(",") for mark in x]
            for x in (one, two)
        ]
        assert clean[0] == clean[1], selector


def test_row_step_by_step(open_page):
    page = open_page(fragment=ROW_FRAGMENT)
    press(page, "start over")
    assert_row(page, 0)
    assert said(page) == "Nothing is read yet: no maximum, an empty sum, no output."
    for step, words in enumerate(
        (
            "Block 1 is the first with a key that counts: the state is that of the block.",
            "Block 2 is masked: its m is −∞, its l is 0. Nothing changes.",
            "Block 3 raises m by 1.20: all that was kept shrinks by the factor "
            "exp(−1.20) = 0.30.",
            "Block 4 does not raise m: its own m is 1.90, so it enters with the factor "
            "exp(−0.50) = 0.61.",
        ),
        start=1,
    ):
        press(page, "next block")
        assert_row(page, step)
        assert said(page) == words
    press(page, "back")
    assert_row(page, 3)
    press(page, "next block", times=2)  # past the end, it starts again
    assert_row(page, 0)
    press(page, "back")
    assert_row(page, 4)


def test_row_in_any_order(open_page):
    page, ends = open_page(fragment=ROW_FRAGMENT), []
    for order in ((3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1), (0, 1, 2, 3)):
        press(page, "other order")
        assert_row(page, 4, order)
        ends.append(page.locator(f"{ROW} tr.now td").all_text_contents())
        press(page, "start over")
        for step in range(1, 5):
            press(page, "next block")
            assert_row(page, step, order)
    assert all(end == ends[0] for end in ends)


def test_row_with_other_masks_down_to_none(open_page):
    page, masked = open_page(fragment=ROW_FRAGMENT), {1}
    for block in (0, 1, 2, 1, 3):  # at the end, every block is masked
        page.get_by_role("checkbox", name=str(block + 1)).click()
        masked ^= {block}
        assert_row(page, 4, masked=masked)
    assert masked == {0, 1, 2, 3}
    assert said(page) == "Block 4 is masked: its m is −∞, its l is 0. Nothing changes."
    assert page.locator(f"{ROW} tr.now td").all_text_contents() == [
        "−∞",
        "0.00",
        "0.00",
        "−∞",
    ]
    for step in range(4):
        press(page, "next block")
        assert_row(page, step, masked=masked)


def test_row_by_keyboard(open_page):
    page = open_page(fragment=ROW_FRAGMENT)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # start over
    assert_row(page, 0)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")  # next block
    assert_row(page, 1)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")  # mask the first
    assert_row(page, 1, masked=(0, 1))


def test_row_fits(open_page):
    page = open_page(fragment=ROW_FRAGMENT)
    press(page, "back")
    for width in (300, 320, 360, 390, 560, 600, 760, 1200):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(ROW).evaluate(SMALL_TEXT) == [], f"small at {width} px"
        boxes = [b.bounding_box() for b in page.locator(f"{ROW} button, {ROW} label").all()]
        assert all(box["height"] >= 36 for box in boxes)


def test_row_twice_on_a_page_and_its_names(open_page):
    page = open_page(fragment=ROW_FRAGMENT, copies=2)
    assert page.locator(f"{ROW}.live").count() == 2
    page.get_by_role("button", name="start over").first.click()
    steps = page.locator(ROW).evaluate_all("all => all.map(f => f.dataset.step)")
    assert steps == ["0", "4"]
    svg = page.locator(f"{ROW} svg").first
    ids = svg.get_attribute("aria-labelledby").split()
    assert all(svg.locator(f"#{name}").text_content() for name in ids)
    assert page.get_by_role("group", name="masked:").count() == 2
    assert page.locator(f"{ROW} [aria-live]").count() == 2
