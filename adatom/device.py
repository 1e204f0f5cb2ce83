"""Facts of this machine: architecture, multiprocessors, shared memory, versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """What a kernel choice may know about a device.

    kind: "cuda", "cpu", or "interpreter" (a CPU tensor while `TRITON_INTERPRET=1`, where Triton rows run too).
    arch: compute capability as an integer, 90 for sm_90; 0 off CUDA.
    sms: multiprocessors; 0 off CUDA.
    shared_memory: bytes of shared memory one program may use; 0 off CUDA.
    """

    kind: str
    arch: int
    sms: int
    shared_memory: int


CPU = Device("cpu", 0, 0, 0)
INTERPRETER = Device("interpreter", 0, 0, 0)


def interpreting() -> bool:
    """Whether Triton kernels run under Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@cache
def _cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        "cuda",
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


_pretended: Device | None = None


@contextmanager
def pretend(device: Device) -> Iterator[None]:
    """While active, every tensor is taken to lie on `device`: for choosing and compiling kernels of absent machines."""
    global _pretended
    before, _pretended = _pretended, device
    try:
        yield
    finally:
        _pretended = before


def facts(device: torch.device) -> Device:
    """The facts of `device`."""
    if _pretended is not None:
        return _pretended
    if device.type == "cuda":
        return _cuda(torch.cuda.current_device() if device.index is None else device.index)
    return INTERPRETER if interpreting() else CPU


def system() -> str:
    """The operating system, kind of processor and C library, as records name them: without the name of a host."""
    return " ".join((platform.system(), platform.machine(), *platform.libc_ver()))


def versions() -> dict[str, str | None]:
    """Versions of what adatom stands on; None for what is absent. Imports Triton if it is installed."""
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version,
    }
