"""Run chapters in place, and normalize them, so that running twice gives no diff.

A chapter that fails is named with its cell and is not written; the others still run. What
did not change keeps its execution count.
Chapters are called by number or name; `changed` are those that differ from the last commit.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, Chapter, parser, read_chapters, run
from bookkit.normalize import normalize, number

TIMEOUT = 600  # seconds a cell
# Threads that wait for others sleep: on a busy machine they would take the others' time.
QUIET = {"OMP_WAIT_POLICY": "PASSIVE"}


def own_sockets() -> dict[str, str]:
    """The settings of a kernel that is spoken to by sockets of its own.

    Otherwise a free port is chosen, and may be taken before the kernel has it: by the
    ranks of a chapter beside it, for example. Windows has ports alone.
    """
    if sys.platform == "win32":
        return {}
    file = Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex}")
    return {"transport": "ipc", "ip": str(file)}


def execute(chapter: Chapter, root: Path) -> None:
    """Run the chapter from the top, as for a reader who opens it in book/."""
    path = os.pathsep.join(
        filter(None, [str(root.resolve()), os.environ.get("PYTHONPATH")])
    )
    running: list[NotebookNode] = []
    client = NotebookClient(
        chapter.notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # or the kernel warns of its transport
        config=Config({"KernelManager": own_sockets()}),
        record_timing=False,
        resources={"metadata": {"path": str(chapter.path.parent)}},
        on_cell_start=lambda cell, cell_index: running.append(cell),
    )
    try:
        client.execute(
            env={**QUIET, **os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path}
        )
    except Exception as error:  # of the cell, a timeout, a dead kernel: reported alike
        raise BookError(report(chapter, running, error)) from error
    number(chapter, root)


def report(chapter: Chapter, running: list[NotebookNode], error: Exception) -> str:
    """The cell that failed, how it starts, the line that failed, and why."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().splitlines()
    last = lines[-1] if lines else type(error).__name__
    if not running:
        return f"{chapter.file}: the kernel did not start: {last}"
    start = [f"    {line}" for line in running[-1].source.splitlines()[:3]]
    failed = [line for line in lines if re.match(r"-+> \d", line)][:1]
    return "\n".join([f"{chapter.where(running[-1])} failed:", *start, *failed, last])


def changed(root: Path) -> set[str]:
    """The names of the changed files in book/, attnlib/ and tools/, and of their folders.

    The last commit is what they are compared with.

    Raises:
        BookError: Git does not know the folder.
    """
    command = ["git", "status", "--porcelain", "--no-renames", "book", "attnlib", "tools"]
    done = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise BookError(f"no way to tell what has changed: {done.stderr.strip()}")
    paths = [Path(line[3:].strip('"')) for line in done.stdout.splitlines()]
    return {name for path in paths for name in (path.stem, path.parent.name)}


def select(chapters: list[Chapter], names: list[str], root: Path) -> list[Chapter]:
    """The chapters called by number, by name or by path; all, if none is."""
    if names == ["changed"]:
        return [c for c in chapters if c.name in changed(root)]
    wanted = {Path(name).stem for name in names}
    chosen = [c for c in chapters if not wanted or wanted & {c.name, c.key}]
    if unknown := wanted - {key for c in chosen for key in (c.name, c.key)}:
        there = ", ".join(c.name for c in chapters)
        raise BookError(f"no chapter {', '.join(sorted(unknown))}; there are: {there}")
    return chosen


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "chapters", nargs="*", metavar="chapter", help="01, or changed (all)"
    )
    options.add_argument("--normalize", action="store_true", help="normalize only")
    args = options.parse_args()
    failed = False
    for chapter in select(read_chapters(args.root), args.chapters, args.root):
        print(f"{chapter.name} … ", end="", flush=True)
        start = time.perf_counter()
        try:
            if not args.normalize:
                execute(chapter, args.root)
            normalize(chapter)
            chapter.write()
            print(f"{len(chapter.cells)} cells, {time.perf_counter() - start:.1f} s")
        except BookError as error:
            print(f"not written\n{error}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    run(main)
