"""Loss of SmolLM2 on a long text, by the window of its heads, and the first tokens kept.

python benchmarks/first_tokens.py        writes results/first_tokens.json
"""

import argparse

import torch
from paired import write_record
from smollm2 import english, smollm2
from torch import Tensor
from torch.nn import functional as F

from attnlib import Llama


@torch.inference_mode()
def loss_of(model: Llama, ids: Tensor, window: int, first: int, after: int) -> float:
    """Mean loss behind token `after`, if a query sees so many keys, `first` among them.

    Positions stay those of the text, within the length of the model's training.
    """
    places = torch.arange(len(ids))
    back = places[:, None] - places
    mask = (back >= 0) & ((back < window - first) | (places < first))
    x = model.token_embedding(ids)
    for block in model.blocks:
        x = block(x, mask=mask)
    logits = model.logits(model.norm(x))
    return F.cross_entropy(logits[after:-1], ids[after + 1 :]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    model, tokenizer, name = smollm2()
    ids, said = english(tokenizer, options.tokens)
    after = min(300, options.tokens // 2)  # all windows are full by then
    record = {"model": name, **said, "after": after, "rows": []}
    for window, first in ((len(ids), 0), *((w, s) for w in (256, 64) for s in (0, 1, 4))):
        loss = round(loss_of(model, ids, window, first, after), 3)
        record["rows"].append({"window": window, "first": first, "loss": loss})
        print(f"window {window}, of which the first {first}: {loss}", flush=True)
    write_record("first_tokens", record)


if __name__ == "__main__":
    main()
