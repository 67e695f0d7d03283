"""The mesh of sixteen ranks, the figure to touch of chapter 25, by the package's cuts."""

import torch

from attnlib import parallel
from touch import close, numbers

RANKS, TEXTS, TOKENS, HEADS, WIDTH = 16, 16, 8192, 32, 4096
AXES = {"data": "copies", "context": "context", "tensor": "tensor"}


def ends(part):
    return part[0].item(), len(part)


def assert_mesh(figure, context, tensor, rank):
    """The rank's place, parts and groups are those of a mesh in PyTorch's order."""
    read = figure.read(
        **{"has": ".has@x,width", "also": ".also@x,width", "in_MB": ".sent"},
        **{"buttons": ".mesh button@aria-pressed,data-in", "talks": ".with"},
    )
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
    for name, part in parts.items():
        assert getattr(read, name) == [*ends(part)], name
    for (name, ranks), said in zip(groups.items(), read.talks, strict=True):
        others = [r for r in ranks.flatten().tolist() if r != rank]
        assert getattr(read, name) == numbers(said) == others
    for r, (pressed, within) in enumerate(read.buttons):
        assert pressed == str(r == rank).lower()
        assert within.split() == [
            n for n, group in AXES.items() if r in getattr(read, group)
        ]

    rows, copies = len(own) * len(tokens), data * context
    sent = [
        (copies - 1) / copies * 12 * WIDTH**2 / tensor,
        bytes_by_heads(context, len(tokens), len(mine), WIDTH // HEADS) * len(own),
        2 * 2 * (tensor - 1) / tensor * rows * WIDTH,
    ]
    close(read.sent, sent, 1)
    close(read.in_MB, [x / 1e6 for x in sent], 0.0501)
    wholes = TEXTS, TOKENS, HEADS, 4 * WIDTH, HEADS
    shown = zip((own, tokens, now, columns, mine), wholes, strict=True)
    bars = [[272 * x / whole for x in ends(part)] for part, whole in shown]
    close(read.has + read.also, [[72 + left, width] for left, width in bars], 0.051)
    told = [rank, data, context, tensor]
    for part in (own, tokens, columns, now):
        told += dict.fromkeys(part[[0, -1]].tolist())
    assert numbers(read.say.replace(",", "")) == told


def bytes_by_heads(ranks, shard, heads, d_k):
    """Numbers that a rank sends for one text: eq-exchange-bytes with a byte a number."""
    return (ranks - 1) / ranks * 2 * shard * d_k * (heads + heads)


def traded(rank, heads):
    x = torch.zeros(1, heads, 3, 4, dtype=torch.float64)
    with parallel.Traffic() as traffic:
        parallel.head_attention(x, x, x)
    return traffic.by_name["all_to_all"]


def test_the_numbers_traded_are_counted():
    for ranks in (2, 4):
        expected = 8 * bytes_by_heads(ranks, 3, 4, 4)
        assert parallel.run(traded, ranks, 4) == [expected] * ranks


def test_mesh_against_the_cuts(open_figure):
    figure = open_figure("rank_mesh")
    assert_mesh(figure, 2, 2, 5)
    figure.root.get_by_role("button", name="rank 7").press("Enter")
    assert_mesh(figure, 2, 2, 7)
    figure.root.get_by_label("4", exact=True).first.check()
    assert_mesh(figure, 4, 2, 7)
    for context in (1, 2, 4):
        for tensor in (1, 2, 4):
            figure.set(context=context, tensor=tensor)
            for rank in (0, 6, 11, 15):
                figure.click(f".mesh button[aria-label='rank {rank}']")
                assert_mesh(figure, context, tensor, rank)
