"""Flash attention on the CPU: time beside PyTorch's own, what each trick gave, and memory.

python benchmarks/flash.py                writes results/flash.json; needs Linux, for memory
python benchmarks/flash.py --only steps   measures one part anew and keeps the others

The machine should have nothing else to do.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from paired import time_in_turn, write_record
from torch import Tensor
from torch.nn import functional as F

from attnlib import ScaledDotProductAttention, flash_attention, online_attention
from attnlib.flash import LOG2E, block_sizes, product, row_blocks

FEATURES = 64
SHAPES = ((8, 1024), (8, 2048), (8, 4096), (2, 16384))  # heads, tokens
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)  # of one head, for the memory
LONGEST_NAIVE = 16384  # its scores take 1 GiB there
PARTS = ("roof", "powers", "fresh", "steps", "limit", "many", "speed", "lengths")


def inputs(heads: int, tokens: int, gradient: bool = False) -> list[Tensor]:
    """Query, key and value (1, heads, tokens, 64) in float32."""
    torch.manual_seed(0)
    shape = (1, heads, tokens, FEATURES)
    return [torch.randn(shape, requires_grad=gradient) for _ in range(3)]


def with_backward(attend: Callable[..., Tensor], qkv: list[Tensor]) -> Callable[[], object]:
    """A call of forward and backward."""
    d_output = torch.randn_like(qkv[2])
    return lambda: torch.autograd.grad(attend(*qkv), qkv, d_output)


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """The median, over the rounds, of each time over that of PyTorch's function."""
    both = {name: zip(ms, times["sdpa"], strict=True) for name, ms in times.items()}
    return {
        name: round(statistics.median(a / b for a, b in pairs), 3)
        for name, pairs in both.items()
    }


def on_one_thread(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Ratios to PyTorch's function, of the least processor time of each on one thread.

    What else runs on the machine can only add to it, so that the least is closest.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = time_in_turn(calls, rounds, time.process_time)
    torch.set_num_threads(threads)
    least = {name: min(ms) for name, ms in times.items()}
    return {name: round(ms / least["sdpa"], 3) for name, ms in least.items()}


def beside_sdpa(heads: int, tokens: int, causal: bool, rounds: int) -> dict[str, object]:
    """Median times, and the median ratios to PyTorch's function, of both passes."""
    row: dict[str, object] = {"heads": heads, "tokens": tokens, "causal": causal}
    plain = ScaledDotProductAttention(causal=causal)
    methods = {
        "flash": lambda q, k, v: flash_attention(q, k, v, causal=causal),
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    }
    if tokens <= 4096:
        methods["plain"] = lambda q, k, v: plain(q, k, v)[0]
    for kind in ("forward", "both"):
        qkv = inputs(heads, tokens, gradient=kind == "both")
        if kind == "both":
            calls = {name: with_backward(attend, qkv) for name, attend in methods.items()}
        else:
            calls = {
                name: lambda attend=attend, qkv=qkv: attend(*qkv)
                for name, attend in methods.items()
            }
        times = time_in_turn(calls, rounds)
        row |= {f"{kind}_{n}_ms": round(statistics.median(t), 2) for n, t in times.items()}
        row |= {f"{kind}_{name}_ratio": ratio for name, ratio in ratios(times).items()}
    return row


def many(heads: int, tokens: int, rounds: int) -> list[dict[str, object]]:
    """Many heads, where a tile's sizes are at their least: forward, on one thread."""
    q, k, v = inputs(heads, tokens)
    rows = []
    for causal in (False, True):
        plain = ScaledDotProductAttention(causal=causal)
        calls = {
            "sdpa": lambda c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
            "flash": lambda c=causal: flash_attention(q, k, v, causal=c),
            "plain": lambda plain=plain: plain(q, k, v),
        }
        row = {"heads": heads, "tokens": tokens, "causal": causal}
        rows.append(row | on_one_thread(calls, rounds))
    return rows


# What each trick gave: the forward pass of the chapter, changed step by step.


def readable(q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
    """The loop of the chapter for all heads at once."""
    outputs = []
    for rows in q.split(size[0], dim=-2):
        blocks = zip(k.split(size[1], dim=-2), v.split(size[1], dim=-2), strict=True)
        scale = 1 / math.sqrt(FEATURES)
        tiles = ((rows @ block.transpose(-2, -1) * scale, value) for block, value in blocks)
        outputs.append(online_attention(tiles).output)
    return torch.cat(outputs, dim=-2)


def running(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], scaled: bool, base_2: bool
) -> Tensor:
    """Three dimensions; on request the scale in the queries; on request powers of two."""
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    scale, power = 1 / math.sqrt(FEATURES), torch.exp
    if base_2:
        scale, power = scale * LOG2E, torch.exp2
    q, output = q * scale if scaled else q, torch.empty_like(q)
    for rows in row_blocks(q.shape[1], size[0]):
        u = torch.zeros_like(output[:, rows])
        total, top = torch.zeros_like(u[..., :1]), torch.full_like(u[..., :1], -1e30)
        for cols in row_blocks(k.shape[1], size[1]):
            s = q[:, rows] @ k[:, cols].transpose(1, 2)
            if not scaled:
                s = s * scale
            old, top = top, torch.maximum(top, s.amax(dim=-1, keepdim=True))
            factor, p = power(old - top), power(s - top)
            total = factor * total + p.sum(dim=-1, keepdim=True)
            u = factor * u + p @ v[:, cols]
        output[:, rows] = u / total
    return output


def in_place(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], bounded: bool
) -> Tensor:
    """One buffer, changed in place; on request no maximum."""
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    q, keys = q * (LOG2E / math.sqrt(FEATURES)), k.transpose(1, 2)
    buffer, output = q.new_empty(len(q) * size[0] * size[1]), torch.empty_like(q)
    for rows in row_blocks(q.shape[1], size[0]):
        u = torch.zeros_like(output[:, rows])
        total, top = torch.zeros_like(u[..., :1]), torch.full_like(u[..., :1], -1e30)
        for cols in row_blocks(k.shape[1], size[1]):
            s = product(q[:, rows], keys[:, :, cols], buffer)
            if not bounded:
                old, top = top, torch.maximum(top, s.amax(dim=-1, keepdim=True))
                factor = torch.exp2(old - top)
                u *= factor
                total *= factor
                s -= top
            total += s.exp2_().sum(dim=-1, keepdim=True)
            u.baddbmm_(s, v[:, cols])
        output[:, rows] = u / total
    return output


def steps(heads: int, tokens: int, rounds: int) -> list[dict[str, object]]:
    """The ratio to PyTorch's function after each step, not causal, on one thread."""
    q, k, v = inputs(heads, tokens)
    size, plain = (256, 512), ScaledDotProductAttention()
    calls = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "plain": lambda: plain(q, k, v),
        "readable": lambda: readable(q, k, v, size),
        "three dimensions": lambda: running(q, k, v, size, scaled=False, base_2=False),
        "scaled queries": lambda: running(q, k, v, size, scaled=True, base_2=False),
        "powers of two": lambda: running(q, k, v, size, scaled=True, base_2=True),
        "one buffer": lambda: in_place(q, k, v, size, bounded=False),
        "no maximum": lambda: in_place(q, k, v, size, bounded=True),
        "tile sizes": lambda: flash_attention(q, k, v),
    }
    found = on_one_thread(calls, rounds)
    return [{"step": name, "ratio": found[name]} for name in list(calls)[1:]]


# The limit of such steps: what is left if only the library's products are.


def products(q: Tensor, k: Tensor, v: Tensor, sums: bool) -> Tensor:
    """The two products of each tile, as in the package; on request the powers and sums."""
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    size = block_sizes(None, len(q), q.shape[1], causal=False)
    buffer, output = q.new_empty(len(q) * size[0] * size[1]), torch.empty_like(q)
    for rows in row_blocks(q.shape[1], size[0]):
        u = torch.zeros_like(output[:, rows])
        total = torch.zeros_like(u[..., :1])
        for cols in row_blocks(k.shape[1], size[1]):
            s = product(q[:, rows], k[:, cols].transpose(1, 2), buffer)
            if sums:
                total += s.exp2_().sum(dim=-1, keepdim=True)
            u.baddbmm_(s, v[:, cols])
        output[:, rows] = u
    return output


def limit(heads: int, tokens: int, rounds: int) -> dict[str, object]:
    """The ratios to PyTorch's function of the products alone, and with powers and sums."""
    q, k, v = (x / FEATURES**0.5 for x in inputs(heads, tokens))  # no power overflows
    calls = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "products": lambda: products(q, k, v, sums=False),
        "sums": lambda: products(q, k, v, sums=True),
        "flash": lambda: flash_attention(q, k, v),
    }
    row = {"heads": heads, "tokens": tokens} | ratios(time_in_turn(calls, rounds))
    one = on_one_thread(calls, rounds)
    return row | {f"{name}_one_thread": ratio for name, ratio in one.items()}


def powers(rounds: int) -> dict[str, object]:
    """Microseconds for e^x and for 2^x of the scores in one tile, into the same memory."""
    torch.manual_seed(0)
    x, result = torch.randn(2**19), torch.empty(2**19)
    functions = {"exp": torch.exp, "exp2": torch.exp2}
    calls = {
        name: lambda function=function: function(x, out=result)
        for name, function in functions.items()
    }
    times = time_in_turn(calls, 20 * rounds)
    micro = {f"{name}_us": round(1e3 * statistics.median(ms)) for name, ms in times.items()}
    return {"numbers": len(x), **micro}


def fresh(tokens: int, rounds: int) -> dict[str, float]:
    """Plain attention of one head, its matrices in new memory or always in the same."""
    q, k, v = (x[0, 0] for x in inputs(1, tokens))
    q = q / math.sqrt(FEATURES)
    scores, weights = (torch.empty(tokens, tokens) for _ in range(2))

    def new() -> Tensor:
        return torch.softmax(q @ k.T, dim=1) @ v

    def same() -> Tensor:
        torch.mm(q, k.T, out=scores)
        return torch.softmax(scores, dim=1, out=weights) @ v

    row: dict[str, float] = {"tokens": tokens}
    for name, ms in time_in_turn({"new": new, "same": same}, rounds).items():
        row[f"{name}_ms"] = round(statistics.median(ms), 1)
    for call in (new, same):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        row[f"{call.__name__}_mib"] = round(faults * resource.getpagesize() / 2**20)
    return row


# Memory, each measurement in a process of its own.


def measure_memory(method: str, tokens: int) -> None:
    """Prints the peak of the resident memory above that with the inputs, in MiB."""
    gradient = method.endswith("backward")
    attend = {
        "flash": flash_attention,
        "sdpa": F.scaled_dot_product_attention,
        "plain": lambda q, k, v: ScaledDotProductAttention()(q, k, v)[0],
    }[method.split()[0]]
    small = inputs(1, 128, gradient)
    with_backward(attend, small)() if gradient else attend(*small)  # libraries are loaded
    qkv = inputs(1, tokens, gradient)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    with_backward(attend, qkv)() if gradient else attend(*qkv)
    print((status("VmHWM") - before) / 1024)


def status(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(f"no {name} in /proc/self/status")


def memory(method: str, tokens: int) -> float:
    """MiB above the inputs."""
    command = [sys.executable, __file__, "--memory-of", method, str(tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return round(float(done.stdout), 1)


def length_row(tokens: int, rounds: int) -> dict[str, object]:
    """One head: time forward and memory of each method."""
    q, k, v = inputs(1, tokens)
    calls = {
        "flash": lambda: flash_attention(q, k, v),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
    }
    if tokens <= LONGEST_NAIVE:
        calls["plain"] = lambda: ScaledDotProductAttention()(q, k, v)
    times = time_in_turn(calls, rounds if tokens < LONGEST_NAIVE else 1)
    row: dict[str, object] = {"tokens": tokens}
    row |= {f"{name}_ms": round(statistics.median(ms), 2) for name, ms in times.items()}
    methods = [m for name in calls for m in (name, f"{name} backward")]
    return row | {f"{method}_mib": memory(method, tokens) for method in methods}


def roof(rounds: int) -> dict[str, float]:
    """The most FLOPs a second in a product of matrices, and numbers a second in a copy."""
    a, b, c = (torch.randn(2048, 2048) for _ in range(3))
    source, target = torch.randn(2**26), torch.empty(2**26)
    calls = {
        "product": lambda: torch.mm(a, b, out=c),
        "copy": lambda: target.copy_(source),
    }
    best = {name: min(ms) / 1e3 for name, ms in time_in_turn(calls, rounds).items()}
    return {
        "gflops": round(2 * 2048**3 / best["product"] / 1e9, 1),
        "giganumbers": round(2 * 2**26 / best["copy"] / 1e9, 2),  # read and written
    }


def speed(rounds: int) -> list[dict[str, object]]:
    """All shapes, with and without a causal mask; fewer rounds where one takes long."""
    rows = []
    for heads, tokens in SHAPES:
        for causal in (False, True):
            few = max(3, rounds * 2**24 // (heads * tokens**2))
            rows.append(beside_sdpa(heads, tokens, causal, min(rounds, few)))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=PARTS, help="measure one part, keep the others")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        return measure_memory(arguments.memory_of[0], int(arguments.memory_of[1]))
    rounds = arguments.rounds
    measure = {
        "roof": lambda: roof(rounds),
        "powers": lambda: powers(rounds),
        "fresh": lambda: [fresh(tokens, rounds) for tokens in (1024, LONGEST_NAIVE)],
        "steps": lambda: steps(8, 2048, 3 * rounds),
        "limit": lambda: [limit(*shape, 3 * rounds) for shape in SHAPES[:3]],
        "many": lambda: many(192, 512, 2 * rounds),
        "speed": lambda: speed(rounds),
        "lengths": lambda: [length_row(tokens, max(3, rounds // 3)) for tokens in LENGTHS],
    }
    record = {"rounds": rounds, "features": FEATURES}
    if arguments.only:
        path = Path(__file__).parent / "results" / "flash.json"
        record = json.loads(path.read_text("utf-8"))
    for name in [arguments.only] if arguments.only else measure:
        record[name] = measure[name]()
        print(name, record[name], flush=True)
    write_record("flash", record)
    return None


if __name__ == "__main__":
    main()
