"""The Triton kernels, interpreted on the CPU, against attention written in eight lines."""

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from jaxtyping import TypeCheckError

import attnlib
from attnlib import flash_attention, flash_attention_triton
from attnlib.flash import BACKENDS
from attnlib.flash_triton import SETTINGS, Setting, TritonFunction, choose_setting, refusal
from attnlib.flash_triton.attention import OLDEST_TRITON, triton_backward, triton_forward
from attnlib.flash_triton.blocks import Matrix, block_pointers, place_of
from attnlib.flash_triton.launch import STATISTICS_ROWS, precision_of
from attnlib.flash_triton.settings import SETTING_INTERPRETED, SETTINGS_FLOAT32
from drawn import (
    agree,
    attention,
    close,
    draw,
    draw_mask,
    each_refused,
    leaves,
    normal,
    require_triton,
    run_compiled,
)

require_triton()
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

LAUNCHER = "attnlib.flash_triton.launch"
ROOM = "attnlib.flash_triton.attention"  # that asks for the machine

# Absolute errors allowed for entries of size 1; float16 rounds to 2⁻¹¹ at several places.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}


def small(queries, keys, d_k=16, d_v=None, leading=(), dtype=torch.float32, **options):
    """Query, key and value."""
    sizes = {"queries": queries, "keys": keys, "d_k": d_k, "d_v": d_v or d_k}
    return draw(*leading, **sizes, dtype=dtype, **options)


def judge(inputs, mask=None, **options):
    """Output, log-sum-exp and gradients, of heads that may share keys and values."""
    shared = inputs[0].dim() > 2 and inputs[0].shape[-3] != inputs[1].shape[-3]
    ours = partial(flash_attention_triton, return_lse=True, enable_gqa=shared)
    agree(ours, inputs, mask, TOLERANCE[inputs[0].dtype], **options)


@pytest.fixture
def tiles(monkeypatch):
    """Of so many queries and keys, in place of those that the table has."""

    def use(queries, keys):
        chosen = Setting(queries, keys, 1, 1)
        monkeypatch.setattr("attnlib.flash_triton.settings.SETTING_INTERPRETED", chosen)

    return use


LENGTHS = ((17, 17), (63, 63), (65, 65), (1, 100), (65, 17), (63, 70), (96, 64))
BOTH = ((1, 1), (64, 64), (70, 70), (17, 65), (100, 1))
WIDTHS = [*((d, d) for d in (1, 8, 40, 64, 80, 128, 192, 256)), (16, 64), (33, 7)]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *((pair, {"causal": True}) for pair in LENGTHS + BOTH),
        *((pair, {}) for pair in (*BOTH, (0, 5), (5, 0), (0, 0))),
        *(((33, 35, *pair), {"causal": True}) for pair in WIDTHS),
        *(((20, 40), {"causal": True, "scale": scale}) for scale in (0.0, -0.7, 3.0)),
    ],
)
def test_sizes_and_scales(sizes, options):
    """Odd lengths, N ≠ M both ways; widths that are padded; no tokens; any scale.

    Causal with N > M has queries that see nothing; a scale that is not positive takes
    another path.
    """
    judge(small(*sizes), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype, causal):
    """16-bit inputs, products accumulated in float32; a mask has the dtype of the query."""
    mask = torch.linspace(-1, 1, 70, dtype=dtype) if causal else None
    judge(small(65, 70, 64, dtype=dtype), mask, causal=causal)


SQUARES = ((33, 33, 1), (33, 33, 16), (33, 33, 17), (48, 48, 47))
SQUARES += ((20, 45, 40), (45, 20, 19), (45, 20, 3), (1, 40, 16))


@pytest.mark.parametrize(
    ("sizes", "lengths", "causal", "window"),
    [
        *(((16, 64), (70, 50), True, None), ((64, 16), (50, 70), True, None)),
        *(((128, 32), (70, 50), True, None), ((32, 16), (50, 70), False, None)),
        *(((16, 32), (34, 50), False, 21), ((32, 16), (34, 50), True, 21)),
        *(((16, 16), pair, c, w) for *pair, w in SQUARES for c in (False, True)),
    ],
)
def test_any_tiles_give_the_same(tiles, sizes, lengths, causal, window):
    """Larger and smaller ones than those of keys, than the window and than the input."""
    tiles(*sizes)
    judge(small(*lengths, 8), causal=causal, window=window)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_with_a_walk_of_its_own_for_the_queries(tiles, same_bits, causal):
    tiles(16, 16)
    same_bits(True)
    judge(small(40, 50, 8), causal=causal, window=18)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("walks", [False, True])
def test_what_a_window_does_not_show_is_not_read(tiles, same_bits, walks, causal):
    """Some keys, then some queries are no numbers; who does not see them does not know.

    Query i is token i + 32, and sees four tokens before it, and unless causal behind it.
    """
    tiles(16, 16)
    same_bits(walks)
    query, key, value = small(96, 128, 8)
    far = [*range(16), *range(80, 96)]  # queries that see none of the keys 64 to 95

    def results(*inputs):
        inputs = leaves(inputs)
        output = flash_attention_triton(*inputs, causal=causal, window=5)[far]
        return output, *torch.autograd.grad(output.sum(), inputs)

    wanted = results(query, key, value)
    hidden = torch.tensor([*range(16), *range(64, 96)])  # nobody sees the first ones
    found = results(query, *(x.index_fill(0, hidden, torch.nan) for x in (key, value)))
    close([found[0], found[1][far]], [wanted[0], wanted[1][far]], atol=1e-5)
    assert all((x[:16] == 0).all() for x in found[2:])
    found = results(query.index_fill(0, torch.arange(32, 64), torch.nan), key, value)
    for x, exact in zip(found[2:], wanted[2:], strict=True):
        close([x[:48], x[112:]], [exact[:48], exact[112:]], atol=1e-5)
        assert (exact[112:] != 0).all()


def test_the_widest_window_gives_the_same_bits():
    """As none: nothing is compared, and the programs are those without."""
    inputs = small(40, 50)
    for causal in (True, False):
        plain = flash_attention_triton(*inputs, causal=causal)
        for window in (50, 2**40):
            found = flash_attention_triton(*inputs, causal=causal, window=window)
            assert torch.equal(found, plain)


WHOLE = normal(2, 34, 6 * 16, dtype=torch.float32)
VIEWS = {
    "tokens first": WHOLE[..., :32].unflatten(2, (2, 16)).transpose(1, 2),
    "every second feature": WHOLE.view(2, 34, 3, 32)[..., ::2].transpose(1, 2),
    "features first": WHOLE[..., :32].unflatten(2, (2, 16)).permute(0, 2, 3, 1).clone().mT,
    "part of one projection": WHOLE.view(2, 34, 3, 2, 16).unbind(2)[1].transpose(1, 2),
    "one for all heads": WHOLE[:, None, :, :16].expand(2, 2, 34, 16),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_strides(kind):
    """Views are read where they lie; the result does not depend on the layout."""
    view = VIEWS[kind]
    judge([view[..., :20, :], view, view], causal=True)


def test_views_are_copied_only_where_their_features_lie_apart(monkeypatch):
    """(B, N, H, d) seen as (B, H, N, d) reaches the kernels with its own memory."""
    seen, apply = [], TritonFunction.apply
    spy = lambda *a: seen.extend(a[:3]) or apply(*a)  # noqa: E731
    monkeypatch.setattr(TritonFunction, "apply", spy)
    inputs = [VIEWS["part of one projection"]] * 3
    flash_attention_triton(*inputs)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in inputs]
    flash_attention_triton(*[VIEWS["every second feature"]] * 3)
    assert [x.stride(-1) for x in seen[3:]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("queries", "keys", "dim"), [(32, 32, 24), (33, 33, 24), (33, 64, 32), (64, 33, 32)]
)
def test_what_lies_behind_is_not_read(queries, keys, dim):
    """Padding is filled with zeros, not with the neighbors in memory, here NaN."""
    inputs = []
    for tensor in small(queries, keys, dim, leading=(1, 1)):
        rows, columns = tensor.shape[-2:]
        wide = torch.full((1, 1, rows + 40, columns + 16), torch.nan)
        wide[..., :rows, :columns] = tensor
        inputs.append(wide[..., :rows, :columns])
    output = flash_attention_triton(*(tensor.requires_grad_() for tensor in inputs))
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(tensor.isfinite().all() for tensor in (output, *gradients))


@pytest.mark.parametrize("walks", [False, True])
def test_gradients_lie_as_their_tensors_do_wherever_the_incoming_one_lies(same_bits, walks):
    """Joining the heads again takes no copy, if splitting them took none."""
    same_bits(walks)
    batch_first = normal(3, 2, 20, 2, 16, dtype=torch.float32).transpose(2, 3)
    inputs = [x.requires_grad_() for x in batch_first]
    output = flash_attention_triton(*inputs)
    coming = torch.randn(2, 2, 16, 20).mT, torch.ones(()).expand_as(output)
    for given in coming:
        found, same = (
            torch.autograd.grad(output, inputs, g, retain_graph=True)
            for g in (given, given.contiguous())
        )
        assert all(map(torch.equal, found, same))
        assert all(x.transpose(1, 2).is_contiguous() for x in (output, *found))


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


@pytest.mark.parametrize(("cache", "heads"), [(0, 1), (2 * 5000, 1), (2 * 10**6, 6)])
def test_so_many_heads_go_together_as_the_cache_holds(monkeypatch, cache, heads):
    """Under a causal mask; the result is the same in any order."""
    monkeypatch.setattr(f"{LAUNCHER}.cache_of", lambda tensor: cache)
    seen, launch = [], attnlib.flash_triton.launch.launch

    def spy(*given, **named):
        seen.append(named.get("together"))
        launch(*given, **named)

    monkeypatch.setattr(f"{LAUNCHER}.launch", spy)
    judge(small(40, 35, leading=(2, 3)), causal=True)
    # 35 · 32 numbers of 4 bytes are 4,480 bytes, and 40 · 32 make 5,120.
    assert seen == [heads, None, heads]
    flash_attention_triton(*small(40, 35, leading=(2, 3)))
    assert seen[-1] == 1


def test_queries_that_see_nothing():
    """Gradients are finite even if NaN comes for their log-sum-exp, which is −inf."""
    inputs = small(50, 20, leading=(2,), grad=True)
    output, lse = flash_attention_triton(*inputs, causal=True, return_lse=True)
    coming = torch.ones_like(lse).masked_fill(lse == -torch.inf, torch.nan)
    assert coming[..., :30].isnan().all()
    gradients = torch.autograd.grad([output, lse], inputs, [output, coming])
    assert all(x.isfinite().all() for x in gradients)


def test_large_scores():
    """Scores of ±10⁴ overflow nowhere."""
    query, key, value = small(20, 40)
    inputs = 100 * query, 100 * key, value
    output, lse = flash_attention_triton(*inputs, return_lse=True)
    expected, expected_lse = attention(*(x.double() for x in inputs))
    close(output.double(), expected, atol=5e-2)
    close(lse.double(), expected_lse, atol=0, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow|invalid value")  # where nothing is, as said
def test_padding_does_not_leak():
    """Scores far below 0: exp(0 − lse) of a padded key is infinite, and must not matter."""
    query, key, value = small(20, 35)
    for causal in (False, True):
        judge([query.abs() + 4, -key.abs() - 4, value], causal=causal)


@pytest.mark.parametrize("kind", ["boolean", "holes"])
@pytest.mark.parametrize(
    ("shape", "causal", "window"),
    [
        *(((2, 2, 33, 40), True, None), ((2, 1, 1, 40), False, None)),
        *(((1, 2, 20, 1), False, None), ((20, 40), False, None)),
        *(((33, 40), True, 9), ((33, 40), False, 9)),
    ],
)
def test_masks(tiles, kind, shape, causal, window):
    """Broadcast by strides of 0, with rows all hidden among them; beside a window."""
    if window:
        tiles(16, 16)
    mask = draw_mask(kind, *shape, dtype=torch.float32)
    inputs = small(max(20, shape[-2]), 40, leading=(2, 2)[: len(shape) - 2])
    judge(inputs, mask, causal=causal, window=window)


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's, which `hide` mends
@pytest.mark.parametrize("scale", [0.125, 0.5, 1.0, 3.0, -0.5])
@pytest.mark.parametrize("attend", [flash_attention, flash_attention_triton])
def test_the_lowest_number_is_no_minus_infinity(attend, scale):
    """A query that has it for every key gets the mean, in both backends, at any scale."""
    inputs = small(20, 40, 16, 24)
    mask = torch.zeros(20, 40)
    mask[3] = mask[4, 10:] = torch.finfo(mask.dtype).min
    mask[5] = -torch.inf
    output = attend(*inputs, mask, scale=scale)
    exact = [x.double() for x in inputs]
    expected, _ = attention(*exact, mask.double(), scale=scale)
    close(output.double(), expected, atol=2e-5, rtol=2e-5)
    close(output[3], inputs[2].mean(dim=0), atol=1e-6, rtol=1e-6)
    assert not output[5].any()


def test_only_some_gradients(same_bits):
    """Each gradient alone equals the one computed with the others, to the bit."""
    same_bits(True)
    tensors = small(20, 30)
    together = leaves(tensors)
    flash_attention_triton(*together).square().sum().backward()
    for i in range(3):
        alone = [t.clone().requires_grad_(i == j) for j, t in enumerate(tensors)]
        flash_attention_triton(*alone).square().sum().backward()
        assert torch.equal(alone[i].grad, together[i].grad)


def walks(monkeypatch, needed=(True, True, True)):
    """For each kernel of a backward: whether it adds to the query's gradient; or None."""
    seen = []
    monkeypatch.setattr(f"{LAUNCHER}.launch", lambda *a, **o: seen.append(o))
    inputs = [x.requires_grad_(n) for x, n in zip(small(9, 9), needed, strict=True)]
    flash_attention_triton(*inputs).sum().backward()
    return [named.get("WITH_QUERY") for named in seen[2:]]  # after forward and statistics


def test_one_walk_adds_to_all_gradients(monkeypatch, same_bits):
    """Five products in place of seven, where somebody wants all, in any order.

    For the same bits, dQ has a walk of its own.
    """
    assert walks(monkeypatch) == [True]
    assert walks(monkeypatch, (True, False, False)) == [None]
    assert walks(monkeypatch, (False, True, False)) == [False]
    same_bits(True)
    assert walks(monkeypatch) == [None, False]


@pytest.mark.parametrize(
    ("heads", "shared", "lengths", "causal", "kind", "window"),
    [
        ((2, 4), 2, (33, 40), True, None, None),
        ((6,), 2, (20, 40), False, "boolean", None),
        ((4,), 1, (35, 40), True, "additive", None),
        *(((4,), 2, (20, 40), True, None, 18), ((3,), 1, (20, 40), True, None, 18)),
    ],
)
@pytest.mark.parametrize("walks", [False, True])
def test_heads_that_share_keys_and_values(
    same_bits, heads, shared, lengths, causal, kind, window, walks
):
    """The gradient of a shared key is the sum over its group."""
    same_bits(walks)
    inputs = small(*lengths, 16, 24, leading=heads, kv_heads=shared)
    mask = draw_mask(kind, heads[-1], *lengths, dtype=torch.float32)
    judge(inputs, mask, causal=causal, window=window)


GROUPS = "key: expected a number of heads that divides {}, that of query, got {}"
LEADING = "expected leading dimensions"
SHARED = partial(flash_attention_triton, enable_gqa=True)


def zeros(query, key, value, tokens=5, dim=16):
    """With so many heads."""
    return [torch.zeros(1, heads, tokens, dim) for heads in (query, key, value)]


ONE = torch.zeros(1, 4, 8)
VALUES = {  # without the switch, heads may not differ
    GROUPS.format(4, 3): lambda: SHARED(*zeros(4, 3, 3)),
    GROUPS.format(2, 4): lambda: SHARED(*zeros(2, 4, 4)),
    GROUPS.format(4, 0): lambda: SHARED(*zeros(4, 0, 0)),
    f"value: {LEADING} (1, 2)…": lambda: SHARED(*zeros(4, 2, 1)),
    f"value: {LEADING} …, got shape (1, 4, 5, 16)": lambda: SHARED(*zeros(4, 2, 4)),
    f"key: {LEADING}…": lambda: flash_attention_triton(*zeros(4, 2, 2)),
    "mask: expected a shape that broadcasts…":
        lambda: SHARED(*zeros(4, 1, 1), torch.ones(3, 5, 5).bool()),
    "key: expected d_k = 8…": lambda: flash_attention_triton(ONE, ONE[..., :7], ONE),
    "query: expected at most 256…": lambda: SHARED(*zeros(1, 1, 1, dim=257)),
    "value: expected at most 256…": lambda: SHARED(ONE, ONE, torch.zeros(1, 4, 257)),
    # rather than giving it none in silence
    "mask: expected one that requires no gradient…":
        lambda: flash_attention_triton(ONE, ONE, ONE, torch.zeros(4, 4).requires_grad_()),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
TYPES = {"query: expected float16…": lambda: flash_attention_triton(*[ONE.double()] * 3)}
test_types = each_refused(TypeError, TYPES)


def test_what_holds_no_kernel_is_checked():
    """The import hook reaches the package's modules; `conftest.py` says which it spares."""
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
    seen = []
    monkeypatch.setattr(f"{LAUNCHER}.launch", lambda *a, **o: seen.append(o["PRECISION"]))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        flash_attention_triton(*small(5, 6, dtype=dtype))
    assert seen == [precision, "ieee", precision]  # bfloat16 is interpreted as float32
    assert precision_of(torch.bfloat16) == "ieee"


@pytest.mark.parametrize("newer", ["tf32", "ieee"])
def test_newer_names_for_the_products_of_float32(monkeypatch, newer):
    """After which PyTorch refuses to tell the older ones."""
    mixed = RuntimeError("mix of the legacy and new APIs")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", Mock(side_effect=mixed))
    chosen = SimpleNamespace(fp32_precision=newer)
    monkeypatch.setattr(torch.backends.cuda, "matmul", chosen)
    assert precision_of(torch.float32) == newer


# Stands for a tensor on a GPU, of which only this is asked.
ELSEWHERE = {"is_cuda": True, "dtype": torch.float16, "shape": (2, 64)}
ELSEWHERE |= {"requires_grad": False, "device": "cuda"}


T4 = ' on a GPU of compute capability 7.5; backend="torch" has tiles for all'


@pytest.mark.parametrize(
    ("change", "capability", "version", "suited", "words"),
    [
        ({}, 80, "3.3.1", True, "None"),
        ({"dtype": torch.float32}, 90, "3.4.0", False, "None"),  # until it is measured
        ({"dtype": torch.float64}, 90, "3.4.0", False,
         "query: expected float16, bfloat16 or float32, got torch.float64"),
        ({"is_cuda": False}, 80, "3.4.0", False,
         "query: expected a tensor on a GPU, got device cuda; for the interpreter set "
         "TRITON_INTERPRET=1 before the import"),
        ({"shape": (2, 300)}, 90, "3.4.0", False,
         "query: expected at most 256 features, got shape (2, 300)"),
        ({"requires_grad": True}, 90, "3.4.0", False,
         "mask: expected one that requires no gradient, got one that does"),
        ({}, 75, "3.4.0", False, "None"),
        ({"dtype": torch.float32}, 75, "3.4.0", False, "None"),
        ({"dtype": torch.bfloat16}, 75, "3.4.0", False,
         f"query: expected float16 or float32, got torch.bfloat16{T4}"),
        ({"shape": (8, 129)}, 75, "3.4.0", False,
         f"query: expected at most 128 features, got shape (8, 129){T4}"),
        ({}, 75, "3.3.1", False, f"expected triton 3.4 or newer{T4}, got 3.3.1"),
        ({}, 70, "3.4.0", False,
         "query: expected a GPU of compute capability 7.5 or higher, got (7, 0)"),
    ],
)  # fmt: skip
def test_what_a_gpu_takes(
    as_shipped, monkeypatch, change, capability, version, suited, words
):
    """A T4 16 and 32 bits, but no bfloat16; "auto" takes the kernels from 8.0 on."""
    monkeypatch.setattr(f"{ROOM}.interpreted", lambda: False)
    monkeypatch.setattr(f"{ROOM}.capability_of", lambda tensor: capability)
    monkeypatch.setattr(triton, "__version__", version)
    found = divmod(capability, 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    tensor = SimpleNamespace(**ELSEWHERE | change)
    mask = tensor if tensor.requires_grad else None
    assert str(refusal(tensor, tensor, mask)) == words
    assert BACKENDS["triton"].suits(tensor, tensor, tensor, mask, False) is suited


@pytest.mark.parametrize(
    ("version", "old"),
    [
        *((version, True) for version in ("2.1.0", "3.0.0", "3.2.0")),
        *((version, False) for version in ("3.3.0", "3.7.1+git1", "3.10.0", "4.0")),
    ],
)
def test_an_older_triton_is_refused(monkeypatch, version, old):
    """Before a kernel is compiled; versions are compared as numbers."""
    monkeypatch.setattr(triton, "__version__", version)
    query, _, value = small(4, 4)
    expected = f"expected triton 3.3 or newer, got {version}" if old else "None"
    assert str(refusal(query, value, None)) == expected


def test_the_workflow_runs_the_oldest_triton():
    """The least version that the kernels take is the one that is tried."""
    workflow = Path(__file__).parents[2] / ".github" / "workflows" / "tests.yml"
    least = ".".join(map(str, OLDEST_TRITON))
    assert f"triton=={least}.0" in workflow.read_text(encoding="utf-8")


def test_a_gpu_of_amd_is_refused(as_shipped, monkeypatch):
    """PyTorch calls it cuda, too."""
    monkeypatch.setattr(f"{ROOM}.interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "6.2.4")
    tensor = SimpleNamespace(**ELSEWHERE)
    assert "expected a GPU of NVIDIA, got one of AMD" in str(refusal(tensor, tensor, None))
    assert not BACKENDS["triton"].suits(tensor, tensor, tensor, None, False)


@pytest.mark.parametrize("attend", [flash_attention, flash_attention_triton])
def test_autocast_as_pytorch_has_it(attend):
    """The dtype of F.scaled_dot_product_attention, whatever comes in; float64 stays."""
    ready = torch.nn.functional.scaled_dot_product_attention
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype, other in itertools.product(dtypes, dtypes):
            query, key, value = small(9, 11, dtype=dtype)
            query, mask = query.to(other), torch.zeros(9, 11, dtype=other)
            query.requires_grad_()
            output = attend(query, key, value, mask)
            assert output.dtype == ready(query, key, value, mask).dtype == torch.bfloat16
            (gradient,) = torch.autograd.grad(output.sum(), query)
            assert gradient.dtype == other
        wide = small(9, 11, dtype=torch.float64)
        assert ready(*wide).dtype == flash_attention(*wide).dtype == torch.float64


def test_the_statistics_are_filled_up_for_every_setting():
    """The kernels read whole blocks of them; they refuse to be compiled otherwise."""
    tables = [*SETTINGS.values(), *SETTINGS_FLOAT32.values(), SETTING_INTERPRETED]
    assert all(STATISTICS_ROWS % setting.queries == 0 for setting in tables)


def test_table_of_settings():
    """Every dimension and capability finds one that a GPU accepts."""
    kernels = ("forward", "query_gradient", "key_value_gradient", "all_gradients")
    capabilities, dtypes = (80, 86, 89, 90, 100, 103, 120), (torch.float16, torch.float32)
    for case in itertools.product(kernels, range(1, 257), dtypes, capabilities):
        setting = choose_setting(*case)
        assert min(setting.queries, setting.keys) >= 16, case
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


def test_without_a_gpu():
    """Compiled kernels want a GPU, and the message knows a way out."""
    program = "import attnlib, torch; attnlib.flash_attention_triton(*torch.ones(3, 2, 4))"
    expected = "RuntimeError: .*got device cpu; for the interpreter set TRITON_INTERPRET=1"
    with pytest.raises(AssertionError, match=expected):  # the process fails
        run_compiled("-c", program)


@pytest.mark.parametrize(("masked", "window"), [(True, None), (False, 7)])
def test_the_kernels_are_operators_of_pytorch(masked, window, as_shipped):
    """By PyTorch's own check, and of each gradient alone by a part of it."""
    inputs = small(5, 7, leading=(1, 2), kv_heads=1)
    mask = torch.rand(1, 2, 5, 7).lt(0.7).view(torch.uint8) if masked else None
    rest = True, 0.25
    torch.library.opcheck(triton_forward, (*leaves(inputs), mask, *rest, window))
    output, lse = triton_forward(*inputs, mask, *rest, window)
    tensors = (*inputs, mask, output, lse, torch.randn_like(output), torch.randn_like(lse))
    torch.library.opcheck(triton_backward, (*tensors, *rest, True, True, window))
    for needed in ((True, False), (False, True)):
        torch.library.opcheck(
            triton_backward,
            (*tensors, *rest, *needed, window),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_batches_of_vmap():
    def score(query, key, value, mask):
        options = {"causal": True, "enable_gqa": True}
        return flash_attention_triton(query, key, value, mask, **options).cos().sum()

    batch = small(5, 7, leading=(2, 2), kv_heads=1)
    allowed = torch.rand(2, 5, 7) < 0.7
    found = torch.vmap(torch.func.grad(score, argnums=(0, 1, 2)))(*batch, allowed)
    for i in range(2):
        own = leaves([x[i] for x in batch])
        expected = torch.autograd.grad(score(*own, allowed[i]), own)
        close([x[i] for x in found], list(expected), atol=1e-5)
