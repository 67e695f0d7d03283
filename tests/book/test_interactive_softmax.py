"""The row that settles, the figure to touch of chapter 13, in a browser, against torch."""

import json

import torch

from touch import press, tensor

ROW = "#running-row"


READ_ROW = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const number = text => text === "\u2212\u221e" ? null : +text.replace("\u2212", "-");
    const at = name => e => e[name].baseVal.value;
    const height = e => parseFloat(e.getAttribute("d").split(" ")[1]);
    const {scores, values, order, masked, step, trace} = figure.dataset;
    return {
        scores, values, order, masked, step, trace,
        table: all("tbody tr", e => [...e.cells].slice(1).map(c => number(c.innerText))),
        names: all("tbody th", e => e.textContent),
        labels: all(".blk text", e => e.textContent),
        bars: all(".key .s", e => [at("y")(e), at("height")(e)]),
        weights: all(".key .e", at("height")),
        bases: all(".key .e", e => at("y")(e) + at("height")(e)),
        dots: all(".key .v", at("cy")),
        sizes: all(".key .v", at("r")),
        crosses: all(".key .c", e => e.getClientRects().length > 0),
        levels: all(".blk .m", height),
        shown: all(".blk .m", e => e.getClientRects().length > 0),
        outputs: all(".blk .o", height),
        band: all(".band", e => [at("x")(e), at("width")(e)])[0],
    };
}"""


def assert_row(page, step, order=(0, 1, 2, 3), masked=(1,)):
    """The table, the picture and the numbers kept are those of torch's softmax."""
    read = page.locator(ROW).first.evaluate(READ_ROW)
    order, masked = list(order), list(masked)
    scores, values = tensor(json.loads(read["scores"])), tensor(json.loads(read["values"]))
    scores[masked] = -torch.inf
    scores, values = scores[order].flatten(), values[order].flatten()
    want = []
    for keys in (0, 3, 6, 9, 12):
        seen = torch.cat([scores[:keys], torch.tensor([-torch.inf], dtype=torch.float64)])
        lse, top = torch.logsumexp(seen, dim=0), seen.max()
        o = (torch.exp(scores[:keys] - lse) * values[:keys]).nan_to_num(0.0).sum()
        want.append([top, torch.exp(lse - top).nan_to_num(0.0), o, lse])
    want = torch.tensor(want, dtype=torch.float64)

    def close(found, expected, atol):
        found = torch.as_tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)

    assert json.loads(read["order"]) == order and int(read["step"]) == step
    assert json.loads(read["masked"]) == [b in masked for b in range(4)]
    close(tensor(json.loads(read["trace"])), want[:, :3], 1e-9)
    names = [f"block {block + 1}" for block in order]
    assert read["names"] == ["start", *names] and read["labels"] == names
    close(tensor(read["table"])[: step + 1], want[: step + 1], 0.0051)
    hidden = page.locator(f"{ROW} tbody td:visible").count()
    assert hidden == 4 * (step + 1)  # what is not read yet does not show

    forbidden, count = scores == -torch.inf, 3 * step
    height = scores.masked_fill(forbidden, 0.0)
    close([y for y, _ in read["bars"]], 96 - 22 * height.clamp(min=0), 0.051)
    close([h for _, h in read["bars"]], 22 * height.abs(), 0.051)
    assert read["crosses"] == forbidden.tolist()
    top, total, _, lse = want[step]
    weights = torch.exp(scores - top).nan_to_num(0.0)
    weights[count:] = 0.0
    close(weights.sum(), total, 1e-9)
    close(read["weights"], 56 * weights, 0.051)
    close(read["bases"], torch.full((12,), 206.0), 0.11)
    close(read["dots"], 316 - 7.5 * values, 0.051)
    close(read["sizes"], 3 + 7 * (weights / total.clamp(min=1e-9)).sqrt(), 0.051)
    assert read["shown"] == [k < step and bool(want[k + 1, 0].isfinite()) for k in range(4)]
    for k in range(step):
        if read["shown"][k]:
            close(read["levels"][k], 96 - 22 * want[k + 1, 0], 0.051)
        close(read["outputs"][k], 316 - 7.5 * want[k + 1, 2], 0.051)
    assert read["band"] == ([34 + 75 * (step - 1), 75] if step else [34, 0])


def said(page):
    return page.locator(f"{ROW} .say").text_content()


def test_row_step_by_step(open_page):
    page = open_page("online_softmax")
    assert_row(page, 4)
    press(page, "start over")
    assert_row(page, 0)
    assert said(page) == "Nothing is read yet: no maximum, an empty sum, no output."
    for step, words in enumerate(
        (
            "Block 1 is the first with a key that counts: the state is that of the block.",
            "Block 2 is masked: its m is −∞, its l is 0. Nothing changes.",
            "Block 3 raises m by 1.20: all that was kept shrinks by the factor "
            "exp(−1.20) = 0.30.",
            "Block 4 does not raise m: its own m is 1.90, so it enters with the factor "
            "exp(−0.50) = 0.61.",
        ),
        start=1,
    ):
        press(page, "next block")
        assert_row(page, step)
        assert said(page) == words
    press(page, "back")
    assert_row(page, 3)
    press(page, "next block", times=2)  # past the end, it starts again
    assert_row(page, 0)
    press(page, "back")
    assert_row(page, 4)


def test_row_in_any_order(open_page):
    page, ends = open_page("online_softmax"), []
    for order in ((3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1), (0, 1, 2, 3)):
        press(page, "other order")
        assert_row(page, 4, order)
        ends.append(page.locator(f"{ROW} tr.now td").all_text_contents())
        press(page, "start over")
        for step in range(1, 5):
            press(page, "next block")
            assert_row(page, step, order)
    assert all(end == ends[0] for end in ends)


def test_row_with_other_masks_down_to_none(open_page):
    page, masked = open_page("online_softmax"), {1}
    for block in (0, 1, 2, 1, 3):  # at the end, every block is masked
        page.get_by_role("checkbox", name=str(block + 1)).click()
        masked ^= {block}
        assert_row(page, 4, masked=masked)
    assert masked == {0, 1, 2, 3}
    assert said(page) == "Block 4 is masked: its m is −∞, its l is 0. Nothing changes."
    assert page.locator(f"{ROW} tr.now td").all_text_contents() == [
        "−∞",
        "0.00",
        "0.00",
        "−∞",
    ]
    for step in range(4):
        press(page, "next block")
        assert_row(page, step, masked=masked)


def test_row_by_keyboard(open_page):
    page = open_page("online_softmax")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # start over
    assert_row(page, 0)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")  # next block
    assert_row(page, 1)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")  # mask the first
    assert_row(page, 1, masked=(0, 1))
