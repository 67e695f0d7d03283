"""What the chapters can't show: dropout, state, devices, and broken classes."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlib import (
    BaseAttention,
    CausalAttention,
    ScaledDotProductAttention,
    SelfAttention,
    apply_mask,
    causal_mask,
    masked_softmax,
    refuse_bad_inputs,
    window_mask,
)
from attnlib.checks import as_autocast
from attnlib.testing import check_attention, random_inputs
from drawn import attention, refuses, visible


class Stepwise(BaseAttention):
    """Correct attention in small steps; each mistake below gets one of them wrong."""

    def check(self, *arguments):
        refuse_bad_inputs(*arguments)

    def scores(self, query, key):
        return query @ key.mT / query.shape[-1] ** 0.5

    def mask(self, scores, mask):
        return apply_mask(scores, mask)

    def triangle(self, scores, mask):
        return apply_mask(scores, causal_mask(*scores.shape[-2:]))

    def near(self, scores, mask):
        return apply_mask(scores, window_mask(*scores.shape[-2:], self.window))

    softmax = staticmethod(masked_softmax)

    def mix(self, weights, value):
        return weights @ value

    def result(self, output, weights, query):
        return output, weights

    def forward(self, query, key, value, mask=None):
        self.check(query, key, value, mask)
        scores = self.scores(query, key)
        if self.causal:
            scores = self.triangle(scores, mask)
        if self.window:
            scores = self.near(scores, mask)
        if mask is not None:
            scores = self.mask(scores, mask)
        weights = self.softmax(scores)
        return self.result(self.mix(weights, value), weights, query)


@pytest.mark.parametrize("steps", [{}, {"causal": True}, {"causal": True, "window": 2}])
def test_conformance(steps, as_shipped):
    check_attention(type("Right", (Stepwise,), steps))


def write(self, query, key):
    query *= query.shape[-1] ** -0.5
    return query @ key.mT


def as_if_contiguous(self, weights, value):
    return weights @ value.as_strided(value.shape, torch.empty(value.shape).stride())


def heads_apart(self, weights, value):
    apart = torch.empty(value.shape).stride()[:-2]  # where copies would lie
    return weights @ value.as_strided(value.shape, (*apart, *value.stride()[-2:]))


def no_maximum(scores):
    e = scores.exp()
    return e / e.sum(dim=-1, keepdim=True).clamp(min=1e-300)


def nameless(self, *arguments):
    try:
        refuse_bad_inputs(*arguments)
    except (TypeError, ValueError) as error:
        raise type(error)("bad input") from error


def convert_mask(self, query, key, value, mask):
    added = mask is not None and mask.is_floating_point()
    refuse_bad_inputs(query, key, value, mask.to(query) if added else mask)


def top_left(self, scores, mask):
    return apply_mask(scores, torch.ones_like(scores).tril() == 1)


def window_top_left(self, scores, mask):
    queries, keys = scores.shape[-2:]
    return apply_mask(scores, window_mask(max(queries, keys), keys, self.window)[:queries])


def only_back(self, scores, mask):
    near = window_mask(*scores.shape[-2:], self.window)
    return apply_mask(scores, near & causal_mask(*scores.shape[-2:]))


def only_boolean(change):
    """A step `mask` that is right for a boolean mask, and `change` for another."""
    return lambda self, s, m: apply_mask(s, m) if m.dtype == torch.bool else change(s, m)


def empty(weights):
    return weights.sum(dim=-1, keepdim=True) == 0


NOTHING = "a query that may attend to nothing"
# What the suite says, word for word, and the steps that are wrong.
MISTAKES = {
    "output has shape (4, 5, 1)": {"result": lambda self, o, w, q: (o[..., None], w)},
    "output has dtype torch.float32": {"result": lambda self, o, w, q: (o.float(), w)},
    "weights have shape (6, 4)": {"result": lambda self, o, w, q: (o, w.mT)},
    "forward wrote to its inputs": {"scores": write},
    "a second call gave another output": {"mix": lambda self, w, v: w @ v + torch.rand(())},
    "the output depends on the strides": {"mix": as_if_contiguous},
    "keys and values that heads share are misread": {"mix": heads_apart},
    "the output leaves the range of the values": {
        "result": lambda self, o, w, q: (3 * o, None)
    },
    "a weight is negative": {"result": lambda self, o, w, q: (o, -w)},
    "the weights of a row do not sum to 1": {
        "softmax": staticmethod(lambda s: masked_softmax(s.mT).mT)
    },
    "output is not weights @ value": {
        "mix": lambda self, w, v: (w @ v + v.mean(-2, keepdim=True)) / 2
    },
    "weights in training are not those before dropout": {
        "result": lambda self, o, w, q: (o, F.dropout(w, 0.5, self.training))
    },
    "a key that the mask forbids changed the output": {"mask": lambda self, s, m: s},
    "a forbidden key has a weight": {
        "result": lambda self, o, w, q: (o, torch.where(w == 0, 0.1, w))
    },
    "an additive mask of 0 and -inf differs from the boolean one": {
        "mask": only_boolean(lambda s, m: s)
    },
    "a mask of shape (1, keys) does not broadcast over queries": {
        "mask": lambda self, s, m: apply_mask(
            s, F.pad(m, (0, 0, 0, s.shape[-2] - m.shape[-2]), value=1)
        )
    },
    "a mask that allows every pair changed the output": {
        "causal": True,
        "triangle": lambda self, s, m: (
            s if m is not None else Stepwise.triangle(self, s, m)
        ),
    },
    "an additive mask does not multiply weights by its exponential": {
        "mask": only_boolean(lambda s, m: apply_mask(s, m > -torch.inf))
    },
    "a boolean mask (..., N, M) does not act pair by pair": {
        "mask": lambda self, s, m: apply_mask(s, m[(0,) * (m.dim() - 2)])
    },
    "an additive mask (..., N, M) does not act pair by pair": {
        "mask": only_boolean(lambda s, m: s + m[(0,) * (m.dim() - 2)])
    },
    f"{NOTHING} (boolean mask): the output is not 0": {
        "softmax": staticmethod(lambda s: torch.softmax(s, dim=-1))
    },
    f"{NOTHING} (additive mask): the output is not 0": {
        "mask": only_boolean(lambda s, m: s + m.clamp(min=-1e9))
    },
    f"{NOTHING} (boolean mask): the weights are not 0": {
        "result": lambda self, o, w, q: (o, torch.where(empty(w), 0.1, w))
    },
    f"{NOTHING} (additive mask): a gradient is not finite": {
        "softmax": staticmethod(lambda s: torch.softmax(s, dim=-1).nan_to_num(0.0))
    },
    f"{NOTHING} (boolean mask): its gradient is not 0": {
        "result": lambda self, o, w, q: (o + (q - q.detach())[..., :1], w)
    },
    "with no keys at all the output is not 0": {
        "result": lambda self, o, w, q: (o if w.shape[-1] else o + 1, w)
    },
    "query 0 of 5 with 5 keys sees the future": {
        "causal": True,
        "triangle": lambda self, s, m: s,
    },
    "query 0 of 3 with 6 keys does not see its own position: not bottom right": {
        "causal": True,
        "triangle": top_left,
    },
    "query 0 of 6 with 3 keys sees nothing but is not 0": {
        "causal": True,
        "result": lambda self, o, w, q: (
            torch.where(empty(w) & (0 < w.shape[-1] < w.shape[-2]), 1.0, o),
            w,
        ),
    },
    "query 2 of 5 with 5 keys and a window of 2 sees key 0": {
        "window": 2,
        "causal": True,
        "near": lambda self, s, m: apply_mask(s, window_mask(*s.shape[-2:], 3)),
    },
    "query 1 of 5 with 5 keys and a window of 2 does not see key 0": {
        "window": 2,
        "causal": True,
        "near": lambda self, s, m: apply_mask(s, window_mask(*s.shape[-2:], 1)),
    },
    "query 0 of 3 with 6 keys and a window of 2 sees key 0": {
        "window": 2,
        "near": window_top_left,
    },
    "query 0 of 5 with 5 keys and a window of 2 does not see key 1": {
        "window": 2,
        "near": only_back,
    },
    "query 0 of 5 with 5 keys and a window of 2 sees key 2": {
        "window": 2,
        "near": lambda self, s, m: s,
    },
    "large scores overflow": {"softmax": staticmethod(no_maximum)},
    "the gradient differs from finite differences": {
        "scores": lambda self, q, k: Stepwise.scores(self, q, k.detach())
    },
    "the gradient differs from finite differences under a mask": {
        "mask": lambda self, s, m: apply_mask(s.detach(), m)
    },
    "torch.float32 in, torch.float64 out": {
        "result": lambda self, o, w, q: (o.double(), w)
    },
    "not finite in torch.float16": {
        "scores": lambda self, q, k: Stepwise.scores(self, 1e5 * q, k) / 1e5
    },
    "without need_weights the output differs": {
        "forward": lambda self, query, key, value, mask=None, need_weights=True: (
            Stepwise.forward(self, query, key, value, mask if need_weights else None)
        )
    },
    "the error does not name query: bad input": {"check": nameless},
    "a bad query raised RuntimeError; expected TypeError": {
        "check": lambda self, *arguments: None
    },
    "a bad mask was accepted; expected TypeError": {"check": convert_mask},
}
UNDER_A_MASK = {
    "window": 2,
    "near": lambda self, s, m: s if m is not None else Stepwise.near(self, s, m),
}


@pytest.mark.parametrize(
    ("said", "steps"),
    [*MISTAKES.items(), ("a mask that allows every pair changed the output", UNDER_A_MASK)],
)
def test_conformance_catches(said, steps, as_shipped):
    with refuses(said, AssertionError):
        check_attention(type("Mistake", (Stepwise,), steps))


def test_conformance_tries_the_dtypes_it_is_given(as_shipped):
    """An operation that lacks float16 is no mistake, if one says so."""

    class Distances(Stepwise):
        def scores(self, query, key):
            return -0.5 * torch.cdist(query, key).square()

    check_attention(Distances, dtypes=[torch.float32])
    with pytest.raises(RuntimeError, match="Half"):
        check_attention(Distances)
    steps = MISTAKES["torch.float32 in, torch.float64 out"]
    wrong = type("Mistake", (Stepwise,), steps)
    check_attention(wrong, dtypes=())
    with pytest.raises(AssertionError, match=r"torch\.bfloat16 in, torch\.float64 out"):
        check_attention(wrong, dtypes=iter([torch.bfloat16]))


def test_conformance_wants_a_base_attention():
    with pytest.raises(AssertionError, match="does not make a BaseAttention"):
        check_attention(nn.Identity)


@pytest.mark.parametrize(("queries", "keys"), [(3, None), (2, 5), (5, 2), (0, 3), (3, 0)])
@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("meta")])
def test_causal_mask(queries, keys, device):
    mask = causal_mask(queries, keys, device)
    assert mask.shape == (queries, queries if keys is None else keys)
    assert mask.dtype == torch.bool and mask.device.type == str(device or "cpu")
    if mask.device.type == "cpu":
        assert torch.equal(mask, visible(*mask.shape, causal=True))


def test_tensors_without_numbers(as_shipped):
    """On the device "meta", which has no autocast, shapes go through as on any other."""
    query, key, value = (x.to("meta") for x in random_inputs((2,)))
    for head in (ScaledDotProductAttention(causal=True), Stepwise()):
        output, weights = head(query, key, value)
        assert output.shape == (2, 4, 5) and weights.shape == (2, 4, 6)
        assert output.device.type == "meta"


def test_as_autocast(as_shipped):
    wide, mask, half = torch.ones(2).double(), torch.ones(2) > 0, torch.ones(2).half()
    given = (torch.ones(2), wide, mask, None, half, [1.0])

    def unchanged(got):
        return all(x is y for x, y in zip(got, given, strict=True))

    assert unchanged(as_autocast(*given))
    with torch.autocast("cpu", torch.bfloat16):
        got = as_autocast(*given)
        assert as_autocast([1.0], half)[1] is half  # refused by what comes next
        with torch.autocast("cpu", enabled=False):
            assert unchanged(as_autocast(*given))
    assert unchanged((given[0], *got[1:4], half, got[5]))
    assert got[0].dtype == got[4].dtype == torch.bfloat16


def test_dropout_only_in_training_and_after_the_returned_weights():
    query, key, value = random_inputs((2,), 5, 7)
    head = ScaledDotProductAttention(dropout=0.5).eval()
    output, weights = head(query, key, value)
    torch.testing.assert_close(output, attention(query, key, value)[0])
    head.train()
    torch.manual_seed(0)
    dropped, same_weights = head(query, key, value)
    assert torch.equal(same_weights, weights)
    assert not torch.allclose(dropped, output)
    nothing, _ = ScaledDotProductAttention(dropout=1.0)(query, key, value)
    assert torch.equal(nothing, 0 * output)


def test_dropout_takes_single_weights_and_scales_the_others():
    query, key, _ = random_inputs((8,), 5, 7)
    value = torch.eye(7, dtype=query.dtype).expand(8, 7, 7)  # the output is the weights
    torch.manual_seed(0)
    output, weights = ScaledDotProductAttention(dropout=0.2)(query, key, value)
    kept = output != 0
    assert kept.any() and not kept.all()
    torch.testing.assert_close(output[kept], weights[kept] / 0.8)
    # One token has the weight 1: its context vector is dropped as a whole, or scaled.
    layer, x = CausalAttention(5, 3, dropout=0.2), torch.randn(40, 1, 5)
    context, value = layer(x), layer.W_value(x)
    kept = (context != 0).any(dim=-1)
    assert kept.any() and not kept.all()
    torch.testing.assert_close(context[kept], value[kept] / 0.8)


@pytest.mark.parametrize("cls", [SelfAttention, CausalAttention])
def test_state_and_seeds(cls):
    torch.manual_seed(0)
    layer = cls(5, 3, dqv_bias=True)
    torch.manual_seed(0)
    by_hand = [nn.Linear(5, 3) for _ in range(3)]  # in the documented order
    roles = ("W_query", "W_key", "W_value")
    for name, linear in zip(roles, by_hand, strict=True):
        assert torch.equal(getattr(layer, name).weight, linear.weight)
    assert set(layer.state_dict()) == {
        f"{r}.{x}" for r in roles for x in ("weight", "bias")
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
    head = ScaledDotProductAttention(causal=True)
    mapped = torch.func.vmap(lambda q, k, v: head(q, k, v)[0])(query, key, value)
    torch.testing.assert_close(mapped, head(query, key, value)[0])
    layer, x = CausalAttention(5, 3), torch.randn(2, 7, 5)
    exported = torch.export.export(layer.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_a_gpu(as_shipped):
    query, key, value = (x.cuda() for x in random_inputs((2, 2)))
    output, _ = ScaledDotProductAttention(causal=True)(query, key, value)
    torch.testing.assert_close(
        output.cpu(), attention(*random_inputs((2, 2)), causal=True)[0]
    )
