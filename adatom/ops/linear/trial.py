"""A case of linear or gated with its tensors: the truth in float64, what PyTorch makes of it, what a launcher gets.

And which cases stand for what: the user's own, a small version of a large one, those that reach every kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from adatom.ops.linear import api, cases, reference
from adatom.ops.linear.cases import Case
from adatom.ops.linear.problem import Inputs, Options, Problem, problem
from adatom.ops.linear.torch_linear import VALUES
from adatom.verify import FLOOR_TF32, FLOORS, round_tf32

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

OUTPUTS = {"linear_fwd": ("out", "pre"), "linear_bwd": ("dx", "dweight", "dup", "dbias")}


class Trial:
    """A case with its tensors, the truth and what PyTorch makes of it; passes are computed when first asked for."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case = case
        self.x, self.o, self.recompute, _ = self.inputs_of(**cases.make(case, device, seed))
        random = torch.Generator(device).manual_seed(seed + 1)
        shape, wide = (self.x.x.shape[0], case.out_features), torch.bfloat16 if case.huge else torch.float32
        self.dout = torch.randn(shape, generator=random, device=device, dtype=wide).to(case.dtype)
        self.needs = (True, True, case.bias and not case.gated)
        self.forwards: dict[str, tuple[Any, ...]] = {}  # results by backend, for its derivatives
        self._truth: dict[str, Tensors] = {}

    inputs_of = staticmethod(api.inputs_of)
    outputs = OUTPUTS

    @property
    def problem(self) -> Problem:
        """What the choice of a kernel may look at."""
        return problem(self.x, self.o, self.recompute)

    def named(self, op: str, values: Any) -> Tensors:
        return {name: v for name, v in zip(self.outputs[op], values) if v is not None}

    def arguments(self, op: str, *results: Tensor | None) -> tuple[Any, ...]:
        """What a launcher of a pass gets, given what a forward returned; nothing stands for the truth, rounded."""
        if op.endswith("_fwd"):
            return self.x, self.o, not self.recompute
        keeps = "" if self.recompute else self.o.keeps
        kept = None
        if keeps and results:
            kept = results[0] if keeps == "out" else results[1]
        elif keeps:
            kept = self.truth(op.replace("_bwd", "_fwd"))[keeps].to(self.x.x.dtype)
        return self.x, self.o, kept, self.dout, self.needs

    def truth(self, op: str) -> Tensors:
        """The results of a pass by the reference in float64."""
        if op not in self._truth:
            self._truth[op] = self._by_reference(op, torch.float64)
        return self._truth[op]

    def _by_reference(self, op: str, dtype: torch.dtype) -> Tensors:
        x, dout = self._moved(dtype)
        if op.endswith("_fwd"):
            return self.named(op, reference.forward(x, self.o, not self.recompute))
        return self.named(op, reference.backward(x, self.o, None, dout, self.needs))

    def _moved(self, dtype: torch.dtype) -> tuple[Inputs, Tensor]:
        return Inputs(*(None if t is None else t.to(dtype) for t in self.x)), self.dout.to(dtype)  # type: ignore[arg-type]

    def yardsticks(self, op: str) -> tuple[Tensors, Tensors]:
        """What PyTorch makes of a pass in the precision of the case: by autograd, and by the reference's formulas."""
        names = self.truth(op).keys()
        return {n: self._autograd[n] for n in names}, {n: t for n, t in self._formulas(op).items() if n in names}

    def _formulas(self, op: str) -> Tensors:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            return self._by_reference(op, self.x.x.dtype)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    @cached_property
    def _autograd(self) -> Tensors:
        """Both passes by eager PyTorch, in the precision of the case; TF32 by rounding the operands of products."""
        tf32 = self.o.precision == "tf32" and self.x.x.dtype == torch.float32
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            moved = Inputs(*(None if t is None else round_tf32(t) if tf32 else t for t in self.x))  # type: ignore[arg-type]
            leaves = Inputs(*(None if t is None else t.detach().requires_grad_() for t in moved))  # type: ignore[arg-type]
            weight, bias = reference.weight_of(leaves), leaves.bias
            z = F.linear(leaves.x, weight, bias)
            act = VALUES[self.o.activation]
            out = act(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1] if self.o.gated else act(z)
            wanted = [t for t in leaves if t is not None]
            (dz,) = torch.autograd.grad(out, z, self.dout, retain_graph=True)
            found = iter(torch.autograd.grad(z, wanted, round_tf32(dz) if tf32 else dz))
            grads = {name: next(found) for name, t in zip(("dx", "dweight", "dup", "dbias"), leaves) if t is not None}
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return {"out": out.detach(), "pre": z.detach(), **grads}

    def least(self, name: str, want: Tensor, biggest: float) -> float:
        """Relative error that is always allowed: one rounding of the result, and that of a float32 sum of its terms."""
        tf32 = self.o.precision == "tf32" and self.x.x.dtype == torch.float32
        terms = {"out": self.case.in_features, "pre": self.case.in_features, "dx": self.x.products}
        n = terms.get(name, self.case.rows)
        unit = 2.0**-53 if self.x.x.dtype == torch.float64 else 2.0**-24
        return (FLOOR_TF32 if tf32 else FLOORS[self.x.x.dtype]) + unit * math.sqrt(n)

    def parts(self, results: Tensors) -> list[tuple[Trial, Tensors]]:
        """The results with the trial to judge them by; of a huge case the first and last rows: addresses overflow at
        the last one, if at all; and the last output features, for what sums over rows."""
        if not self.case.huge:
            return [(self, results)]
        rows, features = self.case.rows, self.case.out_features
        by_row = {k: v for k, v in results.items() if k in ("out", "pre", "dx")}
        by_feature = {k: v[features - 8 :] for k, v in results.items() if k in ("dweight", "dbias")}
        ends = [(s, {k: v[s] for k, v in by_row.items()}) for s in (slice(0, 64), slice(rows - 64, rows))]
        out = [(self.part(s, slice(None), (True, False, False)), some) for s, some in ends if some]
        if by_feature:
            needs = (False, True, self.needs[2])
            out.append((self.part(slice(None), slice(features - 8, features), needs), by_feature))
        return out

    def part(self, rows: slice, features: slice, needs: tuple[bool, bool, bool]) -> Trial:
        """Some rows and output features alone, for cases too large to be judged whole."""
        one = object.__new__(type(self))
        one.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_autograd"})
        x, weight, up, bias = self.x
        one.x = Inputs(x[rows], weight[features], up, None if bias is None else bias[features])
        one.dout, one.needs, one._truth = self.dout[rows, features], needs, {}
        return one


# -- which cases stand for what ----------------------------------------------------------------------------------------


OWN = ("precision",)  # options of `own`


def own(shape: list[int] | None, dtype: torch.dtype, **options: Any) -> Case:
    """The user's own case: shape (rows, in, out), options as fields of a Case. ValueError for what is no case."""
    numbers = shape or [64, 96, 80]
    if len(numbers) != 3:
        raise ValueError(f"a shape of linear is 3 integers, rows, in and out; not {len(numbers)}")
    case = Case("yours", (numbers[0],), numbers[1], numbers[2], dtype, **options)
    api.inputs_of(**cases.make(case, "cpu"))
    return case


def shrunk(case: Case, on_gpu: bool) -> tuple[Case, ...]:
    """A small case with the options of a large one."""
    rows, k, n = (600, 520, 776) if on_gpu else (40, 48, 56)
    return (
        case._replace(
            name="small", lead=(min(case.rows, rows),), in_features=min(case.in_features, k),
            out_features=min(case.out_features, n),
        ),
    )  # fmt: skip


def selection(quick: bool) -> tuple[Case, ...]:
    """The cases to compile."""
    return tuple(case for case in cases.COMPILE if not quick or case.name in cases.COMPILE_QUICK)


def blank(case: Case) -> tuple[Callable[[], Problem], dict[str, tuple[Any, ...]]]:
    """What compiling a case needs: its problem, asked for under the device to compile for, and the arguments of each
    pass's launcher: unwritten tensors of the right layout."""
    return blank_of(case, *api.inputs_of(**cases.make(case, "cpu"))[:2], "linear")


def blank_of(case: Case, x: Inputs, o: Options, op: str) -> tuple[Callable[[], Problem], dict[str, tuple[Any, ...]]]:
    """`blank` of checked inputs."""
    out = x.x.new_empty(x.x.shape[0], case.out_features)
    kept = (
        None if case.recompute or not o.keeps else out if o.keeps == "out" else out.new_empty(out.shape[0], x.products)
    )
    return lambda: problem(x, o, case.recompute), {
        f"{op}_fwd": (x, o, not case.recompute),
        f"{op}_bwd": (x, o, kept, out, (True, True, x.bias is not None)),
    }
