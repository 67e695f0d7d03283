"""Windows: to the token, in every combination, and refused where they are none."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from attnlib import (
    CausalAttention,
    FlashAttention,
    KVCache,
    LanguageModel,
    LearnedBiasAttention,
    PhysicsGuidedAttention,
    ScaledDotProductAttention,
    causal_mask,
    flash_attention,
    fused_attention,
    masked_softmax,
    window_mask,
)
from attnlib.flash import (
    BACKENDS,
    TiledAttention,
    block_sizes,
    flash_backward,
    flash_forward,
    fused_suits,
    narrow_window,
    row_blocks,
    visible_tiles,
)
from attnlib.testing import check_attention, random_inputs

SIZES = ((5, 5), (3, 7), (1, 6), (7, 3), (4, 0), (0, 4))
WINDOWS = (1, 2, 5, 100)


def visible(queries, keys, window, causal):
    """By the words: query i is token i + M − N, and sees itself and window − 1 others."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i, j in itertools.product(range(queries), range(keys)):
        back = i + keys - queries - j  # how many tokens the key lies behind
        seen[i, j] = 0 <= back < window if causal else -window < back < window
    return seen


def masks(queries, keys):
    """None, boolean and additive ones, that broadcast or not, with an empty row."""
    allowed = torch.rand(queries, keys, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed[1:2] = False
    yield from (None, allowed, allowed[:1], torch.tensor(True))
    if keys:
        yield from (allowed[:, :1] | True, allowed.any(dim=0))
    added = torch.zeros(2, queries, keys, dtype=torch.float64) + 0.5
    yield added.masked_fill(~allowed, -torch.inf)


def oracle(query, key, value, mask, seen, scale=None):
    """Attention with what is seen as a mask; output and weights."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (scale * query @ key.mT).masked_fill(~seen, -torch.inf)
    if mask is not None:
        blocked = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        scores = scores if mask.dtype == torch.bool else scores + mask
        scores = scores.masked_fill(blocked, -torch.inf)
    weights = masked_softmax(scores)
    return weights @ value, weights


def gradients(output, inputs):
    torch.manual_seed(3)
    total = (output * torch.randn_like(output)).sum()
    options = {"materialize_grads": True, "retain_graph": True}
    return torch.autograd.grad(total, inputs, **options)


def agree(attend, queries, keys, causal, window, with_gradients=True):
    """An attention (query, key, value, mask) -> output against the oracle."""
    seen = visible(queries, keys, window, causal)
    for mask in masks(queries, keys):
        inputs = [x.requires_grad_() for x in random_inputs((2,), queries, keys)]
        output = attend(*inputs, mask)
        expected, weights = oracle(*inputs, mask, seen)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        assert (output[(weights == 0).all(dim=-1)] == 0).all()
        if with_gradients:
            for ours, right in zip(
                gradients(output, inputs), gradients(expected, inputs), strict=True
            ):
                torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_mask(queries, keys, window):
    mask = window_mask(queries, keys, window)
    assert mask.dtype == torch.bool and mask.shape == (queries, keys)
    assert torch.equal(mask, visible(queries, keys, window, causal=False))
    both = mask & causal_mask(queries, keys)
    assert torch.equal(both, visible(queries, keys, window, causal=True))
    assert window_mask(queries, keys, window, "meta").device.type == "meta"


def test_window_by_hand():
    """Five tokens, of which the last three ask; each sees itself and the one before."""
    seen = (window_mask(3, 5, 2) & causal_mask(3, 5)).int().tolist()
    assert seen == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert window_mask(2, 3, 2).int().tolist() == [[1, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_plain_and_fused(queries, keys, causal, window):
    attention = ScaledDotProductAttention(causal=causal, window=window)
    agree(lambda *x: attention(*x)[0], queries, keys, causal, window)
    agree(
        lambda *x: attention(*x, need_weights=False)[0],
        queries,
        keys,
        causal,
        window,
        False,
    )
    agree(
        lambda *x: fused_attention(*x, causal=causal, window=window),
        *(queries, keys, causal, window),
    )
    query, key, value = random_inputs((2,), queries, keys)
    _, weights = attention(query, key, value)
    _, expected = oracle(query, key, value, None, visible(queries, keys, window, causal))
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_everything_is_none(causal):
    for queries, keys in ((5, 5), (3, 7), (1, 6), (7, 3)):
        inputs = random_inputs((2,), queries, keys)
        for window in (max(queries, keys), 2**40):
            with_window = ScaledDotProductAttention(causal=causal, window=window)
            without = ScaledDotProductAttention(causal=causal)
            for ours, right in zip(with_window(*inputs), without(*inputs), strict=True):
                torch.testing.assert_close(ours, right, rtol=1e-14, atol=1e-14)
            options = {"causal": causal}
            found = fused_attention(*inputs, **options, window=window)
            assert torch.equal(found, fused_attention(*inputs, **options))


def test_a_causal_window_of_one_is_the_token_itself():
    query, key, value = random_inputs((2,), 6, 6)
    output, weights = ScaledDotProductAttention(causal=True, window=1)(query, key, value)
    torch.testing.assert_close(output, value)
    assert torch.equal(weights, torch.eye(6, dtype=torch.float64).expand(2, 6, 6))


def test_one_query_reads_the_last_keys_only(monkeypatch):
    """Decoding: no mask is formed, and the keys before the window are not looked at."""
    calls = []

    def spy(query, key, value, attn_mask=None, **options):
        calls.append((key.shape[-2], value.shape[-2], attn_mask))
        return real(query, key, value, attn_mask=attn_mask, **options)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    query, key, value = random_inputs((2, 3), 1, 50)
    for causal in (False, True):
        output = fused_attention(query, key, value, causal=causal, window=4)
        right = real(query, key[..., -4:, :], value[..., -4:, :])
        torch.testing.assert_close(output, right)
    assert calls == [(4, 4, None)] * 2
    fused_attention(*random_inputs((2, 3), 5, 50), causal=True, window=4)
    assert calls[-1][0] == 8 and calls[-1][2].shape == (5, 8)


def test_dropout_acts_inside_of_the_window():
    query, key, _ = random_inputs((), 40, 40)
    attention = ScaledDotProductAttention(0.5, causal=True, window=4).train()
    torch.manual_seed(0)
    output, weights = attention(query, key, torch.eye(40, dtype=torch.float64))
    seen = visible(40, 40, 4, causal=True)
    assert torch.equal(weights != 0, seen) and (output[~seen] == 0).all()
    kept = output != 0
    torch.testing.assert_close(output[kept], 2 * weights[kept])
    assert 0.3 < kept.sum() / seen.sum() < 0.7


def test_causal_attention_with_a_window():
    """Every layer of a module passes it on; a token sees the three last ones."""
    torch.manual_seed(0)
    attention = CausalAttention(6, 4, window=3)
    x = torch.randn(2, 9, 6)
    output, weights = attention(x, return_weights=True)
    assert torch.equal(weights[0] != 0, visible(9, 9, 3, causal=True))
    torch.testing.assert_close(attention(x), output)
    assert CausalAttention(6, 4).attention.window is None
    assert isinstance(attention, nn.Module) and attention.attention.window == 3


numbers = st.integers(1, 9)


@given(st.integers(1, 20), st.integers(0, 20), numbers, numbers, numbers, st.booleans())
def test_tiles_are_those_that_somebody_sees(queries, keys, rows, cols, window, causal):
    """Each visible pair is in one tile, each tile has some, a whole one has only such."""
    seen = visible(queries, keys, window, causal)
    covered = torch.zeros_like(seen)
    for block in row_blocks(queries, rows):
        short = 0
        for part, partial in visible_tiles(block, queries, keys, causal, cols, window):
            tile = seen[block, part]
            assert tile.any(dim=0).all() and 0 < tile.shape[1] <= cols
            assert partial or tile.all()
            assert not covered[block, part].any()
            covered[block, part] = True
            short += tile.shape[1] < cols
        whole = seen[block].all(dim=0)
        inside = [
            p for p in tiles_of(block, queries, keys, causal, cols, window) if not p[1]
        ]
        assert sum(p.stop - p.start for p, _ in inside) >= whole.sum() - 1
        assert short <= 3
    assert covered[seen].all()


def tiles_of(block, queries, keys, causal, cols, window):
    return list(visible_tiles(block, queries, keys, causal, cols, window))


def test_tiles_outside_of_the_window_are_skipped(monkeypatch):
    """Counted: 32 blocks of queries times 32 of keys, of which a window leaves a band."""
    made = []
    scores = TiledAttention.scores

    def counted(self, rows):
        for cols, s in scores(self, rows):
            made.append(s.shape[1] * s.shape[2])
            yield cols, s

    monkeypatch.setattr(TiledAttention, "scores", counted)
    inputs = [torch.randn(1, 512, 4, requires_grad=True) for _ in range(3)]
    sizes = {"block_size": 16}
    for window, causal, tiles in (
        (None, False, 32 * 32),
        (None, True, 32 * 33 // 2),
        # a block of 16 queries and its diagonal tile, a whole and a cut one before it; two
        # blocks have fewer before them
        (32, True, 30 * 3 + 1 + 2),
        (1, True, 32),
        (1, False, 32),
        (16, False, 30 * 3 + 2 * 2),
    ):
        made.clear()
        output = flash_attention(*inputs, causal=causal, window=window, **sizes)
        assert len(made) == tiles and sum(made) <= 256 * tiles
        made.clear()
        output.sum().backward()
        assert len(made) == tiles
    made.clear()
    flash_attention(*inputs, causal=True, window=32)  # sizes of its own
    assert sum(made) < 512 * 512 / 3


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_tiles_and_backends(queries, keys, causal, window):
    for size in ((2, 3), None):
        options = {"causal": causal, "window": window, "block_size": size}
        agree(lambda *x, o=options: flash_attention(*x, **o), queries, keys, causal, window)
    for backend in ("auto", "fused"):
        attention = FlashAttention(causal=causal, window=window, backend=backend)
        agree(lambda *x, a=attention: a(*x)[0], queries, keys, causal, window)


@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp_and_the_gradient_of_a_mask(causal):
    seen = visible(4, 6, 2, causal)
    query, key, value = (x.requires_grad_() for x in random_inputs((2,), 4, 6))
    mask = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    options = {"causal": causal, "window": 2, "block_size": (3, 2), "return_lse": True}
    output, lse = flash_attention(query, key, value, mask, **options)
    scores = (query @ key.mT / 8**0.5 + mask).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1))
    inputs = (query, key, value, mask)
    expected = torch.softmax(scores, dim=-1) @ value
    ours = gradients(output, inputs), gradients(lse, inputs[:2])
    right = gradients(expected, inputs), gradients(scores.logsumexp(dim=-1), inputs[:2])
    for a, b in zip(ours[0] + ours[1], right[0] + right[1], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_a_gradient(causal):
    inputs = [x.requires_grad_() for x in random_inputs((), 4, 5)]
    options = {"causal": causal, "window": 2, "block_size": (3, 2)}
    assert torch.autograd.gradgradcheck(
        lambda *x: flash_attention(*x, **options), inputs, fast_mode=True
    )


@pytest.mark.parametrize("causal", [False, True])
def test_the_widest_window_gives_the_same_bits_in_tiles(causal):
    """In one dtype and size of tile, a window that hides nothing changes no bit."""
    for queries, keys in ((70, 70), (30, 70), (700, 40)):
        inputs = [x.float() for x in random_inputs((2,), queries, keys)]
        widest = keys if causal else max(queries, keys)
        assert narrow_window(widest, queries, keys, causal) is None
        assert narrow_window(widest - 1, queries, keys, causal) == widest - 1
        for size in (None, 16):
            options = {"causal": causal, "block_size": size}
            plain = flash_attention(*inputs, **options)
            for window in (widest, 2**40):
                assert torch.equal(
                    flash_attention(*inputs, window=window, **options), plain
                )


def test_tiles_fit_to_the_window():
    assert block_sizes(None, 1, 8192, True)[0] == 1024
    assert block_sizes(None, 1, 8192, True, window=1024)[0] == 512
    assert block_sizes(None, 1, 8192, True, window=3)[0] == 128
    assert block_sizes((7, 9), 1, 8192, True, window=3) == (7, 9)


def test_what_auto_takes(monkeypatch, as_shipped):
    """PyTorch's function only where it needs no mask of all pairs."""
    heard = []
    for name, backend in BACKENDS.items():
        spy = backend._replace(
            attention=lambda *x, name=name, window, **_: (
                heard.append((name, window)) or x[2]
            )
        )
        monkeypatch.setitem(BACKENDS, name, spy)
    for queries, keys, window, expected in (
        (6, 6, 3, "torch"),
        (6, 6, 6, "fused"),
        (1, 6, 3, "fused"),
        (6, 6, None, "fused"),
    ):
        inputs = [x[..., :5] for x in random_inputs((2, 2), queries, keys)]
        FlashAttention(causal=True, window=window)(*inputs)
        assert heard.pop() == (expected, window)
        assert fused_suits(*inputs, None, True, window) is (expected == "fused")
    inputs = [x[..., :5] for x in random_inputs((2, 2), 2, 6)]
    assert fused_suits(*inputs, None, False, 6) and not fused_suits(*inputs, None, False, 5)


@pytest.mark.parametrize("backend", ["auto", "torch", "fused"])
@pytest.mark.parametrize("causal", [False, True])
def test_conformance(backend, causal, as_shipped):
    options = {"causal": causal, "backend": backend}
    check_attention(lambda: FlashAttention(**options, window=3))
    check_attention(lambda: FlashAttention(**options, window=1))
    if backend == "torch":
        check_attention(lambda: FlashAttention(**options, block_size=2, window=2))


def test_operators_with_a_window(as_shipped):
    """PyTorch's own checks of an operator; a batch of vmap; a graph."""
    inputs = [x.requires_grad_() for x in random_inputs((2,), 4, 5)]
    arguments = (*inputs, None, True, 0.5, [2, 3], 2)
    torch.library.opcheck(flash_forward, arguments)
    output, lse, *kept = flash_forward(*arguments)
    wanted = (*inputs, None, output, *kept, output, lse, False, True, 0.5, [2, 3], 2)
    torch.library.opcheck(
        flash_backward, [x.detach() if torch.is_tensor(x) else x for x in wanted]
    )
    plain = flash_attention(*inputs, causal=True, window=2)
    each = torch.vmap(lambda *x: flash_attention(*x, causal=True, window=2))(*inputs)
    torch.testing.assert_close(each, plain)
    graph = torch.compile(
        lambda *x: flash_attention(*x, causal=True, window=2),
        backend="eager",
        fullgraph=True,
    )
    torch.testing.assert_close(graph(*inputs), plain)
    for ours, right in zip(
        gradients(graph(*inputs), inputs), gradients(plain, inputs), strict=True
    ):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_with_a_bias(causal, as_shipped):
    """The learned bias and the guidance count inside of the window, and only there."""
    torch.manual_seed(0)
    learned = LearnedBiasAttention(2, 3, causal=causal, window=2).double()
    nn.init.normal_(learned.bias)
    guided = PhysicsGuidedAttention(causal=causal, window=2)
    guided.guide(torch.rand(6, dtype=torch.float64))
    seen = visible(4, 6, 2, causal)
    query, key, value = random_inputs((2, 2), 4, 6)
    for attention in (learned, guided):
        output, weights = attention(query, key, value)
        attention.window = None
        everything, _ = attention(query, key, value, seen)
        torch.testing.assert_close(output, everything)
        assert torch.equal(weights[0, 0] != 0, seen)
    options = {"causal": causal, "window": 2}
    check_attention(lambda: LearnedBiasAttention(2, **options), leading=[(2,), (3, 2)])
    check_attention(lambda: PhysicsGuidedAttention(**options))


BAD = (
    (0, ValueError),
    (-3, ValueError),
    (True, TypeError),
    (2.0, TypeError),
    ("2", TypeError),
)


@pytest.mark.parametrize(("window", "error"), BAD)
@pytest.mark.parametrize(
    "call",
    [
        lambda w: ScaledDotProductAttention(window=w),
        lambda w: CausalAttention(4, 4, window=w),
        lambda w: fused_attention(*random_inputs(), window=w),
        lambda w: flash_attention(*random_inputs(), window=w),
        lambda w: FlashAttention(window=w),
        lambda w: LearnedBiasAttention(2, window=w),
        lambda w: PhysicsGuidedAttention(window=w),
    ],
)
def test_refusals(call, window, error, as_shipped):
    with pytest.raises(error) as caught:
        call(window)
    expected = f"window: expected None or an integer of at least 1, got {window!r}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("attention", [ScaledDotProductAttention, FlashAttention])
def test_a_model_that_writes_with_a_cache(attention):
    """One query at a time, and pieces of several, see what the whole text sees at once."""
    torch.manual_seed(0)
    heads = attention(causal=True, window=3)
    model = LanguageModel(11, 20, 16, 2, 2, attention=heads).eval()
    ids = torch.randint(11, (2, 12))
    with torch.no_grad():
        whole = model(ids)
        caches = [KVCache(20) for _ in model.blocks]
        parts = [model(part, cache=caches) for part in ids.split((5, 1, 4, 1, 1), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)
        changed = ids.clone()
        changed[:, 0] = (changed[:, 0] + 1) % 11
        far = model(changed)[:, 5:]  # two blocks see 1 + 2 · 2 tokens, so not the first
    torch.testing.assert_close(far, whole[:, 5:])
    assert not torch.allclose(model(changed)[:, 4], whole[:, 4])
