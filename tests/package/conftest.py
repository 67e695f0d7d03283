"""The fixtures that the tests of the package share; plain functions stand in drawn.py."""

import pytest
import torch


@pytest.fixture
def same_bits():
    """`torch.use_deterministic_algorithms`, taken back after the test."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)
