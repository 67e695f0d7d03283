"""Linear attention: one result by matrix, loop, pieces and states; what a state refuses.

The layers that keep a state are tried together, that of the delta rule with them.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from attnlib import KVCache, LanguageModel, MultiHeadAttention, Projection, speculate
from attnlib.delta import GatedDeltaAttention
from attnlib.linear import (
    GatedLinearAttention,
    LinearAttention,
    StateCache,
    elu_plus_one,
    linear_attention,
    what_is_left,
)
from drawn import draw_mask

EACH = pytest.mark.parametrize("kind", [GatedLinearAttention, GatedDeltaAttention])


def says(words):
    return pytest.raises((TypeError, ValueError), match=words)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_that_are_the_same_for_all_queries_are_read_by_a_state(causal):
    """The other way, by all weights, says what is right."""
    attention = LinearAttention(causal=causal, piece=2)
    for shape in ((1, 7), (2, 1, 1, 7), (2, 3, 1, 7)):
        query, key, value = (torch.randn(2, 3, n, 5).double() for n in (6, 7, 7))
        mask = draw_mask("boolean", *shape)
        expected, _ = attention(query, key, value, mask)
        assert attention.attend_without_weights(query, key, value, mask) is not None
        output, _ = attention(query, key, value, mask, need_weights=False)
        assert torch.allclose(output, expected)


def test_features_that_are_all_0_give_0_and_no_nan():
    query = torch.full((1, 4), -1000.0, requires_grad=True)
    key, value = torch.randn(3, 4), torch.randn(3, 2)
    for options in ({}, {"need_weights": False}):
        output, _ = LinearAttention()(query, key, value, **options)
        assert (output == 0).all()
        output.sum().backward()
        assert query.grad.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_pieces_cuts_and_ends(data):
    """A text in any cuts and pieces, with shares of 0 and 1 in it, is the matrix's."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    n, lead = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([(), (2,), (2, 3)]))
    q, k, v = (torch.rand(*lead, n, d).double() for d in (3, 3, 2))
    shares = st.sampled_from([0.0, -torch.inf, -0.3, -40.0])
    g = torch.tensor([data.draw(shares) for _ in range(n)]).double().expand(*lead, n)
    expected = (what_is_left(g) * (q @ k.mT)) @ v
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    outputs, state = [], None
    for start, end in zip([0, *cuts], [*cuts, n], strict=True):
        part = slice(start, end)
        output, state = linear_attention(
            *(x[..., part, :] for x in (q, k, v)),
            g[..., part],
            state,
            piece=data.draw(st.integers(1, 5)),
        )
        outputs.append(output)
    assert torch.allclose(torch.cat(outputs, dim=-2), expected)
    assert state.shape == (*lead, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_state_of_half_precision_is_kept_in_float32(dtype):
    """4,001 ones are 4,001: in bfloat16 a sum of ones ends at 256."""
    one = torch.ones(4001, 1, dtype=dtype)
    for piece in (64, 5000):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, state = linear_attention(one, one, one, piece=piece)
        assert output.dtype == dtype and state.dtype == torch.float32
        assert state.item() == 4001 and output[-1] == torch.tensor(4001.0).to(dtype)
    g = torch.full((300,), -0.01, dtype=dtype)  # and so are sums of decays
    found, expected = (linear_attention(*x, g.to(x[0].dtype)) for x in (
        [one[:300]] * 3, [one[:300].double()] * 3))  # fmt: skip
    assert torch.allclose(found[1].double(), expected[1], rtol=1e-4)
    for causal in (False, True):
        heads, x = LinearAttention(causal=causal), torch.randn(2, 3, 4).to(dtype)
        assert heads(x, x, x, need_weights=False)[0].dtype == dtype


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 3), (3, 6), (1, 4), (4, 1), (4, 0)])
def test_without_weights_for_any_numbers(causal, queries, keys):
    """A mask of numbers, too, the same for all queries; constants change nothing."""
    query, key, value = (torch.randn(2, n, 5).double() for n in (queries, keys, keys))
    attention = LinearAttention(causal=causal, piece=2)
    numbers = torch.randn(1, keys).double()
    for mask in (None, numbers, numbers + 800, numbers - 800):
        expected, _ = attention(query, key, value, mask)
        output, _ = attention(query, key, value, mask, need_weights=False)
        assert torch.allclose(output, expected)
    assert torch.allclose(expected, attention(query, key, value, numbers)[0])


def test_what_does_not_fit_is_refused(as_shipped):
    x = torch.randn(2, 4, 3)
    with says("key: expected leading dimensions"):
        linear_attention(x, x[:1], x)
    with says("key: expected shape"):
        linear_attention(x, x[:, :3], x[:, :3])
    with says("value: expected"):
        linear_attention(x, x, x[:, :3])
    with says("log_decay: expected shape"):
        linear_attention(x, x, x, torch.zeros(4))
    with says("state: expected shape"):
        linear_attention(x, x, x, state=torch.zeros(3, 3))
    with says("value: expected torch.float32"):
        linear_attention(x, x, x.double())
    with says("query: expected a floating-point"):
        linear_attention(x.long(), x.long(), x.long())
    with says("state: expected a floating-point dtype up to torch.float32"):
        linear_attention(x, x, x, state=torch.zeros(2, 3, 3).double())
    with says("log_decay: expected a floating-point dtype up to"):
        linear_attention(x, x, x, torch.zeros(2, 4, dtype=torch.bool))
    with says("state: expected device cpu"):
        linear_attention(x, x, x, state=torch.zeros(2, 3, 3, device="meta"))
    with says("query"):
        linear_attention(x[0, 0], x[0, 0], x[0, 0])
    with says("query"):
        linear_attention(None, x, x)
    with says("piece: expected at least 1"):
        linear_attention(x, x, x, piece=0)
    with says("piece"):
        LinearAttention(piece=2.0)
    with says("causal"):
        LinearAttention(causal=1)
    with says("feature: expected a function"):
        LinearAttention("elu")


def model_of(kind=GatedLinearAttention, **options):
    torch.manual_seed(0)
    model = LanguageModel(20, 50, embed_dim=12, num_heads=3, num_layers=2).eval()
    for block in model.blocks:
        block.attention = kind(12, num_heads=3, **options)
        block.attention.gate_proj.W.data.normal_()
    return model.double()


def states():
    return [StateCache(), StateCache()]


@EACH
def test_texts_of_two_lengths_and_those_that_stay(kind):
    """Each is the one that it is alone; rows are chosen, and texts go on in pieces."""
    model, held = model_of(kind, piece=3), states()
    ids = torch.randint(20, (3, 9))
    padding = torch.tensor([0, 4, 7])
    with torch.no_grad():
        whole = model(ids, padding=padding)
        first = model(ids[:, :5], padding=padding.clamp(max=5), cache=held)
        for cache in held:
            cache.select(torch.tensor([2, 0]))
        rest = model(ids[[2, 0], 5:], padding=padding[[2, 0]], cache=held)
        for row, empty in enumerate(padding.tolist()):
            alone = model(ids[row, empty:])
            assert torch.allclose(whole[row, empty:], alone)
        assert torch.allclose(first[:2, 4:], whole[:2, 4:5])
        assert torch.allclose(rest[1], whole[0, 5:])
        assert torch.allclose(rest[0, 2:], whole[2, 7:])
    assert [len(cache) for cache in held] == [9, 9]
    assert held[0].nbytes == 2 * 3 * 4 * (5 if kind is GatedLinearAttention else 4) * 8


@EACH
def test_a_token_that_is_not_there_leaves_the_state_as_it_is(kind):
    layer, x = model_of(kind).blocks[0].attention, torch.randn(1, 6, 12).double()
    mask = torch.tensor([True, True, False, False, True, True])[None, None, None]
    output, none = layer(x, mask)
    there = [0, 1, 4, 5]
    assert none is None and torch.allclose(output[:, there], layer(x[:, there])[0])
    assert torch.allclose(layer(x[0], mask[0, 0])[0], output[0])
    x[:, 2:4] = torch.nan
    assert torch.allclose(layer(x, mask)[0][:, there], output[:, there])


@pytest.mark.parametrize("autocast", [False, True])
def test_long_texts_in_float16(autocast):
    """The sum of the weights passes 65,504, the largest number of float16."""
    torch.manual_seed(0)
    layer, x = GatedLinearAttention(64, 1), F.layer_norm(torch.randn(1, 3000, 64), (64,))
    layer.gate_proj.b.data.fill_(12.0)
    plain = MultiHeadAttention(64, 1, LinearAttention(causal=True))
    both = MultiHeadAttention(64, 1, LinearAttention())
    for made in (layer, plain, both, GatedDeltaAttention(64, 1)):
        with torch.no_grad():
            expected, _ = made(x, need_weights=False)
            if autocast:
                with torch.autocast("cpu", dtype=torch.float16):
                    output, _ = made(x, need_weights=False)
            else:
                output, _ = made.half()(x.half(), need_weights=False)
        assert output.dtype == torch.float16
        assert torch.allclose(output.float(), expected, atol=0.02), made


def test_a_feature_map_with_parameters_of_its_own():
    feature = nn.Sequential(nn.Linear(4, 6), nn.Softplus()).bfloat16()
    for causal in (False, True):
        heads, x = LinearAttention(feature, causal=causal), torch.randn(2, 9, 4).bfloat16()
        expected, _ = heads(x, x, x)
        output, _ = heads(x, x, x, need_weights=False)
        assert torch.allclose(output.float(), expected.float(), atol=0.02)


@EACH
def test_on_no_device_at_all(kind):
    x = torch.empty(2, 9, 12, device="meta")
    with torch.device("meta"):
        layer = kind(12, 3)
    assert layer(x)[0].shape == linear_attention(x, x, x)[0].shape == x.shape


@EACH
def test_a_model_with_rotary_positions_is_told(kind, as_shipped):
    model = LanguageModel(20, 50, 12, num_heads=3, num_layers=1, positions="rotary")
    model.blocks[0].attention = kind(12, 3)
    with says("positions: expected None"):
        model(torch.randint(20, (1, 5)))


@EACH
def test_gradients_beside_a_cache(kind):
    model, held, ids = model_of(kind), states(), torch.randint(20, (1, 5))
    with says("x: expected no gradient"):
        model(ids, cache=held)
    assert len(held[0]) == 0 and held[0].state is None
    model.generate(ids, 4, cache=held)  # in inference mode
    for cache in held:
        cache.select(torch.tensor([0, 0]))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    more = nn.Parameter(torch.randn(2, 1, 12).double())
    with says("x: expected no gradient"):
        model.blocks[0].attention(more, cache=held[0])
    with torch.no_grad():
        model.blocks[0].attention(more, cache=held[0])
    assert not held[0].state.is_inference() and len(held[0]) == 9


@EACH
def test_nothing_is_left_where_a_gate_is_shut(kind):
    layer, x = kind(12, 3), torch.randn(1, 4, 12)
    layer.gate_proj.b.data.fill_(-torch.inf)
    mask = torch.tensor([True, True, False, True])[None, None, None]
    output, _ = layer(x, mask)
    alone = [layer(x[:, [i]])[0] for i in (0, 1, 3)]
    assert torch.allclose(output[:, [0, 1, 3]], torch.cat(alone, dim=1), atol=1e-6)


@EACH
def test_caches_are_told_apart(kind, as_shipped):
    model, ids = model_of(kind), torch.randint(20, (1, 5))
    with says("cache: expected a StateCache, got KVCache"):
        model.generate(ids, 3, cache=True)
    softmax = LanguageModel(20, 50, embed_dim=12, num_heads=3, num_layers=2).eval()
    with says("cache: expected one that holds keys"):
        softmax.generate(ids, 3, cache=states())
    linear = MultiHeadAttention(12, 3, LinearAttention(causal=True))
    with says("cache: expected one that holds keys"):
        linear(torch.randn(1, 2, 12), cache=StateCache())
    cache, x = KVCache(9), torch.randn(1, 4, 12)
    with torch.no_grad():  # as any head can, by its keys
        parts = [linear(part, cache=cache)[0] for part in x.split(2, dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), linear(x)[0], atol=1e-6)
    with says("length: expected 0 or"):
        speculate(model, torch.tensor([[1, 2, 1, 2, 1, 2, 1]]), 3, cache=states())


@EACH
def test_a_state_begins_again_and_refuses_the_rest(kind, as_shipped):
    layer, cache = kind(12, 3).requires_grad_(False), StateCache()
    assert len(cache) == cache.nbytes == 0
    x = torch.randn(2, 4, 12)
    expected, _ = layer(x, cache=cache)
    cache.truncate(4)
    with says("length: expected 0 or 4"):
        cache.truncate(3)
    with says("length: expected between 0 and 4"):
        cache.truncate(5)
    with says("state: expected shape"):
        layer(x[:1], cache=cache)
    assert len(cache) == 4
    cache.truncate(0)
    assert torch.equal(layer(x, cache=cache)[0], expected)
    with says("rows: expected a tensor of integers"):
        cache.select([0])
    cache.select(torch.tensor([1]))
    assert cache.state.shape[:3] == (1, 3, 4)


@EACH
def test_masks_and_tokens_that_a_layer_refuses(kind, as_shipped):
    layer, x = kind(12, 3), torch.randn(2, 4, 12)
    with says("mask: expected a boolean tensor"):
        layer(x, torch.zeros(2, 1, 1, 4))
    for shape in ((4, 4), (2, 1, 4, 4), (2, 3, 1, 4), (1, 4), (2, 1, 1, 5), (1, 1, 1, 4)):
        with says("mask: expected the same for all queries"):
            layer(x, torch.ones(shape, dtype=torch.bool))
    with says("x: expected at least 2 dimensions"):
        layer(torch.randn(4, 11))
    with says("x: expected torch.float32"):
        layer(x.double())
    with says("embed_dim: expected a multiple"):
        kind(10, 3)


def test_a_gate_that_is_open_makes_it_linear_attention():
    """And the layers of a `MultiHeadAttention` are the same."""
    gated = GatedLinearAttention(12, 3)
    gated.gate_proj.W.data.zero_()
    gated.gate_proj.b.data.fill_(torch.inf)
    plain = MultiHeadAttention(12, 3, LinearAttention(causal=True))
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert isinstance(getattr(gated, name), Projection)
        setattr(plain, name, getattr(gated, name))
    x = torch.randn(2, 70, 12)
    assert torch.allclose(gated(x)[0], plain(x)[0], atol=1e-6)


@EACH
def test_at_first_heads_remember_some_4_to_400_tokens(kind):
    share = kind(12, 3).gate_proj.b.sigmoid()
    assert 3 < 1 / (1 - share[0]) < 5 and 390 < 1 / (1 - share[-1]) < 420


@EACH
def test_it_learns(kind):
    """Every parameter has a gradient; those of tokens and gate are finite differences'."""
    layer = kind(4, 2, piece=3).double()
    x = torch.randn(1, 7, 4).double().requires_grad_()

    def called(x, W):
        return torch.func.functional_call(layer, {"gate_proj.W": W}, (x,))[0]

    assert torch.autograd.gradcheck(called, [x, layer.gate_proj.W], fast_mode=True)
    layer(x)[0].square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())
    assert len(list(layer.parameters())) == (10 if kind is GatedLinearAttention else 12)


def test_features_follow_a_head_to_any_layer():
    """Features of another number, and heads that share keys."""

    def signs(x):
        return torch.cat([F.relu(x), F.relu(-x), torch.ones_like(x[..., :1])], dim=-1)

    layer = MultiHeadAttention(12, 4, LinearAttention(signs, causal=True), num_kv_heads=2)
    x = torch.randn(2, 9, 12)
    expected, weights = layer(x)
    assert len(weights) == 4 and torch.allclose(weights[0].sum(-1), torch.ones(2, 9))
    assert torch.allclose(layer(x, need_weights=False)[0], expected, atol=1e-6)
    assert repr(LinearAttention(causal=True)).endswith("causal=True, piece=64)")


def test_small_features_are_exact():
    """exp(x), and not exp(x) - 1 + 1, of which nothing is left below -17 in float32."""
    x = torch.linspace(-80, 3, 50)
    expected = torch.where(x > 0, x.double() + 1, x.double().exp())
    assert torch.allclose(elu_plus_one(x).double(), expected, rtol=1e-5, atol=0.0)
