"""A case of routing with its tensors: the truth in float64, what PyTorch makes of it, what a launcher is given.

And which cases stand for what: the user's own, a small version of a large one, those that reach every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adatom.ops.route import api, cases, reference
from adatom.ops.route.cases import Case
from adatom.ops.route.problem import Problem, Tensor, problem, wide_dtype
from adatom.verify import FLOORS, named

Tensors = dict[str, Tensor]

OUTPUTS = {"route_fwd": ("weights", "indices"), "route_bwd": ("dlogits",)}


class Trial:
    """A case with its tensors, the truth and what PyTorch makes of it, computed when first asked for."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case = case
        self.logits, self.bias, self.o = api.inputs_of(**cases.make(case, device, seed))
        random = torch.Generator(device).manual_seed(seed + 1)
        shape = self.logits.shape[0], self.o.top_k
        wide = wide_dtype(self.logits.dtype)
        self.dweights = torch.randn(shape[::-1], generator=random, device=device, dtype=wide).T
        self.forwards: dict[str, tuple[Any, ...]] = {}
        self._indices: Tensor | None = None

    @property
    def problem(self) -> Problem:
        """What the choice of a kernel may look at."""
        return problem(self.logits, self.o)

    def arguments(self, op: str, *results: Tensor | None) -> tuple[Any, ...]:
        """What a launcher gets; for the backward, the experts that the reference chooses."""
        if op == "route_fwd":
            return self.logits, self.bias, self.o
        indices = self.indices if not self.case.huge else reference.forward(self.logits, self.bias, self.o)[1]
        return self.logits, indices, self.dweights, self.o

    @property
    def indices(self) -> Tensor:
        """The experts that the reference chooses in float64."""
        if self._indices is None:
            self._indices = reference.forward(self.logits.double(), self.bias, self.o)[1]
        return self._indices

    def truth(self, op: str) -> Tensors:
        """The chosen experts and their weights, or the gradient of the logits, in float64."""
        return self._by_reference(op, self.logits.double(), self.dweights.double())

    def yardsticks(self, op: str) -> tuple[Tensors, ...]:
        """What PyTorch's operators make of the same experts in the precision of the case: by the reference's formulas,
        and the gradient by autograd."""
        formulas = self._by_reference(op, self.logits, self.dweights)
        if op == "route_fwd":
            return (formulas,)
        leaf = self.logits.detach().requires_grad_()
        weights = reference.weights_of(leaf, self.indices, self.o)
        return {"dlogits": torch.autograd.grad(weights, leaf, self.dweights)[0]}, formulas

    def _by_reference(self, op: str, logits: Tensor, dweights: Tensor) -> Tensors:
        if op == "route_bwd":
            return named(op, reference.backward(logits, self.indices, dweights, self.o))
        return {"weights": reference.weights_of(logits, self.indices, self.o), "indices": self.indices}

    def least(self, name: str, want: Tensor, biggest: float) -> float:
        """Relative error that is always allowed: a few roundings; none of integers."""
        wide = wide_dtype(self.logits.dtype)
        return {"indices": 1e-30, "dlogits": FLOORS[self.logits.dtype] + FLOORS[wide]}.get(name, FLOORS[wide])

    def parts(self, results: Tensors) -> list[tuple[Trial, Tensors]]:
        """The results with the trial to judge them by; of a huge case the first and last tokens: addresses overflow at
        the last one, if at all. Where scores are compared, whose rounding decides between almost equal ones, the truth
        is the weights of the experts that were chosen if theirs are as large, but for rounding, as those of the
        reference's choice."""
        n = self.logits.shape[0]
        ends = (slice(0, 64), slice(n - 64, n)) if self.case.huge else (slice(None),)
        return [(self._part(s, results.get("indices")), {k: v[s] for k, v in results.items()}) for s in ends]

    def _part(self, s: slice, indices: Tensor | None) -> Trial:
        one = object.__new__(Trial)
        one.__dict__.update(self.__dict__)
        one.logits, one.dweights = self.logits[s], self.dweights[s]
        one._indices = self._indices if s == slice(None) else None
        if self.o.by_logits or indices is None:
            return one
        got = indices[s]
        if got.shape != one.indices.shape or torch.equal(got, one.indices):
            return one
        choice = reference.choice(one.logits.double(), self.bias, self.o)
        valid = ((got >= 0) & (got < choice.shape[1])).all(-1) & (got.sort().values.diff() > 0).all(-1)
        mine, best = choice.gather(-1, got.clamp(0, choice.shape[1] - 1)), choice.gather(-1, one.indices)
        size = best.abs() + (0.0 if self.bias is None else self.bias[self.bias.isfinite()].abs().max())
        alike = valid & ((mine - best).abs() <= 2.0**-20 * size).all(-1)
        one._indices = torch.where(alike[:, None], got, one.indices)
        return one


# -- which cases stand for what ----------------------------------------------------------------------------------------


OWN = ("scale",)  # options of `own`


def own(shape: list[int] | None, dtype: torch.dtype, **options: Any) -> Case:
    """The user's own case: shape (tokens, experts, top_k), options as fields of a Case.

    ValueError for what is no case.
    """
    numbers = shape or [100, 64, 8]
    if len(numbers) != 3 or not 1 <= numbers[2] <= numbers[1]:
        raise ValueError(f"a shape of route is tokens, experts, and top_k up to that; not {shape}")
    case = cases._case("yours", *numbers, dtype, **options)
    api.inputs_of(**cases.make(case, "cpu"))
    return case


def shrunk(case: Case, on_gpu: bool) -> tuple[Case, ...]:
    """A case of few tokens with the options of a large one."""
    return (case._replace(name="small", lead=(min(case.tokens, 600 if on_gpu else 40),)),)


def selection(quick: bool) -> tuple[Case, ...]:
    """The cases to compile."""
    return tuple(case for case in cases.COMPILE if not quick or case.name in cases.COMPILE_QUICK)


def blank(case: Case) -> tuple[Callable[[], Problem], dict[str, tuple[Any, ...]]]:
    """What compiling a case needs: its problem, asked for under the device to compile for, and the launcher's
    arguments."""
    trial = Trial(case, torch.device("cpu"))
    indices = torch.zeros(trial.dweights.shape, dtype=torch.int64)
    return lambda: trial.problem, {
        "route_fwd": trial.arguments("route_fwd"),
        "route_bwd": (trial.logits, indices, trial.dweights, trial.o),
    }
