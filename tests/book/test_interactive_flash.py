"""The tiles of flash attention, the figure to touch of chapter 14, in a browser."""

import pytest
import torch

from touch import press

TILES = "#flash-tiles"


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


@pytest.mark.thorough("flash_tiles", "14_flash_attention")
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
    page.clock.install(time=0)
    page.clock.pause_at(1)  # or it goes on by itself, while a busy machine reads
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
