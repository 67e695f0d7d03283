"""Which chapters can run here."""

import importlib.util

# Triton exists for Linux alone.
KERNELS = "15_flash_on_gpu", "19_split_and_paged", "E_kernels_in_practice"
there = importlib.util.find_spec("triton")
collect_ignore = [] if there else [f"{name}.ipynb" for name in KERNELS]
