"""Caches whose memory, padding or room is not what it seems."""

import pytest
import torch

import drawn
from attnlib import (
    KVCache,
    LanguageModel,
    LatentAttention,
    MultiHeadAttention,
    PagedCache,
    ScaledDotProductAttention,
    WindowCache,
)
from attnlib.online_softmax import add_sink
from drawn import close, normal

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
SHARED = r"cache: expected one of its own for each block, got one that several share"


def model(**options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "num_heads": 4, "num_layers": 3}
    return LanguageModel(11, 20, **sizes, **options).eval().double()


@torch.no_grad()
def test_one_cache_for_several_blocks_is_refused():
    for one in (KVCache(9), WindowCache(9)):
        with pytest.raises(ValueError, match=SHARED):
            model()(IDS, cache=[one] * 3)
        with pytest.raises(ValueError, match=SHARED):
            model().generate(IDS, 2, cache=[one, KVCache(9), one])
    pool = PagedCache(pages=20, page_size=2)
    two = [pool.open(), pool.open()]
    with pytest.raises(ValueError, match=SHARED):
        model()(IDS, cache=[pool.view(two) for _ in range(3)])
    assert not len(pool.view(two)), "nothing was written"


@torch.no_grad()
def test_a_pool_may_serve_all_blocks_with_sequences_of_their_own():
    pool = PagedCache(pages=20, page_size=2)
    views = [pool.view([pool.open(), pool.open()]) for _ in range(3)]
    made, ours = model(), model()
    close(made(IDS, cache=views), ours(IDS), atol=1e-12)


@torch.no_grad()
def test_with_windows_and_turning_positions_a_text_goes_on():
    """Beyond context_length, where each head sees a window of it at most."""
    near = ScaledDotProductAttention(causal=True, window=4)
    made = model(attention=near, positions="rotary")
    longer = model(attention=near, positions="rotary")
    longer.context_length = 60
    rings = [WindowCache(4) for _ in made.blocks]
    text = made.generate(IDS, 40, temperature=0.0, cache=rings)
    assert torch.equal(text, longer.generate(IDS, 40, temperature=0.0))
    assert len(rings[0]) == 44 > made.context_length
    for other in ({"positions": "rotary"}, {"attention": near}):
        with pytest.raises(ValueError, match="length: expected at most"):
            model(**other).generate(IDS, 40, cache=True)


def uneven(blocks=3):
    """Views of two sequences of 5 and 3 tokens, read one by one."""
    made, caches = model(), [PagedCache(pages=8, page_size=2) for _ in range(blocks)]
    with torch.no_grad():
        for row in (IDS[0], IDS[1, 2:]):
            (number,) = {cache.open() for cache in caches}
            made(row, cache=[cache.view(number) for cache in caches])
    return made, [cache.view([0, 1]) for cache in caches]


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, [0, 0], [2, 0], [0, 1]])
def test_padding_that_a_view_knows_cannot_be_forgotten(padding):
    made, views = uneven()
    with pytest.raises(ValueError, match=r"padding: expected to be told of .* \[0, 2\]"):
        made(torch.tensor([[7], [8]]), cache=views, padding=padding)
    assert len(views[0]) == 5, "nothing was written"
    new = torch.tensor([[7], [8]])
    logits = made(new, cache=views, padding=views[0].padding)
    alone = made(torch.cat([IDS[1, 2:], new[1]])[None])
    close(logits[1, -1], alone[0, -1], atol=1e-12)


@torch.no_grad()
def test_a_layer_asks_for_the_mask():
    layer = MultiHeadAttention(16, 4).double()
    _, (view, *_) = uneven()
    view = PagedCache(pages=8, page_size=2)
    for tokens in (3, 2):
        layer(normal(tokens, 16), cache=view.view(view.open()))
    with pytest.raises(ValueError, match=r"mask: expected to be told of .*\[0, 1\]"):
        layer(normal(2, 1, 16), cache=view.view([0, 1]))


@torch.no_grad()
def test_latent_attention_on_sequences_of_different_length():
    torch.manual_seed(0)
    layer = LatentAttention(12, 3, 5, 2).double()
    x, pool = normal(2, 5, 12), PagedCache(pages=8, page_size=2)
    lengths = (4, 2)
    for row, length in zip(x, lengths, strict=True):
        layer(row[:length], cache=pool.view(pool.open()))
    new = torch.stack([x[0, 4:], x[1, 2:3]])
    both = pool.view([0, 1])
    with pytest.raises(ValueError, match=r"positions: expected to be told of .*\[0, 2\]"):
        layer(new, cache=both)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., :2] = False
    with pytest.raises(ValueError, match="mask: expected to be told of"):
        layer(new, cache=both, positions=torch.tensor([[4], [2]]))
    output, _ = layer(new, mask, cache=both, positions=torch.tensor([[4], [2]]))
    close(output[0], layer(x[0])[0][4:], atol=1e-12)
    close(output[1], layer(x[1, :3])[0][2:], atol=1e-12)


def test_absorbed_attention_copies_no_row(monkeypatch):
    """All heads share one key: no tensor of heads × keys × d_latent is made."""
    layer, cache = LatentAttention(64, 8, 32, 4), KVCache(1000)
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            parts = out if isinstance(out, tuple | list) else [out]
            largest.extend(
                x.untyped_storage().nbytes() for x in parts if torch.is_tensor(x)
            )
            return out

    with torch.no_grad():
        layer(torch.randn(1, 999, 64), cache=cache)
        with Sizes():
            layer(torch.randn(1, 1, 64), need_weights=False, cache=cache)
    assert max(largest) <= 4 * 1000 * (32 + 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sink_keeps_dtypes(dtype):
    output, lse = torch.randn(3, 5, 4).to(dtype), torch.randn(3, 5)
    merged, total = add_sink(output, lse, torch.tensor([[0.5], [1.0], [-1.0]]))
    assert merged.dtype == dtype and total.dtype == torch.float32
    share = torch.sigmoid(lse - torch.tensor([[0.5], [1.0], [-1.0]]))
    drawn.close(merged.float(), output.float() * share[..., None], atol=1e-2)


@pytest.mark.parametrize("shape", [(3,), (5,), (3, 5), (1, 5), (2, 1), (2, 3, 1)])
def test_a_sink_for_each_query_is_refused(shape):
    with pytest.raises(ValueError, match=r"sink: expected one number, or \(heads, 1\)"):
        add_sink(torch.randn(3, 5, 4), torch.randn(3, 5), torch.zeros(shape))
