"""What the place of the layer norm, and warmup, do to gradients and to training.

python benchmarks/norm_order.py        writes results/norm_order.json
"""

import argparse
import statistics

import torch
from paired import write_record
from torch import Tensor, nn
from train_text import SYMBOLS, batch, load_text, loss_of

from attnlib import LanguageModel

SIZE = {"context_length": 32, "embed_dim": 64, "num_heads": 4, "num_layers": 16}
PEAK, WARMUP, LOOK = 1e-3, 75, 60  # the gradients are looked at again after LOOK steps


def gradient_by_depth(model: LanguageModel, ids: Tensor) -> list[float]:
    """Size of the loss's gradient at the input of each block, and at the last output."""
    streams: list[Tensor] = []

    def keep(
        block: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, object]
    ) -> None:
        streams.extend([*inputs, output[0]] if not streams else [output[0]])

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    gradients = torch.autograd.grad(loss_of(model, ids), streams)
    for hook in hooks:
        hook.remove()
    return [float(f"{gradient.norm().item():.3g}") for gradient in gradients]


def run(norm_first: bool, warmup: int, seed: int, steps: int) -> dict[str, object]:
    """One training; gradients at its start and after LOOK steps, and its last loss."""
    torch.manual_seed(seed)
    model = LanguageModel(len(SYMBOLS), **SIZE, norm_first=norm_first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    text, _ = load_text()
    losses, gradients = [], {}
    for step in range(steps):
        ids = batch(text, 1000 * seed + step, SIZE["context_length"])
        if step in (0, LOOK):
            gradients[str(step)] = gradient_by_depth(model, ids)
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
        "gradients": gradients,
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
                print({k: v for k, v in runs[-1].items() if k != "gradients"}, flush=True)
    record = {"size": SIZE, "steps": options.steps, "rate": PEAK, "look": LOOK}
    write_record("norm_order", {**record, "runs": runs})


if __name__ == "__main__":
    main()
