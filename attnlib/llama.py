# Made from book/21_llama.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Llama and its relatives, made of the book's parts, and read from their folders.

Derived in chapter 21, "Llama" (book/21_llama.ipynb).
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.checks import (
    require_causal,
    require_count,
    require_sizes,
)
from attnlib.gated_feed_forward import GatedFeedForward
from attnlib.gguf import read_gguf
from attnlib.multi_head import AttentionLike, MultiHeadAttention, Rotary
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
from attnlib.projection import Projection
from attnlib.rms_norm import RMSNorm
from attnlib.rotary import RotaryPositions
from attnlib.scaled_dot_product import ScaledDotProductAttention
from attnlib.transformer import LanguageModel, TransformerBlock


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a `Llama`, and what sets its relatives apart.

    Args:
        vocab_size, context_length, embed_dim, num_heads, num_layers: as for
            `LanguageModel`.
        d_ff: hidden features of the gated network.
        num_kv_heads: heads of keys and values; `None` means num_heads.
        d_k: features of a head; `None` means embed_dim / num_heads.
        rotary: what turns queries and keys; `None` means `RotaryPositions(d_k)`.
        window: how many tokens a query sees, itself included; `None` means all.
        dropout: probability of dropping a weight, in training only.
        tied: whether the embedding also makes the logits.
        eps: ε of the norms.
        qkv_bias, out_bias, ffn_bias: which projections have biases.
        head_norm: whether queries and keys are normalized.

    Source: chapter 21, eq-llama-block; Touvron et al. (2023).
    """

    vocab_size: int
    context_length: int
    embed_dim: int
    num_heads: int
    num_layers: int
    d_ff: int
    num_kv_heads: int | None = None
    d_k: int | None = None
    rotary: nn.Module | None = None
    window: int | None = None
    dropout: float = 0.0
    tied: bool = False
    eps: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    head_norm: bool = False


def require_config(config: LlamaConfig) -> tuple[int, int]:
    """Features of a token and of a head.

    Raises:
        TypeError: no `LlamaConfig`, or a size that is no whole number.
        ValueError: a size below 1, or embed_dim not divisible by num_heads without a d_k.

    Source: chapter 21.
    """
    if not isinstance(config, LlamaConfig):
        raise TypeError(f"config: expected a LlamaConfig, got {type(config).__name__}")
    require_sizes(vocab_size=config.vocab_size, context_length=config.context_length)
    require_sizes(num_layers=config.num_layers)
    d, num_heads = config.embed_dim, config.num_heads
    return d, require_head_width(d, num_heads, config.d_k)


def require_same_window(heads: nn.Module, window: int | None) -> None:
    """Refuses heads that see another number of tokens than the model.

    Raises:
        ValueError: the window of a head is another one.

    Source: chapter 21.
    """
    for head in heads if isinstance(heads, nn.ModuleList) else [heads]:
        if head.window != window:
            raise ValueError(f"attention: expected window={window}, got {head.window}")


class LlamaBlock(TransformerBlock):
    """Attention, then a gated network, each behind an RMS norm and beside a residual path.

    Args:
        config: the sizes of the model.
        attention: what a head is, see `make_heads`.
        rotary: what turns queries and keys; `None` means that nothing does.

    Attributes:
        attention, feed_forward: `LlamaAttention` and `GatedFeedForward`.
        norm_1, norm_2: `RMSNorm(embed_dim, eps)`.

    Source: chapter 21, eq-llama-block; Touvron et al. (2023).
    """

    def __init__(
        self,
        config: LlamaConfig,
        attention: AttentionLike | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        nn.Module.__init__(self)  # other parts; forward is chapter 9's
        self.dropout, self.norm_first = 0.0, True
        d, eps = config.embed_dim, config.eps
        self.norm_1, self.norm_2 = RMSNorm(d, eps), RMSNorm(d, eps)
        self.attention = LlamaAttention(config, attention, rotary)
        self.feed_forward = GatedFeedForward(d, config.d_ff, bias=config.ffn_bias)


class Llama(LanguageModel):
    """A language model in the form of Llama: logits of each token given those before it.

    Args:
        config: its sizes, and what sets it apart.
        attention: what a head is, see `make_heads`; it must have causal=True, and the
            window. Each block gets a copy of its own. `None` means the causal scaled dot
            product with this window and dropout.

    Attributes:
        token_embedding: `nn.Embedding`.
        positions: as rotary.
        blocks: the blocks, each a `LlamaBlock`.
        norm: `RMSNorm` after the last block.
        head: `Projection(embed_dim, vocab_size)` without bias, or `None` if tied.

    Raises:
        TypeError, ValueError: a size below 1, heads that do not fit, attention that is not
            causal or has another window.

    Source: chapter 21, eq-llama-block; Touvron et al. (2023).
    """

    def __init__(self, config: LlamaConfig, attention: AttentionLike | None = None) -> None:
        nn.Module.__init__(self)  # other parts; generate is chapter 9's
        d, d_k = require_config(config)
        self.context_length, self.dropout = config.context_length, 0.0
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        nn.init.normal_(self.token_embedding.weight, std=d**-0.5)
        rotary = RotaryPositions(d_k) if config.rotary is None else config.rotary
        self.positions = copy.deepcopy(rotary)  # a configuration may serve several models
        if attention is None:
            window, dropout = config.window, config.dropout
            attention = ScaledDotProductAttention(dropout, causal=True, window=window)
        self.blocks = nn.ModuleList(
            LlamaBlock(config, copy.deepcopy(attention), self.positions)
            for _ in range(config.num_layers)
        )
        require_causal(self.blocks[0].attention.attention)
        require_same_window(self.blocks[0].attention.attention, config.window)
        self.norm = RMSNorm(d, config.eps)
        self.head = None if config.tied else Projection(d, config.vocab_size, bias=False)

    def logits(
        self, x: Float[Tensor, "*batch embed_dim"]
    ) -> Float[Tensor, "*batch vocab_size"]:
        """Logits, by the head or by the embedding."""
        if self.head is None:
            return F.linear(x, self.token_embedding.weight)
        return self.head(x)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attention: AttentionLike | None = None,
        report: Report | None = None,
        ignore: Collection[str] = (),
    ) -> "Llama":
        """The model of a folder, or of a GGUF file, in `eval()`.

        Llama, Mistral, Qwen 2 and Qwen 3 are understood, as far as they have no experts.
        Everything is compared before memory is taken for the first tensor. On a CPU
        `attnlib.pretrained.order_memory` makes it write faster.

        Args:
            folder: where config.json and the safetensors files are; or one file of the form
                GGUF, whose numbers become float32, see `attnlib.gguf.read_gguf`.
            dtype: of the model; `None` means that of the files.
            device: where it goes; `None` means the CPU.
            attention: as for `Llama`, without parameters and without other options that
                change the numbers, see `BaseAttention.neutral`.
            report: told after each tensor, see `load_into`.
            ignore: names in config.json that are passed over.

        Raises:
            FileNotFoundError: a file is missing.
            TypeError, ValueError: a file is damaged; the configuration asks for something
                that is not supported; a tensor is missing, in surplus, or does not fit.
        """
        if Path(folder).suffix == ".gguf":
            said, tensors = read_gguf(folder)
            config = llama_config(said)
        else:
            config = llama_config(read_config(folder, ignore))
            tensors = read_tensors(folder)
        refuse_more_layers(config.num_layers, tensors)
        with torch.device("meta"):  # shapes without memory
            model = cls(config, attention)
        refuse_other_heads(model.blocks[0].attention.attention, config.window)
        names = llama_names(model)
        if model.head is None:
            refuse_another_head(tensors, "model.embed_tokens.weight")
        options = {"ignored": not_needed(model), "dtype": dtype, "device": device}
        load_into(model, tensors, names, **options, report=report)
        model.positions.to(device or "cpu")
        return model.eval()


# Our parts, and what they are called in the files.
NAMES = {
    "token_embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.out_proj": "self_attn.o_proj",
    "attention.q_proj.norm": "self_attn.q_norm",
    "attention.k_proj.norm": "self_attn.k_norm",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}


def llama_names(model: Llama) -> dict[str, Into]:
    """For each tensor of the files the parameter that it becomes.

    Source: chapter 21.
    """
    names = {}
    for name, _ in model.named_parameters():
        part, _, last = name.rpartition(".")  # blocks.3.norm_1, gamma
        front = ""
        if part.startswith("blocks."):
            _, number, part = part.split(".", 2)
            front = f"model.layers.{number}."
        theirs = f"{front}{NAMES[part]}.{'bias' if last == 'b' else 'weight'}"
        names[theirs] = Into((name,), transposed=last == "W")
    return names


def not_needed(model: Llama) -> set[str]:
    """Names that a file may have and the model does not need.

    Older files hold the speeds of the pairs, which follow from config.json; and a tied
    model's may hold the embedding a second time, as the head.

    Source: chapter 21.
    """
    speeds = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    names = {speeds.format(number) for number in range(len(model.blocks))}
    return names | ({"lm_head.weight"} if model.head is None else set())


# What a config.json must say, what else is read, and what changes nothing here.
NEEDED: dict[str, type | tuple[type, ...]] = {
    "model_type": str,
    "vocab_size": int,
    "max_position_embeddings": int,
    "hidden_size": int,
    "num_attention_heads": int,
    "num_hidden_layers": int,
    "intermediate_size": int,
    "rms_norm_eps": (float, int),
}
READ = ("num_key_value_heads", "head_dim", "attention_dropout", "tie_word_embeddings")
READ += ("rope_theta", "rope_scaling", "rope_parameters")
WINDOWED = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
FAMILIES = {  # what is read of each besides
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": ("sliding_window",),
    "qwen2": WINDOWED,
    "qwen3": ("attention_bias", *WINDOWED),
}
FIXED = {"hidden_act": ("silu",), "partial_rotary_factor": (1.0,), "use_mrope": (False,)}
FIXED |= {"rope_interleaved": (False,), "is_llama_config": (True,)}  # in SmolLM's files
TRUTHS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
COUNTS = ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers")


def llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The sizes and options that a config.json asks for.

    Raises:
        TypeError, ValueError: a name is missing or unknown, or asks for something that is
            not supported.

    Source: chapter 21.
    """
    family = config.get("model_type")
    fixed = {"model_type": tuple(FAMILIES)} | FIXED  # of another family, that is told
    if family == "mistral":
        fixed |= {"attention_bias": (False,)}
    refuse_unknown_config(config, NEEDED, fixed, READ + FAMILIES.get(family, WINDOWED))
    for name in TRUTHS:
        if not isinstance(config.get(name) or False, bool):
            got = config[name]
            raise TypeError(f"config.json: expected {name} as true or false, got {got!r}")
    for name in COUNTS:
        if config.get(name) is not None:
            require_count(f"config.json: {name}", config[name], least=0)
    if family != "llama" and config.get("num_key_value_heads") is None:
        raise ValueError("config.json: expected num_key_value_heads, which is missing")
    embed_dim, heads = config["hidden_size"], config["num_attention_heads"]
    d_k = require_head_width(embed_dim, heads, config.get("head_dim"))
    biased = bool(config.get("attention_bias"))
    return LlamaConfig(
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        embed_dim=embed_dim,
        num_heads=heads,
        num_layers=config["num_hidden_layers"],
        d_ff=config["intermediate_size"],
        num_kv_heads=config.get("num_key_value_heads"),
        d_k=d_k,
        rotary=rotary_of(config, d_k),
        window=window_of(config),
        dropout=config.get("attention_dropout") or 0.0,
        tied=bool(config.get("tie_word_embeddings")),
        eps=config["rms_norm_eps"],
        qkv_bias=family == "qwen2" or biased,
        out_bias=biased,
        ffn_bias=bool(config.get("mlp_bias")),
        head_norm=family == "qwen3",
    )


def window_of(config: Mapping[str, Any]) -> int | None:
    """How many tokens a query sees, the same in all blocks; `None` if all.

    Raises:
        ValueError: it is not said, or blocks would differ.

    Source: chapter 21; chapter 18, eq-window-visible.
    """
    family, window = config["model_type"], config.get("sliding_window")
    if family == "mistral":
        if "sliding_window" not in config:
            raise ValueError("config.json: expected sliding_window, which is missing")
        return window
    if not config.get("use_sliding_window"):
        window = None
    elif "sliding_window" not in config:
        raise ValueError("config.json: expected sliding_window, which is missing")
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        first = config.get("max_window_layers", 28) if window else layers
        kinds = [("full", "sliding")[number >= first] for number in range(layers)]
        kinds = [f"{kind}_attention" for kind in kinds]
    if len(kinds) != layers or len(set(kinds)) > 1:
        raise ValueError(
            f"config.json: expected layer_types with {layers} equal entries, got {kinds}: "
            "windows that differ are not supported"
        )
    if kinds[0] not in ("full_attention", "sliding_attention"):
        raise ValueError(f"config.json: layer_types: {kinds[0]!r} is not supported")
    if kinds[0] == "full_attention":
        return None
    if not window:
        raise ValueError("config.json: expected sliding_window, as layer_types has some")
    return window


# For each kind of scaling its name here, what it needs, and what it may have.
SCALED = ("factor", "original_max_position_embeddings")
YARN = ("beta_slow", "beta_fast", "attention_factor")
ROPES = {
    "default": (None, (), ()),
    "linear": ("linear", ("factor",), ()),
    "llama3": ("llama3", (*SCALED, "low_freq_factor", "high_freq_factor"), ()),
    "yarn": ("yarn", ("factor",), (SCALED[1], *YARN)),
}


def rotary_of(config: Mapping[str, Any], d_k: int) -> RotaryPositions:
    """What turns queries and keys, with the scaling that config.json asks for.

    Raises:
        ValueError: a kind of scaling, or a number of it, that is unknown or missing, or
            said twice in different ways.

    Source: chapter 21; chapter 16, eq-by-parts.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            got = config[name]
            raise TypeError(f"config.json: expected {name} as an object, got {got!r}")
    asked = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if config.get("rope_parameters") and config.get("rope_scaling") not in (None, asked):
        raise ValueError("config.json: expected rope_scaling as rope_parameters, or null")
    bases = [asked.pop("rope_theta", None), config.get("rope_theta")]
    bases = {float(base) for base in bases if base is not None} or {10000.0}
    if len(bases) > 1:
        raise ValueError(f"config.json: expected one rope_theta, got {sorted(bases)}")
    old_name = asked.pop("type", "default")
    kind = asked.pop("rope_type", old_name)
    if kind not in ROPES:
        wanted = ", ".join(map(repr, ROPES))
        raise ValueError(
            f"config.json: expected rope_type as one of {wanted}, got {kind!r}, which is "
            "not supported"
        )
    scaling, needed, allowed = ROPES[kind]
    if missing := [name for name in needed if asked.get(name) is None]:
        raise ValueError(f"config.json: expected {missing[0]} for rope_type {kind!r}")
    for name, value in asked.items():
        neutral = (name, value) in (("truncate", True), ("partial_rotary_factor", 1.0))
        if value is not None and not neutral and name not in (*needed, *allowed):
            raise ValueError(f"config.json: rope_type {kind!r}: {name} is not supported")
        if name in (*needed, *allowed) and type(value) not in (int, float, type(None)):
            raise TypeError(f"config.json: expected {name} as a number, got {value!r}")
    options: dict[str, Any] = {"scaling": scaling}
    if scaling:
        options["factor"] = float(asked["factor"])
    if kind in ("llama3", "yarn"):
        length = asked.get("original_max_position_embeddings")
        options["original_length"] = length or config["max_position_embeddings"]
    if kind == "llama3":
        turns = asked["low_freq_factor"], asked["high_freq_factor"]
        options["turns"] = tuple(map(float, turns))
    elif kind == "yarn":
        turns = asked.get("beta_slow") or 1, asked.get("beta_fast") or 32
        options["turns"] = tuple(map(float, turns))
        options["magnitude"] = asked.get("attention_factor")
    return RotaryPositions(d_k, bases.pop(), **options)


class NormedProjection(Projection):
    """A projection to heads, each of which then has a mean square of 1, times a scale.

    Args:
        in_features, out_features, bias: as for `Projection`.
        d_k: features of a head, a divisor of out_features.
        eps: of the norm.

    Attributes:
        norm: `RMSNorm(d_k, eps)`, the same for all heads.

    Source: chapter 21, eq-head-norm; Henry et al. (2020).
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, d_k: int, eps: float
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.d_k, self.norm = d_k, RMSNorm(d_k, eps)

    def forward(
        self, input: Float[Tensor, "*batch in_features"]
    ) -> Float[Tensor, "*batch out_features"]:
        """Output (..., out_features) of input (..., in_features)."""
        output = super().forward(input)
        heads = output.unflatten(-1, (-1, self.d_k))
        return self.norm(heads).flatten(-2)


class LlamaAttention(MultiHeadAttention):
    """Multi-head attention with the sizes of a `LlamaConfig`, its biases and its norms.

    Args:
        config: the sizes, which projections have biases, and whether queries and keys are
            normalized.
        attention, rotary: as for `MultiHeadAttention`.

    Attributes:
        q_proj, k_proj: `Projection` or `NormedProjection` layers, to num_heads · d_k and
            num_kv_heads · d_k features.
        v_proj, out_proj: `Projection` layers.

    Raises:
        TypeError, ValueError: see `MultiHeadAttention`.

    Source: chapter 21, eq-llama-block, eq-head-norm.
    """

    def __init__(
        self,
        config: LlamaConfig,
        attention: AttentionLike | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        d, h, bias = config.embed_dim, config.num_heads, config.qkv_bias
        super().__init__(d, h, attention, bias, rotary, config.num_kv_heads, d_k=config.d_k)
        q_dim, kv_dim = self.q_proj.out_features, self.k_proj.out_features
        if config.head_norm:
            self.q_proj = NormedProjection(d, q_dim, bias, q_dim // h, config.eps)
            self.k_proj = NormedProjection(d, kv_dim, bias, q_dim // h, config.eps)
        if config.out_bias != bias:
            self.out_proj = Projection(q_dim, d, config.out_bias)


def require_head_width(embed_dim: int, num_heads: int, d_k: int | None) -> int:
    """Returns the features of a head, by default embed_dim / num_heads.

    Raises:
        TypeError: d_k is no whole number.
        ValueError: d_k below 1, or embed_dim not divisible by num_heads without a d_k.

    Source: chapter 21.
    """
    require_sizes(embed_dim=embed_dim, num_heads=num_heads)
    if d_k is not None:
        return require_count("d_k", d_k)
    if embed_dim % num_heads:
        wanted = f"a multiple of num_heads = {num_heads}, or a d_k"
        raise ValueError(f"embed_dim: expected {wanted}, got {embed_dim}")
    return embed_dim // num_heads
