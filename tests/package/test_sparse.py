"""Attention to chosen keys: as a loop says, blind to what is hidden; and its parts."""

from itertools import product

import pytest
import torch

from attnlib import MultiHeadAttention, ScaledDotProductAttention, padding_mask
from attnlib.sparse import (
    ChosenAttention,
    box_scores,
    in_blocks,
    index_scores,
    indexer_loss,
    mean_scores,
    three_branches,
    with_first,
)
from drawn import close, draw, each_refused, leaves, normal, small_model, visible


def squares(query, blocks):
    """A score of a user's own, which looks at no query."""
    return blocks.square().sum(dim=(-2, -1)).unsqueeze(-2).expand(*query.shape[:-1], -1)


SCORES = {  # each with what it says of one query and the keys of one block
    box_scores: lambda q, k: torch.maximum(q * k.amin(dim=0), q * k.amax(dim=0)).sum(),
    mean_scores: lambda q, k: (k @ q).mean(),
    squares: lambda q, k: k.square().sum(),
}


def one_query(q, keys, values, added, block, keep, score):
    """What a query gets: blocks seen in part first, then the best, and a softmax."""
    ranked = []
    for start in range(0, len(keys), block):
        part = slice(start, start + block)
        whole = start + block <= len(keys) and (added[part] > -torch.inf).all()
        rank = -(score(q, keys[part]) + added[part].max()) if whole else -torch.inf
        if (added[part] > -torch.inf).any():
            ranked.append((rank, start))
    starts = [start for _, start in sorted(ranked)[:keep]]
    read = [j for j in range(len(keys)) if j // block * block in starts]
    if not read:
        return 0 * values.sum(dim=0)
    return torch.softmax(keys[read] @ q + added[read], dim=0) @ values[read]


def loop(query, key, value, mask, block, keep, score, causal=False, scale=None):
    """Query by query, head by head, also for heads that share keys."""
    n, m, scores = query.shape[-2], key.shape[-2], SCORES[score]
    if query.dim() > 2:
        group = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    if mask is None or mask.dtype == torch.bool:
        seen = visible(n, m) if mask is None else mask
        mask = torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf)
    mask = mask.masked_fill(~visible(n, m, causal), -torch.inf).expand(*query.shape[:-1], m)
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    rows = [
        one_query(query[i], key[i[:-1]], value[i[:-1]], mask[i], block, keep, scores)
        for i in product(*map(range, query.shape[:-1]))
    ]
    return torch.stack(rows).view(*query.shape[:-1], -1)


def masks(*lead, n, m, block):
    """None; padding, and a query that sees nothing; numbers; and whole blocks hidden."""
    yield None
    begins = 2 * torch.arange(lead[0]).view(-1, *[1] * (len(lead) + 1)) if lead else 2
    yield (torch.arange(m) >= begins) & (torch.arange(n) != 1)[:, None]
    yield 3 * normal(m, seed=7)
    hidden = (torch.arange(m) // block % 2 == 1) & (torch.arange(n) % 2 == 0)[:, None]
    yield normal(*lead[-1:], 1, m, seed=8).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", SCORES, ids=lambda score: score.__name__)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_as_in_a_loop(lead, score, causal):
    """More keys than queries and fewer, block sizes that do not divide, masks of all kinds.

    Of many queries, 64 are read at a time.
    """
    few = [(7, 12, 3, 2, None), (1, 13, 4, 3, 0.3), (9, 5, 2, 2, -0.7), (4, 5, 3, 9, 0.0)]
    many = [(66, 71, 8, 3, None), (70, 5, 2, 2, -0.7)]
    for n, m, *sizes, scale in few if lead else many:
        inputs, attend = draw(*lead, queries=n, keys=m), (*sizes, score, causal, scale)
        for mask in masks(*lead, n=n, m=m, block=sizes[0]):
            output, weights = ChosenAttention(*attend)(*inputs, mask)
            close(output, loop(*inputs, mask, *attend))
            assert weights is None


@pytest.mark.parametrize("scale", [-0.7, torch.linspace(-0.5, 2, 4)[:, None, None]])
def test_gradients_are_those_of_the_loop(scale):
    """Of a mask and a scale, too, for heads that share keys; 0 for keys that none reads."""
    shared = draw(2, 4, kv_heads=2, queries=5, keys=12)
    shared[1][..., 3:6, :] = 0.0  # their squares are the least
    given = *shared, normal(2, 1, 1, 12), torch.as_tensor(scale)
    *x, mask, factor = ours = leaves(given, torch.float64)
    *y, bias, other = exact = leaves(given, torch.float64)
    attend = ChosenAttention(3, 2, squares, causal=True, scale=factor)
    wanted = loop(*y, bias, 3, 2, squares, True, other)
    outputs = attend(*x, mask, enable_gqa=True)[0], wanted
    close(*outputs)
    found, wanted = (
        torch.autograd.grad(output, inputs, normal(*output.shape))
        for output, inputs in zip(outputs, (ours, exact), strict=True)
    )
    close(found, wanted)
    assert (found[1][..., 3:6, :] == 0).all() and (found[1][..., 6:, :] != 0).all()
    near = ChosenAttention(3, 2, causal=True)
    call = lambda *x: near(*x, enable_gqa=True)[0]  # noqa: E731
    assert torch.autograd.gradcheck(call, x, fast_mode=True)


@pytest.mark.parametrize("score", SCORES, ids=lambda score: score.__name__)
def test_nothing_leaks(score):
    """From later tokens, from what a mask hides, from other texts; and in any cuts."""
    attend = ChosenAttention(4, 3, score, causal=True)
    query, key, value = inputs = draw(2, 3, queries=75, keys=75)
    output = attend(*inputs)[0]
    for cut in (1, 34, 68, 70):
        later = [torch.cat([x[..., :cut, :], 1e3 * x[..., cut:, :]], -2) for x in inputs]
        close(attend(*later)[0][..., :cut, :], output[..., :cut, :])
        new = query[..., cut // 2 : cut, :], key[..., :cut, :], value[..., :cut, :]
        close(attend(*new)[0], output[..., cut // 2 : cut, :])
    seen = padding_mask([75, 21]).flip(-1)  # padding stands in front
    output = attend(*inputs, seen)[0]
    other = (torch.where(seen.mT, x, 1e3 * x + 50) for x in (key, value))
    close(attend(query, *other, seen)[0], output)
    close(attend(*(x[1:] for x in inputs), seen[1:])[0], output[1:])


@pytest.mark.parametrize("outlier", [1.0, 50.0])
def test_one_score_is_below_and_one_above(outlier):
    """Of log-sum-exp less the log of the size; for keys that are equal both are it."""
    query, key, _ = draw(2, queries=5, keys=12)
    key[:, 5] *= outlier
    scores = (query @ key.mT).unflatten(-1, (3, 4))
    mass = scores.logsumexp(dim=-1) - torch.tensor(4.0).double().log()
    low, high = (score(query, in_blocks(key, 4)) for score in (mean_scores, box_scores))
    assert (low <= mass).all() and (mass <= high).all()
    assert (scores <= high.unsqueeze(-1) + 1e-12).all()
    close(low, scores.mean(dim=-1))
    for score, size in product((mean_scores, box_scores), (1, 4)):
        equal = key.unsqueeze(-2).expand(2, 12, size, 4)
        close(score(query, equal), query @ key.mT)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_first_block_goes_before_others_but_not_before_ones_seen_in_part(keep):
    """And where it is hidden, it takes nobody's place."""
    query, key, value = inputs = draw(2, queries=10, keys=10, d_v=10)
    attend = ChosenAttention(3, keep, with_first(box_scores), causal=True)
    read = attend(query, key, torch.eye(10).double().expand(2, 10, 10))[0] != 0
    own = (torch.arange(10) + 1) % 3 != 0  # whose last block is seen in part
    assert read[:, own, own.nonzero()[:, 0]].all()
    assert read[:, (keep > 1) | ~own, 0].all()
    rest = ChosenAttention(3, keep, causal=True)(query[:, 3:], key[:, 3:], value[:, 3:])[0]
    close(attend(*inputs, torch.arange(10) > 2)[0][:, 3:], rest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """To the last bit, with the same blocks; and scores of 100,000 are no infinite ones."""
    attend = ChosenAttention(4, 2, causal=True)
    for size in (1, 300):
        half = [(size * x).to(dtype) for x in draw(2, queries=30, keys=30)]
        output = attend(*half)[0]
        assert output.dtype == dtype and output.isfinite().all()
        close(output, attend(*(x.float() for x in half))[0].to(dtype), atol=0)


def test_autocast_rounds_no_scores_and_an_empty_batch_is_none():
    large = torch.full((1, 1, 4, 8), 60.0)
    with torch.autocast("cpu", torch.float16):
        output = ChosenAttention(scale=10.0)(large, large, large)[0]
    assert output.dtype == torch.float16 and output.isfinite().all()
    nothing, seen = torch.ones(0, 3, 5, 4), torch.ones(0, 1, 5, 5, dtype=torch.bool)
    assert ChosenAttention()(nothing, nothing, nothing, seen)[0].shape == (0, 3, 5, 4)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_models_continue_texts_with_a_cache_as_without(kv_heads):
    attention, x = ChosenAttention(3, 2, causal=True), normal(2, 9, 16)
    layer = MultiHeadAttention(16, 4, attention, num_kv_heads=kv_heads).double()
    output = layer(x)[0]
    close(layer(x[:, :5])[0], output[:, :5])
    layer.attention = ScaledDotProductAttention(causal=True)  # which reads all blocks
    assert torch.allclose(layer(x)[0][:, :6], output[:, :6])
    assert not torch.allclose(layer(x)[0][:, 6:], output[:, 6:])
    model = small_model(context_length=40, attention=attention).double().eval()
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    one, two = (
        model.generate(ids, 30, generator=torch.Generator().manual_seed(1), cache=cache)
        for cache in (False, True)
    )
    assert torch.equal(one, two) and one.unique().numel() > 5


def test_an_indexer_and_its_loss():
    """Weighted products above 0; cross entropy, a mean over queries, without overflow."""
    query, key, weight = (normal(*d, seed=1) for d in ((2, 3, 4, 5), (2, 6, 5), (2, 3, 4)))
    found = index_scores(query, key, weight)
    for b, i, j in product(range(2), range(4), range(6)):
        heads = [(query[b, h, i] @ key[b, j]).clamp(min=0) for h in range(3)]
        close(found[b, i, j], weight[b, :, i] @ torch.stack(heads))
    hidden = ~visible(4, 6, causal=True)
    scores = found.masked_fill(hidden, -torch.inf).requires_grad_()
    weights = leaves([normal(2, 4, 6).masked_fill(hidden, -torch.inf).softmax(dim=-1)])[0]
    loss, shares = indexer_loss(scores, weights), scores.detach().softmax(dim=-1)
    close(loss, -(weights * shares.log())[~hidden.expand(2, 4, 6)].sum() / 8)
    gradients = torch.autograd.grad(loss, (scores, weights), allow_unused=True)
    close(gradients[0], (shares - weights) / 8)
    assert gradients[1] is None
    assert indexer_loss(1e4 * scores, weights).isfinite()


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_three_branches_token_by_token(lead):
    """Each alone, 0 before a block is whole; their sum; nothing of later tokens."""
    query, key, value = inputs = draw(*lead, queries=14, keys=14)
    means = [x[..., :12, :].unflatten(-2, (3, 4)).mean(dim=-2) for x in (key, value)]
    whole = torch.arange(3) < (torch.arange(14)[:, None] + 1) // 4
    near = visible(14, 14, causal=True, window=3)
    rows = (
        loop(query, *means, whole, 3, 1, mean_scores),
        loop(*inputs, None, 4, 2, mean_scores, causal=True),
        loop(*inputs, near, 14, 1, mean_scores),
    )
    assert (rows[0][..., :3, :] == 0).all()
    gates, sizes = normal(*lead, 14, 3, seed=5), {"block": 4, "keep": 2, "window": 3}
    expected = [gates[..., i, None] * row for i, row in enumerate(rows)]
    for i in range(3):
        close(three_branches(*inputs, gates * torch.eye(3)[i], **sizes), expected[i])
    close(three_branches(*inputs, gates, **sizes), sum(expected))
    later = [torch.cat([x[..., :9, :], 1e3 * x[..., 9:, :]], -2) for x in inputs]
    close(three_branches(*later, gates, **sizes)[..., :9, :], sum(expected)[..., :9, :])


x, text, places = torch.ones(2, 3, 5, 4), torch.ones(5, 4), torch.arange(5)
WRONG = "expected shape {} beside query, got {}".format
IN_PART = "keep: expected at least {}, the blocks that a query sees in part, got 1".format
test_wrong_numbers = each_refused(ValueError, {
    "block: expected at least 1, got 0": lambda: ChosenAttention(block=0),
    "keep: expected at least 1, got -1": lambda: ChosenAttention(keep=-1),
    "scale: expected a finite number, got nan": lambda: ChosenAttention(scale=torch.nan),
    IN_PART(2): lambda: ChosenAttention(2, 1, causal=True)(*[text] * 3, places > 0),
    IN_PART(3): lambda: ChosenAttention(2, 1)(x, x, x, places % 2 == 0),
    f"weight: {WRONG((2, 3, 5), (3, 5))}": lambda: index_scores(x, x[:, 0], x[0, ..., 0]),
    f"weights: {WRONG((5, 4), (1, 4))}": lambda: indexer_loss(text, text[:1]),
    f"gates: {WRONG((5, 3), (5, 1))}": lambda: three_branches(*[text] * 3, text[:, :1]),
    f"gates: {WRONG((5, 3), (1, 3))}": lambda: three_branches(*[text] * 3, text[:1, :3]),
    f"key: {WRONG((1, 4), (5, 4))}":
        lambda: three_branches(text[:1], text, text, text[:1, :3]),
    f"score: {WRONG((5, 2), (5, 1))}":
        lambda: ChosenAttention(4, 1, lambda q, k: q[:, :1])(*[text] * 3),
    f"score: {WRONG((2, 3, 5, 2), (5, 2))}":
        lambda: ChosenAttention(4, 1, lambda q, k: q[0, 0, :, :2])(x, x, x),
    "window: …, got 0": lambda: three_branches(*[text] * 3, text[:, :3], window=0),
})  # fmt: skip
test_wrong_kinds = each_refused(TypeError, {
    "block: expected a whole number, got 2.0": lambda: ChosenAttention(block=2.0),
    "keep: expected a whole number, got True": lambda: ChosenAttention(keep=True),
    "causal: expected True or False, got 1": lambda: ChosenAttention(causal=1),
    "weights: expected a floating-point dtype …": lambda: indexer_loss(text, text.double()),
    "gates: expected a tensor, got float": lambda: three_branches(*[text] * 3, 1.0),
})  # fmt: skip
