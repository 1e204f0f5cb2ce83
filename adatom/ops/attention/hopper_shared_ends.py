"""The kernels ahead of the Hopper backward under a bias that many (batch, head) share and behind it: what is summed
over rows, and dQ and dbias from their parts."""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import LOG2E, after_previous, at, load_tile, whole

# a query with lse as far from 0 sees nothing but keys masked by a finite bias, as -1e9: lse is too coarse for its P
FAR = tl.constexpr(1048576.0)


@triton.jit(do_not_specialize=["heads", "len_q", "n_m"])
def _ahead_kernel(Out, DOut, Lse, DLse, Rows, Delta, Taken, stride_ob, stride_oh, stride_om, stride_gb, stride_gh,
                  stride_gm, heads, len_q, n_m, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, DLSE: tl.constexpr,
                  EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a block of queries: delta, and lse in log2 units (Rows), +inf for a query that does not exist or sees nothing.
    Taken: becomes 0.
    """
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what is wanted first is written last, and is in L2
    if pid == 0:
        tl.store(Taken, 0)
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


def ahead(call: Call, block_m: int, out: torch.Tensor, dout: torch.Tensor, dlse: bool) -> Launch:
    """The launch for out, dout, lse, dlse, the rows of lse and delta, in blocks of block_m queries, and a counter."""
    n_m = -(-call.len_q // block_m)
    strides = *call.strides(out), *call.strides(dout)
    meta = {
        "HEAD_DIM_V": call.head_dim_v, "BLOCK_DV": call.meta["BLOCK_DV"], "DLSE": dlse, "EARLY": True,
        "PIECE": call.piece, "BLOCK_M": block_m, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    return Launch(_ahead_kernel, n_m * call.batch * call.heads, (*strides, call.heads, call.len_q, n_m), meta)


@triton.jit(do_not_specialize=["heads", "len_q", "n_m", "n", "n_sums", "sums"])
def _finish_kernel(Parts, Sums, DQ, DBias, stride_b, stride_h, stride_m, heads, len_q, n_m, n, n_sums, sums,
                   PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
                   PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """The first n_sums programs: BLOCK of the n elements of dbias, from `sums` sums of float32. The others: BLOCK_M
    queries of dQ (batch, heads, len_q), from PARTS rounded ones."""
    after_previous(EARLY)
    pid = tl.program_id(0)
    if pid < n_sums:
        j = tl.cast(pid, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(Sums + j, mask=j < n, other=0.0)
        for part in range(1, sums):
            y += tl.load(Sums + tl.cast(part, tl.int64) * n + j, mask=j < n, other=0.0)
        tl.store(DBias + j, y.to(DBias.dtype.element_ty), mask=j < n)
    else:
        pid -= n_sums
        bh = pid // n_m
        m0 = (pid - bh * n_m) * BLOCK_M
        b = bh // heads
        i = tl.arange(0, BLOCK_M)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        some = (m0 + i < len_q) & (d < HEAD_DIM)
        each = tl.cast((tl.num_programs(0) - n_sums) // n_m, tl.int64) * len_q * HEAD_DIM
        X = Parts + (tl.cast(bh, tl.int64) * len_q + m0) * HEAD_DIM + i * HEAD_DIM + d
        x = tl.load(X, mask=some, other=0.0).to(tl.float32)
        for block in tl.static_range(1, PARTS):
            x += tl.load(X + block * each, mask=some, other=0.0).to(tl.float32)
        ptr = DQ + at(b, bh - b * heads, m0, stride_b, stride_h, stride_m, PIECE) + i * whole(stride_m, PIECE) + d
        tl.store(ptr, x.to(DQ.dtype.element_ty), mask=some)


def finish(call: Call, dq: torch.Tensor, n: int, sums: int, parts: int) -> Launch:
    """The launch for so many parts of dQ, sums of n elements of dbias (0: it is complete), dQ and dbias."""
    block_m, block = 128, 1024
    n_m, n_sums = -(-call.len_q // block_m), -(-n // block)
    scalars = (*call.strides(dq), call.heads, call.len_q, n_m, n, n_sums, sums)
    meta = {
        "PARTS": parts, "HEAD_DIM": call.head_dim, "BLOCK_D": call.meta["BLOCK_D"], "EARLY": True, "PIECE": call.piece,
        "BLOCK_M": block_m, "BLOCK": block, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    return Launch(_finish_kernel, n_sums + n_m * call.batch * call.heads, scalars, meta)
