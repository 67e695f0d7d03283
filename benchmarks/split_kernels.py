"""What the kernels of appendix E use on GPUs that are not here: compiled for them, not run.

Each goes through its launch, up to the GPU: a stand-in says that there is one, and Triton
finds types and constants by itself. Registers and spills are from the assembler's report.

    python benchmarks/split_kernels.py            writes results/split_kernels.json
    python benchmarks/split_kernels.py --json     prints it, one kernel a line
    python benchmarks/split_kernels.py --json 90  the same for one compute capability
    python benchmarks/split_kernels.py --all      prints every dtype, width and mask
    ... --all --json 90                           the same for one compute capability
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from flash_kernels import TENSOR_CORE, resources
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from attnlib.flash_triton import split

CAPABILITIES = (80, 86, 90, 100)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Case(NamedTuple):
    """One call: `rows` queries in groups over two heads of keys."""

    capability: int
    dtype: str = "fp16"
    dim: int = 128
    rows: int = 8
    mask: str = "none"
    causal: bool = False


def cases(which: str) -> list[Case]:
    """The record; or it and each dtype with each width, each mask with either direction."""
    found = [*itertools.product(CAPABILITIES, ("fp16",), (64, 128, 256), (8, 32))]
    if which == "all":
        masks, causal = ("none", "boolean", "additive", "window"), (False, True)
        wide = DTYPES, (16, 64, 96, 128, 256), (1, 32), ("additive",), (True,)
        found += itertools.product(CAPABILITIES, *wide)
        found += itertools.product(CAPABILITIES, ("fp16",), (128, 256), (8,), masks, causal)
    return [Case(*case) for case in found]


class NoGPU:
    """Stands for a GPU; each capability has a number of its own."""

    capability = CAPABILITIES[0]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def assembled(ptx: str, capability: int) -> dict[str, int | bool]:
    """Registers and spills."""
    architecture = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}"]
        command += [str(file), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return resources(done.stderr + done.stdout)


def compiled(case: Case) -> list[dict[str, Any]]:
    """What both kernels of one call use."""
    NoGPU.capability = case.capability
    rows = []

    def compile_it(kernel: Any, programs: int, device: torch.device, **given: Any) -> None:
        done = kernel.warmup(grid=(programs,), **given)
        assert "cubin" in done.asm
        name = kernel.__name__.removesuffix("_kernel")
        plain = {"rows": None, "mask": "none", "causal": False}  # which it knows nothing of
        rows.append(
            {
                **{"kernel": name, **case._asdict(), **(plain if name == "merge" else {})},
                "keys": given.get("BLOCK_K"),
                "num_warps": done.metadata.num_warps,
                "num_stages": done.metadata.num_stages,
                **assembled(done.asm["ptx"], case.capability),
                "shared": done.metadata.shared,
                "tensor_core": [word for word in TENSOR_CORE if word in done.asm["ptx"]],
            }
        )

    split.launch = compile_it
    dtype, queries = DTYPES[case.dtype], 2 if case.rows > 1 else 1
    heads = 2 * case.rows // queries
    query = torch.empty(2, queries, heads, case.dim, dtype=dtype).transpose(1, 2)
    key = torch.empty(2, 2, 4096, case.dim, dtype=dtype)
    mask, window = None, 1000 if case.mask == "window" else None
    if case.mask in ("boolean", "additive"):
        kind = torch.uint8 if case.mask == "boolean" else dtype
        mask = torch.empty(2, 1, 1, 4096, dtype=kind).expand(2, heads, queries, 4096)
    split.run_split(query, key, key, mask, case.causal, 0.1, 16, window)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", type=int, nargs="?", const=0, metavar="CAPABILITY")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("split_kernels: TRITON_INTERPRET is set; unset it to compile")
    driver.set_active(NoGPU())
    chosen = cases("all" if arguments.all else "record")
    chosen = [case for case in chosen if arguments.json in (None, 0, case.capability)]
    found: dict[str, None] = {}  # the merge is the same for many cases
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing left over from other versions
        for case in chosen:
            for line in map(json.dumps, compiled(case)):
                if line not in found:
                    print(line, flush=True)
                found[line] = None
    if arguments.json is None and not arguments.all:
        path = Path(__file__).parent / "results" / "split_kernels.json"
        lines = ",\n  ".join(found)
        text = f'{{"triton": "{triton.__version__}", "kernels": [\n  {lines}\n]}}\n'
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
