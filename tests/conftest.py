"""What several test files share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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
def interpreted() -> Callable[..., None]:
    """Runs code with arguments in a process of its own, Triton's kernels in its interpreter."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def run(code: str, *args: str) -> None:
        command = [sys.executable, "-c", code, *args]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device; the test is skipped without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
