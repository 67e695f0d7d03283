"""Rotary positions: a float64 oracle of complex numbers, rules, layers, refusals."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    FlashAttention,
    MultiHeadAttention,
    RotaryPositions,
    ScaledDotProductAttention,
    TransformerBlock,
    rotate,
)
from attnlib.rotary import frequencies
from drawn import close, each_refused, normal, small_model

SEEDS = st.integers(0, 999)
YARN = {"scaling": "yarn", "factor": 4.0, "original_length": 64}


def oracle(x, positions, omega, interleaved, magnitude=1.0):
    """Every pair as one complex number, in float64, times e^(j · position · ω)."""
    x = x.double()
    d = x.shape[-1]
    order = torch.arange(d)
    order = order.view(-1, 2) if interleaved else order.view(2, -1).T
    pairs = torch.complex(*x[..., order].unbind(dim=-1))
    angle = positions.double()[..., None] * torch.tensor(omega, dtype=torch.float64)
    pairs = pairs * torch.polar(torch.full_like(angle, magnitude), angle)
    out = torch.empty_like(x)
    out[..., order] = torch.view_as_real(pairs)
    return out


@given(
    st.lists(st.integers(1, 3), max_size=2).map(tuple), st.integers(0, 6),
    st.integers(1, 9), st.sampled_from([2.0, 10000.0, 5e5]), st.booleans(), st.booleans(),
    SEEDS,
)  # fmt: skip
def test_as_complex_numbers(leading, tokens, pairs, base, interleaved, shared, seed):
    x = normal(*leading, tokens, 2 * pairs, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens,) if shared else (*leading, tokens)
    positions = torch.randint(-1000, 1000, shape, generator=generator)
    expected = oracle(x, positions, frequencies(2 * pairs, base), interleaved)
    before = x.clone()
    for found in (
        rotate(x, positions, base, interleaved),
        rotate(x, positions.int(), base, interleaved),
        RotaryPositions(2 * pairs, base, interleaved)(x, positions),
    ):
        close(found, expected, atol=1e-9)
    assert torch.equal(x, before)


def test_positions_default_first_and_broadcast():
    x = normal(2, 3, 5, 8)
    at = torch.arange(5)
    assert torch.equal(rotate(x), rotate(x, at))
    assert torch.equal(rotate(x, 700), rotate(x, at + 700))
    assert torch.equal(rotate(x, -2), rotate(x, at - 2))
    each = torch.stack([at, at + 9])  # one row for each sequence, the same for its heads
    found = rotate(x, each[:, None])
    assert torch.equal(found[0], rotate(x[0])) and torch.equal(found[1], rotate(x[1], 9))
    torch.testing.assert_close(rotate(x[0], at[None].expand(3, 5)), rotate(x[0]))
    parts = torch.cat([rotate(x[..., :2, :], 0), rotate(x[..., 2:, :], 2)], dim=-2)
    close(parts, rotate(x))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved):
    x = normal(2, 5, 6, grad=True)
    turn = partial(rotate, positions=3, base=1e4, interleaved=interleaved)
    assert torch.autograd.gradcheck(turn, x) and torch.autograd.gradgradcheck(turn, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [lambda: rotate, lambda: RotaryPositions(64)])
def test_dtypes(dtype, make):
    """Far positions, in a short dtype: only x and the result are rounded."""
    x, positions = normal(3, 64).to(dtype), torch.tensor([1, 4097, 30011])
    found = make()(x, positions)
    assert found.dtype == dtype
    expected = oracle(x, positions, frequencies(64), interleaved=False)
    atol = 0.02 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    close(found.double(), expected, atol=atol)


def test_a_converted_module_keeps_its_frequencies():
    exact = torch.tensor(frequencies(64), dtype=torch.float64)
    module = RotaryPositions(64)
    for asked in (torch.bfloat16, torch.half, torch.double, torch.float):
        module, dtype = module.to(asked), torch.promote_types(asked, torch.float32)
        assert module.omega.dtype == dtype
        assert torch.equal(module.omega, exact.to(dtype))
    assert not module.state_dict() and not list(module.parameters())
    on_meta = copy.deepcopy(module).to("meta")
    assert on_meta.omega.device.type == "meta"
    back = on_meta.to_empty(device="cpu")
    assert torch.equal(back.omega, exact.float())
    with torch.device("meta"):
        assert RotaryPositions(8)(torch.randn(3, 8)).device.type == "meta"


# The rules for longer texts, each worked out by hand for d = 8 and base 10^4: ω is 1, 0.1,
# 0.01 and 0.001; 2π · 100 tokens make 100, 10, 1 and 0.1 turns.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scaling": "linear"}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ({"scaling": "ntk"}, [1, 4 ** (-1 / 3), 4 ** (-2 / 3), 1 / 4]),
        ({"scaling": "llama3", "turns": (1.0, 19.0)}, [1, 0.5 * 1.25, 1 / 4, 1 / 4]),
        ({"scaling": "llama3"}, [1, 1, 1 / 4, 1 / 4]),
        ({"scaling": "yarn"}, [1, 0.5 * 1.25, 1 / 4, 1 / 4]),
        ({"scaling": "yarn", "turns": (0.05, 32.0)}, [1, 0.8125, 0.625, 0.4375]),
        ({"scaling": "yarn", "turns": (0.05, 5.0)}, [1, 1, 0.75, 0.5]),
        ({"scaling": "yarn", "turns": (1e-7, 32.0)}, [1, 25 / 28, 22 / 28, 19 / 28]),
        ({"scaling": "yarn", "turns": (200.0, 3200.0)}, [1, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_rules(options, expected):
    """YaRN's ends: 32 turns are pair 0.49, 5 turns 1.3, 1 turn 1.9998 and 0.05 turns 3.3;
    rounded outwards, 0, 1, 2 and 4. Of 1e-7 turns the end is 7, by its authors' code, and
    of 200 turns 0: there both ends are one pair, and the ramp is a step."""
    length = round(200 * math.pi)  # 628: 99.95 turns, and so on
    module = RotaryPositions(8, factor=4.0, original_length=length, **options).double()
    kept = module.omega / torch.tensor(frequencies(8), dtype=torch.float64)
    atol = 1e-3 if options["scaling"] == "llama3" else 1e-12  # 9.995 turns, not 10
    close(kept, torch.tensor(expected, dtype=torch.float64), atol=atol)
    magnitude = 1 + 0.1 * math.log(4) if options["scaling"] == "yarn" else 1.0
    assert module.magnitude == pytest.approx(magnitude, abs=1e-15)
    # Both ends of the ramp at one pair: nothing is divided by 0; and a single pair.
    ends = options | {"factor": 2.0, "original_length": 1}
    assert RotaryPositions(4, base=4.0, **ends).omega.isfinite().all()
    assert RotaryPositions(2, scaling="ntk", factor=8.0).omega.tolist() == [1.0]


def test_magnitude_can_be_given():
    x = normal(5, 8)
    length = x.norm(dim=-1)
    for magnitude, expected in ((None, 1 + 0.1 * math.log(4)), (1.0, 1.0), (2.0, 2.0)):
        found = RotaryPositions(8, magnitude=magnitude, **YARN)(x, 3).norm(dim=-1)
        torch.testing.assert_close(found, expected * length)
    shown = "8, base=10000.0, interleaved=False, scaling='yarn', factor=4.0"
    assert repr(RotaryPositions(8, **YARN)) == f"RotaryPositions({shown})"


# In the layers


@pytest.mark.parametrize(
    "attention", [None, FlashAttention(causal=True), [ScaledDotProductAttention()] * 2]
)
def test_multi_head_attention(attention):
    torch.manual_seed(0)
    turned = MultiHeadAttention(8, 2, attention, rotary=RotaryPositions(4)).double()
    x = normal(3, 5, 8)
    whole, plain = turned(x)[0], copy.deepcopy(turned)
    plain.rotary = None
    together = turned(x, positions=torch.zeros(5, dtype=torch.long))[0]
    torch.testing.assert_close(together, plain(x)[0])
    assert (whole - plain(x)[0]).abs().max() > 1e-3
    called = MultiHeadAttention(8, 2, attention, rotary=partial(rotate, base=1e4))
    called.double().load_state_dict(turned.state_dict())
    close(called(x)[0], whole)  # any callable turns
    each = torch.tensor([[0], [7], [300]]) + torch.arange(5)
    for positions in (None, 0, 12, torch.arange(5) + 4, each, each[1:2]):
        torch.testing.assert_close(turned(x, positions=positions)[0], whole)
    spread = torch.tensor([0, 1, 2, 3, 9])
    assert (turned(x, positions=spread)[0] - whole).abs().max() > 1e-4
    if attention is not None and not isinstance(attention, list):  # causal
        new = x[:, 3:]  # two new tokens stand behind three known ones
        torch.testing.assert_close(turned(new, x)[0], whole[:, 3:])
        torch.testing.assert_close(turned(new, x, positions=3)[0], whole[:, 3:])
        assert (turned(new, x, positions=0)[0] - whole[:, 3:]).abs().max() > 1e-4


def test_language_model():
    model = small_model(positions="rotary").double()
    assert isinstance(model.positions, RotaryPositions) and model.positions.d_k == 8
    assert not any("positions" in name for name in model.state_dict())
    ids, twin = torch.tensor([[3, 1, 4, 1, 5, 2, 6]]), copy.deepcopy(model)
    for each in (model, twin):
        assert torch.equal(each(ids), model(ids))
        assert all(block.attention.rotary is each.positions for block in each.blocks)
    changed = model(ids)[:, 2:] - model(ids.roll(1, dims=1))[:, 2:]
    assert changed.abs().max() > 1e-3  # the order counts
    own = RotaryPositions(8, 500.0, interleaved=True)
    other = small_model(positions=own).double()
    other.load_state_dict(model.state_dict())
    assert other.positions is own and (other(ids) - model(ids)).abs().max() > 1e-4
    assert model.generate(ids, 9).shape == (1, 16)  # past the context, too
    model(ids).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    block, x = model.blocks[0], normal(2, 5, 16)
    close(block(x, positions=40), block(x))
    assert (block(x, positions=torch.arange(5) * 3) - block(x)).abs().max() > 1e-4
    plain = small_model(positions="learned")
    assert plain.positions.shape == (12, 16) and plain.blocks[0].attention.rotary is None


def test_autocast_keeps_the_angles():
    model = small_model(context_length=4096, positions="rotary").eval()
    ids = torch.randint(7, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(ids)
    close(found.float(), model(ids), atol=0.1)


def test_export_compile_vmap(as_shipped):
    model, ids = small_model(positions="rotary").eval(), torch.randint(7, (2, 6))
    sizes = ({1: torch.export.Dim("tokens", min=2, max=12)},)
    program = torch.export.export(model, (ids,), dynamic_shapes=sizes, strict=False)
    for text in (ids, torch.randint(7, (2, 11))):
        torch.testing.assert_close(program.module()(text), model(text))
    x = normal(3, 2, 5, 8, dtype=torch.float32)
    for turns in (rotate, RotaryPositions(8)):
        torch.testing.assert_close(torch.func.vmap(turns)(x), turns(x))
        at = torch.randint(50, (3, 5))
        torch.testing.assert_close(torch.func.vmap(turns)(x, at), turns(x, at[:, None]))
        torch.compiler.reset()  # other tests, too, compile what checks annotations
        compiled = torch.compile(turns, fullgraph=True, backend="eager")
        for positions in (0, 3, torch.arange(5) + 2):
            torch.testing.assert_close(compiled(x, positions), turns(x, positions))


X = torch.randn(2, 3, 5, 8)
FLAT = RotaryPositions(4)
BROADCAST = (
    "positions: expected shape (5,), or 3 dimensions that broadcast to (2, 3, 5), got"
)
VALUES = {
    "x: expected an even number of features, in pairs, got shape (5, 7)":
        lambda: rotate(X[0, 0, :, :7]),
    "x: expected at least 2 dimensions (tokens, features), got shape (8,)":
        lambda: rotate(X[0, 0, 0]),
    "x: expected 4 features, got shape (2, 3, 5, 8)": lambda: FLAT(X),
    f"{BROADCAST} (4,)": lambda: rotate(X, torch.arange(4)),
    f"{BROADCAST} (1,)": lambda: rotate(X, torch.tensor([7])),
    "positions: …to (2, 2, 5), got (2, 5)":  # a batch of positions, which would mean heads
        lambda: rotate(X[:, :2], torch.zeros(2, 5, dtype=torch.long)),
    "positions: expected device cpu, got meta":
        lambda: rotate(X, torch.arange(5, device="meta")),
    "base: expected above 1, got 1.0": lambda: rotate(X, 0, 1.0),
    "d_k: expected an even number of features, got 7": lambda: RotaryPositions(7),
    "d_k: …even number of features, got 3":
        lambda: small_model(embed_dim=6, positions="rotary"),
    "scaling: expected None or one of 'linear', 'ntk', 'yarn', 'llama3', got 'dynamic'":
        lambda: RotaryPositions(8, scaling="dynamic", factor=2.0),
    "factor: expected at least 1, got 0.5":
        lambda: RotaryPositions(8, scaling="linear", factor=0.5),
    "factor: expected 1, as there is no scaling, got 2.0":
        lambda: RotaryPositions(8, factor=2.0),
    "original_length: expected the tokens of a text in training, for 'yarn', got None":
        lambda: RotaryPositions(8, scaling="yarn", factor=2.0),
    "turns: expected two positive numbers that rise, got (32.0, 1.0)":
        lambda: RotaryPositions(8, **YARN, turns=(32.0, 1.0)),
    "positions: expected None, since nothing here turns by positions; give rotary to "
    "the constructor": lambda: MultiHeadAttention(8, 2)(X[0], positions=3),
    "positions: expected shape (5,), or 2 dimensions that broadcast to (3, 5), got (6,)":
        lambda: MultiHeadAttention(8, 2, rotary=FLAT)(X[0], positions=torch.arange(6)),
    "x: …8 features, got shape (3, 2, 5, 4)":
        lambda: MultiHeadAttention(8, 2, rotary=RotaryPositions(8))(X[0]),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
WHOLE = "positions: expected a tensor of int64 or int32, or one integer, got"
OBJECT = "rotary: expected an object to call, such as RotaryPositions(d_k), got"
TYPES = {
    "x: expected a floating-point tensor, got torch.int64": lambda: rotate(X.long()),
    f"{WHOLE} torch.float32": lambda: rotate(X, torch.arange(5.0)),
    f"{WHOLE} True": lambda: rotate(X, True),
    f"{WHOLE} [0, 1, 2, 3, 4]": lambda: rotate(X, [0, 1, 2, 3, 4]),
    "interleaved: expected True or False, got 1": lambda: rotate(X, 0, 1e4, 1),
    f"{OBJECT} <class …": lambda: MultiHeadAttention(8, 2, rotary=RotaryPositions),
    f"{OBJECT} 'rotary'": lambda: TransformerBlock(8, 2, rotary="rotary"),
}
test_types = each_refused(TypeError, TYPES)
