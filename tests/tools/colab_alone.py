"""Run the notebooks of tools/editions/colab.py from top to bottom where nothing else is.

    python tests/tools/colab_alone.py NOTEBOOKS PYTHON WHEEL

PYTHON is that of a bare environment: torch, numpy, matplotlib, ipykernel, and what attnlib
needs, but not attnlib. The first notebook finds the wheel beside it and installs it; the
others, each in an empty folder and one on each core, have to notice that it is there.
nbclient runs here, only the kernel runs there. Nothing leaves the machine: Python refuses
to look for another.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bookkit.execute import own_sockets

NO_NETWORK = """\
import sys

def refuse(event, args):
    names = {"socket.getaddrinfo": 0, "socket.connect": 1}
    if event in names:
        host = args[names[event]]
        host = host[0] if isinstance(host, tuple) else host
        if host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "", None):
            raise OSError(f"no network here: {event} {host}")

sys.addaudithook(refuse)
"""


def environment(python: str, folder: Path) -> dict[str, str]:
    """What the kernel sees: the bare Python as "python3", without a network."""
    kernel = folder / "share" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "bare", "language": "python"}
    kernel.write_text(json.dumps(spec), encoding="utf-8")
    guard = folder / "guard" / "sitecustomize.py"
    guard.parent.mkdir()
    guard.write_text(NO_NETWORK, encoding="utf-8")
    kept = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    own = {"PYTHONPATH": str(guard.parent), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return kept | own


def run(work: Path, environ: dict[str, str], given: list[Path], notebook: Path) -> str:
    """Run a copy, in a folder beside what is given; what the setup cell printed."""
    start = time.perf_counter()
    folder = work / notebook.stem
    folder.mkdir()
    for path in (notebook, *given):
        shutil.copy2(path, folder)
    copy = nbformat.read(folder / notebook.name, as_version=4)
    client = NotebookClient(
        copy,
        timeout=600,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        config=Config({"KernelManager": own_sockets()}),
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environ)
    left = {path.name for path in folder.iterdir()}
    extra = left - {notebook.name, "attnlib-files", *(path.name for path in given)}
    assert not extra, f"{notebook.stem} left files behind: {extra}"
    print(f"{notebook.stem}: {time.perf_counter() - start:.1f} s", flush=True)
    return "".join(output.get("text", "") for output in copy.cells[0].outputs)


def main() -> int:
    notebooks, python, wheel = (Path(argument).absolute() for argument in sys.argv[1:])
    chapters = sorted(notebooks.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        environ = environment(str(python), work)
        os.environ["JUPYTER_PATH"] = str(work / "share")  # where nbclient finds the kernel
        network = "import urllib.request as r; r.urlopen('https://pypi.org', timeout=5)"
        tried = subprocess.run([python, "-c", network], env=environ, capture_output=True)
        assert b"no network here" in tried.stderr, "the network is not refused"
        started = time.perf_counter()
        run(work, environ, [wheel], chapters[0])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            others = partial(run, work, environ, [])
            said = dict(zip(chapters[1:], pool.map(others, chapters[1:]), strict=True))
        installed = {chapter.stem: text for chapter, text in said.items() if text}
        assert not installed, f"the setup cell installed: {installed}"
        print(f"{len(chapters)} notebooks: {time.perf_counter() - started:.0f} s")
    return 0 if chapters else 1


if __name__ == "__main__":
    sys.exit(main())
