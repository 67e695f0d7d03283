"""What a server gains and costs: steps, many texts at once, pieces of a prompt, beginnings.

All with SmolLM2 and likeliest tokens; beside it, the batches of `transformers` with a model
of these sizes. The ways that are compared take turns.

python benchmarks/serving.py        writes results/serving.json
"""

import argparse
import time
from functools import partial
from statistics import median

import torch
import transformers
from paired import time_in_turn, write_record
from smollm2 import smollm2
from torch import Tensor

from attnlib import KVCache, Llama
from attnlib.serving import Server

RULES = (
    "You answer the guests of a small hotel by the sea. Breakfast is from seven to ten, "
    "the kitchen is open until nine in the evening, and the beach is five minutes away. "
    "There are twelve rooms; those on the second floor have a balcony. Bicycles are free "
    "of charge. The last bus to town leaves at half past ten. Dogs are welcome in the "
    "garden and in four of the rooms. Be brief, be friendly, and never promise a room. "
)
ASKED = (
    "When is breakfast?", "Is there a bus to town at night?", "May I bring my dog?",
    "How far is the beach?", "Do you have a room with a balcony?", "What do bicycles cost?",
    "Can we still eat at eight?", "How many rooms are there?",
)  # fmt: skip
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 6400  # that all pages hold


@torch.inference_mode()
def step_times(model: Llama, rounds: int) -> list[dict]:
    """Milliseconds of a step: one token of so many texts, or so many of one, after 128."""
    held = {}
    for texts, new in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 16), (1, 64), (1, 256)):
        caches = [KVCache(400) for _ in model.blocks]
        model(torch.randint(1000, 2000, (texts, 128)), cache=caches, last=1)
        held[texts, new] = caches, torch.randint(1000, 2000, (texts, new))

    def step(caches: list[KVCache], ids: Tensor) -> None:
        for cache in caches:
            cache.truncate(128)
        model(ids, cache=caches, last=1)

    times = time_in_turn(
        {key: partial(step, *given) for key, given in held.items()}, rounds
    )
    return [
        {"texts": texts, "tokens": new, "ms": round(median(times[texts, new]), 1)}
        for texts, new in held
    ]


def serve(
    model: Llama, prompts: list[Tensor], length: int, page_size: int = 16, at_once: int = 8
) -> None:
    server = Server(model, TOKENS // page_size, page_size, at_once)
    for ids in prompts:
        server.submit(ids, length, temperature=0.0)
    for _ in server.run():
        pass


def library(model: Llama) -> transformers.LlamaForCausalLM:
    """The same sizes in `transformers`, with numbers that were drawn."""
    config = transformers.LlamaConfig(
        vocab_size=model.token_embedding.num_embeddings,
        hidden_size=model.token_embedding.embedding_dim,
        intermediate_size=1536,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=9,
        num_key_value_heads=3,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).eval()


def at_once(model: Llama, prompts: list[Tensor], length: int, rounds: int) -> list[dict]:
    """Tokens a second, if so many texts are inside, and of the library's own batches.

    No beginning is shared, and all have their length.
    """
    options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": -1}
    config = transformers.GenerationConfig(**options, pad_token_id=0)
    given = {"inputs": [ids.tolist() for ids in prompts], "generation_config": config}
    theirs = partial(library(model).generate_batch, **given, progress_bar=False)
    theirs()  # whose first call prepares much
    ways = {n: partial(serve, model, prompts, length, at_once=n) for n in (1, 2, 4, 8)}
    times = time_in_turn({**ways, 0: theirs}, rounds, warm=False)
    tokens = length * len(prompts)
    return [
        {"at_once": n, "tokens_per_s": round(1e3 * tokens / median(times[n]), 1)}
        for n in (*ways, 0)
    ]


def interrupted(model: Llama, prompts: list[Tensor], long: Tensor, piece: int) -> dict:
    """Four texts are being written when a long prompt comes: who waits, and how long?"""
    server, times = Server(model, TOKENS // 16, piece=piece), []
    writing = [server.submit(ids, 100, temperature=0.0) for ids in prompts[:4]]
    while not all(request.written for request in writing):
        server.step()
    new, begun = server.submit(long, 4, temperature=0.0), time.perf_counter()
    while not new.written:
        start = time.perf_counter()
        server.step()
        times.append(time.perf_counter() - start)
    found = {"longest_pause": max(times), "first_token": time.perf_counter() - begun}
    return {name: round(seconds, 2) for name, seconds in found.items()}


def beginnings(model: Llama, prompts: list[Tensor], length: int, rounds: int) -> list[dict]:
    """The time of all texts with their beginning read once, and by each anew."""
    ways = {
        size: partial(serve, model, prompts, length, page_size=size) for size in (16, 512)
    }
    times, rows = time_in_turn(ways, rounds, warm=False), []
    read: list[int] = []
    hook = model.register_forward_pre_hook(lambda m, args: read.append(args[0].numel()))
    for size in ways:
        read.clear()
        serve(model, prompts, length, page_size=size)
        row = {"page_size": size, "tokens_read": sum(read)}
        rows.append(row | {"seconds": round(median(times[size]) / 1e3, 1)})
    hook.remove()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = range(parser.parse_args().rounds)
    torch.manual_seed(0)
    model, tokenizer, name = smollm2()

    def tokens(text: str) -> Tensor:
        return torch.tensor(tokenizer.encode(text).ids)

    apart = [tokens(TURN.format(text)) for text in ASKED]
    alike = [tokens(TURN.format(RULES + text)) for text in ASKED]
    long = tokens(TURN.format(RULES * 5))
    record = {"model": name, "alike": [len(ids) for ids in alike], "long": len(long)}
    record["steps"] = step_times(model, 5 * len(rounds))
    print(record, flush=True)
    record["at_once"] = at_once(model, apart, 24, len(rounds))
    print(record["at_once"], flush=True)
    record["pieces"] = []
    ways = (16, 64, 256, 1024)
    in_turn = [[interrupted(model, apart, long, piece) for piece in ways] for _ in rounds]
    for piece, tries in zip(ways, zip(*in_turn, strict=True), strict=True):
        row = {key: median(one[key] for one in tries) for key in tries[0]}
        record["pieces"].append({"piece": piece, **row})
        print(record["pieces"][-1], flush=True)
    record["beginnings"] = beginnings(model, alike, 8, len(rounds))
    print(record["beginnings"], flush=True)
    write_record("serving", record)


if __name__ == "__main__":
    main()
