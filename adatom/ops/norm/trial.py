"""A case of the norms with its tensors: the truth in float64, what PyTorch makes of it, what a launcher is given.

And which cases stand for what: the user's own, a small version of a large one, those that reach every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from adatom.ops.norm import cases, reference
from adatom.ops.norm.cases import Case
from adatom.ops.norm.problem import Problem, problem, sum_dtype
from adatom.verify import FLOORS, named

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

OUTPUTS = {"norm_fwd": ("y", "h", "mean", "rstd"), "norm_bwd": ("dx", "dweight", "dbias")}
EPS = 1e-5
_CHUNK = 1 << 17  # rows of a huge case that are taken to float64 at once


class Trial:
    """A case with its tensors, the truth and what PyTorch makes of it; passes are computed when first asked for.

    seed: None leaves all tensors unwritten.
    """

    def __init__(self, case: Case, device: torch.device, seed: int | None = 0) -> None:
        self.case = case
        given = cases.make(case, device, seed)
        self.given: tuple[Any, ...] = tuple(given.get(name) for name in ("x", "residual", "weight", "bias"))
        x, residual, weight, bias = self.given
        random = None if seed is None else torch.Generator(x.device if case.huge else "cpu").manual_seed(seed + 1)
        self.dy = cases.normal(case, random, x.device, x.dtype)
        moved = residual is not None and not case.quiet
        self.dh = cases.normal(case, random, x.device, sum_dtype(x, residual)) if moved else None
        self.wants = weight is not None, bias is not None
        self.forwards: dict[str, tuple[Any, ...]] = {}  # results by backend, for its derivatives
        self._truth: dict[str, Tensors] = {}

    @property
    def problem(self) -> Problem:
        """What the choice of a kernel may look at."""
        x, residual, weight, bias = self.given
        return problem(x, residual, weight, bias, self.case.centred)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each result."""
        x, residual, weight, bias = self.given
        h = x.dtype if residual is None else sum_dtype(x, residual)
        wide = torch.float64 if h == torch.float64 else torch.float32
        vectors = {f"d{n}": t.dtype for n, t in (("weight", weight), ("bias", bias)) if t is not None}
        return {"y": x.dtype, "h": h, "mean": wide, "rstd": wide, "dx": h, **vectors}

    def arguments(self, op: str, *results: Tensor | None) -> tuple[Any, ...]:
        """What a launcher of a pass gets, given what a forward returned; nothing stands for the truth, rounded."""
        x, _, weight, bias = self.given
        if op == "norm_fwd":
            return *self.given, EPS, self.case.centred, self.case.keep
        if not results or not self.case.keep:
            true = self._by_reference("norm_fwd", torch.float64, keep=True)
            results = tuple(true[n].to(self.dtypes[n]) if n in true else None for n in OUTPUTS["norm_fwd"])
        _, h, mean, rstd = results
        return x if h is None else h, weight, bias, mean, rstd, self.dy, self.dh, EPS, self.case.centred, self.wants

    def truth(self, op: str) -> Tensors:
        """The results of a pass by the reference in float64, of inputs as the kernel gets them."""
        if op not in self._truth:
            self._truth[op] = self._by_reference(op, torch.float64, self.case.keep)
        return self._truth[op]

    def _sum(self) -> Tensor:
        x, residual = self.given[:2]
        return x if residual is None else x.to(sum_dtype(x, residual)) + residual

    def _by_reference(self, op: str, dtype: torch.dtype | None, keep: bool) -> Tensors:
        def cast(t: Tensor | None) -> Any:
            return t if t is None or dtype is None else t.to(dtype)

        h, (_, residual, weight, bias), c = cast(self._sum()), self.given, self.case.centred
        if op == "norm_fwd":  # of h as it is rounded, which is no part of the arithmetic
            y, _, mean, rstd = reference.forward(h, None, cast(weight), cast(bias), EPS, c, keep)
            assert y is not None
            return named(op, (y if dtype else y.to(self.dtypes["y"]), None if residual is None else h, mean, rstd))
        given = (h, cast(weight), cast(bias), None, None, cast(self.dy), cast(self.dh), EPS, c, self.wants)
        return named(op, reference.backward(*given))

    def yardsticks(self, op: str) -> tuple[Tensors, ...]:
        """What PyTorch makes of a pass in the precision of the case: by its own operators and autograd, where all
        tensors are of one dtype, and by the reference's formulas."""
        formulas = self._by_reference(op, None, self.case.keep)
        if self._autograd is None:
            return (formulas,)
        return {n: self._autograd.get(n, t) for n, t in formulas.items()}, formulas

    @cached_property
    def _autograd(self) -> Tensors | None:
        x, residual, weight, bias = self.given
        given = [t for t in self.given if t is not None]
        if any(t.dtype != x.dtype for t in given) or not x.numel():
            return None
        h, w, b = (None if t is None else t.detach().requires_grad_() for t in (self._sum(), weight, bias))
        assert h is not None
        shape = h.shape[-1:]
        if self.case.centred:
            y = torch.nn.functional.layer_norm(h, shape, w, b, EPS)
        else:
            y = torch.nn.functional.rms_norm(h, shape, w, EPS)
        found = torch.autograd.grad(y, [t for t in (h, w, b) if t is not None], self.dy)
        names = [n for n, t in (("dx", h), ("dweight", w), ("dbias", b)) if t is not None]
        grads = dict(zip(names, found))
        if self.dh is not None:
            grads["dx"] = grads["dx"] + self.dh
        return {"y": y.detach(), **grads}

    def least(self, name: str, want: Tensor, biggest: float) -> float:
        """Relative error that is always allowed: one rounding of the result, and the rounding of float32 sums of terms
        as large as the largest result, of which little may be left."""
        size = float(want.double().square().mean().sqrt()) if want.numel() else 0.0
        unit = 2.0**-53 if self.given[0].dtype == torch.float64 else 2.0**-24
        return FLOORS[self.dtypes[name]] + 8 * unit * max(1.0, min(biggest / max(size, 1e-30), 1024.0))

    def parts(self, results: Tensors) -> list[tuple[Any, Tensors]]:
        """The results with the trial to judge them by; of a huge case the first and last rows, since addresses overflow
        at the last one, if at all, and the sums over rows."""
        if not self.case.huge:
            return [(self, results)]
        n = results["dx" if "dx" in results else "y"].shape[0]
        rows = {k: v for k, v in results.items() if k not in ("dweight", "dbias")}
        sums = {k: v for k, v in results.items() if k in ("dweight", "dbias")}
        ends = (slice(0, 64), slice(n - 64, n))
        out: list[tuple[Any, Tensors]] = [(self.part(s), {k: v[s] for k, v in rows.items()}) for s in ends]
        return [*out, (_Sums(self), sums)] if sums else out

    def part(self, s: slice, sums: bool = False) -> Trial:
        """Some rows alone, with or without sums over them."""
        one = object.__new__(Trial)
        one.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_autograd"})
        x, residual, *vectors = self.given
        one.given = (x[s], None if residual is None else residual[s], *vectors)
        one.dy, one.dh, one._truth = self.dy[s], None if self.dh is None else self.dh[s], {}
        one.wants = self.wants if sums else (False, False)
        return one


class _Sums:
    """The sums over all rows of a huge case, added up in float64 piece by piece; its yardstick is their rounding."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.least = trial, trial.least
        total: Tensors = {}
        for start in range(0, trial.dy.shape[0], _CHUNK):
            part = trial.part(slice(start, start + _CHUNK), sums=True)
            for name, value in part.truth("norm_bwd").items():
                if name != "dx":
                    total[name] = total[name] + value if name in total else value
        self.sums = total

    def truth(self, op: str) -> Tensors:
        return self.sums

    def yardsticks(self, op: str) -> tuple[Tensors]:
        return ({name: value.to(self.trial.dtypes[name]) for name, value in self.sums.items()},)


# -- which cases stand for what ----------------------------------------------------------------------------------------


OWN = ()  # options of `own`


def own(shape: list[int] | None, dtype: torch.dtype, **options: Any) -> Case:
    """The user's own case: shape (rows, length), options as fields of a Case. ValueError for what is no case."""
    numbers = shape or [64, 96]
    if len(numbers) != 2:
        raise ValueError(f"a shape of norm is 2 integers, rows and length; not {len(numbers)}")
    return Case("yours", (numbers[0],), numbers[1], dtype, **{"weight": dtype, **options})


def shrunk(case: Case, on_gpu: bool) -> tuple[Case, ...]:
    """A case of few rows with the options and the length of a large one, off the GPU at most 200."""
    rows, longest = (150, 2**18) if on_gpu else (7, 200)
    return (case._replace(name="small", lead=(rows,), length=min(case.length, longest)),)


def selection(quick: bool) -> tuple[Case, ...]:
    """The cases to compile."""
    return tuple(case for case in cases.COMPILE if not quick or case.name in cases.COMPILE_QUICK)


def blank(case: Case) -> tuple[Callable[[], Problem], dict[str, tuple[Any, ...]]]:
    """What compiling a case needs: its problem, asked for under the device to compile for, and the arguments of each
    pass's launcher: unwritten tensors of the right layout."""
    trial = Trial(case, torch.device("cpu"), None)
    x, residual, _, _ = trial.given
    rstd = x.new_empty(case.lead, dtype=trial.dtypes["rstd"])
    h = None if residual is None else x.new_empty(x.shape, dtype=trial.dtypes["h"])
    kept = (None, h, rstd if case.centred else None, rstd)
    return lambda: trial.problem, {
        "norm_fwd": trial.arguments("norm_fwd"),
        "norm_bwd": trial.arguments("norm_bwd", *kept),
    }
