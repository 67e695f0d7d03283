"""Online softmax: merging over random splits, orders and trees; dtypes; refusals."""

import functools
import math
import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from attnlib import (
    SoftmaxState,
    block_state,
    merge_outputs,
    merge_states,
    online_attention,
)
from attnlib.online_softmax import finite, nonzero
from drawn import close, each_refused, normal

LEADING = st.lists(st.integers(1, 3), max_size=2).map(tuple)
SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6)  # of blocks; 0: no keys
MASKS = st.sampled_from(["none", "random", "some blocks", "some rows", "everything"])
SEEDS = st.integers(0, 999)


def draw(leading, queries, sizes, d_v, kind, seed, factor=3.0):
    """Scores, masked in one of several ways, and values, for blocks of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    keys = sum(sizes)
    options = {"dtype": torch.float64, "generator": generator}
    scores = factor * torch.randn(*leading, queries, keys, **options)
    value = torch.randn(*leading, keys, d_v, **options)
    allowed = torch.ones(*leading, queries, keys, dtype=torch.bool)
    if kind == "random":
        allowed = torch.rand(allowed.shape, generator=generator) < 0.5
    elif kind == "some blocks":
        for number, block in enumerate(allowed.split(sizes, dim=-1)):
            block[...] = number % 2 == seed % 2
    elif kind == "some rows":
        allowed[..., ::2, :] = False
    elif kind == "everything":
        allowed[...] = False
    return scores.masked_fill(~allowed, -torch.inf), value


def cut(scores, value, sizes):
    return list(zip(scores.split(sizes, dim=-1), value.split(sizes, dim=-2), strict=True))


def merge_in_a_random_tree(merge, parts, seed):
    """Pairs drawn at random are merged until one is left: any order and any tree."""
    luck, parts = random.Random(seed), list(parts)
    while len(parts) > 1:
        luck.shuffle(parts)
        parts.append(merge(parts.pop(), parts.pop()))
    return parts[0]


def whole(scores, value):
    """Maximum, total, output and log-sum-exp of each row, all keys at once.

    A key more, which is forbidden, changes nothing, and there always is one.
    """
    scores, value = F.pad(scores, (0, 1), value=-torch.inf), F.pad(value, (0, 0, 0, 1))
    maximum = scores.detach().amax(dim=-1, keepdim=True)
    empty = maximum == -torch.inf
    total = (scores - maximum.masked_fill(empty, 0.0)).exp().sum(dim=-1)
    safe = scores.masked_fill(empty, 0.0)  # no NaN arises, forward or backward
    output = safe.softmax(dim=-1).masked_fill(empty, 0.0) @ value
    lse = safe.logsumexp(dim=-1).masked_fill(empty[..., 0], -torch.inf)
    return maximum[..., 0], total, output, lse


def test_what_stands_in_for_an_empty_row():
    assert nonzero(torch.tensor([0.0, 0.5])).tolist() == [1.0, 0.5]
    assert finite(torch.tensor([-math.inf, -2.0])).tolist() == [0.0, -2.0]


@given(LEADING, st.integers(0, 4), SIZES, st.integers(0, 3), MASKS, st.booleans(), SEEDS)
@example((), 3, [0], 2, "none", True, 0)  # no keys at all
@example((2,), 3, [1, 1, 1, 1, 1, 1], 2, "some blocks", True, 1)  # the first is masked
@example((2,), 3, [1, 1, 1, 1, 1, 1], 2, "some blocks", True, 0)  # the last one is
@example((), 3, [3, 0, 4], 2, "everything", True, 0)
@example((), 3, [3, 0, 4], 2, "everything", False, 0)
def test_any_split_order_and_tree(leading, queries, sizes, d_v, kind, additive, seed):
    """Results and gradients, also through the log-sum-exp; 0 and never NaN if empty.

    An additive mask of -inf does not cut a score off from its gradient as masked_fill does,
    so it is the harder case.
    """
    masked, value = draw(leading, queries, sizes, d_v, kind, seed)
    forbidden, value = masked == -torch.inf, value.requires_grad_()
    raw = normal(*masked.shape, seed=seed, grad=True)
    kept = raw.masked_fill(forbidden, -torch.inf)
    added = raw + torch.zeros_like(masked).masked_fill(forbidden, -torch.inf)
    scores, expected = added if additive else kept, whole(kept, value)
    blocks = cut(scores, value, sizes)
    states = [block_state(*block) for block in blocks]
    random.Random(seed).shuffle(blocks)
    results = []
    for state in (
        block_state(scores, value),
        functools.reduce(merge_states, states),
        merge_in_a_random_tree(merge_states, states, seed),
        online_attention(iter(blocks)),
    ):
        close([state.maximum, state.total], expected[:2], atol=1e-11)
        results.append((state.output, state.lse))
    pairs = [(state.output, state.lse) for state in states]
    results.append(merge_in_a_random_tree(merge_outputs, pairs, seed))
    coming = [normal(*x.shape, seed=seed + 1) for x in expected[2:]]

    def gradients(results):
        return torch.autograd.grad(results, (raw, value), coming, retain_graph=True)

    slopes = gradients(expected[2:])
    for result in results:
        close(result, expected[2:])
        found = gradients(result)
        close(found, slopes)
        assert not found[0][forbidden].any()


@given(LEADING, st.integers(1, 4), SIZES, MASKS, MASKS, SEEDS)
@example((), 2, [3], "none", "everything", 0)
def test_laws(leading, queries, sizes, kind, other_kind, seed):
    """Commutative and the identity to the last bit, associative up to rounding."""
    a, b, c = (
        block_state(*draw(leading, queries, sizes, 2, k, seed + n))
        for n, k in enumerate((kind, other_kind, "random"))
    )
    none = SoftmaxState(*(torch.zeros_like(part) for part in a))
    none = none._replace(maximum=none.maximum - torch.inf)
    for merged, same in (
        (merge_states(a, b), merge_states(b, a)),
        (merge_states(a, none), a),
        (merge_states(none, a), a),
        (merge_states(none, none), none),
    ):
        close(merged, same, atol=0)
    left, right = (
        merge_states(merge_states(a, b), c),
        merge_states(a, merge_states(b, c)),
    )
    close(left, right)


def test_second_derivatives():
    scores, value = draw((), 2, [3, 2, 2], 2, "some blocks", 0, factor=1.0)
    forbidden = scores == -torch.inf
    raw = scores.masked_fill(forbidden, 0.3).requires_grad_()

    def both(raw, value):
        blocks = cut(raw.masked_fill(forbidden, -torch.inf), value, [3, 2, 2])
        state = online_attention(blocks)
        return state.output, torch.where(state.lse > -torch.inf, state.lse, 0.0)

    assert torch.autograd.gradcheck(both, (raw, value.requires_grad_()))
    assert torch.autograd.gradgradcheck(both, (raw, value))


@pytest.mark.parametrize("size", [80.0, 1e4, 1e30])
def test_huge_scores(size):
    """No overflow, however the blocks come: rising, falling, and equal scores."""
    value = torch.arange(6.0)[:, None]
    for scores in (
        torch.tensor([[-size, 0.0, size, -size, 0.0, size]]),
        torch.tensor([[size, size, 0.0, 0.0, -size, -size]]),
        torch.full((1, 6), size),
        torch.full((1, 6), -size),
    ):
        for sizes in ([1] * 6, [2, 4], [6]):
            state = online_attention(cut(scores, value, sizes))
            torch.testing.assert_close(state.output, torch.softmax(scores, dim=-1) @ value)
            torch.testing.assert_close(state.lse, torch.logsumexp(scores, dim=-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_formats_are_computed_in_float32(dtype):
    """70,000 equal scores: neither stuck at 2048, as in float16, nor infinite."""
    torch.manual_seed(0)
    scores, value = torch.zeros(2, 70_000, dtype=dtype), torch.rand(70_000, 2).to(dtype)
    blocks = cut(scores, value, [700] * 100)
    states = [block_state(*block) for block in blocks]
    exact = value.double().mean(dim=0).expand(2, 2)
    for state in (online_attention(blocks), functools.reduce(merge_states, states)):
        assert {part.dtype for part in (*state, state.lse)} == {torch.float32}
        assert state.total.tolist() == [70_000, 70_000]
        close(state.output.double(), exact, atol=1e-5)
        torch.testing.assert_close(state.lse, torch.full((2,), math.log(70_000)))
    for wide in (torch.float32, torch.float64):  # scores as a kernel accumulates them
        state = online_attention([(scores.to(wide), value)])
        assert {part.dtype for part in state} == {wide}
        close(state.output.double(), exact, atol=1e-5)


def test_merged_values_do_not_overflow():
    """The two factors are divided before they multiply outputs near the largest number."""
    large = torch.finfo(torch.float32).max * torch.tensor([[1.0, -1.0]])
    parts = [block_state(torch.tensor([[score]]), large) for score in (0.0, 0.0, 1.0)]
    merged = functools.reduce(merge_states, parts)
    torch.testing.assert_close(merged.output, large)
    output, _ = merge_outputs((parts[0].output, parts[0].lse), (large, parts[2].lse))
    torch.testing.assert_close(output, large)


def test_inputs_are_not_written_to_and_a_nan_stays():
    scores, value = draw((2,), 3, [2, 2], 2, "none", 0)
    copies = scores.clone(), value.clone()
    a, b = (block_state(*block) for block in cut(scores, value, [2, 2]))
    kept = [part.clone() for part in (*a, *b)]
    merge_states(a, b), merge_outputs((a.output, a.lse), (b.output, b.lse))
    online_attention(cut(scores, value, [2, 2]))
    assert torch.equal(scores, copies[0]) and torch.equal(value, copies[1])
    assert all(map(torch.equal, (*a, *b), kept))

    scores[0, 0, 0] = torch.nan  # a mistake elsewhere must not become a number here
    for size in (1, 2, 4):
        state = online_attention(cut(scores, value, [size] * (4 // size)))
        assert state.output[0, 0].isnan().all() and state.lse[0, 0].isnan()
        assert not state.output[1].isnan().any()


def test_at_most_two_blocks_are_alive():
    """A generator's scores are forgotten: the last block, and the one being made."""
    alive, most = set(), 0

    class Scores(torch.Tensor):
        def __del__(self):
            alive.discard(id(self))

    def blocks():
        nonlocal most
        for _ in range(6):
            scores = torch.zeros(2, 3).as_subclass(Scores)
            alive.add(id(scores))
            most = max(most, len(alive))
            yield scores, torch.ones(3, 1)

    online_attention(blocks())
    assert 1 <= most <= 2


STATE = SoftmaxState(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3, 4))
SHAPES = "expected shapes (2, 3), (2, 3) and (2, 3, 4), got"
VALUES = {
    "blocks: expected at least one block, got none": lambda: online_attention([]),
    "scores: expected at least 2 dimensions (queries, keys), got shape (3,)":
        lambda: block_state(torch.ones(3), torch.ones(3, 1)),
    "value: expected at least 2 dimensions (keys, features), got shape (3,)":
        lambda: online_attention([(torch.ones(2, 3), torch.ones(3))]),
    "value: expected 3 keys as scores, got shape (1, 4)":
        lambda: block_state(torch.ones(2, 3), torch.ones(1, 4)),
    "value: expected leading dimensions (5,) as scores, got shape (3, 4)":
        lambda: block_state(torch.ones(5, 2, 3), torch.ones(3, 4)),
    "blocks: expected outputs (2, 4) as before, got (1, 4)":
        lambda: online_attention((torch.ones(n, 3), torch.ones(3, 4)) for n in (2, 1)),
    f"b: {SHAPES} (2, 3), (2, 3, 1) and (2, 3, 4)":
        lambda: merge_states(STATE, STATE._replace(total=torch.ones(2, 3, 1))),
    f"b: {SHAPES} (2, 1), (2, 1) and (2, 1, 4)":
        lambda: merge_states(STATE, SoftmaxState(*(part[:, :1] for part in STATE))),
    f"a: {SHAPES} (3, 2), (3, 2) and (2, 3, 4)":
        lambda: merge_outputs((STATE.output, STATE.total.mT), (STATE.output, STATE.total)),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
TYPES = {
    "scores: expected a floating-point tensor, got torch.int64":
        lambda: block_state(torch.ones(2, 3).long(), torch.ones(3, 1)),
    "value: expected a floating-point tensor, got torch.bool":
        lambda: block_state(torch.ones(2, 3), torch.ones(3, 1) > 0),
}  # fmt: skip
test_types = each_refused(TypeError, TYPES)
