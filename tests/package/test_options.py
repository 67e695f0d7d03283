"""Options that change the numbers are declared; trained models refuse others by name."""

import inspect
from functools import partial

import pytest
import torch

import attnlib.parallel  # noqa: F401  (its attentions are subclasses, too)
from attnlib import GPT2, BaseAttention, Llama, LlamaConfig, ScaledDotProductAttention, hf
from attnlib.linear import LinearAttention

VALUES = [
    True,
    2,
    0.3,
    "torch",
    "zigzag",
    torch.exp,
    lambda query, blocks: -query @ blocks.mean(dim=-2).mT,  # a score of blocks,
    lambda batch, head, query, key: query != key,  # a mask
    lambda score, *places: 2 * score,  # and a score as programs
]  # tried for each option; some are refused
SET = {"window": 3, "scale": 9.0, "softcap": 2.0}


def kinds(parent=BaseAttention):
    for kind in parent.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_each_option_that_is_declared_is_tried():
    assert BaseAttention.neutral.keys() == SET.keys() | {"causal", "dropout"}


OPTIONS = [
    pytest.param(kind, name, id=f"{kind.__name__}-{name}")
    for kind in kinds()
    if kind.__module__.startswith("attnlib") and not inspect.isabstract(kind)
    for name in inspect.signature(kind).parameters
    if name not in ("num_heads", "group")  # the sizes of a parameter; who computes
]


def numbers(attention):
    generator = torch.Generator().manual_seed(3)
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64, generator=generator)
    torch.manual_seed(4)  # of dropout
    return attention.double()(query, key, value)[0]


@pytest.mark.parametrize(("kind", "name"), OPTIONS)
def test_what_changes_the_numbers_is_declared(kind, name):
    parameters = inspect.signature(kind).parameters
    needed = {"num_heads": 2} if "num_heads" in parameters else {}
    plain, changes, tried = numbers(kind(**needed)), False, 0
    for value in VALUES:
        try:
            found = numbers(kind(**needed, **{name: value}))
        except (TypeError, ValueError):
            continue
        tried += value != parameters[name].default
        changes |= not torch.allclose(found, plain)
    assert tried
    assert changes == (name in kind.neutral), f"{name} changes the numbers: {changes}"
    if changes and kind is not LinearAttention:  # whose numbers are never softmax's
        assert parameters[name].default == kind.neutral[name]


def test_trained_models_refuse_heads_of_another_kind():
    with pytest.raises(ValueError, match="without feature"):
        hf.register("linear", LinearAttention())


class Own(ScaledDotProductAttention):
    """A class of a reader's own, which declares nothing, and one option of the field's."""

    def __init__(self, name="scale", value=9.0):
        super().__init__(causal=True)
        setattr(self, name, value)


class Sloped(Own):
    """One that declares an option which nobody else has."""

    neutral = BaseAttention.neutral | {"slope": 0.0}


class Around(BaseAttention):
    """One that has another as a part."""

    def __init__(self, part):
        super().__init__()
        self.causal, self.part = True, part

    def forward(self, query, key, value, mask=None):
        return self.part(query, key, value, mask)


HEADS = {
    **{name: (Own(name, value), name, value) for name, value in SET.items()},
    "scale 0": (Own("scale", 0.0), "scale", 0.0),
    "declared": (Sloped("slope", 0.5), "slope", 0.5),
    "one of four": ([Own("scale", None)] * 3 + [Own()], "scale", 9.0),
    "a part": (Around(Own()), "scale", 9.0),
    "a part that declares": (Around(Sloped("slope", 0.5)), "slope", 0.5),
    "a class": (Own, "scale", 9.0),
}


SIZES = {"vocab_size": 11, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture(params=[GPT2, Llama])
def load(request, tmp_path):
    transformers = pytest.importorskip("transformers")
    if request.param is GPT2:
        config = transformers.GPT2Config(**SIZES, hidden_size=16, n_positions=8)
    else:
        config = transformers.LlamaConfig(**SIZES, hidden_size=16, intermediate_size=16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return lambda heads: request.param.from_pretrained(tmp_path, attention=heads)


@pytest.mark.parametrize("case", HEADS)
def test_a_trained_model_refuses_what_it_was_not_trained_with(case, load):
    heads, name, value = HEADS[case]
    wanted = Sloped.neutral[name]
    with pytest.raises(
        ValueError, match=f"attention: expected {name}={wanted}, got {value}"
    ):
        load(heads)


def test_a_trained_model_takes_what_changes_nothing(load):
    ids = torch.arange(8)
    expected = load(None)(ids)
    dropping = ScaledDotProductAttention(dropout=0.5, causal=True)  # in training only
    for heads in (dropping, Around(dropping), Sloped("slope", 0.0), Own("scale", None)):
        assert torch.allclose(load(heads)(ids), expected, atol=1e-5)


@pytest.mark.parametrize("case", sorted(HEADS.keys() - {"a class", "one of four"}))
def test_a_guest_says_none_of_what_the_model_says(case):
    guest, name, value = HEADS[case]
    for part in guest.modules():
        part.causal = False
    with pytest.raises(ValueError, match=f"without {name}, .* got {name}={value}"):
        hf.register("guest", guest)


@pytest.mark.parametrize("window", [None, 3])
def test_a_class_has_the_window_of_its_model(window):
    class Windowed(ScaledDotProductAttention):
        def __init__(self):
            super().__init__(causal=True, window=window)

    config = partial(LlamaConfig, 7, 9, embed_dim=16, num_heads=4, num_layers=1, d_ff=12)
    Llama(config(window=window), Windowed)
    other = 3 if window is None else None
    with pytest.raises(ValueError, match=f"expected window={other}, got {window}"):
        Llama(config(window=other), Windowed)
