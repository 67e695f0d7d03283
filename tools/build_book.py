"""Build the book's HTML: warnings are errors, and the path to open is printed.

The chapters are in it as notebooks that stand alone, for the reader to download.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from address import address
from chapters import run
from colab import write_editions

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = "--config _config.yml --toc _toc.yml --path-output . -W --keep-going -n"


def main() -> int:
    """Run Jupyter Book in the root of the repository."""
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    command = [str(jupyter_book), "build", "book", *OPTIONS.split()]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        # Sphinx warns only about pages that it reads: read them all again next time.
        shutil.rmtree(ROOT / "_build" / ".doctrees", ignore_errors=True)
        return code
    site = ROOT / "_build" / "html"
    write_editions(ROOT, site / "notebooks", address())
    print(f"\nOpen {(site / 'index.html').as_uri()}")
    return 0


if __name__ == "__main__":
    run(main)
