"""Pages in a kernel, interpreted, against `paged_attention`."""

import pytest
import torch

from attnlib import PagedCache, PageTable, paged_attention, paged_attention_triton
from attnlib.flash_triton import paged
from drawn import close, normal, require_triton

require_triton()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def filled(lengths=(5, 20), size=4, heads=(2,), d_k=8, d_v=5, dtype=torch.float32, spare=3):
    """A cache with sequences of these lengths, written in turn, so that pages mix."""
    cache = PagedCache(sum(-(-n // size) for n in lengths) + spare, size)
    handles = [cache.open() for _ in lengths]
    for start in range(0, max(lengths), 3):
        for handle, length in zip(handles, lengths, strict=True):
            new = max(0, min(3, length - start))
            shapes = (*heads, new, d_k), (*heads, new, d_v)
            cache.append(handle, *(normal(*s, seed=start, dtype=dtype) for s in shapes))
    return cache, handles


def query_of(*shape, dtype=torch.float32):
    return normal(*shape, seed=5, dtype=dtype)


def judge(cache, handles, query, **options):
    """The kernel against pages in float64."""
    wide = PagedCache(cache.pages, cache.page_size)
    wide.keys, wide.values = cache.keys.double(), cache.values.double()
    table, atol = cache.table(handles), TOLERANCE[query.dtype]
    by_hand = PageTable(table.pages, table.lengths)  # the copy has no sequences
    wanted = paged_attention(query.double(), wide, by_hand, **options)
    for split_size in (7, 256):
        given = dict(split_size=split_size, **options)
        found = paged_attention_triton(query, cache, table, **given)
        pairs = [(found, wanted)]
        if options.get("return_lse"):
            pairs = [*zip(found, wanted, strict=True)]
        assert pairs[0][0].dtype == query.dtype
        for found, expected in pairs:
            close(found.double(), expected, atol=atol, rtol=atol)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
def test_lengths(queries, causal):
    """Among them one shorter than the queries, and one that fills its pages."""
    judge(*filled((5, 33, 1, 16)), query_of(4, 2, queries, 8), causal=causal)


@pytest.mark.parametrize("window", [1, 5, 20, 10**12])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(window, causal):
    options = {"window": window, "causal": causal, "return_lse": True}
    judge(*filled((5, 70, 1, 33)), query_of(4, 2, 3, 8), **options)


def test_behind_a_window_nothing_is_read():
    """But blocks begin where they did: the bits are those of a query alone."""
    cache, handles = filled((5, 70))
    query, options = query_of(2, 2, 2, 8), {"window": 3, "split_size": 40}
    before = paged_attention_triton(query, cache, handles, **options)
    last = paged_attention_triton(query[1:, :, 1:], cache, handles[1:], **options)
    assert torch.equal(last, before[1:, :, 1:])
    for memory in (cache.keys, cache.values):  # the first token seen is 66
        memory[cache.tables[handles[1]][:10]] = torch.nan
    assert torch.equal(paged_attention_triton(query, cache, handles, **options), before)


@pytest.mark.parametrize(
    ("cache", "query", "options"),
    [
        *(({"size": size}, (2, 2, 1, 8), {}) for size in (1, 3, 16, 64)),
        *(({"d_k": d_k, "d_v": d_v}, (2, 2, 1, d_k), {})
          for d_k, d_v in ((16, 16), (40, 80), (1, 1), (256, 3))),
        *(({"d_k": 32, "d_v": 32, "dtype": dtype}, (2, 2, 2, 32), {})
          for dtype in (torch.float16, torch.bfloat16)),
        *(({}, (2, 2, 1, 8), {"scale": scale}) for scale in (0.0, -0.7)),
        # groups that share keys, more rows than a tile has, and no heads at all
        ({"heads": (2,)}, (2, 6, 2, 8), {"enable_gqa": True, "scale": 0.3}),
        ({"heads": (1,)}, (2, 40, 2, 8), {"enable_gqa": True}),
        ({"heads": ()}, (2, 2, 8), {}),
    ],
)  # fmt: skip
def test_sizes_and_scales(cache, query, options):
    given = query_of(*query, dtype=cache.get("dtype", torch.float32))
    judge(*filled((5, 40), **cache), given, **options)


def test_sequences_without_tokens():
    cache, _ = filled()
    empty, query = cache.open(), query_of(2, 2, 1, 8)
    found = paged_attention_triton(query, cache, [empty, 0])
    assert (found[0] == 0).all() and (found[1] != 0).any()
    assert (paged_attention_triton(query[:1], cache, [empty]) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_company(dtype):
    cache, handles = filled((5, 70, 1, 33), d_k=16, d_v=16, dtype=dtype)
    query = query_of(4, 2, 1, 16, dtype=dtype)
    together = paged_attention_triton(query, cache, handles, split_size=16)
    for b in range(4):
        alone = paged_attention_triton(query[b : b + 1], cache, [handles[b]], split_size=16)
        assert torch.equal(alone[0], together[b])


def test_what_was_there_before_is_not_seen():
    """NaN in places that hold no token: behind the last one, and in other pages."""
    cache, handles = filled()
    query = query_of(2, 2, 1, 8)
    before = paged_attention_triton(query, cache, handles)
    used = [cache.tables[h][t // 4] * 4 + t % 4 for h in handles
            for t in range(cache.lengths[h])]  # fmt: skip
    free = [at for at in range(4 * cache.pages) if at not in used]
    for memory in (cache.keys, cache.values):
        memory.flatten(0, 1)[free] = torch.nan
    assert torch.equal(paged_attention_triton(query, cache, handles), before)


@pytest.mark.parametrize(
    ("options", "query", "given", "error", "words"),
    [
        ({}, (2, 2, 1, 8), {"sequences": [0, 7]}, ValueError,
         "sequences: expected a sequence that is open"),
        ({}, (2, 2, 1, 8), {"sequences": [0]}, ValueError, "query: expected shape"),
        ({}, (2, 2, 1, 8), {"window": 0}, ValueError, "window: expected None or an"),
        ({}, (2, 2, 1, 8), {"split_size": 0}, ValueError,
         "split_size: expected at least 1"),
        ({"dtype": torch.float64}, (2, 2, 1, 8), {}, TypeError,
         "query: expected float16, bfloat16 or float32"),
        ({"heads": (2, 3)}, (2, 2, 3, 1, 8), {}, ValueError,
         "cache: expected at most one dimension of heads"),
        ({"d_v": 257}, (2, 2, 1, 8), {}, ValueError,
         "value: expected at most 256 features"),
        ({}, (2, 2, 1, 8), {"query": torch.zeros(2, 2, 1, 8, requires_grad=True)},
         ValueError, "query: expected a tensor that requires no grad"),
    ],
)  # fmt: skip
def test_refusals(options, query, given, error, words, as_shipped):
    cache, handles = filled(**options)
    query = query_of(*query, dtype=options.get("dtype", torch.float32))
    given = {"query": query, "sequences": handles} | given
    with pytest.raises(error, match=f"^{words}"):
        paged_attention_triton(cache=cache, **given)


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(paged, "interpreted", lambda: False)
    monkeypatch.setattr(paged, "capability_of", lambda tensor: 75)
    expected = "^query: expected a GPU of compute capability 8"
    with pytest.raises(RuntimeError, match=expected):
        paged_attention_triton(query_of(2, 2, 1, 8), *filled())
