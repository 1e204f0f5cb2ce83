"""The kernel behind the Hopper backward under a bias that many (batch, head) share: dQ from its float32 sum, and the
gradient of the bias from its parts."""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous, at, whole

_BLOCK = 2048  # elements of the gradient of the bias


@triton.jit(do_not_specialize=["heads", "len_q", "n_m", "n_pieces", "n", "parts"])
def _behind_kernel(Sum, DQ, Parts, DBias, stride_b, stride_h, stride_m, heads, len_q, n_m, n_pieces, n, parts, scale,
                   HEAD_DIM: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """dQ of 64 queries: the sum, from the order of the accumulators to that of rows, scaled; or a BLOCK of the sum of
    float32 (parts, n), in order."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was written last is read first, from L2
    if pid < n_pieces:
        bh = pid // (2 * n_m)
        b = bh // heads
        m0 = (pid - bh * (2 * n_m)) * 64
        x = tl.load(Sum + tl.cast(pid, tl.int64) * 2048 + tl.arange(0, 2048)) * scale
        x = tl.reshape(x, (4, 4, 8, 4, 2, 2))
        x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), (64, 32))
        i = tl.arange(0, 64)[:, None]
        d = tl.arange(0, 32)[None, :]
        start = tl.cast(m0, tl.int64)
        ptr = DQ + at(b, bh - b * heads, start, stride_b, stride_h, stride_m, PIECE) + i * whole(stride_m, PIECE) + d
        tl.store(ptr, x.to(DQ.dtype.element_ty), mask=(m0 + i < len_q) & (d < HEAD_DIM))
    else:
        j = tl.cast(pid - n_pieces, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.load(Parts + j, mask=j < n)
        for part in range(1, parts):
            total += tl.load(Parts + tl.cast(part, tl.int64) * n + j, mask=j < n)
        tl.store(DBias + j, total.to(DBias.dtype.element_ty), mask=j < n)


def behind(call: Call, n_pieces: int, dq: torch.Tensor, bias: torch.Tensor, parts: int) -> Launch:
    """The launch for the float32 sum of dQ, dQ, parts of the gradient of the bias, and that gradient."""
    n_m = n_pieces // (2 * call.batch * call.heads)
    n = bias.numel() if parts > 1 else 0
    scalars = (*call.strides(dq), call.heads, call.len_q, n_m, n_pieces, n, parts, call.scale)
    meta = {
        "HEAD_DIM": call.head_dim, "EARLY": True, "PIECE": call.piece, "BLOCK": _BLOCK, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    return Launch(_behind_kernel, n_pieces + -(-n // _BLOCK), scalars, meta)
