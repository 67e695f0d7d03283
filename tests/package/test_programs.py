"""Masks and scores as programs: as with all scores at once, and as PyTorch has them."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnlib.checks import changed_options
from attnlib.programs import ProgramAttention
from drawn import close, draw, draw_mask, each_refused, leaves, normal, visible

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 3, 3]])
WIDTHS, SLOPES = torch.tensor([1, 3, 6, 9]), torch.linspace(-0.2, 0.5, 4).double()
MASKS = {
    "none": None,
    "documents": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
    "windows": lambda b, h, q, k: ((q - k).abs() < WIDTHS[h]) & (b + q != 5),
    "same for all": lambda b, h, q, k: k % 3 != 1,
    "back": lambda b, h, q, k: k <= q,
}
CHANGES = {
    "none": None,
    "slopes": lambda s, b, h, q, k: s - SLOPES[h] * (q - 2 * k),
    "places alone": lambda s, b, h, q, k: 0.3 * (q - k).to(s.dtype),
    "cap": lambda s, b, h, q, k: (1 + b) * torch.tanh(s / (1 + b)),
}


def dense(query, key, value, mask_mod, score_mod, mask=None, causal=False, scale=None):
    """All scores at once; the last query has the last key's number."""
    group, (n, m) = query.shape[1] // key.shape[1], (query.shape[-2], key.shape[-2])
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    places = [torch.arange(size) for size in (*query.shape[:2], m, m)]
    places = torch.meshgrid(*places, indexing="ij")
    places = [x[..., m - n :, :] for x in places]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    seen = visible(n, m, causal)
    if mask_mod is not None:
        seen = seen & mask_mod(*places)
    if mask is not None:
        seen = seen & mask if mask.dtype == torch.bool else seen
        scores = scores if mask.dtype == torch.bool else scores + mask
    scores = scores.masked_fill(~seen, -torch.inf)
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value


@pytest.mark.parametrize("score_mod", CHANGES)
@pytest.mark.parametrize("mask_mod", MASKS)
def test_as_with_all_scores_at_once(mask_mod, score_mod):
    """Tiles that do not divide, fewer queries than keys, masks beside, shared heads."""
    programs = MASKS[mask_mod], CHANGES[score_mod]
    for n, m, size, causal, scale in (
        (10, 10, 4, True, None),
        (10, 10, 99, False, -0.7),
        (5, 9, 3, False, SLOPES[:, None, None]),
        (1, 10, 4, True, None),
        (0, 4, 4, False, 0.3),
    ):
        attend = ProgramAttention(*programs, causal, scale, size)
        for kind, heads in product((None, "boolean", "holes"), (2, 4)):
            inputs = draw(2, 4, queries=n, keys=m, kv_heads=heads)
            mask = draw_mask(kind, 2, 1, n, m)
            output, weights = attend(*inputs, mask, enable_gqa=True)
            close(output, dense(*inputs, *programs, mask, causal, scale))
            assert weights is None


def test_texts_read_token_by_token_and_inputs_of_fewer_dimensions():
    attend = ProgramAttention(MASKS["windows"], CHANGES["slopes"], True, block_size=3)
    query, key, value = inputs = draw(1, 4, queries=10, keys=10)
    output = attend(*inputs)[0]
    for i in range(10):
        new = query[..., i : i + 1, :], key[..., : i + 1, :], value[..., : i + 1, :]
        close(attend(*new)[0], output[..., i : i + 1, :])
    close(attend(*(x[0] for x in inputs))[0], output[0])
    close(attend(*(x[0, 0] for x in inputs))[0], output[0, 0])


def test_gradients_are_those_of_all_scores_at_once():
    """Of a tensor in a program and of a mask, too; and those of small differences."""

    def tiles(*inputs):
        *x, mask_mod, score_mod, mask, causal = inputs
        return ProgramAttention(mask_mod, score_mod, causal, block_size=3)(*x, mask)[0]

    def call(attend, *inputs):
        *x, slopes, mask = inputs
        sloped = lambda s, b, h, q, k: torch.tanh(s) - slopes[h] * (q - k)  # noqa: E731
        return attend(*x, MASKS["documents"], sloped, mask, True)

    given = leaves([*draw(2, 4, queries=8, keys=10), SLOPES, normal(4, 1, 10)])
    outputs = [call(attend, *given) for attend in (tiles, dense)]
    found, expected = (torch.autograd.grad(x, given, normal(2, 4, 8, 3)) for x in outputs)
    close(found, expected)
    assert all((gradient != 0).any() for gradient in found)
    assert torch.autograd.gradcheck(partial(call, tiles), given, fast_mode=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_programs_for_flex_attention_run_here():
    inputs = draw(2, 4, queries=10, keys=10, d_v=4)
    for mask_mod, score_mod in product(MASKS, CHANGES):
        programs = MASKS[mask_mod], CHANGES[score_mod]
        seen = programs[0] and create_block_mask(programs[0], 2, 4, 10, 10, device="cpu")
        expected = flex_attention(*inputs, score_mod=programs[1], block_mask=seen)
        close(ProgramAttention(*programs, block_size=4)(*inputs)[0], expected)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_that_are_hidden_whole_are_not_computed(causal):
    """Counted, for documents of 8 tokens and a tile of 4; and for no mask of programs."""
    calls = []

    def counted(s, b, h, q, k):
        calls.append((int(q[0]) // 4, int(k[0]) // 4, s.shape))
        return s

    def documents(b, h, q, k):
        return q // 8 == k // 8

    inputs = draw(1, 2, queries=20, keys=20)
    for mask_mod in (documents, None):
        calls.clear()
        ProgramAttention(mask_mod, counted, causal, block_size=4)(*inputs)
        places = product(range(5), range(5))
        if mask_mod:
            places = [(i, j) for i, j in places if i // 2 == j // 2]
        places = [(i, j) for i, j in places if j <= i or not causal]
        assert calls == [(*place, (1, 2, 4, 4)) for place in places]


def test_a_query_that_sees_nothing_gets_0():
    """Its gradients, too: beside others in a tile, in tiles of its own, and by a mask."""
    inputs, sees = (
        leaves(draw(2, queries=10, keys=10)),
        torch.tensor([1, 0, 0, 1] + 6 * [0]),
    )
    attend = ProgramAttention(lambda b, h, q, k: (sees[q] > 0) | (q == 9), block_size=4)
    output = attend(*inputs, torch.arange(10)[:, None] < 9)[0]
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(x.isfinite().all() for x in (output, *gradients))
    for rows in (output, gradients[0]):
        assert torch.equal((rows != 0).any(dim=-1).int(), sees.expand(2, 10).int())
    nothing = ProgramAttention(lambda b, h, q, k: q < 0, block_size=4)
    assert (nothing(*inputs)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """To the last bit; programs get float32, and scores of 100,000 are no infinite ones."""
    programs = MASKS["documents"], lambda s, b, h, q, k: s - 0.1 * q
    attend = ProgramAttention(*programs, block_size=3)
    for size in (1, 300):
        half = [(size * x).to(dtype) for x in draw(2, 3, queries=10, keys=10)]
        output = attend(*half)[0]
        assert output.dtype == dtype and output.isfinite().all()
        close(output, attend(*(x.float() for x in half))[0].to(dtype), atol=0)


def test_autocast_rounds_no_scores_and_no_programs():
    large, slopes = torch.full((1, 1, 4, 8), 60.0), torch.ones(1)
    attend = ProgramAttention(score_mod=lambda s, b, h, q, k: s - slopes[h] * k, scale=10.0)
    with torch.autocast("cpu", torch.float16):
        output = attend(large, large, large)[0]
    assert output.dtype == torch.float16 and output.isfinite().all()


def test_trained_models_are_told_what_changes_their_numbers():
    named = [name for name, *_ in changed_options(ProgramAttention(*[torch.add] * 2))]
    assert sorted(named) == ["mask_mod", "score_mod"]
    assert not list(changed_options(ProgramAttention(block_size=7)))


x, five = torch.ones(2, 3, 4, 5), torch.ones(2, 2, 3, 4, 5)


def says(mask=None, score=None, query=x, key=x):
    """A call with programs that say this, whatever they are asked."""
    programs = [None if y is None else (lambda *_, y=y: y) for y in (mask, score)]
    return lambda: ProgramAttention(*programs, block_size=4)(query, key, key)


def test_without_programs_nothing_is_numbered(as_shipped):
    for query, key in ((five, five), (x, x[..., :2, :])):
        output = ProgramAttention(block_size=3)(query, key, key)[0]
        close(output, torch.ones_like(output), atol=1e-6)


BOOL, FLOAT = (f"expected a tensor of torch.{kind} from it" for kind in ("bool", "float32"))
FITS = "expected a shape from it that fits (2, 3, 4, 4), got"
test_wrong_kinds = each_refused(TypeError, {
    f"mask_mod: {BOOL}, got torch.float32": says(x[..., :4]),
    f"mask_mod: {BOOL}, got bool": says(True),
    f"score_mod: {FLOAT}, got torch.bool": says(None, x[..., :4] > 0),
    f"score_mod: {FLOAT}, got torch.float64": says(None, x[..., :4].double()),
    f"score_mod: {FLOAT}, got float": says(None, 1.0),
    "block_size: expected a whole number, got 2.0":
        lambda: ProgramAttention(block_size=2.0),
    "causal: expected True or False, got 1": lambda: ProgramAttention(causal=1),
})  # fmt: skip
test_wrong_numbers = each_refused(ValueError, {
    f"mask_mod: {FITS} (2, 3, 4, 5)": says(x > 0),
    f"score_mod: {FITS} (1, 2, 3, 4, 1)": says(None, x[None, ..., :1]),
    "query: expected at most (batch, heads, tokens, features), got shape (2, 2, 3, 4, 5)":
        says(None, five, five, five),
    "query: expected at most 2 tokens, as the last has the last key, got 4":
        says(x[..., :2] > 0, None, x, x[..., :2, :]),
    "block_size: expected at least 1, got 0": lambda: ProgramAttention(block_size=0),
    "scale: expected a finite number, got inf": lambda: ProgramAttention(scale=torch.inf),
})  # fmt: skip
