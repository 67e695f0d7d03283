"""A language model trained on Python's own documentation, beside its torch.nn twin.

The twin has the same size, the same first weights and sees the same batches in the same
order, so the two losses must agree. A run that was killed goes on from its checkpoint as
if nothing had happened: batches and learning rate depend on the number of the step alone.

python benchmarks/train_text.py        writes results/train_text.json
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from paired import write_record
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib import LanguageModel, TransformerBlock

SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
SIZE = {"context_length": 128, "embed_dim": 128, "num_heads": 4, "num_layers": 4}
BATCH, PEAK, WARMUP = 16, 3e-3, 100
CHECKPOINTS = Path(__file__).parent / "checkpoints"


class Twin(nn.Module):
    """The language model made of PyTorch's own parts."""

    def __init__(
        self, context_length: int, embed_dim: int, num_heads: int, num_layers: int
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(len(SYMBOLS), embed_dim)
        self.positions = nn.Parameter(torch.randn(context_length, embed_dim))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(embed_dim, num_heads, 4 * embed_dim, **options)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim)
        with torch.no_grad():
            self.positions.mul_(embed_dim**-0.5)
            self.token_embedding.weight.mul_(embed_dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[-1]
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=ids.device)
        x = self.token_embedding(ids) + self.positions[:n]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.token_embedding.weight)


def ours(twin: Twin, size: dict[str, int]) -> LanguageModel:
    """The same model, with the same weights, made of the book's parts."""
    model = LanguageModel(len(SYMBOLS), **size)
    for block, layer in zip(model.blocks, twin.blocks, strict=True):
        block.load_state_dict(TransformerBlock.from_torch(layer).state_dict())
    with torch.no_grad():
        model.positions.copy_(twin.positions)
        model.token_embedding.weight.copy_(twin.token_embedding.weight)
    return model


def load_text() -> tuple[Tensor, Tensor]:
    """The text as numbers: nine tenths to learn from, the rest to be judged by."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    number = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    ids = torch.tensor([number[symbol] for symbol in text if symbol in number])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:]


def batch(ids: Tensor, step: int, length: int) -> Tensor:
    """Pieces of the text, drawn by the number of the step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(ids) - length, (BATCH, 1), generator=generator)
    return ids[starts + torch.arange(length + 1)]


def loss_of(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Mean of -log p of each next symbol."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def rate(step: int, steps: int) -> float:
    """The learning rate: up in a straight line, then down along half a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, log: Tensor
) -> None:
    """Everything that the next step needs, put in place in one move."""
    tensors = {f"model.{name}": x.contiguous() for name, x in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{name}": x.contiguous() for name, x in state.items()}
    part = path.with_suffix(".part")
    save_file({**tensors, "log": log}, part)
    os.replace(part, path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Puts a checkpoint back; returns the losses so far."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k[:6] == "model."}
    model.load_state_dict(weights)
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, i, name = key.split(".")
            state.setdefault(int(i), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return tensors["log"]


def train(model: nn.Module, path: Path, options: argparse.Namespace) -> Tensor:
    """Trains on from the checkpoint, if there is one; returns the loss of each step."""
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95))
    log = torch.zeros(0)
    if path.exists():
        log = load(path, model, optimizer)
    run = torch.compile(model) if options.compile else model
    text, _ = load_text()
    length = model.positions.shape[0]
    for step in range(len(log), options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options.steps)
        ids = batch(text, step, length).to(options.device)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16):
            loss = loss_of(run, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log = torch.cat([log, loss.detach().float().cpu().reshape(1)])
        if len(log) % options.every == 0 or len(log) == options.steps:
            save(path, model, optimizer, log)
            print(f"{path.stem}: step {len(log)}, loss {log[-options.every :].mean():.3f}")
    return log


def judge(model: nn.Module) -> float:
    """Loss on text that was not learned from."""
    _, ids = load_text()
    length = model.positions.shape[0]
    starts = torch.arange(0, len(ids) - length, length)[:, None]
    pieces = ids[starts + torch.arange(length + 1)].to(model.positions.device)
    with torch.no_grad():
        return loss_of(model, pieces).item()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add: Any = parser.add_argument
    add("--steps", type=int, default=3000)
    add("--every", type=int, default=50, help="steps from checkpoint to checkpoint")
    add("--device", default="cuda" if gpu else "cpu")
    switch = argparse.BooleanOptionalAction
    add("--bf16", action=switch, default=gpu, help="autocast; helps on a GPU")
    add("--compile", action=switch, default=gpu, help="torch.compile; helps on a GPU")
    add("--size", type=json.loads, default=SIZE, help="sizes of the model, as JSON")
    add("--checkpoints", type=Path, default=CHECKPOINTS, help="folder; delete to restart")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    twin = Twin(**options.size)
    models = {"attnlib": ours(twin, options.size), "torch.nn": twin}
    per_step = BATCH * options.size["context_length"]
    record = {"size": options.size, "batch": BATCH, "tokens_per_step": per_step}
    record |= {"bf16": options.bf16, "compile": options.compile, "curves": {}}
    for name, model in models.items():
        start = time.perf_counter()
        log = train(model, options.checkpoints / f"{name}.safetensors", options)
        print(f"{name}: {time.perf_counter() - start:.0f} s")
        means = log.unflatten(0, (-1, 20)).mean(dim=1)
        record["curves"][name] = [round(x, 4) for x in means.tolist()]
        record[f"validation {name}"] = round(judge(model), 4)
    write_record("train_text", record)


if __name__ == "__main__":
    main()
