"""The pairs of a call, the figure to touch of chapter 22, by `transformers` and attnlib."""

import functools
import itertools
import os
import re

import numpy as np
import pytest
import torch

from attnlib import FlashAttention, ScaledDotProductAttention, hf
from touch import boxes, numbers

os.environ["HF_HUB_OFFLINE"] = "1"
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


@pytest.mark.costly(
    "figure/no_mask", "book/_static/no_mask.html", "book/_static/touch.html"
)
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


def test_by_keyboard_to_a_call_of_the_chapter(open_figure):
    """From its first picture to the third call: three of five places, bottom right."""
    figure = open_figure("no_mask")
    assert_pairs(figure, 2, 0, 5, None, 0, "left")
    assert figure.read(counts="td").counts == ["6", "15", "9", "0"]
    figure.keys("Home", at="new tokens N")  # no text is all padding
    assert_pairs(figure, 0, 0, 1, None, 0, "left")
    figure.keys("ArrowRight", "ArrowRight", at="new tokens N")
    figure.keys("Home", at="filled up in front r")
    figure.keys("ArrowRight", "ArrowRight", at="empty behind")
    figure.keys("ArrowRight", at="top left")
    said = assert_pairs(figure, 0, 0, 3, None, 2, "right")
    assert said.startswith("The library makes no mask here, and this rule is wrong")
    assert figure.read(counts="td").counts == ["6", "12", "6", "0"]
