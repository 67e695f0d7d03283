"""Flash attention on a GPU: kernels in Triton, forward and backward (chapter 15).

`flash_attention_triton` is `flash_attention` on a GPU of NVIDIA, and the backend "triton"
of `FlashAttention`. The names below are sorted as the chapter introduces them.
"""

from attnlib.flash_triton.attention import TritonFunction, flash_attention_triton, refusal
from attnlib.flash_triton.backward import (
    key_value_gradient_kernel,
    query_gradient_kernel,
    statistics_kernel,
)
from attnlib.flash_triton.forward import forward_kernel
from attnlib.flash_triton.settings import SETTINGS, Setting, choose_setting

__all__ = [
    # The kernels
    "forward_kernel",
    "statistics_kernel",
    "query_gradient_kernel",
    "key_value_gradient_kernel",
    # How they cut their work
    "SETTINGS",
    "Setting",
    "choose_setting",
    # The function that they make
    "TritonFunction",
    "flash_attention_triton",
    "refusal",
]
