"""act(x weight^T + bias), the gated form act(x gate^T) * (x up^T), and their derivatives in plain PyTorch: the judge.

z = x W^T + b; out = a(z), or a(z_gate) * z_up with z = (z_gate, z_up) side by side. With dz the gradient of z,

    dx = dz W,   dW = dz^T x,   db = sum of the rows of dz,   dz = dout * a'(z);
    gated: dz = (dout * z_up * a'(z_gate), dout * a(z_gate)).
"""

from __future__ import annotations

import math

import torch

from adatom.ops.linear.problem import Inputs, Options

Tensor = torch.Tensor
_BEND = math.sqrt(2 / math.pi), 0.044715  # of gelu_tanh


def activation(z: Tensor, name: str) -> Tensor:
    """a(z). gelu: z Phi(z), Phi the normal distribution's; gelu_tanh: its approximation, as in PyTorch."""
    if name == "relu":
        return z.clamp(min=0)
    if name == "gelu":
        return z * 0.5 * torch.erfc(-z * math.sqrt(0.5))
    if name == "gelu_tanh":
        return z * torch.sigmoid(2 * _BEND[0] * (z + _BEND[1] * z**3))
    return z * torch.sigmoid(z) if name == "silu" else z


def first(z: Tensor, name: str) -> Tensor:
    """a'(z); that of relu is 0 at 0."""
    if name == "relu":
        return (z > 0).to(z.dtype)
    if name == "gelu":
        return 0.5 * torch.erfc(-z * math.sqrt(0.5)) + z * _density(z)
    if name == "gelu_tanh":
        s, rest, u = _bent(z)
        return s + z * s * rest * u
    if name == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    return torch.ones_like(z)


def second(z: Tensor, name: str) -> Tensor:
    """a''(z)."""
    if name == "gelu":
        return _density(z) * (2 - z * z)
    if name == "gelu_tanh":
        s, rest, u = _bent(z)
        return s * rest * (2 * u + z * (u * u * (rest - s) + 12 * _BEND[0] * _BEND[1] * z))
    if name == "silu":
        s = torch.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))
    return torch.zeros_like(z)


def _bent(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(s, 1 - s, t') of gelu_tanh(z) = z s, s = sigmoid(t); 1 - s to full precision, which z t'^2 multiplies."""
    t = 2 * _BEND[0] * (z + _BEND[1] * z**3)
    return torch.sigmoid(t), torch.sigmoid(-t), 2 * _BEND[0] * (1 + 3 * _BEND[1] * z**2)


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def weight_of(x: Inputs) -> Tensor:
    """All rows of W."""
    return x.weight if x.up is None else torch.cat((x.weight, x.up))


def preactivation(x: Inputs) -> Tensor:
    """z: (rows, out), or (rows, 2 * out) if gated."""
    z = x.x @ weight_of(x).mT
    return z if x.bias is None else z + x.bias


def value(z: Tensor, o: Options) -> Tensor:
    """out from z."""
    if not o.gated:
        return activation(z, o.activation)
    gate, up = z.chunk(2, -1)
    return activation(gate, o.activation) * up


def gradient(z: Tensor, dout: Tensor, o: Options) -> Tensor:
    """dz from z; if the activation is relu and nothing is gated, out serves as z."""
    if not o.gated:
        return dout * first(z, o.activation)
    gate, up = z.chunk(2, -1)
    return torch.cat((dout * up * first(gate, o.activation), dout * activation(gate, o.activation)), -1)


def gradient_gradient(z: Tensor, dout: Tensor, ddz: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """(gradient of dout, gradient of z) from ddz, that of dz."""
    if not o.gated:
        return ddz * first(z, o.activation), ddz * dout * second(z, o.activation)
    (gate, up), (of_gate, of_up) = z.chunk(2, -1), ddz.chunk(2, -1)
    slope = first(gate, o.activation)
    ddout = of_gate * up * slope + of_up * activation(gate, o.activation)
    through_gate = dout * (of_gate * up * second(gate, o.activation) + of_up * slope)
    return ddout, torch.cat((through_gate, dout * of_gate * slope), -1)


def forward(x: Inputs, o: Options, keep: bool) -> tuple[Tensor, Tensor | None]:
    """(out, pre); pre is z where keep asks for it and the backward needs it, else None."""
    z = preactivation(x)
    return value(z, o), z if keep and o.keeps == "pre" else None


def backward(
    x: Inputs,
    o: Options,
    kept: Tensor | None,
    dout: Tensor,
    needs: tuple[bool, bool, bool],
    into: Tensor | None = None,
    spend: bool = False,
) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dup, dbias), None for what `needs` (of x, of the weights, of the bias) leaves out.

    kept: what the forward kept (see Options.keeps); None: it is computed again. into: float32, like W; the gradient of
    W is added to it, and dweight and dup are None. spend: kept may be overwritten.
    """
    dz = dout if o.keeps == "" else gradient(preactivation(x) if kept is None else kept, dout, o)
    dx = dz @ weight_of(x) if needs[0] else None
    dweight = dup = None
    if needs[1] and into is not None:
        into += dz.mT @ x.x
    elif needs[1]:
        dweight = dz[:, : x.weight.shape[0]].mT @ x.x
        dup = None if x.up is None else dz[:, x.weight.shape[0] :].mT @ x.x
    return dx, dweight, dup, dz.sum(0) if needs[2] and x.bias is not None else None
