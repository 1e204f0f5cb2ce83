"""linear and gated for PyTorch: operator schemas, fakes, and autograd to any order. Imports torch only.

linear_bwd is differentiable in turn: its formula is a composition of differentiable operators on z, computed again. The
tensors that a forward keeps for its backward ride along as values: that formula contains their dependence on the
inputs, so they get no gradient.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from adatom.operators import absent, differentiable, on_device
from adatom.ops.linear.problem import Inputs, Options, problem, rows_of, suits_tma
from adatom.ops.linear.reference import gradient, gradient_gradient
from adatom.registry import choose, load
from adatom.signature import PLAIN, overseen

Tensor = torch.Tensor
_CALL = "Tensor x, Tensor weight, Tensor? up, Tensor? bias, str activation, bool gated, str precision, str? backend"
_library = torch.library.Library("adatom", "FRAGMENT")
# into: where the backward is to add the gradient of the weight; the forward only remembers it.
_library.define(f"linear_fwd({_CALL}, bool keep, Tensor? into) -> (Tensor out, Tensor pre)")
_library.define(
    f"linear_bwd({_CALL}, Tensor? kept, Tensor dout, bool need_x, bool need_weight, bool need_bias)"
    " -> (Tensor dx, Tensor dweight, Tensor dup, Tensor dbias)"
)
_library.define(
    f"linear_bwd_into({_CALL}, Tensor? kept, Tensor dout, bool need_x, bool need_bias, Tensor(a!) into)"
    " -> (Tensor dx, Tensor dbias)"
)


def _taken(args: tuple[Any, ...]) -> tuple[Inputs, Options, str | None]:
    """What the arguments of _CALL are to a launcher: x a matrix."""
    x, weight, up, bias, activation, gated, precision, backend = args
    return Inputs(rows_of(x), weight, up, bias), Options(activation, gated, precision), backend


def _launch(which: str, x: Inputs, o: Options, backend: str | None, *rest: Any) -> tuple[Tensor | None, ...]:
    op = ("gated_" if o.gated else "linear_") + which
    launch = load(choose(op, problem(x, o, which == "bwd" and rest[0] is None), backend).target)
    found: tuple[Tensor | None, ...] = on_device(launch, x.x, x, o, *rest)
    return found


def planned(x: Inputs, o: Options, backend: str | None) -> Any:
    """A function of inputs like these, without gradients, for which the choice of a kernel is made."""
    launch = load(choose("gated_fwd" if o.gated else "linear_fwd", problem(x, o), backend).target)
    return lambda inputs: on_device(launch, inputs.x, inputs, o, False)[0]


def _fwd(*args: Any) -> tuple[Tensor, Tensor]:
    x, o, backend = _taken(args[:8])
    out, pre = _launch("fwd", x, o, backend, args[8])
    assert out is not None
    # no view to autograd, which would refuse to change a Function's view in place
    out = torch.ops.aten._unsafe_view(out, (*args[0].shape[:-1], out.shape[-1]))
    return out, absent(out) if pre is None else pre


def _bwd(*args: Any, spend: bool = False) -> tuple[Tensor, ...]:
    *call, kept, dout, need_x, need_weight, need_bias = args
    return _differentiate(call, kept, dout, (need_x, need_weight, need_bias), None, spend)


def _bwd_into(*args: Any, spend: bool = False) -> tuple[Tensor, Tensor]:
    *call, kept, dout, need_x, need_bias, into = args
    grads = _differentiate(call, kept, dout, (need_x, True, need_bias), into, spend)
    return grads[0], grads[3]


def _differentiate(
    call: Any, kept: Tensor | None, dout: Tensor, needs: Any, into: Tensor | None, spend: bool
) -> tuple[Tensor, ...]:
    x, o, backend = _taken(tuple(call))
    dout = rows_of(dout)
    if not (suits_tma(dout) or dout.is_contiguous() and dout.data_ptr() % 16 == 0):
        dout = dout.clone(memory_format=torch.contiguous_format)
    if kept is not None:
        kept = rows_of(kept)
        if spend:  # a backward that fails after this must not be repeated with what is left
            torch.autograd.graph.increment_version(kept)
    grads = _launch("bwd", x, o, backend, kept, dout, needs, into, spend)
    dx, *rest = (absent(x.x) if g is None else g for g in grads)
    return dx.view(call[0].shape) if needs[0] else dx, *rest


def _fake_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    x, weight, up, _, activation, gated, precision, _, keep, _ = args
    products = Inputs(x, weight, up).products
    out = x.new_empty(*x.shape[:-1], products // 2 if gated else products)
    kept = keep and Options(activation, gated, precision).keeps == "pre"
    return out, x.new_empty(math.prod(x.shape[:-1]), products) if kept else absent(x)


def _fake_bwd(*args: Any) -> tuple[Tensor, ...]:
    x, weight, up, bias = args[:4]
    needs = (args[10], args[11], args[11] and up is not None, args[12] and bias is not None)
    return tuple(absent(x) if not need else like.new_empty(like.shape) for need, like in zip(needs, args[:4]))


def _fake_bwd_into(*args: Any) -> tuple[Tensor, Tensor]:
    x, bias = args[0], args[3]
    return x.new_empty(x.shape) if args[10] else absent(x), bias.new_empty(bias.shape) if args[11] else absent(x)


for _name, _impl, _fake in (
    ("linear_fwd", _fwd, _fake_fwd),
    ("linear_bwd", _bwd, _fake_bwd),
    ("linear_bwd_into", _bwd_into, _fake_bwd_into),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _key)
    torch.library.register_fake(f"adatom::{_name}", _fake, lib=_library)


def _save_forward(ctx: Any, inputs: Any, output: Any) -> None:
    *call, keep, into = inputs
    keeps = Options(*call[4:7]).keeps if keep else ""
    kept = {"out": output[0], "pre": output[1]}.get(keeps)
    ctx.save_for_backward(*call[:4], kept)
    ctx.options, ctx.into = call[4:], into
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Any, ...]:
    return _gradients(ctx, dout, linear_bwd, linear_bwd_into)


def _gradients(ctx: Any, dout: Tensor | None, bwd: Any, bwd_into: Any) -> tuple[Any, ...]:
    """The gradients of all arguments of linear_fwd, by linear_bwd and linear_bwd_into or what does the same."""
    *tensors, kept = ctx.saved_tensors
    nothing = (None,) * 6
    if dout is None:
        return (None,) * 4 + nothing
    need_x, need_weight, need_up, need_bias = ctx.needs_input_grad[:4]
    kept = None if kept is None else kept.detach()
    if ctx.into is not None and need_weight:
        if torch.is_grad_enabled():
            raise RuntimeError("adatom: gradients added to weight_grad cannot be differentiated again")
        if torch._C._functorch.is_legacy_batchedtensor(dout):  # by is_grads_batched
            raise NotImplementedError("adatom: weight_grad takes no batch of gradients (is_grads_batched)")
        dx, dbias = bwd_into(*tensors, *ctx.options, kept, dout, need_x, need_bias, ctx.into)
        dweight = dup = None
    else:
        grads = bwd(*tensors, *ctx.options, kept, dout, need_x, need_weight or need_up, need_bias)
        dx, dweight, dup, dbias = grads
    return (
        dx if need_x else None,
        dweight if need_weight else None,
        dup if need_up else None,
        dbias if need_bias else None,
        *nothing,
    )


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], inputs[9])
    ctx.options, ctx.wants = inputs[4:8], inputs[10:]
    ctx.set_materialize_grads(False)


def _backward_of_backward(ctx: Any, ddx: Any, ddweight: Any, ddup: Any, ddbias: Any) -> tuple[Any, ...]:
    """The gradients of x, the weights, the bias and dout from those of dx, dweight, dup and dbias.

    ddz = ddx W^T + x ddW^T + ddb is the gradient of dz = dz(z, dout); what it leaves on z goes on as in a backward.
    PyTorch would multiply float32 on a GPU as torch.backends.cuda.matmul says, not as precision does.
    """
    x, weight, up, bias, dout = ctx.saved_tensors
    want_x, want_weight, want_bias = ctx.wants  # what stands for the others has no shape
    ddx, ddbias = ddx if want_x else None, ddbias if want_bias else None
    ddweight, ddup = (ddweight, ddup) if want_weight else (None, None)
    o, backend = Options(*ctx.options[:3]), ctx.options[3]
    lead, wide = x.shape[:-1], torch.promote_types(x.dtype, torch.float32)
    n, single = weight.shape[0], x.dtype == torch.float32

    def product(a: Tensor, b: Tensor) -> Tensor:  # a b^T
        return linear(a, b, None, None, "none", False, o.precision, backend, False, None) if single else a @ b.mT

    x, dout = rows_of(x), rows_of(dout)
    whole = weight if up is None else torch.cat((weight, up))
    if up is not None and not (ddweight is None and ddup is None):
        parts = (torch.zeros_like(w) if d is None else d for d, w in ((ddweight, weight), (ddup, up)))
        ddweight = torch.cat(tuple(parts))
    products = []
    if ddx is not None:
        ddx = ddx.reshape(x.shape)
        products.append(product(ddx, whole))
    if ddweight is not None:
        products.append(product(x, ddweight))
    if ddbias is not None and bias is not None:
        products.append(ddbias.expand(x.shape[0], n))
    if not products:
        return (None,) * 13
    ddz = sum(p.to(wide) for p in products[1:]) + products[0].to(wide)
    z = linear(x, whole, None, bias, "none", False, o.precision, backend, False, None).to(wide)
    ddout, through = gradient_gradient(z, dout.to(wide), ddz, o)
    dz, through = gradient(z, dout.to(wide), o).to(x.dtype), through.to(x.dtype)
    dx = product(through, whole.mT) if o.keeps else torch.zeros_like(x)
    dwhole = product(through.mT, x.mT) if o.keeps else torch.zeros_like(whole)
    if ddweight is not None:
        dx = dx + product(dz, ddweight.mT)
    if ddx is not None:
        dwhole = dwhole + product(dz.mT, ddx.mT)
    grads = (dx.reshape(*lead, x.shape[1]), dwhole[:n], None if up is None else dwhole[n:])
    dbias = None if bias is None else through.sum(0)
    return *grads, dbias, *(None,) * 5, ddout.to(x.dtype).reshape(*lead, dout.shape[1]), None, None, None


linear_fwd = differentiable(_library, "linear_fwd", _backward, _save_forward)
linear_bwd = differentiable(_library, "linear_bwd", _backward_of_backward, _save_backward)
linear_bwd_into = torch.ops.adatom.linear_bwd_into.default


class Linear(torch.autograd.Function):
    """The arguments of linear_fwd -> out. For eager mode, where the host's time counts: past PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        results = _fwd(*args)
        _save_forward(ctx, args, results)
        # nobody but this node has it: hooks of saved tensors may hand it to others
        ctx.own = results[1].numel() > 0 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return results[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        # to be differentiated again, or a batch
        if torch.is_grad_enabled() or dout is not None and not _has_memory(dout):
            return _backward(ctx, dout, None)
        # dz goes to the place of what was kept, if that is not needed again: the graph is freed after this backward
        spend = ctx.own and not (
            torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
        )
        return _gradients(ctx, dout, partial(_bwd, spend=spend), partial(_bwd_into, spend=spend))


def _has_memory(x: Tensor) -> bool:
    """Whether x is what it seems: not a negated view, nor one of many gradients in a batch (is_grads_batched)."""
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return not x.is_neg()


_apply = super(torch.autograd.Function, Linear).apply  # without binding arguments for functorch


def linear(*args: Any) -> Tensor:
    """out of linear_fwd, by the shortest way: plain tensors in eager mode need no operator."""
    x = args[0]
    if (
        overseen()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or not (x.is_cuda or x.is_cpu)
        or any(t is not None and (type(t) not in PLAIN or t.is_neg()) for t in args[:4])
    ):
        return linear_fwd(*args)[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:4]):
        return _apply(*args)
    return _fwd(*args)[0]
