"""What the tests of the book share."""

import pytest

from touch import Figure


@pytest.fixture
def open_figure(open_page):
    """Open a figure to touch, alone on its page."""

    def show(name, **options):
        return Figure(open_page(name, **options))

    return show
