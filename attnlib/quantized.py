# Made from book/27_smaller_cache.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""A smaller cache: keys and values in 8, 4 or 2 bits a number.

Derived in chapter 27, "A smaller cache" (book/27_smaller_cache.ipynb).
"""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from attnlib.cache import require_rows
from attnlib.checks import refuse_bad_append, require_count


def quantize(
    x: Float[Tensor, "*batch d"], bits: int, dim: int
) -> tuple[UInt8[Tensor, "*batch d"], Tensor, Tensor]:
    """Whole numbers of so many bits; the least value and the step of each group along dim.

    Source: chapter 27, eq-group-codes.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, most = wide.amin(dim, keepdim=True), 2**bits - 1
    step = (wide.amax(dim, keepdim=True) - low) / most
    if wide.dtype != x.dtype:  # rounded up, or the last mark falls short of the largest
        step = (step * (1 + torch.finfo(x.dtype).eps)).to(x.dtype)
    codes = ((wide - low) / torch.where(step > 0, step, 1)).round().clamp(0, most)
    return codes.to(torch.uint8), low.to(x.dtype), step


def dequantize(
    codes: UInt8[Tensor, "*batch d"], low: Tensor, step: Tensor
) -> Float[Tensor, "*batch d"]:
    """The numbers that the codes stand for.

    Source: chapter 27, eq-group-codes.
    """
    wide = torch.promote_types(low.dtype, torch.float32)
    return (low.to(wide) + step.to(wide) * codes).to(low.dtype)


def pack(codes: UInt8[Tensor, "*batch d"], bits: int) -> UInt8[Tensor, "*batch bytes"]:
    """As many codes in a byte as fit, the first one lowest; zeros fill the last byte up.

    Source: chapter 27.
    """
    codes = F.pad(codes, (0, -codes.shape[-1] % (8 // bits)))
    shifts = torch.arange(0, 8, bits, device=codes.device)
    return (codes.unflatten(-1, (-1, 8 // bits)) << shifts).sum(dim=-1).to(torch.uint8)


def unpack(
    packed: UInt8[Tensor, "*batch bytes"], bits: int, d: int
) -> UInt8[Tensor, "*batch d"]:
    """The d codes of a row of bytes.

    Source: chapter 27.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :d]


class QuantizedCache:
    """Keys and values in few bits: keys in groups of tokens, values token by token.

    It goes where a `KVCache` goes, and is off by what chapter 27 derives. The last tokens,
    between group and 2 group - 1 of them, stay in full. What is stored is made into
    ordinary numbers anew at each `append`: memory is saved between the steps, and no time.

    Args:
        capacity: the most tokens that it holds.
        bits: of each number, 8, 4 or 2.
        group: how many tokens share the least value and the step of a feature of keys.

    Attributes:
        capacity, bits, group: as above.
        nbytes: the bytes that its memory takes.

    Raises:
        TypeError: capacity or group is no whole number.
        ValueError: either below 1, or bits that are not 8, 4 or 2.

    Source: chapter 27, eq-group-codes, eq-quantized-output; Liu et al. (2024).
    """

    along = -2, -1  # of (groups, tokens, features): a group of keys, one of values

    def __init__(self, capacity: int, bits: int = 8, group: int = 32) -> None:
        self.capacity = require_count("capacity", capacity)
        self.group = require_count("group", group)
        if isinstance(bits, bool) or bits not in (8, 4, 2):
            raise ValueError(f"bits: expected 8, 4 or 2, got {bits!r}")
        self.bits, self.length = bits, 0
        self.recent: tuple[Tensor, Tensor] | None = None  # keys and values in full
        self.stored: tuple[Tensor, ...] | None = None  # of both: codes, least values, steps

    def __len__(self) -> int:
        return self.length

    def append(
        self, key: Float[Tensor, "*batch new d_k"], value: Float[Tensor, "*batch new d_v"]
    ) -> tuple[Float[Tensor, "*batch keys d_k"], Float[Tensor, "*batch keys d_v"]]:
        """Adds the keys and values of new tokens; returns those of all tokens held.

        The new ones are returned in full, and stored after that.

        Raises:
            TypeError, ValueError: see `KVCache.append`.
        """
        held = self.recent if self.length else None
        refuse_bad_append(key, value, held, self.capacity - self.length)
        held = held or (key[..., :0, :], value[..., :0, :])
        key, value = torch.cat([held[0], key], -2), torch.cat([held[1], value], -2)
        seen = self.read(key, value)
        self.length = seen[0].shape[-2]
        whole = max(0, key.shape[-2] // self.group - 1) * self.group
        if whole:
            self.store(key[..., :whole, :], value[..., :whole, :])
        self.recent = key[..., whole:, :].clone(), value[..., whole:, :].clone()
        return seen

    def store(
        self, key: Float[Tensor, "*batch new d_k"], value: Float[Tensor, "*batch new d_v"]
    ) -> None:
        """Puts whole groups of tokens behind those that are stored."""
        new = []
        for x, dim in zip((key, value), self.along, strict=True):
            codes, low, step = quantize(x.unflatten(-2, (-1, self.group)), self.bits, dim)
            new += [pack(codes, self.bits), low, step]
        old = self.stored or [x[..., :0, :, :] for x in new]
        self.stored = tuple(torch.cat(pair, dim=-3) for pair in zip(old, new, strict=True))

    def read(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored, as ordinary numbers, and these behind it."""
        if self.stored is None:
            return key, value
        seen = []
        for x, parts in ((key, self.stored[:3]), (value, self.stored[3:])):
            codes = unpack(parts[0], self.bits, x.shape[-1])
            old = dequantize(codes, *parts[1:]).flatten(-3, -2)
            seen.append(torch.cat([old, x], dim=-2))
        return seen[0], seen[1]

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens.

        If stored ones become the last, they are recent again, and stored anew later on.

        Raises:
            TypeError, ValueError: length is no whole number between 0 and len(cache).
        """
        require_count("length", length, least=0, most=self.length)
        if self.recent is None:
            return
        stay = max(0, length // self.group - 1)  # groups that stay stored
        if self.stored is not None and stay < self.stored[0].shape[-3]:
            start = stay * self.group
            recent = (x[..., start:, :] for x in self.read(*self.recent))
            self.stored = tuple(x[..., :stay, :, :] for x in self.stored) if stay else None
        else:
            start, recent = self.length - self.recent[0].shape[-2], self.recent
        self.recent = tuple(x[..., : length - start, :].clone() for x in recent)
        self.length = length

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keeps these sequences of the batch, in this order; see `KVCache.select`."""
        require_rows(rows, None if self.recent is None else self.recent[0])
        if self.recent is not None:
            self.recent = tuple(x[rows] for x in self.recent)
        if self.stored is not None:
            self.stored = tuple(x[rows] for x in self.stored)

    def __repr__(self) -> str:
        of = f"capacity={self.capacity}, bits={self.bits}, group={self.group}"
        return f"QuantizedCache({of}), {self.length} tokens"

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*(self.recent or ()), *(self.stored or ())))
