"""The public functions moe() and moe_routed(): shapes, defaults, checks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.autograd import forward_ad

from adatom.check import require, require_dense, require_operators
from adatom.ops.linear.api import options_of
from adatom.ops.linear.problem import rows_of
from adatom.ops.moe.op import moe_fwd, planned
from adatom.ops.moe.problem import Inputs, Options, Problem, problem
from adatom.ops.moe.torch_moe import differentiable
from adatom.ops.route.api import moe_route
from adatom.registry import require_backend
from adatom.signature import recall, remember

_plans: dict[Any, Any] = {}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def moe(
    x: torch.Tensor, router_logits: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, *, top_k: int,
    renormalize: bool = True, scoring: str = "softmax", selection_bias: torch.Tensor | None = None,
    groups: tuple[int, int] | tuple[int, int, int] | None = None, scale: float | torch.Tensor = 1.0,
    capacity: int | None = None, activation: str = "silu", recompute: bool = False, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """A mixture of experts: each token through the gated blocks of the top_k experts that its router's logits choose.

    Args:
        x: (..., hidden). router_logits: (..., experts), of any floating dtype.
        w_gate_up, w_down, activation, recompute, backend: as in `moe_routed`.
        top_k, renormalize, scoring, selection_bias, groups, scale, capacity: as in `moe_route`.

    Returns:
        (..., hidden) of x's dtype; all else as in `moe_routed`. Gradients reach router_logits through the weights.

    Raises: as `moe_route` and `moe_routed`.
    """
    _check_logits(x, router_logits, w_down)
    weights, indices = moe_route(
        router_logits, top_k, scoring=scoring, renormalize=renormalize, selection_bias=selection_bias, groups=groups,
        scale=scale, capacity=capacity,
    )  # fmt: skip
    return moe_routed(
        x, weights, indices, w_gate_up, w_down, activation=activation, recompute=recompute, backend=backend
    )


def moe_routed(
    x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, *,
    activation: str = "silu", recompute: bool = False, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum over a token's experts of weight * (activation(x w_gate^T) * (x w_up^T)) w_down^T.

    Args:
        x: (..., hidden); float16, bfloat16, float32 or float64.
        weights: (..., top_k), floating; kept in their dtype.
        indices: (..., top_k), int32 or int64. One that names no expert, below 0 or from `experts` on, is no error: it
            drops its pair, which adds nothing, and its weight gets a gradient of 0. An expert may be named by no token,
            or by all.
        w_gate_up: (experts, 2 * intermediate, hidden) of x's dtype, each expert's gate before its up.
        w_down: (experts, hidden, intermediate), likewise.
        activation: of the gate: "silu", "gelu", "gelu_tanh", "relu" or "none".
        recompute: keep nothing for the backward but the arguments and the order of pairs: it multiplies x by w_gate_up
            again. Otherwise that product is kept; copies of x by expert never are.
        backend: one backend by name (see `adatom.explain`), with no fallback. Default: the fastest that fits.

    Returns:
        (..., hidden) of x's dtype, contiguous; a token's experts are added in float32. Differentiable to any order with
        respect to all but indices; every result is deterministic. No host synchronisation. In forward mode PyTorch's
        operators compute it.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message prints them.
        NotImplementedError: no kernel, or not the one asked for, takes this problem; the message lists the reasons.
    """
    plan, key = recall(_plans, (x, weights, indices, w_gate_up, w_down), (activation, backend))
    if plan is not None:
        inputs = Inputs(rows_of(x), rows_of(weights), rows_of(indices), w_gate_up, w_down)
        out = plan(inputs)
        return out if x.dim() == 2 else out.view(x.shape)
    require(backend is None or isinstance(backend, str), "a backend by name, or None", TypeError, backend=backend)
    given, o, shape = _checked(x, weights, indices, w_gate_up, w_down, activation)
    if key is not None:
        remember(_plans, key, planned(given, *o, backend))
    if forward_ad._current_level >= 0:  # PyTorch's operators carry tangents
        require_backend("moe", backend)
        require_operators(backend, "in forward mode")
        return differentiable(given, o).view(shape)
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return moe_fwd(*given, *o, backend, wants and not recompute)[0].view(shape)


def inputs_of(*args: Any, **kwargs: Any) -> tuple[Inputs, Options, bool, str | None]:
    """What kernels get for `moe_routed(*args, **kwargs)`, whether it recomputes, and `backend`."""
    bound = inspect.signature(moe_routed).bind(*args, **kwargs)
    bound.apply_defaults()
    g = bound.arguments
    names = ("x", "weights", "indices", "w_gate_up", "w_down", "activation")
    x, o, _ = _checked(*(g[name] for name in names))
    return x, o, g["recompute"], g["backend"]


def problem_of(*args: Any, **kwargs: Any) -> tuple[Problem, str | None]:
    """The problem that `moe(*args, **kwargs)` poses, or `moe_routed`, if `top_k` is not given; and `backend`."""
    if "top_k" in kwargs:
        bound = inspect.signature(moe).bind(*args, **kwargs)
        bound.apply_defaults()
        g = bound.arguments
        logits = g["router_logits"]
        _check_logits(g["x"], logits, g["w_down"])
        how = ("renormalize", "scoring", "selection_bias", "groups", "scale", "capacity")
        routed = moe_route(logits.detach(), g["top_k"], **{name: g[name] for name in how})
        rest = ("w_gate_up", "w_down", "activation", "recompute", "backend")
        return problem_of(g["x"], *routed, **{name: g[name] for name in rest})
    x, o, recompute, backend = inputs_of(*args, **kwargs)
    return problem(x, o, recompute), backend


def _check_logits(x: Any, router_logits: Any, w_down: Any) -> None:
    """What `moe` asks of the logits beside the other tensors, which `_checked` looks at."""
    if not (isinstance(x, torch.Tensor) and isinstance(router_logits, torch.Tensor)):
        require(False, "tensors x and router_logits", TypeError, x=x, router_logits=router_logits)
    require_dense(x, router_logits)
    if x.shape[:-1] != router_logits.shape[:-1] or x.device != router_logits.device:
        require(False, "x (..., hidden), router_logits (..., experts), one device", x=x, router_logits=router_logits)
    if isinstance(w_down, torch.Tensor) and w_down.dim() == 3 and router_logits.shape[-1:] != w_down.shape[:1]:
        require(False, "a logit for each expert", router_logits=router_logits, w_down=w_down)


def _checked(
    x: Any, weights: Any, indices: Any, w_gate_up: Any, w_down: Any, activation: Any
) -> tuple[Inputs, Options, torch.Size]:
    """The tensors as matrices, cast as autocast casts the operands of products, the options, and x's shape, checked."""
    given = {"x": x, "weights": weights, "indices": indices, "w_gate_up": w_gate_up, "w_down": w_down}
    if not all(isinstance(t, torch.Tensor) for t in given.values()):
        require(False, "tensors", TypeError, **given)
    require_dense(*given.values())
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, w_gate_up, w_down = (
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (x, w_gate_up, w_down)
        )
    if x.dtype not in _FLOATS or w_gate_up.dtype != x.dtype or w_down.dtype != x.dtype:
        require(False, "x and the experts of one dtype: float16, bfloat16, float32 or float64", TypeError, **given)
    if weights.dtype not in _FLOATS or indices.dtype not in (torch.int32, torch.int64):
        require(False, "floating weights, and indices of int32 or int64", TypeError, **given)
    if any(t.device != x.device for t in given.values()):
        require(False, "all tensors on one device", **given)
    threes = w_gate_up.dim() == w_down.dim() == 3
    if not threes or w_gate_up.shape != (w_down.shape[0], 2 * w_down.shape[2], w_down.shape[1]):
        require(False, "w_gate_up (experts, 2 * intermediate, hidden), w_down (experts, hidden, intermediate)", **given)
    if x.dim() < 1 or x.shape[-1] != w_down.shape[1]:
        require(False, "x (..., hidden), as the experts have it", **given)
    if indices.dim() < 1 or weights.shape != indices.shape or indices.shape[:-1] != x.shape[:-1]:
        require(False, "weights and indices (..., top_k) for x (..., hidden)", **given)
    options_of(activation, True, None)
    if not torch.compiler.is_exporting():  # a program is for any number of tokens
        require(indices.numel() < 2**31, "fewer than 2**31 pairs of a token and an expert", **given)
    return Inputs(rows_of(x), rows_of(weights), rows_of(indices), w_gate_up, w_down), Options(activation), x.shape
