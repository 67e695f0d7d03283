"""What is left out has the value that the docstrings and the chapters say."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import attnlib
from attnlib.gpt2 import gelu_tanh

BLOCK = {"dropout": 0.0, "norm_first": True, "activation": torch.relu}
DRAWN = {"temperature": 1.0}
DEFAULTS = {
    "backprop.autograd.LayerNormFunction.forward": {"eps": 1e-5},
    "backprop.attention.ScaledDotProductAttention": {"dropout": 0.0, "causal": False},
    "backprop.gradient_check.complex_step": {"step": 1e-30},
    "backprop.gradient_check.finite_differences": {"step": 1e-3},
    "backprop.gradient_check.gradient_check": {"step": 1e-3, "tolerance": 1e-8, "seed": 0},
    "backprop.base.Layer.train": {"mode": True},
    "backprop.feed_forward.FeedForwardNetwork": {"dropout": 0.0},
    "backprop.gated_feed_forward.GatedFeedForwardLayer": {"bias": False},
    "backprop.layer_norm.LayerNorm": {"eps": 1e-5},
    "backprop.rms_norm.RMSNormLayer": {"eps": 1e-6},
    "backprop.projection.Projection": {"bias": True},
    "backprop.checks.refuse_bad_tokens": {"dims": 1},
    "backprop.multi_head.MultiHeadAttention": {"bias": True},
    "backprop.optimizers.Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8},
    "backprop.optimizers.SGD": {"lr": 1e-3, "momentum": 0.0},
    "backprop.checks.require_rate": {"below": float("inf")},
    "backprop.transformer.LanguageModel": {"dropout": 0.0},
    "backprop.transformer.TransformerBlock": {"dropout": 0.0},
    "causal_attention.CausalAttention": {"dropout": 0.0, "dqv_bias": False},
    "feed_forward.FeedForwardNetwork": {"dropout": 0.0, "activation": torch.relu},
    "feed_forward.FeedForwardNetwork.from_torch": {"activation": torch.relu},
    "flash.attention.FlashAttention": {"causal": False, "backend": "auto"},
    "fused.fused_attention": {"causal": False},
    "flash.attention.flash_attention": {"causal": False, "return_lse": False},
    "flash_triton.attention.flash_attention_triton": {
        **{"causal": False, "return_lse": False, "enable_gqa": False},
    },
    "flash_triton.attention.old_triton": {"where": ""},
    "flash_triton.split.flash_decoding_triton": {
        **{"causal": False, "enable_gqa": False, "return_lse": False},
    },
    "flash_triton.paged.paged_attention_triton": {
        **{"causal": True, "split_size": 256, "enable_gqa": False},
    },
    "gated_feed_forward.GatedFeedForward": {
        "activation": torch.nn.functional.silu,
        "bias": False,
    },
    "hf.attend_for_model": {"dropout": 0.0},
    "hf.register": {"name": "attnlib"},
    "layer_norm.LayerNorm": {"eps": 1e-5},
    "parallel.collectives.agree": {"problem": ""},
    "parallel.collectives.all_gather": {"dim": 0},
    "parallel.collectives.post_shift": {"hops": 1},
    "parallel.collectives.rank_gradients": {"step": 1e-6},
    "parallel.collectives.reduce_scatter": {"dim": 0},
    "parallel.collectives.shift": {"hops": 1},
    "llama.Llama": {
        **{"dropout": 0.0, "tied": False, "eps": 1e-6, "qkv_bias": False},
        **{"out_bias": False, "ffn_bias": False, "head_norm": False},
    },
    "llama.LlamaAttention": {"bias": False, "out_bias": False},
    "llama.LlamaBlock": {"eps": 1e-6, "ffn_bias": False},
    "multi_head.MultiHeadAttention": {"bias": True},
    "multi_head.MultiHeadAttention.forward": {"need_weights": True},
    "masks.mask_from_torch": {"num_heads": 1},
    "distance_bias.LearnedBiasAttention": {
        "max_distance": 16,
        "dropout": 0.0,
        "causal": False,
    },
    "distance_bias.LearnedBiasAttention.forward": {"need_weights": True},
    "physics_guided.PhysicsGuidedAttention": {
        "strength": 1.0,
        "floor": 0.01,
        "dropout": 0.0,
        "causal": False,
    },
    "paged.paged_attention": {"causal": True, "enable_gqa": False},
    "paged.split_attention": {"causal": False, "return_lse": False},
    "parallel.collectives.agree_on": {"summed": False},
    "parallel.places.Rule": {"causal": False},
    "parallel.places.hops_needed": {"pieces": 8},
    "parallel.places.shard_positions": {"order": "zigzag"},
    "parallel.processes.run": {"timeout": 60.0},
    "parallel.ring.RingAttention": {"causal": False, "order": "contiguous"},
    "parallel.ring.ring_attention": {"causal": False, "return_lse": False},
    "parallel.heads.HeadAttention": {"causal": False},
    "parallel.heads.head_attention": {"causal": False, "return_lse": False},
    "parallel.checkpoints.save_checkpoint": {"keep": 2},
    "projection.Projection": {"bias": True},
    "checkpoint.Into": {"transposed": False},
    "checkpoint.Progress": {"after": 2.0},
    "checkpoint.load_into": {"ignored": ()},
    "gpt2.GPT2": {"activation": gelu_tanh, "eps": 1e-5},
    "gpt2.names_of": {"prefix": ""},
    "checks.refuse_bad_positions": {"rotary": True},
    "grouped_query.LatentAttention": {"base": 10000.0},
    "testing.check_window_kept": {"dtype": torch.float64},
    "rms_norm.RMSNorm": {"eps": 1e-6},
    "rotary.RotaryPositions": {
        "base": 10000.0,
        "interleaved": False,
        "factor": 1.0,
    },
    "rotary.RotaryPositions.forward": {"positions": 0},
    "rotary.frequencies": {"base": 10000.0},
    "rotary.rotate": {"positions": 0, "base": 10000.0, "interleaved": False},
    "rotary.turn": {"magnitude": 1.0},
    "scaled_dot_product.ScaledDotProductAttention": {"dropout": 0.0, "causal": False},
    "scaled_dot_product.ScaledDotProductAttention.forward": {"need_weights": True},
    "self_attention.SelfAttention": {"dqv_bias": False},
    "self_attention.SelfAttention.forward": {"return_weights": False},
    "checks.refuse_bad_tokens": {"dims": 1},
    "checks.require_count": {"least": 1},
    "checks.require_padding": {"least": 0},
    "testing.check_attention": {
        "leading": ((), (3,), (2, 2)),
        "dtypes": (torch.float32, torch.float16, torch.bfloat16),
    },
    "testing.check_cache": {
        "leading": ((), (3,), (2, 4)),
        "dtypes": (torch.float32, torch.float16, torch.bfloat16),
    },
    "testing.check_order": {"dtype": torch.float64},
    "testing.random_inputs": {"leading": (), "queries": 4, "keys": 6, "seed": 0},
    "testing.random_pieces": {"seed": 0},
    "transformer.LanguageModel": {**BLOCK, "positions": "learned"},
    "transformer.LanguageModel.forward": {"return_weights": False},
    "transformer.LanguageModel.generate": {**DRAWN, "cache": False},
    "transformer.TransformerBlock": BLOCK,
    "transformer.TransformerBlock.forward": {"return_weights": False},
    "generation.sample": DRAWN,
}


def public_callables():
    """Name and object: the functions and classes that the modules define, and methods."""
    for module in pkgutil.walk_packages(attnlib.__path__, "attnlib."):
        for name, thing in vars(importlib.import_module(module.name)).items():
            known = inspect.isfunction(thing) or inspect.isclass(thing)
            if not known or thing.__module__ != module.name or name.startswith("_"):
                continue
            name = f"{module.name}.{name}".removeprefix("attnlib.")
            yield name, thing
            for part in vars(thing) if inspect.isclass(thing) else ():
                if not part.startswith("_") and inspect.isroutine(getattr(thing, part)):
                    yield f"{name}.{part}", getattr(thing, part)


def defaults(thing):
    """The arguments that may be left out, but for those that are then None."""
    parameters = inspect.signature(thing).parameters.items()
    given = {name: parameter.default for name, parameter in parameters}
    return {k: v for k, v in given.items() if v not in (None, inspect.Parameter.empty)}


PUBLIC = dict(public_callables())
WITH_DEFAULTS = {name for name, thing in PUBLIC.items() if defaults(thing)}


@pytest.mark.parametrize("name", sorted(WITH_DEFAULTS | set(DEFAULTS)))
def test_defaults(name):
    assert repr(defaults(PUBLIC[name])) == repr(DEFAULTS.get(name, {}))  # 0 is not False
