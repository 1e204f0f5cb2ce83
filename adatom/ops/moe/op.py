"""moe for PyTorch: operator schemas, fakes, and autograd to any order. Imports torch only.

moe_bwd is differentiable in turn. Its formula is a composition of differentiable operators: moe_grouped and moe_outer,
each of which is the other's derivative, gathers, and linear's formulas of a gate. What a forward keeps for its backward
rides along as values: that formula contains its dependence on the inputs, so it gets no gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from adatom.operators import absent, differentiable, on_device
from adatom.ops.linear.reference import gradient, gradient_gradient, value
from adatom.ops.moe.problem import Inputs, Options, inverse_of, present, problem
from adatom.ops.moe.torch_grouped import grouped, outer
from adatom.registry import choose, load

Tensor = torch.Tensor
_CALL = "Tensor x, Tensor weights, Tensor indices, Tensor w_gate_up, Tensor w_down, str activation, str? backend"
_library = torch.library.Library("adatom", "FRAGMENT")
_library.define(f"moe_fwd({_CALL}, bool keep) -> (Tensor out, Tensor pre, Tensor order, Tensor offsets)")
_library.define(
    f"moe_bwd({_CALL}, Tensor? pre, Tensor order, Tensor offsets, Tensor dout, bool need_x, bool need_weights,"
    " bool need_gate_up, bool need_down) -> (Tensor dx, Tensor dweights, Tensor dw_gate_up, Tensor dw_down)"
)
_library.define("moe_grouped(Tensor x, Tensor weight, Tensor offsets) -> Tensor")
_library.define("moe_outer(Tensor a, Tensor b, Tensor offsets) -> Tensor")


def _launch(which: str, x: Inputs, activation: str, backend: str | None, *rest: Any) -> Any:
    o = Options(activation)
    launch = load(choose(which, problem(x, o, which == "moe_bwd" and rest[0] is None), backend).target)
    return on_device(launch, x.x, x, o, *rest)


def planned(x: Inputs, activation: str, backend: str | None) -> Any:
    """A function of inputs like these, without gradients: PyTorch's dispatcher and the choice of a kernel cost the host
    more time than small kernels take."""
    o = Options(activation)
    launch = load(choose("moe_fwd", problem(x, o), backend).target)
    return lambda inputs: on_device(launch, inputs.x, inputs, o, False)[0]


def _fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, pre, order, offsets = _launch("moe_fwd", Inputs(*args[:5]), *args[5:])
    return out, absent(out) if pre is None else pre, order, offsets


def _bwd(*args: Any) -> tuple[Tensor, ...]:
    *call, pre, order, offsets, dout = args[:11]
    grads = _launch("moe_bwd", Inputs(*call[:5]), *call[5:], pre, order, offsets, dout.contiguous(), args[11:])
    return tuple(absent(dout) if g is None else g for g in grads)


def _fake_fwd(*args: Any) -> tuple[Tensor, ...]:
    x, _, indices, w_gate_up = args[:4]
    pairs, experts = indices.numel(), w_gate_up.shape[0]
    pre = x.new_empty(pairs, w_gate_up.shape[1]) if args[7] else absent(x)
    ints = {"dtype": torch.int32}
    return x.new_empty(x.shape), pre, indices.new_empty(pairs, **ints), indices.new_empty(experts + 1, **ints)


def _fake_bwd(*args: Any) -> tuple[Tensor, ...]:
    given = (args[0], args[1], args[3], args[4])
    return tuple(t.new_empty(t.shape) if need else absent(args[10]) for need, t in zip(args[11:], given))


def _fake_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1])


for _name, _impl, _fake in (
    ("moe_fwd", _fwd, _fake_fwd),
    ("moe_bwd", _bwd, _fake_bwd),
    ("moe_grouped", grouped, lambda x, weight, offsets: x.new_empty(x.shape[0], weight.shape[1])),
    ("moe_outer", outer, _fake_outer),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _key)
    torch.library.register_fake(f"adatom::{_name}", _fake, lib=_library)


def _save_forward(ctx: Any, inputs: Any, output: Any) -> None:
    pre, order, offsets = output[1:]
    ctx.save_for_backward(*inputs[:5], pre if inputs[7] else None, order, offsets)
    ctx.options = inputs[5:7]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
    *tensors, pre, order, offsets = ctx.saved_tensors
    if dout is None:
        return (None,) * 8
    x, weights, _, gate_up, down = needs = ctx.needs_input_grad[:5]
    pre = None if pre is None else pre.detach()
    grads = moe_bwd(*tensors, *ctx.options, pre, order, offsets, dout, x, weights, gate_up, down)
    dx, dweights, dw_gate_up, dw_down = grads
    found = (dx, dweights, None, dw_gate_up, dw_down)
    return *(g if need else None for g, need in zip(found, needs)), None, None, None


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5], *inputs[8:11])
    ctx.activation, ctx.wants = inputs[5], inputs[11:]
    ctx.set_materialize_grads(False)


def _backward_of_backward(ctx: Any, cx: Any, cweights: Any, cgate_up: Any, cdown: Any) -> tuple[Any, ...]:
    """The gradients of x, weights, w_gate_up, w_down and dout from those of dx, dweights, dw_gate_up and dw_down.

    Per pair, with X, D and C the rows of x, dout and cx, and h, a, v as in reference.py: of dh comes
    ddh = C W^T + X cgate_up^T, and of w a comes q = D cdown; what they leave on h, v and w goes on as in a backward.
    """
    x, weights, indices, w_gate_up, w_down, order, offsets, dout = ctx.saved_tensors
    need_x, need_weights, _, need_gate_up, need_down = ctx.needs_input_grad[:5]
    need_dout = ctx.needs_input_grad[10]
    asked = zip((cx, cweights, cgate_up, cdown), ctx.wants)  # what stands for the others has no shape
    cx, cweights, cgate_up, cdown = (c if want else None for c, want in asked)
    if all(c is None for c in (cx, cweights, cgate_up, cdown)):
        return (None,) * 15
    gate, (tokens, top_k) = Options(ctx.activation).gate, indices.shape
    inverse, dtype, wide = inverse_of(order), x.dtype, torch.promote_types(x.dtype, torch.float32)

    def rows(t: Tensor) -> Tensor:
        return t.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, t.shape[1]).index_select(0, order)

    def column(t: Tensor) -> Tensor:
        return t.reshape(-1, 1).index_select(0, order).to(wide)

    def tokenwise(t: Tensor) -> Tensor:
        return t.index_select(0, inverse).view(tokens, top_k, t.shape[1]).to(wide).sum(1).to(dtype)

    def product(t: Tensor, matrices: Tensor) -> Tensor:
        return moe_grouped(t.to(dtype), matrices, offsets)

    X, D, w = rows(x), rows(dout), column(torch.where(present(indices, w_down.shape[0]), weights, 0))
    h, v = product(X, w_gate_up).to(wide), product(D, w_down.mT).to(wide)
    a, zero = value(h, gate), torch.zeros_like(h)
    C = None if cx is None else rows(cx)
    q = None if cdown is None else product(D, cdown.mT).to(wide)
    ddh = zero if C is None else product(C, w_gate_up).to(wide)
    if cgate_up is not None:
        ddh = ddh + product(X, cgate_up).to(wide)
    dv, dz = gradient_gradient(h, w * v, ddh, gate)  # on w v, and on h through dh
    dw = (dv * v).sum(1)
    dv = w * dv
    if cweights is not None:
        cw = column(cweights)
        dv, dz = dv + cw * a, dz + gradient(h, cw * v, gate)
    if q is not None:
        dw, dz = dw + (q * a).sum(1), dz + gradient(h, w * q, gate)
    dh, dv, dz = gradient(h, w * v, gate).to(dtype), dv.to(dtype), dz.to(dtype)
    gx = gweights = ggate_up = gdown = gdout = None
    if need_x:
        dX = product(dz, w_gate_up.mT)
        gx = tokenwise(dX if cgate_up is None else dX + product(dh, cgate_up.mT))
    if need_weights:
        gweights = dw.index_select(0, inverse).view(tokens, top_k).to(weights.dtype)
    if need_gate_up:
        ggate_up = moe_outer(dz, X, offsets)
        ggate_up = ggate_up if C is None else ggate_up + moe_outer(dh, C, offsets)
    if need_down:
        gdown = moe_outer(D, dv, offsets)
    if need_dout:
        dD = product(dv, w_down)
        gdout = tokenwise(dD if cdown is None else dD + product(w * a, cdown))
    return gx, gweights, None, ggate_up, gdown, None, None, None, None, None, gdout, None, None, None, None


def _save_operands(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight, offsets), (need_x, need_weight, _) = ctx.saved_tensors, ctx.needs_input_grad
    dx = moe_grouped(dy, weight.mT, offsets) if need_x else None
    return dx, moe_outer(dy, x, offsets) if need_weight else None, None


def _outer_backward(ctx: Any, dsums: Tensor) -> tuple[Any, ...]:
    (a, b, offsets), (need_a, need_b, _) = ctx.saved_tensors, ctx.needs_input_grad
    da = moe_grouped(b, dsums, offsets) if need_a else None
    return da, moe_grouped(a, dsums.mT, offsets) if need_b else None, None


moe_fwd = differentiable(_library, "moe_fwd", _backward, _save_forward)
moe_bwd = differentiable(_library, "moe_bwd", _backward_of_backward, _save_backward)
moe_grouped = differentiable(_library, "moe_grouped", _grouped_backward, _save_operands)
moe_outer = differentiable(_library, "moe_outer", _outer_backward, _save_operands)
