"""The text that comes twice, the figure to touch of chapter 20, by the chapter's model."""

import functools
import json
import os
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attnlib import GPT2
from attnlib.gpt2 import without_head
from touch import ROOT, close, numbers

HEADS = (0, 0), (0, 1), (1, 0)  # before, first, continue


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The model and the text of chapter 20, from its own cells."""
    pytest.importorskip("safetensors")
    book = json.loads((ROOT / "book" / "20_gpt2.ipynb").read_text("utf-8"))
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


def bars(paths):
    """Of each bar the left edge, the floor and the height."""
    found = np.array(numbers(paths)).reshape(-1, 5)
    close(found[:, 2], -found[:, 4], 0)  # up and down again
    return found[:, [0, 1, 4]]


def assert_shown(figure, chapter, place, off=()):
    read = figure.read(
        **{"tokens": ".b text", "now": ".b.now text", "later": ".b.later", "cells": "td"},
        **{"heads": "path:is(.h0, .h1, .h2)@d", "chances": ".p@d"},
    )
    weights, chances, loss = computed(chapter, off)
    tokens = chapter[1].tolist()
    corners = [(26 * (j if j < 13 else j - 12), 0 if j < 13 else 92) for j in range(25)]
    assert numbers(read.tokens) == tokens and numbers(read.now) == [tokens[place]]
    assert len(read.later) == 24 - place
    for k, (path, weight) in enumerate(zip(read.heads, weights, strict=True)):
        looks, shown = weight[place], [0] * 25
        for left, floor, height in bars(path):
            shown[corners.index((left - 2 - 7 * k, floor - 32))] += height
        close(shown, 30 * looks * (k not in off), 0.16)
        row, most = read.cells[3 * k : 3 * k + 3], looks.argmax().item()
        if k in off:
            assert row == ["off", "", ""]
        else:
            assert row[:2] == [str(most), str(tokens[most])]
            close(row[2], looks[most], 0.0051)
    left, floor, height = bars(read.chances).T
    close(np.stack([left - 1, floor - 82], axis=1), corners[1:], 0)
    close(height, 24 * chances, 0.13)
    assert f"probability {chances[place].item() + 1e-9:.2f}." in read.say
    assert read.say.endswith(f"second half: {loss:.2f}.")
    assert ("can't be known" in read.say) == (place <= 12)
    return read


@pytest.mark.costly(
    *("figure/text_twice", "book/20_gpt2.ipynb"),
    *("book/_static/text_twice.html", "book/_static/touch.html"),
)
def test_the_numbers_are_those_of_the_chapters_model(open_figure, chapter):
    figure = open_figure("text_twice")
    read = assert_shown(figure, chapter, 18)
    assert read.cells[-2] == "3"  # what the head that continues finds comes next
    for bits in range(8):
        off = tuple(k for k in range(3) if bits >> k & 1)
        for k, name in enumerate(("before", "first", "continue")):
            figure.control(name).set_checked(k not in off)
        for place in range(1, 24):
            figure.set(place=place)
            assert_shown(figure, chapter, place, off)


def test_by_keyboard(open_figure, chapter):
    figure = open_figure("text_twice")
    for key, place in (("Home", 1), ("ArrowRight", 2), ("End", 23), ("ArrowLeft", 22)):
        figure.keys(key, at="place")
        assert assert_shown(figure, chapter, place).say.endswith("half: 0.03.")
    figure.keys(" ", at="continue")
    assert assert_shown(figure, chapter, 22, (2,)).say.endswith("half: 3.92.")
    figure.root.locator(".b").nth(5).click()
    assert_shown(figure, chapter, 5, (2,))


def test_what_the_text_says(open_figure, chapter):
    """One line up and one place on; without the head before, the first token."""
    figure = open_figure("text_twice")
    for off in ((), (0,)):
        figure.control("before").set_checked(not off)
        for place in range(13, 24):
            figure.set(place=place)
            cells = assert_shown(figure, chapter, place, off).cells
            assert cells[6:] == ["0", "0", "1.00"] if off else cells[6] == str(place - 11)
