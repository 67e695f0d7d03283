"""Heads, layers and copies across 2 and 4 processes: equal to one, or refused by all."""

import pytest
import torch
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
from attnlib.testing import check_attention
from drawn import attention, close, draw, leaves, normal

SIZES = {"vocab_size": 11, "context_length": 16, "embed_dim": 8, "num_layers": 2}


def refused(function, *args, **options):
    """What a ValueError of this call says."""
    with pytest.raises(ValueError) as error:
        function(*args, **options)
    return str(error.value)


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
        plugged = parallel.HeadAttention(**options).attend_groups(*own, rows)
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


def test_heads_keep_the_contract_on_one_rank(as_shipped):
    check_attention(parallel.HeadAttention)


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
    x = torch.zeros(2 * ranks, 2, 3)
    mask = torch.ones(2, 2 * ranks).bool()
    learning = x.clone().requires_grad_()
    wrong = {
        "heads": ([torch.zeros(2 * ranks + 1, 2, 3)] * 3, {}),
        "kv heads": ([torch.zeros(6 * ranks, 2, 3), *[torch.zeros(3, 2, 3)] * 2], {}),
        "value heads": ([x, x, x[:1]], {}),
        "features": ([x, x[..., :2], x], {}),
        "unequal": ([x[:, : 1 if odd else 2]] * 3, {}),
        "dtype": ([x.double() if odd else x] * 3, {}),
        "device": ([x.to("meta") if odd else x] * 3, {}),
        "mixed": ([x, x.double() if odd else x, x], {}),
        "not a tensor": ([None if odd else x, x, x], {}),
        "two dimensions": ([x[0]] * 3 if odd else [x] * 3, {}),
        "tokens": ([x, x[:, :1] if odd else x, x], {}),
        "causal": ([x] * 3, {"causal": odd}),
        "window": ([x] * 3, {"window": 2 if odd else None}),
        "bad window": ([x] * 3, {"window": 0 if odd else None}),
        "mask": ([x] * 3, {"mask": None if odd else mask}),
        "mask's dtype": ([x] * 3, {"mask": mask.float() if odd else mask}),
        "own columns": ([x] * 3, {"mask": mask[:, :2] if odd else mask}),
        "no mask": ([x] * 3, {"mask": "all" if odd else None}),
        "sink": ([x] * 3, {"sink": "none" if odd else None}),
        "gradient": ([learning if odd else x, x, x], {}),
    }
    said = {}
    for name, (inputs, options) in wrong.items():
        said[name] = refused(parallel.head_attention, *inputs, **options)
    with torch.set_grad_enabled(not odd):
        said["no_grad"] = refused(parallel.head_attention, learning, x, x)
    said["losses"] = refused(parallel.token_mean, None if odd else torch.zeros(2))
    said["none"] = refused(parallel.token_mean, torch.zeros(0))
    parallel.head_attention(x, x, x)
    return said


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_refuses_what_one_has_wrong(ranks, as_shipped):
    said = run(refusals, ranks, timeout=60)
    assert all(other == said[0] for other in said)
    (said, *_) = said
    last = ranks - 1
    disagree = ("unequal", "dtype", "causal", "window", "mask", "mask's dtype", "gradient")
    for name in (*disagree, "no_grad"):
        assert "the ranks disagree" in said[name], name
    assert f"heads that {ranks} ranks divide, got {2 * ranks + 1}" in said["heads"]
    assert f"divisor of {ranks} ranks" in said["kv heads"]
    assert "value: expected" in said["value heads"]
    assert "key: expected" in said["features"]
    for name, text in (
        ("own columns", "mask: expected"),
        ("no mask", "mask: expected a boolean tensor"),
        ("sink", ""),
        ("device", "query: expected device cpu"),
        ("mixed", "key: expected"),
        ("not a tensor", "query: expected a floating-point tensor"),
        ("two dimensions", "query: expected (..., heads"),
        ("tokens", "value: expected"),
        ("bad window", "window"),
        ("losses", "losses: expected a floating-point"),
    ):
        assert f"rank {last}: {text}" in said[name]
    assert said["none"] == "losses: expected a token on some rank, got none"


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
    if rank:  # rank 0's weights are taken in split_layers
        torch.nn.init.zeros_(model.norm.gamma) if tensor == dist.get_world_size() else None
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
        logits = model(own[:, :-1], cache=[parallel.TokensBefore(at_part * n)] * 2)
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
    said = []
    for style, layer in (
        (parallel.SplitColumns(), torch.nn.Linear(4, 4)),
        (parallel.SplitColumns(), Projection(4, 5)),
        (parallel.SplitRows(), Projection(5, 4)),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            style._apply(layer, mesh)
        said.append(str(error.value))
    plain = {"num_heads": 4}
    for sizes in ({"num_heads": 1}, plain | {"num_kv_heads": 1}, plain | {"d_ff": 9}):
        with pytest.raises(ValueError) as error:
            parallel.split_layers(LanguageModel(**SIZES | sizes), mesh)
        said.append(str(error.value))
    dropping = ScaledDotProductAttention(0.5, causal=True)
    learning = LearnedBiasAttention(4, 8, causal=True)
    for model in (
        LanguageModel(**SIZES | plain, dropout=0.1),
        LanguageModel(**SIZES | plain, attention=dropping),
        LanguageModel(**SIZES | plain, attention=learning),
        network,
    ):
        said.append(refused(parallel.split_layers, model, mesh))
    other = LanguageModel(**SIZES | plain, positions=("rotary", "sinusoidal")[rank])
    said.append(refused(parallel.split_layers, other, mesh))
    for deal in (parallel.split_layers, parallel.share_copies):
        with pytest.raises(ValueError) as error:  # the ranks disagree
            deal(LanguageModel(**SIZES | plain, d_ff=8 * (1 + rank)), mesh)
        said.append(str(error.value))
    return said


def test_projections_split_and_refuse(as_shipped):
    first, second = run(projections_split, 2)
    assert first == second
    wanted = [
        "module: expected a Projection, got a Linear",
        "a number of columns that 2 ranks divide, got 5",
        "a number of rows that 2 ranks divide, got 5",
        "num_heads: expected a multiple of 2 ranks, got 1",
        "num_kv_heads: expected a multiple of 2 ranks, got 1",
        "d_ff: expected a multiple of 2 ranks, got 9",
        "dropout: expected 0, got 0.1",
        "dropout: expected 0, got 0.5",
        "expected an attention without parameters, got a LearnedBiasAttention",
        "model: expected a LanguageModel, got a FeedForwardNetwork",
        "the ranks disagree",
        "the ranks disagree",
        "the ranks disagree",
    ]
    for text, said in zip(wanted, first, strict=True):
        assert text in said


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
    names = sorted(path.name for path in tmp_path.iterdir())
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
    said = [
        refused(save, folder, 1.0 if rank else 1, model, optimizer),
        refused(save, folder, 1, model, optimizer, keep=0),
        refused(save, folder, 1, model, None if rank else optimizer),
        refused(save, folder / str(rank), 1, model, optimizer),
        refused(save, folder / "file", 1, model, optimizer),
        refused(load, folder, model, None if rank else optimizer),
    ]
    save(folder / "kept", 7, model, optimizer)
    said.append(refused(save, folder / "kept", 7, model, optimizer))
    other = LanguageModel(**SIZES | {"num_layers": 1}, num_heads=4)
    optimizer = torch.optim.AdamW(other.parameters())
    said.append(refused(load, folder / "kept", other, optimizer))
    return said


def test_every_rank_refuses_folders_and_steps(tmp_path, as_shipped):
    (tmp_path / "file").touch()
    first, second = run(folders, 2, tmp_path, timeout=60)
    assert first == second
    wanted = [
        "rank 1: step: expected a whole number, got 1.0",
        "keep: expected at least 1, got 0",
        "rank 1: optimizer: expected Optimizer, got NoneType",
        "rank 1: folder: expected one that all ranks see",
        "rank 0: ",
        "rank 1: optimizer: expected Optimizer, got NoneType",
        "step: expected more than 7, the last in",
        "model: expected blocks.1.",
    ]
    for text, said in zip(wanted, first, strict=True):
        assert text in said, said
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000007"]


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
