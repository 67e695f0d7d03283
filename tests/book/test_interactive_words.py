"""The interactive figures of chapters 2 and 3, in a real browser, against the package."""

import json
import re

import pytest
import torch

from attnlib import ScaledDotProductAttention, causal_mask


def kept(page, figure):
    """What the figure keeps of its state, as numbers where they are numbers."""
    data = page.locator(figure).evaluate("f => Object.assign({}, f.dataset)")
    data.pop("lmSuppressShortcuts")
    return {k: v if k == "sentence" else json.loads(v) for k, v in data.items()}


def shown(page, selector):
    texts = page.locator(selector).all_text_contents()
    return [float(text.replace("\u2212", "-")) for text in texts]


def assert_bank_is_right(page):
    """Weights and context vector are the package's; so is what is printed."""
    data = kept(page, "#bank-river")
    words = data["words"] | {"bank": data["bank"]}
    rows = [words[word] for word in data["sentence"].split()]
    x = torch.tensor(rows, dtype=torch.float64)
    context, weights = ScaledDotProductAttention()(x, x, x)
    for name, expected in (("weights", weights[2]), ("context", context[2])):
        off = (torch.tensor(data[name], dtype=torch.float64) - expected).abs().max()
        assert off < 1e-9, name
    printed = torch.tensor(shown(page, "#bank-river .a"), dtype=torch.float64)
    assert (printed - weights[2]).abs().max() < 0.0051
    said = page.locator("#bank-river .say").text_content()
    told = [float(n) for n in re.findall(r"\d+\.\d\d", said.replace("\u2212", "-"))]
    assert torch.allclose(torch.tensor(told), context[2].abs().float(), atol=0.0051, rtol=0)
    return data


def test_bank_moves_by_mouse_by_keys_and_by_its_own_context(open_page):
    page = open_page("bank_river")
    assert assert_bank_is_right(page)["sentence"] == "the river bank flooded"
    handle = page.locator("#bank-river .q")
    money = []
    for _ in range(5):  # the numbers that the chapter tells
        money.append(round(assert_bank_is_right(page)["context"][1], 2))
        page.get_by_role("button", name="attend again").click()
    assert money == [0.33, 0.08, 0.02, 0.01, 0.0]
    page.get_by_role("button", name="other sentence").click()
    data = assert_bank_is_right(page)
    assert data["sentence"] == "the savings bank closed" and data["bank"] == [1, 1, 0]
    assert [round(number, 3) for number in data["context"]] == [0.366, 1.173, 0.154]
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    assert assert_bank_is_right(page)["bank"] == [1.1, 0.5, 0]
    page.get_by_role("button", name="reset").click()
    box = page.locator("#bank-river .plane").bounding_box()
    scale = box["width"] / 320
    page.mouse.move(box["x"] + 150 * scale, box["y"] + 162 * scale)
    page.mouse.down()
    page.mouse.move(box["x"] + 150 * scale, box["y"] + 12 * scale)  # money 2.5
    page.mouse.up()
    page.get_by_role("button", name="other sentence").focus()
    data = assert_bank_is_right(page)
    assert data["bank"] == pytest.approx([1, 2.5, 0], abs=0.02)


def test_bank_far_up_gives_itself_most_of_its_weight(open_page):
    page = open_page("bank_river")
    page.locator("#bank-river .q").focus()
    for _ in range(3):
        page.keyboard.press("Shift+ArrowUp")
    data = assert_bank_is_right(page)
    assert data["bank"] == [1, 2.5, 0] and round(data["weights"][2], 2) == 0.91


def weigh(x, mask, divide):
    if divide:
        return ScaledDotProductAttention()(x, x, x, mask)[1]
    return ScaledDotProductAttention()(x, x, x)[1] * mask


def assert_leaks_are_right(page):
    """Weights and moves are the package's; outputs before the word are told apart."""
    data = kept(page, "#leak-grid")
    x, other = (torch.tensor(data[n], dtype=torch.float64) for n in ("x", "other"))
    mask, token, divide = torch.tensor(data["mask"]) == 1, data["token"], data["divide"]
    changed = x.clone()
    changed[token] = other
    weights = weigh(x, mask, divide)
    moves = (weigh(changed, mask, divide) @ changed - weights @ x).abs().amax(dim=-1)
    for name, expected in (("weights", weights), ("moves", moves)):
        off = (torch.tensor(data[name], dtype=torch.float64) - expected).abs().max()
        assert off < 1e-9, name
    printed = torch.tensor(shown(page, "#leak-grid .m"), dtype=torch.float64)
    assert (printed - moves).abs().max() < 0.0051
    filled = page.locator("#leak-grid .c").all_text_contents()
    assert [text != "" for text in filled] == mask.flatten().tolist()
    marked = page.locator("#leak-grid .m").evaluate_all(
        "all => all.map(m => m.classList.contains('leak'))"
    )
    assert marked == [i < token and moves[i].item() > 1e-12 for i in range(5)]
    said = page.locator("#leak-grid .say").text_content()
    assert ("A leak" in said) == any(marked)
    return data, marked


def test_a_hole_a_missing_mask_and_a_missing_division_leak(open_page):
    page = open_page("leak_grid")

    def press(name):
        page.get_by_role("button", name=name).click()

    data, marked = assert_leaks_are_right(page)
    assert data["mask"] == causal_mask(5).int().tolist() and not any(marked)
    press("may river, word 2, see flooded, word 3?")
    assert assert_leaks_are_right(page)[1] == [False, True, False, False, False]
    press("may river, word 2, see flooded, word 3?")
    assert not any(assert_leaks_are_right(page)[1])
    press("mask after softmax, not divided")
    data, marked = assert_leaks_are_right(page)
    assert data["mask"] == causal_mask(5).int().tolist()
    assert marked == [False, True, False, False, False]  # as the chapter says
    press("no mask")
    page.locator('#leak-grid [data-token="4"]').focus()
    page.keyboard.press("Enter")
    data, marked = assert_leaks_are_right(page)
    assert data["token"] == 4 and marked == [True] * 4 + [False]
    press("causal mask")
    for token in range(5):  # whatever word is replaced, the past stays
        page.locator(f'#leak-grid [data-token="{token}"]').click()
        data, marked = assert_leaks_are_right(page)
        assert data["moves"][:token] == [0] * token and not any(marked)
