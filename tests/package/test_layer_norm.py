"""Layer normalization against PyTorch's, in any dtype, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attnlib import LayerNorm

LEADING = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(LEADING, st.integers(1, 9), st.sampled_from([1e-5, 1e-3, 0.1]), st.integers(0, 99))
def test_equal_to_the_formula(leading, d, eps, seed):
    torch.manual_seed(seed)
    norm = LayerNorm(d, eps).double()
    nn.init.normal_(norm.gamma)
    nn.init.normal_(norm.beta)
    x = torch.randn(*leading, d, dtype=torch.float64)
    centered = x - x.mean(dim=-1, keepdim=True)
    variance = centered.square().mean(dim=-1, keepdim=True)
    expected = centered / torch.sqrt(variance + eps) * norm.gamma + norm.beta
    torch.testing.assert_close(norm(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_from_torch(options):
    theirs = nn.LayerNorm(6, eps=1e-3, **options).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = LayerNorm.from_torch(theirs)
    if theirs.weight is None:  # nothing tells its dtype
        ours.double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)
    before = ours(x)
    for parameter in theirs.parameters():
        parameter.data.zero_()
    assert torch.equal(ours(x), before)  # a copy, not a view


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_low_precision_are_taken_in_float32(dtype):
    x = 300 * torch.randn(4, 64)
    exact, low = LayerNorm(64)(x), LayerNorm(64).to(dtype)(x.to(dtype))
    assert low.dtype == dtype
    assert (low - exact).abs().max() < 8 * torch.finfo(dtype).eps


REFUSED = {
    "no features": (
        lambda: LayerNorm(0),
        ValueError,
        "d_model: expected at least 1, got 0",
    ),
    "a negative eps": (
        lambda: LayerNorm(4, eps=-1.0),
        ValueError,
        "eps: expected a number of at least 0, got -1.0",
    ),
    "a wrong width": (
        lambda: LayerNorm(4)(torch.randn(2, 5)),
        ValueError,
        "input: expected at least 1 dimensions, the last of 4 features, got shape (2, 5)",
    ),
    "integers": (
        lambda: LayerNorm(4)(torch.ones(2, 4, dtype=torch.int64)),
        TypeError,
        "input: expected a floating-point tensor, got torch.int64",
    ),
    "two normalized dimensions": (
        lambda: LayerNorm.from_torch(nn.LayerNorm((3, 4))),
        ValueError,
        "module: expected one normalized dimension, got (3, 4)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message, as_shipped):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
