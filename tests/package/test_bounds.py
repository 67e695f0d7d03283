"""The last number that an argument may have is accepted, and the next one refused."""

import re

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
    backprop,
    padding_mask,
    sample,
)

pytestmark = pytest.mark.usefixtures("as_shipped")

LAYER = backprop.Projection(1, 1)
LEAST = 5e-324  # above 0


def run_model(name, size):
    """A model in which every size is 1 but this one reads as much as it can see."""
    names = ("vocab_size", "context_length", "embed_dim", "num_heads", "num_layers")
    sizes = {**dict.fromkeys(names, 1), name: size}
    LanguageModel(**sizes)(torch.zeros(sizes["context_length"], dtype=torch.int64))


def run_model_by_hand(name, size):
    """The same in NumPy."""
    names = ("vocab_size", "context_length", "embed_dim", "num_heads", "num_layers")
    sizes = {**dict.fromkeys(names, 1), name: size}
    model = backprop.LanguageModel(**sizes)
    model.forward(np.zeros(sizes["context_length"], dtype=np.int64))


def read(tokens):
    LanguageModel(5, 4, 2, 1, 1)(torch.zeros(tokens, dtype=torch.int64))


def read_by_hand(tokens):
    backprop.LanguageModel(5, 4, 2, 1, 1).forward(np.zeros(tokens, dtype=np.int64))


# By the name in the message: a call, the last number that it accepts, and the next one.
BOUNDS = [
    ("in_features", lambda n: Projection(n, 1)(torch.ones(2, n)), 1, 0),
    ("out_features", lambda n: Projection(1, n)(torch.ones(2, 1)), 1, 0),
    ("d_model", lambda n: LayerNorm(n)(torch.ones(2, n)), 1, 0),
    ("eps", lambda eps: LayerNorm(2, eps), 0, -LEAST),
    ("embed_dim", lambda n: MultiHeadAttention(2, n)(torch.ones(3, 2)), 1, 0),
    ("num_heads", LearnedBiasAttention, 1, 0),
    ("max_distance", lambda n: LearnedBiasAttention(1, n), 1, 0),
    ("strength", lambda x: PhysicsGuidedAttention(strength=x), 0, -LEAST),
    ("floor", lambda x: PhysicsGuidedAttention(floor=x), LEAST, 0),
    ("lengths", lambda n: padding_mask([n], 3), 0, -1),
    ("lengths", lambda n: padding_mask([n], 3), 3, 4),
    ("block_size", lambda n: FlashAttention(block_size=n), 1, 0),
    ("block_size", lambda n: FlashAttention(block_size=(n, 2)), 1, 0),
    ("block_size", lambda n: FlashAttention(block_size=(2, n)), 1, 0),
    ("vocab_size", lambda n: run_model("vocab_size", n), 1, 0),
    ("context_length", lambda n: run_model("context_length", n), 1, 0),
    ("num_layers", lambda n: run_model("num_layers", n), 1, 0),
    ("ids", read, 4, 5),
    ("temperature", lambda t: sample(torch.ones(3), temperature=t), 0, -LEAST),
    ("top_k", lambda k: sample(torch.ones(3), top_k=k), 1, 0),
    # The same by hand.
    ("in_features", lambda n: backprop.Projection(n, 1), 1, 0),
    ("out_features", lambda n: backprop.Projection(1, n), 1, 0),
    ("d_model", backprop.LayerNorm, 1, 0),
    ("eps", lambda eps: backprop.LayerNorm(2, eps), 0, -LEAST),
    ("dropout", backprop.Dropout, 0, -LEAST),
    ("dropout", backprop.Dropout, 1, 1 + 1e-15),
    ("vocab_size", lambda n: backprop.Embedding(n, 1), 1, 0),
    ("embed_dim", lambda n: backprop.Embedding(1, n), 1, 0),
    ("embed_dim", lambda n: backprop.MultiHeadAttention(2, n), 1, 0),
    ("context_length", lambda n: run_model_by_hand("context_length", n), 1, 0),
    ("num_layers", lambda n: run_model_by_hand("num_layers", n), 1, 0),
    ("ids", read_by_hand, 4, 5),
    ("lr", lambda lr: backprop.SGD(LAYER, lr), 0, -LEAST),
    ("lr", lambda lr: backprop.Adam(LAYER, lr), 0, -LEAST),
    ("momentum", lambda mu: backprop.SGD(LAYER, momentum=mu), 0, -LEAST),
    ("momentum", lambda mu: backprop.SGD(LAYER, momentum=mu), 1 - 1e-15, 1),
    ("betas", lambda beta: backprop.Adam(LAYER, betas=(beta, 0.9)), 0, -LEAST),
    ("betas", lambda beta: backprop.Adam(LAYER, betas=(0.9, beta)), 1 - 1e-15, 1),
    ("eps", lambda eps: backprop.Adam(LAYER, eps=eps), 0, -LEAST),
]


@pytest.mark.parametrize(("name", "call", "accepted", "refused"), BOUNDS)
def test_bounds(name, call, accepted, refused):
    call(accepted)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{re.escape(str(refused))}"):
        call(refused)
