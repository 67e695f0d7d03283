"""Few queries, many keys: the split kernels, interpreted, against the definitions."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attnlib import causal_mask, flash_decoding_triton, padding_mask
from attnlib.flash_triton import split
from drawn import attention, close, draw, draw_mask, each_refused, require_triton

require_triton()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def small(queries, keys, dim=16, heads=(2, 2), batch=(1,), d_v=None, dtype=torch.float32):
    """Query, key and value, with so many heads of queries and of keys."""
    sizes = {"queries": queries, "keys": keys, "d_k": dim, "d_v": d_v or dim}
    return draw(*batch, heads[0], kv_heads=heads[1], **sizes, dtype=dtype)


def judge(query, key, value, mask=None, **options):
    """Asserts output and log-sum-exp against the definitions, for some shares."""
    atol = TOLERANCE[query.dtype]
    exact = mask.double() if mask is not None and mask.is_floating_point() else mask
    wanted = attention(*(x.double() for x in (query, key, value)), exact, **options)
    shared = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    for splits in (3, None):
        given = dict(splits=splits, enable_gqa=shared, return_lse=True, **options)
        output, lse = flash_decoding_triton(query, key, value, mask, **given)
        assert output.dtype == query.dtype and lse.dtype == torch.float32
        close([output.double(), lse.double()], list(wanted), atol=atol, rtol=atol)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 18])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 100), (5, 33), (40, 17), (2, 0)])
def test_lengths(queries, keys, window, causal):
    """More rows than a tile, and queries that see nothing."""
    judge(*small(queries, keys), causal=causal, window=window)


BITS = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [
        *(({"dim": dim, "d_v": d_v}, None)
          for dim, d_v in ((1, 1), (8, 40), (80, 24), (256, 256))),
        # Neighboring heads share keys; 36 heads of 2 queries fill more than two tiles.
        *(({"heads": heads}, None) for heads in ((6, 1), (6, 2), (6, 3), (36, 1))),
        *(({"queries": 3, "dim": 64, "heads": (4, 2), "dtype": dtype}, None)
          for dtype in BITS),
        *(({}, scale) for scale in (0.0, -0.7, 3.0)),
        *(({"batch": batch}, None) for batch in ((), (3,), (2, 1, 2))),
    ],
)  # fmt: skip
def test_sizes_and_scales(sizes, scale):
    judge(*small(**{"queries": 2, "keys": 40} | sizes), scale=scale, causal=True)


def test_no_heads():
    judge(*(x[0, 0] for x in small(2, 20)))


def test_groups_are_those_of_pytorch():
    query, key, value = small(1, 50, 32, (8, 2), (3,))
    ours = flash_decoding_triton(query, key, value, enable_gqa=True)
    close(ours, F.scaled_dot_product_attention(query, key, value, enable_gqa=True), 1e-5)


@pytest.mark.parametrize("kind", ["boolean", "holes"])
@pytest.mark.parametrize("shape", [(3, 1), (2, 1, 1, 45), (2, 4, 3, 45)])
def test_masks_of_both_kinds(kind, shape):
    """Boolean, and additive with −inf, from a column for all to one matrix a head."""
    mask = draw_mask(kind, *shape, dtype=torch.float32)
    judge(*small(3, 45, heads=(4, 2), batch=(2,)), mask, causal=kind == "boolean")


@pytest.mark.parametrize("mask", [padding_mask([45, 0]), causal_mask(3, 45)[-1]])
def test_masks_of_keys(mask):
    """Of a sequence without any, and one row for all."""
    judge(*small(3, 45, heads=(4, 2), batch=(2,)), mask)


def test_views_are_read_where_they_lie(monkeypatch):
    """(B, N, H, d) seen as (B, H, N, d), and a mask that is one row for all."""
    seen = []
    run = lambda *a: seen.extend(a[:4]) or split_run(*a)  # noqa: E731
    split_run = split.run_split
    monkeypatch.setattr(split, "run_split", run)
    given = small(3, 40, heads=(4, 2))
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    mask = torch.rand(1, 1, 1, 40) < 0.5
    judge(*given, mask)
    assert [x.data_ptr() for x in seen[:4]] == [x.data_ptr() for x in (*given, mask)]
    assert seen[3].stride()[:3] == (0, 0, 0)


def test_what_lies_behind_is_not_read():
    """Behind the last key, and beside the last feature, is NaN."""
    wide = [torch.full((1, 2, rows + 40, 32), torch.nan) for rows in (3, 35, 35)]
    for tensor, given in zip(wide, small(3, 35, 24), strict=True):
        tensor[..., : given.shape[-2], :24] = given
    inputs = [x[..., :rows, :24] for x, rows in zip(wide, (3, 35, 35), strict=True)]
    assert flash_decoding_triton(*inputs, causal=True).isfinite().all()
    query, key, value = small(20, 100)
    for x in (key, value):
        x[..., :48, :] = torch.nan  # before the windows of all
    for causal in (False, True):
        output = flash_decoding_triton(query, key, value, causal=causal, window=18)
        assert output.isfinite().all()


def test_the_same_bits_whatever_else_is_in_the_batch():
    """With a given number of shares; and twice."""
    query, key, value = small(1, 130, heads=(4, 2), batch=(3,))
    given = {"splits": 4, "enable_gqa": True}
    together = flash_decoding_triton(query, key, value, **given)
    for text in range(3):
        alone = (x[text : text + 1] for x in (query, key, value))
        assert torch.equal(flash_decoding_triton(*alone, **given)[0], together[text])


def test_the_number_of_shares_is_chosen(monkeypatch):
    """By programs and blocks, of eight multiprocessors, unless it is given."""
    started, levels, launch = [], [], split.launch

    def spy(kernel, programs, device, **given):
        launch(kernel, programs, device, **given)
        started.append(programs)
        levels.append(given["levels"])

    monkeypatch.setattr(split, "launch", spy)
    flash_decoding_triton(*small(1, 128, heads=(4, 2)), enable_gqa=True)
    assert started == [2 * 4, 4]  # 2 heads of keys, 4 shares of 8 blocks; 4 rows to merge
    flash_decoding_triton(*small(1, 128, heads=(4, 2)), enable_gqa=True, splits=3)
    assert started[2:] == [2 * 3, 4]
    # A window of 40 leaves three blocks of ten; each share has one, and sees some key.
    flash_decoding_triton(*small(1, 160, heads=(1, 1)), causal=True, window=40)
    assert levels[4].shape[-1] == 3 and levels[4].isfinite().all()


@pytest.mark.parametrize("name", ["query", "key", "value", "mask"])
def test_what_requires_a_gradient_is_refused(name):
    query, key, value = small(1, 20)
    given = {"query": query, "key": key, "value": value, "mask": torch.zeros(1, 20)}
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor that requires no"):
        flash_decoding_triton(**given)
    with torch.no_grad():
        if name != "mask":
            assert not flash_decoding_triton(**given).requires_grad


DIVIDES = "key: expected a number of heads that divides 4, that of query, got"
Q, K, V = small(1, 20, heads=(4, 2))
SHARED = partial(flash_decoding_triton, enable_gqa=True)


VALUES = {
    "key: expected leading dimensions (1, 4)…": lambda: flash_decoding_triton(Q, K, V),
    f"{DIVIDES} 3": lambda: SHARED(*small(1, 20, heads=(4, 3))),
    f"{DIVIDES} 0": lambda: SHARED(Q, K[:, :0], V[:, :0]),
    "splits: expected at least 1, got 0": lambda: SHARED(Q, K, V, splits=0),
    "mask: … (1, 4, 1, 20), got (3, 1, 1, 20)":
        lambda: SHARED(Q, K, V, torch.ones(3, 1, 1, 20).bool()),
    "value: expected leading dimensions (1, 2)…": lambda: SHARED(Q, K, V[:, :1]),
    "query: expected at most 256 features…": lambda: SHARED(*small(1, 3, 300)),
    "window: expected None or an integer …, got 0": lambda: SHARED(Q, K, V, window=0),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
TYPES = {
    "mask: expected a boolean…": lambda: SHARED(Q, K, V, torch.ones(20).int()),
    "key: expected torch.float32 as query…": lambda: SHARED(Q, K.half(), V),
    "key: expected a floating-point tensor, got list": lambda: SHARED(Q, [1], V),
    "window: expected None or an integer …, got True":
        lambda: SHARED(Q, K, V, window=True),
}  # fmt: skip
test_types = each_refused(TypeError, TYPES)


def test_autocast_and_inputs_that_stay():
    query, key, value = small(1, 20)
    kept = [x.clone() for x in (query, key, value)]
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_decoding_triton(query, key, value).dtype == torch.bfloat16
    flash_decoding_triton(query, key, value, scale=-1.0, causal=True)
    assert all(map(torch.equal, kept, (query, key, value)))


def test_a_gpu_without_these_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(split, "refusal", lambda *inputs: None)
    monkeypatch.setattr(split, "interpreted", lambda: False)
    monkeypatch.setattr(split, "capability_of", lambda tensor: 75)
    x = torch.randn(1, 2, 16)
    with pytest.raises(
        RuntimeError, match=r"query: expected a GPU of compute capability 8"
    ):
        split.flash_decoding_triton(x, x, x)
