"""Flash attention: beside the oracle over a table, the contract, and its memory."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlib
from attnlib import FlashAttention, causal_mask, flash_attention, masked_softmax
from attnlib.flash import Tiling, row_blocks, tile_sizes, tiles_of


def oracle(query, key, value, mask=None, causal=False, scale=None):
    """Output and log-sum-exp by the definitions, in float64 if the inputs are."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * query @ key.transpose(-2, -1)
    if causal:
        allowed = causal_mask(query.shape[-2], key.shape[-2])
        scores = attnlib.apply_mask(scores, allowed)
    if mask is not None:
        scores = attnlib.apply_mask(scores, mask)
    empty = (scores == -torch.inf).all(dim=-1)
    lse = torch.logsumexp(scores.masked_fill(empty[..., None], 0.0), dim=-1)
    return masked_softmax(scores) @ value, lse.masked_fill(empty, -torch.inf)


def leaves(leading, queries, keys, d_k=4, d_v=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*leading, queries, d_k), (*leading, keys, d_k), (*leading, keys, d_v))
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.requires_grad_() for x in made]


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def gradients(output, lse, wanted):
    """Of a loss that uses the output and the log-sum-exp where a query sees something."""
    g = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    loss = (output * g).sum() + lse[lse > -torch.inf].sin().sum()
    return torch.autograd.grad(loss, wanted)


def holes(*shape):
    return torch.randn(shape, dtype=torch.float64).masked_fill(
        torch.rand(shape) < 0.3, -torch.inf
    )


MASKS = {
    "none": lambda N, M: None,
    "boolean": lambda N, M: torch.rand(2, 1, N, M) < 0.5,
    "boolean, two dimensions": lambda N, M: torch.rand(N, M) < 0.5,
    "for each key": lambda N, M: torch.rand(M) < 0.5,
    "for each query": lambda N, M: torch.rand(N, 1) < 0.5,
    "for each sequence": lambda N, M: torch.rand(2, 1, 1, M) < 0.5,
    "one for all": lambda N, M: torch.tensor(True),
    "nothing": lambda N, M: torch.zeros(N, M, dtype=torch.bool),
    "added": lambda N, M: holes(N, M).requires_grad_(),
    "added for each head": lambda N, M: holes(3, 1, M).requires_grad_(),
    "added everywhere": lambda N, M: holes(2, 3, N, M).requires_grad_(),
    "one number": lambda N, M: torch.tensor(0.5, dtype=torch.float64).requires_grad_(),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 12), (12, 5), (1, 7), (7, 1)])
def test_equal_to_the_oracle(make_mask, queries, keys, causal):
    torch.manual_seed(queries)
    mask, inputs = make_mask(queries, keys), leaves((2, 3), queries, keys)
    wanted = inputs + [mask] * (mask is not None and mask.requires_grad)
    expected = oracle(*inputs, mask, causal)
    judged = gradients(*expected, wanted)
    for block_size in (None, 1, 4, (4, 3), (2, 5)):
        options = {"causal": causal, "block_size": block_size, "return_lse": True}
        found = flash_attention(*inputs, mask, **options)
        for a, b in zip(found, expected, strict=True):
            close(a, b)
        for a, b in zip(gradients(*found, wanted), judged, strict=True):
            close(a, b, atol=1e-11)


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([None, 0.0, -0.7, 40.0]),
)
def test_any_sizes(queries, keys, rows, cols, causal, scale):
    inputs = leaves((2,), queries, keys, d_k=3, d_v=2, seed=queries)
    options = {"causal": causal, "scale": scale, "block_size": (rows, cols)}
    found = flash_attention(*inputs, **options, return_lse=True)
    for a, b in zip(found, oracle(*inputs, None, causal, scale), strict=True):
        close(a, b, atol=1e-11)
    assert all(g.isfinite().all() for g in gradients(*found, inputs))


@pytest.mark.parametrize("leading", [(), (3,), (0,), (2, 0, 3), (2, 2, 2)])
def test_leading_dimensions(leading):
    inputs = leaves(leading, 5, 6)
    found = flash_attention(*inputs, block_size=2, return_lse=True)
    for a, b in zip(found, oracle(*inputs), strict=True):
        close(a, b)
    assert [g.shape for g in gradients(*found, inputs)] == [x.shape for x in inputs]


def test_gradcheck():
    inputs, mask = leaves((2,), 4, 5), holes(4, 5).clamp(min=-3).requires_grad_()

    def both(query, key, value, mask):
        return flash_attention(query, key, value, mask, block_size=2, return_lse=True)

    assert torch.autograd.gradcheck(both, [*inputs, mask])
    output = flash_attention(*inputs)
    (gradient,) = torch.autograd.grad((output**2).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_bound_decides_and_both_ways_agree(monkeypatch):
    inputs = [x.detach() for x in leaves((2,), 20, 30, d_k=16)]
    assert Tiling(*inputs, None, False, 0.25, 7).bounded()
    assert Tiling(*inputs, torch.ones(20, 30, dtype=torch.bool), False, 0.25, 7).bounded()
    assert not Tiling(*inputs, torch.zeros(20, 30), False, 0.25, 7).bounded()
    assert not Tiling(50 * inputs[0], *inputs[1:], None, False, 0.25, 7).bounded()
    assert not Tiling(*inputs, None, False, -20.0, 7).bounded()
    query, key = torch.full((1, 1, 1), 8.0), torch.full((1, 1, 1), 8.0 / math.log2(math.e))
    assert Tiling(query, key, key, None, False, 0.999, 1).bounded()
    assert not Tiling(query, key, key, None, False, 1.001, 1).bounded()
    easy = flash_attention(*inputs, block_size=7, return_lse=True)
    monkeypatch.setattr(Tiling, "bounded", lambda self: False)
    for a, b in zip(
        flash_attention(*inputs, block_size=7, return_lse=True), easy, strict=True
    ):
        close(a, b)


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_huge_scores(size):
    inputs = leaves((2,), 6, 9)
    query = (size * inputs[0]).detach()
    found = flash_attention(query, *inputs[1:], block_size=4, return_lse=True)
    expected = oracle(query, *inputs[1:])
    close(found[0], expected[0], atol=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=0)
    assert all(g.isfinite().all() for g in gradients(*found, inputs[1:]))


def test_scores_far_below_zero():
    query, key = torch.full((1, 4), -300.0), torch.full((5, 4), 300.0)
    value = torch.randn(5, 3)
    output, lse = flash_attention(query, key, value, return_lse=True)
    close(output, value.mean(dim=0, keepdim=True), atol=1e-6)
    torch.testing.assert_close(lse, torch.tensor([-4 * 9e4 / 2 + math.log(5)]))


def test_a_mask_with_the_lowest_number_is_not_minus_infinity():
    query, key, value = (x.detach().float() for x in leaves((), 2, 4))
    mask = torch.full((2, 4), torch.finfo(torch.float32).min)
    mask[1, 2] = 0.0
    output = flash_attention(query, key, value, mask, block_size=3)
    close(output[0], value.mean(dim=0), atol=1e-6)
    close(output[1], value[2], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_at_most_twice_that_of_plain_attention(dtype, causal):
    inputs = [x.detach().to(dtype).requires_grad_() for x in leaves((2,), 90, 130, 32, 16)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    output, lse = flash_attention(*inputs, causal=causal, block_size=32, return_lse=True)
    plain, _ = attnlib.ScaledDotProductAttention(causal=causal)(*inputs)
    exact, exact_lse = oracle(*exact_inputs, None, causal)
    assert output.dtype == dtype and lse.dtype == torch.float32
    assert (output - exact).abs().max() <= 2 * (plain - exact).abs().max()
    assert (lse - exact_lse).abs().max() < 1e-5
    g = torch.linspace(-1, 1, output.numel()).view_as(output).to(dtype)
    ours, theirs = (torch.autograd.grad(y, inputs, g) for y in (output, plain))
    judge = torch.autograd.grad(exact, exact_inputs, g.double())
    for a, b, c in zip(ours, theirs, judge, strict=True):
        assert a.dtype == dtype
        assert (a - c).abs().max() <= 3 * (b - c).abs().max()


@given(
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(1, 7),
    st.integers(1, 7),
    st.booleans(),
)
def test_tiles_cover_what_is_seen_and_no_more(queries, keys, rows, cols, causal):
    allowed = causal_mask(queries, keys) if causal else torch.ones(queries, keys) > 0
    covered = torch.zeros_like(allowed)
    for block in row_blocks(queries, rows):
        for part, partial in tiles_of(block, queries, keys, causal, cols):
            tile = allowed[block, part]
            assert tile.any() and 0 < tile.shape[1] <= cols
            assert partial or tile.all()
            assert not covered[block, part].any()
            covered[block, part] = True
    assert (covered | ~allowed).all()


def test_tile_sizes():
    assert tile_sizes(3, 1, 1, True) == (3, 3) and tile_sizes((3, 5), 1, 1, True) == (3, 5)
    for matrices in (0, 1, 2, 8, 500):
        for queries in (0, 1, 1000, 100_000):
            rows, cols = tile_sizes(None, matrices, queries, causal=queries > 1000)
            assert 128 <= rows <= 1024 and cols in (256, 512)
            assert matrices * rows * cols <= max(2**20, matrices * 128 * 256)


def test_no_tensor_is_larger_than_a_tile_or_an_input():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, torch.Tensor):
                    self.largest = max(self.largest, x.untyped_storage().nbytes() // 4)
            return result

    inputs = [x.detach().float().requires_grad_() for x in leaves((1, 2), 1000, 1000, 8, 8)]
    allowed = torch.rand(1, 1, 1, 1000) < 0.5
    with Watch() as watch:
        output = flash_attention(*inputs, allowed, causal=True, block_size=64)
        output.sum().backward()
    assert watch.largest <= 2 * 1000 * 8


def test_plugs_into_models_and_copies():
    sizes = {"vocab_size": 7, "context_length": 12, "embed_dim": 8, "num_heads": 2}
    heads = FlashAttention(causal=True, block_size=5)
    flash = attnlib.LanguageModel(**sizes, num_layers=2, attention=heads).double()
    plain = attnlib.LanguageModel(**sizes, num_layers=2).double()
    plain.load_state_dict(flash.state_dict())
    ids = torch.randint(7, (2, 12))
    logits, weights = flash(ids, return_weights=True)
    close(logits, plain(ids))
    assert weights == [None, None]
    for a, b in zip(
        torch.autograd.grad(logits.square().sum(), list(flash.parameters())),
        torch.autograd.grad(plain(ids).square().sum(), list(plain.parameters())),
        strict=True,
    ):
        close(a, b, atol=1e-10)
    close(copy.deepcopy(flash)(ids), logits)
    with pytest.raises(ValueError, match="causal=True"):
        attnlib.LanguageModel(**sizes, num_layers=1, attention=FlashAttention)


def test_autocast():
    layer = attnlib.MultiHeadAttention(16, 2, attention=FlashAttention(causal=True))
    x = torch.randn(2, 9, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(x)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16 and x.grad.isfinite().all()


REFUSED = {
    "d_k": (
        (torch.ones(3, 4), torch.ones(3, 5), torch.ones(3, 4)),
        {},
        ValueError,
        "key: ",
    ),
    "block of 0": (
        (torch.ones(3, 4),) * 3,
        {"block_size": 0},
        ValueError,
        "block_size: expected at least 1, got 0",
    ),
    "a pair with 0": (
        (torch.ones(3, 4),) * 3,
        {"block_size": (4, 0)},
        ValueError,
        "block_size: expected at least 1",
    ),
    "not an integer": (
        (torch.ones(3, 4),) * 3,
        {"block_size": 2.0},
        TypeError,
        "block_size: expected an integer, or a pair of them",
    ),
    "three numbers": (
        (torch.ones(3, 4),) * 3,
        {"block_size": (1, 2, 3)},
        TypeError,
        "block_size: expected an integer, or a pair of them",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"), REFUSED.values(), ids=REFUSED
)
def test_refusals(arguments, options, error, message, as_shipped):
    with pytest.raises(error, match=message):
        flash_attention(*arguments, **options)


def test_the_class_refuses_when_it_is_made(as_shipped):
    with pytest.raises(ValueError, match="'torch', 'triton', got 'cuda'"):
        FlashAttention(backend="cuda")
    with pytest.raises(ValueError, match="block_size: expected at least 1"):
        FlashAttention(block_size=0)
