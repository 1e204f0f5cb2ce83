"""What every part of normalisation agrees on: the problem a kernel is chosen for, dtypes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from adatom.device import Device, facts

Tensor = torch.Tensor


class Problem(NamedTuple):
    """All that a choice of kernel may look at. Hashable; rows are rounded up to a power of two.

    centred: layer norm, which subtracts the mean; otherwise RMS norm. dtypes: of x, residual, weight and bias, None for
    those that are absent.
    """

    device: Device
    deterministic: bool
    centred: bool
    rows: int
    length: int
    dtypes: tuple[torch.dtype | None, ...]


def problem(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, centred: bool) -> Problem:
    """The problem that these tensors pose."""
    length = x.shape[-1]
    rows = x.numel() // max(length, 1)
    return Problem(
        facts(x.device),
        torch.are_deterministic_algorithms_enabled(),
        centred,
        1 << (rows - 1).bit_length() if rows > 1 else rows,
        length,
        tuple(None if t is None else t.dtype for t in (x, residual, weight, bias)),
    )


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    """The dtype of x + residual, thus of the new residual."""
    return torch.promote_types(x.dtype, residual.dtype)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """What means and reciprocal deviations of rows are kept in: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
