"""Which problems each backend of normalisation takes; the reason in words for each that it does not."""

from __future__ import annotations

from torch import bfloat16, float16, float32

from adatom.ops.norm.problem import Problem


def reference(p: Problem) -> str | None:
    """The formulas take everything."""
    return None


def torch(p: Problem) -> str | None:
    """The same in PyTorch's operators, which take memory for a few tensors like x: everything that reaches it."""
    return None


def triton(p: Problem) -> str | None:
    """Triton kernels: CUDA from sm_80 up (or the interpreter), 16-bit and 32-bit floats, rows below 2^30 numbers."""
    if p.device.kind == "cpu":
        return "needs a CUDA device (or TRITON_INTERPRET=1)"
    if p.device.kind == "cuda" and p.device.arch < 80:
        return f"needs compute capability 8.0 or newer; this is sm_{p.device.arch}"
    for dtype in p.dtypes:
        if dtype not in (None, float16, bfloat16, float32):
            return f"takes float16, bfloat16 and float32; got {dtype}"
    if p.length >= 2**30 or p.rows > 2**31:
        return f"takes rows of up to 2^30 numbers, and 2^31 rows; got {p.length}, {p.rows}"
    return None
