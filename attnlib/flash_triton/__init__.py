"""Flash attention on a GPU: kernels in Triton, forward and backward (chapter 15).

`flash_attention_triton` is `flash_attention` on a GPU of NVIDIA, and the backend "triton"
of `FlashAttention`; `flash_decoding_triton` is for few queries and many keys (appendix E).
The names below are sorted as the chapters introduce them.
"""

from attnlib.flash_triton.attention import TritonFunction, flash_attention_triton, refusal
from attnlib.flash_triton.backward import (
    key_value_gradient_kernel,
    query_gradient_kernel,
    statistics_kernel,
)
from attnlib.flash_triton.forward import forward_kernel
from attnlib.flash_triton.paged import (
    fold_kernel,
    load_tokens,
    paged_attention_triton,
    paged_kernel,
    paged_step,
)
from attnlib.flash_triton.settings import SETTINGS, Setting, choose_setting
from attnlib.flash_triton.split import (
    choose_splits,
    flash_decoding_triton,
    merge_kernel,
    split_kernel,
)

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
    # Few queries, many keys
    "split_kernel",
    "merge_kernel",
    "choose_splits",
    "flash_decoding_triton",
    # Pages
    "load_tokens",
    "paged_step",
    "paged_kernel",
    "fold_kernel",
    "paged_attention_triton",
]
