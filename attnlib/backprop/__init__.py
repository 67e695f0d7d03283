"""Every backward pass by hand, in NumPy and without autograd (chapters 10 to 12).

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
from attnlib.backprop.gradient_check import (
    complex_step,
    finite_differences,
    gradient_check,
    relative_error,
)
from attnlib.backprop.layer import Dropout, Layer
from attnlib.backprop.layers import (
    CrossEntropy,
    Embedding,
    FeedForwardNetwork,
    LayerNorm,
    Projection,
    ReLU,
    cast,
)
from attnlib.backprop.multi_head import MultiHeadAttention
from attnlib.backprop.optimizers import SGD, Adam
from attnlib.backprop.transformer import LanguageModel, TransformerBlock

__all__ = [
    # Chapter 10: backward through attention
    "Dropout",
    "Layer",
    "ScaledDotProductAttention",
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
    "cast",
    # Chapter 12: a network without autograd
    "Adam",
    "LanguageModel",
    "MultiHeadAttention",
    "SGD",
    "TransformerBlock",
]
