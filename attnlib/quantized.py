# Made from book/27_smaller_cache.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""A smaller cache: keys and values in 8, 4 or 2 bits a number.

Derived in chapter 27, "A smaller cache" (book/27_smaller_cache.ipynb).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from attnlib.cache import require_rows
from attnlib.checks import refuse_bad_append, require_count
from attnlib.paged import PagedCache, PageTable, gather, page_memory


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


def require_bits(bits: int) -> int:
    """Returns the bits of a code, if they are 8, 4 or 2.

    Raises:
        ValueError: they are not.

    Source: chapter 27.
    """
    if isinstance(bits, bool) or bits not in (8, 4, 2):
        raise ValueError(f"bits: expected 8, 4 or 2, got {bits!r}")
    return bits


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
        self.bits, self.length = require_bits(bits), 0
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


class QuantizedPages(PagedCache):
    """A `PagedCache` in few bits: keys in groups of a page, values token by token.

    A page is stored when its sequence writes again and another full page stands behind it;
    of several sequences on it, the first one that goes on has it stored. A page that is
    written on once more is made full again. The kernels can't read these pages.

    Args:
        pages, page_size: see `PagedCache`.
        bits: of each number, 8, 4 or 2.

    Attributes:
        bits: as above.
        full: keys and values of the pages that are in full, each (page_size, ..., d).
        nbytes: the bytes that its memory takes.

    Raises:
        TypeError, ValueError: see `PagedCache`; or bits that are not 8, 4 or 2.

    Source: chapter 27, eq-group-codes; chapter 19, eq-page-place.
    """

    def __init__(self, pages: int, page_size: int, bits: int = 8) -> None:
        super().__init__(pages, page_size)
        self.bits = require_bits(bits)
        self.full: dict[int, tuple[Tensor, Tensor]] = {}
        self.stored: list[Tensor] = []  # of keys and values: codes, least values, steps

    def grow(self, sequence: int, new: int) -> None:
        """Stores what is behind; then as `PagedCache` does."""
        whole = max(0, self.lengths[sequence] // self.page_size - 1)
        behind = dict.fromkeys(self.tables[sequence][:whole])
        if old := [page for page in behind if page in self.full]:
            self.store(old)
        super().grow(sequence, new)

    def store(self, pages: Sequence[int]) -> None:
        """Cuts these pages into few bits."""
        for i, dim in enumerate(QuantizedCache.along):
            x = torch.stack([self.full[page][i].movedim(0, -2) for page in pages])
            codes, *marks = quantize(x, self.bits, dim)
            new = pack(codes, self.bits), *marks
            for part, these in zip(self.stored[3 * i : 3 * i + 3], new, strict=True):
                part[list(pages)] = these
        for page in pages:
            del self.full[page]

    def fill(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of some pages as ordinary numbers, each (pages, ..., size, d)."""
        found = []
        for i, like in enumerate((self.keys, self.values)):
            parts = [part[list(pages)] for part in self.stored[3 * i : 3 * i + 3]]
            codes = unpack(parts[0], self.bits, like.shape[-1])
            found.append(dequantize(codes, *parts[1:]))
            for at, page in enumerate(pages):
                if page in self.full:
                    found[i][at] = self.full[page][i].movedim(0, -2)
        return found[0], found[1]

    def read(
        self, table: PageTable, tokens: Int[Tensor, "... n"]
    ) -> tuple[Float[Tensor, "batch *heads n d_k"], Float[Tensor, "batch *heads n d_v"]]:
        """Keys and values of these tokens of each sequence; 0 where there are none."""
        used, places = table.pages.unique(return_inverse=True)
        table = table._replace(pages=places)
        key, value = (x.movedim(-2, 1) for x in self.fill(used.tolist()))
        return gather(key, table, tokens), gather(value, table, tokens)

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Memory for the codes of all pages; `keys` and `values` are one page of zeros."""
        like, self.stored = [], []
        for x, dim in zip((key, value), QuantizedCache.along, strict=True):
            like.append(page_memory(x, (1, self.page_size), None))
            codes, *marks = quantize(like[-1].movedim(1, -2), self.bits, dim)
            parts = pack(codes, self.bits), *marks
            with torch.inference_mode(False):  # see page_memory
                self.stored += [x.new_zeros(self.pages, *x.shape[1:]) for x in parts]
        self.keys, self.values = like

    def copy(self, page: int, other: int) -> None:
        found = self.fill([page])
        with torch.inference_mode(False):  # see page_memory
            self.full[other] = tuple(x[0].movedim(-2, 0).clone() for x in found)

    def write(self, place: Int[Tensor, "batch new"], key: Tensor, value: Tensor) -> None:
        pages, slots = place // self.page_size, place % self.page_size
        for page in pages.unique().tolist():
            if page not in self.full:
                self.copy(page, page)
            here = pages == page
            for memory, x in zip(self.full[page], (key, value), strict=True):
                memory[slots[here]] = x.movedim(-2, 1)[here]

    def release(self, page: int) -> None:
        super().release(page)
        if not self.owners[page]:
            self.full.pop(page, None)

    def __repr__(self) -> str:
        made = f"QuantizedPages(pages={self.pages}, page_size={self.page_size}"
        kept = f"{len(self.tables)} sequences, {len(self.unused)} pages unused"
        return f"{made}, bits={self.bits}), {kept}"

    @property
    def nbytes(self) -> int:
        full = (x for pair in self.full.values() for x in pair)
        return super().nbytes + sum(x.nbytes for x in (*full, *self.stored))
