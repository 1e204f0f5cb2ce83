"""Attention forward on Hopper whose queries and keys fit one tile, at most 128 of each (Gluon).

A program owns a (batch, head). It asks TMA for all of its q, k and v at once and has nothing to walk over: no running
maximum, no ring, no warp roles. That is bound by memory, which several programs on a multiprocessor keep busy.
"""

import torch

from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles.hopper import (
    LN2,
    LOG2E,
    Launch,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    load_tile,
    make_barriers,
    make_tiles,
    mbarrier,
    store_tile,
    tma,
    visible,
    wait_for_previous,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "len_q", "len_k", "left", "right"])
def _fwd_kernel(Q, K, V, Out, Lse, heads, kv_heads, len_q, len_k, left, right, scale,
                LEFT: gl.constexpr, RIGHT: gl.constexpr, MASK: gl.constexpr, BLOCK_M: gl.constexpr,
                BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    """out and lse of one (batch, head). Out takes the place of the queries in shared memory."""
    q_s = make_tiles(Q, 1).index(0)
    k_s = make_tiles(K, 1).index(0)
    v_s = make_tiles(V, 1).index(0)
    full = make_barriers(3, 1)
    fence_async_shared()
    let_next(True)
    wait_for_previous(True)
    b = gl.program_id(0) // heads
    h = gl.program_id(0) - b * heads
    hk = h // (heads // kv_heads)
    load_tile(Q, b, h, 0, 0, full.index(0), q_s)
    load_tile(K, b, hk, 0, 0, full.index(1), k_s)
    load_tile(V, b, hk, 0, 0, full.index(2), v_s)
    WARPS: gl.constexpr = [BLOCK_M // 16, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, BLOCK_D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    i = gl.arange(0, BLOCK_M, ROWS)
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    mbarrier.wait(full.index(0), 0)
    mbarrier.wait(full.index(1), 0)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,)) * (scale * LOG2E)
    if MASK:
        seen = visible(i[:, None], j[None, :], len_k - len_q, len_k, left, right, LEFT, RIGHT)
        s = gl.where(seen, s, float("-inf"))
    m = gl.max(s, 1)
    if LEFT or RIGHT:  # a row may see nothing
        m = gl.where(m == float("-inf"), 0.0, m)
    p = gl.exp2(s - m[:, None])
    l = gl.sum(p, 1)
    p = gl.convert_layout(p.to(Q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
    mbarrier.wait(full.index(2), 0)
    zeros = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, O_LAYOUT)
    acc = warpgroup_mma(p, v_s, zeros, use_acc=False, is_async=True)
    gl.store(Lse + gl.program_id(0).to(gl.int64) * len_q + i, m * LN2 + gl.log2(l) * LN2, mask=i < len_q)
    l = gl.where(l > 0.0, l, 1.0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O_LAYOUT))[:, None]
    q_s.store(acc.to(Q.dtype))
    fence_async_shared()
    gl.barrier()
    store_tile(Out, b, h, 0, 0, q_s)
    tma.store_wait(0)


def _launch(x: Inputs, o: Options) -> Launch:
    call = Call(x, o)
    m, n = (64 if length <= 64 else 128 for length in (call.len_q, call.len_k))
    dim = call.meta["BLOCK_D"]
    masked = call.left >= 0 or call.right >= 0 or call.len_k != n
    meta = dict(
        LEFT=call.left >= 0, RIGHT=call.right >= 0, MASK=masked, BLOCK_M=m, BLOCK_N=n, BLOCK_D=dim,
        num_warps=m // 16, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
    scalars = (call.heads, call.kv_heads, call.len_q, call.len_k, call.left, call.right, call.scale)
    blocks = {"Q": (m, dim), "K": (n, dim), "V": (n, dim), "Out": (m, dim)}
    return Launch(_fwd_kernel, call.programs(call.len_q, m), scalars, meta, 0, blocks)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    remembered(x, "fwd", lambda: _launch(x, o))(x.q, x.k, x.v, out, lse)
    return out, lse
