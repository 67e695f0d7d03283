"""Chromium and a local server: for the tests of the site, the PDF and the pictures."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREENS = 25  # of 1440 × 1000, at most, for a chapter
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
# The address bar's popups are pages of their own, which a headless window loads as well.
# Chromium heeds the last list that it gets, so what matters of Playwright's is repeated.
DISABLED = (
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup,HttpsUpgrades,MediaRouter,PaintHolding,"
    "OptimizationHints,NetworkTimeServiceQuerying,ThirdPartyStoragePartitioning"
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={DISABLED}",
]


def find_chromium() -> str | None:
    """The browser to use: $CHROMIUM, or the first one found."""
    if os.environ.get("CHROMIUM"):
        return os.environ["CHROMIUM"]
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """The browser, headless."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = find_chromium()
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


def screens(page: Page) -> float:
    """How many screens of 1440 × 1000 the page has that is open."""
    page.set_viewport_size({"width": 1440, "height": 1000})
    return page.evaluate("document.querySelector('article').scrollHeight") / 1000


class _QuietHandler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections: many small files

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine; gives the address."""
    handler = partial(_QuietHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
