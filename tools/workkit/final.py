"""The last milestone: the reader's package, installed and tested, beside ours."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from workkit import earlier
from workkit.checking import MEGABYTES, Workbook
from workkit.ours import book_folder

INSTALL = "-m pip install --quiet --no-deps --no-build-isolation --force-reinstall"
SECONDS = 1800
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


def wanting(book: Workbook) -> str:
    """What does not pass its checks; without Triton, kernels do not count."""
    skip = set() if sys.platform == "linux" else {"15", "E"}
    every = [n for key, c in book.data.items() if key not in skip for n in c["blanks"]]
    missing = [n for n in every if not earlier.passes(book, n)]
    said = f"First all has to pass its checks: {len(missing)} are missing"
    return f"{said}, `{missing[0]}` first." if missing else ""


def problems(book: Workbook) -> list[str]:
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
                done = subprocess.run([python, *words], cwd=made, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                return [f"no end after {SECONDS} seconds: is there a loop without end?"]
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
