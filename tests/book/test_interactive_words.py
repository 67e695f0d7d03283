"""The figures to touch of chapters 2, 3 and 9, in a real browser, against the package."""

import json
import re

import torch

from attnlib import ScaledDotProductAttention, causal_mask
from touch import ROOT, close, numbers, tensor

# Chapter 2: bank in its sentence


def assert_bank(figure):
    """Weights and context vector are the package's; so is what is printed."""
    read = figure.read(printed=".a")
    words = read.words | {"bank": read.bank}
    x = tensor([words[word] for word in read.sentence.split()])
    context, weights = ScaledDotProductAttention()(x, x, x)
    close(read.weights, weights[2], 1e-9)
    close(read.context, context[2], 1e-9)
    close(read.printed, weights[2], 0.0051)
    close(read.say.replace("\u2212", ""), context[2].abs(), 0.0051)
    return read


def test_bank_moves_by_mouse_by_keys_and_by_its_own_context(open_figure):
    figure = open_figure("bank_river")
    assert assert_bank(figure).sentence == "the river bank flooded"
    for money in (0.33, 0.08, 0.02, 0.01, 0.0):  # the numbers that the chapter tells
        assert round(assert_bank(figure).context[1], 2) == money
        figure.press("attend again")
    figure.press("other sentence")
    read = assert_bank(figure)
    assert read.sentence == "the savings bank closed" and read.bank == [1, 1, 0]
    assert [round(number, 3) for number in read.context] == [0.366, 1.173, 0.154]
    handle = figure.root.locator(".q")
    handle.focus()
    figure.keys("ArrowRight", "Shift+ArrowDown")
    assert assert_bank(figure).bank == [1.1, 0.5, 0]
    figure.press("reset")
    top = figure.place(".plane", 150, 12)
    figure.drag(figure.place(".plane", 150, 162), top)
    figure.root.get_by_role("button", name="other sentence").focus()
    close(assert_bank(figure).bank, [1, 2.5, 0], 0.02)
    figure.press("other sentence")
    handle.focus()
    figure.keys(*["Shift+ArrowUp"] * 3)  # far up, it gives itself most of its weight
    read = assert_bank(figure)
    assert read.bank == [1, 2.5, 0] and round(read.weights[2], 2) == 0.91


# Chapter 3: what leaks


def weigh(x, mask, divide):
    if divide:
        return ScaledDotProductAttention()(x, x, x, mask)[1]
    return ScaledDotProductAttention()(x, x, x)[1] * mask


def assert_leaks(figure):
    """Weights and moves are the package's; outputs before the word are told apart."""
    read = figure.read(printed=".m", marked=".m@class", filled=".c")
    x, mask = tensor(read.x), torch.tensor(read.mask) == 1
    changed = x.clone()
    changed[read.token] = tensor(read.other)
    weights = weigh(x, mask, read.divide)
    moves = weigh(changed, mask, read.divide) @ changed - weights @ x
    moves = moves.abs().amax(dim=-1)
    close(read.weights, weights, 1e-9)
    close(read.moves, moves, 1e-9)
    close(read.printed, moves, 0.0051)
    assert [text != "" for text in read.filled] == mask.flatten().tolist()
    leaks = [i for i in range(read.token) if moves[i] > 1e-12]
    assert [i for i in range(5) if "leak" in read.marked[i].split()] == leaks
    assert ("A leak" in read.say) == bool(leaks)
    return read, leaks


def test_a_hole_a_missing_mask_and_a_missing_division_leak(open_figure):
    figure, causal = open_figure("leak_grid"), causal_mask(5).int().tolist()
    read, leaks = assert_leaks(figure)
    assert read.mask == causal and not leaks
    for leaking in ([1], []):
        figure.press("may river, word 2, see flooded, word 3?")
        assert assert_leaks(figure)[1] == leaking
    figure.press("mask after softmax, not divided")
    read, leaks = assert_leaks(figure)
    assert read.mask == causal and leaks == [1]  # as the chapter says
    figure.press("no mask")
    figure.root.locator('[data-token="4"]').focus()
    figure.keys("Enter")
    read, leaks = assert_leaks(figure)
    assert read.token == 4 and leaks == [0, 1, 2, 3]
    figure.press("causal mask")
    for token in range(5):  # whatever word is replaced, the past stays
        figure.root.locator(f'[data-token="{token}"]').click()
        read, leaks = assert_leaks(figure)
        assert read.moves[:token] == [0] * token and not leaks


# Chapter 9: what may follow "there", and a temperature


def assert_temperature(figure, T):
    """What is shown at temperature T, against torch."""
    read = figure.read(logit=".s", chance=".a", bars=".t b@width", draws=".draws")
    logits = tensor(read.logits)
    P = torch.softmax(logits / T, dim=0)
    close(read.logit, logits, 0.0051)
    close(read.chance, P, 0.0051)
    close(read.bars, 100 * P, 0.0051)
    uniforms = tensor(read.uniforms)
    chosen = (uniforms[:, None] >= P.cumsum(0)[:-1]).sum(1)
    assert read.draws == ["".join(read.names[i] for i in chosen)]
    assert f"The space has the probability {P[0]:.2f}" in read.say
    return read


def test_temperature_from_likeliest_to_all_alike(open_figure):
    figure, different = open_figure("temperature"), []
    read = assert_temperature(figure, 1.0)
    notebook = (ROOT / "book" / "09_transformer.ipynb").read_text(encoding="utf-8")
    (cell,) = (
        cell
        for cell in json.loads(notebook)["cells"]
        if "logits = tiny(there)" in "".join(cell["source"])
    )
    printed = "".join(cell["outputs"][0]["text"])  # the last row is what follows
    assert numbers(re.search(r"\[([^\[\]]+)\]\]\)", printed)[1]) == read.logits
    for log10 in (-1, -0.3, 0.3, 1):
        figure.fill("Temperature T", log10)
        (draws,) = assert_temperature(figure, 10**log10).draws
        different.append(len(set(draws)))
    assert different == sorted(different) and different[0] == 1 < different[-1]
    figure.keys("Home", at="Temperature T")
    assert_temperature(figure, 0.1)
