"""What every part of linear and gated agrees on: tensors, options, and the problem that a kernel is chosen for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from adatom.device import Device, facts

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


class Inputs(NamedTuple):
    """The tensors of one call: x (rows, in), weight (out, in), bias (out,), contiguous.

    Gated: weight (2 * out, in), the gate's rows first, or the gate's (out, in) with `up` (out, in); no bias.
    """

    x: torch.Tensor
    weight: torch.Tensor
    up: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def products(self) -> int:
        """Elements of a row of x weight^T: out, and 2 * out if gated."""
        return self.weight.shape[0] + (0 if self.up is None else self.up.shape[0])


class Options(NamedTuple):
    """activation: one of ACTIVATIONS, of the gate if gated. precision: of float32 products."""

    activation: str
    gated: bool
    precision: str

    @property
    def keeps(self) -> str:
        """What a forward keeps for its backward: "" for nothing, "out", or "pre", what the activation was given."""
        if self.gated:
            return "pre"
        return {"none": "", "relu": "out"}.get(self.activation, "pre")


class Problem(NamedTuple):
    """All that a choice of kernel may look at. Hashable; rows are rounded up to a power of two."""

    device: Device
    dtype: torch.dtype
    precision: str
    activation: str
    gated: bool
    rows: int
    in_features: int
    out_features: int
    bias: bool
    recompute: bool  # a backward is not given what the forward kept, though there is something to keep
    tma: bool  # addresses and strides of x and the weights suit tensor descriptors (multiples of 16 bytes)
    deterministic: bool


def suits_tma(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors can hold these: contiguous rows, addresses and steps multiples of 16 bytes."""
    return all(
        t.numel() > 0
        and (t.stride(1) == 1 or t.shape[1] == 1)
        and (t.shape[0] == 1 or t.stride(0) >= t.shape[1] and t.stride(0) * t.element_size() % 16 == 0)
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def problem(x: Inputs, o: Options, recompute: bool = False) -> Problem:
    """The problem that these inputs and options pose."""
    rows, device = x.x.shape[0], facts(x.x.device)
    weights = (x.weight,) if x.up is None else (x.weight, x.up)
    return Problem(
        device,
        x.x.dtype,
        o.precision,
        o.activation,
        o.gated,
        1 << (rows - 1).bit_length() if rows > 1 else rows,
        x.x.shape[1],
        x.products // (2 if o.gated else 1),
        x.bias is not None,
        recompute and o.keeps != "",
        device.kind == "cuda" and suits_tma(x.x, *weights),
        torch.are_deterministic_algorithms_enabled(),
    )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x (..., features) as a matrix: x itself if it is one, a view where its strides allow."""
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # torch.Size.numel would fix what is dynamic
