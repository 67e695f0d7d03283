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

from attnlib import LanguageModel, Projection, flash_attention, parallel
from attnlib.feed_forward import FeedForwardNetwork
from attnlib.multi_head import repeat_heads
from attnlib.parallel import run
from attnlib.parallel.collectives import Traffic

SIZES = {"vocab_size": 11, "context_length": 16, "embed_dim": 8, "num_layers": 2}


def close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12)


def heads_equal_one_call(rank, heads, kv_heads, options):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    shapes = (heads, 8, 4), (kv_heads, 8, 4), (kv_heads, 8, 3)
    for batch in ((), (2,), (2, 3)):
        whole = [torch.randn(*batch, *shape, requires_grad=True) for shape in shapes]
        own = [x.detach().chunk(ranks, -2)[rank].clone().requires_grad_() for x in whole]
        output = parallel.head_attention(*own, **options)
        q, k, v = whole
        k, v = (repeat_heads(x, heads // kv_heads) for x in (k, v))
        expected = flash_attention(q, k, v, **options)
        grad = torch.randn_like(expected)
        assert close(output, expected.chunk(ranks, -2)[rank])
        found = torch.autograd.grad(output, own, grad.chunk(ranks, -2)[rank])
        for a, b in zip(found, torch.autograd.grad(expected, whole, grad), strict=True):
            assert close(a, b.chunk(ranks, -2)[rank])
        plugged = parallel.HeadAttention(**options)
        assert torch.equal(plugged.attend_groups(*own), output)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(1, 3, 1), (2, 4, 4), (4, 8, 2), (4, 8, 4)]
)
def test_heads_dealt_out_equal_one_call(ranks, heads, kv_heads):
    for options in ({"causal": True, "window": 3}, {"scale": 0.3}):
        run(heads_equal_one_call, ranks, heads, kv_heads, options)


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
    wrong = {
        "heads": ([torch.zeros(2 * ranks + 1, 2, 3)] * 3, {}),
        "kv heads": ([torch.zeros(6 * ranks, 2, 3), *[torch.zeros(3, 2, 3)] * 2], {}),
        "value heads": ([x, x, x[:1]], {}),
        "features": ([x, x[..., :2], x], {}),
        "unequal": ([x[:, : 1 if odd else 2]] * 3, {}),
        "dtype": ([x.double() if odd else x] * 3, {}),
        "mixed": ([x, x.double() if odd else x, x], {}),
        "not a tensor": ([None if odd else x, x, x], {}),
        "two dimensions": ([x[0] if odd else x] * 3, {}),
        "tokens": ([x, x[:, :1] if odd else x, x], {}),
        "causal": ([x] * 3, {"causal": odd}),
        "window": ([x] * 3, {"window": 2 if odd else None}),
        "bad window": ([x] * 3, {"window": 0 if odd else None}),
    }
    said = {}
    for name, (inputs, options) in wrong.items():
        with pytest.raises(ValueError) as error:
            parallel.head_attention(*inputs, **options)
        said[name] = str(error.value)
    with pytest.raises(ValueError) as error:
        parallel.token_mean(None if odd else torch.zeros(2))
    said["losses"] = str(error.value)
    with pytest.raises(ValueError) as error:
        parallel.token_mean(torch.zeros(0))
    said["none"] = str(error.value)
    parallel.head_attention(x, x, x)
    return said


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_refuses_what_one_has_wrong(ranks, as_shipped):
    said = run(refusals, ranks, timeout=30)
    assert all(other == said[0] for other in said)
    (said, *_) = said
    last = ranks - 1
    assert (
        f"number of heads that {ranks} ranks divide, got {2 * ranks + 1}" in said["heads"]
    )
    assert f"divisor of {ranks} ranks" in said["kv heads"] or ranks % 3 == 0
    assert "as many heads as value" in said["value heads"]
    assert "3 features as query, got 2" in said["features"]
    for name in ("unequal", "dtype", "causal", "window"):
        assert "the ranks disagree" in said[name], name
    assert f"rank {last}: key: expected torch.float32" in said["mixed"]
    assert f"rank {last}: query: expected a floating-point" in said["not a tensor"]
    assert f"rank {last}: query: expected (..., heads" in said["two dimensions"]
    assert f"rank {last}: key: expected the batch and the tokens" in said["tokens"]
    assert f"rank {last}: window" in said["bad window"]
    assert f"rank {last}: losses: expected a floating-point" in said["losses"]
    assert said["none"] == "losses: expected a token on some rank, got none"


def trains_as_one(rank, data, context, tensor, positions, kv_heads):
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
    model = LanguageModel(
        **sizes, attention=parallel.HeadAttention(causal=True, group=group)
    )
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
        assert close(mean, loss.detach()), f"step {step}: {mean} is not {loss}"
    for (name, x), y in zip(model.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(x.full_tensor(), y, rtol=0, atol=1e-10), name


@pytest.mark.parametrize(
    ("data", "context", "tensor", "positions", "kv_heads"),
    [
        (2, 1, 1, "learned", 4),
        (1, 2, 1, "sinusoidal", 2),
        (1, 1, 2, "rotary", 2),
        (2, 2, 1, "rotary", 1),
        (1, 2, 2, "learned", 2),
        (2, 1, 2, "rotary", 4),
    ],
)
def test_a_step_on_many_is_a_step_on_one(data, context, tensor, positions, kv_heads):
    sizes = (data, context, tensor, positions, kv_heads)
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
    assert close(output, expected)
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
    with pytest.raises(ValueError) as error:
        parallel.split_layers(LanguageModel(**SIZES | plain, dropout=0.1), mesh)
    said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        parallel.split_layers(network, mesh)
    said.append(str(error.value))
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
        "model: expected a LanguageModel, got a FeedForwardNetwork",
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


def test_no_group_is_an_error_that_says_what_to_do(as_shipped):
    with pytest.raises(RuntimeError, match="no process group"):
        parallel.head_attention(*[torch.zeros(2, 2, 2)] * 3)
    with pytest.raises(ValueError, match="mask: expected None"):
        parallel.HeadAttention()(*[torch.zeros(2, 2, 2)] * 3, torch.ones(2, 2).bool())
