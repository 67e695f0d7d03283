# Made from book/19_split_and_paged.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Keys and values in pages: a memory, attention through its table, a cache for a model.

Derived in chapter 19, "Split and paged" (book/19_split_and_paged.ipynb).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnlib.cache import require_rows
from attnlib.checks import (
    positive_scale,
    refuse_bad_append,
    refuse_nested,
    require_count,
    require_scale,
    require_window,
)
from attnlib.fused import attend_fused
from attnlib.split import merge_splits


class PageTable(NamedTuple):
    """Where the tokens of some sequences lie.

    Args:
        pages: the pages of each sequence, (B, most), filled up with 0.
        lengths: the tokens of each, (B,).
        held: from `PagedCache.table`: each sequence, its tokens and its pages. A cache that
            has other ones refuses the table; one that was made by hand has none.

    Source: chapter 19, eq-page-place.
    """

    pages: Int[Tensor, "batch most"]
    lengths: Int[Tensor, " batch"]
    held: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


def places(
    pages: Int[Tensor, "batch most"], tokens: Int[Tensor, "... n"], page_size: int
) -> Int[Tensor, "batch n"]:
    """Where these tokens of each sequence lie, counted through all pages.

    Source: chapter 19, eq-page-place.
    """
    tokens = tokens.expand(len(pages), tokens.shape[-1])
    return pages.gather(1, tokens // page_size) * page_size + tokens % page_size


class PagedCache:
    """Keys and values of many sequences, in pages of one size that any of them may take.

    A sequence is known by the number that `open` or `fork` gave. The first `append` decides
    heads, widths, dtype and device; when no page is taken, another may decide otherwise. It
    is written in place, and so takes no tensor with a gradient.

    Args:
        pages: how many there are.
        page_size: tokens in a page.

    Attributes:
        pages, page_size: as above.
        keys, values: the memory, (pages, page_size, ..., d); `None` before any `append`.
        tables: for each open sequence, the pages of its tokens, in order.
        lengths: for each open sequence, its number of tokens.
        owners: for each page, in how many tables it stands.
        unused: the pages that stand in none.

    Raises:
        TypeError: a number that is not whole.
        ValueError: a number below 1.

    Source: chapter 19, eq-page-place, eq-page-owners; Kwon et al. (2023).
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = require_count("pages", pages)
        self.page_size = require_count("page_size", page_size)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.owners = [0] * pages
        self.unused = list(reversed(range(pages)))
        self.opened = 0

    def open(self) -> int:
        """The number of a new sequence, which has no tokens yet."""
        sequence, self.opened = self.opened, self.opened + 1
        self.tables[sequence], self.lengths[sequence] = [], 0
        return sequence

    def take(self) -> int:
        """A page that was in no table, for one."""
        page = self.unused.pop()
        self.owners[page] = 1
        return page

    def release(self, page: int) -> None:
        """Takes a page out of one table; out of the last one, it is unused."""
        self.owners[page] -= 1
        if not self.owners[page]:
            self.unused.append(page)

    def fork(self, sequence: int) -> int:
        """The number of a new sequence with the tokens of another, on the same pages.

        Raises:
            TypeError, ValueError: the sequence is not open.
        """
        require_open("sequence", sequence, self.tables)
        other = self.open()
        self.tables[other] = list(self.tables[sequence])
        self.lengths[other] = self.lengths[sequence]
        for page in self.tables[other]:
            self.owners[page] += 1
        return other

    def free(self, sequence: int) -> None:
        """Closes a sequence; the pages that no other one has can be taken again.

        Raises:
            TypeError, ValueError: the sequence is not open.
        """
        self.truncate(sequence, 0)
        del self.tables[sequence], self.lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all but the first `length` tokens of a sequence.

        Raises:
            TypeError, ValueError: the sequence is not open, or length is no whole number
                between 0 and that of its tokens.
        """
        require_open("sequence", sequence, self.tables)
        length = require_count("length", length, least=0, most=self.lengths[sequence])
        table, kept = self.tables[sequence], -(-length // self.page_size)
        for page in table[kept:]:
            self.release(page)
        self.tables[sequence], self.lengths[sequence] = table[:kept], length

    def table(self, sequences: int | Sequence[int]) -> PageTable:
        """Where the tokens of these sequences lie, on the device of the cache.

        Raises:
            TypeError, ValueError: a sequence is not open.
        """
        handles = require_open("sequences", sequences, self.tables)
        device = None if self.keys is None else self.keys.device
        most = max(len(self.tables[s]) for s in handles)
        rows = [self.tables[s] + [0] * (most - len(self.tables[s])) for s in handles]
        pages = torch.tensor(rows, device=device, dtype=torch.int64)
        lengths = torch.tensor([self.lengths[s] for s in handles], device=device)
        return PageTable(pages.reshape(len(handles), most), lengths, self.held(handles))

    def held(self, handles: Sequence[int]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Of each of these sequences: its number, how many tokens it has, its pages."""
        return tuple((s, self.lengths[s], tuple(self.tables[s])) for s in handles)

    def fitting(
        self, sequences: int | Sequence[int], key: Tensor, value: Tensor
    ) -> tuple[list[int], Tensor, Tensor]:
        """What `append` takes, with a batch, if there is room for it; memory for it, too.

        Raises:
            TypeError, ValueError: see `append`.
        """
        handles = require_open("sequences", sequences, self.tables)
        batch = () if isinstance(sequences, int) else (len(handles),)
        held = None
        if len(self.unused) < self.pages:  # stand-ins: a page of each sequence
            held = tuple(x[0].movedim(0, -2) for x in (self.keys, self.values))
            held = tuple(x.expand(*batch, *x.shape) for x in held)
        new = key.shape[-2] if isinstance(key, Tensor) and key.dim() > 1 else 0
        fits = self.wanted(handles, new) <= len(self.unused)
        refuse_bad_append(key, value, held, new if fits else self.room(handles))
        if not batch:
            key, value = key[None], value[None]
        refuse_bad_batch(key, len(handles))
        if held is None:
            self.allocate(key[0], value[0])
        return handles, key, value

    def room(self, sequences: int | Sequence[int]) -> int:
        """How many tokens each of these sequences can get, all of them equally many.

        Raises:
            TypeError, ValueError: a sequence is not open.
        """
        handles = require_open("sequences", sequences, self.tables)
        most = (len(self.unused) // len(handles) + 1) * self.page_size
        key = lambda new: self.wanted(handles, new)  # noqa: E731
        return bisect_right(range(most + 1), len(self.unused), key=key) - 1

    def wanted(self, handles: Sequence[int], new: int) -> int:
        """How many unused pages these sequences need for so many tokens more, each."""
        ends = [self.lengths[s] + new for s in handles]
        pages = sum(-(-end // self.page_size) for end in ends)
        pages -= sum(len(self.tables[s]) for s in handles)
        partial = [s for s in handles if new and self.lengths[s] % self.page_size]
        writers = Counter(self.tables[s][-1] for s in partial)
        return pages + sum(min(n, self.owners[page] - 1) for page, n in writers.items())

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Makes memory for pages of such tokens, (..., N, d), when no page is taken."""
        shape = (self.pages, self.page_size)
        self.keys = page_memory(key, shape, self.keys)
        self.values = page_memory(value, shape, self.values)

    def copy(self, page: int, other: int) -> None:
        """Puts what is on a page on another one, too."""
        for memory in (self.keys, self.values):
            memory[other] = memory[page]

    def write(self, place: Int[Tensor, "batch new"], key: Tensor, value: Tensor) -> None:
        """Puts (B, ..., N, d) at these places, counted through all pages."""
        self.keys.flatten(0, 1)[place] = key.movedim(-2, 1)  # (B, N, ..., d)
        self.values.flatten(0, 1)[place] = value.movedim(-2, 1)

    def read(
        self, table: PageTable, tokens: Int[Tensor, "... n"]
    ) -> tuple[Float[Tensor, "batch *heads n d_k"], Float[Tensor, "batch *heads n d_v"]]:
        """Keys and values of these tokens of each sequence; 0 where there are none."""
        return gather(self.keys, table, tokens), gather(self.values, table, tokens)

    def view(self, sequences: int | Sequence[int]) -> "PagedSequences":
        """These sequences as a cache that attention and a model take; see there."""
        return PagedSequences(self, sequences)

    def __repr__(self) -> str:
        made = f"PagedCache(pages={self.pages}, page_size={self.page_size})"
        return f"{made}, {len(self.tables)} sequences, {len(self.unused)} pages unused"

    @property
    def nbytes(self) -> int:
        """The bytes that its memory takes, full or not; 0 before the first `append`."""
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)

    def grow(self, sequence: int, new: int) -> None:
        """Makes the places of so many tokens more, which no other sequence has."""
        table, length = self.tables[sequence], self.lengths[sequence]
        if new and length % self.page_size and self.owners[table[-1]] > 1:
            shared, table[-1] = table[-1], self.take()  # copy on write
            self.copy(shared, table[-1])
            self.release(shared)
        while len(table) * self.page_size < length + new:
            table.append(self.take())
        self.lengths[sequence] = length + new

    def append(
        self,
        sequences: int | Sequence[int],
        key: Float[Tensor, "*batch new d_k"],
        value: Float[Tensor, "*batch new d_v"],
    ) -> None:
        """Adds the keys and values of N new tokens to each of these sequences.

        Args:
            sequences: B of them, or one.
            key: shape (B, ..., N, d_k), usually (B, heads, N, d_k); without B for one.
            value: shape (B, ..., N, d_v), likewise.

        Raises:
            TypeError: not floating point, or not the dtype of the cache.
            ValueError: a sequence that is not open; another batch, number of heads, width
                or device; a gradient; or no page is free. Nothing is then written.
        """
        handles, key, value = self.fitting(sequences, key, value)
        new, old = key.shape[-2], self.table(handles).lengths
        for sequence in handles:
            self.grow(sequence, new)
        tokens = old[:, None] + torch.arange(new, device=key.device)
        if new:
            place = places(self.table(handles).pages, tokens, self.page_size)
            self.write(place, key, value)


def require_open(
    name: str, sequences: int | Sequence[int], opened: Collection[int]
) -> list[int]:
    """Returns the numbers of sequences as a list, if all of them are open.

    Args:
        name: the argument's name, for the message.
        sequences: expected one of opened, or a list of some, each once.
        opened: the numbers of the sequences that are open.

    Raises:
        TypeError: no whole numbers.
        ValueError: one that is not open, one twice, or none.

    Source: chapter 19; the contract, appendix A.
    """
    handles = [sequences] if isinstance(sequences, int) else sequences
    listed = isinstance(handles, Sequence)
    if not listed or any(isinstance(s, bool) or not isinstance(s, int) for s in handles):
        wanted = "the number of a sequence, or a list of them"
        raise TypeError(f"{name}: expected {wanted}, got {sequences!r}")
    for s in handles:
        if s not in opened:
            raise ValueError(f"{name}: expected a sequence that is open, got {s}")
    if not handles or len(set(handles)) < len(handles):
        raise ValueError(f"{name}: expected at least one, each once, got {sequences!r}")
    return list(handles)


def refuse_bad_table(
    pages: Tensor, lengths: Tensor, count: int, page_size: int, device: torch.device
) -> None:
    """Refuses a table of pages that points outside of them.

    Args:
        pages: expected (B, most), integers from 0 to count - 1.
        lengths: expected (B,), integers from 0 to most · page_size.
        count, page_size: how many pages there are, and the tokens of one.
        device: where they are.

    Raises:
        TypeError: not integers.
        ValueError: another shape or device, or a number outside of its range.

    Source: chapter 19; the contract, appendix A.
    """
    for name, x, dims in (("pages", pages, 2), ("lengths", lengths, 1)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            wanted = "a tensor of int64 or int32"
            raise TypeError(f"sequences.{name}: expected {wanted}, got {got}")
        if x.dim() != dims or len(x) != len(pages):
            wanted = "(B, most)" if dims == 2 else f"({len(pages)},) as pages has rows"
            got = f"got {tuple(x.shape)}"
            raise ValueError(f"sequences.{name}: expected shape {wanted}, {got}")
        if x.device != device:
            got = f"got {x.device}"
            raise ValueError(f"sequences.{name}: expected device {device}, {got}")
    for name, x, most in (
        ("lengths", lengths, pages.shape[1] * page_size),
        ("pages", pages, count - 1),
    ):
        outside = x[(x < 0) | (x > most)]
        if outside.numel():
            wanted = f"numbers between 0 and {most}"
            raise ValueError(f"sequences.{name}: expected {wanted}, got {outside[0]}")


def refuse_bad_reader(query: Tensor, keys: Tensor, batch: int, enable_gqa: bool) -> None:
    """Refuses a query that does not fit the pages of a cache.

    Args:
        query: expected (batch, ..., N, d_k), dtype and device of keys.
        keys: the pages, (pages, page_size, ..., d_k).
        batch: how many sequences are looked at.
        enable_gqa: whether the query may have a multiple of the heads.

    Raises:
        TypeError: not floating point, or another dtype.
        ValueError: another shape or device.

    Source: chapter 19; the contract, appendix A.
    """
    if not isinstance(query, Tensor) or not query.is_floating_point():
        got = query.dtype if isinstance(query, Tensor) else type(query).__name__
        raise TypeError(f"query: expected a floating-point tensor, got {got}")
    refuse_nested("query", query)
    if query.dtype != keys.dtype:
        wanted = f"{keys.dtype} as the cache"
        raise TypeError(f"query: expected {wanted}, got {query.dtype}")
    if query.device != keys.device:
        wanted = f"device {keys.device} as the cache"
        raise ValueError(f"query: expected {wanted}, got {query.device}")
    leading, heads = (batch, *keys.shape[2:-1]), ""
    fits = tuple(query.shape[:-2]) == leading
    if enable_gqa and len(leading) > 1 and leading[-1] and query.dim() == keys.dim():
        fits = tuple(query.shape[:-3]) == leading[:-1] and not query.shape[-3] % leading[-1]
        heads = ", or a multiple of these heads"
    if not fits or query.shape[-1] != keys.shape[-1]:
        wanted = f"({', '.join(map(str, leading))}, N, {keys.shape[-1]}) as the cache"
        got = f"got {tuple(query.shape)}"
        raise ValueError(f"query: expected shape {wanted}{heads}, {got}")


def refuse_bad_batch(key: Tensor, count: int) -> None:
    """Refuses keys without a batch of so many sequences in front.

    Args:
        key: expected (count, ..., N, d_k).
        count: number of sequences.

    Raises:
        ValueError: fewer dimensions, or another batch.

    Source: chapter 19; the contract, appendix A.
    """
    if key.dim() < 3 or len(key) != count:
        wanted = f"a batch of {count}, one for each sequence"
        raise ValueError(f"key: expected {wanted}, got shape {tuple(key.shape)}")


def page_memory(
    like: Float[Tensor, "*heads new d"], shape: tuple[int, int], old: Tensor | None
) -> Float[Tensor, "pages size *heads d"]:
    """Memory for pages of such tokens: what was there before, if it fits.

    Source: chapter 19, eq-page-place.
    """
    shape = (*shape, *like.shape[:-2], like.shape[-1])
    kind = (shape, like.dtype, like.device)
    if old is not None and (old.shape, old.dtype, old.device) == kind:
        return old
    with torch.inference_mode(False):  # or it could be written in that mode only
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def table_of(
    cache: PagedCache,
    sequences: Sequence[int] | PageTable,
    query: Tensor,
    enable_gqa: bool,
) -> PageTable:
    """The table of these sequences, if the query fits to it.

    Raises:
        TypeError, ValueError: see `paged_attention`.

    Source: chapter 19.
    """
    if cache.keys is None:
        raise ValueError("cache: expected keys to look at, got one that never had any")
    if isinstance(sequences, PageTable):
        shape = (cache.pages, cache.page_size)
        refuse_bad_table(*sequences[:2], *shape, cache.keys.device)
        table, now = sequences, [s for s, *_ in sequences.held if s in cache.tables]
        if table.held != cache.held(now):
            wanted = "a table of what the cache holds now"
            raise ValueError(f"sequences: expected {wanted}, got an older one or another's")
    else:
        table = cache.table(sequences)
    refuse_bad_reader(query, cache.keys, len(table.lengths), enable_gqa)
    return table


def rows_of(
    query: Tensor, table: PageTable, heads: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The queries of the heads that share keys as rows of one, and where each stands.

    Args:
        query: shape (B, ..., N, d_k); query i of sequence b stands at i + M_b - N.
        table: of B sequences.
        heads: those of the keys.

    Returns:
        Rows (B, *heads, rows, d_k), and (B, ..., rows, 1).

    Source: chapter 19; chapter 18, eq-grouped-heads.
    """
    shape, queries = query.shape, query.shape[-2]
    group = math.prod(shape[1:-2]) // max(1, math.prod(heads))
    own = table.lengths[:, None] + torch.arange(-queries, 0, device=query.device)
    own = own.repeat(1, group).view(shape[0], *[1] * len(heads), group * queries, 1)
    return query.reshape(shape[0], *heads, group * queries, shape[-1]), own


def first_seen(
    table: PageTable, queries: int, window: int | None, split_size: int | None
) -> Int[Tensor, "batch 1"]:
    """Where reading begins: at the first token that is seen, or with its share.

    Raises:
        TypeError, ValueError: see `paged_attention`.

    Source: chapter 19; chapter 18, eq-window-visible.
    """
    size = 1 if split_size is None else require_count("split_size", split_size)
    back = table.lengths[:, None] if window is None else queries + window - 1
    return (table.lengths[:, None] - back).clamp(min=0) // size * size


def seen_tokens(
    tokens: Int[Tensor, "batch n"],
    own: Int[Tensor, "batch ... rows 1"],
    table: PageTable,
    causal: bool,
    window: int | None,
) -> Bool[Tensor, "..."]:
    """Which of these tokens each row sees, broadcasting to (B, ..., rows, n).

    Source: chapter 19; chapter 1, eq-causal-allowed; chapter 18, eq-window-visible.
    """
    j = tokens.view(len(tokens), *[1] * (own.dim() - 2), tokens.shape[-1])
    seen = j <= (own if causal else table.lengths.view(-1, *[1] * (own.dim() - 1)) - 1)
    return seen if window is None else seen & ((own - j).abs() < window)


def gather(
    memory: Float[Tensor, "pages size *heads d"],
    table: PageTable,
    tokens: Int[Tensor, "... n"],
) -> Float[Tensor, "batch *heads n d"]:
    """These tokens of each sequence in one tensor; 0 where there are none.

    Source: chapter 19, eq-page-place.
    """
    pages, lengths, _ = table
    absent = (tokens < 0) | (tokens >= lengths[:, None])
    if not pages.shape[1]:
        pages = pages.new_zeros(len(pages), 1)
    place = places(pages, tokens.masked_fill(absent, 0), memory.shape[1])
    found = memory.flatten(0, 1).index_select(0, place.flatten())
    # Where there is no token, what was there before may be anything.
    found.index_fill_(0, absent.flatten().nonzero().squeeze(1), 0.0)
    return found.unflatten(0, place.shape).movedim(1, -2)


def paged_attention(
    query: Float[Tensor, "batch *heads queries d_k"],
    cache: PagedCache,
    sequences: Sequence[int] | PageTable,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    enable_gqa: bool = False,
) -> Float[Tensor, "batch *heads queries d_v"] | tuple[Tensor, Tensor]:
    """Attention of the last N tokens of each sequence to all of its tokens.

    Args:
        query: shape (B, ..., N, d_k), a batch of queries for each of B sequences, in their
            order.
        cache: has the keys and values, those of the N tokens among them.
        sequences: the numbers of B open sequences, or their `PageTable`, made once for
            several caches with the same pages.
        causal: query i sees the keys up to i + M_b - N only, M_b the tokens of sequence b.
        window: it sees those less than so many tokens from there; others are not read.
        scale: factor on the scores; `None` means 1/√d_k.
        split_size: keys in a share, see `split_attention`: the same bits, whatever else is
            in the batch. `None` leaves the order of sums to PyTorch's function.
        return_lse: whether to return the log-sum-exp too, as `add_sink` takes it; without a
            split_size, all keys are then one share.
        enable_gqa: whether the query may have more heads than the cache, a multiple:
            neighboring heads then share one.

    Returns:
        Output (B, ..., N, d_v), on request the log-sum-exp (B, ..., N), in float32 at
        least; 0 and -inf where a query sees nothing.

    Raises:
        TypeError: a wrong dtype; sequences, a table or a window of no whole numbers.
        ValueError: a sequence that is not open, or twice; a table that points outside of
            the pages, or is an older one; another batch, number of heads, width or
            device; an empty cache; a window below 1.

    Source: chapter 19, eq-page-place, eq-fixed-split; Kwon et al. (2023).
    """
    table = table_of(cache, sequences, query, enable_gqa)
    query, scale = positive_scale(query, require_scale(scale))
    rows, own = rows_of(query, table, cache.keys.shape[2:-1])
    first = first_seen(table, query.shape[-2], require_window(window), split_size)
    most, d_v = int((table.lengths[:, None] - first).max()), cache.values.shape[-1]
    size = split_size or max(1, most)

    def read(start: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = first + torch.arange(start, start + count, device=query.device)
        return *cache.read(table, tokens), seen_tokens(tokens, own, table, causal, window)

    if split_size is None and not return_lse:
        output = attend_fused(rows, *read(0, most), causal=False, scale=scale)
        return output.reshape(*query.shape[:-1], d_v)
    splits = (read(start, size) for start in range(0, most, size))
    state = merge_splits(rows, d_v, splits, scale)
    output = state.output.to(query.dtype).reshape(*query.shape[:-1], d_v)
    return (output, state.lse.reshape(query.shape[:-1])) if return_lse else output


class PagedSequences:
    """Some sequences of a `PagedCache` as one cache, which attention takes as `cache=`.

    Where they differ in length, all end at the last key, and zeros stand in front of the
    shorter ones; `padding` says how many, and is what `LanguageModel` takes by that name.

    Args:
        cache: where the sequences live.
        sequences: a list of B sequences, for tensors (B, ..., N, d), or the number of one,
            for tensors (..., N, d).

    Attributes:
        capacity: the most tokens that the longest one can have, with the pages that are
            unused now, if all get as many.
        padding: zeros in front of each sequence, (B,).

    Raises:
        TypeError, ValueError: a sequence is not open, or twice.

    Source: chapter 19, eq-page-place; chapter 17, eq-padded-position.
    """

    def __init__(self, cache: PagedCache, sequences: int | Sequence[int]) -> None:
        self.cache, self.sequences = cache, sequences
        self.handles = require_open("sequences", sequences, cache.tables)

    def __len__(self) -> int:
        return max(self.cache.lengths[s] for s in self.handles)

    @property
    def capacity(self) -> int:
        return self.capacity_beside([self])

    def capacity_beside(self, caches: Sequence[object]) -> int:
        """The capacity if all of these caches grow, some of them in the same pages."""
        views = [c for c in caches if isinstance(c, PagedSequences)]
        handles = [s for c in views if c.cache is self.cache for s in c.handles]
        return len(self) + self.cache.room(handles)

    @property
    def padding(self) -> Int[Tensor, " batch"]:
        return len(self) - self.cache.table(self.handles).lengths

    def append(
        self, key: Float[Tensor, "*batch new d_k"], value: Float[Tensor, "*batch new d_v"]
    ) -> tuple[Float[Tensor, "*batch keys d_k"], Float[Tensor, "*batch keys d_v"]]:
        """Adds tokens to each sequence; returns copies of all that they hold.

        Raises:
            TypeError, ValueError: see `PagedCache.append`.
        """
        cache = self.cache
        cache.append(self.sequences, key, value)
        table = cache.table(self.handles)
        tokens = torch.arange(len(self), device=key.device) - self.padding[:, None]
        one = isinstance(self.sequences, int)
        return tuple(x[0] if one else x for x in cache.read(table, tokens))

    def truncate(self, length: int) -> None:
        """Takes so many tokens off the end of each that the longest has `length` left.

        Raises:
            TypeError, ValueError: length is no whole number between 0 and len(cache).
        """
        less = len(self) - require_count("length", length, least=0, most=len(self))
        for s in self.handles:
            self.cache.truncate(s, max(0, self.cache.lengths[s] - less))

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keeps these sequences, in this order; one that is there twice shares its pages.

        They get new numbers, see `sequences`; the old ones are freed.

        Raises:
            IndexError, TypeError, ValueError: see `KVCache.select`.
        """
        alone = isinstance(self.sequences, int)
        require_rows(rows, torch.empty(0, 0, 0) if alone else None)
        chosen = [self.handles[row] for row in rows.tolist()]  # or nothing is changed
        old, chosen = self.handles, [self.cache.fork(s) for s in chosen]
        for s in old:
            self.cache.free(s)
        self.sequences = self.handles = chosen
