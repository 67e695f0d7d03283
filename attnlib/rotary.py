# Made from book/16_rotary_positions.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Rotary positions: queries and keys that turn with the places of their tokens.

Derived in chapter 16, "Rotary positions" (book/16_rotary_positions.ipynb).
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnlib.checks import (
    refuse_bad_positions,
    refuse_bad_rotation,
    refuse_bad_scaling,
    require_flag,
    require_turning,
)
from attnlib.transformer import ROTARY


def frequencies(d_k: int, base: float = 10000.0) -> tuple[float, ...]:
    """Radians that each pair of features turns by from one token to the next.

    Source: chapter 16, eq-rotary-frequencies; Su et al. (2024), section 3.2.2.
    """
    return tuple(base ** (-2 * i / d_k) for i in range(d_k // 2))


def angles(
    x: Float[Tensor, "*batch tokens d_k"],
    positions: Int[Tensor, "..."] | int,
    omega: Sequence[float] | Float[Tensor, " pairs"],
) -> Float[Tensor, "..."]:
    """The angle of every pair at each position, in float32 at least.

    Source: chapter 16, eq-rotary-turn.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    omega = torch.as_tensor(omega, dtype=wide, device=x.device)
    if not isinstance(positions, Tensor):
        if x.shape[-2] == 1:  # as in each step of writing
            return omega * positions
        positions = torch.arange(positions, positions + x.shape[-2], device=x.device)
    return positions.to(wide).unsqueeze(-1) * omega


def turn(
    x: Float[Tensor, "*batch tokens d_k"],
    angle: Float[Tensor, "..."],
    interleaved: bool,
    magnitude: float = 1.0,
) -> Float[Tensor, "*batch tokens d_k"]:
    """Turns every pair of features by its angle, counterclockwise; in the dtype of x.

    Source: chapter 16, eq-rotary-turn.
    """
    cos, sin = angle.cos(), angle.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    wide = x.to(cos.dtype)  # once, not in each of the four products
    a, c = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    first, second = a * cos - c * sin, a * sin + c * cos
    if interleaved:
        return torch.stack([first, second], dim=-1).flatten(-2).to(x.dtype)
    return torch.cat([first, second], dim=-1).to(x.dtype)


def rotate(
    x: Float[Tensor, "*batch tokens d_k"],
    positions: Int[Tensor, "..."] | int = 0,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Float[Tensor, "*batch tokens d_k"]:
    """Turns each pair of features of a token by its position times base^(-2i / d_k).

    The score of a turned query and a turned key depends on their distance only.

    Args:
        x: queries or keys (..., tokens, d_k), d_k even.
        positions: where the tokens stand: integers (tokens,), or with one dimension fewer
            than x and broadcasting to x.shape[:-1]; or the first of tokens in a row.
        base: what the frequencies are powers of, above 1.
        interleaved: whether pair i is the features 2i and 2i + 1; otherwise it is i and
            i + d_k / 2.

    Returns:
        The shape and dtype of x; the angles are computed in float32 at least.

    Raises:
        TypeError: x is not floating point, positions are not integers, or interleaved is
            no truth value.
        ValueError: an odd d_k, a base of 1 or less, or positions that do not fit.

    Source: chapter 16, eq-rotary-turn, eq-rotary-layouts; Su et al. (2024).
    """
    refuse_bad_rotation(x)
    refuse_bad_positions(positions, x)
    d_k = require_turning(x.shape[-1], base)
    require_flag("interleaved", interleaved)
    return turn(x, angles(x, positions, frequencies(d_k, base)), interleaved)


# Turns in training at which a pair is slowed down by the whole factor, and not at all.
TURNS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}
SCALINGS = ("linear", "ntk", "yarn", "llama3")


def turns_of(omega: Sequence[float], length: int) -> tuple[float, ...]:
    """How often each pair goes round in a text of this length.

    Source: chapter 16, eq-turns.
    """
    return tuple(length * w / (2 * math.pi) for w in omega)


def ramp_of_turns(
    omega: Sequence[float], length: int, slow: float, fast: float
) -> tuple[float, ...]:
    """The share of its speed that each pair keeps, by how often it goes round.

    Source: chapter 16, eq-llama-ramp; Peng et al. (2024).
    """
    shares = ((r - slow) / (fast - slow) for r in turns_of(omega, length))
    return tuple(min(1.0, max(0.0, share)) for share in shares)


def ramp_of_pairs(
    d_k: int, base: float, length: int, slow: float, fast: float
) -> tuple[float, ...]:
    """The share of its speed that each pair keeps, by its number, as in YaRN's code.

    Source: chapter 16, eq-yarn-ramp; the code of Peng et al. (2024).
    """
    first, last = (
        d_k / 2 * math.log(length / (2 * math.pi * turns)) / math.log(base)
        for turns in (fast, slow)
    )
    low, high = max(math.floor(first), 0), min(math.ceil(last), d_k - 1)
    width = high - low if high != low else 0.001  # as there: a step, not 0 / 0
    shares = ((i - low) / width for i in range(d_k // 2))
    return tuple(1.0 - min(1.0, max(0.0, share)) for share in shares)


def scale_frequencies(
    d_k: int,
    base: float,
    scaling: str | None,
    factor: float,
    length: int | None,
    turns: tuple[float, float] | None,
) -> tuple[float, ...]:
    """Frequencies for texts `factor` times as long; see `RotaryPositions`.

    Source: chapter 16, eq-linear-scaling, eq-ntk-base, eq-by-parts.
    """
    omega = frequencies(d_k, base)
    if scaling is None:
        return omega
    if scaling == "ntk":  # a single pair is the fastest, and is left alone
        return frequencies(d_k, base * factor ** (d_k / (d_k - 2))) if d_k > 2 else omega
    slow, fast = turns or TURNS.get(scaling, (1.0, 1.0))
    if scaling == "yarn":
        kept = ramp_of_pairs(d_k, base, length, slow, fast)
    elif scaling == "llama3":
        kept = ramp_of_turns(omega, length, slow, fast)
    else:
        kept = (0.0,) * len(omega)
    return tuple(g * w + (1 - g) * w / factor for g, w in zip(kept, omega, strict=True))


class RotaryPositions(nn.Module):
    """Turns queries or keys by their positions: `rotate` as a module, also for long texts.

    Args:
        d_k: features of a head, even.
        base: what the frequencies are powers of.
        interleaved: whether pair i is the features 2i and 2i + 1; otherwise it is i and
            i + d_k / 2.
        scaling: `None`; "linear"; "ntk", another base; "yarn", as in its authors' code; or
            "llama3".
        factor: how many times as long as in training the texts become, at least 1.
        original_length: tokens of a text in training; for "yarn" and "llama3".
        turns: how often a pair goes round in training that is slowed down by the whole
            factor, and one that keeps its speed; `None` means (1, 32) for "yarn" and
            (1, 4) for "llama3".
        magnitude: factor on what is turned; `None` means 0.1 ln(factor) + 1 for "yarn",
            otherwise 1.

    Attributes:
        omega: radians a token of each pair, (d_k / 2,), in float32 at least.

    Raises:
        TypeError: interleaved is no truth value.
        ValueError: an odd d_k, a base of 1 or less, unknown scaling, or a factor or length
            that does not fit it.

    Source: chapter 16, eq-rotary-score, eq-yarn-magnitude; Su et al. (2024).
    """

    def __init__(
        self,
        d_k: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scaling: str | None = None,
        factor: float = 1.0,
        original_length: int | None = None,
        turns: tuple[float, float] | None = None,
        magnitude: float | None = None,
    ) -> None:
        super().__init__()
        refuse_bad_scaling(scaling, SCALINGS, factor, original_length)
        require_turning(d_k, base, turns)
        self.d_k, self.base = d_k, base
        self.interleaved = require_flag("interleaved", interleaved)
        self.scaling, self.factor = scaling, factor
        self.exact = scale_frequencies(d_k, base, scaling, factor, original_length, turns)
        if magnitude is None:
            magnitude = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
        self.magnitude = magnitude
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        omega = torch.tensor(self.exact, dtype=wide)
        self.register_buffer("omega", omega, persistent=False)

    def extra_repr(self) -> str:
        """What `print` shows."""
        shown = f"{self.d_k}, base={self.base}, interleaved={self.interleaved}"
        scaled = f", scaling={self.scaling!r}, factor={self.factor}"
        return shown + (scaled if self.scaling else "")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Follows the model to another device; the numbers stay exact, float32 at least."""
        super()._apply(fn, recurse)
        wide = torch.promote_types(self.omega.dtype, torch.float32)
        self.omega = torch.tensor(self.exact, dtype=wide, device=self.omega.device)
        return self

    def forward(
        self,
        x: Float[Tensor, "*batch tokens d_k"],
        positions: Int[Tensor, "..."] | int = 0,
    ) -> Float[Tensor, "*batch tokens d_k"]:
        """x, turned; see `rotate` for both arguments and what is refused."""
        refuse_bad_rotation(x, self.d_k)
        refuse_bad_positions(positions, x)
        omega = self.exact if x.dtype == torch.float64 else self.omega
        return turn(x, angles(x, positions, omega), self.interleaved, self.magnitude)


ROTARY["rotary"] = RotaryPositions  # for LanguageModel(positions="rotary")
