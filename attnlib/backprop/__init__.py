"""Every backward pass by hand, in NumPy and without autograd (chapters 10 to 12, and 21).

A layer has `forward`, which remembers what is needed, `backward(d_output)`, which gives the
gradients of its inputs, and `parameters()` and `gradients()` with the same keys. The names
below are sorted by chapter. `attnlib.backprop.autograd`, which hands these gradients to
PyTorch, is imported by its own name: nothing here needs torch.
"""

from attnlib.backprop.attention import (
    ScaledDotProductAttention,
    softmax,
    softmax_backward,
)
from attnlib.backprop.base import Layer, cast
from attnlib.backprop.cross_entropy import CrossEntropy
from attnlib.backprop.dropout import Dropout
from attnlib.backprop.embedding import Embedding
from attnlib.backprop.feed_forward import FeedForwardNetwork, ReLU
from attnlib.backprop.gated_feed_forward import GatedFeedForwardLayer, SiLU
from attnlib.backprop.gradient_check import (
    complex_step,
    finite_differences,
    gradient_check,
    relative_error,
)
from attnlib.backprop.layer_norm import LayerNorm
from attnlib.backprop.multi_head import MultiHeadAttention
from attnlib.backprop.optimizers import SGD, Adam
from attnlib.backprop.projection import Projection
from attnlib.backprop.rms_norm import RMSNormLayer
from attnlib.backprop.transformer import LanguageModel, TransformerBlock

__all__ = [
    # Chapter 10: backward through attention
    "Dropout",
    "Layer",
    "ScaledDotProductAttention",
    "cast",
    "complex_step",
    "finite_differences",
    "gradient_check",
    "relative_error",
    "softmax",
    "softmax_backward",
    # Chapter 11: backward through the layers
    "CrossEntropy",
    "Embedding",
    "FeedForwardNetwork",
    "LayerNorm",
    "Projection",
    "ReLU",
    # Chapter 12: a network without autograd
    "Adam",
    "LanguageModel",
    "MultiHeadAttention",
    "SGD",
    "TransformerBlock",
    # Chapter 21: Llama
    "GatedFeedForwardLayer",
    "RMSNormLayer",
    "SiLU",
]
