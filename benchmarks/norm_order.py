"""What the place of the layer norm, and warmup, do to gradients and to training.

python benchmarks/norm_order.py        writes results/norm_order.json
"""

import argparse
import statistics

import torch
from paired import write_record
from torch import Tensor
from torch.nn import functional as F
from train_text import SYMBOLS, batch, load_text, loss_of

from attnlib import LanguageModel

SIZE = {"context_length": 32, "embed_dim": 64, "num_heads": 4, "num_layers": 16}
PEAK, WARMUP, LOOK = 1e-3, 75, 60  # the gradients are looked at again after LOOK steps


def measure(model: LanguageModel, ids: Tensor) -> dict[str, list[float]]:
    """Sizes of gradients by depth, how much each part adds, how far tokens differ.

    Returns:
        gradients: the loss's gradient at the input of each block, and at the last output.
        path: the same, if only what comes along the residual path is counted.
        last_weights: the loss's gradient for `feed_forward.linear_2.W` of the last block.
        added: variance of what each part adds, relative to that of what it is added to.
        alignment: the correlation of the two, over the features of a token.
        spread: distance of the tokens from their mean, relative to their size, at the
            input of each block, and at the last output.
    """
    logits, streams, added, alignment = walk(model, ids, path_alone=False)
    torch.testing.assert_close(logits, model(ids[:, :-1]))
    last = model.blocks[-1].feed_forward.linear_2.W
    *whole, matrix = torch.autograd.grad(cross_entropy(logits, ids), [*streams, last])
    logits, path_streams, _, _ = walk(model, ids, path_alone=True)
    path = torch.autograd.grad(cross_entropy(logits, ids), path_streams)
    tokens = [x.flatten(0, 1) for x in streams]
    measured = {
        "gradients": [gradient.norm() for gradient in whole],
        "path": [gradient.norm() for gradient in path],
        "last_weights": [matrix.norm()],
        "added": added,
        "alignment": alignment,
        "spread": [(x - x.mean(dim=0)).norm() / x.norm() for x in tokens],
    }
    return {k: [float(f"{x.item():.3g}") for x in v] for k, v in measured.items()}


def walk(
    model: LanguageModel, ids: Tensor, path_alone: bool
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """What the model does, part by part: logits, streams, `added` and `alignment`."""
    x = model.token_embedding(ids[:, :-1]) + model.positions[: ids.shape[-1] - 1]
    streams, added, alignment = [x], [], []
    for block in model.blocks:
        for part, norm in (
            (block.attention, block.norm_1),
            (block.feed_forward, block.norm_2),
        ):
            change = part(norm(x) if block.norm_first else x)
            change = change[0] if part is block.attention else change
            change = change.detach() if path_alone else change
            centered = [y - y.mean(dim=-1, keepdim=True) for y in (x, change)]
            added.append((change.var(dim=-1) / x.var(dim=-1)).mean())
            alignment.append(F.cosine_similarity(*centered, dim=-1).mean())
            x = x + change if block.norm_first else norm(x + change)
        streams.append(x)
    logits = F.linear(model.norm(x), model.token_embedding.weight)
    return logits, streams, added, alignment


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean of -log P of each next symbol."""
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def frequencies_alone(text: Tensor) -> float:
    """Loss on a text of the model that knows only how frequent each of its symbols is."""
    share = torch.bincount(text) / len(text)
    return -(share * share.clamp(min=1e-12).log()).sum().item()


def run(norm_first: bool, warmup: int, seed: int, steps: int) -> dict[str, object]:
    """One training; gradients at its start and after LOOK steps, and its last loss."""
    torch.manual_seed(seed)
    model = LanguageModel(len(SYMBOLS), **SIZE, norm_first=norm_first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    text, _ = load_text()
    losses, measured = [], {}
    for step in range(steps):
        ids = batch(text, 1000 * seed + step, SIZE["context_length"])
        if step in (0, LOOK):
            measured[str(step)] = measure(model, ids)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / warmup)
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "norm_first": norm_first,
        "warmup": warmup,
        "seed": seed,
        "measured": measured,
        "loss": round(statistics.mean(losses[-20:]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        for norm_first in (True, False):
            for warmup in (1, WARMUP):
                runs.append(run(norm_first, warmup, seed, options.steps))
                print({k: v for k, v in runs[-1].items() if k != "measured"}, flush=True)
    record = {"size": SIZE, "steps": options.steps, "rate": PEAK, "look": LOOK}
    record["frequencies"] = round(frequencies_alone(load_text()[0]), 3)
    write_record("norm_order", {**record, "runs": runs})


if __name__ == "__main__":
    main()
