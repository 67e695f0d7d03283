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
from attnlib.speculative import NgramDraft, first_blocks, following, judge

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
def test_the_likeliest_text_is_that_of_generate(model, rows, draft):
    ids = IDS[rows]
    for length in (0, 1, 2, 23):
        expected = model.generate(ids, length, temperature=0.0, cache=True)
        guesses = {"small": make(1, 6), "known": Known(expected)}.get(draft, draft)
        for ahead in (1, 3, 30):
            found = speculate(model, ids, length, guesses, 0.0, ahead=ahead)
            assert torch.equal(found, expected)
    assert speculate(model, IDS[:0], 4).shape[0] == 0


@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_padding_stops_and_penalties_are_those_of_generate(model, penalty):
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
def test_what_is_drawn_has_the_models_law(model, draft):
    """Three tokens, all 343 of them by their exact probabilities."""
    ids, options = IDS[0], {"temperature": 3.0, "top_k": 5, "repetition_penalty": 1.3}
    with torch.no_grad():
        texts = torch.cartesian_prod(*[torch.arange(WORDS)] * 3)
        law = torch.ones(len(texts))
        for place in range(3):
            text = torch.cat([ids.expand(len(texts), -1), texts[:, :place]], dim=1)
            z = model(text)[:, -1]
            for row, seen in zip(z, text, strict=True):
                for word in seen.unique():
                    row[word] = row[word] / 1.3 if row[word] > 0 else row[word] * 1.3
            kept = z.topk(5).indices
            z = torch.full_like(z, -torch.inf).scatter(-1, kept, z.gather(-1, kept)) / 3
            law *= z.softmax(dim=-1).gather(-1, texts[:, place, None])[:, 0]
    assert law.sum().item() == pytest.approx(1)
    guesses = make(1, 6) if draft == "small" else draft
    counts, luck = torch.zeros(WORDS**3), torch.Generator().manual_seed(1)
    for _ in range(2000):
        new = speculate(model, ids, 3, guesses, generator=luck, ahead=2, **options)[5:]
        counts[(new[0] * WORDS + new[1]) * WORDS + new[2]] += 1
    assert not counts[law == 0].any()
    first = counts.view(WORDS, -1).sum(dim=1) / 2000, law.view(WORDS, -1).sum(dim=1)
    last = counts.view(-1, WORDS).sum(dim=0) / 2000, law.view(-1, WORDS).sum(dim=0)
    for found, expected in (first, last):
        assert (found - expected).abs().max() < 4.5 * (0.25 / 2000) ** 0.5


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


def test_a_refusal_that_rounding_made_is_no_nan():
    """p and q differ by less than their sum's rounding; a uniform number of almost 1."""
    p = torch.tensor([[0.1, 0.2, 0.7]] * 2)
    q = p[:1] * (1 + 1e-7)
    new = judge(p, q, torch.tensor([2]), torch.Generator().manual_seed(0))
    assert len(new) == 2


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
