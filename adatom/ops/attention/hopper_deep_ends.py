"""The kernel ahead of the Hopper backward beyond head_dim 128: delta, and lse as the others read it."""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.hopper_bwd_ends import _block, blocks_of_head
from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous, at, load_tile


@triton.jit(do_not_specialize=["heads", "len_q", "n_m", "n_sequences"])
def _before_kernel(Out, DOut, Lse, DLse, Rows, Delta, Plain, Cu, stride_ob, stride_oh, stride_om, stride_gb, stride_gh,
                   stride_gm, heads, len_q, n_m, n_sequences, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
                   DLSE: tl.constexpr, PLAIN: tl.constexpr, VARLEN: tl.constexpr, EARLY: tl.constexpr,
                   PIECE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a block of queries: delta, and lse in log2 units (Rows), +inf where a query sees nothing or does not exist.
    PLAIN: delta also as lse lies."""
    after_previous(EARLY)
    pid = tl.program_id(0)
    b, h, m0, length, start, row = _block(pid, Cu, heads, len_q, n_m, n_sequences, VARLEN, BLOCK_M)
    i = tl.arange(0, BLOCK_M)
    some = m0 + i < length
    at_q = row + m0 + i
    at_padded = tl.cast(pid, tl.int64) * BLOCK_M + i
    o = load_tile(Out + at(b, h, start, stride_ob, stride_oh, stride_om, PIECE), b, h, m0, stride_om, length, BLOCK_M,
                  HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    do = load_tile(DOut + at(b, h, start, stride_gb, stride_gh, stride_gm, PIECE), b, h, m0, stride_gm, length, BLOCK_M,
                   HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(DLse + at_q, mask=some, other=0.0)
    lse = tl.load(Lse + at_q, mask=some, other=float("-inf"))
    tl.store(Rows + at_padded, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
    tl.store(Delta + at_padded, delta)
    if PLAIN:
        tl.store(Plain + at_q, delta, mask=some)


def before(call: Call, block_m: int, out: torch.Tensor, dout: torch.Tensor, **meta: bool) -> Launch:
    """Its launch, for queries in blocks of block_m, one program each; meta: DLSE and PLAIN."""
    n_m = blocks_of_head(call, block_m)
    strides = (*call.strides(out), *call.strides(dout))
    return Launch(
        _before_kernel, n_m * call.heads * (1 if call.varlen else call.batch),
        (*strides, call.heads, call.len_q, n_m, call.batch),
        meta | {
            "HEAD_DIM_V": call.head_dim_v, "BLOCK_DV": call.meta["BLOCK_DV"], "VARLEN": call.varlen, "EARLY": True,
            "PIECE": call.piece, "BLOCK_M": block_m, "num_warps": 8, "launch_pdl": True,
        }, 64,
    )  # fmt: skip
