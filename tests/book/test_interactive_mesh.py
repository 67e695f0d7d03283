"""The mesh of sixteen ranks, the figure to touch of chapter 25, by the package's cuts."""

import re

import pytest
import torch

from attnlib import parallel

MESH, RANKS = "#rank-mesh", 16
TEXTS, TOKENS, HEADS, WIDTH = 16, 8192, 32, 4096
READ = """figure => {
    const all = (css, f) => [...figure.querySelectorAll(css)].map(f);
    const box = e => [+e.getAttribute("x"), +e.getAttribute("width")];
    const data = {};
    for (const name in figure.dataset)
        if (name !== "lmSuppressShortcuts") data[name] = JSON.parse(figure.dataset[name]);
    return {
        data, has: all(".has", box), also: all(".also", box)[0],
        buttons: all(".mesh button", e => [e.getAttribute("aria-pressed"), e.dataset.in]),
        talks: all(".with", e => e.textContent), sent: all(".sent", e => +e.textContent),
        say: figure.querySelector(".say").textContent.replaceAll(",", ""),
    };
}"""
SET = """(figure, [context, tensor, rank]) => {
    const { elements } = figure.querySelector("form");
    Object.assign(elements.context, {value: context});
    Object.assign(elements.tensor, {value: tensor});
    figure.querySelector("form").dispatchEvent(new Event("input"));
    figure.querySelectorAll(".mesh button")[rank].click();
}"""


def assert_mesh(read, context, tensor, rank):
    """The rank's place, parts and groups are those of a mesh in PyTorch's order."""
    data = RANKS // (context * tensor)
    grid = torch.arange(RANKS).view(data, context, tensor)  # as init_device_mesh does
    a, b, e = (grid == rank).nonzero()[0].tolist()
    groups = {"copies": grid[:, :, e], "context": grid[a, :, e], "tensor": grid[a, b]}
    own = torch.arange(TEXTS).tensor_split(data)[a]
    tokens = torch.arange(TOKENS).chunk(context)[b]
    mine = torch.arange(HEADS).chunk(tensor)[e]
    now = mine.tensor_split(context)[b]
    columns = torch.arange(4 * WIDTH).chunk(tensor)[e]
    parts = {"own": own, "tokens": tokens, "mine": mine, "now": now, "columns": columns}
    found = read["data"]
    for name, part in parts.items():
        assert found[name] == [part[0].item(), len(part)], name
    for (name, ranks), said in zip(groups.items(), read["talks"], strict=True):
        others = [r for r in ranks.flatten().tolist() if r != rank]
        assert found[name] == others
        assert [int(r) for r in re.findall(r"\d+", said)] == others
    for r, (pressed, within) in enumerate(read["buttons"]):
        names = zip(
            ("data", "context", "tensor"), ("copies", "context", "tensor"), strict=True
        )
        assert pressed == str(r == rank).lower()
        assert within.split() == [name for name, group in names if r in found[group]]

    rows, copies = len(own) * len(tokens), data * context
    sent = [
        (copies - 1) / copies * 12 * WIDTH**2 / tensor,
        bytes_by_heads(context, len(tokens), len(mine), WIDTH // HEADS) * len(own),
        2 * 2 * (tensor - 1) / tensor * rows * WIDTH,
    ]
    assert found["sent"] == pytest.approx(sent)
    assert read["sent"] == pytest.approx([x / 1e6 for x in sent], abs=0.0501)
    wholes = TEXTS, TOKENS, HEADS, 4 * WIDTH
    for box, part, whole in zip(
        read["has"], (own, tokens, now, columns), wholes, strict=True
    ):
        expected = [72 + 272 * part[0].item() / whole, 272 * len(part) / whole]
        assert box == pytest.approx(expected, abs=0.051)
    expected = [72 + 272 * mine[0].item() / HEADS, 272 * len(mine) / HEADS]
    assert read["also"] == pytest.approx(expected, abs=0.051)
    ends = [
        x for p in (own, tokens, columns, now) for x in dict.fromkeys(p[[0, -1]].tolist())
    ]
    numbers = [int(number) for number in re.findall(r"\d+", read["say"])]
    assert numbers == [rank, data, context, tensor, *ends]


def bytes_by_heads(ranks, shard, heads, d_k):
    """Numbers that a rank sends for one text: eq-exchange-bytes with a byte a number."""
    return (ranks - 1) / ranks * 2 * shard * d_k * (heads + heads)


def traded(rank, heads):
    x = torch.zeros(1, heads, 3, 4, dtype=torch.float64)
    with parallel.Traffic() as traffic:
        parallel.head_attention(x, x, x)
    return traffic.by_name["all_to_all"]


def test_mesh_against_the_cuts(open_page):
    figure = open_page("rank_mesh").locator(MESH)
    assert_mesh(figure.evaluate(READ), 2, 2, 5)
    for context in (1, 2, 4):
        for tensor in (1, 2, 4):
            for rank in (0, 6, 11, 15):
                figure.evaluate(SET, [context, tensor, rank])
                assert_mesh(figure.evaluate(READ), context, tensor, rank)


def test_the_numbers_traded_are_counted():
    for ranks in (2, 4):
        assert (
            parallel.run(traded, ranks, 4) == [8 * bytes_by_heads(ranks, 3, 4, 4)] * ranks
        )


def test_mesh_by_keyboard(open_page):
    page = open_page("rank_mesh")
    page.get_by_role("button", name="rank 7").press("Enter")
    assert_mesh(page.locator(MESH).evaluate(READ), 2, 2, 7)
    page.get_by_label("4", exact=True).first.check()
    assert_mesh(page.locator(MESH).evaluate(READ), 4, 2, 7)
