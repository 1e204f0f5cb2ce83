"""What the potential does around attention, written to be differentiated twice.

Each function is plain PyTorch, for autograd to differentiate, and on a GPU one kernel with the same derivatives
(triton_parts.py): eager PyTorch takes a pass over memory for each operation of a second derivative. What is compiled,
traced, transformed by torch.func or given tangents is plain PyTorch: autograd Functions would lose derivatives there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from adatom.device import facts

Tensor = torch.Tensor
_COMPONENTS = (3, 5)


def fuses(x: Tensor) -> bool:
    """Whether Triton's kernels take x: on a GPU, float32 or float64, in eager mode without torch.func or tangents."""
    if (
        torch.compiler.is_compiling()  # no derivative of a Function's backward is traced
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    return facts(x.device).kind != "cpu" and x.dtype in (torch.float32, torch.float64)


def turn(x: Tensor, y: Tensor, scalars: int, heads: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Scalars, and amplitudes times harmonics, head by head: (atoms, heads, slots, scalars + components) for each of
    `heads`, from x (atoms, slots, heads, scalars + degree) and y (atoms, slots, components): 3, or 3 and 5 components
    of l = 1 and 2, each multiplied by its amplitude."""
    if fuses(x):
        return _triton().Turn.apply(x.contiguous(), y.contiguous(), scalars, heads)[:-1]
    plain, *amplitudes = x.split([scalars] + [1] * (x.shape[-1] - scalars), -1)
    by_degree = y[:, :, None].split(list(_COMPONENTS[: len(amplitudes)]), -1)
    turned = torch.cat([plain, *(a * b for a, b in zip(amplitudes, by_degree))], -1)
    return turned.transpose(1, 2).split(heads, 1)


def seen(x: Tensor, y: Tensor, scalars: int) -> Tensor:
    """Scalars, and dot products with harmonics: (atoms, slots, heads, scalars + degree) of x (atoms, heads, slots,
    scalars + components). The transpose of `turn`."""
    if fuses(x):
        x = x if x.stride(-1) == 1 else x.contiguous()
        return _triton().Seen.apply(x, y.contiguous(), scalars)
    degree = 1 if y.shape[-1] == 3 else 2
    plain, *turned = x.transpose(1, 2).split([scalars, *_COMPONENTS[:degree]], -1)
    by_degree = y[:, :, None].split(list(_COMPONENTS[:degree]), -1)
    return torch.cat([plain, *((a * b).sum(-1, keepdim=True) for a, b in zip(turned, by_degree))], -1)


def silu(x: Tensor) -> Tensor:
    """silu(x), with a second derivative in one pass."""
    return _triton().Silu.apply(x.contiguous()) if fuses(x) else F.silu(x)


def swap(x: Tensor, reverse: Tensor, add: Tensor | None = None) -> Tensor:
    """x[reverse] (+ add), rows (rows, ...) put where their opposites are; `reverse` is its own inverse."""
    if fuses(x) and x.dim() == 2:
        return _triton().Swap.apply(x, reverse, add)
    moved = x.index_select(0, reverse)
    return moved if add is None else moved + add


def _triton() -> Any:
    from adatom.potential import triton_parts

    return triton_parts
