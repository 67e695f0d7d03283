"""Describes the machine that a benchmark ran on, for the record beside its numbers."""

import os
import platform
from pathlib import Path

import torch


def describe() -> dict[str, str | int]:
    """CPU, cores, threads and the versions that decide how fast the numbers came."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    """The processor's model; Linux hides it in /proc, elsewhere `platform` knows it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
