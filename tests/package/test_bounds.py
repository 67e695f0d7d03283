"""The last number that an argument may have is accepted, and the next one refused."""

import numpy as np
import pytest
import torch

from attnlib import (
    FlashAttention,
    LanguageModel,
    LayerNorm,
    LearnedBiasAttention,
    MultiHeadAttention,
    PhysicsGuidedAttention,
    Projection,
    RMSNorm,
    backprop,
    padding_mask,
    sample,
)
from drawn import refuses

pytestmark = pytest.mark.usefixtures("as_shipped")

SIZES = dict.fromkeys(("vocab_size", "context_length", "embed_dim", "num_heads"), 1)


def read(tokens, num_layers=1, **sizes):
    """With a model in which every other size is 1."""
    model = LanguageModel(**SIZES | sizes, num_layers=num_layers)
    model(torch.zeros(tokens, dtype=torch.int64))


def read_by_hand(tokens, num_layers=1, **sizes):
    """The same in NumPy."""
    model = backprop.LanguageModel(**SIZES | sizes, num_layers=num_layers)
    model.forward(np.zeros(tokens, dtype=np.int64))


COUNTS = [
    ("in_features", lambda n: Projection(n, 1)(torch.ones(2, n))),
    ("out_features", lambda n: Projection(1, n)(torch.ones(2, 1))),
    ("d_model", lambda n: LayerNorm(n)(torch.ones(2, n))),
    ("d_model", RMSNorm),
    ("num_heads", LearnedBiasAttention),
    ("max_distance", lambda n: LearnedBiasAttention(1, n)),
    ("block_size", lambda n: FlashAttention(block_size=n)),
    ("block_size", lambda n: FlashAttention(block_size=(n, 2))),
    ("block_size", lambda n: FlashAttention(block_size=(2, n))),
    ("vocab_size", lambda n: read(1, vocab_size=n)),
    ("context_length", lambda n: read(n, context_length=n)),
    ("num_layers", lambda n: read(1, num_layers=n)),
    ("top_k", lambda k: sample(torch.ones(3), top_k=k)),
    # The same by hand.
    ("in_features", lambda n: backprop.Projection(n, 1)),
    ("out_features", lambda n: backprop.Projection(1, n)),
    ("d_model", backprop.LayerNorm),
    ("d_model", backprop.RMSNormLayer),
    ("vocab_size", lambda n: backprop.Embedding(n, 1)),
    ("embed_dim", lambda n: backprop.Embedding(1, n)),
    ("context_length", lambda n: read_by_hand(n, context_length=n)),
    ("num_layers", lambda n: read_by_hand(1, num_layers=n)),
]


@pytest.mark.parametrize(("name", "call"), COUNTS)
def test_counts(name, call):
    call(1)
    with refuses(f"{name}: expected at least 1, got …0…"):
        call(0)


LAYER = backprop.Projection(1, 1)
LEAST = 5e-324  # above 0
HEADS = "embed_dim: expected a multiple of num_heads = 0"
LENGTHS = "lengths: expected numbers between 0 and max_length = 3"
TOKENS = "ids: expected at most context_length = 4 tokens in the last dimension"
EPS = "eps: expected a number of at least 0"
CHANCE = "dropout: expected a probability between 0 and 1"

# By the message: a call, the last number that it accepts, and the next one.
BOUNDS = [
    (HEADS, lambda n: MultiHeadAttention(10, n)(torch.ones(3, 10)), 1, 0),
    (LENGTHS, lambda n: padding_mask([n], 3), 0, -1),
    (LENGTHS, lambda n: padding_mask([n], 3), 3, 4),
    (TOKENS, lambda n: read(n, context_length=4), 4, 5),
    (EPS, lambda eps: LayerNorm(2, eps), 0, -LEAST),
    (EPS, lambda eps: RMSNorm(2, eps), 0, -LEAST),
    ("strength: expected a number of at least 0",
     lambda x: PhysicsGuidedAttention(strength=x), 0, -LEAST),
    ("floor: expected a number above 0",
     lambda x: PhysicsGuidedAttention(floor=x), LEAST, 0),
    ("temperature: expected at least 0",
     lambda t: sample(torch.ones(3), temperature=t), 0, -LEAST),
    # The same by hand.
    (HEADS, lambda n: backprop.MultiHeadAttention(10, n), 1, 0),
    (TOKENS, lambda n: read_by_hand(n, context_length=4), 4, 5),
    (EPS, lambda eps: backprop.LayerNorm(2, eps), 0, -LEAST),
    (EPS, lambda eps: backprop.RMSNormLayer(2, eps), 0, -LEAST),
    (CHANCE, backprop.Dropout, 0, -LEAST),
    (CHANCE, backprop.Dropout, 1, 1 + 1e-15),
]  # fmt: skip
STEPS = [
    ("lr", "inf", lambda lr: backprop.SGD(LAYER, lr)),
    ("lr", "inf", lambda lr: backprop.Adam(LAYER, lr)),
    ("eps", "inf", lambda eps: backprop.Adam(LAYER, eps=eps)),
    ("momentum", "1", lambda mu: backprop.SGD(LAYER, momentum=mu)),
    ("betas", "1", lambda beta: backprop.Adam(LAYER, betas=(beta, 0.9))),
    ("betas", "1", lambda beta: backprop.Adam(LAYER, betas=(0.9, beta))),
]
for _name, _below, _call in STEPS:
    _words = f"{_name}: expected a number in [0, {_below})"
    BOUNDS += [(_words, _call, 0, -LEAST), (_words, _call, 0.5, float("nan"))]
    if _below == "1":
        BOUNDS.append((_words, _call, 1 - 1e-15, 1))


@pytest.mark.parametrize(("words", "call", "accepted", "refused"), BOUNDS)
def test_bounds(words, call, accepted, refused):
    call(accepted)
    with refuses(f"{words}, got …{refused}…"):
        call(refused)
