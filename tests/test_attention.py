"""What the chapters can't show: dropout, state, devices, and broken classes."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import attnlib
from attnlib import (
    BaseAttention,
    CausalAttention,
    ScaledDotProductAttention,
    SelfAttention,
    apply_mask,
    causal_mask,
    check_inputs,
    masked_softmax,
)
from attnlib.testing import check_attention, random_inputs


class Stepwise(BaseAttention):
    """Correct attention in small steps; each subclass below gets one of them wrong."""

    def check(self, *arguments):
        check_inputs(*arguments)

    def scores(self, query, key):
        return query @ key.mT / query.shape[-1] ** 0.5

    def mask(self, scores, mask):
        return scores if mask is None else apply_mask(scores, mask)

    def triangle(self, scores):
        return (
            apply_mask(scores, causal_mask(*scores.shape[-2:])) if self.causal else scores
        )

    softmax = staticmethod(masked_softmax)

    def mix(self, weights, value):
        return weights @ value

    def forward(self, query, key, value, mask=None):
        self.check(query, key, value, mask)
        scores = self.triangle(self.mask(self.scores(query, key), mask))
        weights = self.softmax(scores)
        return self.mix(weights, value), weights


@pytest.mark.parametrize(
    "factory",
    [
        ScaledDotProductAttention,
        lambda: ScaledDotProductAttention(causal=True),
        lambda: ScaledDotProductAttention(dropout=0.3, scale=0.7),
        Stepwise,
    ],
)
def test_conformance(factory, as_shipped):
    check_attention(factory)


def top_left(self, scores):
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~allowed, -torch.inf)


def write(self, query, key):
    query *= query.shape[-1] ** -0.5
    return query @ key.mT


def no_maximum(scores):
    e = scores.exp()
    return e / e.sum(dim=-1, keepdim=True).clamp(min=1e-300)


MISTAKES = {
    "inputs are not checked": (
        "a bad query raised",
        {"check": lambda self, *arguments: None},
    ),
    "inputs are written to": ("wrote to its inputs", {"scores": write}),
    "softmax over the queries": (
        "do not sum to 1",
        {"softmax": staticmethod(lambda s: masked_softmax(s.mT).mT)},
    ),
    "no maximum subtracted": ("overflow", {"softmax": staticmethod(no_maximum)}),
    "NaN where nothing is allowed": (
        "may attend to nothing",
        {"softmax": staticmethod(lambda s: torch.softmax(s, dim=-1))},
    ),
    "NaN repaired too late": (
        "gradient is not finite",
        {"softmax": staticmethod(lambda s: torch.softmax(s, dim=-1).nan_to_num(0.0))},
    ),
    "mask ignored": ("forbids changed the output", {"mask": lambda self, s, m: s}),
    "mask with the wrong polarity": (
        "forbids changed the output",
        {
            "mask": lambda self, s, m: (
                apply_mask(s, ~m if m is not None and m.dtype == torch.bool else m)
                if m is not None
                else s
            )
        },
    ),
    "forbidden keys get a little weight": (
        "forbids changed the output",
        {"mask": lambda self, s, m: s if m is None else apply_mask(s, m).clamp(min=-3.0)},
    ),
    "not causal": ("sees the future", {"causal": True, "triangle": lambda self, s: s}),
    "causal, top left": (
        "bottom right|sees the future",
        {"causal": True, "triangle": top_left},
    ),
    "output is not weights @ value": (
        "output is not weights @ value",
        {
            "mix": lambda self, w, v: (
                (w @ v + w.mT.mean() * 0 + v.mean(-2, keepdim=True)) / 2
            )
        },
    ),
    "a detached gradient": (
        "differs from finite differences",
        {
            "scores": lambda self, q, k: (
                (q @ k.detach().mT / q.shape[-1] ** 0.5) + 0 * k.sum()
            )
        },
    ),
}


@pytest.mark.parametrize(("message", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_conformance_catches(message, mistake, as_shipped):
    with pytest.raises(AssertionError, match=message):
        check_attention(type("Mistake", (Stepwise,), mistake))


def test_conformance_wants_a_base_attention():
    with pytest.raises(AssertionError, match="does not make a BaseAttention"):
        check_attention(nn.Identity)


def test_base_attention_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        BaseAttention()


def test_dropout_only_in_training_and_after_the_returned_weights():
    query, key, value = random_inputs((2,), 5, 7)
    attention = ScaledDotProductAttention(dropout=0.5)
    attention.eval()
    output, weights = attention(query, key, value)
    torch.testing.assert_close(output, ScaledDotProductAttention()(query, key, value)[0])
    attention.train()
    torch.manual_seed(0)
    dropped, same_weights = attention(query, key, value)
    assert torch.equal(same_weights, weights)
    assert not torch.allclose(dropped, output)
    assert torch.equal(
        ScaledDotProductAttention(dropout=1.0)(query, key, value)[0], 0 * output
    )


def test_scale():
    query, key, value = random_inputs()
    default = ScaledDotProductAttention()(query, key, value)[0]
    explicit = ScaledDotProductAttention(scale=8**-0.5)(query, key, value)[0]
    torch.testing.assert_close(default, explicit)
    flat = ScaledDotProductAttention(scale=0.0)(query, key, value)[0]
    torch.testing.assert_close(flat, value.mean(dim=-2, keepdim=True).expand_as(flat))


@pytest.mark.parametrize("cls", [SelfAttention, CausalAttention])
def test_state_and_seeds(cls):
    torch.manual_seed(0)
    layer = cls(5, 3, dqv_bias=True)
    torch.manual_seed(0)
    by_hand = [nn.Linear(5, 3) for _ in range(3)]  # query, key, value: the documented order
    for name, linear in zip(("W_query", "W_key", "W_value"), by_hand, strict=True):
        assert torch.equal(getattr(layer, name).weight, linear.weight)
    assert set(layer.state_dict()) == {
        f"W_{role}.{kind}"
        for role in ("query", "key", "value")
        for kind in ("weight", "bias")
    }
    x = torch.randn(2, 7, 5)
    again = cls(5, 3, dqv_bias=True)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    again.load_state_dict(torch.load(buffer))
    for other in (again, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))


def test_vmap_and_export(as_shipped):
    """vmap gives what the batch dimension gives; export keeps the numbers."""
    query, key, value = random_inputs((3,))
    attention = ScaledDotProductAttention(causal=True)
    mapped = torch.func.vmap(lambda q, k, v: attention(q, k, v)[0])(query, key, value)
    torch.testing.assert_close(mapped, attention(query, key, value)[0])
    layer, x = CausalAttention(5, 3), torch.randn(2, 7, 5)
    exported = torch.export.export(layer.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


def test_public_names_exist_and_are_sorted_within_a_chapter():
    assert all(hasattr(attnlib, name) for name in attnlib.__all__)
    assert len(set(attnlib.__all__)) == len(attnlib.__all__)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_a_gpu(as_shipped):
    query, key, value = (x.cuda() for x in random_inputs((2, 2)))
    output, _ = ScaledDotProductAttention(causal=True)(query, key, value)
    expected, _ = ScaledDotProductAttention(causal=True)(
        query.cpu(), key.cpu(), value.cpu()
    )
    torch.testing.assert_close(output.cpu(), expected)
