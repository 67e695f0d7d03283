"""The one door: every way through an attention is its module call, and none differs."""

import sys
from itertools import product

import pytest
import torch
from torch import nn

import attnlib
from attnlib import (
    BaseAttention,
    FlashAttention,
    LearnedBiasAttention,
    MultiHeadAttention,
    PhysicsGuidedAttention,
    ScaledDotProductAttention,
    SelfAttention,
    fused_attention,
    parallel,
    split_attention,
)
from attnlib.testing import check_attention
from drawn import close, draw, normal, refuses

KINDS = [
    ScaledDotProductAttention,
    FlashAttention,
    lambda: FlashAttention(backend="torch"),
    lambda: FlashAttention(backend="fused"),
    PhysicsGuidedAttention,
    lambda: LearnedBiasAttention(4),
]
WAYS = ({}, {"need_weights": False})


def layer_of(attention, **options):
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, attention, **options).double().eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_hooks_see_every_call(kind, num_kv_heads):
    """What a hook does to the values counts, with and without weights, shared or not."""
    layer, x = layer_of(kind(), num_kv_heads=num_kv_heads), normal(2, 5, 16)
    layer.attention.register_forward_pre_hook(
        lambda module, inputs: (*inputs[:2], torch.zeros_like(inputs[2]), *inputs[3:])
    )
    for options in WAYS:
        close(layer(x, **options)[0], layer.out_proj.b.expand(2, 5, 16))
    single = SelfAttention(16, 16).double()
    single.attention.register_forward_hook(lambda module, inputs, result: 1 / 0)
    for wanted in (True, False):
        with pytest.raises(ZeroDivisionError):
            single(x, return_weights=wanted)


SCALED = [ScaledDotProductAttention, PhysicsGuidedAttention, *(
    lambda b=b, **options: FlashAttention(backend=b, **options)
    for b in ("auto", "torch", "fused", "triton")
)]  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("causal", [True, False])
def test_a_scale_below_0_turns_the_scores_around(kind, causal):
    query, key, value = (x.float() for x in draw(2, 3, queries=4, keys=6))
    for scale, options in product((-1.0, 0.0), WAYS):
        found = kind(scale=scale, causal=causal)(query, key, value, **options)[0]
        plain = kind(scale=1.0, causal=causal)(scale * query, key, value)[0]
        close(found, plain, atol=1e-5)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 1)])
def test_a_scale_that_learns(kind, shape):
    inputs = [x.float() for x in draw(2, 3, queries=4, keys=6)]
    scale = nn.Parameter(normal(*shape).float())
    attention = kind(scale=scale)
    expected = ScaledDotProductAttention(scale=1.0)(scale * inputs[0], *inputs[1:])[0]
    (wanted,) = torch.autograd.grad(expected.sin().sum(), scale)
    for options in WAYS:
        output = attention(*inputs, **options)[0]
        close(output, expected, atol=1e-5)
        close(torch.autograd.grad(output.sin().sum(), scale)[0], wanted, atol=1e-4)


def by_function(scale):
    fused_attention(*draw(2, 3, queries=4, keys=6), scale=scale)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    "make",
    [
        *(lambda scale, k=k: k(scale=scale) for k in SCALED),
        by_function,
        lambda scale: split_attention(
            *draw(2, 3, queries=4, keys=6), split_size=2, scale=scale
        ),
        lambda scale: parallel.RingAttention(scale=scale),
        lambda scale: parallel.HeadAttention(scale=scale),
    ],
)
def test_what_is_no_scale(make):
    for scale in (True, "1", torch.tensor(1)):
        with refuses(
            "scale: expected None, a number or a tensor of floats, got …", TypeError
        ):
            make(scale)
    for shape in ((2,), (3, 1), (1, 3, 1), (2, 3, 1, 1)):
        said = (
            "scale: expected one number, or one for each head, (heads, 1, 1), got shape …"
        )
        with refuses(said, ValueError):
            make(torch.ones(shape))
    for scale in (float("nan"), float("inf")):
        with refuses(f"scale: expected a finite number, got {scale}", ValueError):
            make(scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [True, False])
def test_scores_beyond_float16(kind, autocast):
    """Scores of 320,000 / √d_k: weighted alike, in every way, also under autocast."""
    shape, dtype = (1, 4, 2, 64), torch.float32 if autocast else torch.float16
    query, value = torch.full(shape, 200.0, dtype=dtype), normal(*shape).to(dtype)
    least = torch.full((2, 2), torch.finfo(torch.float16).min, dtype=dtype)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        for mask, sign, options in product((None, least), (1, -1), WAYS):
            output, weights = kind()(query, sign * query, value, mask, **options)
            assert output.dtype == torch.float16
            close(output.double(), value.double().mean(-2, True).expand(shape), atol=2e-3)
            assert weights is None or (weights == 0.5).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", WAYS)
def test_batches_of_vmap_have_gradients(kind, options):
    x, mask = normal(3, 4, 5, 8, grad=True), torch.ones(5, 5).tril(-1) == 1
    attention = kind().double()
    found = torch.vmap(lambda x: attention(x, x, x, mask, **options)[0])(x)
    expected = torch.stack([attention(y, y, y, mask)[0] for y in x])
    close(found, expected)
    close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, expected)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_an_empty_batch(kind, num_kv_heads):
    layer = layer_of(kind(), num_kv_heads=num_kv_heads)
    for shape, options in product(((0, 1, 16), (0, 5, 16), (2, 0, 16)), WAYS):
        assert layer(normal(*shape), **options)[0].shape == shape


class Own(BaseAttention):
    """As the source documents show the interface."""

    def forward(self, query, key, value, mask=None):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if mask is not None:
            scores = attnlib.apply_mask(scores, mask)
        weights = attnlib.masked_softmax(scores)
        return weights @ value, weights


class OwnAttend(BaseAttention):
    """The same, behind the door."""

    def attend(self, query, key, value, mask):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        return weights @ value, weights


@pytest.mark.usefixtures("as_shipped")
def test_what_a_readers_own_head_writes():
    check_attention(OwnAttend)
    check_attention(OwnAttend, leading=[(2, 4)])
    for num_kv_heads, mask in product((4, 2, 1), (None, torch.ones(5, 5).tril() == 1)):
        x, layers = normal(2, 5, 16), []
        for kind in (Own, OwnAttend, ScaledDotProductAttention):
            layers.append(layer_of([kind() for _ in range(4)], num_kv_heads=num_kv_heads))
            layers.append(layer_of(kind, num_kv_heads=num_kv_heads))
        for layer, options in product(layers, WAYS):
            output, weights = layer(x, mask=mask, **options)
            close(output, layers[0](x, mask=mask)[0])
            assert (weights is None) == bool(options)
    with pytest.raises(NotImplementedError, match="BaseAttention: write attend"):
        BaseAttention()(*draw(2, 3, queries=4, keys=6))


class Hotter(ScaledDotProductAttention):
    """Another `attend` than its parent's, which also knows a way without weights."""

    def attend(self, query, key, value, mask):
        return super().attend(query / 9, key, value, mask)


def test_a_parents_way_without_weights_is_not_ones_own():
    inputs = draw(2, 3, queries=4, keys=6)
    output, _ = Hotter()(*inputs)
    close(Hotter()(*inputs, need_weights=False)[0], output)
    assert not torch.allclose(output, ScaledDotProductAttention()(*inputs)[0])


def calls_of(function):
    """How often a function of the package is entered below this one."""
    names = []

    def count(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("attnlib"):
            names.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.usefixtures("as_shipped")
def test_one_forward_makes_few_calls():
    layer, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    for options in WAYS:
        names = calls_of(lambda options=options: layer(x, **options))
        assert names[:2] == ["called", "forward"] and len(names[2:]) <= 12, names


@pytest.mark.parametrize(
    "call",
    [
        *(lambda q, k, v, kind=kind: kind()(q, k, v)[0] for kind in KINDS[:5]),
        lambda q, k, v: attnlib.online_attention([(q @ k.mT, v)]).output,
        lambda q, k, v: parallel.RingAttention(causal=True, order="zigzag")(q, k, v)[0],
        lambda q, k, v: split_attention(q, k, v, split_size=2, causal=True),
    ],
)
def test_a_default_device_does_not_reach_in(call):
    """Tensors that are made on the way stand where the inputs do."""
    inputs = draw(2, 3, queries=4, keys=6)
    expected = call(*inputs)
    with torch.device("meta"):
        close(call(*inputs), expected)
