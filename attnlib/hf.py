# Made from book/22_inside_transformers.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Any attention inside the models of `transformers`.

Derived in chapter 22, "Inside transformers" (book/22_inside_transformers.ipynb).
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.base import BaseAttention, repeat_heads
from attnlib.cache import WindowCache
from attnlib.checks import CacheLike, changed_options, require_caches
from attnlib.flash.attention import FlashAttention
from attnlib.masks import Mask, causal_mask


def scaled_query(
    query: Float[Tensor, "*batch queries d_k"], scaling: float | None
) -> Float[Tensor, "*batch queries d_k"]:
    """Queries whose scores, over √d_k, are those of the model's scaling.

    Source: chapter 22, eq-model-scale.
    """
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    return query if math.isclose(factor, 1.0, rel_tol=1e-9) else query * factor


def as_added(mask: Mask | None, like: Tensor) -> Tensor:
    """A mask as numbers to add to the scores, at least (1, 1).

    Source: chapter 22; eq-mask-additive of chapter 1.
    """
    if mask is None:
        return like.new_zeros(1, 1)
    if mask.dtype != torch.bool:
        return mask
    return like.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)


def with_sink(
    key: Float[Tensor, "batch heads keys d_k"],
    value: Float[Tensor, "batch heads keys d_v"],
    mask: Mask | None,
    sinks: Float[Tensor, "query_heads"],
    queries: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and an added mask with one more key, whose score is the sink's.

    Source: chapter 22, eq-sink-key.
    """
    added = as_added(mask, key)
    batch = key.shape[0]
    shape = (batch, len(sinks), queries, key.shape[-2])
    column = sinks.to(key.dtype).reshape(1, -1, 1, 1).expand(*shape[:-1], 1)
    added = torch.cat([added.expand(shape), column], dim=-1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), added


def capped_scores(
    query: Float[Tensor, "batch heads queries d_k"],
    key: Float[Tensor, "batch kv_heads keys d_k"],
    mask: Mask | None,
    cap: float,
) -> Float[Tensor, "batch heads queries keys"]:
    """The scores bent below a cap, with the mask, to be added where the queries are 0.

    Source: chapter 22, eq-capped.
    """
    key = repeat_heads(key, query.shape[1] // key.shape[1])
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return cap * torch.tanh(scores / cap) + as_added(mask, scores)


# What a model may pass that changes nothing here: it is in the mask already, or for others.
HARMLESS = frozenset({
    *("position_ids", "cache_position", "position_embeddings", "use_cache"),
    *("past_key_values", "output_hidden_states", "output_router_logits", "return_dict"),
    *("num_items_in_batch", "logits_to_keep", "deterministic"),
    *("max_length_q", "max_length_k"),  # of the documents in cu_seq_lens
})  # fmt: skip


IN_THE_MASK = ("position_bias", "softcap", "s_aux")
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")  # where documents of one row begin, and its end
DONE = ("is_causal", "sliding_window", "output_attentions", *IN_THE_MASK, *PACKED)


def refuse_unknown(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are done, `None` where one is left out; others are refused.

    Raises:
        TypeError: an option that is neither done nor harmless.

    Source: chapter 22.
    """
    for name, option in options.items():
        if name not in DONE and name not in HARMLESS and option is not None:
            raise TypeError(
                f"{name}: expected nothing, since no attention of attnlib knows what this "
                f"model means by it, got {type(option).__name__}"
            )
    return {name: options.get(name) for name in DONE}


def refuse_lost_window(window: int | None, keys: int) -> None:
    """Refuses a window that is shorter than the keys, where no mask keeps it.

    Raises:
        ValueError: a window, no mask, and more keys than the window has.

    Source: chapter 22.
    """
    if window is not None and keys > window:
        raise ValueError(
            f"sliding_window: expected a mask that hides what lies before the {window} "
            f"tokens of the window, got None for {keys} keys"
        )


def refuse_lost_documents(starts: Tensor | None, mask: Mask | None) -> None:
    """Refuses several documents in one row, where the mask lets one look into another.

    Args:
        starts: where each begins, and the end (documents + 1,); `None` if there is one.
        mask: as the model gave it.

    Raises:
        ValueError: no mask, or one that allows the last token of a document to the first
            of the next.

    Source: chapter 22.
    """
    if starts is None or len(starts) < 3:
        return
    first = starts[1:-1].long()
    seen = None if mask is None else mask[..., first, first - 1]
    if seen is None or (seen if seen.dtype == torch.bool else seen > -1e4).any():
        raise ValueError(
            "cu_seq_lens_q: expected a mask that keeps the documents of a row apart; give "
            "the model position_ids that begin anew with each"
        )


def into_mask(
    known: Mapping[str, Any],
    query: Float[Tensor, "batch heads queries d_k"],
    key: Float[Tensor, "batch kv_heads keys d_k"],
    value: Float[Tensor, "batch kv_heads keys d_v"],
    mask: Mask | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What attentions have no argument for: a bias, a cap and sinks, by a mask of numbers.

    Source: chapter 22, eq-capped, eq-sink-key.
    """
    bias, cap, sinks = (known[name] for name in IN_THE_MASK)
    added = as_added(mask, query)
    if bias is not None:
        added = added + bias[..., : key.shape[-2]]
    if cap is not None:
        added, query = capped_scores(query, key, added, cap), 0 * query
    if sinks is not None:
        key, value, added = with_sink(key, value, added, sinks, query.shape[-2])
    return query, key, value, added


def set_for_call(
    attention: BaseAttention, causal: bool, dropout: float, training: bool
) -> BaseAttention:
    """The attention with what this call wants; a shallow copy if it differs.

    Raises:
        ValueError: the model drops weights, and the attention can't.

    Source: chapter 22.
    """
    wanted: dict[str, Any] = {"causal": True} if causal else {}
    if training and dropout:
        if not hasattr(attention, "dropout"):
            name = type(attention).__name__
            raise ValueError(
                f"dropout: expected 0, since {name} drops no weights, got {dropout}; set "
                "the dropout of the model's configuration to 0, or register an attention "
                "that has it, such as ScaledDotProductAttention"
            )
        wanted["dropout"] = dropout
    if not wanted and attention.training == training:
        return attention
    chosen = type(attention).__new__(type(attention))  # torch.compile can't trace copy.copy
    chosen.__dict__.update({**vars(attention), **wanted, "training": training})
    return chosen


def records_weights() -> bool:
    """Whether the model collects weights; GPT-2's does without telling its layers.

    `torch.compile` can't trace the question: `False` there.

    Source: chapter 22.
    """
    if torch.compiler.is_compiling():
        return False
    recorder = sys.modules.get("transformers.utils.output_capturing")
    active = getattr(recorder, "_active_collector", None)
    collected = (active.get() if active is not None else None) or {}
    return "attentions" in collected or "cross_attentions" in collected


def attend_for_model(
    attention: BaseAttention,
    module: nn.Module,
    query: Float[Tensor, "batch heads queries d_k"],
    key: Float[Tensor, "batch kv_heads keys d_k"],
    value: Float[Tensor, "batch kv_heads keys d_v"],
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Float[Tensor, "batch queries heads d_v"], Tensor | None]:
    """What a model of `transformers` calls: its layout, its mask and its options.

    Args:
        attention: computes; without a mask of its own, or parameters that learn.
        module: the model's layer; its `is_causal` says what no mask means.
        query, key, value: heads before tokens; heads of query may share keys.
        attention_mask: boolean, True = may attend, or floating, added to the scores.
            `None` allows everything, or what lies before, if the layer is causal.
        scaling: factor on the scores; `None` means 1/√d_k.
        dropout: probability of dropping a weight, while `module` trains.
        options: `is_causal`, `sliding_window`, `softcap`, `s_aux` (sinks), `position_bias`
            and `output_attentions` are done, and `cu_seq_lens_q` where the mask does it;
            others are refused, unless they can't matter.

    Returns:
        Output with tokens before heads, and the weights or `None`.

    Raises:
        TypeError, ValueError: what the attention can't do, by name.

    Source: chapter 22, eq-none-means.
    """
    known = refuse_unknown(options)
    queries, held = query.shape[-2], key.shape[-2]
    causal = known["is_causal"]
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and attention_mask is None and queries > 1
    if causal:  # aligned top left: what comes after the square holds nothing yet
        key, value = key[..., :queries, :], value[..., :queries, :]
    if not getattr(module, "layer_idx", None):  # once a model: it may wait for a GPU
        refuse_lost_documents(known["cu_seq_lens_q"], attention_mask)
    if attention_mask is None:
        refuse_lost_window(known["sliding_window"], key.shape[-2])
    mask, query = attention_mask, scaled_query(query, scaling)
    key, value, mask = without_empty_places(key, value, mask)
    written = any(known[name] is not None for name in IN_THE_MASK)
    if causal and (written or "causal" not in vars(attention)):
        mask, causal = causal_mask(queries, key.shape[-2], query.device), False
    if written:
        query, key, value, mask = into_mask(known, query, key, value, mask)
    chosen = set_for_call(attention, causal, dropout, module.training)
    need_weights = bool(known["output_attentions"]) or records_weights()
    output, weights = chosen(
        query, key, value, mask, need_weights=need_weights, enable_gqa=True
    )
    if need_weights and weights is None:
        name = type(attention).__name__
        raise ValueError(
            f"output_attentions: expected False, since {name} never forms the weights"
        )
    if weights is not None:
        weights = weights[..., :-1] if known["s_aux"] is not None else weights
        weights = F.pad(weights, (0, held - weights.shape[-1]))  # what was cut off has 0
    return output.transpose(1, 2).contiguous(), weights


WANTED = "expected version 5 or newer to be installed; pip install attnlib[transformers]"


def refuse_bad_guest(name: str, attention: BaseAttention) -> None:
    """Refuses a name that means something else, or an attention that would be wrong.

    Raises:
        TypeError: name is no text, or attention no object of a `BaseAttention`.
        ValueError: a name that is taken, or that `transformers` reads in its own way; an
            attention with parameters that learn, or with an option that changes the
            numbers, see `BaseAttention.neutral`.

    Source: chapter 22.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a text, got {type(name).__name__}")
    if not isinstance(attention, BaseAttention):
        got = (
            attention.__name__ if isinstance(attention, type) else type(attention).__name__
        )
        raise TypeError(
            "attention: expected an object of a BaseAttention, such as FlashAttention(), "
            f"got {got}"
        )
    if not name.isidentifier() or any(
        x in name for x in ("sdpa", "flash", "flex", "eager")
    ):
        raise ValueError(
            "name: expected letters, digits and _, without sdpa, flash, flex or eager, "
            f"which transformers reads in its own way, got {name!r}"
        )
    kind = type(attention).__name__
    if any(weight.requires_grad for weight in attention.parameters()):
        raise ValueError(
            f"attention: expected parameters that are frozen, by requires_grad_(False), "
            f"since the model would neither save nor train those of {kind}"
        )
    for own, _, got in changed_options(attention):
        raise ValueError(
            f"attention: expected {kind} without {own}, since the model says at every call "
            f"what changes its numbers, got {own}={got}"
        )


def refuse_own_attention(model: nn.Module) -> None:
    """Refuses a model whose layers ask for no attention by name, but keep their own.

    Raises:
        TypeError: it is such a model; the library would change its name and nothing else.

    Source: chapter 22.
    """
    homes = {type(module).__module__ for module in model.modules()}
    if not any(hasattr(sys.modules.get(h), "ALL_ATTENTION_FUNCTIONS") for h in homes):
        raise TypeError(
            "model: expected layers that ask for an attention by name, got "
            f"{type(model).__name__}, which keeps its own"
        )


def mask_for_model(theirs: Callable[..., Tensor | None], **options: Any) -> Tensor | None:
    """The library's mask; its attribute `used` tells how many keys are no empty places.

    A static cache returns places that hold nothing yet. The mask hides them, but scores
    that depend on places count from the last key.

    Args:
        theirs: what makes the mask.
        options: what the library passes to it.

    Source: chapter 22, eq-guest-sees.
    """
    mask = theirs(**options)
    if mask is None or torch.compiler.is_compiling():
        return mask
    if "q_length" in options:
        used = options.get("q_offset", 0) + options["q_length"]
    else:  # before transformers passed lengths
        used = options["cache_position"][-1] + 1
    used = int(used - options.get("kv_offset", 0))
    if 0 < used < mask.shape[-1] and not mask[..., used:].any():
        mask = mask.contiguous()  # or the library's own call of it would lose the attribute
        mask.used = used
    return mask


def without_empty_places(
    key: Float[Tensor, "batch kv_heads keys d_k"],
    value: Float[Tensor, "batch kv_heads keys d_v"],
    mask: Mask | None,
) -> tuple[Tensor, Tensor, Mask | None]:
    """Keys, values and mask up to where the mask of `mask_for_model` says that they end.

    Source: chapter 22, eq-guest-sees.
    """
    used = None if torch.compiler.is_compiling() else getattr(mask, "used", None)
    if used is None or mask is None or mask.shape[-1] != key.shape[-2]:
        return key, value, mask
    return key[..., :used, :], value[..., :used, :], mask[..., :used]


def register(
    name: str = "attnlib",
    attention: BaseAttention | None = None,
    model: nn.Module | None = None,
) -> str:
    """Makes an attention known to `transformers`, for every model that can change its own.

    `model.set_attn_implementation(name)` puts it into a model, `attn_implementation=name`
    into one that is being loaded; neither says where a model keeps an attention of its own.
    The mask is registered together with it: without, a model gives no mask at all, and
    padding is read as text.

    Scores may depend on the places of the keys, with every cache. Two cases are left out:
    sinks, which are one more key, and `torch.compile` over a static cache, whose empty
    places are then counted.

    Args:
        name: by which models ask for it. A name that this function gave may be given anew.
        attention: a `BaseAttention`, the same in each layer; its parameters, if any, are
            frozen. `None` means `FlashAttention()`.
        model: to put it into at once.

    Returns:
        The name.

    Raises:
        ImportError: `transformers` is not installed, or too old.
        TypeError, ValueError: see `refuse_bad_guest`; another has registered the name; or
            the model has an attention of its own, see `refuse_own_attention`.

    Source: chapter 22.
    """
    attention = FlashAttention() if attention is None else attention
    refuse_bad_guest(name, attention)
    if model is not None:
        refuse_own_attention(model)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask as theirs
    except ImportError as error:
        raise ImportError(f"transformers: {WANTED}") from error
    sdpa_mask = partial(mask_for_model, theirs)

    taken = AttentionInterface().get(name)
    ours = getattr(getattr(taken, "func", None), "__name__", "") == "attend_for_model"
    if taken is not None and not ours:
        raise ValueError(f"name: expected one that nobody has registered, got {name!r}")
    AttentionInterface.register(name, partial(attend_for_model, attention))
    AttentionMaskInterface.register(name, sdpa_mask)
    if model is not None:
        model.set_attn_implementation(name)
    return name


def cache_for_model(model: nn.Module, caches: Sequence[CacheLike]) -> Any:
    """A cache of `transformers` that keeps keys and values in caches of this book.

    For `past_key_values` of a model, or of its `generate`, also with beams where the caches
    can `select`. What the library crops, as for guessed tokens, it refuses here.

    Args:
        model: a causal model of the library, whose layers keep keys and values.
        caches: one for each layer, in their order; for layers with a window, and for these
            alone, it may be a `WindowCache` of the same window, then for all of them.

    Returns:
        A `transformers.Cache`.

    Raises:
        ImportError: `transformers` is not installed, or too old.
        TypeError, ValueError: see `require_caches`; a layer that keeps something else; a
            `WindowCache` of another window than its layer, or not for all with a window.

    Source: chapter 22, eq-guest-sees.
    """
    try:
        from transformers.cache_utils import CacheLayerMixin, DynamicCache
    except ImportError as error:
        raise ImportError(f"transformers: {WANTED}") from error
    theirs = DynamicCache(config=model.config)  # which knows the windows of the layers
    require_caches(caches, len(theirs.layers), torch.empty(0), context_length=2**62)
    rings = set()
    for at, (held, layer) in enumerate(zip(caches, theirs.layers, strict=True)):
        if not type(layer).__name__.startswith("Dynamic"):
            raise TypeError(f"model: expected keys and values in layer {at}, got {layer!r}")
        window = getattr(layer, "sliding_window", None)
        if isinstance(held, WindowCache) and held.window != window:
            wanted = "a KVCache" if window is None else f"WindowCache({window})"
            raise ValueError(f"caches: expected {wanted} for layer {at}, got {held!r}")
        if window is not None:
            rings.add(isinstance(held, WindowCache))
    if len(rings) > 1:
        raise ValueError("caches: expected rings for all layers with a window, or for none")
    kept = kept_layer(CacheLayerMixin)
    theirs.layers = [kept(held) for held in caches]
    return theirs


def first_handed_out(held: CacheLike) -> int:
    """The first token whose key and value a cache hands out with the next one.

    Source: chapter 22, eq-guest-sees.
    """
    ring = isinstance(held, WindowCache) and len(held) > 0
    return max(held.first, len(held) - held.window + 1) if ring else 0


def kept_layer(base: type) -> type:
    """The class of a layer's part of `cache_for_model`, of the library's own for it.

    Source: chapter 22, eq-guest-sees.
    """

    class KeptLayer(base):
        """Keys and values of one layer, in a cache of this book."""

        def __init__(self, held: CacheLike) -> None:
            super().__init__()
            self.held, self.is_initialized = held, True
            self.is_sliding = isinstance(held, WindowCache)

        def lazy_initialization(self, *tensors: Tensor) -> None:
            """Nothing: the caches of this book take their memory at the first `append`."""

        def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            """All keys and values that the new tokens may see."""
            return self.held.append(key, value)

        def get_mask_sizes(self, new: int | Tensor) -> tuple[int, int]:
            """How many keys the new tokens get, and the position of the first."""
            count = new if isinstance(new, int) else len(new)  # once, their positions
            first = first_handed_out(self.held)
            return len(self.held) - first + count, first

        def get_seq_length(self) -> int:
            """How many tokens were read."""
            return len(self.held)

        def get_max_length(self) -> int:
            """How many may be read."""
            return self.held.capacity

        get_max_cache_shape = get_max_length  # its name before

        def reset(self) -> None:
            """Forgets all."""
            self.held.truncate(0)

        def reorder_cache(self, rows: Tensor) -> None:
            """Keeps these texts of the batch, in this order."""
            self.held.select(rows)

        def crop(self, *tokens: int) -> None:
            """Refused, since versions of the library disagree on what the number is."""
            raise NotImplementedError("cache: expected no cropping; see attnlib.speculate")

    return KeptLayer
