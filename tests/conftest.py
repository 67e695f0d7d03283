"""While the tests run, every call is checked against its shape annotations."""

import pytest
from hypothesis import settings
from jaxtyping import config, install_import_hook

install_import_hook("attnlib", "beartype.beartype")  # before the first import of attnlib

# The same examples on every run: a failure is then a change of the code, never of luck.
settings.register_profile("attnlib", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("attnlib")


@pytest.fixture
def as_shipped():
    """Without the run-time check of annotations, which would refuse bad input first."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
