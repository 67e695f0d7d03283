"""Latency and bandwidth of messages between processes, and what collectives take.

Two to four processes of this machine form a group of gloo. For sizes from 8 bytes to 16 MiB
a message goes round the ring, and each collective of `attnlib.parallel` runs on a whole of
that size. The latency is the median time of the smallest message, the bandwidth that of the
largest; beside each collective stands what eq-message-time makes of the two.

    python benchmarks/collectives.py    writes results/collectives.json
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from paired import write_record

from attnlib import parallel

SIZES = tuple(8 * 4**k for k in range(11) if 8 * 4**k <= 2**24)  # bytes of the whole


def median_time(work: Callable[[], object], rounds: int) -> float:
    """Seconds of one call, of this rank; all begin together."""
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measured(rank: int, rounds: int) -> list[dict[str, float]]:
    """For each size, seconds of a message and of each collective."""
    ranks, rows = dist.get_world_size(), []
    for size in SIZES:
        whole = torch.zeros(max(ranks, size // 4))
        whole = whole[: len(whole) // ranks * ranks]
        piece = whole[: len(whole) // ranks].clone()
        work = {
            "message": lambda whole=whole: parallel.post_shift([whole])(),
            "all_gather": lambda piece=piece: parallel.all_gather(piece),
            "reduce_scatter": lambda whole=whole: parallel.reduce_scatter(whole),
            "all_to_all": lambda whole=whole: parallel.all_to_all(whole, 0, 0),
            "all_reduce": lambda whole=whole: parallel.all_reduce(whole),
        }
        row = {name: median_time(call, rounds) for name, call in work.items()}
        rows.append({"bytes": whole.nbytes, **row})
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=30)
    args = options.parse_args()
    record = {}
    for ranks in (2, 4):
        rows = parallel.run(measured, ranks, args.rounds, timeout=600)[0]
        alpha, longest = rows[0]["message"], rows[-1]
        beta = longest["bytes"] / max(longest["message"] - alpha, 1e-9)
        for row in rows:
            steps, volume = ranks - 1, (ranks - 1) / ranks * row["bytes"]
            row["gather_by_model"] = steps * alpha + volume / beta
            row["all_reduce_by_model"] = 2 * row["gather_by_model"]
        record[f"{ranks} ranks"] = {"latency": alpha, "bandwidth": beta, "sizes": rows}
    write_record("collectives", record)


if __name__ == "__main__":
    main()
