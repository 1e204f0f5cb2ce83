"""What several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# Warnings that PyTorch raises at itself: forward mode scripts its decompositions, Dynamo instantiates Functions.
_PYTORCHS_OWN = (
    r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning",
    r"ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in _PYTORCHS_OWN:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers whatever runs before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device; the test is skipped without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
