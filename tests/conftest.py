"""While the tests run, every call is checked against its shape annotations."""

import os

import pytest
from hypothesis import settings
from jaxtyping import config, install_import_hook
from site_browser import ARGUMENTS, find_chromium

install_import_hook("attnlib", "beartype.beartype")  # before the first import of attnlib

# The same examples on every run: a failure is then a change of the code, never of luck.
settings.register_profile("attnlib", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("attnlib")


def pytest_collection_modifyitems(items):
    """Marks what needs a browser or the built site: `-m "not site"` leaves it out."""
    for item in items:
        if {"browser", "site"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("site")


@pytest.fixture
def as_shipped():
    """Without the run-time check of annotations, which would refuse bad input first."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


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
