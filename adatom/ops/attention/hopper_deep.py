"""Attention backward on Hopper for head_dim 136 to 256 (Gluon): a consumer warpgroup for dV, one for dK.

The formulas are hopper_bwd.py's. A program owns 64 keys: dK and dV of 64 x 256 float32 are half of all registers, so
that one warpgroup accumulates dV and the other dK. Each multiplies one of S^T and dP^T, too, and half of the columns of
dQ: all five products are multiplied once. dQ is added to a float32 sum in memory by TMA, in whatever order programs
come to it: dK and dV repeat bit for bit, dQ but for rounding. Who waits for what is in docs/hopper.md.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_deep_ends import ends
from adatom.ops.attention.hopper_deep_walk import (
    BLOCK,
    LO,
    MATRIX,
    Q_STAGES,
    key_consumer,
    make_halves,
    make_plan,
    producer,
    value_consumer,
)
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like
from adatom.ops.attention.triton_call import NO_SPECIALIZE, Call, remembered, sink_grad
from adatom.tiles import launch
from adatom.tiles.hopper import (
    Launch,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    wait_for_previous,
)

_L2_BYTES = 24 * 2**20  # what the heads in flight read and add to: half of an H100's L2


class Config(NamedTuple):
    """How the kernel is tiled: buffers of the second half of dO; registers of a consumer's thread; persistent: as many
    programs as multiprocessors, which take tiles in turn; spill: bytes of registers it may spill."""

    hi_stages: int
    registers: int
    persistent: bool
    spill: int = 512


# (columns of q and k, of v, in memory; whether the work of programs is unequal) -> tile
CONFIGS: dict[tuple[int, int, bool], Config] = {
    (dim, dim_v, unequal): Config(1 if (dim, dim_v) == (256, 256) else 2, 240, not unequal)
    for dim in (192, 256)
    for dim_v in (128, 192, 256)
    for unequal in (False, True)
}


@gluon.jit(do_not_specialize=[*NO_SPECIALIZE, "n_tiles"])
def _deep_kernel(Q, K, V, DOut, Lse, Delta, DK, DV, DQ, Lens, heads, kv_heads, n_heads, group, len_q, len_k, left,
                 right, n_tiles, scale, HQ: gl.constexpr, HV: gl.constexpr, HI_STAGES: gl.constexpr,
                 LEFT: gl.constexpr, RIGHT: gl.constexpr, EVEN_N: gl.constexpr, LENS: gl.constexpr,
                 EARLY: gl.constexpr, REGISTERS: gl.constexpr):
    """dK and dV of blocks of 64 keys; dQ, unscaled, is added to a float32 sum.

    Tensors come as descriptors, their tiles [64, 64]. Lse, Delta: float32, one number for each query, the queries of
    each (batch, head) rounded up to 64; Lse in log2 units, +inf where a query sees nothing or does not exist. DQ:
    float32 [-1, 128], the pieces of `_add_dq` by batch, head, block of queries and 64 columns.
    """
    PLAN: gl.constexpr = make_plan(HQ, HV, HI_STAGES, LEFT, RIGHT, EVEN_N, LENS)
    k_lo = make_halves(K, 1, LO)
    k_hi = make_halves(K, 1, HQ)
    v_lo = make_halves(V, 1, LO)
    q_lo = make_halves(Q, Q_STAGES, LO)
    q_hi = make_halves(Q, Q_STAGES, HQ)
    do_lo = make_halves(DOut, 2, LO)
    v_hi, do_hi = v_lo, do_lo
    if HV > 0:
        v_hi = make_halves(V, 1, HV)
        do_hi = make_halves(DOut, HI_STAGES, HV)
    lse_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK], Delta.layout)
    p_s = gl.allocate_shared_memory(Q.dtype, [BLOCK, BLOCK], MATRIX)
    ds_s = gl.allocate_shared_memory(Q.dtype, [BLOCK, BLOCK], MATRIX)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK // 2, 128], DQ.layout)
    k_full = make_barriers(1, 1)
    v_full = make_barriers(1, 1)
    kv_empty = make_barriers(1, 2)
    q_full = make_barriers(Q_STAGES, 1)
    q_empty = make_barriers(Q_STAGES, 2)
    lo_full = make_barriers(2, 1)
    lo_empty = make_barriers(2, 2)
    hi_full = make_barriers(HI_STAGES, 1)
    hi_empty = make_barriers(HI_STAGES, 2)
    p_full = make_barriers(1, 1)
    ds_full = make_barriers(1, 1)
    fence_async_shared()
    tiles = (k_lo, k_hi, v_lo, v_hi, q_lo, q_hi, do_lo, do_hi, lse_s, delta_s, p_s, ds_s, dq_s)
    bars = (k_full, v_full, kv_empty, q_full, q_empty, lo_full, lo_empty, hi_full, hi_empty, p_full, ds_full)
    wait_for_previous(EARLY)
    let_next(EARLY)
    counts = (heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles)
    gl.warp_specialize([
        (value_consumer, (DV, DQ, Lens, tiles, bars, counts, scale, PLAN)),
        (key_consumer, (DK, DQ, Lens, tiles, bars, counts, scale, PLAN)),
        (producer, (Q, K, V, DOut, Lse, Delta, Lens, tiles, bars, counts, PLAN)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- launchers ---------------------------------------------------------------------------------------------------------


class Launches(NamedTuple):
    """The launches of one backward and the sizes of what they share: what follows from shapes and options."""

    before: launch.Launch
    main: Launch
    behind: launch.Launch
    blocks: int  # of queries, of all heads
    dim: int  # columns of the sum of dQ


def _launches(x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor, dlse: bool) -> Launches:
    call = Call(x, o)
    block = BLOCK.value
    dim = 192 if call.head_dim <= 192 else 256
    dim_v = next(d for d in (128, 192, 256) if call.head_dim_v <= d)
    left, right, lens = call.left >= 0, call.right >= 0, x.kv_lens is not None
    config = CONFIGS[dim, dim_v, left or right or lens]
    before, behind = ends(call, dim, block, out, dout, dq, dlse)
    n_tiles = call.programs(call.len_k, block, kv=True)
    n_heads = call.batch * call.kv_heads
    sharing = call.heads // max(call.kv_heads, 1)
    together = _L2_BYTES // (sharing * (dim * 6 + dim_v * 2))  # rows whose queries, dO and sum of dQ lie in L2
    group = max(1, min(n_heads, together // call.len_q))
    scalars = (
        call.heads, call.kv_heads, n_heads, group, call.len_q, call.len_k, call.left, call.right, n_tiles, call.scale,
    )  # fmt: skip
    tile = (block, block)
    main = Launch(
        _deep_kernel, min(n_tiles, call.device.sms) if config.persistent else n_tiles, scalars,
        {
            "HQ": dim - LO.value, "HV": dim_v - LO.value, "HI_STAGES": config.hi_stages, "LEFT": left, "RIGHT": right,
            "EVEN_N": call.even(call.len_k, block), "LENS": lens, "EARLY": True, "REGISTERS": config.registers,
            "num_warps": 4, "launch_pdl": True,
        },
        config.spill,
        {
            "Q": tile, "K": tile, "V": tile, "DOut": tile, "Lse": (block,), "Delta": (block,), "DK": tile, "DV": tile,
            "DQ": (32, 128),
        },
    )  # fmt: skip
    return Launches(before, main, behind, -(-call.len_q // block) * call.heads * call.batch, dim)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, None (it takes no bias), dsinks. dq is summed in an order that varies from run to run."""
    dlse = None if dlse is None else dlse.contiguous()
    if any(s * 2 % 16 or s <= 0 for s in dout.stride()[:-1]) or dout.data_ptr() % 16:
        dout = dout.contiguous()  # for TMA
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    plan = remembered(x, "deep", lambda: _launches(x, o, out, dout, dq, dlse is not None))
    rows, delta = empty((2, plan.blocks * BLOCK.value), lse).unbind()
    total = empty((plan.blocks * plan.dim // 2, 128), lse)
    plan.before(out, dout, lse, dlse, rows, delta, total)
    plan.main(x.q, x.k, x.v, dout, rows, delta, dk, dv, total, x.kv_lens)
    plan.behind(total, dq)
    dsinks = None
    if x.sinks is not None:
        dsinks = sink_grad(x, lse, delta.view(*lse.shape[:2], -1)[..., : lse.shape[2]])
    return dq, dk, dv, None, dsinks
