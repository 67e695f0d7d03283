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
again after a crash, with as many ranks as you like: it goes on from the last checkpoint
that is whole, if model, rate, batch and text are those that it was trained with. One run
has a folder at a time.
"""

import argparse
import hashlib
import os
import threading
import time
import uuid
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
    claim_folder,
    clip_gradients,
    load_checkpoint,
    save_checkpoint,
    share_copies,
    split_layers,
    token_mean,
)

ATTENTIONS = {"heads": HeadAttention, "ring": RingAttention}
# What the steps depend on, compared when a run goes on; any ranks compute the same.
KEPT = ("batch", "tokens", "width", "heads", "layers", "rate", "clip", "float64")


def read_options():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {"context": 1, "tensor": 1, "batch": 8, "tokens": 512, "steps": 200}
    sizes |= {"every": 20, "width": 128, "heads": 8, "layers": 4}
    for name, default in sizes.items():
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--attention", choices=ATTENTIONS, default="heads")
    options.add_argument("--rate", type=float, default=1e-3)
    options.add_argument("--clip", type=float, default=1.0, help="of the gradient's length")
    options.add_argument("--text", type=Path, help="a file; without one, Python's help")
    options.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options.add_argument("--losses", type=Path, help="where to add a line a step")
    options.add_argument("--float64", action="store_true")
    return options.parse_args()


def refuse_bad_sizes(options, ranks):
    """The same on each rank, so that all refuse."""
    for name, given in vars(options).items():
        if isinstance(given, int) and not isinstance(given, bool) and given < 1:
            raise SystemExit(f"--{name}: expected 1 or more, got {given}")
        if isinstance(given, float) and not 0 < given < float("inf"):
            raise SystemExit(f"--{name}: expected a positive number, got {given}")
    if options.width % (2 * options.heads):
        raise SystemExit(
            f"--width: expected an even number for each of {options.heads} heads"
        )
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


def read_text(options):
    """Its letters, as numbers, how many kinds there are, and a digest to know it by."""
    if options.text:
        text = options.text.read_text("utf-8")
    else:
        text = "\n\n".join(topics[name] for name in sorted(topics))
    if len(text) <= options.tokens:
        raise SystemExit(f"--tokens: expected fewer than the text's {len(text)} letters")
    letters = sorted(set(text))
    place = {letter: i for i, letter in enumerate(letters)}
    ids = torch.tensor([place[letter] for letter in text])
    return ids, len(letters), hashlib.sha256(text.encode()).hexdigest()


def end_with(parent):
    """Ends this rank when whoever started it has ended, who alone would stop it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def of_this_start(store, rank, ranks):
    """The store without what ranks have written there that are dead.

    Each agent of torchrun counts its own starts, so these are no name in common. Rank 0
    makes one up, and answers whoever asks now, until all of them have it.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"asks {rank}", own)
        name = store.get(f"answer to {own}").decode()
        store.set(f"{name} has {rank}", "it")
        return dist.PrefixStore(name, store)
    missing = set(range(1, ranks))
    while missing:
        for other in missing:
            if store.check([f"asks {other}"]):
                store.set("answer to " + store.get(f"asks {other}").decode(), own)
        missing = {other for other in missing if not store.check([f"{own} has {other}"])}
        time.sleep(0.02)
    return dist.PrefixStore(own, store)


def texts_of(ids, step, options):
    """The texts of a step: the same with any ranks, before and after a crash."""
    drawn = torch.Generator().manual_seed(step)
    starts = torch.randint(len(ids) - options.tokens, (options.batch, 1), generator=drawn)
    return ids[starts + torch.arange(options.tokens + 1)]  # (batch, tokens + 1)


def main():
    options = read_options()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start it with torchrun: see the first lines of this file")
    data = refuse_bad_sizes(options, int(os.environ["WORLD_SIZE"]))  # before they meet
    ids, kinds, digest = read_text(options)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, ranks = next(dist.rendezvous("env://"))
    store = of_this_start(store, rank, ranks)
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

    claim_folder(options.folder)
    attention = ATTENTIONS[options.attention]
    torch.manual_seed(0)  # the same weights on each rank
    model = LanguageModel(
        kinds,
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
    settings = {name: getattr(options, name) for name in KEPT} | {"text": digest}
    start = load_checkpoint(options.folder, model, optimizer, settings=settings)
    first = dist.get_rank() == 0
    if first:
        print(f"{data} × {options.context} × {options.tensor} ranks, from step {start}")
        if start >= options.steps:
            print(f"nothing to do: {start} of {options.steps} steps are done")

    n = options.tokens // options.context
    here = slice(at_part * n, at_part * n + n + 1)  # and the token after
    began = time.monotonic()
    for step in range(start + 1, options.steps + 1):
        texts = texts_of(ids, step, options).tensor_split(data)[at_text][:, here].to(device)
        logits = model(texts[:, :-1])
        losses = F.cross_entropy(
            logits.flatten(0, 1), texts[:, 1:].flatten(), reduction="none"
        )
        loss, mean = token_mean(losses, copies)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(model, options.clip)
        optimizer.step()
        if first:
            rate = (step - start) * options.batch * options.tokens
            rate /= time.monotonic() - began
            print(f"step {step:5}  loss {mean:.4f}  {rate:,.0f} tokens/s", flush=True)
            if options.losses:
                with options.losses.open("a") as log:
                    log.write(f"{step} {mean.item()!r}\n")
        if step % options.every == 0 or step == options.steps:
            save_checkpoint(options.folder, step, model, optimizer, settings=settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
