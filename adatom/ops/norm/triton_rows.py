# mypy: ignore-errors
"""What the Triton kernels of normalisation share: rows of tensors with any leading strides, launches remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from adatom.device import Device


class Config(NamedTuple):
    """A tile of so many rows, warps, programs that share a multiprocessor (0: one for each tile), how many tiles are on
    their way at once, in how many parts a row is walked over, twice; spill: bytes of registers it may spill."""

    rows: int
    num_warps: int
    per_sm: int = 0
    num_stages: int = 1
    chunks: int = 1
    spill: int = 64


@triton.jit
def offset_of(i, n1, n2, s0, s1, s2, DIMS: tl.constexpr):
    """Where row i begins: rows are numbered over DIMS dimensions, the last two of n1 and n2."""
    if DIMS == 1:
        return i * s2
    elif DIMS == 2:
        return i // n2 * s1 + i % n2 * s2
    else:
        return i // n2 // n1 * s0 + i // n2 % n1 * s1 + i % n2 * s2


@triton.jit
def mask_of(i, j, rows, length, EVEN_R: tl.constexpr, EVEN_N: tl.constexpr):
    """Which elements of rows i and columns j exist. EVEN_R, EVEN_N: all rows, all columns do."""
    if EVEN_R and EVEN_N:
        return tl.full((1, 1), True, tl.int1)
    elif EVEN_R:
        return j < length
    elif EVEN_N:
        return i < rows
    else:
        return (i < rows) & (j < length)


@triton.jit
def prefetch(at, size):
    """Bring `size` bytes, a multiple of 16, from `at` into the L2 cache (sm_90): one instruction of one thread."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [at, size], dtype=tl.int32, is_pure=False, pack=1,
    )


class Rows:
    """Tensors of one shape (..., length), numbered alike row by row.

    tensors: those given, copied where the last dimension is not contiguous, or the leading ones need more than three
    strides. count, length: rows and columns.
    sizes: (n1, n2) of `offset_of`. strides: three for each tensor; 0s for None.
    """

    def __init__(self, *given: torch.Tensor | None) -> None:
        some = [t for t in given if t is not None]
        shape = some[0].shape
        self.length = shape[-1]
        self.count = some[0].numel() // max(self.length, 1)
        self.tensors = [
            t if t is None or t.stride(-1) == 1 or shape[-1] == 1 else t.contiguous() for t in given
        ]
        merged = self._merged(shape[:-1])
        if len(merged) > 3:
            self.tensors = [None if t is None else t.contiguous() for t in self.tensors]
            merged = self._merged(shape[:-1])
        self.dims = max(len(merged), 1)
        merged = [(1, (0,) * len(given))] * (3 - len(merged)) + merged
        self.sizes = merged[1][0], merged[2][0]
        self.strides = tuple(merged[d][1][k] for k in range(len(given)) for d in range(3))

    def ahead(self, device: Device, *which: int) -> int:
        """The bytes of a row, if those of these tensors may be brought into the L2 cache as a whole; otherwise 0."""
        some = [self.tensors[k] for k in which]
        size = {t.element_size() for t in some if t is not None}
        if device.kind != "cuda" or device.arch < 90 or len(size) > 1:
            return 0
        (each,) = size
        steps = [s * each for k in which for s in self.strides[3 * k : 3 * k + 3]]
        steps += [t.data_ptr() for t in some if t is not None] + [self.length * each]
        return self.length * each if all(s % 16 == 0 for s in steps) else 0

    def _merged(self, shape: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """(size, stride of each tensor) of the fewest dimensions that number the rows."""
        out: list[tuple[int, tuple[int, ...]]] = []
        for d, n in enumerate(shape):
            if n == 1:
                continue
            steps = tuple(0 if t is None else t.stride(d) for t in self.tensors)
            if out and all(before == n * step for before, step in zip(out[-1][1], steps)):
                out[-1] = out[-1][0] * n, steps
            else:
                out.append((n, steps))
        return out


Built = TypeVar("Built")
_built: dict[Any, Any] = {}


def remembered(
    rows: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None], options: Any,
    build: Callable[[Rows], Built],
) -> tuple[Built, Sequence[torch.Tensor | None]]:  # fmt: skip
    """What `build` makes of the `Rows` of some tensors, or made in an earlier call like this one; and their tensors.

    others: more that it is launched with. options: all else that it depends on.
    """
    key = [options]
    for t in (*rows, *others):
        key.append(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16, t.get_device()))
    found = _built.get(tuple(key))
    if found is not None:
        return found, rows
    r = Rows(*rows)
    made = build(r)
    if all(a is b for a, b in zip(r.tensors, rows)):  # of copies, the key says nothing
        if len(_built) >= 4096:  # lengths that never repeat must not fill the memory
            _built.clear()
        _built[tuple(key)] = made
    return made, r.tensors


def tile_of(length: int) -> int:
    """The power of two that holds a row."""
    return max(16, 1 << (length - 1).bit_length())
