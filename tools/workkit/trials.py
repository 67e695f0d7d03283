"""What a milestone tries on the reader's package, in the process of `runner.py`.

A trial says what is to be seen, and an AssertionError what is not reached.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

import attnlib
from attnlib.testing import check_attention
from workkit.by_hand import backward
from workkit.places import place_of
from workkit.training import Say, english


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


TRIALS = {
    "attention": attention,
    "english": english,
    "backward": backward,
    "tiles": tiles,
    "kernel": kernel,
}
