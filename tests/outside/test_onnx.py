"""The ONNX standard's own cases of its operators, answered by ours."""

import functools

import numpy as np
import pytest
import torch
from onnx import helper
from onnx.backend.test.case import node

from attnlib import (
    FlashAttention,
    KVCache,
    LayerNorm,
    RMSNorm,
    ScaledDotProductAttention,
    padding_mask,
)
from attnlib.delta import delta_rule, delta_rule_by_feature
from attnlib.linear import linear_attention
from attnlib.programs import ProgramAttention
from attnlib.rotary import turn


@functools.cache
def cases_of(operator):
    """Name, attributes, inputs and outputs by their names; expanded cases are the same."""
    found = {}
    with np.errstate(all="ignore"):  # other operators' cases overflow on purpose
        collected = node.collect_testcases(None)
    for case in collected:
        graph = case.model.graph if case.model else None
        if not graph or len(graph.node) > 1 or graph.node[0].op_type != operator:
            continue
        told = graph.node[0]
        options = {a.name: helper.get_attribute_value(a) for a in told.attribute}
        inputs, outputs = case.data_sets[0]
        given = dict(zip(filter(None, told.input), map(tensor, inputs), strict=True))
        wanted = dict(zip(filter(None, told.output), map(tensor, outputs), strict=True))
        found[case.name] = options, given, wanted
    return found


def tensor(array):
    if array.dtype.name == "bfloat16":  # NumPy has none of its own, PyTorch no way from it
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(array.copy())


def both(mask, allowed):
    if mask is None:
        return allowed
    forbidden = False if mask.dtype == torch.bool else -torch.inf
    return torch.where(allowed, mask, forbidden)


def assert_close(name, ours, theirs):
    wide = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[theirs.dtype]
    assert ours.shape == theirs.shape, name
    assert torch.allclose(ours.float(), theirs.float(), rtol=wide, atol=wide), name


def attention_of(make, options, given):
    """Y, the weights, keys and values so far: as the standard's Attention has them."""
    query, key, value = given["Q"], given["K"], given["V"]
    flat = query.dim() == 3
    if flat:
        shared = options["kv_num_heads"]
        query = query.unflatten(-1, (options["q_num_heads"], -1)).transpose(1, 2)
        key, value = (x.unflatten(-1, (shared, -1)).transpose(1, 2) for x in (key, value))
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[-2]
        cache = KVCache(past + key.shape[-2])
        cache.append(given["past_key"], given["past_value"])
        key, value = cache.append(key, value)
    n, m = query.shape[-2], key.shape[-2]
    mask, scale = given.get("attn_mask"), options.get("scale")
    if mask is not None and mask.shape[-1] < m:  # what is missing there is forbidden
        nothing = False if mask.dtype == torch.bool else -torch.inf
        mask = torch.nn.functional.pad(mask, (0, m - mask.shape[-1]), value=nothing)
    start = torch.tensor(past)  # where the first query stands; top left without a past
    if (lengths := given.get("nonpad_kv_seqlen")) is not None:
        mask = both(mask, padding_mask(lengths, m))
        start = lengths[:, None, None, None] - n
    distance = start + torch.arange(n)[:, None] - torch.arange(m)  # from key to query
    left, right = options.get("left_window_size", -1), options.get("right_window_size", -1)
    causal = bool(options.get("is_causal"))
    # The standard counts from the past's end, or aligns top left; ours is bottom right.
    alike = causal and lengths is None and past + n == m
    if causal:
        right = 0
    if left >= 0:
        mask = both(mask, distance <= left)
    if right >= 0 and not alike:
        mask = both(mask, distance >= -right)
    attention = make(causal=alike, scale=scale)
    output, weights = attention(query, key, value, mask, enable_gqa=True)
    if flat:
        output = output.transpose(1, 2).flatten(-2)
    return output, weights, key, value


@pytest.mark.costly("outside/onnx attention")
@pytest.mark.parametrize("make", [ScaledDotProductAttention, FlashAttention])
def test_attention(make):
    answered = 0
    for name, (options, given, wanted) in cases_of("Attention").items():
        if "softcap" in options:
            continue  # by a program, below
        output, weights, key, value = attention_of(make, options, given)
        assert_close(name, output, wanted["Y"])
        if "present_key" in wanted:
            assert_close(name, key, wanted["present_key"])
            assert_close(name, value, wanted["present_value"])
        if options.get("qk_matmul_output_mode") == 3 and weights is not None:
            assert_close(name, weights, wanted["qk_matmul_output"])
        answered += 1
    assert answered >= 65


@pytest.mark.costly("outside/onnx soft cap")
def test_attention_under_a_cap():
    answered = 0
    for name, (options, given, wanted) in cases_of("Attention").items():
        if limit := options.get("softcap"):

            def capped(score, *places, limit=limit):
                return limit * torch.tanh(score / limit)

            make = functools.partial(ProgramAttention, score_mod=capped, block_size=3)
            output, _, key, value = attention_of(make, options, given)
            assert_close(name, output, wanted["Y"])
            if "present_key" in wanted:
                assert_close(name, key, wanted["present_key"])
                assert_close(name, value, wanted["present_value"])
            answered += 1
    assert answered == 11


@pytest.mark.costly("outside/onnx rotary")
def test_rotary():
    found = cases_of("RotaryEmbedding")
    for name, (options, given, wanted) in found.items():
        x, cos, sin = given["input"], given["cos_cache"], given["sin_cache"]
        if flat := x.dim() == 3:
            x = x.unflatten(-1, (options["num_heads"], -1)).transpose(1, 2)
        if "position_ids" in given:
            cos, sin = cos[given["position_ids"]], sin[given["position_ids"]]
        cos, sin, pairs = cos[:, None], sin[:, None], bool(options.get("interleaved"))
        width = options.get("rotary_embedding_dim") or x.shape[-1]
        turned = turn(x[..., :width], torch.atan2(sin, cos), pairs)
        # The standard's numbers are drawn: no point of them lies on the circle.
        length = torch.hypot(sin, cos)
        length = length.repeat_interleave(2, -1) if pairs else length.repeat(1, 1, 1, 2)
        output = torch.cat([turned * length, x[..., width:]], dim=-1)
        if flat:
            output = output.transpose(1, 2).flatten(-2)
        assert_close(name, output, wanted["output"])
    assert len(found) >= 8


@pytest.mark.costly("outside/onnx norms")
@pytest.mark.parametrize(
    ("operator", "norm", "eps"),
    [("LayerNormalization", LayerNorm, 1e-5), ("RMSNormalization", RMSNorm, 1e-5)],
)
def test_norms(operator, norm, eps):
    found = cases_of(operator)
    for name, (options, given, wanted) in found.items():
        x = given["X"]
        rows = x.flatten(options.get("axis", -1))  # these axes are normalized as one
        layer = norm(rows.shape[-1], options.get("epsilon", eps))
        layer.gamma.data = given["W"].flatten()
        if "B" in given:
            layer.beta.data = given["B"].flatten()
        assert_close(name, layer(rows).reshape(x.shape).detach(), wanted["Y"])
    assert len(found) >= 19


@pytest.mark.costly("outside/onnx linear attention")
def test_linear_attention():
    found = cases_of("LinearAttention")
    for name, (options, given, wanted) in found.items():
        shared, own = options["kv_num_heads"], options["q_num_heads"]
        query, key, value = (given[x].float() for x in ("query", "key", "value"))
        query = query.unflatten(-1, (own, -1)).transpose(1, 2)
        key, value = (x.unflatten(-1, (shared, -1)).transpose(1, 2) for x in (key, value))
        query = query * (options.get("scale") or query.shape[-1] ** -0.5)
        # Here each head has a state of its own; there those that share keys share one.
        key, value = (x.repeat_interleave(own // shared, 1) for x in (key, value))
        decay, beta, state = (given.get(x) for x in ("decay", "beta", "past_state"))
        if state is not None:
            state = state.repeat_interleave(own // shared, 1)
        if decay is not None and decay.shape[-1] != shared:  # one for each feature
            decay = decay.float().unflatten(-1, (shared, -1)).transpose(1, 2)
            decay = decay.repeat_interleave(own // shared, 1)
        elif decay is not None:
            decay = decay.float().mT.repeat_interleave(own // shared, 1)
        output, state = by_rule(options, (query, key, value), beta, decay, state)
        assert_close(name, output.transpose(1, 2).flatten(-2), wanted["output"])
        assert_close(name, state[:, :: own // shared], wanted["present_state"])
    assert len(found) >= 14


def by_rule(options, tensors, beta, decay, state):
    """What the operator computes; a decay of (batch, heads, tokens), or with features."""
    query, key, value = tensors
    by_feature = decay is not None and decay.dim() == key.dim()
    if "delta" in options.get("update_rule", b"gated_delta").decode():
        beta = beta.float().mT
        beta = beta.repeat_interleave(query.shape[1] // beta.shape[1], 1)
        rule = delta_rule_by_feature if by_feature else delta_rule
        return rule(query, key, value, beta, decay, state)
    if not by_feature:
        return linear_attention(query, key, value, decay, state)
    query, key = (x.mT.unsqueeze(-1) for x in (query, key))  # heads of one feature
    value = value.unsqueeze(-3).expand(*key.shape[:-1], -1)
    outputs, rows = linear_attention(query, key, value, decay.mT)
    return outputs.sum(dim=-3), rows.squeeze(-2)
