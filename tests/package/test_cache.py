"""The cache: any split gives the same, texts token for token, the suite, refusals."""

import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    FlashAttention,
    KVCache,
    LanguageModel,
    LearnedBiasAttention,
    MultiHeadAttention,
    RotaryPositions,
    ScaledDotProductAttention,
    TransformerBlock,
)
from attnlib.testing import check_cache
from attnlib.transformer import padded_places

SIZES = {"vocab_size": 11, "context_length": 20, "embed_dim": 16, "num_heads": 2}
HEADS = {
    "fused": ScaledDotProductAttention(causal=True),
    "flash": FlashAttention(causal=True),
    "tiles": FlashAttention(causal=True, backend="torch", block_size=4),
    "bias": LearnedBiasAttention(2, 8, causal=True),
    "one a head": [ScaledDotProductAttention(causal=True), FlashAttention(causal=True)],
}


def small_model(**options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**SIZES, num_layers=3, **options).double().eval()


def caches(model, capacity=20):
    return [KVCache(capacity) for _ in model.blocks]


def by_formula(layer, x):
    """Causal attention of tokens (n, d) with every head, as a loop over query and key."""
    q, k, v = (x @ p.W + p.b for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    width = x.shape[-1] // layer.num_heads
    rows = []
    for n in range(len(x)):
        heads = []
        for h in range(layer.num_heads):
            part = slice(h * width, (h + 1) * width)
            scores = [q[n, part] @ k[j, part] / math.sqrt(width) for j in range(n + 1)]
            heads.append(torch.stack(scores).softmax(0) @ v[: n + 1, part])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ layer.out_proj.W + layer.out_proj.b


# ── the class ────────────────────────────────────────────────────────────────────────


def test_the_suite_passes(as_shipped):
    check_cache(KVCache)


@given(st.data())
def test_any_appends_and_truncations_are_a_list(data):
    """A cache and a plain list of tokens, given the same random commands."""
    capacity = data.draw(st.integers(1, 9))
    cache, told = KVCache(capacity), []
    for count in range(12):
        if data.draw(st.booleans()):
            size = data.draw(st.integers(0, 4))
            rows = [[count + i / 8, -count] for i in range(size)]
            piece = torch.tensor(rows, dtype=torch.float64).reshape(1, size, 2)
            if len(told) + size > capacity:
                with pytest.raises(ValueError, match=r"^key: expected at most"):
                    cache.append(piece, piece[..., :1])
            else:
                told += rows
                keys, values = cache.append(piece, piece[..., :1])
                assert keys.reshape(-1, 2).tolist() == told
                assert values.reshape(-1).tolist() == [row[0] for row in told]
        else:
            length = data.draw(st.integers(0, len(told)))
            cache.truncate(length)
            told = told[:length]
        assert len(cache) == len(told)


def test_memory():
    cache = KVCache(10)
    assert cache.nbytes == 0 and repr(cache) == "KVCache(capacity=10), 0 tokens"
    key, value = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 5)
    cache.append(key, value)
    assert cache.nbytes == 4 * 2 * 3 * 10 * (8 + 5)
    where = cache.keys.data_ptr()
    keys, _ = cache.append(key, value)
    assert keys.data_ptr() == where  # a view, not a copy
    cache.truncate(0)
    cache.append(key, value)
    assert cache.keys.data_ptr() == where  # the memory of the same kind is used again
    assert repr(cache) == "KVCache(capacity=10), 4 tokens"
    for other in (key.double(), key[:1], key.to("meta")):
        cache.truncate(0)
        keys, _ = cache.append(other, other)
        assert (keys.dtype, keys.shape, keys.device) == (
            *(other.dtype, other.shape, other.device),
        )


def test_a_cache_made_in_inference_mode_is_used_outside():
    cache, x = KVCache(4), torch.ones(2, 3)
    with torch.inference_mode():
        cache.append(x, x)
    keys, _ = cache.append(x, x)
    assert keys.tolist() == torch.ones(4, 3).tolist()


# ── the suite refuses ────────────────────────────────────────────────────────────────


class Reversed(KVCache):
    def append(self, key, value):
        keys, values = super().append(key, value)
        return keys.flip(-2), values


class Rolling(KVCache):
    def append(self, key, value):
        over = self.length + key.shape[-2] - self.capacity
        if self.length and over > 0:
            old = [x[..., over : self.length, :].clone() for x in (self.keys, self.values)]
            self.truncate(0)
            super().append(*old)
        return super().append(key, value)


class Everything(KVCache):
    def append(self, key, value):
        super().append(key, value)
        return self.keys, self.values


class OnlyNew(KVCache):
    def append(self, key, value):
        super().append(key, value)
        return key, value


class NoValues(KVCache):
    def append(self, key, value):
        keys, _ = super().append(key, value)
        return keys, keys[..., : value.shape[-1]]


class Rounded(KVCache):
    def append(self, key, value):
        keys, values = super().append(key, value)
        return keys.bfloat16().to(keys.dtype), values


class Float32(KVCache):
    def append(self, key, value):
        keys, values = super().append(key, value)
        return keys.float(), values.float()


class ByReference(KVCache):
    def append(self, key, value):
        super().append(key, value)
        first = self.length == key.shape[-2]
        self.pieces = [*([] if first else self.pieces), (key, value)]
        return tuple(torch.cat(parts, dim=-2) for parts in zip(*self.pieces, strict=True))


class Scratch(KVCache):
    """Returns a view of one scratch memory, filled anew at each call."""

    def append(self, key, value):
        keys, values = super().append(key, value)
        if not hasattr(self, "scratch") or self.scratch[0].shape != self.keys.shape:
            self.scratch = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        for memory, new in zip(self.scratch, (keys, values), strict=True):
            memory.zero_()
            memory[..., memory.shape[-2] - self.length :, :] = new
        return tuple(
            memory[..., memory.shape[-2] - self.length :, :] for memory in self.scratch
        )


class WritesInputs(KVCache):
    def append(self, key, value):
        returned = super().append(key, value)
        key.mul_(2)
        return returned


class Counter(KVCache):
    def __len__(self):
        return self.capacity


class Calls(KVCache):
    calls = 0

    def append(self, key, value):
        self.calls += 1
        return super().append(key, value)

    def __len__(self):
        return self.calls


class Shared(KVCache):
    memory: ClassVar[dict] = {}

    def __init__(self, capacity):
        self.__dict__ = Shared.memory.setdefault(capacity, {})
        if not self.__dict__:
            super().__init__(capacity)


class ForgetsNothing(KVCache):
    def truncate(self, length):
        if length > self.length or length < 0:
            super().truncate(length)


class FromTheFront(KVCache):
    def truncate(self, length):
        drop, old = self.length - length, self.length
        super().truncate(length)
        for x in (self.keys, self.values):
            if x is not None and drop:
                x[..., :length, :] = x[..., drop:old, :].clone()


class AnyLength(KVCache):
    def truncate(self, length):
        self.length = max(0, min(length, self.length))


class KeepsItsBatch(KVCache):
    def append(self, key, value):
        if self.keys is not None and key.dim() != self.keys.dim():
            raise ValueError("key: expected the batch of before")
        return super().append(key, value)


class Loose(KVCache):
    """Repeats one sequence for the whole batch."""

    def append(self, key, value):
        if self.length and key.dim() > 2:
            key = key.expand(*self.keys.shape[:-2], *key.shape[-2:])
            value = value.expand(*self.values.shape[:-2], *value.shape[-2:])
        return super().append(key, value)


class Casts(KVCache):
    def append(self, key, value):
        if self.length and key.is_floating_point():
            key, value = key.to(self.keys.dtype), value.to(self.values.dtype)
        return super().append(key, value)


class CountsTheRefused(KVCache):
    def append(self, key, value):
        before = self.length
        self.length += key.shape[-2]
        if self.length > self.capacity:
            raise ValueError("key: no room")
        self.length = before
        return super().append(key, value)


class Nameless(KVCache):
    def append(self, key, value):
        try:
            return super().append(key, value)
        except ValueError as error:
            raise ValueError("something does not fit") from error


class WrongError(KVCache):
    def append(self, key, value):
        try:
            return super().append(key, value)
        except ValueError as error:
            raise RuntimeError(f"key: {error}") from error


class AnyCapacity(KVCache):
    def __init__(self, capacity):
        super().__init__(max(1, int(capacity)))


class Detaches(KVCache):
    def append(self, key, value):
        return super().append(key.detach(), value.detach())


BROKEN = {
    Reversed: "the keys are not what was appended",
    Rolling: "key, one token too many: accepted",
    Everything: "the keys have shape",
    OnlyNew: "the keys have shape",
    NoValues: "the values are not what was appended",
    Rounded: "the keys are not what was appended",
    Float32: "the keys have dtype torch.float32",
    ByReference: "after the inputs were changed from outside",
    Scratch: "what append 0 returned has changed",
    WritesInputs: "append wrote to its inputs",
    Counter: "a new cache has len 8",
    Calls: "len is 1, not 4",
    Shared: "a cache shares what it holds|a new cache has len",
    ForgetsNothing: "after truncate",
    FromTheFront: "after truncate and append, the keys are not",
    AnyLength: "length, 7: accepted",
    KeepsItsBatch: "expected the batch of before",
    Loose: "key, another batch: raised RuntimeError",
    Casts: "key, keys of another dtype: accepted",
    CountsTheRefused: "refused, but the length has changed",
    Nameless: "the error does not name key",
    WrongError: "raised RuntimeError; expected ValueError",
    AnyCapacity: "capacity, 0: accepted",
    Detaches: "a gradient that would be lost",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_suite_refuses(broken, as_shipped):
    kind = ValueError if broken is KeepsItsBatch else AssertionError
    with pytest.raises(kind, match=BROKEN[broken]):
        check_cache(broken)


def test_the_suite_wants_a_cache(as_shipped):
    with pytest.raises(AssertionError, match="does not make a CacheLike"):
        check_cache(lambda capacity: [])


# ── attention ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 1, 2, 1), (1, 6), (6, 1)])
def test_any_split_gives_the_same(heads, sizes):
    torch.manual_seed(1)
    layer = MultiHeadAttention(16, 2, HEADS[heads]).double()
    x, cache = torch.randn(2, 7, 16, dtype=torch.float64), KVCache(7)
    with torch.no_grad():
        whole, weights = layer(x)
        parts = [layer(part, cache=cache) for part in x.split(sizes, dim=1)]
    output = torch.cat([part for part, _ in parts], dim=1)
    torch.testing.assert_close(output, whole, rtol=0, atol=1e-12)
    if heads in ("fused", "bias"):
        for mine, theirs in zip(parts[-1][1], weights, strict=True):
            last = theirs[:, -sizes[-1] :]
            torch.testing.assert_close(mine, last, rtol=0, atol=1e-12)


def test_against_the_formula():
    torch.manual_seed(2)
    layer = MultiHeadAttention(12, 3, ScaledDotProductAttention(causal=True)).double()
    x, cache = torch.randn(6, 12, dtype=torch.float64), KVCache(6)
    with torch.no_grad():
        expected = by_formula(layer, x)
        found = torch.cat([layer(x[t : t + 1], cache=cache)[0] for t in range(6)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_block(norm_first):
    heads = ScaledDotProductAttention(causal=True)
    block = TransformerBlock(16, 2, attention=heads, norm_first=norm_first).double()
    x, cache = torch.randn(2, 5, 16, dtype=torch.float64), KVCache(5)
    with torch.no_grad():
        whole, all_weights = block(x, return_weights=True)
        block(x[:, :3], cache=cache)
        rest, weights = block(x[:, 3:], return_weights=True, cache=cache)
    torch.testing.assert_close(rest, whole[:, 3:], rtol=0, atol=1e-12)
    torch.testing.assert_close(weights[0], all_weights[0][:, 3:], rtol=0, atol=1e-12)


def test_keys_of_their_own_beside_rotary_are_refused():
    layer = MultiHeadAttention(16, 2, HEADS["fused"], rotary=RotaryPositions(8))
    x, other = torch.randn(2, 1, 4, 16)
    with pytest.raises(ValueError, match="key: expected None beside rotary and a cache"):
        layer(x, other, cache=KVCache(9))


def test_under_autocast_the_cache_has_its_dtype():
    model, ids = small_model().float(), torch.arange(6)
    held = caches(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = model(ids)
        parts = [model(part, cache=held) for part in ids.split(2)]
    assert held[0].keys.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0.05, atol=0.1)


# ── the model ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "sinusoidal"},
        {"positions": "rotary"},
        {"norm_first": False},
        {"heads": "flash"},
    ],
)
def test_logits_in_pieces(options):
    options = dict(options)
    if "heads" in options:
        options = {"attention": HEADS[options["heads"]]}
    model, ids = small_model(**options), torch.randint(11, (2, 9))
    with torch.no_grad():
        whole = model(ids)
        for sizes in ((9,), (4, 5), (1,) * 9, (5, 1, 3)):
            held = caches(model, 9)
            parts = [model(part, cache=held) for part in ids.split(sizes, dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}])
@pytest.mark.parametrize("padding", [None, [0, 2, 4]])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_same_text_token_for_token(options, padding, positions):
    model = small_model(positions=positions)
    for shape in ((3, 5), (5,)):
        if padding and len(shape) == 1:
            continue
        start = torch.randint(11, shape)
        texts = []
        for cache in (False, True, caches(model)):
            luck = torch.Generator().manual_seed(1)
            given = {**options, "generator": luck, "padding": padding}
            texts.append(model.generate(start, 16, cache=cache, **given))
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_padded_sequences_are_written_as_if_alone(cache, positions):
    model, padding = small_model(positions=positions), torch.tensor([3, 0, 1])
    start = torch.randint(11, (3, 6))
    texts = model.generate(start, 15, temperature=0.0, cache=cache, padding=padding)
    changed = start.clone()
    changed[0, :3] = changed[2, 0] = 10  # what stands in the padding does not matter
    same = model.generate(changed, 15, temperature=0.0, cache=cache, padding=padding)
    for row, front in enumerate(padding.tolist()):
        alone = model.generate(start[row, front:], 15, temperature=0.0)
        assert torch.equal(texts[row, front:], alone)
        assert torch.equal(same[row, front:], alone)


def test_padding_leaves_the_window():
    model, padding = small_model(), [0, 2, 4]
    start = torch.randint(11, (3, 5))
    texts = model.generate(start, 30, temperature=0.0, padding=padding)
    for row, front in enumerate(padding):
        alone = model.generate(start[row, front:], 30, temperature=0.0)
        assert torch.equal(texts[row, front:], alone)


def test_padded_places():
    places, mask = padded_places(torch.tensor([0, 2]), 1, 4)
    assert places.tolist() == [[1, 2, 3], [0, 0, 1]]
    assert mask.shape == (2, 1, 1, 4)
    assert mask[:, 0, 0].tolist() == [[True] * 4, [False, False, True, True]]


def test_a_talk_goes_on():
    """A prompt read in pieces, an answer, more words: nothing is computed twice."""
    model, ids, seen = small_model(), torch.randint(11, (1, 8)), []
    model.token_embedding.register_forward_hook(lambda m, x, y: seen.append(x[0].shape[-1]))
    held = caches(model)
    with torch.no_grad():
        for part in ids[:, :6].split(3, dim=1):
            model(part, cache=held)
    text = model.generate(ids, 4, temperature=0.0, cache=held)
    assert len(held[0]) == 11 and seen == [3, 3, 2, 1, 1, 1]
    assert torch.equal(text, model.generate(ids, 4, temperature=0.0))
    for one in held:
        one.truncate(8)
    more = torch.cat([text[:, :8], torch.tensor([[1, 2]])], dim=1)
    with_cache = model.generate(more, 4, temperature=0.0, cache=held)
    assert torch.equal(with_cache, model.generate(more, 4, temperature=0.0))


def test_the_last_place_is_used():
    model, start = small_model(), torch.randint(11, (4,))
    text = model.generate(start, 17, temperature=0.0, cache=True)  # reads 20 of 20
    assert torch.equal(text, model.generate(start, 17, temperature=0.0))
    assert torch.equal(model.generate(start, 0, cache=True), start)


# ── refusals ─────────────────────────────────────────────────────────────────────────

MODEL = small_model()
ONE, TWO = torch.ones(4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
KEY, VALUE = torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2, 5)


def filled(capacity=4):
    cache = KVCache(capacity)
    cache.append(KEY, VALUE)
    return cache


def uneven():
    held = caches(MODEL)
    held[1].append(KEY, VALUE)
    return held


def after(tokens, capacity=20):
    held = caches(MODEL, capacity)
    with torch.no_grad():
        MODEL(ONE[:tokens], cache=held)
    return held


REFUSED = {
    "capacity 0": (lambda: KVCache(0), ValueError, "capacity: expected at least 1, got 0"),
    "capacity 2.5": (
        lambda: KVCache(2.5),
        TypeError,
        "capacity: expected a whole number, got 2.5",
    ),
    "capacity True": (
        lambda: KVCache(True),
        TypeError,
        "capacity: expected a whole number, got True",
    ),
    "a list": (
        lambda: filled().append([1.0], VALUE),
        TypeError,
        "key: expected a floating-point tensor, got list",
    ),
    "integers": (
        lambda: filled().append(KEY, VALUE.long()),
        TypeError,
        "value: expected a floating-point tensor, got torch.int64",
    ),
    "one dimension": (
        lambda: KVCache(3).append(KEY[0, 0, 0], VALUE),
        ValueError,
        "key: expected at least 2 dimensions (tokens, features), got shape (8,)",
    ),
    "another batch": (
        lambda: filled().append(KEY[:1], VALUE[:1]),
        ValueError,
        "key: expected leading dimensions (2, 3) as the cache, got shape (1, 3, 2, 8)",
    ),
    "other heads": (
        lambda: filled().append(KEY[:, :1], VALUE[:, :1]),
        ValueError,
        "key: expected leading dimensions (2, 3) as the cache, got shape (2, 1, 2, 8)",
    ),
    "another width": (
        lambda: filled().append(KEY[..., :7], VALUE),
        ValueError,
        "key: expected 8 features as the cache, got shape (2, 3, 2, 7)",
    ),
    "another dtype": (
        lambda: filled().append(KEY, VALUE.double()),
        TypeError,
        "value: expected torch.float32 as the cache, got torch.float64",
    ),
    "another device": (
        lambda: filled().append(KEY.to("meta"), VALUE),
        ValueError,
        "key: expected device cpu as the cache, got meta",
    ),
    "mixed at first": (
        lambda: KVCache(3).append(KEY, VALUE.double()),
        TypeError,
        "value: expected torch.float32 as key, got torch.float64",
    ),
    "other values": (
        lambda: KVCache(3).append(KEY, VALUE[..., :1, :]),
        ValueError,
        "value: expected 2 tokens as key, got shape (2, 3, 1, 5)",
    ),
    "no room": (
        lambda: filled(3).append(KEY, VALUE),
        ValueError,
        "key: expected at most 1 more tokens, since the cache is full then, got 2",
    ),
    "a gradient": (
        lambda: KVCache(3).append(KEY, VALUE.clone().requires_grad_()),
        ValueError,
        "value: expected no gradient, since a cache is written in place; call the model "
        "within torch.no_grad()",
    ),
    "truncate to more": (
        lambda: filled().truncate(3),
        ValueError,
        "length: expected between 0 and 2, got 3",
    ),
    "truncate to a half": (
        lambda: filled().truncate(0.5),
        TypeError,
        "length: expected a whole number, got 0.5",
    ),
    "one cache for all": (
        lambda: MODEL(ONE, cache=KVCache(4)),
        TypeError,
        "cache: expected a list of caches, one a block, got KVCache(capacity=4), 0 tokens",
    ),
    "a list of something": (
        lambda: MODEL(ONE, cache=[1, 2, 3]),
        TypeError,
        "cache: expected a list of caches, one a block, got [1, 2, 3]",
    ),
    "too few": (
        lambda: MODEL(ONE, cache=caches(MODEL)[:2]),
        ValueError,
        "cache: expected 3, one for each block, got 2",
    ),
    "of different lengths": (
        lambda: MODEL(ONE, cache=uneven()),
        ValueError,
        "cache: expected the same tokens in each, got lengths [0, 2, 0]",
    ),
    "past the capacity": (
        lambda: MODEL(ONE, cache=after(2, capacity=5)),
        ValueError,
        "ids: expected at most 3 tokens after the 2 in the cache, which with "
        "context_length has room for 5, got 4",
    ),
    "past the context": (
        lambda: MODEL(torch.ones(17, dtype=torch.int64), cache=after(4, capacity=99)),
        ValueError,
        "ids: expected at most 16 tokens after the 4 in the cache, which with "
        "context_length has room for 20, got 17",
    ),
    "a text too long": (
        lambda: MODEL.generate(ONE, 18, cache=True),
        ValueError,
        "length: expected at most 17 with a cache, as the model or its cache has room for "
        "20 tokens and ids has 4, got 18",
    ),
    "a text too long for its caches": (
        lambda: MODEL.generate(ONE, 4, cache=caches(MODEL, 6)),
        ValueError,
        "length: expected at most 3 with a cache, as the model or its cache has room for "
        "6 tokens and ids has 4, got 4",
    ),
    "nothing new": (
        lambda: MODEL.generate(ONE, 4, cache=after(4)),
        ValueError,
        "ids: expected more than the 4 tokens in the cache, which begin it, got shape (4,)",
    ),
    "another sequence count": (
        lambda: MODEL(TWO, padding=[1]),
        ValueError,
        "padding: expected one number for each sequence of ids (batch, tokens), got shape "
        "(1,) for ids of shape (2, 4)",
    ),
    "padding without a batch": (
        lambda: MODEL(ONE, padding=[1]),
        ValueError,
        "padding: expected one number for each sequence of ids (batch, tokens), got shape "
        "(1,) for ids of shape (4,)",
    ),
    "padding below 0": (
        lambda: MODEL(TWO, padding=[1, -1]),
        ValueError,
        "padding: expected numbers of at least 0, got [1, -1]",
    ),
    "only padding": (
        lambda: MODEL.generate(TWO, 2, padding=[0, 4]),
        ValueError,
        "padding: expected numbers between 0 and 3, got [0, 4]",
    ),
    "half a column": (
        lambda: MODEL(TWO, padding=[0.5, 1.0]),
        TypeError,
        "padding: expected whole numbers, got [0.5, 1.0]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, as_shipped):
    call, kind, message = REFUSED[case]
    with torch.set_grad_enabled(case == "a gradient"), pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_a_refused_call_leaves_the_caches_alone(as_shipped):
    held = after(4, capacity=6)
    with torch.no_grad(), pytest.raises(ValueError, match="ids: expected at most 2"):
        MODEL(ONE, cache=held)
    assert [len(one) for one in held] == [4, 4, 4]
