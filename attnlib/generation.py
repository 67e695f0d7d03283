# Made from book/09_transformer.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Writing: one token drawn from the logits of a model.

Derived in chapter 9, "The transformer" (book/09_transformer.ipynb).
"""

import math

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
        logits: shape (vocab_size,) or (batch, vocab_size).
        temperature: at least 0; 0 means the likeliest token.
        top_k: how many of the likeliest tokens may be drawn; `None` means all.
        generator: the source of randomness; `None` means PyTorch's own.

    Raises:
        ValueError: temperature below 0, or top_k below 1.

    Source: chapter 9, eq-temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if top_k is not None:
        require_sizes(top_k=top_k)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)
