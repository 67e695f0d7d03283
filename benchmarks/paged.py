"""Tokens a second of a server with many texts: rows of a plain cache, and pages.

Both have the same memory in each block and the same requests, whose lengths are drawn: most
are short, some are long. With rows, each has room for the longest text; as many texts as
there are rows begin together, filled up in front, and wait for the last of them. With
pages, texts come and go between two steps. Each way is timed from the first request to the
last token. Then one step by itself: the same batch with either cache, in turn; pages are
copied together before they are used.

    python benchmarks/paged.py            writes results/paged.json
    python benchmarks/paged.py --smoke    a tiny model, a few requests; writes nothing
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record
from torch import Tensor

from attnlib import KVCache, LanguageModel, PagedCache

SIZES = {"vocab_size": 4096, "context_length": 512, "embed_dim": 512, "num_heads": 8}
LAYERS, ROWS, PAGE, REQUESTS = 8, 8, 16, 64
STEPS = ((1, 128), (8, 128), (8, 448))  # texts, tokens
Request = tuple[Tensor, int]  # a prompt, and how many tokens to write


def draw_requests(count: int, vocabulary: int, longest: int) -> list[Request]:
    """Prompts and lengths, at most `longest` tokens together; a quarter of them long."""
    make = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=make))

    made = []
    for number in range(count):
        most = longest // 2 if number % 4 == 0 else longest // 8
        prompt = torch.randint(vocabulary, (between(4, most),), generator=make)
        made.append((prompt, between(2, most)))
    return made


def serve_rows(model: LanguageModel, requests: list[Request], rows: int) -> list[int]:
    """Batches of a plain cache; returns the places with tokens at each step."""
    used = []
    for first in range(0, len(requests), rows):
        batch = requests[first : first + rows]
        most = max(len(prompt) for prompt, _ in batch)
        padding = torch.tensor([most - len(prompt) for prompt, _ in batch])
        ids = torch.stack([torch.cat([prompt.new_zeros(most - len(prompt)), prompt])
                           for prompt, _ in batch])  # fmt: skip
        caches = [KVCache(model.context_length) for _ in model.blocks]
        steps = max(length for _, length in batch) - 1
        new = model(ids, cache=caches, padding=padding)[:, -1:].argmax(-1)
        for step in range(steps):
            new = model(new, cache=caches, padding=padding).argmax(-1)
            alive = [(p, n) for p, n in batch if step < n - 1]
            used.append(sum(len(prompt) + step + 1 for prompt, _ in alive))
    return used


def serve_pages(model: LanguageModel, requests: list[Request], pages: int) -> list[int]:
    """Texts come and go; returns the places with tokens at each step."""
    caches = [PagedCache(pages, PAGE) for _ in model.blocks]
    waiting, ends, last, used = list(requests), {}, {}, []
    books = caches[0]
    while waiting or ends:
        while waiting:
            prompt, length = waiting[0]
            end = len(prompt) + length - 1
            promised = sum(-(-e // PAGE) - len(books.tables[s]) for s, e in ends.items())
            if promised - (-end // PAGE) > len(books.unused):
                break
            waiting.pop(0)
            (sequence,) = {cache.open() for cache in caches}
            views = [cache.view(sequence) for cache in caches]
            last[sequence], ends[sequence] = model(prompt, cache=views)[-1].argmax(), end
        sequences = list(ends)
        views = [cache.view(sequences) for cache in caches]
        new = torch.stack([last[s] for s in sequences])[:, None]
        found = model(new, cache=views, padding=views[0].padding)[:, -1].argmax(-1)
        used.append(sum(books.lengths.values()))
        for s, token in zip(sequences, found, strict=True):
            last[s] = token
            if books.lengths[s] == ends[s]:
                for cache in caches:
                    cache.free(s)
                del ends[s], last[s]
    return used


def one_step(
    model: LanguageModel, batch: int, tokens: int
) -> dict[str, Callable[[], Tensor]]:
    """The same step with either cache; both give the same logits."""
    ids = torch.randint(model.token_embedding.num_embeddings, (batch, tokens))
    plain = [KVCache(tokens) for _ in model.blocks]
    pages = [PagedCache(batch * -(-tokens // PAGE), PAGE) for _ in model.blocks]
    views = [cache.view([cache.open() for _ in range(batch)]) for cache in pages]
    for caches in (plain, views):
        model(ids[:, :-1], cache=caches)

    def step(caches: list) -> Tensor:
        for cache in caches:
            cache.truncate(tokens - 1)
        return model(ids[:, -1:], cache=caches)

    torch.testing.assert_close(step(plain), step(views), rtol=0, atol=1e-3)
    return {"plain": lambda: step(plain), "pages": lambda: step(views)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    sizes, layers, count = SIZES, LAYERS, REQUESTS
    if given.smoke:
        sizes = {"vocab_size": 32, "context_length": 64, "embed_dim": 16, "num_heads": 2}
        layers, count, given.rounds = 2, 12, 1
    torch.manual_seed(0)
    model = LanguageModel(**sizes, num_layers=layers).eval()
    longest = sizes["context_length"]
    requests = draw_requests(count, sizes["vocab_size"], longest)
    written, places = sum(length for _, length in requests), ROWS * longest
    ways = {
        "rows": lambda: serve_rows(model, requests, ROWS),
        "pages": lambda: serve_pages(model, requests, places // PAGE),
    }
    rows, steps = [], []
    with torch.no_grad():
        taken: dict[str, list[float]] = {name: [] for name in ways}
        used = {}
        for _ in range(given.rounds):
            for name, serve in ways.items():
                start = time.perf_counter()
                used[name] = serve()
                taken[name].append(time.perf_counter() - start)
        for name, seconds in taken.items():
            row: dict[str, float | str] = {"cache": name, "steps": len(used[name])}
            row["memory_used"] = round(sum(used[name]) / len(used[name]) / places, 3)
            row["tokens_per_s"] = round(written / statistics.median(seconds), 1)
            rows.append(row)
            print(row, flush=True)
        for batch, tokens in STEPS:
            tokens = min(tokens, longest)
            times = time_in_turn(one_step(model, batch, tokens), 3 * given.rounds)
            step = {"batch": batch, "tokens": tokens}
            step |= {
                f"{name}_ms": round(statistics.median(ms), 3) for name, ms in times.items()
            }
            steps.append(step)
            print(step, flush=True)
    if given.smoke:
        return
    shape = {**sizes, "layers": layers, "rows": ROWS, "page_size": PAGE, "requests": count}
    record = {**shape, "places": places, "rounds": given.rounds}
    write_record("paged", {**record, "served": rows, "one_step": steps})


if __name__ == "__main__":
    main()
