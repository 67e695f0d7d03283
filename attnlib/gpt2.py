# Made from book/20_gpt2.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""GPT-2: the language model of chapter 9 with the tanh GELU, from its own files.

Derived in chapter 20, "GPT-2, from its own file" (book/20_gpt2.ipynb).
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.checks import require_count
from attnlib.feed_forward import Activation
from attnlib.layer_norm import LayerNorm
from attnlib.multi_head import AttentionLike
from attnlib.pretrained import (
    Into,
    Report,
    load_into,
    read_config,
    read_tensors,
    refuse_another_head,
    refuse_more_layers,
    refuse_other_heads,
    refuse_unknown_config,
)
from attnlib.transformer import LanguageModel


def names_of(blocks: int, prefix: str = "") -> dict[str, str | Into]:
    """Where each tensor of GPT-2's file goes.

    Args:
        blocks: number of blocks.
        prefix: what stands before each name, "transformer." in some files.

    Source: chapter 20, eq-conv1d.
    """
    names: dict[str, str | Into] = {
        "wte.weight": "token_embedding.weight",
        "wpe.weight": "positions",
        "ln_f.weight": "norm.gamma",
        "ln_f.bias": "norm.beta",
    }
    for block in range(blocks):
        theirs, ours = f"h.{block}", f"blocks.{block}"
        for number in (1, 2):
            names[f"{theirs}.ln_{number}.weight"] = f"{ours}.norm_{number}.gamma"
            names[f"{theirs}.ln_{number}.bias"] = f"{ours}.norm_{number}.beta"
        for kind, own in (("weight", "W"), ("bias", "b")):
            heads, network = f"{ours}.attention", f"{ours}.feed_forward"
            qkv = tuple(f"{heads}.{x}_proj.{own}" for x in "qkv")
            names[f"{theirs}.attn.c_attn.{kind}"] = Into(qkv)
            names[f"{theirs}.attn.c_proj.{kind}"] = f"{heads}.out_proj.{own}"
            names[f"{theirs}.mlp.c_fc.{kind}"] = f"{network}.linear_1.{own}"
            names[f"{theirs}.mlp.c_proj.{kind}"] = f"{network}.linear_2.{own}"
    return {prefix + name: into for name, into in names.items()}


def gelu_tanh(z: Tensor) -> Tensor:
    """GELU with the tanh that approximates it, as GPT-2 was trained.

    Source: chapter 20, eq-gelu-tanh; Hendrycks and Gimpel (2016), section 2.
    """
    return F.gelu(z, approximate="tanh")


class GPT2(LanguageModel):
    """The model of chapter 9 as GPT-2 has it: norms first, learned positions, tanh GELU.

    It has no dropout: a model that has been trained is here to be used.

    Args:
        vocab_size, context_length, embed_dim, num_heads, num_layers, d_ff, attention: as
            for `LanguageModel`.
        activation: of the feed-forward networks.
        eps: ε of all norms.

    Raises:
        TypeError, ValueError: see `LanguageModel`; or eps below 0.

    Source: chapter 20, eq-gpt2-parameters; Radford et al. (2019).
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        d_ff: int | None = None,
        attention: AttentionLike | None = None,
        activation: Activation = gelu_tanh,
        eps: float = 1e-5,
    ) -> None:
        sizes = (vocab_size, context_length, embed_dim, num_heads, num_layers, d_ff)
        super().__init__(*sizes, attention, activation=activation)
        if not eps >= 0:
            raise ValueError(f"eps: expected a number of at least 0, got {eps}")
        for part in self.modules():
            if isinstance(part, LayerNorm):
                part.eps = eps

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        attention: AttentionLike | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        report: Report | None = None,
        ignore: Collection[str] = (),
    ) -> "GPT2":
        """The model in a folder with config.json and safetensors files, ready to write.

        On a CPU `attnlib.pretrained.order_memory` makes it write faster.

        Args:
            folder: where the files are.
            attention: what a head is, as for `LanguageModel`, without parameters and
                without options that change the numbers, see `BaseAttention.neutral`.
            dtype, device, report: as for `load_into`.
            ignore: names in config.json that are passed over.

        Raises:
            FileNotFoundError: a file is missing.
            ImportError: the library safetensors is not installed.
            TypeError, ValueError: config.json asks for what this model does not do; a file
                is cut off or malformed; a tensor is missing, in surplus, or has another
                shape or type. It is named, and no memory was taken.
        """
        options = options_of(read_config(folder, ignore))
        tensors = read_tensors(folder)
        refuse_more_layers(options["num_layers"], tensors)
        with torch.device("meta"):  # shapes without memory
            model = cls(**options, attention=attention)
        refuse_other_heads(model.blocks[0].attention.attention)
        prefix = "transformer." if "transformer.wte.weight" in tensors else ""
        refuse_another_head(tensors, prefix + "wte.weight")
        ignored = {"lm_head.weight"}
        for block in range(len(model.blocks)):  # masks that older files carry along
            ignored |= {f"{prefix}h.{block}.attn.{n}" for n in ("bias", "masked_bias")}
        names = names_of(len(model.blocks), prefix)
        options = {"dtype": dtype, "device": device, "report": report}
        load_into(model, tensors, names, ignored=ignored, **options)
        return model.eval()


ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
}
NEEDED = {
    **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_head", "n_layer"), int),
    "layer_norm_epsilon": (float, int),
}
FIXED: dict[str, Collection[Any]] = {
    "model_type": ["gpt2"],
    "activation_function": list(ACTIVATIONS),
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "reorder_and_upcast_attn": [False],
    "add_cross_attention": [False],
    "tie_word_embeddings": [True],
}
# Beside what changes nothing in any model: we take no dropout, and make no summary.
IGNORED = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_inner", "n_special")
IGNORED += ("summary_activation", "summary_first_dropout", "summary_proj_to_labels")
IGNORED += ("summary_type", "summary_use_proj", "predict_special_tokens")


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `GPT2` that a config.json asks for.

    Raises:
        TypeError, ValueError: it lacks a size, or asks for what `GPT2` does not do.

    Source: chapter 20.
    """
    fixed = {**FIXED, "n_ctx": [config.get("n_positions")]}
    refuse_unknown_config(config, NEEDED, fixed, IGNORED)
    d_ff = config.get("n_inner")
    return {
        "vocab_size": config["vocab_size"],
        "context_length": config["n_positions"],
        "embed_dim": config["n_embd"],
        "num_heads": config["n_head"],
        "num_layers": config["n_layer"],
        "d_ff": None if d_ff is None else require_count("n_inner", d_ff),
        "activation": ACTIVATIONS[config.get("activation_function", "gelu_new")],
        "eps": config["layer_norm_epsilon"],
    }


@contextmanager
def without_head(model: LanguageModel, block: int, head: int) -> Iterator[None]:
    """Within `with`, one head of one block adds nothing; then it is as it was.

    Raises:
        TypeError, ValueError: there is no such block or head; or what makes the rows of its
            output projection is no parameter, which could be set to 0.

    Source: chapter 20, eq-head-sum.
    """
    blocks = len(model.blocks)
    layer = model.blocks[require_count("block", block, least=0, most=blocks - 1)].attention
    require_count("head", head, least=0, most=layer.num_heads - 1)
    whole = dict(layer.out_proj.named_parameters(recurse=False)).get("W")
    if type(whole) is not nn.Parameter:  # but made of others, inside another, or a shard
        raise TypeError(
            f"model: expected out_proj.W of block {block} as a parameter of this process, "
            f"got {layer.out_proj}"
        )
    rows = layer.out_proj.W.chunk(layer.num_heads)[head]  # (d_k, d_model)
    kept = rows.detach().clone()
    try:
        with torch.no_grad():
            rows.zero_()
        yield
    finally:
        with torch.no_grad():
            rows.copy_(kept)
