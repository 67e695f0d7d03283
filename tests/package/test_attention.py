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
from drawn import refuses, visible


class Stepwise(BaseAttention):
    """Correct attention in small steps; each mistake below gets one of them wrong."""

    check = staticmethod(refuse_bad_inputs)
    softmax = staticmethod(masked_softmax)
    mask = staticmethod(apply_mask)

    @staticmethod
    def scores(query, key):
        return query @ key.mT / query.shape[-1] ** 0.5

    @staticmethod
    def triangle(scores, mask):
        return apply_mask(scores, causal_mask(*scores.shape[-2:]))

    @staticmethod
    def near(scores, mask):
        return apply_mask(scores, window_mask(*scores.shape[-2:], 2))

    @staticmethod
    def mix(weights, value):
        return weights @ value

    @staticmethod
    def widen(x):
        return x.float() if x.dtype == torch.float16 else x

    @staticmethod
    def result(output, weights, query, training):
        return output, weights

    def forward(self, query, key, value, mask=None):
        self.check(query, key, value, mask)
        given = query
        query, key, value = (self.widen(x) for x in (query, key, value))
        scores = self.scores(query, key)
        if self.causal:
            scores = self.triangle(scores, mask)
        if self.window:
            scores = self.near(scores, mask)
        if mask is not None:
            scores = self.mask(scores, mask)
        weights = self.softmax(scores)
        output = self.mix(weights, value).to(given.dtype)
        return self.result(output, weights.to(given.dtype), given, self.training)


def stepwise(step=None, wrong=None, **options):
    """A class with one step that is wrong, and options."""
    if step is not None:
        options[step] = wrong if step == "forward" else staticmethod(wrong)
    return type("Otherwise", (Stepwise,), options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 2}])
def test_conformance(options, as_shipped):
    check_attention(stepwise(**options))


def write(query, key):
    query *= query.shape[-1] ** -0.5
    return query @ key.mT


def as_if_contiguous(weights, value):
    return weights @ value.as_strided(value.shape, torch.empty(value.shape).stride())


def heads_apart(weights, value):
    apart = torch.empty(value.shape).stride()[:-2]  # where copies would lie
    return weights @ value.as_strided(value.shape, (*apart, *value.stride()[-2:]))


def no_maximum(scores):
    e = scores.exp()
    return e / e.sum(dim=-1, keepdim=True).clamp(min=1e-300)


def nameless(*arguments):
    try:
        refuse_bad_inputs(*arguments)
    except (TypeError, ValueError) as error:
        raise type(error)("bad input") from error


def convert_mask(query, key, value, mask):
    added = mask is not None and mask.is_floating_point()
    refuse_bad_inputs(query, key, value, mask.to(query) if added else mask)


def nothing(scores, mask):
    return scores


def top_left(scores, mask):
    return apply_mask(scores, torch.ones_like(scores).tril() == 1)


def for_all_queries(scores, mask):
    spare = scores.shape[-2] - mask.shape[-2]
    return apply_mask(scores, F.pad(mask, (0, 0, 0, spare), value=1))


def window_of(window):
    return lambda scores, mask: apply_mask(scores, window_mask(*scores.shape[-2:], window))


def window_top_left(scores, mask):
    queries, keys = scores.shape[-2:]
    return apply_mask(scores, window_mask(max(queries, keys), keys, 2)[:queries])


def only_back(scores, mask):
    return Stepwise.triangle(Stepwise.near(scores, mask), mask)


def only_boolean(change):
    """A step `mask` that is right for a boolean mask, and `change` for another."""
    return lambda s, m: apply_mask(s, m) if m.dtype == torch.bool else change(s, m)


def without_mask(step):
    """A step that is not done where there is a mask."""
    return lambda s, m: s if m is not None else step(s, m)


def masked_only_with_weights(self, query, key, value, mask=None, need_weights=True):
    return Stepwise.forward(self, query, key, value, mask if need_weights else None)


def empty(weights):
    return weights.sum(dim=-1, keepdim=True) == 0


def not_where_keys_are_few(o, w, q, _):
    return torch.where(empty(w) & (0 < w.shape[-1] < w.shape[-2]), 1.0, o), w


NOTHING = "a query that may attend to nothing"
DIFFERS = "the gradient differs from finite differences"
CAUSAL, WINDOW = {"causal": True}, {"window": 2}
# What the suite says, word for word, a step, what is wrong there, and options.
MISTAKES = [
    ("output has shape (4, 5, 1)", "result", lambda o, w, *_: (o[..., None], w)),
    ("output has dtype torch.float32", "result", lambda o, w, *_: (o.float(), w)),
    ("weights have shape (6, 4)", "result", lambda o, w, *_: (o, w.mT)),
    ("forward wrote to its inputs", "scores", write),
    ("a second call gave another output", "mix", lambda w, v: w @ v + torch.rand(())),
    ("the output depends on the strides", "mix", as_if_contiguous),
    ("keys and values that heads share are misread", "mix", heads_apart),
    ("the output leaves the range of the values", "result", lambda o, *_: (3 * o, None)),
    ("a weight is negative", "result", lambda o, w, *_: (o, -w)),
    ("the weights of a row do not sum to 1", "softmax", lambda s: masked_softmax(s.mT).mT),
    ("output is not weights @ value", "mix",
     lambda w, v: (w @ v + v.mean(-2, keepdim=True)) / 2),
    ("weights in training are not those before dropout", "result",
     lambda o, w, q, training: (o, F.dropout(w, 0.5, training))),
    ("a key that the mask forbids changed the output", "mask", nothing),
    ("a forbidden key has a weight", "result",
     lambda o, w, *_: (o, torch.where(w == 0, 0.1, w))),
    ("an additive mask of 0 and -inf differs from the boolean one", "mask",
     only_boolean(nothing)),
    ("a mask of shape (1, keys) does not broadcast over queries", "mask", for_all_queries),
    ("a mask that allows every pair changed the output", "triangle",
     without_mask(Stepwise.triangle), CAUSAL),
    ("a mask that allows every pair changed the output", "near",
     without_mask(Stepwise.near), WINDOW),
    ("an additive mask does not multiply weights by its exponential", "mask",
     only_boolean(lambda s, m: apply_mask(s, m > -torch.inf))),
    ("a boolean mask (..., N, M) does not act pair by pair", "mask",
     lambda s, m: apply_mask(s, m[(0,) * (m.dim() - 2)])),
    ("an additive mask (..., N, M) does not act pair by pair", "mask",
     only_boolean(lambda s, m: s + m[(0,) * (m.dim() - 2)])),
    (f"{NOTHING} (boolean mask): the output is not 0", "softmax",
     lambda s: torch.softmax(s, dim=-1)),
    (f"{NOTHING} (additive mask): the output is not 0", "mask",
     only_boolean(lambda s, m: s + m.clamp(min=-1e9))),
    (f"{NOTHING} (boolean mask): the weights are not 0", "result",
     lambda o, w, *_: (o, torch.where(empty(w), 0.1, w))),
    (f"{NOTHING} (additive mask): a gradient is not finite", "softmax",
     lambda s: torch.softmax(s, dim=-1).nan_to_num(0.0)),
    (f"{NOTHING} (boolean mask): its gradient is not 0", "result",
     lambda o, w, q, _: (o + (q - q.detach())[..., :1], w)),
    ("with no keys at all the output is not 0", "result",
     lambda o, w, *_: (o if w.shape[-1] else o + 1, w)),
    ("query 0 of 5 with 5 keys sees the future", "triangle", nothing, CAUSAL),
    ("query 0 of 3 with 6 keys does not see its own position: not bottom right",
     "triangle", top_left, CAUSAL),
    ("query 0 of 6 with 3 keys sees nothing but is not 0", "result",
     not_where_keys_are_few, CAUSAL),
    ("query 2 of 5 with 5 keys and a window of 2 sees key 0", "near", window_of(3),
     CAUSAL | WINDOW),
    ("query 1 of 5 with 5 keys and a window of 2 does not see key 0", "near", window_of(1),
     CAUSAL | WINDOW),
    ("query 0 of 3 with 6 keys and a window of 2 sees key 0", "near", window_top_left,
     WINDOW),
    ("query 0 of 5 with 5 keys and a window of 2 does not see key 1", "near", only_back,
     WINDOW),
    ("query 0 of 5 with 5 keys and a window of 2 sees key 2", "near", nothing, WINDOW),
    ("large scores overflow", "softmax", no_maximum),
    (DIFFERS, "scores", lambda q, k: Stepwise.scores(q, k.detach())),
    (f"{DIFFERS} under a mask", "mask", lambda s, m: apply_mask(s.detach(), m)),
    ("torch.float32 in, torch.float64 out", "result", lambda o, w, *_: (o.double(), w)),
    ("not finite in torch.float16", "result",
     lambda o, w, q, _: (1e5 * o.to(q.dtype) / 1e5, w)),
    ("not finite in torch.float16: scores beyond 65504", "widen", lambda x: x),
    ("without need_weights the output differs", "forward", masked_only_with_weights),
    ("the error does not name query: bad input", "check", nameless),
    ("a bad query raised RuntimeError; expected TypeError", "check", lambda *_: None),
    ("a bad mask was accepted; expected TypeError", "check", convert_mask),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_conformance_catches(mistake, as_shipped):
    said, step, wrong, *options = mistake
    with refuses(said, AssertionError):
        check_attention(stepwise(step, wrong, **dict(*options)))


def test_conformance_draws_on_the_default_device(as_shipped):
    """Where a head is built; the numbers are drawn on the CPU, the same everywhere."""
    with torch.device("meta"):
        assert all(tensor.device.type == "meta" for tensor in random_inputs((2,)))


def test_conformance_tries_the_dtypes_it_is_given(as_shipped):
    """An operation that lacks float16 is no mistake, if one says so."""

    class Distances(Stepwise):
        @staticmethod
        def scores(query, key):
            return -0.5 * torch.cdist(query, key).square()

    check_attention(Distances, dtypes=[torch.float32])
    with pytest.raises(RuntimeError, match="cdist"):
        check_attention(Distances)
    wrong = stepwise("result", lambda o, w, *_: (o.double(), w))
    check_attention(wrong, dtypes=())
    with pytest.raises(AssertionError, match=r"torch\.bfloat16 in, torch\.float64 out"):
        check_attention(wrong, dtypes=iter([torch.bfloat16]))
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


def test_dropout_takes_single_weights_in_training_and_scales_the_others():
    """The weights that are returned are those before."""
    query, key, _ = random_inputs((8,), 5, 7)
    value = torch.eye(7, dtype=query.dtype).expand(8, 7, 7)  # the output is the weights
    head = ScaledDotProductAttention(dropout=0.2)
    output, weights = head.eval()(query, key, value)
    assert torch.equal(output, weights)
    torch.manual_seed(0)
    output, same = head.train()(query, key, value)
    kept = output != 0
    assert torch.equal(same, weights) and kept.any() and not kept.all()
    torch.testing.assert_close(output[kept], weights[kept] / 0.8)
    nothing, _ = ScaledDotProductAttention(dropout=1.0)(query, key, value)
    assert torch.equal(nothing, 0 * output)
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
