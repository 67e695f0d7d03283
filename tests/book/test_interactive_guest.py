"""The pairs of a call, the figure to touch of chapter 22, by `transformers` and attnlib."""

import functools
import itertools
import os
import re

import pytest
import torch

from attnlib import FlashAttention, ScaledDotProductAttention, hf

os.environ["HF_HUB_OFFLINE"] = "1"
FIGURE = "#no-mask-figure"
READ = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const path = css => figure.querySelector(css).getAttribute("d");
    return {
        room: path(".above .room"), same: path(".below .room"),
        meant: path(".above .meant"),
        both: path(".below .meant"), wrong: path(".below .wrong"),
        cross: path(".below .cross"),
        lost: path(".below .lost"), counts: all("td", e => +e.textContent),
        names: all(".above text", e => e.textContent),
        again: all(".below text", e => e.textContent),
        outputs: all("output", e => e.textContent),
        say: figure.querySelector(".say").textContent,
        front: figure.querySelector("form").elements.r.max,
    };
}"""
SET = """(figure, numbers) => {
    const form = figure.querySelector("form");
    for (const name of ["s", "n", "e", "w", "rule", "r"]) {
        form.elements[name].value = numbers[name];
        form.dispatchEvent(new Event("input"));
    }
}"""
transformers = pytest.importorskip("transformers")
CONFIG = transformers.LlamaConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)
CONFIG._attn_implementation = "sdpa"


@functools.cache
def library_mask(r, s, n, w, e, skip=True):
    """The library's mask for such a call, or the None that it gives; e: a static cache."""
    from transformers import masking_utils as masks

    CONFIG.sliding_window = None  # its caches keep everything
    cache = transformers.DynamicCache()
    if e:
        cache = transformers.StaticCache(config=CONFIG, max_cache_len=s + n + e)
    if s:
        cache.update(torch.zeros(1, 1, s, 8), torch.zeros(1, 1, s, 8), 0)
    elif e:
        cache.early_initialization(1, 1, 8, torch.float32, torch.device("cpu"))
    here = (torch.arange(s + n) >= r).long()[None]
    CONFIG.sliding_window = w
    make = masks.create_sliding_window_causal_mask if w else masks.create_causal_mask
    more = {} if skip else {"and_mask_function": lambda b, h, i, j: j >= 0}  # never None
    call = {"inputs_embeds": torch.zeros(1, n, 8), "attention_mask": here}
    return make(config=CONFIG, past_key_values=cache, **call, **more)


def seen_without(n, m, rule):
    """Which keys an attention of the package mixes when no mask is given."""
    query, key, value = torch.zeros(1, 1, n, 4), torch.zeros(1, 1, m, 4), torch.eye(m)
    if rule == "left":
        layer = torch.nn.Identity().eval()
        layer.is_causal = True
        got, _ = hf.attend_for_model(
            FlashAttention(), layer, query, key, value[None, None], None
        )
        return got[0, :, 0] > 0
    plain = ScaledDotProductAttention(causal=True)
    return plain(query, key, value[None, None])[0][0, 0] > 0


def squares(path, inset=0):
    """Rows and columns of the squares of a path."""
    found = re.findall(r"M([\d.]+) ([\d.]+)", path)
    return {((float(y) - inset) / 20, (float(x) - inset) / 20) for x, y in found}


def places(pairs):
    return {(i, j) for i, j in pairs.nonzero().tolist()}


def assert_pairs(read, r, s, n, w, e, rule):
    m, mask = s + n + e, library_mask(r, s, n, w, e)
    meant = library_mask(r, s, n, w, e, skip=False)[0, 0]
    seen = seen_without(n, m, rule)
    assert (
        squares(read["room"]) == places(torch.ones(n, m)) and read["room"] == read["same"]
    )
    assert squares(read["meant"]) == places(meant)
    assert squares(read["both"]) == places(meant & seen)
    assert squares(read["wrong"]) == places(seen & ~meant) == squares(read["cross"], 4)
    assert squares(read["lost"], 1.5) == places(meant & ~seen)
    numbers = [x.sum().item() for x in (meant, seen, seen & ~meant, meant & ~seen)]
    assert read["counts"] == numbers
    wrong = numbers[2] + numbers[3]
    assert ("for" in read["say"]) == bool(wrong)
    assert not wrong or re.search(rf"\b{wrong} pairs?\b", read["say"])
    assert ("makes one" in read["say"]) == (mask is not None)
    assert rule == "right" or mask is not None or not wrong  # the library's rule is right
    names = ["–"] * r + [str(t + 1) for t in range(s + n - r)] + ["?"] * e
    names += [""] * (12 - m)
    assert read["names"] == names + names[s : s + n] + [""] * (5 - n) == read["again"]
    assert read["outputs"] == [*map(str, (r, s, n)), str(w or "none"), str(e)]


def test_it_begins_with_the_picture_of_the_chapter(open_page):
    read = open_page("no_mask").locator(FIGURE).evaluate(READ)
    assert_pairs(read, 2, 0, 5, None, 0, "left")
    assert read["counts"] == [6, 15, 9, 0]


@pytest.mark.thorough("no_mask", "hf")
def test_pairs_and_counts_for_all_lengths(open_page):
    figure = open_page("no_mask").locator(FIGURE)
    lengths = (0, 1, 4), (0, 4), (1, 5), (None, 3), (0, 2)
    sentences = set()
    for r, s, n, w, e, rule in itertools.product(*lengths, ("left", "right")):
        if r >= s + n:
            continue
        numbers = {"r": r, "s": s, "n": n, "w": w or 10, "e": e, "rule": rule}
        figure.evaluate(SET, numbers)
        read = figure.evaluate(READ)
        assert read["front"] == str(min(4, s + n - 1))
        assert_pairs(read, r, s, n, w, e, rule)
        sentences.add(re.sub(r"\d+ pairs?", "", read["say"]))
    assert len(sentences) == 4  # each of the four sentences was right somewhere


def test_no_text_is_all_padding(open_page):
    page = open_page("no_mask")
    page.get_by_label("new tokens N").press("Home")
    assert_pairs(page.locator(FIGURE).evaluate(READ), 0, 0, 1, None, 0, "left")


def test_by_keyboard(open_page):
    """The third call of the chapter's picture: three of five places, bottom right."""
    page = open_page("no_mask")
    page.get_by_label("filled up in front r").press("Home")
    for name, key in (("new tokens N", "ArrowLeft"), ("empty behind", "ArrowRight")):
        for _ in range(2):
            page.get_by_label(name).press(key)
    page.get_by_label("top left").press("ArrowRight")
    read = page.locator(FIGURE).evaluate(READ)
    assert_pairs(read, 0, 0, 3, None, 2, "right")
    assert read["counts"] == [6, 12, 6, 0]
    assert read["say"].startswith("The library makes no mask here, and this rule is wrong")
