"""How fast GPT-2 and Llama write, beside `transformers`.

A model of each family with random weights is written into a folder by `transformers`, and
read by both libraries. Both continue the same texts greedily, each with its own cache: ours
with `cache=True`, theirs with what `generate` takes by itself. In float32 the tokens are
asserted to be the same; in bfloat16 two roundings may part at a tie. The calls take turns;
a row has the median of each time, and the median of their ratios, of as many rounds as fit
into a minute, from 5 to 31.

    python benchmarks/models.py             writes results/models.json
    python benchmarks/models.py --small     tiny models, writes nothing
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers
from paired import time_in_turn, write_record
from torch import Tensor

from attnlib import GPT2, Llama
from attnlib.pretrained import order_memory

FAMILIES = {
    "GPT-2": (GPT2, transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "Llama": (Llama, transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
SIZES = {
    "GPT-2": {"vocab_size": 50257, "n_embd": 512, "n_head": 8, "n_layer": 8},
    "Llama": {
        **{"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408},
        **{"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
    },
}
TINY = {
    "GPT-2": {"vocab_size": 99, "n_embd": 32, "n_head": 2, "n_layer": 2},
    "Llama": {
        **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    },
}
TEXTS = ((1, 16), (1, 256), (1, 960), (8, 16), (8, 256))  # how many, and their tokens


def both(family: str, sizes: dict[str, int], dtype: torch.dtype) -> tuple[object, object]:
    """Our model and theirs, from one folder."""
    ours, make_config, theirs = FAMILIES[family]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        theirs(make_config(**sizes)).save_pretrained(folder)
        model = theirs.from_pretrained(folder, dtype=dtype).eval()
        model.generation_config.eos_token_id = None  # every text gets its full length
        mine = ours.from_pretrained(folder, dtype=dtype)
        order_memory(mine)
        return mine, model


def measure(
    family: str, sizes: dict[str, int], length: int, seconds: float
) -> Iterator[dict[str, object]]:
    """A row for each type, number of texts and length of what was read."""
    for dtype in (torch.float32, torch.bfloat16):
        mine, theirs = both(family, sizes, dtype)
        for batch, read in TEXTS:
            ids = torch.randint(sizes["vocab_size"], (batch, read))
            calls: dict[str, Callable[[], Tensor]] = {
                "attnlib": partial(mine.generate, ids, length, 0.0, cache=True),
                "transformers": partial(
                    theirs.generate, ids, max_new_tokens=length, do_sample=False
                ),
            }
            start = time.perf_counter()
            same = torch.equal(calls["attnlib"](), calls["transformers"]())
            assert same or dtype != torch.float32
            fit = round(seconds / (time.perf_counter() - start))
            rounds = min(max(fit, 5), 31)
            times = time_in_turn(calls, rounds, warm=False)
            pairs = zip(times["transformers"], times["attnlib"], strict=True)
            row: dict[str, object] = {"family": family, "dtype": str(dtype)[6:]}
            row |= {"batch": batch, "read": read, "same": same, "rounds": rounds}
            for name, ms in times.items():
                per_s = 1e3 * batch * length / statistics.median(ms)
                row[f"{name}_per_s"] = round(per_s, 1)
            row["speed"] = round(statistics.median(b / a for b, a in pairs), 3)
            print(row, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny, and writes nothing")
    parser.add_argument("--seconds", type=float, default=60.0, help="for a row, about")
    parser.add_argument("--length", type=int, default=32, help="tokens written")
    options = parser.parse_args()
    length, seconds = options.length, options.seconds
    record = {"transformers": transformers.__version__, "sizes": SIZES}
    record |= {"length": length, "seconds": seconds}
    rows: list[dict[str, object]] = []
    for name, sizes in (TINY if options.small else SIZES).items():
        for row in measure(name, sizes, length, seconds):
            rows.append(row)
            if not options.small:  # after each row: a run that is stopped leaves the others
                write_record("models", {**record, "rows": rows})


if __name__ == "__main__":
    main()
