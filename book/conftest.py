"""Which chapters can run here."""

import importlib.util
import sys

# Triton exists for Linux alone.
KERNELS = "15_flash_on_gpu", "19_split_and_paged", "E_kernels_in_practice"
there = importlib.util.find_spec("triton")
# Ranks of a notebook are copies of its process.
RANKS = "23_many_processes", "24_ring_attention", "25_heads_layers_copies"
left = (() if there else KERNELS) + (() if sys.platform == "linux" else RANKS)
collect_ignore = [f"{name}.ipynb" for name in left]
