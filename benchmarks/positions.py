"""Chapter 9's model with learned positions, with sinusoidal ones, and with none.

python benchmarks/positions.py        writes results/positions.json
"""

import argparse

import torch
from paired import write_record
from torch import nn
from train_text import SYMBOLS, judge, load_text, loss_of

from attnlib import LanguageModel

SIZE = {"context_length": 64, "embed_dim": 128, "num_heads": 4, "num_layers": 2}
BATCH, PEAK = 12, 4e-3


def make(positions: str) -> LanguageModel:
    """A model whose positions are learned, sinusoidal, or 0 and stay so (none)."""
    kind = "learned" if positions == "none" else positions
    model = LanguageModel(len(SYMBOLS), **SIZE, positions=kind)
    if positions == "none":
        nn.init.zeros_(model.positions).requires_grad_(False)
    return model


def run(positions: str, seed: int, steps: int) -> float:
    """One training, of more steps than in the chapter; the loss on the test text."""
    torch.manual_seed(seed)
    model = make(positions)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=PEAK, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, steps, pct_start=0.1)
    text, _ = load_text()
    length = SIZE["context_length"]
    source = torch.Generator().manual_seed(seed)  # the same batches for all kinds
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (BATCH, 1), generator=source)
        loss = loss_of(model, text[starts + torch.arange(length + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return judge(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    record = {"size": SIZE, "batch": BATCH, "steps": options.steps, "losses": {}}
    for positions in ("learned", "sinusoidal", "none"):
        losses = [run(positions, seed, options.steps) for seed in range(options.seeds)]
        record["losses"][positions] = [round(loss, 3) for loss in losses]
        print(positions, record["losses"][positions], flush=True)
    write_record("positions", record)


if __name__ == "__main__":
    main()
