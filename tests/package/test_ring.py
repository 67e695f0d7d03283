"""`ring_attention` on 1, 2 and 4 ranks: the attention of the whole text, with gradients.

Each test is one call of `run`; every rank compares its part with `flash_attention` for the
whole text, which it computes for itself.
"""

import copy
import multiprocessing
import threading

import pytest
import torch
import torch.distributed as dist

from attnlib import (
    FlashAttention,
    KVCache,
    MultiHeadAttention,
    parallel,
    refuse_bad_inputs,
)
from attnlib.base import BaseAttention
from attnlib.parallel import (
    HeadAttention,
    RingAttention,
    places,
    ring_attention,
    shard_positions,
)
from attnlib.testing import check_attention
from drawn import attention, close, leaves, normal, small_model

RANKS = (1, 2, 4)
ORDERS = {1: places.ORDERS[:1], 2: places.ORDERS, 4: places.ORDERS[1:2]}
TEXT = 16


def compared(rank, order, **case):
    """Output, log-sum-exp and all gradients of a rank's part, and of the whole text."""
    case = {"queries": TEXT, "kv_heads": 4} | case
    queries, kv_heads = case.pop("queries"), case.pop("kv_heads")
    documents, sink, mask = (case.pop(x, False) for x in ("documents", "sink", "mask"))
    ranks = dist.get_world_size()
    shapes = (4, queries, 6), (kv_heads, TEXT, 6), (kv_heads, TEXT, 5)
    whole = [normal(2, *shape, seed=i) for i, shape in enumerate(shapes)]
    weight, slope = normal(2, 4, queries, 5, seed=4), normal(2, 4, queries, seed=5)
    texts = torch.arange(TEXT) * 3 // TEXT
    last = torch.arange(TEXT - queries, TEXT)  # where the queries stand; −8 is before all
    same = (texts[last][:, None] == texts) if documents else None
    sinks = normal(4, 1, seed=6, grad=True) if sink else None
    added = normal(4, queries, TEXT, seed=7, grad=True) if mask else None
    inputs, allowed = leaves(whole), same if added is None else added
    if mask and documents:
        allowed = added.masked_fill(~same, -torch.inf)
    right = attention(*inputs, allowed, sink=sinks, **case)
    seen = right[1] != -torch.inf
    loss = (right[0] * weight).sum() + (right[1] * slope)[seen].sum()
    truth = torch.autograd.grad(loss, [x for x in (*inputs, added, sinks) if x is not None])

    keys = shard_positions(TEXT, ranks, rank, order)
    rows = shard_positions(queries, ranks, rank, order)
    mine = leaves(x[..., p, :] for x, p in zip(whole, (rows, keys, keys), strict=True))
    part = leaves([added[:, rows]])[0] if mask else None
    own = leaves([sinks])[0] if sink else None
    positions = None if order == "contiguous" else (rows + TEXT - queries, keys)
    if order == "striped" and queries == TEXT:
        positions = keys  # one row for both
    cut = (texts[rows + TEXT - queries], texts[keys]) if documents else None
    output, lse = ring_attention(
        *mine, positions, documents=cut, sink=own, mask=part, return_lse=True, **case
    )
    seen = lse != -torch.inf
    loss = (output * weight[..., rows, :]).sum() + (lse * slope[..., rows])[seen].sum()
    found = torch.autograd.grad(loss, [x for x in (*mine, part, own) if x is not None])
    close([output, lse], [right[0][..., rows, :], right[1][..., rows]], rtol=1e-10)
    for x, y, p in zip(found, truth, (rows, keys, keys), strict=False):
        close(x, y[..., p, :], rtol=1e-10)
    if mask:
        close(found[3], truth[3][:, rows], rtol=1e-10)
    if sink:
        total = found[-1].clone()
        dist.all_reduce(total)
        close(total, truth[-1], rtol=1e-10)


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "both sides": {"window": 3},
    "documents": {"causal": True, "documents": True},
    "sink": {"causal": True, "window": 4, "sink": True, "scale": 0.7},
    "grouped": {"causal": True, "kv_heads": 2, "sink": True},
    "shared": {"kv_heads": 1, "documents": True, "mask": True},
    "mask": {"mask": True, "window": 6},
    "fewer queries": {"queries": 8, "causal": True, "window": 9},
    "more queries": {"queries": 24, "causal": True, "kv_heads": 2},
}
EVERYTHING = {"causal": True, "documents": True, "sink": True, "mask": True}
CASES["all"] = EVERYTHING | {"queries": 8, "window": 7, "kv_heads": 2}


def all_cases(rank, tile):
    places.TILE, places.MIXED = tile, max(2, tile // 4)
    for order in ORDERS[dist.get_world_size()]:
        for name, case in CASES.items():
            try:
                compared(rank, order, **case)
            except AssertionError as error:
                raise AssertionError(f"{order}, {name}: {error}") from error


@pytest.mark.parametrize(("ranks", "tile"), ((1, 3), (2, 1024), (4, 8)))
def test_the_ring_is_the_attention_of_the_whole_text(ranks, tile):
    parallel.run(all_cases, ranks, tile)
    assert not multiprocessing.active_children()


# The contract, for inputs that are spread over the ranks


class Sharded(BaseAttention):
    """Attention of whole tensors, of which each rank computes its share by the ring."""

    def __init__(self, causal=False, window=None):
        super().__init__()
        self.causal, self.window = causal, window

    def forward(self, query, key, value, mask=None):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        refuse_bad_inputs(query, key, value, mask)
        n, m = query.shape[-2], key.shape[-2]
        rows, cols = (torch.arange(-(-x // ranks) * ranks) for x in (n, m))
        i, j = (x.chunk(ranks)[rank] if len(x) else x for x in (rows, cols))
        q, k, v = (
            parallel.replicate(pad(x, len(p)))[..., own, :]
            for x, p, own in ((query, rows, i), (key, cols, j), (value, cols, j))
        )
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], n, m) if mask.dim() else mask.expand(n, m)
            mask = pad(pad(mask, len(rows)).mT, len(cols)).mT[..., i, :]
        output = ring_attention(
            q, k, v, (i + m - n, j), causal=self.causal, window=self.window, mask=mask,
            documents=((i < 0).long(), (j >= m).long()),
        )  # fmt: skip
        whole = output.new_zeros(*output.shape[:-2], len(rows), output.shape[-1])
        return parallel.add_up(whole.index_copy(-2, i, output))[..., :n, :], None


def pad(x, tokens):
    more = (*x.shape[:-2], tokens - x.shape[-2], x.shape[-1])
    return torch.cat([x, x.new_zeros(more)], dim=-2)


def contract(rank):
    options = {"causal": True, "window": 3}
    check_attention(lambda: Sharded(**options), leading=((2,),), dtypes=(torch.bfloat16,))


def test_the_sharded_form_keeps_the_contract(as_shipped):
    parallel.run(contract, 3)


# What travels


def counted(rank, window, dtype):
    ranks, tokens, shapes = dist.get_world_size(), 6, ((4, 6, 8), (2, 6, 8), (2, 6, 3))
    mine = [normal(*x, seed=rank, dtype=dtype, grad=True) for x in shapes]
    with parallel.Traffic() as forward:
        output = ring_attention(*mine, causal=True, window=window)
    with parallel.Traffic() as backward:
        output.sum().backward()
    hops = ranks - 1 if window is None else min(ranks - 1, -(-(window - 1) // tokens))
    numbers = 2 * tokens * (8 + 3)
    size = torch.finfo(dtype).bits // 8
    wide = max(size, 4)
    assert forward.by_name.get("shift", 0) == hops * numbers * size
    home = (hops + 1) * numbers * wide if hops else 0
    assert backward.by_name.get("shift", 0) == hops * numbers * size + home
    assert all(x.grad.dtype == dtype for x in mine) and output.dtype == dtype


def all_counted(rank):
    for dtype in (torch.float64, torch.bfloat16):
        for window in (None, 1, 2, 7, 8, 14):
            counted(rank, window, dtype)


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_are_as_predicted(ranks):
    parallel.run(all_counted, ranks)


def in_halves(rank):
    halves = [normal(2, 32, 16, seed=10 * rank + i, dtype=torch.bfloat16) for i in range(3)]
    exact = ring_attention(*(x.double() for x in halves), causal=True)
    found = ring_attention(*halves, causal=True)
    return (found == exact.to(torch.bfloat16)).double().mean().item()


def test_half_precision_is_rounded_once():
    assert min(parallel.run(in_halves, 4)) > 0.999


# Bad input: one error, on every rank


def last(rank, ranks, **change):
    return change if rank == ranks - 1 else {}


BAD = {
    "key: expected": lambda r, p, c: last(r, p, key=c["key"][0]),
    "value: expected 6 tokens": lambda r, p, c: last(r, p, value=c["value"][:, :5]),
    "key: expected torch.float64": lambda r, p, c: last(r, p, key=c["key"].float()),
    "query: expected a floating-point": lambda r, p, c: last(r, p, query=[1, 2]),
    "causal: expected True": lambda r, p, c: last(r, p, causal=1),
    "window: expected None": lambda r, p, c: last(r, p, window=0),
    "expected shape (6,)": lambda r, p, c: last(r, p, positions=torch.arange(5)),
    "positions: expected a tensor of int":
        lambda r, p, c: last(r, p, positions=torch.arange(6.0)),
    "documents: expected one tensor or two": lambda r, p, c: last(r, p, documents=[]),
    "sink: expected a shape": lambda r, p, c: last(r, p, sink=torch.zeros(3, 1)),
    "sink: expected a floating": lambda r, p, c: last(r, p, sink=1.0),
    "mask: expected a shape": lambda r, p, c: last(r, p, mask=torch.ones(6, 7) > 0),
    "since they are columns of mask":
        lambda r, p, c: {"positions": torch.arange(6), "mask": torch.ones(6, 6 * p) > 0},
    "got one twice": lambda r, p, c: {"positions": torch.arange(6), "causal": True},
    "rank 0 has":
        lambda r, p, c: last(r, p, query=learning(c), sink=torch.zeros(4, 1)),
    "mask = torch.bool":
        lambda r, p, c: {"mask": torch.ones(6, 6 * p).double()}
        | last(r, p, mask=torch.ones(6, 6 * p) > 0),
    "window = 3": lambda r, p, c: last(r, p, window=3),
    "causal = True": lambda r, p, c: last(r, p, causal=True),
    "scale = 0.5": lambda r, p, c: last(r, p, scale=0.5),
    "positions = None": lambda r, p, c: last(r, p, positions=None),
    "mask = None": lambda r, p, c: last(r, p, mask=torch.ones(6, 6 * p) > 0),
    "key = torch.float64 (2, 5, 8)": lambda r, p, c: last(
        r, p, key=c["key"][:, :5], value=c["value"][:, :5],
        positions=(c["positions"], c["positions"][:5]),
    ),
    "torch.float32": lambda r, p, c: last(r, p, **tensors(c, torch.Tensor.float)),
    "requires_grad = True": lambda r, p, c: last(r, p, query=learning(c)),
    "expected device cpu":
        lambda r, p, c: last(r, p, **tensors(c, lambda x: x.to("meta"))),
}  # fmt: skip


def learning(call):
    return call["query"].clone().requires_grad_()


def tensors(call, change):
    return {name: change(call[name]) for name in ("query", "key", "value")}


def all_refused(rank):
    ranks = dist.get_world_size()
    for message, change in BAD.items():
        shapes = {"query": (4, 6, 8), "key": (2, 6, 8), "value": (2, 6, 3)}
        call = {name: normal(*shape) for name, shape in shapes.items()}
        call |= {"positions": torch.arange(6) + 6 * rank}
        call |= change(rank, ranks, call)
        with pytest.raises((TypeError, ValueError)) as error:
            ring_attention(call.pop("query"), call.pop("key"), call.pop("value"), **call)
        assert message in str(error.value)


@pytest.mark.parametrize("ranks", (2, 4))
def test_a_refusal_is_raised_on_every_rank(ranks, as_shipped):
    parallel.run(all_refused, ranks)
    assert not multiprocessing.active_children()


def shared_only_if_wanted(rank):
    query, key = normal(4, 6, 8), normal(2, 6, 8)
    for each in (RingAttention(), HeadAttention()):
        expected, _ = each(query, query, query)
        found, _ = each(query, query, query, enable_gqa=False)
        assert torch.equal(found, expected)
        for wanted in (False, rank != 0):  # by all ranks, or by all but one
            with pytest.raises(ValueError, match="key: expected"):
                each(query, key, key, enable_gqa=wanted)


def test_heads_share_keys_only_if_wanted(as_shipped):
    parallel.run(shared_only_if_wanted, 2)
    for each in (RingAttention(), HeadAttention()):
        with pytest.raises(ValueError, match="key: expected"):
            each(normal(4, 6, 8), *normal(2, 2, 6, 8), enable_gqa=False)


def test_shards_of_a_text(as_shipped):
    for order, rows in {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }.items():
        assert [shard_positions(8, 2, r, order).tolist() for r in range(2)] == rows
        assert shard_positions(5, 1, 0, order).tolist() == list(range(5))
    for message, given in {
        "order: expected one of": (8, 2, 0, "zigzg"),
        "rank: expected 0 to 1": (8, 2, 2, "striped"),
        "tokens: expected a multiple of 4": (6, 2, 0, "zigzag"),
        "tokens: expected a multiple of 2": (7, 2, 0, "contiguous"),
    }.items():
        with pytest.raises(ValueError, match=message):
            shard_positions(*given)


@pytest.mark.parametrize("given", ({"causal": 1}, {"window": 1.5}))
def test_the_class_refuses(given, as_shipped):
    with pytest.raises(TypeError, match=next(iter(given))):
        RingAttention(**given)
    with pytest.raises(ValueError, match="order"):
        RingAttention(order="")


# As a part of a layer


def all_layers(rank):
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    make = {"embed_dim": 8, "num_heads": 4, "num_kv_heads": 2}
    for order in places.ORDERS:
        heads = RingAttention(causal=True, window=6, order=order)
        layer = MultiHeadAttention(**make, attention=heads).double()
        plain = FlashAttention(causal=True, window=6)
        whole = MultiHeadAttention(**make, attention=plain).double()
        whole.load_state_dict(layer.state_dict())
        x, mine = normal(2, TEXT, 8), shard_positions(TEXT, ranks, rank, order)
        right, _ = whole(x, need_weights=False)
        found, _ = layer(x[:, mine], need_weights=False)
        close(found, right[:, mine], rtol=1e-10)
        (found**2).sum().backward()
        (right**2).sum().backward()
        same_gradients(layer, whole)


def same_gradients(layer, whole):
    """Those of all ranks, added up, are those of the whole."""
    for part, full in zip(layer.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(part.grad)
        close(part.grad, full.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_layer_of_heads_on_every_rank(ranks):
    parallel.run(all_layers, ranks)


def all_models(rank, window, order, positions):
    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)))
    sizes = {"context_length": TEXT, "num_heads": 4, "num_kv_heads": 2}
    sizes["positions"] = positions
    heads = RingAttention(causal=True, window=window, order=order, group=group)
    model = small_model(**sizes, attention=heads).double()
    assert all(block.attention.attention.group is group for block in model.blocks)
    plain = FlashAttention(causal=True, window=window)
    whole = small_model(**sizes, attention=plain).double()
    ids = torch.randint(11, (2, TEXT), generator=torch.Generator().manual_seed(1))
    weight, mine = normal(2, TEXT, 11, seed=2), shard_positions(TEXT, ranks, rank, order)
    found, right = model(ids[:, mine]), whole(ids)
    close(found, right[:, mine], rtol=1e-10)
    (found * weight[:, mine]).sum().backward()
    (right * weight).sum().backward()
    same_gradients(model, whole)
    if positions == "rotary":
        tokens, layer = normal(2, TEXT, 16, seed=3), model.blocks[0].attention
        right, _ = whole.blocks[0].attention(tokens)
        found, _ = layer(tokens[:, mine])  # a layer by itself asks, too
        close(found, right[:, mine], rtol=1e-10)
        with pytest.raises(ValueError, match="key: expected None beside rotary and a text"):
            layer(tokens[:, mine], tokens[:, mine] + 1)
        with pytest.raises(ValueError, match="cache: expected None beside rotary where"):
            layer(tokens[:, mine], cache=KVCache(TEXT))
    with pytest.raises(ValueError, match="cache, padding: expected None"):
        model(ids[:, mine], cache=[KVCache(TEXT) for _ in model.blocks])
    with pytest.raises(ValueError, match="cache, padding: expected None"):
        model(ids[:, mine], padding=[1, 0])
    with pytest.raises(ValueError, match="ids: expected the whole text"):
        model.generate(ids[:, mine], 1)
    if window is None:
        with pytest.raises(ValueError, match=f"on all ranks together, got {2 * TEXT}"):
            model(ids.repeat(1, 2)[:, : 2 * len(mine)])


@pytest.mark.parametrize("positions", ("learned", "sinusoidal", "rotary"))
@pytest.mark.parametrize("order", places.ORDERS)
def test_a_model_on_every_rank(order, positions):
    parallel.run(all_models, 2, None if order == "striped" else 6, order, positions)


def test_a_copy_has_the_group_and_nothing_else(as_shipped):
    group = threading.Lock()  # can't be copied, as a group
    heads = RingAttention(True, 0.5, window=3, order="striped").eval()
    heads.group, heads.said = group, [1]
    twin = copy.deepcopy(heads)
    assert twin.group is group and not twin.training and type(twin) is RingAttention
    assert (twin.causal, twin.scale, twin.window, twin.order) == (True, 0.5, 3, "striped")
    twin.said.append(2)
    assert heads.said == [1]


def one_without_grad(rank):
    inputs = [normal(4, 6, 8, seed=i, grad=True) for i in range(3)]
    with torch.set_grad_enabled(rank > 0), pytest.raises(ValueError, match="requires_grad"):
        ring_attention(*inputs, causal=True)
    sink = torch.zeros(4, 1, dtype=torch.float64, requires_grad=rank > 0)
    plain = [x.detach() for x in inputs]
    ring_attention(*plain, sink=sink).sum()  # a sink does not travel: no backward hops
    output = ring_attention(*inputs, causal=True)
    (output.sum() if rank else (output * 0).sum()).backward()


def test_a_rank_without_gradients(as_shipped):
    parallel.run(one_without_grad, 2)


@pytest.mark.parametrize("order", ("zigzag", "striped"))
def test_tiles_that_are_cut_are_halved(order):
    """In zigzag, half of the pairs of a later step; in stripes, what a triangle takes."""
    ranks, tokens, rule = 4, 2048, places.Rule(causal=True)
    shards = [shard_positions(ranks * tokens, ranks, r, order) for r in range(ranks)]
    every = torch.stack([torch.stack([x, torch.zeros_like(x)]) for x in shards])
    for rank in range(ranks):
        rest = (ranks - 1, rank, None, 1.0, torch.device("cpu"))
        plan = places.RingPlan(rule, every[rank], every, *rest)
        for step in range(1, ranks):
            tiles = list(plan.tiles(step, None))
            found = sum((i.stop - i.start) * (j.stop - j.start) for i, j, _, _ in tiles)
            more = tokens * places.MIXED // 2 if order == "striped" else 0
            assert found == tokens**2 // 2 + more


def test_hops_of_many_ranks():
    rule, row = places.Rule(causal=True, window=3000), torch.arange(1024 * 1024)
    shards = row.view(1024, 1, 1024)
    every = torch.cat([shards, torch.zeros_like(shards)], dim=1)
    assert places.hops_needed(rule, every, every) == 3
    assert places.hops_needed(rule, every, every[:, :, :0]) == 0
