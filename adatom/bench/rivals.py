"""What a rival is: another implementation of an op that adatom is timed against, each optional.

The rivals of an op are in `rivals_<op>.py`, which holds

- `TENSORS`: the names of the arguments that contenders take, in order, those that a case has;
- `RIVALS`: a tuple of `Rival`;
- `passes(group, case)`: what is timed there, of "forward", "backward", "double backward" and "forward mode".
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adatom.registry import PASSES, rows

OWN = "adatom:"  # ahead of the name of a backend, which is timed beside what adatom chooses

Call = Callable[..., Any]
Bind = Callable[[Any, dict[str, Any]], Call]


class Unfit(Exception):
    """A rival does not do this case; the message says why."""


class Rival(NamedTuple):
    """name: as on the command line. packages: distribution names, any of which provides it; () for PyTorch itself.
    bind(case, given) -> a function of the op's TENSORS that computes what adatom would, through the rival's own public
    interface, or raises Unfit; given is cases.make(case, device).
    matters(case, group): whether it is timed there without being asked for by name."""

    name: str
    packages: tuple[str, ...]
    bind: Bind
    matters: Callable[[Any, str], bool]


def contest(op: str) -> Any:
    """The module `rivals_<op>`."""
    return importlib.import_module(f"adatom.bench.rivals_{op}")


def every() -> tuple[Rival, ...]:
    """The rivals of every op, one of each name."""
    return tuple({rival.name: rival for op in PASSES for rival in contest(op).RIVALS}.values())


def installed(rival: Rival) -> tuple[str | None, str]:
    """(version, "") of an installed rival, or (None, why it is not there). Imports none of them."""
    if not rival.packages:
        return torch.__version__, ""
    for package in rival.packages:
        try:
            return importlib.metadata.version(package), ""
        except importlib.metadata.PackageNotFoundError:
            continue
    return None, "not installed"


def own() -> tuple[str, ...]:
    """adatom's own backends, by the names that they have among rivals: "adatom:triton"."""
    backends = dict.fromkeys(row.backend for op in PASSES for name in PASSES[op] for row in rows(name))
    return tuple(OWN + backend for backend in (*backends, "deterministic"))


def select(names: str) -> tuple[str, ...]:
    """The names in a comma-separated list, or those that "all" or "none" stand for; `own` ones are not among all.
    ValueError for an unknown one."""
    known = [rival.name for rival in every()]
    wanted = [n.strip() for n in names.split(",") if n.strip()]
    unknown = [n for n in wanted if n not in ("all", "none", *known, *own())]
    if unknown:
        listed = f"{', '.join(known)}; and adatom's backends, as {OWN}triton"
        raise ValueError(f"no rival {', '.join(unknown)}; there are: {listed}")
    meant = {"all": known, "none": []}
    return tuple(dict.fromkeys(one for n in wanted for one in meant.get(n, [n])))
