"""The public functions: rms_norm() and layer_norm()."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from adatom.check import finite, require, require_dense, require_operators, supplied
from adatom.ops.norm import reference
from adatom.ops.norm.op import Plan, norm_fwd
from adatom.ops.norm.problem import Problem, Tensor, problem
from adatom.registry import require_backend
from adatom.signature import remember, signature, watched

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, of x or of x + residual, in one pass.

    Args:
        x: (..., length); float16, bfloat16, float32 or float64 (float64 runs in PyTorch). Any strides, without a copy
            where the last dimension is contiguous and the leading ones need no more than three strides.
        weight: (length,), a float of any of these dtypes.
        eps: is added to the mean square.
        residual: of x's shape, a float of any of these dtypes: h = x + residual, in the dtype that PyTorch would give
            the sum, is what is normalised, and is returned as the new residual.
        backend: one backend by name (see `adatom.explain`), with no fallback. Default: the fastest that fits.

    Returns:
        y of x's shape and dtype, whatever that of weight, contiguous; or (y, h) where a residual is given. Statistics
        and arithmetic are float32 (float64 for float64). Differentiable to any order through both results; every result
        is deterministic. In forward mode and under torch.func, PyTorch's operators compute it, not the kernels.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message prints them.
        NotImplementedError: no kernel, or not the one asked for, takes this problem; the message lists the reasons.

    Source: Zhang and Sennrich, arXiv:1910.07467; derivatives: docs/norm.md.
    """
    return _norm(x, weight, None, eps, residual, backend, False)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, of x or of x + residual, in one pass.

    Args:
        bias: (length,), a float of any dtype that x may have. eps: is added to the variance, that of a population.
        x, weight, residual, backend: as in `rms_norm`, as are results and errors.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450; derivatives: docs/norm.md.
    """
    return _norm(x, weight, bias, eps, residual, backend, True)


def problem_of(
    x: torch.Tensor, weight: Any = None, bias: Any = None, *, eps: float = 0.0, residual: Any = None,
    backend: str | None = None,
) -> tuple[Problem, str | None]:  # fmt: skip
    """The problem that `layer_norm` of these arguments poses, or, without a bias, `rms_norm`; and `backend`."""
    return problem(*_checked(x, residual, weight, bias, eps), bias is not None), backend


_plans: dict[Any, Plan] = {}


def _norm(x: Any, weight: Any, bias: Any, eps: float, residual: Any, backend: str | None, centred: bool) -> Any:
    if backend is not None and not isinstance(backend, str):
        require(False, "a backend by name, or None", TypeError, backend=backend)
    plan = _planned((x, residual, weight, bias), eps, centred, backend)
    if plan is not None:
        y, h = plan(x, residual, weight, bias)
        return y if residual is None else (y, h)
    given = _checked(x, residual, weight, bias, eps)
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        require_backend("norm", backend)
        require_operators(backend, "in forward mode and under torch.func")
        y, h = (t if t is None else t.contiguous() for t in reference.forward(*given, eps, centred, False)[:2])
    else:
        y, h, *_ = norm_fwd(*given, eps, centred, backend)
    return y if residual is None else (y, h)


def _planned(given: tuple[Any, Any, Any, Any], eps: float, centred: bool, backend: str | None) -> Plan | None:
    """The plan of a call; None for those that are watched, and for tensors not on a GPU."""
    if watched() or not isinstance(eps, float) or not isinstance(given[0], Tensor):
        return None
    key = signature(given)
    if key is None:
        return None
    key = (key, eps, centred, backend)
    plan = _plans.get(key)
    if plan is None:
        checked = _checked(*given, eps)
        if any(a is not b for a, b in zip(checked, given)):  # a plan copies nothing
            return None
        plan = Plan(checked, eps, centred, backend)
        remember(_plans, key, plan)
    return plan


def _checked(
    x: Any, residual: Any, weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Any]:
    """x, residual, weight and bias as autocast would give them to PyTorch's norms, checked."""
    given = {"x": x} | supplied(residual=residual, weight=weight, bias=bias)
    if not isinstance(x, Tensor) or not all(isinstance(t, Tensor) or t is None for t in (residual, weight, bias)):
        require(False, "tensors", TypeError, **given)
    require_dense(x, residual, weight, bias)
    if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):  # as torch: in float32; not on CPUs
        low = (torch.float16, torch.bfloat16)
        x, residual, weight, bias = (
            t.float() if t is not None and t.dtype in low else t for t in (x, residual, weight, bias)
        )
    present = [t for t in (x, residual, weight, bias) if t is not None]
    if any(t.dtype not in _FLOATS for t in present):
        require(False, "float16, bfloat16, float32 or float64", TypeError, **given)
    if any(t.device != x.device for t in present):
        require(False, "all tensors on one device", **given)
    if x.dim() < 1 or any(t is not None and t.shape != x.shape[-1:] for t in (weight, bias)):
        require(False, "x (..., length), weight and bias (length,)", **given)
    if residual is not None and residual.shape != x.shape:
        require(False, "a residual of x's shape", **given)
    if not finite(eps, 0):
        require(False, f"a finite eps >= 0; got eps={eps!r}")  # None too
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))  # one number after the other in memory
    return x, residual, weight, bias
