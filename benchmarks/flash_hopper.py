"""What Triton makes of a forward kernel with what came with Hopper and Blackwell.

One kernel without a mask, compiled for GPUs that are not here, with blocks loaded by
addresses or by tensor descriptors; with warps that specialize, or all alike; with a program
for each block of queries, or persistent ones, as many as multiprocessors, that take one
block after the other. Counted are instructions in the program, not executed ones. What
Triton refuses is recorded with its words.

    python benchmarks/flash_hopper.py             writes results/flash_hopper.json
    python benchmarks/flash_hopper.py --json 90   prints it for one compute capability
    python benchmarks/flash_hopper.py --dry-run   interpreted and compared, writes nothing
"""

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernel is decorated

import torch
import triton
import triton.language as tl
from flash_kernels import assembler, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Capability, features, queries, keys, warps, stages: as in attnlib's table. For Hopper also
# with four warps at 128 features, as eight warps do not specialize there.
SETTINGS = (
    (90, 64, 128, 64, 4, 3),
    (90, 128, 128, 64, 4, 2),
    (90, 128, 128, 128, 8, 2),
    (100, 64, 128, 128, 8, 3),
    (100, 128, 128, 128, 8, 2),
)

# What to count in the PTX.
COUNTED = {
    "wgmma": r"\bwgmma\.mma_async",  # products on Hopper's tensor cores
    "tcgen05": r"\btcgen05\.mma",  # and on Blackwell's
    "bulk": r"\bcp\.async\.bulk\.tensor\S*\.shared",  # a block, by one thread
    "bulk_store": r"\bcp\.async\.bulk\.tensor\S*\.global\.shared",
    "async": r"\bcp\.async\.c[ag]\.",  # 16 bytes, by each thread
    "load": r"\bld\.global",
    "barrier_wait": r"\bmbarrier\.try_wait",
    "barrier": r"\b(?:bar|barrier)\.(?:cta\.)?sync",
    "product_wait": r"\bwgmma\.wait_group",
}
# From warps that load, registers go to those that compute.
SHARES = re.compile(r"\bsetmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)")


@triton.jit
def rows_of(source, row, ROWS: tl.constexpr, WIDTH: tl.constexpr, BULK: tl.constexpr):
    """A block of rows, by a descriptor or by addresses."""
    if BULK:
        block = source.load([row, 0])
    else:
        at = (row + tl.arange(0, ROWS))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        block = tl.load(source + at)
    return block


@triton.jit
def attend(
    query, key, value, out, lse, tile, tokens, scale,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BULK: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp, to base 2, of one block of queries of one head."""
    blocks = tokens // BLOCK_Q
    first = tile // blocks * tokens
    start = first + tile % blocks * BLOCK_Q
    q = rows_of(query, start, BLOCK_Q, WIDTH, BULK)
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    u = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    for at in tl.range(0, tokens, BLOCK_K, warp_specialize=SPECIALIZED):
        k = rows_of(key, first + at, BLOCK_K, WIDTH, BULK)
        scores = tl.dot(q, tl.trans(k))
        raised = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - raised[:, None])
        decay = tl.exp2(maximum - raised)
        total = total * decay + tl.sum(weights, 1)
        u = u * decay[:, None]
        v = rows_of(value, first + at, BLOCK_K, WIDTH, BULK)
        u = tl.dot(weights.to(v.dtype), v, u)
        maximum = raised
    result = (u / total[:, None]).to(q.dtype)
    if BULK:
        out.store([start, 0], result)
    else:
        at = (start + tl.arange(0, BLOCK_Q))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(out + at, result)
    tl.store(lse + start + tl.arange(0, BLOCK_Q), maximum + tl.log2(total))


@triton.jit
def hopper_kernel(
    query, key, value, out, lse, tokens, heads, scale,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BULK: tl.constexpr, SPECIALIZED: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Heads of `tokens` rows lie one after the other, (heads · tokens, WIDTH)."""
    if BULK:
        rows = heads * tokens
        query = tl.make_tensor_descriptor(
            query, [rows, WIDTH], [WIDTH, 1], [BLOCK_Q, WIDTH]
        )
        key = tl.make_tensor_descriptor(key, [rows, WIDTH], [WIDTH, 1], [BLOCK_K, WIDTH])
        value = tl.make_tensor_descriptor(
            value, [rows, WIDTH], [WIDTH, 1], [BLOCK_K, WIDTH]
        )
        out = tl.make_tensor_descriptor(out, [rows, WIDTH], [WIDTH, 1], [BLOCK_Q, WIDTH])
    if PERSISTENT:
        tiles = heads * (tokens // BLOCK_Q)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
            attend(
                query, key, value, out, lse, tile, tokens, scale,
                WIDTH, BLOCK_Q, BLOCK_K, BULK, SPECIALIZED,
            )  # fmt: skip
    else:
        attend(
            query, key, value, out, lse, tl.program_id(0), tokens, scale,
            WIDTH, BLOCK_Q, BLOCK_K, BULK, SPECIALIZED,
        )  # fmt: skip


class Variant(NamedTuple):
    """One way to write the kernel, for one GPU."""

    capability: int
    dim: int
    queries: int
    keys: int
    warps: int
    stages: int
    descriptors: bool
    specialized: bool
    persistent: bool


def variants() -> list[Variant]:
    """All combinations for each setting."""
    ways = tuple(itertools.product((False, True), repeat=3))
    return [Variant(*setting, *way) for setting in SETTINGS for way in ways]


def constants_of(variant: Variant) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        **{"WIDTH": variant.dim, "BLOCK_Q": variant.queries, "BLOCK_K": variant.keys},
        **{"BULK": variant.descriptors, "SPECIALIZED": variant.specialized},
        "PERSISTENT": variant.persistent,
    }


@contextmanager
def complaints(said: list[str]) -> Iterator[None]:
    """Keeps what the compiler's parts in C++ write to the standard error in here."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))


def compiled(variant: Variant) -> dict[str, Any]:
    """What one variant uses, or why it is refused."""
    constants, numbers = constants_of(variant), {"tokens": "i32", "heads": "i32"}
    numbers["scale"] = "fp32"
    signature, attributes = {}, {}
    for index, name in enumerate(hopper_kernel.arg_names):
        kind = "*fp32" if name == "lse" else numbers.get(name, "*fp16")
        signature[name] = "constexpr" if name in constants else kind
        if (kind.startswith("*") and name not in constants) or name == "tokens":
            attributes[(index,)] = [["tt.divisibility", 16]]
    what = ASTSource(hopper_kernel, signature, constants, attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    options["enable_fp_fusion"] = True
    target = GPUTarget("cuda", variant.capability, 32)
    said: list[str] = []
    try:
        with complaints(said), assembler() as called:
            result = triton.compile(what, target=target, options=options)
    except Exception as error:  # of the compiler or the assembler: a result, too
        step = re.search(r"Pipeline failed while executing \[`(\w+)`", said[0])
        words = [step[1] if step else "", *str(error).strip().splitlines()]
        return {**variant._asdict(), "refused": ": ".join(filter(None, words[:2]))[:120]}
    ptx = result.asm["ptx"]
    threads = re.search(r"\.reqntid (\d+)", ptx)
    return {
        **variant._asdict(),
        **resources(called["report"]),
        "shared": result.metadata.shared,
        "threads": int(threads[1]) if threads else 32 * result.metadata.num_warps,
        **{name: len(re.findall(pattern, ptx)) for name, pattern in COUNTED.items()},
        "register_shares": sorted(set(map(int, SHARES.findall(ptx)))),
        "assembler": called["name"],
    }


def interpreted() -> Iterator[str]:
    """Compares every way of writing it with the definition, in the interpreter."""
    torch.manual_seed(0)
    heads, tokens, dim = 3, 64, 16
    query, key, value = (torch.randn(heads, tokens, dim).half() for _ in range(3))
    scale = dim**-0.5
    scores = query.double() @ key.double().mT * scale
    expected = scores.softmax(-1) @ value.double()
    for way in itertools.product((False, True), repeat=3):
        variant = Variant(90, dim, 16, 32, 4, 1, *way)
        out, lse = torch.empty_like(query), torch.empty(heads, tokens)
        programs = 2 if variant.persistent else heads * tokens // variant.queries
        to_base_2 = scale * 1.4426950408889634
        tensors = (query, key, value, out, lse)
        hopper_kernel[(programs,)](
            *tensors, tokens, heads, to_base_2, **constants_of(variant)
        )
        torch.testing.assert_close(out.double(), expected, atol=3e-3, rtol=0)
        wanted = scores.logsumexp(-1) / 0.6931471805599453
        torch.testing.assert_close(lse.double(), wanted, atol=3e-3, rtol=0)
        names = ("descriptors", "specialized", "persistent")
        said = [name for name, is_so in zip(names, way, strict=True) if is_so]
        yield f"agrees: {', '.join(said) or 'addresses'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=int, metavar="CAPABILITY", help="only prints")
    parser.add_argument("--dry-run", action="store_true", help="interpreted")
    arguments = parser.parse_args()
    if arguments.dry_run:
        print(*interpreted(), sep="\n")
        return
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing left over from other versions
        for variant in variants():
            if arguments.json in (None, variant.capability):
                rows.append(compiled(variant))
                print(json.dumps(rows[-1]), flush=True)
    if arguments.json is None:
        path = Path(__file__).parent / "results" / "flash_hopper.json"
        lines = ",\n  ".join(map(json.dumps, rows))  # nothing of this machine
        text = f'{{"triton": "{triton.__version__}", "kernels": [\n  {lines}\n]}}\n'
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
