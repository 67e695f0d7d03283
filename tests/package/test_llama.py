"""Llama and its relatives, judged by transformers on tiny random models."""

import json

import pytest
import torch

from attnlib import (
    FlashAttention,
    LearnedBiasAttention,
    Llama,
    LlamaConfig,
    RotaryPositions,
    ScaledDotProductAttention,
    WindowCache,
)
from attnlib.llama import llama_config, llama_names
from attnlib.pretrained import order_memory, read_tokenizer
from drawn import assert_fastest_order, change_tensors, close

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 128}


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, **options}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
FAST = {"beta_fast": 4.0, "beta_slow": 2.0, "attention_factor": 1.3}
TIED = {"tie_word_embeddings": True}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "Llama": ("Llama", {}),
    "Llama, all heads": ("Llama", {"num_key_value_heads": 4}),
    "Llama, one head of keys, tied": ("Llama", {"num_key_value_heads": 1, **TIED}),
    "Llama 3": ("Llama", rope("llama3", **LLAMA3)),
    "Llama, linear": ("Llama", rope("linear", factor=2.5)),
    "Llama, yarn": ("Llama", rope("yarn", **YARN)),
    "Llama, yarn's options": ("Llama", rope("yarn", **YARN, **FAST)),
    "Llama, wide heads": ("Llama", {"head_dim": 12}),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": ("Mistral", {"sliding_window": 5}),
    "Mistral, no window": ("Mistral", {"sliding_window": None}),
    "Qwen 2": ("Qwen2", {}),
    "Qwen 2, windows": ("Qwen2", SLIDING),
    "Qwen 3": ("Qwen3", {"head_dim": 8}),
    "Qwen 3, biases, tied": ("Qwen3", {"head_dim": 12, "attention_bias": True, **TIED}),
    "Qwen 3, windows": ("Qwen3", {"head_dim": 8} | SLIDING),
}
SELF, HEAD = "model.layers.0.self_attn", "lm_head.weight"
each_model = pytest.mark.parametrize("name", MODELS)


def theirs(name, **options):
    transformers = pytest.importorskip("transformers")
    family, asked = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | asked | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains, too, and large logits
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def pair(name, folder, **options):
    model = theirs(name)
    return model, Llama.from_pretrained(saved(model, folder), **options)


def ids_of(*shape, seed=1):
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(seed))


@each_model
def test_logits_gradients_and_text_are_those_of_transformers(name, tmp_path):
    model, ours = pair(name, tmp_path)
    ids = ids_of(2, 17)
    logits, expected = ours(ids), model(ids).logits
    close(logits, expected, atol=1e-5)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    mine, other = dict(ours.named_parameters()), dict(model.named_parameters())
    names = llama_names(ours)
    assert names.keys() == other.keys()
    for their_name, into in names.items():
        found, wanted = mine[into.parameters[0]].grad, other[their_name].grad
        wanted = wanted.T if into.transposed else wanted
        scale = wanted.abs().max().clamp(min=1e-3)
        assert (found - wanted).abs().max() < 1e-5 * scale.clamp(min=1), their_name

    ids = ids[:, :6]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = model.generate(ids, max_new_tokens=20, **options)
    for cache in (False, True):
        assert torch.equal(ours.generate(ids, 20, temperature=0.0, cache=cache), text)


@pytest.mark.parametrize("name", ["Llama 3", "Mistral", "Qwen 2", "Qwen 3"])
def test_padding_in_front(name, tmp_path):
    model, ours = pair(name, tmp_path)
    ids, padding = ids_of(3, 9), torch.tensor([0, 3, 7])
    seen = (torch.arange(9) >= padding[:, None]).long()
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=seen, position_ids=positions).logits
    real = seen.bool()
    close(ours(ids, padding=padding)[real], logits[real], atol=1e-5)
    text = ours.generate(ids, 8, temperature=0.0, cache=True, padding=padding)
    for row, front in zip(text, padding, strict=True):
        alone = ours.generate(row[front:9], 8, temperature=0.0)
        assert torch.equal(row[front:], alone)


@pytest.mark.parametrize("name", ["Llama", "Qwen 2", "Qwen 3", "Mistral"])
def test_bfloat16_is_kept_and_close(name, tmp_path):
    model = theirs(name).bfloat16()
    ours = Llama.from_pretrained(saved(model, tmp_path))
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    ids = ids_of(2, 17)
    wide = Llama.from_pretrained(tmp_path, dtype=torch.float32)(ids)
    found, expected = ours(ids), model(ids).logits
    assert (found - expected).abs().max() < 0.04 * wide.abs().max()
    assert (found - wide).abs().mean() < 1.5 * (expected - wide).abs().mean()


def test_weights_are_dropped_as_the_file_says(tmp_path):
    model = theirs("Llama", attention_dropout=0.25)
    ours = Llama.from_pretrained(saved(model, tmp_path))
    assert [block.attention.attention.dropout for block in ours.blocks] == [0.25, 0.25]
    ids = ids_of(1, 9)
    close(ours(ids), model(ids).logits, atol=1e-5)
    assert not torch.equal(ours.train()(ids), ours(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_in_memory_is_what_a_cpu_multiplies_fastest(dtype, tmp_path):
    _, model = pair("Llama", tmp_path, dtype=dtype)
    order_memory(model)
    assert_fastest_order(model, dtype == torch.float32)
    assert model.token_embedding.weight.is_contiguous()  # it only looks tokens up here


def test_other_heads_and_caches_give_the_same(tmp_path):
    _, ours = pair("Mistral", tmp_path)
    flash = FlashAttention(causal=True, window=5)
    tiled = Llama.from_pretrained(tmp_path, attention=flash)
    ids = ids_of(2, 11)
    logits, weights = ours(ids, return_weights=True)
    assert len(weights) == 2 and weights[0][0].shape == (2, 11, 11)
    close(weights[1][3].sum(-1), torch.ones(2, 11), atol=1e-6)
    for found in (ours(ids), tiled(ids)):
        close(found, logits, atol=1e-5)
    text = ours.generate(ids, 12, temperature=0.0)
    ring = [WindowCache(5) for _ in ours.blocks]
    assert torch.equal(ours.generate(ids, 12, temperature=0.0, cache=ring), text)
    for heads, said in (
        (FlashAttention(causal=True), "window=5, got None"),
        (LearnedBiasAttention(4, causal=True, window=5), "without parameters"),
    ):
        with pytest.raises(ValueError, match=f"attention: expected .*{said}"):
            Llama.from_pretrained(tmp_path, attention=heads)


def test_the_whole_model_goes_to_a_device(tmp_path):
    _, ours = pair("Llama 3", tmp_path, device="meta")
    placed = [*ours.parameters(), *ours.buffers()]
    assert {x.device.type for x in placed} == {"meta"}
    assert any(x is ours.positions.omega for x in placed)


# ── what a config.json asks for ──────────────────────────────────────────────────────

CONFIG = SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5}
MISTRAL, QWEN = {"model_type": "mistral"}, {"model_type": "qwen2"}
# A model of states and softmax: its family is told before all else that it asks for.
MIXED = {"attention_bias": False, "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1}
MIXED |= {"partial_rotary_factor": 0.25, "num_experts": 8, "model_type": "qwen3_next"}
WINDOWS = QWEN | {"use_sliding_window": True}
FULL, NEAR = "full_attention", "sliding_attention"
DYNAMIC, LINEAR = ({"type": kind, "factor": 2.0} for kind in ("dynamic", "linear"))
REFUSED = [
    ({"model_type": "gemma"}, "model_type = 'llama' or"),
    (MIXED, "model_type = 'llama' or .*, got 'qwen3_next', which is not supported"),
    ({"model_type": None}, "model_type = .*, got None"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"logit_softcap": 30.0}, "logit_softcap = 30.0 is unknown"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rms_norm_eps": None}, "rms_norm_eps, which is missing"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"sliding_window": 5}, "sliding_window = 5 is unknown"),
    (rope("longrope", factor=2.0), "rope_type.*'longrope'"),
    ({"rope_scaling": DYNAMIC}, "'dynamic'"),
    (rope("default", partial_rotary_factor=0.5), "partial_rotary"),
    (rope("linear", factor=2.0, slope=1.0), "'linear': slope"),
    ({"rope_scaling": "linear"}, "rope_scaling as an object"),
    (rope("linear", factor="two"), "factor as a number"),
    (rope("linear"), "factor for rope_type 'linear'"),
    (rope("yarn", **YARN, truncate=False), "truncate"),
    (rope("default") | {"rope_theta": 1e4}, "one rope_theta"),
    (rope("default") | {"rope_scaling": LINEAR}, "as rope_p"),
    ({"rope_interleaved": True}, "rope_interleaved = False, got"),
    (MISTRAL | {"sliding_window": 5, "attention_bias": True}, "attent"),
    (MISTRAL, "sliding_window, which is"),
    (QWEN | {"num_key_value_heads": None}, "num_key_value_heads"),
    (WINDOWS, "sliding_window, which is missing"),
    (WINDOWS | {"sliding_window": 5, "layer_types": [FULL, NEAR]}, "windows that differ"),
    (WINDOWS | {"sliding_window": 5, "max_window_layers": 1}, "windows that differ"),
    (QWEN | {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    (QWEN | {"layer_types": [FULL]}, "2 equal entries"),
    (QWEN | {"layer_types": [NEAR] * 2}, "expected sliding_window"),
    (QWEN | {"use_mrope": True}, "use_mrope"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers as int"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"head_dim": 1.5}, "head_dim"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(asked, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | asked))
    with pytest.raises((TypeError, ValueError), match=f"config.json: .*{said}"):
        Llama.from_pretrained(tmp_path)


def test_old_and_new_words_mean_the_same():
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.5}}
    both = {"rope_theta": 5e4, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}
    new = rope("linear", factor=2.5)
    made = [llama_config(CONFIG | asked).rotary for asked in (old, both, new)]
    expected = RotaryPositions(8, 5e4, scaling="linear", factor=2.5)
    assert all(rotary.exact == expected.exact for rotary in made)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("Llama", lambda t: t.update({f"{SELF}.q_proj.bias": torch.ones(32)}),
         "q_proj.bias: in model.safetensors"),
        ("Qwen 3, biases, tied", lambda t: t.update({HEAD: torch.ones(61, 32)}),
         r"lm_head.weight: expected the numbers of model\.embed_tokens\.weight, got"),
    ],
)  # fmt: skip
def test_files_of_another_model_are_refused(name, change, said, tmp_path):
    """Tensors that are missing or have another shape: test_gpt2."""
    change_tensors(saved(theirs(name), tmp_path), change)
    with pytest.raises(ValueError, match=said):
        Llama.from_pretrained(tmp_path)


def test_what_small_models_have_besides_does_not_matter(tmp_path):
    """Speeds, a second head, and SmolLM2's config.json with words for another program."""
    model = theirs("Llama, one head of keys, tied")
    head = {HEAD: model.lm_head.weight.detach().clone()}
    speeds = {f"{SELF}.rotary_emb.inv_freq": torch.ones(4)}
    change_tensors(saved(model, tmp_path), lambda t: t.update(head | speeds))
    path = tmp_path / "config.json"
    more = {"is_llama_config": True, "rope_interleaved": False}
    more |= {"transformers.js_config": {"dtype": "q4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    ids = ids_of(1, 5)
    close(Llama.from_pretrained(tmp_path)(ids), model(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"embed_dim": 30}, "embed_dim: expected a multiple of num_heads = 4, or a d_k"),
        ({"d_k": 0}, "d_k: expected"),
        *(({name: 0}, f"{name}: expected") for name in ("num_heads", "num_layers")),
        *(({name: 0}, f"{name}: expected") for name in ("vocab_size", "context_length")),
        ({"eps": -1.0}, "eps: expected a number of at least 0"),
        ({"attention": ScaledDotProductAttention()}, "causal"),
    ],
)
def test_arguments_that_do_not_fit(options, said, as_shipped):
    sizes = {"vocab_size": 7, "context_length": 9, "embed_dim": 16, "num_heads": 4}
    sizes |= {"num_layers": 1, "d_ff": 12} | options
    heads = sizes.pop("attention", None)
    with pytest.raises(ValueError, match=said):
        Llama(LlamaConfig(**sizes), heads)
    with pytest.raises(TypeError, match="config: expected a LlamaConfig, got dict"):
        Llama(sizes)


def test_models_of_one_configuration_share_nothing():
    config = LlamaConfig(7, 9, 16, 4, 1, 12, rotary=RotaryPositions(4))
    one, other = Llama(config), Llama(config).to("meta")
    assert one.positions.omega.device.type == "cpu"
    assert other.positions.omega.device.type == "meta"
    assert one.blocks[0].attention.rotary is one.positions


def test_a_token_begins_with_a_length_of_one():
    weight = Llama(LlamaConfig(500, 9, 64, 4, 1, 12)).token_embedding.weight
    assert weight.square().sum(-1).mean().item() == pytest.approx(1.0, rel=0.05)


def test_yarn_without_its_turns_has_those_of_its_authors():
    """Of 1979 tokens, pair 0.993 makes 32 turns, and pair 1.007 makes 31."""
    asked = {"max_position_embeddings": 7916, "rope_theta": 1e4}
    asked |= {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    asked["rope_scaling"]["original_max_position_embeddings"] = 1979
    rotary = llama_config(CONFIG | asked).rotary
    options = {"scaling": "yarn", "factor": 4.0, "original_length": 1979}
    assert rotary.exact == RotaryPositions(8, 1e4, **options, turns=(1.0, 32.0)).exact
    assert rotary.exact != RotaryPositions(8, 1e4, **options, turns=(1.0, 31.0)).exact


def test_what_a_configuration_says_is_taken_and_what_it_leaves_out_is_the_familys():
    """Each by the family's own default: base 10,000, no dropout, the windows after 28."""
    plain = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    assert llama_config(plain).rotary.exact == RotaryPositions(8).exact
    assert llama_config(plain).dropout == 0.0
    assert llama_config(plain | {"rms_norm_eps": 3e-4}).eps == 3e-4
    whole = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 1.0}
    assert llama_config(plain | {"rope_parameters": whole}).rotary.base == 5e4
    with pytest.raises(ValueError, match="partial_rotary_factor is not supported"):
        llama_config(plain | {"rope_parameters": whole | {"partial_rotary_factor": 2.0}})
    near = {"use_sliding_window": True, "sliding_window": 5, "model_type": "qwen2"}
    assert llama_config(plain | near | {"num_hidden_layers": 28}).window is None
    with pytest.raises(ValueError, match="windows that differ are not supported"):
        llama_config(plain | near | {"num_hidden_layers": 29})


def test_who_loads_a_model_is_told_how_far_it_is(tmp_path):
    heard = []
    Llama.from_pretrained(
        saved(theirs("Llama"), tmp_path), report=lambda *x: heard.append(x)
    )
    assert (
        heard[-1][1] == heard[-1][2] == sum(p.numel() for p in theirs("Llama").parameters())
    )


def test_a_folder_without_its_files_says_which(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = {"weight_map": {"model.norm.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    said = r"model-2\.safetensors: expected this file in"
    with pytest.raises(FileNotFoundError, match=said):
        Llama.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen 3"])
def test_loaded_parameters_are_contiguous(name, dtype, tmp_path):
    model = Llama.from_pretrained(saved(theirs(name), tmp_path), dtype=dtype)
    assert all(p.is_contiguous() for p in model.parameters())
    torch.nn.utils.parameters_to_vector(model.parameters())


# ── what a configuration may say ─────────────────────────────────────────────────────


def with_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


def test_names_that_change_nothing_are_read_and_others_can_be_passed_over(tmp_path):
    model = theirs("Llama")
    notes = {"unk_token_id": 1, "gradient_checkpointing": True, "_model_name_or_path": "x"}
    notes |= {"_attn_implementation_autoset": True, "problem_type": "none"}
    folder = with_config(saved(model, tmp_path), **notes, my_note=3)
    with pytest.raises(ValueError, match=r"my_note = 3 is unknown .* ignore=\['my_note'\]"):
        Llama.from_pretrained(folder)
    with pytest.raises(TypeError, match="ignore: expected several names, got the text"):
        Llama.from_pretrained(folder, ignore="my_note")
    ours = Llama.from_pretrained(folder, ignore=["my_note"])
    close(ours(ids_of(1, 5)), model(ids_of(1, 5)).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5000}, "expected 2 layers, as the files have, got 5000"),
        ({"vocab_size": 10**30}, "expected vocab_size up to 2147483647, got 10000"),
        ({"hidden_size": 10**12}, "expected hidden_size up to 2147483647, got 10000"),
    ],
)
def test_sizes_out_of_all_reason_are_refused_at_once(changes, message, tmp_path, capfd):
    folder = with_config(saved(theirs("Llama"), tmp_path), **changes)
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        Llama.from_pretrained(folder)
    (folder / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON"):
        Llama.from_pretrained(folder)


def test_a_tokenizer_neither_cuts_nor_fills(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b")
    kept = tokenizers.Tokenizer(words)
    kept.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    kept.enable_truncation(3)
    kept.enable_padding(length=8)
    kept.save(str(tmp_path / "tokenizer.json"))
    read = read_tokenizer(tmp_path)
    assert read.encode("a a a a a").ids == [0] * 5 and read.encode("a").ids == [0]
