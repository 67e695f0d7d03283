"""What a milestone tries on the reader's package, in the process of `runner.py`.

A trial says what is to be seen, and an AssertionError what is not reached.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pydoc_data.topics import topics
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import attnlib
from attnlib import backprop
from attnlib.testing import check_attention
from workkit.errors import place_of

Say = Callable[[str], None]
TEXT = "\n\n".join(topics[name] for name in sorted(topics))
SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
WORDS = re.compile(r"\b[a-z]{3,}\b")


def attempt(name: str, tell: Callable) -> list[str]:
    """Why a trial failed, or nothing; what it says is printed for the process that waits.

    `tell` hears each time that it still goes on.
    """
    sys.__stdout__.reconfigure(encoding="utf-8")

    def say(line: str) -> None:
        tell(f"the milestone {name}", [], 0.0)
        print(line, file=sys.__stdout__, flush=True)

    tell(f"the milestone {name}", [], 0.0)
    try:
        TRIALS[name](say)
    except AssertionError as error:
        return [str(error) or place_of(error)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}", place_of(error)]
    return []


def attention(say: Say) -> None:
    """The suite of appendix A, and the numbers of PyTorch's function."""
    made = attnlib.ScaledDotProductAttention
    for options in ({}, {"causal": True}, {"dropout": 0.5, "scale": 0.3}):
        check_attention(functools.partial(made, **options))
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        say(f"check_attention: ScaledDotProductAttention({given}) keeps the contract.")
    torch.manual_seed(5)
    Q, K, V = (torch.randn(2, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    seen = torch.ones(5, 7, dtype=torch.bool).tril(7 - 5)
    theirs = F.scaled_dot_product_attention(Q, K, V, seen)
    scores = attnlib.apply_mask(Q @ K.mT / math.sqrt(8), attnlib.causal_mask(5, 7))
    for name, output in {
        "the class, causal,": made(causal=True)(Q, K, V)[0],
        "apply_mask, causal_mask and masked_softmax": attnlib.masked_softmax(scores) @ V,
    }.items():
        gap = (output - theirs).abs().max().item()
        say(f"{name}: largest difference to PyTorch's function {gap:.0e}")
        assert gap < 1e-12, f"{name}: off by up to {gap:.2g} from PyTorch's function"


def tiles(say: Say) -> None:
    """Chapter 14 against plain attention, in float64."""
    attend = functools.partial(attnlib.flash_attention, block_size=(16, 24))
    say("Your flash_attention in tiles of 16 × 24, and the formula in float64.")
    beside_oracle(attend, torch.float64, 1e-12, say)


def kernel(say: Say) -> None:
    """Chapter 15 against the plain formula, in Triton's interpreter."""
    assert find_spec("triton"), "Triton is not installed here; it is made for Linux"
    say("Your kernels in float32, in Triton's interpreter, and the formula in float64.")
    beside_oracle(attnlib.flash_attention_triton, torch.float32, 2e-5, say)


def beside_oracle(attend: Callable, dtype: torch.dtype, within: float, say: Say) -> None:
    """Outputs, log-sum-exp and gradients, of sizes that fill no block."""
    torch.manual_seed(5)
    names = ("output", "lse", "dQ", "dK", "dV")
    for causal, (N, M, d_k, d_v) in (
        (False, (33, 65, 16, 16)),
        (True, (40, 70, 24, 40)),
        (True, (65, 65, 16, 16)),
    ):
        shapes = (N, d_k), (M, d_k), (M, d_v)
        inputs = [torch.randn(2, *s, dtype=dtype).requires_grad_() for s in shapes]
        coming = torch.randn(2, N, d_v), torch.randn(2, N)
        found = attend(*inputs, causal=causal, return_lse=True)
        found += torch.autograd.grad(found, inputs, [x.to(dtype) for x in coming])
        exact = [x.detach().double().requires_grad_() for x in inputs]
        wanted = oracle(*exact, causal)
        wanted += torch.autograd.grad(wanted, exact, [x.double() for x in coming])
        gaps = [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]
        case = f"{N} queries, {M} keys, {'causal' if causal else 'all seen'}"
        told = ", ".join(f"{n} {g:.0e}" for n, g in zip(names, gaps, strict=True))
        say(f"{case}: the largest differences are\n  {told}")
        for name, gap, right in zip(names, gaps, wanted, strict=True):
            allowed = within * max(1.0, right.abs().max().item())
            assert gap <= allowed, (
                f"{case}: {name} is off by up to {gap:.2g}, {allowed:.0e} are allowed"
            )


def oracle(Q: Tensor, K: Tensor, V: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the formula, with PyTorch's functions alone."""
    scores = Q @ K.mT / math.sqrt(Q.shape[-1])
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~seen.tril(K.shape[-2] - Q.shape[-2]), -math.inf)
    return scores.softmax(dim=-1) @ V, scores.logsumexp(dim=-1)


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


def backward(say: Say) -> None:
    """The training of chapter 12, without autograd; and first its gradients beside it."""
    learn, test = texts()
    rng = np.random.default_rng(4)
    model = backprop.LanguageModel(len(SYMBOLS), 24, 48, num_heads=4, num_layers=2, rng=rng)
    torch.manual_seed(7)
    beside_autograd(model, pieces(learn, 24, 4), say)
    model = backprop.cast(model, np.float32)
    optimizer, cross_entropy = backprop.Adam(model, lr=1e-2), backprop.CrossEntropy()

    def loss_of(batch: Tensor) -> float:
        ids = batch.numpy()
        return float(cross_entropy.forward(model.forward(ids[:, :-1]), ids[:, 1:]))

    def step(lr: float) -> float:
        optimizer.lr = lr
        loss = loss_of(pieces(learn, 24, 16))
        model.backward(cross_entropy.backward())
        optimizer.step()
        return loss

    held_out = pieces(test, 24, 200)
    say(f"Loss before the training: {loss_of(held_out):.2f}")
    refuse = mock.Mock(side_effect=AssertionError("PyTorch's autograd was called"))
    with mock.patch.multiple(torch.autograd, grad=refuse, backward=refuse):
        train(step, 1e-2, 400, say)
    compare(loss_of(held_out), learn, test, say)


def beside_autograd(model: backprop.LanguageModel, batch: Tensor, say: Say) -> None:
    """Logits and gradients by hand, and by PyTorch's functions and its autograd."""
    ids, cross_entropy = batch.numpy(), backprop.CrossEntropy()
    logits = model.forward(ids[:, :-1])
    cross_entropy.forward(logits, ids[:, 1:])
    model.backward(cross_entropy.backward())
    arrays = {n: torch.tensor(p).requires_grad_() for n, p in model.parameters().items()}
    theirs = by_pytorch(arrays, batch[:, :-1], len(model.blocks), heads=4)
    gap = np.abs(logits - theirs.detach().numpy()).max()
    assert gap < 1e-9, f"its logits differ from those of PyTorch's functions by {gap:.1g}"
    loss = F.cross_entropy(theirs.flatten(0, 1), batch[:, 1:].flatten())
    judged = dict(zip(arrays, torch.autograd.grad(loss, [*arrays.values()]), strict=True))
    gaps = {n: np.abs(g - judged[n].numpy()).max() for n, g in model.gradients().items()}
    worst = max(gaps, key=gaps.__getitem__)
    said = f"{len(gaps)} gradients by hand, beside autograd's"
    say(f"{said}: the largest difference is {gaps[worst]:.0e}.")
    wrong = f"the gradient of {worst} is not autograd's: off by {gaps[worst]:.1g}"
    assert gaps.keys() == arrays.keys() and gaps[worst] < 1e-10, wrong


def by_pytorch(arrays: dict[str, Tensor], ids: Tensor, blocks: int, heads: int) -> Tensor:
    """The logits of chapter 9's model, with PyTorch's functions alone."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, arrays[f"{name}.W"].T, arrays[f"{name}.b"])

    def norm(name: str, x: Tensor) -> Tensor:
        gamma, beta = arrays[f"{name}.gamma"], arrays[f"{name}.beta"]
        return F.layer_norm(x, gamma.shape, gamma, beta)

    table = arrays["token_embedding.weight"]
    x = table[ids] + arrays["positions"][: ids.shape[-1]]
    for block in (f"blocks.{i}" for i in range(blocks)):
        normed, at = norm(f"{block}.norm_1", x), f"{block}.attention"
        qkv = (linear(f"{at}.{role}_proj", normed) for role in "qkv")
        split = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in qkv)
        read = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + linear(f"{at}.out_proj", read.transpose(1, 2).flatten(2))
        hidden = linear(f"{block}.feed_forward.linear_1", norm(f"{block}.norm_2", x))
        x = x + linear(f"{block}.feed_forward.linear_2", hidden.relu())
    return norm("norm", x) @ table.T


TRIALS = {
    "attention": attention,
    "english": english,
    "backward": backward,
    "tiles": tiles,
    "kernel": kernel,
}
