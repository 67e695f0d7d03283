"""Which chapters can run here."""

import importlib.util

# Triton exists for Linux alone.
collect_ignore = [] if importlib.util.find_spec("triton") else ["15_flash_on_gpu.ipynb"]
