"""Which chapters can run here, and how their kernels are spoken to."""

import importlib.util
import os
import sys
import tempfile
import uuid

import nbval.kernel
from jupyter_client import KernelManager

# Triton exists for Linux alone.
KERNELS = "15_flash_on_gpu", "19_split_and_paged", "E_kernels_in_practice"
there = importlib.util.find_spec("triton")
# Ranks of a notebook are copies of its process.
RANKS = "23_many_processes", "24_ring_attention", "25_heads_layers_copies"
left = (() if there else KERNELS) + (() if sys.platform == "linux" else RANKS)
collect_ignore = [f"{name}.ipynb" for name in left]


def kernel_manager(**given) -> KernelManager:
    """By sockets of its own: a free port is chosen, and may be taken before it is bound.

    By the ranks of a chapter or a test beside it, for example.
    """
    sockets = os.path.join(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex}")
    return KernelManager(transport="ipc", ip=sockets, **given)


if sys.platform != "win32":
    nbval.kernel.KernelManager = kernel_manager
