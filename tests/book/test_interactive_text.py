"""The figure to touch of chapter 9, in a real browser, against torch."""

import json
import re
from pathlib import Path

import torch

# Chapter 9: what may follow "there", and a temperature.

BOOK = Path(__file__).resolve().parents[2] / "book"
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
    book = json.loads((BOOK / "09_transformer.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in book["cells"]]
    at = next(i for i, source in enumerate(cells) if "logits = tiny(there)" in source)
    printed = "".join(book["cells"][at]["outputs"][0]["text"])
    row = re.search(r"\[([^\[\]]+)\]\]\)", printed)[1]
    figure = (BOOK / "_static" / "temperature.html").read_text(encoding="utf-8")
    shown = re.search(r'data-logits="([^"]+)"', figure)[1]
    assert [float(x) for x in row.split(",")] == json.loads(shown)


def test_temperature_from_likeliest_to_all_alike(open_page):
    page = open_page("temperature")
    assert_temperature(page, 1.0)
    slider, different = page.locator(f"{TEMPERATURE} input"), []
    for log10 in (-1, -0.3, 0.3, 1):
        slider.fill(str(log10))
        different.append(len(set(assert_temperature(page, 10**log10))))
    assert different == sorted(different) and different[0] == 1 < different[-1]
    slider.focus()
    page.keyboard.press("Home")
    assert_temperature(page, 0.1)
