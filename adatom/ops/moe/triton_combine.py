# mypy: ignore-errors
"""Sums of the rows that belong to one token (Triton): each is read once, in order of its experts, and written once."""

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous
from adatom.tiles.triton_dense import remembered

_COLUMNS, _TOGETHER = 1024, 8  # of a program; rows that it loads before it adds the first


@triton.jit
def _kernel(Y, Places, Offsets, Weights, Out, pairs, hidden, top_k, experts, stride_wt, stride_wk, EARLY: tl.constexpr,
            WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr):
    """Some columns of a token."""
    after_previous(EARLY)
    blocks = tl.cdiv(hidden, COLUMNS)
    pid = tl.program_id(0)
    token = (pid // blocks).to(tl.int64)
    j = pid % blocks * COLUMNS + tl.arange(0, COLUMNS)
    m = j < hidden
    end = tl.load(Offsets + experts)  # rows from here on belong to no expert
    total = tl.zeros([COLUMNS], tl.float32)
    for k0 in range(0, top_k, TOGETHER):
        for k in tl.static_range(TOGETHER):
            place = tl.load(Places + token * top_k + k0 + k, mask=k0 + k < top_k, other=pairs)
            present = place < end
            row = tl.load(Y + place.to(tl.int64) * hidden + j, mask=m & present, other=0.0).to(tl.float32)
            if WEIGHTED:
                w = tl.load(Weights + token * stride_wt + (k0 + k) * stride_wk, mask=present, other=0.0)
                row *= w.to(tl.float32)
            total += row
    tl.store(Out + token * hidden + j, total.to(Out.dtype.element_ty), mask=m)


def _build(tensors, top_k):
    y, places, offsets, weights, out = tensors
    pairs, hidden = y.shape
    steps = (0, 0) if weights is None else weights.stride()
    together = min(_TOGETHER, 1 << max(top_k - 1, 0).bit_length())
    columns = min(_COLUMNS, max(128, 1 << (hidden - 1).bit_length()))
    early = facts(y.device).arch >= 90
    meta = dict(EARLY=early, WEIGHTED=weights is not None, COLUMNS=columns, TOGETHER=together, num_warps=4)
    pdl = {"launch_pdl": True} if early else {}
    scalars = (pairs, hidden, top_k, offsets.shape[0] - 1, *steps)
    return Launch(_kernel, out.shape[0] * -(-hidden // columns), scalars, meta | pdl)


def combine(
    y: torch.Tensor, places: torch.Tensor, top_k: int, weights: torch.Tensor | None = None, *, offsets: torch.Tensor
) -> torch.Tensor:
    """The sum over k of weights[t, k] * y[places[t * top_k + k]] for each token t, in order of k and in float32.

    y (pairs, hidden), contiguous; places (pairs,) and offsets (experts + 1,) as triton_order.order returns them: places
    from offsets[experts] on are dropped, and their rows not read. weights (tokens, top_k) of any dtype and strides;
    None for 1. Returns (tokens, hidden) of y's dtype.
    """
    out = y.new_empty(places.shape[0] // top_k, y.shape[1])
    tensors = (y, places, offsets, weights, out)
    remembered(_build, tensors, top_k)(*tensors)
    return out
