"""The row that settles, the figure to touch of chapter 13, in a browser, against torch."""

import numpy as np
import torch

from touch import close, numbers, tensor

INF = torch.inf
STEPS = (  # the words after each block
    "Nothing is read yet: no maximum, an empty sum, no output.",
    "Block 1 is the first with a key that counts: the state is that of the block.",
    "Block 2 is masked: its m is −∞, its l is 0. Nothing changes.",
    "Block 3 raises m by 1.20: all that was kept shrinks by the factor exp(−1.20) = 0.30.",
    "Block 4 does not raise m: its own m is 1.90, so it enters with the factor "
    "exp(−0.50) = 0.61.",
)


def states(scores, values):
    """After each block, by torch: m, l, O and the log-sum-exp."""
    rows = []
    for keys in (0, 3, 6, 9, 12):
        seen = torch.cat([scores[:keys], tensor([-INF])])
        lse, top = torch.logsumexp(seen, dim=0), seen.max()
        o = (torch.exp(scores[:keys] - lse) * values[:keys]).nan_to_num(0.0).sum()
        rows.append([top, torch.exp(lse - top).nan_to_num(0.0), o, lse])
    return tensor(rows)


def assert_row(figure, step, order=(0, 1, 2, 3), masked=(1,)):
    """The table, the picture and the numbers kept are those of torch's softmax."""
    read = figure.read(
        **{"cells": "tbody td", "seen": "tbody td@visible", "names": "tbody th"},
        **{"labels": ".blk text", "band": ".band@x,width", "bars": ".key .s@y,height"},
        **{"weights": ".key .e@y,height", "dots": ".key .v@cy,r", "outputs": ".blk .o@d"},
        **{"crosses": ".key .c@visible", "levels": ".blk .m@d", "shown": ".blk .m@visible"},
    )
    order, masked = list(order), list(masked)
    scores, values = tensor(read.scores), tensor(read.values)
    scores[masked] = -INF
    scores, values = scores[order].flatten(), values[order].flatten()
    want = states(scores, values)
    assert (read.order, read.step) == (order, step)
    assert read.masked == [block in masked for block in range(4)]
    close(read.trace, want[:, :3], 1e-9)
    names = [f"block {block + 1}" for block in order]
    assert read.names == ["start", *names] and read.labels == names
    close(read.cells[: 4 * (step + 1)], want[: step + 1], 0.0051)
    assert read.seen == [k <= step for k in range(5) for _ in range(4)]

    forbidden = scores == -INF
    height = scores.masked_fill(forbidden, 0.0)
    tops = 96 - 22 * height.clamp(min=0)
    close(read.bars, torch.stack([tops, 22 * height.abs()], dim=1), 0.051)
    assert read.crosses == forbidden.tolist()
    top, total, *_ = want[step]
    weights = torch.exp(scores - top).nan_to_num(0.0)
    weights[3 * step :] = 0.0
    close(weights.sum(), total, 1e-9)
    y, height = np.array(read.weights, float).T
    close(height, 56 * weights, 0.051)
    close(y + height, [206] * 12, 0.11)
    sizes = 3 + 7 * (weights / total.clamp(min=1e-9)).sqrt()
    close(read.dots, torch.stack([316 - 7.5 * values, sizes], dim=1), 0.051)
    assert read.shown == [k < step and bool(want[k + 1, 0].isfinite()) for k in range(4)]
    for k in range(step):
        if read.shown[k]:
            close(numbers(read.levels[k])[1], 96 - 22 * want[k + 1, 0], 0.051)
        close(numbers(read.outputs[k])[1], 316 - 7.5 * want[k + 1, 2], 0.051)
    assert numbers(read.band) == ([34 + 75 * (step - 1), 75] if step else [34, 0])
    return read


def test_row_step_by_step(open_figure):
    figure = open_figure("online_softmax")
    assert_row(figure, 4)
    figure.press("start over")
    for step, words in enumerate(STEPS):
        assert assert_row(figure, step).say == words
        figure.press("next block")
    assert_row(figure, 0)  # past the end, it starts again
    for step in (4, 3):
        figure.press("back")
        assert_row(figure, step)


def test_row_in_any_order(open_figure):
    figure, ends = open_figure("online_softmax"), []
    for order in ((3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1), (0, 1, 2, 3)):
        figure.press("other order")
        ends.append(assert_row(figure, 4, order).cells[-4:])
        figure.press("start over")
        for step in range(1, 5):
            figure.press("next block")
            assert_row(figure, step, order)
    assert all(end == ends[0] for end in ends)


def test_row_with_other_masks_down_to_none(open_figure):
    figure, masked = open_figure("online_softmax"), {1}
    for block in (0, 1, 2, 1, 3):  # at the end, every block is masked
        figure.root.get_by_role("checkbox", name=str(block + 1)).click()
        masked ^= {block}
        read = assert_row(figure, 4, masked=masked)
    assert masked == {0, 1, 2, 3}
    assert read.say == "Block 4 is masked: its m is −∞, its l is 0. Nothing changes."
    assert read.cells[-4:] == ["−∞", "0.00", "0.00", "−∞"]
    for step in range(4):
        figure.press("next block")
        assert_row(figure, step, masked=masked)


def test_row_by_keyboard(open_figure):
    figure = open_figure("online_softmax")
    figure.keys("Tab", "Enter")  # start over
    assert_row(figure, 0)
    figure.keys("Tab", "Tab", "Space")  # next block
    assert_row(figure, 1)
    figure.keys("Tab", "Tab", "Space")  # mask the first
    assert_row(figure, 1, masked=(0, 1))
