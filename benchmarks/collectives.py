"""Latency and bandwidth of messages between processes, and what collectives take.

Two and then four processes of this machine, with one thread each, form a group of gloo. For
sizes from 64 bytes to 16 MiB a message goes round the ring, and each collective of
`attnlib.parallel` runs on a whole of that size, with what it asks before. A time is that of
one call of the slowest rank, of five in a row where they are short, and the least of the
rounds: what the machine does when nothing else disturbs it. Chapter 23 fits eq-message-time
to the messages, and says how far it is from the collectives.

    python benchmarks/collectives.py    writes results/collectives.json, within two minutes
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from paired import write_record

from attnlib import parallel

SIZES = tuple(64 * 8**k for k in range(7))  # bytes of the whole, in float32


def seconds_of(call: Callable[[], object], times: int) -> float:
    """Of one call, of the slowest rank; they begin together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    took = torch.tensor((time.perf_counter() - start) / times, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measured(rank: int, rounds: int) -> list[dict[str, float]]:
    """For each size, microseconds of a message and of each collective."""
    rows = []
    for size in SIZES:
        whole = torch.zeros(size // 4)
        piece = torch.zeros(size // 4 // dist.get_world_size())
        calls = {
            "message": lambda whole=whole: parallel.post_shift([whole])(),
            "agree": lambda: parallel.agree("nothing", ()),
            "all_gather": lambda piece=piece: parallel.all_gather(piece),
            "reduce_scatter": lambda whole=whole: parallel.reduce_scatter(whole),
            "all_to_all": lambda whole=whole: parallel.all_to_all(whole, 0, 0),
            "all_reduce": lambda whole=whole: parallel.all_reduce(whole),
        }
        times = 5 if size < 2**20 else 1
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):  # the first is not counted
            for name, call in calls.items():
                took = 1e6 * seconds_of(call, times)
                if number:
                    taken[name].append(took)
        rows.append({"bytes": size} | {name: round(min(t), 1) for name, t in taken.items()})
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=20)
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)  # as in each rank
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    groups = [
        {"ranks": ranks, "us": parallel.run(measured, ranks, rounds, timeout=100)[0]}
        for ranks in (2, 4)
    ]
    write_record("collectives", {"rounds": rounds, "load": load, "groups": groups})


if __name__ == "__main__":
    main()
