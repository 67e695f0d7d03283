"""What the tests of figures to touch share."""

from pathlib import Path

import torch

STATIC = Path(__file__).parents[2] / "book" / "_static"


SMALL_TEXT = """figure => [...figure.querySelectorAll("text, p, span, i, sub, button")]
    .filter(e => e.textContent.trim() && e.getClientRects().length)
    .map(e => {
        const svg = e.closest("svg"), wide = svg && svg.getBoundingClientRect().width;
        const scale = svg ? wide / svg.viewBox.baseVal.width : 1;
        return [e.textContent, parseFloat(getComputedStyle(e).fontSize) * scale];
    }).filter(([, size]) => size < 12)"""


def tensor(rows):
    """Rows of numbers, with None for minus infinity."""
    return torch.tensor(
        [[-torch.inf if x is None else x for x in row] for row in rows], dtype=torch.float64
    )


def press(page, name, times=1):
    for _ in range(times):
        page.get_by_role("button", name=name).click()
