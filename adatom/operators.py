"""What the operators of all ops share: where they launch, and their rule under vmap. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def on_device(launch: Callable[..., Any], like: Tensor, *args: Any) -> Any:
    """launch(*args), with the device of `like` the current one."""
    if like.is_cuda and like.get_device() != torch._C._cuda_getDevice():  # without a look at whether CUDA is up
        with torch.cuda.device(like.device):
            return launch(*args)
    return launch(*args)


def vmap_rule(name: str) -> Any:
    """vmap of operator adatom::name: one call for each element, whatever is batched. A batch dimension is faster."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        op = getattr(torch.ops.adatom, name).default
        calls = [
            op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)))
            for i in range(info.batch_size)
        ]
        if isinstance(calls[0], Tensor):
            return torch.stack(calls), 0
        results = tuple(torch.stack(r) for r in zip(*calls))
        return results, (0,) * len(results)

    return rule
