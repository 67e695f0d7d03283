"""How well a ring of ranks is used: time of a step of attention on P ranks, against one.

Each rank is a process with one thread, on one machine, with gloo; the text grows with the
ranks, c tokens each, or stays, n tokens in all. Forward and backward, causal, by order of
the shards. From latency and bandwidth, which are measured by hops of two sizes, and from
the time of one square of c queries and c keys, a model says what it should take; where it
is right about the ranks that are here, it is asked about more.

    python benchmarks/ring.py            writes results/ring.json
    python benchmarks/ring.py --json     prints it
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from machine import describe

from attnlib import flash_attention, parallel

HEADS, KV_HEADS, FEATURES = 8, 2, 64
ORDERS = ("contiguous", "zigzag", "striped")


def median_time(function, repeats=5):
    """Seconds of the slowest rank, median of some calls; a first one is not counted."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item())
    return statistics.median(times[1:])


def shard(rank, ranks, tokens, order):
    """Query, key and value of a rank, and their positions."""
    torch.manual_seed(rank)
    shapes = [(heads, tokens, FEATURES) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    return inputs, parallel.shard_positions(ranks * tokens, ranks, rank, order)


def ring_times(rank, tokens):
    """Seconds forward and with backward, for each order."""
    found = {}
    for order in ORDERS:
        inputs, places = shard(rank, dist.get_world_size(), tokens, order)

        def forward(inputs=inputs, places=places):
            return parallel.ring_attention(*inputs, places, causal=True)

        def both(forward=forward):
            forward().sum().backward()

        found[order] = {"forward": median_time(forward), "both": median_time(both)}
    return found


def hop_times(rank, sizes=(1 << 10, 1 << 24)):
    """Latency in seconds and bandwidth in bytes a second, by hops of two sizes."""
    took = []
    for size in sizes:
        row = torch.zeros(size // 4)
        took.append(median_time(lambda row=row: parallel.post_shift((row,))(), repeats=9))
    bandwidth = (sizes[1] - sizes[0]) / (took[1] - took[0])
    return {"latency": max(0.0, took[0] - sizes[0] / bandwidth), "bandwidth": bandwidth}


def square_time(rank, tokens):
    """Seconds of one rank for c queries and c keys, all of which they see."""
    (query, key, value), _ = shard(rank, 1, tokens, "contiguous")
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (key, value))
    with torch.no_grad():
        return median_time(lambda: flash_attention(query, key, value))


def modeled(ranks, tokens, square, hop):
    """Efficiency forward, in zigzag: half a square a step, its hop hidden or waited for."""
    message = 2 * KV_HEADS * tokens * FEATURES * 4
    sending = hop["latency"] + message / hop["bandwidth"]
    steps = square / 2 + (ranks - 1) * max(square / 2, sending)
    return ranks * square / 2 / steps


def main():
    """Measures, models, and writes or prints the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print it instead")
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    alone = parallel.run(square_time, 1, given.tokens)[0]
    hop = parallel.run(hop_times, 2)[0]
    record = {"machine": describe(), "tokens": given.tokens, "square": alone, "hop": hop}
    record["ring"] = {
        ranks: parallel.run(ring_times, ranks, given.tokens, timeout=600)[0]
        for ranks in given.ranks
    }
    many = (*given.ranks, 8, 64, 1024)
    record["model"] = {p: modeled(p, given.tokens, alone, hop) for p in many}
    text = json.dumps(record, indent=2) + "\n"
    if given.json:
        print(text)
    else:
        Path(__file__).with_name("results").joinpath("ring.json").write_text(text)


if __name__ == "__main__":
    main()
