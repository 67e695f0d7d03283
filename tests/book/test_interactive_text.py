"""The figure to touch of chapter 9, in a real browser, against torch."""

import json
import re

import pytest
import torch

from touch import STATIC

# Chapter 9: what may follow "there", and a temperature.

TEMPERATURE_FRAGMENT = (STATIC / "temperature.html").read_text(encoding="utf-8")
TEMPERATURE = "#temperature"
READ_TEMPERATURE = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const number = e => parseFloat(e.textContent.replace("\u2212", "-"));
    return {
        logits: JSON.parse(figure.dataset.logits),
        uniforms: JSON.parse(figure.dataset.uniforms),
        names: figure.dataset.names,
        printedLogits: all(".s", number),
        printed: all(".a", number),
        bars: all(".t b", e => parseFloat(e.style.width)),
        draws: figure.querySelector(".draws").textContent,
        said: figure.querySelector(".say").textContent,
    };
}"""


def assert_temperature(page, T):
    """What is shown at temperature T, against torch."""
    read = page.locator(TEMPERATURE).first.evaluate(READ_TEMPERATURE)
    logits = torch.tensor(read["logits"], dtype=torch.float64)
    P = torch.softmax(logits / T, dim=0)
    shown = (read["printedLogits"], logits), (read["printed"], P), (read["bars"], 100 * P)
    for got, expected in shown:
        got = torch.tensor(got, dtype=torch.float64)
        assert torch.allclose(got, expected, rtol=0, atol=0.0051)
    uniforms = torch.tensor(read["uniforms"], dtype=torch.float64)
    chosen = (uniforms[:, None] >= P.cumsum(0)[:-1]).sum(1)
    assert read["draws"] == "".join(read["names"][i] for i in chosen)
    assert f"The space has the probability {P[0]:.2f}" in read["said"]
    return read["draws"]


def test_temperature_figure_has_the_numbers_of_the_chapter():
    """The logits after "there" are the last row that chapter 9 prints."""
    book = json.loads((STATIC.parent / "09_transformer.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in book["cells"]]
    at = next(i for i, source in enumerate(cells) if "class TinyGPT" in source)
    printed = "".join(book["cells"][at]["outputs"][0]["text"])
    row = re.search(r"\[([^\[\]]+)\]\]\)", printed)[1]
    shown = re.search(r'data-logits="([^"]+)"', TEMPERATURE_FRAGMENT)[1]
    assert [float(x) for x in row.split(",")] == json.loads(shown)


def test_temperature_from_likeliest_to_all_alike(open_page):
    assert len(TEMPERATURE_FRAGMENT.encode()) < 15_000
    bare = re.sub(r"<script>.*?</script>", "", TEMPERATURE_FRAGMENT, flags=re.S)
    static, page = open_page(fragment=bare), open_page(fragment=TEMPERATURE_FRAGMENT)
    assert not static.locator(f"{TEMPERATURE} input").is_visible()
    assert assert_temperature(static, 1.0) == assert_temperature(page, 1.0)
    slider, different = page.locator(f"{TEMPERATURE} input"), []
    for log10 in (-1, -0.3, 0.3, 1):
        slider.fill(str(log10))
        different.append(len(set(assert_temperature(page, 10**log10))))
    assert different == sorted(different) and different[0] == 1 < different[-1]
    slider.focus()
    page.keyboard.press("Home")
    assert_temperature(page, 0.1)


@pytest.mark.parametrize("width", [360, 760])
def test_temperature_fits_and_stands_twice(open_page, width):
    page = open_page(fragment=TEMPERATURE_FRAGMENT, copies=2, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator(f"{TEMPERATURE} input").first.fill("0.3")
    values = page.locator(f"{TEMPERATURE} output").all_text_contents()
    assert values == ["2.00", "1.00"]
