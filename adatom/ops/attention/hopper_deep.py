"""Attention backward on Hopper for head_dim 136 to 256 (Gluon): a consumer warpgroup for dV, one for dK.

The formulas are hopper_bwd.py's. A program owns 64 keys: dK and dV of 64 x 256 float32 are half of all registers, so
that one warpgroup accumulates dV and the other dK. Each multiplies one of S^T and dP^T, too, and half of the columns of
dQ: all five products are multiplied once. dQ is added to a float32 sum in memory by TMA, in whatever order programs
come to it: dK and dV repeat bit for bit, dQ but for rounding. Who waits for what is in docs/hopper.md.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_deep_ends import ends
from adatom.ops.attention.hopper_deep_query import ROWS, _query_kernel
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

_L2_BYTES = 8 * 2**20  # what the heads in flight read and add to
_KEYS_BYTES = 24 * 2**20  # keys and values of the heads in flight, in the kernel of dQ


class Config(NamedTuple):
    """How the kernel is tiled: buffers of the second half of dO; registers of a consumer's thread; spill: bytes of
    registers it may spill."""

    hi_stages: int
    registers: int
    spill: int = 128


# (columns of q and k, of v, in memory; whether it sums dQ) -> tile
CONFIGS: dict[tuple[int, int, bool], Config] = {
    (dim, dim_v, adds): Config(1 if adds and (dim, dim_v) == (256, 256) else 2, 240)
    for dim in (192, 256)
    for dim_v in (128, 192, 256)
    for adds in (False, True)
}
# (columns of q and k, of v) -> tile of the kernel of dQ, whose stages are those of v
QUERY_CONFIGS: dict[tuple[int, int], Config] = {
    (dim, dim_v): Config(1 if (dim, dim_v) == (256, 256) else 2, 240) for dim in (192, 256) for dim_v in (128, 192, 256)
}


@gluon.jit(do_not_specialize=NO_SPECIALIZE)
def _deep_kernel(Q, K, V, DOut, Lse, Delta, DK, DV, DQ, Lens, heads, kv_heads, n_heads, group, len_q, len_k, left,
                 right, scale, HQ: gl.constexpr, HV: gl.constexpr, HI_STAGES: gl.constexpr,
                 LEFT: gl.constexpr, RIGHT: gl.constexpr, EVEN_N: gl.constexpr, LENS: gl.constexpr,
                 ADDS: gl.constexpr, EARLY: gl.constexpr, REGISTERS: gl.constexpr):
    """dK and dV of blocks of 64 keys; dQ, unscaled, is added to a float32 sum.

    Tensors come as descriptors, their tiles [64, 64]. Lse, Delta: float32, one number for each query, the queries of
    each (batch, head) rounded up to 64; Lse in log2 units, +inf where a query sees nothing or does not exist. DQ:
    float32 [-1, 128], the pieces of `_add_dq` by batch, head, block of queries and 64 columns.
    """
    PLAN: gl.constexpr = make_plan(HQ, HV, HI_STAGES, LEFT, RIGHT, EVEN_N, LENS, ADDS)
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
    ds_s, dq_s = p_s, p_s  # not looked at
    if ADDS:
        ds_s = gl.allocate_shared_memory(Q.dtype, [BLOCK, BLOCK], MATRIX)
        dq_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK // 2, 128], DQ.layout)
    k_full = make_barriers(1, 1)
    v_full = make_barriers(1, 1)
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
    bars = (k_full, v_full, q_full, q_empty, lo_full, lo_empty, hi_full, hi_empty, p_full, ds_full)
    wait_for_previous(EARLY)
    let_next(EARLY)
    counts = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
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
    after: launch.Launch  # dQ from its sum, or by the kernel of its own
    blocks: int  # of queries, of all heads
    dim: int  # columns of the sum of dQ


def _launches(
    x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor, dlse: bool, adds: bool
) -> Launches:
    call = Call(x, o)
    block = BLOCK.value
    dim = 192 if call.head_dim <= 192 else 256
    dim_v = next(d for d in (128, 192, 256) if call.head_dim_v <= d)
    config, query_config = CONFIGS[dim, dim_v, adds], QUERY_CONFIGS[dim, dim_v]
    before, behind = ends(call, dim, block, out, dout, dq, dlse, adds)
    tiles = call.programs(call.len_k, block, kv=True), call.programs(call.len_q, ROWS.value)
    sharing = call.heads // max(call.kv_heads, 1)
    together = _L2_BYTES // (sharing * (dim * (6 if adds else 2) + dim_v * 2))  # rows of q, dO and the sum of dQ in L2

    def scalars(n_heads: int, group: int) -> tuple[int | float, ...]:
        group = max(1, min(n_heads, group))
        return (
            call.heads, call.kv_heads, n_heads, group, call.len_q, call.len_k, call.left, call.right, call.scale,
        )  # fmt: skip

    meta = {
        "HQ": dim - LO.value, "HV": dim_v - LO.value, "LEFT": call.left >= 0, "RIGHT": call.right >= 0,
        "EVEN_N": call.even(call.len_k, block), "LENS": x.kv_lens is not None, "EARLY": True, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    tile = {name: (block, block) for name in ("Q", "K", "V", "DOut")}
    main = Launch(
        _deep_kernel, tiles[0], scalars(call.batch * call.kv_heads, together // call.len_q),
        meta | {"HI_STAGES": config.hi_stages, "ADDS": adds, "REGISTERS": config.registers}, config.spill,
        tile | {"Lse": (block,), "Delta": (block,), "DK": (block, block), "DV": (block, block)}
        | ({"DQ": (32, 128)} if adds else {}),
    )  # fmt: skip
    if not adds:
        group = _KEYS_BYTES * sharing // (call.len_k * (dim + dim_v) * 2)
        behind = Launch(
            _query_kernel, tiles[1], scalars(call.batch * call.heads, group),
            meta | {"V_STAGES": query_config.hi_stages, "REGISTERS": query_config.registers}, query_config.spill,
            tile | {"DQ": (block, block)},
        )  # fmt: skip
    return Launches(before, main, behind, -(-call.len_q // block) * call.heads * call.batch, dim)


def _backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    adds: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    dlse = None if dlse is None else dlse.contiguous()
    if any(s * 2 % 16 or s <= 0 for s in dout.stride()[:-1]) or dout.data_ptr() % 16:
        dout = dout.contiguous()  # for TMA
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    name = "deep" if adds else "deep_ordered"
    plan = remembered(x, name, lambda: _launches(x, o, out, dout, dq, dlse is not None, adds))
    rows, delta = empty((2, plan.blocks * BLOCK.value), lse).unbind()
    total = empty((plan.blocks * plan.dim // 2, 128), lse) if adds else None
    plan.before(out, dout, lse, dlse, rows, delta, total)
    plan.main(x.q, x.k, x.v, dout, rows, delta, dk, dv, total, x.kv_lens)
    if adds:
        plan.after(total, dq)
    else:
        plan.after(x.q, x.k, x.v, dout, dq, rows, delta, x.kv_lens)
    dsinks = None
    if x.sinks is not None:
        dsinks = sink_grad(x, lse, delta.view(*lse.shape[:2], -1)[..., : lse.shape[2]])
    return dq, dk, dv, None, dsinks


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, None (it takes no bias), dsinks. dq is summed in an order that varies from run to run."""
    return _backward(x, o, out, lse, dout, dlse, True)


def backward_ordered(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """As `backward`, bit for bit the same on every run."""
    return _backward(x, o, out, lse, dout, dlse, False)
