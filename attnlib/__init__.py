"""Attention, derived: the package that the book builds, chapter by chapter.

Every definition stands in a chapter of the book, where it is derived and checked. The names
below are sorted by chapter.
"""

from attnlib import backprop, hf, testing
from attnlib.base import BaseAttention
from attnlib.cache import KVCache, WindowCache
from attnlib.causal_attention import CausalAttention
from attnlib.checks import refuse_bad_inputs
from attnlib.distance_bias import LearnedBiasAttention
from attnlib.feed_forward import FeedForwardNetwork
from attnlib.flash import FlashAttention, flash_attention
from attnlib.flash_triton import (
    flash_attention_triton,
    flash_decoding_triton,
    paged_attention_triton,
)
from attnlib.fused import fused_attention
from attnlib.gated_feed_forward import GatedFeedForward
from attnlib.generation import as_text, sample, stream
from attnlib.gpt2 import GPT2
from attnlib.latent import LatentAttention
from attnlib.layer_norm import LayerNorm
from attnlib.llama import Llama, LlamaConfig
from attnlib.logits import log_probabilities
from attnlib.masks import (
    apply_mask,
    causal_mask,
    mask_from_torch,
    padding_mask,
    window_mask,
)
from attnlib.multi_head import MultiHeadAttention
from attnlib.online_softmax import (
    SoftmaxState,
    add_sink,
    block_state,
    merge_outputs,
    merge_states,
    online_attention,
)
from attnlib.paged import (
    PagedCache,
    PagedSequences,
    PageTable,
    paged_attention,
)
from attnlib.physics_guided import PhysicsGuidedAttention
from attnlib.projection import Projection
from attnlib.quantized import QuantizedCache, QuantizedPages
from attnlib.rms_norm import RMSNorm
from attnlib.rotary import RotaryPositions, rotate
from attnlib.scaled_dot_product import ScaledDotProductAttention, masked_softmax
from attnlib.self_attention import SelfAttention
from attnlib.speculative import speculate
from attnlib.split import split_attention
from attnlib.transformer import LanguageModel, TransformerBlock, sinusoidal_positions

__version__ = "0.1.0"

__all__ = [
    # Chapter 1: scaled dot-product attention
    "BaseAttention",
    "ScaledDotProductAttention",
    "apply_mask",
    "causal_mask",
    "masked_softmax",
    "window_mask",
    # Chapter 2: self-attention
    "SelfAttention",
    # Chapter 3: causal attention
    "CausalAttention",
    # Chapter 4: projection
    "Projection",
    # Chapter 5: multi-head attention
    "MultiHeadAttention",
    "mask_from_torch",
    "padding_mask",
    # Chapter 6: heads to plug in
    "LearnedBiasAttention",
    "PhysicsGuidedAttention",
    # Chapter 7: layer normalization
    "LayerNorm",
    # Chapter 8: feed-forward network
    "FeedForwardNetwork",
    # Chapter 9: the transformer
    "LanguageModel",
    "TransformerBlock",
    "as_text",
    "sample",
    "sinusoidal_positions",
    "stream",
    # Chapters 10 to 12: backward, by hand
    "backprop",
    # Chapter 13: online softmax
    "SoftmaxState",
    "block_state",
    "merge_outputs",
    "merge_states",
    "online_attention",
    # Chapter 14: flash attention
    "FlashAttention",
    "flash_attention",
    # Chapter 15: flash attention on a GPU
    "flash_attention_triton",
    # Chapter 16: rotary positions
    "RotaryPositions",
    "rotate",
    # Chapter 17: a cache
    "KVCache",
    "log_probabilities",
    # Chapter 18: fewer keys
    "LatentAttention",
    "WindowCache",
    "add_sink",
    # Chapter 19: split and paged
    "PageTable",
    "PagedCache",
    "PagedSequences",
    "paged_attention",
    "paged_attention_triton",
    "split_attention",
    # Chapter 20: GPT-2, from its own file
    "GPT2",
    # Chapter 21: Llama
    "GatedFeedForward",
    "Llama",
    "LlamaConfig",
    "RMSNorm",
    # Chapter 22: inside transformers
    "hf",
    # Chapter 26: draft and verify
    "speculate",
    # Chapter 27: a smaller cache
    "QuantizedCache",
    "QuantizedPages",
    # Appendix A: the contract
    "refuse_bad_inputs",
    "testing",
    # Appendix B: beside PyTorch
    "fused_attention",
    # Appendix E: kernels in practice
    "flash_decoding_triton",
]
