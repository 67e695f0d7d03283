# Made from book/17_cache.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Logits before the draw: which tokens may be drawn, and which are made less likely.

Derived in chapter 17, "A cache" (book/17_cache.ipynb).
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnlib.checks import require_count


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
    factor: float = 1.0,
    difference: float = 0.0,
    padding: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """Makes the tokens of a text less likely to come again, however often they are in it.

    Args:
        logits: shape (vocab_size,) or (batch, vocab_size).
        ids: the text so far, (n,) or (batch, n).
        factor: above 0; above 1 makes them less likely, below 1 likelier.
        difference: what is taken from their logits after that; below 0 makes them likelier.
        padding: how many columns at the front of each sequence hold no token.

    Source: chapter 17, eq-repetition-penalty, eq-presence-penalty; Keskar et al. (2019).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = ids.long()
    if padding is not None:  # count the last token again in place of what is none
        columns = torch.arange(ids.shape[-1], device=ids.device)
        ids = torch.where(columns < padding[:, None], ids[:, -1:], ids)
    seen = logits.gather(-1, ids)
    seen = torch.where(seen > 0, seen / factor, seen * factor) - difference
    return logits.scatter(-1, ids, seen)


def bias_of(bias: Mapping[int, float], words: int) -> Float[Tensor, " words"]:
    """What is added to the logits of a vocabulary of `words` tokens.

    Args:
        bias: a number by token, finite or -inf, which forbids it.

    Raises:
        TypeError: a token or number that is none.
        ValueError: a token outside the vocabulary; NaN or inf; all tokens are forbidden.

    Source: chapter 17, eq-logit-bias.
    """
    added = torch.zeros(words)
    for token, number in bias.items():
        place = require_count("bias", token, least=0, most=words - 1)
        if not isinstance(number, Real) or isinstance(number, bool):
            raise TypeError(f"bias: expected a number for token {place}, got {number!r}")
        added[place] = torch.tensor(number, dtype=torch.float64).float()  # 1e300: inf
        if not added[place] < math.inf:
            raise ValueError(
                f"bias: expected a finite number, or -inf, for token {place}, got {number}"
            )
    if not added.isfinite().any():
        raise ValueError("bias: expected one token at least that is not forbidden")
    return added


def log_probabilities(
    model: nn.Module,
    ids: Int[Tensor, "*batch tokens"],
    padding: Int[Tensor, " batch"] | Sequence[int] | None = None,
) -> Float[Tensor, "*batch predictions"]:
    """The logarithm of the probability that a model gives to each token after the first.

    Minus their mean is the loss of a text. Nothing is drawn, so no temperature, penalty or
    bias counts.

    Args:
        model: a `LanguageModel`.
        ids: texts of n >= 1 tokens, (n,) or (batch, n).
        padding: how many columns at the front of each text, (batch,), hold no token.

    Returns:
        Shape (..., n - 1), with gradients; 0 where the token or the one before it is none.

    Raises:
        TypeError, ValueError: see `forward` of the model.

    Source: chapter 17; chapter 9, eq-next-token.
    """
    logits = model(ids, padding=padding)[..., :-1, :]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = torch.log_softmax(wide, dim=-1).gather(-1, ids[..., 1:, None].long())[..., 0]
    if padding is None:
        return found
    places = torch.arange(found.shape[-1], device=ids.device)
    none = places < torch.as_tensor(padding, device=ids.device)[:, None]
    return found.masked_fill(none, 0.0)
