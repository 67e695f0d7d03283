"""The delta rule: one result by loop and pieces; decays of a state, or of each feature."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import KVCache, LanguageModel
from attnlib.delta import (
    GatedDeltaAttention,
    delta_rule,
    delta_rule_by_feature,
    unit_length,
)
from attnlib.linear import StateCache, linear_attention


def says(words):
    return pytest.raises((TypeError, ValueError), match=words)


def loop(q, k, v, beta, g, S):
    """Token by token; g is (..., n) or (..., n, D)."""
    outputs = [v[..., :0, :]]
    share = g.exp().unsqueeze(-1) if g.dim() == beta.dim() else g.exp()
    for i in range(q.shape[-2]):
        key = k[..., i, :, None]
        S = share[..., i, :, None] * S
        S = S + beta[..., i, None, None] * key * (v[..., i, None, :] - key.mT @ S)
        outputs.append(q[..., i, None, :] @ S)
    return torch.cat(outputs, dim=-2), S


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pieces_cuts_and_ends(data):
    """A text in any cuts and pieces, shares of 0 and 1, beta of 0 and 2: as in the loop."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    n, lead = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([(), (2,), (2, 3)]))
    q, k, v = (torch.randn(*lead, n, d).double() for d in (3, 3, 2))
    k = unit_length(k)
    features = data.draw(st.booleans())
    rule, shape = (delta_rule_by_feature, (n, 3)) if features else (delta_rule, (n,))
    shares = st.sampled_from([0.0, -torch.inf, -0.3, -700.0])
    many = n * 3 if features else n
    g = torch.tensor([data.draw(shares) for _ in range(many)]).double().view(shape)
    g = g.expand(*lead, *shape)
    sizes = st.sampled_from([0.0, 0.4, 1.0, 2.0])
    beta = torch.tensor([data.draw(sizes) for _ in range(n)]).double().expand(*lead, n)
    begun = torch.randn(*lead, 3, 2).double()
    expected, end = loop(q, k, v, beta, g, begun)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    outputs, state, at = [], begun, len(lead)
    for first, last in zip([0, *cuts], [*cuts, n], strict=True):
        part = [x.narrow(at, first, last - first) for x in (q, k, v, beta, g)]
        output, state = rule(*part, state, piece=data.draw(st.integers(1, 5)))
        outputs.append(output)
    assert torch.allclose(torch.cat(outputs, dim=-2), expected)
    assert torch.allclose(state, end)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = torch.randn(3, 2, 70, 4)
    tensors = [x.to(dtype) for x in (q, unit_length(k), v)]
    beta, g = torch.rand(2, 70).to(dtype), -0.1 * torch.rand(2, 70).to(dtype)
    expected, _ = delta_rule(*(x.double() for x in (*tensors, beta, g)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = delta_rule(*tensors, beta, g)
    assert output.dtype == dtype and state.dtype == torch.float32
    assert torch.allclose(output.double(), expected, rtol=8e-3, atol=8e-3)


def test_long_texts_stay_exact_in_float32():
    """Also where all keys are alike, and powers of the system are large."""
    for alike in (False, True):
        k = unit_length(torch.randn(1 if alike else 2000, 16)).expand(2000, 16)
        q, v, beta = (
            unit_length(torch.randn(2000, 16)),
            torch.randn(2000, 8),
            torch.ones(2000),
        )
        expected, _ = delta_rule(*(x.double() for x in (q, k, v, beta)), piece=1)
        output, _ = delta_rule(q, k, v, beta)
        assert torch.allclose(output.double(), expected, atol=2e-5)


def test_keys_at_right_angles_are_those_of_linear_attention():
    """Nothing stands at a key that comes once: nothing is taken away."""
    k, v = torch.eye(6).double(), torch.randn(6, 3).double()
    q, ones = torch.randn(6, 6).double(), torch.ones(6).double()
    expected, state = linear_attention(q, k, v)
    found = delta_rule(q, k, v, ones)
    assert torch.allclose(found[0], expected) and torch.allclose(found[1], state)


@pytest.mark.parametrize("rule", [delta_rule, delta_rule_by_feature])
def test_what_does_not_fit_is_refused(rule, as_shipped):
    x, beta = torch.randn(2, 4, 3), torch.rand(2, 4)
    g = -torch.rand(2, 4) if rule is delta_rule else -torch.rand(2, 4, 3)
    with says("key: expected leading dimensions"):
        rule(x, x[:1], x, beta, g)
    with says("value: expected"):
        rule(x, x, x[:, :3], beta, g)
    with says("beta: expected a tensor, got float"):
        rule(x, x, x, 1.0, g)
    with says(r"beta: expected shape \(2, 4\) beside query, got \(4,\)"):
        rule(x, x, x, beta[0], g)
    with says("beta: expected shape"):
        rule(x, x, x, beta[..., None], g)
    with says("beta: expected a floating-point dtype up to"):
        rule(x, x, x, beta.double(), g)
    with says("log_decay: expected shape"):
        rule(x, x, x, beta, g[:1])
    other = torch.rand(2, 4, 3) if rule is delta_rule else torch.rand(2, 4)
    with says("log_decay: expected shape"):
        rule(x, x, x, beta, other)
    with says("log_decay: expected a tensor"):
        rule(x, x, x, beta, 0.5)
    with says("state: expected shape"):
        rule(x, x, x, beta, g, torch.zeros(3, 3))
    with says("beta: expected device cpu"):
        rule(x, x, x, beta.to("meta"), g)
    with says("piece: expected at least 1"):
        rule(x, x, x, beta, g, piece=0)
    with says("piece"):
        rule(x, x, x, beta, g, piece=2.0)
    with says("value: expected torch.float32"):
        rule(x, x, x.double(), beta, g)


def test_layers_of_two_kinds_in_one_model():
    """Each block has the cache that it needs, and texts go on in pieces."""
    model = LanguageModel(20, 50, embed_dim=12, num_heads=3, num_layers=2).double().eval()
    model.blocks[0].attention = GatedDeltaAttention(12, 3, piece=2).double()
    ids, caches = torch.randint(20, (2, 9)), [StateCache(), KVCache(50)]
    with torch.no_grad():
        parts = [model(part, cache=caches) for part in ids.split([4, 1, 4], dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), model(ids))


def test_a_token_of_zeros_writes_nothing():
    """Its key has no length; and its gradients are numbers of usual size."""
    layer, cache = GatedDeltaAttention(4, 2), StateCache()
    for name in ("q_proj", "k_proj"):
        getattr(layer, name).b.data.zero_()
    x = torch.zeros(1, 3, 4, requires_grad=True)
    with torch.no_grad():
        layer(x, cache=cache)
    assert (cache.state == 0).all()
    layer(x)[0].sum().backward()
    assert x.grad.abs().max() < 100


def test_rows_of_any_size_get_length_1():
    rows = torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [0.0, -1e-3]], requires_grad=True)
    found = unit_length(rows)
    assert torch.allclose(found, torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, -1.0]]))
    zeros = torch.zeros(1, 3, requires_grad=True)
    unit_length(zeros).sum().backward()
    assert zeros.grad.tolist() == [[1.0] * 3]  # and no large number
    half = unit_length(torch.full((1, 64), 1e4, dtype=torch.float16))
    assert torch.allclose(half, torch.tensor(0.125, dtype=torch.float16))
    tokens = torch.randn(3, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(unit_length, tokens)
