"""What the tests share; while they run, calls are checked against their annotations.

That takes half of their time: of a test with many examples, the first one checks, and with
--everything each. Which tests run at all is a matter of costly.py.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from jaxtyping import config, install_import_hook

from build_book import is_current
from site_browser import ARGUMENTS, find_chromium

pytest_plugins = ["costly"]

# All before the first import of attnlib. Tests side by side, and the kernels of their
# notebooks, keep to one thread each: more would wait for each other. Elsewhere a thread
# that waits sleeps, and leaves a busy machine to the others. Triton reads the source of its
# kernels, where a wrapper around the function would stand in its way: modules that have
# some are not checked.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "book" / "_static"
checked = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "attnlib").rglob("*.py"))
    if "@triton.jit" not in path.read_text(encoding="utf-8")
]
install_import_hook(checked, "beartype.beartype")

# The same examples on every run: a failure is then a change of the code, never of luck.
settings.register_profile("attnlib", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("attnlib")


def pytest_collection_modifyitems(config, items):
    """Marks what needs a browser or the built site: `-m "not site"` leaves it out."""
    seen = set()  # of a test with many examples, the first one checks the annotations
    for item in items:
        test = (item.path, getattr(item, "originalname", item.name))
        item.checks = config.getoption("--everything") or test not in seen
        seen.add(test)
        if {"browser", "site"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("site")


def pytest_collection_finish():
    """What was imported stays: it is not looked through for garbage, nor in a fork."""
    gc.freeze()
    gc.set_threshold(100_000)  # at the usual 700, parsing pages takes a quarter longer


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    config.update("jaxtyping_disable", not item.checks)


@pytest.fixture(scope="session", autouse=True)
def kernels_faster():
    """Triton's interpreter patches its language at each call of a function by a kernel.

    The first time is enough: a kernel patches what it needs itself, and what a function
    of Triton's own needs stays patched. The others take a quarter of a kernel's time.
    """
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        called, first = set(), interpreter.InterpretedFunction.__call__

        def call(self, *args, **given):
            if self.fn in called:
                return self.rewrite()(*args, **given)
            called.add(self.fn)
            return first(self, *args, **given)

        interpreter.InterpretedFunction.__call__ = call


@pytest.fixture(autouse=True)
def package_stays():
    """A desk of the workbook has the package imported anew; other tests hold the old one.

    A class of the one is none of the other: its objects are not pickled and not known.
    """
    package = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "attnlib"}
    yield
    sys.modules.update(package)


@pytest.fixture
def as_shipped():
    """Without the run-time check of annotations, which would refuse bad input first."""
    config.update("jaxtyping_disable", True)


@pytest.fixture(scope="session")
def site(tmp_path_factory, testrun_uid) -> Path:
    """The site, built with warnings as errors, once for all that test side by side.

    A site that `make book` has built from all that is there is taken as it is.
    """
    built = tmp_path_factory.getbasetemp().parent / f"site-{testrun_uid}"
    with FileLock(f"{built}.lock"):
        current = is_current(ROOT / "_build" / "html" / ".sources", ROOT)
        if not built.exists() and not current:
            build = subprocess.run(
                [sys.executable, "tools", "build_book"],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            if build.returncode:
                output = f"{build.stdout}\n{build.stderr}"
                pytest.fail(f"the book does not build\n{output}", pytrace=False)
            built.touch()
    return ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium; where there is none, its tests are skipped, but not in CI."""
    chromium = find_chromium()
    if chromium is None:
        reason = "no Chromium found; name one in the environment variable CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser):
    """Open a figure to touch, with its library, as a page; fail on an error or a request.

    With `scripts=False` it is what a reader sees whose browser runs none.
    """
    contexts, problems = [], []

    def show(name, width=760, height=900, copies=1, scripts=True, **options):
        files = (STATIC / f"{part}.html" for part in ("touch", name))
        fragment = "".join(file.read_text(encoding="utf-8") for file in files)
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, java_script_enabled=scripts, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
        page.on("request", lambda request: problems.append(f"request: {request.url}"))
        page.set_content(
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            + '<body style="margin: 10px">'
            + fragment * copies
        )
        return page

    yield show
    for context in contexts:
        context.close()
    assert problems == []
