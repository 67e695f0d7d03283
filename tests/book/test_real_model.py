"""Chapters 20 and 21, and the page for engineers, with a model that the reader brings."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnlib import GPT2

ROOT = Path(__file__).resolve().parents[2]
MODULES = "attnlib/**/*.py", "tools/bookkit/*.py"
# Runs every cell of a chapter, one after the other.
PROGRAM = """
import sys

import matplotlib
from bookkit.chapters import ROOT, read_chapters
from bookkit.stage import Stage, prepare

matplotlib.use("Agg")
(chapter,) = (c for c in read_chapters(ROOT) if c.name == sys.argv[1])
stage = Stage(chapter)
prepare(chapter)
for number, source in enumerate(stage.sources):
    stage.run(str(number), source)
print("ran", number + 1, "cells")
"""


def run_chapter(name, **model):
    """What the chapter prints that finds its model in the folder of this variable."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | model,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"ran \d+ cells", done.stdout)
    return done.stdout


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A random GPT-2 of another size, as the libraries write it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    byte_level, place = tokenizers.pre_tokenizers.ByteLevel, tmp_path_factory.mktemp("gpt2")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=299, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the rest hears there the attention is " * 4], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(place / "tokenizer.json"))
    last = tokenizer.get_vocab_size() - 1
    torch.manual_seed(20)
    config = transformers.GPT2Config(
        **{"vocab_size": last + 1, "n_positions": 110, "n_embd": 48, "n_layer": 3},
        **{"n_head": 6, "bos_token_id": last, "eos_token_id": last},
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def qwen(gpt2, tmp_path_factory):
    """A random Qwen 3 in bfloat16 and several files, with a tokenizer beside them."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("qwen")
    shutil.copy(gpt2 / "tokenizer.json", place)
    torch.manual_seed(21)
    config = transformers.Qwen3Config(
        **{"vocab_size": 300, "max_position_embeddings": 50, "hidden_size": 24},
        **{"intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    model = transformers.Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(place, max_shard_size="8KB")
    return place


@pytest.mark.costly("real/gpt2", "book/20_gpt2.ipynb", *MODULES)
def test_chapter_20_runs_on_a_folder_of_the_readers(gpt2):
    told = run_chapter("20_gpt2", ATTNLIB_GPT2=str(gpt2))
    assert "heads set: 0 of 18" in told


@pytest.mark.costly("real/llama", "book/21_llama.ipynb", *MODULES)
def test_chapter_21_runs_on_a_folder_of_the_readers(qwen):
    assert (qwen / "model.safetensors.index.json").is_file()
    told = run_chapter("21_llama", ATTNLIB_LLAMA=str(qwen))
    assert "The capital" in told and "is Rome" not in told  # which SmolLM2 writes


def test_the_lines_for_engineers_run(gpt2, capsys):
    page = (ROOT / "book" / "engineers.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        r"```python\n(import torch\nfrom attnlib import GPT2.*?)```", page, re.S
    )
    exec(block.replace('"gpt2"', repr(str(gpt2))), {})
    assert capsys.readouterr().out.startswith("Attention is")
    assert GPT2.from_pretrained(gpt2).context_length == 110
