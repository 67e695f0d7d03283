"""GPT-2 from its files: equal to the library transformers, and what is refused by name."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from attnlib import GPT2, FlashAttention, LearnedBiasAttention
from attnlib.gpt2 import names_of, without_head
from attnlib.pretrained import (
    Into,
    Progress,
    load_into,
    order_memory,
    read_config,
    read_tensors,
    read_tokenizer,
    require_library,
)
from drawn import assert_fastest_order, change_tensors, close, refuses

os.environ["HF_HUB_OFFLINE"] = "1"
safetensors = pytest.importorskip("safetensors.torch")
SHAPES = [  # vocabulary, context, width, heads, blocks, hidden, activation
    (61, 32, 32, 4, 2, None, "gelu_new"),
    (97, 48, 24, 1, 1, 40, "gelu_new"),
    (50, 16, 64, 8, 3, None, "gelu_new"),
    (31, 24, 20, 5, 4, 17, "gelu"),
    (128, 40, 48, 2, 2, None, "relu"),
]
SMALL = SHAPES[0]


def theirs(shape, **options):
    """A random model of the library's whose every parameter is away from its start."""
    transformers = pytest.importorskip("transformers")
    vocab, context, width, heads, blocks, hidden, activation = shape
    config = transformers.GPT2Config(
        **{"vocab_size": vocab, "n_positions": context, "n_embd": width, "n_head": heads},
        **{"n_layer": blocks, "n_inner": hidden, "activation_function": activation},
        **{"bos_token_id": 0, "eos_token_id": None, "layer_norm_epsilon": 1e-3, **options},
    )
    torch.manual_seed(20)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a small model."""
    folder = tmp_path_factory.mktemp("small")
    theirs(SMALL).save_pretrained(folder)
    return folder


@pytest.fixture
def written(small, tmp_path):
    """A copy of it to change."""
    return shutil.copytree(small, tmp_path, dirs_exist_ok=True)


def configure(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    config = {name: value for name, value in config.items() if value != "gone"}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_gradients_and_text_are_those_of_transformers(shape, tmp_path):
    model = theirs(shape)
    model.save_pretrained(tmp_path)
    ours = GPT2.from_pretrained(tmp_path)
    assert not ours.training
    ids = torch.randint(shape[0], (3, shape[1] // 2))
    expected, found = model(ids), ours(ids)
    close(found, expected.logits, atol=1e-5)

    expected.logits.logsumexp(-1).sum().backward()
    found.logsumexp(-1).sum().backward()
    grads, here = dict(model.named_parameters()), dict(ours.named_parameters())
    count = 0
    for name, into in names_of(shape[4], "transformer.").items():
        into = into if isinstance(into, Into) else Into((into,))
        pieces = into.parts(grads[name].grad, here)
        for parameter, piece in zip(into.parameters, pieces, strict=True):
            scale = piece.abs().max()
            close(here[parameter].grad, piece, atol=2e-5 * scale.item() + 1e-5)
            count += 1
    assert count == len(here)

    length = shape[1] // 2
    text = model.generate(
        **{"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        **{"max_new_tokens": length, "do_sample": False, "pad_token_id": 0},
    )
    for cache in (False, True):
        assert torch.equal(ours.generate(ids, length, temperature=0.0, cache=cache), text)


@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_bfloat16_is_kept_and_as_near_as_it_can_be(shape, tmp_path):
    model = theirs(shape).bfloat16()
    model.save_pretrained(tmp_path)
    ours = GPT2.from_pretrained(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    ids = torch.randint(shape[0], (2, shape[1]))
    exact = GPT2.from_pretrained(tmp_path, dtype=torch.float64)(ids)
    with torch.no_grad():
        off = (model(ids).logits - exact).abs()
        mine = (ours(ids) - exact).abs()
    assert mine.mean() <= 1.2 * off.mean()
    assert mine.max() <= 2 * off.max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_order_in_memory_is_what_a_cpu_multiplies_fastest(small, dtype):
    """Few tokens by a matrix: along its longer side, in two bytes always by columns."""
    model = GPT2.from_pretrained(small, dtype=dtype)
    order_memory(model)
    again = GPT2.from_pretrained(small, dtype=torch.float64)
    for p, exact in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, exact.to(dtype))
    table = model.token_embedding.weight.T  # x @ table.T: the logits
    assert_fastest_order(model, dtype != torch.bfloat16, table)


def test_another_attention_and_names_without_a_prefix(written):
    whole = GPT2.from_pretrained(written)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    change_tensors(written, strip)
    flash = GPT2.from_pretrained(written, attention=FlashAttention(causal=True))
    ids = torch.randint(61, (2, 20))
    close(flash(ids), whole(ids), atol=1e-5)


def test_several_files(written):
    whole = GPT2.from_pretrained(written)
    tensors = safetensors.load_file(written / "model.safetensors")
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    for file, held in shards.items():
        safetensors.save_file({name: tensors[name] for name in held}, written / file)
    (written / "model.safetensors").unlink()
    places = {name: file for file, held in shards.items() for name in held}
    index = written / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    again = GPT2.from_pretrained(written)
    assert all(map(torch.equal, whole.parameters(), again.parameters()))

    first, second = names[:2]
    for weight_map, error, message in (
        ({}, ValueError, "weight_map"),
        ([], ValueError, "expected a weight_map with names"),
        (places | {first: "../x.safetensors"}, ValueError, f"same folder for {first}"),
        (places | {first: "..\\x.safetensors"}, ValueError, "same folder"),
        (places | {first: "weights.bin"}, ValueError, "weights.bin"),
        (places | {first: "third.safetensors"}, FileNotFoundError, "third"),
        (places | {first: places[second]}, ValueError, f"00002.*expected {first}"),
        (places | {"more": places[first]}, ValueError, "expected more"),
        ({n: f for n, f in places.items() if n != first}, ValueError,
         f"{first} is not in"),
    ):  # fmt: skip
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(error, match=message):
            GPT2.from_pretrained(written)
    index.write_text("[]")
    with pytest.raises(ValueError, match="expected JSON with a weight_map"):
        GPT2.from_pretrained(written)
    index.write_text(json.dumps({"weight_map": places}))
    twice = {name: tensors[name] for name in (*names[::2], second)}
    safetensors.save_file(twice, written / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=f"expected {second} once"):
        GPT2.from_pretrained(written)


NAME = "transformer.h.1.attn.c_attn.weight"
HALF = {NAME: torch.Tensor.half}
WRONG = [
    (ValueError, {NAME: None}, f"{NAME}: expected this tensor.*missing"),
    (ValueError, {"extra": torch.ones(1)}, r"extra: in model\.safetensors, but this model"),
    (ValueError, {"transformer.h.2.ln_1.weight": torch.ones(32)}, "h.2.ln_1.weight: in mo"),
    (ValueError, {NAME: lambda t: t.T.contiguous()},
     rf"{NAME}: expected shape \(32, 96\), got \(96, 32\)"),
    (TypeError, {NAME: torch.Tensor.int},
     f"{NAME}: expected floating point, got torch.int32"),
    (TypeError, HALF, f"{NAME}: expected torch.float32.*torch.float16.*dtype"),
    (TypeError, {NAME: lambda t: t.to(torch.float8_e4m3fn)},
     f"{NAME}: expected floating point, got F8_E4M3"),
    (ValueError, {"lm_head.weight": torch.ones(61, 32)},
     "lm_head.weight: expected the numbers of transformer.wte.weight"),
]  # fmt: skip


def replace(folder, changes):
    """Tensors by others, by what a function makes of them, or by nothing."""

    def edit(tensors):
        for name, new in changes.items():
            old = tensors.pop(name, None)
            if new is not None:
                tensors[name] = new(old) if callable(new) else new

    change_tensors(folder, edit)


@pytest.mark.parametrize(("error", "changes", "message"), WRONG)
def test_a_wrong_tensor_is_named(error, changes, message, written, monkeypatch):
    replace(written, changes)
    taken = []
    monkeypatch.setattr("attnlib.pretrained.put_parameter", lambda *a: taken.append(a))
    with pytest.raises(error, match=message):
        GPT2.from_pretrained(written)
    assert not taken  # nothing was read before


def test_types_are_converted_on_request(written):
    replace(written, HALF)
    model = GPT2.from_pretrained(written, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


OTHERS = [b"PK\x03\x04" + bytes(96), b"\x80\x04" * 40, b"{}" * 9]  # of another kind


@pytest.mark.parametrize("data", [0, 4, 100, 5000, -1, *OTHERS])
def test_a_file_cut_off_or_of_another_kind_is_refused(data, written):
    path = written / "model.safetensors"
    path.write_bytes(path.read_bytes()[:data] if isinstance(data, int) else data)
    size = path.stat().st_size
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*whole.*got {size} bytes"):
        GPT2.from_pretrained(written)


BY_BLOCK = "scale_attn_by_inverse_layer_idx"
CONFIGS = [
    (ValueError, {"model_type": "llama"}, "model_type = 'gpt2', got 'llama'"),
    (ValueError, {"rope_theta": 1e4}, "rope_theta = 10000.0 is unknown"),
    (ValueError, {BY_BLOCK: True}, f"{BY_BLOCK} = False, got True, .*not supported"),
    (ValueError, {"scale_attn_weights": 1}, "scale_attn_weights = True, got 1"),
    (ValueError, {"tie_word_embeddings": False}, "tie_word_embeddings"),
    (ValueError, {"n_embd": "gone"}, "expected n_embd, which is missing"),
    (TypeError, {"n_layer": "2"}, "n_layer as int, got '2'"),
    (TypeError, {"n_layer": True}, "n_layer as int, got True"),
    (ValueError, {"n_layer": 0}, "num_layers: expected at least 1"),
    (ValueError, {"n_head": 5}, "multiple of num_heads = 5"),
    (ValueError, {"n_inner": 0}, "n_inner: expected at least 1, got 0"),
    (ValueError, {"activation_function": "silu"}, "got 'silu'"),
    (ValueError, {"layer_norm_epsilon": -1.0}, "eps: expected a number .* 0, got -1.0"),
    (ValueError, {"layer_norm_epsilon": float("nan")}, "eps: .* got nan"),
    (ValueError, {"n_ctx": 16}, "n_ctx = 32, got 16"),
    (ValueError, {"n_layer": 3}, "expected 2 layers, as the files have, got 3"),
    (ValueError, {"vocab_size": 10**9}, r"wte.weight: expected shape \(10000000"),
    (ValueError, {"n_embd": 10**12}, "expected n_embd up to 2147483647"),
]


@pytest.mark.parametrize(("error", "changes", "message"), CONFIGS)
def test_a_wrong_configuration_is_named(error, changes, message, written):
    configure(written, **changes)
    with pytest.raises(error, match=message):
        GPT2.from_pretrained(written)


def test_the_published_configuration_is_read(written):
    """The keys that the files of 2019 have, with small sizes."""
    configure(
        written,
        **{"n_ctx": 32, "task_specific_params": {"text-generation": {"do_sample": True}}},
        **{"output_past": True, "anything": None},
        **{"n_special": 0, "predict_special_tokens": True},  # the one of medium size
        **{"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    )
    GPT2.from_pretrained(written)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": LearnedBiasAttention(4, causal=True)}, ValueError,
         "attention: expected .*without parameters, .* got LearnedBias"),
        ({"attention": FlashAttention()}, ValueError, "attention: expected .*causal=True"),
        ({"dtype": torch.int32}, TypeError, r"dtype: expected a torch\.dtype of floating"),
        ({"dtype": torch.bool}, TypeError, r"dtype: expected a torch\.dtype of floating"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(options, error, message, written):
    """What changes the numbers of heads: test_options tries all of it."""
    with pytest.raises(error, match=message):
        GPT2.from_pretrained(written, **options)


def test_missing_files_are_named(written):
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (written / name).unlink(missing_ok=True)
        if name == "model.safetensors":
            (written / "pytorch_model.bin").write_bytes(b"")
        read = read_tokenizer if name == "tokenizer.json" else GPT2.from_pretrained
        with pytest.raises(FileNotFoundError, match=name) as caught:
            read(written)
        assert ("pickle" in str(caught.value)) == (name == "model.safetensors")
    for text, message in (("{", "expected JSON"), ("[]", "with names, got a list")):
        (written / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(written)


def test_a_broken_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer"):
        read_tokenizer(tmp_path)


def test_a_library_that_is_missing_is_named():
    said = r"no_such_thing: .*pip install attnlib\[models\]"
    with pytest.raises(ImportError, match=said):
        require_library("no_such_thing")


def test_a_plan_fills_each_parameter_once(written):
    model, names = GPT2(61, 32, 32, 4, 2), names_of(2, "transformer.")
    short = {n: into for n, into in names.items() if into != "norm.gamma"}
    for plan in (short, names | {"transformer.ln_f.bias": "norm.gamma"}):
        with pytest.raises(ValueError, match=r"parameter once, see norm\.(gamma|beta)"):
            load_into(model, read_tensors(written), plan)


def test_parts_and_transposes_go_where_they_belong(tmp_path):
    torch.manual_seed(1)
    whole = torch.randn(7, 4)
    safetensors.save_file({"fused": whole}, tmp_path / "model.safetensors")
    parts = {"a": torch.nn.Parameter(torch.zeros(4, 5))}
    module = torch.nn.ParameterDict(parts | {"b": torch.nn.Parameter(torch.zeros(4, 2))})
    module["b"].requires_grad_(False)
    names = {"fused": Into(("a", "b"), transposed=True)}
    load_into(module, read_tensors(tmp_path), names)
    assert torch.equal(module["a"], whole[:5].T) and torch.equal(module["b"], whole[5:].T)
    assert module["a"].requires_grad and not module["b"].requires_grad


def test_progress_is_shown_when_it_is_slow(written, capsys):
    told = []
    GPT2.from_pretrained(written, report=lambda *args: told.append(args))
    size = sum(p.numel() for p in GPT2(61, 32, 32, 4, 2).parameters())
    assert told[-1][1:3] == (size, size)
    GPT2.from_pretrained(written)
    assert capsys.readouterr().err == ""
    GPT2.from_pretrained(written, report=Progress(after=0.0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(read_tensors(written))
    assert lines[-1].startswith("attnlib: 100 % of ")


MEASURE = """
import sys, torch
from attnlib import GPT2


def most():  # not ru_maxrss, in which that of the parent lives on
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


GPT2(11, 4, 8, 1, 1)(torch.tensor([1]))  # what a first call takes is not the model's
small = GPT2.from_pretrained(sys.argv[1] + "/small")
before = most()
model = GPT2.from_pretrained(sys.argv[1] + "/large")
print(most() - before, sum(4 * p.numel() for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_the_model_and_one_tensor(tmp_path):
    largest = 6000 * 384 * 4
    for folder, shape in (("small", (11, 4, 8, 1, 1)), ("large", (6000, 64, 384, 6, 4))):
        theirs((*shape, None, "gelu_new")).save_pretrained(tmp_path / folder)
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, size = map(int, done.stdout.split())
    assert peak < size + largest + 8e6, f"{peak / 1e6:.0f} MB for {size / 1e6:.0f} MB"


def test_a_head_is_off_within_and_on_again_behind(written):
    model = GPT2.from_pretrained(written)
    ids = torch.randint(61, (1, 12))
    before = model(ids)
    kept = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError), without_head(model, 1, 2):
        assert (model(ids) - before).abs().max() > 1e-3
        off = model.blocks[1].attention.out_proj.W.chunk(4)
        assert [bool(rows.any()) for rows in off] == [True, True, False, True]
        raise RuntimeError
    assert all(map(torch.equal, kept, model.parameters()))
    for block, head, name in ((2, 0, "block"), (0, 4, "head"), (-1, 0, "block")):
        with pytest.raises(ValueError, match=name), without_head(model, block, head):
            pass


def test_a_loaded_model_can_be_trained_as_one_vector(written):
    model = GPT2.from_pretrained(written)
    assert all(p.is_contiguous() for p in model.parameters())
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(0 * vector, model.parameters())
    ids = torch.randint(61, (1, 12))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def loss():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
        loss.backward()
        return loss

    optimizer.step(loss)


class Around(nn.Module):
    """A layer inside another, which has no W."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer

    def forward(self, x):
        return self.base(x)


@pytest.mark.parametrize("how", ["pruned", "parametrized", "wrapped"])
def test_a_head_whose_rows_are_no_parameter_is_refused(written, how):
    """To set them to 0 would change a tensor that is made anew at each call."""
    model = GPT2.from_pretrained(written)
    layer = model.blocks[1].attention
    if how == "pruned":
        prune.identity(layer.out_proj, "W")
    elif how == "parametrized":
        parametrize.register_parametrization(layer.out_proj, "W", nn.Identity())
    else:
        layer.out_proj = Around(layer.out_proj)
    words = "model: expected out_proj.W of block 1 as a parameter …"
    with refuses(words, TypeError), without_head(model, 1, 2):
        pass
    with without_head(model, 0, 2):
        assert not model.blocks[0].attention.out_proj.W.chunk(4)[2].any()
