"""Describes the machine that a benchmark ran on, for the record beside its numbers."""

import os
import platform
from pathlib import Path

import torch


def describe() -> dict[str, str | int]:
    """CPU, cores, threads and the versions that decide how fast the numbers came."""
    return {
        "cpu": cpu_name(),
        "instructions": instructions(),
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


def instructions() -> str:
    """The widest that PyTorch computes with here, and those for bfloat16 if there are any.

    A product in bfloat16 takes many times as long without; only Linux is asked for them.
    """
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8").split() if info.exists() else []
    halves = sorted({flag for flag in flags if flag.endswith("_bf16")})
    return ", ".join([torch.backends.cpu.get_cpu_capability(), *halves])
