# Made from book/A_contract.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""What refuses bad input, and the conversion under autocast before it.

Derived in appendix A, "The contract" (book/A_contract.ipynb).
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


def refuse_bad_mask(mask: Tensor, query: Tensor, keys: int) -> None:
    """Refuses a mask of a wrong dtype, device or shape, before any arithmetic.

    Args:
        mask: expected to broadcast to the scores' shape (..., N, M).
        query: shape (..., N, d_k).
        keys: number of keys M.

    Raises:
        TypeError: not a tensor, or a dtype that is neither boolean nor that of query.
        ValueError: a shape that does not broadcast to the scores', or another device.

    Source: the contract, appendix A.
    """
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, query.dtype):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            "mask: expected a boolean tensor (True = may attend) or a "
            f"{query.dtype} tensor that is added to the scores, got {got}"
        )
    if mask.device != query.device:
        raise ValueError(
            f"mask: expected device {query.device} as query, got {mask.device}"
        )
    scores_shape = (*query.shape[:-1], keys)
    if not broadcasts(mask.shape, scores_shape):
        padding = query.dim() > 2 and mask.shape == (query.shape[0], keys)
        advice = "; one row for each sequence is mask[:, None, None], see padding_mask"
        raise ValueError(
            "mask: expected a shape that broadcasts to that of the scores, "
            f"{scores_shape}, got {tuple(mask.shape)}{advice * padding}"
        )


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be repeated to fill the other.

    Source: the contract, appendix A.
    """
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, full) for size, full in sizes)


def refuse_bad_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> None:
    """Refuses what an attention can't compute, before any arithmetic.

    Args:
        query: expected (..., N, d_k), floating point.
        key: expected (..., M, d_k), dtype, device and leading dimensions of query.
        value: expected (..., M, d_v), likewise.
        mask: expected to broadcast to (..., N, M), boolean or of the dtype of query.
        enable_gqa: whether query may have a multiple of the heads of key and value.

    Raises:
        TypeError: not a tensor, not floating point, or a mixed dtype.
        ValueError: wrong rank, mismatched shapes or mixed devices.

    Source: the contract, appendix A.
    """
    refuse_misfits(one_each(query, key) if enable_gqa else query, key, value)
    if mask is not None:
        refuse_bad_mask(mask, query, keys=key.shape[-2])


def one_each(query: Tensor, key: Tensor) -> Tensor:
    """The first of the query's heads that share a head of key; query, if none do.

    Raises:
        ValueError: the number of heads of query is no multiple of those of key.

    Source: chapter 18, eq-grouped-heads; the contract, appendix A.
    """
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor)
    if not tensors or query.is_nested or key.is_nested:
        return query
    if query.dim() < 3 or key.dim() != query.dim() or key.shape[-3] == query.shape[-3]:
        return query
    heads, shared = query.shape[-3], key.shape[-3]
    if shared == 0 or heads % shared:
        expected = f"key: expected a number of heads that divides {heads}, that of query"
        raise ValueError(f"{expected}, got {shared}")
    return query[..., :: heads // shared, :, :] if heads else query


def fitting(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask as autocast gives them, if an attention can take them.

    Raises:
        TypeError, ValueError: see `refuse_bad_inputs`.

    Source: the contract, appendix A.
    """
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor)
    tensors = tensors and isinstance(value, Tensor)
    kind = query.device.type if tensors else "cpu"
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if known and torch.is_autocast_enabled(kind):
        query, key, value, mask = as_autocast(query, key, value, mask)
    if not (  # in one look what refuse_bad_inputs looks for one by one
        tensors
        and query.is_floating_point()
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and not (query.is_nested or key.is_nested or value.is_nested)
        and query.dim() == key.dim() == value.dim() > 1
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and query.shape[-1] == key.shape[-1] != 0
        and key.shape[-2] == value.shape[-2]
    ):
        refuse_bad_inputs(query, key, value, mask, enable_gqa)
    elif mask is not None:
        refuse_bad_mask(mask, query, keys=key.shape[-2])
    return query, key, value, mask


def refuse_nested(name: str, tensor: Tensor) -> None:
    """Refuses sequences of different lengths in one nested or jagged tensor.

    Raises:
        TypeError: the tensor is nested.

    Source: the contract, appendix A.
    """
    if tensor.is_nested:
        advice = "pad the sequences, and mask what was padded by padding_mask"
        raise TypeError(f"{name}: expected a tensor that is not nested; {advice}")


def refuse_misfits(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuses query, key and value that do not fit together, and says which and why.

    Raises:
        TypeError, ValueError: see `refuse_bad_inputs`.

    Source: the contract, appendix A.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a floating-point tensor, got {got}")
        refuse_nested(name, tensor)
        got = f"got shape {tuple(tensor.shape)}"
        if tensor.dim() < 2:
            raise ValueError(
                f"{name}: expected at least 2 dimensions (tokens, features), {got}"
            )
        if tensor.shape[:-2] != query.shape[:-2]:
            leading = tuple(query.shape[:-2])
            raise ValueError(
                f"{name}: expected leading dimensions {leading} as query, {got}"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: expected {query.dtype} as query, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(
                f"{name}: expected device {query.device} as query, got {tensor.device}"
            )
    if key.shape[-1] != query.shape[-1] or key.shape[-1] == 0:
        expected = (
            f"d_k = {query.shape[-1]} features as query" if query.shape[-1] else "d_k ≥ 1"
        )
        raise ValueError(f"key: expected {expected}, got shape {tuple(key.shape)}")
    if value.shape[-2] != key.shape[-2]:
        expected = f"{key.shape[-2]} tokens as key"
        raise ValueError(f"value: expected {expected}, got shape {tuple(value.shape)}")


def refuse_bad_tokens(
    name: str, x: Tensor, features: int, weight: Tensor, dims: int = 1
) -> None:
    """Refuses input that a layer with this weight can't take, or says what was wrong.

    Args:
        name: the argument's name, for the message.
        x: expected (..., features), floating point, dtype and device of weight.
        features: size of the last dimension.
        weight: a parameter of the layer.
        dims: the least number of dimensions.

    Raises:
        TypeError: not a floating-point tensor, or not of the dtype of weight. Under
            autocast any floating dtype will do but float64, which it leaves as it is.
        ValueError: too few dimensions, wrong number of features, or another device.

    Source: the contract, appendix A.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected a floating-point tensor, got {got}")
    refuse_nested(name, x)
    if x.dim() < dims or x.shape[-1] != features:
        raise ValueError(
            f"{name}: expected at least {dims} dimensions, the last of {features} "
            f"features, got shape {tuple(x.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(f"{name}: expected device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype:
        left = torch.float64 in (x.dtype, weight.dtype)
        converted = under_autocast(x.device)
        if left or not converted:
            why = ", as autocast does not convert float64" if left and converted else ""
            raise TypeError(
                f"{name}: expected {weight.dtype} as the weights, got {x.dtype}{why}"
            )


def explained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's `forward`, which says what is wrong with tokens that PyTorch refuses.

    Tokens are the arguments x, query, key and value. They need what the first of the
    layer's projections does: features, dtype and device. While all is well, nothing is
    looked at.

    Source: the contract, appendix A.
    """
    arguments = inspect.signature(forward)

    @wraps(forward)
    def called(self: nn.Module, *args: Any, **options: Any) -> Any:
        try:
            return forward(self, *args, **options)
        except Exception:
            given = arguments.bind(self, *args, **options).arguments
            first = next(self.children())
            size, weight = getattr(first, "in_features", 0), next(first.parameters(), None)
            known = size and weight is not None  # a layer in its place may not say
            for name in ("x", "query", "key", "value"):
                if known and given.get(name) is not None:
                    refuse_bad_tokens(name, given[name], size, weight, dims=2)
            raise

    return called


def copy_parameter(parameter: Tensor | None) -> nn.Parameter | None:
    """A copy of a parameter, frozen if it is; none of none.

    Source: the contract, appendix A.
    """
    if parameter is None:
        return None
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def refuse_ambiguous_mask(mask: Tensor | None, query: Tensor) -> None:
    """Refuses a mask that broadcasting could misread; the attention checks the rest.

    Raises:
        ValueError: neither 2 nor 4 dimensions, or 4 for tokens without a batch.

    Source: chapter 5; the contract, appendix A.
    """
    if not isinstance(mask, Tensor) or mask.dim() == 2:
        return
    got = f"got shape {tuple(mask.shape)}"
    if query.dim() == 2:
        per_head = mask.dim() == 4 and mask.shape[1] > 1
        each = "; a mask for each head needs a batch: tokens[None]" if per_head else ""
        raise ValueError(
            "mask: expected 2 dimensions (queries, keys) as the tokens have no batch, "
            f"{got}{each}"
        )
    if mask.dim() != 4:
        raise ValueError(
            "mask: expected 2 dimensions (queries, keys) or 4 (batch, heads, queries, "
            f"keys), {got}; one mask for each sequence of the batch is mask[:, None]"
        )


def refuse_bad_block(scores: Tensor, value: Tensor) -> None:
    """Refuses a block of keys that can't be mixed, before any arithmetic.

    Args:
        scores: expected (..., N, keys), floating point.
        value: expected (..., keys, d_v), floating point, leading dimensions of scores.

    Raises:
        TypeError: not floating point.
        ValueError: wrong rank or mismatched shapes.

    Source: chapter 13; the contract, appendix A.
    """
    axes = {"scores": "queries, keys", "value": "keys, features"}
    for (name, last), tensor in zip(axes.items(), (scores, value), strict=True):
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")
        if tensor.dim() < 2:
            got = f"got shape {tuple(tensor.shape)}"
            raise ValueError(f"{name}: expected at least 2 dimensions ({last}), {got}")
    got = f"got shape {tuple(value.shape)}"
    if value.shape[:-2] != scores.shape[:-2]:
        leading = tuple(scores.shape[:-2])
        raise ValueError(f"value: expected leading dimensions {leading} as scores, {got}")
    if value.shape[-2] != scores.shape[-1]:
        raise ValueError(f"value: expected {scores.shape[-1]} keys as scores, {got}")


def refuse_bad_positions(
    positions: Tensor | int | None, x: Tensor, rotary: bool = True
) -> None:
    """Refuses positions that do not fit the tokens, before any arithmetic.

    Args:
        positions: expected an integer, integers (tokens,), or one dimension fewer than x
            and broadcasting to x.shape[:-1]; `None` is left to the caller.
        x: tokens (..., tokens, features).
        rotary: whether anything uses positions.

    Raises:
        TypeError: neither an integer nor a tensor of int64 or int32.
        ValueError: a shape that does not fit, another device, or nothing uses positions.

    Source: chapter 16; the contract, appendix A.
    """
    if positions is None:
        return
    if not rotary:
        raise ValueError(
            "positions: expected None, since nothing here turns by positions; give rotary "
            "to the constructor"
        )
    if isinstance(positions, int | torch.SymInt) and not isinstance(positions, bool):
        return
    integers = (torch.int64, torch.int32)
    if not isinstance(positions, Tensor) or positions.dtype not in integers:
        got = positions.dtype if isinstance(positions, Tensor) else repr(positions)
        raise TypeError(
            f"positions: expected a tensor of int64 or int32, or one integer, got {got}"
        )
    shape, full = tuple(positions.shape), tuple(x.shape[:-1])
    fits = len(shape) == len(full) and broadcasts(shape, full) and shape[-1] == full[-1]
    if not fits and shape != full[-1:]:
        raise ValueError(
            f"positions: expected shape {full[-1:]}, or {len(full)} dimensions that "
            f"broadcast to {full}, got {shape}"
        )
    if positions.device != x.device:
        raise ValueError(f"positions: expected device {x.device}, got {positions.device}")


def refuse_bad_rotation(x: Tensor, width: int | None = None) -> None:
    """Refuses what can't be turned in pairs of features.

    Args:
        x: expected (..., tokens, width), floating point, of an even width.
        width: the features that the frequencies were made for; `None` means any.

    Raises:
        TypeError: not a floating-point tensor, or a nested one.
        ValueError: fewer than 2 dimensions, an odd width, or another one.

    Source: chapter 16; the contract, appendix A.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: expected a floating-point tensor, got {got}")
    refuse_nested("x", x)
    got = f"got shape {tuple(x.shape)}"
    if x.dim() < 2:
        raise ValueError(f"x: expected at least 2 dimensions (tokens, features), {got}")
    if x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"x: expected an even number of features, in pairs, {got}")
    if width is not None and x.shape[-1] != width:
        raise ValueError(f"x: expected {width} features, {got}")


def require_rotary(rotary: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
    """Returns `rotary` if it is `None` or an object that can be called.

    Args:
        rotary: what turns queries and keys.

    Raises:
        TypeError: it is anything else.

    Source: chapter 16; the contract, appendix A.
    """
    if rotary is not None and (isinstance(rotary, type) or not callable(rotary)):
        raise TypeError(
            "rotary: expected an object to call, such as RotaryPositions(d_k), "
            f"got {rotary!r}"
        )
    return rotary


def refuse_bad_scaling(
    scaling: str | None, known: Collection[str], factor: float, length: int | None
) -> None:
    """Refuses a rule for longer texts that is unknown or lacks a number.

    Args:
        scaling: expected `None` or one of known.
        known: the names of the rules.
        factor: how many times as long the texts become, expected at least 1, and 1 without
            a rule.
        length: tokens that the model was trained on, which "yarn" and "llama3" need.

    Raises:
        ValueError: one of these is not so.

    Source: chapter 16; the contract, appendix A.
    """
    if scaling is not None and scaling not in known:
        wanted = ", ".join(map(repr, known))
        raise ValueError(f"scaling: expected None or one of {wanted}, got {scaling!r}")
    if not factor >= 1 or (scaling is None and factor != 1):
        expected = "at least 1" if scaling else "1, as there is no scaling"
        raise ValueError(f"factor: expected {expected}, got {factor}")
    if scaling in ("yarn", "llama3") and (length is None or length < 1):
        raise ValueError(
            f"original_length: expected the tokens of a text in training, for {scaling!r}, "
            f"got {length}"
        )


def require_turning(d_k: int, base: float, turns: tuple[float, float] | None = None) -> int:
    """Returns `d_k` if its features can be turned in pairs at speeds that fall.

    Args:
        d_k: features of a head, expected even and at least 2.
        base: what the speeds are powers of, expected above 1.
        turns: expected `None`, or two positive numbers that rise.

    Raises:
        TypeError: d_k is no whole number.
        ValueError: one of these is not so.

    Source: chapter 16; the contract, appendix A.
    """
    if isinstance(d_k, bool) or not isinstance(d_k, Integral):
        raise TypeError(f"d_k: expected a whole number, got {d_k!r}")
    if d_k < 2 or d_k % 2:
        raise ValueError(f"d_k: expected an even number of features, got {d_k}")
    if not base > 1:
        raise ValueError(f"base: expected above 1, got {base}")
    if turns is not None and not 0 < turns[0] < turns[1]:
        raise ValueError(f"turns: expected two positive numbers that rise, got {turns}")
    return d_k


def require_probability(name: str, value: float) -> float:
    """Returns `value` if it is a probability.

    Args:
        name: the argument's name, for the message.
        value: expected in [0, 1].

    Raises:
        TypeError: `value` is no number, or a truth value, which Python takes for 0 or 1.
        ValueError: `value` lies outside [0, 1] or is NaN.

    Source: the contract, appendix A.
    """
    expected = f"{name}: expected a probability between 0 and 1, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(expected)
    if not 0.0 <= value <= 1.0:
        raise ValueError(expected)
    return value


def require_scale(scale: float | Tensor | None) -> float | Tensor | None:
    """Returns `scale` if it can be a factor on the scores.

    Args:
        scale: expected `None`, a finite number, or a floating-point tensor of one number,
            or of one for each head, (heads, 1, 1), which may learn.

    Raises:
        TypeError: anything else, a truth value too, which Python takes for 0 or 1.
        ValueError: a number that is not finite, or a tensor of another shape.

    Source: the contract, appendix A.
    """
    if scale is None:
        return None
    if isinstance(scale, Tensor) and scale.is_floating_point():
        if scale.shape not in ((), (1,)) and (scale.dim() != 3 or scale[0].numel() != 1):
            wanted = "one number, or one for each head, (heads, 1, 1)"
            raise ValueError(f"scale: expected {wanted}, got shape {tuple(scale.shape)}")
        return scale
    if isinstance(scale, bool | Tensor) or not isinstance(scale, Real):
        raise TypeError(
            f"scale: expected None, a number or a tensor of floats, got {scale!r}"
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale!r}")
    return scale


def positive_scale(query: Tensor, scale: float | Tensor | None) -> tuple[Tensor, float]:
    """Query and scale for a kernel that takes one positive number; `None` means 1/√d_k.

    A kernel may mask, or look for the maximum, before it multiplies: a factor below 0 turns
    the order of the scores around, and 0 · -inf is NaN. A tensor may have a gradient. These
    are multiplied to the query before.

    Source: appendix B; chapter 15, eq-raw-maximum.
    """
    if isinstance(scale, Tensor):
        return query * scale.to(query.dtype), 1.0
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return (query, scale) if scale > 0 else (query * scale, 1.0)


def require_flag(name: str, value: bool) -> bool:
    """Returns `value` if it is a truth value, not a number put in its place.

    Args:
        name: the argument's name, for the message.
        value: expected True or False.

    Raises:
        TypeError: `value` is anything else.

    Source: the contract, appendix A.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def require_window(window: int | None) -> int | None:
    """Returns `window` if it is `None` or a number of tokens that a query may see.

    Args:
        window: expected `None`, or an integer of at least 1.

    Raises:
        TypeError: anything else, a truth value too, which Python takes for 0 or 1.
        ValueError: it is below 1.

    Source: chapter 18; the contract, appendix A.
    """
    expected = f"window: expected None or an integer of at least 1, got {window!r}"
    if isinstance(window, bool) or not isinstance(window, int | None):
        raise TypeError(expected)
    if window is not None and window < 1:
        raise ValueError(expected)
    return window


def require_sizes(**sizes: int) -> None:
    """Refuses a number of features, heads, layers or tokens that is none, or below 1.

    Args:
        sizes: by the names of the arguments.

    Raises:
        TypeError: one of them is no whole number, or a truth value.
        ValueError: one of them is below 1.

    Source: the contract, appendix A.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{name}: expected a whole number, got {size!r}")
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def refuse_other_module(name: str, module: nn.Module, wanted: type[nn.Module]) -> None:
    """Refuses to copy a module of PyTorch whose numbers are not what it computes with.

    Args:
        name: the argument's name, for the message.
        module: expected of the class wanted, or of a subclass without methods of its own
            for what the class computes with.
        wanted: the class whose arithmetic is known.

    Raises:
        TypeError: of another class, or with such a method of its own.
        ValueError: a parameter that has become a tensor, made anew at each call.

    Source: the contract, appendix A.
    """
    expected = f"{name}: expected an nn.{wanted.__name__}"
    if not isinstance(module, wanted):
        raise TypeError(f"{expected}, got {type(module).__name__}")
    for method in ("forward", "_sa_block", "_ff_block"):
        theirs = getattr(wanted, method, None)
        if getattr(getattr(module, method, None), "__func__", None) is not theirs:
            raise TypeError(
                f"{expected}, got {type(module).__name__} with its own {method}"
            )
    for parameter in ("weight", "bias", "in_proj_weight", "in_proj_bias"):
        if isinstance(vars(module).get(parameter), Tensor):
            raise ValueError(
                f"{expected} whose {parameter} is a parameter, got a tensor made of "
                "others; prune.remove or remove_weight_norm makes it one"
            )


def require_causal(heads: nn.Module) -> None:
    """Refuses heads that let a token see later ones.

    Args:
        heads: one attention for all heads, or an `nn.ModuleList` with one for each.

    Raises:
        ValueError: a head has no attribute `causal`, or it is False.

    Source: chapter 9; the contract, appendix A.
    """
    for head in heads if isinstance(heads, nn.ModuleList) else [heads]:
        if not getattr(head, "causal", False):
            raise ValueError(
                "attention: expected causal=True, since a language model must not see "
                f"later tokens, got {head!r}"
            )


# Options that change the numbers of an attention, and what changes nothing.
NEUTRAL = {"causal": False, "window": None, "scale": None, "dropout": 0.0, "softcap": None}
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def changed_options(attention: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The options by which an attention, or a part of it, changes the numbers.

    Args:
        attention: a `BaseAttention`, whose `neutral` names its options of that kind.

    Returns:
        Of each that is set: its name, the value that changes nothing, and what it is.

    Source: the contract, appendix A.
    """
    for part in attention.modules():
        if isinstance(part, DROPOUTS) and part.p:
            yield "dropout", 0.0, part.p
        for name, neutral in (attention.neutral | getattr(part, "neutral", {})).items():
            got = getattr(part, name, None)
            if got is not None and got != neutral:
                yield name, neutral, got


def require_ids(ids: Tensor, context_length: int) -> None:
    """Refuses what is not a sequence of tokens short enough.

    Args:
        ids: expected (..., tokens), integers.
        context_length: the most tokens that are allowed.

    Raises:
        TypeError: not a tensor of int64 or int32.
        ValueError: more tokens than context_length, or no dimension of tokens.

    Source: chapter 9; the contract, appendix A.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids: expected a tensor of int64 or int32, got {got}")
    if ids.dim() < 1 or ids.shape[-1] > context_length:
        raise ValueError(
            f"ids: expected at most context_length = {context_length} tokens in "
            f"the last dimension, got shape {tuple(ids.shape)}"
        )


@runtime_checkable
class CacheLike(Protocol):
    """What attention asks of a cache; `attnlib.testing.check_cache` tests the rest.

    Attributes:
        capacity: the most tokens that it holds.

    Source: the contract, appendix A.
    """

    capacity: int

    def __len__(self) -> int:
        """Number of tokens held."""
        ...

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys (..., N, d_k) and values (..., N, d_v); returns all that it holds."""
        ...

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        ...


def require_count(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    """Returns `value` if it is a whole number in its range.

    Args:
        name: the argument's name, for the message.
        value: expected a Python integer.
        least, most: the smallest and the largest that is allowed.

    Raises:
        TypeError: `value` is no integer, or a truth value, which Python takes for 0 or 1.
        ValueError: `value` lies outside of its range.

    Source: chapter 17; the contract, appendix A.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")
    return value


def refuse_bad_append(
    key: Tensor, value: Tensor, held: tuple[Tensor, Tensor] | None, room: int
) -> None:
    """Refuses keys and values that do not continue what a cache holds.

    Args:
        key: expected (..., N, d_k), floating point.
        value: expected (..., N, d_v), likewise, leading dimensions of key.
        held: keys and values in the cache; `None` if it has none yet.
        room: how many tokens more it can hold.

    Raises:
        TypeError: not floating point, or another dtype.
        ValueError: another shape or device, no room, or a gradient that would be lost.

    Source: chapter 17; the contract, appendix A.
    """
    for name, tensor in (("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a floating-point tensor, got {got}")
        refuse_nested(name, tensor)
        if tensor.dim() < 2:
            wanted = "at least 2 dimensions (tokens, features)"
            raise ValueError(f"{name}: expected {wanted}, got shape {tuple(tensor.shape)}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected no gradient, since a cache is written in place; call "
                "the model within torch.no_grad()"
            )
    keys, values = held or (key, key)  # at first, value has to fit to key
    for name, tensor, like in (("key", key, keys), ("value", value, values)):
        beside = "the cache" if held else "key"
        got = f"got shape {tuple(tensor.shape)}"
        if tensor.dtype != like.dtype:
            raise TypeError(
                f"{name}: expected {like.dtype} as {beside}, got {tensor.dtype}"
            )
        if tensor.device != like.device:
            wanted = f"device {like.device} as {beside}"
            raise ValueError(f"{name}: expected {wanted}, got {tensor.device}")
        if tensor.shape[:-2] != like.shape[:-2]:
            wanted = f"leading dimensions {tuple(like.shape[:-2])} as {beside}"
            raise ValueError(f"{name}: expected {wanted}, {got}")
        if held and tensor.shape[-1] != like.shape[-1]:
            wanted = f"{like.shape[-1]} features as the cache"
            raise ValueError(f"{name}: expected {wanted}, {got}")
    if value.shape[-2] != key.shape[-2]:
        wanted = f"{key.shape[-2]} tokens as key"
        raise ValueError(f"value: expected {wanted}, got shape {tuple(value.shape)}")
    if key.shape[-2] > room:
        wanted = f"at most {room} more tokens, since the cache is full then"
        raise ValueError(f"key: expected {wanted}, got {key.shape[-2]}")


def memory_of(cache: CacheLike) -> list[Any]:
    """What a cache writes to: itself, or sequences of a pool that others may share.

    Source: chapter 17; the contract, appendix A.
    """
    pool = getattr(cache, "cache", None)
    if pool is None:
        return [id(cache)]
    return [(id(pool), sequence) for sequence in cache.handles]


def refuse_hidden_padding(cache: CacheLike, name: str, given: Any) -> None:
    """Refuses sequences of different length in a cache where nobody says how they differ.

    Args:
        cache: a view of pages knows its `padding`.
        name, given: what says it, such as a mask or padding; `None`, or numbers that are
            smaller than the cache's, are refused.

    Raises:
        ValueError: sequences differ in length, and `given` does not say so.

    Source: chapter 19; the contract, appendix A.
    """
    hidden = getattr(cache, "padding", None)
    if hidden is None or not bool((hidden != 0).any()):
        return
    told = given is not None
    if told and name == "padding":
        told = bool((torch.as_tensor(given, device=hidden.device) >= hidden).all())
    if not told:
        got = None if given is None else torch.as_tensor(given).tolist()
        raise ValueError(
            f"{name}: expected to be told of the padding {hidden.tolist()} in front of "
            f"sequences of different length in the cache, got {got}"
        )


def joint_capacity(cache: Sequence[CacheLike]) -> int:
    """The most tokens that each of these can hold if all do; some may share their memory.

    Source: chapter 19; the contract, appendix A.
    """
    beside = [getattr(c, "capacity_beside", None) for c in cache]
    return min(b(cache) if b else c.capacity for b, c in zip(beside, cache, strict=True))


def require_caches(
    cache: Sequence[CacheLike], blocks: int, ids: Tensor, context_length: int
) -> int:
    """Returns how many tokens the caches of a model hold, if these tokens may follow.

    Args:
        cache: expected one cache for each block, of the same length.
        blocks: number of blocks.
        ids: the tokens to come, (..., n).
        context_length: the most tokens that the model can see.

    Raises:
        TypeError: not a list of caches.
        ValueError: another number of them, of different lengths, or no room in them.

    Source: chapter 17; the contract, appendix A.
    """
    listed = isinstance(cache, Sequence)
    one_of_each = {type(c): c for c in cache}.values() if listed else ()
    listed = listed and all(isinstance(c, CacheLike) for c in one_of_each)  # slow a call
    if not listed:
        raise TypeError(f"cache: expected a list of caches, one a block, got {cache!r}")
    if len(cache) != blocks:
        raise ValueError(f"cache: expected {blocks}, one for each block, got {len(cache)}")
    owned = [place for c in cache for place in memory_of(c)]
    if len(set(owned)) < len(owned):
        raise ValueError(
            "cache: expected one of its own for each block, got one that several share, "
            "as in [KVCache(n)] * blocks"
        )
    lengths = [len(c) for c in cache]
    if len(set(lengths)) > 1:
        raise ValueError(f"cache: expected the same tokens in each, got lengths {lengths}")
    most = min(context_length, joint_capacity(cache))
    if lengths[0] + ids.shape[-1] > most:
        raise ValueError(
            f"ids: expected at most {most - lengths[0]} tokens after the {lengths[0]} in "
            f"the cache, which with context_length has room for {most}, got {ids.shape[-1]}"
        )
    return lengths[0]


def require_room(
    cache: Sequence[CacheLike], blocks: int, ids: Tensor, read: int, context_length: int
) -> None:
    """Refuses caches in which a text can't be continued to its end, before it is begun.

    Args:
        cache, blocks, context_length: as for `require_caches`.
        ids: the start of the text, with what the caches hold.
        read: how many tokens of the text the model will have read at the end.

    Raises:
        TypeError, ValueError: see `require_caches`; or the caches hold more than ids, or
            the text is too long.

    Source: chapter 17; the contract, appendix A.
    """
    held = require_caches(cache, blocks, ids[..., :0], context_length)
    if held >= ids.shape[-1]:
        wanted = f"more than the {held} tokens in the cache, which begin it"
        raise ValueError(f"ids: expected {wanted}, got shape {tuple(ids.shape)}")
    most = min(context_length, joint_capacity(cache))
    if read > most:
        raise ValueError(
            f"length: expected at most {most + 1 - ids.shape[-1]} with a cache, as the "
            f"model or its cache has room for {most} tokens and ids has {ids.shape[-1]}, "
            f"got {read + 1 - ids.shape[-1]}"
        )


def require_padding(padding: Tensor | Sequence[int], ids: Tensor, least: int = 0) -> Tensor:
    """Returns how many columns at the front of each sequence hold no token.

    Args:
        padding: expected (batch,), integers.
        ids: the sequences, (batch, n).
        least: how many tokens each must have in these columns.

    Raises:
        TypeError: not integers.
        ValueError: another number of sequences, below 0, or too few tokens left. Numbers
            on a GPU, or while `torch.compile` traces, are looked at only if least is not 0:
            what is below 0 counts as 0 there.

    Source: chapter 17; the contract, appendix A.
    """
    padding = torch.as_tensor(padding)
    if padding.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"padding: expected whole numbers, got {padding.tolist()}")
    if ids.dim() != 2 or padding.shape != ids.shape[:1]:
        raise ValueError(
            "padding: expected one number for each sequence of ids (batch, tokens), got "
            f"shape {tuple(padding.shape)} for ids of shape {tuple(ids.shape)}"
        )
    most = ids.shape[-1] - least
    at_hand = padding.device.type == "cpu" and not torch.compiler.is_compiling()
    if (at_hand or least) and ((padding < 0).any() or (least and (padding > most).any())):
        wanted = f"numbers between 0 and {most}" if least else "numbers of at least 0"
        raise ValueError(f"padding: expected {wanted}, got {padding.tolist()}")
    return padding.clamp(min=0).to(ids.device)


def require_kv_heads(num_kv_heads: int | None, num_heads: int) -> int:
    """Returns the number of heads of keys and values, if the heads of queries can share it.

    Args:
        num_kv_heads: expected a divisor of num_heads; `None` means num_heads.
        num_heads: number of heads of queries.

    Raises:
        TypeError: no whole number, or a truth value.
        ValueError: below 1, or no divisor of num_heads.

    Source: chapter 18; the contract, appendix A.
    """
    if num_kv_heads is None:
        return num_heads
    require_count("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        wanted = f"a divisor of num_heads = {num_heads}"
        raise ValueError(f"num_kv_heads: expected {wanted}, got {num_kv_heads}")
    return num_kv_heads


def require_window_kept(heads: nn.Module, cache: CacheLike) -> None:
    """Refuses a cache that forgets tokens which a head still sees.

    Args:
        heads: one attention for all heads, or an `nn.ModuleList` with one for each.
        cache: if it forgets, it says by `window` how many tokens it keeps.

    Raises:
        ValueError: a head has no window, or a longer one.

    Source: chapter 18; the contract, appendix A.
    """
    kept = getattr(cache, "window", None)
    if kept is None:
        return
    for head in heads if isinstance(heads, nn.ModuleList) else [heads]:
        window = getattr(head, "window", None)
        if window is None or window > kept:
            seen = "all tokens" if window is None else f"{window} tokens"
            raise ValueError(
                f"cache: expected one that keeps what a head sees, {seen}, got a window "
                f"of {kept}"
            )


def as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as autocast gives them to `F.scaled_dot_product_attention`.

    Args:
        tensors: query, key, value and mask; the device of the first one counts.

    Returns:
        Within `torch.autocast`, every floating-point tensor but float64 in autocast's
        dtype; all else, and everything outside of autocast, as it came.

    Source: the contract, appendix A.
    """
    if not isinstance(tensors[0], Tensor) or not under_autocast(tensors[0].device):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    cast = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in cast else x for x in tensors
    )


def under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; for some, such as "meta", there is none.

    Source: the contract, appendix A.
    """
    kind = device.type
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)
