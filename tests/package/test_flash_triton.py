"""The Triton kernels, interpreted on the CPU, against attention written in eight lines."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import TypeCheckError

import attnlib
from attnlib import FlashAttention, MultiHeadAttention, flash_attention_triton
from attnlib.flash import BACKENDS
from attnlib.flash_triton import SETTINGS, Setting, TritonFunction, choose_setting, refusal
from attnlib.flash_triton.attention import OLDEST_TRITON, triton_backward, triton_forward
from attnlib.flash_triton.blocks import Matrix, block_pointers, place_of
from attnlib.flash_triton.launch import STATISTICS_ROWS, precision_of
from attnlib.flash_triton.settings import SETTING_INTERPRETED, SETTINGS_FLOAT32

if importlib.util.find_spec("triton") is None:
    if os.environ.get("CI") and sys.platform == "linux":
        pytest.fail("no triton found, but CI has to run the kernels", pytrace=False)
    pytest.skip("no triton found", allow_module_level=True)

import triton
import triton.language as tl

LAUNCHER = "attnlib.flash_triton.launch"
ROOM = "attnlib.flash_triton.attention"  # that asks for the machine

# Absolute errors allowed for entries of size 1; float16 rounds to 2⁻¹¹ at several places.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}


def oracle(query, key, value, mask=None, causal=False, scale=None):
    """Slow attention: (output, log-sum-exp), 0 and −inf for a query that sees nothing."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if causal:
        seen = torch.ones(scores.shape[-2:]).tril(key.shape[-2] - query.shape[-2]).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        added = mask.dtype != torch.bool
        scores = scores + mask if added else scores.masked_fill(~mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)  # so that no NaN arises, forward or backward
    weights = scores.softmax(-1).masked_fill(empty, 0)
    return weights @ value, scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def agree(inputs, mask=None, atol=None, **options):
    """Asserts output, log-sum-exp and all gradients against the oracle in float64."""
    generator = torch.Generator().manual_seed(1)
    atol = atol or TOLERANCE[inputs[0].dtype]
    ours = [tensor.detach().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output, lse = flash_attention_triton(*ours, mask=mask, return_lse=True, **options)
    additive = mask is not None and mask.is_floating_point()
    wide = mask.double() if additive else mask
    expected, expected_lse = oracle(*exact, mask=wide, **options)
    assert output.dtype == inputs[0].dtype and lse.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, atol=atol, rtol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, atol=atol, rtol=atol)

    grad_output = torch.randn(output.shape, generator=generator).to(output.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator)
    torch.autograd.backward([output, lse], [grad_output, grad_lse])
    torch.autograd.backward(
        [expected, expected_lse], [grad_output.double(), grad_lse.double()]
    )
    for tensor, reference in zip(ours, exact, strict=True):
        wanted = reference.grad
        size = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
        torch.testing.assert_close(
            tensor.grad.double(), wanted, atol=atol * size, rtol=atol
        )


def draw(queries, keys, d_k, d_v=None, leading=(1, 2), dtype=torch.float32, seed=0):
    """Random query, key and value."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, d_k), (keys, d_k), (keys, d_v or d_k)]
    return [torch.randn(*leading, *s, generator=generator).to(dtype) for s in shapes]


ALIKE = ((1, 1), (17, 17), (63, 63), (64, 64), (65, 65))
UNLIKE = ((1, 100), (17, 65), (65, 17), (100, 1), (63, 70), (96, 64))
PLAIN = ((1, 1), (64, 64), (70, 70), (17, 65), (100, 1))


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(*pair, True) for pair in ALIKE + UNLIKE] + [(*pair, False) for pair in PLAIN],
)
def test_lengths(queries, keys, causal):
    """Odd lengths, N ≠ M both ways; causal with N > M has queries that see nothing."""
    agree(draw(queries, keys, 16, leading=()), causal=causal)


@pytest.mark.parametrize("dim", [1, 8, 16, 32, 40, 64, 80, 96, 128, 192, 256])
def test_head_dimensions(dim):
    """Those that are powers of two and those that are padded."""
    agree(draw(33, 35, dim, leading=()), causal=True)


@pytest.mark.parametrize(("d_k", "d_v"), [(16, 64), (80, 24), (33, 7)])
def test_values_of_another_width(d_k, d_v):
    """d_v ≠ d_k."""
    agree(draw(40, 37, d_k, d_v, leading=()), causal=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype, causal):
    """16-bit inputs, products accumulated in float32."""
    agree(draw(65, 70, 64, leading=(), dtype=dtype), causal=causal)


@pytest.mark.parametrize(
    ("sizes", "causal", "lengths"),
    [
        *((sizes, True, (70, 50)) for sizes in ((16, 16), (16, 64), (64, 16), (128, 32))),
        *((sizes, True, (50, 70)) for sizes in ((16, 64), (64, 16), (32, 128))),
        *(((16, 32), False, (70, 50)), ((32, 16), False, (50, 70))),
    ],
)
def test_any_tiles_give_the_same(monkeypatch, sizes, causal, lengths):
    """Tiles of queries larger and smaller than those of keys, and than the input."""
    small = Setting(*sizes, 1, 1)
    monkeypatch.setattr("attnlib.flash_triton.settings.SETTING_INTERPRETED", small)
    agree(draw(*lengths, 16, leading=()), causal=causal)


@pytest.mark.parametrize("leading", [(), (3,), (1, 2), (2, 1, 2)])
def test_leading_dimensions(leading):
    """Any number of them."""
    agree(draw(5, 6, 16, leading=leading), causal=True)


def strided(kind, tokens, dim):
    """A (2, 2, tokens, dim) view that is not contiguous."""
    make = torch.Generator().manual_seed(tokens)
    if kind == "tokens first":
        return torch.randn(2, tokens, 2, dim, generator=make).transpose(1, 2)
    if kind == "every second feature":
        return torch.randn(2, 2, tokens, 2 * dim, generator=make)[..., ::2]
    if kind == "features first":
        return torch.randn(2, 2, dim, tokens, generator=make).mT
    if kind == "part of one projection":
        whole = torch.randn(2, tokens, 6 * dim, generator=make)
        return whole.view(2, tokens, 3, 2, dim).unbind(2)[1].transpose(1, 2)
    return torch.randn(2, 1, tokens, dim, generator=make).expand(2, 2, tokens, dim)


LAYOUTS = (
    "tokens first",
    "every second feature",
    "features first",
    "part of one projection",
    "one for all heads",
)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_strides(kind):
    """Views are read where they lie; the result does not depend on the layout."""
    agree([strided(kind, tokens, 16) for tokens in (20, 34, 34)], causal=True)


def test_a_transposed_view_is_not_copied(monkeypatch):
    """(B, N, H, d) seen as (B, H, N, d) reaches the kernels with its own memory."""
    query, key, value = (strided("tokens first", 20, 16) for _ in range(3))
    seen = []
    apply = TritonFunction.apply
    spy = lambda *a: seen.extend(a[:3]) or apply(*a)  # noqa: E731
    monkeypatch.setattr(TritonFunction, "apply", spy)
    flash_attention_triton(query, key, value)
    given = [tensor.data_ptr() for tensor in (query, key, value)]
    assert [tensor.data_ptr() for tensor in seen] == given


@pytest.mark.parametrize(
    ("queries", "keys", "dim"), [(32, 32, 24), (33, 33, 24), (33, 64, 32), (64, 33, 32)]
)
def test_what_lies_behind_is_not_read(queries, keys, dim):
    """Padding is filled with zeros, not with the neighbors in memory, here NaN."""
    inputs = []
    for tensor in draw(queries, keys, dim, leading=(1, 1)):
        rows, columns = tensor.shape[-2:]
        wide = torch.full((1, 1, rows + 40, columns + 16), torch.nan)
        wide[..., :rows, :columns] = tensor
        inputs.append(wide[..., :rows, :columns])
    output = flash_attention_triton(*(tensor.requires_grad_() for tensor in inputs))
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(tensor.isfinite().all() for tensor in (output, *gradients))


def test_features_apart_are_brought_together(monkeypatch):
    """Kernels would read them one by one; a copy is faster."""
    inputs = [strided("every second feature", 20, 16) for _ in range(3)]
    seen = []
    apply = TritonFunction.apply
    spy = lambda *a: seen.extend(a[:3]) or apply(*a)  # noqa: E731
    monkeypatch.setattr(TritonFunction, "apply", spy)
    flash_attention_triton(*inputs)
    assert [tensor.stride(-1) for tensor in seen] == [1, 1, 1]


def test_the_output_lies_as_the_query_does():
    """Joining the heads again takes no copy, if splitting them took none."""
    inputs = [strided("tokens first", 20, 16).requires_grad_() for _ in range(3)]
    output = flash_attention_triton(*inputs)
    assert output.transpose(1, 2).is_contiguous()
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(tensor.transpose(1, 2).is_contiguous() for tensor in gradients)


def test_strides_of_the_incoming_gradient():
    """A gradient may come expanded or transposed."""
    query, key, value = (tensor.requires_grad_() for tensor in draw(20, 20, 16))
    output = flash_attention_triton(query, key, value)
    weights = torch.randn(1, 20, 2, 16).transpose(1, 2)
    inputs = (query, key, value)
    ours = torch.autograd.grad(output, inputs, weights, retain_graph=True)
    same = torch.autograd.grad(output, inputs, weights.contiguous(), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))
    flat = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    ones = torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert all(torch.equal(a, b) for a, b in zip(flat, ones, strict=True))


@triton.jit
def offsets_kernel(matrix, out, start, row, column):
    view = Matrix(matrix, row, column, 100, 2)
    pointers, _ = block_pointers(view, start, 4, 2)
    at = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out + at, pointers.to(tl.int64) - matrix.to(tl.int64))


def test_offsets_have_64_bits():
    """A row of a large tensor may begin beyond 2³¹ entries; nothing is read here."""
    row, column, out = 2**30 + 5, 2**31 - 1, torch.empty(4, 2, dtype=torch.int64)
    offsets_kernel[(1,)](torch.empty(1), out, 3, row, column)
    entries = [[(3 + i) * row + j * column for j in range(2)] for i in range(4)]
    assert (out // 4).tolist() == entries


@triton.jit
def place_kernel(out, blocks, together):
    index, turn = place_of(tl.program_id(0), blocks, together)
    tl.store(out + 2 * tl.program_id(0), index)
    tl.store(out + 2 * tl.program_id(0) + 1, turn)


@pytest.mark.parametrize("together", [1, 2, 3, 7])
def test_each_block_of_each_pair_has_a_program(together):
    """Pairs that go together take turns; the last ones may be fewer."""
    pairs, blocks, out = 7, 3, torch.empty(21, 2, dtype=torch.int32)
    place_kernel[(pairs * blocks,)](out, blocks, together)
    groups = [range(i, min(i + together, pairs)) for i in range(0, pairs, together)]
    assert out.tolist() == [
        [i, b] for group in groups for b in range(blocks) for i in group
    ]


@pytest.mark.parametrize(
    "cache", [pytest.param(0, marks=pytest.mark.thorough), 2 * 5000, 2 * 10**6]
)
def test_so_many_heads_go_together_as_the_cache_holds(monkeypatch, cache):
    """Under a causal mask; the result is the same in any order."""
    monkeypatch.setattr(f"{LAUNCHER}.cache_of", lambda tensor: cache)
    seen, launch = [], attnlib.flash_triton.launch.launch

    def spy(*given, **named):
        seen.append(named.get("together"))
        launch(*given, **named)

    monkeypatch.setattr(f"{LAUNCHER}.launch", spy)
    agree(draw(40, 35, 16, leading=(2, 3)), causal=True)
    # 35 · 32 numbers of 4 bytes are 4,480 bytes, and 40 · 32 make 5,120.
    assert seen == {0: [1, None, 1], 10**4: [1, None, 1], 2 * 10**6: [6, None, 6]}[cache]
    flash_attention_triton(*draw(40, 35, 16, leading=(2, 3)))
    assert seen[-1] == 1


def test_queries_that_see_nothing():
    """Output 0, log-sum-exp −inf and gradient 0, even if NaN comes for that log-sum-exp."""
    query, key, value = (tensor.requires_grad_() for tensor in draw(50, 20, 16))
    output, lse = flash_attention_triton(query, key, value, causal=True, return_lse=True)
    assert (output[..., :30, :] == 0).all() and (lse[..., :30] == -torch.inf).all()
    assert (lse[..., 30:] > -torch.inf).all()
    grad_lse = torch.ones_like(lse)
    grad_lse[..., :30] = torch.nan
    torch.autograd.backward([output, lse], [torch.ones_like(output), grad_lse])
    assert (query.grad[..., :30, :] == 0).all() and (query.grad[..., 30:, :] != 0).any()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_tokens(queries, keys):
    """No query, or no key."""
    agree(draw(queries, keys, 16))


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scale(scale):
    """Any scale; a scale that is not positive takes another path."""
    agree(draw(20, 40, 16), scale=scale, causal=True)


def test_large_scores():
    """Scores of ±10⁴ overflow nowhere."""
    query, key, value = draw(20, 40, 16)
    output, lse = flash_attention_triton(100 * query, 100 * key, value, return_lse=True)
    exact = [tensor.double() for tensor in (100 * query, 100 * key, value)]
    expected, expected_lse = oracle(*exact)
    torch.testing.assert_close(output.double(), expected, atol=5e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=0, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow|invalid value")  # where nothing is, as said
def test_padding_does_not_leak():
    """Scores far below 0: exp(0 − lse) of a padded key is infinite, and must not matter."""
    query, key, value = draw(20, 35, 16)
    agree([query.abs() + 4, -key.abs() - 4, value], causal=False)
    agree([query.abs() + 4, -key.abs() - 4, value], causal=True)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        *(((2, 2, 33, 40), True), ((2, 1, 1, 40), False)),
        *(((1, 2, 20, 1), False), ((20, 40), False)),
    ],
)
def test_masks(kind, shape, causal):
    """Broadcast by strides of 0, with causal and without, rows all hidden among them."""
    generator = torch.Generator().manual_seed(3)
    allowed = torch.rand(shape, generator=generator) < 0.7
    allowed[..., 0, :] &= shape[-2] == 1  # the first query sees nothing
    mask = allowed
    if kind == "additive":
        noise = torch.randn(shape, generator=generator)
        mask = noise.masked_fill(~allowed, -torch.inf)
    queries = max(20, shape[-2])
    agree(draw(queries, 40, 16, leading=(2, 2)), mask=mask, causal=causal)


def test_a_mask_in_half_precision():
    """An additive mask has the dtype of the query."""
    mask = torch.linspace(-1, 1, 40, dtype=torch.float16)
    agree(draw(33, 40, 16, dtype=torch.float16), mask=mask)


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's, which `hide` mends
@pytest.mark.parametrize("scale", [0.125, 0.5, 1.0, 3.0, -0.5])
@pytest.mark.parametrize("attend", [attnlib.flash_attention, flash_attention_triton])
def test_the_lowest_number_is_no_minus_infinity(attend, scale):
    """A query that has it for every key gets the mean, in both backends, at any scale."""
    query, key, value = draw(20, 40, 16, 24)
    mask = torch.zeros(20, 40)
    mask[3] = mask[4, 10:] = torch.finfo(mask.dtype).min
    mask[5] = -torch.inf
    output = attend(query, key, value, mask, scale=scale)
    exact = [tensor.double() for tensor in (query, key, value)]
    expected, _ = oracle(*exact, mask.double(), scale=scale)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)
    mean = value.mean(dim=-2, keepdim=True)
    torch.testing.assert_close(output[..., 3:4, :], mean, atol=1e-6, rtol=1e-6)
    assert not output[..., 5, :].any()


def test_only_some_gradients(same_bits):
    """Each gradient alone equals the one computed with the others."""
    tensors = draw(20, 30, 16)
    together = [tensor.clone().requires_grad_() for tensor in tensors]
    flash_attention_triton(*together).square().sum().backward()
    for i in range(3):
        alone = [t.clone().requires_grad_(i == j) for j, t in enumerate(tensors)]
        flash_attention_triton(*alone).square().sum().backward()
        assert torch.equal(alone[i].grad, together[i].grad)


@pytest.fixture
def same_bits():
    """The user asks for the same bits every time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def walks(monkeypatch, needed=(True, True, True)):
    """For each kernel of a backward: whether it adds to the query's gradient; or None."""
    seen = []
    monkeypatch.setattr(f"{LAUNCHER}.launch", lambda *a, **o: seen.append(o))
    inputs = [x.requires_grad_(n) for x, n in zip(draw(9, 9, 16), needed, strict=True)]
    flash_attention_triton(*inputs).sum().backward()
    return [named.get("WITH_QUERY") for named in seen[2:]]  # after forward and statistics


def test_one_walk_adds_to_all_gradients(monkeypatch):
    """Five products in place of seven, where somebody wants all."""
    assert walks(monkeypatch) == [True]
    assert walks(monkeypatch, (True, False, False)) == [None]
    assert walks(monkeypatch, (False, True, False)) == [False]


def test_nothing_is_added_in_any_order_for_the_same_bits(monkeypatch, same_bits):
    """Then dQ has a walk of its own."""
    assert walks(monkeypatch) == [None, False]


def test_both_ways_to_the_gradients_agree():
    """One walk and two, for lengths that fill no tile and heads side by side."""
    found = []
    for same in (False, True):
        inputs = [strided("tokens first", n, 24).requires_grad_() for n in (50, 70, 70)]
        output = flash_attention_triton(*inputs, causal=True)
        torch.use_deterministic_algorithms(same)
        found.append(torch.autograd.grad(output.cos().sum(), inputs))
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert a.stride() == b.stride()


def grouped(query, key, value, mask=None, causal=False):
    """PyTorch's attention with shared keys and values, a causal mask as ours is aligned."""
    queries, keys = query.shape[-2], key.shape[-2]
    seen = torch.ones(queries, keys).tril(keys - queries if causal else keys).bool()
    if mask is not None:
        seen = (
            seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
        )
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=seen, enable_gqa=True)


@pytest.mark.parametrize(
    ("batch", "heads", "shared", "lengths", "causal", "kind"),
    [
        (2, 4, 2, (33, 40), True, "none"),
        pytest.param(1, 6, 2, (40, 65), False, "boolean", marks=pytest.mark.thorough),
        (1, 4, 1, (35, 70), True, "additive"),
        (2, 3, 3, (20, 20), True, "none"),
    ],
)
def test_heads_that_share_keys_and_values(batch, heads, shared, lengths, causal, kind):
    """As PyTorch's `enable_gqa`; the gradient of a shared key is the sum over its group."""
    query = draw(*lengths, 16, leading=(batch, heads))[0]
    inputs = [query, *draw(*lengths, 16, 24, leading=(batch, shared), seed=1)[1:]]
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = None
    if kind == "boolean":
        mask = torch.rand(batch, heads, *lengths, generator=torch.manual_seed(1)) < 0.7
        mask[..., 0] = True
    if kind == "additive":
        mask = torch.randn(heads, *lengths, generator=torch.manual_seed(1))
    wide = mask.double() if kind == "additive" else mask
    output = flash_attention_triton(*inputs, mask, causal=causal, enable_gqa=True)
    expected = grouped(*exact, wide, causal)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    coming = torch.randn(output.shape, generator=torch.manual_seed(2))
    wanted = torch.autograd.grad(expected, exact, coming.double())
    for same in (False, True):
        torch.use_deterministic_algorithms(same)
        found = torch.autograd.grad(output, inputs, coming, retain_graph=True)
        torch.use_deterministic_algorithms(False)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ((4, 3, 3), "key: expected a number of heads that divides 4, that of query, got 3"),
        ((2, 4, 4), "key: expected a number of heads that divides 2, that of query, got 4"),
        ((4, 0, 0), "key: expected a number of heads that divides 4, that of query, got 0"),
        ((4, 2, 1), "value: expected leading dimensions"),
        ((4, 2, 4), "value: expected leading dimensions"),
    ],
)
def test_heads_that_cannot_share_are_refused(as_shipped, heads, words):
    """By name, before anything runs; without the switch, any that differ."""
    tensors = [torch.zeros(1, h, 5, 16) for h in heads]
    with pytest.raises(ValueError, match=words):
        flash_attention_triton(*tensors, enable_gqa=True)
    with pytest.raises(ValueError, match="key: expected leading dimensions"):
        flash_attention_triton(*tensors)
    with pytest.raises(ValueError, match="mask: expected a shape that broadcasts"):
        bad = torch.ones(3, 5, 5).bool()
        flash_attention_triton(
            tensors[0], *torch.zeros(2, 1, 1, 5, 16), bad, enable_gqa=True
        )


def test_twice_the_same_bits(same_bits):
    """Deterministic, backward too."""
    results = []
    for _ in range(2):
        inputs = [tensor.requires_grad_() for tensor in draw(40, 35, 32, leading=())]
        flash_attention_triton(*inputs, causal=True).square().sum().backward()
        results.append([tensor.grad for tensor in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inputs_are_not_written_to():
    """Forward and backward leave them as they were."""
    inputs = [tensor.requires_grad_() for tensor in draw(20, 20, 16)]
    before = [tensor.detach().clone() for tensor in inputs]
    flash_attention_triton(*inputs).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize(
    ("shapes", "dtype", "error", "words"),
    [
        ([(4, 8)] * 3, torch.float64, TypeError, "query: expected float16"),
        ([(4, 8), (4, 9), (4, 8)], torch.float32, ValueError, "key: expected d_k = 8"),
        ([(4, 257)] * 3, torch.float32, ValueError, "query: expected at most 256"),
        ([(4, 8), (4, 8), (4, 257)], torch.float32, ValueError, "value: expected at most"),
    ],
)
def test_refusals(as_shipped, shapes, dtype, error, words):
    """Bad input is named before anything runs."""
    with pytest.raises(error, match=words):
        flash_attention_triton(*(torch.zeros(shape, dtype=dtype) for shape in shapes))


def test_a_mask_that_wants_a_gradient_is_refused():
    """Rather than getting none in silence."""
    mask = torch.zeros(4, 4, requires_grad=True)
    with pytest.raises(ValueError, match="mask: expected one that requires no gradient"):
        flash_attention_triton(*draw(4, 4, 16), mask=mask)


@pytest.mark.parametrize(
    "example", [pytest.param(0, marks=pytest.mark.thorough), 1, 2], ids=str
)
def test_what_holds_no_kernel_is_checked(pytestconfig, example):
    """The import hook reaches the package's modules; `conftest.py` says which it spares.

    Of the examples that are tried, the first one checks.
    """
    if example == 2 and not pytestconfig.getoption("--everything"):
        choose_setting("forward", 64.0, torch.float16, 90)
        return
    with pytest.raises(TypeCheckError):
        choose_setting("forward", 64.0, torch.float16, 90)
    with pytest.raises(TypeCheckError):
        flash_attention_triton(*torch.zeros(3, 4, 8), causal="yes")


@pytest.mark.parametrize(
    ("chosen", "precision"), [("highest", "ieee"), ("high", "tf32x3"), ("medium", "tf32")]
)
def test_products_of_float32_are_as_the_user_says(monkeypatch, chosen, precision):
    """Those of 16 bits have no choice."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: chosen)
    assert precision_of(torch.float32) == precision
    assert precision_of(torch.float16) == precision_of(torch.bfloat16) == "ieee"
    seen = []
    monkeypatch.setattr(f"{LAUNCHER}.launch", lambda *a, **o: seen.append(o["PRECISION"]))
    flash_attention_triton(*draw(5, 6, 16))
    flash_attention_triton(*draw(5, 6, 16, dtype=torch.float16))
    assert seen == [precision, "ieee"]


@pytest.mark.parametrize(("newer", "precision"), [("tf32", "tf32"), ("ieee", "ieee")])
def test_newer_names_for_the_products_of_float32(monkeypatch, newer, precision):
    """After which PyTorch refuses to tell the older ones."""

    def refuse():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    monkeypatch.setattr(
        torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=newer)
    )
    assert precision_of(torch.float32) == precision


class Elsewhere:
    """Stands for a tensor on a GPU, of which only this is asked."""

    is_cuda, dtype, shape, requires_grad = True, torch.float16, (2, 64), False


@pytest.mark.parametrize(
    ("change", "capability", "suited"),
    [
        ({}, 80, True),
        ({}, 75, False),
        ({"is_cuda": False}, 80, False),
        ({"dtype": torch.float64}, 90, False),
        ({"dtype": torch.float32}, 90, False),  # until somebody has measured it
        ({"shape": (2, 300)}, 90, False),
        ({"requires_grad": True}, 90, False),  # as a mask
    ],
)
def test_auto_takes_what_the_kernels_can(
    as_shipped, monkeypatch, change, capability, suited
):
    """A GPU of 8.0 or more, 16 bits, up to 256 features, no gradient of a mask."""
    monkeypatch.setattr(f"{ROOM}.interpreted", lambda: False)
    monkeypatch.setattr(f"{ROOM}.capability_of", lambda tensor: capability)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    tensor = Elsewhere()
    tensor.device = "cuda"
    for name, value in change.items():
        setattr(tensor, name, value)
    assert BACKENDS["triton"].suits(tensor, tensor, tensor, tensor, False) is suited


@pytest.mark.parametrize("version", ["2.1.0", "3.0.0", "3.2.0"])
def test_an_older_triton_is_refused(monkeypatch, version):
    """Before a kernel is compiled, and with the least version in the message."""
    monkeypatch.setattr(triton, "__version__", version)
    expected = f"expected triton 3.3 or newer, got {version}"
    with pytest.raises(RuntimeError, match=expected):
        flash_attention_triton(*draw(4, 4, 16))


@pytest.mark.parametrize("version", ["3.3.0", "3.7.1+git1", "3.10.0", "4.0"])
def test_a_newer_triton_is_taken(monkeypatch, version):
    """Versions are compared as numbers."""
    monkeypatch.setattr(triton, "__version__", version)
    query, _, value = draw(4, 4, 16)
    assert refusal(query, value, None) is None


def test_the_workflow_runs_the_oldest_triton():
    """The least version that the kernels take is the one that is tried."""
    workflow = Path(__file__).parents[2] / ".github" / "workflows" / "tests.yml"
    least = ".".join(map(str, OLDEST_TRITON))
    assert f"triton=={least}.0" in workflow.read_text(encoding="utf-8")


def test_a_gpu_of_amd_is_refused(as_shipped, monkeypatch):
    """PyTorch calls it cuda, too."""
    monkeypatch.setattr(f"{ROOM}.interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "6.2.4")
    tensor = Elsewhere()
    assert "expected a GPU of NVIDIA, got one of AMD" in str(refusal(tensor, tensor, None))
    assert not BACKENDS["triton"].suits(tensor, tensor, tensor, None, False)


@pytest.mark.parametrize("attend", [attnlib.flash_attention, flash_attention_triton])
def test_autocast_as_pytorch_has_it(attend):
    """The dtype of F.scaled_dot_product_attention, whatever comes in; float64 stays."""
    ready = torch.nn.functional.scaled_dot_product_attention
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype, other in itertools.product(dtypes, dtypes):
            query, key, value = draw(9, 11, 16, dtype=dtype)
            query, mask = query.to(other), torch.zeros(9, 11, dtype=other)
            query.requires_grad_()
            output = attend(query, key, value, mask)
            assert output.dtype == ready(query, key, value, mask).dtype == torch.bfloat16
            (gradient,) = torch.autograd.grad(output.sum(), query)
            assert gradient.dtype == other
        wide = draw(9, 11, 16, dtype=torch.float64)
        assert ready(*wide).dtype == attnlib.flash_attention(*wide).dtype == torch.float64


def test_auto_asks_the_backends(monkeypatch):
    """The first one that suits; on a CPU never the kernels, unless told so."""
    used = []
    spies = {
        name: backend._replace(
            attention=lambda *a, name=name, **o: used.append((name, set(o))) or a[0]
        )
        for name, backend in BACKENDS.items()
    }
    for name, backend in spies.items():
        monkeypatch.setitem(BACKENDS, name, backend)
    inputs = draw(4, 4, 16)
    FlashAttention()(*inputs)
    FlashAttention(causal=True)(*inputs)
    FlashAttention(causal=True)(*draw(3, 4, 16))  # PyTorch would form its mask
    FlashAttention(backend="triton")(*inputs)
    monkeypatch.setitem(BACKENDS, "fused", spies["fused"]._replace(suits=lambda *a: False))
    monkeypatch.setitem(BACKENDS, "triton", spies["triton"]._replace(suits=lambda *a: True))
    FlashAttention()(*inputs)
    FlashAttention(backend="torch")(*inputs)
    options = {"causal", "window", "scale"}
    fused, tiles, kernels = (
        ("fused", options),
        ("torch", options | {"block_size"}),
        ("triton", options),
    )
    assert used == [fused, fused, tiles, kernels, kernels, tiles]


def test_plugged_into_many_heads():
    """The same layer with either backend, with gradients."""
    torch.manual_seed(0)
    x, gradients = torch.randn(2, 9, 16), []
    layer = MultiHeadAttention(16, 2, FlashAttention(causal=True, backend="torch"))
    for backend in ("torch", "triton"):
        layer.zero_grad()
        layer.attention.backend = backend
        layer(x)[0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_statistics_are_filled_up_for_every_setting():
    """The kernels read whole blocks of them; they refuse to be compiled otherwise."""
    tables = [*SETTINGS.values(), *SETTINGS_FLOAT32.values(), SETTING_INTERPRETED]
    assert all(STATISTICS_ROWS % setting.queries == 0 for setting in tables)


def test_table_of_settings():
    """Every dimension and capability finds one that a GPU accepts."""
    kernels = ("forward", "query_gradient", "key_value_gradient", "all_gradients")
    for capability in (80, 86, 89, 90, 100, 103, 120):
        for kernel in kernels:
            for dim in range(1, 257):
                for dtype in (torch.float16, torch.float32):
                    setting = choose_setting(kernel, dim, dtype, capability)
                    assert min(setting.queries, setting.keys) >= 16
    assert choose_setting("forward", 64, torch.float16, 100) == SETTINGS[100, "forward", 64]
    assert choose_setting("forward", 64, torch.float16, 90) == SETTINGS[90, "forward", 64]
    assert choose_setting("forward", 64, torch.float16, 89) == SETTINGS[80, "forward", 64]
    assert choose_setting("forward", 65, torch.float16, 120) == SETTINGS[80, "forward", 128]
    assert choose_setting("forward", 129, torch.float32, 90) == SETTINGS_FLOAT32[256]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import attnlib
inputs = torch.zeros(3, 2, 4)
assert attnlib.FlashAttention()(*inputs)[0].shape == (2, 4)
try:
    attnlib.FlashAttention(backend="triton")(*inputs)
except RuntimeError as error:
    print(error)
"""


def test_without_triton():
    """The package works; only the kernels are refused, and that says why."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False
    )
    assert "expected the package triton" in done.stdout, done.stderr


WITHOUT_A_GPU = """
import torch
import attnlib
try:
    attnlib.flash_attention_triton(*torch.zeros(3, 2, 4))
except RuntimeError as error:
    print(error)
"""


def test_without_a_gpu():
    """Compiled kernels want a GPU, and the message knows a way out."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_A_GPU]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "got device cpu; for the interpreter set TRITON_INTERPRET=1" in done.stdout


@pytest.mark.parametrize(
    ("masked", "shared"), [(True, 2), pytest.param(False, 1, marks=pytest.mark.thorough)]
)
def test_the_kernels_are_operators_of_pytorch(masked, shared, as_shipped):
    """By PyTorch's own check; with the batch of vmap, and as one exported graph."""
    inputs = [
        torch.randn(1, h, tokens, 16) for h, tokens in ((2, 5), (shared, 7), (shared, 7))
    ]
    mask = torch.rand(1, 2, 5, 7).lt(0.7).view(torch.uint8) if masked else None
    torch.library.opcheck(triton_forward, (*inputs, mask, True, 0.25))
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.library.opcheck(triton_forward, (*leaves, mask, True, 0.25))
    output, lse = triton_forward(*inputs, mask, True, 0.25)
    tensors = (*inputs, mask, output, lse, torch.randn_like(output), torch.randn_like(lse))
    for needed in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(triton_backward, (*tensors, True, 0.25, *needed))

    def score(query, key, value, mask):
        options = {"causal": True, "enable_gqa": True}
        return flash_attention_triton(query, key, value, mask, **options).cos().sum()

    batch = [torch.stack([x[0], 2 * x[0]]) for x in inputs]
    allowed = torch.rand(2, 5, 7) < 0.7
    found = torch.vmap(torch.func.grad(score, argnums=(0, 1, 2)))(*batch, allowed)
    for i in range(2):
        leaves = [x[i].clone().requires_grad_() for x in batch]
        expected = torch.autograd.grad(score(*leaves, allowed[i]), leaves)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[i], b, rtol=0, atol=1e-5)
