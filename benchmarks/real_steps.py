"""SmolLM2 in float32: its steps and prompts, beside `transformers` and their bounds.

Both libraries have the same numbers and the likeliest token, each with a cache of its own.
What is timed takes turns, within a part:

- steps: one token, when so many are seen. Beside it the reading of as many bytes as it
  needs, by the sum of a row; the products of one row with all matrices; and the copying by
  which the library's cache makes room for one token.
- prompts: so many tokens at once, into an empty cache, for the logits of the last. Beside
  it the reading of the parameters, and the FLOPs at the speed of a large product.
- writing: tokens that follow a text, from the call to the last of them.

A row has medians in milliseconds, and the median of the ratios, theirs over ours.

    python benchmarks/real_steps.py                  writes results/real_steps.json
    python benchmarks/real_steps.py --part steps     measures this part anew
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from paired import time_in_turn, write_record
from smollm2 import english, model_file, smollm2
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM

from attnlib import KVCache, Llama, Projection
from attnlib.gguf import read_gguf
from attnlib.pretrained import order_memory

STEPS = (64, 256, 1024, 2048)  # tokens that are seen
PROMPTS = (1, 4, 16, 64, 256, 1024)
WRITTEN = (64, 64)  # tokens that are read, and that follow
SIDE = 2048  # of the matrices of a large product

Calls = dict[str, Callable[[], object]]


def library() -> LlamaForCausalLM:
    """The model of `transformers` with the numbers of the same file."""
    said, tensors = read_gguf(model_file())
    asked = {k: v for k, v in said.items() if k not in ("rope_theta", "model_type")}
    turns = {"rope_type": "default", "rope_theta": said["rope_theta"]}
    config = transformers.LlamaConfig(
        **asked, rope_parameters=turns, attn_implementation="sdpa"
    )
    model = LlamaForCausalLM(config).eval()
    numbers = {name: tensors[name] for name in tensors}
    model.load_state_dict(
        {**numbers, "lm_head.weight": numbers["model.embed_tokens.weight"]}
    )
    model.generation_config.eos_token_id = None  # every text gets its full length
    return model


@torch.inference_mode()
def sizes(model: Llama) -> dict[str, int]:
    """Parameters; those in matrices of the blocks; and what a cache holds of a token."""
    cache = [KVCache(1) for _ in model.blocks]
    model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    blocks = [w.numel() for w in model.blocks.parameters() if w.dim() == 2]
    table = model.token_embedding.weight
    return {
        "parameters": sum(w.numel() for w in model.parameters()),
        "blocks": sum(blocks),
        "table": table.numel(),
        "width": table.shape[1],
        "layers": len(cache),
        "held": sum(one.nbytes for one in cache) // table.itemsize,
    }


def products(model: Llama) -> Callable[[], Tensor]:
    """The products of one token's features with all matrices, and nothing else."""
    layers = [layer for layer in model.modules() if isinstance(layer, Projection)]
    given = [(layer, torch.randn(1, 1, len(layer.W))) for layer in layers]
    table = model.token_embedding.weight
    features = torch.randn(1, 1, table.shape[1])

    def multiply() -> Tensor:
        for layer, x in given:
            layer(x)
        return F.linear(features, table)

    return multiply


def step_calls(ours: Llama, theirs: LlamaForCausalLM, ids: Tensor) -> Calls:
    """The last token of a text after all others; and the library's copies of these."""
    read = ids.shape[-1] - 1
    caches, cache = [KVCache(read + 1) for _ in ours.blocks], DynamicCache()
    ours(ids[:, :-1], cache=caches, last=1)
    theirs(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def our_step() -> Tensor:
        for one in caches:
            one.truncate(read)
        return ours(ids[:, -1:], cache=caches)

    def their_step() -> Tensor:
        logits = theirs(ids[:, -1:], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)  # as it was before the step
        return logits

    def copies() -> None:
        for layer in cache.layers:
            torch.cat([layer.keys, layer.keys[..., :1, :]], dim=-2)
            torch.cat([layer.values, layer.values[..., :1, :]], dim=-2)

    torch.testing.assert_close(our_step(), their_step(), rtol=0, atol=2e-3)
    return {"ours": our_step, "theirs": their_step, "copies": copies}


def prompt_calls(ours: Llama, theirs: LlamaForCausalLM, ids: Tensor) -> Calls:
    """A text at once, into caches that are made for it."""

    def our_reading() -> Tensor:
        caches = [KVCache(ids.shape[-1]) for _ in ours.blocks]
        return ours(ids, cache=caches, last=1)

    def their_reading() -> Tensor:
        cache = DynamicCache()
        told = theirs(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return told.logits

    torch.testing.assert_close(our_reading(), their_reading(), rtol=0, atol=2e-3)
    return {"ours": our_reading, "theirs": their_reading}


def row_of(times: dict[str, list[float]]) -> dict[str, float]:
    """The medians, and how many times as long theirs takes as ours."""
    found = {name: round(median(ms), 3) for name, ms in times.items()}
    pairs = zip(times["theirs"], times["ours"], strict=True)
    return found | {"ratio": round(median(a / b for a, b in pairs), 3)}


@torch.inference_mode()
def measure_steps(ours: Llama, theirs: Any, ids: Tensor, rounds: int) -> list[dict]:
    """A row for each length."""
    size, rows = sizes(ours), []
    memory = torch.ones(size["parameters"] + STEPS[-1] * size["held"])
    for tokens in STEPS:
        if tokens > ids.shape[-1]:
            continue
        needed = size["parameters"] + tokens * size["held"]
        calls = step_calls(ours, theirs, ids[:, :tokens])
        calls |= {"reading": memory[:needed].sum, "products": products(ours)}
        row = {"tokens": tokens, "bytes": memory.itemsize * needed}
        rows.append(row | row_of(time_in_turn(calls, rounds)))
        print(rows[-1], flush=True)
    return rows


def prompt_flops(size: dict[str, int], tokens: int) -> int:
    """At least: a last row of logits, and of the scores only those that are seen."""
    seen = tokens * (tokens + 1) // 2
    attention = 4 * size["layers"] * size["width"] * seen
    return 2 * (tokens * size["blocks"] + size["table"]) + attention


@torch.inference_mode()
def measure_prompts(ours: Llama, theirs: Any, ids: Tensor, rounds: int) -> list[dict]:
    """A row for each length."""
    size, rows = sizes(ours), []
    memory, square = torch.ones(size["parameters"]), torch.randn(SIDE, SIDE)
    for tokens in PROMPTS:
        if tokens > ids.shape[-1]:
            continue
        calls = prompt_calls(ours, theirs, ids[:, :tokens])  # which makes each once
        calls |= {"reading": memory.sum, "square": partial(torch.mm, square, square)}
        row = row_of(time_in_turn(calls, rounds, warm=tokens < 100))
        flops = prompt_flops(size, tokens)
        row["arithmetic"] = round(flops / (2 * SIDE**3) * row.pop("square"), 3)
        rows.append({"tokens": tokens, "flops": flops, **row})
        print(rows[-1], flush=True)
    return rows


def measure_writing(
    ours: Llama, theirs: Any, ids: Tensor, rounds: int, length: int
) -> dict[str, Any]:
    """Tokens that follow the first ones of a text, the likeliest each."""
    ids = ids[:, : WRITTEN[0]]
    options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)  # or the first token, 0, is hidden
    calls = {
        "ours": partial(ours.generate, ids, length, 0.0, cache=True),
        "theirs": partial(theirs.generate, ids, **options),
    }
    same = torch.equal(calls["ours"](), calls["theirs"]())
    times = time_in_turn(calls, rounds, warm=False)
    row = {"read": ids.shape[-1], "written": length, "same": same, **row_of(times)}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["steps", "prompts", "writing"])
    parser.add_argument("--rounds", type=int, default=5, help="of steps, three times that")
    parser.add_argument("--tokens", type=int, default=2048, help="no text is longer")
    parser.add_argument("--length", type=int, default=WRITTEN[1], help="tokens written")
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / "real_steps.json"
    record = json.loads(path.read_text("utf-8")) if options.part else {}
    (ours, tokenizer, name), theirs = smollm2(), library()
    order_memory(ours)
    ids, said = english(tokenizer, options.tokens)
    record |= {"model": name, "transformers": transformers.__version__, **said}
    record |= {"rounds": options.rounds, "sizes": sizes(ours)}
    given = ours, theirs, ids[None]
    if options.part in (None, "steps"):
        record["steps"] = measure_steps(*given, 3 * options.rounds)
    if options.part in (None, "prompts"):
        record["prompts"] = measure_prompts(*given, options.rounds)
    if options.part in (None, "writing"):
        record["writing"] = measure_writing(*given, options.rounds, options.length)
    write_record("real_steps", record)


if __name__ == "__main__":
    main()
