"""The interactive figures of chapters 1, 13 and 14, in a real browser, against torch."""

import json
import re

import pytest
import torch

FIGURE, ROW, TILES = "#soft-lookup", "#running-row", "#flash-tiles"


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


def test_row_step_by_step(open_page):
    page = open_page("online_softmax")
    assert_row(page, 4)
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
    page, ends = open_page("online_softmax"), []
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
    page, masked = open_page("online_softmax"), {1}
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
    page = open_page("online_softmax")
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


# Chapter 14: the tiles that are visited


READ_TILES = """figure => {
    const boxes = css => [...figure.querySelectorAll(".pic " + css)].flatMap(path =>
        [...path.getAttribute("d").matchAll(/M(\\S+) (\\S+?)h(\\S+?)v(\\S+?)H/g)]
            .map(found => found.slice(1).map(Number)));
    const at = figure.querySelector(".at"), place = name => at[name].baseVal.value;
    return {
        ahead: boxes(".cell:not(.done, .now, .skip)"),
        done: boxes(".done"), now: boxes(".now"),
        skip: boxes(".skip"), hatch: boxes(".hatch"),
        frame: getComputedStyle(at).visibility === "hidden" ? []
            : [["x", "y", "width", "height"].map(place)],
        hot: boxes(".hot"), full: boxes(".box"), hollow: boxes(".out"),
        heads: [...figure.querySelectorAll(".pic text")].map(e => e.textContent),
        rows: figure.querySelector("tbody").style.visibility === "hidden" ? []
            : [...figure.querySelectorAll("tbody tr")]
                .map(row => [...row.cells].map(c => c.textContent)),
        count: figure.querySelector(".count").textContent,
        say: figure.querySelector(".say").textContent,
    };
}"""
SETTINGS = [  # backward, queries, causal: every pair of values of two of them
    (False, 23, True),
    (False, 18, False),
    (True, 18, True),
    (True, 23, False),
]


def tiles_of(queries, causal, keys=23, size=4):
    """Every tile (i, j) with the part of the mask that it covers."""
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        allowed = allowed.tril(keys - queries)
    return {
        (i, j): part
        for i, rows in enumerate(allowed.split(size))
        for j, part in enumerate(rows.split(size, dim=1))
    }


def cell(tile, part):
    """Where a tile is drawn: x, y, width, height."""
    rows, cols = part.shape
    return [113 + 40 * tile[1], 83 + 40 * tile[0], 10 * cols - 2, 10 * rows - 2]


def strips(backward, tiles):
    """Boxes as {name: [(block, x, y, width, height)]}, and what grows along i or j."""
    across = [part.shape[1] for (i, _), part in tiles.items() if i == 0]
    down = [part.shape[0] for (_, j), part in tiles.items() if j == 0]
    tops = {"K": (20, 10), "V": (44, 10)} | (
        {"dK": (33, 7), "dV": (57, 7)} if backward else {}
    )
    lefts = (
        {
            "Q": (15.5, 11),
            "dO": (35.5, 13),
            "lse": (58.5, 9),
            "D": (77.5, 9),
            "dQ": (92.5, 13),
        }
        if backward
        else {"Q": (16, 18), "O": (44, 18), "m": (72, 10), "l": (91, 10)}
    )
    boxes = {
        name: [(b, 114 + 40 * b, y, 10 * n - 4, h) for b, n in enumerate(across)]
        for name, (y, h) in tops.items()
    } | {
        name: [(b, x, 84 + 40 * b, w, 10 * n - 4) for b, n in enumerate(down)]
        for name, (x, w) in lefts.items()
    }
    grows = {"dK": 1, "dV": 1, "dQ": 0} if backward else {"O": 0, "m": 0, "l": 0}
    return boxes, grows, lefts


def in_fast_memory(backward, rows, cols, d=8):
    """The parts of the table, as {name: arrays of one step}."""
    one, many, key = torch.empty(rows), torch.empty(rows, d), torch.empty(cols, d)
    tile = torch.empty(rows, cols)
    if not backward:
        held = {"Q": many, "K": key, "V": key, "S": tile, "m": one, "l": one, "O": many}
        return held, ("Q", "K", "V", "S", "m l", "O")
    held = {"Q": many, "dO": many, "lse": one, "D": one, "K": key, "V": key}
    held |= {"P": tile, "dS": tile, "dQ": many, "dK": key, "dV": key}
    return held, ("Q dO", "lse D", "K V", "P dS", "dQ", "dK dV")


def low(number):
    return "".join(chr(0x2080 + int(digit)) for digit in str(number))


def assert_tiles(read, step, backward, queries, causal):
    """Tiles, boxes, table and counter after some steps, against the mask itself."""
    tiles = tiles_of(queries, causal)
    path = [tile for tile, part in tiles.items() if part.any()]
    skipped = [tile for tile, part in tiles.items() if not part.any()]
    past, now = path[:step], path[step - 1] if step else None
    want = {
        "done": past[:-1],
        "now": past[-1:],
        "frame": past[-1:],
        "ahead": path[step:],
        "skip": skipped,
    }
    for kind, which in want.items():
        assert read[kind] == [cell(tile, tiles[tile]) for tile in which], (kind, step)
    hatched = {
        (round((y - 82) / 10), round((x - 112) / 10) + k)
        for x, y, w, h in read["hatch"]
        for k in range(round(w / 10))
    }
    masked = {
        (4 * i + r, 4 * j + c)
        for i, j in path
        for r, c in (~tiles[i, j]).nonzero().tolist()
    }
    assert hatched == masked

    boxes, grows, lefts = strips(backward, tiles)
    full, hollow, hot = [], [], []
    for name, row in boxes.items():
        along = grows.get(name, 0 if name in lefts else 1)
        for block, x, y, w, h in row:
            of_block = [tile[along] == block for tile in path]
            share = sum(of_block[:step]) / sum(of_block) if name in grows else 1
            held = now is not None and now[along] == block
            if share:
                full.append([x, y, pytest.approx(w * share, abs=0.051), h])
            if share < 1:
                hollow.append([x, y, w, h])
            hot += [[x, y, w, h]] * (held and share < 1)
            hot += [[x, y, pytest.approx(w * share, abs=0.051), h]] * (held and share > 0)
    for kind, expected in (("full", full), ("hollow", hollow), ("hot", hot)):
        found = read[kind]
        assert len(found) == len(expected), (kind, step)
        assert all(box in found for box in expected), (kind, step)
    names = ["K, dK", "V, dV"] if backward else ["K", "V"]
    blocks = [str(1 + b) for b, *_ in boxes["Q"]]
    assert read["heads"] == ["123456", *names, *lefts, *blocks]

    numbers, table = 0, []
    if now:
        held, lines = in_fast_memory(backward, *tiles[now].shape)
        numbers = sum(array.numel() for array in held.values())
        for line in lines:
            parts = line.split()
            index = {"K": 1, "V": 1, "dK": 1, "dV": 1}.get(parts[0], 0)
            mark = "" if parts[0] in ("S", "P") else low(now[index] + 1)
            shape = ["2"] * (len(parts) == 2) + [str(n) for n in held[parts[0]].shape]
            total = sum(held[part].numel() for part in parts)
            table.append(
                [", ".join(p + mark for p in parts), " × ".join(shape), str(total)]
            )
    assert read["rows"] == table
    finished = {i for i, _ in path} - {i for i, _ in path[step:]}
    passed = sum(i in finished for i, _ in skipped)
    assert read["count"] == (
        f"tiles computed {step} of {len(path)}, skipped {passed} of {len(skipped)}; "
        f"{numbers} numbers in fast memory; scores ever kept: 0 of {queries * 23}"
    )
    if now:
        assert read["say"].startswith(f"Queries {now[0] + 1}, keys {now[1] + 1}: scores ")
        assert ("some masked" in read["say"]) == (not tiles[now].all())
        assert ("again" in read["say"]) == backward
        last = step == len(path) or path[step][0] != now[0]
        assert ("finished" in read["say"]) == last
        row_skips = [j + 1 for i, j in skipped if i == now[0]]
        assert ("skipped" in read["say"]) == (last and bool(row_skips))
        if last and len(row_skips) > 1:
            assert f"Keys {row_skips[0]} to {row_skips[-1]} are skipped." in read["say"]


def set_tiles(page, backward, queries, causal):
    page.get_by_label("backward" if backward else "forward").check()
    page.get_by_label("N < M" if queries == 18 else "N = M").check()
    page.get_by_label("causal").set_checked(causal)


def read_tiles(page):
    return page.locator(TILES).first.evaluate(READ_TILES)


def told(page):
    return page.locator(f"{TILES} .say").text_content()


@pytest.mark.parametrize(("backward", "queries", "causal"), SETTINGS)
def test_tiles_are_those_with_a_key_to_see(open_page, backward, queries, causal):
    page = open_page("flash_tiles")
    set_tiles(page, not backward, queries, causal)  # so that what follows is a change
    set_tiles(page, backward, queries, causal)
    visible = sum(bool(part.any()) for part in tiles_of(queries, causal).values())
    assert (
        visible
        == {(23, True): 21, (23, False): 36, (18, True): 24, (18, False): 30}[
            queries, causal
        ]
    )
    steps = page.locator(TILES).evaluate(
        "(figure, steps) => { const read = "
        + READ_TILES
        + """;
            const all = [read(figure)], next = figure.querySelector("[data-do='1']");
            for (let k = 0; k < steps; k++) { next.click(); all.push(read(figure)); }
            return all; }""",
        visible + 1,
    )
    for step, read in enumerate(steps):  # one step past the end, it starts again
        assert_tiles(read, step % (visible + 1), backward, queries, causal)
    press(page, "back")
    assert_tiles(read_tiles(page), visible, backward, queries, causal)
    press(page, "start over")
    assert_tiles(read_tiles(page), 0, backward, queries, causal)


def test_tiles_in_words(open_page):
    page = open_page("flash_tiles")
    press(page, "start over")
    assert told(page) == "Nothing is computed yet: 21 tiles to visit, 15 to skip."
    for words in (
        "Queries 1, keys 1: scores from Q₁ and K₁, some masked; their weights and V₁ begin "
        "m₁, l₁, O₁. Keys 2 to 6 are skipped. O₁ and lse₁ are finished.",
        "Queries 2, keys 1: scores from Q₂ and K₁; their weights and V₁ begin m₂, l₂, O₂.",
        "Queries 2, keys 2: scores from Q₂ and K₂, some masked; their weights and V₂ go "
        "into m₂, l₂, O₂. Keys 3 to 6 are skipped. O₂ and lse₂ are finished.",
    ):
        press(page, "step")
        assert told(page) == words
    press(page, "back", times=4)
    assert told(page).endswith(" O₆ and lse₆ are finished, and so is the pass.")
    set_tiles(page, True, 23, True)
    press(page, "step", times=5)
    assert told(page) == (
        "Queries 3, keys 2: scores again from Q₃ and K₂, weights with lse₃; "
        "adds to dV₂, dK₂, dQ₃."
    )
    press(page, "step", times=10)
    assert told(page).endswith(" Keys 6 are skipped. dQ₅ is finished.")
    press(page, "step", times=6)
    assert told(page).endswith(" dQ₆ is finished, and so are all dK and dV.")


def test_tiles_play(open_page):
    page = open_page("flash_tiles")
    page.clock.install()
    live = page.locator(f"{TILES} .say")
    page.clock.run_for(5000)
    assert_tiles(read_tiles(page), 9, False, 23, True)  # nothing moves by itself
    press(page, "play")
    assert_tiles(read_tiles(page), 10, False, 23, True)  # at once, then every 0.8 s
    assert live.get_attribute("aria-live") == "off"
    page.clock.run_for(1700)
    assert_tiles(read_tiles(page), 12, False, 23, True)
    press(page, "pause")
    assert live.get_attribute("aria-live") == "polite"
    page.clock.run_for(5000)
    assert_tiles(read_tiles(page), 12, False, 23, True)
    press(page, "play")
    page.clock.run_for(60_000)  # to the end, and no further
    assert_tiles(read_tiles(page), 21, False, 23, True)
    assert page.get_by_role("button", name="play").count() == 1
    for stops in (
        lambda: press(page, "step"),
        lambda: press(page, "start over"),
        lambda: page.get_by_label("causal").click(),
    ):
        press(page, "play")
        page.clock.run_for(1000)
        stops()
        held = read_tiles(page)
        page.clock.run_for(5000)
        assert read_tiles(page) == held
        assert page.get_by_role("button", name="play").count() == 1


def test_tiles_with_reduced_motion(open_page):
    duration = "e => getComputedStyle(e).transitionDuration"
    moving = open_page("flash_tiles", reduced_motion="no-preference")
    still = open_page("flash_tiles", reduced_motion="reduce")
    assert moving.locator(f"{TILES} .at").evaluate(duration) == "0.15s, 0.15s"
    for page in (moving, still):
        press(page, "step")
        page.wait_for_timeout(900)  # longer than a step of play
        assert_tiles(read_tiles(page), 10, False, 23, True)
    css = f"{TILES}, {TILES} *"
    durations = still.locator(css).evaluate_all(f"all => all.map({duration})")
    animations = still.evaluate("document.getAnimations().length")
    assert set(durations) == {"0s"} and animations == 0


def test_tiles_by_keyboard(open_page):
    page = open_page("flash_tiles")

    def keys(*names):
        for name in names:
            page.keyboard.press(name)

    keys("Tab", "Enter")  # start over
    assert_tiles(read_tiles(page), 0, False, 23, True)
    keys("Tab", "Tab", "Space", "Enter")  # step, twice
    assert_tiles(read_tiles(page), 2, False, 23, True)
    keys("Tab", "Tab", "ArrowRight")  # past play; backward
    assert_tiles(read_tiles(page), 0, True, 23, True)
    keys("Tab", "ArrowRight")  # N < M
    assert_tiles(read_tiles(page), 0, True, 18, True)
    keys("Tab", "Space")  # not causal
    assert_tiles(read_tiles(page), 0, True, 18, False)
    keys("Shift+Tab", "Shift+Tab", "Shift+Tab", "Enter", "Enter")  # play, pause
    assert_tiles(read_tiles(page), 1, True, 18, False)
    assert page.get_by_role("button", name="play").count() == 1
    sent = """form => new Promise(tell => {
        addEventListener("submit", event => tell(!event.defaultPrevented));
        form.requestSubmit();  // what some browsers do at Enter on a choice
    })"""
    assert not page.locator(f"{TILES} form").evaluate(sent)
