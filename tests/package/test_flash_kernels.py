"""The kernels compiled for GPUs that are not here: they fit, and use the tensor cores.

Triton can't compile in a process that interprets, as this one does, so that
benchmarks/flash_kernels.py runs in processes of its own.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORD = BENCHMARKS / "results" / "flash_kernels.json"

if importlib.util.find_spec("triton") is None:
    if os.environ.get("CI") and sys.platform == "linux":
        pytest.fail("no triton found, but CI has to compile the kernels", pytrace=False)
    pytest.skip("no triton found", allow_module_level=True)

sys.path.insert(0, str(BENCHMARKS))
from flash_gpu import GPU, as_table, candidates, why_not  # noqa: E402
from flash_kernels import KERNELS, Case, assembler, cases, resources  # noqa: E402

from attnlib.flash_triton import SETTINGS, Setting, choose_setting  # noqa: E402

# Bytes of shared memory that one program may have. The table's settings for 80 serve 86,
# 89 and 120 too, which have 99 KB: that is the limit to keep. 80 itself has 163 KB.
SHARED_LIMIT = {75: 64 * 1024, 80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}

TENSOR_MEMORY_LIMIT = 512  # columns, on 100; a launch that needs more is refused by Triton

# The instructions that multiply tiles on tensor cores; Triton has none for 75.
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

# Bytes a thread, for so many features. Kernels that need all 255 registers keep a few of
# their numbers in memory, most of them outside of the loops.
SPILL_LIMIT = {128: 112, 256: 120}
OTHER_SPILL_LIMIT = 320  # the settings were chosen for no mask, and no heads that share

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_kernel
    24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size
"""

SERIALIZED = (
    "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions defining accumulator registers\n"
)


def problems(row):
    """What is wrong with one compiled kernel, in words."""
    found = []
    if row["shared"] > SHARED_LIMIT[row["capability"]]:
        found.append(f"{row['shared']} bytes of shared memory")
    if row["tensor_memory"] > TENSOR_MEMORY_LIMIT:
        found.append(f"{row['tensor_memory']} columns of tensor memory")
    limit = min(SPILL_LIMIT[dim] for dim in SPILL_LIMIT if row["dim"] <= dim)
    chosen_for = row["mask"] == "none" and row["group"] == 1
    limit = limit if chosen_for else OTHER_SPILL_LIMIT
    if max(row["spill_stores"], row["spill_loads"]) > limit:
        found.append(f"{row['spill_stores']} + {row['spill_loads']} bytes spilled")
    if row["serialized"]:
        found.append("wgmma instructions serialized")
    wanted = TENSOR_CORE.get(row["capability"])
    exact = row["dtype"] == "fp32" and row["precision"] == "ieee"
    multiplies = row["kernel"] != "statistics" and not exact
    if wanted and row["dtype"] == "fp32":
        wanted = "mma.sync"  # tiles are small there
    if wanted and multiplies and wanted not in row["tensor_core"]:
        found.append(f"no {wanted}")
    return found


def run(*command):
    """What a script prints, in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent)))
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def capability(pytestconfig):
    """The one that is compiled for; with `--thorough` all of them, which is 0."""
    return 0 if pytestconfig.getoption("--everything") else 90


def compiled(which, capability):
    """What benchmarks/flash_kernels.py finds."""
    found = run(BENCHMARKS / "flash_kernels.py", which, "--json", str(capability))
    return [json.loads(line) for line in found]


@pytest.fixture(scope="module")
def rows(capability, pytestconfig):
    """The kernels of the record."""
    if capability and "flash_triton" not in pytestconfig.changed:
        pytest.skip("unchanged; --thorough compiles them")
    return compiled("--record", capability)


def test_all_were_compiled(rows, capability):
    """None is missing."""
    names = Case._fields
    wanted = [c for c in cases("record") if capability in (0, c.capability)]
    found = [Case(*(row[name] for name in names)) for row in rows]
    assert [case._replace(setting=tuple(case.setting)) for case in found] == wanted


def test_resources_and_instructions(rows):
    """Shared memory, spills and tensor cores, with the settings of the table."""
    rows = [row for row in rows if not row["setting"]]  # of the others, one is too large
    bad = {str(Case(*(row[n] for n in Case._fields))): problems(row) for row in rows}
    assert not {case: words for case, words in bad.items() if words}


def test_every_kind_of_mask(capability, pytestconfig):
    """Each kernel with each, with full tiles and with others."""
    if capability and "flash_triton" not in pytestconfig.changed:
        pytest.skip("unchanged; --thorough compiles them")
    rows = compiled("--masks", capability)
    found = {(r["kernel"], r["capability"], r["mask"], r["even"]) for r in rows}
    kernels = ("forward", "query_gradient", "key_value_gradient", "all_gradients")
    capabilities = [capability] if capability else [80, 90, 100]
    masks, even = ("none", "boolean", "additive", "window"), (True, False)
    assert found == set(itertools.product(kernels, capabilities, masks, even))
    bad = {str(Case(*(row[n] for n in Case._fields))): problems(row) for row in rows}
    assert not {case: words for case, words in bad.items() if words}


def test_kernels_for_a_t4(capability):
    """7.5 has 64 KB, and no tensor cores that Triton uses: tiles of its own."""
    if capability:
        pytest.skip("--thorough compiles them")
    rows = compiled("--cores", 75)
    assert [row["kernel"] for row in rows] == [case.kernel for case in cases("cores")]
    bad = {str(Case(*(row[n] for n in Case._fields))): problems(row) for row in rows}
    assert not {case: words for case, words in bad.items() if words}


def test_a_multiply_add_is_one_instruction(capability, pytestconfig):
    """As the launch says: without, each score and weight takes two."""
    if capability and "flash_triton" not in pytestconfig.changed:
        pytest.skip("unchanged; --thorough compiles them")
    rows = compiled("--fusion", 90)
    assert json.loads(RECORD.read_text(encoding="utf-8"))["fusion"] == rows
    numbers = {(row["kernel"], row["fused"]): row["multiply_adds"] for row in rows}
    kernels = {kernel for kernel, _ in numbers}
    assert len(kernels) >= 3
    for kernel in kernels:  # a thread has at least 16 scores
        assert numbers[kernel, True] >= numbers[kernel, False] + 16, numbers


def test_the_record_is_up_to_date(rows, capability):
    """What chapter 15 prints is what this Triton makes of these kernels."""
    import triton

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    kernels = [k for k in record["kernels"] if capability in (0, k["capability"])]
    assert (record["triton"], kernels) == (triton.__version__, rows)


# Goes through a launch up to the GPU. A stand-in says that there is one; Triton then finds
# types and constants by itself.
STAND_IN = """
import os
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from attnlib.flash_triton import launch

CAPABILITY = int(sys.argv[1])
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # a later Triton's default


class NoGPU:
    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(NoGPU())
launch.capability_of = lambda tensor: CAPABILITY
"""

LAUNCH = """
import flash_kernels


def compare(kernel, grid, arguments):
    done = kernel.warmup(grid=grid, **arguments)
    found, name = done.src, kernel.__name__.removesuffix("_kernel")
    name = "all_gradients" if arguments.get("WITH_QUERY") else name
    expected, options = flash_kernels.source(flash_kernels.Case(name, 90, "fp16", 128))
    used = {option: getattr(done.metadata, option) for option in options}
    assert used == options, (used, options)
    assert found.signature == expected.signature, (found.signature, expected.signature)
    assert found.constants == expected.constants, (found.constants, expected.constants)
    missing = expected.attrs.keys() - found.attrs.keys()
    assert not missing, missing
    print(name)


started = lambda kernel, grid: lambda **arguments: compare(kernel, grid, arguments)
triton.JITFunction.__getitem__ = started  # where a launch would reach the GPU
inputs = [torch.randn(2, 256, 3, 128).half().transpose(1, 2) for _ in range(3)]
output, lse = launch.run_forward(*inputs, None, True, 0.1)
numbers = launch.run_statistics(output, output, lse, lse)
for same_bits in (False, True):
    torch.use_deterministic_algorithms(same_bits)
    launch.run_backward(*inputs, None, output, numbers, True, 0.1, (True, True))
"""


@pytest.mark.thorough
def test_a_launch_compiles_the_same():
    """Types, constants and what 16 divides are what Triton finds in a launch."""
    kernels = ["forward", "statistics", "all_gradients"]
    kernels += ["query_gradient", "key_value_gradient"]
    assert run("-c", STAND_IN + LAUNCH, "90") == kernels


# A size or a stride of 1 becomes a constant, one that 16 divides is known to be so: each
# makes another program. Triton would compile them at the first launch, before a user.
SIZES = """
import itertools


def compile_it(kernel, programs, device, **arguments):
    done = kernel.warmup(grid=(programs,), **arguments)
    assert "cubin" in done.asm
    print(kernel.__name__, flush=True)


def masks(kind, batch, heads, queries, keys):
    if kind == "none":
        return None
    dtype = torch.uint8 if kind == "boolean" else torch.float16
    rows = torch.zeros(queries, 1, dtype=dtype)  # with strides of 0, and of 1
    return rows.expand(batch, heads, queries, keys)


launch.launch = compile_it
sizes = ((1, 1, 1, 1, 1), (2, 1, 1, 40, 17), (1, 2, 40, 1, 16), (1, 1, 1, 64, 64))
kinds, causal, windows = ("none", "boolean", "additive"), (False, True), (None, 1, 16)
if sys.argv[2] == "few":
    sizes, causal, windows = sizes[:2], (True,), (None, 1)
for size, kind, is_causal, window in itertools.product(sizes, kinds, causal, windows):
    if window is not None and (kind == "boolean" or size[2:4] == (1, 1)):
        continue  # one kind of mask beside it, and something to hide
    batch, heads, queries, keys, dim = size
    mask = masks(kind, batch, heads, queries, keys)
    query = torch.zeros(batch, queries, heads, dim).half().transpose(1, 2)
    key, value = (torch.zeros(batch, heads, keys, dim).half() for _ in range(2))
    output, lse = launch.run_forward(query, key, value, mask, is_causal, 1.0, window)
    numbers = launch.run_statistics(output, output, lse, lse)
    rest = (output, numbers, is_causal, 1.0, (True, True), window)
    for same_bits in (False, True):
        torch.use_deterministic_algorithms(same_bits)
        launch.run_backward(query, key, value, mask, *rest)
    torch.use_deterministic_algorithms(False)
"""


@pytest.mark.parametrize("of", (75, 80, 90, 100))
def test_sizes_that_become_constants(of, capability, pytestconfig):
    """One batch, one head, one query, one key, one feature, with every kind of mask."""
    if capability not in (0, of):
        pytest.skip("--thorough compiles for each")
    if capability and "flash_triton" not in pytestconfig.changed:
        pytest.skip("unchanged; --thorough compiles them")
    few = "few" if capability else "all"
    kernels = ["forward", "statistics", "key_value_gradient"]
    kernels += ["query_gradient", "key_value_gradient"]
    times = 2 * 3 if capability else 4 * 3 * 2
    times += 2 if capability else 3 * 2 * 2 * 2  # with windows
    names = [f"{kernel}_kernel" for kernel in kernels] * times
    assert run("-c", STAND_IN + SIZES, str(of), few) == names


def test_the_report_of_ptxas_is_read():
    """Registers and spills; an unknown text is no 0."""
    expected = {"registers": 168, "spill_stores": 20, "spill_loads": 16}
    expected["serialized"] = False
    assert resources(REPORT) == expected
    assert resources(SERIALIZED + REPORT) == expected | {"serialized": True}
    with pytest.raises(ValueError, match="expected registers and spills"):
        resources("ptxas info    : 0 bytes gmem")


GOOD = {
    **Case("forward", 90, "fp16", 64)._asdict(),
    **{"shared": 1000, "spill_stores": 0, "spill_loads": 0, "serialized": False},
    **{"tensor_core": ["wgmma.mma_async"], "tensor_memory": 0},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"shared": 227 * 1024 + 1}, ["232449 bytes of shared memory"]),
        ({"tensor_memory": 512}, []),
        ({"tensor_memory": 576}, ["576 columns of tensor memory"]),
        ({"spill_stores": 112}, []),
        ({"spill_stores": 116, "dim": 192}, []),
        ({"spill_stores": 124, "dim": 192}, ["124 + 0 bytes spilled"]),
        ({"spill_stores": 116}, ["116 + 0 bytes spilled"]),
        ({"spill_loads": 116}, ["0 + 116 bytes spilled"]),
        ({"spill_loads": 320, "group": 4}, []),
        ({"spill_loads": 324, "group": 4}, ["0 + 324 bytes spilled"]),
        ({"spill_stores": 320, "mask": "boolean"}, []),
        ({"spill_loads": 324, "mask": "additive"}, ["0 + 324 bytes spilled"]),
        ({"serialized": True}, ["wgmma instructions serialized"]),
        ({"tensor_core": ["mma.sync"]}, ["no wgmma.mma_async"]),
        ({"tensor_core": [], "dtype": "fp32"}, []),
        ({"tensor_core": [], "dtype": "fp32", "precision": "tf32"}, ["no mma.sync"]),
        ({"capability": 100, "tensor_core": ["tcgen05.mma"]}, []),
        ({"capability": 75, "tensor_core": []}, []),
        ({"capability": 75, "tensor_core": [], "shared": 64 * 1024 + 4},
         ["65540 bytes of shared memory"]),
        ({"capability": 80, "shared": 100 * 1024, "tensor_core": ["mma.sync"]},
         ["102400 bytes of shared memory"]),
    ],
)  # fmt: skip
def test_a_fault_is_noticed(change, words):
    """Each limit, once broken."""
    assert problems({**GOOD, **change}) == words


@pytest.mark.parametrize("name", ["ptxas", "ptxas-blackwell"])
def test_the_assembler_is_the_one_that_triton_calls(tmp_path, name):
    """Whatever its name, with its version and its report; other commands pass by."""
    tool = tmp_path / name
    tool.write_text("#!/bin/sh\necho Cuda, release 13.1, V13.1.0; echo report >&2\n")
    tool.chmod(0o755)
    with assembler() as called:
        subprocess.run([sys.executable, "-c", "0"], check=True)
        assert called == {}
        with (tmp_path / "log").open("w") as log:
            subprocess.run([tool, "-v", "kernel.ptx"], check=True, stderr=log)
    assert called == {"report": "report\n", "name": f"{name} 13.1"}


# What this GPU can't do, by name, with a tensor that says that it lies there.
ON_A_T4 = """
from types import SimpleNamespace
from unittest.mock import patch

from attnlib.flash import BACKENDS
from attnlib.flash_triton import attention

attention.capability_of = lambda tensor: CAPABILITY
torch.cuda.get_device_capability = lambda device: divmod(CAPABILITY, 10)


def there(dtype, width):
    shape = (8, width)
    return SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype, shape=shape)


for dtype in (torch.float16, torch.float32, torch.bfloat16):
    tensor = there(dtype, 128)
    suits = BACKENDS["triton"].suits(tensor, tensor, tensor, None, False)
    print(suits, attention.refusal(tensor, tensor, None))
half, wide = there(torch.float16, 64), there(torch.float16, 129)
print(attention.refusal(half, wide, None))
with patch.object(triton, "__version__", "3.3.1"):
    print(attention.refusal(half, half, None))
"""


@pytest.mark.thorough
def test_what_a_t4_takes():
    """16 and 32 bits, but no bfloat16; never by itself."""
    found = run("-c", STAND_IN + ON_A_T4, "75")
    tiles = 'on a GPU of compute capability 7.5; backend="torch" has tiles for all'
    assert found == [
        "False None",
        "False None",
        f"False query: expected float16 or float32, got torch.bfloat16 {tiles}",
        f"value: expected at most 128 features, got shape (8, 129) {tiles}",
        f"expected triton 3.4 or newer {tiles}, got 3.3.1",
    ]
    expected = "query: expected a GPU of compute capability 7.5 or higher, got (7, 0)"
    found = run("-c", STAND_IN + ON_A_T4, "70")
    assert found[0] == f"False {expected}" and expected in found[3]
    found = run("-c", STAND_IN + ON_A_T4, "80")
    assert found[:4] == ["True None", "False None", "True None", "None"]


def test_tiles_for_a_t4():
    """Of its own for either dtype, where it takes the width; those of 8.0 are others."""
    for kernel, dim in itertools.product(KERNELS, (1, 64, 65, 128)):
        limit = 64 if dim <= 64 else 128
        for dtype in (torch.float16, torch.float32):
            chosen = choose_setting(kernel, dim, dtype, 75)
            assert chosen == SETTINGS[75, kernel, limit]
        assert chosen != choose_setting(kernel, dim, torch.float16, 80)


HALF, WIDE = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("kernel", "setting", "dtype", "capability", "words"),
    [
        ("forward", (128, 128, 8, 2), HALF, 90, None),  # 128 · 256 / 256 = 128 registers
        ("forward", (128, 128, 4, 2), HALF, 90, "at least 256 registers"),
        ("query_gradient", (128, 128, 4, 2), HALF, 90, "at least 256 registers"),
        ("key_value_gradient", (32, 64, 4, 2), HALF, 90, None),
        ("key_value_gradient", (64, 128, 4, 2), HALF, 90, "at least 320 registers"),
        ("forward", (64, 64, 8, 4), HALF, 80, None),  # 3 · 64 · 512 bytes
        ("forward", (64, 64, 8, 5), HALF, 80, "at least 131072 bytes"),
        ("forward", (64, 64, 8, 1), WIDE, 80, None),
        ("forward", (64, 64, 8, 2), WIDE, 80, "stages are for tensor cores"),
        ("forward", (64, 64, 4, 1), WIDE, 80, "8192 multiply-adds a thread"),
        ("forward", (64, 64, 8, 2), HALF, 75, "stages are for tensor cores"),
    ],
)
def test_what_cannot_fit_is_not_tried(kernel, setting, dtype, capability, words):
    """Numbers by hand, for 128 features; a setting that may fit is never left out."""
    gpu = GPU(capability, 228 * 1024 if capability == 90 else 99 * 1024)
    found = why_not(kernel, Setting(*setting), 128, dtype, gpu)
    assert found is None if words is None else found.startswith(words)


def test_the_table_is_among_what_is_tried():
    """All its settings, on the GPU that they are for."""
    for (capability, kernel, dim), setting in SETTINGS.items():
        gpu = GPU(capability, SHARED_LIMIT[capability])
        tried, refused = candidates(kernel, dim, HALF, gpu)
        assert setting in tried, (capability, kernel, dim, refused.get(setting))
        assert len(tried) + len(refused) == 4 * 4 * 2 * 4
        assert why_not(kernel, setting, dim, HALF, gpu) is None


def test_tuning_writes_the_table():
    """Lines of settings.py: the least time, of all kernels together for float32."""
    rows = [
        {"kernel": kernel, "dim": 64, "dtype": dtype, "ms": ms}
        for kernel, dtype, ms in (
            ("forward", "float16", [[64, 32, 4, 2, 1.5], [32, 32, 4, 1, 1.0]]),
            ("query_gradient", "float16", []),  # nothing ran
            ("forward", "float32", [[16, 16, 4, 1, 1.0], [32, 32, 4, 1, 2.0]]),
            ("query_gradient", "float32", [[16, 16, 4, 1, 5.0], [32, 32, 4, 1, 2.0]]),
        )
    ]
    lines = ["SETTINGS", '    (90, "forward", 64): Setting(32, 32, 4, 1),']
    lines += ["SETTINGS_FLOAT32", "    64: Setting(32, 32, 4, 1),"]
    assert as_table(rows, 90).splitlines() == lines
    entries = eval("{" + lines[1] + "}", {"Setting": Setting})
    assert entries == {(90, "forward", 64): Setting(32, 32, 4, 1)}
    old = as_table(rows, 75).splitlines()  # there float32 has the settings of float16
    assert old == [
        "SETTINGS",
        '    (75, "forward", 64): Setting(32, 32, 4, 1),',
        '    (75, "query_gradient", 64): Setting(32, 32, 4, 1),',
        "SETTINGS_FLOAT32",
    ]


HOPPER = BENCHMARKS / "flash_hopper.py"


@pytest.mark.thorough
def test_what_hopper_brings_is_right():
    """Descriptors, roles and persistent programs give the same, in the interpreter."""
    found = run(HOPPER, "--dry-run")
    assert len(set(found)) == 8 and all(line.startswith("agrees: ") for line in found)


def test_what_hopper_brings_is_recorded(capability):
    """What Triton makes of it, and what it refuses; the page shows these numbers."""
    import triton

    record = json.loads((BENCHMARKS / "results/flash_hopper.json").read_text("utf-8"))
    assert record["triton"] == triton.__version__
    for row in record["kernels"]:
        if "refused" not in row:
            product = "wgmma" if row["capability"] == 90 else "tcgen05"
            assert row[product] > 0 and (row["bulk"] > 0) == row["descriptors"]
            assert (row["async"] > 0) != row["descriptors"]
    if capability:
        pytest.skip("--thorough compiles them")
    for capability in (90, 100):
        rows = [row for row in record["kernels"] if row["capability"] == capability]
        found = [json.loads(line) for line in run(HOPPER, "--json", str(capability))]
        assert found == rows
