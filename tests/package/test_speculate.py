"""Guessed tokens: the same texts, the same law, and what the caches hold afterwards."""

import pytest
import torch

from attnlib import (
    KVCache,
    LanguageModel,
    PagedCache,
    ScaledDotProductAttention,
    WindowCache,
    speculate,
)
from attnlib.speculative import ModelDraft, NgramDraft, first_blocks, following, judge

WORDS = 7
IDS = torch.tensor([[3, 1, 4, 3, 1], [1, 5, 2, 6, 5], [0, 0, 0, 2, 2]])


def make(blocks=3, seed=5, **options):
    torch.manual_seed(seed)
    model = LanguageModel(WORDS, 48, 16, 4, blocks, **options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def model():
    return make()


class Known:
    """Guesses what it was told, or something else at every third place."""

    def __init__(self, told):
        self.told, self.asked = told, []

    def propose(self, ids, count):
        self.asked.append(count)
        n = ids.shape[-1]
        guesses = self.told[..., n : n + count].clone()
        guesses[..., 2::3] = (guesses[..., 2::3] + 1) % WORDS
        return guesses, None


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def says(words):
    return pytest.raises((TypeError, ValueError), match=words)


@pytest.mark.parametrize("rows", [0, 1, slice(0, 1), slice(0, 3)])
@pytest.mark.parametrize("draft", ["ngram", 1, 2, "small", "known"])
def test_the_likeliest_text_is_that_of_generate(as_shipped, model, rows, draft):
    ids = IDS[rows]
    for length in (0, 1, 14):
        expected = model.generate(ids, length, temperature=0.0, cache=True)
        guesses = {"small": make(1, 6), "known": Known(expected)}.get(draft, draft)
        for ahead in (1, 3, 20):
            found = speculate(model, ids, length, guesses, 0.0, ahead=ahead)
            assert torch.equal(found, expected)
    assert speculate(model, IDS[:0], 4).shape[0] == 0
    assert speculate(model, ids, 0).data_ptr() != ids.data_ptr()


@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_padding_stops_and_penalties_are_those_of_generate(as_shipped, model, penalty):
    options = {"temperature": 0.0, "padding": [0, 2, 1], "repetition_penalty": penalty}
    whole = model.generate(IDS, 20, **options)
    for stop in ([], [whole[0, 8].item()], whole[:, 7].tolist(), list(range(WORDS))):
        expected = model.generate(IDS, 20, stop=stop, **options)
        for draft in ("ngram", 2, Known(whole)):
            found = speculate(model, IDS, 20, draft, stop=stop, **options)
            assert torch.equal(found, expected), stop
        one = model.generate(IDS[0], 20, 0.0, repetition_penalty=penalty, stop=stop)
        found = speculate(model, IDS[0], 20, 1, 0.0, repetition_penalty=penalty, stop=stop)
        assert torch.equal(found, one)


def test_good_guesses_save_steps_and_no_guess_costs_a_token(model):
    told = model.generate(IDS[0], 21, temperature=0.0)
    steps = []
    hook = model.register_forward_hook(lambda *called: steps.append(1))
    draft = Known(told)
    speculate(model, IDS[0], 21, draft, 0.0, ahead=2)  # two right ones, and one more
    hook.remove()
    assert len(steps) == 7 and draft.asked == [2] * 7
    last = Known(told)
    speculate(model, IDS[0], 2, last, 0.0, ahead=9)
    assert last.asked == [1]  # the other comes for nothing


@pytest.mark.parametrize("draft", ["ngram", 1, "small"])
def test_what_is_drawn_has_the_models_law(as_shipped, model, draft):
    """Three tokens, all 343 by their exact probabilities, two texts side by side."""
    ids, options = IDS[0], {"temperature": 3.0, "top_k": 5, "repetition_penalty": 1.3}
    options |= {"presence_penalty": 0.6, "bias": {2: 1.5, 4: -torch.inf}}
    with torch.no_grad():
        texts = torch.cartesian_prod(*[torch.arange(WORDS)] * 3)
        law = torch.ones(len(texts))
        for place in range(3):
            text = torch.cat([ids.expand(len(texts), -1), texts[:, :place]], dim=1)
            z = model(text)[:, -1]
            for row, seen in zip(z, text, strict=True):
                for word in seen.unique():
                    row[word] = row[word] / 1.3 if row[word] > 0 else row[word] * 1.3
                    row[word] -= 0.6
                row[2] += 1.5
                row[4] = -torch.inf
            kept = z.topk(5).indices
            z = torch.full_like(z, -torch.inf).scatter(-1, kept, z.gather(-1, kept)) / 3
            law *= z.softmax(dim=-1).gather(-1, texts[:, place, None])[:, 0]
    assert law.sum().item() == pytest.approx(1)
    guesses = make(1, 6) if draft == "small" else draft
    counts, luck = torch.zeros(WORDS**3), torch.Generator().manual_seed(1)
    for _ in range(1000):
        new = speculate(
            model, ids.expand(2, 5), 3, guesses, generator=luck, ahead=2, **options
        )
        places = new[:, 5:] @ torch.tensor([WORDS**2, WORDS, 1])
        counts += places.bincount(minlength=WORDS**3)
    assert not counts[law == 0].any()
    expected, often = 2000 * law, 2000 * law > 5
    squares = ((counts - expected).square() / expected)[often].sum().item()
    freedom = often.sum().item() - 1
    assert freedom > 20 and squares < freedom + 4 * (2 * freedom) ** 0.5, squares


def test_who_waits_for_others_keeps_its_law(as_shipped):
    """Two texts, of which one refuses nearly all guesses, so that the other waits."""
    p = torch.tensor([[[0.5, 0.375, 0.125]], [[0.9, 0.05, 0.05]]]).expand(2, 3, 3)
    q = torch.tensor([[[0.25, 0.25, 0.5]], [[0.05, 0.05, 0.9]]]).expand(2, 2, 3)
    luck, first = torch.Generator().manual_seed(4), torch.zeros(2, 3)
    for _ in range(4000):
        guesses = torch.stack([torch.multinomial(x[0], 2, True, generator=luck) for x in q])
        new = judge(p, q, guesses, luck)
        first[torch.arange(2), new[:, 0]] += 1
    spread = (p[:, 0] * (1 - p[:, 0]) / 4000).sqrt()
    assert ((first / 4000 - p[:, 0]).abs() < 4 * spread).all()


def test_each_sequence_draws_by_its_own_generator(model):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    alone = speculate(model, IDS[0], 9, 1, generator=generators(1)[0])
    assert torch.equal(speculate(model, IDS[0], 9, 1, generator=generators(1)), alone)
    both = [
        speculate(model, IDS, 9, 1, 2.0, generator=generators(*seeds))
        for seeds in ((1, 2, 3), (1, 2, 3), (1, 2, 4))
    ]
    assert torch.equal(both[0], both[1]) and not torch.equal(both[0], both[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_an_ended_text_sets_no_pace():
    """Where one ends at once, the others are guessed as if it were not there."""
    for model in (make(seed=seed) for seed in range(100)):
        told = model.generate(IDS, 20, temperature=0.0)
        stop = told[0, 5].item()
        if stop not in told[1, 5:]:
            break
    else:
        raise AssertionError("nothing to see")
    bad = told.clone()
    bad[0] = (bad[0] + 1) % WORDS
    steps = []
    hook = model.register_forward_hook(lambda *called: steps.append(1))
    speculate(model, IDS[:2], 20, Known(bad[:2]), 0.0, ahead=2, stop=[stop])
    hook.remove()
    assert len(steps) == 1 + 7  # at first one token, then three in a step


@pytest.mark.parametrize("kind", ["plain", "grouped", "window", "pages"])
def test_caches_hold_the_text_and_can_go_on(kind, as_shipped):
    options = {"num_kv_heads": 2} if kind == "grouped" else {}
    if kind == "window":
        near = ScaledDotProductAttention(causal=True, window=5)
        options = {"attention": near, "positions": "rotary"}
    model = make(2, **options)
    if kind == "pages":
        pools = [PagedCache(40, 3) for _ in model.blocks]
        caches = [pool.view([pool.open() for _ in IDS]) for pool in pools]
    elif kind == "window":
        caches = [WindowCache(5, spare=4) for _ in model.blocks]
    else:
        caches = [KVCache(60) for _ in model.blocks]
    expected = model.generate(IDS, 30, temperature=0.0, cache=True)
    text = IDS
    for length in (7, 1, 12, 10):
        text = speculate(model, text, length, Known(expected), 0.0, cache=caches)
        assert [len(held) for held in caches] == [text.shape[1] - 1] * len(caches)
    assert torch.equal(text, expected)


@torch.no_grad()
def test_a_models_guesses_have_its_laws_whatever_was_refused(model):
    """As if it read the text anew: all kept, the first one refused, none of it known."""
    caches, _ = model.start_writing(IDS, 20, True, None)
    draft = ModelDraft(model, caches, lambda z, text: torch.softmax(z / 2, dim=-1))
    guesses, _ = draft.propose(IDS, 3)
    other = (guesses[:, :1] + 1) % WORDS
    for text in (
        torch.cat([IDS, guesses], 1),
        torch.cat([IDS, other], 1),
        IDS.flip(1),
        IDS,
    ):
        guesses, q = draft.propose(text, 3)
        logits = model(torch.cat([text, guesses], dim=1))[:, text.shape[1] - 1 : -1]
        torch.testing.assert_close(q, torch.softmax(logits / 2, dim=-1))


def test_a_ring_without_a_spare_is_refused_at_once(as_shipped):
    near = ScaledDotProductAttention(causal=True, window=5)
    model = make(2, attention=near, positions="rotary")
    read = []
    hook = model.register_forward_hook(lambda *called: read.append(1))
    for spare, length, ahead in ((0, 9, 2), (2, 9, 4), (2, 5, 9)):
        caches = [WindowCache(5, spare=spare) for _ in model.blocks]
        with says(
            f"cache: expected a spare of at least ahead - 1 = {ahead - 1}, got {spare}"
        ):
            speculate(model, IDS, length, cache=caches, ahead=ahead)
    hook.remove()
    assert not read
    expected = model.generate(IDS, 9, temperature=0.0, cache=True)
    for places, ahead in ((14, 9), (8, 4), (5, 1)):  # all; three to spare; one a step
        caches = [WindowCache(5, spare=places - 5) for _ in model.blocks]
        found = speculate(model, IDS, 9, Known(expected), 0.0, cache=caches, ahead=ahead)
        assert torch.equal(found, expected)


def test_the_first_blocks_are_the_models_own(model):
    short = first_blocks(model, 2)
    assert len(short.blocks) == 2 and len(model.blocks) == 3
    assert short.token_embedding is model.token_embedding
    assert all(a is b for a, b in zip(short.blocks, model.blocks, strict=False))


def test_following():
    for text in ([1], [1, 2], [], [5, 5], [1, 2, 1, 2, 3, 1, 2]):
        kept = list(text)
        found = following(text, 4)
        assert text == kept and len(found) in (0, 4)
    assert following([5, 5], 3) == [5, 5, 5]
    assert following([1, 2, 1, 2, 3, 1, 2], 4) == [3, 1, 2, 3]
    assert following([9, 1, 2, 8, 2, 7, 1, 2], 2) == [8, 2]  # two tokens before one
    guesses, laws = NgramDraft().propose(IDS[1:2, :4], 3)
    assert guesses.shape == (1, 0) and laws is None


def test_a_refusal_that_rounding_made_is_no_nan(monkeypatch):
    """q is nowhere below p, by rounding, and the uniform number is almost 1."""
    p = torch.tensor([[0.1, 0.2, 0.7]] * 2)
    q = torch.nextafter(p[:1], torch.ones(1, 3))
    almost = torch.tensor([1 - 2**-24])
    monkeypatch.setattr("attnlib.speculative.uniform", lambda *given: almost)
    assert judge(p, q, torch.tensor([2])).shape == (1,)


class Says:
    """Proposes what it was made with."""

    def __init__(self, guesses, laws=None):
        self.said = guesses, laws

    def propose(self, ids, count):
        return self.said


def test_what_a_draft_says_is_looked_at(as_shipped, model):
    two, even = torch.tensor([1, 2]), torch.full((2, WORDS), 1 / WORDS)
    none = even.clone()
    none[1, 2] = 0.0
    for words, said in {
        "guesses: expected a tensor of integers, got list": ([1, 2],),
        "guesses: expected a tensor of integers, got torch.float32": (two.float(),),
        r"guesses: expected \(4,\), or fewer at the end, got shape \(5,\)": (
            torch.ones(5, dtype=torch.int64),
        ),
        r"guesses: expected \(4,\), or fewer at the end, got shape \(1, 2\)": (two[None],),
        r"guesses: expected tokens below 7, got \[1, 7\]": (torch.tensor([1, 7]),),
        r"guesses: expected tokens below 7, got \[-1, 1\]": (torch.tensor([-1, 1]),),
        r"laws: expected shape \(2, 7\), got \(2, 6\)": (two, even[:, 1:]),
        "laws: expected floating-point numbers, or None, got torch.int64": (
            two,
            even.long(),
        ),
        "laws: expected those from which the guesses were drawn, got 0": (two, none),
    }.items():
        with says(words):
            speculate(model, IDS[0], 6, Says(*said))
    small = IDS[0].to(torch.int32)
    assert speculate(model, small, 6, Says(two, even)).dtype == torch.int32
    short = LanguageModel(WORDS, 9, 16, 4, 1)
    with says("length: expected at most 5 with a cache"):
        speculate(model, IDS[0], 6, short)  # at once, and not at the tenth token


def test_refusals(as_shipped, model):
    caches = [KVCache(40) for _ in model.blocks]
    other = LanguageModel(WORDS + 1, 48, 16, 4, 1)
    for words, given in {
        'draft: expected "ngram", a number of blocks': {"draft": "gram"},
        "draft: expected between 1 and 2, got 3": {"draft": 3},
        "draft: expected between 1 and 2, got 0": {"draft": 0},
        "draft: expected .* got True": {"draft": True},
        "draft: expected a vocabulary of 7, got one of 8": {"draft": other},
        "ahead: expected at least 1": {"ahead": 0},
        "ahead: expected a whole number": {"ahead": 2.5},
        "cache: expected True or a list of caches, got False": {"cache": False},
        "stop: expected none for a batch": {"cache": caches, "stop": [1]},
        "stop: expected between 0 and 6, got 7": {"stop": [WORDS]},
        "temperature: expected at least 0": {"temperature": -1},
        "repetition_penalty: expected a number above 0": {"repetition_penalty": 0},
        "generator: expected one for each of 3": {"generator": generators(1, 2)},
        "length: expected at most": {"length": 60},
        "padding: expected": {"padding": [0, 1]},
    }.items():
        with says(words):
            speculate(model, IDS, **({"length": 5} | given))
    with says("model: expected a LanguageModel, got Linear"):
        speculate(torch.nn.Linear(2, 2), IDS, 5)
    with pytest.raises(TypeError, match="top_q"):
        speculate(model, IDS, 5, top_q=0.5)
