"""Keys and values in few bits: within half a step, and otherwise as a `KVCache`."""

import random

import pytest
import torch

from attnlib import (
    KVCache,
    LanguageModel,
    PagedCache,
    QuantizedCache,
    QuantizedPages,
    ScaledDotProductAttention,
    paged_attention,
    paged_attention_triton,
    speculate,
)
from attnlib.checks import require_count
from attnlib.quantized import dequantize, quantize
from attnlib.testing import check_cache

GROUP = 4


def pair(n, leading=(2, 3), d_k=7, d_v=10, dtype=torch.float32):
    return tuple(torch.randn(*leading, n, d, dtype=dtype) for d in (d_k, d_v))


def says(words):
    return pytest.raises((TypeError, ValueError), match=words)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_conformance(as_shipped, bits):
    """What it has not stored yet is exact."""
    check_cache(lambda capacity: QuantizedCache(capacity, bits))

    def one_page(capacity):
        pages = QuantizedPages(1, require_count("capacity", capacity), bits)
        return pages.view(pages.open())

    check_cache(one_page)


def allowed(key, value, bits):
    """Half a step of each number, as groups were when they were stored."""
    k, v = key.double(), value.double()
    groups = k.unflatten(-2, (-1, GROUP))
    span_k = (groups.amax(-2, True) - groups.amin(-2, True)).expand(groups.shape)
    span_v = (v.amax(-1, True) - v.amin(-1, True)).expand(v.shape)
    return [span / (2**bits - 1) / 2 for span in (span_k.flatten(-3, -2), span_v)]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
)
@pytest.mark.parametrize("leading", [(), (3,), (2, 4)])
def test_stored_numbers_are_half_a_step_off_at_most(bits, dtype, leading):
    torch.manual_seed(bits)
    key, value = pair(23, leading, dtype=dtype)
    key[..., 2] += 20  # a large feature is no matter for the others
    cache, at = QuantizedCache(23, bits, GROUP), 0
    for size in (1, 6, 2, 9, 4, 1):
        new = slice(at, at + size)
        seen = cache.append(key[..., new, :], value[..., new, :])
        stored = max(0, at // GROUP - 1) * GROUP
        at += size
        assert len(cache) == at and seen[0].dtype == dtype
        whole = key[..., :at, :], value[..., :at, :]
        eps = torch.finfo(dtype).eps  # of the step, and of what is read
        for found, expected in zip(seen, whole, strict=True):
            assert torch.equal(found[..., stored:, :], expected[..., stored:, :])
        limits = allowed(key[..., :stored, :], value[..., :stored, :], bits)
        for found, expected, limit in zip(seen, whole, limits, strict=True):
            off = (found - expected)[..., :stored, :].double().abs()
            size = expected[..., :stored, :].double().abs()
            assert (off <= limit * (1 + 4 * eps) + eps * size).all()


def test_any_order_of_appends_and_truncations():
    """Beside a plain cache: what was never stored is exact, and lengths agree."""
    for trial in range(60):
        torch.manual_seed(trial)
        random.seed(trial)
        ours, plain = QuantizedCache(60, 8, GROUP), KVCache(60)
        for _ in range(12):
            if random.random() < 0.6 and len(plain) < 50:
                new = pair(random.randint(0, 10))
                if not len(plain) and not new[0].shape[-2]:
                    continue
                seen, expected = ours.append(*new), plain.append(*new)
                for found, right in zip(seen, expected, strict=True):
                    assert found.shape == right.shape
                    assert (found - right).abs().max() < 0.1 if right.numel() else True
            else:
                length = random.randint(0, len(plain))
                ours.truncate(length)
                plain.truncate(length)
            assert len(ours) == len(plain)
            if ours.recent is not None and len(ours):
                recent = ours.recent[0].shape[-2]
                assert recent < 2 * GROUP and recent >= min(len(ours), GROUP)
        chosen = torch.tensor([1, 1, 0])
        if len(plain):
            ours.select(chosen)
            plain.select(chosen)
            new = pair(1, (3, 3)) if len(plain) else pair(1)
            found, right = ours.append(*new), plain.append(*new)
            assert (found[0] - right[0]).abs().max() < 0.1


def test_pages_are_shared_cut_and_given_back_as_in_full():
    """Beside pages in full: of two numbers in a group, both are at marks, and come back."""
    for trial in range(40):
        torch.manual_seed(trial)
        random.seed(trial)
        both = PagedCache(30, 2), QuantizedPages(30, 2)
        alive = [*{cache.open() for cache in both}]
        for _ in range(40):
            s, kind, new = random.choice(alive), random.random(), random.randint(0, 5)
            rows = ((), ())
            if kind < 0.5 and both[0].room(s) >= new:
                piece = pair(new, (3,), d_k=4, d_v=2, dtype=torch.float64)
                rows = [cache.view(s).append(*piece) for cache in both]
            elif kind < 0.6:
                length = random.randint(0, both[0].lengths[s])
                for cache in both:
                    cache.truncate(s, length)
            elif kind < 0.75:
                alive += {cache.fork(s) for cache in both}  # the same number in both
            elif len(alive) > 1:
                alive.remove(s)
                for cache in both:
                    cache.free(s)
            for found, right in zip(*rows, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
            assert both[0].tables == both[1].tables and both[0].owners == both[1].owners
            held = {page for table in both[1].tables.values() for page in table}
            assert both[1].full.keys() <= held
        if both[0].keys is not None and any(both[0].lengths.values()):
            query = torch.randn(len(alive), 3, 1, 4, dtype=torch.float64)
            found, right = (paged_attention(query, cache, alive) for cache in both)
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_pages_that_are_written_on_once_more():
    """They are full again, with what was stored, and stored anew later on."""
    pages, alone = QuantizedPages(9, GROUP, 4), QuantizedCache(30, 4, GROUP)
    view = pages.view(pages.open())
    for n in (22, 0):  # the second writes nothing, but stores what is behind
        piece = pair(n)
        torch.testing.assert_close(view.append(*piece), alone.append(*piece))
    assert len(pages.full) == 2
    for cache in (view, alone):
        cache.truncate(6)
    for n in (1, 9, 3, 1):
        piece = pair(n)
        for found, right in zip(view.append(*piece), alone.append(*piece), strict=True):
            assert torch.equal(found, right)
    pages.free(0)
    assert not pages.full


def test_pages_that_were_made_in_inference_mode_are_written_outside():
    pages = QuantizedPages(9, 2)
    view = pages.view(pages.open())
    with torch.inference_mode():
        view.append(*pair(5, (3,)))
    for n in (1, 6, 1):  # on the open page, and in place of others
        view.append(*pair(n, (3,)))
    assert len(view) == 13 and pages.stored[0].any()


@pytest.mark.parametrize("window", [None, 6])
def test_a_model_writes_on_pages(window):
    """Heads that share keys, with positions that turn; in one batch, of one length."""
    torch.manual_seed(2)
    heads = ScaledDotProductAttention(causal=True, window=window)
    model = LanguageModel(
        11, 60, 16, 2, 2, attention=heads, positions="rotary", num_kv_heads=1
    ).eval()
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    memories = [QuantizedPages(30, GROUP, 8) for _ in model.blocks]
    views = [memory.view([memory.open(), memory.open()]) for memory in memories]
    caches = [QuantizedCache(60, 8, GROUP) for _ in model.blocks]
    found, right = (
        model.generate(ids, 40, temperature=0.0, cache=held) for held in (views, caches)
    )
    assert torch.equal(found, right)
    assert memories[0].stored[0].any()


def test_what_is_returned_is_the_callers():
    cache = QuantizedCache(30, 8, GROUP)
    key, value = pair(10)
    seen = cache.append(key, value)
    kept = key.clone()
    key.zero_()
    seen[1].zero_()
    again = cache.append(*pair(1))
    assert (again[0][..., :10, :] - kept).abs().max() < 0.1
    assert again[1][..., :10, :].abs().max() > 0.5


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes(bits):
    cache = QuantizedCache(2000, bits)
    assert cache.nbytes == 0
    for _ in range(20):
        cache.append(*pair(64, (1, 1), 64, 64, torch.float16))
    per_token = cache.nbytes / 1280
    assert {2: 44, 4: 76, 8: 140}[bits] <= per_token < {2: 55, 4: 86, 8: 146}[bits]
    cache.truncate(0)
    assert cache.nbytes == 0


def test_a_model_writes_with_it():
    torch.manual_seed(1)
    model = LanguageModel(11, 120, 16, 2, 2, positions="rotary", num_kv_heads=1).eval()
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    plain = model.generate(ids, 90, temperature=0.0, cache=True)
    caches = [QuantizedCache(100, 8, GROUP) for _ in model.blocks]
    found = model.generate(ids, 90, temperature=0.0, cache=caches)
    assert torch.equal(plain[:, :30], found[:, :30])
    with torch.no_grad():
        caches = [QuantizedCache(100, 8, GROUP) for _ in model.blocks]
        rows = torch.cat([model(part, cache=caches) for part in plain.split(7, dim=1)], 1)
        assert (rows - model(plain)).abs().max() < 0.05
    caches = [QuantizedCache(100, 8, GROUP) for _ in model.blocks]
    drafted = speculate(model, ids, 30, temperature=0.0, cache=caches)
    assert torch.equal(drafted, plain[:, :33])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_last_mark_reaches_the_largest_number(dtype):
    torch.manual_seed(2)
    x = (torch.randn(2000, 32) + torch.randn(2000, 1)).to(dtype)
    codes, low, step = quantize(x, 8, -1)
    reach = low.double() + step.double() * 255
    assert (reach >= x.double().amax(dim=-1, keepdim=True)).all()
    assert dequantize(codes, low, step).dtype == dtype


def test_equal_numbers_and_large_ones():
    same = torch.full((3, 8), 2.5)
    codes, low, step = quantize(same, 2, -1)
    assert torch.equal(dequantize(codes, low, step), same)
    huge = torch.tensor([-6e4, 1.0, 6e4], dtype=torch.float16)
    assert quantize(huge, 8, -1)[2].isfinite().all()


def test_refusals(as_shipped):
    for words, given in {
        "bits: expected 8, 4 or 2, got 3": (10, 3),
        "bits: expected 8, 4 or 2, got True": (10, True),
        "group: expected at least 1": (10, 8, 0),
        "group: expected a whole number": (10, 8, 2.0),
        "capacity: expected at least 1": (0,),
    }.items():
        with says(words):
            QuantizedCache(*given)
    with says("bits: expected 8, 4 or 2, got 1"):
        QuantizedPages(4, 2, 1)
    pages = QuantizedPages(4, 2, 4)
    assert pages.nbytes == 0
    pages.append(pages.open(), *pair(3, (2,)))
    shown = "QuantizedPages(pages=4, page_size=2, bits=4), 1 sequences, 2 pages unused"
    assert repr(pages) == shown
    with says("cache: expected a PagedCache with all pages in full, got QuantizedPages"):
        paged_attention_triton(torch.ones(1, 2, 1, 7), pages, [0])
    cache = QuantizedCache(10, 2)
    cache.append(*pair(3))
    with says("length: expected between 0 and 3, got 4"):
        cache.truncate(4)
    with says("rows: expected a tensor of integers"):
        cache.select([0])
    assert repr(cache) == "QuantizedCache(capacity=10, bits=2, group=32), 3 tokens"
