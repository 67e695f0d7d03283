# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The setting of each kernel on each GPU: sizes of tiles, warps and stages.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

from typing import Literal, NamedTuple

import torch


class Setting(NamedTuple):
    """How a kernel cuts its work: sides of a tile, warps that share it, loads in flight.

    Source: chapter 15, eq-registers, eq-shared-memory.
    """

    queries: int
    keys: int
    warps: int
    stages: int


Kernel = Literal["forward", "query_gradient", "key_value_gradient", "all_gradients"]

# By compute capability (from), kernel, and the larger head dimension (up to), for 16-bit
# numbers. Those for 80 keep below 99 KB of shared memory: 86, 89 and 120 have no more. 75
# has 64 KB, and no tensor cores that Triton uses: small tiles, for float32 too. Those for
# 90 were measured on an H200, benchmarks/results/flash_tune_90.json: the fastest that have
# room for a mask and spill little. The others are chosen by the limits.
SETTINGS: dict[tuple[int, Kernel, int], Setting] = {
    (75, "forward", 64): Setting(32, 32, 4, 1),
    (75, "forward", 128): Setting(32, 32, 8, 1),
    (75, "query_gradient", 64): Setting(32, 32, 8, 1),
    (75, "query_gradient", 128): Setting(16, 16, 8, 1),
    (75, "key_value_gradient", 64): Setting(16, 32, 8, 1),
    (75, "key_value_gradient", 128): Setting(16, 16, 8, 1),
    (75, "all_gradients", 64): Setting(16, 32, 8, 1),
    (75, "all_gradients", 128): Setting(16, 16, 8, 1),
    (80, "forward", 64): Setting(128, 64, 4, 3),
    (80, "forward", 128): Setting(128, 32, 4, 3),
    (80, "forward", 256): Setting(64, 32, 4, 2),
    (80, "query_gradient", 64): Setting(64, 64, 4, 2),
    (80, "query_gradient", 128): Setting(64, 32, 4, 2),
    (80, "query_gradient", 256): Setting(32, 32, 4, 1),
    (80, "key_value_gradient", 64): Setting(32, 64, 4, 3),
    (80, "key_value_gradient", 128): Setting(32, 64, 4, 2),
    (80, "key_value_gradient", 256): Setting(16, 32, 4, 1),
    (80, "all_gradients", 64): Setting(64, 128, 8, 2),
    (80, "all_gradients", 128): Setting(64, 64, 8, 2),
    (80, "all_gradients", 256): Setting(32, 32, 8, 1),
    (90, "forward", 64): Setting(64, 64, 4, 3),
    (90, "forward", 128): Setting(128, 64, 8, 3),
    (90, "forward", 256): Setting(128, 64, 8, 2),
    (90, "query_gradient", 64): Setting(64, 64, 4, 3),
    (90, "query_gradient", 128): Setting(128, 64, 8, 3),
    (90, "query_gradient", 256): Setting(128, 32, 8, 3),
    (90, "key_value_gradient", 64): Setting(64, 64, 4, 3),
    (90, "key_value_gradient", 128): Setting(64, 128, 8, 3),
    (90, "key_value_gradient", 256): Setting(64, 64, 8, 2),
    (90, "all_gradients", 64): Setting(64, 128, 8, 3),
    (90, "all_gradients", 128): Setting(64, 128, 8, 2),
    (90, "all_gradients", 256): Setting(32, 64, 8, 3),
    (100, "forward", 64): Setting(128, 128, 8, 3),
    (100, "forward", 128): Setting(128, 128, 8, 2),
    (100, "forward", 256): Setting(128, 32, 8, 2),
    (100, "query_gradient", 64): Setting(128, 64, 8, 3),
    (100, "query_gradient", 128): Setting(128, 64, 8, 2),
    (100, "query_gradient", 256): Setting(128, 32, 8, 1),
    (100, "key_value_gradient", 64): Setting(64, 128, 8, 3),
    (100, "key_value_gradient", 128): Setting(64, 128, 8, 2),
    (100, "key_value_gradient", 256): Setting(64, 64, 8, 1),
    (100, "all_gradients", 64): Setting(64, 128, 8, 2),
    (100, "all_gradients", 128): Setting(64, 64, 8, 2),
    (100, "all_gradients", 256): Setting(32, 32, 8, 1),
}

# float32 numbers are multiplied without tensor cores, out of registers: small tiles.
SETTINGS_FLOAT32 = {
    64: Setting(32, 32, 4, 1),
    128: Setting(32, 32, 8, 1),
    256: Setting(16, 16, 8, 1),
}

# The interpreter has no such limits; small tiles let short examples have several.
SETTING_INTERPRETED = Setting(32, 32, 1, 1)


def choose_setting(
    kernel: Kernel, dim: int, dtype: torch.dtype, capability: int
) -> Setting:
    """The setting of a kernel.

    Args:
        kernel: which one.
        dim: the larger one of d_k and d_v, at most 256, and 128 for 7.5.
        dtype: of the inputs.
        capability: compute capability of the GPU, 90 for 9.0; 0 in the interpreter.

    Source: chapter 15, eq-registers, eq-shared-memory.
    """
    if capability == 0:
        return SETTING_INTERPRETED
    limit = min(limit for limit in SETTINGS_FLOAT32 if dim <= limit)
    if dtype == torch.float32 and capability >= 80:
        return SETTINGS_FLOAT32[limit]
    # Capability 120 is a smaller machine than 90 and 100, though its number is larger.
    known = [first for first, _, _ in SETTINGS if first <= capability < 120]
    return SETTINGS[max(known, default=80), kernel, limit]
