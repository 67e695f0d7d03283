# Made from book/26_draft_and_verify.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Draft and verify: a model judges in one step the tokens that a draft has guessed.

Derived in chapter 26, "Draft and verify" (book/26_draft_and_verify.ipynb).
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.cache import WindowCache
from attnlib.checks import CacheLike, require_count
from attnlib.generation import (
    Generators,
    adjustment,
    draw_token,
    ending,
    require_choice,
    require_drawable,
    token_probabilities,
)

# Makes probabilities (..., V) of logits (..., V), after a text (..., n).
Law = Callable[[Tensor, Tensor], Tensor]


def acceptance(
    p: Float[Tensor, "*batch vocab_size"],
    q: Float[Tensor, "*batch vocab_size"],
    guess: Int[Tensor, "*batch"],
) -> Float[Tensor, "*batch"]:
    """With which probability a guess that was drawn from q is kept, if p is wanted.

    Source: chapter 26, eq-accept; Leviathan et al. (2023).
    """
    wanted, offered = (law.gather(-1, guess[..., None])[..., 0] for law in (p, q))
    return (wanted / offered).clamp(max=1)


def residual(
    p: Float[Tensor, "*batch vocab_size"], q: Float[Tensor, "*batch vocab_size"]
) -> Float[Tensor, "*batch vocab_size"]:
    """The law from which is drawn where a guess was refused: what q lacks of p.

    Source: chapter 26, eq-draft-residual; Leviathan et al. (2023).
    """
    missing = (p - q).clamp(min=0)
    total = missing.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, missing / total, p)  # if q lacks nothing, none is refused


def judge(
    p: Float[Tensor, "*batch more vocab_size"],
    q: Float[Tensor, "*batch guesses vocab_size"],
    guesses: Int[Tensor, "*batch guesses"],
    generator: Generators = None,
    over: Bool[Tensor, "*batch"] | None = None,
) -> Int[Tensor, "*batch gained"]:
    """The tokens that one step brings: guesses that are kept, and one more.

    Args:
        p: the model's laws after the text and after each of k guesses, (..., k + 1, V).
        q: the laws from which the guesses were drawn, (..., k, V).
        guesses: shape (..., k).
        generator: one, or one for each sequence, or PyTorch's own.
        over: which texts have ended, and hold the others up no more.

    Returns:
        Shape (..., m + 1), where m is how many guesses all sequences keep.

    Source: chapter 26, eq-accept, eq-draft-residual, eq-expected-tokens.
    """
    k = guesses.shape[-1]
    kept = uniform(guesses, generator, p.dtype) < acceptance(p[..., :k, :], q, guesses)
    if over is not None:
        kept = kept | over[..., None]
    counts = kept.long().cumprod(dim=-1).sum(dim=-1)  # up to the first refusal
    m = min(counts.flatten().tolist(), default=k)  # of the text that keeps fewest
    if m == k:
        last = draw_token(p[..., k, :], generator)
    else:
        last = draw_token(residual(p[..., m, :], q[..., m, :]), generator)
        last = torch.where(kept[..., m, None], guesses[..., m, None], last)
    return torch.cat([guesses[..., :m], last.to(guesses.dtype)], dim=-1)


def uniform(
    like: Int[Tensor, "*batch guesses"], generator: Generators, dtype: torch.dtype
) -> Float[Tensor, "*batch guesses"]:
    """Numbers between 0 and 1, for each sequence by its own generator if there are several.

    Source: chapter 26.
    """
    options = {"dtype": dtype, "device": like.device}
    if not isinstance(generator, list | tuple):
        return torch.rand(like.shape, generator=generator, **options)
    count = like.shape[-1]
    rows = [torch.rand(count, generator=own, **options) for own in generator]
    return torch.stack(rows).view(like.shape) if rows else torch.rand(like.shape, **options)


def following(text: Sequence[int], count: int, longest: int = 3) -> list[int]:
    """What followed where the last tokens of a text were there before; [] if they were not.

    Args:
        text: its tokens.
        count: of how many tokens to guess; what follows may reach into the guesses.
        longest: how many of the last tokens to look for; if in vain, for fewer.

    Source: chapter 26; Saxena (2023).
    """
    for size in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):  # the latest place first
            if text[start : start + size] == text[-size:]:
                grown = list(text)
                for place in range(start + size, start + size + count):
                    grown.append(grown[place])
                return grown[len(text) :]
    return []


class NgramDraft:
    """Guesses what followed the last tokens of a text where they occurred before.

    Source: chapter 26; Saxena (2023).
    """

    def propose(
        self, ids: Int[Tensor, "*batch tokens"], count: int
    ) -> tuple[Int[Tensor, "*batch guesses"], None]:
        """`count` guesses for each sequence, or none if no sequence repeats anything.

        Returns:
            Guesses (..., k), and `None`, since they are certain.
        """
        texts = ids.view(-1, ids.shape[-1]).tolist()
        rows = [following(text, count) for text in texts]
        if not any(rows):
            return ids[..., :0], None
        rows = [row or [0] * count for row in rows]  # as good as any
        return ids.new_tensor(rows).view(*ids.shape[:-1], count), None


def law_of(
    logits: Float[Tensor, "*batch vocab_size"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """The probabilities with which `sample` draws; at temperature 0 one token has all.

    Source: chapter 26, eq-draft-laws; chapter 9, eq-temperature.
    """
    logits, temperature = require_drawable(logits, temperature, top_k, top_p, min_p)
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return token_probabilities(logits, temperature, top_k, top_p, min_p)


def laws(
    logits: Float[Tensor, "*batch more vocab_size"],
    ids: Int[Tensor, "*batch tokens"],
    guesses: Int[Tensor, "*batch guesses"],
    law: Law,
) -> Float[Tensor, "*batch more vocab_size"]:
    """The model's laws after the text and after each guess, one after the other.

    Source: chapter 26, eq-draft-laws.
    """
    found = []
    for i in range(guesses.shape[-1] + 1):
        text = torch.cat([ids, guesses[..., :i]], dim=-1)
        found.append(law(logits[..., i, :], text))
    return torch.stack(found, dim=-2)


@runtime_checkable
class Draft(Protocol):
    """What guesses: `NgramDraft`, `ModelDraft`, or one of your own.

    Source: chapter 26.
    """

    def propose(
        self, ids: Int[Tensor, "*batch tokens"], count: int
    ) -> tuple[
        Int[Tensor, "*batch guesses"], Float[Tensor, "*batch guesses vocab_size"] | None
    ]:
        """At most `count` guesses of what follows, and their laws; `None` if certain."""


def write_drafted(
    model: nn.Module,
    ids: Int[Tensor, "*batch tokens"],
    length: int,
    propose: Callable[..., tuple[Tensor, Tensor | None]],
    ahead: int,
    judged: Callable[..., Int[Tensor, "*batch gained"]],
    cache: Sequence[CacheLike],
    padding: Int[Tensor, " batch"] | None,
    ended: Callable[[Tensor], Bool[Tensor, "*batch"]],
) -> Int[Tensor, "*batch more_tokens"]:
    """The loop of `speculate`.

    Source: chapter 26, eq-draft-laws.
    """
    ids, end = ids.clone(), ids.shape[-1] + length
    over = torch.zeros_like(ids[..., -1], dtype=torch.bool)
    while ids.shape[-1] < end and not (over.numel() and over.all()):
        most = min(ahead, end - ids.shape[-1] - 1)  # one more comes for nothing
        guesses, q = propose(ids, most) if most else (ids[..., :0], None)
        read = torch.cat([ids, guesses], dim=-1)[..., len(cache[0]) :]
        logits = model(read, cache=cache, padding=padding, last=guesses.shape[-1] + 1)
        new = judged(logits, ids, guesses, q, over)
        for token in new.unbind(dim=-1):
            token = torch.where(over, ids[..., -1], token)  # what has ended stays as it is
            ids = torch.cat([ids, token[..., None]], dim=-1)
            over = over | ended(ids)
            if over.all():
                break
        for held in cache:
            held.truncate(ids.shape[-1] - 1)  # the last token is read in the next step
    return ids


def speculate(
    model: nn.Module,
    ids: Int[Tensor, "*batch tokens"],
    length: int,
    draft: str | int | nn.Module | Draft = "ngram",
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
    ahead: int = 4,
) -> Int[Tensor, "*batch more_tokens"]:
    """The given tokens, continued as `generate` does, several in a step where guesses fit.

    With temperature 0 the text is that of `generate`, up to ties within rounding. Otherwise
    it has the same law, but is another text with the same generator. In a batch all
    sequences go at the pace of the slowest, and so a text does depend on its company.

    Args:
        model: a `LanguageModel`.
        ids, length: as for `generate`.
        draft: where guesses come from: "ngram", which looks for them in the text; a number,
            of how many of the first blocks of the model guess; a faster model with the same
            vocabulary; or an object with a method `propose(ids, count)`, which returns
            guesses (..., k) and their laws (..., k, V), or `None` if they are certain.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, bias: see
            `stream`; they count for a model that guesses, too.
        generator, padding, stop, tokenizer: see `stream`.
        cache: the caches, one for each block, or `True`. A `WindowCache` needs a spare of
            at least ahead - 1, since what was refused is taken back.
        ahead: the most guesses in a step, at least 1.

    Returns:
        Texts of one length: one that has ended is filled with the token that ended it.

    Raises:
        TypeError, ValueError: see `stream`; an unknown draft, one with another vocabulary
            or too few positions, or guesses and laws that do not fit; no cache; a
            `WindowCache` with less spare; or caches for a batch together with stop, since
            they would not hold what is returned.

    Source: chapter 26, eq-speculation-exact; Leviathan et al. (2023), Chen et al. (2023).
    """
    if not hasattr(model, "start_writing"):
        raise TypeError(f"model: expected a LanguageModel, got {type(model).__name__}")
    own = cache is True
    cache, padding = model.start_writing(ids, length, cache, padding)
    require_choice(ids, temperature, top_k, top_p, min_p, generator)
    adjust = adjustment(model, repetition_penalty, presence_penalty, bias)
    ended = ending(stop, model, ids, tokenizer)
    apart = len(stop) > 0 and not own and ids.dim() == 2
    refuse_bad_caches(cache, ids.shape[-1] + length, require_count("ahead", ahead), apart)

    def law(logits, text):
        return law_of(adjust(logits, text, padding), temperature, top_k, top_p, min_p)

    def judged(logits, ids, guesses, q, over):
        p = laws(logits, ids, guesses, law)
        q = F.one_hot(guesses.long(), p.shape[-1]).to(p.dtype) if q is None else q
        return judge(p, q, guesses, generator, over)

    draft = draft_of(draft, model, ids, length, law, generator, padding)
    words = model.token_embedding.num_embeddings

    def propose(ids, count):
        return require_guesses(*draft.propose(ids, count), ids, count, words)

    loop = propose, ahead, judged, cache, padding, ended
    with torch.no_grad():
        return write_drafted(model, ids, length, *loop)


def draft_of(
    draft: str | int | nn.Module | Draft,
    model: nn.Module,
    ids: Int[Tensor, "*batch tokens"],
    length: int,
    law: Law,
    generator: Generators,
    padding: Int[Tensor, " batch"] | None,
) -> Draft:
    """What guesses, of what was asked for.

    Raises:
        TypeError, ValueError: see `speculate`.

    Source: chapter 26.
    """
    if draft == "ngram":
        return NgramDraft()
    if isinstance(draft, int) and not isinstance(draft, bool):
        draft = first_blocks(model, draft)
    if hasattr(draft, "start_writing"):
        mine, theirs = (m.token_embedding.num_embeddings for m in (model, draft))
        if mine != theirs:
            raise ValueError(f"draft: expected a vocabulary of {mine}, got one of {theirs}")
        caches, _ = draft.start_writing(ids, length, True, padding)
        return ModelDraft(draft, caches, law, generator, padding)
    if not isinstance(draft, Draft):
        raise TypeError(
            f'draft: expected "ngram", a number of blocks, a LanguageModel, or an object '
            f"with propose(ids, count), got {draft!r}"
        )
    return draft


def refuse_bad_caches(
    cache: Sequence[CacheLike] | None, tokens: int, ahead: int, apart: bool
) -> None:
    """Refuses caches that would not hold what is needed, or not what is returned.

    Raises:
        ValueError: there are none; texts that end apart are to be kept in given ones; or a
            ring's spare is too small, so that guesses would write over what is needed when
            one is refused, and the text is not short enough to do without.

    Source: chapter 26; chapter 18, eq-ring-place.
    """
    if cache is None:
        raise ValueError("cache: expected True or a list of caches, got False")
    if apart:
        raise ValueError("stop: expected none for a batch whose caches are given")
    for held in cache:
        if isinstance(held, WindowCache) and held.places < tokens:
            spare = held.places - held.window
            if spare < ahead - 1:
                least = f"at least ahead - 1 = {ahead - 1}"
                raise ValueError(f"cache: expected a spare of {least}, got {spare}")


def require_guesses(
    guesses: Tensor, q: Tensor | None, ids: Tensor, count: int, words: int
) -> tuple[Tensor, Tensor | None]:
    """Returns what a draft has proposed, the guesses in the dtype of the text.

    Raises:
        TypeError: guesses that are no integers, or laws that are no numbers.
        ValueError: guesses or laws of another shape, more of them than asked for, outside
            the vocabulary, or to which their laws give nothing.

    Source: chapter 26.
    """
    if not isinstance(guesses, Tensor) or guesses.dtype not in (torch.int32, torch.int64):
        got = guesses.dtype if isinstance(guesses, Tensor) else type(guesses).__name__
        raise TypeError(f"guesses: expected a tensor of integers, got {got}")
    if guesses.shape[:-1] != ids.shape[:-1] or guesses.shape[-1] > count:
        wanted = f"{(*ids.shape[:-1], count)}, or fewer at the end"
        raise ValueError(f"guesses: expected {wanted}, got shape {tuple(guesses.shape)}")
    if ((guesses < 0) | (guesses >= words)).any():
        raise ValueError(f"guesses: expected tokens below {words}, got {guesses.tolist()}")
    if q is not None:
        if not isinstance(q, Tensor) or not q.is_floating_point():
            got = q.dtype if isinstance(q, Tensor) else type(q).__name__
            raise TypeError(f"laws: expected floating-point numbers, or None, got {got}")
        if q.shape != (*guesses.shape, words):
            wanted = (*guesses.shape, words)
            raise ValueError(f"laws: expected shape {wanted}, got {tuple(q.shape)}")
        if not (q.gather(-1, guesses.long()[..., None]) > 0).all():
            raise ValueError(
                "laws: expected those from which the guesses were drawn, got 0"
            )
    return guesses.to(ids.dtype), q


def first_blocks(model: nn.Module, count: int) -> nn.Module:
    """The first blocks of a model, with its norm and its head; nothing is copied.

    Raises:
        ValueError: not at least one block, or not fewer than there are.

    Source: chapter 26.
    """
    count = require_count("draft", count, most=len(model.blocks) - 1)
    short = copy.copy(model)
    short._modules = dict(model._modules)  # or the model would lose its blocks, too
    short.blocks = model.blocks[:count]
    return short


class ModelDraft:
    """Lets another model guess, which has the same vocabulary and is faster.

    Args:
        model: a `LanguageModel`.
        caches: one for each of its blocks, empty.
        law: makes probabilities of logits and of the text before.
        generator, padding: see `speculate`.

    Source: chapter 26; Leviathan et al. (2023).
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[CacheLike],
        law: Law,
        generator: Generators = None,
        padding: Int[Tensor, " batch"] | None = None,
    ) -> None:
        self.model, self.caches, self.law = model, caches, law
        self.generator, self.padding = generator, padding
        self.read: Tensor | None = None  # what the caches hold

    def propose(
        self, ids: Int[Tensor, "*batch tokens"], count: int
    ) -> tuple[Int[Tensor, "*batch guesses"], Float[Tensor, "*batch guesses vocab_size"]]:
        """Guesses (..., count), and the laws from which they were drawn."""
        known, text, laws = self.forget_what_differs(ids), ids, []
        for _ in range(count):
            options = {"cache": self.caches, "padding": self.padding, "last": 1}
            logits = self.model(text[..., known:], **options)[..., -1, :]
            laws.append(self.law(logits, text))
            known = text.shape[-1]
            token = draw_token(laws[-1], self.generator).to(ids.dtype)
            text = torch.cat([text, token], dim=-1)
        self.read = text[..., :known]
        return text[..., ids.shape[-1] :], torch.stack(laws, dim=-2)

    def forget_what_differs(self, ids: Int[Tensor, "*batch tokens"]) -> int:
        """Keeps the beginning that the caches share with ids, and tells how long it is."""
        most = 0 if self.read is None else min(self.read.shape[-1], ids.shape[-1] - 1)
        if most:
            agree = (self.read[..., :most] == ids[..., :most]).view(-1, most).all(dim=0)
            most = int(agree.long().cumprod(dim=0).sum())
        for held in self.caches:
            held.truncate(most)
        return most
