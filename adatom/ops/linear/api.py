"""The public function linear(), and the checks that gated shares with it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.autograd import forward_ad

from adatom.check import require, require_dense, require_operators, supplied
from adatom.ops.linear import op
from adatom.ops.linear.problem import ACTIVATIONS, Inputs, Options, Problem, problem, rows_of
from adatom.ops.linear.torch_linear import differentiable
from adatom.registry import require_backend
from adatom.signature import recall, remember, transformed

_plans: dict[Any, Any] = {}
PRECISIONS = ("ieee", "tf32x3", "tf32")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    recompute: bool = False,
    weight_grad: torch.Tensor | None = None,
    precision: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """activation(x weight^T + bias), in one kernel where that is faster: bias and activation in float32, then rounded.

    Elsewhere (a CPU, few rows on Hopper) PyTorch's operators compute it, which round after each step.

    Args:
        x: (..., in); float16, bfloat16, float32 or float64 (float64 runs in PyTorch). Any strides; it is copied where
            its leading dimensions cannot be taken as one.
        weight: (out, in), as torch.nn.Linear holds it, of x's dtype. bias: (out,), likewise.
        activation: None, "relu", "gelu", "gelu_tanh" (the approximation that PyTorch calls "tanh") or "silu".
        recompute: keep nothing for the backward but x and the weight: it multiplies again, and makes the gradient of
            what the activation was given in that product's epilogue.
        weight_grad: float32 (out, in), contiguous, on x's device, in memory of its own: the backward adds the gradient
            of weight to it, in float32, and weight.grad stays as it is (accumulation over micro-batches). Every
            backward through the layer adds, also one that asks for other gradients only; it cannot be differentiated
            or batched (is_grads_batched), nor can the layer in forward mode or under torch.func. Nothing is added for a
            weight that requires no gradient; one that was computed from others (or is a view, as FSDP1's may be) is
            refused, as those would get none. Nobody adds up the buffers of several processes: DDP and FSDP2 see
            weight.grad only.
        precision: of float32 products on tensor cores, as in `attention`: "tf32x3" (default), "tf32" or "ieee". In
            forward mode products are PyTorch's, which on a GPU go by torch.backends.cuda.matmul.
        backend: one backend by name (see `adatom.explain`), with no fallback. Default: the fastest that fits.

    Returns:
        (..., out) of x's dtype, contiguous. Differentiable to any order; every result is deterministic.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message prints them.
        NotImplementedError: no kernel, or not the one asked for, takes this problem; the message lists the reasons.

    Source: GELU: Hendrycks and Gimpel, arXiv:1606.08415; SiLU: Elfwing et al., arXiv:1702.03118.
    """
    if weight_grad is None:
        return checked_call((x, weight, None, bias), activation, False, recompute, precision, backend)
    require(not transformed(), "no weight_grad under torch.func, which knows of none", NotImplementedError)
    given = weight  # autocast casts it
    x, weight, _, bias, o = _checked(x, weight, None, bias, activation, False, precision)
    fits = isinstance(weight_grad, torch.Tensor) and weight_grad.dtype == torch.float32
    require(
        fits and weight_grad.is_contiguous() and weight_grad.shape == weight.shape and weight_grad.device == x.device,
        "weight_grad as a contiguous float32 tensor like weight, on x's device",
        weight=weight,
        weight_grad=weight_grad,
    )
    require(not weight_grad.requires_grad, "a weight_grad that requires no grad", weight_grad=weight_grad)
    if not torch.compiler.is_compiling():  # which sees no memory
        mine = _extent(weight_grad)
        others = [  # of one storage
            _extent(t) for t in supplied(x=x, weight=given, bias=bias).values() if torch._C._overlaps(t, weight_grad)
        ]
        apart = all(mine.start >= r.stop or r.start >= mine.stop for r in others)
        require(apart, "a weight_grad in memory of its own, not in that of x, weight or bias")
    require(given.is_leaf, "with weight_grad, a weight that is a leaf: what it is made of would get no gradient")
    return _call(x, weight, None, bias, o, backend, recompute, weight_grad)


def _extent(t: torch.Tensor) -> range:
    """The bytes of its storage that a tensor lies in."""
    begin, last = t.storage_offset() * t.itemsize, sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return range(begin, begin + (last + 1) * t.itemsize if t.numel() else begin)


def checked_call(
    tensors: tuple[Any, Any, Any, Any], activation: Any, gated: bool, recompute: bool, precision: Any, backend: Any
) -> torch.Tensor:
    """The layer on x, weight, up and bias, without checks if a call like it, which wanted no gradient, was checked."""
    x = tensors[0]
    plan, key = recall(_plans, tensors, (activation, gated, precision, backend))
    if plan is not None:
        out: torch.Tensor = plan(Inputs(rows_of(x), *tensors[1:]))
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])
    x, weight, up, bias, o = _checked(*tensors, activation, gated, precision)
    if key is not None and bias is tensors[3]:  # a plan copies nothing
        remember(_plans, key, op.planned(Inputs(rows_of(x), weight, up, bias), o, backend))
    return _call(x, weight, up, bias, o, backend, recompute)


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    o: Options,
    backend: str | None,
    recompute: bool,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator on checked arguments, keeping what its backward needs if there may be one."""
    require(backend is None or isinstance(backend, str), "a backend by name, or None", TypeError, backend=backend)
    if forward_ad._current_level >= 0:  # PyTorch's operators carry tangents
        require(into is None, "no weight_grad in forward mode, whose operators know of none", NotImplementedError)
        require_backend("gated" if o.gated else "linear", backend)
        require_operators(backend, "in forward mode")
        out = differentiable(Inputs(rows_of(x), weight, up, bias), o)
        return out.reshape(*x.shape[:-1], out.shape[-1])
    given = (x, weight, up, bias)
    keep = not recompute and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    return op.linear(*given, *o, backend, keep, into)


def inputs_of(*args: Any, **kwargs: Any) -> tuple[Inputs, Options, bool, str | None]:
    """What kernels get for `linear(*args, **kwargs)`, whether it recomputes, and `backend`."""
    bound = inspect.signature(linear).bind(*args, **kwargs)
    bound.apply_defaults()
    g = bound.arguments
    x, weight, up, bias, o = _checked(g["x"], g["weight"], None, g["bias"], g["activation"], False, g["precision"])
    return Inputs(rows_of(x), weight, up, bias), o, g["recompute"], g["backend"]


def problem_of(*args: Any, **kwargs: Any) -> tuple[Problem, str | None]:
    """The problem that `linear(*args, **kwargs)` poses, and `backend`."""
    x, o, recompute, backend = inputs_of(*args, **kwargs)
    return problem(x, o, recompute), backend


def options_of(activation: Any, gated: bool, precision: Any) -> Options:
    """The options by their names, checked; ValueError for others, and for a gate's activation that is None."""
    name = "none" if activation is None and not gated else activation
    if name not in ACTIVATIONS:
        require(False, f"an activation among {', '.join(ACTIVATIONS)}", activation=activation)
    if precision is not None and precision not in PRECISIONS:
        require(False, f"a precision among {', '.join(PRECISIONS)}", precision=precision)
    return Options(name, gated, precision or "tf32x3")


def _checked(
    x: Any, weight: Any, up: Any, bias: Any, activation: str | None, gated: bool, precision: str | None
) -> tuple[Any, Any, Any, Any, Options]:
    """The tensors as autocast would give them to F.linear, and the options, checked."""
    given = {"x": x, "w_gate" if gated else "weight": weight} | supplied(w_up=up, bias=bias)
    tensors = all(isinstance(t, torch.Tensor) for t in (x, weight))
    if not tensors or not all(isinstance(t, torch.Tensor) or t is None for t in (up, bias)):
        require(False, "tensors", TypeError, **given)
    require_dense(x, weight, up, bias)
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, up, bias = (
            t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
            for t in (x, weight, up, bias)
        )
    present = [t for t in (weight, up, bias) if t is not None]
    if x.dtype not in _FLOATS or any(t.dtype != x.dtype for t in present):
        require(False, "one dtype: float16, bfloat16, float32 or float64", TypeError, **given)
    if any(t.device != x.device for t in present):
        require(False, "all tensors on one device", **given)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        require(False, f"x (..., in) and {'weights' if gated else 'weight'} (out, in)", **given)
    if up is not None and up.shape != weight.shape:
        require(False, "gate and up weights of one shape (out, in)", **given)
    if gated and up is None and weight.shape[0] % 2:
        require(False, "a weight (2 * out, in), the gate's rows first", **given)
    if bias is not None and bias.shape != (weight.shape[0],):
        require(False, "bias (out,)", **given)
    o = options_of(activation, gated, precision)
    if bias is not None:
        bias = bias.contiguous()  # kernels read one number after the other
    return x, weight, up, bias, o
