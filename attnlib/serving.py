# Made from book/28_many_at_once.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""A server: one model, many requests, and the keys and values of all in pages.

Derived in chapter 28, "Many at once" (book/28_many_at_once.ipynb).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnlib.checks import require_count
from attnlib.generation import adjustment, ending, require_choice, sample
from attnlib.paged import PagedCache


class Request:
    """A text that a `Server` continues, as `Server.submit` returns it.

    Attributes:
        ids: its tokens so far, those of the prompt first.
        written: those that the model wrote.
        start, end: how many tokens the prompt has, and the most that the text will have.
        over: why it has ended, "length", "stop" or "aborted"; empty until then.
        sequence: the number of its pages; `None` while it has none.
        generator: its own source of randomness.

    Source: chapter 28.
    """

    def __init__(
        self,
        prompt: Int[Tensor, " tokens"],
        length: int,
        choose: Callable[[Tensor, Tensor], Tensor],
        ended: Callable[[Tensor], Tensor],
        generator: torch.Generator,
    ) -> None:
        self.ids, self.start, self.end = prompt.tolist(), len(prompt), len(prompt) + length
        self.choose, self.ended, self.generator = choose, ended, generator
        self.sequence: int | None = None
        self.over = ""

    @property
    def written(self) -> list[int]:
        return self.ids[self.start :]

    def next(self, logits: Float[Tensor, " vocab_size"]) -> tuple[int, str]:
        """The token that follows, and why the text is over with it, if it is."""
        token = int(self.choose(logits, torch.tensor(self.ids)))
        text = [*self.ids, token]
        if self.ended(torch.tensor(text)):
            return token, "stop"
        return token, "length" if len(text) == self.end else ""


def common_beginning(text: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before the first that differs.

    Source: chapter 28, eq-shared-beginning.
    """
    for place, (mine, theirs) in enumerate(zip(text, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(text), len(other))


class Pages:
    """The pages of all blocks of a model, which hold the same tokens.

    Args:
        blocks: how many.
        pages, page_size: see `PagedCache`.
        window: how many tokens a query sees at most; `None` if it may see all.

    Attributes:
        caches: one for each block.
        kept: the tokens of texts that have ended, by the number of their pages; the one
            that was not used for longest comes first.

    Source: chapter 28, eq-shared-beginning; chapter 19, eq-page-owners.
    """

    def __init__(
        self, blocks: int, pages: int, page_size: int, window: int | None = None
    ) -> None:
        self.caches = [PagedCache(pages, page_size) for _ in range(blocks)]
        self.pages, self.page_size, self.window = pages, page_size, window
        self.kept: dict[int, list[int]] = {}

    def begin(self, ids: Sequence[int], others: Mapping[int, Sequence[int]]) -> int:
        """The number of a text whose beginning is on full pages of another, if it is."""
        known = {**others, **self.kept}
        shared = {s: common_beginning(ids[:-1], text) for s, text in known.items()}
        if self.window is not None:
            shared = {s: n for s, n in shared.items() if self.has_before(s, n)}
        best = max(shared, key=shared.get, default=None)
        whole = 0 if best is None else shared[best] // self.page_size * self.page_size
        if not whole:
            for cache in self.caches:
                number = cache.open()  # the same in all
            return number
        if best in self.kept:
            self.kept[best] = self.kept.pop(best)  # used just now
        for cache in self.caches:
            number = cache.fork(best)
        self.cut(number, whole)
        return number

    def cut(self, number: int, length: int) -> None:
        """Forgets what a text has behind so many tokens, in some blocks perhaps fewer."""
        for cache in self.caches:
            cache.truncate(number, min(length, cache.lengths[number]))

    def free(self, number: int) -> None:
        """Closes a text, in all blocks."""
        for cache in self.caches:
            cache.free(number)

    def length(self, number: int) -> int:
        """How many tokens of a text are on pages."""
        return self.caches[0].lengths[number]

    def fit(self, tokens: Mapping[int, int]) -> bool:
        """Whether these texts could have so many tokens each, if no other was kept."""
        tables = self.caches[0].tables
        taken = {page for number in tokens for page in tables[number]}
        more = (-(-n // self.page_size) - len(tables[s]) for s, n in tokens.items())
        return len(taken) + sum(more) <= self.pages

    def make_room(self, numbers: Sequence[int], count: int) -> None:
        """Frees pages of texts that have ended, until these have room for more tokens."""
        while self.caches[0].wanted(numbers, count) > len(self.caches[0].unused):
            self.give_up(next(iter(self.kept)))  # there is one, if they fit without any

    def give_up(self, number: int) -> None:
        """Frees the pages of a text that was kept."""
        del self.kept[number]
        self.free(number)

    def forget(self, number: int) -> None:
        """Frees the pages that no later token of a text sees, behind its window."""
        first = 0 if self.window is None else self.length(number) + 1 - self.window
        for cache in self.caches:
            table = cache.tables[number]
            start = min(first // self.page_size, len(table) - 2)  # not one still written on
            for place in range(start):
                if table[place] != table[start]:  # which stands there from now on, unseen
                    cache.owners[table[start]] += 1
                    cache.release(table[place])
                    table[place] = table[start]

    def has_before(self, number: int, length: int) -> bool:
        """Whether a text still has what the token behind so many full pages sees."""
        table, whole = self.caches[0].tables[number], length // self.page_size
        gone = table.count(table[0]) - 1 if table else 0
        return not gone or gone * self.page_size <= whole * self.page_size + 1 - self.window


def seen_by(model: nn.Module) -> int | None:
    """How many tokens the heads of a model see at most; `None` if one sees all.

    Source: chapter 28; chapter 18, eq-window-visible.
    """
    heads = [block.attention.attention for block in model.blocks]
    each = [[*h] if isinstance(h, nn.ModuleList) else [h] for h in heads]
    windows = {head.window for group in each for head in group}
    return None if None in windows else max(windows)


class Server:
    """Continues many texts with one model, each as if it was the only one.

    Each step writes a token of every text that is read to its end, and reads a piece of a
    prompt. Who came first is read first. If pages run out, who came last is sent back, and
    read again later. Not for several threads at once.

    Args:
        model: a `LanguageModel`; call `eval()` first if it has dropout.
        pages, page_size: how many pages of how many tokens, in each block.
        at_once: the most texts that are inside.
        piece: the most tokens of prompts that are read in a step.

    Attributes:
        waiting, inside: requests, in the order in which they came.
        memory: the `Pages`.
        news: tokens that nobody was told yet, with their requests.

    Raises:
        TypeError: no `LanguageModel`, or a number that is not whole.
        ValueError: a number below 1.

    Source: chapter 28; Yu et al. (2022), Kwon et al. (2023), Agrawal et al. (2024).
    """

    def __init__(
        self,
        model: nn.Module,
        pages: int,
        page_size: int = 16,
        at_once: int = 8,
        piece: int = 64,
    ) -> None:
        if not hasattr(model, "start_writing"):
            raise TypeError(f"model: expected a LanguageModel, got {type(model).__name__}")
        self.model = model
        self.memory = Pages(len(model.blocks), pages, page_size, seen_by(model))
        self.at_once = require_count("at_once", at_once)
        self.piece = require_count("piece", piece)
        self.waiting: deque[Request] = deque()
        self.inside: list[Request] = []
        self.news: deque[tuple[Request, int]] = deque()

    def needs(self, request: Request) -> int:
        """For how many of its tokens a text that is inside has to have places."""
        return len(request.ids)

    def fit(self, requests: Sequence[Request]) -> bool:
        """Whether all of these have room for the tokens that they need."""
        return self.memory.fit({r.sequence: self.needs(r) for r in requests})

    def unread(self, request: Request) -> int:
        """How many tokens of a text that is inside are on no page yet."""
        return len(request.ids) - self.memory.length(request.sequence)

    def step(self) -> list[tuple[Request, int]]:
        """Reads and writes once; returns what was written, each token with its request.

        If it raises, texts and generators are as before what failed, and what was written
        until then is returned by the next step.
        """
        while not self.fit(self.inside):
            self.send_back()
        writers = [r for r in self.inside if self.unread(r) == 1]
        readers = [r for r in self.inside if self.unread(r) > 1]
        if writers:
            self.read(writers, 1)
        left = self.piece
        while left > 0:
            request = readers.pop() if readers else self.let_in()  # one reader at most
            if request is None:
                break
            count = min(left, self.unread(request))
            self.read([request], count)
            left -= count
        written = list(self.news)
        self.news.clear()
        return written

    def let_in(self) -> Request | None:
        """Who has waited longest, if there is room for it."""
        if not self.waiting or len(self.inside) == self.at_once:
            return None
        request, read = self.waiting[0], self.memory.length
        others = {r.sequence: r.ids[: read(r.sequence)] for r in self.inside}
        request.sequence = self.memory.begin(request.ids, others)
        if not self.fit([*self.inside, request]):
            self.memory.free(request.sequence)
            request.sequence = None
            return None
        self.inside.append(self.waiting.popleft())
        return request

    def send_back(self) -> None:
        """Takes its pages from who came last, and lets it wait as the first."""
        request = self.inside.pop()
        self.memory.free(request.sequence)
        request.sequence = None
        self.waiting.appendleft(request)

    def leave(self, request: Request, over: str) -> None:
        """Lets go who has ended; its pages are kept for texts that begin alike."""
        self.inside.remove(request)
        number, request.sequence, request.over = request.sequence, None, over
        if read := self.memory.length(number):
            self.memory.kept[number] = request.ids[:read]
        else:
            self.memory.free(number)

    def read(self, requests: Sequence[Request], count: int) -> None:
        """Reads so many tokens of each text; a text that is read to its end gets one more.

        If anything fails, the texts, their pages and generators are as before.
        """
        numbers = [r.sequence for r in requests]
        self.memory.make_room(numbers, count)
        views = [cache.view(numbers) for cache in self.memory.caches]
        before = [self.memory.length(number) for number in numbers]
        states = [r.generator.get_state() for r in requests]
        rows = [r.ids[at : at + count] for r, at in zip(requests, before, strict=True)]
        device = next(self.model.parameters()).device
        given = {"cache": views, "padding": views[0].padding, "last": 1}
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor(rows, device=device), **given)[:, -1].cpu()
            pairs = zip(requests, logits, strict=True)
            found = [(r, *r.next(row)) for r, row in pairs if not self.unread(r)]
        except BaseException:
            for r, length, state in zip(requests, before, states, strict=True):
                self.memory.cut(r.sequence, length)
                r.generator.set_state(state)
            raise
        if self.memory.window is not None:
            for number in numbers:
                self.memory.forget(number)
        for request, token, over in found:
            request.ids.append(token)
            self.news.append((request, token))
            if over:
                self.leave(request, over)

    def submit(
        self,
        ids: Int[Tensor, " tokens"],
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        bias: Mapping[int, float] | None = None,
        generator: torch.Generator | None = None,
        stop: Collection[int | str] = (),
        tokenizer: Any = None,
    ) -> Request:
        """Puts a text at the end of those that wait.

        Args:
            ids: the start of the text, (n,).
            length: the most tokens to write, at least 1.
            generator: its own source of randomness, of the CPU, where tokens are drawn;
                `None` makes one, whose seed PyTorch's own draws now.
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty: see
                `stream`.
            bias, stop, tokenizer: see `stream`.

        Raises:
            TypeError, ValueError: see `stream`; a batch of texts; or a text that would have
                more tokens than the model or all pages together have room for.
        """
        self.model.start_writing(ids, length, False, None)
        require_count("length", length)
        if ids.dim() != 1:
            got = f"got shape {tuple(ids.shape)}"
            raise ValueError(f"ids: expected one text, (tokens,), {got}")
        words = self.model.token_embedding.num_embeddings
        if int(ids.min()) < 0 or int(ids.max()) >= words:
            raise ValueError(f"ids: expected numbers from 0 to {words - 1}, got {ids}")
        room = min(self.model.longest, self.memory.pages * self.memory.page_size)
        if len(ids) + length - 1 > room:
            raise ValueError(
                f"length: expected at most {room + 1 - len(ids)}, as the model or the "
                f"pages have room for {room} tokens and ids has {len(ids)}, got {length}"
            )
        limits = temperature, top_k, top_p, min_p
        require_choice(ids, *limits, generator)
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        if isinstance(generator, list | tuple) or generator.device.type != "cpu":
            raise TypeError(f"generator: expected one of the CPU, got {generator!r}")
        if any(r.generator is generator for r in (*self.inside, *self.waiting)):
            raise ValueError("generator: expected one of its own, got another request's")
        adjust = adjustment(self.model, repetition_penalty, presence_penalty, bias)

        def choose(logits, text):
            return sample(adjust(logits, text, None), *limits, generator)

        ended = ending(stop, self.model, ids.cpu(), tokenizer)
        self.waiting.append(Request(ids, length, choose, ended, generator))
        return self.waiting[-1]

    def abort(self, request: Request) -> None:
        """Ends a text before its end.

        Raises:
            TypeError: no `Request`.
            ValueError: it is over, or another server's.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request: expected a Request, got {request!r}")
        if request in self.inside:
            self.leave(request, "aborted")
        elif request in self.waiting:
            self.waiting.remove(request)
            request.over = "aborted"
        else:
            got = f"one that is {request.over}" if request.over else "another server's"
            raise ValueError(f"request: expected one that waits or is inside, got {got}")

    def forget(self) -> None:
        """Frees what is kept of texts that have ended, as after a change of the model."""
        for number in list(self.memory.kept):
            self.memory.give_up(number)

    def run(self) -> Iterator[tuple[Request, int]]:
        """Yields each token with its request, step by step, until all are over.

        More requests may be submitted, and any aborted, meanwhile. Who stops listening can
        call it again, and gets what is left.
        """
        while self.news or self.waiting or self.inside:
            if not self.news:
                self.news.extend(self.step())
            while self.news:
                yield self.news.popleft()
