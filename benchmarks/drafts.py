"""Tokens that SmolLM2 gains in a step by guesses, and the time beside `generate`.

python benchmarks/drafts.py        writes results/drafts.json
"""

import argparse
from functools import partial
from statistics import median

import torch
from paired import time_in_turn, write_record
from smollm2 import smollm2
from torch import Tensor

from attnlib import KVCache, Llama, speculate

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TASKS = {
    "spelling": "Correct the spelling: The bus was late agian, so Maria walked to the "
    "markte. The market was full of people, and the smell of bread made her hungry. She "
    "bought two apples and a loaf of bread, and on the way home she met her brother, who "
    "had lost his keys.",
    "story": "Tell me a short story about a cat that lives in a library.",
}
DRAFTS = (("ngram", 2), ("ngram", 4), ("ngram", 8), (20, 2), (28, 2))


@torch.inference_mode()
def cost_of_reading(model: Llama, new: int, rounds: int) -> float:
    """Time of a step that reads so many tokens after a hundred, over that of one token."""
    ids, caches = torch.randint(1000, 2000, (100,)), [KVCache(200) for _ in model.blocks]

    def read(count: int) -> None:
        for held in caches:
            held.truncate(min(len(held), 100))
        model(ids[:count], cache=caches, last=count)

    read(100)
    times = time_in_turn({"one": partial(read, 1), "new": partial(read, new)}, rounds)
    return median(b / a for a, b in zip(times["one"], times["new"], strict=True))


def measure(
    model: Llama, ids: Tensor, length: int, temperature: float, rounds: int
) -> list:
    """For each draft the tokens that a step brings, and the time of `generate` over its."""
    luck, steps = torch.Generator().manual_seed(0), {}
    options = {"temperature": temperature, "generator": luck}

    def write(draft: str | int, ahead: int) -> None:
        called = []
        hook = model.register_forward_hook(lambda m, *_: called.append(m is model))
        speculate(model, ids, length, draft, ahead=ahead, **options)
        hook.remove()
        steps.setdefault((draft, ahead), []).append(sum(called))

    calls = {f"{draft}, {ahead}": partial(write, draft, ahead) for draft, ahead in DRAFTS}
    calls["generate"] = partial(model.generate, ids, length, cache=True, **options)
    times = time_in_turn(calls, rounds, warm=False)
    rows = []
    for draft, ahead in DRAFTS:
        pairs = zip(times["generate"], times[f"{draft}, {ahead}"], strict=True)
        gain = length * rounds / sum(steps[draft, ahead])
        row = {"draft": draft, "ahead": ahead, "tokens_a_step": round(gain, 2)}
        rows.append(row | {"faster": round(median(a / b for a, b in pairs), 2)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer, name = smollm2()
    costs = {new: round(cost_of_reading(model, new, 25), 2) for new in (2, 3, 5, 9)}
    print(costs, flush=True)
    record = {"model": name, "length": options.length, "costs": costs, "rows": []}
    for task, asked in TASKS.items():
        ids = torch.tensor(tokenizer.encode(TURN.format(asked)).ids)
        for temperature in (0.0, 1.0):
            print(task, temperature, flush=True)
            same = model, ids, options.length, temperature, options.rounds
            kind = {"task": task, "temperature": temperature}
            record["rows"] += [kind | row for row in measure(*same)]
    write_record("drafts", record)


if __name__ == "__main__":
    main()
