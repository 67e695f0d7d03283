"""Heads that share keys, caches for windows, sinks, latent attention."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from attnlib import (
    FlashAttention,
    KVCache,
    LatentAttention,
    LearnedBiasAttention,
    MultiHeadAttention,
    PhysicsGuidedAttention,
    RotaryPositions,
    ScaledDotProductAttention,
    TransformerBlock,
    WindowCache,
    add_sink,
    backprop,
    flash_attention,
    rotate,
)
from attnlib.grouped_query import in_order
from attnlib.multi_head import merge_heads, repeat_heads, split_heads
from attnlib.testing import check_cache
from drawn import (
    Largest,
    attention,
    close,
    leaves,
    normal,
    refuses,
    small_model,
    visible,
)

F64 = torch.float64
HEADS = {
    "plain": lambda: ScaledDotProductAttention(causal=True),
    "flash": lambda: FlashAttention(causal=True),
    "tiles": lambda: FlashAttention(causal=True, block_size=2),
    "bias": lambda: LearnedBiasAttention(6, 8, causal=True),
    "one a head": lambda: [ScaledDotProductAttention(causal=True) for _ in range(6)],
    "guided": lambda: PhysicsGuidedAttention(causal=True),
    "mixed": lambda: [
        *(FlashAttention(causal=True) for _ in range(5)),
        ScaledDotProductAttention(causal=True),
    ],
}


def layer_of(heads, num_kv_heads, **options):
    torch.manual_seed(0)
    return MultiHeadAttention(24, 6, heads, num_kv_heads=num_kv_heads, **options).double()


def repeated(layer):
    """The same layer with heads of keys of their own: a copy for each that shares them."""
    times = layer.num_heads // layer.num_kv_heads
    heads = layer.attention
    heads = list(heads) if isinstance(heads, torch.nn.ModuleList) else heads
    whole = MultiHeadAttention(24, 6, heads, rotary=layer.rotary).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("k_proj", "v_proj")):
                heads = parameter.unflatten(-1, (layer.num_kv_heads, -1))
                parameter = heads.repeat_interleave(times, dim=-2).flatten(-2)
            whole.get_parameter(name).copy_(parameter)
    return whole.eval()


# ── heads that share ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_every_attention_shares(heads, num_kv_heads, need_weights):
    layer = layer_of(HEADS[heads](), num_kv_heads).eval()
    whole, x = repeated(layer), normal(2, 5, 24)
    for mask in (None, normal(2, 1, 5, 5) > -1, normal(2, 6, 5, 5), normal(5, 5) > -1):
        found, weights = layer(x, mask=mask, need_weights=need_weights)
        expected, theirs = whole(x, mask=mask, need_weights=need_weights)
        close(found, expected)
        assert (weights is None) == (theirs is None)
        for a, b in zip(weights or [], theirs or [], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b)


@pytest.mark.parametrize("backend", ["auto", "fused", "torch", "triton"])
def test_back_ends_share(backend, monkeypatch):
    """Heads are repeated for the tiles only; output and gradients are the same."""
    from attnlib.flash.attention import BACKENDS

    heads = FlashAttention(causal=True, backend=backend)
    layer = layer_of(heads, 2).float()
    whole, x = repeated(layer).float(), normal(1, 4, 24).float()
    copies = []
    monkeypatch.setattr(
        "attnlib.multi_head.repeat_heads",
        lambda x, times: copies.append(times) or repeat_heads(x, times),
    )
    found = layer(x, need_weights=False)[0]
    assert copies == ([3, 3] if backend == "torch" else [])
    close(found, whole(x)[0], atol=1e-5)
    found.sin().sum().backward()
    whole(x)[0].sin().sum().backward()
    theirs = whole.k_proj.W.grad.unflatten(-1, (2, 3, 4)).sum(dim=-2).flatten(-2)
    close(layer.k_proj.W.grad, theirs, atol=1e-5)
    assert BACKENDS["torch"].grouped is None


class Sharper(ScaledDotProductAttention):
    def forward(self, query, key, value, mask=None, need_weights=True):
        return super().forward(2 * query, key, value, mask, need_weights)


class SharperTiles(FlashAttention):
    def forward(self, query, key, value, mask=None):
        return super().forward(2 * query, key, value, mask)


def biased():
    attention = LearnedBiasAttention(6)
    torch.nn.init.normal_(attention.bias)
    return attention


@pytest.mark.parametrize("make", [Sharper, SharperTiles, biased])
def test_a_forward_of_ones_own_is_asked_where_nobody_wants_weights(make):
    """What a parent knows of heads that share keys would pass it by."""
    layer, x = layer_of(make(), 2).eval(), normal(2, 5, 24)
    plain = layer_of(ScaledDotProductAttention(), 2).eval()
    for need_weights in (True, False):
        found = layer(x, need_weights=need_weights)[0]
        close(found, repeated(layer)(x)[0])
        assert not torch.allclose(found, plain(x)[0], rtol=0, atol=1e-3)


def test_cross_attention_of_shared_heads():
    layer = layer_of(None, 2)
    x, y = normal(2, 3, 24), normal(2, 7, 24, seed=1)
    q = split_heads(layer.q_proj(x), 6)
    k, v = split_heads(layer.k_proj(y), 2), split_heads(layer.v_proj(y), 2)
    for need_weights in (True, False):
        found = layer(x, y, need_weights=need_weights)[0]
        o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        close(found, layer.out_proj(merge_heads(o)))
    alone = layer(x[0], y[0], need_weights=False)[0]
    close(alone, found[0])


@pytest.mark.parametrize("times", [1, 2, 3, 6])
def test_gradient_of_shared_keys_by_hand(times):
    q, k, v = (
        normal(6, 4, 3),
        normal(6 // times, 5, 3, seed=1),
        normal(6 // times, 5, 2, seed=2),
    )
    d_output = normal(6, 4, 2, seed=3)
    d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
    for a in range(6):
        head = backprop.ScaledDotProductAttention(causal=True)
        head.forward(*(x.numpy() for x in (q[a], k[a // times], v[a // times])))
        _, d_key, d_value = head.backward(d_output[a].numpy())
        d_k[a // times] += torch.from_numpy(d_key)
        d_v[a // times] += torch.from_numpy(d_value)
    k.requires_grad_()
    v.requires_grad_()
    plain = ScaledDotProductAttention(causal=True)
    seen = visible(4, 5, causal=True)
    for output in (
        plain.attend_groups(q, k, v),
        plain(q, repeat_heads(k, times), repeat_heads(v, times))[0],
        F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True),
    ):
        close(torch.autograd.grad(output, (k, v), d_output), (d_k, d_v))


def test_a_layer_of_shared_heads_is_exported():
    layer = layer_of(ScaledDotProductAttention(causal=True), 2).eval()
    tokens = torch.export.Dim("tokens", min=2, max=64)
    sizes = {"query": {1: tokens}, "need_weights": None}
    given = (normal(2, 5, 24),), {"need_weights": False}
    program = torch.export.export(layer, *given, dynamic_shapes=sizes).module()
    for x in (normal(2, 5, 24), normal(2, 9, 24)):
        close(program(x, need_weights=False)[0], layer(x, need_weights=False)[0])


def test_gradients_of_a_layer():
    layer, x = layer_of(ScaledDotProductAttention(causal=True), 2), normal(3, 24)

    def forward(w_k, w_v, need_weights):
        parameters = {"k_proj.W": w_k, "v_proj.W": w_v}
        call = (x[None],), {"need_weights": need_weights}
        return torch.func.functional_call(layer, parameters, *call)[0].sin().sum()

    for need_weights in (True, False):
        w = leaves((layer.k_proj.W, layer.v_proj.W))
        assert torch.autograd.gradcheck(forward, (*w, need_weights), fast_mode=True)


def test_without_num_kv_heads_nothing_has_changed():
    x, outputs, shown = normal(2, 5, 24), [], set()
    for options in ({}, {"num_kv_heads": None}, {"num_kv_heads": 6}):
        torch.manual_seed(1)
        layer = MultiHeadAttention(24, 6, **options).double()
        assert {tuple(p.W.shape) for p in (layer.q_proj, layer.k_proj)} == {(24, 24)}
        outputs.append(layer(x)[0])
        shown.add(repr(layer))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert len(shown) == 1 and "num_kv_heads" not in shown.pop()
    assert "num_heads=6, num_kv_heads=2" in repr(layer_of(None, 2))


def test_dropout_acts_on_shared_heads():
    layer = layer_of(ScaledDotProductAttention(dropout=0.5, causal=True), 2).train()
    x, outputs = normal(2, 5, 24), []
    for need_weights in (False, True):
        torch.manual_seed(2)
        outputs.append(layer(x, need_weights=need_weights)[0])
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], layer.eval()(x)[0])


def test_no_copies_where_heads_can_share():
    """A step of one token makes no tensor as large as the repeated keys."""
    layer, cache = layer_of(ScaledDotProductAttention(causal=True), 1), KVCache(100)
    with torch.no_grad():
        layer(normal(1, 99, 24), cache=cache, need_weights=False)
        with Largest() as largest:
            layer(normal(1, 1, 24), cache=cache, need_weights=False)
    assert cache.nbytes == 8 * 2 * 100 * 4
    assert largest.numbers < 6 * 100 * 4


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_model_writes_the_same_with_a_cache(num_kv_heads):
    shared = {"num_heads": 4, "num_kv_heads": num_kv_heads}
    model = small_model(**shared, context_length=24, positions="rotary").double().eval()
    ids = torch.randint(11, (2, 5))
    caches = [KVCache(20) for _ in model.blocks]
    texts = []
    for cache in (False, True, caches):
        generator = torch.Generator().manual_seed(4)
        texts.append(model.generate(ids, 12, generator=generator, cache=cache))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert caches[0].keys.shape == (2, num_kv_heads, 20, 4)
    assert {b.attention.num_kv_heads for b in model.blocks} == {num_kv_heads}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (4, ValueError, "num_kv_heads: expected a divisor of num_heads = 6, got 4"),
        (12, ValueError, "num_kv_heads: expected a divisor of num_heads = 6, got 12"),
        (0, ValueError, "num_kv_heads: expected at least 1, got 0"),
        (-2, ValueError, "num_kv_heads: expected at least 1, got -2"),
        (True, TypeError, "num_kv_heads: expected a whole number, got True"),
        (2.0, TypeError, "num_kv_heads: expected a whole number, got 2.0"),
    ],
)
def test_heads_that_do_not_divide_are_refused(number, error, message):
    for make in (
        lambda: MultiHeadAttention(24, 6, num_kv_heads=number),
        lambda: TransformerBlock(24, 6, num_kv_heads=number),
        lambda: small_model(embed_dim=24, num_heads=6, num_kv_heads=number),
    ):
        with refuses(message, error):
            make()


# ── a cache for windows ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_the_suite_passes(window, as_shipped):
    check_cache(lambda capacity: WindowCache(window, capacity), window=window)


def test_a_window_that_is_never_full_keeps_the_whole_contract(as_shipped):
    check_cache(lambda capacity: WindowCache(8, capacity))


def returning(change):
    """A cache that returns something else, made of itself and what it should return."""

    def append(self, key, value):
        return change(self, *WindowCache.append(self, key, value))

    return type("Returning", (WindowCache,), {"append": append})


def in_ring_order(cache, keys, values):
    """As they lie there, where the last token is one alone."""
    full = keys.shape[-2] == cache.window < len(cache)
    return (cache.keys.clone(), cache.values.clone()) if full else (keys, values)


def views(cache, keys, values):
    if len(cache) > cache.window:
        return keys, values
    return cache.keys[..., : len(cache), :], cache.values[..., : len(cache), :]


class Longer(WindowCache):
    """Keeps one token more than it says."""

    def __init__(self, window, capacity):
        super().__init__(window + 1, capacity)


class Shorter(WindowCache):
    def __init__(self, window, capacity):
        super().__init__(max(1, window - 1), capacity)


class CountsKept(WindowCache):
    def __len__(self):
        return min(self.length, self.window)


class AnyLength(WindowCache):
    def truncate(self, length):
        self.length = length


class Endless(WindowCache):
    def __init__(self, window, capacity):
        super().__init__(window)


class TakesBackTwo(WindowCache):
    def truncate(self, length):
        if length and max(0, length - self.window + 1) < self.length - self.window:
            super().truncate(length)
        self.length = length


BROKEN = {
    "longer": (Longer, "keys of shape"),
    "shorter": (Shorter, "keys of shape"),
    "keeps all": (lambda window, capacity: KVCache(capacity), "keys of shape"),
    "in the ring's order": (returning(in_ring_order), "other keys than the last ones"),
    "views": (returning(views), "what append 0 returned has changed"),
    "counts what it keeps": (CountsKept, "len is 3, not the 4 tokens read"),
    "its own values": (returning(lambda cache, keys, values: (keys, values.flip(-2))),
                       "other values than the last ones"),
    "any length": (AnyLength, "what it has forgotten: accepted"),
    "endless": (Endless, "a full cache: accepted"),
    "takes back two": (TakesBackTwo, "one more is taken back: accepted"),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "words"), BROKEN.values(), ids=BROKEN)
def test_the_suite_notices(broken, words, as_shipped):
    with pytest.raises(AssertionError, match=words):
        check_cache(lambda capacity: broken(3, capacity), window=3)


@given(st.data())
def test_any_appends_are_a_list(data):
    """A ring and a plain list of tokens, given the same random commands."""
    window = data.draw(st.integers(1, 5))
    cache, told, kept_from = WindowCache(window), [], 0
    for count in range(15):
        if data.draw(st.integers(0, 3)):
            size = data.draw(st.integers(0, 7))
            new = [[count + i / 8, -count] for i in range(size)]
            piece = torch.tensor(new, dtype=F64).reshape(1, size, 2)
            keys, values = cache.append(piece, piece[..., :1])
            first = max(kept_from, len(told) - window + min(1, size))
            told += new
            assert keys.reshape(-1, 2).tolist() == told[first:]
            assert values.reshape(-1).tolist() == [row[0] for row in told[first:]]
            kept_from = max(kept_from, len(told) - window)
        elif told:
            length = data.draw(st.integers(0, len(told)))
            if length and max(0, length - window + 1) < kept_from:
                with pytest.raises(ValueError, match=r"^length: expected 0, or at least"):
                    cache.truncate(length)
            else:
                cache.truncate(length)
                told, kept_from = told[:length], kept_from if length else 0
        assert len(cache) == len(told)
        assert cache.keys is None or cache.keys.shape[-2] == window


def test_memory_and_words():
    cache = WindowCache(4)
    assert cache.nbytes == 0 and repr(cache) == "WindowCache(window=4), 0 tokens"
    for _ in range(9):
        cache.append(torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5, 6))
    assert cache.nbytes == 4 * 2 * 3 * 4 * (8 + 6)
    assert repr(cache) == "WindowCache(window=4), 45 tokens" and cache.capacity > 10**9
    where = cache.keys.data_ptr()
    cache.truncate(0)
    cache.append(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 6))
    assert cache.keys.data_ptr() == where


def test_in_order():
    ring = torch.tensor([[4.0], [5.0], [2.0], [3.0]])  # tokens 2 to 5
    for first, end in ((2, 6), (3, 5), (4, 6), (5, 5), (2, 4)):
        found = torch.cat(in_order(ring, first, end))
        assert found.flatten().tolist() == list(range(first, end))


WINDOWED = {
    "bias": LearnedBiasAttention(4, 8, causal=True, window=3),
    "tiles": FlashAttention(causal=True, block_size=4, window=3),
    "plain": ScaledDotProductAttention(causal=True, window=3),
    "list": [ScaledDotProductAttention(causal=True, window=3 - i % 2) for i in range(4)],
}


@pytest.mark.parametrize("heads", WINDOWED)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_text_with_a_ring_is_that_with_all(heads, positions):
    sizes = {"context_length": 20, "num_heads": 4, "num_kv_heads": 2}
    model = small_model(**sizes, attention=WINDOWED[heads], positions=positions)
    model, ids = model.double().eval(), torch.randint(11, (3, 7))
    for front in (None, torch.tensor([0, 2, 5])):
        texts = []
        for kind in (None, KVCache, lambda capacity: WindowCache(3)):
            caches = False if kind is None else [kind(20) for _ in model.blocks]
            options = {"cache": caches, "padding": front}
            generator = torch.Generator().manual_seed(6)
            texts.append(model.generate(ids, 12, generator=generator, **options))
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
        assert all(c.keys.shape == (3, 2, 3, 4) for c in caches)


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 1, 4, 2], [2, 9, 1]])
def test_logits_with_a_ring_of_any_larger_size(sizes):
    near = ScaledDotProductAttention(causal=True, window=3)
    shared = {"num_heads": 4, "num_kv_heads": 2, "attention": near}
    model = small_model(**shared, positions="rotary").double().eval()
    ids = torch.randint(11, (2, 12))
    with torch.no_grad():
        expected = model(ids)
        for window in (3, 4, 12):
            for weights in (False, True):
                caches = [WindowCache(window) for _ in model.blocks]
                parts = [model(p, weights, cache=caches) for p in ids.split(sizes, dim=1)]
                parts = [x[0] for x in parts] if weights else parts
                close(torch.cat(parts, dim=1), expected)


def test_positions_right_after_the_ring_is_full():
    rotary = RotaryPositions(4)
    layer = layer_of(ScaledDotProductAttention(causal=True, window=3), 2, rotary=rotary)
    cache, x = WindowCache(3), normal(1, 9, 24)
    with torch.no_grad():
        for t in range(9):
            layer(x[:, t : t + 1], cache=cache)
            turned = rotary(split_heads(layer.k_proj(x[:, t : t + 1]), 2), t)
            assert torch.equal(cache.keys[:, :, t % 3], turned[:, :, 0])


@pytest.mark.usefixtures("as_shipped")
def test_a_ring_that_forgets_what_is_seen_is_refused():
    near = ScaledDotProductAttention(causal=True, window=4)
    for heads, seen in (
        (ScaledDotProductAttention(causal=True), "all tokens"),
        (near, "4 tokens"),
        (LearnedBiasAttention(6, 3, causal=True), "all tokens"),
        ([near] * 6, "4 tokens"),
    ):
        cache = WindowCache(3)
        with pytest.raises(
            ValueError, match=rf"^cache: expected .* sees, {seen}, got a win"
        ):
            layer_of(heads, 2)(normal(1, 2, 24), cache=cache)
        assert len(cache) == 0


@pytest.mark.usefixtures("as_shipped")
def test_window_cache_refuses():
    for window, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match=r"^window: expected"):
            WindowCache(window)
    cache = WindowCache(3)
    cache.append(torch.ones(8, 2), torch.ones(8, 2))
    said = (
        "length: expected 0, or at least 7, since the first 5 tokens are forgotten, got 6"
    )
    with refuses(said):
        cache.truncate(6)
    with pytest.raises(ValueError, match=r"^length: expected between 0 and 8, got 9"):
        cache.truncate(9)


# ── a sink ───────────────────────────────────────────────────────────────────────────


def test_a_sink_is_one_more_score():
    q, k, v = normal(2, 3, 5, 4), normal(2, 3, 9, 4, seed=1), normal(2, 3, 9, 6, seed=2)
    mask = visible(5, 9, causal=True, window=3)
    mask[-1] = False  # the last sees none
    sink = normal(3, 1, seed=3, grad=True)
    expected = attention(q, k, v, mask, sink=sink)
    found = add_sink(*flash_attention(q, k, v, mask, return_lse=True), sink)
    close(found, expected)
    assert (found[0][..., -1, :] == 0).all()
    d_output = torch.randn_like(found[0])
    close(*(torch.autograd.grad(x[0], sink, d_output) for x in (found, expected)))


def test_no_sink_and_an_endless_one():
    output, lse = normal(4, 3), normal(4)
    same, unchanged = add_sink(output, lse, torch.tensor(-math.inf, dtype=F64))
    assert torch.equal(same, output)
    close(unchanged, lse)
    gone, _ = add_sink(output, lse, torch.tensor(1e4, dtype=F64))
    assert (gone == 0).all()
    huge, total = add_sink(output, lse + 1e4, torch.tensor(1e4, dtype=F64))
    assert huge.isfinite().all() and total.isfinite().all()
    nothing = torch.zeros(2, 3, dtype=F64), torch.full((2,), -math.inf, dtype=F64)
    found, lse = add_sink(*nothing, torch.tensor(-math.inf, dtype=F64))
    assert (found == 0).all() and (lse == -math.inf).all()


# ── latent attention ─────────────────────────────────────────────────────────────────


def latent(**options):
    torch.manual_seed(8)
    return LatentAttention(12, 3, 5, 2, **options).double()


def latent_by_formula(layer, x, mask=None):
    """Every pair of tokens of (n, 12), head by head."""
    h, d_k, d_r = layer.num_heads, 12 // layer.num_heads, layer.d_rotary
    c, r = x @ layer.down_proj.W, rotate(x @ layer.k_rotary_proj.W)
    outputs = []
    for a in range(h):
        part, turn = slice(a * d_k, (a + 1) * d_k), slice(a * d_r, (a + 1) * d_r)
        q, u = (x @ layer.q_proj.W)[:, part], rotate((x @ layer.q_rotary_proj.W)[:, turn])
        k, v = c @ layer.k_up_proj.W[:, part], c @ layer.v_up_proj.W[:, part]
        allowed = visible(len(x), len(x), causal=True)
        allowed = allowed if mask is None else allowed & mask
        s = ((q @ k.T + u @ r.T) / math.sqrt(d_k + d_r)).masked_fill(~allowed, -math.inf)
        outputs.append(torch.nan_to_num(s.softmax(dim=-1)) @ v)
    return torch.cat(outputs, dim=-1) @ layer.out_proj.W


@pytest.mark.parametrize("absorb", [True, False, None])
def test_latent_attention_against_its_formula(absorb):
    layer, x = latent(), normal(2, 7, 12)
    expected = torch.stack([latent_by_formula(layer, row) for row in x])
    close(layer(x, absorb=absorb), expected)
    close(layer(x[0], absorb=absorb), expected[0])
    mask = normal(7, 7, seed=1) > -0.5
    expected = torch.stack([latent_by_formula(layer, row, mask) for row in x])
    close(layer(x, mask, absorb=absorb), expected)
    close(layer(x, mask[None, None], absorb=absorb), expected)
    for sizes in ([7], [1] * 7, [3, 1, 3]):
        cache, whole = KVCache(7), layer(x)
        with torch.no_grad():
            parts = [layer(p, cache=cache, absorb=absorb) for p in x.split(sizes, dim=1)]
        close(torch.cat(parts, dim=1), whole)
        assert cache.nbytes == 8 * 2 * 7 * (5 + 2)


def test_both_forms_have_the_same_gradients():
    layer, x = latent(), normal(2, 4, 12).requires_grad_()
    d_output = normal(2, 4, 12, seed=2)
    wanted = (x, *layer.parameters())
    one, two = (
        torch.autograd.grad(layer(x, absorb=absorb), wanted, d_output)
        for absorb in (True, False)
    )
    close(one, two)
    assert len(one) == 8 and all(g.abs().max() > 0 for g in one)
    assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)


def test_latent_attention_keeps_its_numbers():
    layer = LatentAttention(12, 3, 5, 2, base=500.0)
    assert (layer.d_latent, layer.d_rotary, layer.rotary.base) == (5, 2, 500.0)
    assert sum(p.numel() for p in layer.parameters()) == (
        12 * 12 + 12 * 6 + 12 * 5 + 12 * 2 + 2 * 5 * 12 + 12 * 12
    )
    x = torch.randn(2, 3, 12)
    assert layer(x).dtype == torch.float32 and layer.half()(x.half()).dtype == torch.float16


@pytest.mark.usefixtures("as_shipped")
def test_latent_attention_refuses():
    for arguments, message in (
        ((12, 5, 5, 2), "embed_dim: expected a multiple of num_heads = 5, got 12"),
        ((12, 0, 5, 2), "num_heads: expected at least 1, got 0"),
        ((12, 3, 0, 2), "d_latent: expected at least 1, got 0"),
        ((12, 3, 5, 3), "d_k: expected an even number of features, got 3"),
    ):
        with refuses(message):
            LatentAttention(*arguments)
    layer, x = latent(), normal(2, 3, 12)
    with pytest.raises(ValueError, match=r"^x: expected at least 2 dimensions"):
        layer(x[..., :11])
    with pytest.raises(TypeError, match=r"^x: expected torch.float64"):
        layer(x.float())
    with pytest.raises(ValueError, match=r"^mask: expected 2 dimensions"):
        layer(x, torch.ones(2, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^cache: expected one that keeps .* all tokens"):
        layer(x, cache=WindowCache(2))
    with pytest.raises(ValueError, match=r"^key: expected no gradient"):
        layer(x, cache=KVCache(3))
    cache = KVCache(2)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^key: expected at most 2 more"):
        layer(x, cache=cache)
