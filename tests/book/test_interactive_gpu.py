"""The figures to touch of chapter 15 and appendix E, in a real browser."""

import json
import math

from attnlib.flash_triton import choose_splits
from touch import ROOT, close, numbers

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
    taken = {"the registers": (w * lot, 65536)}
    taken["the shared memory"] = shared + 1024, 228 * 1024
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
    start, fewer = (64, 128, 64, 4, 3), (64, 64, 64, 4, 3)
    assert_fits(figure, start, kernels[start])
    figure.keys("ArrowLeft", at="queries r")
    assert_fits(figure, fewer, kernels[fewer])
    for setting, kernel in kernels.items():
        named = zip(STOPS, setting, strict=True)
        figure.set(**{name: STOPS[name].index(value) for name, value in named})
        assert_fits(figure, setting, kernel)


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
    figure.keys("ArrowRight", at="shares S")
    assert_split(figure, 8, 128, 2)
    for programs in (1, 8, 33, 100, 132, 200):
        for stop in (0, 3, 5):
            for shares in (1, 5, 16, 17, 132):
                figure.set(p=programs, t=stop, s=shares)
                assert_split(figure, programs, BLOCKS[stop], shares)
