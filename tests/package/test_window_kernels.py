"""Windows in the Triton kernels, interpreted: to the token, and what nobody sees unread."""

import importlib.util
import os
import sys

import pytest
import torch

from attnlib import FlashAttention, flash_attention, flash_attention_triton
from attnlib import flash_decoding_triton as flash_decoding
from attnlib.flash_triton import Setting, split
from attnlib.flash_triton.attention import triton_backward, triton_forward

if importlib.util.find_spec("triton") is None:
    if os.environ.get("CI") and sys.platform == "linux":
        pytest.fail("no triton found, but CI has to run the kernels", pytrace=False)
    pytest.skip("no triton found", allow_module_level=True)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Of 16 queries and 16 keys: short examples have several."""
    small = Setting(16, 16, 1, 1)
    monkeypatch.setattr("attnlib.flash_triton.settings.SETTING_INTERPRETED", small)


@pytest.fixture
def same_bits():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(queries, keys, heads=(1, 1), dim=8):
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(heads[0], queries, dim), (heads[1], keys, dim), (heads[1], keys, dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def agree(inputs, mask=None, **options):
    """Output, log-sum-exp and gradients against the tiles in float64; and the shares."""
    group = len(inputs[0]) // len(inputs[1])
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    wide = [exact[0], *(x.repeat_interleave(group, 0) for x in exact[1:])]
    added = mask.double() if mask is not None and mask.is_floating_point() else mask
    found = flash_attention_triton(
        *ours, mask, **options, return_lse=True, enable_gqa=group > 1
    )
    wanted = flash_attention(*wide, added, **options, return_lse=True)
    with torch.no_grad():
        shares = flash_decoding(
            *inputs, mask, **options, return_lse=True, enable_gqa=group > 1, splits=3
        )
    for a, b in zip(found + shares, wanted * 2, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)
    generator = torch.Generator().manual_seed(1)
    coming = [torch.randn(x.shape, generator=generator) for x in found]
    torch.autograd.backward(found, coming)
    torch.autograd.backward(wanted, [x.double() for x in coming])
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=5e-5, rtol=5e-5)


SIZES = [*((48, 48, w) for w in (1, 16, 17, 48)), (20, 45, 40), (45, 20, 19), (1, 40, 16)]
MORE = [*((48, 48, w) for w in (2, 33, 47)), (20, 45, 3), (45, 20, 3), (45, 20, 30)]
MORE += [(1, 40, 1), (17, 17, 5)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    SIZES + [pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in MORE],
)
def test_to_the_token(queries, keys, window, causal):
    """Full tiles and others, more keys and fewer, windows inside of a tile and beyond."""
    agree(draw(queries, keys), causal=causal, window=window)


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits(causal, same_bits):
    """dQ by its own walk along the keys."""
    agree(draw(40, 50), causal=causal, window=18)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_beside_a_mask(kind, causal):
    """Both have to allow a pair; one query is left with nothing."""
    mask = torch.rand(33, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[3] = False
    if kind == "additive":
        mask = torch.randn(33, 40).masked_fill(~mask, -torch.inf)
    agree(draw(33, 40), mask, causal=causal, window=9)


@pytest.mark.thorough("flash_triton")
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_heads_that_share(heads):
    agree(draw(20, 40, heads), causal=True, window=18)


@pytest.mark.thorough("flash_triton")
def test_tiles_of_other_sizes(monkeypatch):
    for sizes, causal in (((16, 32), False), ((32, 16), True)):
        other = Setting(*sizes, 1, 1)
        monkeypatch.setattr("attnlib.flash_triton.settings.SETTING_INTERPRETED", other)
        agree(draw(34, 50), causal=causal, window=21)


@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_what_nobody_sees_is_not_read(causal, walks):
    """The keys before all windows are no numbers, nor are their values."""
    torch.use_deterministic_algorithms(walks)
    query, key, value = draw(20, 100)
    early = 100 - 20 - 18 + 1  # the first key that the first query sees is 63
    for x in (key, value):
        x[:, : early // 16 * 16] = torch.nan
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output = flash_attention_triton(*inputs, causal=causal, window=18)
    assert output.isfinite().all()
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    assert (key.grad[:, :48] == 0).all() and (key.grad[:, 63:] != 0).all()
    assert (
        flash_decoding(*(x.detach() for x in inputs), causal=causal, window=18)
        .isfinite()
        .all()
    )
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("walks", [False, True])
def test_a_query_does_not_walk_beyond_its_window(walks):
    """Not causal: the first queries do not know that later keys are no numbers."""
    torch.use_deterministic_algorithms(walks)
    query, key, value = draw(48, 48)
    key[:, 32:] = value[:, 32:] = torch.nan  # queries 0 to 15 see the keys up to 19
    query.requires_grad_()
    output = flash_attention_triton(query, key, value, window=5)
    assert output[:, :16].isfinite().all() and output[:, 32:].isnan().all()
    output[:, :16].sum().backward()
    assert query.grad[:, :16].isfinite().all()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [False, True])
def test_a_key_does_not_walk_along_queries_that_do_not_see_it(causal):
    """Queries beyond the window of the first keys are no numbers; dK and dV do not know."""
    query, key, value = (x.requires_grad_() for x in draw(96, 96))
    output = flash_attention_triton(query, key, value, causal=causal, window=5)
    coming = torch.ones_like(output)
    wanted = torch.autograd.grad(output, (key, value), coming)
    with torch.no_grad():
        broken = query.clone()
        broken[:, 32:64] = torch.nan  # seen by none of the keys 0 to 15, and 80 to 95
    broken.requires_grad_()
    output = flash_attention_triton(broken, key, value, causal=causal, window=5)
    found = torch.autograd.grad(output, (key, value), coming)
    for a, b in zip(found, wanted, strict=True):
        for seen in (slice(0, 16), slice(80, 96)):
            torch.testing.assert_close(a[:, seen], b[:, seen])


def test_shares_are_of_what_the_window_leaves(monkeypatch):
    """Of ten blocks of 16 keys, the last three; each share has one, and sees some key."""
    levels, chosen, launch = [], [], split.launch

    def spy(kernel, programs, device, **given):
        launch(kernel, programs, device, **given)
        levels.append(given["levels"])

    monkeypatch.setattr(split, "launch", spy)
    monkeypatch.setattr(split, "choose_splits", lambda *given: chosen.append(given[1]) or 3)
    flash_decoding(*draw(1, 160), causal=True, window=40)
    assert chosen == [3] and levels[0].shape[-1] == 3 and levels[0].isfinite().all()


def test_the_widest_window_gives_the_same_bits():
    """As none: nothing is compared, and the programs are those without."""
    inputs = draw(40, 50)
    for causal, widest in ((True, 50), (False, 50)):
        plain = flash_attention_triton(*inputs, causal=causal)
        for window in (widest, 2**40):
            found = flash_attention_triton(*inputs, causal=causal, window=window)
            assert torch.equal(found, plain)


def test_as_a_backend_and_an_operator(as_shipped):
    inputs = [x.requires_grad_() for x in draw(20, 30)]
    expected = flash_attention(*inputs, causal=True, window=7)
    output, _ = FlashAttention(causal=True, window=7, backend="triton")(*inputs)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
    four = [x.detach()[None] for x in inputs]
    torch.library.opcheck(triton_forward, (*four, None, True, 0.25, 7))
    leaves = [x.clone().requires_grad_() for x in four]
    torch.library.opcheck(triton_forward, (*leaves, None, True, 0.25, 7))
    output, lse = triton_forward(*four, None, True, 0.25, 7)
    tensors = (*four, None, output, lse, output, lse)
    torch.library.opcheck(triton_backward, (*tensors, True, 0.25, True, True, 7))


@pytest.mark.parametrize("attend", [flash_attention_triton, flash_decoding])
@pytest.mark.parametrize(
    ("window", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)],
)
def test_refusals(attend, window, error, as_shipped):
    with pytest.raises(error, match=r"^window: expected None or an integer of at least 1"):
        attend(*draw(2, 3), window=window)
