"""Both normalizations against PyTorch's, in any dtype, and what they refuse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from attnlib import LayerNorm, RMSNorm, backprop
from drawn import close, each_refused, normal

LEADING = st.lists(st.integers(0, 3), max_size=3).map(tuple)
THEIRS = {
    LayerNorm: lambda x, norm: F.layer_norm(
        x, x.shape[-1:], norm.gamma, norm.beta, norm.eps
    ),
    RMSNorm: lambda x, norm: F.rms_norm(x, x.shape[-1:], norm.gamma, norm.eps),
}
each_norm = pytest.mark.parametrize("cls", THEIRS)


@each_norm
@given(LEADING, st.integers(1, 9), st.sampled_from([1e-5, 1e-3, 0.1]), st.integers(0, 99))
def test_equal_to_the_function_of_pytorch(cls, leading, d, eps, seed):
    norm, x = cls(d, eps).double(), normal(*leading, d, seed=seed)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    close(norm(x), THEIRS[cls](x, norm), atol=1e-9)


@pytest.mark.parametrize(
    ("cls", "theirs"),
    [
        (LayerNorm, nn.LayerNorm(6, eps=1e-3)),
        (LayerNorm, nn.LayerNorm(6, eps=1e-3, bias=False)),
        (LayerNorm, nn.LayerNorm(6, eps=1e-3, elementwise_affine=False)),
        (RMSNorm, nn.RMSNorm(6, eps=0.2)),
        (RMSNorm, nn.RMSNorm(6, eps=0.2, elementwise_affine=False)),
    ],
    ids=str,
)
def test_from_torch(cls, theirs):
    for parameter in theirs.double().parameters():
        nn.init.normal_(parameter)
    ours, x = cls.from_torch(theirs), normal(2, 5, 6)
    if theirs.weight is None:  # nothing tells its dtype
        ours.double()
    before = ours(x)
    close(before, theirs(x))
    for parameter in theirs.parameters():
        parameter.data.zero_()
    assert torch.equal(ours(x), before)  # a copy, not a view


@each_norm
def test_a_second_derivative(cls):
    assert torch.autograd.gradgradcheck(cls(3).double(), normal(2, 3, grad=True))


@each_norm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_low_precision_are_taken_in_float32(cls, dtype):
    x = 1000 * normal(4, 64, dtype=torch.float32)  # the squares overflow in float16
    exact, low = cls(64)(x), cls(64).to(dtype)(x.to(dtype))
    assert low.dtype == dtype
    assert (low - exact).abs().max() < 8 * torch.finfo(dtype).eps


EPS = "eps: expected a number of at least 0"
WIDTH = "input: expected at least 1 dimensions, the last of"
VALUES = {
    f"{EPS}, got nan": lambda: RMSNorm(3, float("nan")),
    f"{WIDTH} 4 features, got shape (2, 5)": lambda: LayerNorm(4)(torch.ones(2, 5)),
    f"{WIDTH} 3 features, got shape (2, 5)": lambda: RMSNorm(3)(torch.ones(2, 5)),
    "input: …3 features, got shape (2, 4)":
        lambda: backprop.RMSNormLayer(3).forward(normal(2, 4).numpy()),
    "module: expected one normalized dimension, got (3, 4)":
        lambda: LayerNorm.from_torch(nn.LayerNorm((3, 4))),
    "module: …dimension, got (2, 3)":
        lambda: RMSNorm.from_torch(nn.RMSNorm((2, 3), eps=0.2)),
    "module: expected an eps, got None: one for each dtype":
        lambda: RMSNorm.from_torch(nn.RMSNorm(5)),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
TYPES = {
    "input: …tensor, got torch.int64": lambda: LayerNorm(4)(torch.ones(2, 4).long()),
    "input: expected torch.float32 as the weights, got torch.float64":
        lambda: RMSNorm(3)(normal(2, 3)),
}  # fmt: skip
test_types = each_refused(TypeError, TYPES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_scale_of_rms_norm_acts_on_what_is_rounded(dtype):
    """As in the models that were trained with it: rounded twice."""
    torch.manual_seed(0)
    norm, x = RMSNorm(64).to(dtype), torch.randn(50, 64).to(dtype)
    torch.nn.init.normal_(norm.gamma)
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps)
    expected = normalized.to(dtype) * norm.gamma
    assert (norm(x) != expected).float().mean() < 0.01  # the last bit of float32
    at_once = (normalized * norm.gamma.float()).to(dtype)
    assert (at_once != expected).float().mean() > 0.1
