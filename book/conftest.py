"""Which chapters can run here, and how their kernels are spoken to."""

import importlib.util
import sys

import nbval.kernel
from jupyter_client import KernelManager

from bookkit.execute import own_sockets

# Triton exists for Linux alone.
KERNELS = "15_flash_on_gpu", "19_split_and_paged", "E_kernels_in_practice"
there = importlib.util.find_spec("triton")
# Ranks of a notebook are copies of its process.
RANKS = "23_many_processes", "24_ring_attention", "25_heads_layers_copies"
left = (() if there else KERNELS) + (() if sys.platform == "linux" else RANKS)
collect_ignore = [f"{name}.ipynb" for name in left]


def kernel_manager(**given) -> KernelManager:
    """In place of nbval's, which takes a port."""
    return KernelManager(**own_sockets(), **given)


nbval.kernel.KernelManager = kernel_manager
