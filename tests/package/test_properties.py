"""Properties of attention over random shapes, masks, dtypes and scales."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from attnlib import (
    CausalAttention,
    ScaledDotProductAttention,
    SelfAttention,
)
from drawn import attention, close, draw, draw_mask, normal, visible

LEADING = st.lists(st.integers(1, 3), max_size=3).map(tuple)
TOKENS = st.integers(0, 6)
MASKS = st.sampled_from([None, "boolean", "additive", "holes", "nothing"])


def make_mask(kind, leading, queries, keys, seed, dtype=torch.float64):
    """A mask that broadcasts over the last leading dimension, if there is one."""
    shape = (*leading[:-1], 1, queries, keys) if leading else (queries, keys)
    if kind == "nothing":
        return torch.zeros(shape, dtype=torch.bool)
    return draw_mask(kind, *shape, seed=seed + 1, dtype=dtype)


@given(
    LEADING, TOKENS, TOKENS, st.integers(1, 9), st.integers(0, 9), MASKS, st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
@example((), 0, 0, 1, 1, None, True, 0)
@example((2, 2), 6, 2, 8, 8, None, True, 0)  # causal with fewer keys: empty rows
def test_weights_and_output(leading, queries, keys, d_k, d_v, kind, causal, seed):
    query, key, value = inputs = draw(
        *leading, queries=queries, keys=keys, d_k=d_k, d_v=d_v, seed=seed
    )
    mask = make_mask(kind, leading, queries, keys, seed)
    output, weights = ScaledDotProductAttention(causal=causal)(query, key, value, mask)

    allowed = visible(queries, keys, causal).expand(*leading, queries, keys)
    if mask is not None:
        allowed = allowed & (mask if mask.dtype == torch.bool else mask > -torch.inf)
    assert (weights >= 0).all() and (weights[~allowed] == 0).all()
    torch.testing.assert_close(weights.sum(dim=-1), allowed.any(dim=-1).double())
    assert (output[~allowed.any(dim=-1)] == 0).all()
    close(output, weights @ value)
    close(output, attention(*inputs, mask, causal=causal)[0])


@given(
    LEADING, st.integers(1, 5), st.integers(1, 6), MASKS, st.floats(0, 1e4),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.integers(0, 99),
)  # fmt: skip
@example((), 5, 6, None, 1e4, torch.float16, 0)
@example((), 5, 6, "holes", 1e4, torch.float32, 0)
def test_large_scores_in_low_precision(leading, queries, keys, kind, size, dtype, seed):
    """Scores up to `size`: finite, rows sum to 1 or 0, and near the float64 result."""
    query, key, value = draw(*leading, queries=queries, keys=keys, d_k=64, seed=seed)
    scores = (query @ key.mT / 8).abs()  # unscaled up to 8e4, beyond float16
    factor = math.sqrt(size / scores.max())
    query, key, value = (x.to(dtype) for x in (factor * query, factor * key, value))
    mask = make_mask(kind, leading, queries, keys, seed, dtype)
    output, weights = ScaledDotProductAttention()(query, key, value, mask)
    assert output.dtype == weights.dtype == dtype
    assert output.isfinite().all() and weights.isfinite().all()
    sums = weights.double().sum(dim=-1)
    eps = torch.finfo(dtype).eps
    assert (((sums - 1).abs() < 4 * eps) | (sums == 0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_is_near_float64(dtype):
    query, key, value = draw(2, 3, queries=16, keys=24, d_k=32, d_v=8, dtype=dtype)
    exact, _ = ScaledDotProductAttention()(query.double(), key.double(), value.double())
    output, _ = ScaledDotProductAttention()(query, key, value)
    assert (output - exact).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("cls", [SelfAttention, CausalAttention])
@given(LEADING, st.integers(0, 6), MASKS, st.booleans(), st.integers(0, 99))
def test_self_attention_is_the_attention_of_three_maps(
    cls, leading, tokens, kind, bias, seed
):
    layer, x = cls(5, 3, dqv_bias=bias).double(), normal(*leading, tokens, 5, seed=seed)
    mask = make_mask(kind, leading, tokens, tokens, seed)
    maps = (layer.W_query, layer.W_key, layer.W_value)
    assert all((linear.bias is not None) == bias for linear in maps)
    roles = [F.linear(x, linear.weight, linear.bias) for linear in maps]
    output, weights = layer(x, mask, return_weights=True)
    close(output, attention(*roles, mask, causal=cls is CausalAttention)[0])
    close(weights @ roles[2], output)
    close(layer(x, mask=mask), output)


@given(st.integers(1, 8), st.integers(0, 99), st.data())
def test_no_future_token_reaches_causal_attention(tokens, seed, data):
    position = data.draw(st.integers(0, tokens - 1))
    torch.manual_seed(seed)
    layer, x = CausalAttention(4, 4).double(), normal(tokens, 4, seed=seed)
    other = x.clone()
    other[position:] = torch.randn(tokens - position, 4, dtype=torch.float64)
    assert torch.equal(layer(other)[:position], layer(x)[:position])
