"""Backward by hand: what is refused, and in which words; test_bounds has the numbers."""

import numpy as np
import torch

from attnlib.backprop import (
    Adam,
    CrossEntropy,
    Dropout,
    Embedding,
    FeedForwardNetwork,
    LanguageModel,
    LayerNorm,
    MultiHeadAttention,
    Projection,
    ReLU,
    ScaledDotProductAttention,
    SiLU,
    TransformerBlock,
    gradient_check,
)
from attnlib.backprop.multi_head import EachHead
from drawn import draw, each_refused

Q, K, V = (x.numpy() for x in draw(2, d_k=3, d_v=5))
X, SINGLE, WHOLE = Q[..., :3], Q.astype(np.float32), np.ones((2, 4, 3), dtype=int)
IDS = np.array([[2, 0, 2], [2, 6, 0]])
LOGITS = np.ones((2, 3, 7))


def attend(inputs):
    ScaledDotProductAttention().forward(*inputs)


def given_back(d_output, layer=None, inputs=(Q, K, V)):
    """Backward after forward."""
    layer = layer or ScaledDotProductAttention()
    layer.forward(*inputs)
    layer.backward(d_output)


def heads(*inputs, mask=None):
    MultiHeadAttention(3, 3).forward(*inputs, mask=mask)


def read(ids):
    LanguageModel(5, 4, 4, 2, 1).forward(ids)


BROADCAST = "mask: expected a shape that broadcasts to that of the scores, (2, 4, 6), got "
MASK = (
    "mask: expected a boolean array (True = may attend) or a float64 array that is added "
    "to the scores, got "
)
SHAPES_FOR_ATTENTION = {
    "query: expected at least 2 dimensions (tokens, features), got shape (3,)": (
        *(Q[0, 0], K, V),
    ),
    "key: expected leading dimensions (2,) as query, got shape (1, 6, 3)": (Q, K[:1], V),
    "key: expected d_k = 3 features as query, got shape (2, 6, 2)": (Q, K[..., :2], V),
    "key: expected d_k ≥ 1, got shape (2, 6, 0)": (Q[..., :0], K[..., :0], V),
    "value: expected 6 tokens as key, got shape (2, 5, 5)": (Q, K, V[:, :5]),
    f"{BROADCAST}(6, 4)": (Q, K, V, np.ones((6, 4)) > 0),
    f"{BROADCAST}(1, 1, 4, 6)": (Q, K, V, np.ones((1, 1, 4, 6)) > 0),
}
test_shapes_for_attention = each_refused(ValueError, SHAPES_FOR_ATTENTION, attend)
TYPES_FOR_ATTENTION = {
    "query: expected a floating-point array, got int64": (WHOLE, K, V),
    "query: expected a floating-point array, got list": ([[1.0]], K, V),
    "key: expected a floating-point array, got list": (Q, [[1.0]], V),
    "value: expected float64, got float32": (Q, K, V.astype(np.float32)),
    f"{MASK}int64": (Q, K, V, np.ones((4, 6), dtype=int)),
    f"{MASK}float32": (Q, K, V, np.ones(6, np.float32)),
}
test_types_for_attention = each_refused(TypeError, TYPES_FOR_ATTENTION, attend)
FEATURES = "expected at least 1 dimensions, the last of"
TOO_LONG = "ids: expected at most context_length = 4 tokens in the last dimension, got "
MASK_DIMS = "mask: expected 2 dimensions (queries, keys) or 4 (batch, heads, …), got shape "
VALUES = {
    "d_output: expected shape (2, 4, 5) as the output, got (4, 5)":
        lambda: given_back(V[0, :4]),
    "d_output: …, got (4, 3)": lambda: given_back(X[0], FeedForwardNetwork(3), [X]),
    "d_output: expected shape (3, 5) as the output, got (3, 4)":
        lambda: given_back(np.ones((3, 4)), LanguageModel(5, 4, 4, 2, 1), [IDS[0]]),
    "input: …4 features, got shape (2, 4, 3)": lambda: Projection(4, 3).forward(X),
    f"input: {FEATURES} 5 features, got shape (2, 4, 3)": lambda: LayerNorm(5).forward(X),
    "input: …4 features, got shape ()": lambda: Projection(4, 3).forward(np.array(1.0)),
    "targets: expected shape (2, 3) as the tokens of logits, got (2, 2)":
        lambda: CrossEntropy().forward(LOGITS, IDS[:, :2]),
    "logits: …one token, got shape ()":
        lambda: CrossEntropy().forward(np.array(1.0), np.array(0)),
    "logits: …, got shape (0, 7)":
        lambda: CrossEntropy().forward(LOGITS[:0, 0], IDS[:0, 0]),
    "embed_dim: …num_heads = 4, got 6": lambda: MultiHeadAttention(6, 4),
    "attention: expected 2 instances, one a head, got 1":
        lambda: MultiHeadAttention(4, 2, [ScaledDotProductAttention()]),
    "value: …least 2 dimensions, the last of 3 features, got shape (2, 6, 5)":
        lambda: heads(Q, K, V),
    "query: …the last of 3 features, got shape (3,)": lambda: heads(Q[0, 0]),
    f"{MASK_DIMS}(1, 4, 4)": lambda: heads(Q, mask=np.ones((1, 4, 4), bool)),
    f"{MASK_DIMS}()": lambda: heads(Q, mask="causal"),
    f"{TOO_LONG}()": lambda: read(np.array(3)),
    "dropout: …between 0 and 1, got nan":
        lambda: FeedForwardNetwork(4, dropout=float("nan")),
    "dropout: …probability between 0 and 1, got 1.5":
        lambda: ScaledDotProductAttention(1.5),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
PART = "attention: expected a Layer with a backward, its class, or a list of them, got "
TYPES = {
    "d_output: expected a floating-point array, got int64": lambda: given_back(WHOLE),
    "d_output: expected float64, got float32": lambda: given_back(SINGLE),
    "d_output: expected a floating-point array, got NoneType": lambda: given_back(None),
    "input: …array, got int64": lambda: Projection(3, 4).forward(WHOLE),
    "input: …array, got int32": lambda: ReLU().forward(WHOLE.astype(np.int32)),
    "input: …array, got int16": lambda: Dropout(0.5).forward(WHOLE.astype(np.int16)),
    "input: …array, got int8": lambda: SiLU().forward(WHOLE.astype(np.int8)),
    "input: expected a floating-point array, got list": lambda: LayerNorm(1).forward([1.0]),
    "input: …array, got Tensor": lambda: LayerNorm(2).forward(torch.ones(2)),
    "input: …as the parameters, got float32": lambda: LayerNorm(3).forward(SINGLE),
    "input: expected float64, got float32": lambda: gradient_check(Dropout(0.0), SINGLE),
    "ids: expected an array of integers, got float64": lambda: read(np.ones(3)),
    "ids: expected an array of integers, got list": lambda: Embedding(7, 4).forward([1]),
    "ids: …integers, got bool": lambda: Embedding(7, 4).forward(IDS > 0),
    "logits: …array, got int64": lambda: CrossEntropy().forward(LOGITS.astype(int), IDS),
    f"{PART}'x'": lambda: MultiHeadAttention(4, 2, "x"),
    f"{PART}[…, 'x']": lambda: MultiHeadAttention(4, 2, [ScaledDotProductAttention(), "x"]),
    "query: expected a floating-point array, got int64": lambda: heads(WHOLE),
    "key: expected float64 as the parameters, got float32": lambda: heads(Q, SINGLE),
    f"{MASK}int64": lambda: heads(Q, mask=np.ones((4, 4), int)),
}
test_types = each_refused(TypeError, TYPES)
BEFORE = "call forward before backward"
ORDER = {
    f"ScaledDotProductAttention: {BEFORE}": lambda: ScaledDotProductAttention().backward(V),
    f"Projection: {BEFORE}": lambda: Projection(4, 3).backward(V),
    f"MultiHeadAttention: {BEFORE}": lambda: MultiHeadAttention(4, 2).backward(V),
    f"EachHead: {BEFORE}": lambda: EachHead([ScaledDotProductAttention()]).backward(V),
    f"TransformerBlock: {BEFORE}": lambda: TransformerBlock(4, 2).backward(V),
    f"LanguageModel: {BEFORE}": lambda: LanguageModel(5, 4, 4, 2, 1).backward(V),
    f"CrossEntropy: {BEFORE}": CrossEntropy().backward,
    "Projection: no gradient of W, b: call backward first": Adam(Projection(2, 2)).step,
}
test_order = each_refused(RuntimeError, ORDER)
INDICES = {
    "ids: expected integers from 0 to 4, got 5 to 5": lambda: read(np.array([5])),
    "ids: …from 0 to 6, got -1 to 5": lambda: Embedding(7, 4).forward(IDS - 1),
    "targets: …from 0 to 6, got 1 to 7": lambda: CrossEntropy().forward(LOGITS, IDS + 1),
}
test_indices = each_refused(IndexError, INDICES)
