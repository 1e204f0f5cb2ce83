"""Normalisation by PyTorch's own kernels, or few passes over memory, on a CPU; elsewhere by reference.py, whose
contract holds for both."""

from __future__ import annotations

import torch

from adatom.ops.norm import reference
from adatom.ops.norm.problem import Tensor


def _alike(*tensors: Tensor | None) -> bool:
    """Whether all are on a CPU and of one dtype, in which statistics are taken, and there is something to normalise."""
    present = [t for t in tensors if t is not None]
    first = present[0]
    same = all(t.dtype == first.dtype for t in present) and first.dtype in (torch.float32, torch.float64)
    return same and first.device.type == "cpu" and first.numel() > 0


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool,
    keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(y, h, mean, rstd)."""
    if not _alike(x, residual, weight, bias):
        return reference.forward(x, residual, weight, bias, eps, centred, keep)
    h, mean = x if residual is None else x + residual, None
    if centred:
        y, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], weight, bias, eps)
        mean = mean.squeeze(-1)
    else:
        rstd = (h * h).mean(-1, keepdim=True).add_(eps).rsqrt_()
        y = h * rstd
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
    return y, None if residual is None else h, *((mean, rstd.squeeze(-1)) if keep else (None, None))


def backward(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor | None, dy: Tensor,
    dh: Tensor | None, eps: float, centred: bool, wants: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, dweight, dbias)."""
    if mean is None or rstd is None or not _alike(h, weight, bias, dy, dh):
        return reference.backward(h, weight, bias, mean, rstd, dy, dh, eps, centred, wants)
    mask = [True, wants[0] and weight is not None, wants[1] and bias is not None]
    statistics = mean.unsqueeze(-1), rstd.unsqueeze(-1)
    given = dy.contiguous(), h.contiguous(), h.shape[-1:], *statistics, weight, bias, mask
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(*given)
    return dx if dh is None else dx.add_(dh), dweight if mask[1] else None, dbias if mask[2] else None
