"""The kernels ahead of the Hopper backward beyond head_dim 128 and behind it: delta, and dQ from its float32 sum."""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous, at, load_tile, whole


@triton.jit(do_not_specialize=["heads", "len_q", "n_m"])
def _before_kernel(Out, DOut, Lse, DLse, Rows, Delta, DQ, stride_ob, stride_oh, stride_om, stride_gb, stride_gh,
                   stride_gm, heads, len_q, n_m, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, D: tl.constexpr,
                   DLSE: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr,
                   BLOCK_M: tl.constexpr):
    """Of a block of queries: delta, lse in log2 units (Rows; +inf where a query sees nothing or does not exist), and,
    ADDS, zeros for D columns of the sum of dQ."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what is wanted first is written last, and is in L2
    bh = pid // n_m
    m0 = (pid - bh * n_m) * BLOCK_M
    b = bh // heads
    h = bh - b * heads
    i = tl.arange(0, BLOCK_M)
    some = m0 + i < len_q
    at_q = tl.cast(bh, tl.int64) * len_q + m0 + i
    at_padded = tl.cast(pid, tl.int64) * BLOCK_M + i
    piece = tl.arange(0, BLOCK_M * 64)
    if ADDS:
        for c in tl.static_range(D // 64):
            tl.store(DQ + tl.cast(pid, tl.int64) * (BLOCK_M * D) + c * (BLOCK_M * 64) + piece,
                     tl.zeros((BLOCK_M * 64,), tl.float32))
    o = load_tile(Out + at(b, h, 0, stride_ob, stride_oh, stride_om, PIECE), b, h, m0, stride_om, len_q, BLOCK_M,
                  HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    do = load_tile(DOut + at(b, h, 0, stride_gb, stride_gh, stride_gm, PIECE), b, h, m0, stride_gm, len_q, BLOCK_M,
                   HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(DLse + at_q, mask=some, other=0.0)
    lse = tl.load(Lse + at_q, mask=some, other=float("-inf"))
    tl.store(Rows + at_padded, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
    tl.store(Delta + at_padded, delta)


@triton.jit(do_not_specialize=["heads", "len_q", "n_m"])
def _behind_kernel(Sum, DQ, stride_b, stride_h, stride_m, heads, len_q, n_m, scale, HEAD_DIM: tl.constexpr,
                   D: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr):
    """dQ of 64 queries and 64 columns: the sum, from the order of the accumulators to that of rows, scaled."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was written last is read first, from L2
    block = pid // (D // 64)
    bh = block // n_m
    m0 = (block - bh * n_m) * BLOCK_M
    b = bh // heads
    h = bh - b * heads
    x = tl.load(Sum + tl.cast(pid, tl.int64) * 4096 + tl.arange(0, 4096)) * scale
    x = tl.reshape(x, (4, 8, 8, 4, 2, 2))
    x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), (64, 64))
    i = tl.arange(0, 64)[:, None]
    d = pid % (D // 64) * 64 + tl.arange(0, 64)[None, :]
    ptr = DQ + at(b, h, m0, stride_b, stride_h, stride_m, PIECE) + i * whole(stride_m, PIECE) + d
    tl.store(ptr, x.to(DQ.dtype.element_ty), mask=(m0 + i < len_q) & (d < HEAD_DIM))


def ends(
    call: Call, dim: int, block_m: int, out: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor, dlse: bool, adds: bool
) -> tuple[Launch, Launch]:
    """The launches (before, behind) for a float32 sum with `dim` columns in memory, in blocks of block_m queries; only
    the first is of use without a sum (adds)."""
    n_m = -(-call.len_q // block_m)
    n_blocks = n_m * call.heads * call.batch
    sizes = (call.heads, call.len_q, n_m)
    strides_o, strides_g, strides_q = (call.strides(x) for x in (out, dout, dq))
    shared = {"D": dim, "EARLY": True, "PIECE": call.piece, "BLOCK_M": block_m, "launch_pdl": True}
    before = Launch(
        _before_kernel, n_blocks, (*strides_o, *strides_g, *sizes),
        shared | {
            "HEAD_DIM_V": call.head_dim_v, "BLOCK_DV": call.meta["BLOCK_DV"], "DLSE": dlse, "ADDS": adds,
            "num_warps": 8,
        },
    )  # fmt: skip
    behind = Launch(
        _behind_kernel, n_blocks * (dim // 64), (*strides_q, *sizes, call.scale),
        shared | {"HEAD_DIM": call.head_dim, "num_warps": 4},
    )  # fmt: skip
    return before, behind
