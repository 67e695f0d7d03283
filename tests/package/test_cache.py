"""The cache: any split gives the same, texts token for token, the suite, refusals."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import drawn
from attnlib import (
    FlashAttention,
    KVCache,
    LearnedBiasAttention,
    MultiHeadAttention,
    RotaryPositions,
    ScaledDotProductAttention,
    TransformerBlock,
)
from attnlib.testing import check_cache
from drawn import close, normal, refuses

HEADS = {
    "fused": ScaledDotProductAttention(causal=True),
    "flash": FlashAttention(causal=True),
    "tiles": FlashAttention(causal=True, backend="torch", block_size=4),
    "window": FlashAttention(causal=True, window=3),
    "bias": LearnedBiasAttention(2, 8, causal=True),
    "one a head": [ScaledDotProductAttention(causal=True), FlashAttention(causal=True)],
}


def small_model(**options):
    options = {"context_length": 20, "num_layers": 3} | options
    return drawn.small_model(**options).double().eval()


def caches(model, capacity=20):
    return [KVCache(capacity) for _ in model.blocks]


# ── the class ────────────────────────────────────────────────────────────────────────


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
            del told[data.draw(st.integers(0, len(told))) :]
            cache.truncate(len(told))
        assert len(cache) == len(told)


def test_memory():
    cache = KVCache(10)
    assert cache.nbytes == 0 and repr(cache) == "KVCache(capacity=10), 0 tokens"
    key, value = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 5)
    with torch.inference_mode():  # what is made in that mode can be used outside
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
        kind = (keys.dtype, keys.shape, keys.device)
        assert kind == (other.dtype, other.shape, other.device)


# ── the suite refuses ────────────────────────────────────────────────────────────────


def with_append(append):
    """A class of caches that append otherwise."""
    return type("Otherwise", (KVCache,), {"append": append})


def returning(change):
    """A cache that returns something else than what it holds."""
    return with_append(lambda self, *new: change(self, *new, *KVCache.append(self, *new)))


def taking(change):
    """A cache that takes something else than what it is given."""
    return with_append(lambda self, *new: KVCache.append(self, *change(self, *new)))


def raising(error, message):
    """A cache that refuses with another error."""

    def append(self, key, value):
        try:
            return KVCache.append(self, key, value)
        except ValueError as caught:
            raise error(message) from caught

    return with_append(append)


def write(cache, key, value, *returned):
    key.mul_(2)
    return returned


def repeat(cache, key, value):
    """One sequence, for the whole batch."""
    if not cache.length or key.dim() < 3:
        return key, value
    held = zip((key, value), (cache.keys, cache.values), strict=True)
    return [x.expand(*memory.shape[:-2], *x.shape[-2:]) for x, memory in held]


def cast(cache, key, value):
    if not cache.length or not key.is_floating_point():
        return key, value
    return key.to(cache.keys.dtype), value.to(cache.values.dtype)


def by_reference(cache, key, value, *returned):
    first = cache.length == key.shape[-2]
    cache.pieces = [*([] if first else cache.pieces), (key, value)]
    return tuple(torch.cat(parts, dim=-2) for parts in zip(*cache.pieces, strict=True))


def scratch(cache, key, value, *returned):
    """A view of one memory, filled anew at each call."""
    if not hasattr(cache, "scratch") or cache.scratch[0].shape != cache.keys.shape:
        cache.scratch = torch.zeros_like(cache.keys), torch.zeros_like(cache.values)
    views = [memory[..., memory.shape[-2] - cache.length :, :] for memory in cache.scratch]
    for memory, view, new in zip(cache.scratch, views, returned, strict=True):
        memory.zero_()
        view.copy_(new)
    return tuple(views)


class Rolling(KVCache):
    def append(self, key, value):
        over = self.length + key.shape[-2] - self.capacity
        if self.length and over > 0:
            old = [x[..., over : self.length, :].clone() for x in (self.keys, self.values)]
            self.truncate(0)
            super().append(*old)
        return super().append(key, value)


class Calls(KVCache):
    calls = 0

    def append(self, key, value):
        self.calls += 1
        return super().append(key, value)

    def __len__(self):
        return self.calls


class Shared(KVCache):
    memory = {}  # noqa: RUF012

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


class CountsTheRefused(KVCache):
    def append(self, key, value):
        before = self.length
        self.length += key.shape[-2]
        if self.length > self.capacity:
            raise ValueError("key: no room")
        self.length = before
        return super().append(key, value)


class AnyCapacity(KVCache):
    def __init__(self, capacity):
        super().__init__(max(1, int(capacity)))


OTHER_KEYS = "the keys are not what was appended"
BROKEN = {
    "reversed": (returning(lambda c, k, v, keys, values: (keys.flip(-2), values)),
                 OTHER_KEYS),
    "rolling": (Rolling, "key, one token too many: accepted"),
    "everything": (returning(lambda c, *_: (c.keys, c.values)), "the keys have shape"),
    "only new": (returning(lambda c, k, v, *_: (k, v)), "the keys have shape"),
    "no values": (returning(lambda c, k, v, keys, _: (keys, keys[..., : v.shape[-1]])),
                  "the values are not what was appended"),
    "rounded": (returning(lambda c, k, v, keys, values:
                          (keys.bfloat16().to(keys.dtype), values)), OTHER_KEYS),
    "float32": (returning(lambda c, k, v, *both: [x.float() for x in both]),
                "the keys have dtype torch.float32"),
    "by reference": (returning(by_reference), "after the inputs were changed from outside"),
    "scratch": (returning(scratch), "what append 0 returned has changed"),
    "writes": (returning(write), "append wrote to its inputs"),
    "counter": (type("Counter", (KVCache,), {"__len__": lambda self: self.capacity}),
                "a new cache has len 8"),
    "calls": (Calls, "len is 1, not 4"),
    "shared": (Shared, "a cache shares what it holds|a new cache has len"),
    "forgets nothing": (ForgetsNothing, "after truncate"),
    "from the front": (FromTheFront, "after truncate and append, the keys are not"),
    "any length": (AnyLength, "length, 7: accepted"),
    "keeps its batch": (KeepsItsBatch, "expected the batch of before"),
    "repeats": (taking(repeat), "key, another batch: raised RuntimeError"),
    "casts": (taking(cast), "key, keys of another dtype: accepted"),
    "counts the refused": (CountsTheRefused, "refused, but the length has changed"),
    "nameless": (raising(ValueError, "does not fit"), "the error does not name key"),
    "wrong error": (raising(RuntimeError, "key: "), "raised RuntimeError; expected Value"),
    "any capacity": (AnyCapacity, "capacity, 0: accepted"),
    "detaches": (taking(lambda c, *both: [x.detach() for x in both]),
                 "a gradient that would be lost"),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "words"), BROKEN.values(), ids=BROKEN)
def test_the_suite_refuses(broken, words, as_shipped):
    kind = ValueError if broken is KeepsItsBatch else AssertionError
    with pytest.raises(kind, match=words):
        check_cache(broken)


def test_the_suite_passes_and_wants_a_cache(as_shipped):
    check_cache(KVCache)
    with pytest.raises(AssertionError, match="does not make a CacheLike"):
        check_cache(lambda capacity: [])


# ── attention ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 1, 2, 1), (1, 6), (6, 1)])
def test_any_split_gives_the_same(heads, sizes):
    """Of a layer, and of a block with it, which passes the weights on."""
    torch.manual_seed(1)
    x, first = normal(2, 7, 16), len(sizes) % 2 == 0
    block = TransformerBlock(16, 2, attention=HEADS[heads], norm_first=first).double()
    for call in (block.attention, partial(block, return_weights=True)):
        with torch.no_grad():
            (whole, weights), cache = call(x), KVCache(7)
            parts = [call(part, cache=cache) for part in x.split(sizes, dim=1)]
        close(torch.cat([part for part, _ in parts], dim=1), whole)
        if heads in ("fused", "bias"):
            close(parts[-1][1], [w[:, -sizes[-1] :] for w in weights])


def test_under_autocast_the_cache_has_its_dtype():
    model, ids = small_model().float(), torch.arange(6)
    held = caches(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = model(ids)
        parts = [model(part, cache=held) for part in ids.split(2)]
    assert held[0].keys.dtype == torch.bfloat16
    close(torch.cat(parts), whole, rtol=0.05, atol=0.1)


# ── the model ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"positions": "sinusoidal"}, {"positions": "rotary"}, {"norm_first": False}),
        *({"attention": HEADS["flash"]}, {"attention": HEADS["window"]}),
    ],
)
def test_logits_in_pieces(options):
    model, ids = small_model(**options), torch.randint(11, (2, 9))
    with torch.no_grad():
        whole = model(ids)
        for sizes in ((9,), (4, 5), (1,) * 9, (5, 1, 3)):
            held = caches(model, 9)
            parts = [model(part, cache=held) for part in ids.split(sizes, dim=1)]
            close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}])
@pytest.mark.parametrize(
    ("shape", "padding"), [((5,), None), ((3, 5), None), ((3, 5), [0, 2, 4])]
)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_same_text_token_for_token(options, shape, padding, positions):
    """The last place of the cache is used, too: 20 of 20 tokens are read."""
    model, start, texts = small_model(positions=positions), torch.randint(11, shape), []
    for cache in (False, True, caches(model)):
        luck = torch.Generator().manual_seed(1)
        given = {**options, "generator": luck, "padding": padding}
        texts.append(model.generate(start, 16, cache=cache, **given))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert torch.equal(model.generate(start, 0, cache=True), start)


LEAVES = ("learned", False, 30)  # the padding leaves the window


@pytest.mark.parametrize(
    ("positions", "cache", "length"),
    [*itertools.product(("learned", "rotary"), (False, True), (15,)), LEAVES],
)
def test_padded_sequences_are_written_as_if_alone(positions, cache, length):
    model, padding = small_model(positions=positions), torch.tensor([4, 0, 2])
    start, options = torch.randint(11, (3, 5)), {"temperature": 0.0, "padding": padding}
    texts = model.generate(start, length, cache=cache, **options)
    changed = start.clone()
    changed[0, :4] = changed[2, :2] = 10  # what stands in the padding does not matter
    same = model.generate(changed, length, cache=cache, **options)
    for row, front in enumerate(padding.tolist()):
        alone = model.generate(start[row, front:], length, temperature=0.0)
        assert torch.equal(texts[row, front:], alone)
        assert torch.equal(same[row, front:], alone)


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


# ── refusals ─────────────────────────────────────────────────────────────────────────

MODEL = small_model()
ONE, TWO = torch.ones(4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
KEY, VALUE = torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2, 5)


def filled(capacity=4):
    cache = KVCache(capacity)
    cache.append(KEY, VALUE)
    return cache


ONE, TWO = torch.ones(4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
KEY, VALUE = torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2, 5)


def uneven():
    held = caches(MODEL)
    held[1].append(KEY, VALUE)
    return held


def after(tokens, capacity=20):
    held = caches(MODEL, capacity)
    with torch.no_grad():
        MODEL(ONE[:tokens], cache=held)
    return held


def model_with(cache, ids=ONE):
    return MODEL(ids, cache=cache)


ROOM = "tokens after the {} in the cache, which with context_length has room for {}, got {}"
LONG = "with a cache, as the model or its cache has room for {} tokens and ids has 4, got"
EACH = "padding: expected one number for each sequence of ids (batch, tokens), got shape"
VALUE_ERRORS = [
    (lambda: KVCache(0), "capacity: expected at least 1, got 0"),
    (lambda: KVCache(3).append(KEY[0, 0, 0], VALUE),
     "key: expected at least 2 dimensions (tokens, features), got shape (8,)"),
    (lambda: filled().append(KEY[:1], VALUE[:1]),
     "key: expected leading dimensions (2, 3) as the cache, got shape (1, 3, 2, 8)"),
    (lambda: filled().append(KEY[..., :7], VALUE),
     "key: expected 8 features as the cache, got shape (2, 3, 2, 7)"),
    (lambda: filled().append(KEY.to("meta"), VALUE),
     "key: expected device cpu as the cache, got meta"),
    (lambda: KVCache(3).append(KEY, VALUE[..., :1, :]),
     "value: expected 2 tokens as key, got shape (2, 3, 1, 5)"),
    (lambda: filled(3).append(KEY, VALUE),
     "key: expected at most 1 more tokens, since the cache is full then, got 2"),
    (lambda: torch.enable_grad()(KVCache(3).append)(KEY, VALUE.clone().requires_grad_()),
     "value: expected no gradient, since a cache is written in place; call the model "
     "within torch.no_grad()"),
    (lambda: filled().truncate(3), "length: expected between 0 and 2, got 3"),
    (lambda: model_with(caches(MODEL)[:2]), "cache: expected 3, one for each block, got 2"),
    (lambda: model_with(uneven()),
     "cache: expected the same tokens in each, got lengths [0, 2, 0]"),
    (lambda: model_with(after(2, capacity=5)),
     f"ids: expected at most 3 {ROOM.format(2, 5, 4)}"),
    (lambda: model_with(after(4, capacity=99), torch.ones(17, dtype=torch.int64)),
     f"ids: expected at most 16 {ROOM.format(4, 20, 17)}"),
    (lambda: MODEL.generate(ONE, 18, cache=True),
     f"length: expected at most 17 {LONG.format(20)} 18"),
    (lambda: MODEL.generate(ONE, 4, cache=caches(MODEL, 6)),
     f"length: expected at most 3 {LONG.format(6)} 4"),
    (lambda: MODEL.generate(ONE, 4, cache=after(4)),
     "ids: expected more than the 4 tokens in the cache, which begin it, got shape (4,)"),
    (lambda: MODEL(TWO, padding=[1]), f"{EACH} (1,) for ids of shape (2, 4)"),
    (lambda: MODEL(ONE, padding=[1]), f"{EACH} (1,) for ids of shape (4,)"),
    (lambda: MODEL(TWO, padding=[1, -1]),
     "padding: expected numbers of at least 0, got [1, -1]"),
    (lambda: MODEL.generate(TWO, 2, padding=[0, 4]),
     "padding: expected numbers between 0 and 3, got [0, 4]"),
    (lambda: ROTARY(*torch.randn(2, 1, 4, 16), cache=KVCache(9)),
     "key: expected None beside rotary and a cache…"),
]  # fmt: skip
ROTARY = MultiHeadAttention(16, 2, HEADS["fused"], rotary=RotaryPositions(8))
ONE_A_BLOCK = "cache: expected a list of caches, one a block, got"
TYPE_ERRORS = [
    (lambda: KVCache(2.5), "capacity: expected a whole number, got 2.5"),
    (lambda: KVCache(True), "capacity: expected a whole number, got True"),
    (lambda: filled().append([1.0], VALUE),
     "key: expected a floating-point tensor, got list"),
    (lambda: filled().append(KEY, VALUE.long()),
     "value: expected a floating-point tensor, got torch.int64"),
    (lambda: filled().append(KEY, VALUE.double()),
     "value: expected torch.float32 as the cache, got torch.float64"),
    (lambda: KVCache(3).append(KEY, VALUE.double()),
     "value: expected torch.float32 as key, got torch.float64"),
    (lambda: filled().truncate(0.5), "length: expected a whole number, got 0.5"),
    (lambda: model_with(KVCache(4)), f"{ONE_A_BLOCK} KVCache(capacity=4), 0 tokens"),
    (lambda: model_with([1, 2, 3]), f"{ONE_A_BLOCK} [1, 2, 3]"),
    (lambda: MODEL(TWO, padding=[0.5, 1.0]),
     "padding: expected whole numbers, got [0.5, 1.0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [(ValueError, *x) for x in VALUE_ERRORS] + [(TypeError, *x) for x in TYPE_ERRORS],
)
def test_refusals(error, call, message, as_shipped):
    with torch.no_grad(), refuses(message, error):
        call()


def test_a_refused_call_leaves_the_caches_alone(as_shipped):
    held = after(4, capacity=6)
    with torch.no_grad(), pytest.raises(ValueError, match="ids: expected at most 2"):
        MODEL(ONE, cache=held)
    assert [len(one) for one in held] == [4, 4, 4]
