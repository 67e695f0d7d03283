"""The site: how long it takes to build, what a page weighs, when its formulas are there.

python benchmarks/site.py   writes results/site.json, and site.md with the same numbers

The site is built from nothing and served by this machine, so that no network is measured.
Every page is opened in a browser that has seen nothing yet, in each of several rounds.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paired import write_record
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from editions.one_page import contents
from site_browser import ARGUMENTS, find_chromium, serve

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent / "tools"
# Milliseconds, or 0 on a page without formulas, which loads no MathJax.
RENDERED = """addEventListener("DOMContentLoaded", () =>
  Promise.resolve(window.MathJax?.startup?.promise).then(() => {
    window.rendered = window.MathJax ? performance.now() : 0;
  }))"""


def build(folder: Path) -> float:
    """Seconds to build the site into an empty folder."""
    start = time.perf_counter()
    command = [sys.executable, str(TOOLS), "build_book", "--into", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def visit(browser: Browser, url: str) -> tuple[list[bytes], float]:
    """The files that a first visit brings, and milliseconds until the math is rendered."""
    context, responses = browser.new_context(), []
    page = context.new_page()
    page.on("response", lambda response: responses.append(response))
    page.add_init_script(RENDERED)
    page.goto(url, wait_until="networkidle")
    page.wait_for_function("() => window.rendered !== undefined")
    files = [response.body() for response in responses]
    rendered = page.evaluate("() => window.rendered")
    context.close()
    return files, rendered


def measure(site: Path, rounds: int) -> dict[str, Any]:
    """Weight and median time of every page of the contents."""
    pages = [name for name, *_ in contents(site)]
    weights: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {name: [] for name in pages}
    with serve(site) as address, sync_playwright() as playwright:
        chromium = find_chromium()
        for _ in range(rounds):
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            version = browser.version
            visit(browser, f"{address}/404.html")  # the browser itself has started
            for name in pages:
                files, milliseconds = visit(browser, f"{address}/{name}.html")
                times[name].append(milliseconds)
                weights[name] = {
                    "files": len(files),
                    "kilobytes": round(sum(map(len, files)) / 1e3),
                    "kilobytes_gzip": round(sum(map(gzipped, files)) / 1e3),
                }
            browser.close()
    rows = [
        {"page": name, **weights[name], "math_ms": round(statistics.median(times[name]))}
        for name in pages
    ]
    return {"rounds": rounds, "chromium": version, "pages": rows}


def gzipped(file: bytes) -> int:
    """What a server sends that compresses where it helps."""
    return min(len(file), len(gzip.compress(file, 6)))


def table(record: dict[str, Any]) -> str:
    """The record as a page of Markdown."""
    machine = record["machine"]
    lines = [
        "# The site, measured",
        "",
        "Written by `python benchmarks/site.py`. A first visit to each page, with nothing",
        f"cached, served by the same machine; times: medians of {record['rounds']} rounds.",
        "",
        f"Build from nothing: {record['build_s']} s. Machine: {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['system']}, Chromium {record['chromium']}.",
        "",
        "| page | files | kB | kB with gzip | math rendered after, ms |",
        "|---|--:|--:|--:|--:|",
    ]
    keys = ("page", "files", "kilobytes", "kilobytes_gzip", "math_ms")
    for row in record["pages"]:
        lines.append("| " + " | ".join(str(row[key] or "–") for key in keys) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with TemporaryDirectory() as folder:
        seconds = build(Path(folder))
        record = {
            "build_s": round(seconds, 1),
            **measure(Path(folder, "_build/html"), rounds),
        }
    write_record("site", record)
    stored = json.loads((HERE / "results" / "site.json").read_text("utf-8"))
    (HERE / "site.md").write_text(table(stored), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
