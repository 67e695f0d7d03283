"""Windows: to the token, in every combination, and refused where they are none."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlib import (
    CausalAttention,
    FlashAttention,
    LearnedBiasAttention,
    PhysicsGuidedAttention,
    ScaledDotProductAttention,
    causal_mask,
    flash_attention,
    fused_attention,
    window_mask,
)
from attnlib.flash import TiledAttention, narrow_window
from attnlib.testing import check_attention
from drawn import agree, close, draw, draw_mask, visible

SIZES = ((5, 5), (3, 7), (1, 6), (7, 3), (4, 0), (0, 4))
WINDOWS = (1, 2, 5, 100)


def masks(queries, keys):
    """None, boolean and additive ones, that broadcast or not, with an empty row."""
    allowed = draw_mask("boolean", queries, keys)
    yield from (None, allowed, allowed[:1], torch.tensor(True))
    if keys:
        yield from (allowed[:, :1] | True, allowed.any(dim=0))
    yield draw_mask("holes", 2, queries, keys)
    yield draw_mask("additive", queries, keys).requires_grad_()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_mask(queries, keys, window):
    mask = window_mask(queries, keys, window)
    assert mask.dtype == torch.bool and mask.shape == (queries, keys)
    assert torch.equal(mask, visible(queries, keys, window=window))
    both = mask & causal_mask(queries, keys)
    assert torch.equal(both, visible(queries, keys, causal=True, window=window))
    assert window_mask(queries, keys, window, "meta").device.type == "meta"


def output_of(make, query, key, value, mask=None, *, causal, window=None, **options):
    """What an attention that is made like this returns first."""
    return make(causal=causal, window=window)(query, key, value, mask, **options)[0]


ATTEND = {
    "plain": partial(output_of, ScaledDotProductAttention),
    "no weights": partial(output_of, ScaledDotProductAttention, need_weights=False),
    "fused": fused_attention,
    "tiles": partial(flash_attention, block_size=(2, 3), return_lse=True),
    "large tiles": partial(flash_attention, return_lse=True),
    "auto": partial(output_of, FlashAttention),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_every_attention(queries, keys, causal, window):
    inputs = draw(2, queries=queries, keys=keys, d_v=4)  # as wide: some suit no other
    for attend in ATTEND.values():
        for mask in masks(queries, keys):
            agree(attend, inputs, mask, causal=causal, window=window)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_everything_is_none(causal):
    """It changes no bit: in one dtype and size of tile, nothing is computed otherwise."""
    for queries, keys in ((70, 70), (30, 70), (700, 40)):
        inputs = draw(2, queries=queries, keys=keys, dtype=torch.float32)
        widest = keys if causal else max(queries, keys)
        assert narrow_window(widest, queries, keys, causal) is None
        assert narrow_window(widest - 1, queries, keys, causal) == widest - 1
        for attend in ATTEND.values():
            plain = attend(*inputs, causal=causal)
            for window in (widest, 2**40):
                close(attend(*inputs, causal=causal, window=window), plain, atol=0)


def test_one_query_reads_the_last_keys_only(monkeypatch):
    """Decoding: no mask is formed, and the keys before the window are not looked at."""
    calls = []

    def spy(query, key, value, attn_mask=None, **options):
        calls.append((key.shape[-2], value.shape[-2], attn_mask))
        return real(query, key, value, attn_mask=attn_mask, **options)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for causal in (False, True):
        fused_attention(*draw(2, 3, queries=1, keys=50), causal=causal, window=4)
    assert calls == [(4, 4, None)] * 2
    fused_attention(*draw(2, 3, queries=5, keys=50), causal=True, window=4)
    assert calls[-1][0] == 8 and calls[-1][2].shape == (5, 8)


def test_causal_attention_with_a_window():
    """Every layer of a module passes it on; a token sees the three last ones."""
    layer = CausalAttention(6, 4, window=3)
    output, weights = layer(x := torch.randn(2, 9, 6), return_weights=True)
    assert torch.equal(weights[0] != 0, visible(9, 9, causal=True, window=3))
    close(layer(x), output, atol=1e-6)


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
    # A block of queries has its diagonal tile, and one or two beside it, but at the ends.
    for window, causal, tiles in (
        (None, True, 32 * 33 // 2),
        (32, True, 30 * 3 + 1 + 2),
        (16, False, 30 * 3 + 2 * 2),
    ):
        made.clear()
        output = flash_attention(*inputs, causal=causal, window=window, block_size=16)
        assert len(made) == tiles and sum(made) <= 256 * tiles
        output.sum().backward()
        assert len(made) == 2 * tiles
    made.clear()
    flash_attention(*inputs, causal=True, window=32)  # sizes of its own
    assert sum(made) < 512 * 512 / 3


@pytest.mark.parametrize("backend", ["auto", "torch", "fused"])
@pytest.mark.parametrize("causal", [False, True])
def test_conformance(backend, causal, as_shipped):
    """Tiles of two queries and keys: test_every_attention."""
    check_attention(lambda: FlashAttention(causal=causal, backend=backend, window=3))


@pytest.mark.parametrize("causal", [False, True])
def test_heads_with_a_bias(causal):
    """The learned bias and the guidance count inside of the window, and only there."""
    torch.manual_seed(0)
    learned = LearnedBiasAttention(2, 3, causal=causal, window=2).double()
    nn.init.normal_(learned.bias)
    guided = PhysicsGuidedAttention(causal=causal, window=2)
    guided.guide(torch.rand(6, dtype=torch.float64))
    seen, inputs = visible(4, 6, causal, window=2), draw(2, 2)
    for heads in (learned, guided):
        output, weights = heads(*inputs)
        heads.window = None
        close(output, heads(*inputs, seen)[0])
        assert torch.equal(weights[0, 0] != 0, seen)


@pytest.mark.parametrize("window", [0, -3, True, 2.0, "2"])
@pytest.mark.parametrize(
    "call",
    [
        ScaledDotProductAttention,
        partial(CausalAttention, 4, 4),
        partial(fused_attention, *draw()),
        partial(flash_attention, *draw()),
        FlashAttention,
        partial(LearnedBiasAttention, 2),
        PhysicsGuidedAttention,
    ],
)
def test_refusals(call, window, as_shipped):
    with pytest.raises(ValueError if type(window) is int else TypeError) as caught:
        call(window=window)
    expected = f"window: expected None or an integer of at least 1, got {window!r}"
    assert str(caught.value) == expected
