"""The benchmarks that need a GPU, tried without one."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton here")
@pytest.mark.costly("benchmark/flash_gpu", "benchmarks/flash_gpu.py")
def test_the_benchmark_of_the_kernels_runs_in_the_interpreter():
    command = [sys.executable, BENCHMARKS / "flash_gpu.py", "--dry-run"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "forward" in done.stdout
