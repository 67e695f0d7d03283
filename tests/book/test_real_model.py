"""Chapter 20 and the page for engineers, with a model that the reader brings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnlib import GPT2

ROOT = Path(__file__).resolve().parents[2]

# Runs every cell of the chapter, one after the other.
PROGRAM = """
import matplotlib
from bookkit.chapters import ROOT, read_chapters
from bookkit.stage import Stage, prepare

matplotlib.use("Agg")
(chapter,) = (c for c in read_chapters(ROOT) if c.name == "20_gpt2")
stage = Stage(chapter)
prepare(chapter)
for number, source in enumerate(stage.sources):
    stage.run(str(number), source)
print("ran", number + 1, "cells")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


@pytest.mark.thorough
def test_the_chapter_runs_on_a_folder_of_the_readers(folder):
    environment = {**os.environ, "ATTNLIB_GPT2": str(folder), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    command = [sys.executable, "-c", PROGRAM]
    options = {"capture_output": True, "encoding": "utf-8", "env": environment}
    done = subprocess.run(command, cwd=ROOT, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heads set: 0 of 18" in done.stdout
    assert re.search(r"ran \d+ cells", done.stdout)


def test_the_lines_for_engineers_run(folder, capsys):
    page = (ROOT / "book" / "engineers.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        r"```python\n(import torch\nfrom attnlib import GPT2.*?)```", page, re.S
    )
    exec(block.replace('"gpt2"', repr(str(folder))), {})
    assert capsys.readouterr().out.startswith("Attention is")
    assert GPT2.from_pretrained(folder).context_length == 110
