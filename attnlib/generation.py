# Made from book/09_transformer.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Writing: one token drawn from the logits of a model.

Derived in chapter 9, "The transformer" (book/09_transformer.ipynb).
"""

import math
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnlib.checks import require_sizes


def sample(
    logits: Float[Tensor, "*batch vocab_size"],
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "*batch 1"]:
    """Draws one token from softmax(logits / temperature).

    Args:
        logits: shape (vocab_size,) or (batch, vocab_size); -inf forbids a token.
        temperature: at least 0; 0 means the likeliest token.
        top_k: how many of the likeliest tokens may be drawn; `None` means all.
        generator: the source of randomness; `None` means PyTorch's own.

    Raises:
        TypeError: logits that are no floating-point tensor, or a number that is none.
        ValueError: logits of another shape, with NaN or inf, or that forbid all tokens;
            temperature below 0, or top_k below 1.

    Source: chapter 9, eq-temperature.
    """
    logits, temperature = require_drawable(logits, temperature, top_k)
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k)  # exactly so many, even of equal ones
        forbidden = torch.full_like(logits, -math.inf)
        logits = forbidden.scatter(-1, kept.indices, kept.values)
    logits = logits - logits.amax(dim=-1, keepdim=True)  # so that no quotient overflows
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)


def require_drawable(
    logits: Float[Tensor, "*batch vocab_size"], temperature: float, top_k: int | None
) -> tuple[Float[Tensor, "*batch vocab_size"], float]:
    """Returns logits in float32 at least, and a temperature by which they can be divided.

    Raises:
        TypeError, ValueError: see `sample`.

    Source: chapter 9.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits: expected a floating-point tensor, got {got}")
    if logits.dim() not in (1, 2) or not logits.shape[-1]:
        raise ValueError(
            "logits: expected (vocab_size,) or (batch, vocab_size), got shape "
            f"{tuple(logits.shape)}"
        )
    if not isinstance(temperature, Real) or isinstance(temperature, bool):
        raise TypeError(f"temperature: expected a number, got {temperature!r}")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if top_k is not None:
        require_sizes(top_k=top_k)
    if not logits.amax(dim=-1).isfinite().all():  # NaN wins, then inf; -inf if all are
        raise ValueError(
            "logits: expected finite numbers, or -inf for a token that must not be drawn, "
            "and one at least that may be in each row; got NaN, inf or a row of -inf"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    limits = torch.finfo(logits.dtype)
    divisor = min(max(temperature, limits.tiny), limits.max) if temperature else 0.0
    return logits, float(divisor)
