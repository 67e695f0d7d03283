"""Heads that share keys, caches for windows, sinks, latent attention."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from attnlib import (
    FlashAttention,
    KVCache,
    LanguageModel,
    LatentAttention,
    LearnedBiasAttention,
    MultiHeadAttention,
    PhysicsGuidedAttention,
    ScaledDotProductAttention,
    TransformerBlock,
    WindowCache,
    add_sink,
    flash_attention,
    rotate,
    speculate,
)
from attnlib.base import repeat_heads
from attnlib.multi_head import merge_heads, split_heads
from attnlib.serving import Server
from attnlib.testing import check_cache
from drawn import (
    Largest,
    attention,
    close,
    draw,
    each_refused,
    normal,
    refuses,
    small_model,
    visible,
)

F64 = torch.float64
CAUSAL = partial(ScaledDotProductAttention, causal=True)
HEADS = {
    "plain": CAUSAL,
    "flash": partial(FlashAttention, causal=True),
    "tiles": partial(FlashAttention, causal=True, block_size=2),
    "bias": partial(LearnedBiasAttention, 6, 8, causal=True),
    "one a head": lambda: [CAUSAL() for _ in range(6)],
    "guided": partial(PhysicsGuidedAttention, causal=True),
    "mixed": lambda: [*(FlashAttention(causal=True) for _ in range(5)), CAUSAL()],
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
    """Output, weights and gradients are those of heads with copies of the keys."""
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
    mine, theirs = (
        torch.autograd.grad(y.sin().sum(), (x.k_proj.W, x.v_proj.W))
        for x, y in ((layer, found), (whole, expected))
    )
    for a, b in zip(mine, theirs, strict=True):
        close(a, b.unflatten(-1, (num_kv_heads, -1, 4)).sum(dim=-2).flatten(-2))


@pytest.mark.parametrize("backend", ["auto", "fused", "torch", "triton"])
def test_back_ends_share(backend, monkeypatch):
    """Heads are repeated for the tiles only; output and gradients are the same."""
    layer = layer_of(FlashAttention(causal=True, backend=backend), 2).float()
    whole, x, copies = repeated(layer).float(), normal(1, 4, 24).float(), []
    monkeypatch.setattr(
        "attnlib.base.repeat_heads",
        lambda x, times: copies.append(times) or repeat_heads(x, times),
    )
    found, expected = layer(x, need_weights=False)[0], whole(x)[0]
    assert copies == ([3, 3] if backend == "torch" else [])
    close(found, expected, atol=1e-5)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    theirs = whole.k_proj.W.grad.unflatten(-1, (2, 3, 4)).sum(dim=-2).flatten(-2)
    close(layer.k_proj.W.grad, theirs, atol=1e-5)


class Sharper(ScaledDotProductAttention):
    def forward(self, query, *inputs, **options):
        return super().forward(2 * query, *inputs, **options)


class SharperTiles(FlashAttention):
    def forward(self, query, *inputs):
        return super().forward(2 * query, *inputs)


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
    layer, x, y = layer_of(None, 2), normal(2, 3, 24), normal(2, 7, 24, seed=1)
    q = split_heads(layer.q_proj(x), 6)
    k, v = split_heads(layer.k_proj(y), 2), split_heads(layer.v_proj(y), 2)
    expected = layer.out_proj(merge_heads(attention(q, k, v)[0]))
    for need_weights in (True, False):
        close(layer(x, y, need_weights=need_weights)[0], expected)
    close(layer(x[0], y[0], need_weights=False)[0], expected[0])


def test_without_num_kv_heads_nothing_has_changed():
    x, layers = normal(2, 5, 24), [layer_of(None, number) for number in (None, 6)]
    torch.manual_seed(0)
    layers.append(MultiHeadAttention(24, 6).double())
    assert len({repr(layer) for layer in layers}) == 1 and "num_kv" not in repr(layers[0])
    assert all(torch.equal(layer(x)[0], layers[0](x)[0]) for layer in layers)
    assert "num_heads=6, num_kv_heads=2" in repr(layer_of(None, 2))


def test_dropout_and_export_of_shared_heads():
    layer, x, outputs = layer_of(CAUSAL(dropout=0.5), 2).train(), normal(2, 5, 24), []
    for need_weights in (False, True):
        torch.manual_seed(2)
        outputs.append(layer(x, need_weights=need_weights)[0])
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], layer.eval()(x)[0])
    tokens, fast = torch.export.Dim("tokens", min=2, max=64), {"need_weights": False}
    sizes = {"query": {1: tokens}, "need_weights": None}
    program = torch.export.export(layer, (x,), fast, dynamic_shapes=sizes).module()
    for x in (normal(2, 5, 24), normal(2, 9, 24)):
        close(program(x, **fast)[0], layer(x, **fast)[0])


def test_no_copies_where_heads_can_share():
    """A step of one token makes no tensor as large as the repeated keys."""
    layer, cache = layer_of(CAUSAL(), 1), KVCache(100)
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
    ids, caches = torch.randint(11, (2, 5)), [KVCache(20) for _ in model.blocks]
    texts = []
    for cache in (False, caches):
        luck = torch.Generator().manual_seed(4)
        texts.append(model.generate(ids, 12, generator=luck, cache=cache))
    assert torch.equal(*texts)
    assert caches[0].keys.shape == (2, num_kv_heads, 20, 4)
    assert {b.attention.num_kv_heads for b in model.blocks} == {num_kv_heads}


NUMBERS = {
    "expected a divisor of num_heads = 6, got 4": 4,
    "expected a divisor of num_heads = 6, got 12": 12,
    "expected at least 1, got 0": 0,
    "expected at least 1, got -2": -2,
    "expected a whole number, got True": True,
    "expected a whole number, got 2.0": 2.0,
}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("words", NUMBERS)
def test_heads_that_do_not_divide_are_refused(words):
    sizes, number = {"embed_dim": 24, "num_heads": 6}, NUMBERS[words]
    error = TypeError if "whole" in words else ValueError
    for make in (MultiHeadAttention, TransformerBlock, small_model):
        with refuses(f"num_kv_heads: {words}", error):
            make(**sizes, num_kv_heads=number)


# ── a cache for windows ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_the_suite_passes(window, as_shipped):
    """Also that for caches which forget nothing, where the window is never full."""
    check_cache(partial(WindowCache, window), window=window)
    if window == 7:
        check_cache(partial(WindowCache, 8))


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


class CountsKept(WindowCache):
    def __len__(self):
        return min(self.length, self.window)


class AnyLength(WindowCache):
    def truncate(self, length):
        self.length = length


class TakesBackTwo(WindowCache):
    def truncate(self, length):
        if length and max(0, length - self.window + 1) < self.length - self.window:
            super().truncate(length)
        self.length = length


BROKEN = {
    "longer": (lambda window, capacity: WindowCache(window + 1, capacity), "keys of shape"),
    "shorter": (lambda window, capacity: WindowCache(2, capacity), "keys of shape"),
    "keeps all": (lambda window, capacity: KVCache(capacity), "keys of shape"),
    "in the ring's order": (returning(in_ring_order), "other keys than the last ones"),
    "views": (returning(views), "what append 0 returned has changed"),
    "counts what it keeps": (CountsKept, "len is 3, not the 4 tokens read"),
    "its own values": (returning(lambda cache, keys, values: (keys, values.flip(-2))),
                       "other values than the last ones"),
    "any length": (AnyLength, "what it has forgotten: accepted"),
    "endless": (lambda window, capacity: WindowCache(window), "a full cache: accepted"),
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


def full():
    """Eight tokens, of which a window of three is left."""
    cache = WindowCache(3)
    cache.append(torch.ones(8, 2), torch.ones(8, 2))
    return cache


def read(heads):
    cache = WindowCache(3)
    try:
        layer_of(heads, 2)(normal(1, 2, 24), cache=cache)
    finally:
        assert len(cache) == 0


KEPT = "cache: expected one that keeps what a head sees,"
NEAR = partial(CAUSAL, window=4)
VALUES = {
    "window: expected at least 1, got 0": lambda: WindowCache(0),
    "window: expected at least 1, got -1": lambda: WindowCache(-1),
    "length: expected 0, or at least 7, since the first 5 tokens are forgotten, got 6": (
        lambda: full().truncate(6)
    ),
    "length: expected between 0 and 8, got 9": lambda: full().truncate(9),
    f"{KEPT} all tokens, got a window of 3": lambda: read(CAUSAL()),
    "cache: … sees, all tokens, got a window of 3": lambda: read(
        LearnedBiasAttention(6, 3, causal=True)
    ),
    f"{KEPT} 4 tokens, got a window of 3": lambda: read(NEAR()),
    "cache: … sees, 4 tokens, got a window of 3": lambda: read([NEAR()] * 6),
}
test_what_a_window_refuses = each_refused(ValueError, VALUES)
WHOLE = {"window: expected a whole number, got 2.0": lambda: WindowCache(2.0)}
test_a_window_is_whole = each_refused(TypeError, WHOLE)


WINDOWED = {
    "bias": LearnedBiasAttention(4, 8, causal=True, window=3),
    "tiles": FlashAttention(causal=True, block_size=4, window=3),
    "plain": CAUSAL(window=3),
    "list": [CAUSAL(window=3 - i % 2) for i in range(4)],
}


@pytest.mark.parametrize("heads", WINDOWED)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_text_with_a_ring_is_that_with_all(heads, positions):
    sizes = {"context_length": 20, "num_heads": 4, "num_kv_heads": 2}
    model = small_model(**sizes, attention=WINDOWED[heads], positions=positions)
    model, ids = model.double().eval(), torch.randint(11, (3, 7))
    for front in (None, torch.tensor([0, 2, 5])):
        caches, texts = [WindowCache(3) for _ in model.blocks], []
        for cache in (False, caches):
            luck = torch.Generator().manual_seed(6)
            given = {"cache": cache, "padding": front, "generator": luck}
            texts.append(model.generate(ids, 12, **given))
        assert torch.equal(*texts)
        assert all(c.keys.shape == (3, 2, 3, 4) for c in caches)


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 1, 4, 2], [2, 9, 1]])
def test_logits_with_a_ring_of_any_larger_size(sizes):
    shared = {"num_heads": 4, "num_kv_heads": 2, "attention": CAUSAL(window=3)}
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


# ── a sink ───────────────────────────────────────────────────────────────────────────


def test_a_sink_is_one_more_score():
    q, k, v = draw(2, 3, queries=5, keys=9, d_v=6)
    mask = visible(5, 9, causal=True, window=3)
    mask[-1] = False  # the last sees none
    for size in (1.0, -math.inf, 1e4):  # no sink, and one that leaves nothing
        sink = normal(3, 1, seed=3) + size
        sink.requires_grad_()
        expected = attention(q, k, v, mask, sink=sink)
        found = add_sink(*flash_attention(q, k, v, mask, return_lse=True), sink)
        close(found, expected)
        assert (found[0][..., -1, :] == 0).all()
        d_output = torch.randn_like(found[0])
        if size == 1.0:
            close(*(torch.autograd.grad(x[0], sink, d_output) for x in (found, expected)))
    output, lse = normal(4, 3), normal(4)
    huge, total = add_sink(output, lse + 1e4, torch.tensor(1e4, dtype=F64))
    assert huge.isfinite().all() and total.isfinite().all()


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
    close(layer(x, absorb=absorb)[0], expected)
    close(layer(x[0], absorb=absorb)[0], expected[0])
    mask = normal(7, 7, seed=1) > -0.5
    expected = torch.stack([latent_by_formula(layer, row, mask) for row in x])
    close(layer(x, mask, absorb=absorb)[0], expected)
    close(layer(x, mask[None, None], absorb=absorb)[0], expected)
    for sizes in ([7], [1] * 7, [3, 1, 3]):
        cache, (whole, _) = KVCache(7), layer(x)
        with torch.no_grad():
            parts = [layer(p, cache=cache, absorb=absorb)[0] for p in x.split(sizes, dim=1)]
        close(torch.cat(parts, dim=1), whole)
        assert cache.nbytes == 8 * 2 * 7 * (5 + 2)


def test_both_forms_have_the_same_gradients():
    layer, x = latent(), normal(2, 4, 12).requires_grad_()
    d_output = normal(2, 4, 12, seed=2)
    wanted = (x, *layer.parameters())
    one, two = (
        torch.autograd.grad(layer(x, absorb=absorb)[0], wanted, d_output)
        for absorb in (True, False)
    )
    close(one, two)
    assert len(one) == 8 and all(g.abs().max() > 0 for g in one)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("new", [1, 2, 5, 6, 8])
def test_of_the_two_forms_the_one_with_fewer_flops_is_taken(new):
    layer, x = latent(), normal(2, 8, 12)

    def flops(absorb):
        cache = KVCache(8)
        with torch.no_grad():
            if new < 8:
                layer(x[:, :-new], cache=cache)
            with FlopCounterMode(display=False) as counted:
                layer(x[:, -new:], None, False, cache, absorb=absorb)
        return counted.get_total_flops()

    absorbed, plain = flops(True), flops(False)
    assert absorbed != plain and flops(None) == min(absorbed, plain)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_latent_attention_stands_in_a_model(positions):
    """Written with caches, padded, by a server, drafted: the text is the same."""
    torch.manual_seed(0)
    model = LanguageModel(50, 64, 24, 3, 2, positions=positions).double().eval()
    for block in model.blocks:
        block.attention = LatentAttention(24, 3, 5, 2).double()
    ids = torch.randint(50, (2, 5))

    def write(ids, **options):
        draws = [torch.Generator().manual_seed(seed) for seed in range(2)]
        return model.generate(ids, 12, generator=draws, **options)

    expected = write(ids)
    assert torch.equal(write(ids, cache=True), expected)
    padded = torch.stack([F.pad(ids[0], (3, 0)), torch.cat([ids[1, :3], ids[1]])])
    mixed = write(padded, cache=True, padding=[3, 0])
    assert torch.equal(mixed[0, 3:], expected[0])
    server = Server(model, pages=20, page_size=4)
    draws = [torch.Generator().manual_seed(seed) for seed in range(2)]
    texts = [server.submit(x, 12, generator=g) for x, g in zip(ids, draws, strict=True)]
    list(server.run())
    assert [text.ids for text in texts] == expected.tolist()
    drafted = speculate(model, ids[0], 12, temperature=0.0)
    assert torch.equal(drafted, model.generate(ids[0], 12, temperature=0.0))
    _, weights = model(ids, return_weights=True)
    assert [len(heads) for heads in weights] == [3, 3]
    close(weights[0][2].sum(dim=-1), torch.ones(2, 5).double())
    caches = [KVCache(9) for _ in model.blocks]
    with torch.no_grad():
        model(ids, cache=caches)
        for cache in caches:
            cache.select(torch.tensor([1, 0, 1]))
        again = model(ids[[1, 0, 1], :1], cache=caches)
    close(again[0], again[2])


def test_latent_attention_keeps_its_numbers():
    layer, x = LatentAttention(12, 3, 5, 2, base=500.0), torch.randn(2, 3, 12)
    assert (layer.d_latent, layer.d_rotary, layer.rotary.base) == (5, 2, 500.0)
    sizes = (12 * 12, 12 * 6, 12 * 5, 12 * 2, 2 * 5 * 12, 12 * 12)
    assert sum(p.numel() for p in layer.parameters()) == sum(sizes)
    assert layer(x)[0].dtype == torch.float32
    assert layer.half()(x.half())[0].dtype == torch.float16


def without_gradients(cache):
    with torch.no_grad():
        latent()(X, cache=cache)


X = normal(2, 3, 12)
LATENT = {
    "embed_dim: expected a multiple of num_heads = 5, got 12": (
        lambda: LatentAttention(12, 5, 5, 2)
    ),
    "num_heads: expected at least 1, got 0": lambda: LatentAttention(12, 0, 5, 2),
    "d_latent: expected at least 1, got 0": lambda: LatentAttention(12, 3, 0, 2),
    "d_k: expected an even number…, got 3": lambda: LatentAttention(12, 3, 5, 3),
    "x: expected at least 2 dimensions…": lambda: latent()(X[..., :11]),
    "mask: expected 2 dimensions…": lambda: latent()(X, torch.ones(2, 3, 3) > 0),
    "cache: expected one that … all tokens…": lambda: latent()(X, cache=WindowCache(2)),
    "key: expected no gradient…": lambda: latent()(X, cache=KVCache(3)),
    "key: expected at most 2 more…": lambda: without_gradients(KVCache(2)),
}
test_what_latent_attention_refuses = each_refused(ValueError, LATENT)
LATENT_TYPES = {"x: expected torch.float64…": lambda: latent()(X.float())}
test_what_type_latent_attention_refuses = each_refused(TypeError, LATENT_TYPES)


def test_what_was_written_over_is_not_taken_for_the_beginning():
    """Of 5 tokens a window of 4 has lost the first, which the fourth would still see."""
    cache, x = WindowCache(4), torch.randn(5, 2)
    cache.append(x, x)
    with pytest.raises(ValueError, match="expected 0, or at least 4"):
        cache.truncate(3)
    cache.truncate(4)
    assert torch.equal(cache.append(x[4:], x[4:])[0], x[1:])
