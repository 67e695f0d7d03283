"""What each step from the smallest flash kernel to a fast one changes, compiled, not run.

The kernel is chapter 15's `small_kernel` with a causal mask, and a flag for each step. It
is compiled for an H100, and the machine's own instructions are counted, in the loops as
often as these go round for a text. Divided by the scores that the mask leaves, that is the
work for a score.

    python benchmarks/flash_ladder.py           writes results/flash_ladder.json
    python benchmarks/flash_ladder.py --time    runs the steps in turn, on a GPU, and
                                                writes results/flash_ladder_times.json
"""

import argparse
import collections
import heapq
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from flash_gpu import describe_gpu, gpu_times
from paired import write_record
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITY, MULTIPROCESSORS = 90, 132  # an H100
TOKENS, HEADS, WIDTH = 4096, 32, 64
LOG2E = tl.constexpr(1.4426950408889634)


class Step(NamedTuple):
    """A kernel of the ladder."""

    name: str
    dtype: str = "fp16"
    base_2: bool = True
    skip: bool = True  # what lies behind the diagonal
    peel: bool = True  # tiles that it does not cut come first, without a mask
    stages: int = 3
    rows: int = 128
    late_first: bool = False


STEPS = (
    Step("small kernel", "fp32", False, False, False, 1, 64),
    Step("16 bits", "fp16", False, False, False, 1, 64),
    Step("powers of two", "fp16", True, False, False, 1, 64),
    Step("skipped tiles", "fp16", True, True, False, 1, 64),
    Step("no mask where none is needed", "fp16", True, True, True, 1, 64),
    Step("stages", "fp16", True, True, True, 3, 64),
    Step("more queries", "fp16", True, True, True, 3, 128),
    Step("late queries first", "fp16", True, True, True, 3, 128, True),
)
COLS, WARPS = 64, 4


@triton.jit
def take_tile(
    q, K, V, i, first, start, m, total, u, scale,
    CHECK: tl.constexpr, BASE_2: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One round of the loop of `small_kernel`."""
    j = start + tl.arange(0, COLS)
    at = (first + j)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    k, v = tl.load(K + at), tl.load(V + at)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if not BASE_2:
        s = s * scale
    if CHECK:
        s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    if BASE_2:
        p = tl.exp2(s * (scale * LOG2E) - (m_new * (scale * LOG2E))[:, None])
        factor = tl.exp2((m - m_new) * (scale * LOG2E))
    else:
        p = tl.exp(s - m_new[:, None])
        factor = tl.exp(m - m_new)
    total = total * factor + tl.sum(p, 1)
    u = u * factor[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, total, u


@triton.jit
def step_kernel(
    Q, K, V, out, tokens, scale,
    BASE_2: tl.constexpr, SKIP: tl.constexpr, PEEL: tl.constexpr, LATE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Causal attention of one block of queries of one head."""
    first = tl.program_id(1) * tokens
    block = tl.program_id(0)
    if LATE:
        block = tl.num_programs(0) - 1 - block
    i = block * ROWS + tl.arange(0, ROWS)
    mine = (first + i)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    q = tl.load(Q + mine)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    u = tl.zeros((ROWS, WIDTH), tl.float32)
    end = tokens
    if SKIP:
        end = (block + 1) * ROWS
    whole = 0
    if PEEL:
        whole = block * ROWS
        for start in range(0, whole, COLS):
            m, total, u = take_tile(
                q, K, V, i, first, start, m, total, u, scale, False, BASE_2, COLS, WIDTH
            )
    for start in range(whole, end, COLS):
        m, total, u = take_tile(
            q, K, V, i, first, start, m, total, u, scale, True, BASE_2, COLS, WIDTH
        )
    tl.store(out + mine, (u / total[:, None]).to(q.dtype))


def constants(step: Step) -> dict[str, Any]:
    """The kernel's flags and sizes."""
    flags = {"BASE_2": step.base_2, "SKIP": step.skip, "PEEL": step.peel}
    sizes = {"ROWS": step.rows, "COLS": COLS, "WIDTH": WIDTH}
    return {**flags, "LATE": step.late_first, **sizes}


def compiled(step: Step) -> tuple[int, str]:
    """Bytes of shared memory, and what the disassembler says of registers and code."""
    known, signature, attributes = constants(step), {}, {}
    for index, name in enumerate(step_kernel.arg_names):
        small = {"tokens": "i32", "scale": "fp32"}
        signature[name] = (
            "constexpr" if name in known else small.get(name, f"*{step.dtype}")
        )
        if name not in known and name != "scale":
            attributes[(index,)] = [["tt.divisibility", 16]]
    kernel = triton.compile(
        ASTSource(step_kernel, signature, known, attributes),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": WARPS, "num_stages": step.stages, "enable_fp_fusion": True},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        command = [tool, "-sass", "-res-usage", file]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return kernel.metadata.shared, done.stdout + done.stderr


def instructions(code: str) -> tuple[list[collections.Counter], collections.Counter]:
    """Of each loop, and of the rest, by name; a loop ends where a branch leads back."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([^;]*);", code)
    lines = [(int(address, 16), text) for address, text in found]
    spans = []
    for end, text in lines:
        back = re.match(r"BRA.*?(0x[0-9a-f]+)\s*$", text)
        if back and int(back[1], 16) < end:
            spans.append((int(back[1], 16), end))

    def count(inside: Callable[[int], bool]) -> collections.Counter:
        names = (re.search(r"\w+", text)[0] for address, text in lines if inside(address))
        return collections.Counter(name for name in names if name != "NOP")

    loops = [count(lambda at, a=a, b=b: a <= at <= b) for a, b in spans]
    return loops, count(lambda at: not any(a <= at <= b for a, b in spans))


def rounds(step: Step) -> list[int]:
    """How often the loops of one head run in all: over whole tiles first, if peeled.

    The second loop of a square tile has a single round, so it is none.
    """
    blocks = range(TOKENS // step.rows)
    if not step.skip:
        return [len(blocks) * (TOKENS // COLS)]
    if not step.peel:
        return [sum((block + 1) * step.rows // COLS for block in blocks)]
    whole = sum(block * step.rows // COLS for block in blocks)
    return [whole] if step.rows == COLS else [whole, TOKENS // COLS]


def last_end(step: Step, programs: int) -> int:
    """Tiles until the last program ends; so many run at a time on a multiprocessor."""
    ends = [0] * (programs * MULTIPROCESSORS)
    blocks = range(TOKENS // step.rows)
    for block in reversed(blocks) if step.late_first else blocks:
        for _ in range(HEADS):  # the next program goes where one has ended
            tiles = (block + 1) * step.rows if step.skip else TOKENS
            heapq.heapreplace(ends, ends[0] + tiles // COLS)
    return max(ends)


def row_of(step: Step) -> dict[str, Any]:
    """What the compiler made of a step, and what follows from it."""
    shared, code = compiled(step)
    registers = int(re.search(r"REG:(\d+)", code)[1])
    (loops, rest), often = instructions(code), rounds(step)
    done = rest.total() * (TOKENS // step.rows)
    done += sum(loop.total() * n for loop, n in zip(loops, often, strict=True))
    scores = TOKENS * (TOKENS + 1) // 2  # that the mask leaves
    tiles = sum((b + 1) * step.rows // COLS for b in range(TOKENS // step.rows))
    tiles = tiles if step.skip else TOKENS // step.rows * (TOKENS // COLS)
    bytes_read = tiles * COLS * 2 * WIDTH * (4 if step.dtype == "fp32" else 2)
    programs = min(65_536 // (32 * WARPS * registers), 227 * 1024 // (shared + 1024))
    return {
        "name": step.name,
        "instructions": round(32 * WARPS * done / scores, 2),  # for a score
        "bytes": round(bytes_read / scores, 2),  # of keys and values, for a score
        "products": loops[0]["HGMMA"],  # of the tensor cores, in the loop
        "loads": loops[0]["LDG"],  # that the loop waits for
        "loads_ahead": loops[0]["LDGSTS"],
        "registers": registers,
        "shared": shared,
        "programs": programs,  # at a time on a multiprocessor
        "end": last_end(step, programs) * step.rows,  # rows of tiles until the last ends
    }


def run(step: Step, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of all heads, (heads, tokens, features), on the GPU."""
    output = torch.empty_like(query)
    grid = (query.shape[1] // step.rows, query.shape[0])
    step_kernel[grid](
        query, key, value, output, query.shape[1], query.shape[2] ** -0.5,
        **constants(step), num_warps=WARPS, num_stages=step.stages,
    )  # fmt: skip
    return output


def time_steps(rounds: int = 41) -> None:
    """Checks each step against float64, times them in turn, and writes the record."""
    torch.manual_seed(0)
    drawn = torch.randn(3, HEADS, TOKENS, WIDTH, device="cuda", dtype=torch.float16)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *drawn.double(), is_causal=True
    )
    calls, errors = {}, {}
    for step in STEPS:
        given = drawn.float() if step.dtype == "fp32" else drawn
        errors[step.name] = (run(step, *given) - exact).abs().max().item()
        assert errors[step.name] < 4e-3, (step.name, errors[step.name])
        calls[step.name] = lambda step=step, given=given: run(step, *given)
    times = gpu_times(calls, rounds)
    rows = [
        {"name": name, "ms": statistics.median(ms), "error": errors[name]}
        for name, ms in times.items()
    ]
    sizes = {"tokens": TOKENS, "heads": HEADS, "features": WIDTH, "rounds": rounds}
    write_record("flash_ladder_times", {**sizes, "gpu": describe_gpu(), "steps": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", action="store_true", help="run the steps on a GPU")
    if parser.parse_args().time:
        time_steps()
        return
    rows = []
    for step in STEPS:
        rows.append(row_of(step))
        print(json.dumps(rows[-1]), flush=True)
    sizes = {"tokens": TOKENS, "heads": HEADS, "features": WIDTH, "capability": CAPABILITY}
    lines = ",\n  ".join(map(json.dumps, rows))
    start = json.dumps({"triton": triton.__version__, **sizes})[:-1]
    path = Path(__file__).parent / "results" / "flash_ladder.json"
    path.write_text(f'{start}, "steps": [\n  {lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
