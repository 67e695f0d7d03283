"""Every backward pass by hand, in NumPy (chapters 10 to 12).

The names below are sorted by chapter.
"""

from attnlib.backprop.gradient_check import (
    complex_step,
    finite_differences,
    gradient_check,
    relative_error,
)
from attnlib.backprop.layer import Dropout, Layer

__all__ = [
    # Chapter 10: backward through attention
    "Dropout",
    "Layer",
    "complex_step",
    "finite_differences",
    "gradient_check",
    "relative_error",
]
