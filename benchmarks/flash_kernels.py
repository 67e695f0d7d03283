"""What the Triton kernels use on GPUs that are not here: compiled for them, not run.

Registers, spills and whether products wait for each other are from the report of the
assembler that Triton called, as Triton called it; shared memory and instructions from
Triton's. Not with TRITON_INTERPRET set: a process either interprets or compiles.

    python benchmarks/flash_kernels.py            writes results/flash_kernels.json
    python benchmarks/flash_kernels.py --json     prints it, one kernel a line
    python benchmarks/flash_kernels.py --json 90  the same for one compute capability
    python benchmarks/flash_kernels.py --full     prints every head dimension and dtype
    python benchmarks/flash_kernels.py --masks    prints every kind of mask
    python benchmarks/flash_kernels.py --cores    prints those for 7.5, a T4
    python benchmarks/flash_kernels.py --grid     writes results/flash_tiles.json
    ... --masks --json 90                         the same for one compute capability
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnlib import flash_triton
from attnlib.flash_triton.blocks import Heads
from attnlib.flash_triton.launch import STATISTICS_ROWS, padded

FLOAT32 = ("lse", "grad_lse", "level", "delta")  # pointers to one number a query
SIZES = ("heads", "queries", "keys", "together", "scale", "window")
KERNELS = ("forward", "query_gradient", "key_value_gradient", "all_gradients")
CAPABILITIES = (80, 90, 100)
FUSED_INTO_ONE = re.compile(r"\bfma\.rn(?:\.ftz)?\.f32")  # a · b + c, rounded once
TENSOR_CORE = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
DIVISIBLE = [["tt.divisibility", 16]]

# The forward kernel for 90 with other settings and widths than the table's, to compare with
# eq-registers and eq-shared-memory: queries, keys, d_k, d_v, warps, stages.
COMPARED = (
    (64, 64, 64, 128, 4, 2),
    (128, 32, 64, 128, 4, 2),
    (128, 64, 128, 64, 8, 2),
    (128, 64, 64, 64, 4, 3),
    (128, 32, 64, 256, 8, 2),
    (128, 128, 128, 128, 8, 2),
    (128, 128, 128, 128, 4, 2),
)

# The forward kernel for 90 over a grid of settings, which the figure of chapter 15 shows:
# head dimension, queries, keys, warps, stages.
GRID = tuple(itertools.product((64, 128), (64, 128), (32, 64, 128), (4, 8), (1, 2, 3)))


class Case(NamedTuple):
    """One kernel for one GPU."""

    kernel: str
    capability: int
    dtype: str
    dim: int
    causal: bool = True
    mask: str = "none"
    even: bool = True
    d_v: int = 0  # as dim
    setting: tuple[int, ...] = ()  # the table's
    group: int = 1  # heads of queries that share one of keys and values
    precision: str = "ieee"  # of products of float32
    fused: bool = True  # as a launch has it


def cases(which: str) -> list[Case]:
    """What to compile. A causal kernel holds all the code that a plain one does."""
    if which == "full":
        dims, dtypes = (16, 32, 40, 64, 80, 96, 128, 192, 256), ("fp16", "bf16", "fp32")
        causal = (True, False)
        found = itertools.product(KERNELS, CAPABILITIES, dtypes, dims, causal)
        return [Case(*case) for case in found]
    if which == "masks":
        masks, even = ("none", "boolean", "additive", "window"), (True, False)
        found = itertools.product(
            KERNELS, CAPABILITIES, ("fp16",), (128,), (True,), masks, even
        )
        return [Case(*case) for case in found]
    if which == "cores":  # no tensor cores there, and float32 has tiles of its own
        masks, dims, dtypes = ("none", "additive"), (64, 128), ("fp16", "fp32")
        found = itertools.product(KERNELS, dtypes, dims, masks)
        kernels = [Case(k, 75, t, d, True, m, m == "none") for k, t, d, m in found]
        return [*kernels, *(Case("statistics", 75, t, 128) for t in dtypes)]
    if which == "fusion":
        found = itertools.product(KERNELS, (True, False))
        return [Case(kernel, 90, "fp16", 64, fused=fused) for kernel, fused in found]
    if which == "grid":
        plain = {"causal": False}
        return [Case("forward", 90, "fp16", d, setting=s, **plain) for d, *s in GRID]
    found = itertools.product(KERNELS, CAPABILITIES, ("fp16",), (64, 128))
    extra = [
        Case("forward", 90, "bf16", 128, causal=False),
        Case("key_value_gradient", 90, "fp32", 128, causal=False),
        Case("key_value_gradient", 90, "fp16", 256, causal=False, even=False),
        Case("query_gradient", 90, "fp16", 80, False, "boolean", even=False),
        Case("statistics", 90, "fp16", 128),
        Case("all_gradients", 90, "fp16", 128, group=4),
        Case("all_gradients", 80, "fp16", 96, even=False),
        Case("forward", 90, "fp32", 64, precision="tf32x3"),
        Case("all_gradients", 80, "fp32", 64, precision="tf32"),
    ]
    compared = [
        Case("forward", 90, "fp16", d_k, causal=False, d_v=d_v, setting=(r, c, w, g))
        for r, c, d_k, d_v, w, g in COMPARED
    ]
    return [*(Case(*case) for case in found), *extra, *compared]


def constants_of(case: Case) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants, and warps and stages, as the module chooses them for this case."""
    dtype = torch.float32 if case.dtype == "fp32" else torch.float16
    d_k, d_v = case.dim, case.d_v or case.dim
    constants = {
        **{"D_K": d_k, "D_V": d_v, "PADDED_K": padded(d_k), "PADDED_V": padded(d_v)},
        **{"CAUSAL": case.causal, "BLOCK_Q": 64, "EVEN": case.even},
        **{"ROWS": STATISTICS_ROWS, "GROUP": case.group, "PRECISION": case.precision},
        "WITH_QUERY": case.kernel == "all_gradients",
        "MASK": "none" if case.mask == "window" else case.mask,
    }
    if case.mask != "window":
        constants["window"] = None
    options = {"num_warps": 4, "num_stages": 3}
    if case.kernel != "statistics":
        chosen = flash_triton.choose_setting(case.kernel, d_k, dtype, case.capability)
        chosen = flash_triton.Setting(*case.setting) if case.setting else chosen
        constants |= {"BLOCK_Q": chosen.queries, "BLOCK_K": chosen.keys}
        options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return constants, options


def source(case: Case) -> tuple[ASTSource, dict[str, int]]:
    """What Triton compiles, and with which warps and stages: as a launch would."""
    name = case.kernel.replace("all_gradients", "key_value_gradient")  # one more product
    kernel = getattr(flash_triton, f"{name}_kernel")
    constants, options = constants_of(case)
    signature, known, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            known[name] = constants[name]
        elif name in SIZES:  # a launch would find out what 16 divides; lengths need not be
            signature[name] = "fp32" if name == "scale" else "i32"
        elif name in FLOAT32:
            signature[name] = "*fp32"
            attributes[(index,)] = DIVISIBLE
        else:  # a tensor with its strides, of which the last is 1
            boolean = name == "mask" and case.mask == "boolean"
            sums = name == "grad_query" and kernel.arg_names[-1] == "WITH_QUERY"
            pointer = "*u8" if boolean else "*fp32" if sums else f"*{case.dtype}"
            signature[name] = Heads(pointer, "i32", "i32", "i32", "constexpr")
            known[(index, 4)] = 1
            attributes.update({(index, place): DIVISIBLE for place in range(4)})
    # As every launch says it, attnlib.flash_triton.launch.
    options["enable_fp_fusion"] = case.fused
    return ASTSource(kernel, signature, known, attributes), options


@contextmanager
def assembler() -> Iterator[dict[str, str]]:
    """Which assembler Triton calls in here, and its report.

    Which one it is depends on Triton: 3.9 takes the newer of its two for 9.0 already.
    """
    called, run = {}, subprocess.run

    def listen(command: Any, *args: Any, **options: Any) -> Any:
        done = run(command, *args, **options)
        if "-v" in command:  # it assembles, and writes its report into a file
            called["report"] = Path(options["stderr"].name).read_text(encoding="utf-8")
            asked = run([command[0], "--version"], capture_output=True, text=True)
            release = re.search(r"release ([\d.]+)", asked.stdout)[1]
            called["name"] = f"{Path(command[0]).name} {release}"
        return done

    with patch.object(subprocess, "run", listen):
        yield called


def resources(report: str) -> dict[str, int | bool]:
    """Registers a thread, bytes spilled, from what `ptxas -v` prints.

    Also whether it made the multiplications wait for each other, which it does without
    failing when it can't tell that nothing touches their registers in between.
    """
    registers = re.search(r"Used (\d+) registers", report)
    stores = re.search(r"(\d+) bytes spill stores", report)
    loads = re.search(r"(\d+) bytes spill loads", report)
    if not (registers and stores and loads):
        raise ValueError(f"ptxas: expected registers and spills, got {report!r}")
    return {
        "registers": int(registers[1]),
        "spill_stores": int(stores[1]),
        "spill_loads": int(loads[1]),
        "serialized": "wgmma.mma_async instructions are serialized" in report,
    }


def compiled(case: Case) -> dict[str, Any]:
    """Compiles one case and returns what it uses."""
    what, options = source(case)
    target = GPUTarget("cuda", case.capability, 32)
    with assembler() as called:
        result = triton.compile(what, target=target, options=options)
    ptx = result.asm["ptx"]
    constants, _ = constants_of(case)
    return {
        **case._asdict(),
        **{"queries": constants["BLOCK_Q"], "keys": constants.get("BLOCK_K")},
        **{name: options[name] for name in ("num_warps", "num_stages")},
        **resources(called["report"]),
        "shared": result.metadata.shared,
        "tensor_memory": getattr(result.metadata, "tmem_size", None) or 0,  # columns
        "tensor_core": [word for word in TENSOR_CORE if word in ptx],
        "multiply_adds": len(FUSED_INTO_ONE.findall(ptx)),
        "assembler": called["name"],
    }


def compile_all(chosen: list[Case]) -> Iterator[dict[str, Any]]:
    """Compiles cases, two at a time."""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("flash_kernels: TRITON_INTERPRET is set; unset it to compile")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing left over from other versions
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            yield from pool.map(compiled, chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--cores", action="store_true")
    parser.add_argument("--fusion", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--record", action="store_true", help="what the record has")
    parser.add_argument("--json", type=int, nargs="?", const=0, metavar="CAPABILITY")
    arguments = parser.parse_args()
    names = ("full", "masks", "cores", "fusion", "grid")
    chosen = [name for name in names if getattr(arguments, name)]
    which = chosen[0] if chosen else "record"
    rows, chosen = [], cases(which)
    if arguments.json:
        chosen = [case for case in chosen if case.capability == arguments.json]
    for row in compile_all(chosen):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json is None and which == "grid":
        path = Path(__file__).parent / "results" / "flash_tiles.json"
        names = ("dim", "queries", "keys", "num_warps", "num_stages")
        names += ("registers", "spill_stores", "shared")
        lines = ",\n  ".join(json.dumps([row[name] for name in names]) for row in rows)
        start = f'{{"triton": "{triton.__version__}", "columns": {json.dumps(names)},'
        path.write_text(f'{start} "kernels": [\n  {lines}\n]}}\n', encoding="utf-8")
    if arguments.json is None and which == "record":
        path = Path(__file__).parent / "results" / "flash_kernels.json"
        # One kernel a line, and nothing of this machine: it only compiled.
        lines = ",\n  ".join(map(json.dumps, rows))
        fusion = ",\n  ".join(map(json.dumps, compile_all(cases("fusion"))))
        text = f'{{"triton": "{triton.__version__}", "kernels": [\n  {lines}\n],'
        text += f' "fusion": [\n  {fusion}\n]}}\n'
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
