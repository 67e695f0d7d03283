"""Milestones; the last one installs the reader's package and tests it there."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from workkit import progress
from workkit.checking import Workbook
from workkit.ours import book_folder

TIMED = """
import json, time, tracemalloc, torch, attnlib
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


def show(book: Workbook, word: str) -> int:
    """The list; with `final`, the last one is tried."""
    good = final(book) if word == "final" else True
    for text, done in progress.reached(book).items():
        print(f"{'✓' if done else '·'} {text}")
    progress.write_page(book)
    return 0 if good else 1


def final(book: Workbook) -> bool:
    """pip install of the reader's package in a bare environment, and its tests there."""
    book.sync()
    missing = [n for n in names(book) if n not in book.state["passed"]]
    if missing:
        print(
            f"First all of it has to be yours; {len(missing)} are missing: {missing[0]}, …"
        )
        return False
    with tempfile.TemporaryDirectory() as made:
        python = bare_python(Path(made, "bare"))
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--force-reinstall",
        ]
        subprocess.run([*install, str(book.folder)], check=True, cwd=made)
        tests = book.folder / "tests"
        done = subprocess.run([python, "-m", "pytest", "-q", str(tests)], cwd=made)
        table(book, python, made)
    book.state["installed"] = done.returncode == 0
    book.save()
    return done.returncode == 0


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


def names(book: Workbook) -> list[str]:
    """All definitions; without Triton, those of kernels do not count."""
    skip = set() if sys.platform == "linux" else {"15", "E"}
    return [n for key, c in book.data.items() if key not in skip for n in c["blanks"]]


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
