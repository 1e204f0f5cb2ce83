"""Checks of arguments, and errors that print what was given."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MOST = torch.finfo(torch.float32).max


def describe(value: Any) -> str:
    """A short text for an error message: dtype, shape and device of a tensor, the repr of anything else, cut short."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def finite(value: Any, least: float = -math.inf) -> bool:
    """Whether value is a number of at least `least` that float32 can hold, and no tensor that would get no gradient."""
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        return False
    try:
        return bool(least <= value and -_MOST <= value <= _MOST)
    except (TypeError, ValueError, RuntimeError):
        return False


def whole(number: Any, least: int) -> bool:
    """Whether number is an integer, and no bool, of at least `least`."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= least


def dense(x: Any) -> bool:
    """Whether x is a tensor, neither sparse nor nested."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested


def supplied(**optional: Any) -> dict[str, Any]:
    """Those that were given, for `require` to list: None stands for what the caller left out."""
    return {name: value for name, value in optional.items() if value is not None}


def require_dense(*tensors: torch.Tensor | None, instead: str = "") -> None:
    """Raise TypeError for a sparse, nested or distributed tensor, whose rows no kernel can read. instead: what there is
    for the first two."""
    whole_here = all(type(t).__name__ != "DTensor" for t in tensors)
    require(whole_here, "tensors of this process alone (`to_local`), no DTensor", TypeError)
    fits = all(t is None or dense(t) for t in tensors)
    require(fits, f"dense tensors, not sparse or nested ones{instead}", TypeError)


def require_operators(backend: str | None, where: str) -> None:
    """Raise NotImplementedError for a backend that is not PyTorch's operators; `where` these alone serve."""
    fits = backend in (None, "torch", "reference", "deterministic")
    require(fits, f'backend "torch" {where}, which PyTorch\'s operators serve', NotImplementedError, backend=backend)


def readable(x: torch.Tensor) -> bool:
    """Whether the host may look at the numbers in x: on a CPU, neither fake, traced nor one of many under vmap."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    functorch, modes = torch._C._functorch, torch._C._TorchDispatchModeKey
    while functorch.is_functorch_wrapped_tensor(x) and not functorch.is_batchedtensor(x):  # grad's lie outside vmap's
        x = functorch.get_unwrapped(x)
    traced = any(torch._C._get_dispatch_mode(m) is not None for m in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL))
    return not (traced or isinstance(x, FakeTensor) or functorch.is_batchedtensor(x))


def require(condition: bool, expected: str, error: type[Exception] = ValueError, /, **given: Any) -> None:
    """Raise `error` saying what was expected and what was given, unless `condition` holds.

    `given` are the offending values by name, without optional ones that were not given; tensors are printed as dtype,
    shape and device.
    """
    if not condition:
        listed = ", ".join(f"{name}={describe(value)}" for name, value in given.items())
        raise error(f"adatom: expected {expected}; got {listed}" if listed else f"adatom: expected {expected}")
