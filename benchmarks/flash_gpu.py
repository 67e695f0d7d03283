"""Speed of the Triton kernels against PyTorch's attention on a GPU.

Timed are ours, each backend of F.scaled_dot_product_attention and naive attention, in turn
in every round, with the L2 cache overwritten before each call; recorded are the medians as
TFLOP/s, and the medians of the times round by round divided by ours. Every shape has 16384
tokens in all and 2048 features over its heads. Inputs are (B, N, H, d) in memory, as the
projections of a layer leave them. FLOPs are 4·B·N²·H·d, half of that if causal, and 2.5
times as many in the backward.

Before, ours is compared with float64 attention: its error may be twice that of naive
attention in the same 16-bit numbers, three times for gradients. If it is larger anywhere,
nothing is timed.

    python benchmarks/flash_gpu.py                writes results/flash_gpu.json
    python benchmarks/flash_gpu.py --check-only   errors alone, writes nothing
    python benchmarks/flash_gpu.py --dry-run      interpreter, tiny sizes, writes nothing
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are decorated

import torch
import torch.nn.functional as F
import triton
from paired import time_in_turn, write_record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib import flash_attention_triton

DRY = "--dry-run" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
TOKENS, WIDTH = (32, 32) if DRY else (16384, 2048)  # batch · length, heads · dim
DIMS = (16,) if DRY else (64, 128)
LENGTHS = (16,) if DRY else (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Call = Callable[[], object]


def naive(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
    """The definition, all N×M scores in the inputs' dtype; hidden queries give 0."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if hidden is None:
        return scores.softmax(-1) @ value
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    if hidden.all(-1).any():
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0)
    return weights @ value


def hidden_by_causal(queries: int, keys: int) -> Tensor:
    """Where query i may not see key j: j > i + M − N."""
    return torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(
        keys - queries + 1
    )


# --- Errors ----------------------------------------------------------------------------


def table_of_shapes() -> list[tuple[int, int, int, bool, str]]:
    """(N, M, d, causal, dtype): lengths, N ≠ M both ways and head dimensions, as in CI."""
    same = [(n, n) for n in (1, 17, 63, 64, 65, 100, 256)]
    pairs = [*same, (1, 100), (17, 65), (65, 17), (100, 1), (63, 100), (100, 63)]
    if DRY:
        pairs = [(1, 1), (17, 33)]
    lengths = [(n, m, 64, c, t) for (n, m) in pairs for c in (False, True) for t in DTYPES]
    dims = (80,) if DRY else (16, 32, 40, 80, 96, 128, 192, 256)
    n = 33 if DRY else 130
    wide = [(n, n, dim, True, "float16") for dim in dims]
    wide += [(n, n, dim, False, "bfloat16") for dim in dims if dim in (80, 128, 256)]
    return lengths + wide


def errors_of(
    queries: int, keys: int, dim: int, causal: bool, dtype: str
) -> dict[str, tuple[float, float]]:
    """Largest error of ours and of naive, for the output and for each gradient."""
    torch.manual_seed(0)
    tokens = {"query": queries, "key": keys, "value": keys}
    shapes = {name: (2, 2, number, dim) for name, number in tokens.items()}
    inputs = [torch.randn(shape, device=DEVICE) for shape in shapes.values()]
    inputs = [tensor.to(DTYPES[dtype]) for tensor in inputs]
    d_output = torch.randn(2, 2, queries, dim, device=DEVICE).to(DTYPES[dtype])
    hidden = hidden_by_causal(queries, keys) if causal else None

    def results(dtype: torch.dtype, attention: Callable[..., Tensor]) -> list[Tensor]:
        tensors = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        output = attention(*tensors)
        gradients = torch.autograd.grad(output, tensors, d_output.to(dtype))
        return [tensor.detach().double() for tensor in (output, *gradients)]

    exact = results(torch.float64, lambda q, k, v: naive(q, k, v, hidden))
    plain = results(DTYPES[dtype], lambda q, k, v: naive(q, k, v, hidden))
    ours = results(
        DTYPES[dtype], lambda q, k, v: flash_attention_triton(q, k, v, causal=causal)
    )
    names = ("output", "d_query", "d_key", "d_value")
    return {
        name: ((a - e).abs().max().item(), (p - e).abs().max().item())
        for name, a, p, e in zip(names, ours, plain, exact, strict=True)
    }


def too_large(dtype: str, errors: dict[str, tuple[float, float]]) -> list[str]:
    """The results whose error is above the bound; a NaN is above every bound.

    A tenth of the spacing of numbers at 1 is allowed to everyone: where the definition is
    exact by luck (one token), twice its error would be 0.
    """
    floor = torch.finfo(DTYPES[dtype]).eps / 10
    factors = {"output": 2, "d_query": 3, "d_key": 3, "d_value": 3}
    return [
        name
        for name, (ours, plain) in errors.items()
        if not ours <= factors[name] * plain + floor
    ]


def check() -> tuple[list[dict[str, Any]], bool]:
    """The table of errors, and whether all are small enough."""
    rows, good = [], True
    for shape in table_of_shapes():
        errors = errors_of(*shape)
        named = dict(zip(("queries", "keys", "dim", "causal", "dtype"), shape, strict=True))
        bad = too_large(named["dtype"], errors)
        good = good and not bad
        rows.append({**named, "errors": errors, "too_large": bad})
        text = " ".join(f"{n} {a:.1e} ({p:.1e})" for n, (a, p) in errors.items())
        print(*shape, text, "TOO LARGE" if bad else "", flush=True)
    return rows, good


# --- Times -----------------------------------------------------------------------------


def contestants(
    length: int, dim: int, causal: bool, dtype: str, backward: bool
) -> dict[str, Call]:
    """The calls to compare, all on the same tensors."""
    torch.manual_seed(0)
    shape = (TOKENS // length, length, WIDTH // dim, dim)
    inputs = [torch.randn(shape, device=DEVICE, dtype=DTYPES[dtype]) for _ in range(3)]
    query, key, value = (t.transpose(1, 2).requires_grad_(backward) for t in inputs)
    d_output = torch.randn(shape, device=DEVICE, dtype=DTYPES[dtype]).transpose(1, 2)
    hidden = hidden_by_causal(length, length) if causal else None

    def run(attention: Call) -> Call:
        def call() -> None:
            with torch.set_grad_enabled(backward):
                output = attention()
                if backward:
                    torch.autograd.grad(output, (query, key, value), d_output)

        return call

    def scaled_dot_product(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    calls = {
        "ours": run(lambda: flash_attention_triton(query, key, value, causal=causal)),
        "naive": run(lambda: naive(query, key, value, hidden)),
    }
    for name, backend in BACKENDS.items():
        calls[name] = run(lambda backend=backend: scaled_dot_product(backend))
    return calls


def synchronize() -> None:
    """Waits for the GPU."""
    if not DRY:
        torch.cuda.synchronize()


def usable(calls: dict[str, Call]) -> tuple[dict[str, Call], dict[str, str], float]:
    """Warms up: calls that run here, why others don't, and seconds that a round takes."""
    able, unable, seconds = {}, {}, 0.0
    for name, call in calls.items():
        try:
            call()  # compiles, plans, allocates
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            seconds += time.perf_counter() - start
            able[name] = call
        except RuntimeError as error:  # no such backend here, or not enough memory
            if name == "ours":
                raise
            unable[name] = str(error).splitlines()[0][:60]
        if name in unable and not DRY:
            torch.cuda.empty_cache()
    return able, unable, seconds


def gpu_times(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; every second round in reverse order.

    The calls are queued ahead of the GPU, so that it never waits for Python; writing more
    than the L2 cache holds comes before each, so that none finds its inputs there.
    """
    if DRY:
        return time_in_turn(calls, rounds)
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in sorted(calls.items(), reverse=number % 2 == 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            first.record()
            call()
            last.record()
            pairs[name].append((first, last))
    synchronize()
    return {n: [a.elapsed_time(b) for a, b in events] for n, events in pairs.items()}


def measure(
    length: int, dim: int, causal: bool, dtype: str, backward: bool, seconds: float
) -> dict[str, Any]:
    """TFLOP/s of every contestant, and its time divided by ours, within some seconds."""
    calls, unable, a_round = usable(contestants(length, dim, causal, dtype, backward))
    rounds = 2 if DRY else max(5, min(40, int(seconds / a_round)))
    times = gpu_times(calls, rounds)
    flops = 4 * TOKENS * length * WIDTH / (2 if causal else 1) * (3.5 if backward else 1)
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(ms, times["ours"], strict=True))
        for name, ms in times.items()
    }
    return {
        "rounds": rounds,
        "ms": {name: round(ms, 4) for name, ms in medians.items()},
        "tflops": {name: round(flops / ms / 1e9, 1) for name, ms in medians.items()},
        "time_over_ours": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "unable": unable,
    }


def describe_gpu() -> dict[str, Any]:
    """The GPU, its driver, and the versions that decide how fast the numbers came."""
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm"]
    command += ["--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    driver, power, clock = answer.splitlines()[torch.cuda.current_device()].split(", ")
    return {
        "name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        **{"driver": driver, "power_limit": power, "highest_clock": clock},
        **{"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="interpreter, tiny sizes")
    parser.add_argument("--check-only", action="store_true", help="errors alone")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    gpu = {} if DRY else describe_gpu()
    errors, good = check()
    if not good:
        sys.exit("flash_gpu: an error is too large; nothing was timed")
    if arguments.check_only:
        return
    shapes = list(itertools.product(LENGTHS, DIMS, (False, True), DTYPES, (False, True)))
    rows = []
    for number, (length, dim, causal, dtype, backward) in enumerate(shapes):
        # A third of its share of the time: the rest goes into compiling and planning.
        share = (deadline - time.monotonic()) / (len(shapes) - number) / 3
        named = {"length": length, "dim": dim, "causal": causal, "dtype": dtype}
        named["pass"] = "forward+backward" if backward else "forward"
        measured = measure(length, dim, causal, dtype, backward, share)
        rows.append({**named, **measured})
        print(*named.values(), measured["tflops"], measured["unable"] or "", flush=True)
    record = {"tokens": TOKENS, "width": WIDTH, "gpu": gpu, "errors": errors, "rows": rows}
    if not DRY:
        write_record("flash_gpu", record)


if __name__ == "__main__":
    main()
