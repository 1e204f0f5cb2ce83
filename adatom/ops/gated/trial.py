"""A case of swiglu or geglu with its tensors: linear's trial, of other cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adatom.ops.gated import api, cases
from adatom.ops.linear import trial as linear
from adatom.ops.linear.cases import Case
from adatom.ops.linear.problem import Problem
from adatom.ops.linear.trial import shrunk

__all__ = ["shrunk"]

OUTPUTS = {"gated_fwd": ("out", "pre"), "gated_bwd": ("dx", "dweight", "dup", "dbias")}


class Trial(linear.Trial):
    """A case with its tensors, the truth and what PyTorch makes of it; passes are computed when first asked for."""

    inputs_of = staticmethod(api.inputs_of)
    outputs = OUTPUTS


OWN = ("precision",)  # options of `own`


def own(shape: list[int] | None, dtype: torch.dtype, **options: Any) -> Case:
    """The user's own case: shape (rows, in, out), options as fields of a Case. ValueError for what is no case."""
    numbers = shape or [64, 96, 80]
    if len(numbers) != 3:
        raise ValueError(f"a shape of gated is 3 integers, rows, in and out; not {len(numbers)}")
    options = {"activation": "silu", "bias": False, "gated": True, **options}
    case = Case("yours", (numbers[0],), numbers[1], numbers[2], dtype, **options)
    api.inputs_of(**cases.make(case, "cpu"))
    return case


def selection(quick: bool) -> tuple[Case, ...]:
    """The cases to compile."""
    return tuple(case for case in cases.COMPILE if not quick or case.name in cases.COMPILE_QUICK)


def blank(case: Case) -> tuple[Callable[[], Problem], dict[str, tuple[Any, ...]]]:
    """What compiling a case needs; see linear."""
    return linear.blank_of(case, *api.inputs_of(**cases.make(case, "cpu"))[:2], "gated")
