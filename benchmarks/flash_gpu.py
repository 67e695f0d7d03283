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
    python benchmarks/flash_gpu.py --tune         which tiles are fastest on this GPU
    python benchmarks/flash_gpu.py --dry-run      all of it, interpreted, tiny sizes

`--tune` tries settings for each kernel, head dimension and dtype, in an order that is
drawn, so that what it gets to within `--minutes` is a sample; each takes seconds, nearly
all of them of the compiler. `--jobs 14` lets so many processes compile beforehand, in at
most half of the time, and `--only "forward 64 *"` limits the cases. A setting whose
registers or shared memory can't suffice is not tried, one that the GPU refuses is told. It
prints lines for the tables of attnlib/flash_triton/settings.py, where those for 9.0 are
from such a run, and writes results/flash_tune_CAPABILITY.json.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are decorated

import torch
import torch.nn.functional as F
import triton
from paired import time_in_turn, write_record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib import flash_attention_triton
from attnlib.flash_triton import Setting, choose_setting, launch
from attnlib.flash_triton.settings import Kernel

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
    if hidden.shape[0] > hidden.shape[1]:  # asking the GPU would make it wait for Python
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


def gpu_times(
    calls: dict[str, Call], rounds: int, cleared: int = 256 * 2**20
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; every second round in reverse order.

    The calls are queued ahead of the GPU, so that it never waits for Python; writing more
    bytes than the L2 cache holds comes before each, so that none finds its inputs there.
    """
    if DRY:
        return time_in_turn(calls, rounds)
    cache = torch.empty(cleared, dtype=torch.int8, device=DEVICE)
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


# --- Settings --------------------------------------------------------------------------

SIDES = (16, 256) if DRY else (16, 32, 64, 128)  # a tile of 256 will not fit
WARPS, STAGES = ((1,), (1, 2)) if DRY else ((4, 8), (1, 2, 3, 4))
TUNED_DIMS = DIMS if DRY else (64, 128, 256)
TUNED_LENGTH, TUNED_HEADS = (16, 2) if DRY else (4096, 32)
REGISTERS = 255  # that a thread may have
UNROLLED = 4096  # multiply-adds of a thread for a tile; more take minutes to compile


class GPU(NamedTuple):
    """What limits a setting: capability, and bytes of shared memory for a program."""

    capability: int
    shared: int

    @classmethod
    def here(cls) -> "GPU":
        """The one at hand; in the interpreter a small one."""
        if DRY:
            return cls(0, 8192)
        major, minor = torch.cuda.get_device_capability()
        asked = triton.runtime.driver.active.utils.get_device_properties
        found = asked(torch.cuda.current_device())
        return cls(10 * major + minor, found["max_shared_mem"])


def why_not(
    kernel: Kernel, setting: Setting, dim: int, dtype: torch.dtype, gpu: GPU
) -> str | None:
    """Why a setting can't fit, by chapter 15's two limits; `None` if it may.

    Counted is the least: what must be held, without addresses or a second copy.
    """
    r, c, warps, stages = setting
    by_keys = kernel in ("key_value_gradient", "all_gradients")
    held = c * (r + 2 * dim) if by_keys else r * (c + dim)
    if held / (32 * warps) > REGISTERS:
        return f"at least {held // (32 * warps)} registers a thread"
    walked = r if by_keys else c
    loaded = dtype.itemsize * 2 * dim * walked * max(stages - 1, 1)
    if loaded > gpu.shared:
        return f"at least {loaded} bytes of shared memory"
    cores = dtype == torch.float32 or 0 < gpu.capability < 80
    products = r * c * 2 * dim // (32 * warps)
    if cores and products > UNROLLED:
        return f"{products} multiply-adds a thread, one after the other"
    if cores and stages > 1:
        return "stages are for tensor cores"
    return None


def candidates(
    kernel: Kernel, dim: int, dtype: torch.dtype, gpu: GPU
) -> tuple[list[Setting], dict[Setting, str]]:
    """Settings to try, in an order that is drawn, and why others are not."""
    every = [Setting(*sizes) for sizes in itertools.product(SIDES, SIDES, WARPS, STAGES)]
    random.Random(0).shuffle(every)
    refused = {s: why_not(kernel, s, dim, dtype, gpu) for s in every}
    refused = {setting: words for setting, words in refused.items() if words}
    return [setting for setting in every if setting not in refused], refused


def kernel_call(kernel: Kernel, dim: int, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """Starts one kernel with causal inputs, and returns what it writes."""
    torch.manual_seed(0)
    shape = (1, TUNED_LENGTH, TUNED_HEADS, dim)
    drawn = [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(4)]
    query, key, value, grad_output = (tensor.transpose(1, 2) for tensor in drawn)
    inputs, rest = (query, key, value, None), (True, dim**-0.5)
    if kernel == "forward":
        return lambda: [launch.run_forward(*inputs, *rest)[0]]
    output, lse = launch.run_forward(*inputs, *rest)
    numbers = launch.run_statistics(output, grad_output, lse, torch.zeros_like(lse))
    needed = (kernel != "key_value_gradient", kernel != "query_gradient")

    def backward() -> list[Tensor]:
        found = launch.run_backward(*inputs, grad_output, numbers, *rest, needed)
        return [tensor for tensor in found if tensor is not None]

    return backward


def with_setting(setting: Setting, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, with this setting in place of the table's."""

    def run() -> Any:
        with patch.object(launch, "choose_setting", lambda *case: setting):
            return call()

    return run


def tune_one(
    kernel: Kernel, dim: int, dtype: torch.dtype, gpu: GPU, seconds: float
) -> dict[str, Any]:
    """Times of all settings of one kernel that run here, the three best ones in turn."""
    start, call = time.monotonic(), kernel_call(kernel, dim, dtype)
    expected, times = call(), {}
    tried, refused = candidates(kernel, dim, dtype, gpu)
    print(f"  {len(tried)} settings to try, {len(refused)} can't fit", flush=True)
    for number, setting in enumerate(tried):
        if time.monotonic() - start > seconds:
            refused.update(dict.fromkeys(tried[number:], "no time left"))
            break
        run = with_setting(setting, call)
        try:
            for ours, theirs in zip(run(), expected, strict=True):  # compiles
                torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
            times[setting] = statistics.median(gpu_times({"run": run}, 5)["run"])
        except (RuntimeError, AssertionError, triton.TritonError) as error:
            refused[setting] = (str(error).strip() or type(error).__name__).splitlines()[0]
        said = f"{times[setting]:.3f} ms" if setting in times else refused[setting][:60]
        print(f"  {number + 1}/{len(tried)}", *setting, said, flush=True)
    best = sorted(times, key=times.get)[:3]
    calls = {str(place): with_setting(setting, call) for place, setting in enumerate(best)}
    for place, taken in gpu_times(calls, 2 if DRY else 21).items():
        times[best[int(place)]] = statistics.median(taken)
    return {
        **{"kernel": kernel, "dim": dim, "dtype": str(dtype).removeprefix("torch.")},
        "table": choose_setting(kernel, dim, dtype, gpu.capability),
        "ms": [[*setting, round(ms, 4)] for setting, ms in times.items()],
        "refused": [[*setting, words] for setting, words in refused.items()],
    }


def fastest(rows: list[dict[str, Any]]) -> tuple[int, ...]:
    """The setting that takes the least time in all of these together."""
    sums: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        for *setting, ms in row["ms"]:
            sums.setdefault(tuple(setting), []).append(ms)
    most = max(map(len, sums.values()))  # where no setting ran in all of them
    able = {setting: sum(ms) for setting, ms in sums.items() if len(ms) == most}
    return min(able, key=able.get)


def as_table(rows: list[dict[str, Any]], capability: int) -> str:
    """What was found, as lines of SETTINGS and of SETTINGS_FLOAT32.

    float32 has one setting for all kernels; below 8.0 it has those of float16.
    """
    rows = [row for row in rows if row["ms"]]
    shared = 0 < capability < 80
    by_kernel: dict[tuple[str, int], list[dict[str, Any]]] = {}
    by_dim: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["dtype"] == "float16" or shared:
            by_kernel.setdefault((row["kernel"], row["dim"]), []).append(row)
        else:
            by_dim.setdefault(row["dim"], []).append(row)
    lines = ["SETTINGS"]
    for (kernel, dim), found in by_kernel.items():
        lines.append(f'    ({capability}, "{kernel}", {dim}): Setting{fastest(found)},')
    lines.append("SETTINGS_FLOAT32")
    lines += [f"    {dim}: Setting{fastest(found)}," for dim, found in by_dim.items()]
    return "\n".join(lines)


Case = tuple[Kernel, int, torch.dtype]


def compile_setting(case: Case, setting: Setting) -> None:
    """Leaves the kernel in Triton's cache; what fails fails again when it is timed."""
    with contextlib.suppress(RuntimeError, triton.TritonError):
        with_setting(setting, kernel_call(*case))()


def compile_ahead(cases: list[Case], gpu: GPU, jobs: int, deadline: float) -> None:
    """Compiles the settings of all cases in so many processes, until the time is up."""
    settings = {case: candidates(*case, gpu)[0] for case in cases}
    longest = max(map(len, settings.values()))
    todo = [
        (case, settings[case][place])
        for place in range(longest)
        for case in cases
        if place < len(settings[case])
    ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        waiting = [pool.apply_async(compile_setting, given) for given in todo]
        for number, answer in enumerate(waiting):
            try:
                answer.get(max(deadline - time.monotonic(), 0))
            except multiprocessing.TimeoutError:
                print(f"compiled {number} of {len(todo)} settings", flush=True)
                return


def tune(deadline: float, described: dict[str, Any], only: str, jobs: int) -> None:
    """Measures, prints the table, and writes the record."""
    gpu, rows = GPU.here(), []
    dtypes = (torch.float16, torch.float32)
    dims = [dim for dim in TUNED_DIMS if not 0 < gpu.capability < 80 or dim <= 128]
    cases = list(itertools.product(get_args(Kernel), dims, dtypes))
    cases = [case for case in cases if fnmatch(" ".join(map(str, case)), only)]
    if jobs:
        compile_ahead(cases, gpu, jobs, (time.monotonic() + deadline) / 2)
    for number, case in enumerate(cases):
        print(f"{number + 1}/{len(cases)}", *case, flush=True)
        share = (deadline - time.monotonic()) / (len(cases) - number)
        rows.append(tune_one(*case, gpu, share))
    print(as_table(rows, gpu.capability))
    record = {"length": TUNED_LENGTH, "heads": TUNED_HEADS, "causal": True}
    record |= {"gpu": described, "rows": rows}
    if not DRY:
        write_record(f"flash_tune_{gpu.capability}", record)


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
    parser.add_argument("--tune", action="store_true", help="settings of the kernels")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--only", default="*", help="of --tune: kernel, dimension, dtype")
    parser.add_argument("--jobs", type=int, default=0, help="of --tune: that compile")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    gpu = {} if DRY else describe_gpu()
    if arguments.tune or DRY:
        tune(deadline, gpu, arguments.only, arguments.jobs)
    if arguments.tune:
        return
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
        record = {"tokens": TOKENS, "width": WIDTH, "gpu": gpu, "errors": errors}
        if not DRY:  # after each row: a run that is ended leaves what it measured
            write_record("flash_gpu", {**record, "rows": rows})


if __name__ == "__main__":
    main()
