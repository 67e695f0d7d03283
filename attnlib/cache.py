# Made from book/17_cache.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""A cache: the keys and values of the tokens that were read before.

Derived in chapter 17, "A cache" (book/17_cache.ipynb), and in chapter 18, "Fewer keys"
(book/18_fewer_keys.ipynb).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnlib.checks import refuse_bad_append, require_count


class KVCache:
    """Keys and values of up to `capacity` tokens, in one piece of memory each.

    The first `append` decides batch, heads, widths, dtype and device; a cache that was
    emptied by `truncate(0)` may be given others. It is written in place, and so takes no
    tensor with a gradient: call the model within `torch.no_grad()`.

    Args:
        capacity: the most tokens that it holds.

    Attributes:
        capacity: as above.
        nbytes: the bytes that its memory takes, full or not; 0 before the first `append`.

    Raises:
        TypeError: capacity is no whole number.
        ValueError: capacity below 1.

    Source: chapter 17, eq-cached-attention, eq-cache-bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = require_count("capacity", capacity)
        self.length = 0
        self.keys: Tensor | None = None  # (..., capacity, d_k)
        self.values: Tensor | None = None  # (..., capacity, d_v)

    def __len__(self) -> int:
        return self.length

    def append(
        self, key: Float[Tensor, "*batch new d_k"], value: Float[Tensor, "*batch new d_v"]
    ) -> tuple[Float[Tensor, "*batch keys d_k"], Float[Tensor, "*batch keys d_v"]]:
        """Adds the keys and values of new tokens; returns those of all tokens held.

        Args:
            key: shape (..., N, d_k), usually (batch, heads, N, d_k).
            value: shape (..., N, d_v).

        Returns:
            Keys (..., M, d_k) and values (..., M, d_v) of all M tokens held. They are
            views of the cache: read them, and do not write to them.

        Raises:
            TypeError: not floating point, or not the dtype of the cache.
            ValueError: another batch, number of heads, width or device, a gradient, or
                more tokens than there is room for. Nothing is then written.
        """
        held = (self.keys, self.values) if self.length else None
        refuse_bad_append(key, value, held, self.capacity - self.length)
        if held is None:
            self.keys = room_for(key, self.capacity, self.keys)
            self.values = room_for(value, self.capacity, self.values)
        start, self.length = self.length, self.length + key.shape[-2]
        self.keys[..., start : self.length, :] = key
        self.values[..., start : self.length, :] = value
        return self.keys[..., : self.length, :], self.values[..., : self.length, :]

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens.

        What `append` has returned before is then no longer to be read: later tokens are
        written in the same place.

        Raises:
            TypeError, ValueError: length is no whole number between 0 and len(cache).
        """
        self.length = require_count("length", length, least=0, most=self.length)

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keeps these sequences of the batch, in this order; one may be there twice.

        Args:
            rows: their numbers, counted from 0, each below the number of sequences.

        Raises:
            IndexError: no such sequence (raised by PyTorch).
            TypeError: rows is no tensor of integers.
            ValueError: rows has another shape, or the cache has tokens without a batch.
        """
        require_rows(rows, self.keys)
        if self.keys is not None:
            with torch.inference_mode(False):  # see room_for
                self.keys, self.values = self.keys[rows], self.values[rows]

    def __repr__(self) -> str:
        return f"KVCache(capacity={self.capacity}), {self.length} tokens"

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)


def room_for(
    like: Float[Tensor, "*batch new d"], capacity: int, old: Tensor | None
) -> Float[Tensor, "*batch capacity d"]:
    """Memory for `capacity` tokens such as these: what was there before, if it fits.

    Source: chapter 17.
    """
    shape = (*like.shape[:-2], capacity, like.shape[-1])
    kind = (shape, like.dtype, like.device)
    if old is not None and (old.shape, old.dtype, old.device) == kind:
        return old
    with torch.inference_mode(False):  # or it could be written in that mode only
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def require_rows(rows: Int[Tensor, " chosen"], held: Tensor | None) -> None:
    """Refuses what does not say which sequences of (batch, heads, tokens, d) to keep.

    Raises:
        TypeError, ValueError: see `KVCache.select`.

    Source: chapter 17.
    """
    whole = isinstance(rows, Tensor) and rows.dtype in (torch.int32, torch.int64)
    if not whole:
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows: expected a tensor of integers, got {got}")
    if rows.dim() != 1:
        raise ValueError(f"rows: expected one dimension, got shape {tuple(rows.shape)}")
    if held is not None and held.dim() < 4:
        shape = tuple(held.shape)
        raise ValueError(f"rows: expected a cache of a batch, got one of shape {shape}")


class WindowCache:
    """The keys and values of the last `window` tokens, for heads with such a window.

    It counts all tokens, so that positions go on, and keeps the last ones: token t stands
    in place t mod (window + spare), where the token before it that stood there is written
    over. Like `KVCache`, it takes no tensor with a gradient.

    Args:
        window: how many tokens it keeps; heads with a longer window, or none, are refused.
        capacity: the most tokens that may be appended in all; `None` sets no limit.
        spare: how many more it keeps, which heads do not see, so that `truncate` can take
            back one more than that.

    Attributes:
        window, capacity: as above.
        nbytes: the bytes that its memory takes; 0 before the first `append`.

    Raises:
        TypeError: window or capacity is no whole number.
        ValueError: window or capacity below 1.

    Source: chapter 18, eq-ring-place, eq-window-visible.
    """

    def __init__(self, window: int, capacity: int | None = None, spare: int = 0) -> None:
        self.window = require_count("window", window)
        self.places = self.window + require_count("spare", spare, least=0)
        self.capacity = require_count("capacity", 2**62 if capacity is None else capacity)
        self.length = self.first = 0  # tokens in all; the first that is still here
        self.keys: Tensor | None = None  # (..., window + spare, d_k)
        self.values: Tensor | None = None  # (..., window + spare, d_v)

    def __len__(self) -> int:
        return self.length  # all tokens, not those kept: positions go on

    def append(
        self, key: Float[Tensor, "*batch new d_k"], value: Float[Tensor, "*batch new d_v"]
    ) -> tuple[Float[Tensor, "*batch keys d_k"], Float[Tensor, "*batch keys d_v"]]:
        """Adds the keys and values of new tokens; returns all that these see.

        Args:
            key: shape (..., N, d_k), usually (batch, heads, N, d_k).
            value: shape (..., N, d_v).

        Returns:
            Keys and values of the last window - 1 tokens before, or all if there are
            fewer, and of the new ones, in the order of the text; with no new ones, all
            that it keeps. They are copies.

        Raises:
            TypeError, ValueError: see `KVCache.append`.
        """
        held = (self.keys, self.values) if self.length else None
        refuse_bad_append(key, value, held, self.capacity - self.length)
        if held is None:
            self.keys = room_for(key, self.places, self.keys)
            self.values = room_for(value, self.places, self.values)
        start, end = self.length, self.length + key.shape[-2]
        first = max(self.first, start - self.window + min(1, end - start))
        stay = torch.arange(max(start, end - self.places), end, device=key.device)
        seen = []
        for ring, new in ((self.keys, key), (self.values, value)):
            seen.append(torch.cat([*in_order(ring, first, start), new], dim=-2))
            ring[..., stay % self.places, :] = new[..., stay - start, :]
        self.length, self.first = end, max(self.first, end - self.places)
        return seen[0], seen[1]

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens.

        Raises:
            TypeError: length is no whole number.
            ValueError: not between 0 and len(cache), or what the next token would see has
                been written over. spare + 1 tokens can be taken back, and all.
        """
        require_count("length", length, least=0, most=self.length)
        if length and max(0, length - self.window + 1) < self.first:
            least = self.first + self.window - 1
            raise ValueError(
                f"length: expected 0, or at least {least}, since the first {self.first} "
                f"tokens are forgotten, got {length}"
            )
        self.length, self.first = length, self.first if length else 0

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keeps these sequences of the batch, in this order; see `KVCache.select`."""
        require_rows(rows, self.keys)
        if self.keys is not None:
            with torch.inference_mode(False):
                self.keys, self.values = self.keys[rows], self.values[rows]

    def __repr__(self) -> str:
        return f"WindowCache(window={self.window}), {self.length} tokens"

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)


def in_order(
    ring: Float[Tensor, "*batch window d"], first: int, end: int
) -> tuple[Tensor, Tensor]:
    """Tokens first to end - 1 of a ring, as two pieces: up to its last place, and from 0.

    Source: chapter 18, eq-ring-place.
    """
    places = ring.shape[-2]
    place, count = first % places, end - first
    over = max(0, place + count - places)
    return ring[..., place : place + count, :], ring[..., :over, :]
