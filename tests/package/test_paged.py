"""Split and paged: the same in any pieces, the same bits in any company, no page lost."""

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from attnlib import (
    KVCache,
    MultiHeadAttention,
    PagedCache,
    PagedSequences,
    PageTable,
    ScaledDotProductAttention,
    merge_outputs,
    padding_mask,
    paged_attention,
    split_attention,
)
from attnlib.checks import require_count
from attnlib.paged import places, sum_by_halves
from attnlib.testing import check_cache
from drawn import attention, close, draw, normal
from drawn import small_model as model_of


def bits(x):
    """The bits of a tensor as integers, in which −0.0 and 0.0 differ."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sizes[x.element_size()])


# ── split ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 31, 64])
def test_sum_by_halves(size):
    x = torch.randn(3, size, 4, dtype=torch.float64)
    torch.testing.assert_close(sum_by_halves(x, 1), x.sum(1))
    torch.testing.assert_close(sum_by_halves(x, -2), x.sum(1))


def test_sum_by_halves_has_the_order_of_the_equation():
    def by_hand(x):
        if len(x) == 1:
            return x[0]
        half = len(x) // 2
        kept = [a + b for a, b in zip(x[:half], x[half : 2 * half], strict=True)]
        return by_hand(kept + x[2 * half :])

    for size in (1, 2, 5, 13, 64):
        x = normal(size, seed=size, dtype=torch.float32)
        assert sum_by_halves(x, 0) == by_hand(list(x))


@pytest.mark.parametrize("split_size", [1, 2, 7, 64, 70, 1000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 4)])
def test_any_split_gives_the_same(split_size, causal, leading):
    inputs = draw(*leading, queries=3, keys=70)
    given = dict(split_size=split_size, causal=causal, return_lse=True)
    close(split_attention(*inputs, **given), attention(*inputs, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        *(torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.6,),
        *(normal(2, 1, 3, 9), padding_mask([4, 9]), torch.zeros(()).double()),
    ],
)
def test_masks(mask, causal):
    inputs = draw(2, 4, queries=3, keys=9)
    wanted, _ = attention(*inputs, mask, causal=causal)
    for split_size in (1, 4, 9, 16):
        close(split_attention(*inputs, mask, split_size=split_size, causal=causal), wanted)


def test_a_query_that_sees_nothing():
    inputs = query, key, value = draw(2, queries=4, keys=2, grad=True)
    output, lse = split_attention(*inputs, split_size=2, causal=True, return_lse=True)
    assert (output[:, :2] == 0).all() and (lse[:, :2] == -torch.inf).all()
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(g.isfinite().all() for g in gradients) and (gradients[0][:, :2] == 0).all()
    nothing = split_attention(query, key[:, :0], value[:, :0], split_size=3)
    assert nothing.shape == (2, 4, 3) and (nothing == 0).all()


def test_gradients():
    inputs = draw(2, queries=2, keys=5, grad=True)
    given = dict(split_size=2, causal=True, return_lse=True)
    assert torch.autograd.gradcheck(
        lambda *x: split_attention(*x, **given), inputs, fast_mode=True
    )


def test_the_shares_merge_as_outputs_do():
    query, key, value = draw(2, 3, keys=70)
    given = dict(split_size=9, return_lse=True)
    parts = [
        split_attention(query, key[..., at, :], value[..., at, :], **given)
        for at in (slice(30), slice(30, 70))
    ]
    wanted = split_attention(query, key, value, **given)
    close(merge_outputs(*parts), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d_k", [5, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_in_any_company(dtype, d_k, threads):
    """Alone, in a batch, with other heads, with other queries, and behind a mask."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = {"queries": 3, "keys": 150, "d_k": d_k}
        query, key, value = draw(5, 4, **sizes, dtype=dtype)
        together = split_attention(query, key, value, split_size=32)
        lengths = [150, 33, 1, 96, 70]
        mask = padding_mask(lengths)
        uneven = split_attention(query, key, value, mask, split_size=32)
        for b, length in enumerate(lengths):
            for h in range(4):
                for n in range(3):
                    q, k, v = query[b, h, n : n + 1], key[b, h], value[b, h]
                    alone = split_attention(q, k, v, split_size=32)
                    assert torch.equal(bits(alone[0]), bits(together[b, h, n]))
                    alone = split_attention(q, k[:length], v[:length], split_size=32)
                    assert torch.equal(bits(alone[0]), bits(uneven[b, h, n]))
        strided = [x.mT.contiguous().mT for x in (query, key, value)]
        again = split_attention(*strided, split_size=32)
        assert torch.equal(bits(again), bits(together))
    finally:
        torch.set_num_threads(before)


# ── pages ────────────────────────────────────────────────────────────────────────────


def row(token):
    """Key (1, 1, 2) and value (1, 1, 1) of a token, by its number."""
    key = torch.tensor([[[token, token / 2]]], dtype=torch.float64)
    return key, -key[..., :1]


def assert_sound(cache, told):
    """Contents as told; owners are counted; every page is unused or in a table, once."""
    counted = [0] * cache.pages
    for sequence, tokens in told.items():
        table = cache.tables[sequence]
        assert cache.lengths[sequence] == len(tokens)
        assert len(table) == -(-len(tokens) // cache.page_size)
        assert len(set(table)) == len(table)
        for page in table:
            counted[page] += 1
        for j, token in enumerate(tokens):
            page, slot = table[j // cache.page_size], j % cache.page_size
            assert cache.keys[page, slot].tolist() == [[token, token / 2]]
            assert cache.values[page, slot].tolist() == [[-token]]
    assert set(cache.tables) == set(cache.lengths) == set(told)
    assert cache.owners == counted, "the owners of a page are not those in the tables"
    unused = [page for page, owners in enumerate(counted) if not owners]
    assert sorted(cache.unused) == unused, "a page is lost, or unused and owned"


some = precondition(lambda machine: machine.told)


class Pages(RuleBasedStateMachine):
    """A paged cache and a dict of lists, given the same commands."""

    made = PagedCache

    def __init__(self):
        super().__init__()
        self.cache, self.told, self.next = self.made(6, 3), {}, 1.0

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.told)))

    def forked(self, sequence):
        other = self.cache.fork(sequence)
        assert other not in self.told
        self.told[other] = list(self.told[sequence])
        return other

    def forget(self, sequence):
        self.cache.free(sequence)
        del self.told[sequence]

    @rule()
    def open(self):
        sequence = self.cache.open()
        assert sequence not in self.told
        self.told[sequence] = []

    @some
    @rule(data=st.data())
    def fork(self, data):
        self.forked(self.one(data))

    @some
    @rule(data=st.data())
    def free(self, data):
        self.forget(self.one(data))

    @some
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.one(data)
        length = data.draw(st.integers(0, len(self.told[sequence])))
        self.cache.truncate(sequence, length)
        del self.told[sequence][length:]

    @some
    @rule(data=st.data(), new=st.integers(0, 4))
    def append_to_some(self, data, new):
        each = st.sampled_from(sorted(self.told))
        self.add(data.draw(st.lists(each, min_size=1, max_size=3, unique=True)), new)

    @some
    @rule(data=st.data(), new=st.integers(1, 2))
    def append_to_one(self, data, new):
        self.add([self.one(data)], new)

    @some
    @rule(data=st.data(), new=st.integers(1, 2))
    def append_beside_a_fork(self, data, new):
        sequence = self.one(data)
        other = self.forked(sequence)
        self.add([sequence], new)
        self.sound()
        self.forget(other)

    def add(self, chosen, new):
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
        assert_sound(self.cache, self.told)


STEPS = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_no_page_is_lost_or_owned_twice():
    run_state_machine_as_test(Pages, settings=STEPS)


class FreedTwice(PagedCache):
    def free(self, sequence):
        pages = self.tables[sequence]
        super().free(sequence)
        self.unused += pages[:1]


class FreedForAll(PagedCache):
    def release(self, page):
        self.owners[page] -= 1
        self.unused.append(page)


class NoCopyOnWrite(PagedCache):
    def grow(self, sequence, new):
        owners, self.owners = self.owners, [min(1, n) for n in self.owners]
        super().grow(sequence, new)
        pairs = zip(owners, self.owners, strict=True)
        self.owners = [n + more - min(1, n) for n, more in pairs]


class CopiesNothing(PagedCache):
    def grow(self, sequence, new):
        kept = self.keys.clone(), self.values.clone()
        super().grow(sequence, new)
        self.keys.copy_(kept[0])
        self.values.copy_(kept[1])


class CopiesForAll(PagedCache):
    """The copy goes into the tables of all, so that they still share it."""

    def grow(self, sequence, new):
        before = list(self.tables[sequence])
        super().grow(sequence, new)
        for table in self.tables.values():
            if before and table[: len(before)] == before != self.tables[sequence]:
                table[len(before) - 1] = self.tables[sequence][len(before) - 1]


class LeaksOnFree(PagedCache):
    def free(self, sequence):
        for page in self.tables.pop(sequence):
            self.owners[page] -= 1
        del self.lengths[sequence]


class LeaksOnTruncate(PagedCache):
    def truncate(self, sequence, length):
        self.lengths[sequence] = length


class ForkOwnsNothing(PagedCache):
    def fork(self, sequence):
        other = self.open()
        self.tables[other] = list(self.tables[sequence])
        self.lengths[other] = self.lengths[sequence]
        return other


class ForkIsTheSame(PagedCache):
    def fork(self, sequence):
        other = super().fork(sequence)
        self.tables[other] = self.tables[sequence]
        return other


class CountsTooFew(PagedCache):
    def wanted(self, handles, new):
        ends = [self.lengths[s] + new for s in handles]
        pages = sum(-(-end // self.page_size) for end in ends)
        return pages - sum(len(self.tables[s]) for s in handles)  # without the copies


class CountsTooMany(PagedCache):
    def wanted(self, handles, new):
        partial = [s for s in handles if new and self.lengths[s] % self.page_size]
        shared = sum(self.owners[self.tables[s][-1]] > 1 for s in partial)
        return CountsTooFew.wanted(self, handles, new) + shared


BROKEN = [
    *(FreedTwice, FreedForAll, NoCopyOnWrite, CopiesNothing, CopiesForAll, LeaksOnFree),
    *(LeaksOnTruncate, ForkOwnsNothing, ForkIsTheSame, CountsTooFew),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda c: c.__name__)
def test_the_walk_notices(broken):
    machine = type("Broken", (Pages,), {"made": broken})
    first = {"phases": [Phase.generate], "report_multiple_bugs": False}
    once = settings(STEPS, **first, database=None, max_examples=200)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        run_state_machine_as_test(machine, settings=once)


def room_of_two(kind):
    """Two sequences share a page with two tokens and two free places; one page is left."""
    cache, row = kind(2, 4), torch.zeros(2, 1)
    first = cache.open()
    cache.append(first, row, row)
    return cache.room([first, cache.fork(first)])


def test_only_one_of_two_copies():
    assert room_of_two(PagedCache) == 2  # one copies, the other then is the only owner
    assert room_of_two(CountsTooMany) == 0


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
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(), (2,), (2, 3)])
def test_paged_attention(split_size, queries, causal, heads):
    cache, told = filled(heads=heads)
    sequences = [2, 0, 1]  # any order
    query = normal(3, *heads, queries, 8, seed=3)
    given = dict(causal=causal, split_size=split_size)
    found = paged_attention(query, cache, sequences, **given)
    for q, output, sequence in zip(query, found, sequences, strict=True):
        close(output, attention(q, *told[sequence], causal=causal)[0])


@pytest.mark.parametrize("split_size", [None, 4])
def test_groups(split_size):
    cache, told = filled()
    query = normal(3, 6, 2, 8, seed=3)
    given = dict(split_size=split_size, enable_gqa=True, scale=0.7)
    found = paged_attention(query, cache, list(told), **given)
    for q, output, pair in zip(query, found, told.values(), strict=True):
        close(output, attention(q, *pair, causal=True, scale=0.7)[0])


@pytest.mark.parametrize("split_size", [None, 4])
def test_a_permutation_of_pages_changes_nothing(split_size):
    cache, told = filled()
    query = torch.randn(3, 2, 1, 8, dtype=torch.float64)
    before = paged_attention(query, cache, list(told), split_size=split_size)
    table = cache.table(list(told))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    cache.keys, cache.values = cache.keys[order], cache.values[order]
    moved = PageTable(order.argsort()[table.pages], table.lengths)
    after = paged_attention(query, cache, moved, split_size=split_size)
    assert torch.equal(after, before)
    wrong = paged_attention(query, cache, table, split_size=split_size)
    assert not torch.allclose(wrong, before)


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


def test_what_was_there_before_is_not_seen():
    """NaN in places that hold no token: behind the last one, and in other pages."""
    cache, told = filled()
    query = normal(3, 2, 1, 8)
    before = paged_attention(query, cache, list(told))
    used = [cache.tables[s][t // 4] * 4 + t % 4 for s in told
            for t in range(cache.lengths[s])]  # fmt: skip
    free = [at for at in range(4 * cache.pages) if at not in used]
    for memory in (cache.keys, cache.values):
        memory.flatten(0, 1)[free] = torch.nan
    for split_size in (None, 3):
        close(paged_attention(query, cache, list(told), split_size=split_size), before)


def test_sequences_without_tokens():
    cache, _ = filled()
    empty = cache.open()
    query = torch.randn(2, 2, 1, 8, dtype=torch.float64)
    for split_size in (None, 4):
        found = paged_attention(query[:1], cache, [empty], split_size=split_size)
        assert found.shape == (1, 2, 1, 5) and (found == 0).all()
        found = paged_attention(query, cache, [empty, 0], split_size=split_size)
        assert (found[0] == 0).all() and (found[1] != 0).any()
        none = paged_attention(query[:, :, :0], cache, [1, 0], split_size=split_size)
        assert none.shape == (2, 2, 0, 5)


def test_memory_and_words():
    cache = PagedCache(6, 4)
    assert cache.nbytes == 0 and cache.room(cache.open()) == 24
    key, value = torch.ones(2, 3, 8), torch.ones(2, 3, 5)
    cache.append(0, key, value)
    assert cache.nbytes == 4 * 6 * 4 * 2 * 13 and cache.keys.shape == (6, 4, 2, 8)
    assert repr(cache) == "PagedCache(pages=6, page_size=4), 1 sequences, 5 pages unused"
    other = cache.fork(0)
    assert cache.room([0]) == 17 and cache.room([0, other]) == 9 and len(cache.unused) == 5
    where = cache.keys.data_ptr()
    for sequence in (0, other):
        cache.free(sequence)
    cache.append(cache.open(), key, value)
    assert cache.keys.data_ptr() == where
    cache.free(2)
    cache.append(cache.open(), key.double(), value.double())
    assert cache.keys.dtype == torch.float64


def test_made_in_inference_mode_used_outside():
    cache, x = PagedCache(2, 2), torch.ones(1, 2)
    with torch.inference_mode():
        cache.append(cache.open(), x, x)
    cache.append(0, x, x)
    assert cache.lengths[0] == 2


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


def small_model(**options):
    return model_of(context_length=30, num_layers=3, **options).double().eval()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_sequences_of_different_lengths_in_one_call(positions):
    """Two texts were read before; each step gives both the logits that they have alone."""
    model = small_model(positions=positions)
    texts = [
        torch.randint(11, (n,), generator=torch.Generator().manual_seed(n)) for n in (4, 9)
    ]
    caches = [PagedCache(12, 4) for _ in model.blocks]
    for cache in caches:
        assert [cache.open(), cache.open()] == [0, 1]
    with torch.no_grad():
        for sequence, ids in enumerate(texts):
            model(ids, cache=[cache.view(sequence) for cache in caches])
        for step in range(5):
            new = torch.randint(11, (2, 1), generator=torch.Generator().manual_seed(step))
            views = [cache.view([0, 1]) for cache in caches]
            assert views[0].padding.tolist() == [5, 0] and len(views[0]) == 9 + step
            found = model(new, cache=views, padding=views[0].padding)
            texts = [torch.cat([ids, x]) for ids, x in zip(texts, new, strict=True)]
            for ids, logits in zip(texts, found, strict=True):
                close(logits[-1], model(ids)[-1])


@pytest.mark.parametrize("batch", [None, 2])
def test_generate(batch):
    model = small_model()
    ids = torch.randint(11, (4,) if batch is None else (batch, 4))
    caches = [PagedCache(14, 4) for _ in model.blocks]
    views = [
        c.view(c.open() if batch is None else [c.open() for _ in range(batch)])
        for c in caches
    ]
    wanted = model.generate(ids, 15, temperature=0.0)
    assert torch.equal(model.generate(ids, 15, temperature=0.0, cache=views), wanted)
    with pytest.raises(ValueError, match=r"^ids: expected at most"):
        model(ids.repeat_interleave(20, -1), cache=views)


def test_uneven_views_truncate_from_the_end():
    cache, _ = filled()
    view = cache.view([0, 1, 2])
    assert (len(view), view.padding.tolist()) == (9, [4, 0, 8])
    view.truncate(6)
    assert [cache.lengths[s] for s in range(3)] == [2, 6, 0]
    keys, values = view.append(*key_value(3))
    assert keys.shape == (3, 2, 7, 8) and (keys[0, :, :4] == 0).all()
    assert (values[2, :, :6] == 0).all() and (values[:, :, 6] == 1).all()


def test_attention_layer_takes_a_view():
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 2, ScaledDotProductAttention(causal=True)).double()
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    pages = PagedCache(12, 2)
    view, plain = pages.view([pages.open() for _ in range(3)]), KVCache(7)
    assert isinstance(view, PagedSequences)
    with torch.no_grad():
        for piece in x.split([3, 1, 3], dim=1):
            found, wanted = layer(piece, cache=view)[0], layer(piece, cache=plain)[0]
            close(found, wanted)


# ── refusals ─────────────────────────────────────────────────────────────────────────


def key_value(batch=1, heads=2, tokens=1, d_k=8, d_v=5, dtype=torch.float64, device=None):
    return [
        torch.ones(batch, heads, tokens, d, dtype=dtype, device=device) for d in (d_k, d_v)
    ]


def table(pages, lengths):
    return PageTable(torch.as_tensor(pages), torch.as_tensor(lengths))


QUERY = torch.ones(1, 2, 1, 8, dtype=torch.float64)
OPEN, AS = "sequences: expected a sequence that is open", "sequences: expected at least one"
PAGES, LENGTHS = "sequences.pages: expected", "sequences.lengths: expected"
BAD_VALUES = [
    (f"{OPEN}, got 9", QUERY, [9]),
    (AS, QUERY, [0, 0]),
    (AS, QUERY, []),
    (r"query: expected shape \(2, 2, N, 8\)", QUERY, [0, 1]),
    ("query: expected shape", QUERY[:, :1], [0]),
    ("query: expected shape", QUERY[..., :7], [0]),
    ("query: expected shape", QUERY[0], [0]),
    ("query: expected device cpu", QUERY.to("meta"), [0]),
    (f"{PAGES} numbers between 0 and 11, got 12", QUERY, table([[1, 12]], [8])),
    (f"{PAGES} numbers between 0 and 11, got -1", QUERY, table([[-1]], [1])),
    (f"{LENGTHS} numbers between 0 and 8, got 9", QUERY, table([[1, 2]], [9])),
    (f"{LENGTHS} numbers between 0 and 8, got -1", QUERY, table([[1, 2]], [-1])),
    (rf"{PAGES} shape \(B, most\), got \(2,\)", QUERY, table([1, 2], [8])),
    (rf"{LENGTHS} shape \(1,\) as pages has rows, got", QUERY, table([[1, 2]], [8, 8])),
    (f"{PAGES} device cpu, got meta", QUERY,
     PageTable(*(torch.ones(1, 1, device="meta").long() for _ in range(2)))),
]  # fmt: skip
BAD_TYPES = [
    ("sequences: expected the number of a sequence", QUERY, "0"),
    ("sequences: expected the number", QUERY, [True]),
    ("query: expected torch.float64", QUERY.float(), [0]),
    ("query: expected a floating-point", QUERY.long(), [0]),
    ("query: expected a floating-point", None, [0]),
    (f"{PAGES} a tensor of int64 or int32, got torch.f", QUERY, table([[1.0]], [1])),
]


@pytest.mark.parametrize(
    ("error", "words", "query", "sequences"),
    [(ValueError, *x) for x in BAD_VALUES] + [(TypeError, *x) for x in BAD_TYPES],
)
def test_bad_reading_is_refused(error, words, query, sequences, as_shipped):
    with pytest.raises(error, match=f"^{words}"):
        paged_attention(query, filled()[0], sequences)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_bad_sizes_of_a_share_are_refused(size, as_shipped):
    error = ValueError if type(size) is int else TypeError
    for call, given in (
        (split_attention, draw()),
        (paged_attention, (QUERY, filled()[0], [0])),
    ):
        with pytest.raises(error, match=r"^split_size: expected"):
            call(*given, split_size=size)


def test_other_bad_reading_is_refused(as_shipped):
    with pytest.raises(ValueError, match=r"^query: .* or a multiple of these heads, got"):
        paged_attention(QUERY.expand(1, 2, 1, 8)[:, [0, 0, 0]], filled()[0], [0],
                        enable_gqa=True)  # fmt: skip
    with pytest.raises(ValueError, match=r"^cache: expected keys to look at"):
        paged_attention(QUERY, PagedCache(2, 2), [0])
    query, key, value = draw()
    with pytest.raises(ValueError, match=r"^value: expected 6 tokens"):
        split_attention(query, key, value[:3], split_size=2)


LEADING = "key: expected leading dimensions"


@pytest.mark.parametrize(
    ("words", "sequences", "pair"),
    [
        (OPEN, [9], key_value()),
        (AS, [0, 0], key_value(2)),
        (LEADING, [0, 1], key_value()),
        (LEADING, 0, key_value()),
        (LEADING, [0], key_value(heads=1)),
        ("key: expected 8 features", [0], key_value(d_k=9)),
        ("value: expected 5 features", [0], key_value(d_v=6)),
        ("key: expected torch.float64", [0], key_value(dtype=torch.float32)),
        ("key: expected device", [0], key_value(device="meta")),
        ("key: expected at most 27 more tokens, since the cache is full then", [0],
         key_value(tokens=28)),
    ],
)  # fmt: skip
def test_bad_writing_is_refused_and_leaves_the_cache_alone(
    words, sequences, pair, as_shipped
):
    cache, told = filled()
    kept = cache.keys.clone()
    with pytest.raises(TypeError if "torch." in words else ValueError, match=f"^{words}"):
        cache.append(sequences, *pair)
    assert torch.equal(cache.keys, kept) and len(cache.unused) == 12 - 6
    assert [cache.lengths[s] for s in told] == [5, 9, 1]


def test_a_first_batch_that_does_not_fit_is_refused():
    cache = PagedCache(4, 2)
    pair = [cache.open(), cache.open()]
    some, learned = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)
    for sequences, given, words in (
        (pair, key_value(3), "a batch of 2, one for each"),
        (pair, (some, some), "a batch of 2"),
        (0, (learned, some), "no gradient"),
    ):
        with pytest.raises(ValueError, match=f"^key: expected {words}"):
            cache.append(sequences, *given)
    assert cache.keys is None and len(cache.unused) == 4


def test_bad_numbers_of_a_cache_are_refused(as_shipped):
    for bad, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        for name in ("pages", "page_size"):
            with pytest.raises(error, match=f"^{name}: expected"):
                PagedCache(**{"pages": 4, "page_size": 4, name: bad})
    cache, _ = filled()
    cache.free(0)
    between = "length: expected between 0 and 9"
    for call, words in (
        (lambda: cache.fork(7), "sequence: expected a sequence that is open"),
        (lambda: cache.truncate(7, 0), "sequence: expected a sequence that is open"),
        (lambda: cache.free(0), "sequence: expected a sequence that is open, got 0"),
        (lambda: cache.view([0, 1]), OPEN),
        (lambda: cache.truncate(1, 10), between),
        (lambda: cache.truncate(1, -1), between),
        (lambda: cache.view([1, 2]).truncate(10), between),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            call()
