"""What the benchmarks share: calls timed in turn, and the record they write."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe


def time_in_turn(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    warm: bool = True,
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; every second round in reverse order.

    A call is made once more before it is timed, unless `warm` is off, as for calls of
    seconds: what the one before left in caches and allocator is then gone.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in sorted(calls.items(), reverse=number % 2 == 1):
            if warm:
                call()
            start = clock()
            call()
            times[name].append(1e3 * (clock() - start))
    return times


def write_record(name: str, record: dict[str, Any]) -> None:
    """Writes results/NAME.json: the record, and the machine."""
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({**record, "machine": describe()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path.name}")
