"""The figure to touch of chapter 15, in a real browser, against the record."""

import json
import math
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GPU = "#gpu-tiles"


# Chapter 15: what one program takes, and how many fit


def compiled_kernels():
    """By d, r, c, w and g: registers, bytes spilled, bytes of shared memory."""
    record = json.loads((RESULTS / "flash_tiles.json").read_text(encoding="utf-8"))
    assert record["columns"][:5] == ["dim", "queries", "keys", "num_warps", "num_stages"]
    return {tuple(row[:5]): row[5:] for row in record["kernels"]}


def fit(warps, registers, shared):
    """Programs that fit on a multiprocessor by registers, and by shared memory."""
    lot = math.ceil(32 * registers / 256) * 256  # of a warp
    return 65536 // (warps * lot), 228 * 1024 // (shared + 1024)


READ_GPU = """figure => {
    const text = css => figure.querySelector(css).textContent;
    const widths = css => [...figure.querySelectorAll(css + " rect:not(.over)")].map(
        e => Number(e.getAttribute("width")));
    return {R: text(".R"), Rf: text(".Rf"), spill: text(".spill"), S: text(".S"),
        Sf: text(".Sf"), say: text(".say"), r: widths(".bars-r"), s: widths(".bars-s")};
}"""


def assert_fits(read, setting, kernel):
    d, r, c, w, g = setting
    registers, spilled, shared = kernel
    assert read["R"] == str(registers) and read["spill"] == str(spilled)
    assert float(read["Rf"]) == pytest.approx(r * (c + d) / (32 * w), abs=0.05)
    assert float(read["S"]) == pytest.approx(shared / 1024, abs=0.05)
    assert float(read["Sf"]) == pytest.approx(2 * (r * d + 2 * g * c * d) / 1024, abs=0.05)
    by_registers, by_shared = fit(w, registers, shared)
    programs = min(by_registers, by_shared)
    limit = "both" if by_registers == by_shared else "the registers"
    limit = "the shared memory" if by_shared < by_registers else limit
    assert read["say"].startswith(f"Programs on a multiprocessor: {programs}, ")
    assert f"limited by {limit}." in read["say"]
    assert ("spilled" in read["say"]) == (spilled > 0)
    for bars in (read["r"], read["s"]):
        assert len(bars) == programs and sum(bars) <= 420.5
    lot = math.ceil(32 * registers / 256) * 256
    assert read["r"][0] == pytest.approx(420 * w * lot / 65536, abs=0.1)
    assert read["s"][0] == pytest.approx(420 * (shared + 1024) / (228 * 1024), abs=0.1)


def test_gpu_tiles_show_the_record(open_page):
    page = open_page("gpu_tiles")
    kernels = compiled_kernels()
    stops = {
        "d": (64, 128),
        "r": (64, 128),
        "c": (32, 64, 128),
        "w": (4, 8),
        "g": (1, 2, 3),
    }
    for setting, kernel in kernels.items():
        places = {
            name: stops[name].index(value)
            for name, value in zip(stops, setting, strict=True)
        }
        page.locator(GPU).evaluate(
            """(figure, places) => { const form = figure.querySelector("form");
            for (const name in places) form.elements[name].value = places[name];
            form.dispatchEvent(new Event("input")); }""",
            places,
        )
        assert_fits(page.locator(GPU).evaluate(READ_GPU), setting, kernel)


def test_gpu_tiles_by_keyboard(open_page):
    page, kernels = open_page("gpu_tiles"), compiled_kernels()
    start = (64, 128, 64, 4, 3)
    assert_fits(page.locator(GPU).evaluate(READ_GPU), start, kernels[start])
    page.get_by_label("queries r").press("ArrowLeft")
    fewer = (64, 64, 64, 4, 3)
    assert_fits(page.locator(GPU).evaluate(READ_GPU), fewer, kernels[fewer])
