"""Flash attention: beside the oracle over a table, the contract, and its memory."""

import ast
import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlib
from attnlib import FlashAttention, causal_mask, flash_attention, masked_softmax
from attnlib.flash import TiledAttention, block_sizes, row_blocks, visible_tiles


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
@pytest.mark.parametrize(
    ("queries", "keys"), [(9, 9), (5, 12), (12, 5), (2, 2), (1, 7), (7, 1)]
)
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


@pytest.mark.filterwarnings("error")  # PyTorch warns where a buffer does not fit
@pytest.mark.parametrize(("d_k", "d_v"), [(4, 3), (2, 9)])
@pytest.mark.parametrize("leading", [(), (3,), (0,), (2, 0, 3), (2, 2, 2)])
def test_leading_dimensions(leading, d_k, d_v):
    inputs = leaves(leading, 5, 6, d_k, d_v)
    found = flash_attention(*inputs, block_size=2, return_lse=True)
    for a, b in zip(found, oracle(*inputs), strict=True):
        close(a, b)
    assert [g.shape for g in gradients(*found, inputs)] == [x.shape for x in inputs]


def test_gradcheck():
    inputs, mask = leaves((2,), 4, 5), holes(4, 5).clamp(min=-3).requires_grad_()

    def both(query, key, value, mask):
        return flash_attention(query, key, value, mask, block_size=2, return_lse=True)

    assert torch.autograd.gradcheck(both, [*inputs, mask])


def test_the_bound_decides_and_both_ways_agree(monkeypatch):
    inputs = [x.detach() for x in leaves((2,), 90, 30, d_k=16)]
    wide = [5000 * inputs[0], *inputs[1:]]
    assert TiledAttention(*inputs, None, False, 0.25, 7).bounded().all()
    assert (
        TiledAttention(*inputs, torch.ones(90, 30, dtype=torch.bool), False, 0.25, 7)
        .bounded()
        .all()
    )
    assert not TiledAttention(*wide, None, False, 0.25, 7).bounded().any()
    assert not TiledAttention(*inputs, None, False, -2000.0, 7).bounded().any()
    assert TiledAttention(*inputs, torch.zeros(90, 30), False, 0.25, 7).bounded() is None
    assert (
        TiledAttention(inputs[0][:, :9], *inputs[1:], None, False, 0.25, 7).bounded()
        is None
    )
    easy = flash_attention(*inputs, block_size=7, return_lse=True)
    monkeypatch.setattr(TiledAttention, "bounded", lambda self: None)
    for a, b in zip(
        flash_attention(*inputs, block_size=7, return_lse=True), easy, strict=True
    ):
        close(a, b)


class Reckless(TiledAttention):
    """Never takes a maximum."""

    def bounded(self):
        return torch.ones(len(self.q), 1, 1, dtype=torch.bool)


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
            attention = TiledAttention(query, key, value, None, False, 1.0, (7, 4))
            inside = stretch < 1 and limit > 0
            assert attention.bounded().flatten()[matrix] == inside
            output = attention.forward()[0]
            expected = value.double().mean(dim=1, keepdim=True).expand_as(output)
            torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("feature", "entry"), [(3.9, 1e37), (-5.0, 1e-36), (-9.5, 1.0)])
def test_what_the_bound_prevents(feature, entry):
    inputs = [torch.full((1, 40, 4), feature), torch.full((1, 2, 4), abs(feature))]
    inputs.append(torch.full((1, 2, 1), entry))
    expected = inputs[2][:, :1].expand(1, 40, 1)
    torch.testing.assert_close(flash_attention(*inputs), expected, rtol=1e-6, atol=0)
    reckless = Reckless(*inputs, None, False, 0.5, None).forward()[0]
    assert not torch.allclose(reckless, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("size", [1e3, 1e30, 1e-40, torch.inf, torch.nan])
def test_a_matrix_does_not_change_the_bits_of_another(size, part, causal):
    inputs = [x.detach().float() for x in leaves((2, 3), 70, 50)]
    found = []
    for factor in (1.0, size):
        changed = [x.clone() for x in inputs]
        changed[part][1, 2] *= factor
        for x in changed:
            x.requires_grad_()
        output, lse = flash_attention(
            *changed, causal=causal, block_size=32, return_lse=True
        )
        g = torch.autograd.grad(output[..., 0].sum() + lse[..., 20:].sum(), changed)
        found.append([x.flatten(0, 1)[:5] for x in (output, lse, *g)])
    assert all(map(torch.equal, *found))


def test_no_number_is_looked_at_on_other_devices():
    """On the device "meta" there is none: what would wait on a GPU fails there."""
    inputs = [x.detach().to("meta") for x in leaves((2,), 90, 50)]
    mask = torch.empty(90, 50, device="meta")
    for attention in (
        TiledAttention(*inputs, None, True, 0.5, 16),
        TiledAttention(*inputs, mask > 0, False, 0.5, None),
        TiledAttention(*inputs, mask, True, 0.5, 16),
    ):
        output, lse, *kept = attention.forward()
        assert output.shape == (2, 90, 3) and lse.shape == (2, 90)
        gradients = attention.backward(output, *kept, output, lse, torch.empty_like(mask))
        assert [x.shape for x in gradients] == [x.shape for x in inputs]


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


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e38, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_where_no_score_can_be_told_from_another(low, dtype):
    """Of a query under such a mask, and of the keys that it sees."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in leaves((2,), 7, 5)]
    mask = torch.zeros(7, 5, dtype=dtype)
    mask[2] = torch.finfo(dtype).min if low < -1e38 else low
    mask[4, 1:] = mask[2, 1:]
    mask.requires_grad_()
    g = torch.linspace(-1, 1, 2 * 7 * 3, dtype=dtype).view(2, 7, 3)
    ours, theirs = (
        torch.autograd.grad(output, [*inputs, mask], g)
        for output in (
            flash_attention(*inputs, mask, block_size=3),
            oracle(*inputs, mask)[0],
        )
    )
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, atol=1e-6 if dtype == torch.float32 else 1e-12)


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
        seen_by_all = allowed[block].all(dim=0).sum()
        for part, partial in visible_tiles(block, queries, keys, causal, cols):
            tile = allowed[block, part]
            assert tile.any() and 0 < tile.shape[1] <= cols
            assert partial or tile.all()
            assert not partial or part.start >= seen_by_all - 1
            assert not covered[block, part].any()
            covered[block, part] = True
    assert (covered | ~allowed).all()


def test_block_sizes():
    assert block_sizes(3, 1, 1, True) == (3, 3) and block_sizes((3, 5), 1, 1, True) == (
        3,
        5,
    )
    for matrices in (0, 1, 2, 8, 500):
        for queries in (0, 1, 1000, 100_000):
            rows, cols = block_sizes(None, matrices, queries, causal=queries > 1000)
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

    inputs = [x.detach().float() for x in leaves((1, 2), 1000, 1000, 8, 8)]
    allowed = torch.rand(1, 1, 1, 1000) < 0.5
    with Watch() as watch:  # what the operators run, which a mode can't look into
        tiles = TiledAttention(*inputs, allowed, True, 0.3, 64)
        output, lse, *kept = tiles.forward()
        tiles.backward(output, *kept, output, lse.exp(), None)
    assert 2 * 64 * 64 <= watch.largest <= 2 * 1000 * 8


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
    with pytest.raises(ValueError, match="'torch', 'fused', 'triton', got 'cuda'"):
        FlashAttention(backend="cuda")
    with pytest.raises(ValueError, match="block_size: expected at least 1"):
        FlashAttention(block_size=0)
    expected = "block_size: expected None, since 'triton' chooses its own tiles, got 64"
    with pytest.raises(ValueError, match=expected):
        FlashAttention(block_size=64, backend="triton")


@pytest.mark.parametrize("backend", ["auto", "torch", "fused", "triton"])
def test_the_class_refuses_a_list(backend, as_shipped):
    with pytest.raises(TypeError, match=r"^query: expected a floating-point tensor"):
        FlashAttention(backend=backend)([[1.0]], *leaves((), 3, 4)[1:])


def test_a_block_size_means_these_tiles(monkeypatch):
    """Under "auto", also where another backend suits; nothing is ignored in silence."""
    used = []
    for name, backend in attnlib.flash.BACKENDS.items():
        spy = backend._replace(
            attention=lambda *inputs, name=name, **options: (
                used.append((name, options.get("block_size"))) or inputs[2]
            ),
            suits=lambda *inputs: True,
        )
        monkeypatch.setitem(attnlib.flash.BACKENDS, name, spy)
    inputs = [x.detach() for x in leaves((2,), 3, 3)]
    for attention in (
        FlashAttention(block_size=(4, 2)),
        FlashAttention(block_size=8, backend="torch"),
        FlashAttention(),
    ):
        attention(*inputs)
    assert used == [("torch", (4, 2)), ("torch", 8), ("fused", None)]


def test_the_package_has_every_name_of_its_modules():
    """What could be imported when it was one module still can."""
    made = set()
    for path in Path(attnlib.flash.__file__).parent.glob("[a-z]*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.Assign):
                made |= {target.id for target in node.targets}
    assert len(made) >= 29 and made == set(attnlib.flash.__all__)
    assert all(hasattr(attnlib.flash, name) for name in made)
