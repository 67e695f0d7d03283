"""Heads, layers and copies across 2 and 4 processes: equal to one, or refused by all."""

from functools import partial

import pytest
import torch
import torch.nn.utils.prune
from torch.nn import functional as F

pytest.importorskip("torch.distributed")
if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not built in", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from attnlib import (
    LanguageModel,
    LearnedBiasAttention,
    Projection,
    ScaledDotProductAttention,
    flash_attention,
    parallel,
)
from attnlib.feed_forward import FeedForwardNetwork
from attnlib.parallel import run
from attnlib.parallel.collectives import Traffic
from drawn import attention, close, draw, leaves, normal

SIZES = {"vocab_size": 11, "context_length": 16, "embed_dim": 8, "num_layers": 2}


def each_refused(*cases):
    """What each call says, which are words and a function with its arguments."""
    said = []
    for words, function, *arguments in cases:
        with pytest.raises((TypeError, ValueError)) as error:
            function(*arguments)
        assert words in str(error.value)
        said.append(str(error.value))
    return said


def rows_of(mask, rank, ranks):
    """A mask for the queries of a rank, out of one for all."""
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask.detach().chunk(ranks, -2)[rank].clone().requires_grad_(mask.requires_grad)


def heads_equal_one_call(rank, heads, kv_heads, queries, kind, options):
    """Output, log-sum-exp and all gradients, among them those of mask and sink."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    whole = draw(2, heads, kv_heads=kv_heads, queries=queries, keys=8, grad=True)
    sink = normal(heads, 1, seed=3, grad=True) if kind else None
    mask = MASKS[kind](heads, queries)
    own = leaves(x.chunk(ranks, -2)[rank] for x in whole)
    rows = rows_of(mask, rank, ranks)
    given = options | {"mask": rows, "sink": sink, "return_lse": True}
    found = parallel.head_attention(*own, **given)
    expected = attention(*whole, mask, **options, sink=sink)
    close(found, tuple(y.chunk(ranks, 2)[rank] for y in expected))
    grad = normal(*expected[0].shape, seed=9)
    learns = mask is not None and mask.requires_grad
    wanted = torch.autograd.grad(expected[0], [*whole, *[mask] * learns], grad)
    mine = grad.chunk(ranks, -2)[rank]
    gradients = torch.autograd.grad(found[0], [*own, *[rows] * learns], mine)
    close(gradients, tuple(y.chunk(ranks, -2)[rank] for y in wanted))
    if sink is None:  # the way without a log-sum-exp
        plugged = parallel.HeadAttention(**options)(*own, rows)[0]
        close(plugged, found[0])
        close(torch.autograd.grad(plugged, own, mine), gradients[:3])


MASKS = {
    "": lambda heads, queries: None,
    "rows": lambda heads, queries: torch.rand(queries, 8) < 0.6,
    "keys": lambda heads, queries: torch.rand(2, 1, 1, 8) < 0.6,
    "one row": lambda heads, queries: torch.rand(8) < 0.6,
    "heads": lambda heads, queries: torch.rand(heads, queries, 8) < 0.6,
    "numbers": lambda heads, queries: normal(heads, queries, 8, grad=True),
    "shared": lambda heads, queries: normal(queries, 8, grad=True),
}


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "queries", "kind", "options"),
    [
        (1, 3, 1, 8, "rows", {"causal": True, "window": 3}),
        (2, 4, 4, 8, "", {"causal": True, "window": 3}),
        (2, 4, 1, 4, "", {"causal": True}),
        (2, 4, 2, 4, "rows", {"causal": True}),
        (2, 4, 2, 2, "rows", {}),  # one query on each rank
        (2, 4, 4, 8, "keys", {"scale": 0.3}),
        (2, 2, 2, 8, "one row", {"causal": True}),
        (2, 4, 2, 8, "heads", {"window": 2}),
        (2, 4, 2, 8, "numbers", {"causal": True}),
        (4, 4, 4, 8, "shared", {"causal": True, "window": 5}),
        (4, 8, 2, 8, "", {"scale": 0.3}),
    ],
)
def test_heads_dealt_out_equal_one_call(ranks, heads, kv_heads, queries, kind, options):
    run(heads_equal_one_call, ranks, heads, kv_heads, queries, kind, options)


def ranks_with_other_rows(rank):
    """Where each rank has one row of its own, it counts for its own queries."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 4)
    rows = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1]]).bool()
    own = [x.chunk(2, -2)[rank].clone() for x in (q, k, v)]
    output = parallel.head_attention(*own, mask=rows[rank : rank + 1])
    wanted = flash_attention(q, k, v, rows.repeat_interleave(3, 0))
    return torch.allclose(output, wanted.chunk(2, -2)[rank], atol=1e-6)


def test_one_row_of_a_rank_is_for_its_own_queries():
    assert run(ranks_with_other_rows, 2) == [True, True]


def bytes_of_heads(rank):
    x = torch.randn(8, 4, 3, dtype=torch.float64)
    with Traffic() as traffic:
        parallel.head_attention(x, x, x)
    return traffic.by_name["all_to_all"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_send_four_parts_of_what_a_rank_has(ranks):
    own = 8 * 4 * 3 * 8
    assert run(bytes_of_heads, ranks) == [4 * own * (ranks - 1) // ranks] * ranks


def refusals(rank):
    """What each bad call says, here; the calls after one that was refused still work."""
    ranks = dist.get_world_size()
    odd = rank == ranks - 1
    here = f"rank {ranks - 1}: "
    x, disagree = torch.zeros(2 * ranks, 2, 3), "the ranks disagree"
    mask = torch.ones(2, 2 * ranks).bool()
    learning = x.clone().requires_grad_()

    def attend(*inputs, **options):
        return partial(parallel.head_attention, *inputs, **options)

    said = each_refused(
        (f"heads that {ranks} ranks divide, got {2 * ranks + 1}",
         attend(*[torch.zeros(2 * ranks + 1, 2, 3)] * 3)),
        (f"divisor of {ranks} ranks",
         attend(torch.zeros(6 * ranks, 2, 3), *[torch.zeros(3, 2, 3)] * 2)),
        ("value: expected", attend(x, x, x[:1])),
        ("key: expected", attend(x, x[..., :2], x)),
        (disagree, attend(*[x[:, : 1 if odd else 2]] * 3)),
        (disagree, attend(*[x.double() if odd else x] * 3)),
        (f"{here}query: expected device cpu", attend(*[x.to("meta") if odd else x] * 3)),
        (f"{here}key: expected", attend(x, x.double() if odd else x, x)),
        (f"{here}query: expected a floating-point tensor",
         attend(None if odd else x, x, x)),
        (f"{here}query: expected (..., heads", attend(*[x[0] if odd else x] * 3)),
        (f"{here}value: expected", attend(x, x[:, :1] if odd else x, x)),
        (disagree, attend(x, x, x, causal=odd)),
        (disagree, attend(x, x, x, window=2 if odd else None)),
        (f"{here}window", attend(x, x, x, window=0 if odd else None)),
        (disagree, attend(x, x, x, mask=None if odd else mask)),
        (disagree, attend(x, x, x, mask=mask.float() if odd else mask)),
        (f"{here}mask: expected", attend(x, x, x, mask=mask[:, :2] if odd else mask)),
        (f"{here}mask: expected a boolean tensor",
         attend(x, x, x, mask="all" if odd else None)),
        (here, attend(x, x, x, sink="none" if odd else None)),
        (disagree, attend(learning if odd else x, x, x)),
        (disagree, torch.set_grad_enabled(not odd)(attend(learning, x, x))),
        (f"{here}losses: expected a floating-point",
         parallel.token_mean, None if odd else torch.zeros(2)),
        ("losses: expected a token on some rank, got none",
         parallel.token_mean, torch.zeros(0)),
    )  # fmt: skip
    parallel.head_attention(x, x, x)
    return said


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_refuses_what_one_has_wrong(ranks, as_shipped):
    said = run(refusals, ranks, timeout=60)
    assert all(other == said[0] for other in said)


def trains_as_one(rank, data, context, tensor, positions, kv_heads, kind):
    torch.set_default_dtype(torch.float64)
    names = ("data", "context", "tensor")
    grid = init_device_mesh("cpu", (data, context, tensor), mesh_dim_names=names)
    mesh = init_device_mesh(
        "cpu", (data * context, tensor), mesh_dim_names=("copies", "tensor")
    )
    sizes = SIZES | {"positions": positions, "num_heads": 4, "num_kv_heads": kv_heads}
    torch.manual_seed(0)
    one = LanguageModel(**sizes)
    group = grid["context"].get_group()
    attention = getattr(parallel, kind)(causal=True, group=group)
    model = LanguageModel(**sizes, attention=attention)
    model.load_state_dict(one.state_dict())
    parallel.split_layers(model, mesh["tensor"])
    parallel.share_copies(model, mesh["copies"])
    # Not Adam: the keys' bias has gradient 0, and it would divide round-off by itself.
    a, b = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (one, model))
    at_text, at_part, _ = grid.get_coordinate()
    n = 12 // context
    for step in range(2):
        torch.manual_seed(step)
        ids = torch.randint(11, (3, 13))  # 3 texts: not as many on each rank
        loss = F.cross_entropy(one(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        a.zero_grad()
        loss.backward()
        a.step()
        own = ids.tensor_split(data)[at_text][:, at_part * n : at_part * n + n + 1]
        logits = model(own[:, :-1])
        losses = F.cross_entropy(
            logits.flatten(0, 1), own[:, 1:].flatten(), reduction="none"
        )
        own_loss, mean = parallel.token_mean(losses, mesh["copies"].get_group())
        b.zero_grad()
        own_loss.backward()
        b.step()
        close(mean, loss.detach())
    for (name, x), y in zip(model.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(x.full_tensor(), y, rtol=0, atol=1e-10), name


@pytest.mark.parametrize(
    ("data", "context", "tensor", "positions", "kv_heads", "kind"),
    [
        (1, 1, 1, "rotary", 2, "HeadAttention"),
        (2, 1, 1, "learned", 4, "HeadAttention"),
        (1, 2, 1, "sinusoidal", 2, "HeadAttention"),
        (1, 2, 1, "rotary", 1, "RingAttention"),
        (1, 1, 2, "rotary", 2, "HeadAttention"),
        (2, 2, 1, "rotary", 1, "HeadAttention"),
        (1, 2, 2, "learned", 2, "HeadAttention"),
        (1, 2, 2, "rotary", 4, "RingAttention"),
    ],
)
def test_a_step_on_many_is_a_step_on_one(data, context, tensor, positions, kv_heads, kind):
    sizes = (data, context, tensor, positions, kv_heads, kind)
    run(trains_as_one, data * context * tensor, *sizes)


def count_all_reduces(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LanguageModel(**SIZES | {"num_layers": 3}, num_heads=4)
    parallel.split_layers(model, mesh)
    with CommDebugMode() as counted:
        logits = model(torch.zeros(1, 5, dtype=torch.long))
    forward = counted.get_total_counts()
    with CommDebugMode() as counted:
        logits.sum().backward()
    return forward, counted.get_total_counts()


def test_a_block_adds_up_twice_each_way():
    assert run(count_all_reduces, 2) == [(6, 6)] * 2


def projections_split(rank):
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    network = FeedForwardNetwork(6, 8)
    x = torch.randn(2, 3, 6)
    expected = network(x)
    network.linear_1.W.grad = None
    parallel.SplitColumns()._apply(network.linear_1, mesh)
    parallel.SplitRows()._apply(network.linear_2, mesh)
    output = network(x)
    close(output, expected)
    assert network.linear_1(x).shape[-1] == 8 // mesh.size()
    plain = SIZES | {"num_heads": 4}
    split, share = parallel.split_layers, parallel.share_copies

    def model(**options):
        return LanguageModel(**plain | options)

    alone, disagree = "got a LearnedBiasAttention", "the ranks disagree"
    multiple = "expected a multiple of 2 ranks, got"
    columns, rows = parallel.SplitColumns(), parallel.SplitRows()
    dropping = ScaledDotProductAttention(0.5, causal=True)
    learning = LearnedBiasAttention(4, 8, causal=True)
    wrapped, pruned = model(), model()
    network_of = wrapped.blocks[0].feed_forward
    network_of.linear_1 = torch.nn.Sequential(network_of.linear_1)
    torch.nn.utils.prune.identity(pruned.blocks[0].attention.q_proj, "W")
    return each_refused(
        ("module: expected a Projection, got a Linear",
         columns._apply, torch.nn.Linear(4, 4), mesh),
        ("a number of columns that 2 ranks divide, got 5",
         columns._apply, Projection(4, 5), mesh),
        ("a number of rows that 2 ranks divide, got 5",
         rows._apply, Projection(5, 4), mesh),
        (f"num_heads: {multiple} 1", split, model(num_heads=1), mesh),
        (f"num_kv_heads: {multiple} 1", split, model(num_kv_heads=1), mesh),
        (f"d_ff: {multiple} 9", split, model(d_ff=9), mesh),
        ("dropout: expected 0, got 0.1", split, model(dropout=0.1), mesh),
        ("dropout: expected 0, got 0.5", split, model(attention=dropping), mesh),
        (f"expected an attention without parameters, {alone}",
         split, model(attention=learning), mesh),
        ("model: expected a LanguageModel, got a FeedForwardNetwork",
         split, network, mesh),
        ("model: feed_forward.linear_1: expected a Projection, got a Sequential",
         split, wrapped, mesh),
        ("model: attention.q_proj: expected a Projection whose W is a parameter",
         split, pruned, mesh),
        (disagree, split, model(positions=("rotary", "sinusoidal")[rank]), mesh),
        (disagree, split, model(d_ff=8 * (1 + rank)), mesh),
        (disagree, share, model(d_ff=8 * (1 + rank)), mesh),
    )  # fmt: skip


def test_projections_split_and_refuse(as_shipped):
    first, second = run(projections_split, 2)
    assert first == second


def a_model(rank, tensor):
    ranks = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (ranks // tensor, tensor), mesh_dim_names=("copies", "tensor")
    )
    model = LanguageModel(**SIZES, num_heads=4)
    parallel.split_layers(model, mesh["tensor"])
    parallel.share_copies(model, mesh["copies"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def write(rank, folder, tensor):
    torch.manual_seed(3)
    model, optimizer = a_model(rank, tensor)
    ids = torch.arange(10)[None]
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(ids).sum(-1).pow(2).mean().backward()
        optimizer.step()
        parallel.save_checkpoint(folder, step, model, optimizer)
    with torch.no_grad():
        return model(ids).tolist()


def read(rank, folder, tensor):
    torch.manual_seed(4)
    model, optimizer = a_model(rank, tensor)
    step = parallel.load_checkpoint(folder, model, optimizer)
    moments = [s["exp_avg_sq"].full_tensor().sum() for s in optimizer.state.values()]
    with torch.no_grad():
        return step, model(torch.arange(10)[None]).tolist(), float(sum(moments))


@pytest.mark.costly("training/checkpoints", "attnlib/parallel/*.py")
def test_a_checkpoint_is_read_by_other_ranks(tmp_path):
    written = run(write, 4, tmp_path, 2)[0]
    names = sorted(path.name for path in tmp_path.glob("*-*"))
    assert names == ["step-00000002", "step-00000003"]
    (tmp_path / "step-00000009").mkdir()  # without .metadata, the last thing written
    (tmp_path / "partial-00000010").mkdir()
    moments = []
    for ranks, tensor in ((1, 1), (2, 2)):
        for step, logits, moment in run(read, ranks, tmp_path, tensor):
            assert step == 3
            assert torch.allclose(torch.tensor(logits), torch.tensor(written), atol=1e-5)
            moments.append(moment)
    assert max(moments) - min(moments) < 1e-4 * max(moments)
    assert run(read, 1, tmp_path / "empty", 1)[0][0] == 0


def folders(rank, folder):
    """What saving and loading refuse, on each rank."""
    model, optimizer = a_model(rank, 1)
    model(torch.arange(10)[None]).sum().backward()
    optimizer.step()
    save, load = parallel.save_checkpoint, parallel.load_checkpoint
    save(folder / "kept", 7, model, optimizer)
    other = LanguageModel(**SIZES | {"num_layers": 1}, num_heads=4)
    others = torch.optim.AdamW(other.parameters())
    no_optimizer = "rank 1: optimizer: expected Optimizer, got NoneType"
    on_one = None if rank else optimizer
    return each_refused(
        ("rank 1: step: expected a whole number, got 1.0",
         save, folder, 1.0 if rank else 1, model, optimizer),
        ("keep: expected at least 1, got 0",
         partial(save, keep=0), folder, 1, model, optimizer),
        (no_optimizer, save, folder, 1, model, on_one),
        ("rank 1: folder: expected one that all ranks see",
         save, folder / str(rank), 1, model, optimizer),
        ("rank 0: ", save, folder / "file", 1, model, optimizer),
        (no_optimizer, load, folder, model, on_one),
        ("step: expected more than 7, the last in",
         save, folder / "kept", 7, model, optimizer),
        ("model: blocks.1.", load, folder / "kept", other, others),
    )  # fmt: skip


def test_every_rank_refuses_folders_and_steps(tmp_path, as_shipped):
    (tmp_path / "file").touch()
    first, second = run(folders, 2, tmp_path, timeout=60)
    assert first == second
    assert [path.name for path in (tmp_path / "kept").glob("*-*")] == ["step-00000007"]


def test_a_checkpoint_is_read_without_a_group_and_after_a_gradient(tmp_path):
    written = run(write, 2, tmp_path, 2)[0]
    model = LanguageModel(**SIZES, num_heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.arange(10)[None]).sum().backward()
    assert parallel.load_checkpoint(tmp_path, model, optimizer) == 3
    assert torch.allclose(model(torch.arange(10)[None]), torch.tensor(written), atol=1e-5)
    assert optimizer.param_groups[0]["lr"] == 0.1 and len(optimizer.state) > 0


def first_ranks_weights(rank):
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "tensor"))
    model = LanguageModel(**SIZES, num_heads=4)
    model.blocks[0].requires_grad_(False)
    parallel.split_layers(model, mesh["tensor"])
    parallel.share_copies(model, mesh["copies"])
    frozen = {name for name, x in model.named_parameters() if not x.requires_grad}
    return frozen, [x.full_tensor().detach() for x in model.parameters()]


def test_weights_are_those_of_rank_0_and_what_is_frozen_stays_so():
    torch.manual_seed(0)
    model = LanguageModel(**SIZES, num_heads=4)
    names = {name for name, _ in model.named_parameters() if name.startswith("blocks.0.")}
    for frozen, weights in run(first_ranks_weights, 4):
        assert frozen == names
        for x, y in zip(weights, model.parameters(), strict=True):
            assert torch.equal(x, y)


def written_with_shares(rank):
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2,))
    model = parallel.share_copies(LanguageModel(**SIZES, num_heads=4), mesh)
    ids = torch.arange(5)[None]
    texts = [model.generate(ids, 6, temperature=0.0, cache=kept) for kept in (False, True)]
    model(texts[1]).sum().backward()  # what was written can be learned from
    return texts


def test_a_model_in_shares_writes():
    torch.manual_seed(0)
    model = LanguageModel(**SIZES, num_heads=4)
    text = model.generate(torch.arange(5)[None], 6, temperature=0.0)
    for texts in run(written_with_shares, 2):
        assert all(torch.equal(x, text) for x in texts)


def test_no_group_is_an_error_that_says_what_to_do(as_shipped):
    with pytest.raises(RuntimeError, match="no process group"):
        parallel.token_mean(torch.zeros(2))


def clipped(rank, longest):
    torch.manual_seed(3)
    model, _ = a_model(rank, 2)
    model(torch.arange(10)[None]).square().sum().backward()
    length = parallel.clip_gradients(model, longest)
    again = parallel.clip_gradients(model, longest)
    return length, again, [x.grad.full_tensor() for x in model.parameters()]


@pytest.mark.parametrize("longest", [0.5, 1e9])
def test_gradients_are_clipped_over_all_meshes(longest):
    torch.manual_seed(3)
    model = LanguageModel(**SIZES, num_heads=4)
    model(torch.arange(10)[None]).square().sum().backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), longest))
    assert expected > 1
    for length, again, gradients in run(clipped, 4, longest):
        assert abs(length - expected) < 1e-4 * expected
        assert abs(again - min(longest, expected)) < 1e-4 * again
        for x, y in zip(model.parameters(), gradients, strict=True):
            assert torch.allclose(x.grad, y, rtol=1e-3, atol=1e-6 * expected)
    with pytest.raises(ValueError, match="longest: expected a positive number, got 0"):
        parallel.clip_gradients(model, 0)
