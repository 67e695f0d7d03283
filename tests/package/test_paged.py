"""Split and paged: the same in any pieces, the same bits in any company, no page lost."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from attnlib import (
    LanguageModel,
    PagedCache,
    PageTable,
    add_sink,
    flash_attention,
    padding_mask,
    paged_attention,
    split_attention,
)
from attnlib.checks import require_count
from attnlib.paged import places
from attnlib.split import sum_by_halves
from attnlib.testing import check_cache
from drawn import (
    agree,
    attention,
    close,
    draw,
    draw_mask,
    each_refused,
    normal,
    refuses,
    small_model,
)


def bits(x):
    """The bytes of a tensor, in which −0.0 and 0.0 differ."""
    return x.contiguous().view(torch.uint8)


# ── split ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 1, 2, 5, 8, 13, 64])
def test_sum_by_halves_has_the_order_of_the_equation(size):
    def by_hand(x):
        if len(x) < 2:
            return sum(x, torch.zeros(3, 4))
        half = len(x) // 2
        kept = [a + b for a, b in zip(x[:half], x[half : 2 * half], strict=True)]
        return by_hand(kept + x[2 * half :])

    x = normal(3, size, 4, dtype=torch.float32)
    for dim in (1, -2):
        assert torch.equal(sum_by_halves(x, dim), by_hand(list(x.unbind(1))))


@pytest.mark.parametrize("split_size", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_any_split_gives_the_same(split_size, causal):
    """Output, log-sum-exp and gradients, also of queries that see nothing."""
    split = partial(split_attention, split_size=split_size, return_lse=True)
    for leading, queries, keys in (((), 3, 70), ((2, 4), 4, 2)):
        agree(split, draw(*leading, queries=queries, keys=keys), causal=causal)
    nothing, boolean = draw(2, keys=0), draw_mask("boolean", 3, 9)
    close(split(*nothing), attention(*nothing))
    for mask in (boolean, normal(2, 1, 3, 9), padding_mask([4, 9]), normal()):
        agree(split, draw(2, 4, queries=3, keys=9), mask, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d_k", [5, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_in_any_company(dtype, d_k, threads):
    """Alone, in a batch, with other heads, with other queries, and behind a mask."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        split = partial(split_attention, split_size=32)
        inputs = draw(3, 2, queries=2, keys=150, d_k=d_k, dtype=dtype)
        together, lengths = split(*inputs), [150, 33, 96]
        uneven = split(*inputs, padding_mask(lengths))
        for b, h, n in itertools.product(range(3), range(2), range(2)):
            query, key, value = (x[b, h] for x in inputs)
            for length, found in ((150, together), (lengths[b], uneven)):
                alone = split(query[n : n + 1], key[:length], value[:length])
                assert torch.equal(bits(alone[0]), bits(found[b, h, n]))
        strided = [x.mT.contiguous().mT for x in inputs]
        assert torch.equal(bits(split(*strided)), bits(together))
    finally:
        torch.set_num_threads(before)


# ── pages ────────────────────────────────────────────────────────────────────────────


some = precondition(lambda machine: machine.told)


class Pages(RuleBasedStateMachine):
    """A paged cache and a dict of lists, given the same commands."""

    def __init__(self):
        super().__init__()
        self.cache, self.told, self.next = PagedCache(6, 3), {}, 1.0

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.told)))

    @rule()
    def open(self):
        sequence = self.cache.open()
        assert sequence not in self.told
        self.told[sequence] = []

    @some
    @rule(data=st.data())
    def fork(self, data):
        sequence = self.one(data)
        other = self.cache.fork(sequence)
        assert other not in self.told
        self.told[other] = list(self.told[sequence])

    @some
    @rule(data=st.data())
    def free(self, data):
        sequence = self.one(data)
        self.cache.free(sequence)
        del self.told[sequence]

    @some
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.one(data)
        length = data.draw(st.integers(0, len(self.told[sequence])))
        self.cache.truncate(sequence, length)
        del self.told[sequence][length:]

    @some
    @rule(data=st.data(), most=st.integers(1, 3), new=st.integers(0, 4))
    def append(self, data, most, new):
        if data.draw(st.booleans()):
            self.fork(data)
        each = st.sampled_from(sorted(self.told))
        chosen = data.draw(st.lists(each, min_size=1, max_size=most, unique=True))
        tokens = [[self.next + 10 * i + j for j in range(new)] for i in range(len(chosen))]
        self.next += 100
        key = torch.tensor(tokens, dtype=torch.float64).reshape(len(chosen), 1, new, 1)
        key = torch.cat([key, key / 2], dim=-1)
        room = self.fits(chosen)
        assert self.cache.room(chosen) == room
        if new > room:
            with pytest.raises(ValueError, match=r"^key: expected at most \d+ more tokens"):
                self.cache.append(chosen, key, -key[..., :1])
            return
        self.cache.append(chosen, key, -key[..., :1])
        for sequence, more in zip(chosen, tokens, strict=True):
            self.told[sequence] += more

    def fits(self, chosen):
        """The most tokens that each can get, by trying it out on sets of pages."""
        size, new = self.cache.page_size, 0
        while True:
            tables = {s: list(t) for s, t in self.cache.tables.items()}
            spare = self.cache.pages - len({p for t in tables.values() for p in t})
            for s in chosen:
                length, count = len(self.told[s]), new + 1
                if length % size and sum(tables[s][-1] in t for t in tables.values()) > 1:
                    tables[s][-1], spare = -1, spare - 1
                spare -= -(-(length + count) // size) - -(-length // size)
            if spare < 0:
                return new
            new += 1

    @invariant()
    def sound(self):
        """Contents as told; owners are counted; a page is unused or in a table, once."""
        cache, counted = self.cache, [0] * self.cache.pages
        for sequence, tokens in self.told.items():
            table = cache.tables[sequence]
            assert cache.lengths[sequence] == len(tokens)
            assert len(table) == len(set(table)) == -(-len(tokens) // cache.page_size)
            for page in table:
                counted[page] += 1
            for j, token in enumerate(tokens):
                page, slot = table[j // cache.page_size], j % cache.page_size
                assert cache.keys[page, slot].tolist() == [[token, token / 2]]
                assert cache.values[page, slot].tolist() == [[-token]]
        assert set(cache.tables) == set(cache.lengths) == set(self.told)
        assert cache.owners == counted, "the owners of a page are not those in the tables"
        unused = [page for page, owners in enumerate(counted) if not owners]
        assert sorted(cache.unused) == unused, "a page is lost, or unused and owned"


def test_no_page_is_lost_or_owned_twice():
    steps = settings(max_examples=60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Pages, settings=settings(steps, derandomize=True))


def test_only_one_of_two_copies():
    """Two sequences share a page with two tokens and two free places; one page is left.

    One copies it, and the other then is the only owner.
    """
    cache, tokens = PagedCache(2, 4), torch.zeros(2, 1)
    first = cache.open()
    cache.append(first, tokens, tokens)
    assert cache.room([first, cache.fork(first)]) == 2


def test_a_copy_of_a_page_that_is_not_full():
    """Shared from its beginning: whoever writes there copies it."""
    cache, tokens = PagedCache(2, 4), torch.ones(3, 1)
    first = cache.open()
    cache.append(first, tokens, tokens)
    other = cache.fork(first)
    cache.append(other, 2 * tokens[:1], 2 * tokens[:1])
    cache.append(first, 3 * tokens[:1], 3 * tokens[:1])
    found = [cache.keys[cache.tables[s][0]].flatten().tolist() for s in (first, other)]
    assert found == [[1, 1, 1, 3], [1, 1, 1, 2]]


def test_places_by_hand():
    pages = torch.tensor([[5, 0, 3], [2, 7, 0]])
    found = places(pages, torch.tensor([0, 3, 4, 9]), 4)
    assert found.tolist() == [[20, 23, 0, 13], [8, 11, 28, 1]]


def filled(lengths=(5, 9, 1), pages=12, size=4, heads=(2,), dtype=torch.float64):
    """A cache with sequences of these lengths, and their keys and values."""
    cache, told = PagedCache(pages, size), {}
    for length in lengths:
        sequence = cache.open()
        pair = [normal(*heads, length, d, seed=length + d, dtype=dtype) for d in (8, 5)]
        for k, v in zip(*(x.split(3, dim=-2) for x in pair), strict=True):
            cache.append(sequence, k, v)
        told[sequence] = pair
    return cache, told


@pytest.mark.parametrize("split_size", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "all_heads"), [((), ()), ((2,), (6,)), ((2, 3), (2, 3))])
def test_paged_attention(split_size, queries, causal, heads, all_heads):
    """Of sequences in any order, one of them without tokens."""
    cache, told = filled((5, 9, 1, 0), heads=heads)
    sequences = [2, 0, 3, 1]
    query = normal(4, *all_heads, queries, 8, seed=3)
    given = {"causal": causal} | ({"scale": 0.7} if heads else {})
    options = {"split_size": split_size, "enable_gqa": heads != all_heads}
    found = paged_attention(query, cache, sequences, **given, **options)
    for q, output, sequence in zip(query, found, sequences, strict=True):
        close(output, attention(q, *told[sequence], **given)[0])
    alone = paged_attention(query[2:3], cache, [3], **given, **options)
    assert torch.equal(alone, torch.zeros(1, *all_heads, queries, 5).double())


@pytest.mark.parametrize("split_size", [None, 1, 3, 100])
@pytest.mark.parametrize(
    ("window", "causal"), [(1, True), (4, True), (4, False), (50, True)]
)
def test_windows_and_sinks(split_size, window, causal):
    """The output and log-sum-exp of each sequence alone, and what a sink makes of them."""
    cache, told = filled((5, 19, 1, 0))
    query, sink = normal(4, 2, 3, 8, seed=3), normal(2, 1, seed=8)
    given = {"causal": causal, "window": window}
    options = given | {"split_size": split_size}
    pair = paged_attention(query, cache, list(told), **options, return_lse=True)
    close(paged_attention(query, cache, list(told), **options), pair[0])
    for b, sequence in enumerate(told):
        alone = flash_attention(query[b], *told[sequence], **given, return_lse=True)
        for found, expected in zip(pair, alone, strict=True):
            close(found[b], expected)
        with_sink = add_sink(*(x[b] for x in pair), sink)
        close(with_sink[0], add_sink(*alone, sink)[0])


@pytest.mark.parametrize("split_size", [None, 3, 4])
def test_behind_a_window_nothing_is_read(split_size):
    """Its pages may have gone to others; and the bits are those of a query alone."""
    cache, _ = filled((5, 40), pages=16)
    query = normal(2, 2, 2, 8)
    options = {"window": 3, "split_size": split_size}
    before = paged_attention(query, cache, [0, 1], **options)
    if split_size:
        last = paged_attention(query[1:, :, 1:], cache, [1], **options)
        assert torch.equal(last, before[1:, :, 1:])
    for memory in (cache.keys, cache.values):  # the first token seen is 36, on page 9
        memory[cache.tables[1][:9]] = torch.nan
    assert torch.equal(paged_attention(query, cache, [0, 1], **options), before)


@pytest.mark.parametrize("split_size", [None, 4])
def test_only_what_the_table_says_is_seen(split_size):
    """Not where pages lie, and not NaN in places that hold no token of a sequence."""
    cache, told = filled()
    query, table = normal(3, 2, 1, 8), cache.table(list(told))
    before = paged_attention(query, cache, list(told), split_size=split_size)
    used = [
        cache.tables[s][t // 4] * 4 + t % 4 for s in told for t in range(cache.lengths[s])
    ]
    free = [at for at in range(4 * cache.pages) if at not in used]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for memory in (cache.keys, cache.values):
        memory.flatten(0, 1)[free] = torch.nan
        memory.copy_(memory[order])
    moved = PageTable(order.argsort()[table.pages], table.lengths)
    after = paged_attention(query, cache, moved, split_size=split_size)
    assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_pages_and_any_company(dtype):
    """Alone and among others, in pages of any size, and as without pages."""
    lengths = (5, 70, 1, 33)
    query = normal(4, 2, 1, 8, dtype=dtype)
    found = []
    for size in (1, 4, 16, 100):
        cache, told = filled(lengths, pages=120 // size + 5, size=size, dtype=dtype)
        together = paged_attention(query, cache, list(told), split_size=16)
        for b, (key, value) in enumerate(told.values()):
            alone = paged_attention(query[b : b + 1], cache, [b], split_size=16)
            plain = split_attention(query[b], key, value, split_size=16)
            assert torch.equal(bits(alone[0]), bits(together[b]))
            assert torch.equal(bits(plain), bits(together[b]))
        found.append(together)
    assert all(torch.equal(bits(x), bits(found[0])) for x in found)


def test_memory_and_words():
    cache, sequence = PagedCache(6, 4), 0
    assert cache.nbytes == 0 and cache.room(cache.open()) == 24
    key, value = torch.ones(2, 3, 8), torch.ones(2, 3, 5)
    with torch.inference_mode():  # what is made in that mode can be used outside
        cache.append(sequence, key, value)
    assert cache.nbytes == 4 * 6 * 4 * 2 * 13 and cache.keys.shape == (6, 4, 2, 8)
    assert repr(cache) == "PagedCache(pages=6, page_size=4), 1 sequences, 5 pages unused"
    other, where = cache.fork(sequence), cache.keys.data_ptr()
    assert cache.room([0]) == 17 and cache.room([0, other]) == 9 and len(cache.unused) == 5
    cache.append(sequence, key, value)
    for sequence in (0, other):
        cache.free(sequence)
    cache.append(cache.open(), key, value)
    assert cache.keys.data_ptr() == where
    cache.free(2)
    cache.append(cache.open(), key.double(), value.double())
    assert cache.keys.dtype == torch.float64


# ── as the cache of attention and of a model ─────────────────────────────────────────


def factory(size, count=None):
    """Makes a view of one sequence, or of so many, that hold a capacity."""

    def make(capacity):
        require_count("capacity", capacity)
        cache = PagedCache((count or 1) * -(-capacity // size), size)
        return cache.view([cache.open() for _ in range(count)] if count else cache.open())

    return make


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_suite_passes(size, as_shipped):
    check_cache(factory(size))
    for leading in ((3,), (2, 4)):
        check_cache(factory(size, leading[0]), leading=[leading])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_sequences_of_different_lengths_in_one_call(positions):
    """Two texts were read before; each step gives both the logits that they have alone."""
    model = small_model(context_length=30, positions=positions).double().eval()
    texts = [torch.arange(4) % 11, torch.arange(9).flip(0)]
    caches = [PagedCache(12, 4) for _ in model.blocks]
    for cache in caches:
        assert [cache.open(), cache.open()] == [0, 1]
    with torch.no_grad():
        for sequence, ids in enumerate(texts):
            model(ids, cache=[cache.view(sequence) for cache in caches])
        for step in range(5):
            new = torch.tensor([[step], [10 - 2 * step]])
            views = [cache.view([0, 1]) for cache in caches]
            assert views[0].padding.tolist() == [5, 0] and len(views[0]) == 9 + step
            found = model(new, cache=views, padding=views[0].padding)
            texts = [torch.cat([ids, x]) for ids, x in zip(texts, new, strict=True)]
            for ids, logits in zip(texts, found, strict=True):
                close(logits[-1], model(ids)[-1])


@pytest.mark.parametrize("batch", [(), (2,)])
def test_generate(batch):
    model = small_model(context_length=30).double().eval()
    ids, caches = torch.randint(11, (*batch, 4)), [PagedCache(14, 4) for _ in model.blocks]
    views = [c.view([c.open(), c.open()] if batch else c.open()) for c in caches]
    wanted = model.generate(ids, 15, temperature=0.0)
    assert torch.equal(model.generate(ids, 15, temperature=0.0, cache=views), wanted)
    with pytest.raises(ValueError, match=r"^ids: expected at most"):
        model(ids.repeat_interleave(20, -1), cache=views)


def test_uneven_views_truncate_from_the_end():
    cache, _ = filled()
    view = cache.view([0, 1, 2])
    assert (len(view), view.padding.tolist()) == (9, [4, 0, 8])
    with pytest.raises(ValueError, match="length: expected"):
        view.truncate(10)
    view.truncate(6)
    assert [cache.lengths[s] for s in range(3)] == [2, 6, 0]
    keys, values = view.append(*key_value(3))
    assert keys.shape == (3, 2, 7, 8) and (keys[0, :, :4] == 0).all()
    assert (values[2, :, :6] == 0).all() and (values[:, :, 6] == 1).all()


# ── refusals ─────────────────────────────────────────────────────────────────────────


def key_value(batch=1, heads=2, tokens=1, d_k=8, d_v=5, **options):
    options = {"dtype": torch.float64} | options
    return [torch.ones(batch, heads, tokens, d, **options) for d in (d_k, d_v)]


def table(pages, lengths):
    return PageTable(torch.as_tensor(pages), torch.as_tensor(lengths))


QUERY, QKV = torch.ones(1, 2, 1, 8, dtype=torch.float64), draw()


def read(case):
    """Query, sequences, and what else `paged_attention` takes."""
    query, sequences, enable_gqa, split_size = (*case, False, None)[:4]
    options = {"enable_gqa": enable_gqa, "split_size": split_size}
    paged_attention(query, filled()[0], sequences, **options)


OPEN, MANY = "sequences: expected a sequence that is open", "sequences: expected at least"
PAGES, LENGTHS = "sequences.pages: expected", "sequences.lengths: expected"
META = PageTable(*(torch.ones(1, 1, device="meta").long() for _ in range(2)))
READING = {
    f"{OPEN}, got 9": (QUERY, [9]),
    f"{MANY} one, each once, got [0, 0]": (QUERY, [0, 0]),
    f"{MANY} one, each once, got []": (QUERY, []),
    "query: expected shape (2, 2, N, 8)…": (QUERY, [0, 1]),
    "query: expected shape (1, 2, N, 8)…, got (1, 1, 1, 8)": (QUERY[:, :1], [0]),
    "query: expected shape …, got (1, 2, 1, 7)": (QUERY[..., :7], [0]),
    "query: expected shape …, got (2, 1, 8)": (QUERY[0], [0]),
    "query: … or a multiple of these heads, got…": (QUERY[:, [0, 0, 0]], [0], True),
    "query: expected device cpu…": (QUERY.to("meta"), [0]),
    f"{PAGES} numbers between 0 and 11, got 12": (QUERY, table([[1, 12]], [8])),
    f"{PAGES} numbers between 0 and 11, got -1": (QUERY, table([[-1]], [1])),
    f"{LENGTHS} numbers between 0 and 8, got 9": (QUERY, table([[1, 2]], [9])),
    f"{LENGTHS} numbers between 0 and 8, got -1": (QUERY, table([[1, 2]], [-1])),
    f"{PAGES} shape (B, most), got (2,)": (QUERY, table([1, 2], [8])),
    f"{LENGTHS} shape (1,) as pages has rows, got…": (QUERY, table([[1, 2]], [8, 8])),
    f"{PAGES} device cpu, got meta": (QUERY, META),
}
test_bad_reading = each_refused(ValueError, READING, read)
TYPES = {
    "sequences: expected the number of a sequence…, got '0'": (QUERY, "0"),
    "sequences: expected the number of a sequence…, got [True]": (QUERY, [True]),
    "query: expected torch.float64…": (QUERY.float(), [0]),
    "query: expected a floating-point tensor, got torch.int64": (QUERY.long(), [0]),
    "query: expected a floating-point tensor, got NoneType": (None, [0]),
    f"{PAGES} a tensor of int64 or int32, got torch.f…": (QUERY, table([[1.0]], [1])),
}
test_bad_types = each_refused(TypeError, TYPES, read)
LEADING = "key: expected leading dimensions"
WRITING = {
    f"{OPEN}, got 9": ([9], key_value()),
    f"{MANY} one, each once, got [0, 0]": ([0, 0], key_value(2)),
    f"{LEADING} (2, 2)…": ([0, 1], key_value()),
    f"{LEADING} (2,)…": (0, key_value()),
    f"{LEADING} (1, 2)…": ([0], key_value(heads=1)),
    "key: expected 8 features…": ([0], key_value(d_k=9)),
    "value: expected 5 features…": ([0], key_value(d_v=6)),
    "key: expected torch.float64…": ([0], key_value(dtype=torch.float32)),
    "key: expected device…": ([0], key_value(device="meta")),
    "key: expected at most 27 more tokens, since the cache is full then, got 28": (
        *([0], key_value(tokens=28)),
    ),
}


@pytest.mark.parametrize("words", WRITING)
def test_bad_writing_is_refused_and_leaves_the_cache_alone(words, as_shipped):
    (cache, told), (sequences, pair) = filled(), WRITING[words]
    kept = cache.keys.clone()
    with refuses(words, TypeError if "torch." in words else ValueError):
        cache.append(sequences, *pair)
    assert torch.equal(cache.keys, kept) and len(cache.unused) == 12 - 6
    assert [cache.lengths[s] for s in told] == [5, 9, 1]


def test_a_first_batch_that_does_not_fit_is_refused():
    cache = PagedCache(4, 2)
    pair = [cache.open(), cache.open()]
    some, learned = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)
    for sequences, given, words in (
        (pair, key_value(3), "a batch of 2, one for each…"),
        (pair, (some, some), "a batch of 2…"),
        (0, (learned, some), "no gradient…"),
    ):
        with refuses(f"key: expected {words}"):
            cache.append(sequences, *given)
    assert cache.keys is None and len(cache.unused) == 4


def closed(sequence=0):
    """A cache without a sequence that it had."""
    cache, _ = filled()
    cache.free(sequence)
    return cache


ONE, LENGTH = "sequence: expected a sequence that is open", "length: expected between 0 and"
VALUES = {
    "pages: expected at least 1, got 0": lambda: PagedCache(0, 4),
    "page_size: expected at least 1, got 0": lambda: PagedCache(4, 0),
    f"{ONE}, got 7": lambda: closed().fork(7),
    f"{ONE}, got 8": lambda: closed().truncate(8, 0),
    f"{ONE}, got 0": lambda: closed().free(0),
    f"{OPEN}, got 0": lambda: closed().view([0, 1]),
    f"{LENGTH} 9, got 10": lambda: closed().truncate(1, 10),
    f"{LENGTH} 9, got -1": lambda: closed().truncate(1, -1),
    f"{LENGTH} 9, got 11": lambda: closed().view([1, 2]).truncate(11),
    "split_size: expected at least 1, got 0": lambda: split_attention(*QKV, split_size=0),
    "split_size: expected at least 1, got -1": lambda: read((QUERY, [0], False, -1)),
    "value: expected 6 tokens as key…": lambda: split_attention(
        *QKV[:2], QKV[2][:3], split_size=2
    ),
    "window: expected None or an integer of at least 1, got 0": lambda: paged_attention(
        QUERY, filled()[0], [0], window=0
    ),
    "cache: expected keys to look at…": lambda: paged_attention(
        QUERY, PagedCache(2, 2), [0]
    ),
}
test_values = each_refused(ValueError, VALUES)
NUMBERS = {
    "pages: expected a whole number, got 2.5": lambda: PagedCache(2.5, 4),
    "page_size: expected a whole number, got True": lambda: PagedCache(4, True),
    "split_size: expected a whole number, got 2.0": lambda: split_attention(
        *QKV, split_size=2.0
    ),
    "split_size: expected a whole number, got True": lambda: read(
        (QUERY, [0], False, True)
    ),
}
test_numbers = each_refused(TypeError, NUMBERS)


@pytest.mark.parametrize("again", ["freed", "shorter", "longer", "forked", "another's"])
def test_a_table_is_refused_when_it_is_no_longer_true(again):
    """Or it would read the next conversation, which has taken the pages."""
    (cache, _), other = filled(), filled()[0]
    kept = cache.table([0, 1])
    query = normal(2, 2, 1, 8)
    assert torch.equal(
        paged_attention(query, other, kept), paged_attention(query, cache, [0, 1])
    )
    if again == "freed":
        cache.free(0)
        cache.append(cache.open(), *(x[0] for x in key_value(tokens=5)))
    elif again == "shorter":
        cache.truncate(0, 4)
    elif again == "longer":
        cache.append(0, *(x[0] for x in key_value()))
    elif again == "forked":
        cache.append(cache.fork(0), *(x[0] for x in key_value()))  # which copies its page
        paged_attention(query, cache, kept)  # the older of the two has kept its own
        cache.append(0, *(x[0] for x in key_value()))
    else:
        cache.truncate(0, 0)
        cache.truncate(1, 0)
        cache.append([1, 0], *key_value(2, tokens=5))
        cache.append(1, *(x[0] for x in key_value(tokens=4)))
    with refuses("sequences: expected a table of what the cache holds now…", ValueError):
        paged_attention(query, cache, kept)


@pytest.mark.parametrize("prompt", [3, 1])
def test_layers_in_one_pool_have_room_for_all_or_none(prompt):
    """Views of one cache count its pages together, and no layer is written alone."""
    model = LanguageModel(7, 64, embed_dim=8, num_heads=2, num_layers=3).eval()
    pool = PagedCache(pages=7, page_size=2)  # two for each layer, and one
    views = [pool.view(pool.open()) for _ in model.blocks]
    with torch.no_grad():
        model(torch.zeros(prompt, dtype=torch.int64), cache=views)
        with refuses("ids: expected at most …", ValueError):
            model(torch.zeros(5 - prompt, dtype=torch.int64), cache=views)
        assert [len(view) for view in views] == [prompt] * 3
        model(torch.zeros(4 - prompt, dtype=torch.int64), cache=views)
        with refuses("ids: expected at most 0 tokens…", ValueError):
            model(torch.zeros(1, dtype=torch.int64), cache=views)
        with refuses("length: expected at most …", ValueError):
            model.generate(torch.zeros(5, dtype=torch.int64), 3, cache=views)
    assert [len(view) for view in views] == [4] * 3


def test_one_sequence_is_not_two_layers():
    model = LanguageModel(7, 64, embed_dim=8, num_heads=2, num_layers=2).eval()
    pool = PagedCache(pages=7, page_size=2)
    views = [pool.view(pool.open())] * 2
    with refuses("cache: expected one of its own for each block…", ValueError):
        model(torch.zeros(1, dtype=torch.int64), cache=views)
    assert not len(views[0])
