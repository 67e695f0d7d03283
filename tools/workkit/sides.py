"""The two sides of a comparison that does not hold: what tells them apart."""

from __future__ import annotations

from typing import Any

from workkit.known import alike
from workkit.values import brief, digits, shows

EQUALITIES = ("Eq", "call", "all")
PLACES = (4, 8, 12, 17)


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
