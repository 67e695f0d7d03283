"""What the kernels of chapter 19 use on GPUs that are not here: compiled for them, not run.

As in split_kernels.py, they go through their launch, up to the GPU.

    python benchmarks/paged_kernels.py       prints one kernel a line
    python benchmarks/paged_kernels.py 90    the same for one compute capability
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from typing import Any, NamedTuple

import torch
from flash_kernels import TENSOR_CORE
from split_kernels import CAPABILITIES, DTYPES, NoGPU, assembled
from triton.runtime import driver

from attnlib.flash_triton import paged
from attnlib.paged import PageTable


class Case(NamedTuple):
    """One call: `rows` queries in groups over two heads of keys."""

    capability: int
    dtype: str
    dim: int
    rows: int
    page_size: int
    causal: bool


def cases() -> list[Case]:
    """Each GPU and dtype, one query and many, a page of a power of two and another one."""
    found = itertools.product(CAPABILITIES, DTYPES, (64, 128, 256), (1, 32), (16,), (True,))
    others = [
        (c, "fp16", 128, 8, 24, causal) for c in CAPABILITIES for causal in (True, False)
    ]
    return [Case(*case) for case in (*found, *others)]


def compiled(case: Case) -> list[dict[str, Any]]:
    """What both kernels of one call use."""
    NoGPU.capability = case.capability
    rows = []

    def compile_it(kernel: Any, programs: int, device: torch.device, **given: Any) -> None:
        done = kernel.warmup(grid=(programs,), **given)
        assert "cubin" in done.asm
        name = kernel.__name__.removesuffix("_kernel")
        rows.append(
            {
                **{"kernel": name, **case._asdict()},
                **assembled(done.asm["ptx"], case.capability),
                "shared": done.metadata.shared,
                "tensor_core": [word for word in TENSOR_CORE if word in done.asm["ptx"]],
            }
        )

    paged.launch = compile_it
    dtype, queries = DTYPES[case.dtype], 2 if case.rows > 1 else 1
    query = torch.empty(2, 2 * case.rows // queries, queries, case.dim, dtype=dtype)
    pages = torch.empty(64, case.page_size, 2, case.dim, dtype=dtype)
    whole = torch.zeros(2, 32, dtype=torch.int64)
    table = PageTable(whole, whole[:, 0])
    paged.run_paged(query, pages, pages, table, case.causal, 0.1, 256)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capability", type=int, nargs="?", default=0)
    only = parser.parse_args().capability
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("paged_kernels: TRITON_INTERPRET is set; unset it to compile")
    driver.set_active(NoGPU())
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing left over from other versions
        for case in cases():
            for row in compiled(case) if only in (0, case.capability) else ():
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
