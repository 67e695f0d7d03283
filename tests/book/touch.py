"""What the tests of figures to touch share."""

import torch


def tensor(rows):
    """Rows of numbers, with None for minus infinity."""
    return torch.tensor(
        [[-torch.inf if x is None else x for x in row] for row in rows], dtype=torch.float64
    )


def press(page, name, times=1):
    for _ in range(times):
        page.get_by_role("button", name=name).click()
