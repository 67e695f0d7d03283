"""The kernels compiled for GPUs that are not here: they fit, and use the tensor cores.

Triton can't compile in a process that interprets, as this one does, so that the programs in
benchmarks/ run in processes of their own.
"""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from drawn import BENCHMARKS, attention, close, normal, require_triton, run_compiled

require_triton()
sys.path.insert(0, str(BENCHMARKS))
import triton  # noqa: E402
from flash_gpu import GPU, as_table, candidates, why_not  # noqa: E402
from flash_kernels import KERNELS, Case, assembler, cases, resources  # noqa: E402
from flash_ladder import STEPS, WIDTH, constants, step_kernel  # noqa: E402

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

# Kernels for few queries have one setting for all GPUs, of which 8.6 is the smallest.
FEW_QUERIES = ("split", "merge", "paged", "fold")
FEW_SHARED_LIMIT, FEW_SPILL_LIMIT = 99 * 1024, 40


def limits(row):
    """Bytes of shared memory, bytes spilled, and the instruction that multiplies tiles."""
    multiplies = row["kernel"] not in ("statistics", "merge", "fold")
    if row["kernel"] in FEW_QUERIES:
        wanted = "mma.sync" if multiplies and row["dtype"] != "fp32" else None
        return FEW_SHARED_LIMIT, FEW_SPILL_LIMIT, wanted
    spilled = min(SPILL_LIMIT[dim] for dim in SPILL_LIMIT if row["dim"] <= dim)
    chosen_for = row["mask"] == "none" and row["group"] == 1
    wanted = TENSOR_CORE.get(row["capability"])
    if wanted and row["dtype"] == "fp32":  # tiles are small there
        wanted = None if row["precision"] == "ieee" else "mma.sync"
    return (
        SHARED_LIMIT[row["capability"]],
        spilled if chosen_for else OTHER_SPILL_LIMIT,
        wanted if multiplies else None,
    )


def problems(row):
    """What is wrong with one compiled kernel, in words."""
    found, (shared, spilled, wanted) = [], limits(row)
    if row["shared"] > shared:
        found.append(f"{row['shared']} bytes of shared memory")
    if row.get("tensor_memory", 0) > TENSOR_MEMORY_LIMIT:
        found.append(f"{row['tensor_memory']} columns of tensor memory")
    if max(row["spill_stores"], row["spill_loads"]) > spilled:
        found.append(f"{row['spill_stores']} + {row['spill_loads']} bytes spilled")
    if row["serialized"]:
        found.append("wgmma instructions serialized")
    if wanted and wanted not in row["tensor_core"]:
        found.append(f"no {wanted}")
    return found


def compiled(program, *options):
    """What a program in benchmarks/ prints, one kernel a line."""
    return list(map(json.loads, run_compiled(BENCHMARKS / program, *options)))


def unfit(rows):
    return {str(row): words for row in rows if (words := problems(row))}


def recorded(name, capability, kernels="kernels"):
    """The rows of a record for one capability; they are of this Triton."""
    path = BENCHMARKS / "results" / f"{name}.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["triton"] == triton.__version__
    return [row for row in record[kernels] if row["capability"] == capability]


# ── compiled, each kind for each capability ──────────────────────────────────────────


FLASH = ("attnlib/flash_triton/*.py", "benchmarks/flash_kernels.py")
RECORD = "benchmarks/results/flash_kernels.json"


@pytest.mark.costly("kernels/flash-{capability}", *FLASH, RECORD)
@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_flash(capability):
    """What the record has, and every kind of mask: all that chapter 15 prints is so."""
    for which in ["cores"] if capability == 75 else ["record", "masks"]:
        rows = compiled("flash_kernels.py", f"--{which}", "--json", str(capability))
        found = [Case(*(row[name] for name in Case._fields)) for row in rows]
        found = [case._replace(setting=tuple(case.setting)) for case in found]
        assert found == [c for c in cases(which) if c.capability == capability]
        if which == "record":
            assert rows == recorded("flash_kernels", capability)
        # of other settings than the table's, one is too large
        assert not unfit(row for row in rows if which != "record" or not row["setting"])


@pytest.mark.costly("kernels/fusion-{capability}", *FLASH, RECORD)
@pytest.mark.parametrize("capability", [90])
def test_a_multiply_add_is_one_instruction(capability):
    """As the launch says: without, each score and weight takes two."""
    rows = compiled("flash_kernels.py", "--fusion", "--json", str(capability))
    assert rows == recorded("flash_kernels", capability, "fusion")
    numbers = {(row["kernel"], row["fused"]): row["multiply_adds"] for row in rows}
    assert {kernel for kernel, _ in numbers} == set(KERNELS)
    for kernel in KERNELS:  # a thread has at least 16 scores
        assert numbers[kernel, True] >= numbers[kernel, False] + 16, numbers


# What 32 queries of 256 features in float32 take is more than the registers there: right,
# and slow. No other variant may be.
SPILLING = {(86, "fp32", 256, 32), (90, "fp32", 256, 32)}


@pytest.mark.costly(
    "kernels/split-{capability}",
    *("attnlib/flash_triton/*.py", "benchmarks/split_kernels.py"),
    "benchmarks/results/split_kernels.json",
)
@pytest.mark.parametrize("capability", [80, 86, 90, 100])
def test_split(capability):
    """What appendix E prints, and each dtype, width and kind of mask."""
    rows = compiled("split_kernels.py", "--all", "--json", str(capability))
    bad = {(r["capability"], r["dtype"], r["dim"], r["rows"]) for r in rows if unfit([r])}
    assert bad == {case for case in SPILLING if case[0] == capability}
    record = recorded("split_kernels", capability)
    assert [row for row in rows if row in record] == record
    names = ("dtype", "dim", "rows", "mask", "causal")
    made = [tuple(row[n] for n in names) for row in rows if row["kernel"] == "split"]
    dtypes, masks = ("fp16", "bf16", "fp32"), ("none", "boolean", "additive", "window")
    wide = itertools.product(dtypes, (16, 64, 96, 128, 256), (1, 32), ["additive"], [True])
    hidden = itertools.product(["fp16"], (128, 256), [8], masks, (False, True))
    assert {*wide, *hidden} <= set(made)
    merged = {(r["dtype"], r["dim"]) for r in rows if r["kernel"] == "merge"}
    assert merged == {(dtype, dim) for dtype, dim, *_ in made}


@pytest.mark.costly(
    "kernels/paged-{capability}",
    *("attnlib/flash_triton/*.py", "attnlib/paged.py", "benchmarks/paged_kernels.py"),
)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_paged(capability):
    """Each dtype and width, one query and many, pages of a power of two and others."""
    rows = compiled("paged_kernels.py", str(capability))
    assert len(rows) == 2 * (3 * 3 * 2 + 2)
    assert {row["kernel"] for row in rows} == {"paged", "fold"}
    assert not unfit(rows)


@pytest.mark.costly(
    "kernels/ladder", "benchmarks/flash_ladder.py", "benchmarks/results/flash_ladder.json"
)
def test_ladder():
    """What chapter 15's table of steps prints."""
    program = (
        "import json, flash_ladder as x\nfor s in x.STEPS: print(json.dumps(x.row_of(s)))"
    )
    record = json.loads((BENCHMARKS / "results/flash_ladder.json").read_text("utf-8"))
    assert record["triton"] == triton.__version__
    assert [json.loads(line) for line in run_compiled("-c", program)] == record["steps"]
    work = [row["instructions"] for row in record["steps"]]
    assert all(work[i] < work[i - 1] for i in (1, 2, 3, 4, 6))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_each_step_of_the_ladder_computes_causal_attention(step):
    dtype = torch.float32 if step.dtype == "fp32" else torch.float16
    q, k, v = (normal(2, 256, WIDTH, seed=seed, dtype=dtype) for seed in range(3))
    out = torch.full_like(q, torch.nan)
    step_kernel[256 // step.rows, 2](q, k, v, out, 256, WIDTH**-0.5, **constants(step))
    expected, _ = attention(*(x.double() for x in (q, k, v)), causal=True)
    close(out.double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-3)


HOPPER = ("benchmarks/flash_hopper.py", "benchmarks/results/flash_hopper.json")


@pytest.mark.costly("kernels/hopper-{capability}", *HOPPER)
@pytest.mark.parametrize("capability", [90, 100])
def test_hopper(capability):
    """What Triton makes of what Hopper brings, and what it refuses."""
    rows = compiled("flash_hopper.py", "--json", str(capability))
    assert rows == recorded("flash_hopper", capability)
    for row in rows:
        if "refused" not in row:
            product = "wgmma" if capability == 90 else "tcgen05"
            assert row[product] > 0 and (row["bulk"] > 0) == row["descriptors"]
            assert (row["async"] > 0) != row["descriptors"]


@pytest.mark.costly("kernels/hopper", *HOPPER)
def test_what_hopper_brings_is_right():
    """Descriptors, roles and persistent programs give the same, in the interpreter."""
    found = run_compiled(BENCHMARKS / "flash_hopper.py", "--dry-run")
    assert len(set(found)) == 8 and all(line.startswith("agrees: ") for line in found)


# ── through a launch, up to the GPU ──────────────────────────────────────────────────


# A stand-in says that there is a GPU; Triton then finds types and constants by itself.
STAND_IN = """
import os
import sys

import torch
import triton
from split_kernels import NoGPU
from triton.runtime import driver

from attnlib.flash_triton import launch

CAPABILITY = NoGPU.capability = int(sys.argv[1])
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # a later Triton's default
driver.set_active(NoGPU())
launch.capability_of = lambda tensor: CAPABILITY
"""

LAUNCH = """
import flash_kernels


def compare(kernel, grid, arguments):
    done = kernel.warmup(grid=grid, **arguments)
    found, name = done.src, kernel.__name__.removesuffix("_kernel")
    name = "all_gradients" if arguments.get("WITH_QUERY") else name
    case = flash_kernels.Case(name, CAPABILITY, "fp16", 128)
    expected, options = flash_kernels.source(case)
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
ways = [("none", True, None), ("boolean", False, None)]
ways += [("additive", True, 16), ("none", False, 1)]  # beside a window
for size, (kind, is_causal, window) in itertools.product(sizes, ways):
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


@pytest.mark.costly("kernels/launch-{capability}", *FLASH, "benchmarks/split_kernels.py")
@pytest.mark.parametrize("capability", [90])
def test_a_launch_compiles_the_same(capability):
    """Types, constants and what 16 divides are what Triton finds in a launch."""
    kernels = ["forward", "statistics", "all_gradients"]
    kernels += ["query_gradient", "key_value_gradient"]
    assert run_compiled("-c", STAND_IN + LAUNCH, str(capability)) == kernels


@pytest.mark.costly("kernels/sizes-{capability}", *FLASH, "benchmarks/split_kernels.py")
@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_sizes_that_become_constants(capability):
    """One batch, one head, one query, one key, one feature, with every kind of mask."""
    kernels = ["forward", "statistics", "key_value_gradient"]
    kernels += ["query_gradient", "key_value_gradient"]
    names = [f"{kernel}_kernel" for kernel in kernels] * (4 * 4)
    assert run_compiled("-c", STAND_IN + SIZES, str(capability)) == names


# ── what judges and tunes them ───────────────────────────────────────────────────────


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
SPLIT = {"kernel": "split", "tensor_core": ["mma.sync"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"shared": 227 * 1024 + 1}, ["232449 bytes of shared memory"]),
        ({"tensor_memory": 512}, []),
        ({"tensor_memory": 576}, ["576 columns of tensor memory"]),
        ({"spill_stores": 112}, []),
        ({"spill_stores": 116}, ["116 + 0 bytes spilled"]),
        ({"spill_loads": 124, "dim": 192}, ["0 + 124 bytes spilled"]),
        ({"spill_loads": 320, "group": 4}, []),
        ({"spill_loads": 324, "mask": "additive"}, ["0 + 324 bytes spilled"]),
        ({"serialized": True}, ["wgmma instructions serialized"]),
        ({"tensor_core": ["mma.sync"]}, ["no wgmma.mma_async"]),
        ({"tensor_core": [], "dtype": "fp32"}, []),
        ({"tensor_core": [], "dtype": "fp32", "precision": "tf32"}, ["no mma.sync"]),
        ({"capability": 75, "tensor_core": [], "shared": 64 * 1024 + 4},
         ["65540 bytes of shared memory"]),
        (SPLIT | {"shared": 99 * 1024 + 1}, ["101377 bytes of shared memory"]),
        (SPLIT | {"spill_stores": 44}, ["44 + 0 bytes spilled"]),
        (SPLIT | {"tensor_core": []}, ["no mma.sync"]),
        (SPLIT | {"tensor_core": [], "dtype": "fp32"}, []),
        (SPLIT | {"tensor_core": [], "kernel": "merge"}, []),
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
    old = as_table(rows, 75).splitlines()  # there float32 has the settings of float16
    assert old == [
        "SETTINGS",
        '    (75, "forward", 64): Setting(32, 32, 4, 1),',
        '    (75, "query_gradient", 64): Setting(32, 32, 4, 1),',
        "SETTINGS_FLOAT32",
    ]
