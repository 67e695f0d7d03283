"""Few queries, many keys: the split kernels, interpreted, against PyTorch's function."""

import importlib.util
import os
import sys

import pytest
import torch
import torch.nn.functional as F

from attnlib import causal_mask, flash_attention, flash_decoding_triton, padding_mask
from attnlib.flash_triton import split

if importlib.util.find_spec("triton") is None:
    if os.environ.get("CI") and sys.platform == "linux":
        pytest.fail("no triton found, but CI has to run the kernels", pytrace=False)
    pytest.skip("no triton found", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(queries, keys, dim, heads=(2, 2), batch=(1,), d_v=None, dtype=torch.float32):
    """Query, key and value, with so many heads of queries and of keys."""
    make = torch.Generator().manual_seed(queries + keys)
    shapes = [(heads[0], queries, dim), (heads[1], keys, dim), (heads[1], keys, d_v or dim)]
    return [torch.randn(*batch, *shape, generator=make).to(dtype) for shape in shapes]


def agree(query, key, value, mask=None, atol=None, **options):
    """Asserts output and log-sum-exp against tiles in float64, for some shares."""
    atol = atol or TOLERANCE[query.dtype]
    group = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    wide = [x.double().repeat_interleave(group, -3) if group > 1 else x.double()
            for x in (key, value)]  # fmt: skip
    exact = mask.double() if mask is not None and mask.is_floating_point() else mask
    wanted = flash_attention(query.double(), *wide, exact, return_lse=True, **options)
    for splits in (3, None):
        given = dict(splits=splits, enable_gqa=group > 1, return_lse=True, **options)
        found = flash_decoding_triton(query, key, value, mask, **given)
        assert found[0].dtype == query.dtype and found[1].dtype == torch.float32
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=atol)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 100), (5, 33), (40, 17), (2, 0)])
def test_lengths(queries, keys, causal):
    """More rows than a tile, and queries that see nothing."""
    agree(*draw(queries, keys, 16), causal=causal)


@pytest.mark.parametrize(("dim", "d_v"), [(1, 1), (8, 40), (80, 24), (256, 256)])
def test_widths(dim, d_v):
    agree(*draw(2, 20, dim, d_v=d_v))


@pytest.mark.parametrize("heads", [(6, 1), (6, 2), (6, 3), (6, 6), (36, 1)])
def test_groups(heads):
    """Neighboring heads share keys; 36 heads of 2 queries fill more than two tiles."""
    agree(*draw(2, 40, 16, heads), causal=True)


def test_groups_are_those_of_pytorch():
    query, key, value = draw(1, 50, 32, (8, 2), (3,))
    ours = flash_decoding_triton(query, key, value, enable_gqa=True)
    theirs = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    agree(*draw(3, 70, 64, (4, 2), dtype=dtype), causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale(scale):
    agree(*draw(2, 40, 16), scale=scale, causal=True)


@pytest.mark.thorough("flash_triton")
def test_masks_of_both_kinds():
    """Boolean, additive and −inf, from one row for all to one matrix a head."""
    query, key, value = draw(3, 45, 16, (4, 2), (2,))
    make = torch.Generator().manual_seed(0)
    shapes = ((45,), (3, 1), (2, 1, 1, 45), (4, 3, 45), (2, 4, 3, 45))
    for number, shape in enumerate(shapes):
        allowed = torch.rand(shape, generator=make) < 0.6
        added = torch.randn(shape, generator=make).masked_fill(~allowed, -torch.inf)
        if number % 2 == 0:
            agree(query, key, value, allowed, causal=True)
        if number in (1, 3, 4):
            agree(query, key, value, added)
    agree(query, key, value, padding_mask(torch.tensor([45, 0])))
    agree(query, key, value, causal_mask(3, 45))


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 2)])
def test_leading_dimensions(batch):
    agree(*draw(2, 20, 16, batch=batch))
    agree(*(x[..., 0, :, :] for x in draw(2, 20, 16, batch=batch)))


def test_views_are_read_where_they_lie(monkeypatch):
    """(B, N, H, d) seen as (B, H, N, d), and a mask that is one row for all."""
    seen = []
    run = lambda *a: seen.extend(a[:4]) or split_run(*a)  # noqa: E731
    split_run = split.run_split
    monkeypatch.setattr(split, "run_split", run)
    given = [
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(3, 40, 16, (4, 2))
    ]
    mask = torch.rand(1, 1, 1, 40) < 0.5
    agree(*given, mask)
    assert [x.data_ptr() for x in seen[:4]] == [x.data_ptr() for x in (*given, mask)]
    assert seen[3].stride()[:3] == (0, 0, 0)


def test_what_lies_behind_is_not_read():
    """Behind the last key, and beside the last feature, is NaN."""
    wide = [torch.full((1, 2, rows + 40, 32), torch.nan) for rows in (3, 35, 35)]
    for tensor, given in zip(wide, draw(3, 35, 24), strict=True):
        tensor[..., : given.shape[-2], :24] = given
    inputs = [x[..., :rows, :24] for x, rows in zip(wide, (3, 35, 35), strict=True)]
    assert flash_decoding_triton(*inputs, causal=True).isfinite().all()


def test_the_same_bits_whatever_else_is_in_the_batch():
    """With a given number of shares; and twice."""
    query, key, value = draw(1, 130, 16, (4, 2), (3,))
    given = {"splits": 4, "enable_gqa": True}
    together = flash_decoding_triton(query, key, value, **given)
    for text in range(3):
        alone = (x[text : text + 1] for x in (query, key, value))
        assert torch.equal(flash_decoding_triton(*alone, **given)[0], together[text])


def test_the_number_of_shares_is_chosen(monkeypatch):
    """By programs and blocks, of eight multiprocessors, unless it is given."""
    started = []
    launch = split.launch
    monkeypatch.setattr(
        split, "launch", lambda *a, **g: started.append(a[1]) or launch(*a, **g)
    )
    flash_decoding_triton(*draw(1, 128, 16, (4, 2)), enable_gqa=True)
    assert started == [2 * 4, 4]  # 2 heads of keys, 4 shares of 8 blocks; 4 rows to merge
    flash_decoding_triton(*draw(1, 128, 16, (4, 2)), enable_gqa=True, splits=3)
    assert started[2:] == [2 * 3, 4]


@pytest.mark.parametrize("name", ["query", "key", "value", "mask"])
def test_what_requires_a_gradient_is_refused(name):
    query, key, value = draw(1, 20, 16)
    given = {"query": query, "key": key, "value": value, "mask": torch.zeros(1, 20)}
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor that requires no"):
        flash_decoding_triton(**given)
    with torch.no_grad():
        if name != "mask":
            assert not flash_decoding_triton(**given).requires_grad


DIVIDES = "^key: expected a number of heads that divides 4, that of query, got [03]$"


def call(heads, **options):
    return lambda: flash_decoding_triton(*draw(1, 20, 16, heads), **options)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (call((4, 2)), ValueError, r"key: expected leading dimensions \(1, 4\)"),
        (call((4, 3), enable_gqa=True), ValueError, DIVIDES),
        (call((4, 0), enable_gqa=True), ValueError, DIVIDES),
        (call((2, 2), splits=0), ValueError, "splits: expected at least 1, got 0"),
        (call((4, 2), enable_gqa=True, mask=torch.ones(3, 1, 1, 20).bool()), ValueError,
         r"mask: .* \(1, 4, 1, 20\), got \(3, 1, 1, 20\)"),
        (call((2, 2), mask=torch.ones(20).int()), TypeError, "mask: expected a boolean"),
    ],
)  # fmt: skip
def test_refusals(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_refusals_of_groups_name_the_tensor(as_shipped):
    query, key, value = draw(1, 20, 16, (4, 2))
    with pytest.raises(ValueError, match=r"value: expected leading dimensions \(1, 2\)"):
        flash_decoding_triton(query, key, value[:, :1], enable_gqa=True)
    with pytest.raises(TypeError, match=r"key: expected torch\.float32 as query"):
        flash_decoding_triton(query, key.half(), value, enable_gqa=True)
    with pytest.raises(TypeError, match="key: expected a floating-point tensor, got list"):
        flash_decoding_triton(query, [1], value, enable_gqa=True)
    with pytest.raises(ValueError, match="query: expected at most 256 features"):
        flash_decoding_triton(*draw(1, 3, 300))


def test_autocast_and_inputs_that_stay():
    query, key, value = draw(1, 20, 16)
    kept = [x.clone() for x in (query, key, value)]
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_decoding_triton(query, key, value).dtype == torch.bfloat16
    flash_decoding_triton(query, key, value, scale=-1.0, causal=True)
    assert all(map(torch.equal, kept, (query, key, value)))


def test_a_gpu_without_these_kernels_is_refused(monkeypatch):
    from attnlib.flash_triton import split

    monkeypatch.setattr(split, "refusal", lambda *inputs: None)
    monkeypatch.setattr(split, "interpreted", lambda: False)
    monkeypatch.setattr(split, "capability_of", lambda tensor: 75)
    x = torch.randn(1, 2, 16)
    with pytest.raises(
        RuntimeError, match=r"query: expected a GPU of compute capability 8"
    ):
        split.flash_decoding_triton(x, x, x)
