"""Heads to plug in: what distances and residuals add to the scores, and what is saved."""

import math

import pytest
import torch
from torch import nn

from attnlib import LearnedBiasAttention, MultiHeadAttention, PhysicsGuidedAttention
from attnlib.distance_bias import relative_positions
from drawn import attention as attend
from drawn import close, draw, normal, refuses


@pytest.mark.parametrize("shape", [(4,), (), (3, 5), (1, 1, 5)])
def test_a_residual_for_other_keys_is_refused(shape, as_shipped):
    attention = PhysicsGuidedAttention()
    attention.guide(torch.rand(shape))
    expected = "expected one number for each of 5 keys, in a shape that broadcasts to"
    with refuses(f"residual: {expected} (2, 5), got {shape}"):
        attention(*torch.randn(3, 2, 5, 8))


@pytest.mark.parametrize("unit", [1e-9, 1e5])
def test_guidance_has_no_unit_whatever_the_dtype(unit):
    attention, residual = PhysicsGuidedAttention(), torch.tensor([1.0, -2.0, 0.1])
    query, key, value = torch.randn(3, 3, 8, dtype=torch.float16)
    attention.guide(residual)
    expected = attention(query, key, value)[1]
    attention.guide(unit * residual)
    torch.testing.assert_close(attention(query, key, value)[1], expected)


def prior_of_distance(bias, queries, keys):
    """The bias of each head at each pair, by the sum's own words."""
    reach = bias.shape[1] // 2
    rows = [
        [[b[min(max(j - i - (keys - queries), -reach), reach) + reach] for j in range(keys)]
         for i in range(queries)] for b in bias.tolist()
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64)


def prior_of_residual(residual, strength, floor):
    size = [abs(r) for r in residual.tolist()]
    mean = sum(size) / len(size)
    prior = [strength * math.log(r / mean + floor) for r in size]
    return torch.tensor(prior, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 6), (6, 3)])
def test_heads_add_their_prior_to_the_scores(queries, keys, causal):
    inputs, residual = draw(3, 2, queries=queries, keys=keys), normal(keys)
    biased = LearnedBiasAttention(2, max_distance=2, causal=causal).double()
    assert (biased.bias == 0).all()
    nn.init.normal_(biased.bias)
    guided = PhysicsGuidedAttention(1.5, 0.2, causal=causal, scale=0.3)
    guided.guide(residual)
    priors = (
        (biased, prior_of_distance(biased.bias.detach(), queries, keys), None),
        (guided, prior_of_residual(residual, 1.5, 0.2), 0.3),
    )
    for head, prior, scale in priors:
        output, weights = head(*inputs)
        close(output, attend(*inputs, prior, causal=causal, scale=scale)[0])
        close(weights @ inputs[2], output)


def test_heads_pass_dropout_on():
    for head in (LearnedBiasAttention(2, 3, 1.0), PhysicsGuidedAttention(dropout=1.0)):
        output, weights = head(*torch.randn(3, 2, 5, 4))
        assert (output == 0).all() and torch.allclose(weights.sum(-1), torch.ones(2, 5))


@pytest.mark.parametrize("residual", [None, torch.zeros(5)])
def test_nothing_and_zeros_do_not_guide(residual):
    attention, inputs = PhysicsGuidedAttention(), torch.randn(3, 5, 8)
    plain = attention(*inputs)[1]
    attention.guide(torch.rand(5))
    assert not torch.allclose(attention(*inputs)[1], plain)
    attention.guide(residual)
    torch.testing.assert_close(attention(*inputs)[1], plain)


def test_distances_are_made_where_the_scores_are():
    output, _ = LearnedBiasAttention(2).to("meta")(*torch.randn(3, 2, 5, 4, device="meta"))
    assert output.device.type == "meta"
    assert relative_positions(2, 3, 9, "meta").device.type == "meta"


def test_guidance_takes_no_gradient_and_may_differ_by_sequence():
    attention, residual = PhysicsGuidedAttention(), torch.rand(2, 1, 5, requires_grad=True)
    attention.guide(residual)
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    output, _ = attention(query, key, value)
    assert not output.requires_grad
    for b in range(2):
        attention.guide(residual[b, 0])
        torch.testing.assert_close(attention(query[b], key[b], value[b])[0], output[b])


def test_the_residual_of_a_guided_head_is_saved_with_the_model():
    def model():
        return MultiHeadAttention(12, 2, attention=PhysicsGuidedAttention(strength=2.0))

    guided, x = model(), torch.randn(2, 5, 12)
    assert "attention.residual" not in guided.state_dict()  # not guided yet: no trace
    guided.attention.guide(torch.rand(5))
    for before in (None, torch.rand(5), torch.rand(2, 1, 3)):  # of the model that loads
        again = model()
        again.attention.guide(before)
        kept = None if before is None else before.clone()
        again.load_state_dict(guided.state_dict())
        assert torch.equal(again(x)[0], guided(x)[0])
        assert before is None or torch.equal(before, kept)  # nobody else's tensor changed
        again.load_state_dict(model().state_dict())
        assert again.attention.residual is None
    assert guided.to(torch.float64).attention.residual.dtype == torch.float64


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e6])  # too small for float16, and too large
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_fewer_bits_keeps_its_residual(unit, dtype):
    head, residual = PhysicsGuidedAttention(), unit * torch.rand(5)
    inputs = torch.randn(3, 4, 5, 8).to(dtype)
    head.guide(residual)
    expected = head(*inputs)[1]
    assert torch.equal(head.to(dtype)(*inputs)[1], expected)
    assert head.double().to(dtype).residual.dtype == torch.float32
    head.guide(None)
    assert head.to(dtype).residual is None
    head.guide(torch.tensor([3e4] * 5, dtype=torch.float16))  # whose sum is infinite
    assert head.residual.dtype == torch.float32
