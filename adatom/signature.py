"""What two eager calls must share for the second to go the way of the first, past checks, dispatcher and choice."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from adatom.device import facts

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
ANY_DEVICE = False  # for tests: the short way on a CPU for every op


def transformed() -> bool:
    """Whether a torch.func transform looks on. In a compiled region, whose operators take none, it raises
    NotImplementedError: torch.compile then runs the region uncompiled, but for fullgraph=True."""
    active = bool(torch._C._are_functorch_transforms_active())
    if active and torch.compiler.is_compiling():
        raise NotImplementedError("no torch.func transform inside a compiled region: compile the rest, or take "
                                  "autograd.grad there under torch._dynamo.config.trace_autograd_ops")  # fmt: skip
    return active


def overseen() -> int:
    """Whether eager calls go the long way for what no dispatch key tells: compilers, modes, profilers, tangents."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def watched() -> bool:
    """Whether eager calls go the long way: they are traced, profiled, transformed, cast, or have tangents."""
    if overseen():
        return True
    changed = torch._C._are_functorch_transforms_active() or torch._C._is_any_autocast_enabled()
    return bool(changed or torch._C._get_tracing_state() is not None)


def recall(plans: dict[Any, Any], tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """(plan, key) of a call that wants no gradient, by the signature of its tensors (some may be None) and options.

    plan: of an earlier call like it, or None. key: by which to keep one; None for a call that goes the long way.
    """
    if watched() or not all(x is None or isinstance(x, torch.Tensor) for x in tensors):
        return None, None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return None, None
    key = signature(tensors, cpu=True)
    if key is None:
        return None, None
    try:
        return plans.get((key, options)), (key, options)
    except TypeError:  # an option that is no option, of which checks will speak
        return None, None


def remember(plans: dict[Any, Any], key: Any, plan: Any) -> None:
    """Keep a plan; sizes that never repeat must not fill the memory."""
    if len(plans) >= 4096:
        plans.clear()
    plans[key] = plan


def signature(args: tuple[Any, ...], cpu: bool = False) -> tuple[Any, ...] | None:
    """All that a choice of kernel and its launch depend on, hashable; None unless all tensors are plain, on a GPU, or
    if `cpu` on a CPU."""
    key: list[Any] = [torch._C._get_deterministic_algorithms()]
    machine = None
    try:
        for x in args:
            if type(x) in PLAIN:
                address = x.data_ptr()
                if x.is_cuda:
                    where: Any = x.get_device()
                elif x.is_cpu and (cpu or ANY_DEVICE):
                    where = machine = machine or facts(x.device)  # it may stand for another device
                else:
                    return None
                if x.is_neg() or not address and x.numel():  # zeros without storage
                    return None
                key += x.shape, x.stride(), x.dtype, where, address & 15
            elif x is None or not isinstance(x, torch.Tensor):
                key.append(x)
            else:
                return None
    except RuntimeError:  # a dead wrapper of functorch has no address
        return None
    return tuple(key)
