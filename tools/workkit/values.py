"""What is said of a value, and of the two sides of a comparison that does not hold.

And the few digits by which a value is known again.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from workkit.naming import alike

OPERATORS = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le,
    "Gt": operator.gt, "GtE": operator.ge, "Is": operator.is_, "IsNot": operator.is_not,
    "In": lambda a, b: a in b, "NotIn": lambda a, b: a not in b,
}  # fmt: skip
NO_STATE = FunctionType, type  # what no call changes
# A call may change what it names, but through these no value of the reader's comes back.
CARRY_NOTHING = ModuleType, np.random.Generator, torch.Generator, random.Random
EQUALITIES = ("Eq", "call", "all")
PLACES = (4, 8, 12, 17)


def holds(form: str, parts: tuple) -> bool:
    """Whether a comparison holds, given its parts."""
    if form == "value":
        return bool(parts[0])
    if form == "call":
        function, options, *values = parts
        return bool(function(*values, **options))
    if form == "all":
        return not odd(parts)
    return all(OPERATORS[op](a, b) for op, a, b in links(form, parts))


def odd(parts: tuple) -> tuple:
    """The first pair of values that should be alike and is not."""
    function, options, pairs = parts
    return next((p for p in pairs if not function(*p, **options)), ())


def links(form: str, parts: tuple) -> list[tuple[str, Any, Any]]:
    """The comparisons of a chain such as a == b == c, each with its operator."""
    return list(zip(form.split(), parts, parts[1:]))  # noqa: B905


def apart(form: str, parts: tuple) -> list[Any]:
    """The two values of the comparison that does not hold."""
    if form == "value":
        return []
    if form == "call":
        return list(parts[2:4])
    if form == "all":
        return list(odd(parts)[:2])
    return next([a, b] for op, a, b in links(form, parts) if not OPERATORS[op](a, b))


def listed(value: Any) -> Any:
    """Arrays and tensors as lists."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().resolve_conj().resolve_neg()
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def numbers(value: Any) -> Iterator[Any]:
    """What a value consists of, in order."""
    value = listed(value)
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, complex):
        yield from (value.real, value.imag)
    elif isinstance(value, bool | int | float):
        yield float(value) if abs(value) < 1e300 or value != value else math.inf
    else:
        yield str(value)[:200] if isinstance(value, str) else type(value).__name__


def digits(value: Any, most: int = 3) -> str:
    """Shape or count, sum, size and some entries, with four digits each."""
    found = list(numbers(value))
    plain = [x for x in found if isinstance(x, float) and math.isfinite(x)]
    step = max(1, len(found) // most)
    total, size = sum(plain), math.hypot(*plain)
    if abs(total) < 1e-6 * size * len(found):  # what is left is rounding
        total = 0.0
    shape = tuple(value.shape) if hasattr(value, "shape") else (len(found),)
    kept = [total, size, *found[::step][:most]] if len(found) > 1 else found
    texts = [x[:60] if isinstance(x, str) else f"{x:.4g}" for x in kept]
    return " ".join(["×".join(map(str, shape)), *texts])


def brief(value: Any, other: Any = None, places: int = 4) -> str:
    """A value in a line; of a large one, the entry where it differs most from another."""
    shape = getattr(value, "shape", None)
    if shape is None:
        text = repr(value)
        return text if len(text) <= 160 else f"{text[:150]} …"
    flat = list(numbers(value))
    if len(flat) <= 24:
        return written(listed(value), places)
    text = f"shape {tuple(shape)}"
    there = (
        list(numbers(other)) if tuple(getattr(other, "shape", ())) == tuple(shape) else []
    )
    gaps = [abs(a - b) if a == a and b == b else math.inf for a, b in zip(flat, there)]  # noqa: B905
    if not gaps:
        return f"{text}, beginning {written(flat[:6], places)}"
    at = gaps.index(max(gaps))
    place, rest = [], at
    for size in reversed(shape):
        place.insert(0, rest % size)
        rest //= size
    return f"{text}, at {place}: {written(flat[at], places)}"


def written(value: Any, places: int = 4) -> str:
    if isinstance(value, list):
        return f"[{', '.join(written(part, places) for part in value)}]"
    if isinstance(value, float):
        return f"{value + 0.0:.{places}g}"  # −0 is 0
    return str(value)


def shows(value: Any) -> bool:
    """Whether a value says something when it is printed beside a failure."""
    if isinstance(value, ModuleType):  # NumPy has a function `shape`
        return False
    return hasattr(value, "shape") or isinstance(value, int | float | list | tuple)


def sides(values: list[Any]) -> list[str]:
    """Both in a line each, with as many digits as tell them apart, or with their types."""
    types = [type_of(value) for value in values if hasattr(value, "dtype")]
    apart = len({*types}) == 2
    plain = [brief(v, values[1 - i]) for i, v in enumerate(values)]
    for places in PLACES:
        shown = [brief(v, values[1 - i], places) for i, v in enumerate(values)]
        if len({*shown}) > 1:
            plain = shown
            break
    return [f"{v}, {types[i]}" if apart else v for i, v in enumerate(plain)]


def differences(form: str, values: list[Any]) -> list[str]:
    """That the sides of an equality differ in shape, or only in their type."""
    if form not in EQUALITIES or len(values) != 2:
        return []
    shapes = [shape_of(v) for v in values]
    flat = all(len(s) == 1 and not hasattr(v, "shape") for s, v in zip(shapes, values))  # noqa: B905
    if all(shapes) and shapes[0] != shapes[1] and not flat:
        return [f"shape {shapes[0]}, expected {shapes[1]}"]
    types = [type_of(v) for v in values]
    if all(types) and types[0] != types[1] and alike(*map(digits, values)):
        return [f"dtype {types[0]}, expected {types[1]}"]
    return []


def unseen(form: str, values: list[Any]) -> list[str]:
    """Differences that the digits do not show: without these, it is another mistake."""
    firsts = {digits(v).split(" ")[0] for v in values}
    return differences(form, values) if len(firsts) == 1 else []


def shape_of(value: Any) -> tuple[int, ...]:
    """Of arrays and of lists of lists; empty for a number, or where rows differ."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if not isinstance(value, list | tuple):
        return ()
    inner = {shape_of(part) for part in value}
    return (len(value), *inner.pop()) if len(inner) == 1 else (len(value),)


def type_of(value: Any) -> str:
    """Such as float32, of a tensor or an array."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def looked_at(look: Any) -> str:
    """The value of a name in a line; empty if it has none, as within a comprehension."""
    try:
        value = look()
    except NameError:
        return ""
    return brief(value) if shows(value) else ""
