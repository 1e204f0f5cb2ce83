"""Which problems each backend of moe takes: None, or the reason in words."""

from __future__ import annotations

import torch

from adatom.ops.linear.limits import without_triton
from adatom.ops.moe.problem import Problem


def reference(p: Problem) -> str | None:
    """Every expert on every token, in PyTorch: everything."""
    return None


def _many(p: Problem) -> str | None:
    if p.experts > 4095:
        return f"takes up to 4095 experts; got {p.experts}"
    if p.tokens * p.top_k > 2**31 - 2**20:
        return "numbers its pairs with 32 bits"
    return None


def hopper_any(p: Problem) -> str | None:
    """The Gluon kernels: sm_90, 16-bit floats, what TMA can read."""
    if p.device.kind != "cuda" or p.device.arch != 90:
        return "needs a Hopper GPU (sm_90)"
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16; got {p.dtype}"
    if not (p.tokens and p.hidden and p.intermediate and p.experts and p.top_k):
        return "does not take empty tensors"
    if p.hidden % 8 or p.intermediate % 8:
        return f"needs hidden and intermediate features in multiples of 8; got {p.hidden} and {p.intermediate}"
    if not p.aligned:
        return "needs contiguous rows, and addresses and strides of multiples of 16 bytes"
    return _many(p)


def hopper(p: Problem) -> str | None:
    """The Gluon kernels where they were faster than Triton's (docs/moe.md)."""
    if (why := hopper_any(p)) is not None:
        return why
    if p.tokens * p.top_k < 100 * p.experts:
        return "has not been measured below 100 rows of an expert on average, tokens rounded up to a power of two"
    return None


def hopper_one(p: Problem) -> str | None:
    """The Gluon kernels for up to 3 tokens: narrow experts, rows of which fit in shared memory."""
    if (why := hopper_any(p)) is not None:
        return why
    if p.tokens > 3 or p.tokens * p.top_k > 32:
        return "takes up to 3 tokens and 32 pairs"
    if p.top_k * -(-p.intermediate // 256) * 256 > 6656:
        return "holds top_k rows of w_down of up to 6656 elements together"
    return None


def triton(p: Problem) -> str | None:
    """The Triton kernels: sm_80 and later, but for float64."""
    if (why := without_triton(p.device, p.dtype)) is not None:
        return why
    if not (p.tokens and p.hidden and p.intermediate and p.experts and p.top_k):
        return "does not take empty tensors"
    return _many(p)


def torch_moe(p: Problem) -> str | None:
    """PyTorch's grouped product where there is one, else products of padded blocks, or of each expert on a CPU."""
    return None
