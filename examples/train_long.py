"""Chapter 25 as a program: long texts on many devices, and checkpoints that survive.

On one machine, with 2 parts of each text times 2 parts of each layer:

    torchrun --standalone --nproc-per-node 4 examples/train_long.py --context 2 --tensor 2

On two, call this on both; HOST is the name of one of them, and both see the folder of the
checkpoints:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 \\
        examples/train_long.py --context 2 --tensor 2 --folder /shared/checkpoints

The ranks that remain, all / (context · tensor), have texts of their own. The parts of a
text trade tokens for heads, or, with --attention ring, pass their keys around. Call it
again after a crash, with as many ranks as you like: it goes on from the last checkpoint.
"""

import argparse
import os
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from attnlib import LanguageModel
from attnlib.parallel import (
    HeadAttention,
    RingAttention,
    TokensBefore,
    load_checkpoint,
    save_checkpoint,
    share_copies,
    split_layers,
    token_mean,
)

ATTENTIONS = {"heads": HeadAttention, "ring": RingAttention}


def read_options():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {"context": 1, "tensor": 1, "batch": 8, "tokens": 512, "steps": 200}
    sizes |= {"every": 20, "width": 128, "heads": 8, "layers": 4}
    for name, default in sizes.items():
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--attention", choices=ATTENTIONS, default="heads")
    options.add_argument("--rate", type=float, default=1e-3)
    options.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options.add_argument("--losses", type=Path, help="where to add a line a step")
    options.add_argument("--float64", action="store_true")
    return options.parse_args()


def refuse_bad_sizes(options, ranks):
    """The same on each rank, so that all refuse."""
    for name in ("context", "tensor", "batch", "tokens", "steps", "every", "layers"):
        if getattr(options, name) < 1:
            raise SystemExit(f"--{name}: expected 1 or more")
    parts = options.context * options.tensor
    if ranks % parts:
        raise SystemExit(f"--context · --tensor: {parts} does not divide {ranks} ranks")
    if options.tokens % options.context:
        raise SystemExit(
            f"--tokens: {options.context} parts do not divide {options.tokens}"
        )
    split = options.tensor * (options.context if options.attention == "heads" else 1)
    if options.heads % split:
        raise SystemExit(f"--heads: {split} parts do not divide {options.heads}")
    if options.batch < ranks // parts:
        raise SystemExit(f"--batch: expected {ranks // parts} texts or more")
    return ranks // parts


def texts_of(ids, step, options):
    """The texts of a step: the same with any ranks, before and after a crash."""
    drawn = torch.Generator().manual_seed(step)
    starts = torch.randint(len(ids) - options.tokens, (options.batch, 1), generator=drawn)
    return ids[starts + torch.arange(options.tokens + 1)]  # (batch, tokens + 1)


def main():
    options = read_options()
    data = refuse_bad_sizes(options, int(os.environ["WORLD_SIZE"]))  # before they meet
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, ranks = next(dist.rendezvous("env://"))
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # no address of the dead
    store = dist.PrefixStore(f"start {again}", store)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    device = "cuda" if gpu else "cpu"
    if options.float64:
        torch.set_default_dtype(torch.float64)

    # The same ranks twice: whole columns of the grid have texts or parts of texts.
    grid = init_device_mesh(
        device,
        (data, options.context, options.tensor),
        mesh_dim_names=("data", "context", "tensor"),
    )
    mesh = init_device_mesh(
        device,
        (data * options.context, options.tensor),
        mesh_dim_names=("copies", "tensor"),
    )
    copies = mesh["copies"].get_group()
    at_text, at_part, _ = grid.get_coordinate()

    text = "\n\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    place = {letter: i for i, letter in enumerate(letters)}
    ids = torch.tensor([place[letter] for letter in text])

    attention = ATTENTIONS[options.attention]
    torch.manual_seed(0)  # the same weights on each rank
    model = LanguageModel(
        len(letters),
        options.tokens,
        options.width,
        options.heads,
        options.layers,
        attention=attention(causal=True, group=grid["context"].get_group()),
        positions="rotary",
    ).to(device)
    split_layers(model, mesh["tensor"])
    share_copies(model, mesh["copies"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, foreach=False)
    start = load_checkpoint(options.folder, model, optimizer)
    first = dist.get_rank() == 0
    if first:
        print(f"{data} × {options.context} × {options.tensor} ranks, from step {start}")
        if start >= options.steps:
            print(f"nothing to do: {start} of {options.steps} steps are done")

    n = options.tokens // options.context
    here = slice(at_part * n, at_part * n + n + 1)  # and the token after
    before = [TokensBefore(at_part * n)] * options.layers
    began = time.monotonic()
    for step in range(start + 1, options.steps + 1):
        texts = texts_of(ids, step, options).tensor_split(data)[at_text][:, here].to(device)
        logits = model(texts[:, :-1], cache=before)
        losses = F.cross_entropy(
            logits.flatten(0, 1), texts[:, 1:].flatten(), reduction="none"
        )
        loss, mean = token_mean(losses, copies)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if first:
            rate = (step - start) * options.batch * options.tokens
            rate /= time.monotonic() - began
            print(f"step {step:5}  loss {mean:.4f}  {rate:,.0f} tokens/s", flush=True)
            if options.losses:
                with options.losses.open("a") as log:
                    log.write(f"{step} {mean.item()!r}\n")
        if step % options.every == 0 or step == options.steps:
            save_checkpoint(options.folder, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
