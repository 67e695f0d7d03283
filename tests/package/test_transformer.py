"""The block and the language model: PyTorch's layer, causality, learning, compiling."""

import copy
import importlib
import math
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlib import (
    CausalAttention,
    FlashAttention,
    LanguageModel,
    LearnedBiasAttention,
    PhysicsGuidedAttention,
    ScaledDotProductAttention,
    TransformerBlock,
    mask_from_torch,
    sample,
    sinusoidal_positions,
)
from drawn import BENCHMARKS, close, each_refused, refuses, small_model

IDS = torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def torch_layer(**options) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    defaults = {"dropout": 0.0, "batch_first": True}
    layer = nn.TransformerEncoderLayer(16, 4, 24, **{**defaults, **options}).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


# ── the block ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", [F.relu, F.gelu, nn.GELU()])
@pytest.mark.parametrize("bias", [True, False])
def test_from_torch(norm_first, activation, bias):
    layer = torch_layer(norm_first=norm_first, activation=activation, bias=bias)
    layer.norm1.eps = 1e-3
    block = TransformerBlock.from_torch(layer)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    blocked = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    for masks in ((None, None), (blocked, None), (None, padding), (blocked, padding)):
        mine = block(x, mask_from_torch(*masks))
        theirs = layer(x, src_mask=masks[0], src_key_padding_mask=masks[1])
        close(mine, theirs)
        a, b = (torch.autograd.grad(y.square().sum(), x)[0] for y in (mine, theirs))
        close(a, b, rtol=1e-10, atol=1e-10)
    for mode in (True, False):
        layer = torch_layer(dropout=0.3, bias=bias).train(mode)
        block = TransformerBlock.from_torch(layer)
        parts = (block, block.feed_forward, block.attention.attention)
        assert block.training == mode and {part.dropout for part in parts} == {0.3}


@pytest.mark.parametrize("made", [TransformerBlock, LanguageModel])
def test_heads_that_are_passed_bring_their_own_dropout(made):
    """Nothing but weights could differ here between training and not, and it does not."""
    torch.manual_seed(0)
    sizes, x = ((11, 12, 16, 2, 2), IDS) if made is LanguageModel else ((16, 2), X)
    for attention, differs in ((None, True), (FlashAttention(causal=True), False)):
        model = made(*sizes, dropout=0.5, attention=attention)
        for part in model.modules():
            if hasattr(part, "dropout") and not isinstance(part, ScaledDotProductAttention):
                part.dropout = 0.0
        trained = model(x)
        assert torch.equal(trained, model.eval()(x)) != differs
    assert "bring their own" in " ".join(made.__doc__.split())


# ── the language model ───────────────────────────────────────────────────────────────

MODELS = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "sinusoidal": {"positions": "sinusoidal"},
    "learned bias": {"attention": LearnedBiasAttention(2, 3, causal=True)},
    "one for each head": {"attention": [ScaledDotProductAttention(causal=True)] * 2},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_logits_do_not_see_later_tokens(options):
    model = small_model(**options).double()
    before = model(IDS)
    for t in range(1, 12):
        changed = IDS.clone()
        changed[:, t:] = (IDS[:, t:] + 1) % 11
        assert torch.equal(model(changed)[:, :t], before[:, :t])
    assert (model(changed)[:, -1] != before[:, -1]).any()
    first, second = (block.attention.attention for block in model.blocks)
    assert first is not second  # nor what they learn


@pytest.mark.parametrize(("positions", "rows"), [("learned", 11 + 12), ("sinusoidal", 11)])
def test_tables_are_tied_and_rows_start_with_length_one(positions, rows):
    """Sinusoids are no parameters, and not saved."""
    model = small_model(positions=positions)
    blocks = 2 * (12 * 16**2 + 13 * 16)
    assert sum(p.numel() for p in model.parameters()) == blocks + (rows + 2) * 16
    assert ("positions" in model.state_dict()) == (positions == "learned")
    model = LanguageModel(400, 400, 64, 2, 1, positions=positions)
    for table in (model.token_embedding.weight, model.positions):
        assert table.square().sum(dim=1).mean().item() == pytest.approx(1, abs=0.05)


def test_generate(as_shipped):
    model = small_model().eval()
    for parameter in model.parameters():  # sharp, so that every token in sight matters
        nn.init.normal_(parameter, std=0.5)
    start = torch.randint(11, (2, 3))
    luck = (torch.Generator().manual_seed(1) for _ in range(2))
    one, two = (model.generate(start, 20, generator=same) for same in luck)
    assert one.shape == (2, 23) and torch.equal(one, two) and torch.equal(one[:, :3], start)
    greedy = model.generate(start, 12, temperature=0)
    for t in range(3, 15):  # past the context length too
        expected = model(greedy[:, max(0, t - 12) : t])[:, -1].argmax(dim=-1)
        assert torch.equal(greedy[:, t], expected)
    assert torch.equal(model.generate(start[0], 12, temperature=0), greedy[0])
    assert torch.equal(model.generate(start, 12, top_k=1), greedy)
    assert torch.equal(model.generate(start, 0), start)


def modes_of(model):
    """In which it is called: (inference mode, with gradients)."""
    modes, seen = [], (torch.is_inference_mode_enabled, torch.is_grad_enabled)
    model.norm.register_forward_pre_hook(
        lambda *_: modes.append(tuple(mode() for mode in seen))
    )
    return modes


class Marked(nn.Parameter):
    """As DTensor is for FSDP2: of another type, and not to be read in inference mode."""


def test_what_was_written_can_be_learned_from():
    model = small_model()
    modes = modes_of(model)
    for cache in (False, True):
        text = model.generate(IDS[:1, :3], 4, cache=cache)
        assert not text.is_inference()
        model(text).sum().backward()  # which keeps the text for the gradient
    assert modes[:4] == [(True, False)] * 4 and modes[4] == (False, True)
    model.positions = Marked(model.positions.detach())
    model.generate(IDS[:1, :3], 2, cache=True)
    assert modes[-2:] == [(False, False)] * 2


def test_weights_are_kept_only_if_asked_for():
    model, ids, kept = small_model(), IDS[:2, :5], []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, result: kept.append(type(result)))
    logits = model(ids)
    again, weights = model(ids, return_weights=True)
    assert kept == [torch.Tensor] * 2 + [tuple] * 2
    assert torch.allclose(logits, again, rtol=0, atol=1e-5)
    assert [[w.shape for w in block] for block in weights] == [[(2, 5, 5)] * 2] * 2


def test_samples_are_of_the_likeliest_and_as_often_as_they_should():
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0], [2.0, 0.0, 4.0, 3.0, 1.0]])
    drawn = torch.cat([sample(logits, top_k=3) for _ in range(200)], dim=1)
    assert [set(row.tolist()) for row in drawn] == [{1, 2, 3}, {0, 2, 3}]
    many = torch.tensor([0.0, math.log(3.0)]).expand(4000, 2)
    for temperature, share in ((0.5, 9 / 10), (1.0, 3 / 4), (1e9, 1 / 2)):
        mean = sample(many, temperature).double().mean()
        assert mean.item() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_of_equal_ones_no_more_than_top_k_are_drawn(top_k):
    torch.manual_seed(0)
    for logits in (torch.zeros(2, 5), torch.tensor([[1.0, 3.0, 3.0, 3.0, 3.0]] * 2)):
        drawn = torch.cat([sample(logits, top_k=top_k) for _ in range(100)], dim=1)
        assert [row.unique().numel() for row in drawn] == [top_k] * 2


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("top_k", [None, 3])
def test_the_smallest_and_the_largest_temperature(dtype, top_k):
    """Next to 0 only the likeliest are left; at infinity all are alike."""
    torch.manual_seed(0)
    logits = torch.tensor([100.0, 3.0, 100.0, -torch.inf], dtype=dtype)
    if top_k is None:  # with top_k, this one may be left out
        logits = torch.cat([logits, torch.tensor([-60_000.0], dtype=dtype)])
    for temperature in (1e-38, 1e-45, 5e-324):
        drawn = sample(logits.expand(200, -1), temperature, top_k)
        assert set(drawn.flatten().tolist()) == {0, 2}
    drawn = sample(logits.expand(200, -1), math.inf, top_k).flatten().tolist()
    assert set(drawn) == ({0, 1, 2} if top_k else {0, 1, 2, 4})


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("row", [[NAN, 1, 1], [1, 1, INF], [1, NAN, -INF], [-INF] * 3])
def test_logits_of_which_none_can_be_drawn_are_refused(row, temperature, as_shipped):
    for logits in (torch.tensor(row), torch.tensor([[1.0, 2.0, 3.0], row])):
        with refuses("logits: expected finite numbers, …", ValueError):
            sample(logits, temperature, top_k=2)


@pytest.mark.parametrize("token", [0, 1, 2, 100_000])
def test_sinusoidal_positions(token):
    table = sinusoidal_positions(100_001, 8)
    angles = [token / 10_000 ** (2 * i / 8) for i in range(4)]
    expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
    assert table.shape == (100_001, 8) and table.dtype == torch.float32
    assert table[token].tolist() == pytest.approx(expected, rel=0, abs=1e-7)


# ── in use ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("norm_first", [True, False])
def test_export(norm_first, as_shipped):
    model = small_model(norm_first=norm_first).double().eval()
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=12)}
    ids = torch.randint(11, (3, 7))
    # PyTorch 2.4 exports a model only without the strict tracing, now the default.
    program = torch.export.export(model, (ids,), dynamic_shapes=(sizes,), strict=False)
    exported = program.module()
    for shape in ((3, 7), (2, 12), (5, 2)):
        ids = torch.randint(11, shape)
        close(exported(ids), model(ids))


def test_logits_of_the_last_tokens_only(as_shipped):
    model, ids = small_model().eval(), IDS[:2, :6]
    whole = model(ids)
    for last in (1, 4, 6):
        close(model(ids, last=last), whole[:, -last:], atol=1e-6)
    logits, weights = model(ids, True, last=2)
    assert logits.shape == (2, 2, 11) and len(weights) == 2


@pytest.mark.skipif(
    sys.platform == "win32", reason="torch.compile needs vcvars64.bat called first there"
)
@pytest.mark.costly("compile/block")
def test_compile(as_shipped):
    block, x = TransformerBlock(16, 2).double(), X.double().requires_grad_()
    torch.compiler.reset()
    y, expected = torch.compile(block, fullgraph=True)(x), block(x)
    close(y, expected)
    a, b = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected))
    close(a, b, atol=1e-11)


def test_autocast_in_bfloat16():
    model = small_model()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS)
        F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
    assert logits.dtype == torch.bfloat16
    close(logits.float(), model(IDS), rtol=0.05, atol=0.05)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


SIZE = {"context_length": 16, "embed_dim": 16, "num_heads": 2, "num_layers": 2}
RUN = ["--steps", "80", "--every", "10", "--size", str(SIZE).replace("'", '"')]


def test_trains_like_its_twin_of_torch_parts(benchmark, tmp_path):
    train_text = benchmark("train_text")
    options = train_text.parse([*RUN, "--steps", "20"])
    torch.manual_seed(0)
    twin = train_text.Twin(**SIZE).double()
    logs = [
        train_text.train(model, tmp_path / f"{i}.safetensors", options)
        for i, model in enumerate((train_text.ours(twin, SIZE).double(), twin))
    ]
    assert logs[0][-1] < logs[0][0]
    close(logs[0], logs[1], atol=1e-6)  # kept as float32


@pytest.mark.costly("training/train_text", "benchmarks/train_text.py")
def test_a_killed_training_goes_on_as_if_nothing_had_happened(benchmark, tmp_path):
    train_text = benchmark("train_text")
    options = train_text.parse([*RUN, "--checkpoints", str(tmp_path / "killed")])
    path = options.checkpoints / "attnlib.safetensors"
    command = [sys.executable, "train_text.py", *RUN, "--checkpoints", options.checkpoints]
    with subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.DEVNULL) as process:
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    torch.manual_seed(0)
    start = train_text.ours(train_text.Twin(**SIZE), SIZE)
    killed, whole = copy.deepcopy(start), start
    saved = train_text.load(
        path, copy.deepcopy(start), torch.optim.AdamW(start.parameters())
    )
    assert 0 < len(saved) < options.steps  # it was indeed killed on its way
    resumed = train_text.train(killed, path, options)
    expected = train_text.train(whole, tmp_path / "whole.safetensors", options)
    assert torch.equal(resumed, expected)
    for a, b in zip(killed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm_first", [True, False])
def test_norm_order_measures_the_path(norm_first, benchmark):
    norm_order = benchmark("norm_order")
    torch.manual_seed(0)
    model = LanguageModel(96, 12, 16, 2, 3, norm_first=norm_first)
    measured = norm_order.measure(model, torch.randint(96, (4, 13)))
    path = torch.tensor(measured["path"])
    if norm_first:  # nothing but additions
        torch.testing.assert_close(path, path[-1:].expand(4), rtol=1e-2, atol=0)
    else:  # by the norms alone: 1 + v + 2 ρ √v at each, after the first block
        v, rho = (torch.tensor(measured[name]) for name in ("added", "alignment"))
        factors = (1 + v + 2 * rho * v.sqrt()) ** -0.5
        expected = factors[2::2] * factors[3::2]
        torch.testing.assert_close(path[1:-1] / path[2:], expected, rtol=0.1, atol=0)
    assert measured["gradients"][-1] == measured["path"][-1]


def test_positions_of_every_kind_are_trained_and_none_stays_none(benchmark, monkeypatch):
    positions = benchmark("positions")
    monkeypatch.setattr(positions, "SIZE", SIZE)
    models = {kind: positions.make(kind) for kind in ("learned", "sinusoidal", "none")}
    assert models["learned"].positions.requires_grad
    assert not any(p.requires_grad for p in [models[k].positions for k in list(models)[1:]])
    assert models["none"].positions.abs().max() == 0 < models["sinusoidal"].positions.max()
    made, kept = positions.make, []
    monkeypatch.setattr(positions, "make", lambda kind: kept.append(made(kind)) or kept[-1])
    assert 3 < positions.run("none", 0, steps=2) < 7
    assert kept[0].positions.abs().max() == 0  # the optimizer has left them alone


# ── what is refused ──────────────────────────────────────────────────────────────────

TEXTS = "ids: expected (tokens,) or (batch, tokens) with at least one token, got shape"
LAST = "last: expected"
FUTURE = (
    "attention: expected causal=True, since a language model must not see later tokens, got"
)
MIXED = [ScaledDotProductAttention(causal=True), PhysicsGuidedAttention()]
VALUES = {
    "input: …, the last of 8 features, got shape (2, 5, 16)":
        lambda: TransformerBlock(8, 4)(X),
    "positions: expected one of 'learned', 'sinusoidal', 'rotary', or a module that "
    "turns, got 'absolute'": lambda: small_model(positions="absolute"),
    "embed_dim: expected an even number, got 5": lambda: sinusoidal_positions(4, 5),
    "ids: expected at most context_length = 12 tokens in the last dimension, "
    "got shape ()": lambda: small_model()(torch.tensor(3)),
    f"{TEXTS} (2, 0)": lambda: small_model().generate(IDS[:2, :0], 3),
    f"{TEXTS} (0,)": lambda: small_model().generate(IDS[0, :0], 3),
    "logits: expected (vocab_size,) or (batch, vocab_size), got shape (1, 2, 3)":
        lambda: sample(torch.ones(1, 2, 3)),
    "logits: expected (vocab_size,) or (batch, vocab_size), got shape ()":
        lambda: sample(torch.tensor(1.0)),
    "logits: expected (vocab_size,) or (batch, vocab_size), got shape (2, 0)":
        lambda: sample(torch.ones(2, 0)),
    "temperature: expected at least 0, got nan": lambda: sample(torch.ones(3), math.nan),
    "length: expected at least 0, got -3": lambda: small_model().generate(IDS, -3),
    f"{LAST} between 1 and 12, got 0": lambda: small_model()(IDS, last=0),
    f"{LAST} between 1 and 12, got 13": lambda: small_model()(IDS, last=13),
    f"{FUTURE} Scaled…": lambda: small_model(attention=ScaledDotProductAttention),
    f"{FUTURE} ScaledDotProductAttention(…":
        lambda: small_model(attention=ScaledDotProductAttention()),
    f"{FUTURE} PhysicsGuidedAttention(…": lambda: small_model(attention=MIXED),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
TYPES = {
    "ids: expected a tensor of int64 or int32, got torch.float32": lambda: small_model()(X),
    "attention: expected a BaseAttention…": lambda: TransformerBlock(
        16, 2, attention=CausalAttention(8, 8)
    ),
    "logits: expected a floating-point tensor, got torch.int64": lambda: sample(IDS[0]),
    "logits: expected a floating-point tensor, got list": lambda: sample([0.1, 0.9]),
    **{
        f"temperature: expected a number, got {t!r}": lambda t=t: sample(torch.ones(3), t)
        for t in (None, "0.7", True, [1.0])
    },
    "ids: expected a tensor, got list": lambda: small_model().generate([1, 2], 3),
    "ids: expected a tensor of int64 or int32, got torch.float64": lambda: (
        small_model().generate(IDS.double(), 0)
    ),
    **{
        f"length: expected a whole number, got {n!r}": lambda n=n: small_model().generate(
            IDS, n
        )
        for n in (2.0, "2", True, None)
    },
    f"{LAST} a whole number, got 1.5": lambda: small_model()(IDS, last=1.5),
    f"{LAST} a whole number, got '1'": lambda: small_model()(IDS, last="1"),
    f"{LAST} a whole number, got True": lambda: small_model()(IDS, last=True),
}
test_types = each_refused(TypeError, TYPES)


# ── what no file holds ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_positions_after_memory_without_numbers(positions, dtype, as_shipped):
    """Made without memory, moved, then filled from a file, which has no positions."""
    torch.manual_seed(0)
    sizes = {"context_length": 12, "embed_dim": 16, "num_heads": 2, "num_layers": 2}
    options = {"vocab_size": 11, "positions": positions, **sizes}
    model = LanguageModel(**options).to(dtype)
    with torch.device("meta"):
        other = torch.nn.Sequential(LanguageModel(**options)).to(dtype)
    other.to_empty(device="cpu")
    for buffer in other.buffers():
        assert buffer.isfinite().all() and (buffer != 0).any()
    other.to_empty(device="cpu")[0].load_state_dict(model.state_dict())
    assert torch.equal(other[0](IDS), model(IDS))


def test_sinusoidal_positions_are_exact_in_every_dtype(as_shipped):
    table = sinusoidal_positions(12, 16, torch.float64) * 8**-0.5
    model = small_model(positions="sinusoidal")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(model.to(dtype).positions, table.to(dtype))
    assert "positions" not in model.state_dict()
