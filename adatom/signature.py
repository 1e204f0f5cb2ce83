"""What two eager calls must share for the second to go the way of the first, past checks, dispatcher and choice."""

from __future__ import annotations

from typing import Any

import torch

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
ANY_DEVICE = False  # for tests


def signature(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that a choice of kernel and its launch depend on, hashable; None unless all tensors are plain, on a GPU."""
    key: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    for x in args:
        if x is None:
            key.append(None)
        elif type(x) in PLAIN:
            if not (x.is_cuda or ANY_DEVICE) or x.is_neg():
                return None
            try:
                address = x.data_ptr()
            except RuntimeError:  # a dead wrapper of functorch
                return None
            if not address and x.numel():  # zeros without storage
                return None
            key.append((x.shape, x.stride(), x.dtype, x.get_device(), address % 16))
        elif isinstance(x, torch.Tensor):
            return None
        else:
            key.append(x)
    return tuple(key)
