"""What every part of routing agrees on: options, and the problem a kernel is chosen for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from adatom.device import Device, facts

Tensor = torch.Tensor

SCORINGS = ("softmax", "sigmoid")


class Options(NamedTuple):
    """All of a call but its tensors. groups: (n, kept, best), or (0, 0, 0) for none. biased: with a selection bias."""

    top_k: int
    scoring: str
    renormalize: bool
    groups: tuple[int, int, int]
    scale: float
    biased: bool

    @property
    def by_logits(self) -> bool:
        """Whether experts are chosen by logits, not by scores."""
        return not self.biased and not self.groups[0]


class Problem(NamedTuple):
    """All that a choice of kernel may look at. Hashable; tokens are rounded up to a power of two."""

    device: Device
    deterministic: bool
    dtype: torch.dtype
    tokens: int
    experts: int
    options: Options


def problem(logits: Tensor, o: Options) -> Problem:
    """The problem that these logits and options pose."""
    tokens, experts = logits.shape
    return Problem(
        facts(logits.device), torch.are_deterministic_algorithms_enabled(), logits.dtype,
        1 << (tokens - 1).bit_length() if tokens > 1 else tokens, experts, o,
    )  # fmt: skip


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores and weights are computed in: float32, float64 of float64."""
    return torch.promote_types(dtype, torch.float32)
