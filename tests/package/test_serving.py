"""A server: every text as alone, under any load; pages that are never lost."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from attnlib import (
    GPT2,
    LanguageModel,
    Llama,
    LlamaConfig,
    ScaledDotProductAttention,
)
from attnlib.serving import Pages, Server, common_beginning

WORDS = 11


def small(**options):
    torch.manual_seed(3)
    return LanguageModel(WORDS, 40, 8, 2, num_layers=2, **options).double().eval()


MODEL = small()
BEGINNINGS = [[(7 * i + k) % WORDS for i in range(9)] for k in range(2)]


def alone(model, prompt, length, seed, **options):
    own = torch.Generator().manual_seed(seed)
    return model.generate(torch.tensor(prompt), length, generator=own, **options).tolist()


def require_books(server):
    """Each page is unused or in as many tables as it has owners; all blocks alike."""
    first = server.memory.caches[0]
    for cache in server.memory.caches:
        owners = [0] * first.pages
        for table in cache.tables.values():
            for page in table:
                owners[page] += 1
        assert owners == cache.owners
        assert sorted(cache.unused) == [page for page, n in enumerate(owners) if not n]
        assert cache.lengths == first.lengths and len(cache.unused) == len(first.unused)
    inside = {request.sequence for request in server.inside}
    assert {*first.tables} == inside | {*server.memory.kept}
    for number, text in server.memory.kept.items():
        assert first.lengths[number] == len(text)
    assert all(request.sequence is None for request in server.waiting)


class Stop(BaseException):
    """What a reader presses in the middle of a step."""


REQUESTS = st.lists(
    st.tuples(
        st.builds(
            lambda text, shared, own: text[:shared] + own,
            st.sampled_from(BEGINNINGS),
            st.integers(1, 9),
            st.lists(st.integers(0, WORDS - 1), max_size=4),
        ),
        st.integers(1, 16),
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 1.0]),
                "stop": st.sampled_from([(), (3,)]),
            }
        ),
    ),
    min_size=2,
    max_size=4,
)


class Load(RuleBasedStateMachine):
    """Requests that come, end, are aborted and interrupted, in any order."""

    model = MODEL

    @initialize(
        pages=st.integers(10, 24),
        size=st.integers(3, 5),
        at_once=st.integers(1, 5),
        piece=st.sampled_from([1, 3, 50]),
        requests=REQUESTS,
    )
    def begin(self, pages, size, at_once, piece, requests):
        self.server, self.asked = Server(self.model, pages, size, at_once, piece), []
        self.submit(requests)

    @rule(requests=REQUESTS)
    def submit(self, requests):
        for prompt, length, drawn in requests:
            options, seed = drawn | {"repetition_penalty": 1.1}, len(self.asked)
            own = torch.Generator().manual_seed(seed)
            given = torch.tensor(prompt), length
            request = self.server.submit(*given, generator=own, **options)
            self.asked.append((request, (prompt, length, seed), options))

    @rule(times=st.integers(1, 9))
    def steps(self, times):
        for _ in range(times):
            oldest, before = self.server.inside[:1], [len(r.ids) for r, *_ in self.asked]
            for request, token in self.server.step():
                assert request.ids[-1] == token
            assert len(self.server.inside) <= self.server.at_once
            assert all(r in self.server.inside or r.over for r in oldest)
            gained = [len(r.ids) - n for (r, *_), n in zip(self.asked, before, strict=True)]
            assert max(gained, default=0) <= 1

    @rule(which=st.integers(0, 20))
    def abort(self, which):
        there = [*self.server.inside, *self.server.waiting]
        if there:
            request = there[which % len(there)]
            self.server.abort(request)
            assert request.over == "aborted"

    @rule(block=st.integers(0, 1))
    def interrupt(self, block):
        def stop(module, args, result):
            raise Stop

        hook = self.model.blocks[block].register_forward_hook(stop)
        before = [list(request.ids) for request, *_ in self.asked]
        try:
            self.server.step()
        except Stop:
            assert before == [request.ids for request, *_ in self.asked]
        hook.remove()

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "server"):
            require_books(self.server)
            order = [request for request, *_ in self.asked]
            there = [*self.server.inside, *self.server.waiting]
            assert there == [request for request in order if request in there]

    def teardown(self):
        if not hasattr(self, "server"):
            return
        most = sum(request.end for request, *_ in self.asked)
        while self.server.waiting or self.server.inside:
            self.server.step()
            most -= 1
            assert most >= 0, "no end"
        require_books(self.server)
        for request, given, options in self.asked:
            meant = alone(self.model, *given, **options)
            part = len(request.ids) if request.over == "aborted" else len(meant)
            assert request.ids == meant[:part]


Load.TestCase.settings = settings(max_examples=12, stateful_step_count=8, deadline=None)
TestLoad = Load.TestCase


def near_sighted(window, **options):
    attention = ScaledDotProductAttention(causal=True, window=window)
    return small(attention=attention, positions="rotary", **options)


class LoadWithAWindow(Load):
    """Pages behind the window are freed, and what begins alike may be gone."""

    model = near_sighted(5)


LoadWithAWindow.TestCase.settings = Load.TestCase.settings
TestLoadWithAWindow = LoadWithAWindow.TestCase


def served(model, prompts, length, **options):
    server = Server(model, **{"pages": 30, "page_size": 3, "piece": 4} | options)
    asked = [server.submit(torch.tensor(ids), length, 0.0) for ids in prompts]
    assert sum(1 for _ in server.run()) == sum(len(r.written) for r in asked)
    return [request.ids for request in asked]


TINY = {"vocab_size": WORDS, "context_length": 40, "embed_dim": 16, "num_heads": 4}
MODELS = {
    "rotary": lambda: small(positions="rotary"),
    "sinusoidal": lambda: small(positions="sinusoidal"),
    "shared": lambda: small(num_kv_heads=1, positions="rotary"),
    "window": lambda: near_sighted(5),
    "gpt2": lambda: GPT2(**TINY, num_layers=2).double().eval(),
    "llama": lambda: Llama(LlamaConfig(**TINY, d_ff=24, num_layers=2)).double().eval(),
}


@pytest.mark.parametrize("kind", MODELS)
def test_any_model_gives_each_text_as_alone(kind):
    torch.manual_seed(1)
    model = MODELS[kind]()
    prompts = [BEGINNINGS[0], [*BEGINNINGS[0][:7], 3], BEGINNINGS[1][:2], BEGINNINGS[0]]
    found = served(model, prompts, 12, at_once=3)
    assert found == [alone(model, ids, 12, 0, temperature=0.0) for ids in prompts]


def test_what_begins_alike_is_read_once():
    read = []
    hook = MODEL.register_forward_pre_hook(lambda m, args: read.append(args[0].numel()))
    start = list(range(9))
    server = Server(MODEL, 30, page_size=3, piece=50)
    asked = [server.submit(torch.tensor([*start, k]), 1, 0.0) for k in (1, 2, 2)]
    server.step()
    hook.remove()
    assert read == [10, 1, 1] and [r.over for r in asked] == ["length"] * 3
    assert len(server.memory.kept) == 3 and len(server.memory.caches[0].unused) == 24
    assert common_beginning([1, 2], [1, 2, 3]) == 2


def test_pages_behind_a_window_are_freed():
    """And a text that needs them does not share; who needs none of them does."""
    model, start = near_sighted(4), list(range(9))
    server = Server(model, 8, page_size=3, piece=50)
    first = server.submit(torch.tensor(start), 6, 0.0)
    free = []
    while not first.over:
        server.step()
        free.append(len(server.memory.caches[1].unused))
        require_books(server)
    # 9 to 14 tokens on pages, of which the next sees those from 6 to 11 on
    assert free == [6] * 6  # of 8, and never fewer
    read = []
    hook = model.register_forward_pre_hook(lambda m, args: read.append(args[0].numel()))
    for prompt, count in ((start, 9), ([*first.ids[:13], 3], 2)):
        read.clear()
        request = server.submit(torch.tensor(prompt), 3, 0.0)
        list(server.run())
        assert request.ids == alone(model, prompt, 3, 0, temperature=0.0)
        assert read[0] == count
    hook.remove()


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("window", [2, 4, 7])
def test_what_the_next_token_sees_is_still_there(size, window):
    """And of what begins alike, so much as is said, for any number of tokens."""
    told = set()
    for count in range(1, 20):
        memory = Pages(1, 60, size, window)
        number, cache = memory.begin([], {}), memory.caches[0]
        rows = torch.arange(count + 1.0)[:, None]
        cache.append(number, rows[:-1], rows[:-1])
        memory.forget(number)
        pages, behind = -(-count // size), (count + 1 - window) // size
        assert 60 - len(cache.unused) == pages - max(0, min(behind, pages - 2))
        for shared in range(size, count, size):
            other = cache.fork(number)
            memory.cut(other, shared)
            keys, _ = cache.view(other).append(rows[shared, None], rows[shared, None])
            right = torch.equal(keys[-window:], rows[: shared + 1][-window:])
            assert memory.has_before(number, shared) == right
            told.add(right)
        keys, _ = cache.view(number).append(rows[-1:], rows[-1:])
        assert torch.equal(keys[-window:], rows[-window:])
    assert told == {True, False}


def test_texts_that_were_not_used_for_longest_are_given_up_first():
    server = Server(MODEL, 6, page_size=3)
    texts = [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 9], [0] * 8  # 2, 2, 1 and 3 pages
    for ids in texts:
        server.submit(torch.tensor(ids), 1, 0.0)
        server.step()
    assert [*server.memory.kept.values()] == [
        texts[0],
        *texts[2:],
    ]  # the third used the first


def test_a_text_does_not_depend_on_when_the_others_are_drawn():
    """Without generators, PyTorch's own says at `submit` how each is drawn."""
    texts = []
    for at_once in (1, 4):
        torch.manual_seed(5)
        server = Server(MODEL, 40, 3, at_once)
        asked = [server.submit(torch.tensor(ids), 9) for ids in ([1, 2], [3], [4, 5, 6])]
        assert len([*server.run()]) == 27
        texts.append([request.ids for request in asked])
    assert texts[0] == texts[1] and len({tuple(ids[-9:]) for ids in texts[0]}) == 3


class Words:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids):
        return "".join(chr(97 + token) for token in ids)


def test_a_text_ends_a_text():
    text = alone(MODEL, [1, 2], 12, 0, temperature=0.0)
    end = Words().decode(text[5:7])
    server = Server(MODEL, 40)
    given = torch.tensor([1, 2]), 12, 0.0
    request = server.submit(*given, stop=[end], tokenizer=Words())
    assert len([*server.run()]) == len(request.written) and request.over == "stop"
    wanted = MODEL.generate(*given, stop=[end], tokenizer=Words())
    assert request.ids == wanted.tolist()


class Broken(Words):
    """A tokenizer that fails once, at a text of so many tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def decode(self, ids):
        if len(ids) == self.tokens:
            self.tokens = None
            raise RuntimeError("no such word")
        return super().decode(ids)


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_who_fails_costs_the_others_nothing(tokens):
    """Nobody loses a draw, a token or its turn; the texts are those of before."""
    server = Server(MODEL, 40, page_size=3)
    given = [[1, 2], [3, 4, 5], [6]]
    asked = []
    for seed, ids in enumerate(given):
        own = torch.Generator().manual_seed(seed)
        options = {"stop": ["zz"], "tokenizer": Broken(tokens)} if seed == 1 else {}
        asked.append(server.submit(torch.tensor(ids), 5, generator=own, **options))
    told, failed = [], 0
    for _ in range(30):
        try:
            told += server.step()
        except RuntimeError:
            failed += 1
    assert failed == 1
    for seed, (request, ids) in enumerate(zip(asked, given, strict=True)):
        assert request.ids == alone(MODEL, ids, 5, seed)
        assert [token for r, token in told if r is request] == request.written


def test_who_stops_listening_can_go_on():
    server = Server(MODEL, 40)
    asked = [server.submit(torch.tensor([k]), 4) for k in range(3)]
    told = []
    while server.news or server.inside or server.waiting:
        for pair in server.run():
            told.append(pair)
            break
    for request in asked:
        assert [token for r, token in told if r is request] == request.written


def test_what_is_kept_can_be_forgotten():
    model = small()
    server = Server(model, 10, page_size=2)
    server.submit(torch.tensor([1, 2, 3, 4]), 1, 0.0)
    server.step()
    for parameter in model.parameters():
        parameter.data.neg_()
    server.forget()
    assert not server.memory.kept and len(server.memory.caches[1].unused) == 10
    request = server.submit(torch.tensor([1, 2, 3, 4]), 6, 0.0)
    assert len([*server.run()]) == 6
    assert request.ids == alone(model, [1, 2, 3, 4], 6, 0, temperature=0.0)


def test_others_may_come_and_go_while_it_runs():
    server = Server(MODEL, 40, page_size=3)
    first = server.submit(torch.tensor([1, 2]), 9, 0.0)
    for request, _ in server.run():
        if request is first and len(first.written) == 2:
            late = server.submit(torch.tensor([3, 4]), 9, 0.0)
        if request is first and len(first.written) == 5:
            server.abort(first)
    assert (first.over, late.over) == ("aborted", "length") and len(first.written) == 5
    assert late.ids == alone(MODEL, [3, 4], 9, 0, temperature=0.0)
    for request in (first, late):
        with pytest.raises(ValueError, match=f"request: .* got one that is {request.over}"):
            server.abort(request)
    other = Server(MODEL, 40).submit(torch.tensor([3]), 2)
    with pytest.raises(ValueError, match="waits or is inside, got another server's"):
        server.abort(other)


REFUSED = [
    (lambda s: s.submit(torch.tensor([1, WORDS]), 3), f"ids: .* 0 to {WORDS - 1}"),
    (lambda s: s.submit(torch.tensor([-1]), 3), "ids: expected numbers from 0"),
    (lambda s: s.abort(None), "request: expected a Request, got None"),
    (lambda s: s.submit(torch.tensor([[1, 2]]), 3), "ids: expected one text"),
    (lambda s: s.submit(torch.tensor([1.0]), 3), "ids: expected a tensor of int64"),
    (lambda s: s.submit(torch.tensor([], dtype=torch.int64), 3), "at least one token"),
    (lambda s: s.submit(torch.tensor([1]), 0), "length: expected .* got 0"),
    (lambda s: s.submit(torch.tensor([1, 2]), 24), "length: expected at most 23.* 24 tok"),
    (lambda s: s.submit(torch.tensor([1]), 3, -1.0), "temperature: expected at least 0"),
    (lambda s: s.submit(torch.tensor([1]), 3, stop=[WORDS]), "stop: expected"),
    (lambda s: s.submit(torch.tensor([1]), 3, bias={WORDS: 1.0}), "bias: expected"),
    (
        lambda s: s.submit(torch.tensor([1]), 3, generator=[torch.Generator()]),
        "generator: expected one of the CPU",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refused(as_shipped, call, words):
    server = Server(MODEL, 8, page_size=3)
    with pytest.raises((TypeError, ValueError), match=words):
        call(server)
    assert not server.waiting


def test_a_generator_has_one_text():
    server, own = Server(MODEL, 8, page_size=3), torch.Generator()
    server.submit(torch.tensor([1]), 3, generator=own)
    with pytest.raises(ValueError, match=r"generator: .* got another request's"):
        server.submit(torch.tensor([1]), 3, generator=own)
    assert len([*server.run()]) == 3
    server.submit(torch.tensor([1]), 3, generator=own)  # free again


def test_what_is_no_server_is_refused(as_shipped):
    with pytest.raises(TypeError, match="model: expected a LanguageModel, got Linear"):
        Server(torch.nn.Linear(2, 2), 8)
    for name in ("pages", "page_size", "at_once", "piece"):
        with pytest.raises(ValueError, match=f"{name}: expected .* got 0"):
            Server(MODEL, **{"pages": 8, name: 0})


def test_the_longest_text_that_fits_is_served():
    server = Server(MODEL, 8, page_size=3)
    request = server.submit(torch.tensor([1, 2]), 23, 0.0)
    others = [server.submit(torch.tensor([k]), 5, 0.0) for k in range(3)]
    assert len([*server.run()]) == 38
    assert request.ids == alone(MODEL, [1, 2], 23, 0, temperature=0.0)
    assert [len(other.written) for other in others] == [5, 5, 5]
