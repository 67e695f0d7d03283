"""The kernels of the ladder: each computes the same; their record is of this Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton found", allow_module_level=True)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORD = json.loads((BENCHMARKS / "results" / "flash_ladder.json").read_text("utf-8"))
SPEC = importlib.util.spec_from_file_location(
    "flash_ladder", BENCHMARKS / "flash_ladder.py"
)
flash_ladder = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(flash_ladder)
STEPS = flash_ladder.STEPS


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_each_step_computes_causal_attention(step):
    torch.manual_seed(0)
    tokens, width = 256, flash_ladder.WIDTH
    dtype = torch.float32 if step.dtype == "fp32" else torch.float16
    q, k, v = torch.randn(3, 2, tokens, width).to(dtype)
    out = torch.full_like(q, torch.nan)
    grid = (tokens // step.rows, 2)
    sizes = flash_ladder.constants(step)
    flash_ladder.step_kernel[grid](q, k, v, out, tokens, width**-0.5, **sizes)
    wide = (x.double() for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*wide, is_causal=True)
    error = (out.double() - expected).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2e-3)


def test_the_record_has_these_steps():
    assert [row["name"] for row in RECORD["steps"]] == [step.name for step in STEPS]
    work = [row["instructions"] for row in RECORD["steps"]]
    assert all(work[i] < work[i - 1] for i in (1, 2, 3, 4, 6))


def test_the_record_is_what_is_compiled(request):
    import triton

    if not request.config.getoption("--everything"):
        pytest.skip("--thorough compiles a step")
    if triton.__version__ != RECORD["triton"]:
        pytest.skip(f"recorded with triton {RECORD['triton']}")
    program = "import json, flash_ladder as x; print(json.dumps(x.row_of(x.STEPS[4])))"
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, env=environ, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()
    assert json.loads(run.stdout.splitlines()[-1]) == RECORD["steps"][4]
