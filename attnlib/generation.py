# Made from book/09_transformer.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Writing: tokens drawn from the logits of a model, one after the other.

Derived in chapter 9, "The transformer" (book/09_transformer.ipynb).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnlib.checks import CacheLike, require_count, require_probability, require_sizes

# The source of randomness: one, or one for each sequence, or PyTorch's own.
Generators = torch.Generator | Sequence[torch.Generator] | None


def sample(
    logits: Float[Tensor, "*batch vocab_size"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    generator: Generators = None,
) -> Int[Tensor, "*batch 1"]:
    """Draws one token from softmax(logits / temperature).

    Args:
        logits: shape (vocab_size,) or (batch, vocab_size); -inf forbids a token.
        temperature: at least 0; 0 means the likeliest token.
        top_k: how many of the likeliest tokens may be drawn; `None` means all.
        top_p: the probability that those have together which may be drawn, above 0 and at
            most 1, see chapter 17; after `top_k`.
        min_p: the least probability of a token that may be drawn, as a part of that of the
            likeliest, between 0 and 1; after `top_p`.
        generator: the source of randomness, `None` means PyTorch's own; or a list with one
            for each sequence, whose token then does not depend on the others'.

    Raises:
        TypeError: logits that are no floating-point tensor, or a number that is none.
        ValueError: logits of another shape, with NaN or inf, or that forbid all tokens;
            temperature below 0, top_k below 1, top_p or min_p out of range; or another
            number of generators than of sequences.

    Source: chapter 9, eq-temperature; chapter 17, eq-top-p, eq-min-p.
    """
    logits, temperature = require_drawable(logits, temperature, top_k, top_p, min_p)
    require_generators(generator, logits.shape[:-1])
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    chances = token_probabilities(logits, temperature, top_k, top_p, min_p)
    return draw_token(chances, generator)


def token_probabilities(
    logits: Float[Tensor, "*batch vocab_size"],
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """With which probability `sample` draws each token, at a temperature above 0.

    Source: chapter 9, eq-temperature.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k)  # exactly so many, even of equal ones
        forbidden = torch.full_like(logits, -math.inf)
        logits = forbidden.scatter(-1, kept.indices, kept.values)
    logits = logits - logits.amax(dim=-1, keepdim=True)  # so that no quotient overflows
    logits = logits / temperature
    if top_p is not None or min_p is not None:
        from attnlib.logits import keep_likely  # chapter 17, which comes later

        logits = keep_likely(logits, top_p, min_p)
    return torch.softmax(logits, dim=-1)


def draw_token(
    probabilities: Float[Tensor, "*batch vocab_size"], generator: Generators
) -> Int[Tensor, "*batch 1"]:
    """A token drawn with these probabilities, by each sequence's generator if it has one.

    Source: chapter 9.
    """
    if probabilities.dim() == 1 and isinstance(generator, list | tuple):
        generator = generator[0]
    if not isinstance(generator, list | tuple) or not len(probabilities):
        one = generator if isinstance(generator, torch.Generator) else None
        return torch.multinomial(probabilities, 1, generator=one)
    pairs = zip(probabilities, generator, strict=True)
    return torch.stack([torch.multinomial(row, 1, generator=own) for row, own in pairs])


def require_generators(generator: Generators, shape: torch.Size) -> None:
    """Refuses what is no generator, and lists that have not one for each sequence.

    Raises:
        TypeError, ValueError: see `sample`.

    Source: chapter 9.
    """
    if generator is None or isinstance(generator, torch.Generator):
        return
    if not isinstance(generator, list | tuple) or not all(
        isinstance(one, torch.Generator) for one in generator
    ):
        raise TypeError(f"generator: expected torch.Generator or a list, got {generator!r}")
    if len(generator) != math.prod(shape):
        raise ValueError(
            f"generator: expected one for each of {math.prod(shape)} sequences, "
            f"got {len(generator)}"
        )


def require_drawable(
    logits: Float[Tensor, "*batch vocab_size"],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
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
    require_limits(temperature, top_k, top_p, min_p)
    if not logits.amax(dim=-1).isfinite().all():  # NaN wins, then inf; -inf if all are
        raise ValueError(
            "logits: expected finite numbers, or -inf for a token that must not be drawn, "
            "and one at least that may be in each row; got NaN, inf or a row of -inf"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    limits = torch.finfo(logits.dtype)
    divisor = min(max(temperature, limits.tiny), limits.max) if temperature else 0.0
    return logits, float(divisor)


def require_limits(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Refuses what does not say which tokens may be drawn.

    Raises:
        TypeError, ValueError: see `sample`.

    Source: chapter 9.
    """
    require_number("temperature", temperature)
    if not temperature >= 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if top_k is not None:
        require_sizes(top_k=top_k)
    if top_p is not None and not require_probability("top_p", top_p):
        raise ValueError("top_p: expected above 0, got 0")
    if min_p is not None:
        require_probability("min_p", min_p)


def require_choice(
    ids: Int[Tensor, "*batch tokens"],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    generator: Generators,
) -> None:
    """Refuses what does not say how the tokens of a text are to be drawn.

    Raises:
        TypeError, ValueError: see `stream`.

    Source: chapter 9.
    """
    require_limits(temperature, top_k, top_p, min_p)
    require_generators(generator, ids.shape[:-1])


def require_number(name: str, value: float) -> float:
    """Returns what is a number, and neither a truth value nor a tensor.

    Raises:
        TypeError: it is none.

    Source: chapter 9.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    return value


def write_tokens(
    model: nn.Module,
    ids: Int[Tensor, "*batch tokens"],
    length: int,
    draw: Callable[..., Int[Tensor, "*batch 1"]],
    cache: Sequence[CacheLike] | None,
    padding: Int[Tensor, " batch"] | None,
    ended: Callable[..., Bool[Tensor, "*batch"]],
    own: bool,
) -> Iterator[Int[Tensor, "*batch"]]:
    """The loop of `stream`; what has ended leaves the batch if the caches are our own.

    Source: chapter 9, eq-next-token.
    """
    plain = all(type(p) is nn.Parameter for p in model.parameters())
    # The first is faster, and FSDP2, whose parameters are of another type, refuses it.
    quiet = torch.inference_mode if plain else torch.no_grad
    rows = ... if ids.dim() == 1 else torch.arange(len(ids), device=ids.device)
    last, over = ids[..., -1], torch.zeros_like(ids[..., -1], dtype=torch.bool)
    for _ in range(length):
        with quiet():
            logits = model.last_logits(ids, cache, padding)  # (..., V)
            new = draw(logits, ids, padding, rows)[..., 0].to(ids.dtype)
        last = last.clone()  # the one before was handed out
        last[rows] = torch.where(over[rows], last[rows], new)
        yield last.clone()
        ids = torch.cat([ids, last[rows][..., None]], dim=-1)
        over[rows] |= ended(ids)
        if over.numel() and over.all():
            return
        if own and over[rows].any():
            left = (~over[rows]).nonzero()[:, 0]
            rows, ids = rows[left], ids[left]
            padding = None if padding is None else padding[left]
            for held in cache or ():
                held.select(left)


def stream(
    model: nn.Module,
    ids: Int[Tensor, "*batch tokens"],
    length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    bias: Mapping[int, float] | None = None,
    generator: Generators = None,
    cache: bool | Sequence[CacheLike] = True,
    padding: Int[Tensor, " batch"] | Sequence[int] | None = None,
    stop: Collection[int | str] = (),
    tokenizer: Any = None,
) -> Iterator[Int[Tensor, "*batch"]]:
    """Yields what a model writes, token by token, as soon as each is drawn.

    Without a cache, where the text has become longer than context_length, only its end is
    seen. Call `eval()` first if the model has dropout. The model runs in PyTorch's
    inference mode, or in `no_grad` if a parameter is of a type of its own, as a sharded one
    is: what a hook keeps can be learned from after `clone()`.

    Args:
        model: a `LanguageModel`.
        ids: the start, (n,) or (batch, n), at least one token.
        length: the most tokens to draw, at least 0, each by `sample`.
        temperature, top_k, top_p, min_p, generator: see `sample`.
        repetition_penalty, presence_penalty: what makes tokens of the text less likely, by
            a factor above 0 or by a difference; 1 and 0 change nothing, see chapter 17.
        bias: what is added to the logits of some tokens, after the penalties; -inf forbids
            a token.
        cache: whether to keep keys and values, so that each step computes one token: the
            same tokens in less time. Or the caches themselves, one for each block; what
            they hold must be the beginning of ids, and is not computed again.
        padding: how many columns at the front of each sequence, (batch,), hold no token, so
            that sequences of a batch may differ in length.
        stop: the tokens that end a text, as ids, and texts that do, wherever they come in
            what is written; none by default. A sequence that has ended is computed no
            longer, unless caches were given: they keep all sequences.
        tokenizer: what `decode` makes a text of a list of ids, for texts in stop.

    Yields:
        The next token of each sequence, shape () or (batch,): of one that has ended, again
        the token that ended it. Nothing more when all have ended.

    Raises:
        TypeError, ValueError: at once, and not at the first token: see `forward` of the
            model and `sample`; a length below 0; no token to start from; a token of bias or
            stop that is outside the vocabulary, a bias that is no number or forbids all;
            an empty text in stop, or texts without a tokenizer; stop with sharded
            parameters, whose ranks have to take equally many steps; or with a cache, more
            tokens than context_length or the caches have room for.

    Source: chapter 9, eq-next-token, eq-temperature; chapter 17.
    """
    if not hasattr(model, "start_writing"):
        raise TypeError(f"model: expected a LanguageModel, got {type(model).__name__}")
    own = isinstance(cache, bool)
    cache, padding = model.start_writing(ids, length, cache, padding)
    limits = temperature, top_k, top_p, min_p
    require_choice(ids, *limits, generator)
    adjust = adjustment(model, repetition_penalty, presence_penalty, bias)
    each = ids.dim() == 2 and isinstance(generator, list | tuple)

    def draw(logits, ids, padding, rows):
        chosen = [generator[i] for i in rows] if each else generator
        return sample(adjust(logits, ids, padding), *limits, chosen)

    ended = ending(stop, model, ids, tokenizer)
    return write_tokens(model, ids, length, draw, cache, padding, ended, own)


def adjustment(
    model: nn.Module,
    repetition_penalty: float,
    presence_penalty: float,
    bias: Mapping[int, float] | None,
) -> Callable[..., Float[Tensor, "*batch vocab_size"]]:
    """What is done to logits before the draw: a function of them, the text, and padding.

    Raises:
        TypeError, ValueError: see `stream`.

    Source: chapter 9.
    """
    if not 0 < require_number("repetition_penalty", repetition_penalty) < math.inf:
        got = f"above 0 and finite, got {repetition_penalty}"
        raise ValueError(f"repetition_penalty: expected a number {got}")
    if not math.isfinite(require_number("presence_penalty", presence_penalty)):
        raise ValueError(f"presence_penalty: expected finite, got {presence_penalty}")
    if bias is not None and not isinstance(bias, Mapping):
        raise TypeError(f"bias: expected numbers by token, or None, got {bias!r}")
    if repetition_penalty == 1 and presence_penalty == 0 and not bias:
        return lambda logits, ids, padding: logits
    from attnlib.logits import bias_of, penalize  # chapter 17, which comes later

    added = bias_of(bias or {}, model.token_embedding.num_embeddings)

    def adjust(logits, ids, padding):
        penalties = repetition_penalty, presence_penalty
        return penalize(logits, ids, *penalties, padding) + added.to(logits.device)

    return adjust


def ending(
    stop: Collection[int | str],
    model: nn.Module,
    ids: Int[Tensor, "*batch tokens"],
    tokenizer: Any,
) -> Callable[[Tensor], Bool[Tensor, "*batch"]]:
    """Returns a function of texts (..., n): whether each has ended with its last token.

    Raises:
        TypeError, ValueError: see `stream`.

    Source: chapter 9.
    """
    if isinstance(stop, str | bytes) or not isinstance(stop, Collection):
        raise TypeError(f"stop: expected a list of token ids or texts, got {stop!r}")
    most, start = model.token_embedding.num_embeddings - 1, ids.shape[-1]
    texts = [end for end in stop if isinstance(end, str)]
    ends = [end for end in stop if not isinstance(end, str)]
    ends = [require_count("stop", end, least=0, most=most) for end in ends]
    ends = torch.tensor(ends, dtype=ids.dtype, device=ids.device)
    if "" in texts:
        raise ValueError("stop: expected no empty text, which is in every text")
    if texts and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"tokenizer: expected one with decode for texts of stop, got {tokenizer!r}"
        )
    if len(stop) and any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise ValueError(
            "stop: expected none where parameters are sharded, since all ranks have to "
            "take equally many steps"
        )

    def ended(ids):
        over = torch.isin(ids[..., -1], ends)
        if texts:
            rows = ids[..., start:].reshape(-1, ids.shape[-1] - start).tolist()
            written = [tokenizer.decode(row) for row in rows]
            found = [any(end in text for end in texts) for text in written]
            over = over | torch.tensor(found, device=ids.device).view(over.shape)
        return over

    return ended


def as_text(tokens: Iterable[Int[Tensor, ""]], tokenizer: Any) -> Iterator[str]:
    """Yields the words of one text as its tokens come, in whole characters.

    A character may be made of several tokens; if some are missing at the end, U+FFFD comes.

    Args:
        tokens: as `stream` yields them for one sequence.
        tokenizer: what `decode` makes a text of a list of ids.

    Source: chapter 9.
    """
    read, shown, text = [], "", ""
    for token in tokens:
        read.append(int(token))
        text = tokenizer.decode(read)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    if text != shown:
        yield text[len(shown) :]
