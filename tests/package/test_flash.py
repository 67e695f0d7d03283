"""Flash attention: beside the definitions over a table, its tiles, and its memory."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlib
from attnlib import FlashAttention, flash_attention
from attnlib.flash import (
    BACKENDS,
    TiledAttention,
    block_sizes,
    row_blocks,
    visible_tiles,
)
from drawn import (
    Largest,
    agree,
    attention,
    close,
    draw,
    each_refused,
    leaves,
    small_model,
    visible,
)


def holes(*shape):
    mask = torch.randn(shape, dtype=torch.float64)
    return mask.masked_fill(torch.rand(shape) < 0.3, -torch.inf).requires_grad_()


MASKS = {
    "none": lambda N, M: None,
    "boolean": lambda N, M: torch.rand(2, 1, N, M) < 0.5,
    "boolean, two dimensions": lambda N, M: torch.rand(N, M) < 0.5,
    "for each key": lambda N, M: torch.rand(M) < 0.5,
    "for each query": lambda N, M: torch.rand(N, 1) < 0.5,
    "for each sequence": lambda N, M: torch.rand(2, 1, 1, M) < 0.5,
    "one for all": lambda N, M: torch.tensor(True),
    "nothing": lambda N, M: torch.zeros(N, M, dtype=torch.bool),
    "added": lambda N, M: holes(N, M),
    "added for each head": lambda N, M: holes(3, 1, M),
    "added everywhere": lambda N, M: holes(2, 3, N, M),
    "one number": lambda N, M: torch.tensor(0.5, dtype=torch.float64).requires_grad_(),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("queries", "keys"), [(9, 9), (5, 12), (12, 5), (2, 2), (1, 7), (7, 1)]
)
def test_equal_to_the_definitions(make_mask, queries, keys, causal):
    torch.manual_seed(queries)
    mask, inputs = make_mask(queries, keys), draw(2, 3, queries=queries, keys=keys)
    for block_size in (None, 1, 4, (4, 3), (2, 5)):
        tiles = partial(flash_attention, block_size=block_size, return_lse=True)
        agree(tiles, inputs, mask, causal=causal)


SIZES = st.integers(0, 12), st.integers(0, 12), st.integers(1, 6), st.integers(1, 6)
SCALES = st.sampled_from([None, 0.0, -0.7, 40.0])


@given(*SIZES, st.booleans(), SCALES)
def test_any_sizes(queries, keys, rows, cols, causal, scale):
    inputs = draw(2, queries=queries, keys=keys, d_k=3, d_v=2, seed=queries)
    tiles = partial(flash_attention, block_size=(rows, cols), return_lse=True)
    agree(tiles, inputs, causal=causal, scale=scale)


@pytest.mark.filterwarnings("error")  # PyTorch warns where a buffer does not fit
@pytest.mark.parametrize(("d_k", "d_v"), [(4, 3), (2, 9)])
@pytest.mark.parametrize("leading", [(), (3,), (0,), (2, 0, 3), (2, 2, 2)])
def test_leading_dimensions(leading, d_k, d_v):
    inputs = draw(*leading, queries=5, keys=6, d_k=d_k, d_v=d_v)
    agree(partial(flash_attention, block_size=2, return_lse=True), inputs)


# ── sums without a maximum ───────────────────────────────────────────────────────────


def test_the_bound_decides_and_both_ways_agree(monkeypatch):
    inputs = draw(2, queries=90, keys=30, d_k=16)

    def bounded(*tensors, mask=None, scale=0.25):
        return TiledAttention(*tensors, mask, False, scale, 7).bounded()

    assert bounded(*inputs).all()
    assert bounded(*inputs, mask=torch.ones(90, 30) > 0).all()
    assert not bounded(5000 * inputs[0], *inputs[1:]).any()
    assert not bounded(*inputs, scale=-2000.0).any()
    assert bounded(*inputs, mask=torch.zeros(90, 30)) is None
    assert bounded(inputs[0][:, :9], *inputs[1:]) is None
    easy = flash_attention(*inputs, block_size=7, return_lse=True)
    monkeypatch.setattr(TiledAttention, "bounded", lambda self: None)
    close(flash_attention(*inputs, block_size=7, return_lse=True), easy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entry", [1.0, 2.0**50, -(2.0**50), 2.0**-70, -(2.0**-70), 0.0])
def test_no_sum_leaves_the_range(dtype, entry):
    """On both sides of the bound the result is right; well beyond it, it has to be."""
    reach = -math.log2(torch.finfo(dtype).tiny) - 1
    value = torch.ones(2, 6, 1, dtype=dtype)
    value[1, 3:] = entry  # the other matrix stays as it is
    widest = max(6.0, 6 * abs(entry), 1 / abs(entry) if entry else torch.inf)
    limits = [reach - math.log2(6), reach - math.log2(widest)]
    for matrix, limit in enumerate(limits):
        for stretch, sign in ((0.999, 1), (0.999, -1), (1.001, 1), (1.001, -1)):
            query = torch.full((2, 20, 1), sign * stretch * max(limit, 0.0), dtype=dtype)
            query /= math.log2(math.e)
            key = torch.ones(2, 6, 1, dtype=dtype)
            tiles = TiledAttention(query, key, value, None, False, 1.0, (7, 4))
            inside = stretch < 1 and limit > 0
            assert tiles.bounded().flatten()[matrix] == inside
            output = tiles.forward()[0]
            expected = value.double().mean(dim=1, keepdim=True).expand_as(output)
            close(output.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("size", [1e3, 1e30, 1e-40, torch.inf, torch.nan])
def test_a_matrix_does_not_change_the_bits_of_another(size, part, causal):
    inputs = draw(2, 3, queries=70, keys=50, dtype=torch.float32)
    found = []
    for factor in (1.0, size):
        changed = [x.clone() for x in inputs]
        changed[part][1, 2] *= factor
        changed = leaves(changed)
        output, lse = flash_attention(
            *changed, causal=causal, block_size=32, return_lse=True
        )
        g = torch.autograd.grad(output[..., 0].sum() + lse[..., 20:].sum(), changed)
        found.append([x.flatten(0, 1)[:5] for x in (output, lse, *g)])
    assert all(map(torch.equal, *found))


def test_no_number_is_looked_at_on_other_devices():
    """On the device "meta" there is none: what would wait on a GPU fails there."""
    inputs = [x.to("meta") for x in draw(2, queries=90, keys=50)]
    mask = torch.empty(90, 50, device="meta")
    for tiles in (
        TiledAttention(*inputs, None, True, 0.5, 16),
        TiledAttention(*inputs, mask > 0, False, 0.5, None),
        TiledAttention(*inputs, mask, True, 0.5, 16),
    ):
        output, lse, *kept = tiles.forward()
        assert output.shape == (2, 90, 3) and lse.shape == (2, 90)
        gradients = tiles.backward(output, *kept, output, lse, torch.empty_like(mask))
        assert [x.shape for x in gradients] == [x.shape for x in inputs]


# ── large numbers, small dtypes ──────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_huge_scores(size):
    query, *inputs = draw(2, queries=6, keys=9)
    inputs = leaves(inputs)
    found = flash_attention(size * query, *inputs, block_size=4, return_lse=True)
    expected = attention(size * query, *inputs)
    close(found[0], expected[0], atol=1e-9)
    close(found[1], expected[1], rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)
    low, key, value = torch.full((1, 4), -size), torch.full((5, 4), size), torch.randn(5, 3)
    output, lse = flash_attention(low, key, value, return_lse=True)  # far below zero
    close(output, value.mean(dim=0, keepdim=True), atol=1e-6)
    close(lse, torch.tensor([math.log(5) - 2 * size**2]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e38, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_where_no_score_can_be_told_from_another(low, dtype):
    """Of a query under such a mask, and of the keys that it sees."""
    inputs = draw(2, queries=7, keys=5, dtype=dtype, grad=True)
    mask = torch.zeros(7, 5, dtype=dtype)
    mask[2] = torch.finfo(dtype).min if low < -1e38 else low
    mask[4, 1:] = mask[2, 1:]
    wanted, g = [*inputs, mask.requires_grad_()], torch.linspace(-1, 1, 42, dtype=dtype)
    ours, theirs = (
        torch.autograd.grad(output, wanted, g.view(2, 7, 3))
        for output in (
            flash_attention(*inputs, mask, block_size=3),
            attention(*inputs, mask)[0],
        )
    )
    close(ours, theirs, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_at_most_twice_that_of_plain_attention(dtype, causal):
    inputs = draw(2, queries=90, keys=130, d_k=32, d_v=16, dtype=dtype, grad=True)
    exact_inputs = leaves(inputs, torch.float64)
    output, lse = flash_attention(*inputs, causal=causal, block_size=32, return_lse=True)
    plain, _ = attnlib.ScaledDotProductAttention(causal=causal)(*inputs)
    exact, exact_lse = attention(*exact_inputs, causal=causal)
    assert output.dtype == dtype and lse.dtype == torch.float32
    assert (lse - exact_lse).abs().max() < 1e-5
    g = torch.linspace(-1, 1, output.numel()).view_as(output).to(dtype)
    ours, theirs = ([y, *torch.autograd.grad(y, inputs, g)] for y in (output, plain))
    judge = [exact, *torch.autograd.grad(exact, exact_inputs, g.double())]
    for a, b, c, times in zip(ours, theirs, judge, (2, 3, 3, 3), strict=True):
        assert a.dtype == dtype
        assert (a - c).abs().max() <= times * (b - c).abs().max()


# ── tiles ────────────────────────────────────────────────────────────────────────────


NUMBERS = st.integers(1, 9)


@given(
    st.integers(1, 20), st.integers(0, 20), NUMBERS, NUMBERS, st.none() | NUMBERS,
    st.booleans(),
)  # fmt: skip
def test_tiles_are_those_that_somebody_sees(queries, keys, rows, cols, window, causal):
    """Each visible pair is in one tile, each tile has some, a whole one has only such."""
    seen = visible(queries, keys, causal, window)
    covered = torch.zeros_like(seen)
    for block in row_blocks(queries, rows):
        short = whole = 0
        for part, partial_ in visible_tiles(block, queries, keys, causal, cols, window):
            tile = seen[block, part]
            assert tile.any(dim=0).all() and 0 < tile.shape[1] <= cols
            assert partial_ or tile.all()
            assert not covered[block, part].any()
            covered[block, part] = True
            short += tile.shape[1] < cols
            whole += 0 if partial_ else tile.shape[1]
        assert whole >= seen[block].all(dim=0).sum() - 1
        assert short <= 3
    assert covered[seen].all()


def test_block_sizes():
    assert block_sizes(3, 1, 1, True) == (3, 3)
    assert block_sizes((3, 5), 1, 8192, True, window=3) == (3, 5)
    for matrices in (0, 1, 2, 8, 500):
        for queries in (0, 1, 1000, 100_000):
            rows, cols = block_sizes(None, matrices, queries, causal=queries > 1000)
            assert 128 <= rows <= 1024 and cols in (256, 512)
            assert matrices * rows * cols <= max(2**20, matrices * 128 * 256)
    for window, rows in ((None, 1024), (1024, 512), (3, 128)):
        assert block_sizes(None, 1, 8192, True, window=window)[0] == rows


def test_no_tensor_is_larger_than_a_tile_or_an_input():
    inputs = draw(1, 2, queries=1000, keys=1000, d_k=8, d_v=8, dtype=torch.float32)
    allowed = torch.rand(1, 1, 1, 1000) < 0.5
    with Largest() as largest:  # what the operators run, which a mode can't look into
        tiles = TiledAttention(*inputs, allowed, True, 0.3, 64)
        output, lse, *kept = tiles.forward()
        tiles.backward(output, *kept, output, lse.exp(), None)
    assert 2 * 64 * 64 <= largest.numbers <= 2 * 1000 * 8


# ── the class ────────────────────────────────────────────────────────────────────────


def test_a_model_with_tiles_computes_the_same_and_has_no_weights():
    heads = FlashAttention(causal=True, block_size=5)
    flash, plain = (small_model(**x).double() for x in ({"attention": heads}, {}))
    ids = torch.randint(7, (2, 12))
    logits, weights = flash(ids, return_weights=True)
    close(logits, plain(ids))
    assert weights == [None, None]


@pytest.fixture
def heard(monkeypatch):
    """What each backend is asked to do, in place of doing it."""
    calls = []
    for name, backend in BACKENDS.items():
        spy = backend._replace(
            attention=lambda *x, name=name, **options: calls.append((name, options)) or x[2]
        )
        monkeypatch.setitem(BACKENDS, name, spy)
    return calls


def test_auto_takes_the_first_that_suits(monkeypatch, heard, as_shipped):
    """On a CPU never the kernels, unless told so; a block size means these tiles.

    PyTorch's function is taken only where it needs no mask of all pairs.
    """
    square, last, late = (draw(2, 2, queries=n, keys=6, d_k=5, d_v=5) for n in (6, 1, 2))
    for inputs, options, expected in (
        (square, {}, "fused"),
        (square, {"causal": True}, "fused"),
        (late, {"causal": True}, "torch"),
        (square, {"causal": True, "window": 3}, "torch"),
        (square, {"causal": True, "window": 6}, "fused"),
        (last, {"causal": True, "window": 3}, "fused"),
        (late, {"window": 6}, "fused"),
        (late, {"window": 5}, "torch"),
        (square, {"block_size": 4}, "torch"),
        (square, {"backend": "torch", "block_size": (4, 2)}, "torch"),
        (square, {"backend": "triton", "scale": 0.3}, "triton"),
    ):
        FlashAttention(**options)(*inputs)
        name, given = heard.pop()
        wanted = {"causal": False, "window": None, "scale": None} | options
        wanted |= {"block_size": options.get("block_size")} if name == "torch" else {}
        wanted.pop("backend", None)
        assert (name, given) == (expected, wanted)
    never, ever = (
        BACKENDS[name]._replace(suits=lambda *x, suits=suits: suits)
        for name, suits in (("fused", False), ("triton", True))
    )
    monkeypatch.setitem(BACKENDS, "triton", ever)
    FlashAttention(block_size=8)(*square)  # nothing is ignored in silence
    monkeypatch.setitem(BACKENDS, "fused", never)
    FlashAttention()(*square)
    assert [name for name, _ in heard] == ["torch", "triton"]


ONES = (torch.ones(3, 4),) * 3
LEAST = "block_size: expected at least 1, got"
VALUES = {
    "key: …": lambda: flash_attention(ONES[0], torch.ones(3, 5), ONES[0]),
    f"{LEAST} 0": lambda: flash_attention(*ONES, block_size=0),
    f"{LEAST} (4, 0)": lambda: flash_attention(*ONES, block_size=(4, 0)),
    f"{LEAST} 0…": lambda: FlashAttention(block_size=0),
    "…'torch', 'fused', 'triton', got 'cuda'": lambda: FlashAttention(backend="cuda"),
    "block_size: expected None, since 'triton' chooses its own tiles, got 64":
        lambda: FlashAttention(block_size=64, backend="triton"),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
PAIR = "block_size: expected an integer, or a pair of them, queries and keys"
TYPES = {
    f"{PAIR}, got 2.0": lambda: flash_attention(*ONES, block_size=2.0),
    f"{PAIR}, got (1, 2, 3)": lambda: flash_attention(*ONES, block_size=(1, 2, 3)),
}
test_types = each_refused(TypeError, TYPES)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_the_class_refuses_a_list(backend, as_shipped):
    with pytest.raises(TypeError, match=r"^query: expected a floating-point tensor"):
        FlashAttention(backend=backend)([[1.0]], *draw()[1:])
