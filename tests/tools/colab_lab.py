"""Open every notebook for Colab in JupyterLab and see that its formulas are shown.

    python tests/tools/colab_lab.py NOTEBOOKS PYTHON

PYTHON is that of an environment with jupyterlab. The browser is Chromium, see
tools/site_browser.py. Nothing is run, and no request leaves the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from site_browser import ARGUMENTS, find_chromium

# No news, no update checks, all cells at once rather than those that are in sight.
OVERRIDES = """{
  "@jupyterlab/apputils-extension:notification":
    {"fetchNews": "false", "checkForUpdates": false, "doNotDisturbMode": true},
  "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}
}"""
OPTIONS = "--no-browser --allow-root --ServerApp.port=0 --IdentityProvider.token="

# Formulas, and what is wrong: errors, unknown commands (red), TeX or Sphinx as text.
LOOK = r"""() => {
  const texts = [...document.querySelectorAll(".jp-RenderedMarkdown")].map((cell) => {
    const copy = cell.cloneNode(true);
    for (const other of copy.querySelectorAll("mjx-container, code, pre")) other.remove();
    return copy.textContent;
  });
  const syntax = /\$.{0,40}|\\[a-z(\[]+.{0,40}|\{[a-z:]+\}/g;
  const left = texts.flatMap((text) => text.match(syntax) ?? []);
  const errors = document.querySelectorAll(
    "mjx-merror, [data-mjx-error], mjx-container [style*='color: red']");
  return {
    displayed: document.querySelectorAll("mjx-container[display=true]").length,
    tags: document.querySelectorAll("mjx-container[display=true] mjx-mlabeledtr").length,
    inline: document.querySelectorAll("mjx-container:not([display=true])").length,
    wrong: [...left, ...[...errors].map((e) => e.textContent || "unknown command")],
  };
}"""


@contextmanager
def jupyterlab(python: str, folder: Path) -> Iterator[str]:
    """JupyterLab on a free port, with settings of its own; gives the address."""
    settings = folder / "settings"
    settings.mkdir()
    (settings / "overrides.json").write_text(OVERRIDES, encoding="utf-8")
    environ = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
    environ |= {"JUPYTER_CONFIG_DIR": str(folder / "config"), "HOME": str(folder)}
    options = [f"--ServerApp.root_dir={folder}", f"--LabApp.app_settings_dir={settings}"]
    command = [python, "-m", "jupyterlab", *OPTIONS.split(), *options]
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as stream:
        server = subprocess.Popen(command, env=environ, stdout=stream, stderr=stream)
    try:
        for _ in range(600):
            if found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text("utf-8")):
                yield found[0]
                return
            time.sleep(0.1)
        raise TimeoutError(log.read_text("utf-8"))
    finally:
        server.terminate()
        server.wait()


def faults(page: Page, address: str, path: Path) -> list[str]:
    """What is wrong with a notebook as JupyterLab shows it."""
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    page.goto(f"{address}doc/tree/{path.name}?reset")
    shown = "(count) => document.querySelectorAll('.jp-Notebook .jp-Cell').length === count"
    page.wait_for_function(shown, arg=len(notebook.cells), timeout=60_000)
    expected = {
        "displayed": text.count("$$") // 2,
        "tags": text.count("\\tag{"),
        "inline": len(re.findall(r"\$[^$]+\$", text.replace("$$", ""))),
    }
    seen: dict = {}
    for _ in range(600):  # a minute: other notebooks may be running
        seen = page.evaluate(LOOK)
        if all(seen[what] >= count for what, count in expected.items()):
            break
        page.wait_for_timeout(100)
    print(f"{seen['displayed']} + {seen['inline']} formulas", flush=True)
    return seen["wrong"] + [
        f"{seen[what]} {what} formulas instead of {count}"
        for what, count in expected.items()
        if seen[what] != count
    ]


def main() -> int:
    notebooks, python = Path(sys.argv[1]), str(Path(sys.argv[2]).absolute())
    wrong, left = [], []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        paths = [
            Path(shutil.copy2(path, name)) for path in sorted(notebooks.glob("*.ipynb"))
        ]
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=ARGUMENTS
        )
        with jupyterlab(python, Path(name)) as address:
            page = browser.new_page()
            page.on("request", lambda request: left.append(request.url))
            for path in paths:
                print(f"{path.stem} … ", end="", flush=True)
                wrong += [f"{path.stem}: {fault}" for fault in faults(page, address, path)]
        browser.close()
    here = (address, "data:", "blob:")
    wrong += [f"left the machine: {url}" for url in left if not url.startswith(here)]
    print("\n".join(wrong))
    return int(bool(wrong) or not paths)


if __name__ == "__main__":
    sys.exit(main())
