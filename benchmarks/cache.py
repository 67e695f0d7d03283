"""Tokens a second of a model that writes: without a cache, with one, and the bound.

For each length, a model has read so many tokens, less one, and makes one step more: the
whole text again, or its last token alone. Steps are timed in turn. The bound is the bytes
of the parameters and the caches, over the bandwidth of memory, which is measured here: the
sum of a long row of numbers. The products with the parameters are timed by themselves,
too. Where `transformers` is installed, its model of the same size, with its own cache,
makes the same step.

    python benchmarks/cache.py    writes results/cache.json
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import torch
from paired import time_in_turn, write_record
from torch import Tensor
from torch.nn import functional as F

from attnlib import KVCache, LanguageModel, Projection

VOCABULARY, WIDTH, HEADS, LAYERS = 4096, 512, 8, 8
LENGTHS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 8)


def bandwidth(rounds: int) -> float:
    """Bytes a second that a sum reads, of a row far longer than the processor's caches."""
    row = torch.ones(2**28 // 4)  # 256 MiB
    times = time_in_turn({"sum": row.sum}, rounds)["sum"]
    return row.nbytes / (min(times) / 1e3)


def steps(model: LanguageModel, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """One step at this length, without and with a cache; both give the same logits."""
    read = ids.shape[-1] - 1
    caches = [KVCache(read + 1) for _ in model.blocks]
    for piece in ids[:, :-1].split(256, dim=-1):
        model(piece, cache=caches)

    def with_cache() -> Tensor:
        for cache in caches:
            cache.truncate(read)
        return model(ids[:, -1:], cache=caches)[:, -1]

    def without() -> Tensor:
        return model(ids)[:, -1]

    torch.testing.assert_close(with_cache(), without(), rtol=0, atol=1e-3)
    return {"with": with_cache, "without": without}


def products(model: LanguageModel, batch: int) -> dict[str, Callable[[], Tensor]]:
    """The products of one token's features with all parameters, and nothing else."""
    layers = [layer for layer in model.modules() if isinstance(layer, Projection)]
    given = [(layer, torch.randn(batch, 1, len(layer.W))) for layer in layers]
    tokens, table = torch.randn(batch, 1, WIDTH), model.token_embedding.weight

    def all_products() -> Tensor:
        for layer, features in given:
            layer(features)
        return F.linear(tokens, table)

    return {"products": all_products}


def their_step(ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The same step in a GPT-2 of `transformers`, random weights, if it is installed."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=max(LENGTHS))).eval()
    cache = DynamicCache()
    model(ids[:, :-1], past_key_values=cache, use_cache=True)

    def step() -> Tensor:
        logits = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)  # as it was before the step
        return logits

    return {"transformers": step}


def bytes_read(model: LanguageModel, batch: int, tokens: int) -> int:
    """Bytes that a step with a cache has to read."""
    numbers = sum(weight.numel() for weight in model.parameters())
    numbers -= model.positions.numel()
    return 4 * (numbers + 2 * batch * LAYERS * tokens * WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, max(LENGTHS), WIDTH, HEADS, LAYERS).eval()
    rows, speed = [], bandwidth(rounds)
    for batch in BATCHES:
        for tokens in LENGTHS:
            ids = torch.randint(VOCABULARY, (batch, tokens))
            with torch.no_grad():
                ways = {**steps(model, ids), **products(model, batch), **their_step(ids)}
                times = time_in_turn(ways, rounds)
            row: dict[str, float] = {"batch": batch, "tokens": tokens}
            for name, ms in times.items():
                row[f"{name}_per_s"] = round(1e3 * batch / statistics.median(ms), 2)
            least = bytes_read(model, batch, tokens) / speed
            row["bound_per_s"] = round(batch / least, 2)
            rows.append(row)
            print(row, flush=True)
    shape = {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "vocabulary": VOCABULARY}
    record = {**shape, "bandwidth_gb_s": round(speed / 1e9, 2), "rounds": rounds}
    write_record("cache", {**record, "rows": rows})


if __name__ == "__main__":
    main()
