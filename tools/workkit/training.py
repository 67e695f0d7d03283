"""The milestone of chapter 9, and what it shares with that of chapter 12."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn import functional as F

import attnlib

Say = Callable[[str], None]
TEXT = "\n\n".join(topics[name] for name in sorted(topics))
SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
WORDS = re.compile(r"\b[a-z]{3,}\b")


def english(say: Say) -> None:
    """The training of chapter 9, and 200 symbols that the model writes then."""
    (learn, test), steps = texts(), 600
    torch.manual_seed(7)
    model = attnlib.LanguageModel(len(SYMBOLS), 64, 128, num_heads=4, num_layers=2)

    def logits(ids: Tensor) -> Tensor:
        return model(ids, return_weights=True)[0]  # without: PyTorch's attention

    refuse_future(logits, test[:64])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))

    def step(lr: float) -> float:
        optimizer.param_groups[0]["lr"] = lr
        loss = loss_of(logits, pieces(learn, 64, 12))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    train(step, 4e-3, steps, say)
    with torch.no_grad():
        after = loss_of(logits, pieces(test, 64, 200)).item()
    start = torch.tensor([SYMBOLS.index(symbol) for symbol in "The "]).expand(5, 4)
    rows = model.generate(start, 200, temperature=0.7)
    written = ["".join(SYMBOLS[i] for i in row) for row in rows]
    most = max(written, key=lambda text: len(WORDS.findall(text)))
    say(f"\nIt writes five times; the one with the most words:\n\n{most}\n")
    compare(after, learn, test, say)
    words, found = set(WORDS.findall(TEXT)), WORDS.findall(" ".join(written))
    known = sum(word in words for word in found)
    say(f"Of the {len(found)} words in all five, {known} are words of the text.")
    enough = 4 * known > len(found) > 40  # of what follows from pairs, one in ten is
    assert enough, "what it writes is no English: too few of its words are words"


def texts() -> tuple[Tensor, Tensor]:
    """The text to learn from and the text to test with, as numbers."""
    number = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    ids = torch.tensor([number[symbol] for symbol in TEXT if symbol in number])
    return ids.tensor_split([len(ids) * 9 // 10])


def pieces(ids: Tensor, length: int, size: int) -> Tensor:
    """Pieces from random places, one symbol too long."""
    return ids[torch.randint(len(ids) - length, (size, 1)) + torch.arange(length + 1)]


def train(step: Callable[[float], float], largest: float, steps: int, say: Say) -> None:
    """Up in a tenth of the steps, then down to zero, as in the chapters."""
    for i in range(steps):
        fall = (1 + math.cos(math.pi * i / steps)) / 2
        loss = step(largest * min((i + 1) / (steps // 10), 1) * fall)
        if (i + 1) % (steps // 10) == 0:
            say(f"  step {i + 1} of {steps}: loss {loss:.2f}")


def loss_of(logits: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return F.cross_entropy(logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def compare(loss: float, learn: Tensor, test: Tensor, say: Say) -> None:
    """Beside a model that knows nothing and one that knows pairs of symbols."""
    count = len(SYMBOLS)
    pairs = torch.full((count, count), 0.1)
    pairs.index_put_((learn[:-1], learn[1:]), torch.ones(len(learn) - 1), accumulate=True)
    pair = -(pairs / pairs.sum(dim=1, keepdim=True)).log()[test[:-1], test[1:]].mean()
    say(f"Loss on a text that it has not seen: {loss:.2f}. A model that knows nothing")
    say(f"has {math.log(count):.2f}, one that knows what follows each symbol {pair:.2f}.")
    assert loss < pair, "it has not learned to look further back than one symbol"


def refuse_future(logits: Callable[[Tensor], Tensor], ids: Tensor) -> None:
    """What comes later changes nothing that was said before."""
    with torch.no_grad():
        gap = (logits(ids)[:32] - logits(ids[:32])).abs().max().item()
    assert gap < 1e-3, f"the model sees what comes later: a logit changes by {gap:.2g}"
