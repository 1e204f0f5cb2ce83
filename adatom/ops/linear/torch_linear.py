"""linear and gated by PyTorch's own kernels, one after the other: the CPU's path, and that of plain products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from adatom.ops.linear.problem import Inputs, Options
from adatom.ops.linear.reference import weight_of

Tensor = torch.Tensor
VALUES = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
_GRADIENTS = {
    "none": lambda dout, z: dout,
    "relu": lambda dout, z: torch.ops.aten.threshold_backward(dout, z, 0),
    "gelu": lambda dout, z: torch.ops.aten.gelu_backward(dout, z),
    "gelu_tanh": lambda dout, z: torch.ops.aten.gelu_backward(dout, z, approximate="tanh"),
    "silu": lambda dout, z: torch.ops.aten.silu_backward(dout, z),
}


def preactivation(x: Inputs) -> Tensor:
    """z = x W^T + b; see reference.py."""
    if x.up is None:
        return F.linear(x.x, x.weight, x.bias)
    z = x.x.new_empty(x.x.shape[0], x.products)
    for part, weight in zip(z.split((x.weight.shape[0], x.up.shape[0]), 1), (x.weight, x.up)):
        torch.mm(x.x, weight.mT, out=part)
    return z


def forward(x: Inputs, o: Options, keep: bool) -> tuple[Tensor, Tensor | None]:
    """(out, pre); the contract is in reference.py."""
    z, pre = preactivation(x), keep and o.keeps == "pre"
    if o.gated:
        gate, up = z.chunk(2, 1)
        out = VALUES[o.activation](gate)
        return out.mul_(up) if out is not gate else out * up, z if pre else None
    return VALUES[o.activation](z), z if pre else None


def differentiable(x: Inputs, o: Options) -> Tensor:
    """out by operators that PyTorch differentiates in any mode."""
    z = F.linear(x.x, weight_of(x), x.bias)
    if not o.gated:
        return VALUES[o.activation](z)
    gate, up = z.chunk(2, 1)
    return VALUES[o.activation](gate) * up


def gradient(x: Inputs, o: Options, kept: Tensor | None, dout: Tensor) -> Tensor:
    """dz."""
    z = preactivation(x) if kept is None and o.keeps else kept
    if not o.gated:
        return _GRADIENTS[o.activation](dout, z)
    assert z is not None
    gate, up = z.chunk(2, 1)
    dz = torch.empty_like(z)
    of_gate, of_up = dz.chunk(2, 1)
    torch.mul(dout, VALUES[o.activation](gate), out=of_up)
    of_gate.copy_(_GRADIENTS[o.activation](dout * up, gate))
    return dz


def products(
    x: Inputs, dz: Tensor, needs: tuple[bool, bool, bool], into: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dup) from dz by PyTorch's products; see reference.backward."""
    n = x.weight.shape[0]
    dx = dweight = dup = None
    if needs[0]:
        dx = dz[:, :n] @ x.weight
        if x.up is not None:
            dx = dx + dz[:, n:] @ x.up
    if needs[1] and into is not None:
        _add_product(into, dz.mT, x.x)
    elif needs[1]:
        dweight = dz[:, :n].mT @ x.x
        dup = None if x.up is None else dz[:, n:].mT @ x.x
    return dx, dweight, dup


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda and a.dtype != into.dtype:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def backward(
    x: Inputs,
    o: Options,
    kept: Tensor | None,
    dout: Tensor,
    needs: tuple[bool, bool, bool],
    into: Tensor | None = None,
    spend: bool = False,
) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dup, dbias); the contract is in reference.py."""
    dz = gradient(x, o, kept, dout)
    return *products(x, dz, needs, into), dz.sum(0) if needs[2] and x.bias is not None else None
