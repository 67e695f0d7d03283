"""Any attention inside the models of transformers, and what is refused."""

import importlib.util
import itertools
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import drawn
from attnlib import (
    BaseAttention,
    FlashAttention,
    KVCache,
    LearnedBiasAttention,
    Llama,
    QuantizedCache,
    ScaledDotProductAttention,
    WindowCache,
    hf,
)

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"initializer_range": 0.2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"initializer_range": 0.2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
KINDS = {
    "GPT2": GPT2,
    "Llama": SIZES,
    "Mistral": {**SIZES, "sliding_window": 5},
    "Qwen3": SIZES,
    "Gemma": SIZES,
    "Gemma2": {**SIZES, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "Gemma3Text": {**SIZES, "sliding_window": 5},
    "GptOss": {**SIZES, "sliding_window": 5, "initializer_range": 0.3},
}
KINDS["GptOss"] |= {"num_local_experts": 4, "num_experts_per_tok": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


class Plainest(BaseAttention):
    """An attention that has neither a causal mode nor weights."""

    def forward(self, query, key, value, mask=None):
        return ScaledDotProductAttention()(query, key, value, mask)[0], None


class Around(BaseAttention):
    """What another attention does, with a part of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, query, key, value, mask=None):
        return ScaledDotProductAttention()(query, key, value, mask)


BIASED = LearnedBiasAttention(4).requires_grad_(False)
nn.init.normal_(BIASED.bias, generator=torch.Generator().manual_seed(1))
GUESTS = {
    "attnlib": FlashAttention(),
    "tiles": FlashAttention(backend="torch"),
    "plain": ScaledDotProductAttention(),
    "plainest": Plainest(),
}
REAL = {
    "nothing padded": torch.ones(3, 11, dtype=torch.long),
    "left": torch.tensor([[1] * 11, [0] * 4 + [1] * 7, [0] + [1] * 10]),
    "right": torch.tensor([[1] * 11, [1] * 7 + [0] * 4, [1] * 10 + [0]]),
}
IDS = torch.randint(1, 61, (3, 11), generator=torch.Generator().manual_seed(0))
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def transformers():
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    if not library.utils.is_torch_available():
        pytest.skip("transformers takes no PyTorch as old as the one installed")
    for name, guest in (*GUESTS.items(), ("biased", BIASED)):
        assert hf.register(name, guest) == name
    return library


@pytest.fixture
def make(transformers):
    def build(kind, auto="AutoModelForCausalLM", **more):
        torch.manual_seed(22)
        options = {**KINDS.get(kind, {}), **SPECIAL, **more}
        config = getattr(transformers, f"{kind}Config")(**options)
        return getattr(transformers, auto).from_config(config).eval()

    return build


close = partial(drawn.close, atol=2e-5)


def each_guest(model):
    """Their names; the model attends by one after the other."""
    for name in GUESTS:
        model.set_attn_implementation(name)
        yield name


def caches(transformers, model):
    yield transformers.DynamicCache(config=model.config)
    yield transformers.StaticCache(config=model.config, max_cache_len=20)


def in_pieces(model, cache, real=None, ends=(4, 9, 10)):
    """Logits of a text that is read piece by piece."""
    logits = []
    for a, b in itertools.pairwise((0, *ends, 11)):
        mask = None if real is None else real[:, :b]
        piece = model(IDS[:, a:b], attention_mask=mask, past_key_values=cache)
        logits.append(piece.logits)
    return torch.cat(logits, dim=1)


def results(model, name, real, **inputs):
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    model.zero_grad()
    logits = model(IDS, attention_mask=real, **inputs).logits[real.bool()]
    logits.logsumexp(dim=-1).mean().backward()
    given = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), given


@each_kind
@pytest.mark.parametrize("side", REAL)
def test_logits_and_gradients(make, kind, side):
    model = make(kind)
    logits, gradients = results(model, "eager", REAL[side])
    for name in GUESTS:
        found, given = results(model, name, REAL[side])
        close(found, logits)
        assert given.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            close(given[parameter], gradient)


def greedy(model, tokens, **options):
    options |= {"do_sample": False, "disable_compile": True}
    return model.generate(
        IDS, attention_mask=REAL["left"], max_new_tokens=tokens, **options
    )


@each_kind
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_greedy_text(make, kind, cache):
    model = make(kind)
    model.set_attn_implementation("eager")
    options = {"use_cache": False} if cache == "none" else {"cache_implementation": cache}
    expected = greedy(model, 12, **options)
    for name in each_guest(model):
        assert torch.equal(greedy(model, 12, **options), expected), name


@each_kind
def test_a_text_in_pieces(transformers, make, kind):
    """A second piece stands after what a cache holds: more keys than queries.

    Scores that depend on places, too: a static cache returns places that hold nothing,
    which are no keys; but for sinks, which are one key more.
    """
    model = make(kind)
    for name in [*GUESTS, *["biased"] * (kind != "GptOss")]:
        model.set_attn_implementation(name)
        with torch.no_grad():
            whole = model(IDS).logits
            for cache in caches(transformers, model):
                close(in_pieces(model, cache, REAL["nothing padded"]), whole)
                cache.reset()
                close(in_pieces(model, cache), whole)
        caching = ("dynamic", "static") if name == "biased" else ()
        texts = [greedy(model, 8, cache_implementation=cache) for cache in caching]
        assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Gemma2"])
def test_scores_by_place_in_a_static_cache_without_padding(make, kind):
    """The library makes the mask of `generate` contiguous, which drops attributes."""
    model = make(kind)
    model.set_attn_implementation("biased")
    options = {"do_sample": False, "disable_compile": True, "max_new_tokens": 8}
    static, dynamic = (
        model.generate(IDS, cache_implementation=cache, **options)
        for cache in ("static", "dynamic")
    )
    assert torch.equal(static, dynamic)


COMPILED = """
import torch
import transformers
from attnlib import FlashAttention, ScaledDotProductAttention, hf

torch.manual_seed(22)
sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
sizes |= {"vocab_size": 61, "num_key_value_heads": 2, "intermediate_size": 48}
config = transformers.LlamaConfig(**sizes, initializer_range=0.2)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
for guest in (FlashAttention(), ScaledDotProductAttention()):
    model.set_attn_implementation(hf.register("guest", guest))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-5)
"""


def test_compiled_without_a_break(transformers):
    """In a process of its own: the checks of types in these tests can't be traced."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


def test_weights_of_gpt2(make):
    """Its layers are not told that the model collects them."""
    model, seen = make("GPT2"), []
    for name in ("eager", "plain"):
        model.set_attn_implementation(name)
        seen.append(list(model(IDS, output_attentions=True).attentions))
    assert len(seen[1]) == 2
    close(*seen)
    model.set_attn_implementation("attnlib")
    with pytest.raises(ValueError, match="output_attentions: expected False, since Flash"):
        model(IDS, output_attentions=True)


def test_documents_packed_into_one_row(make):
    """The mask keeps them apart, if the positions tell of them; otherwise it is refused."""
    model = make("Llama").eval()
    model.set_attn_implementation("attnlib")
    ids, starts = IDS[:1, :9], torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    lengths |= {"max_length_q": 5, "max_length_k": 5}
    places = torch.cat([torch.arange(4), torch.arange(5)])[None]
    packed = model(ids, position_ids=places, use_cache=False, **lengths).logits
    alone = [model(ids[:, part]).logits for part in (slice(4), slice(4, 9))]
    close(packed, torch.cat(alone, dim=1), atol=1e-5)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a mask that keeps"):
        model(ids, use_cache=False, **lengths)
    seen = torch.ones_like(ids)  # no padding: a mask, or none, by the version
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a mask that keeps"):
        model(ids, attention_mask=seen, use_cache=False, **lengths)
    one = {"cu_seq_lens_q": starts[[0, 2]], "cu_seq_lens_k": starts[[0, 2]]}
    close(model(ids, **one).logits, model(ids).logits)


def test_modern_bert(make):
    """It passes `deterministic`, which is for the kernels of others."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "local_attention": 6}
    sizes |= {"cls_token_id": 1, "sep_token_id": 2}
    model = make("ModernBert", "AutoModelForMaskedLM", **sizes)
    for real in REAL.values():
        model.set_attn_implementation("eager")
        expected = model(IDS, attention_mask=real).logits[real.bool()]
        for _ in each_guest(model):
            close(model(IDS, attention_mask=real).logits[real.bool()], expected)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen3", "Gemma"])  # without windows
def test_a_quantized_cache(transformers, make, kind):
    """Old keys and values in 8 bits, which changes the logits, as much as with sdpa.

    Now and then round-off tips a number over to the next one of 8 bits; so what is compared
    is how far the logits are from those of sdpa, on average, with how much the bits change.
    """
    model, real = make(kind), REAL["left"]

    def logits(cache):
        return in_pieces(model, cache, real, ends=(7, 8, 10))[real.bool()]

    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        exact = logits(transformers.DynamicCache(config=model.config))
        expected = logits(transformers.QuantizedCache("fp8", model.config))
        change = (expected - exact).abs().mean()
        assert change > 1e-3
        for name in each_guest(model):
            found = logits(transformers.QuantizedCache("fp8", model.config))
            assert (found - expected).abs().mean() < 0.05 * change, name


def test_keys_of_another_text_are_not_cut_off():
    """In cross-attention there may be more keys than were read of this text."""
    everything = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    mask = hf.mask_for_model(lambda **options: everything, q_length=3, q_offset=0)
    assert getattr(mask, "used", None) is None
    everything[..., 5:] = False
    older = {"cache_position": torch.tensor([4, 5]), "kv_offset": 1}
    for options in ({"q_length": 2, "q_offset": 3}, older):
        assert hf.mask_for_model(lambda **options: everything, **options).used == 5


def test_bfloat16(make):
    model = make("Llama", attn_implementation="eager").bfloat16()
    with torch.no_grad():
        expected = model(IDS).logits
        for _ in each_guest(model):
            found = model(IDS).logits
            assert found.dtype == torch.bfloat16
            close(found, expected, atol=0.15)


def test_encoders_and_cross_attention(make):
    """Layers that are not causal; T5's learned bias; keys of another text."""
    bert = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    bert |= {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
    t5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    t5 |= {"num_heads": 4, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    for model, inputs in (
        (make("Bert", "AutoModelForMaskedLM", **bert), {}),
        (make("T5", "AutoModelForSeq2SeqLM", **t5), {"decoder_input_ids": IDS[:, :5]}),
    ):
        for real in REAL.values():
            model.set_attn_implementation("eager")
            expected = model(IDS, attention_mask=real, **inputs).logits
            chosen = slice(None) if inputs else real.bool()
            for _ in each_guest(model):
                found = model(IDS, attention_mask=real, **inputs).logits
                close(found[chosen], expected[chosen])


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_weights(transformers, make, kind):
    """Of a text that is padded, and as wide as the keys that a static cache returns."""
    model, rows = make(kind, attn_implementation="eager"), REAL["left"].bool()
    padded = {"attention_mask": REAL["left"], "output_attentions": True}
    seen = []
    for name in ("eager", "plain"):
        model.set_attn_implementation(name)
        weights = [x.transpose(1, 2)[rows] for x in model(IDS, **padded).attentions]
        if kind == "Llama":
            cache = transformers.StaticCache(config=model.config, max_cache_len=20)
            model(IDS[:, :4], past_key_values=cache)
            late = model(IDS[:, 4:], past_key_values=cache, output_attentions=True)
            weights += late.attentions
            assert weights[-1].shape[-1] == 20
        seen.append(weights)
    close(*seen)
    model.set_attn_implementation("attnlib")
    with pytest.raises(ValueError, match="output_attentions: expected False, since Flash"):
        model(IDS, **padded)


def test_frozen_parameters(make):
    model = make("Llama")
    plain = model(IDS).logits
    model.set_attn_implementation("biased")
    found = model(IDS).logits
    assert not torch.allclose(found, plain, atol=0.01)
    found.sum().backward()
    assert BIASED.bias.grad is None and model.lm_head.weight.grad is not None


def test_dropout(make):
    model = make("Llama", attention_dropout=0.5).train()
    model.set_attn_implementation("plain")
    torch.manual_seed(0)
    one, other = model(IDS).logits, model(IDS).logits
    assert not torch.equal(one, other)
    close(model.eval()(IDS).logits, model(IDS).logits, atol=0)
    assert GUESTS["plain"].dropout == 0 and not GUESTS["plain"].causal  # as it was
    model.train().set_attn_implementation("attnlib")
    refused = r"dropout: expected 0, since FlashAttention .* 0.5"
    with pytest.raises(ValueError, match=refused):
        model(IDS)
    model.eval()(IDS)


def layer(**more):
    module = nn.Module()
    module.is_causal = True
    vars(module).update(more)
    return module.eval()


def call(guest=None, mask=None, module=None, keys=6, **options):
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, h, n, 8) for h, n in ((4, 6), (2, keys), (2, keys)))
    guest = guest or FlashAttention()
    return hf.attend_for_model(guest, module or layer(), q, k, v, mask, **options)


def test_layout_and_none():
    output, weights = call()
    assert output.shape == (1, 6, 4, 8) and output.is_contiguous() and weights is None
    square = torch.ones(6, 9, dtype=torch.bool).tril()
    close(call(keys=9)[0], call(keys=9, mask=square)[0])
    everything = torch.ones(6, 9, dtype=torch.bool)
    for said in ({"is_causal": False}, {"module": layer(is_causal=False)}):
        close(call(keys=9, **said)[0], call(keys=9, mask=everything)[0])


def test_numbers_as_a_mask_with_cap_and_sink():
    allowed = torch.rand(1, 1, 6, 6) < 0.7
    numbers = torch.zeros(1, 1, 6, 6).masked_fill(~allowed, -torch.inf)
    for options in ({}, {"softcap": 2.0}, {"s_aux": torch.randn(4)}):
        for guest in GUESTS.values():
            one, other = (call(guest, mask, **options)[0] for mask in (allowed, numbers))
            close(one, other)


def test_a_bias_is_longer_than_the_keys_at_its_end():
    """As beside a cache that has room for more: its first column is the first key's."""
    bias = torch.randn(1, 4, 6, 9, generator=torch.Generator().manual_seed(2))
    for guest in GUESTS.values():
        one, other = (call(guest, position_bias=b)[0] for b in (bias, bias[..., :6]))
        assert torch.equal(one, other) and not torch.equal(one, call(guest)[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sliding_window": 3}, "sliding_window: expected a mask .* 3 tokens .* 6 keys"),
        ({"block_indices": 1}, "block_indices: expected nothing"),
        ({"cache": object()}, "cache: expected nothing, .* got object"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, "cu_seq_lens_q: expected a mask"),
    ],
)
def test_options_that_nobody_knows_are_refused(options, message):
    """Those that change nothing are not."""
    with pytest.raises((TypeError, ValueError), match=message):
        call(**options)
    harmless = {"position_ids": torch.arange(6)[None], "use_cache": True, "indices": None}
    found, _ = call(**harmless, sliding_window=6, output_attentions=False)
    close(found, call()[0], atol=0)


@pytest.mark.parametrize(
    "name, guest, message",
    [
        (3, FlashAttention(), "name: expected a text, got int"),
        ("my_sdpa", FlashAttention(), "name: expected letters, digits and _"),
        ("eager", FlashAttention(), "name: expected letters"),
        ("a/b", FlashAttention(), "name: expected letters"),
        ("mine", FlashAttention, "attention: expected an object .* got FlashAttention"),
        ("mine", torch.nn.Identity(), "attention: expected an object .* got Identity"),
        ("mine", LearnedBiasAttention(4), "parameters that are frozen, by requires_grad_"),
        ("mine", FlashAttention(causal=True), "without causal, .* got causal=True"),
        ("mine", ScaledDotProductAttention(0.1), "without dropout, .* got dropout=0.1"),
        ("mine", Around(nn.Dropout(0.1)), "Around without dropout, .* got dropout=0.1"),
        ("mine", Around(FlashAttention(causal=True)), "Around without causal"),
        ("mine", Around(nn.Linear(2, 2)), "are frozen, .* those of Around"),
    ],
)
def test_names_and_guests_that_are_refused(name, guest, message, as_shipped):
    with pytest.raises((TypeError, ValueError), match=message):
        hf.register(name, guest)


def test_a_name_is_known_again_when_the_module_is_loaded_anew(transformers):
    """As after an edit of it in a notebook."""
    spec = importlib.util.spec_from_file_location("attnlib_hf_anew", hf.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    hf.register("edited", FlashAttention())
    assert anew.register("edited", FlashAttention()) == "edited"


def test_a_name_may_be_given_anew_by_us_only(transformers, make):
    model = make("Llama")
    expected = model(IDS).logits
    for guest in (Plainest(), FlashAttention(), None):
        hf.register("anew", guest)
        model.set_attn_implementation("anew")
        close(model(IDS).logits, expected)
    transformers.AttentionInterface.register("theirs", print)
    with pytest.raises(ValueError, match="name: expected one that nobody has registered"):
        hf.register("theirs")


def test_a_model_that_keeps_its_own_attention_is_refused(transformers, make):
    llama = make("Llama")
    hf.register("put_in", Plainest(), model=llama)
    assert llama.config._attn_implementation == "put_in"
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    bloom = transformers.BloomForCausalLM(config)
    with pytest.raises(TypeError, match="got BloomForCausalLM, which keeps its own"):
        hf.register("put_in", model=bloom)
    assert bloom.config._attn_implementation != "put_in"


def test_without_the_library():
    """The module can be imported, and register says what to install."""
    missing = "import sys; sys.modules['transformers'] = None"
    script = f"{missing}; from attnlib import hf; hf.register()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    expected = "ImportError: transformers: expected version 5 or newer to be installed"
    assert f"{expected}; pip install attnlib[transformers]" in done.stderr


@pytest.mark.parametrize("kind", [KVCache, partial(QuantizedCache, bits=4, group=4)])
def test_the_same_cache_inside_and_outside(make, tmp_path, kind):
    """A model of the library with our cache, and ours of the same file with it."""
    guest = make("Llama")
    guest.save_pretrained(tmp_path)
    own = Llama.from_pretrained(tmp_path)
    ids = torch.randint(61, (2, 30))
    there = hf.cache_for_model(guest, [kind(40) for _ in own.blocks])
    here = [kind(40) for _ in own.blocks]
    with torch.no_grad():
        for start, end in itertools.pairwise((0, 11, 12, 13, 25, 30)):
            found = guest(ids[:, start:end], past_key_values=there).logits
            expected = own(ids[:, start:end], cache=here)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert there.get_seq_length() == len(here[0]) == 30
        exact = own(ids)[:, 25:]
        assert torch.allclose(expected, exact, atol=1e-4) == (kind is KVCache)
        there.reset()
        found = guest(ids[:, :11], past_key_values=there).logits
        torch.testing.assert_close(found, own(ids[:, :11]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Mistral", "Gemma2"])
@pytest.mark.parametrize("beams", [1, 3])
def test_models_write_the_same_with_our_caches(make, kind, beams):
    """Padded texts; with windows in all blocks, or in every second one; and beams."""
    guest, ids, real = make(kind), torch.randint(61, (2, 9)), torch.ones(2, 9).long()
    real[1, :4] = 0
    options = {"attention_mask": real, "do_sample": False, "max_new_tokens": 14}
    expected = guest.generate(ids, num_beams=beams, **options)
    near = {"Mistral": [True, True], "Gemma2": [True, False]}.get(kind, [False, False])
    if beams > 1:  # a ring does not choose among texts
        near = [False, False]
    caches = [WindowCache(5) if ring else KVCache(30) for ring in near]
    mine = hf.cache_for_model(guest, caches)
    found = guest.generate(ids, past_key_values=mine, num_beams=beams, **options)
    assert torch.equal(found, expected)


def test_what_our_caches_do_not_do_inside(as_shipped, make):
    guest, ids = make("Llama"), torch.randint(61, (1, 9))
    mine = hf.cache_for_model(guest, [KVCache(40), KVCache(40)])
    options = {"past_key_values": mine, "do_sample": False, "max_new_tokens": 9}
    with pytest.raises(NotImplementedError, match="cache: expected no cropping"):
        guest.generate(ids, prompt_lookup_num_tokens=3, **options)
    short = hf.cache_for_model(guest, [KVCache(12), KVCache(12)])
    with pytest.raises(
        ValueError, match="expected at most 0 more tokens, since the cache is full"
    ):
        guest.generate(ids, **(options | {"past_key_values": short}))


def test_caches_that_would_show_fewer_keys_are_refused(as_shipped, make):
    """The library would hide what the layer's own window hides, and miss the rest."""
    llama, mistral = make("Llama"), make("Mistral")
    two = KVCache(40), KVCache(40)
    for words, model, caches in (
        ("cache: expected 2, one for each block, got 1", llama, [KVCache(40)]),
        ("cache: expected 2, one for each block, got 3", llama, [*two, KVCache(40)]),
        ("cache: expected one of its own for each block", llama, [two[0]] * 2),
        ("cache: expected a list of caches", llama, KVCache(40)),
        (
            "expected a KVCache for layer 0, got WindowCache",
            llama,
            [WindowCache(5), two[1]],
        ),
        (
            r"expected WindowCache\(5\) for layer 1",
            mistral,
            [WindowCache(5), WindowCache(3)],
        ),
        (
            r"expected WindowCache\(5\) for layer 0",
            mistral,
            [WindowCache(6), WindowCache(6)],
        ),
        ("rings for all layers with a window", mistral, [WindowCache(5), two[1]]),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            hf.cache_for_model(model, caches)
    read = KVCache(40)
    read.append(*torch.zeros(2, 1, 2, 3, 8))
    with pytest.raises(ValueError, match=r"the same tokens in each, got lengths \[3, 0\]"):
        hf.cache_for_model(llama, [read, two[1]])
    import transformers

    mamba = transformers.MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2)
    with pytest.raises(TypeError, match="model: expected keys and values in layer 0"):
        hf.cache_for_model(transformers.MambaForCausalLM(mamba), list(two))
