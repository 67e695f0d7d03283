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
from attnlib.parallel import collectives, processes
from drawn import normal

RANKS = (1, 2, 4)
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def mine(rank, *shape):
    return normal(*shape, seed=100 + rank)


def nobody_left():
    return not multiprocessing.active_children()


# The collectives against what they are defined as


def collected(rank):
    ranks, x = dist.get_world_size(), mine(rank, 4, 8)
    with parallel.Traffic() as traffic:
        found = {
            "all_gather 0": parallel.all_gather(x),
            "all_gather 1": parallel.all_gather(x, 1),
            "reduce_scatter 0": parallel.reduce_scatter(x),
            "reduce_scatter 1": parallel.reduce_scatter(x, -1),
            "all_to_all": parallel.all_to_all(x, 1, 0),
            "there and back": parallel.all_to_all(parallel.all_to_all(x, 1, 0), 0, 1),
            "shift": parallel.shift(x),
            "shift back": parallel.shift(x, -1),
            "all_reduce": parallel.all_reduce(x),
            "add_up": parallel.add_up(x),
        }
        parts = parallel.post_shift([x, x[0].float()], 3)()
    assert traffic.bytes == sum(traffic.by_name.values())
    V = x.nbytes * ranks  # of all pieces together
    assert traffic.by_name.get("all_gather", 0) == 2 * (ranks - 1) * V // ranks
    assert traffic.by_name.get("reduce_scatter", 0) == 2 * (ranks - 1) * x.nbytes // ranks
    assert traffic.by_name.get("all_to_all", 0) == 3 * (ranks - 1) * x.nbytes // ranks
    assert traffic.by_name.get("all_reduce", 0) == 4 * (ranks - 1) * x.nbytes // ranks
    shifts = 0 if ranks == 1 else 2 * x.nbytes + (ranks > 1) * (x.nbytes + 4 * 8)
    assert traffic.by_name.get("shift", 0) == shifts
    return found, parts


@pytest.mark.parametrize("ranks", RANKS)
def test_each_collective_is_what_it_is_defined_as(ranks):
    xs = [mine(r, 4, 8) for r in range(ranks)]
    total = sum(xs)
    for r, (found, parts) in enumerate(parallel.run(collected, ranks, timeout=20)):
        pieces = [x.chunk(ranks, 1)[r] for x in xs]
        expected = {
            "all_gather 0": torch.cat(xs),
            "all_gather 1": torch.cat(xs, 1),
            "reduce_scatter 0": total.chunk(ranks)[r],
            "reduce_scatter 1": total.chunk(ranks, 1)[r],
            "all_to_all": torch.cat(pieces),
            "there and back": xs[r],
            "shift": xs[r - 1],
            "shift back": xs[(r + 1) % ranks],
            "all_reduce": total,
            "add_up": total,
        }
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, msg=name)
        torch.testing.assert_close(parts[0], xs[(r - 3) % ranks])
        torch.testing.assert_close(parts[1], xs[(r - 3) % ranks][0].float())
    assert nobody_left()


def slopes(rank, which):
    functions = {
        "all_gather": lambda x: parallel.all_gather(x.sin(), 1).cos(),
        "reduce_scatter": lambda x: parallel.reduce_scatter(x.sin()).cos(),
        "all_to_all": lambda x: parallel.all_to_all(x.sin(), 1, 0).cos(),
        "shift": lambda x: parallel.shift(x.sin(), 1).cos() + parallel.shift(x, -2),
        "all_reduce": lambda x: parallel.all_reduce(x.sin()).cos() * x,
    }
    exact, near = parallel.rank_gradients(functions[which], mine(rank, 4, 4)[:, :4])
    return max((a - b).abs().max().item() for a, b in zip(exact, near, strict=True))


@pytest.mark.parametrize(
    "which", ["all_gather", "reduce_scatter", "all_to_all", "shift", "all_reduce"]
)
def test_gradients_across_two_ranks(which):
    assert max(parallel.run(slopes, 2, which, timeout=25)) < 1e-7


def pairings(rank):
    """⟨A x, y⟩ and ⟨x, Aᵀ y⟩ of this rank, for each collective."""
    ranks, found = dist.get_world_size(), {}
    for name, function in {
        "all_gather": lambda x: parallel.all_gather(x, 1),
        "reduce_scatter": lambda x: parallel.reduce_scatter(x, 0),
        "all_to_all": lambda x: parallel.all_to_all(x, 0, 1),
        "shift": lambda x: parallel.shift(x, ranks - 1),
        "all_reduce": parallel.all_reduce,
    }.items():
        x = mine(rank, 4, 4).requires_grad_()
        out = function(x)
        y = normal(*out.shape, seed=7 + rank, grad=True)
        (back,) = torch.autograd.grad(out, x, y, create_graph=True)
        (twice,) = torch.autograd.grad(back, y, x.detach())  # (Aᵀ)ᵀ x is A x
        torch.testing.assert_close(twice, out)
        found[name] = ((out * y).sum().item(), (x * back).sum().item())
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_backward_is_the_transpose_and_its_backward_the_collective(ranks):
    results = parallel.run(pairings, ranks, timeout=20)
    for name in results[0]:
        forward, backward = (sum(r[name][side] for r in results) for side in (0, 1))
        assert forward == pytest.approx(backward, abs=1e-12), name


def one_loss(rank, all_copies):
    """w · x, a piece of w on each rank, and the square of the sum: one loss, or P of it."""
    w = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
    shared = parallel.replicate(x)
    add = parallel.all_reduce if all_copies else parallel.add_up
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
    x, said = x.clone().requires_grad_(), []
    for function in (
        parallel.all_gather,
        parallel.reduce_scatter,
        partial(parallel.all_to_all, split_dim=0, concat_dim=0),
        parallel.shift,
        parallel.replicate,
        parallel.add_up,
        parallel.all_reduce,
    ):
        with torch.set_grad_enabled(not here), pytest.raises(ValueError) as error:
            function(x)
        said.append(str(error.value))
    assert all("disagree: rank 0" in text for text in said)
    raise error.value


def refused(rank):
    """What each call says that does not fit, and that the next one is not disturbed."""
    ranks, x, said = dist.get_world_size(), torch.ones(4, 4), {}
    first = rank == 0
    cases = {
        "shape": lambda: parallel.all_gather(torch.ones(3 - first)),
        "rank": lambda: parallel.all_gather(torch.ones((2,) * (2 - first))),
        "dtype": lambda: parallel.all_reduce(x if first else x.double()),
        "dim": lambda: parallel.all_gather(x, int(first)),
        "no dim": lambda: parallel.all_gather(x, 2),
        "gradient": lambda: parallel.shift(x.clone().requires_grad_(not first)),
        "hops": lambda: parallel.shift(x, 1 + (not first)),
        "one divides not": lambda: parallel.reduce_scatter(torch.ones(5 - first)),
        "divides": lambda: parallel.reduce_scatter(torch.ones(ranks + 1)),
        "exchange": lambda: parallel.all_to_all(torch.ones(ranks + 1, 2), 0, 1),
        "another": lambda: (parallel.replicate if first else parallel.all_gather)(x),
        "no tensor": lambda: parallel.add_up(x if first else [1.0]),
        "booleans": lambda: parallel.all_reduce(x > 0),
        "pieces": lambda: parallel.reduce_scatter(x > 0),
        "device": lambda: parallel.replicate(x if first else x.to("meta")),
        "not recorded": lambda: not_recorded(x, not first),
        "inputs": lambda: parallel.rank_gradients(torch.sum, x[0, : 2 + first].double()),
        "float32": lambda: parallel.rank_gradients(torch.sum, x),
    }
    for case, call in cases.items():
        try:
            call()
        except ValueError as error:
            said[case] = str(error)
        assert parallel.all_reduce(torch.ones(2)).tolist() == [ranks, ranks], case
    return said


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_does_not_fit_is_refused_on_every_rank(ranks):
    says = {
        "shape": "the ranks disagree: rank 0 has all_gather((2,), torch.float32",
        "rank": "rank 1 has all_gather((2, 2), torch.float32",
        "dtype": "rank 1 has add_up((4, 4), torch.float64",
        "dim": "rank 1 has all_gather((4, 4), torch.float32, 0)",
        "no dim": "all_gather: dim: expected a dimension of shape (4, 4), got 2",
        "gradient": "rank 1 has shift((4, 4), torch.float32, with gradient, hops=1)",
        "hops": "rank 1 has shift((4, 4), torch.float32, hops=2)",
        "one divides not": "rank 1: x: expected a length divisible by",
        "divides": "reduce_scatter: x: expected a length divisible by",
        "exchange": "all_to_all: x: expected a length divisible by",
        "another": "rank 1 has all_gather((4, 4)",
        "no tensor": "add_up: rank 1: x: expected a tensor, got list",
        "booleans": "add_up: x: expected numbers, which can be added up, got torch.bool",
        "pieces": "reduce_scatter: x: expected numbers, which can be added up, got",
        "device": "replicate: rank 1: x: expected device cpu as the group, got meta",
        "not recorded": "with gradient); rank 1 has add_up((4, 4), torch.float32)",
        "inputs": "rank 0 has rank_gradients(3); rank 1 has rank_gradients(2)",
        "float32": "rank_gradients: inputs: expected torch.float64, got torch.float32",
    }
    found = parallel.run(refused, ranks, timeout=25)
    for case, start in says.items():
        messages = {of_rank.get(case, "accepted") for of_rank in found}
        if case == "another":  # there, the ranks do not even agree on the name
            assert len(messages) == 2
        else:
            assert len(messages) == 1, case
        assert all(start in message for message in messages), case
    assert nobody_left()


def checked(rank):
    def check():
        if rank == 1:
            raise TypeError("mask: expected booleans")
        return (rank,)

    said = []
    for one in (check, lambda: (rank,), lambda: (1,)):
        try:
            collectives.agree_after("attend", one)
            said.append("agreed")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_one_rank_finds_wrong_is_raised_on_all():
    wrong = "attend: rank 1: mask: expected booleans"
    differ = "attend: the ranks disagree: rank 0 has attend(0); rank 1 has attend(1)"
    assert parallel.run(checked, 2, timeout=25) == [[wrong, differ, "agreed"]] * 2


def outside(rank):
    group = dist.new_group([0])
    try:
        parallel.all_gather(torch.ones(2), group=group)
    except ValueError as error:
        return str(error)
    return "inside"


@pytest.mark.usefixtures("as_shipped")
def test_a_rank_outside_the_group_is_told():
    said = parallel.run(outside, 2, timeout=25)
    assert said == ["inside", "group: rank 1 is not in the group"]


def test_without_a_group_one_is_asked_for():
    with pytest.raises(RuntimeError, match="call this in"):
        parallel.all_gather(torch.ones(2))


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


def fails(rank, how):
    if rank == 1:
        if how == "raises":
            raise KeyError("lost")
        if how == "exits":
            os._exit(3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "never comes":
            time.sleep(60)
        if how == "leaves":
            return None
    return parallel.all_gather(torch.ones(2))


@pytest.mark.parametrize(
    ("how", "ranks_at_fault", "says"),
    [
        ("raises", [1], "rank 1 raised\n"),
        ("exits", [1], "rank 1 died (exit code 3)"),
        ("killed", [1], "rank 1 died (exit code -9)"),
        ("never comes", [1], "rank 1 did not come: fails, line "),
        ("leaves", [0], "rank 0 waits in fails, line "),
    ],
)
def test_a_rank_that_fails_is_named_and_nobody_is_left(how, ranks_at_fault, says):
    start = time.monotonic()
    with pytest.raises(parallel.RankError) as caught:
        parallel.run(fails, 4, how, timeout=2)
    assert time.monotonic() - start < 5
    assert says in str(caught.value)
    if how == "leaves":
        assert "rank 1 had returned" in str(caught.value)
    else:
        assert caught.value.ranks == ranks_at_fault
    if how == "raises":
        assert "KeyError: 'lost'" in str(caught.value)
    assert nobody_left()


def orphans(rank, path):
    """Leaves the ids of this rank, of a process that it starts and of one that it forks."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    started = subprocess.Popen(["sleep", "60"])
    with open(f"{path}{rank}.new", "w", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {forked.pid} {started.pid}")
    os.rename(f"{path}{rank}.new", f"{path}{rank}")


def orphans_left(rank, path, how):
    orphans(rank, path)
    if how == "returns":
        return rank
    if how == "raises":
        raise KeyError("lost")
    if how == "dies" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return None


def gone(path):
    """Waits until none of the processes is left that the ranks have written down."""
    pids = [
        int(pid) for r in range(2) for pid in (path.parent / f"rank{r}").read_text().split()
    ]
    assert len(pids) == 6
    for _ in range(50):
        alive = [pid for pid in pids if is_alive(pid)]
        if not alive:
            return True
        time.sleep(0.1)
    raise AssertionError(f"still there: {alive}")


@linux
@pytest.mark.parametrize("how", ["returns", "raises", "dies", "is late"])
def test_what_the_ranks_have_started_ends_with_them(how, tmp_path):
    start, path = time.monotonic(), tmp_path / "rank"
    inputs = {"timeout": 1 if how == "is late" else 20}
    if how == "returns":
        assert parallel.run(orphans_left, 2, str(path), how, **inputs) == [0, 1]
    else:
        with pytest.raises(parallel.RankError) as caught:
            parallel.run(orphans_left, 2, str(path), how, **inputs)
        if how == "dies":
            assert caught.value.ranks == [1]
            assert "rank 1 died (exit code -9)" in str(caught.value)
    assert time.monotonic() - start < 10
    assert gone(path) and nobody_left()


def leads(path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if it is ignored here
    parallel.run(orphans_left, 2, path, "is late", timeout=50)


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_ranks_end_with_a_caller_that_is_killed_or_interrupted(number, tmp_path):
    context = multiprocessing.get_context("fork")
    parent = context.Process(target=leads, args=(str(tmp_path / "rank"),))
    parent.start()
    for _ in range(200):
        if all((tmp_path / f"rank{rank}").exists() for rank in range(2)):
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
