"""The one place from which Triton kernels are launched, so that they can also be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], int], None]
_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """While active, `launch` hands (kernel, args, meta, spill) to `observer` and runs nothing."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def launch(kernel: Any, programs: int, args: tuple[Any, ...], meta: dict[str, Any], spill: int = 0) -> None:
    """Run `kernel` with that many programs. `meta` holds its constexprs and num_warps, num_stages.

    Nothing is launched for 0 programs. spill: bytes of registers it may spill, for `adatom compile` to check.
    """
    if _observer is not None:
        _observer(kernel, args, meta | {"enable_fp_fusion": True}, spill)
    elif programs:  # Triton 3.10 fuses multiply-adds only on request; 3.9 warns of it
        kernel[(programs,)](*args, enable_fp_fusion=True, **meta)
