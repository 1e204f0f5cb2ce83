"""Routing by PyTorch's operators where no kernel serves: `reference.py`, but for how the largest are found."""

from __future__ import annotations

import torch

from adatom.ops.route import reference
from adatom.ops.route.problem import Options, Tensor


def _largest(x: Tensor, n: int) -> Tensor:
    """Where the n largest of each row are, the first of equals first; NaN counts as the largest.

    float32 become numbers that order as they do, with the place below, which `topk` finds sooner than a stable sort.
    """
    if x.dtype != torch.float32:
        return reference.largest(x, n)
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)  # -0 is 0
    key = torch.where(x.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & (2**31 - 1))).long()
    last = x.shape[-1] - 1
    places = torch.arange(last, -1, -1, device=x.device)
    return last - (((key << 32) | places).topk(n, dim=-1).values & 0xFFFFFFFF)


def forward(logits: Tensor, selection_bias: Tensor | None, o: Options) -> tuple[Tensor, Tensor]:
    """(weights, indices); the contract is in reference.py."""
    indices = _largest(reference.choice(logits, selection_bias, o), o.top_k).contiguous()
    return reference.weights_of(logits, indices, o), indices
