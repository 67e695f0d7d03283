"""What is left out has one value wherever its name occurs, and namesakes agree."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import attnlib
from attnlib import backprop, parallel
from attnlib.gpt2 import gelu_tanh
from attnlib.linear import elu_plus_one
from attnlib.sparse import box_scores

FLAGS = (
    *("causal", "return_lse", "enable_gqa", "return_weights", "interleaved", "summed"),
    *("cache", "tied", "transposed", "dqv_bias", "qkv_bias", "out_bias", "ffn_bias"),
    *("head_norm", "grouped"),
)
USUAL = {
    **dict.fromkeys(FLAGS, False),
    **{"need_weights": True, "bias": True, "norm_first": True, "mode": True},
    **{"dropout": 0.0, "eps": 1e-5, "activation": torch.relu, "num_heads": 1},
    **{"temperature": 1.0, "strength": 1.0, "floor": 0.01, "max_distance": 16},
    **{"base": 10000.0, "factor": 1.0, "magnitude": 1.0, "positions": 0, "rotary": True},
    **{"lr": 1e-3, "betas": (0.9, 0.999), "momentum": 0.0, "below": float("inf")},
    **{"step": 1e-3, "tolerance": 1e-8, "seed": 0, "dims": 1, "least": 1},
    **{"backend": "auto", "split_size": 256, "where": "", "name": "attnlib"},
    **{"dim": 0, "hops": 1, "problem": "", "pieces": 8, "timeout": 60.0, "keep": 2},
    "wait": 10.0,
    **{"order": "contiguous", "prefix": "", "ignored": (), "after": 2.0},
    **{"queries": 4, "keys": 6, "leading": (), "dtype": torch.float64, "steps": ()},
    "dtypes": (torch.float32, torch.float16, torch.bfloat16),
    **{"ignore": (), "held": (), "repetition_penalty": 1.0, "stop": ()},
    **{"presence_penalty": 0.0, "difference": 0.0, "file": "config.json"},
    **{"page_size": 16, "at_once": 8, "piece": 64, "feature": elu_plus_one},
    **{"block": 16, "score": box_scores, "window": 64, "block_size": 128},
    **{"spare": 0, "bits": 8, "group": 32, "longest": 3, "draft": "ngram", "ahead": 4},
}
# By the function or the class, where it is another.
SMALL, NO_BIAS, PAGES = {"eps": 1e-6}, {"bias": False}, {"causal": True}
OTHERS = {
    **{"RMSNorm": SMALL, "RMSNormLayer": SMALL, "LlamaConfig": SMALL},
    **{"Adam": {"eps": 1e-8}, "complex_step": {"step": 1e-30}},
    **{"rank_gradients": {"step": 1e-6}, "require_padding": {"least": 0}},
    **{"GatedFeedForwardLayer": NO_BIAS},
    "GatedFeedForward": {**NO_BIAS, "activation": torch.nn.functional.silu},
    **{"GPT2": {"activation": gelu_tanh}, "LanguageModel": {"positions": "learned"}},
    **{"paged_attention": PAGES, "paged_attention_triton": PAGES},
    **{"shard_positions": {"order": "zigzag"}, "stream": {"cache": True}},
    **{"speculate": {"cache": True}, "delta_rule_by_feature": {"piece": 16}},
    **{f"{x}Attention:forward": {"enable_gqa": True} for x in ("Ring", "Head")},
    **{"ChosenAttention": {"keep": 16}, "three_branches": {"keep": 16}},
    "check_attention": {"leading": ((), (3,), (2, 2))},
    "check_cache": {"leading": ((), (3,), (2, 4))},
    "check_state": {"leading": ((), (3,), (2, 4))},
}


def public_callables():
    """Name and object: the functions and classes that the modules define, and methods."""
    for module in pkgutil.walk_packages(attnlib.__path__, "attnlib."):
        for name, thing in vars(importlib.import_module(module.name)).items():
            known = inspect.isfunction(thing) or inspect.isclass(thing)
            if not known or thing.__module__ != module.name or name.startswith("_"):
                continue
            yield f"{module.name}.{name}".removeprefix("attnlib."), thing
            for part in vars(thing) if inspect.isclass(thing) else ():
                if not part.startswith("_") and inspect.isroutine(getattr(thing, part)):
                    yield f"{module.name}.{name}:{part}", getattr(thing, part)


def defaults(thing):
    """The arguments that may be left out, but for those that are then None."""
    parameters = inspect.signature(thing).parameters.items()
    given = {name: parameter.default for name, parameter in parameters}
    return {k: v for k, v in given.items() if v not in (None, inspect.Parameter.empty)}


PUBLIC = dict(public_callables())


@pytest.mark.parametrize("place", [name for name in PUBLIC if defaults(PUBLIC[name])])
def test_what_is_left_out_has_its_usual_value(place):
    usual = USUAL | OTHERS.get(place.rpartition(".")[2], {})
    given = defaults(PUBLIC[place])
    assert repr(given) == repr({name: usual[name] for name in given})  # 0 is not False


def test_every_name_of_the_table_occurs():
    assert USUAL.keys() == {name for thing in PUBLIC.values() for name in defaults(thing)}


SIGNATURES = [  # what the design promises; more may come behind
    "ScaledDotProductAttention(dropout=0.0, causal=False, scale=None)",
    "SelfAttention(d_in, d_out, dqv_bias=False)",
    "SelfAttention.forward(self, x, mask=None, return_weights=False)",
    "CausalAttention.forward(self, x, mask=None, return_weights=False)",
    "Projection(in_features, out_features, bias=True)",
    "MultiHeadAttention(embed_dim, num_heads, attention=None, bias=True)",
    "MultiHeadAttention.forward(self, query, key=None, value=None, mask=None, "
    "need_weights=True)",
    "padding_mask(lengths, max_length=None)",
    "causal_mask(queries, keys=None)",
    "LayerNorm(d_model, eps=1e-05)",
    "FeedForwardNetwork(d_model, d_ff=None, dropout=0.0)",
    "TransformerBlock(embed_dim, num_heads, d_ff=None, attention=None, dropout=0.0, "
    "norm_first=True)",
    "flash_attention(query, key, value, mask=None, *, causal=False, window=None, "
    "scale=None, block_size=None, return_lse=False)",
    "FlashAttention(causal=False, scale=None, block_size=None, backend='auto')",
]


@pytest.mark.parametrize("promised", SIGNATURES)
def test_the_signature_is_as_designed(promised):
    name, _, arguments = promised.rstrip(")").partition("(")
    thing = attnlib
    for part in name.split("."):
        thing = getattr(thing, part)
    found = inspect.signature(thing)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    found = found.replace(parameters=plain, return_annotation=found.empty)
    assert str(found).removeprefix("(").startswith(arguments)


def test_namesakes_take_the_same_arguments_in_the_same_order():
    shared = {*attnlib.__all__} & {*backprop.__all__}
    assert len(shared) >= 6
    for name in sorted(shared):
        mine, theirs = (
            inspect.signature(getattr(library, name)).parameters
            for library in (backprop, attnlib)
        )
        both = [argument for argument in mine if argument in theirs]
        assert both == [argument for argument in theirs if argument in mine], name
        assert set(mine) - set(both) <= {"rng"}, name


@pytest.mark.parametrize("library", [attnlib, backprop, parallel])
def test_public_names_exist_once(library):
    assert all(hasattr(library, name) for name in library.__all__)
    assert len(set(library.__all__)) == len(library.__all__)
