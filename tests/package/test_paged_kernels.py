"""Pages in a kernel: interpreted against `paged_attention`, and compiled for GPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnlib import PagedCache, paged_attention, paged_attention_triton
from attnlib.flash_triton import paged

if importlib.util.find_spec("triton") is None:
    if os.environ.get("CI") and sys.platform == "linux":
        pytest.fail("no triton found, but CI has to run the kernels", pytrace=False)
    pytest.skip("no triton found", allow_module_level=True)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHARED_LIMIT = 99 * 1024  # of 8.6, the smallest; one setting serves all
SPILL_LIMIT = 40  # bytes a thread


def filled(lengths, size=4, heads=(2,), d_k=8, d_v=5, dtype=torch.float32, spare=3):
    """A cache with sequences of these lengths, written in turn, so that pages mix."""
    make = torch.Generator().manual_seed(len(lengths))
    cache = PagedCache(sum(-(-n // size) for n in lengths) + spare, size)
    handles = [cache.open() for _ in lengths]
    for start in range(0, max(lengths), 3):
        for handle, length in zip(handles, lengths, strict=True):
            new = max(0, min(3, length - start))
            pair = (
                torch.randn(*heads, new, d, generator=make).to(dtype) for d in (d_k, d_v)
            )
            cache.append(handle, *pair)
    return cache, handles


def agree(cache, handles, query, **options):
    """The kernel against pages in float64."""
    wide = PagedCache(cache.pages, cache.page_size)
    wide.keys, wide.values = cache.keys.double(), cache.values.double()
    table, atol = cache.table(handles), TOLERANCE[query.dtype]
    wanted = paged_attention(query.double(), wide, table, **options)
    for split_size in (7, 256):
        found = paged_attention_triton(
            query, cache, table, split_size=split_size, **options
        )
        assert found.dtype == query.dtype and found.shape == wanted.shape
        torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=atol)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
def test_lengths(queries, causal):
    """Among them one shorter than the queries, and one that fills its pages."""
    cache, handles = filled((5, 33, 1, 16))
    agree(cache, handles, draw(4, 2, queries, 8), causal=causal)


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_page_sizes(size):
    cache, handles = filled((5, 40), size=size)
    agree(cache, handles, draw(2, 2, 1, 8))


@pytest.mark.parametrize(("heads", "all_heads"), [((2,), (6,)), ((1,), (40,)), ((), ())])
def test_heads(heads, all_heads):
    """Groups that share keys, more rows than a tile has, and no heads at all."""
    cache, handles = filled((5, 20), heads=heads)
    query = draw(2, *all_heads, 2, 8)
    agree(cache, handles, query, enable_gqa=bool(heads), scale=0.3)


@pytest.mark.parametrize(("d_k", "d_v"), [(16, 16), (40, 80), (1, 1), (256, 3)])
def test_widths(d_k, d_v):
    cache, handles = filled((5, 20), d_k=d_k, d_v=d_v)
    agree(cache, handles, draw(2, 2, 1, d_k))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    cache, handles = filled((5, 40), d_k=32, d_v=32, dtype=dtype)
    agree(cache, handles, draw(2, 2, 2, 32, dtype=dtype))


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_any_scale(scale):
    cache, handles = filled((5, 20))
    agree(cache, handles, draw(2, 2, 1, 8), scale=scale)


def test_sequences_without_tokens():
    cache, _ = filled((5, 20))
    empty, query = cache.open(), draw(2, 2, 1, 8)
    found = paged_attention_triton(query, cache, [empty, 0])
    assert (found[0] == 0).all() and (found[1] != 0).any()
    assert (paged_attention_triton(query[:1], cache, [empty]) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_company(dtype):
    lengths = (5, 70, 1, 33)
    cache, handles = filled(lengths, d_k=16, d_v=16, dtype=dtype)
    query = draw(4, 2, 1, 16, dtype=dtype)
    together = paged_attention_triton(query, cache, handles, split_size=16)
    for b in range(4):
        alone = paged_attention_triton(query[b : b + 1], cache, [handles[b]], split_size=16)
        assert torch.equal(alone[0], together[b])


def test_what_was_there_before_is_not_seen():
    cache, handles = filled((5, 20))
    query = draw(2, 2, 1, 8)
    before = paged_attention_triton(query, cache, handles)
    used = {
        cache.tables[h][t // 4] * 4 + t % 4
        for h in handles
        for t in range(cache.lengths[h])
    }
    free = [place for place in range(cache.pages * 4) if place not in used]
    for memory in (cache.keys, cache.values):
        memory.flatten(0, 1)[free] = torch.nan
    assert torch.equal(paged_attention_triton(query, cache, handles), before)


def test_refusals(as_shipped):
    cache, handles = filled((5, 20))
    query = draw(2, 2, 1, 8)
    with pytest.raises(ValueError, match=r"^sequences: expected a sequence that is open"):
        paged_attention_triton(query, cache, [0, 7])
    with pytest.raises(ValueError, match=r"^query: expected shape"):
        paged_attention_triton(query, cache, [0])
    with pytest.raises(ValueError, match=r"^split_size: expected at least 1"):
        paged_attention_triton(query, cache, handles, split_size=0)
    with pytest.raises(
        ValueError, match=r"^query: expected a tensor that requires no grad"
    ):
        paged_attention_triton(query.requires_grad_(), cache, handles)
    doubled, handles = filled((5,), dtype=torch.float64)
    with pytest.raises(TypeError, match=r"^query: expected float16, bfloat16 or float32"):
        paged_attention_triton(draw(1, 2, 1, 8).double(), doubled, handles)
    nested, handles = filled((5,), heads=(2, 3))
    with pytest.raises(
        ValueError, match=r"^cache: expected at most one dimension of heads"
    ):
        paged_attention_triton(draw(1, 2, 3, 1, 8), nested, handles)
    wide, handles = filled((5,), d_v=257)
    with pytest.raises(ValueError, match=r"^value: expected at most 256 features"):
        paged_attention_triton(draw(1, 2, 1, 8), wide, handles)


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(paged, "interpreted", lambda: False)
    monkeypatch.setattr(paged, "capability_of", lambda tensor: 75)
    cache, handles = filled((5, 20))
    with pytest.raises(
        RuntimeError, match=r"^query: expected a GPU of compute capability 8"
    ):
        paged_attention_triton(draw(2, 2, 1, 8), cache, handles)


# ── compiled ahead of time ───────────────────────────────────────────────────────────


def problems(row):
    """What is wrong with one compiled kernel, in words."""
    found = []
    if row["shared"] > SHARED_LIMIT:
        found.append(f"{row['shared']} bytes of shared memory")
    if max(row["spill_stores"], row["spill_loads"]) > SPILL_LIMIT:
        found.append(f"{row['spill_stores']} + {row['spill_loads']} bytes spilled")
    if row["kernel"] == "paged" and row["dtype"] != "fp32" and not row["tensor_core"]:
        found.append("no tensor cores")
    return found


def test_compiled_for_gpus_that_are_not_here(pytestconfig):
    """In a process that does not interpret; with `--thorough` for all of them."""
    thorough = pytestconfig.getoption("--everything")
    if not thorough and not {"flash_triton", "paged_kernels"} & pytestconfig.changed:
        pytest.skip("unchanged; --thorough compiles them")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent)))
    command = [sys.executable, BENCHMARKS / "paged_kernels.py", "0" if thorough else "90"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * (4 if thorough else 1) * (3 * 3 * 2 + 2)
    assert not {str(row): words for row in rows if (words := problems(row))}
