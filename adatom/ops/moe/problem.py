"""What every part of moe agrees on: tensors, options, the order of pairs, and the problem a kernel is chosen for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from adatom.device import Device, facts
from adatom.ops.linear.problem import Options as Gate

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """The tensors of one call: x (tokens, hidden), weights and indices (tokens, top_k), w_gate_up (experts,
    2 * intermediate, hidden) with the gate's rows first, w_down (experts, hidden, intermediate).

    A pair is a token with one of its top_k experts, number token * top_k + its place. An index that names no expert
    drops its pair.
    """

    x: Tensor
    weights: Tensor
    indices: Tensor
    w_gate_up: Tensor
    w_down: Tensor

    @property
    def experts(self) -> int:
        return self.w_down.shape[0]

    @property
    def top_k(self) -> int:
        return self.indices.shape[1]

    @property
    def pairs(self) -> int:
        return self.indices.numel()


class Options(NamedTuple):
    """activation: of the gate, one of linear's ACTIVATIONS."""

    activation: str

    @property
    def gate(self) -> Gate:
        """The options by which linear's formulas know a gate."""
        return Gate(self.activation, True, "tf32x3")


class Problem(NamedTuple):
    """All that a choice of kernel may look at. Hashable; tokens beyond 4 are rounded up to a power of two."""

    device: Device
    dtype: torch.dtype
    weights_dtype: torch.dtype
    activation: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    recompute: bool
    aligned: bool  # addresses and strides of x and experts' weights are multiples of 16 bytes; rows not far apart
    deterministic: bool


def aligned(*tensors: Tensor) -> bool:
    """Whether rows are contiguous, and addresses and steps multiples of 16 bytes, none of them 0."""
    return all(
        t.stride(-1) == 1
        and t.data_ptr() % 16 == 0
        and all(s > 0 and s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        for t in tensors
    )


def problem(x: Inputs, o: Options, recompute: bool = False) -> Problem:
    """The problem that these inputs and options pose."""
    tokens, device = x.x.shape[0], facts(x.x.device)
    near = max(x.x.stride(0), x.weights.stride(0)) < 2**29  # kernels for few tokens multiply in 32 bits
    return Problem(
        device, x.x.dtype, x.weights.dtype, o.activation, 1 << (tokens - 1).bit_length() if tokens > 4 else tokens,
        x.x.shape[1], x.w_down.shape[2], x.experts, x.top_k, recompute,
        device.kind == "cuda" and aligned(x.x, x.w_gate_up, x.w_down) and near,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def present(indices: Tensor, experts: int) -> Tensor:
    """Whether each index names an expert; bool, like indices."""
    return (indices >= 0) & (indices < experts)


def plan(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order, offsets), int32, without host synchronisation and without atomics.

    order (pairs,): the pairs sorted by expert, those of one expert by token and place; dropped pairs come last.
    offsets (experts + 1,): expert e has order[offsets[e] : offsets[e + 1]]; dropped ones are order[offsets[experts] :].
    """
    flat = indices.reshape(-1)
    keys = torch.where(present(flat, experts), flat, experts)
    keys, order = torch.sort(keys, stable=True)
    bounds = torch.arange(experts + 1, device=indices.device, dtype=keys.dtype)
    return order.int(), torch.searchsorted(keys, bounds, out_int32=True)


def inverse_of(order: Tensor) -> Tensor:
    """Where in `order` each pair is, int64. Nothing is scattered: compiled for a CPU, PyTorch 2.13 reads such a result
    before it is written."""
    return order.argsort()
