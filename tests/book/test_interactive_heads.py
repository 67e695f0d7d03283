"""The text that comes twice, the figure to touch of chapter 20, by the chapter's model."""

import functools
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from attnlib import GPT2
from attnlib.gpt2 import without_head

BOOK = Path(__file__).resolve().parents[2] / "book"
TWICE = "#text-twice"
HEADS = (0, 0), (0, 1), (1, 0)  # before, first, continue
READ = r"""figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const bars = e => [...e.getAttribute("d").matchAll(/M(\S+) (\S+?)v-?(\S+?)h/g)]
        .map(bar => bar.slice(1).map(Number));
    return {
        tokens: all(".b text", e => +e.textContent),
        now: all(".b.now text", e => e.textContent),
        later: all(".b.later", e => e.textContent).length,
        heads: [0, 1, 2].map(k => bars(figure.querySelector(`path.h${k}`))),
        chances: bars(figure.querySelector(".p")), cells: all("td", e => e.textContent),
        say: figure.querySelector(".say").textContent,
    };
}"""


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The model and the text of chapter 20, from its own cells."""
    pytest.importorskip("safetensors")
    book = json.loads((BOOK / "20_gpt2.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]
    space = {"V": 16, "h": 4, "L": 2, "first": 0}
    kept = os.environ.pop("ATTNLIB_GPT2", None)
    for start in (
        *("# Setup", "load = False", "word, place", "def look_back", "def go_on"),
        "torch.manual_seed(1)\nr = 50",
    ):
        (source,) = (cell for cell in cells if cell.startswith(start))
        exec(source, space)  # the book's own code
    if kept is not None:
        os.environ["ATTNLIB_GPT2"] = kept
    return space["package"], space["twice"], space["r"]


@functools.cache
def computed(chapter, off):
    """Weights of the three heads, probabilities and the loss, with heads switched off."""
    model, twice, r = chapter
    assert isinstance(model, GPT2)
    with ExitStack() as stack, torch.no_grad():
        for place in off:
            stack.enter_context(without_head(model, *HEADS[place]))
        logits, weights = model(twice, return_weights=True)
    each = F.cross_entropy(logits[:-1], twice[1:], reduction="none")
    shown = [weights[block][head] for block, head in HEADS]
    return shown, (-each).exp(), each[r + 1 :].mean().item()


def assert_shown(figure, chapter, place, off=()):
    read, (weights, chances, loss) = figure.evaluate(READ), computed(chapter, off)
    tokens = chapter[1].tolist()
    x = [26 * (j if j < 13 else j - 12) for j in range(25)]
    y = [0 if j < 13 else 92 for j in range(25)]
    assert read["tokens"] == tokens and read["now"] == [str(tokens[place])]
    assert read["later"] == 24 - place
    for k, (bars, weight) in enumerate(zip(read["heads"], weights, strict=True)):
        heights = {(left - 2 - 7 * k, floor - 32): height for left, floor, height in bars}
        for j in range(25):
            wanted = 0 if k in off else 30 * weight[place, j].item()
            assert abs(heights.pop((x[j], y[j]), 0) - wanted) < 0.16, (k, j)
        assert not heights
        row, most = read["cells"][3 * k : 3 * k + 3], weight[place].argmax().item()
        if k in off:
            assert row == ["off", "", ""]
        else:
            assert row[:2] == [str(most), str(tokens[most])]
            assert abs(float(row[2]) - weight[place, most].item()) < 0.0051
    for j, (left, floor, height) in enumerate(read["chances"], start=1):
        assert (left - 1, floor - 82) == (x[j], y[j])
        assert abs(height - 24 * chances[j - 1].item()) < 0.13
    assert len(read["chances"]) == 24
    assert f"probability {chances[place].item() + 1e-9:.2f}." in read["say"]
    assert read["say"].endswith(f"second half: {loss:.2f}.")
    assert ("can't be known" in read["say"]) == (place <= 12)
    return read


@pytest.mark.thorough("text_twice", "20_gpt2", "gpt2")
def test_the_numbers_are_those_of_the_chapters_model(open_page, chapter):
    page = open_page("text_twice")
    figure = page.locator(TWICE)
    read = assert_shown(figure, chapter, 18)
    assert read["cells"][-2] == "3"  # what the head that continues finds comes next
    for bits in range(8):
        off = tuple(k for k in range(3) if bits >> k & 1)
        for k, name in enumerate(("before", "first", "continue")):
            page.get_by_role("checkbox", name=name).set_checked(k not in off)
        for place in range(1, 24):
            page.get_by_role("slider").fill(str(place))
            assert_shown(figure, chapter, place, off)


def test_by_keyboard(open_page, chapter):
    page = open_page("text_twice")
    for key, place in (("Home", 1), ("ArrowRight", 2), ("End", 23), ("ArrowLeft", 22)):
        page.get_by_role("slider").press(key)
        assert_shown(page.locator(TWICE), chapter, place)
    page.get_by_role("checkbox", name="continue").press(" ")
    assert_shown(page.locator(TWICE), chapter, 22, (2,))


def test_what_the_text_says(open_page, chapter):
    """One line up and one place on; without the head before, the first token."""
    page = open_page("text_twice")
    for place in range(13, 24):
        page.get_by_role("slider").fill(str(place))
        page.get_by_role("checkbox", name="before").check()
        read = assert_shown(page.locator(TWICE), chapter, place)
        assert read["cells"][6] == str(place - 11)
        page.get_by_role("checkbox", name="before").uncheck()
        read = assert_shown(page.locator(TWICE), chapter, place, (0,))
        assert read["cells"][6:] == ["0", "0", "1.00"]
    for name, loss in (("before", "0.03"), ("continue", "3.92")):
        page.get_by_role("checkbox", name=name).click()
        assert page.locator(f"{TWICE} .say").text_content().endswith(f"half: {loss}.")
    page.locator(f"{TWICE} .b").nth(5).click()
    assert_shown(page.locator(TWICE), chapter, 5, (2,))
