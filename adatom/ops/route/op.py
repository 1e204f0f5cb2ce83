"""Routing for PyTorch: schemas, fakes, and autograd to any order. Imports torch only.

The gradient of a gradient is that of the formula that the reference has for it.
"""

from __future__ import annotations

from typing import Any

import torch

from adatom.operators import differentiable, on_device
from adatom.ops.route import reference
from adatom.ops.route.problem import Options, problem, wide_dtype
from adatom.registry import choose, load

Tensor = torch.Tensor
_OPTIONS = (
    "int top_k, str scoring, bool renormalize, int groups, int kept, int best, float scale, bool biased, str? backend"
)
_library = torch.library.Library("adatom", "FRAGMENT")
_library.define(f"route_fwd(Tensor logits, Tensor? selection_bias, {_OPTIONS}) -> (Tensor weights, Tensor indices)")
_library.define(f"route_bwd(Tensor logits, Tensor indices, Tensor dweights, {_OPTIONS}) -> Tensor dlogits")


def flat(o: Options) -> tuple[Any, ...]:
    """The options as the operators take them."""
    return *o[:3], *o.groups, o.scale, o.biased


def _options(top_k: int, scoring: str, renormalize: bool, n: int, kept: int, best: int, *rest: Any) -> Options:
    return Options(top_k, scoring, renormalize, (n, kept, best), *rest)


def _launch(which: str, tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
    *options, backend = rest
    o = _options(*options)
    launch = load(choose(which, problem(tensors[0], o), backend).target)
    return on_device(launch, tensors[0], *tensors, o)


def planned(logits: Tensor, o: Options, backend: str | None) -> Any:
    """A function of logits like these, and a selection bias where there is one, without gradients: PyTorch's dispatcher
    and the choice of a kernel cost the host more time than the kernel takes."""
    launch = load(choose("route_fwd", problem(logits, o), backend).target)
    return lambda logits, bias: on_device(launch, logits, logits, bias, o)


def _fwd(*args: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _launch("route_fwd", args[:2], args[2:])
    return found


def _bwd(*args: Any) -> Tensor:
    dlogits: Tensor = _launch("route_bwd", args[:3], args[3:])[0]
    return dlogits


def _fake_fwd(logits: Tensor, selection_bias: Tensor | None, top_k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=wide_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


def _fake_bwd(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


for _name, _impl, _fake in (("route_fwd", _fwd, _fake_fwd), ("route_bwd", _bwd, _fake_bwd)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _key)
    torch.library.register_fake(f"adatom::{_name}", _fake, lib=_library)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.options = inputs[2:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dweights: Tensor | None, _: Any) -> tuple[Any, ...]:
    dlogits = None
    if dweights is not None and ctx.needs_input_grad[0]:
        logits, indices = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            dlogits = reference.backward(logits, indices, dweights, _options(*ctx.options[:-1]))[0]
        else:
            dlogits = torch.ops.adatom.route_bwd(logits, indices, dweights, *ctx.options)
    return dlogits, *(None,) * (1 + len(ctx.options))


route_fwd = differentiable(_library, "route_fwd", _backward, _save)
