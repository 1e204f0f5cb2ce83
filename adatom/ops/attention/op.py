"""Attention for PyTorch: operator schemas, fakes, and autograd to second order. Imports torch only.

Three Functions make the chain forward -> backward -> double backward. `out` and `lse` ride along as values: the
formulas of the second derivative already contain their dependence on the inputs (docs/double_backward.md), so they get
no gradient. A third derivative raises. Forward mode is a Function too, so that reverse mode can go over it.
torch.compile takes operators of its own, whose formulas say the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from adatom.operators import absent, on_device, vmap_rule
from adatom.ops.attention.problem import (
    Inputs,
    Options,
    Remembered,
    aligned,
    empty_like,
    empty_lse,
    empty_out,
    in_rows,
    problem,
)
from adatom.registry import choose, load
from adatom.signature import signature, watched
from adatom.tiles.first import together

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? kv_lens, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
_OPTIONS = (
    "float scale, bool causal, SymInt window_left, SymInt window_right, float softcap, str precision, str? backend"
)
_GRADS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks"

_library = torch.library.Library("adatom", "FRAGMENT")
_library.define(f"attention_fwd({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_bwd({_TENSORS}, {_OPTIONS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool bias_grad)"
    f" -> {_GRADS})"
)
_library.define(
    f"attention_bwd_bwd({_TENSORS}, {_OPTIONS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    "Tensor? ddq, Tensor? ddk, Tensor? ddv, Tensor? ddbias, Tensor? ddsinks, bool bias_grad)"
    f" -> {_GRADS}, Tensor ddout, Tensor ddlse)"
)
# The first two again as torch.compile takes them: it refuses a Function with a jvp, and traces no derivative of its
# backward. These bring their formulas with them (below), which takes more of the host's time.
_library.define(f"attention({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_grad({_TENSORS}, {_OPTIONS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool bias_grad)"
    f" -> {_GRADS})"
)
_library.define(
    f"attention_jvp({_TENSORS}, {_OPTIONS}, Tensor out, Tensor lse, "
    "Tensor? tq, Tensor? tk, Tensor? tv, Tensor? tbias, Tensor? tsinks) -> (Tensor tout, Tensor tlse)"
)

_N_INPUTS = len(Inputs._fields)
_N_OPTIONS = len(Options._fields)
_N_CALL = _N_INPUTS + _N_OPTIONS + 1  # the tensors, the options, the backend


_ready: dict[Any, tuple[Any, dict[str, Any]]] = {}  # signature of a call -> its launcher, and the launcher's memo


def ready(
    key: Any, op: str, tensors: tuple[Any, ...], o: Options, backend: str | None, bias_grad: bool
) -> tuple[Any, dict[str, Any]]:
    """The launcher for a call whose signature is `key`, and the memo that its calls share."""
    found = _ready.get(key)
    if found is None:
        if len(_ready) >= 4096:  # lengths that never repeat must not fill the memory
            _ready.clear()
        found = _ready[key] = load(choose(op, problem(Inputs(*tensors), o, bias_grad), backend).target), {}
    return found


def _run(op: str, args: tuple[Any, ...], bias_grad: bool = False) -> tuple[torch.Tensor | None, ...]:
    """Choose a row for the call that `args` begins with, and launch it with the rest of `args`."""
    tensors, numbers, rest = args[:_N_INPUTS], args[_N_INPUTS:_N_CALL], args[_N_CALL:]
    o, backend = Options(*numbers[:-1]), numbers[-1]
    key = signature(tensors + rest, cpu=True)
    if key is None:
        x = Inputs(*tensors)
        launch = load(choose(op, problem(x, o, bias_grad), backend).target)
    else:
        launch, memo = ready((op, key, numbers), op, tensors, o, backend, bias_grad)
        x = Remembered.of(tensors, memo)
        if not memo:
            memo["called"] = True
            return on_device(together, x.q, launch, x, o, *rest)
    return on_device(launch, x.q, x, o, *rest)


def _fwd(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _run("attention_fwd", args)  # type: ignore[return-value]


def _grads(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """attention_bwd, with None for what nobody asked for."""
    *head, dout, dlse, bias_grad = args
    dout = aligned(in_rows(dout)) if dout.is_cuda else in_rows(dout)
    return _run("attention_bwd", (*head, dout, dlse, bias_grad), bias_grad)


def _as_faked(q: torch.Tensor, grads: Any) -> tuple[torch.Tensor, ...]:
    """Gradients as fakes promise them: a tensor for None, and that of the bias contiguous, as kernels write it."""
    dbias = None if grads[3] is None else grads[3].contiguous()
    return tuple(absent(q) if g is None else g for g in (*grads[:3], dbias, *grads[4:]))


def _bwd(*args: Any) -> tuple[torch.Tensor, ...]:
    return _as_faked(args[0], _grads(*args))


def _bwd_bwd(*args: Any) -> tuple[torch.Tensor, ...]:
    call, (out, lse, dout, dlse, *cotangents, bias_grad) = args[:_N_CALL], args[_N_CALL:]
    cotangents = [c if c is None else in_rows(c) for c in cotangents]
    grads = _run("attention_bwd_bwd", (*call, out, lse, in_rows(dout), dlse, *cotangents, bias_grad), bias_grad)
    return _as_faked(args[0], grads)


def _jvp(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, (out, lse, *tangents) = args[:_N_CALL], args[_N_CALL:]
    moved = (t if t is None else in_rows(t) for t in tangents)
    return _run("attention_jvp", (*call, out, lse, *moved))  # type: ignore[return-value]


def _fake_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_out(q, v), empty_lse(q)


def _fake_bwd(*args: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, bias, sinks = args[:5]
    dbias = bias.new_empty(bias.shape) if bias is not None and args[-1] else absent(q)
    return empty_like(q), empty_like(k), empty_like(v), dbias, absent(q) if sinks is None else empty_like(sinks)


def _fake_bwd_bwd(*args: Any) -> tuple[torch.Tensor, ...]:
    return *_fake_bwd(*args), empty_out(args[0], args[2]), empty_lse(args[0])


for _name, _impl, _fake in (
    ("attention_fwd", _fwd, _fake_fwd),
    ("attention_bwd", _bwd, _fake_bwd),
    ("attention_bwd_bwd", _bwd_bwd, _fake_bwd_bwd),
    ("attention_jvp", _jvp, _fake_fwd),
    ("attention", _fwd, _fake_fwd),
    ("attention_grad", _bwd, _fake_bwd),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _key)
    torch.library.register_fake(f"adatom::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"adatom::{_name}", vmap_rule(_name), lib=_library)

_ops = torch.ops.adatom
attention_fwd = _ops.attention_fwd.default
attention_bwd = _ops.attention_bwd.default
attention_bwd_bwd = _ops.attention_bwd_bwd.default
attention_jvp = _ops.attention_jvp.default
attention_compiled = _ops.attention.default


class Attention(Function):
    """(q, k, v, bias, sinks, kv_lens, cu_seqlens_q, cu_seqlens_k, *options, backend) -> (out, lse)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return attention_fwd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors = (*inputs[:_N_INPUTS], *output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.options = inputs[_N_INPUTS:_N_CALL]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        return _backward_of_attention(ctx, dout, dlse, AttentionBackward.apply)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *inputs, out, lse = ctx.saved_tensors
        return AttentionJvp.apply(*inputs, *ctx.options, out.detach(), lse.detach(), *tangents[:5])


class PlannedAttention(Function):
    """(plan, q, k, v[, bias, sinks, kv_lens]) -> out, or (out, lse) if plan.return_lse.

    Attention for eager mode, where the host's time counts. plan computes (out, lse) of these tensors.
    """

    @staticmethod
    def forward(ctx: Any, plan: Any, *tensors: Any) -> Any:
        out, lse = plan(*tensors)
        ctx.save_for_backward(*tensors, *plan.absent, out, lse)
        ctx.options = plan.options
        ctx.set_materialize_grads(False)
        return (out, lse) if plan.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        differentiate: Any = attention_bwd
        if _further():
            differentiate = partial(apply, AttentionBackward)
        elif not watched() and signature((dout, dlse), cpu=True) is not None:
            differentiate = _grads  # past the dispatcher
        grads = _backward_of_attention(ctx, dout, dlse, differentiate, 1)
        return None, *grads[: len(ctx.needs_input_grad) - 1]


def _further() -> bool:
    """Whether what a backward returns is to be differentiated again."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def apply(function: type[Function], *args: Any) -> Any:
    """function.apply(*args). It binds arguments by name for functorch; without functorch this takes half the time."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


apply_planned = super(Function, PlannedAttention).apply


def _backward_of_attention(ctx: Any, dout: Any, dlse: Any, differentiate: Any, first: int = 0) -> Any:
    """The gradients of all arguments of Attention; `differentiate` is attention_bwd, or the Function around it.

    first: which argument of the Function is q.
    """
    *inputs, out, lse = ctx.saved_tensors
    nothing = (None,) * len(ctx.options)
    if dout is None and dlse is None:
        return (None,) * _N_INPUTS + nothing
    if dout is None:
        dout = torch.zeros_like(out)
    bias_grad = inputs[3] is not None and ctx.needs_input_grad[first + 3]
    if _further():
        out, lse = out.detach(), lse.detach()
    grads = differentiate(*inputs, *ctx.options, out, lse, dout, dlse, bias_grad)
    dq, dk, dv, dbias, dsinks = grads
    sinks_grad = inputs[4] is not None and ctx.needs_input_grad[first + 4]
    dbias, dsinks = dbias if bias_grad else None, dsinks if sinks_grad else None
    return dq, dk, dv, dbias, dsinks, None, None, None, *nothing


class AttentionJvp(Function):
    """(the inputs and options of Attention, out, lse, tq, tk, tv, tbias, tsinks) -> (tout, tlse)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return attention_jvp(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors = (*inputs[:_N_INPUTS], *inputs[_N_CALL:])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.options = inputs[_N_INPUTS:_N_CALL]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        inputs, (out, lse, *tangents) = saved[:_N_INPUTS], saved[_N_INPUTS:]
        grads: list[Any] = [None] * len(needed)
        if dout is None and dlse is None:
            return tuple(grads)
        dout = torch.zeros_like(out) if dout is None else dout
        head = (*inputs, *ctx.options, out, lse, dout, dlse)
        if any(needed[:5]):  # the derivative by the inputs along the tangents: the second derivative is symmetric
            grads[:5] = differentiate_twice(*head, *tangents, needed[3])[:5]
        if any(needed[-5:]):  # linear in the tangents
            grads[-5:] = AttentionBackward.apply(*head, needed[-2])
        return tuple(g if need else None for g, need in zip(grads, needed))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved, moved = ctx.saved_tensors, tangents[-5:]
        if any(t is not None for t in tangents[:5]):
            raise RuntimeError("adatom: forward mode over forward mode is not implemented; use reverse mode for one")
        return AttentionJvp.apply(*saved[:_N_INPUTS], *ctx.options, *saved[_N_INPUTS : _N_INPUTS + 2], *moved)


class AttentionBackward(Function):
    """(the inputs and options of Attention, out, lse, dout, dlse, bias_grad) -> (dq, dk, dv, dbias, dsinks)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return attention_bwd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors = (*inputs[:_N_INPUTS], *inputs[_N_CALL : _N_CALL + 4])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.options, ctx.bias_grad = inputs[_N_INPUTS:_N_CALL], inputs[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _backward_of_backward(ctx, cotangents, differentiate_twice if _further() else attention_bwd_bwd)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        tdout, tdlse = tangents[_N_CALL + 2 : _N_CALL + 4]
        return _tangent_of_backward(ctx, tangents[:5], tdout, tdlse, ctx.bias_grad)


def _tangent_of_backward(ctx: Any, moved: Any, tdout: Any, tdlse: Any, bias_grad: bool) -> tuple[Any, ...]:
    """How the gradients move as the inputs move along `moved`, dout and dlse along tdout and tdlse."""
    *inputs, out, lse, dout, dlse = ctx.saved_tensors
    call = (*inputs, *ctx.options, out, lse)
    parts = []
    if any(t is not None for t in moved):  # the Hessian is symmetric: its product with the tangents
        parts.append(differentiate_twice(*call, dout, dlse, *moved, bias_grad)[:5])
    if tdout is not None or tdlse is not None:  # linear in (dout, dlse)
        tdout = torch.zeros_like(out) if tdout is None else tdout
        parts.append(AttentionBackward.apply(*call, tdout, tdlse, bias_grad))
    return tuple(sum(p[1:], p[0]) for p in zip(*parts))


def _of_shapes(gradients: Any, inputs: Any) -> list[Any]:
    """Of these gradients of bias and sinks those that there are: what stands for one may be differentiated too."""
    return [g if g is not None and t is not None and g.shape == t.shape else None for g, t in zip(gradients, inputs)]


def _backward_of_backward(ctx: Any, cotangents: tuple[Any, ...], differentiate: Any) -> Any:
    """The gradients of all arguments of AttentionBackward; `differentiate` is attention_bwd_bwd, or the Function around
    it."""
    *inputs, out, lse, dout, dlse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    if all(c is None for c in cotangents):
        return (None,) * len(needed)
    ddq, ddk, ddv, *rest = cotangents
    ddbias, ddsinks = _of_shapes(rest, inputs[3:5])
    grads = differentiate(*inputs, *ctx.options, out, lse, dout, dlse, ddq, ddk, ddv, ddbias, ddsinks, needed[3])
    dq, dk, dv, dbias, dsinks, ddout, ddlse = grads
    dbias, dsinks = dbias if needed[3] else None, dsinks if needed[4] else None
    return dq, dk, dv, dbias, dsinks, *(None,) * (_N_CALL - 3), ddout, None if dlse is None else ddlse, None


def _save_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:_N_INPUTS], *output)
    ctx.options = inputs[_N_INPUTS:]
    ctx.set_materialize_grads(False)


torch.library.register_autograd(
    "adatom::attention",
    lambda ctx, dout, dlse: _backward_of_attention(ctx, dout, dlse, _ops.attention_grad.default),
    setup_context=_save_attention,
    lib=_library,
)
torch.library.register_autograd(
    "adatom::attention_grad",
    lambda ctx, *cotangents: _backward_of_backward(ctx, cotangents, differentiate_twice),
    setup_context=AttentionBackward.setup_context,
    lib=_library,
)


class AttentionBackwardBackward(Function):
    """(the inputs and options of Attention, out, lse, dout, dlse, ddq, ddk, ddv, ddbias, ddsinks, bias_grad) ->
    (dq, dk, dv, dbias, dsinks, ddout, ddlse), the second derivative. It is linear in the cotangents of the first, and
    differentiable by them, which is all that a Hessian's product with a vector by two reverse modes wants; that
    derivatives by the rest raise is up to `differentiate_twice`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return attention_bwd_bwd(*args)

    setup_context = AttentionBackward.setup_context

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        needed = ctx.needs_input_grad
        grads: list[Any] = [None] * len(needed)
        *moved, tdout, tdlse = cotangents
        moved[3:] = _of_shapes(moved[3:], ctx.saved_tensors[3:5])
        if any(needed[-6:-1]) and any(c is not None for c in (*moved, tdout, tdlse)):
            grads[-6:-1] = _tangent_of_backward(ctx, moved, tdout, tdlse, needed[-3])
        return tuple(g if need else None for g, need in zip(grads, needed))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("adatom: forward mode over the second derivative of attention is not implemented")


class Twice(Function):
    """Its argument, which has been differentiated by twice: derivatives by it raise from here on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dx: Any) -> Any:
        raise RuntimeError("adatom: third derivatives of attention are not implemented")

    jvp = backward


def differentiate_twice(*args: Any) -> Any:
    """AttentionBackwardBackward, of which only derivatives by the cotangents may be asked for."""
    out, lse, dout, dlse, *cotangents = args[_N_CALL:]
    *inputs, dout, dlse = (x if x is None else apply(Twice, x) for x in (*args[:5], dout, dlse))
    return apply(AttentionBackwardBackward, *inputs, *args[5:_N_CALL], out, lse, dout, dlse, *cotangents)
