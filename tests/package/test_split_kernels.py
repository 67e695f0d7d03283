"""The kernels of appendix E compiled for GPUs that are not here, through their launch."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORD = BENCHMARKS / "results" / "split_kernels.json"

if importlib.util.find_spec("triton") is None:
    if os.environ.get("CI") and sys.platform == "linux":
        pytest.fail("no triton found, but CI has to compile the kernels", pytrace=False)
    pytest.skip("no triton found", allow_module_level=True)

SHARED_LIMIT = 99 * 1024  # of 8.6, the smallest; one setting serves all
SPILL_LIMIT = 40  # bytes a thread


def problems(row):
    """What is wrong with one compiled kernel, in words."""
    found = []
    if row["shared"] > SHARED_LIMIT:
        found.append(f"{row['shared']} bytes of shared memory")
    if max(row["spill_stores"], row["spill_loads"]) > SPILL_LIMIT:
        found.append(f"{row['spill_stores']} + {row['spill_loads']} bytes spilled")
    multiplies = row["kernel"] == "split" and row["dtype"] != "fp32"
    if multiplies and not row["tensor_core"]:
        found.append("no tensor cores")
    return found


def compiled(*options):
    """What benchmarks/split_kernels.py prints, in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent)))
    command = [sys.executable, BENCHMARKS / "split_kernels.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def capability(pytestconfig):
    """The one that is compiled for; with `--thorough` all of them, which is 0."""
    if pytestconfig.getoption("--everything"):
        return 0
    if not {"flash_triton", "split_kernels"} & pytestconfig.changed:
        pytest.skip("unchanged; --thorough compiles them")
    return 90


def test_the_record_is_up_to_date(capability):
    """What appendix E prints is what this Triton makes of these kernels."""
    import triton

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    kernels = [k for k in record["kernels"] if capability in (0, k["capability"])]
    found = compiled("--json", str(capability))
    assert (record["triton"], kernels) == (triton.__version__, found)


def test_what_the_record_has_fits():
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["kernels"]
    assert {row["capability"] for row in rows} == {80, 86, 90, 100}
    bad = {str(row): problems(row) for row in rows}
    assert not {case: words for case, words in bad.items() if words}


@pytest.mark.parametrize("of", [80, 86, 90, 100])
def test_every_variant_fits(of, pytestconfig):
    """Every dtype, width and kind of mask, one query and many."""
    if not pytestconfig.getoption("--everything"):
        pytest.skip("--thorough compiles them")
    rows = compiled("--all", "--json", str(of))
    split = [row for row in rows if row["kernel"] == "split"]
    assert len(split) == 3 * 5 * 3 * 4 * 2 and len(rows) == len(split) + 3 * 5
    bad = {str(row): problems(row) for row in rows}
    assert not {case: words for case, words in bad.items() if words}


GOOD = {
    **{"kernel": "split", "dtype": "fp16", "shared": 1000},
    **{"spill_stores": 0, "spill_loads": 0, "tensor_core": ["mma.sync"]},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"shared": 99 * 1024 + 1}, ["101377 bytes of shared memory"]),
        ({"spill_stores": 40}, []),
        ({"spill_stores": 44}, ["44 + 0 bytes spilled"]),
        ({"spill_loads": 44}, ["0 + 44 bytes spilled"]),
        ({"tensor_core": []}, ["no tensor cores"]),
        ({"tensor_core": [], "dtype": "fp32"}, []),
        ({"tensor_core": [], "kernel": "merge"}, []),
    ],
)
def test_a_fault_is_noticed(change, words):
    """Each limit, once broken."""
    assert problems({**GOOD, **change}) == words
