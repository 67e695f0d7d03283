"""Texts token by token: where they end, who is still computed, and what may be drawn."""

import copy
import json
import math
from itertools import combinations

import pytest
import torch

from attnlib import (
    KVCache,
    LanguageModel,
    PagedCache,
    QuantizedCache,
    ScaledDotProductAttention,
    WindowCache,
    as_text,
    log_probabilities,
    sample,
    speculate,
    stream,
)
from attnlib.generation import adjustment, token_probabilities
from attnlib.logits import keep_min_p, keep_top_p, penalize
from attnlib.pretrained import read_generation_config

WORDS = 11
IDS = torch.tensor([[3, 1, 4], [1, 5, 9], [2, 6, 5]])


@pytest.fixture(scope="module")
def model():
    """Sharp enough that its texts differ and end at different places."""
    torch.manual_seed(5)
    model = LanguageModel(WORDS, 32, 16, 2, 2).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def says(words):
    return pytest.raises((TypeError, ValueError), match=words)


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def rows_read(model, monkeypatch):
    """How many sequences each call of the model computes."""
    read, forward = [], model.forward

    def counting(ids, *args, **named):
        read.append(1 if ids.dim() == 1 else len(ids))
        return forward(ids, *args, **named)

    monkeypatch.setattr(model, "forward", counting)
    return read


def ended(text, stop, start=3):
    """What a text is, up to and with the first of these tokens after its start."""
    for place in range(start, len(text)):
        if text[place] in stop:
            return text[: place + 1].tolist()
    return text.tolist()


@pytest.mark.parametrize("cache", [True, False, "given"])
@pytest.mark.parametrize("padded", [False, True])
def test_each_text_ends_where_it_does_alone(model, monkeypatch, cache, padded):
    padding = torch.tensor([0, 2, 1]) if padded else None
    whole = model.generate(
        IDS, 20, generator=generators(1, 2, 3), cache=True, padding=padding
    )
    for stop in combinations(range(WORDS), 2):
        lengths = [len(ended(text, stop)) - 3 for text in whole]
        if lengths[0] < min(lengths[1:]) and max(lengths) < 20:  # the first leaves first
            break
    else:
        raise AssertionError("nothing to see")
    read = rows_read(model, monkeypatch)
    held = [KVCache(40) for _ in model.blocks] if cache == "given" else cache
    options = {"padding": padding, "stop": stop}
    text = model.generate(IDS, 20, generator=generators(1, 2, 3), cache=held, **options)
    assert text.shape[1] == 3 + max(lengths)
    for row, full in zip(text, whole, strict=True):
        right = ended(full, stop)
        filled = [right[-1]] * (text.shape[1] - len(right))
        assert row.tolist() == right + filled
    computed = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert read == ([3] * max(lengths) if cache == "given" else computed)


def test_one_text_ends_too(model):
    whole = model.generate(IDS[0], 12, temperature=0.0)
    stop = [whole[7].item()]
    assert model.generate(IDS[0], 12, 0.0, stop=stop).tolist() == ended(whole, stop)
    begun = torch.tensor([*IDS[0], *stop])  # what stands in the start ends nothing
    assert len(model.generate(begun, 3, stop=stop)) > 4
    assert list(stream(model, IDS[0], 0)) == []
    for stop in ([], [1]):
        assert model.generate(IDS[:0], 4, stop=stop).shape == (0, 7)


def test_tokens_come_as_they_are_drawn_and_are_the_callers(model, monkeypatch):
    read = rows_read(model, monkeypatch)
    tokens = stream(model, IDS, 4, temperature=0.0)
    first = next(tokens)
    assert len(read) == 1 and first.shape == (3,) and not first.is_inference()
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    kept = first.clone()
    first.fill_(0)  # theirs to change
    text = torch.cat([IDS, kept[:, None], *(t[:, None] for t in tokens)], dim=1)
    assert torch.equal(text, model.generate(IDS, 4, temperature=0.0))
    model(text).sum().backward()


def test_a_text_does_not_depend_on_its_company(model):
    batch = model.generate(IDS, 15, generator=generators(7, 8, 9), top_p=0.9, cache=True)
    for row, start, seed in zip(batch, IDS, (7, 8, 9), strict=True):
        for own in (generators(seed), generators(seed)[0]):
            assert torch.equal(model.generate(start, 15, generator=own, top_p=0.9), row)
    turned = model.generate(IDS.flip(0), 15, generator=generators(9, 8, 7), top_p=0.9)
    assert torch.equal(turned.flip(0), batch)


def test_refusals_come_at_once(as_shipped, model):
    for words, given in {
        "stop: expected a list of token ids or texts, got 3": {"stop": 3},
        "stop: expected a list of token ids or texts, got 'end'": {"stop": "end"},
        "stop: expected between 0 and 10, got 11": {"stop": [2, WORDS]},
        "stop: expected a whole number, got 2.0": {"stop": [2.0]},
        "temperature: expected at least 0": {"temperature": -1},
        "top_p: expected above 0, got 0": {"top_p": 0},
        "top_p: expected a probability between 0 and 1, got 1.1": {"top_p": 1.1},
        "min_p: expected a probability between 0 and 1, got -0.1": {"min_p": -0.1},
        "min_p: expected a probability between 0 and 1, got True": {"min_p": True},
        "repetition_penalty: expected a number above 0": {"repetition_penalty": 0.0},
        "repetition_penalty: expected a number, got '2'": {"repetition_penalty": "2"},
        "repetition_penalty: .* finite, got inf": {"repetition_penalty": math.inf},
        "presence_penalty: expected finite, got nan": {"presence_penalty": math.nan},
        "presence_penalty: expected a number, got True": {"presence_penalty": True},
        r"bias: expected numbers by token, or None, got \[1\]": {"bias": [1]},
        "bias: expected between 0 and 10, got 11": {"bias": {WORDS: 1.0}},
        "bias: expected a whole number, got '1'": {"bias": {"1": 1.0}},
        "bias: expected a number for token 2, got None": {"bias": {2: None}},
        "bias: expected a finite number, or -inf, for token 2, got nan": {
            "bias": {2: math.nan}
        },
        "bias: expected a finite number, or -inf, for token 2, got 1e": {
            "bias": {2: 1e300}
        },
        "bias: expected one token at least that is not forbidden": {
            "bias": dict.fromkeys(range(WORDS), -math.inf)
        },
        "stop: expected no empty text": {"stop": ["ab", ""], "tokenizer": Letters()},
        "tokenizer: expected one with decode for texts of stop, got None": {"stop": ["ab"]},
        "generator: expected one for each of 3 sequences, got 2": {
            "generator": generators(1, 2)
        },
        "generator: expected torch.Generator or a list, got 7": {"generator": 7},
    }.items():
        with says(words):
            stream(model, IDS, 5, **given)
        with says(words):
            model.generate(IDS, 5, **given)
    with pytest.raises(TypeError, match="top_q"):
        model.generate(IDS, 5, top_q=0.5)
    with says("model: expected a LanguageModel, got Linear"):
        stream(torch.nn.Linear(2, 2), IDS, 5)
    with says("generator: expected one for each of 1 sequences, got 2"):
        sample(torch.zeros(4), generator=generators(1, 2))
    with says("generator: expected one for each of 2 sequences, got 3"):
        sample(torch.zeros(2, 4), 0.0, generator=generators(1, 2, 3))  # greedy is no excuse
    model.norm.gamma.device_mesh = None  # as a sharded parameter has one
    with says("stop: expected none where parameters are sharded"):
        stream(model, IDS, 5, stop=[1])
    del model.norm.gamma.device_mesh


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_what_is_drawn_has_the_probabilities_that_the_cuts_leave(temperature):
    torch.manual_seed(1)
    logits = torch.tensor([2.0, 1.5, 1.5, 0.0, -1.0, -math.inf])
    P = (logits / temperature).softmax(dim=0)
    for top_k, top_p, min_p in ((4, 0.8, 0.05), (None, 0.5, None), (None, None, 0.5)):
        order = P.argsort(descending=True, stable=True)[:top_k].tolist()
        of_k, kept = P[order] / P[order].sum(), []
        for place, word in enumerate(order):
            if top_p is None or of_k[:place].sum() < top_p:
                kept.append(word)
        kept = [w for w in kept if P[w] >= (min_p or 0) * P.max()]
        expected = torch.zeros(6).index_put((torch.tensor(kept),), P[kept] / P[kept].sum())
        many = logits.expand(40_000, -1)
        drawn = sample(many, temperature, top_k, top_p, min_p).flatten()
        often = drawn.bincount(minlength=6) / len(drawn)
        assert not often[expected == 0].any()
        assert (often - expected).abs().max() < 0.01


def test_the_borders_of_the_cuts(as_shipped):
    even = torch.zeros(2, 4)
    assert torch.equal(keep_top_p(even, 1.0), even) and torch.equal(
        keep_min_p(even, 0), even
    )
    assert keep_top_p(even, 0.5).isfinite().sum(dim=-1).tolist() == [2, 2]
    assert keep_min_p(even, 1.0).isfinite().all()
    many = torch.zeros(5000)  # of equal ones the first
    assert keep_top_p(many, 0.09995).isfinite().nonzero()[:, 0].tolist() == list(range(500))
    assert keep_top_p(torch.tensor([5.0, 1.0]), 1e-6).tolist() == [5.0, -math.inf]
    wide = torch.randn(50_000)
    assert torch.equal(sample(wide, 0, top_p=0.1, min_p=0.9)[0], wide.argmax())


def test_a_penalty_counts_the_text_and_no_padding(model):
    logits = torch.tensor([[3.0, -2.0, 1.0], [3.0, -2.0, 1.0]])
    ids, padding = torch.tensor([[1, 0, 0], [2, 1, 1]]), torch.tensor([0, 1])
    right = [[1.5, -4.0, 1.0], [3.0, -4.0, 1.0]]
    assert penalize(logits, ids, 2.0, padding=padding).tolist() == right
    half = penalize(torch.tensor([-9e3], dtype=torch.float16), torch.tensor([0]), 10.0)
    assert half.item() == -9e4  # beyond float16
    small = ids.to(torch.int32)
    assert penalize(logits[0], small[0], 2.0).tolist() == right[0]
    alone = model.generate(IDS[1, 1:], 7, temperature=0.0, repetition_penalty=3.0)
    assert not torch.equal(alone, model.generate(IDS[1, 1:], 7, temperature=0.0))
    columns = {"padding": [0, 1, 0], "repetition_penalty": 3.0}
    batch = model.generate(IDS, 7, temperature=0.0, **columns)
    assert torch.equal(batch[1, 1:], alone)


@pytest.mark.parametrize("cache", [True, False])
def test_a_difference_and_a_bias_act_on_each_draw(model, cache):
    """Beside a loop by hand, which knows of no padding and no batch."""
    options = {"temperature": 0.0, "presence_penalty": 1.5, "cache": cache}
    options["bias"] = {0: 2.0, 7: -math.inf, 3: -1.0}
    batch = model.generate(IDS, 12, padding=[0, 1, 0], **options)
    assert not torch.equal(batch, model.generate(IDS, 12, 0.0, padding=[0, 1, 0]))
    for row, first in zip(batch, (0, 1, 0), strict=True):
        text = row[first:3].tolist()
        for token in row[3:].tolist():
            logits = model(torch.tensor(text))[-1]
            for word in range(WORDS):
                logits[word] -= 1.5 * (word in text) - options["bias"].get(word, 0.0)
            assert token == logits.argmax()
            text.append(token)
    assert not (batch[:, 3:] == 7).any()
    for token in range(WORDS):  # what stands where no token is does not count
        other = IDS.clone()
        other[1, 0] = token
        assert torch.equal(
            model.generate(other, 12, padding=[0, 1, 0], **options)[:, 3:], batch[:, 3:]
        )
    del options["bias"]
    alone = model.generate(IDS[0], 12, **options)
    assert not torch.equal(alone, model.generate(IDS[0], 12, 0.0))
    one = model.generate(IDS[0], 5, bias={7: 1000.0}, cache=cache)
    assert one[3:].tolist() == [7] * 5


class Letters:
    """Token w is the letter w; but 8 and 9 are the halves of one character."""

    def decode(self, ids):
        letters = [b"%c" % (97 + w) for w in range(8)] + [b"\xc3", b"\xa4", b"k"]
        return b"".join(letters[w] for w in ids).decode(errors="replace")


@pytest.mark.parametrize("cache", [True, False, "given"])
def test_a_text_ends_a_text_wherever_it_stands(model, cache):
    whole = model.generate(IDS, 20, generator=generators(1, 2, 3), cache=True)
    new = [Letters().decode(row) for row in whole[:, 3:].tolist()]
    for size in (1, 2, 3):
        for place in (0, 2, 9):
            stop = [new[0][place : place + size], new[1][5 : 5 + size], 4]
            held = [KVCache(40) for _ in model.blocks] if cache == "given" else cache
            options = {"cache": held, "stop": stop, "tokenizer": Letters()}
            text = model.generate(IDS, 20, generator=generators(1, 2, 3), **options)
            for row, full in zip(text[:, 3:].tolist(), whole[:, 3:].tolist(), strict=True):
                n = next((n for n in range(1, 21) if is_over(full[:n], stop)), 20)
                assert row == full[:n] + [full[n - 1]] * (len(row) - n)
    start = torch.tensor([0, 1, 2])  # "abc" stands in the start, and ends nothing
    assert len(model.generate(start, 3, stop=["bc"], tokenizer=Letters())) > 4


def is_over(tokens, stop):
    text = Letters().decode(tokens)
    return tokens[-1] in stop or any(end in text for end in stop if isinstance(end, str))


def test_guessed_tokens_end_at_the_same_texts(model):
    whole = Letters().decode(model.generate(IDS[0], 20, temperature=0.0)[3:].tolist())
    for place in range(15):
        options = {"stop": [whole[place : place + 2]], "tokenizer": Letters()}
        options |= {"presence_penalty": 0.5, "bias": {1: 0.5}}
        expected = model.generate(IDS, 20, 0.0, **options)
        for draft in ("ngram", 1):
            assert torch.equal(speculate(model, IDS, 20, draft, 0.0, **options), expected)


def test_words_come_in_whole_characters():
    tokens = [torch.tensor(w) for w in (0, 8, 9, 1, 9, 2, 8)]
    assert [*as_text(tokens, Letters())] == ["a", "ä", "b", "\ufffdc", "\ufffd"]
    assert [*as_text([], Letters())] == []


@torch.no_grad()
def test_what_a_model_gives_to_a_text(model):
    padding = torch.tensor([0, 2, 1])
    found = log_probabilities(model, IDS, padding)
    for row, first, ids in zip(found, padding.tolist(), IDS, strict=True):
        P = model(ids[first:]).softmax(dim=-1)
        right = [P[i, ids[first + i + 1]].log() for i in range(2 - first)]
        torch.testing.assert_close(row, torch.tensor([0.0] * first + right))
    loss = torch.nn.functional.cross_entropy(model(IDS[0, :-1]), IDS[0, 1:])
    torch.testing.assert_close(-log_probabilities(model, IDS[0]).mean(), loss)
    assert log_probabilities(model, IDS[:, :1]).shape == (3, 0)
    with torch.enable_grad():
        assert log_probabilities(model, IDS, [0, 2, 1]).requires_grad
    assert log_probabilities(model, IDS.int()).dtype == torch.float32
    assert log_probabilities(copy.deepcopy(model).bfloat16(), IDS).dtype == torch.float32


@pytest.mark.parametrize(
    "said",
    [
        {"do_sample": True, "repetition_penalty": 1.3, "eos_token_id": [4, 2]},
        {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.8, "min_p": 0.05},
        {"do_sample": True, "top_k": 3, "suppress_tokens": [1, 5], "num_beams": 1},
        {"repetition_penalty": 1.3, "eos_token_id": 4, "max_length": 9, "pad_token_id": 0},
    ],
)
def test_a_file_of_generation_asks_for_what_transformers_does(tmp_path, said):
    """Beside what its own `generate` makes of the logits, at each of five draws."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    size = {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 60}
    guest = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).eval()
    guest.lm_head.weight.data *= 10
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    choice = read_generation_config(tmp_path)
    ids, mine = torch.randint(60, (2, 4)), LanguageModel(60, 9, 8, 2, 1)
    asked = [choice.pop(name) for name in ("repetition_penalty", "bias", "stop")]
    assert asked[2] == [*torch.tensor(said.get("eos_token_id", [])).reshape(-1)]
    assert asked[1] == dict.fromkeys(said.get("suppress_tokens", ()), -math.inf)
    adjust = adjustment(mine, asked[0], 0.0, asked[1])
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    wanted |= {"max_new_tokens": 5, "pad_token_id": 0}
    wanted["attention_mask"] = torch.ones_like(ids)
    found = guest.generate(ids, generation_config=theirs, **wanted)
    for step, (scores, logits) in enumerate(zip(found.scores, found.logits, strict=True)):
        z = adjust(logits, found.sequences[:, : 4 + step], None)
        if "do_sample" in said:
            torch.testing.assert_close(token_probabilities(z, **choice), scores.softmax(-1))
        else:
            assert choice == {"temperature": 0.0}
            assert torch.equal(sample(z, **choice)[:, 0], scores.argmax(dim=-1))


def test_a_file_of_generation_may_ask_for_too_much(tmp_path):
    file = tmp_path / "generation_config.json"
    with pytest.raises(FileNotFoundError, match=r"a file generation_config\.json"):
        read_generation_config(tmp_path)
    for name, value in {"num_beams": 4, "no_repeat_ngram_size": 2, "top_h": 0.4}.items():
        file.write_text(json.dumps({name: value, "do_sample": True}))
        with says(f"generation_config.json: expected nothing .* got {{'{name}': {value}}}"):
            read_generation_config(tmp_path)
    file.write_text(json.dumps({"stop_strings": "ab", "eos_token_id": 3}))
    assert read_generation_config(tmp_path)["stop"] == [3, "ab"]
    file.write_text("[1]")
    with says("generation_config.json: expected an object with names, got a list"):
        read_generation_config(tmp_path)


def pages_of(batch):
    pages = PagedCache(20, 2)
    return pages.view([pages.open() for _ in range(batch)])


@pytest.mark.parametrize("kind", ["whole", "window", "pages", "few bits"])
def test_beams_go_on_in_any_cache(kind):
    """Rows are chosen again and again, some twice; then each goes on as alone."""
    torch.manual_seed(0)
    heads = ScaledDotProductAttention(causal=True, window=4 if kind == "window" else None)
    model = LanguageModel(11, 20, 8, 2, 2, attention=heads, positions="rotary").double()
    make = {
        "whole": lambda: KVCache(20),
        "window": lambda: WindowCache(4),
        "pages": lambda: pages_of(3),
        "few bits": lambda: QuantizedCache(20, 8, group=16),
    }[kind]
    caches, texts = [make() for _ in model.blocks], torch.randint(11, (3, 5))
    with torch.no_grad():
        logits = model(texts, cache=caches)[:, -1]
        for chosen in ([2, 0, 2, 1], [3, 3, 1, 0], [1, 2]):
            rows, token = torch.tensor(chosen), torch.randint(11, (len(chosen), 1))
            for held in caches:
                held.select(rows)
            texts = torch.cat([texts[rows], token], dim=1)
            logits = model(token, cache=caches)[:, -1]
            assert torch.allclose(logits, model(texts)[:, -1])
    if kind == "pages":
        pages = caches[0].cache
        assert {*pages.tables} == {*caches[0].sequences} and len(pages.tables) == 2
        assert len(pages.unused) == 20 - len({p for t in pages.tables.values() for p in t})
        with says("rows: expected a cache of a batch"):
            pages.view(caches[0].sequences[0]).select(torch.tensor([0]))
        with says("rows: expected a tensor of integers, got list"):
            caches[0].select([0])
        with pytest.raises(IndexError):
            caches[0].select(torch.tensor([0, 2]))
        assert len(pages.tables) == 2  # nothing is opened


def test_a_cache_keeps_the_sequences_that_it_is_told(as_shipped, model):
    caches = [KVCache(8) for _ in model.blocks]
    with torch.inference_mode():
        model(IDS, cache=caches)
        for held in caches:
            held.select(torch.tensor([2, 0, 2]))
    with torch.no_grad():
        mixed = model(IDS[:, :1], cache=caches)
        whole = torch.cat([IDS[[2, 0, 2]], IDS[:, :1]], dim=1)
        assert torch.allclose(mixed[:, 0], model(whole)[:, -1], atol=1e-5)
    empty = KVCache(3)
    empty.select(torch.tensor([0]))
    assert len(empty) == 0
    for words, rows in {
        "rows: expected a tensor of integers, got list": [0],
        "rows: expected a tensor of integers, got torch.bool": torch.tensor([True]),
        r"rows: expected one dimension, got shape \(1, 1\)": torch.tensor([[0]]),
    }.items():
        with says(words):
            caches[0].select(rows)
    with pytest.raises(IndexError):
        caches[0].select(torch.tensor([3]))
    alone = KVCache(3)
    alone.append(*torch.randn(2, 4, 1, 8))
    with says(r"rows: expected a cache of a batch, got one of shape \(4, 3, 8\)"):
        alone.select(torch.tensor([0]))
