"""A ring of ranks: memory of a rank against the length, and time beside that of one rank.

Each rank is a process of this machine with one thread; messages go by gloo. Everything is
causal, in float32, forward and backward.

- memory: the peak of the resident memory of a rank above its inputs, for whole texts of
  several lengths on 1, 2 and 4 ranks.
- hop: latency and bandwidth between two ranks, from hops of several sizes.
- times, for c tokens of a rank and each order: one text of 2c tokens on one rank and on two,
  and the parts by themselves, a rank's own keys and those of another rank, while both ranks
  compute and nothing travels. From the parts and the hop a model says what the two ranks
  should take (`modeled`); chapter 24 asks it about more of them.

    python benchmarks/ring.py            writes results/ring.json; needs Linux, for memory
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from paired import write_record

from attnlib import parallel
from attnlib.parallel.places import ORDERS

HEADS, KV_HEADS, FEATURES = 8, 2, 64
SIZES = tuple(4**k for k in range(5, 13))  # bytes of a hop


def median_time(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the slowest rank, median of some calls; a first one is not counted."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item())
    return statistics.median(times[1:])


def attention(positions, group=None, heads=HEADS, kv_heads=KV_HEADS) -> Callable[[], None]:
    """A call forward and backward, of the tokens at some positions of queries and keys."""
    shapes = [(heads, len(positions[0]), FEATURES)]
    shapes += [(kv_heads, len(positions[1]), FEATURES)] * 2
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def call() -> None:
        output = parallel.ring_attention(*inputs, positions, causal=True, group=group)
        output.backward(torch.ones_like(output))

    return call


def hop_times(rank: int, rounds: int) -> list[dict[str, float]]:
    """Seconds of a hop, for each number of bytes."""
    rows = []
    for size in SIZES:
        row = torch.zeros(size // 4)
        took = median_time(lambda row=row: parallel.post_shift((row,))(), 4 * rounds)
        rows.append({"bytes": size, "seconds": took})
    return rows


def whole_time(rank: int, tokens: int, rounds: int) -> float:
    """Seconds of one rank for a whole text."""
    text = torch.arange(tokens)
    return median_time(attention((text, text)), rounds)


def ring_times(rank: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """For each order, seconds of both ranks: in the ring, and for the parts of a step."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    found = {}
    for order in ORDERS:
        places = [parallel.shard_positions(2 * tokens, 2, r, order) for r in range(2)]
        mine = places[rank]
        late = places[1]  # rank 1 has pairs with the keys of rank 0 in every order
        found[order] = {
            "ring": median_time(attention((mine, mine)), rounds),
            "own": median_time(attention((late, late), alone), rounds),
            "other": median_time(attention((late, places[0]), alone), rounds),
        }
    return found


def hop_fit(rows: list[dict[str, float]]) -> dict[str, float]:
    """Latency in seconds and bandwidth in bytes a second: first and last of the hops."""
    first, last = rows[0], rows[-1]
    bandwidth = (last["bytes"] - first["bytes"]) / (last["seconds"] - first["seconds"])
    return {"latency": first["seconds"], "bandwidth": bandwidth}


def modeled(
    ranks: int, tokens: int, parts: dict[str, float], hop: dict[str, float]
) -> float:
    """Seconds on P ranks: its own keys, then P - 1 times those of others or their hops.

    A step of the ring sends, beside the computation, keys and values forward, the same
    backward, and their gradients backward; the last gradients go home by themselves.
    """
    sent = 2 * KV_HEADS * tokens * FEATURES * 4
    send = hop["latency"] + sent / hop["bandwidth"]
    steps = max(parts["other"], 3 * send)
    return parts["own"] + (ranks - 1) * steps + (send if ranks > 1 else 0)


def status(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(f"no {name} in /proc/self/status")


def memory(rank: int, tokens: int) -> float:
    """MiB of this rank's peak above its inputs, for one head and its part of a text."""
    ranks = dist.get_world_size()
    places = parallel.shard_positions(64 * ranks, ranks, rank)
    attention((places, places), None, 1, 1)()  # libraries are loaded
    places = parallel.shard_positions(tokens, ranks, rank)
    call = attention((places, places), None, 1, 1)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / 1024


def main() -> None:
    """Measures and writes the record."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048])
    options.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    given = options.parse_args()
    rows = parallel.run(hop_times, 2, given.rounds, timeout=600)[0]
    hop = hop_fit(rows)
    record = {"heads": HEADS, "kv_heads": KV_HEADS, "features": FEATURES}
    record |= {"rounds": given.rounds, "hops": rows, **hop, "times": [], "memory": []}
    for tokens in given.tokens:
        whole = parallel.run(whole_time, 1, 2 * tokens, given.rounds, timeout=600)[0]
        found = parallel.run(ring_times, 2, tokens, given.rounds, timeout=600)[0]
        for order, times in found.items():
            model = modeled(2, tokens, times, hop)
            row = {"tokens": tokens, "order": order, "whole": whole, **times}
            record["times"].append(row | {"modeled": model})
            print(row, f"modeled {model:.4f}", flush=True)
    for tokens in given.lengths:
        for ranks in (1, 2, 4):
            peaks = parallel.run(memory, ranks, tokens, timeout=600)
            row = {"tokens": tokens, "ranks": ranks, "mib": round(max(peaks), 1)}
            record["memory"].append(row)
            print(row, flush=True)
    write_record("ring", record)


if __name__ == "__main__":
    main()
