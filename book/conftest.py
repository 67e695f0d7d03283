"""Which chapters can run here."""

import importlib.util

# Triton exists for Linux alone.
KERNELS = ["15_flash_on_gpu.ipynb", "19_split_and_paged.ipynb"]
collect_ignore = [] if importlib.util.find_spec("triton") else KERNELS
