"""PyTorch's own samples of its operators and layers, answered by ours."""

import functools
import math

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.nn import functional as F

from attnlib import (
    FlashAttention,
    LayerNorm,
    MultiHeadAttention,
    RMSNorm,
    ScaledDotProductAttention,
    TransformerBlock,
    mask_from_torch,
)


@functools.cache
def databases():
    """Its operators by name, and its layers by class.

    Made on first use: their modules take seconds, and choose hypothesis's settings anew.
    """
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    settings.load_profile("attnlib")
    operators = {op.name: op for op in op_db}
    return operators, {info.module_cls: info for info in module_db}


def samples_of(name, requires_grad=True):
    operator = databases()[0][f"nn.functional.{name}"]
    torch.manual_seed(0)
    for sample in operator.sample_inputs("cpu", torch.float64, requires_grad):
        yield (sample.input, *sample.args), sample.kwargs


def layers_of(cls):
    """Each of its layers, with what it is given."""
    info = databases()[1][cls]
    torch.manual_seed(0)
    options = {"device": "cpu", "dtype": torch.float64, "requires_grad": False}
    for case in info.module_inputs_func(info, training=False, **options):
        made, given = case.constructor_input, case.forward_input
        layer = cls(*made.args, **made.kwargs, dtype=torch.float64).eval()
        yield layer, given.args, given.kwargs


def assert_same(ours, theirs, inputs=()):
    """To round-off, with the gradients of inputs."""
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    if inputs and theirs.requires_grad:
        pull = torch.linspace(-1, 2, theirs.numel(), dtype=theirs.dtype).view_as(theirs)
        both = [torch.autograd.grad(y, inputs, pull) for y in (ours, theirs)]
        for mine, wanted in zip(*both, strict=True):
            assert torch.allclose(mine, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.costly("outside/torch attention")
@pytest.mark.parametrize("make", [ScaledDotProductAttention, FlashAttention])
def test_scaled_dot_product(make):
    answered = 0
    for (query, key, value), given in samples_of("scaled_dot_product_attention"):
        if given.get("dropout_p"):
            continue  # drawn
        mask = given.get("attn_mask")
        if given.get("is_causal"):  # top left there, bottom right here
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        attention = make(scale=given.get("scale"))
        shared = {"enable_gqa": given.get("enable_gqa", False)}
        if key.shape[:-2] != query.shape[:-2] and not shared["enable_gqa"]:
            with pytest.raises(ValueError, match="key: expected leading dimensions"):
                attention(query, key, value, mask)
            continue  # theirs broadcasts
        for need_weights in (True, False):
            ours, _ = attention(query, key, value, mask, need_weights, **shared)
            theirs = F.scaled_dot_product_attention(query, key, value, **given)
            assert_same(ours, theirs, (query, key, value))
        answered += 1
    assert answered >= 9


@pytest.mark.costly("outside/torch norms")
@pytest.mark.parametrize(
    ("name", "norm"), [("layer_norm", LayerNorm), ("rms_norm", RMSNorm)]
)
def test_norm_function(name, norm):
    answered = 0
    for (x, shape, *parameters), given in samples_of(name):
        eps = given.get("eps", torch.finfo(x.dtype).eps if norm is RMSNorm else 1e-5)
        if eps < 0:
            with pytest.raises(ValueError, match="eps: expected a number of at least 0"):
                norm(math.prod(shape), eps)
            continue
        theirs = getattr(F, name)(x, shape, *parameters, eps=eps)
        layer = norm(math.prod(shape), eps).to(x.dtype)
        for own, given_one in zip(layer.parameters(), parameters, strict=False):
            if given_one is not None:
                own.data = given_one.detach().flatten()
        rows = x.flatten(x.dim() - len(shape))  # these dimensions are normalized as one
        assert_same(layer(rows).reshape(x.shape), theirs, (x,))
        answered += 1
    assert answered >= 5


@pytest.mark.costly("outside/torch norms")
@pytest.mark.parametrize(
    ("cls", "norm"), [(nn.LayerNorm, LayerNorm), (nn.RMSNorm, RMSNorm)]
)
def test_norm_layer(cls, norm):
    for layer, (x,), _ in layers_of(cls):
        if len(layer.normalized_shape) > 1:
            with pytest.raises(ValueError, match="one normalized dimension"):
                norm.from_torch(layer)
        else:
            assert_same(norm.from_torch(layer)(x), layer(x))


@pytest.mark.costly("outside/torch layers")
def test_multi_head():
    answered = 0
    for layer, tokens, given in layers_of(nn.MultiheadAttention):
        other = layer.bias_k is not None or layer.add_zero_attn or not layer.batch_first
        if other or layer.in_proj_weight is None:
            with pytest.raises(ValueError, match="module: expected"):
                MultiHeadAttention.from_torch(layer)
            continue
        alone = tokens[0].dim() == 2  # without a batch; theirs takes a mask for each head
        ours = MultiHeadAttention.from_torch(layer)
        blocked, padded = given.get("attn_mask"), given.get("key_padding_mask")
        if alone and padded is not None:
            padded = padded[None]
        mask = mask_from_torch(blocked, padded, num_heads=layer.num_heads)
        mine = [x[None] for x in tokens] if alone else tokens
        output, weights = ours(*mine, mask=mask)
        theirs, mean = layer(*tokens, **given)
        blocked = theirs.isnan()  # a query that may attend to nothing: 0 here
        weights = torch.stack(weights).mean(0) if weights[0].dim() < 4 else weights[0]
        output, weights = (y[0] if alone else y for y in (output, weights))
        assert_same(output[~blocked], theirs[~blocked])
        assert_same(weights.reshape(mean.shape).nan_to_num(), mean.nan_to_num())
        answered += 1
    assert answered >= 8


@pytest.mark.costly("outside/torch layers")
def test_block():
    answered = 0
    for layer, (x,), given in layers_of(nn.TransformerEncoderLayer):
        if not layer.self_attn.batch_first:
            with pytest.raises(ValueError, match="batch_first"):
                TransformerBlock.from_torch(layer)
            continue
        alone = x.dim() == 2
        masks = given.get("src_mask"), given.get("src_key_padding_mask")
        mask = mask_from_torch(*masks, num_heads=layer.self_attn.num_heads)
        block = TransformerBlock.from_torch(layer)
        output = block(x[None] if alone else x, mask)
        theirs = layer(x, **given)
        blocked = theirs.isnan()
        assert_same((output[0] if alone else output)[~blocked], theirs[~blocked])
        answered += 1
    assert answered >= 15
