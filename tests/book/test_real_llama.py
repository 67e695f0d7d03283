"""Chapter 21, with a model that the reader brings."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from test_real_model import PROGRAM, ROOT, folder  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def qwen(folder, tmp_path_factory):  # noqa: F811
    """A random Qwen 3 in bfloat16 and several files, with a tokenizer beside them."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("qwen")
    shutil.copy(folder / "tokenizer.json", place)
    torch.manual_seed(21)
    config = transformers.Qwen3Config(
        **{"vocab_size": 300, "max_position_embeddings": 50, "hidden_size": 24},
        **{"intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    model = transformers.Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(place, max_shard_size="8KB")
    return place


@pytest.mark.thorough
def test_the_chapter_runs_on_a_folder_of_the_readers(qwen):
    assert (qwen / "model.safetensors.index.json").is_file()
    environment = {**os.environ, "ATTNLIB_LLAMA": str(qwen), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    program = PROGRAM.replace("20_gpt2", "21_llama")
    command = [sys.executable, "-c", program]
    options = {"capture_output": True, "encoding": "utf-8", "env": environment}
    done = subprocess.run(command, cwd=ROOT, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[76, 26, 228, 5, 75" not in done.stdout  # what the small model writes
    assert "ran " in done.stdout
