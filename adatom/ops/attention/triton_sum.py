"""Adds what several programs summed of one gradient."""

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.ops.attention.problem import empty
from adatom.tiles.launch import Launch, launch
from adatom.tiles.triton import after_previous

_BLOCK = 1024


@triton.jit(do_not_specialize=["n", "parts"])
def _parts_kernel(Parts, Sum, n, parts, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of float32 (parts, n), in order."""
    after_previous(EARLY)
    i = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(Parts + i, mask=i < n)
    for part in range(1, parts):
        x += tl.load(Parts + tl.cast(part, tl.int64) * n + i, mask=i < n)
    tl.store(Sum + i, x.to(Sum.dtype.element_ty), mask=i < n)


def sum_of_parts(of: Launch, bias: torch.Tensor, *before: torch.Tensor | None) -> torch.Tensor:
    """The gradient of a bias, in its dtype: what `of` makes of the tensors `before` and a place for its parts."""
    dbias = empty(tuple(bias.shape), bias)
    if of.parts == 1:
        of(*before, dbias)
        return dbias
    of(*before, parts := empty((of.parts, *bias.shape), bias, torch.float32))
    early = facts(bias.device).arch >= 90
    meta = {"EARLY": early, "BLOCK": _BLOCK, "num_warps": 4, "launch_pdl": early}
    launch(_parts_kernel, -(-dbias.numel() // _BLOCK), (parts, dbias, dbias.numel(), of.parts), meta)
    return dbias
