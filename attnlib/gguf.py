# Made from book/F_four_bits.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""A model in one file of the form GGUF, of which most numbers have few bits.

Derived in appendix F, "A model in four bits" (book/F_four_bits.ipynb).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attnlib.pretrained import Tensors, require_library


class BlockTensors(Tensors):
    """The tensors of a GGUF file by a folder's names; read in float32, one at a time.

    Args:
        reader: an open file of the library gguf.
        path: where it is, for messages.
        pairs: in which matrices the rows of a head stand in pairs, and of how many heads.

    Source: appendix F, eq-block-levels; chapter 16, eq-rotary-layouts.
    """

    def __init__(self, reader: Any, path: Path, pairs: Mapping[str, int]) -> None:
        super().__init__()
        self.pairs, self.parts = pairs, {}
        for part in reader.tensors:
            name = folder_name(part, path)
            self.parts[name], self.files[name] = part, path
            self.shapes[name] = tuple(int(size) for size in reversed(part.shape))
            self.dtypes[name] = torch.float32

    def __getitem__(self, name: str) -> Tensor:
        """Reads one tensor: of levels come numbers, of pairs of rows halves."""
        part = self.parts[name]
        numbers = require_library("gguf").dequantize(part.data, part.tensor_type)
        read = torch.from_numpy(np.require(numbers, np.float32, "W"))
        read = read.reshape(self.shapes[name])
        heads = self.pairs.get(name.split(".")[-2])
        return read if heads is None else in_halves(read, heads)


def in_halves(
    rows: Float[Tensor, "features *columns"], heads: int
) -> Float[Tensor, "features *columns"]:
    """The rows of each head, in pairs (0, 1), (2, 3), …, put into halves: 0, 2, …, 1, 3, …

    Source: chapter 16, eq-rotary-layouts.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# What a file calls the parts, and what a folder does.
PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WORDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
TURNED = {  # of positions in longer texts
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
# What must be the width of a head, and what the tensors say themselves.
WIDTHS = ("rope.dimension_count", "attention.value_length")
ARCHITECTURES = ("llama", "qwen2", "qwen3")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
KINDS += ("Q4_K", "Q5_K", "Q6_K")


def read_gguf(path: str | Path) -> tuple[dict[str, Any], BlockTensors]:
    """A model's file in GGUF: its configuration and its tensors, in a folder's words.

    Args:
        path: the file.

    Returns:
        What config.json would say, see `read_config`, and the tensors by the names that
        safetensors files have, see `Tensors`; each is read when it is asked for.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the library gguf is not installed.
        TypeError: numbers of a kind that is not read here.
        ValueError: the file is cut off or malformed, or has an architecture, a name or an
            option that is unknown here.

    Source: appendix F.
    """
    path = Path(path)
    reader = opened_gguf(path)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.")  # long, and of no use here
    }
    config = config_of(fields, path.name)
    pairs = {}
    if config["model_type"] == "llama":
        heads = config.get("num_attention_heads")
        pairs = {"q_proj": heads, "k_proj": config.get("num_key_value_heads", heads)}
    tensors = BlockTensors(reader, path, pairs)
    config["vocab_size"] = tensors.shapes.get("model.embed_tokens.weight", (None,))[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    if config["model_type"] == "llama":
        bias = "model.layers.0.self_attn.q_proj.bias"
        config["attention_bias"] = bias in tensors
    return config, tensors


def opened_gguf(path: Path) -> Any:
    """A GGUF file whose header has been read, and compared with its length.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut off or malformed.

    Source: appendix F.
    """
    library = require_library("gguf")
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}: expected this file in {path.parent}")
    try:
        return library.GGUFReader(path)
    except Exception as error:  # the library raises whatever it stumbles over
        size = path.stat().st_size
        raise ValueError(
            f"{path.name}: expected a whole GGUF file, got {size} bytes: {error}"
        ) from error


def config_of(fields: Mapping[str, Any], file: str) -> dict[str, Any]:
    """What config.json would say, by the fields of a file.

    Raises:
        ValueError: an unknown architecture, or an option of it that is not understood.

    Source: appendix F.
    """
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        wanted = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(
            f"{file}: expected general.architecture as one of {wanted}, got {family!r}, "
            "which is not supported"
        )
    own = {
        name.removeprefix(f"{family}."): value
        for name, value in fields.items()
        if name.startswith(f"{family}.")
    }
    config = {"model_type": family, "hidden_act": "silu", "rms_norm_eps": None}
    scaling = {TURNED[name]: own.pop(name) for name in TURNED if name in own}
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    config |= {WORDS[name]: own.pop(name) for name in WORDS if name in own}
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    own.pop("vocab_size", None)  # the tokens' table has it
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or config.get("hidden_size", 0) // (heads or 1)
    for name in WIDTHS:
        if own.pop(name, width) != width:
            got = fields[f"{family}.{name}"]
            raise ValueError(f"{file}: expected {name} = {width}, got {got}")
    for name, value in own.items():
        raise ValueError(
            f"{file}: {family}.{name} = {value!r} is unknown here, and might change what "
            "the model computes"
        )
    return config


def folder_name(part: Any, path: Path) -> str:
    """The name of a tensor in a folder's words.

    Raises:
        TypeError: its numbers are of a kind that is not read here.
        ValueError: its name is unknown, or its bytes are fewer than they should be.

    Source: appendix F.
    """
    if part.tensor_type.name not in KINDS:
        wanted = ", ".join(KINDS)
        raise TypeError(
            f"{part.name}: expected one of {wanted}, got {part.tensor_type.name} in "
            f"{path.name}"
        )
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", part.name)
    if match is None or match[2] not in PARTS:
        raise ValueError(f"{part.name}: in {path.name}, but this model has no such tensor")
    front = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{front}{PARTS[match[2]]}.{match[3]}"


# How a text is cut before its bytes are joined, by the name that the file gives.
CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "gpt-2": (None, False),
    "smollm": ("digits", False),
    "llama-bpe": (CONTRACTED + r"\p{N}{1,3}" + REST, True),
    "qwen2": (CONTRACTED + r"\p{N}" + REST, False),
}
CONTROL, OWN = 3, 4  # kinds of words: such as the end of a text, and added ones


def gguf_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a GGUF file, a `tokenizers.Tokenizer`.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: a library is not installed.
        ValueError: the file is malformed, or its words are of a kind that is unknown here.

    Source: appendix F; chapter 20.
    """
    path, library = Path(path), require_library("tokenizers")
    reader = opened_gguf(path)
    front = "tokenizer.ggml."
    said = {
        name.removeprefix(front): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(front)
    }
    if said.get("model") != "gpt2" or said.get("pre") not in CUTS:
        got = f"{said.get('model')!r} with {said.get('pre')!r}"
        wanted = ", ".join(map(repr, CUTS))
        raise ValueError(f"{path.name}: expected words of gpt2, cut as {wanted}, got {got}")
    cut, whole = CUTS[said["pre"]]
    vocabulary = {word: number for number, word in enumerate(said["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in said["merges"]]
    words = library.models.BPE(vocabulary, merges, ignore_merges=whole)
    tokenizer = library.Tokenizer(words)
    cutters = library.pre_tokenizers
    by_bytes = cutters.ByteLevel(add_prefix_space=False, use_regex=cut in (None, "digits"))
    first = []
    if cut == "digits":
        first = [cutters.Digits(individual_digits=True)]
    elif cut:
        first = [cutters.Split(library.Regex(cut), "isolated")]
    tokenizer.pre_tokenizer = cutters.Sequence([*first, by_bytes])
    tokenizer.decoder = library.decoders.ByteLevel()
    if said["pre"] == "qwen2":
        tokenizer.normalizer = library.normalizers.NFC()
    for number, kind in enumerate(said.get("token_type", [])):
        if kind in (CONTROL, OWN):
            special = kind == CONTROL
            added = library.AddedToken(
                said["tokens"][number], special=special, normalized=False
            )
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    if said.get("add_bos_token"):
        begin = said["tokens"][said["bos_token_id"]]
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, said["bos_token_id"])]
        )
    return tokenizer


def chat_words(path: str | Path) -> tuple[str | None, int | None]:
    """How a file writes a conversation, as a Jinja template, and the word that ends a turn.

    Raises:
        FileNotFoundError, ValueError: as for `read_gguf`.

    Source: appendix F.
    """
    fields = opened_gguf(Path(path)).fields
    names = ("tokenizer.chat_template", "tokenizer.ggml.eos_token_id")
    template, end = (fields[name].contents() if name in fields else None for name in names)
    return template, end
