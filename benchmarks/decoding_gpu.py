"""One query and many keys on a GPU: the split kernels by their number of shares.

Timed in turn are appendix E's kernels with 1, 2, 4 … shares of the keys and with the number
that the package chooses, chapter 15's kernel, whose programs walk along all keys, and
PyTorch's function by each backend that runs here. The cache is overwritten before each
call. Each is compared with float64 attention before.

    python benchmarks/decoding_gpu.py              writes results/decoding_gpu.json
    python benchmarks/decoding_gpu.py --dry-run    interpreted, few keys, writes nothing
"""

import statistics
from typing import Any

import torch
import torch.nn.functional as F
from flash_gpu import BACKENDS, DEVICE, DRY, Call, describe_gpu, gpu_times, usable
from paired import write_record
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib import flash_attention_triton, flash_decoding_triton

HEADS, WIDTH, ROUNDS = 8, 128, 2 if DRY else 41
KEYS = (130,) if DRY else (512, 2048, 8192, 32768, 131072)
SHARES = (1, 2, 4, 8, 16, 32, 64)


def contestants(inputs: list[torch.Tensor]) -> dict[str, Call]:
    """The calls to compare, all on the same tensors."""

    def scaled_dot_product(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs)

    calls = {
        str(n): lambda n=n: flash_decoding_triton(*inputs, splits=n)
        for n in SHARES
        if 64 * n <= inputs[1].shape[-2]
    }
    calls["chosen"] = lambda: flash_decoding_triton(*inputs)
    calls["ours"] = lambda: flash_attention_triton(*inputs)
    for name, backend in BACKENDS.items():
        calls[name] = lambda backend=backend: scaled_dot_product(backend)
    return calls


def measure(keys: int) -> dict[str, Any]:
    """Milliseconds of every call for so many keys."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, HEADS, tokens, WIDTH, device=DEVICE, dtype=torch.float16)
        for tokens in (1, keys, keys)
    ]
    exact = F.scaled_dot_product_attention(*(x.double() for x in inputs))
    able, unable, _ = usable(contestants(inputs))
    errors = {name: (call() - exact).abs().max().item() for name, call in able.items()}
    assert max(errors.values()) < 2e-3, errors
    # Two GiB take longer to write than Python takes to start a call of several kernels.
    found = gpu_times(able, ROUNDS, 2 * 2**30)
    times = {name: statistics.median(ms) for name, ms in found.items()}
    return {"keys": keys, "ms": times, "errors": errors, "unable": unable}


def main() -> None:
    rows = []
    with torch.no_grad():
        for keys in KEYS:
            rows.append(measure(keys))
            print(rows[-1], flush=True)
    sizes = {"heads": HEADS, "width": WIDTH, "rounds": ROUNDS}
    if not DRY:
        write_record("decoding_gpu", {**sizes, "gpu": describe_gpu(), "rows": rows})


if __name__ == "__main__":
    main()
