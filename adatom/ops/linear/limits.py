"""Which problems each backend of linear and gated takes: None, or the reason in words."""

from __future__ import annotations

import torch

from adatom.device import Device
from adatom.ops.linear.problem import Problem

_HALVES = (torch.float16, torch.bfloat16)


def reference(p: Problem) -> str | None:
    """The formulas in PyTorch: everything."""
    return None


def torch_linear(p: Problem) -> str | None:
    """PyTorch's kernels one after the other."""
    if p.device.kind == "cuda" and p.dtype == torch.float32 and p.rows and p.in_features and p.out_features:
        return "multiplies float32 as torch.backends.cuda.matmul says, not as precision does"
    return None


def without_triton(device: Device, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel of a layer runs there on tensors of that dtype; None if they do."""
    if device.kind == "cpu":
        return "needs a CUDA device (on a CPU: TRITON_INTERPRET=1)"
    if device.kind == "cuda" and device.arch < 80:
        return f"needs sm_80 or later; this is sm_{device.arch}"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32; got {dtype}"
    return None


def triton_any(p: Problem) -> str | None:
    """The Triton kernels wherever they run."""
    if (why := without_triton(p.device, p.dtype)) is not None:
        return why
    if not (p.rows and p.in_features and p.out_features):
        return "does not take empty tensors"
    return None


def triton(p: Problem) -> str | None:
    """The Triton kernels where there is something to fuse."""
    if (why := triton_any(p)) is not None:
        return why
    if p.dtype not in _HALVES or p.device.kind != "cuda":
        return None
    if p.activation == "none" and not p.gated:
        return "has nothing to fuse: PyTorch's product serves"
    return None


def triton_fwd(p: Problem) -> str | None:
    """The same for the forward of linear."""
    if (why := triton(p)) is not None:
        return why
    if p.dtype in _HALVES and p.device.arch == 90 and (p.out_features % 2 == 0 or _few_tiles(p)):
        return "was slower on Hopper than PyTorch's kernels one after the other, but for odd numbers of features out"
    return None


def triton_bwd(p: Problem) -> str | None:
    """The same for the backward of linear."""
    if (why := triton(p)) is not None:
        return why
    if hopper_any(p) is None and not p.recompute:
        return "is left to PyTorch's kernels on Hopper, where the Hopper row is not worth it"
    return None


def hopper_any(p: Problem) -> str | None:
    """The Gluon kernels: sm_90, 16-bit floats, what TMA can read and write."""
    if p.device.kind != "cuda":
        return "needs a CUDA device"
    if p.device.arch != 90:
        return f"needs a Hopper GPU (sm_90); this is sm_{p.device.arch}"
    if p.dtype not in _HALVES:
        return f"takes float16 and bfloat16; got {p.dtype}"
    if not (p.rows and p.in_features and p.out_features):
        return "does not take empty tensors"
    if p.in_features % 8 or p.out_features % 8:
        return f"needs multiples of 8 features; got {p.in_features} and {p.out_features}"
    if not p.tma:
        return "needs addresses and strides of x and the weights that are multiples of 16 bytes"
    return None


def _few_tiles(p: Problem) -> bool:
    """Whether the result has too few tiles for three quarters of the multiprocessors."""
    return 4 * -(-p.rows // 128) * -(-p.out_features // 128) < 3 * p.device.sms


def hopper(p: Problem) -> str | None:
    """The Gluon kernels where the forward of linear was faster than PyTorch's (docs/linear.md)."""
    if (why := hopper_any(p)) is not None:
        return why
    if _few_tiles(p):
        return f"has too few tiles of 128 x 128 for {p.device.sms} multiprocessors: PyTorch's kernels cut them along k"
    if p.activation == "none" and p.rows <= 64:
        return "has nothing to hide the reading of the weight under, with 64 rows or less"
    return None


def hopper_bwd(p: Problem) -> str | None:
    """The same for the backward."""
    if (why := hopper_any(p)) is not None:
        return why
    if p.rows <= 128 and not p.recompute:
        return "computes tiles of 128 rows, which is slow for that many or less"
    return None
