"""`attnlib.parallel`: processes that start, fail and end; collectives and their transposes.

Each test of the collectives is one call of `run`: the function runs in every rank, and
returns what the test compares.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from attnlib import parallel
from attnlib.parallel import (
    all_gather,
    all_reduce,
    all_to_all,
    processes,
    reduce_scatter,
    shift,
)
from drawn import close, normal

RANKS = (1, 2, 4)
LINUX = sys.platform == "linux"
linux = pytest.mark.skipif(not LINUX, reason="looks for processes in /proc")


def mine(rank, *shape):
    return normal(*shape, seed=100 + rank)


def nobody_left():
    return not multiprocessing.active_children()


# The collectives, each with what rank r of P has then, by its definition


COLLECTIVES = {
    "all_gather 0": (all_gather, lambda xs, r, P: torch.cat(xs)),
    "all_gather 1": (lambda x: all_gather(x, 1), lambda xs, r, P: torch.cat(xs, 1)),
    "reduce_scatter 0": (reduce_scatter, lambda xs, r, P: sum(xs).chunk(P)[r]),
    "reduce_scatter 1": (
        *(lambda x: reduce_scatter(x, -1), lambda xs, r, P: sum(xs).chunk(P, 1)[r]),
    ),
    "all_to_all": (
        lambda x: all_to_all(x, 1, 0),
        lambda xs, r, P: torch.cat([x.chunk(P, 1)[r] for x in xs]),
    ),
    "there and back": (
        *(lambda x: all_to_all(all_to_all(x, 1, 0), 0, 1), lambda xs, r, P: xs[r]),
    ),
    "shift": (shift, lambda xs, r, P: xs[r - 1]),
    "shift back": (lambda x: shift(x, -1), lambda xs, r, P: xs[(r + 1) % P]),
    "all_reduce": (all_reduce, lambda xs, r, P: sum(xs)),
}


def collected(rank):
    """What each gives; its bytes; and ⟨A x, y⟩ and ⟨x, Aᵀ y⟩ of this rank."""
    ranks, x = dist.get_world_size(), mine(rank, 4, 8).requires_grad_()
    with parallel.Traffic() as traffic:
        outputs = {name: function(x) for name, (function, _) in COLLECTIVES.items()}
        added = parallel.add_up(x)
        parts = parallel.post_shift([x, x[0].float()], 3)()
    one = (ranks - 1) * x.nbytes // ranks
    several = (ranks > 1) * x.nbytes
    wanted = {"all_gather": 2 * ranks * one, "reduce_scatter": 2 * one}
    wanted |= {"all_to_all": 3 * one, "all_reduce": 4 * one}
    wanted |= {"shift": 3 * several + (ranks > 1) * 4 * 8}
    assert {name: traffic.by_name.get(name, 0) for name in wanted} == wanted
    assert traffic.bytes == sum(traffic.by_name.values())
    pairings = {}
    for name, output in outputs.items():
        y = normal(*output.shape, seed=7 + rank, grad=True)
        (back,) = torch.autograd.grad(output, x, y, create_graph=True)
        (twice,) = torch.autograd.grad(back, y, x.detach())  # (Aᵀ)ᵀ x is A x
        close(twice, output)
        pairings[name] = ((output * y).sum().item(), (x * back).sum().item())
    found = {name: output.detach() for name, output in outputs.items()}
    return found, added.detach(), [part.detach() for part in parts], pairings


@pytest.mark.parametrize("ranks", RANKS)
def test_each_is_what_it_is_defined_as_and_its_backward_the_transpose(ranks):
    xs = [mine(r, 4, 8) for r in range(ranks)]
    results = parallel.run(collected, ranks, timeout=20)
    for r, (found, added, parts, _) in enumerate(results):
        for name, (_, definition) in COLLECTIVES.items():
            torch.testing.assert_close(found[name], definition(xs, r, ranks), msg=name)
        close(added, sum(xs))
        before = xs[(r - 3) % ranks]
        torch.testing.assert_close(parts, [before, before[0].float()])
    for name in COLLECTIVES:
        pairs = [pairings[name] for *_, pairings in results]
        forward, backward = (sum(side) for side in zip(*pairs, strict=True))
        assert forward == pytest.approx(backward, abs=1e-12), name
    assert nobody_left()


def slopes(rank):
    """By finite differences, which `rank_gradients` takes over all ranks."""
    for name, (function, _) in COLLECTIVES.items():
        exact, near = parallel.rank_gradients(
            lambda x, function=function: function(x.sin()).cos(), mine(rank, 2, 2)
        )
        for x, y in zip(exact, near, strict=True):
            assert (x - y).abs().max() < 1e-7, name


def test_gradients_across_two_ranks():
    parallel.run(slopes, 2, timeout=25)


def one_loss(rank, all_copies):
    """w · x, a piece of w on each rank, and the square of the sum: one loss, or P of it."""
    w = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
    shared = parallel.replicate(x)
    add = all_reduce if all_copies else parallel.add_up
    loss = add((w * shared).sum()) ** 2
    loss.backward()
    return loss.detach(), w.grad, x.grad


@pytest.mark.parametrize("ranks", RANKS)
def test_a_loss_that_all_ranks_hold_counts_once_by_add_up(ranks):
    w = [torch.tensor([1.0 + r, 2.0], dtype=torch.float64) for r in range(ranks)]
    x = torch.tensor([3.0, -1.0], dtype=torch.float64)
    total = sum((part * x).sum() for part in w)
    for all_copies, times in ((False, 1), (True, ranks)):
        for loss, grad_w, grad_x in parallel.run(one_loss, ranks, all_copies, timeout=20):
            torch.testing.assert_close(loss, total**2)
            torch.testing.assert_close(grad_w, times * 2 * total * x)
            torch.testing.assert_close(grad_x, times * 2 * total * sum(w))


# What is refused, and that all ranks refuse it


def not_recorded(x, here):
    """Each collective under `no_grad` on some ranks, which then would not go backward."""
    x = x.clone().requires_grad_()
    for function in (
        all_gather,
        reduce_scatter,
        partial(all_to_all, split_dim=0, concat_dim=0),
        shift,
        parallel.replicate,
        parallel.add_up,
        all_reduce,
    ):
        with torch.set_grad_enabled(not here), pytest.raises(ValueError) as error:
            function(x)
        assert "disagree: rank 0" in str(error.value)
    raise error.value


DIVIDES = "x: expected a length divisible by"
NUMBERS = "x: expected numbers, which can be added up, got torch.bool"


def refused(rank):
    """What each call says that does not fit; the next one is not disturbed."""
    ranks, x, said = dist.get_world_size(), torch.ones(4, 4), []
    first, ones = rank == 0, torch.ones
    for words, call in (
        ("the ranks disagree: rank 0 has all_gather((2,), torch.float32",
         lambda: all_gather(ones(3 - first))),
        ("rank 1 has all_gather((2, 2), torch.float32",
         lambda: all_gather(ones((2,) * (2 - first)))),
        ("rank 1 has add_up((4, 4), torch.float64",
         lambda: all_reduce(x if first else x.double())),
        ("rank 1 has all_gather((4, 4), torch.float32, 0)",
         lambda: all_gather(x, int(first))),
        ("all_gather: dim: expected a dimension of shape (4, 4), got 2",
         lambda: all_gather(x, 2)),
        ("rank 1 has shift((4, 4), torch.float32, with gradient, hops=1)",
         lambda: shift(x.clone().requires_grad_(not first))),
        ("rank 1 has shift((4, 4), torch.float32, hops=2)",
         lambda: shift(x, 1 + (not first))),
        (f"rank 1: {DIVIDES}", lambda: reduce_scatter(ones(5 - first))),
        (f"reduce_scatter: {DIVIDES}", lambda: reduce_scatter(ones(ranks + 1))),
        (f"all_to_all: {DIVIDES}", lambda: all_to_all(ones(ranks + 1, 2), 0, 1)),
        ("rank 0 has replicate((4, 4), torch.float32); rank 1 has all_gather((4, 4)",
         lambda: (parallel.replicate if first else all_gather)(x)),
        ("add_up: rank 1: x: expected a tensor, got list",
         lambda: parallel.add_up(x if first else [1.0])),
        (f"add_up: {NUMBERS}", lambda: all_reduce(x > 0)),
        (f"reduce_scatter: {NUMBERS}", lambda: reduce_scatter(x > 0)),
        ("replicate: rank 1: x: expected device cpu as the group, got meta",
         lambda: parallel.replicate(x if first else x.to("meta"))),
        ("with gradient); rank 1 has add_up((4, 4), torch.float32)",
         lambda: not_recorded(x, not first)),
        ("rank 0 has rank_gradients(3); rank 1 has rank_gradients(2)",
         lambda: parallel.rank_gradients(torch.sum, x[0, : 2 + first].double())),
        ("rank_gradients: inputs: expected torch.float64, got torch.float32",
         lambda: parallel.rank_gradients(torch.sum, x)),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value)
        said.append(str(error.value))
        assert all_reduce(ones(2)).tolist() == [ranks, ranks], words
    return said


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_does_not_fit_is_refused_on_every_rank(ranks):
    found = parallel.run(refused, ranks, timeout=25)
    for messages in zip(*found, strict=True):
        # where the ranks do not agree on the name of the call, each says its own
        names = {message.partition(":")[0] for message in messages}
        assert len(set(messages)) == len(names) <= 2
        assert len(names) == 1 or names == {"replicate", "all_gather"}
    assert nobody_left()


def outside(rank):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match=r"^group: rank 1 is not in the group$"):
            all_gather(torch.ones(2), group=group)
        return True
    return len(all_gather(torch.ones(2), group=group))


@pytest.mark.usefixtures("as_shipped")
def test_a_rank_outside_of_the_group_is_told_and_one_without_a_group():
    assert parallel.run(outside, 2, timeout=25) == [2, True]
    with pytest.raises(RuntimeError, match="call this in"):
        all_gather(torch.ones(2))


def within_two_of_three(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    x = mine(rank, 4, 6)
    calls = all_gather, reduce_scatter, all_reduce, shift
    split = all_to_all(x, 1, 0, group=group)
    return *(call(x, group=group) for call in calls), shift(x, -1, group=group), split


def test_a_group_that_does_not_begin_with_rank_0():
    a, b = mine(1, 4, 6), mine(2, 4, 6)
    _, first, (_, rest, *_) = parallel.run(within_two_of_three, 3)
    gathered, part, total, *others = first
    close(gathered, torch.cat([a, b]))
    close(torch.cat([part, rest]), a + b)
    close(total, a + b)
    for found, expected in zip(others, (b, b, torch.cat([a, b])[:, :3]), strict=True):
        close(found, expected)


# run


def addressed(rank, *args):
    return rank, args, torch.get_num_threads(), os.getpid()


def test_run_returns_what_the_ranks_return_in_their_order():
    results = parallel.run(addressed, 3, "a", [1], timeout=15)
    assert [result[:3] for result in results] == [(r, ("a", [1]), 1) for r in range(3)]
    assert len({result[3] for result in results} | {os.getpid()}) == 4
    assert nobody_left()


@linux
def test_run_takes_a_closure_where_processes_are_forked():
    here = 5
    assert parallel.run(lambda rank: rank + here, 2, timeout=15, start="fork") == [5, 6]


def test_run_spawns_processes():
    (result,) = parallel.run(addressed, 1, timeout=30, start="spawn")
    assert result[:2] == (0, ())


def orphans(rank, path):
    """Leaves the ids of this rank, of a process that it starts and of one that it forks."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    started = subprocess.Popen(["sleep", "60"])
    with open(f"{path}{rank}.new", "w", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {forked.pid} {started.pid}")
    os.rename(f"{path}{rank}.new", f"{path}{rank}")


def ends(rank, how, path):
    """Rank 1 in its own way; the others wait for it, unless all return."""
    if LINUX:
        orphans(rank, path)
    if rank == 1:
        if how == "raises":
            raise KeyError("lost")
        if how == "exits":
            os._exit(3)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("never comes", "never shifts"):
            time.sleep(60)
    if how == "returns" or (rank == 1 and how == "leaves"):
        return rank
    if how == "never shifts":
        return parallel.post_shift(
            [torch.ones(2)]
        )()  # which waits in no function of PyTorch's
    return all_gather(torch.ones(2))


def gone(path):
    """Waits until none of the processes is left that the ranks have written down."""
    files = [path.parent / f"{path.name}{rank}" for rank in range(3)]
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(pids) == 9
    for _ in range(50):
        alive = [pid for pid in pids if is_alive(pid)]
        if not alive:
            return True
        time.sleep(0.1)
    raise AssertionError(f"still there: {alive}")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("returns", None),
        ("raises", ["rank 1 raised\n", "KeyError: 'lost'"]),
        ("exits", ["rank 1 died (exit code 3)"]),
        ("is killed", ["rank 1 died (exit code -9)"]),
        ("never comes", ["rank 1 did not come: ends, line "]),
        ("never shifts", ["rank 1 did not come: ends, line ", "rank 0 waits in ends"]),
        ("leaves", ["rank 0 waits in ends, line ", "rank 1 had returned"]),
    ],
)
def test_a_rank_that_fails_is_named_and_nobody_is_left(how, said, tmp_path):
    """Nor what the ranks have started."""
    start, path = time.monotonic(), tmp_path / "rank"
    if said is None:
        assert parallel.run(ends, 3, how, str(path), timeout=20) == [0, 1, 2]
    else:
        late = how in (
            "never comes",
            "never shifts",
            "leaves",
        )  # if one fails, the others get no more time
        with pytest.raises(parallel.RankError) as caught:
            parallel.run(ends, 3, how, str(path), timeout=2 if late else 20)
        assert all(words in str(caught.value) for words in said)
        assert how == "leaves" or caught.value.ranks == [1]
    assert time.monotonic() - start < 5
    assert nobody_left() and (not LINUX or gone(path))


def leads(path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if it is ignored here
    parallel.run(ends, 3, "never comes", path, timeout=50)


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_ranks_end_with_a_caller_that_is_killed_or_interrupted(number, tmp_path):
    context = multiprocessing.get_context("fork")
    parent = context.Process(target=leads, args=(str(tmp_path / "rank"),))
    parent.start()
    for _ in range(200):
        if all((tmp_path / f"rank{rank}").exists() for rank in range(3)):
            break
        time.sleep(0.1)
    os.kill(parent.pid, number)
    parent.join(10)
    assert parent.exitcode == (1 if number == signal.SIGINT else -number)
    assert gone(tmp_path / "rank")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_spawned_processes_cannot_import_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"got test_.*<lambda> of a notebook or of another"
    ):
        parallel.run(lambda rank: rank, 1, start="spawn")
    notebook = types.ModuleType("__main__")  # which comes from no file
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setattr(addressed, "__module__", "__main__")
    with pytest.raises(ValueError, match="import it, got addressed of a notebook"):
        parallel.run(addressed, 1, start="spawn")


@pytest.mark.parametrize("used", ["CUDA", "backward"])
def test_where_a_gpu_is_in_use_processes_are_spawned(used, monkeypatch):
    if used == "CUDA":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    else:
        monkeypatch.setattr(processes, "backward_has_threads", lambda: True)
    assert processes.checked_start(addressed, 1, 1.0, None) == "spawn"
    with pytest.raises(ValueError, match='CUDA_VISIBLE_DEVICES=""'):
        parallel.run(lambda rank: rank, 1)


@linux
def test_threads_of_backward_are_known_by_their_name():
    assert not processes.backward_has_threads()
    ready, done = threading.Event(), threading.Event()

    def named():
        Path("/proc/thread-self/comm").write_text("pt_autograd_0", encoding="utf-8")
        ready.set()
        done.wait()

    thread = threading.Thread(target=named)
    thread.start()
    ready.wait()
    try:
        assert processes.backward_has_threads()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"ranks": 0}, "ranks: expected a positive integer, got 0"),
        ({"ranks": True}, "ranks: expected a positive integer, got True"),
        ({"ranks": 2, "timeout": 0}, "timeout: expected a positive number of seconds"),
        ({"ranks": 2, "timeout": float("inf")}, "expected a positive number of seconds"),
        ({"ranks": 2, "start": "thread"}, 'start: expected "fork", "spawn" or None'),
    ],
)
def test_run_refuses(inputs, says):
    with pytest.raises(ValueError, match=says):
        parallel.run(addressed, **inputs)


def runs_again(rank):
    return parallel.run(addressed, 1, start="fork")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are spawned here")
def test_a_rank_cannot_be_copied_into_ranks():
    with pytest.raises(parallel.RankError, match="this process is a rank of a group"):
        parallel.run(runs_again, 1, timeout=15)
    assert nobody_left()
