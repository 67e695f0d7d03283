"""Everything lies where the inputs lie: on a GPU, and on a device that this machine plays.

The played device computes on the CPU. Its tensors say that they lie on "meta", and an
operation that mixes them with others is refused, as a GPU refuses it.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attnlib import (
    GPT2,
    CausalAttention,
    FeedForwardNetwork,
    FlashAttention,
    GatedFeedForward,
    KVCache,
    LatentAttention,
    LayerNorm,
    LearnedBiasAttention,
    Llama,
    LlamaConfig,
    MultiHeadAttention,
    PagedCache,
    PhysicsGuidedAttention,
    Projection,
    RMSNorm,
    RotaryPositions,
    ScaledDotProductAttention,
    SelfAttention,
    WindowCache,
    add_sink,
    block_state,
    causal_mask,
    flash_attention,
    fused_attention,
    mask_from_torch,
    merge_outputs,
    merge_states,
    online_attention,
    padding_mask,
    paged_attention,
    rotate,
    sample,
    split_attention,
    window_mask,
)
from drawn import draw, normal, small_model

# A copy crosses, and an index may lie on the CPU.
FREE = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")


class Elsewhere(torch.Tensor):
    """A tensor that says that it lies on another device."""

    @staticmethod
    def __new__(cls, real):
        at = {"strides": real.stride(), "storage_offset": real.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, dtype=real.dtype, device="meta", **at
        )
        made.held = real
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with Played():
            return function(*args, **(kwargs or {}))


class Played(TorchDispatchMode):
    """Computes where the tensors lie, and refuses to where they lie apart."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = [x for x in tensors if isinstance(x, Elsewhere)]
        here = [x for x in tensors if not isinstance(x, Elsewhere) and x.dim()]
        name = function.__name__.partition(".")[0]
        if there and here and name not in FREE:
            raise RuntimeError(f"{name}: tensors on two devices")
        device = kwargs.get("device")
        goes = bool(there) if device is None else torch.device(device).type == "meta"
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        real = {id(x.held): x for x in there}
        args, kwargs = tree_map_only(Elsewhere, lambda x: x.held, (args, kwargs))
        found = function(*args, **kwargs)
        if name == "copy_":
            goes = id(found) in real
        if not goes:
            return found
        return tree_map_only(
            torch.Tensor, lambda x: real[id(x)] if id(x) in real else Elsewhere(x), found
        )


def playing(x):
    """A tensor, or a module with all of its own, on the played device."""
    if not isinstance(x, nn.Module):
        return Elsewhere(x)
    for part in x.modules():
        for kept in (part._parameters, part._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    own = Elsewhere(tensor.detach())
                    kept[name] = nn.Parameter(own) if kept is part._parameters else own
    return x


IDS = torch.tensor([[1, 4, 2, 7, 3], [0, 0, 5, 9, 6]])
SIZES = {"vocab_size": 11, "context_length": 12, "embed_dim": 16, "num_heads": 2}


def drawn_with(kind, *arguments, **options):
    """A module whose numbers are the same each time, in float64."""
    torch.manual_seed(0)
    return kind(*arguments, **options).double().eval()


def heads(kind, **options):
    def case(on):
        query, key, value = (on(x) for x in draw(2, 2))
        head, allowed = on(drawn_with(kind, **options)), on(torch.rand(4, 6) < 0.8)
        added = on(normal(4, 6))
        yield head(query, key, value)[0]
        for mask in (None, allowed, added):
            yield head(query, key, value, mask, need_weights=False)[0]
        shared = (x[:, :1] for x in (key, value))
        yield head(query, *shared, enable_gqa=True, need_weights=False)[0]

    return case


def layer(kind, *arguments, **options):
    def case(on):
        made = on(drawn_with(kind, *arguments, **options))
        yield made(on(normal(2, 5, 16)))

    return case


def multi_head(on, **options):
    x, allowed = on(normal(2, 5, 16)), on(padding_mask([3, 5]))
    for given in ({}, {"num_kv_heads": 1}, {"rotary": RotaryPositions(8)}):
        causal = ScaledDotProductAttention(causal=True, window=3)
        made = on(drawn_with(MultiHeadAttention, 16, 2, causal, **given))
        yield made(x, mask=allowed)[0]
        caches = [KVCache(5), WindowCache(3)]
        for cache in caches:
            yield made(x[:, :3], need_weights=False, cache=cache)[0]
            yield made(x[:, 3:], need_weights=False, cache=cache)[0]


def latent(on):
    made, x = on(drawn_with(LatentAttention, 16, 2, 4, 2)), on(normal(2, 5, 16))
    cache = KVCache(5)
    yield made(x)
    yield made(x, on(padding_mask([3, 5])), absorb=True)
    yield made(x[:, :3], cache=cache)
    yield made(x[:, 3:], cache=cache)


def models(on):
    llama = LlamaConfig(**SIZES, num_layers=2, d_ff=8, num_kv_heads=1, head_norm=True)
    for made in (
        small_model(),
        small_model(positions="sinusoidal"),
        small_model(positions=RotaryPositions(8)),
        drawn_with(GPT2, **SIZES, num_layers=1),
        drawn_with(Llama, llama),
    ):
        model, ids = on(made.double().eval()), on(IDS)
        padding = on(torch.tensor([0, 2]))
        yield model(ids, padding=padding)
        yield model(ids, padding=[0, 2], last=1)
        for cache in (False, True):
            yield model.generate(ids, 3, temperature=0, cache=cache)
            yield model.generate(ids, 3, temperature=0, cache=cache, padding=padding)


def pages(on):
    cache = PagedCache(9, 2)
    first, second = cache.open(), cache.open()
    query, key, value = (on(x) for x in draw(2, 2, queries=2, keys=3))
    cache.append([first, second], key, value)
    cache.append(second, key[0], value[0])
    third = cache.fork(first)
    cache.append(third, key[0, :, :1], value[0, :, :1])
    for split in (None, 2):
        for given in ([first, second], cache.table([third, second])):
            yield paged_attention(query, cache, given, split_size=split)
    model = on(small_model().double().eval())
    caches = [PagedCache(20, 2) for _ in model.blocks]
    views = [c.view([c.open(), c.open()]) for c in caches]
    yield model.generate(on(IDS), 3, temperature=0, cache=views)


def functions(on):
    query, key, value = (on(x) for x in draw(2, 2))
    scores, mask = query @ key.mT, on(torch.rand(4, 6) < 0.8)
    yield causal_mask(4, 6, scores.device)
    yield window_mask(4, 6, 2, scores.device)
    yield padding_mask(on(torch.tensor([3, 5])))
    yield padding_mask([3, 5], 6, scores.device)
    yield mask_from_torch(on(torch.ones(4, 6) > 1), on(torch.rand(2, 6) < 0.3))
    for causal in (False, True):
        yield flash_attention(query, key, value, mask, causal=causal, window=3)
        yield fused_attention(query, key, value, mask, causal=causal, window=3)
        yield split_attention(query, key, value, mask, split_size=2, causal=causal)
    state = online_attention([(scores[..., :2], value[..., :2, :])])
    yield merge_states(state, block_state(scores[..., 2:], value[..., 2:, :])).output
    lse = scores.logsumexp(-1)
    yield merge_outputs((value[..., :4, :], lse), (query[..., :3], lse))
    yield add_sink(query, lse, on(normal(2, 1)))
    yield rotate(query, 2)
    yield rotate(query, on(torch.arange(4)))
    yield sample(scores[0, 0], temperature=0.0, top_k=2)


CASES = {
    "flash": heads(FlashAttention, causal=True, window=3),
    "heads": heads(ScaledDotProductAttention, causal=True, window=3),
    "learned bias": heads(LearnedBiasAttention, num_heads=2),
    "physics guided": heads(PhysicsGuidedAttention),
    **{f"flash {b}": heads(FlashAttention, backend=b) for b in ("torch", "fused", "auto")},
    "self-attention": layer(SelfAttention, 16, 3),
    "causal attention": layer(CausalAttention, 16, 3),
    "projection": layer(Projection, 16, 3),
    "norm": layer(LayerNorm, 16),
    "root mean square": layer(RMSNorm, 16),
    "feed forward": layer(FeedForwardNetwork, 16, 8),
    "gated": layer(GatedFeedForward, 16, 8),
    **{f.__name__: f for f in (multi_head, latent, models, pages, functions)},
}


def made_of_numbers(make):
    """`torch.tensor` or `torch.as_tensor`, for numbers in Python: no operation of those."""

    def call(data, *, device=None, **options):
        there = device is not None and torch.device(device).type == "meta"
        made = make(data, device="cpu" if there else device, **options)
        return Elsewhere(made) if there and not isinstance(made, Elsewhere) else made

    return call


@pytest.fixture(params=["played", "cuda"] if torch.cuda.is_available() else ["played"])
def device(request, monkeypatch):
    """How a thing gets there, the device's name, and how a tensor comes back."""
    if request.param == "played":
        for name in ("tensor", "as_tensor"):
            monkeypatch.setattr(torch, name, made_of_numbers(getattr(torch, name)))
        with Played():
            yield playing, "meta", lambda x: x.held
    else:
        yield lambda x: x.to("cuda"), "cuda", lambda x: x.cpu()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("case", CASES)
def test_everything_lies_where_the_inputs_lie(case, device):
    move, name, back = device
    with torch.no_grad():
        torch.manual_seed(0)
        expected = tree_leaves(list(CASES[case](lambda x: x)))
        torch.manual_seed(0)
        found = tree_leaves(list(CASES[case](move)))
    assert {x.device.type for x in found} == {name}
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(back(ours), exact, rtol=1e-9, atol=1e-9)


class Forgetful(ScaledDotProductAttention):
    """One that makes numbers without saying where, as a person would."""

    def attend(self, query, key, value, mask):
        near = torch.arange(key.shape[-2])
        output, weights = super().attend(query, key, value, mask)
        return output + (weights * near).sum(dim=-1, keepdim=True), weights


@pytest.mark.usefixtures("as_shipped")
def test_what_is_made_elsewhere_is_noticed(device):
    with pytest.raises(RuntimeError, match=r"two devices|same device"):
        list(heads(Forgetful)(device[0]))


@pytest.mark.usefixtures("as_shipped")
def test_an_emptied_cache_serves_another_device(device):
    """Its memory is made anew where the next tokens lie."""
    move, name, _ = device
    key, value = draw(2, 2, queries=3)[1:]
    plain, pages = KVCache(6), PagedCache(9, 2)
    for on in (lambda x: x, move):
        kept = plain.append(on(key), on(value))
        sequences = [pages.open(), pages.open()]
        kept += pages.view(sequences).append(on(key), on(value))
        plain.truncate(0)
        for sequence in sequences:
            pages.free(sequence)
    assert {x.device.type for x in kept} == {name}
