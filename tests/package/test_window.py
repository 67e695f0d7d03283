"""Windows: to the token, in every combination, and refused where they are none."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlib import (
    CausalAttention,
    ScaledDotProductAttention,
    causal_mask,
    fused_attention,
    masked_softmax,
    window_mask,
)
from attnlib.testing import random_inputs

SIZES = ((5, 5), (3, 7), (1, 6), (7, 3), (4, 0), (0, 4), (2, 2))
WINDOWS = (1, 2, 3, 5, 100)


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
    return torch.autograd.grad(
        (output * torch.randn_like(output)).sum(), inputs, materialize_grads=True
    )


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
    ],
)
def test_refusals(call, window, error, as_shipped):
    with pytest.raises(error) as caught:
        call(window)
    expected = f"window: expected None or an integer of at least 1, got {window!r}"
    assert str(caught.value) == expected
