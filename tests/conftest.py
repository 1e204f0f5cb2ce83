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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other over tiny products cost far more than they save on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device; the test is skipped without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
