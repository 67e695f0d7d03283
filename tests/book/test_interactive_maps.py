"""The figures to touch of chapters 4 and 5, in a real browser, against torch."""

import pytest
import torch

# Chapter 5: what one mixture of two numbers tells


PLANE = "#two-numbers"
READ_PLANE = r"""figure => {
    const numbers = e => e.match(/-?\d+(\.\d+)?/g).map(Number);
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const path = e => numbers(e.getAttribute("d"));
    const u = figure.querySelector(".u");
    return {
        at: numbers(figure.querySelector(".pt").getAttribute("transform")),
        guess: numbers(figure.querySelector(".guess").getAttribute("transform")),
        error: ["x1", "y1", "x2", "y2"].map(n => +u.getAttribute(n)),
        lines: all(".l:not(.off)", path),
        directions: all(".d:not(.off)", path),
        say: figure.querySelector(".say").textContent.replaceAll("\u2212", "-"),
    };
}"""


def read_plane(page):
    return page.locator(PLANE).first.evaluate(READ_PLANE)


def assert_plane(read, pair, *shares):
    """The lines hold the pairs with its mixtures; the guess is the least-squares one."""
    size = {"dtype": torch.float64}
    pair, heads = torch.tensor(pair, **size), torch.tensor([[p, 0.9 - p] for p in shares])
    heads = heads.to(torch.float64)
    guess = torch.linalg.pinv(heads, rtol=1e-6) @ (heads @ pair)
    place = lambda x: [160 + 25 * x[0].item(), 160 - 25 * x[1].item()]  # noqa: E731
    near = {"abs": 0.12}
    assert read["at"] == pytest.approx(place(pair), **near)
    assert read["guess"] == pytest.approx(place(guess), **near)
    assert read["error"] == pytest.approx(place(guess) + place(pair), **near)
    assert len(read["lines"]) == len(read["directions"]) == len(heads)
    for head, line, direction in zip(heads, read["lines"], read["directions"], strict=True):
        ends = torch.tensor(line, **size).view(2, 2)
        ends = (ends - 160) / torch.tensor([25.0, -25.0], **size)
        assert torch.allclose(ends @ head, head @ pair, atol=0.02)
        assert (ends[0] - ends[1]).norm() > 20
        end = torch.tensor(direction[2:], **size) - 160
        assert torch.allclose(end[0] * head[1], -end[1] * head[0], atol=0.1)
    assert f"{(heads @ pair)[0]:.2f}" in read["say"]


def test_plane_measures_one_direction_a_head(open_page):
    page = open_page("two_numbers", copies=2)
    assert_plane(read_plane(page), [3.0, 5.0], 0.6)
    assert "The best guess is (4.4, 2.2), at the distance 3.1." in read_plane(page)["say"]
    page.locator(f"{PLANE} .pt").first.focus()
    for key, pair in (
        ("ArrowLeft", [2.9, 5.0]),
        ("Shift+ArrowDown", [2.9, 4.0]),
        ("Shift+ArrowRight", [3.9, 4.0]),
        ("ArrowUp", [3.9, 4.1]),
    ):
        page.keyboard.press(key)
        assert_plane(read_plane(page), pair, 0.6)
    for share in (0.0, 0.45, 0.9):
        page.get_by_role("slider", name="weight of a in head 1").first.fill(str(share))
        assert_plane(read_plane(page), pair, share)
    page.get_by_role("checkbox", name="a second head").first.check()
    assert_plane(read_plane(page), pair, 0.9, 0.2)
    assert "cross at one point, (3.9, 4.1)" in read_plane(page)["say"]
    page.get_by_role("slider", name="weight of a in head 2").first.fill("0.9")
    assert_plane(read_plane(page), pair, 0.9, 0.9)
    assert "the second adds nothing" in read_plane(page)["say"]
    page.get_by_role("button", name="reset").first.click()
    assert_plane(read_plane(page), [3.0, 5.0], 0.6)
    page.get_by_role("slider", name="weight of a in head 2").first.fill("0.5")
    assert_plane(read_plane(page), [3.0, 5.0], 0.6, 0.5)  # it calls the second head
    second = page.locator(PLANE).last.evaluate(READ_PLANE)
    assert_plane(second, [3.0, 5.0], 0.6)  # the other copy has not moved


def test_plane_drags(open_page):
    page = open_page("two_numbers")
    box = page.locator(f"{PLANE} svg").bounding_box()
    scale = box["width"] / 320
    page.mouse.move(box["x"] + 235 * scale, box["y"] + 35 * scale)
    page.mouse.down()
    page.mouse.move(box["x"] + 110 * scale, box["y"] + 210 * scale, steps=3)
    assert_plane(read_plane(page), [-2.0, -2.0], 0.6)
    page.mouse.move(2000, -500)
    page.mouse.up()
    assert_plane(read_plane(page), [6.0, 6.0], 0.6)


# Chapter 4: a grid and its image


GRID = "#grid-image"
READ_GRID = r"""figure => {
    const numbers = e => e.match(/-?\d+(\.\d+)?/g).map(Number);
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const circle = css => figure.querySelector(css);
    return {
        lines: numbers(circle(".m").getAttribute("d")),
        arrows: all(".arrow", e => numbers(e.getAttribute("d"))),
        handles: all(".h", e => numbers(e.getAttribute("transform"))),
        token: ["cx", "cy"].map(n => +circle(".x").getAttribute(n)),
        image: ["cx", "cy"].map(n => +circle(".z").getAttribute(n)),
        table: all("td", e => +e.textContent.replace("\u2212", "-")),
        say: circle(".say").textContent,
    };
}"""


def read_grid(page):
    return page.locator(GRID).first.evaluate(READ_GRID)


def assert_grid(read, rows):
    """Lines, arrows, token and words are those of the matrix, by torch."""
    W, token = torch.tensor(rows), torch.tensor([0.5, 1.0])
    ticks = [-1, -0.5, 0, 0.5, 1]
    ends = [[(t, -1), (t, 1), (-1, t), (1, t)] for t in ticks]
    place = torch.tensor([160, 160]) + torch.tensor([75, -75]) * (
        torch.tensor(ends, dtype=W.dtype).view(-1, 2) @ W
    )
    corner = torch.tensor([160.0, 160.0])
    heads = corner + torch.tensor([75.0, -75.0]) * W
    dot = corner + torch.tensor([75.0, -75.0]) * (token @ W)
    table = torch.stack([*W, token, token @ W])
    for got, want, atol in (
        (read["lines"], place.flatten(), 0.06),
        (read["arrows"], torch.cat([corner.expand(2, 2), heads], dim=1), 0.06),
        (read["handles"], heads, 0.06),
        (read["token"], corner + torch.tensor([75.0, -75.0]) * token, 0.06),
        (read["image"], dot, 0.06),
        (read["table"], table.flatten(), 0.006),
    ):
        assert torch.allclose(torch.tensor(got, dtype=want.dtype), want, rtol=0, atol=atol)
    rank = torch.linalg.matrix_rank(W).item()
    assert read["say"].startswith(f"Rank {rank}:")
    if rank == 2:
        assert f" {torch.linalg.det(W).abs():.2f} times" in read["say"]
        assert ("turned over" in read["say"]) == (torch.linalg.det(W) < 0).item()


def test_grid_follows_its_rows(open_page):
    page = open_page("grid_image", copies=2)
    for name, rows in (
        ("identity", [[1.0, 0.0], [0.0, 1.0]]),
        ("quarter turn", [[0.0, 1.0], [-1.0, 0.0]]),
        ("rank 1", [[1.0, 0.5], [-0.6, -0.3]]),
        ("reset", [[1.0, 0.4], [-0.5, 0.9]]),
    ):
        page.get_by_role("button", name=name).first.click()
        assert_grid(read_grid(page), rows)
    page.get_by_role("slider", name="Row 2 of W").first.focus()
    for key, row in (
        ("ArrowLeft", [-0.55, 0.9]),
        ("Shift+ArrowDown", [-0.55, 0.4]),
        ("Shift+ArrowRight", [-0.05, 0.4]),
        ("ArrowUp", [-0.05, 0.45]),
    ):
        page.keyboard.press(key)
        assert_grid(read_grid(page), [[1.0, 0.4], row])
    assert_grid(page.locator(GRID).last.evaluate(READ_GRID), [[1.0, 0.4], [-0.5, 0.9]])
    box = page.locator(f"{GRID} svg").first.bounding_box()
    scale = box["width"] / 320
    page.mouse.move(box["x"] + 235 * scale, box["y"] + 130 * scale)
    page.mouse.down()
    page.mouse.move(box["x"] + 85 * scale, box["y"] + 160 * scale, steps=3)
    assert_grid(read_grid(page), [[-1.0, 0.0], [-0.05, 0.45]])  # turned over
    page.mouse.move(box["x"] + 160 * scale, box["y"] + 160 * scale, steps=3)
    page.mouse.up()
    assert_grid(read_grid(page), [[0.0, 0.0], [-0.05, 0.45]])
