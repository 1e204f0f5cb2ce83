"""What two eager calls must share for the second to go the way of the first, past checks, dispatcher and choice."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
ANY_DEVICE = False  # for tests


def watched() -> bool:
    """Whether eager calls go the long way: they are traced, profiled, transformed, cast, or have tangents."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
    )


def signature(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that a choice of kernel and its launch depend on, hashable; None unless all tensors are plain, on a GPU."""
    key: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    try:
        for x in args:
            if x is None:
                key.append(None)
            elif type(x) in PLAIN:
                address = x.data_ptr()
                if not (x.is_cuda or ANY_DEVICE) or x.is_neg() or not address and x.numel():  # zeros without storage
                    return None
                key += x.shape, x.stride(), x.dtype, x.get_device(), address & 15
            elif isinstance(x, torch.Tensor):
                return None
            else:
                key.append(x)
    except RuntimeError:  # a dead wrapper of functorch has no address
        return None
    return tuple(key)
