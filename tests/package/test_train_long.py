"""The program that trains on many ranks: killed at any moment, it goes on."""

import contextlib
import importlib.util
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if not sys.platform.startswith("linux"):
    pytest.skip("looks for processes in /proc", allow_module_level=True)

PROGRAM = ROOT / "examples" / "train_long.py"
SPEC = importlib.util.spec_from_file_location("train_long", PROGRAM)
TRAIN = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TRAIN)
DEPENDS = "examples/train_long.py", "attnlib/parallel/*.py", "attnlib/transformer.py"
EVERY, STEPS = 3, 24
PATIENCE = 240  # seconds, where a machine is busy with something else
SIZES = {"tokens": 16, "width": 16, "heads": 4, "layers": 1, "batch": 4}
# Ranks, parts of a text and of a layer, and how the parts of a text attend.
LAYOUTS = (
    (2, 1, 2, "heads"),
    (1, 1, 1, "heads"),
    (2, 2, 1, "heads"),
    (2, 1, 1, "ring"),
    (4, 2, 2, "heads"),
    (2, 2, 1, "ring"),
)


def arguments(folder, layout, **given):
    _, context, tensor, attention = layout
    options = {"folder": folder / "kept", "losses": folder / "losses", "every": EVERY}
    options |= {"context": context, "tensor": tensor, "attention": attention}
    options |= SIZES | {"steps": STEPS} | given
    return [f"--{name}={value}" for name, value in options.items()] + ["--float64"]


def torchrun(folder, layout, nodes=("--standalone",)):
    """As a user calls it: all ranks are started anew where one dies."""
    command = [sys.executable, "-m", "torch.distributed.run", *nodes]
    command += ["--max-restarts", "12", "--monitor-interval", "0.1", str(PROGRAM)]
    command[-1:-1] = ["--nproc-per-node", str(layout[0] // (2 if len(nodes) > 1 else 1))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "output").open("a") as output:
        return subprocess.Popen(
            [*command, *arguments(folder, layout)],
            **{"env": environment, "stdout": output, "stderr": output},
        )


def one_rank(rank, port, folder, layout, given):
    """What torchrun starts, in a process that has the imports of its parent."""
    sys.argv = ["train_long.py", *arguments(folder, layout, **given)]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(layout[0])}
    sys.stdout = sys.stderr = (folder / "output").open("a", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    torch.set_num_threads(1)
    TRAIN.main()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork(folder, layout, **given):
    """The processes of all ranks, in a moment."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=one_rank, args=(rank, port, folder, layout, given), daemon=True
        )
        for rank in range(layout[0])
    ]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks, folder):
    """Waits until all have ended well."""
    for rank in ranks:
        rank.join(PATIENCE)
    said = (folder / "output").read_text()[-2000:]
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks), said


def end(ranks):
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join(10)
        assert not rank.is_alive()


def called_with(folder):
    """All processes that were called with this folder, however they came to be."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in entry.read_bytes():
                found.append(int(entry.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def end_torchrun(process, folder):
    process.kill()
    process.wait()
    for _ in range(500):
        left = called_with(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.02)
    raise AssertionError(f"still there: {left}")


def losses(folder):
    """(step, loss) of each line, in the order in which they were written."""
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss)) for step, loss in map(str.split, lines)]


def partial(folder):
    return list((folder / "kept").glob("partial-*"))


def wait_until(true, alive, folder):
    """Until true(folder), or the program has ended."""
    until = time.monotonic() + PATIENCE
    while not true(folder) and alive():
        assert time.monotonic() < until, (folder / "output").read_text()[-2000:]
        time.sleep(0.002)


def more_lines(folder, count):
    """Whether so many lines more have been written, as a function of the folder."""
    known = len(losses(folder))
    return lambda folder: len(losses(folder)) >= known + count


def refuse_lost_steps(folder, expected, last_step=None):
    """Every loss is that of the run that nobody killed; no more than EVERY are repeated."""
    last = 0
    for step, loss in losses(folder):
        assert abs(loss - expected[step]) < 1e-9, (step, loss, expected[step])
        assert last - EVERY < step <= last + 1, (last, step)
        last = step
    assert last_step in (None, last)


def kill_often(tmp_path, expected, draw, kills):
    """Kills one rank or all, in a step or in writing; what is killed goes on elsewhere.

    Returns:
        How often a checkpoint was left cut off.
    """
    cut, folder = 0, tmp_path / "0"
    for number in range(3 * kills):  # some runs end before they are killed
        if kills == 0:
            break
        if losses(folder) and losses(folder)[-1][0] == STEPS:
            refuse_lost_steps(folder, expected, STEPS)
            folder = tmp_path / str(number)
        ranks = fork(folder, LAYOUTS[number % len(LAYOUTS)])

        def alive(ranks=ranks):
            return all(rank.is_alive() for rank in ranks)

        try:
            if draw.random() < 0.5:
                wait_until(partial, alive, folder)
                time.sleep(draw.random() * 0.02)
            else:
                wait_until(more_lines(folder, draw.randrange(1, 6)), alive, folder)
                time.sleep(draw.random() * 0.05)
            if alive():
                kills -= 1
                if draw.random() < 0.5:  # one, and the others a moment later
                    draw.choice(ranks).kill()
                    time.sleep(draw.random() * 0.2)
        finally:
            end(ranks)
        cut += bool(partial(folder))
        refuse_lost_steps(folder, expected)
    assert kills == 0, f"{kills} are left"
    finish(fork(folder, LAYOUTS[1]), folder)
    refuse_lost_steps(folder, expected, STEPS)
    assert not called_with(tmp_path)
    return cut


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    finish(fork(folder, LAYOUTS[1]), folder)
    found = losses(folder)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    return dict(found)


def test_killed_it_goes_on(tmp_path, expected):
    kill_often(tmp_path, expected, random.Random(24), 4)


@pytest.mark.costly("training/kills", *DEPENDS)
def test_many_kills_lose_nothing(tmp_path, expected, record_testsuite_property):
    cut = kill_often(tmp_path, expected, random.Random(25), 40)
    record_testsuite_property("cut off in writing", cut)
    assert cut >= 5, "too few were killed in writing for a test of that"


def workers(folder, process):
    """Ranks that this torchrun has started."""
    ranks = []
    for pid in called_with(folder):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ranks += [pid] * (int(status[1]) == process.pid)
    return ranks


def go_on(folder, processes, until):
    """Waits for `until`, while all of the commands run."""
    wait_until(until, lambda: all(p.poll() is None for p in processes), folder)
    said = (folder / "output").read_text()[-2000:]
    assert losses(folder)[-1][0] < STEPS, f"it was done before it was killed: {said}"


@pytest.mark.costly("training/torchrun", *DEPENDS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_goes_on_whoever_is_killed(tmp_path, expected, nodes):
    """A rank, on each node in turn; then every torchrun, whose ranks end by themselves."""

    def start(layout):
        if nodes == 1:
            return [torchrun(tmp_path, layout)]
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
        options += [f"127.0.0.1:{free_port()}", "--rdzv-id", "any"]
        return [torchrun(tmp_path, layout, options) for _ in range(2)]

    processes = start(LAYOUTS[2])
    try:
        for process in (*processes[::-1], *processes):
            go_on(tmp_path, processes, more_lines(tmp_path, 1))
            os.kill(workers(tmp_path, process)[0], signal.SIGKILL)
        go_on(tmp_path, processes, more_lines(tmp_path, 1))
        for process in processes:
            process.kill()
        processes += start(LAYOUTS[2 if nodes == 2 else 0])  # at once
        for process in processes[nodes:]:
            assert process.wait(PATIENCE) == 0, (tmp_path / "output").read_text()[-2000:]
    finally:
        for process in processes:
            end_torchrun(process, tmp_path)
    refuse_lost_steps(tmp_path, expected, STEPS)


def test_another_run_is_refused_and_a_damaged_checkpoint_is_told(tmp_path, expected):
    (tmp_path / "text").write_text("another text " * 9)
    finish(fork(tmp_path, LAYOUTS[1], steps=9), tmp_path)
    said = tmp_path / "output"
    for name, given in (("rate", 0.5), ("batch", 8), ("text", tmp_path / "text")):
        (rank,) = fork(tmp_path, LAYOUTS[1], **{name: given})
        rank.join(PATIENCE)
        assert rank.exitcode == 1 and f"settings: {name}: expected" in said.read_text()
    part = next(tmp_path.glob("kept/step-00000009/*.distcp"))
    part.write_bytes(part.read_bytes()[:-9])
    finish(fork(tmp_path, LAYOUTS[1]), tmp_path)
    assert "from step 6" in said.read_text()
    assert (tmp_path / "kept" / "damaged-00000009").is_dir()
    found = losses(tmp_path)
    assert [step for step, _ in found] == [*range(1, 10), *range(7, STEPS + 1)]
    assert all(abs(loss - expected[step]) < 1e-9 for step, loss in found)


@pytest.mark.parametrize(
    ("layout", "sizes", "said"),
    [
        ((1, 2, 1, "heads"), {}, "2 does not divide 1 ranks"),
        ((3, 3, 1, "heads"), {}, "3 parts do not divide 16"),
        ((2, 2, 1, "heads"), {"heads": 1}, "2 parts do not divide 1"),
        ((2, 1, 1, "heads"), {"batch": 1}, "expected 2 texts or more"),
        ((1, 1, 1, "heads"), {"heads": 0}, "--heads: expected 1 or more, got 0"),
        ((1, 1, 1, "heads"), {"heads": 3}, "--width: expected an even number for each"),
        ((1, 1, 1, "heads"), {"rate": -1.0}, "--rate: expected a positive number"),
        ((1, 1, 1, "heads"), {"tokens": 10**9}, "--tokens: expected fewer than the text's"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, monkeypatch, layout, sizes, said):
    """Before the ranks meet."""
    given = ["train_long.py", *arguments(tmp_path, layout, **sizes)]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setenv("WORLD_SIZE", str(layout[0]))
    with pytest.raises(SystemExit, match=said):
        TRAIN.main()


def test_without_torchrun_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_long.py", *arguments(tmp_path, LAYOUTS[1])])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="start it with torchrun"):
        TRAIN.main()
