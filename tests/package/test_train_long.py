"""The program that trains on many ranks: killed at any moment, it goes on."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not sys.platform.startswith("linux"):
    pytest.skip("looks for processes in /proc", allow_module_level=True)

EVERY, STEPS = 3, 12
SIZES = {"tokens": 16, "width": 16, "heads": 4, "layers": 1, "batch": 4}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(folder, ranks, parts=(1, 1), steps=STEPS):
    """torchrun with as many ranks; it starts all anew where one dies."""
    options = {"folder": folder / "kept", "losses": folder / "losses", "every": EVERY}
    options |= {"context": parts[0], "tensor": parts[1], "steps": steps} | SIZES
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", str(ranks), str(ROOT / "examples" / "train_long.py")]
    command += [f"--{name}={value}" for name, value in options.items()] + ["--float64"]
    output = (folder / "output").open("a")
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)


def workers(process):
    """The processes that a torchrun has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process.pid:
            found.append(int(entry.parent.name))
    return found


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all(process):
    own = workers(process)
    kill(process.pid)
    process.wait()
    for pid in own:
        kill(pid)


def losses(folder):
    """(step, loss) of each line, in the order in which they were written."""
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss)) for step, loss in map(str.split, lines)]


def wait_for(process, folder, lines, seconds=60):
    """Until so many lines are written, or the program has ended."""
    until = time.monotonic() + seconds
    while len(losses(folder)) < lines and process.poll() is None:
        assert time.monotonic() < until, (folder / "output").read_text()[-2000:]
        time.sleep(0.02)


def refuse_lost_steps(folder, expected):
    """Every loss is that of the run that nobody killed; no more than EVERY are repeated."""
    found = losses(folder)
    last = 0
    for step, loss in found:
        assert abs(loss - expected[step]) < 1e-9, (step, loss, expected[step])
        assert last - EVERY < step <= last + 1, (last, step)
        last = step
    assert last == max(expected)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    process = start(folder, 1)
    assert process.wait(60) == 0, (folder / "output").read_text()[-2000:]
    return dict(losses(folder))


def test_killed_it_goes_on_with_other_ranks(tmp_path, expected):
    process = start(tmp_path, 2, (1, 2))
    try:
        wait_for(process, tmp_path, EVERY + 2)
    finally:
        kill_all(process)
    assert max(losses(tmp_path))[0] < STEPS, "it was done before it was killed"
    process = start(tmp_path, 1)
    assert process.wait(60) == 0, (tmp_path / "output").read_text()[-2000:]
    refuse_lost_steps(tmp_path, expected)


@pytest.mark.thorough
def test_twenty_kills_lose_nothing(tmp_path, expected):
    """One rank, which torchrun starts anew, or all, and then with other ranks."""
    draw = random.Random(25)
    layouts = [(2, (1, 2)), (1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (2, (1, 1))]
    kills, done = 0, 0
    while kills < 20:
        folder = tmp_path / str(done)
        folder.mkdir(exist_ok=True)
        process = start(folder, *layouts[kills % len(layouts)])
        try:
            for one in (True, False):
                known = len(losses(folder))
                wait_for(process, folder, known + draw.randrange(7))
                time.sleep(
                    draw.random() * 0.1
                )  # in a step, or while a checkpoint is written
                if process.poll() is not None:
                    break
                own = workers(process)
                if one and own:
                    kill(draw.choice(own))
                    kills += 1
            kills += process.poll() is None
        finally:
            kill_all(process)
        found = losses(folder)
        if found and found[-1][0] == STEPS:
            refuse_lost_steps(folder, expected)
            done += 1
    process = start(folder, 1)
    assert process.wait(60) == 0
    refuse_lost_steps(folder, expected)


@pytest.mark.parametrize(
    ("ranks", "parts", "said"),
    [(1, (2, 1), "does not divide 1 ranks"), (3, (3, 1), "3 parts do not divide 16")],
)
@pytest.mark.thorough
def test_sizes_that_do_not_fit_are_refused(tmp_path, ranks, parts, said):
    process = start(tmp_path, ranks, parts)
    assert process.wait(60) != 0
    assert said in (tmp_path / "output").read_text()
