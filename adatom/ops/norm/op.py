"""Normalisation for PyTorch: operator schemas, fakes, and autograd to any order. Imports torch only.

norm_bwd is differentiable in turn: its formula is composed of PyTorch's operators on the inputs, as reference.py writes
it. mean and rstd ride along as values, and so get no gradient: that formula contains their dependence on the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from adatom.operators import absent, differentiable, on_device
from adatom.ops.norm import reference
from adatom.ops.norm.problem import Tensor, problem, statistics_dtype, sum_dtype
from adatom.registry import choose, load
from adatom.signature import signature, watched

_library = torch.library.Library("adatom", "FRAGMENT")
_library.define(
    "norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centred, str? backend)"
    " -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)"
)
_library.define(
    "norm_bwd(Tensor h, Tensor? weight, Tensor? bias, Tensor dy, Tensor? dh, Tensor mean, Tensor rstd, float eps, "
    "bool centred, str? backend, bool weight_grad, bool bias_grad) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def _launch(op: str, posed: Any, backend: str | None, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """What the row chosen for a problem returns, with placeholders for what there is not."""
    found = on_device(load(choose(op, posed, backend).target), x, x, *args)
    return tuple(absent(x) if t is None else t.contiguous() for t in found)


def _posed_backward(h: Tensor, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, centred: bool) -> Any:
    """The problem of a backward whose dy is of that dtype, which stands in the place of the residual's."""
    posed = problem(h, None, weight, bias, centred)
    return posed._replace(dtypes=(h.dtype, None if dtype == h.dtype else dtype, *posed.dtypes[2:]))


def _fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    posed = problem(x, residual, weight, bias, centred)
    return _launch("norm_fwd", posed, backend, x, residual, weight, bias, eps, centred, True)


def _bwd(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, dh: Tensor | None, mean: Tensor, rstd: Tensor,
    eps: float, centred: bool, backend: str | None, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    posed, wants = _posed_backward(h, dy.dtype, weight, bias, centred), (weight_grad, bias_grad)
    given = (weight, bias, mean if centred else None, rstd, dy, dh, eps, centred, wants)
    return _launch("norm_bwd", posed, backend, h, *given)


def _fake_fwd(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, eps: float, centred: bool, _: Any) -> Any:
    h = absent(x) if residual is None else x.new_empty(x.shape, dtype=sum_dtype(x, residual))
    rstd = x.new_empty(x.shape[:-1], dtype=statistics_dtype(x.dtype if residual is None else h.dtype))
    return x.new_empty(x.shape), h, torch.empty_like(rstd) if centred else absent(x), rstd


def _fake_bwd(h: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    wanted = zip((weight, bias), rest[-2:])
    return h.new_empty(h.shape), *(t.new_empty(t.shape) if w and t is not None else absent(h) for t, w in wanted)


for _name, _impl, _fake in (("norm_fwd", _fwd, _fake_fwd), ("norm_bwd", _bwd, _fake_bwd)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _key)
    torch.library.register_fake(f"adatom::{_name}", _fake, lib=_library)


def _save_forward(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, bias, *ctx.options = inputs
    _, h, mean, rstd = output
    ctx.save_for_backward(x if residual is None else h, weight, bias, mean, rstd)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Any, ...]:
    h, weight, bias, mean, rstd = ctx.saved_tensors
    (x_dtype, residual_dtype), needs = ctx.dtypes, ctx.needs_input_grad
    dh = None if residual_dtype is None else dh
    dweight = dbias = None
    dx = dh
    if dy is not None:
        grads = norm_bwd(h, weight, bias, dy, dh, mean.detach(), rstd.detach(), *ctx.options, needs[2], needs[3])
        dx, dweight, dbias = grads
    return (
        None if dx is None else dx.to(x_dtype),
        None if dx is None or residual_dtype is None else dx.to(residual_dtype),
        dweight if needs[2] else None,
        dbias if needs[3] else None,
        *(None,) * 3,
    )


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    h, weight, bias, dy, dh, _, _, ctx.eps, ctx.centred, _, *wants = inputs
    ctx.wants = wants[0] and weight is not None, wants[1] and bias is not None
    ctx.save_for_backward(h, weight, dy)
    ctx.dh_dtype = None if dh is None else dh.dtype
    ctx.set_materialize_grads(False)


def _backward_of_backward(ctx: Any, ddx: Any, ddweight: Any, ddbias: Any) -> tuple[Any, ...]:
    h, weight, dy = ctx.saved_tensors
    ddweight = ddweight if ctx.wants[0] else None
    ddbias = ddbias if ctx.wants[1] else None
    if ddx is None and ddweight is None and ddbias is None:
        return (None,) * 12
    by_h, by_w, by_dy = reference.backward_backward(h, weight, dy, ddx, ddweight, ddbias, ctx.eps, ctx.centred)
    by_dh = ddx.to(ctx.dh_dtype) if ddx is not None and ctx.dh_dtype is not None else None
    return by_h, by_w, None, by_dy, by_dh, *(None,) * 7


norm_fwd = differentiable(_library, "norm_fwd", _backward, _save_forward)
norm_bwd = differentiable(_library, "norm_bwd", _backward_of_backward, _save_backward)


class Plan:
    """A call that was checked before, and its launchers: checks, PyTorch's dispatcher and the choice of a kernel cost
    the host more time than small kernels take."""

    def __init__(self, given: Any, eps: float, centred: bool, backend: str | None) -> None:
        x, residual, weight, bias = given
        self.options = eps, centred, backend
        self.forward = load(choose("norm_fwd", problem(x, residual, weight, bias, centred), backend).target)
        posed = _posed_backward(x, x.dtype, weight, bias, centred)
        if residual is not None:
            h = sum_dtype(x, residual)
            posed = posed._replace(dtypes=(h, None if h == x.dtype else x.dtype, *posed.dtypes[2:]))
        self.backward = load(choose("norm_bwd", posed, backend).target)

    def __call__(self, *given: Tensor | None) -> Any:
        """y and h of the tensors, differentiable if one of them wants it."""
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
            return super(Function, PlannedNorm).apply(self, *given)
        return self.run(False, *given)[:2]

    def run(self, keep: bool, x: Any, *rest: Any) -> tuple[Tensor | None, ...]:
        """y, h, mean and rstd; keep: whether a backward may follow."""
        y, h, *statistics = on_device(self.forward, x, x, *rest, *self.options[:2], keep)
        assert y is not None
        return y.contiguous(), None if h is None else h.contiguous(), *statistics


class PlannedNorm(Function):
    """(plan, x, residual, weight, bias) -> (y, h), for eager mode on a GPU."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, residual: Any, weight: Any, bias: Any) -> Any:
        y, h, mean, rstd = plan.run(True, x, residual, weight, bias)
        ctx.save_for_backward(x if h is None else h, weight, bias, mean, rstd)
        ctx.plan, ctx.dtypes = plan, (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> Any:
        h, weight, bias, mean, rstd = ctx.saved_tensors
        (eps, centred, backend), needs, dx = ctx.plan.options, ctx.needs_input_grad, dh
        dweight = dbias = None
        if dy is not None:
            if torch.is_grad_enabled() or watched() or signature((dy, dh), cpu=True) is None:
                mean = absent(h) if mean is None else mean
                grads: Any = norm_bwd(h, weight, bias, dy, dh, mean, rstd, eps, centred, backend, needs[3], needs[4])
            else:
                wants = needs[3], needs[4]
                grads = on_device(ctx.plan.backward, h, h, weight, bias, mean, rstd, dy, dh, eps, centred, wants)
            dx, dweight, dbias = grads
        x_dtype, residual_dtype = ctx.dtypes
        return (
            None,
            None if dx is None or not needs[1] else dx.to(x_dtype),
            None if dx is None or not needs[2] else dx.to(residual_dtype),
            dweight if needs[3] else None,
            dbias if needs[4] else None,
        )
