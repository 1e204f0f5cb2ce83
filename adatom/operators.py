"""What the operators of all ops share: where they launch, what stands for no result, their rules under torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adatom.signature import transformed

Tensor = torch.Tensor


def on_device(launch: Callable[..., Any], like: Tensor, *args: Any) -> Any:
    """launch(*args), with the device of `like` the current one, and without autocast, which would cast the products of
    PyTorch's rows once more: what it casts, it casts before an operator. In deterministic mode also without its filling
    of new tensors: launchers write each element before it is read. (That setting is the process's: other threads may
    see it off meanwhile.)"""
    if torch._C._get_deterministic_algorithms() and torch._C._get_deterministic_fill_uninitialized_memory():
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        try:
            return on_device(launch, like, *args)
        finally:
            torch._C._set_deterministic_fill_uninitialized_memory(True)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(like.device.type):
        with torch.autocast(like.device.type, enabled=False):
            return on_device(launch, like, *args)
    if like.is_cuda and like.get_device() != torch._C._cuda_getDevice():  # without a look at whether CUDA is up
        with torch.cuda.device(like.device):
            return launch(*args)
    return launch(*args)


def absent(x: Tensor) -> Tensor:
    """The placeholder operators return for a result that nobody asked for: no elements, x's dtype and device."""
    return x.new_empty(0)


def vmap_rule(name: str) -> Any:
    """vmap of operator adatom::name: one call for each element, whatever is batched. A batch dimension is faster. Of no
    elements, one call with zeros, whose results tell the shapes."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        op, n = getattr(torch.ops.adatom, name).default, info.batch_size

        def one(x: Any, dim: int | None, i: int) -> Any:
            return x if dim is None else x.select(dim, i) if n else x.sum(dim, dtype=x.dtype)

        calls = [op(*(one(x, dim, i) for x, dim in zip(args, in_dims))) for i in range(max(n, 1))]
        if isinstance(calls[0], Tensor):
            return torch.stack(calls)[:n], 0
        return tuple(torch.stack(r)[:n] for r in zip(*calls)), (0,) * len(calls[0])

    return rule


def differentiable(library: torch.library.Library, name: str, formula: Any, setup: Any) -> Callable[..., Any]:
    """Operator adatom::name with its gradient, `formula`, for which `setup` keeps what it needs; and vmap's rule.

    For torch.func, which takes no operator's own formula, it is a Function.
    """
    operator = getattr(torch.ops.adatom, name).default
    torch.library.register_autograd(f"adatom::{name}", formula, setup_context=setup, lib=library)
    torch.library.register_vmap(f"adatom::{name}", vmap_rule(name), lib=library)
    parts = {"forward": operator.__call__, "setup_context": setup, "backward": formula}
    methods = {key: staticmethod(part) for key, part in parts.items()}
    function: Any = type(name, (torch.autograd.Function,), {**methods, "generate_vmap_rule": True})

    def call(*args: Any) -> Any:
        return function.apply(*args) if transformed() else operator(*args)

    return call
