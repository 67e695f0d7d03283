"""The figures to touch of chapters 13 to 15 and appendix E, against the package."""

import json
import math
from itertools import product

import numpy as np
import pytest
import torch

from attnlib.flash_triton import choose_splits
from touch import ROOT, boxes, close, numbers, tensor

# Chapter 13: a row that settles

INF = torch.inf
STEPS = (  # the words after each block
    "Nothing is read yet: no maximum, an empty sum, no output.",
    "Block 1 is the first with a key that counts: the state is that of the block.",
    "Block 2 is masked: its m is −∞, its l is 0. Nothing changes.",
    "Block 3 raises m by 1.20: all that was kept shrinks by the factor exp(−1.20) = 0.30.",
    "Block 4 does not raise m: its own m is 1.90, so it enters with the factor "
    "exp(−0.50) = 0.61.",
)


def states(scores, values):
    """After each block, by torch: m, l, O and the log-sum-exp."""
    rows = []
    for keys in (0, 3, 6, 9, 12):
        seen = torch.cat([scores[:keys], tensor([-INF])])
        lse, top = torch.logsumexp(seen, dim=0), seen.max()
        o = (torch.exp(scores[:keys] - lse) * values[:keys]).nan_to_num(0.0).sum()
        rows.append([top, torch.exp(lse - top).nan_to_num(0.0), o, lse])
    return tensor(rows)


def assert_row(figure, step, order=(0, 1, 2, 3), masked=(1,)):
    """The table, the picture and the numbers kept are those of torch's softmax."""
    read = figure.read(
        **{"cells": "tbody td", "seen": "tbody td@visible", "names": "tbody th"},
        **{"labels": ".blk text", "band": ".band@x,width", "bars": ".key .s@y,height"},
        **{"weights": ".key .e@y,height", "dots": ".key .v@cy,r", "outputs": ".blk .o@d"},
        **{"crosses": ".key .c@visible", "levels": ".blk .m@d", "shown": ".blk .m@visible"},
    )
    order, masked = list(order), list(masked)
    scores, values = tensor(read.scores), tensor(read.values)
    scores[masked] = -INF
    scores, values = scores[order].flatten(), values[order].flatten()
    want = states(scores, values)
    assert (read.order, read.step) == (order, step)
    assert read.masked == [block in masked for block in range(4)]
    close(read.trace, want[:, :3], 1e-9)
    names = [f"block {block + 1}" for block in order]
    assert read.names == ["start", *names] and read.labels == names
    close(read.cells[: 4 * (step + 1)], want[: step + 1], 0.0051)
    assert read.seen == [k <= step for k in range(5) for _ in range(4)]

    forbidden = scores == -INF
    height = scores.masked_fill(forbidden, 0.0)
    tops = 96 - 22 * height.clamp(min=0)
    close(read.bars, torch.stack([tops, 22 * height.abs()], dim=1), 0.051)
    assert read.crosses == forbidden.tolist()
    top, total, *_ = want[step]
    weights = torch.exp(scores - top).nan_to_num(0.0)
    weights[3 * step :] = 0.0
    close(weights.sum(), total, 1e-9)
    y, height = np.array(read.weights, float).T
    close(height, 56 * weights, 0.051)
    close(y + height, [206] * 12, 0.11)
    sizes = 3 + 7 * (weights / total.clamp(min=1e-9)).sqrt()
    close(read.dots, torch.stack([316 - 7.5 * values, sizes], dim=1), 0.051)
    assert read.shown == [k < step and bool(want[k + 1, 0].isfinite()) for k in range(4)]
    for k in range(step):
        if read.shown[k]:
            close(numbers(read.levels[k])[1], 96 - 22 * want[k + 1, 0], 0.051)
        close(numbers(read.outputs[k])[1], 316 - 7.5 * want[k + 1, 2], 0.051)
    assert numbers(read.band) == ([34 + 75 * (step - 1), 75] if step else [34, 0])
    return read


def test_row_step_by_step_in_any_order(open_figure):
    figure = open_figure("online_softmax")
    assert_row(figure, 4)
    figure.press("start over")
    for order in ((3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1), (0, 1, 2, 3)):
        figure.press("other order")
        words = []
        for step in range(5):
            words.append(assert_row(figure, step, order).say)
            figure.press("next block")
        assert_row(figure, 0, order)  # past the end, it starts again
    assert words == [*STEPS]
    for step in (4, 3):
        assert_row(figure.press("back"), step)


def test_row_with_other_masks_down_to_none(open_figure):
    figure, masked = open_figure("online_softmax"), {1}
    for block in (0, 1, 2, 1, 3):  # at the end, every block is masked
        figure.root.get_by_role("checkbox", name=str(block + 1)).click()
        masked ^= {block}
        read = assert_row(figure, 4, masked=masked)
    assert masked == {0, 1, 2, 3}
    assert read.say == "Block 4 is masked: its m is −∞, its l is 0. Nothing changes."
    assert read.cells[-4:] == ["−∞", "0.00", "0.00", "−∞"]
    for step in range(4):
        assert_row(figure.press("next block"), step, masked=masked)


# Chapter 14: tiles

SETTINGS = {  # backward, queries, causal: tiles with a key to see; every pair of values
    (False, 23, True): 21,
    (False, 18, False): 30,
    (True, 18, True): 24,
    (True, 23, False): 36,
}
# By pass: the strips above the tiles and left of them, each with its place and how thick
# it is; those that fill up; the lines of the table, with their shapes of r queries, c keys
# and d features.
ABOVE = {"K": (20, 10), "V": (44, 10)}
PASSES = {
    False: (
        ABOVE,
        {"Q": (16, 18), "O": (44, 18), "m": (72, 10), "l": (91, 10)},
        ("O", "m", "l"),
        {"Q": "rd", "K": "cd", "V": "cd", "S": "rc", "m l": "2r", "O": "rd"},
    ),
    True: (
        ABOVE | {"dK": (33, 7), "dV": (57, 7)},
        {"Q": (15.5, 11), "dO": (35.5, 13), "lse": (58.5, 9), "D": (77.5, 9)}
        | {"dQ": (92.5, 13)},
        ("dK", "dV", "dQ"),
        {"Q dO": "2rd", "lse D": "2r", "K V": "2cd", "P dS": "2rc"}
        | {"dQ": "rd", "dK dV": "2cd"},
    ),
}


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


def strips(backward, tiles, path, step):
    """What is full, what is empty, and what is held in this step."""
    above, left, growing, _ = PASSES[backward]
    across = [part.shape[1] for (i, _), part in tiles.items() if i == 0]
    down = [part.shape[0] for (_, j), part in tiles.items() if j == 0]
    drawn = {"full": [], "hollow": [], "hot": []}
    for name, (at, thick) in (above | left).items():
        along = int(name in above)
        for block, n in enumerate(across if along else down):
            place, long = 40 * block + 84, 10 * n - 4
            x, y, w, h = at, place, thick, long
            if along:
                x, y, w, h = place + 30, at, long, thick
            own = [tile[along] == block for tile in path]
            share = sum(own[:step]) / sum(own) if name in growing else 1
            held = step and own[step - 1]
            for kind, part in (("full", share), ("hollow", float(share < 1))):
                for there in (kind, "hot") if held else (kind,):
                    drawn[there] += [[x, y, w * part, h]] * (part > 0)
    return drawn


def in_fast_memory(backward, tile, part):
    """The table of what a step holds, line by line, and how many numbers it is."""
    (i, j), (r, c) = tile, part.shape
    sizes, cells, total = {"2": 2, "r": r, "c": c, "d": 8}, [], 0
    for names, letters in PASSES[backward][-1].items():
        shape = [sizes[letter] for letter in letters]
        block = "" if "rc" in letters else chr(0x2081 + (j if "c" in letters else i))
        shown = ", ".join(name + block for name in names.split())
        cells += [shown, " × ".join(map(str, shape)), str(math.prod(shape))]
        total += math.prod(shape)
    return cells, total


def sentence(backward, tiles, path, step):
    """What is said of a step."""
    if not step:
        skipped = len(tiles) - len(path)
        return f"Nothing is computed yet: {len(path)} tiles to visit, {skipped} to skip."
    i, j = path[step - 1]
    a, b, again = chr(0x2081 + i), chr(0x2081 + j), "again " * backward
    said = f"Queries {i + 1}, keys {j + 1}: scores {again}from Q{a} and K{b}"
    said += ", some masked" * (not tiles[i, j].all())
    if backward:
        said += f", weights with lse{a}; adds to dV{b}, dK{b}, dQ{a}."
    else:
        enter = "go into" if j else "begin"
        said += f"; their weights and V{b} {enter} m{a}, l{a}, O{a}."
    last = step == len(path)
    if last or path[step][0] != i:
        if left := [t + 1 for s, t in tiles if s == i and (s, t) not in path]:
            keys = f"{left[0]} to {left[-1]}" if len(left) > 1 else left[0]
            said += f" Keys {keys} are skipped."
        said += f" dQ{a} is finished" if backward else f" O{a} and lse{a} are finished"
        rest = "so are all dK and dV" if backward else "so is the pass"
        said += f", and {rest}." if last else "."
    return said


def assert_tiles(figure, step, backward, queries, causal):
    """Tiles, boxes, table and counter after some steps, against the mask itself."""
    kinds = {"ahead": "cell:not(.done, .now, .skip)", "full": "box", "hollow": "out"}
    kinds |= {name: name for name in ("done", "now", "skip", "hatch", "hot")}
    read = figure.read(
        **{kind: f".pic .{css}@d" for kind, css in kinds.items()},
        **{"frame": ".at@x,y,width,height,visible", "heads": ".pic text"},
        **{"cells": "tbody tr > *", "seen": "tbody tr > *@visible", "count": ".count"},
    )
    tiles = tiles_of(queries, causal)
    path = [tile for tile, part in tiles.items() if part.any()]
    skipped = [tile for tile, part in tiles.items() if not part.any()]
    now = path[step - 1] if step else None

    def cells(places):
        for i, j in places:
            rows, cols = tiles[i, j].shape
            yield [113 + 40 * j, 83 + 40 * i, 10 * cols - 2, 10 * rows - 2]

    assert boxes(read.done) == [*cells(path[: max(0, step - 1)])]
    assert boxes(read.now) == [*cells([now] if now else [])]
    assert boxes(read.ahead) == [*cells(path[step:])]
    assert boxes(read.skip) == [*cells(skipped)]
    ((*frame, framed),) = read.frame
    assert framed == bool(now)
    assert not now or [[float(x) for x in frame]] == boxes(read.now)
    hatched = {
        (round((y - 82) / 10), round((x - 112) / 10) + k)
        for x, y, w, _ in boxes(read.hatch)
        for k in range(round(w / 10))
    }
    assert hatched == {
        (4 * i + r, 4 * j + c)
        for i, j in path
        for r, c in (~tiles[i, j]).nonzero().tolist()
    }
    for kind, expected in strips(backward, tiles, path, step).items():
        found = np.array(sorted(boxes(getattr(read, kind))))
        close(found, sorted(expected), 0.051)
    names = ["K, dK", "V, dV"] if backward else ["K", "V"]
    blocks = [str(i + 1) for i, j in tiles if j == 0]
    assert read.heads == ["123456", *names, *PASSES[backward][1], *blocks]

    assert set(read.seen) == {bool(now)}
    table, numbers = in_fast_memory(backward, now, tiles[now]) if now else ([], 0)
    assert not now or read.cells == table
    finished = {i for i, _ in path} - {i for i, _ in path[step:]}
    passed = sum(i in finished for i, _ in skipped)
    assert read.count == [
        f"tiles computed {step} of {len(path)}, skipped {passed} of {len(skipped)}; "
        f"{numbers} numbers in fast memory; scores ever kept: 0 of {queries * 23}"
    ]
    assert read.say == sentence(backward, tiles, path, step)


def choose(figure, backward, queries, causal):
    name = "backward" if backward else "forward"
    return figure.set(queries=queries, causal=causal, **{"pass": name})


@pytest.mark.parametrize(("backward", "queries", "causal"), SETTINGS)
def test_tiles_are_those_with_a_key_to_see(open_figure, backward, queries, causal):
    figure, setting = open_figure("flash_tiles"), (backward, queries, causal)
    choose(figure, not backward, queries, causal)  # so that what follows is a change
    choose(figure, *setting)
    last = SETTINGS[setting]
    for done in range(last + 1):
        assert_tiles(figure, done, *setting)
        figure.click("[data-do='1']")
    assert_tiles(figure, 0, *setting)  # past the end, it starts again
    assert_tiles(figure.press("back"), last, *setting)
    assert_tiles(figure.press("start over"), 0, *setting)


def at_its_own_time(figure):
    """A clock that stands until it is told: else a busy machine reads too late."""
    clock = figure.page.clock
    clock.install(time=0)
    clock.pause_at(1)
    return clock.run_for


def test_tiles_play(open_figure):
    figure = open_figure("flash_tiles")
    wait, live = at_its_own_time(figure), figure.root.locator(".say")
    for button, seconds, step, spoken in (
        (None, 5, 9, "polite"),  # nothing moves by itself
        ("play", 0, 10, "off"),  # at once, then every 0.8 s
        (None, 1.7, 12, "off"),
        ("pause", 5, 12, "polite"),
        ("play", 60, 21, "polite"),  # to the end, and no further
    ):
        if button:
            figure.press(button)
        wait(1000 * seconds)
        assert_tiles(figure, step, False, 23, True)
        assert live.get_attribute("aria-live") == spoken
    for stops in ("step", "start over", "causal"):
        figure.press("play")
        wait(1000)
        figure.root.get_by_text(stops, exact=True).click()
        held = figure.root.inner_html()
        wait(5000)
        assert figure.root.inner_html() == held
        assert figure.root.get_by_role("button", name="play").count() == 1


def test_tiles_with_reduced_motion(open_figure):
    duration = "e => getComputedStyle(e).transitionDuration"
    moving, still = (
        open_figure("flash_tiles", reduced_motion=motion)
        for motion in ("no-preference", "reduce")
    )
    assert moving.root.locator(".at").evaluate(duration) == "0.15s, 0.15s"
    for figure in (moving, still):
        wait = at_its_own_time(figure)
        figure.press("step")
        wait(5000)
        assert_tiles(figure, 10, False, 23, True)
    every = still.page.locator("figure, figure *")
    assert set(every.evaluate_all(f"all => all.map({duration})")) == {"0s"}
    assert still.page.evaluate("document.getAnimations().length") == 0


# Chapter 15: what one program takes, and how many fit

STOPS = {"d": (64, 128), "r": (64, 128), "c": (32, 64, 128), "w": (4, 8), "g": (1, 2, 3)}


def assert_fits(figure, setting, kernel):
    """What was compiled, and how often it fits; a setting is d, r, c, w and g."""
    cells = {name: f".{name}" for name in ("R", "Rf", "spill", "S", "Sf")}
    bars = {name: f".bars-{name} rect:not(.over)@width" for name in "rs"}
    read, (d, r, c, w, g) = figure.read(**cells, **bars), setting
    registers, spilled, shared = kernel
    assert read.R + read.spill == [str(registers), str(spilled)]
    close(read.Rf, [r * (c + d) / (32 * w)], 0.05)
    close(read.S + read.Sf, [shared / 1024, 2 * (r * d + 2 * g * c * d) / 1024], 0.05)
    lot = math.ceil(32 * registers / 256) * 256  # of a warp
    taken = {
        "the registers": (w * lot, 65536),
        "the shared memory": (shared + 1024, 228 * 1024),
    }
    fit = {name: room // one for name, (one, room) in taken.items()}
    programs = min(fit.values())
    limits = [name for name in fit if fit[name] == programs]
    limit = "both" if len(limits) == 2 else limits[0]
    assert read.say.startswith(f"Programs on a multiprocessor: {programs}, ")
    assert f"limited by {limit}." in read.say
    assert ("spilled" in read.say) == (spilled > 0)
    for widths, (one, room) in zip((read.r, read.s), taken.values(), strict=True):
        assert sum(numbers(widths)) <= 420.5
        close(widths, [420 * one / room] * programs, 0.1)


def test_gpu_tiles_show_the_record(open_figure):
    figure, results = open_figure("gpu_tiles"), ROOT / "benchmarks" / "results"
    record = json.loads((results / "flash_tiles.json").read_text(encoding="utf-8"))
    assert record["columns"][:5] == ["dim", "queries", "keys", "num_warps", "num_stages"]
    kernels = {tuple(row[:5]): row[5:] for row in record["kernels"]}
    start = 64, 128, 64, 4, 3
    assert_fits(figure, start, kernels[start])
    for setting, kernel in kernels.items():
        named = zip(STOPS, setting, strict=True)
        stops = {name: STOPS[name].index(value) for name, value in named}
        assert_fits(figure.set(**stops), setting, kernel)


# Appendix E: keys split among programs

BLOCKS = (16, 32, 64, 128, 256, 512)
ALL = 132  # multiprocessors


def assert_split(figure, programs, blocks, shares):
    """The table and the squares; the last column is the package's choice."""
    read = figure.read(
        **{name: f".{name}" for name in "SPWT"},
        **{name: f".{name}@d" for name in ("busy", "part", "room")},
    )
    best = choose_splits(programs, blocks, ALL)
    three = (shares, 1, best)
    waves = [math.ceil(programs * s / ALL) for s in three]
    tiles = [w * math.ceil(blocks / s) for w, s in zip(waves, three, strict=True)]
    assert numbers(read.S) == [shares, best]
    assert numbers(read.P) == [programs * s for s in three]
    assert (numbers(read.W), numbers(read.T)) == (waves, tiles)
    last = programs * shares - ALL * (waves[0] - 1)  # programs of the last wave
    squares = [path.count("M") for path in read.busy + read.part + read.room]
    assert squares == [last, ALL - last if waves[0] > 1 else 0, ALL]
    assert f"{last} of {ALL} multiprocessors" in read.say
    assert f"{tiles[0]} tiles" in read.say


def test_split_keys_against_the_rule(open_figure):
    figure = open_figure("split_keys")
    assert_split(figure, 8, 128, 1)
    settings = (1, 8, 33, 100, 132, 200), (0, 3, 5), (1, 2, 5, 16, 17, 132)
    for programs, stop, shares in product(*settings):
        figure.set(p=programs, t=stop, s=shares)
        assert_split(figure, programs, BLOCKS[stop], shares)
