"""The public functions swiglu(), geglu() and mlp(). Operators, formulas and kernels are those of linear, gated."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from adatom.check import require, supplied
from adatom.ops.linear.api import _checked, checked_call, linear
from adatom.ops.linear.problem import Inputs, Options, Problem, problem, rows_of


def swiglu(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None = None,
    *,
    recompute: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """silu(x w_gate^T) * (x w_up^T): both products and the gate in one kernel, the gate in float32.

    Args:
        x: (..., in); float16, bfloat16, float32 or float64 (float64 runs in PyTorch). Any strides; it is copied where
            its leading dimensions cannot be taken as one.
        w_gate, w_up: (out, in) of x's dtype. Or w_gate (2 * out, in) alone, the gate's rows first. Neither is copied.
        recompute: keep nothing for the backward but x and the weights: it multiplies again.
        precision, backend: as in `linear`.

    Returns:
        (..., out) of x's dtype, contiguous. Differentiable to any order; every result is deterministic.

    Raises: as `linear`.

    Source: Shazeer, arXiv:2002.05202.
    """
    return _gated(x, w_gate, w_up, "silu", recompute, precision, backend)


def geglu(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    recompute: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """gelu(x w_gate^T) * (x w_up^T). approximate: "none" or "tanh", as in F.gelu; all else as in `swiglu`."""
    return _gated(x, w_gate, w_up, _gelu(approximate), recompute, precision, backend)


def mlp(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    *,
    activation: str = "silu",
    recompute: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """(activation(x w_gate^T) * (x w_up^T)) w_down^T: the gated block of a transformer.

    Args:
        x: (..., in). w_gate, w_up: (hidden, in), or w_gate (2 * hidden, in) and w_up None; see `swiglu`.
        w_down: (out, hidden).
        activation: of the gate: "silu", "gelu", "gelu_tanh", "relu" or "none".
        recompute: keep x, the weights and the gated product for the backward, and not what the gate was given.
        precision, backend: as in `linear`.

    Returns:
        (..., out). Raises: as `linear`.
    """
    hidden = _gated(x, w_gate, w_up, activation, recompute, precision, backend)
    if isinstance(w_down, torch.Tensor) and w_down.shape[1:] != hidden.shape[-1:]:
        require(False, "w_down (out, hidden)", w_gate=w_gate, **supplied(w_up=w_up), w_down=w_down)
    return linear(hidden, w_down, precision=precision, backend=backend)


def _gated(x: Any, gate: Any, up: Any, activation: str, recompute: bool, precision: Any, backend: Any) -> torch.Tensor:
    return checked_call((x, gate, up, None), activation, True, recompute, precision, backend)


def _gelu(approximate: str) -> str:
    require(approximate in ("none", "tanh"), 'approximate="none" or "tanh"', approximate=approximate)
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def inputs_of(*args: Any, **kwargs: Any) -> tuple[Inputs, Options, bool, str | None]:
    """What kernels get for `swiglu(*args, **kwargs)` (or `geglu`, given approximate), whether it recomputes, and
    `backend`."""
    function = geglu if "approximate" in kwargs else swiglu
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    g = bound.arguments
    activation = _gelu(g["approximate"]) if function is geglu else "silu"
    x, gate, up, _, o = _checked(g["x"], g["w_gate"], g["w_up"], None, activation, True, g["precision"])
    return Inputs(rows_of(x), gate, up), o, g["recompute"], g["backend"]


def problem_of(*args: Any, **kwargs: Any) -> tuple[Problem, str | None]:
    """The problem that `swiglu(*args, **kwargs)` poses (or `geglu`, given approximate), and `backend`."""
    x, o, recompute, backend = inputs_of(*args, **kwargs)
    return problem(x, o, recompute), backend
