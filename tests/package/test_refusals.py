"""Bad input is refused: each message names argument, what was expected, what came."""

from functools import partial

import numpy as np
import pytest
import torch

from attnlib import (
    CausalAttention,
    FeedForwardNetwork,
    FlashAttention,
    LearnedBiasAttention,
    PhysicsGuidedAttention,
    ScaledDotProductAttention,
    SelfAttention,
    TransformerBlock,
)
from drawn import each_refused, refuses

pytestmark = pytest.mark.usefixtures("as_shipped")

Q, K, V = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 5)
MASK = torch.ones(4, 6, dtype=torch.bool)
NESTED = torch.nested.nested_tensor([V[0, 0], V[0, 0, :5]], layout=torch.jagged)
X = torch.randn(7, 5)

LEADING = "expected leading dimensions"
SCORES = "mask: expected a shape that broadcasts to that of the scores, (2, 3, 4, 6)"
EITHER = (
    "mask: expected a boolean tensor (True = may attend) or a torch.float32 tensor that is "
    "added to the scores, got"
)


def attend(inputs):
    ScaledDotProductAttention()(*inputs)


VALUES = {
    "query: expected at least 2 dimensions (tokens, features), got shape (8,)": (
        *(Q[0, 0, 0], K, V),
    ),
    "key: expected device cpu as query, got meta": (Q, K.to("meta"), V),
    f"key: {LEADING} (2, 3) as query, got shape (1, 3, 6, 8)": (Q, K[:1], V),
    f"key: {LEADING} (3,) as query, got shape (1, 6, 8)": (Q[0], K[0, :1], V[0]),
    f"value: {LEADING} (2, 3) as query, got shape (3, 6, 5)": (Q, K, V[0]),
    "key: expected d_k = 8 features as query, got shape (2, 3, 6, 7)": (Q, K[..., :7], V),
    "key: expected d_k ≥ 1, got shape (2, 3, 6, 0)": (Q[..., :0], K[..., :0], V),
    "value: expected 6 tokens as key, got shape (2, 3, 5, 5)": (Q, K, V[..., :5, :]),
    f"{SCORES}, got (4, 5)": (Q, K, V, MASK[:, :5]),
    f"{SCORES}, got (1, 2, 3, 4, 6)": (Q, K, V, MASK.expand(1, 2, 3, 4, 6)),
    "mask: expected device cpu as query, got meta": (Q, K, V, MASK.to("meta")),
}
test_attention_refuses_values = each_refused(ValueError, VALUES, attend)
TYPES = {
    "query: expected a floating-point tensor, got torch.int64": (Q.long(), K, V),
    "key: expected a floating-point tensor, got list": (Q, [[1.0]], V),
    "value: expected a tensor that is not nested; pad the sequences, and mask what was "
    "padded by padding_mask": (Q, K, NESTED),
    "value: expected torch.float32 as query, got torch.float64": (Q, K, V.double()),
    f"{EITHER} torch.int64": (Q, K, V, MASK.long()),
    f"{EITHER} torch.float64": (Q, K, V, MASK.double()),
    f"{EITHER} list": (Q, K, V, [[True]]),
}
test_attention_refuses_types = each_refused(TypeError, TYPES, attend)


def read(x):
    """By either layer, with the same words."""
    with pytest.raises((TypeError, ValueError)) as said:
        SelfAttention(5, 3)(x)
    with refuses(str(said.value), said.type):
        CausalAttention(5, 3)(x)
    raise said.value


DIMENSIONS = "x: expected at least 2 dimensions, the last of 5 features, got shape"
TOKENS = {
    f"{DIMENSIONS} (2, 7, 4)": torch.randn(2, 7, 4),
    f"{DIMENSIONS} (5,)": X[0],
    "x: expected device cpu, got meta": X.to("meta"),
}
test_self_attention_refuses_values = each_refused(ValueError, TOKENS, read)
TYPES_OF_TOKENS = {
    "x: expected a floating-point tensor, got torch.int64": X.long(),
    "x: expected a floating-point tensor, got list": [[1.0] * 5],
    "x: expected torch.float32 as the weights, got torch.float64": X.double(),
}
test_self_attention_refuses_types = each_refused(TypeError, TYPES_OF_TOKENS, read)


WITH_DROPOUT = [
    *(ScaledDotProductAttention, PhysicsGuidedAttention, partial(CausalAttention, 5, 3)),
    *(partial(LearnedBiasAttention, 2), partial(FeedForwardNetwork, 4)),
    partial(TransformerBlock, 4, 2),
]


@pytest.mark.parametrize("make", WITH_DROPOUT)
def test_dropout_must_be_a_probability(make):
    for dropout in (0, 0.0, 1, 1.0, np.float32(0.5), np.float64(0.5)):
        assert make(dropout=dropout).training
    no_numbers = (True, False, "0.1", None, [0.1], 1j, torch.tensor(0.1))
    for dropout in (-0.1, 1.5, float("nan"), *no_numbers):
        error = ValueError if type(dropout) is float else TypeError
        words = f"dropout: expected a probability between 0 and 1, got {dropout!r}"
        with refuses(words, error):
            make(dropout=dropout)


FLAG = "expected True or False, got"
FLAGS = {
    f"causal: {FLAG} 0.1": lambda: ScaledDotProductAttention(0.0, 0.1),
    f"causal: {FLAG} 0.2": lambda: FlashAttention(0.2),
    f"causal: {FLAG} 'no'": lambda: ScaledDotProductAttention(causal="no"),
    f"dqv_bias: {FLAG} 0.1": lambda: SelfAttention(5, 4, 0.1),
    f"dqv_bias: {FLAG} 0": lambda: CausalAttention(5, 4, dqv_bias=0),
    f"causal: {FLAG} 1": lambda: LearnedBiasAttention(2, 3, 0.0, 1),
}
test_what_is_no_truth_value_is_refused = each_refused(TypeError, FLAGS)


@pytest.mark.parametrize("third", [True, 0.1])
def test_what_differs_between_the_two_layers_is_named(third):
    """The third place is the bias in one and was the dropout in the other."""
    with pytest.raises(TypeError, match="positional"):
        CausalAttention(5, 4, third)
    assert CausalAttention(5, 4).W_query.bias is None
    assert SelfAttention(5, 4, True).W_query.bias is not None
    with pytest.raises(TypeError, match=r"^mask: expected a boolean tensor"):
        SelfAttention(5, 4)(torch.randn(3, 5), True)  # once the place of return_weights


def test_on_a_device_without_autocast_and_under_autocast():
    layer, meta = SelfAttention(5, 3), torch.randn(7, 5, device="meta")
    with torch.autocast("cpu", torch.bfloat16):  # dtypes may be mixed
        assert torch.allclose(layer(X.bfloat16()).float(), layer(X).float(), atol=0.02)
        with refuses("key: expected a floating-point tensor, got list", TypeError):
            attend((Q, [[1.0]], V))
    layer = layer.to("meta")
    with refuses("x: expected torch.float32 as the weights, got torch.float64", TypeError):
        layer(meta.double())
    assert layer(meta).shape == (7, 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("layer", [SelfAttention(5, 4), FeedForwardNetwork(5, 4)], ids=type)
def test_layers_refuse_nested_tensors(layer, layout):
    x = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(2, 5)], layout=layout)
    with pytest.raises(TypeError, match=r"(x|input): expected a tensor that is not nested"):
        layer(x)
