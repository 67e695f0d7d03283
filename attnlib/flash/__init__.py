"""Flash attention: exact attention in tiles, forward and backward (chapter 14).

`flash_attention` is the function, `FlashAttention` the attention to plug in. The names
below are sorted as the chapter introduces them.
"""

from attnlib.flash.attention import (
    BACKENDS,
    FASTEST,
    Backend,
    FlashAttention,
    flash_attention,
    fused_suits,
)
from attnlib.flash.operators import (
    NAMESPACE,
    FlashFunction,
    FlashGradients,
    backward_batched,
    backward_flops,
    backward_shapes,
    flash_backward,
    flash_forward,
    forward_batched,
    forward_flops,
    forward_shapes,
    gradients_of,
    plain_rows,
    with_batch,
)
from attnlib.flash.tiles import (
    LOG2E,
    BlockSize,
    TiledAttention,
    apply_mask_,
    block_sizes,
    mask_tile,
    narrow_window,
    product,
    row_blocks,
    visible_tiles,
)

__all__ = [
    # The tiles
    "LOG2E",
    "BlockSize",
    "block_sizes",
    "row_blocks",
    "narrow_window",
    "visible_tiles",
    "product",
    "mask_tile",
    "apply_mask_",
    "TiledAttention",
    # The operators that they make
    "NAMESPACE",
    "flash_forward",
    "forward_shapes",
    "flash_backward",
    "backward_shapes",
    "with_batch",
    "forward_flops",
    "backward_flops",
    "forward_batched",
    "backward_batched",
    "FlashFunction",
    "FlashGradients",
    "plain_rows",
    "gradients_of",
    # The function and the class
    "flash_attention",
    "Backend",
    "fused_suits",
    "BACKENDS",
    "FASTEST",
    "FlashAttention",
]
