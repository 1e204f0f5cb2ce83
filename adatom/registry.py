"""Every kernel as a row, best first; which one runs, and why the faster ones do not.

A row is plain data. Its order is its priority. The last row of an op runs anywhere. `unfit` looks at a `Problem`
(shapes, dtypes, options and device facts, never tensors) and returns None or the reason in words.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

from adatom.check import require
from adatom.evidence import on_gpu
from adatom.ops.attention import limits as attention
from adatom.ops.linear import limits as linear
from adatom.ops.moe import limits as moe
from adatom.ops.norm import limits as norm
from adatom.ops.route import limits as route
from adatom.tiles.first import prepare

log = logging.getLogger("adatom")
if os.environ.get("ADATOM_LOG"):
    logging.basicConfig()
    log.setLevel(os.environ["ADATOM_LOG"].upper())


class Row(NamedTuple):
    """One kernel: the op it implements, its backend's name, its launcher `module:function` under adatom.ops,
    `unfit(problem)`, which returns None or why this kernel cannot take the problem, and whether it returns the same
    bits on every run."""

    op: str
    backend: str
    target: str
    unfit: Callable[[Any], str | None]
    deterministic: bool = True

    def refuses(self, problem: Any) -> str | None:
        """Why this row does not take the problem; None if it does."""
        if problem.deterministic and not self.deterministic:
            return "not deterministic, which torch.use_deterministic_algorithms or backend='deterministic' asks for"
        return self.unfit(problem)


ROWS: tuple[Row, ...] = (
    Row("attention_fwd", "one_tile", "attention.triton_tile:forward", attention.one_tile),
    Row("attention_fwd", "hopper_tile", "attention.hopper_tile_fwd:forward", attention.hopper_tile_fwd),
    Row("attention_fwd", "short", "attention.triton_short:forward", attention.short),
    Row("attention_fwd", "hopper_deep", "attention.hopper_deep_fwd:forward", attention.hopper_deep_fwd),
    Row("attention_fwd", "hopper_shared", "attention.hopper_shared_fwd:forward", attention.hopper_shared_fwd),
    Row("attention_fwd", "hopper_float", "attention.hopper_float_fwd:forward", attention.hopper_float_fwd),
    Row("attention_fwd", "hopper", "attention.hopper_fwd:forward", attention.hopper_fwd),
    Row("attention_fwd", "triton", "attention.triton_fwd:forward", attention.triton),
    Row("attention_fwd", "torch_chunked", "attention.torch_chunked:forward", attention.torch_chunked),
    Row("attention_fwd", "reference", "attention.reference:forward", attention.reference),
    Row("attention_bwd", "one_tile", "attention.triton_tile:backward", attention.one_tile),
    Row("attention_bwd", "hopper_shared", "attention.hopper_shared_bwd:backward", attention.hopper_shared_bwd),
    Row("attention_bwd", "hopper_float", "attention.hopper_float_bwd:backward", attention.hopper_float_bwd),
    Row("attention_bwd", "hopper", "attention.hopper_bwd:backward", attention.hopper_bwd, deterministic=False),
    Row("attention_bwd", "hopper_ordered", "attention.hopper_bwd:backward_ordered", attention.hopper_bwd_ordered),
    Row("attention_bwd", "hopper_deep", "attention.hopper_deep:backward", attention.hopper_deep),
    Row("attention_bwd", "triton", "attention.triton_bwd:backward", attention.triton),
    Row("attention_bwd", "hopper_any", "attention.hopper_bwd:backward", attention.hopper_bwd_any, deterministic=False),
    Row("attention_bwd", "hopper_any_ordered", "attention.hopper_bwd:backward_ordered", attention.hopper_bwd_any),
    Row("attention_bwd", "hopper_deep_any", "attention.hopper_deep:backward", attention.hopper_deep_any),
    Row("attention_bwd", "torch_chunked", "attention.torch_chunked:backward", attention.torch_chunked),
    Row("attention_bwd", "reference", "attention.reference:backward", attention.reference),
    Row("attention_bwd_bwd", "one_tile", "attention.triton_tile_second:backward_backward", attention.one_tile_second),
    Row("attention_bwd_bwd", "triton", "attention.triton_bwd_bwd:backward_backward", attention.triton_second),
    Row("attention_bwd_bwd", "torch_chunked", "attention.torch_chunked:backward_backward", attention.torch_chunked),
    Row("attention_bwd_bwd", "reference", "attention.reference:backward_backward", attention.reference),
    Row("attention_jvp", "one_tile", "attention.triton_tile_second:jvp", attention.one_tile),
    Row("attention_jvp", "triton", "attention.triton_jvp:jvp", attention.triton),
    Row("attention_jvp", "torch_chunked", "attention.torch_chunked:jvp", attention.torch_chunked),
    Row("attention_jvp", "reference", "attention.reference:jvp", attention.reference),
    Row("linear_fwd", "hopper", "linear.hopper_linear:forward", linear.hopper),
    Row("linear_fwd", "triton", "linear.triton_linear:forward", linear.triton_fwd),
    Row("linear_fwd", "torch", "linear.torch_linear:forward", linear.torch_linear),
    Row("linear_fwd", "hopper_any", "linear.hopper_linear:forward", linear.hopper_any),
    Row("linear_fwd", "triton_any", "linear.triton_linear:forward", linear.triton_any),
    Row("linear_fwd", "reference", "linear.reference:forward", linear.reference),
    Row("linear_bwd", "hopper", "linear.hopper_linear:backward", linear.hopper_bwd),
    Row("linear_bwd", "triton", "linear.triton_linear:backward", linear.triton_bwd),
    Row("linear_bwd", "torch", "linear.torch_linear:backward", linear.torch_linear),
    Row("linear_bwd", "hopper_any", "linear.hopper_linear:backward", linear.hopper_any),
    Row("linear_bwd", "triton_any", "linear.triton_linear:backward", linear.triton_any),
    Row("linear_bwd", "reference", "linear.reference:backward", linear.reference),
    Row("gated_fwd", "hopper", "linear.hopper_linear:forward", linear.hopper_any),
    Row("gated_fwd", "triton", "linear.triton_linear:forward", linear.triton),
    Row("gated_fwd", "torch", "linear.torch_linear:forward", linear.torch_linear),
    Row("gated_fwd", "triton_any", "linear.triton_linear:forward", linear.triton_any),
    Row("gated_fwd", "reference", "linear.reference:forward", linear.reference),
    Row("gated_bwd", "hopper", "linear.hopper_linear:backward", linear.hopper_any),
    Row("gated_bwd", "triton", "linear.triton_linear:backward", linear.triton),
    Row("gated_bwd", "torch", "linear.torch_linear:backward", linear.torch_linear),
    Row("gated_bwd", "triton_any", "linear.triton_linear:backward", linear.triton_any),
    Row("gated_bwd", "reference", "linear.reference:backward", linear.reference),
    Row("moe_fwd", "hopper", "moe.hopper_moe:forward", moe.hopper),
    Row("moe_fwd", "hopper_one", "moe.hopper_one:forward", moe.hopper_one),
    Row("moe_fwd", "triton", "moe.triton_moe:forward", moe.triton),
    Row("moe_fwd", "hopper_any", "moe.hopper_moe:forward", moe.hopper_any),
    Row("moe_fwd", "torch", "moe.torch_moe:forward", moe.torch_moe),
    Row("moe_fwd", "reference", "moe.reference:forward", moe.reference),
    Row("moe_bwd", "hopper", "moe.hopper_moe:backward", moe.hopper),
    Row("moe_bwd", "triton", "moe.triton_moe:backward", moe.triton),
    Row("moe_bwd", "hopper_any", "moe.hopper_moe:backward", moe.hopper_any),
    Row("moe_bwd", "torch", "moe.torch_moe:backward", moe.torch_moe),
    Row("moe_bwd", "reference", "moe.reference:backward", moe.reference),
    Row("norm_fwd", "triton", "norm.triton_fwd:forward", norm.triton),
    Row("norm_fwd", "torch", "norm.torch_norm:forward", norm.torch),
    Row("norm_fwd", "reference", "norm.reference:forward", norm.reference),
    Row("norm_bwd", "triton", "norm.triton_bwd:backward", norm.triton),
    Row("norm_bwd", "torch", "norm.torch_norm:backward", norm.torch),
    Row("norm_bwd", "reference", "norm.reference:backward", norm.reference),
    Row("route_fwd", "triton", "route.triton_route:forward", route.triton),
    Row("route_fwd", "torch", "route.torch_route:forward", route.torch_route),
    Row("route_fwd", "reference", "route.reference:forward", route.reference),
    Row("route_bwd", "triton", "route.triton_route:backward", route.triton),
    Row("route_bwd", "torch", "route.reference:backward", route.torch_route),
    Row("route_bwd", "reference", "route.reference:backward", route.reference),
)

PASSES: dict[str, tuple[str, ...]] = {
    "attention": ("attention_fwd", "attention_bwd", "attention_bwd_bwd", "attention_jvp"),
    "linear": ("linear_fwd", "linear_bwd"),
    "gated": ("gated_fwd", "gated_bwd"),
    "moe": ("moe_fwd", "moe_bwd"),
    "norm": ("norm_fwd", "norm_bwd"),
    "route": ("route_fwd", "route_bwd"),
}


# the op of each public function; an op's name stands for any of its functions
PUBLIC = {
    "attention": "attention", "attention_varlen": "attention", "linear": "linear", "swiglu": "gated", "geglu": "gated",
    "moe": "moe", "moe_routed": "moe", "rms_norm": "norm", "layer_norm": "norm", "moe_route": "route",
}  # fmt: skip


def op_of(op: str) -> str:
    """The op that a pass belongs to, or the op itself. Raises ValueError for neither."""
    for name, passes in PASSES.items():
        if op == name or op in passes:
            return name
    known = (name for op, passes in PASSES.items() for name in (op, *passes))
    raise ValueError(f"adatom: no op {op!r}; there are: {', '.join(known)}")


def part(op: str, name: str) -> Any:
    """A file of the folder of an op, or of one of its passes: its api, cases or trial."""
    return importlib.import_module(f"adatom.ops.{op_of(op)}.{name}")


class Verdict(NamedTuple):
    """One line of `explain`: a row of pass `op`, and why it is unfit (None if it can run)."""

    op: str
    backend: str
    chosen: bool
    unfit: str | None


def rows(op: str) -> tuple[Row, ...]:
    """The rows of one pass, best first."""
    return tuple(row for row in ROWS if row.op == op)


@cache
def load(target: str) -> Callable[..., Any]:
    """The launcher behind `module:function`; its kernel file is imported on first use."""
    module, function = target.split(":")
    imported = partial(importlib.import_module, f"adatom.ops.{module}")
    launcher: Callable[..., Any] = getattr(prepare(imported) if on_gpu(target) else imported(), function)
    return launcher


def _asked(problem: Any, backend: str | None) -> tuple[Any, str | None]:
    """`backend="deterministic"` names no row: it asks for the fastest row whose results never vary."""
    require(backend is None or isinstance(backend, str), "a backend by name, or None", TypeError, backend=backend)
    return (problem._replace(deterministic=True), None) if backend == "deterministic" else (problem, backend)


def require_backend(op: str, backend: Any) -> None:
    """Raise TypeError for a backend that is no name, ValueError for one that no row of the op, or pass, has."""
    require(backend is None or isinstance(backend, str), "a backend by name, or None", TypeError, backend=backend)
    known = tuple(dict.fromkeys(row.backend for p in PASSES.get(op, (op,)) for row in rows(p)))
    if backend not in (None, "deterministic") and not any(serves(backend, name) for name in known):
        raise ValueError(f"adatom: no backend {backend!r} for {op}; there are: {', '.join(known)}")


def serves(backend: str, name: str) -> bool:
    """Whether a row called `name` serves `backend=`: its own name, or a variant of it (`name_...`)."""
    return name == backend or name.startswith(backend + "_")


@lru_cache(maxsize=4096)
def choose(op: str, problem: Any, backend: str | None = None) -> Row:
    """The first fit row for `problem`. With `backend`, only rows of that name, never another.

    Raises NotImplementedError listing every row with its reason when none fits.
    """
    problem, backend = _asked(problem, backend)
    candidates = [row for row in rows(op) if backend is None or serves(backend, row.backend)]
    if not candidates:
        require_backend(op, backend)
    reasons: list[str] = []
    for row in candidates:
        reason = row.refuses(problem)
        if reason is None:
            if backend is None and row.backend == "reference" and problem.device.kind == "cuda":
                warnings.warn(
                    f"adatom: {op} runs the reference, which is slow, on the GPU: {'; '.join(reasons)}", stacklevel=2
                )
            log.info("%s: %s for %s", op, row.backend, problem)
            return row
        reasons.append(f"{row.backend}: {reason}")
    raise NotImplementedError(f"adatom: nothing can run {op}:\n  " + "\n  ".join(reasons))


def verdicts(op: str, problem: Any, backend: str | None = None) -> list[Verdict]:
    """Every row of pass `op` with the reason it is unfit for `problem`, the chosen one marked."""
    problem, backend = _asked(problem, backend)
    out, taken = [], False
    for row in rows(op):
        reason = row.refuses(problem)
        if reason is None and backend is not None and not serves(backend, row.backend):
            reason = f"backend={backend!r} was asked for"
        out.append(Verdict(op, row.backend, reason is None and not taken, reason))
        taken = taken or reason is None
    return out


class Explanation(list[Verdict]):
    """The verdicts of a call, pass by pass; prints as a table."""

    def __str__(self) -> str:
        lines = []
        for op in dict.fromkeys(v.op for v in self):
            lines.append(op)
            for v in self:
                if v.op == op:
                    mark = "->" if v.chosen else "  "
                    lines.append(f"  {mark} {v.backend:<18} {'runs' if v.chosen else v.unfit or 'could run'}")
        return "\n".join(lines)

    __repr__ = __str__


def _bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults included, of a call of a public function, or of the first of an op's functions
    that takes them. Raises TypeError that names the function, an op's first."""
    said = []
    for function in [n for n, op in PUBLIC.items() if op == name] if name in PASSES else [name]:
        try:
            bound = inspect.signature(getattr(part(PUBLIC[function], "api"), function)).bind(*args, **kwargs)
            bound.apply_defaults()
            return bound.arguments
        except TypeError as error:
            said.append(f"adatom: {function}: {error}")
    raise TypeError(said[0])


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel would run for a call of `op` with these arguments, pass by pass, and why each faster one would not.

    op: the name of the public function: "attention", "attention_varlen", "linear", "swiglu", "geglu", "rms_norm",
    "layer_norm", "moe", "moe_routed" or "moe_route". No kernel runs (`moe` routes). Of `mlp`, ask for its two parts.
    Returns a list of `Verdict` that prints as a table. Raises ValueError for an unknown op, TypeError for arguments
    that the function has not, and whatever the call itself would raise for bad ones.

    >>> print(adatom.explain("attention", q, k, v, causal=True))
    """
    asked, op = op, PUBLIC.get(op, op)
    if op not in PASSES:
        why = "mlp runs two ops: ask for swiglu or geglu, then for linear" if op == "mlp" else f"no op {op!r}"
        raise ValueError(f"adatom: {why}; there are: {', '.join(dict.fromkeys((*PASSES, *PUBLIC)))}")
    problem, backend = part(op, "api").problem_of(**_bound(asked, args, kwargs))
    require_backend(op, backend)
    return Explanation(v for p in PASSES[op] for v in verdicts(p, problem, backend))
