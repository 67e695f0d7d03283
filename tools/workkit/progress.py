"""How far the reader is, as a line and as a page; the milestones, and trying one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

from workkit.jobs import MEGABYTES, SECONDS, run_job
from workkit.package import book_folder
from workkit.report import folded, next_step
from workkit.store import write_whole
from workkit.workbook import Workbook, called

INSTALL = "-m pip install --quiet --no-deps --no-build-isolation --force-reinstall"
MOST_SECONDS = 1800
TESTS = """
import sys, pytest
sys.path.append(sys.argv[1])
from workkit.runner import limit_memory
limit_memory(int(sys.argv[2]))
sys.exit(pytest.main(["-q", sys.argv[3]]))
"""
TIMED = """
import json, time, torch, attnlib
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 512, 64) for _ in range(3))
found = {}
for name in ("ScaledDotProductAttention", "FlashAttention"):
    attend = getattr(attnlib, name)(causal=True)
    attend(q, k, v)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        attend(q, k, v)
        times.append(time.perf_counter() - start)
    saved = []
    hooks = lambda x: saved.append(x.nbytes) or x, lambda x: x
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        attend(*inputs)
    found[name] = [min(times) * 1000, sum(saved) / 2**20]
print(json.dumps(found))
"""


class Milestone(NamedTuple):
    """What is reached, with which chapters, and how long a trial takes."""

    text: str
    chapters: str
    time: str


MILESTONES = {
    "attention": Milestone(
        "Your attention keeps the contract: `check_attention` passes", "01", "a second"
    ),
    "english": Milestone(
        "Your transformer writes English", "01 04 05 07 08 09", "a minute"
    ),
    "backward": Milestone(
        "Your backward trains a network without autograd", "10 11 12", "ten seconds"
    ),
    "tiles": Milestone("Your tiles give what plain attention gives", "14", "seconds"),
    "kernel": Milestone("Your kernel equals the oracle", "15", "seconds"),
    "final": Milestone(
        "Your package, installed, passes the package's own tests", "", "some minutes"
    ),
}


def reached(book: Workbook) -> dict[str, bool]:
    return {name: book.state["milestones"].get(name, False) for name in MILESTONES}


def choose(book: Workbook, name: str) -> int:
    """What is next shall be on the way to this milestone; to the final one, all is."""
    if name not in MILESTONES:
        print(f"a path to which milestone? There are {', '.join(MILESTONES)}.")
        return 2
    book.state["path"] = MILESTONES[name].chapters
    book.save()
    print(line(book))
    return 0


def show(book: Workbook, name: str) -> int:
    """Tries the one that is named; then all, which are reached, and what is next."""
    if name and name not in MILESTONES:
        print(f"which milestone is {name}? There are {', '.join(MILESTONES)}.")
        return 2
    good = attempt(book, name) if name else not book.sync()
    print()
    for one, done in reached(book).items():
        print(f"{'✓' if done else '·'} {one:10} {MILESTONES[one].text}")
    print(f"\n{next_one(book)}")
    return 0 if good or not name else 1


def next_one(book: Workbook) -> str:
    """How to try the first that is not reached."""
    for name, done in reached(book).items():
        if not done:
            first = wanting(book, name)
            how = f"python check.py milestone {name}, which takes {MILESTONES[name].time}."
            return f"Next, {name}: {first}\nThen: {how}" if first else f"Next: {how}"
    return "All of them are reached."


def attempt(book: Workbook, name: str) -> bool:
    """Tries a milestone on the reader's own package, and keeps whether it is reached."""
    for said in book.sync():
        print(said)
    if refused := wanting(book, name):
        print(f"Not tried. {refused}")
        return False
    why = final_problems(book) if name == "final" else problems(book, name)
    book.state["milestones"][name] = not why
    book.clock()
    book.save()
    if why:
        lines = [part for line in why for part in folded(line)]
        print("\n".join(["", "Not reached:", *lines]))
    else:
        print(f"\nReached: {MILESTONES[name].text}")
    return not why


def wanting(book: Workbook, name: str) -> str:
    """What is still to be written or given back, or to be mended before it is tried."""
    if name == "final":
        return final_wanting(book)
    states = {
        n: book.state_of(n)
        for key in MILESTONES[name].chapters.split()
        for n in book.data[key]["blanks"]
    }
    for state, said in (("to do", "First write"), ("lent", "Ours stand in for")):
        found = [n for n, is_ in states.items() if is_ == state]
        if found:
            _, known, blank = book.find(found[0])
            more = f" and {len(found) - 1} more" if found[1:] else ""
            where = f"`{blank['symbol']}` ({called(known['key'])}){more}"
            lent = "; a milestone takes your own." if state == "lent" else "."
            return f"{said} {where}{lent}"
    return next((p for n, p in book.problems.items() if n in states), "")


def problems(book: Workbook, name: str) -> list[str]:
    """Why a trial failed, in a process with limits; what it shows is printed."""
    job = {"folder": str(book.folder), "milestone": name}
    job |= {"seconds": SECONDS, "megabytes": MEGABYTES}
    run = run_job(job, lambda line: print(line, flush=True))
    if not run["ended"]:
        return [line for line in run["notes"] if line]
    inside = re.search(r'(attnlib[\\/][^"]*)", line (\d+)', run["trace"])
    where = [f"in line {inside[2]} of {inside[1]}"] if inside else []
    return [run["ended"], *where]


def final_wanting(book: Workbook) -> str:
    """What does not pass its checks; without Triton, kernels do not count."""
    skip = set() if sys.platform == "linux" else {"15", "E"}
    every = [n for key, c in book.data.items() if key not in skip for n in c["blanks"]]
    missing = [n for n in every if not book.passes(n)]
    said = f"First all has to pass its checks: {len(missing)} are missing"
    return f"{said}, `{missing[0]}` first." if missing else ""


def final_problems(book: Workbook) -> list[str]:
    """pip install of the reader's package in a bare environment, and its tests there."""
    with tempfile.TemporaryDirectory() as made:
        python = bare_python(Path(made, "bare"))
        limits = [str(book.folder / "tools"), str(MEGABYTES), str(book.folder / "tests")]
        steps = {
            "it can't be installed": [*INSTALL.split(), str(book.folder)],
            "tests fail": ["-c", TESTS, *limits],
        }
        for problem, words in steps.items():
            try:
                done = subprocess.run([python, *words], cwd=made, timeout=MOST_SECONDS)
            except subprocess.TimeoutExpired:
                return [
                    f"no end after {MOST_SECONDS} seconds: is there a loop without end?"
                ]
            if done.returncode:
                return [f"{problem}, status {done.returncode}; see above"]
        table(book, python, made)
    return []


def bare_python(folder: Path) -> str:
    """A new environment: what is installed here is looked for after what is in it."""
    venv.create(folder, with_pip=True)
    here = "Scripts" if sys.platform == "win32" else "bin"
    python = str(folder / here / "python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = subprocess.check_output([python, "-c", ask], text=True).strip()
    outer = sysconfig.get_path("purelib")
    Path(place, "outer.pth").write_text(f"{outer}\n", encoding="utf-8")
    return python


def table(book: Workbook, python: str, folder: str) -> None:
    """Yours and ours: lines, milliseconds, memory kept for the backward."""
    ours, rows = book_folder(), {}
    paths = {"yours": book.folder, **({"ours": ours.parent} if ours else {})}
    for who, path in paths.items():
        files = (path / "attnlib").rglob("*.py")
        lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
        code = f"import sys; sys.path.insert(0, {str(path)!r})\n{TIMED}"
        run = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, cwd=folder
        )
        rows[who] = lines, json.loads(run.stdout or "{}")
    print(f"\n{'':10}{'lines':>8}{'ms':>10}{'MiB kept':>10}   1 × 4 × 512 × 64, causal")
    for who, (lines, found) in rows.items():
        for name, (ms, mib) in found.items():
            print(f"{who:10}{lines:8}{ms:10.2f}{mib:10.1f}   {name}")


def chapter_line(book: Workbook, key: str) -> tuple[int, int, int, int, int, int]:
    """Of definitions, equations and exercises: how many are done, of how many."""
    known, state = book.data[key], book.state
    numbers = [exercise["number"] for exercise in known["exercises"]]
    return (
        sum(book.passes(name) for name in known["blanks"]),
        len(known["blanks"]),
        sum(state["equations"].get(label, False) for label in known["equations"]),
        len(known["equations"]),
        sum(state["exercises"].get(number, False) for number in numbers),
        len(numbers),
    )


def line(book: Workbook) -> str:
    rows = [chapter_line(book, key) for key in book.data]
    total = [sum(column) for column in zip(*rows, strict=True)]
    lent = sum(book.state_of(name) == "lent" for name in book.state["lent"])
    borrowed = f", {lent} on loan from us" if lent else ""
    seen = f", {len(book.state['answers'])} answers seen" if book.state["answers"] else ""
    minutes = round(book.state.get("minutes", 0))
    told = (
        f"{total[0]} of {total[1]} definitions{borrowed}{seen}, {total[2]} of {total[3]} "
        f"equations, {total[4]} of {total[5]} exercises, "
        f"{sum(reached(book).values())} of {len(MILESTONES)} milestones, "
        f"{minutes // 60} h {minutes % 60} min."
    )
    if path := book.state.get("path", "").split():
        rows = [chapter_line(book, key) for key in path if key in book.data]
        done, all_ = (sum(row[i] for row in rows) for i in (0, 1))
        told += f"\nOn your path, chapters {' '.join(path)}: {done} of {all_} definitions."
    step = next_step(book)
    return f"{told}\nNext: {step}" if step else f"{told}\nAll of it is yours."


def write_page(book: Workbook) -> Path:
    """PROGRESS.md, anew."""
    lines = [
        "# Your workbook",
        "",
        line(book).replace("\n", "\n\n"),
        "",
        "## Milestones",
        "",
    ]
    for name, done in reached(book).items():
        mark, text = "x" if done else " ", MILESTONES[name].text
        lines.append(f"- [{mark}] {text}: `python check.py milestone {name}`")
    lines += ["", "## Chapters", "", "| | Chapter | Definitions | Equations | Exercises |"]
    lines.append("|---|---|---|---|---|")
    for key, known in book.data.items():
        a, b, c, d, e, f = chapter_line(book, key)
        if b + d + f:
            done = "✓" if (a, e) == (b, f) and b + f else ""
            parts = [done, f"{key} {known['title']}", f"{a} of {b}", f"{c} of {d}"]
            lines.append(f"| {' | '.join(parts)} | {e} of {f} |")
    path = book.folder / "PROGRESS.md"
    write_whole(path, "\n".join(lines) + "\n")
    return path
