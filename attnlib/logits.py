# Made from book/17_cache.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Logits before the draw: which tokens may be drawn, and which are made less likely.

Derived in chapter 17, "A cache" (book/17_cache.ipynb).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def keep_top_p(
    logits: Float[Tensor, "*batch vocab_size"], mass: float
) -> Float[Tensor, "*batch vocab_size"]:
    """Forbids all but the fewest of the likeliest tokens whose probabilities reach `mass`.

    Source: chapter 17, eq-top-p; Holtzman et al. (2020).
    """
    if mass == 1:  # a sum of rounded numbers may reach 1 before its end
        return logits
    chance, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    kept = chance.cumsum(dim=-1) - chance < mass  # what those before it have together
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    return logits.masked_fill(~kept, -math.inf)


def keep_min_p(
    logits: Float[Tensor, "*batch vocab_size"], least: float
) -> Float[Tensor, "*batch vocab_size"]:
    """Forbids tokens with less than the part `least` of the likeliest one's probability.

    Source: chapter 17, eq-min-p; Nguyen et al. (2025).
    """
    if least == 0:
        return logits
    lowest = logits.amax(dim=-1, keepdim=True) + math.log(least)
    return logits.masked_fill(logits < lowest, -math.inf)


def keep_likely(
    logits: Float[Tensor, "*batch vocab_size"], top_p: float | None, min_p: float | None
) -> Float[Tensor, "*batch vocab_size"]:
    """Both cuts, one after the other; `None` forbids nothing.

    Source: chapter 17, eq-top-p, eq-min-p.
    """
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return logits if min_p is None else keep_min_p(logits, min_p)


def penalize(
    logits: Float[Tensor, "*batch vocab_size"],
    ids: Int[Tensor, "*batch tokens"],
    penalty: float,
    padding: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """Makes the tokens of a text less likely to come again, however often they are in it.

    Args:
        logits: shape (vocab_size,) or (batch, vocab_size).
        ids: the text so far, (n,) or (batch, n).
        penalty: above 0; above 1 makes them less likely, below 1 likelier.
        padding: how many columns at the front of each sequence hold no token.

    Source: chapter 17, eq-repetition-penalty; Keskar et al. (2019).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = ids.long()
    if padding is not None:  # count the last token again in place of what is none
        columns = torch.arange(ids.shape[-1], device=ids.device)
        ids = torch.where(columns < padding[:, None], ids[:, -1:], ids)
    seen = logits.gather(-1, ids)
    seen = torch.where(seen > 0, seen / penalty, seen * penalty)
    return logits.scatter(-1, ids, seen)
