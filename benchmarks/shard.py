"""What travels by heads and in a ring: time of the messages, against the number of tokens.

Each rank is a process of this machine with one thread; they form a group of gloo. For each
number of tokens a rank sends what attention by heads sends, forward, and then what a ring
sends, and computes nothing. Both begin with one question, whether all ranks ask for the
same; by heads a third time, each exchange asks again, as the package's do. The heads of
query are as many as those of keys, or four to one. The bytes are counted; where they say
which of the two should be sooner, the times say whether it is.

    python benchmarks/shard.py    writes results/shard.json
"""

import argparse
import time
from unittest import mock

import torch
import torch.distributed as dist
from paired import write_record

from attnlib import parallel
from attnlib.parallel import collectives
from attnlib.parallel.heads import heads_for_tokens, tokens_for_heads

FEATURES, RANKS, TOKENS = 64, (2, 4), (256, 1024, 4096)
HEADS = ((8, 8), (16, 4))  # of queries, of keys


def by_heads(query, key):
    """What head_attention sends forward, after one question."""
    collectives.agree("by_heads", [query.shape, key.shape])
    with mock.patch.object(collectives, "agree_on"):
        exchange(query, key)


def by_heads_that_ask(query, key):
    """The same as the package does it: each exchange begins with a word of all ranks."""
    collectives.agree("by_heads_that_ask", [query.shape, key.shape])
    exchange(query, key)


def exchange(query, key):
    traded, _, _ = (heads_for_tokens(x) for x in (query, key, key))
    tokens_for_heads(traded)  # in the place of the output


def by_ring(query, key):
    """All that ring_attention sends forward, after one question."""
    collectives.agree("by_ring", [query.shape, key.shape])
    for _ in range(dist.get_world_size() - 1):
        parallel.post_shift((key, key))()


WAYS = {"heads": by_heads, "asking": by_heads_that_ask, "ring": by_ring}


def measured(rank, heads, kv_heads, tokens, rounds):
    """Milliseconds of the slowest rank, in the soonest round, and bytes of this one."""
    own = tokens // dist.get_world_size()
    given = [torch.zeros(count, own, FEATURES) for count in (heads, kv_heads)]
    times, found = {}, {}
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            dist.barrier()
            start = time.perf_counter()
            with parallel.Traffic() as traffic:
                way(*given)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found[f"{name}_bytes"] = traffic.bytes
            if number:  # the first is not counted
                times.setdefault(name, []).append(1e3 * took.item())
    for name in WAYS:  # the soonest: what else the machine does only adds to it
        found[f"{name}_ms"] = round(min(times[name]), 3)
    return found


def main():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=25)
    rounds, rows = options.parse_args().rounds, []
    for ranks in RANKS:
        for heads, kv_heads in HEADS:
            for tokens in TOKENS:
                row = {"ranks": ranks, "heads": heads, "kv_heads": kv_heads}
                row |= {"tokens": tokens}
                inputs = (heads, kv_heads, tokens, rounds)
                row |= parallel.run(measured, ranks, *inputs, timeout=300)[0]
                rows.append(row)
                print(row, flush=True)
    write_record("shard", {"features": FEATURES, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
