"""A case of moe with its tensors: the truth in float64, what PyTorch makes of it, what a launcher is given.

And which cases stand for what: the user's own, a small version of a large one, those that reach every kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from adatom.ops.linear.torch_linear import VALUES
from adatom.ops.moe import api, cases, reference
from adatom.ops.moe.cases import Case
from adatom.ops.moe.problem import Inputs, Problem, Tensor, plan, problem
from adatom.verify import FLOORS, named

Tensors = dict[str, Tensor]

OUTPUTS = {
    "moe_fwd": ("out", "pre", "order", "offsets"),
    "moe_bwd": ("dx", "dweights", "dw_gate_up", "dw_down"),
}
_ALL = (True, True, True, True)


class Trial:
    """A case with its tensors, the truth and what PyTorch makes of it; passes are computed when first asked for."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case = case
        self.x, self.o, self.recompute, _ = api.inputs_of(**cases.make(case, device, seed))
        random = torch.Generator(device).manual_seed(seed + 1)
        wide = torch.bfloat16 if case.huge else torch.float32
        self.dout = torch.randn(self.x.x.shape, generator=random, device=device, dtype=wide).to(case.dtype)
        self.needs, self.compared = _ALL, set(OUTPUTS["moe_fwd"])
        self.forwards: dict[str, tuple[Any, ...]] = {}  # results by backend, for its derivatives
        self._truth: dict[str, Tensors] = {}

    @property
    def problem(self) -> Problem:
        """What the choice of a kernel may look at."""
        return problem(self.x, self.o, self.recompute)

    def arguments(self, op: str, *results: Tensor | None) -> tuple[Any, ...]:
        """What a launcher of a pass gets, given what a forward returned; nothing stands for the truth, rounded."""
        if op == "moe_fwd":
            return self.x, self.o, not self.recompute
        if results:
            kept = results[1:]
        else:
            truth = self.truth("moe_fwd")
            pre = None if self.recompute else truth["pre"].to(self.x.x.dtype)
            kept = pre, truth["order"], truth["offsets"]
        return self.x, self.o, *kept, self.dout, self.needs

    def truth(self, op: str) -> Tensors:
        """The results of a pass by the reference in float64."""
        if op not in self._truth:
            self._truth[op] = self._by_reference(op, torch.float64)
        return self._truth[op]

    def _by_reference(self, op: str, dtype: torch.dtype | None) -> Tensors:
        x, dout = self.x, self.dout
        if dtype is not None:
            x, dout = Inputs(*(t.to(dtype) if t.is_floating_point() else t for t in x)), dout.to(dtype)
        if op == "moe_fwd":
            results = named(op, reference.forward(x, self.o, not self.recompute))
            return {name: t for name, t in results.items() if name in self.compared}
        return named(op, reference.backward(x, self.o, None, *plan(x.indices, x.experts), dout, self.needs))

    def yardsticks(self, op: str) -> tuple[Tensors, Tensors]:
        """What PyTorch makes of a pass in the precision of the case: by autograd, and by the reference's formulas."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            names, formulas = self.truth(op).keys(), self._by_reference(op, None)
            return {name: self._autograd.get(name, formulas[name]) for name in names}, formulas
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    @cached_property
    def _autograd(self) -> Tensors:
        """Both passes by eager PyTorch, expert by expert, in the precision of the case."""
        leaves = Inputs(*(t.detach().requires_grad_(t.is_floating_point()) for t in self.x))
        x, weights, indices, w_gate_up, w_down = leaves
        out = torch.zeros_like(x)
        for e in range(leaves.experts):
            token, place = torch.where(indices == e)
            gate, up = F.linear(x[token], w_gate_up[e]).chunk(2, -1)
            y = F.linear(VALUES[self.o.activation](gate) * up, w_down[e])
            out = out.index_add(0, token, (y * weights[token, place, None]).to(out.dtype))
        given = (x, weights, w_gate_up, w_down)
        return {"out": out.detach(), **named("moe_bwd", torch.autograd.grad(out, given, self.dout))}

    def least(self, name: str, want: Tensor, biggest: float) -> float:
        """Relative error that is always allowed: one rounding of the result, and that of a float32 sum of its terms;
        none of integers."""
        if name in ("order", "offsets"):
            return 1e-30
        case = self.case
        terms = {"pre": case.hidden, "out": case.intermediate + case.top_k, "dweights": case.hidden + case.intermediate}
        n = terms.get(name, 2 * case.intermediate + case.hidden if name == "dx" else case.pairs)
        unit = 2.0**-53 if self.x.x.dtype == torch.float64 else 2.0**-24
        return FLOORS[self.x.x.dtype] + unit * math.sqrt(n)

    def parts(self, results: Tensors) -> list[tuple[Trial, Tensors]]:
        """The results with the trial to judge them by; of a huge case the first and last tokens: addresses overflow at
        the last one, if at all; and the last intermediate features, for what sums over tokens."""
        if not self.case.huge:
            return [(self, results)]
        tokens, wide = self.x.x.shape[0], self.case.intermediate
        by_token = {k: v for k, v in results.items() if k in ("out", "dx", "dweights")}
        out = []
        for s in (slice(0, 64), slice(tokens - 64, tokens)):
            if by_token:
                x = self.x._replace(x=self.x.x[s], weights=self.x.weights[s], indices=self.x.indices[s])
                part = self._part(x, self.dout[s], (True, True, False, False))
                out.append((part, {k: v[s] for k, v in by_token.items()}))
        if "dw_down" in results:
            ends = [*range(wide - 8, wide), *range(2 * wide - 8, 2 * wide)]
            x = self.x._replace(w_gate_up=self.x.w_gate_up[:, ends], w_down=self.x.w_down[..., wide - 8 :])
            some = {"dw_gate_up": results["dw_gate_up"][:, ends], "dw_down": results["dw_down"][..., wide - 8 :]}
            out.append((self._part(x, self.dout, (False, False, True, True)), some))
        return out

    def _part(self, x: Inputs, dout: Tensor, needs: tuple[bool, bool, bool, bool]) -> Trial:
        """Some tokens or intermediate features alone, for cases too large to be judged whole."""
        one = object.__new__(Trial)
        one.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_autograd"})
        one.x, one.dout, one.needs, one.compared, one._truth = x, dout, needs, {"out"}, {}
        return one


# -- which cases stand for what ----------------------------------------------------------------------------------------


OWN = ()  # options of `own`


def own(shape: list[int] | None, dtype: torch.dtype, **options: Any) -> Case:
    """The user's own case: shape (tokens, hidden, intermediate, experts, top_k), options as fields of a Case.

    ValueError for what is no case.
    """
    numbers = shape or [96, 64, 48, 8, 2]
    if len(numbers) != 5 or not 1 <= numbers[4] <= numbers[3]:
        raise ValueError(f"a shape of moe is tokens, hidden, intermediate, experts, and top_k up to that; not {shape}")
    case = cases._case("yours", *numbers, dtype, **options)
    api.inputs_of(**cases.make(case, "cpu"))
    return case


def shrunk(case: Case, on_gpu: bool) -> tuple[Case, ...]:
    """A small case with the options of a large one, and as many experts where they stay small."""
    tokens, hidden, wide, experts = (600, 512, 256, 32) if on_gpu else (40, 48, 24, 8)
    experts = min(case.experts, experts)
    return (
        case._replace(
            name="small", lead=(min(case.tokens, tokens),), hidden=min(case.hidden, hidden), experts=experts,
            intermediate=min(case.intermediate, wide), top_k=min(case.top_k, experts),
        ),
    )  # fmt: skip


def selection(quick: bool) -> tuple[Case, ...]:
    """The cases to compile."""
    return tuple(case for case in cases.COMPILE if not quick or case.name in cases.COMPILE_QUICK)


def blank(case: Case) -> tuple[Callable[[], Problem], dict[str, tuple[Any, ...]]]:
    """What compiling a case needs: its problem, asked for under the device to compile for, and the arguments of each
    pass's launcher."""
    x, o, recompute, _ = api.inputs_of(**cases.make(case, "cpu"))
    pre = None if recompute else x.x.new_empty(x.pairs, 2 * case.intermediate)
    kept = (pre, *plan(x.indices, x.experts))
    return lambda: problem(x, o, recompute), {
        "moe_fwd": (x, o, not recompute),
        "moe_bwd": (x, o, *kept, torch.empty_like(x.x), _ALL),
    }
