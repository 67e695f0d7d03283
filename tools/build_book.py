"""Build the book's HTML: warnings are errors, and the path to open is printed.

The chapters are in it as notebooks that stand alone, and the workbook as a ZIP, for the
reader to download.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from address import address
from bookkit.chapters import ROOT, BookError, run

OPTIONS = "--config _config.yml --toc _toc.yml -W --keep-going -n"


def forget_if_reordered(build: Path) -> None:
    """Have all pages read again after a change of _toc.yml.

    Sphinx reads the pages that changed; the others would keep their neighbors.
    """
    read = build / ".doctrees" / "environment.pickle"
    if read.exists() and read.stat().st_mtime < (ROOT / "_toc.yml").stat().st_mtime:
        shutil.rmtree(read.parent)


def sources(root: Path) -> list[str]:
    """The repository's files that are there; without Git, nobody knows."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return sorted(name for name in done.stdout.split("\0") if (root / name).is_file())


def is_current(built: Path, root: Path) -> bool:
    """Whether a build's list of files is that of now, and younger than each of them."""
    names = sources(root)
    if not names or not built.exists() or built.read_text("utf-8").splitlines() != names:
        return False
    return built.stat().st_mtime > max((root / name).stat().st_mtime for name in names)


def build_if_missing(root: Path) -> None:
    """For what is made from the site: builds it where no build has come to its end."""
    if not (root / "_build" / "html" / ".sources").exists():
        command = [sys.executable, str(root / "tools" / "build_book.py")]
        if subprocess.run(command).returncode:
            raise BookError("the book does not build")


def main() -> int:
    """Run Jupyter Book in the root of the repository."""
    from editions.colab import write_editions
    from editions.workbook import write_zip  # whose program calls build_if_missing

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--into", type=Path, default=ROOT, help="the folder that gets _build (this one)"
    )
    into = parser.parse_args().into.resolve()
    began = time.time()
    forget_if_reordered(into / "_build")
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    command = [str(jupyter_book), "build", "book", *OPTIONS.split()]
    code = subprocess.run([*command, "--path-output", str(into)], cwd=ROOT).returncode
    if code:
        # Sphinx warns only about pages that it reads: read them all again next time.
        shutil.rmtree(into / "_build" / ".doctrees", ignore_errors=True)
        return code
    site = into / "_build" / "html"
    write_editions(ROOT, site / "notebooks", address(), built=into)
    write_zip(ROOT, site / "workbook.zip", into)
    (site / ".sources").write_text("\n".join(sources(ROOT)), "utf-8")
    os.utime(site / ".sources", (began, began))  # what was written since may not be in it
    print(f"\nOpen {(site / 'index.html').as_uri()}")
    return 0


if __name__ == "__main__":
    run(main)
