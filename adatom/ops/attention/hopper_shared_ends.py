"""The kernel ahead of the Hopper backward under a bias that many (batch, head) share: what is summed over rows."""

import math

import torch
import triton
import triton.language as tl

from adatom.ops.attention.hopper_shared_lent import Units
from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import LOG2E, after_previous, at, load_tile

# a query with lse as far from 0 sees nothing but keys masked by a finite bias, as -1e9: lse is too coarse for its P
FAR = tl.constexpr(1048576.0)
LARGEST = tl.constexpr(1e38)
NUMBERS = tl.constexpr(2048)  # words that programs of the kernels behind count in


@triton.jit(do_not_specialize=["heads", "repeats", "bias_heads", "in_lent", "len_q", "n_m"])
def _ahead_kernel(Out, DOut, Lse, DLse, Rows, Delta, E, Rest, Taken, stride_ob, stride_oh, stride_om, stride_gb,
                  stride_gh, stride_gm, heads, repeats, bias_heads, in_lent, len_q, n_m, inverse,
                  HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, SHARED_HEADS: tl.constexpr, SHARERS: tl.constexpr,
                  DLSE: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a block of queries: delta, and lse in log2 units (Rows), +inf for a query that does not exist or sees nothing.
    E: eight columns, three parts of lse in units of a product of q and k, `inverse` of log2 units, and three of delta;
    those of the first in_lent (batch, head), in the order of units (hopper_shared_lent.py), lie in E, the others in
    Rest. Taken: NUMBERS of them become 0.
    """
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what is wanted first is written last, and is in L2
    if pid == 0:
        tl.store(Taken + tl.arange(0, NUMBERS), 0)
    bh = pid // n_m
    m0 = (pid - bh * n_m) * BLOCK_M
    b = bh // heads
    h = bh - b * heads
    i = tl.arange(0, BLOCK_M)
    some = m0 + i < len_q
    start = tl.cast(0, tl.int64)
    o = load_tile(Out + at(b, h, start, stride_ob, stride_oh, stride_om, PIECE), b, h, m0, stride_om, len_q, BLOCK_M,
                  HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    do = load_tile(DOut + at(b, h, start, stride_gb, stride_gh, stride_gm, PIECE), b, h, m0, stride_gm, len_q, BLOCK_M,
                   HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at_q = tl.cast(bh, tl.int64) * len_q + m0 + i
    if DLSE:
        delta -= tl.load(DLse + at_q, mask=some, other=0.0)
    lse = tl.load(Lse + at_q, mask=some, other=float("-inf"))
    lse = tl.where(tl.abs(lse) > FAR, float("inf"), lse * LOG2E)
    at_padded = tl.cast(pid, tl.int64) * BLOCK_M + i
    tl.store(Rows + at_padded, lse)
    tl.store(Delta + at_padded, delta)
    d = tl.arange(0, 8)[None, :]
    x = tl.clamp(lse * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.where(d < 3, x[:, None], delta[:, None])
    first = x.to(tl.bfloat16)
    x -= first.to(tl.float32)
    second = x.to(tl.bfloat16)
    third = (x - second.to(tl.float32)).to(tl.bfloat16)
    e = tl.where(d % 3 == 0, first, tl.where(d % 3 == 1, second, third))
    r = b % repeats
    shared = repeats
    if SHARED_HEADS:
        r = r * heads + h
        h = 0
        shared *= heads
    first = r // SHARERS * SHARERS
    place = (b // repeats * shared + first) * bias_heads + h * tl.minimum(shared - first, SHARERS) + r - first
    X = tl.where(place < in_lent, E, Rest)
    place -= tl.where(place < in_lent, 0, in_lent)
    X += (tl.cast(place, tl.int64) * n_m * BLOCK_M + m0) * 8
    tl.store(X + i[:, None] * 8 + d, tl.where(d < 6, e, 0.0))


def divisor(call: Call) -> float:
    """The scale of scores, which lse is divided by; not so small, or 0, that its scores are as good as 0."""
    return math.copysign(max(abs(call.scale), 2.0**-60), call.scale)


def ahead(
    call: Call, block_m: int, bias: torch.Tensor, units: Units, in_lent: int, out: torch.Tensor, dout: torch.Tensor,
    dlse: bool,
) -> Launch:  # fmt: skip
    """The launch for out, dout, lse, dlse, the rows of lse and delta, E in two places, and NUMBERS counters."""
    n_m = -(-call.len_q // block_m)
    strides = *call.strides(out), *call.strides(dout)
    scalars = (
        *strides, call.heads, call.repeats, bias.shape[1], in_lent, call.len_q, n_m, 1 / (divisor(call) * LOG2E.value),
    )  # fmt: skip
    meta = {
        "HEAD_DIM_V": call.head_dim_v, "BLOCK_DV": call.meta["BLOCK_DV"], "SHARED_HEADS": bias.shape[1] < call.heads,
        "SHARERS": units.sharers, "DLSE": dlse, "EARLY": True, "PIECE": call.piece, "BLOCK_M": block_m, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    return Launch(_ahead_kernel, n_m * call.batch * call.heads, scalars, meta)
