"""Bad input is refused: each message names argument, what was expected, what came."""

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

pytestmark = pytest.mark.usefixtures("as_shipped")

Q, K, V = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 5)
MASK = torch.ones(4, 6, dtype=torch.bool)
NESTED = torch.nested.nested_tensor([V[0, 0], V[0, 0, :5]], layout=torch.jagged)

ATTENTION = {
    "query of rank 1": (
        (Q[0, 0, 0], K, V),
        ValueError,
        "query: expected at least 2 dimensions (tokens, features), got shape (8,)",
    ),
    "integer query": (
        (Q.long(), K, V),
        TypeError,
        "query: expected a floating-point tensor, got torch.int64",
    ),
    "a list for a key": (
        (Q, [[1.0]], V),
        TypeError,
        "key: expected a floating-point tensor, got list",
    ),
    "a nested value": (
        (Q, K, NESTED),
        TypeError,
        "value: expected a tensor that is not nested; pad the sequences, and mask what was "
        "padded by padding_mask",
    ),
    "mixed dtypes": (
        (Q, K, V.double()),
        TypeError,
        "value: expected torch.float32 as query, got torch.float64",
    ),
    "mixed devices": (
        (Q, K.to("meta"), V),
        ValueError,
        "key: expected device cpu as query, got meta",
    ),
    "another batch": (
        (Q, K[:1], V),
        ValueError,
        "key: expected leading dimensions (2, 3) as query, got shape (1, 3, 6, 8)",
    ),
    "another number of heads": (
        (Q[0], K[0, :1], V[0]),
        ValueError,
        "key: expected leading dimensions (3,) as query, got shape (1, 6, 8)",
    ),
    "another rank": (
        (Q, K, V[0]),
        ValueError,
        "value: expected leading dimensions (2, 3) as query, got shape (3, 6, 5)",
    ),
    "mismatched d_k": (
        (Q, K[..., :7], V),
        ValueError,
        "key: expected d_k = 8 features as query, got shape (2, 3, 6, 7)",
    ),
    "no features": (
        (Q[..., :0], K[..., :0], V),
        ValueError,
        "key: expected d_k ≥ 1, got shape (2, 3, 6, 0)",
    ),
    "mismatched lengths": (
        (Q, K, V[..., :5, :]),
        ValueError,
        "value: expected 6 tokens as key, got shape (2, 3, 5, 5)",
    ),
    "integer mask": (
        (Q, K, V, MASK.long()),
        TypeError,
        "mask: expected a boolean tensor (True = may attend) or a "
        "torch.float32 tensor that is added to the scores, got torch.int64",
    ),
    "mask of another float": (
        (Q, K, V, MASK.double()),
        TypeError,
        "mask: expected a boolean tensor (True = may attend) or a "
        "torch.float32 tensor that is added to the scores, got torch.float64",
    ),
    "a list for a mask": (
        (Q, K, V, [[True]]),
        TypeError,
        "mask: expected a boolean tensor (True = may attend) or a "
        "torch.float32 tensor that is added to the scores, got list",
    ),
    "mask of a wrong length": (
        (Q, K, V, MASK[:, :5]),
        ValueError,
        "mask: expected a shape that broadcasts to that of the scores, (2, 3, 4, 6), "
        "got (4, 5)",
    ),
    "mask that would add a dimension": (
        (Q, K, V, MASK.expand(1, 2, 3, 4, 6)),
        ValueError,
        "mask: expected a shape that broadcasts to that of the scores, (2, 3, 4, 6), "
        "got (1, 2, 3, 4, 6)",
    ),
    "mask on another device": (
        (Q, K, V, MASK.to("meta")),
        ValueError,
        "mask: expected device cpu as query, got meta",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"), ATTENTION.values(), ids=ATTENTION
)
def test_attention_refuses(arguments, error, message):
    with pytest.raises(error) as caught:
        ScaledDotProductAttention()(*arguments)
    assert str(caught.value) == message


TOKENS = {
    "wrong number of features": (
        torch.randn(2, 7, 4),
        ValueError,
        "x: expected at least 2 dimensions, the last of 5 features, got shape (2, 7, 4)",
    ),
    "rank 1": (
        torch.randn(5),
        ValueError,
        "x: expected at least 2 dimensions, the last of 5 features, got shape (5,)",
    ),
    "integers": (
        torch.ones(7, 5, dtype=torch.long),
        TypeError,
        "x: expected a floating-point tensor, got torch.int64",
    ),
    "a list": ([[1.0] * 5], TypeError, "x: expected a floating-point tensor, got list"),
    "another dtype": (
        torch.randn(7, 5).double(),
        TypeError,
        "x: expected torch.float32 as the weights, got torch.float64",
    ),
    "another device": (
        torch.randn(7, 5, device="meta"),
        ValueError,
        "x: expected device cpu, got meta",
    ),
}


@pytest.mark.parametrize("cls", [SelfAttention, CausalAttention])
@pytest.mark.parametrize(("x", "error", "message"), TOKENS.values(), ids=TOKENS)
def test_self_attention_refuses(cls, x, error, message):
    with pytest.raises(error) as caught:
        cls(5, 3)(x)
    assert str(caught.value) == message


WITH_DROPOUT = [
    lambda dropout: ScaledDotProductAttention(dropout=dropout),
    lambda dropout: CausalAttention(5, 3, dropout=dropout),
    lambda dropout: LearnedBiasAttention(2, dropout=dropout),
    lambda dropout: PhysicsGuidedAttention(dropout=dropout),
    lambda dropout: FeedForwardNetwork(4, dropout=dropout),
    lambda dropout: TransformerBlock(4, 2, dropout=dropout),
]


@pytest.mark.parametrize("dropout", [-0.1, 1.5, float("nan"), True, False])
@pytest.mark.parametrize("make", WITH_DROPOUT)
def test_dropout_must_be_a_probability(make, dropout):
    with pytest.raises(TypeError if isinstance(dropout, bool) else ValueError) as caught:
        make(dropout)
    expected = f"dropout: expected a probability between 0 and 1, got {dropout}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("dropout", ["0.1", None, [0.1], 1j, torch.tensor(0.1)])
@pytest.mark.parametrize("make", WITH_DROPOUT)
def test_what_is_no_number_is_no_probability(make, dropout):
    with pytest.raises(TypeError) as caught:
        make(dropout)
    expected = f"dropout: expected a probability between 0 and 1, got {dropout!r}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("make", WITH_DROPOUT)
def test_certainty_and_impossibility_are_probabilities(make):
    numbers = (0, 0.0, 1, 1.0, np.float32(0.5), np.float64(0.5))
    assert {make(dropout).training for dropout in numbers} == {True}


FLAGS = {
    "a probability for causal": (
        lambda: ScaledDotProductAttention(0.0, 0.1),
        "causal",
        0.1,
    ),
    "the same of the tiles": (lambda: FlashAttention(0.1), "causal", 0.1),
    "a word for causal": (lambda: ScaledDotProductAttention(causal="no"), "causal", "'no'"),
    "a probability for a bias": (lambda: SelfAttention(5, 4, 0.1), "dqv_bias", 0.1),
    "0 for no bias": (lambda: CausalAttention(5, 4, dqv_bias=0), "dqv_bias", 0),
    "a head that learns": (lambda: LearnedBiasAttention(2, 3, 0.0, 1), "causal", 1),
}


@pytest.mark.parametrize(("make", "name", "got"), FLAGS.values(), ids=FLAGS)
def test_what_is_no_truth_value_is_refused(make, name, got):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == f"{name}: expected True or False, got {got}"


def test_what_differs_between_the_two_layers_is_named():
    """The third place is the bias in one and was the dropout in the other."""
    with pytest.raises(TypeError, match="positional"):
        CausalAttention(5, 4, True)
    with pytest.raises(TypeError, match="positional"):
        CausalAttention(5, 4, 0.1)
    without, biased = CausalAttention(5, 4), SelfAttention(5, 4, True)
    for layer, has_bias in ((without, False), (biased, True)):
        maps = (layer.W_query, layer.W_key, layer.W_value)
        assert [linear.bias is not None for linear in maps] == 3 * [has_bias]
    assert CausalAttention(5, 4).attention.dropout == 0.0
    with pytest.raises(TypeError, match=r"^mask: expected a boolean tensor"):
        SelfAttention(5, 4)(torch.randn(3, 5), True)  # once the place of return_weights


def test_shapes_are_refused_on_a_device_without_autocast_too():
    layer = SelfAttention(5, 3).to("meta")
    with pytest.raises(TypeError) as caught:
        layer(torch.randn(7, 5, device="meta").double())
    assert (
        str(caught.value) == "x: expected torch.float32 as the weights, got torch.float64"
    )
    assert layer(torch.randn(7, 5, device="meta")).shape == (7, 3)


def test_autocast_may_mix_dtypes():
    layer, x = SelfAttention(5, 3), torch.randn(7, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(layer(x.bfloat16()).float(), layer(x).float(), atol=0.02)


def test_autocast_does_not_hide_what_is_no_tensor():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError) as caught:
        ScaledDotProductAttention()(Q, [[1.0]], V)
    assert str(caught.value) == "key: expected a floating-point tensor, got list"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("layer", [SelfAttention(5, 4), FeedForwardNetwork(5, 4)], ids=type)
def test_layers_refuse_nested_tensors(layer, layout):
    x = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(2, 5)], layout=layout)
    with pytest.raises(TypeError, match=r"(x|input): expected a tensor that is not nested"):
        layer(x)
