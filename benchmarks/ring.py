"""A ring of ranks: memory of a rank against the length, and time beside that of one rank.

Each rank is a process of this machine with one thread; messages go by gloo. Everything is
causal, in float32.

- hops: seconds between two ranks, for several sizes; from them latency and bandwidth.
- times, for c tokens of a rank and each order: one text of 2c tokens on one rank and on
  two, forward, and with backward. And the parts of the forward pass by themselves, the
  pairs with a rank's own keys and with those of the other, while both ranks compute and
  nothing travels: of these chapter 24 makes a model, for two ranks and for more.
- memory: the most bytes of tensors that a rank has at once, beside its inputs, forward and
  backward, by PyTorch's profiler: texts of one head and several lengths on 1 to 8 ranks.

    python benchmarks/ring.py            writes results/ring.json
"""

import argparse
import time
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist
from paired import write_record
from torch.profiler import ProfilerActivity, profile

from attnlib import parallel
from attnlib.parallel.places import ORDERS

HEADS, KV_HEADS, FEATURES = 8, 2, 64
SIZES = tuple(4**k for k in range(5, 13))  # bytes of a hop


def fastest(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the slowest rank, in the fastest call; a first one is not counted."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item())
    return min(times[1:])


def attention(
    positions: tuple[torch.Tensor, torch.Tensor],
    backward: bool = True,
    group: dist.ProcessGroup | None = None,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
) -> Callable[[], None]:
    """A call for the tokens at some positions of queries and keys."""
    tokens = [len(x) for x in positions]
    shapes = [(heads[0], tokens[0], FEATURES), *[(heads[1], tokens[1], FEATURES)] * 2]
    inputs = [torch.randn(shape, requires_grad=backward) for shape in shapes]

    def call() -> None:
        output = parallel.ring_attention(*inputs, positions, causal=True, group=group)
        if backward:
            output.backward(torch.ones_like(output))

    return call


def hop_times(rank: int, rounds: int) -> list[dict[str, float]]:
    """Seconds of a hop, for each number of bytes."""
    rows = []
    for size in SIZES:
        row = torch.zeros(size // 4)
        took = fastest(lambda row=row: parallel.post_shift((row,))(), 2 * rounds)
        rows.append({"bytes": size, "seconds": took})
    return rows


def whole_times(rank: int, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of one rank for a whole text."""
    text = (torch.arange(tokens),) * 2
    return {
        "whole": fastest(attention(text, False), rounds),
        "whole_both": fastest(attention(text), rounds),
    }


def ring_times(rank: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """For each order, seconds of both ranks: in the ring, and for the parts of a step."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    found = {}
    for order in ORDERS:
        places = [parallel.shard_positions(2 * tokens, 2, r, order) for r in range(2)]
        mine = (places[rank], places[rank])
        late, early = places[1], places[0]  # rank 1 sees keys of rank 0 in every order
        found[order] = {
            "ring": fastest(attention(mine, False), rounds),
            "own": fastest(attention((late, late), False, alone), rounds),
            "other": fastest(attention((late, early), False, alone), rounds),
            "ring_both": fastest(attention(mine), rounds),
        }
    return found


def memory(rank: int, tokens: int) -> int:
    """Most bytes of tensors at once, beside its inputs, for one head and a rank's part."""
    ranks = dist.get_world_size()
    places = parallel.shard_positions(tokens, ranks, rank)
    call = attention((places, places), heads=(1, 1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    events = watched.profiler.kineto_results.events()
    events = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in events))


def main() -> None:
    """Measures and writes the record."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024])
    options.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    given = options.parse_args()
    hops = parallel.run(hop_times, 2, given.rounds, timeout=600)[0]
    first, last = hops[0], hops[-1]
    bandwidth = (last["bytes"] - first["bytes"]) / (last["seconds"] - first["seconds"])
    record = {"heads": HEADS, "kv_heads": KV_HEADS, "features": FEATURES}
    record |= {"rounds": given.rounds, "hops": hops, "bandwidth": bandwidth}
    record |= {"latency": first["seconds"], "times": [], "memory": []}
    for tokens in given.tokens:
        whole = parallel.run(whole_times, 1, 2 * tokens, given.rounds, timeout=600)[0]
        found = parallel.run(ring_times, 2, tokens, given.rounds, timeout=600)[0]
        for order, times in found.items():
            row = {"tokens": tokens, "order": order, **whole, **times}
            record["times"].append(row)
            print(row, flush=True)
    for tokens in given.lengths:
        for ranks in (1, 2, 4, 8):
            most = max(parallel.run(memory, ranks, tokens, timeout=600))
            row = {"tokens": tokens, "ranks": ranks, "bytes": most}
            record["memory"].append(row)
            print(row, flush=True)
    write_record("ring", record)


if __name__ == "__main__":
    main()
