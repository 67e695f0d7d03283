"""The benchmarks that need a GPU, tried without one."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton here")
@pytest.mark.costly(
    "benchmark/{name}", "benchmarks/flash_gpu.py", "benchmarks/decoding_gpu.py"
)
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [("flash_gpu", ["--jobs", "2"], "forward"), ("decoding_gpu", [], "chosen")],
)
def test_a_benchmark_of_the_kernels_runs_in_the_interpreter(name, options, said):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--dry-run", *options]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
