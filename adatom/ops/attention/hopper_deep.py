"""Attention backward on Hopper for head_dim 136 to 256 (Gluon): a kernel for dK and dV, one for dQ.

The formulas are hopper_bwd.py's. A program owns 64 keys: dK and dV of 64 x 256 float32 are half of all registers, so
that one warpgroup accumulates dV and the other dK. dQ would have to be added up in memory, by each 64 keys, which costs
more than to multiply S and dP again in a kernel that owns queries (docs/hopper.md). All results repeat bit for bit.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_deep_ends import before
from adatom.ops.attention.hopper_deep_query import ROWS, _query_kernel
from adatom.ops.attention.hopper_deep_walk import (
    BLOCK,
    LO,
    MATRIX,
    STAGES,
    key_consumer,
    make_halves,
    make_plan,
    producer,
    value_consumer,
)
from adatom.ops.attention.hopper_packed import table_launch, table_size
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like, suits_tma
from adatom.ops.attention.triton_call import NO_SPECIALIZE, Call, remembered, sink_grad
from adatom.tiles import launch
from adatom.tiles.hopper import (
    Launch,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    sequences,
    wait_for_previous,
)

_QUERIES_BYTES = 8 * 2**20  # queries and dO of the heads in flight, in the kernel of dK and dV
_KEYS_BYTES = 24 * 2**20  # keys and values of the heads in flight, in the kernel of dQ


class Config(NamedTuple):
    """How the kernels are tiled: v_stages: buffers of v in the kernel of dQ; registers of a consumer's thread; spill:
    bytes of registers they may spill."""

    v_stages: int
    registers: int
    spill: int = 128


# (columns of q and k, of v, in memory) -> tile
CONFIGS: dict[tuple[int, int], Config] = {
    (dim, dim_v): Config(1 if (dim, dim_v) == (256, 256) else 2, 240) for dim in (192, 256) for dim_v in (128, 192, 256)
}


@gluon.jit(do_not_specialize=NO_SPECIALIZE)
def _deep_kernel(Q, K, V, DOut, Lse, Delta, DK, DV, Order, Lens, heads, kv_heads, n_heads, group, len_q, len_k, left,
                 right, scale, softcap, HQ: gl.constexpr, HV: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
                 EVEN_N: gl.constexpr, LENS: gl.constexpr, VARLEN: gl.constexpr, SOFTCAP: gl.constexpr,
                 EARLY: gl.constexpr, REGISTERS: gl.constexpr):
    """dK and dV of blocks of 64 keys.

    Tensors come as descriptors, their tiles [64, 64]. Lse, Delta: float32, one number for each query, the queries of
    each (batch, head), of packed sequences each (head, sequence), rounded up to 64; Lse in log2 units, +inf where a
    query sees nothing or does not exist. Order: for packed sequences, the table of tiles; then n_heads is their number.
    """
    PLAN: gl.constexpr = make_plan(HQ, HV, LEFT, RIGHT, EVEN_N, LENS, VARLEN, SOFTCAP)
    k_lo = make_halves(K, 1, LO)
    k_hi = make_halves(K, 1, HQ)
    v_lo = make_halves(V, 1, LO)
    q_lo = make_halves(Q, STAGES, LO)
    q_hi = make_halves(Q, STAGES, HQ)
    do_lo = make_halves(DOut, STAGES, LO)
    v_hi, do_hi = v_lo, do_lo
    if HV > 0:
        v_hi = make_halves(V, 1, HV)
        do_hi = make_halves(DOut, STAGES, HV)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Delta.layout)
    p_s = gl.allocate_shared_memory(Q.dtype, [BLOCK, BLOCK], MATRIX)
    k_full = make_barriers(1, 1)
    v_full = make_barriers(1, 1)
    q_full = make_barriers(STAGES, 1)
    q_empty = make_barriers(STAGES, 2)
    lo_full = make_barriers(STAGES, 1)
    lo_empty = make_barriers(STAGES, 2)
    hi_full = make_barriers(STAGES, 1)
    hi_empty = make_barriers(STAGES, 2)
    p_full = make_barriers(1, 1)
    p_empty = make_barriers(1, 1)
    fence_async_shared()
    tiles = (k_lo, k_hi, v_lo, v_hi, q_lo, q_hi, do_lo, do_hi, lse_s, delta_s, p_s)
    bars = (k_full, v_full, q_full, q_empty, lo_full, lo_empty, hi_full, hi_empty, p_full, p_empty)
    wait_for_previous(EARLY)
    let_next(EARLY)
    counts = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    gl.warp_specialize([
        (value_consumer, (DV, Order, Lens, tiles, bars, counts, (scale, softcap), PLAN)),
        (key_consumer, (DK, Order, Lens, tiles, bars, counts, scale, PLAN)),
        (producer, (Q, K, V, DOut, Lse, Delta, Order, Lens, tiles, bars, counts, PLAN)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- launchers ---------------------------------------------------------------------------------------------------------


class Launches(NamedTuple):
    """The launches of one backward: what follows from shapes and options."""

    tables: tuple[launch.Launch, ...]  # of the tiles of packed sequences: of keys, of queries
    before: launch.Launch
    keys: Launch
    queries: Launch
    lines: tuple[int, ...]  # numbers of those tables
    blocks: int  # of queries, of all heads
    plain: bool  # delta is wanted as lse lies


def _launches(x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, dlse: bool) -> Launches:
    call = Call(x, o)
    block, rows = BLOCK.value, ROWS.value
    dim = 192 if call.head_dim <= 192 else 256
    dim_v = next(d for d in (128, 192, 256) if call.head_dim_v <= d)
    config = CONFIGS[dim, dim_v]
    sharing = call.heads // max(call.kv_heads, 1)
    row_bytes = (dim + dim_v) * 2
    # rows of the heads in flight: queries in the kernel of dK and dV, keys in that of dQ
    together = _QUERIES_BYTES // (row_bytes * sharing), _KEYS_BYTES * sharing // row_bytes

    def scalars(n_heads: int, group: int) -> tuple[int | float, ...]:
        n_heads = call.batch if call.varlen else n_heads
        group = max(1, min(n_heads, group))
        sizes = (call.heads, call.kv_heads, n_heads, group, call.len_q, call.len_k, call.left, call.right)
        return (*sizes, call.scale, o.softcap)

    meta = {
        "HQ": dim - LO.value, "HV": dim_v - LO.value, "LEFT": call.left >= 0, "RIGHT": call.right >= 0,
        "EVEN_N": call.even(call.len_k, block), "LENS": x.kv_lens is not None, "VARLEN": call.varlen,
        "SOFTCAP": o.softcap > 0, "EARLY": True, "REGISTERS": config.registers, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    tiles = {name: (block, block) for name in ("Q", "K", "V", "DOut")}
    keys = Launch(
        _deep_kernel, call.programs(call.len_k, block, kv=True),
        scalars(call.batch * call.kv_heads, together[0] // call.len_q), meta, config.spill,
        tiles | {"Lse": (block,), "Delta": (block,), "DK": (block, block), "DV": (block, block)},
    )  # fmt: skip
    queries = Launch(
        _query_kernel, call.programs(call.len_q, rows),
        scalars(call.batch * call.heads, together[1] // call.len_k),
        meta | {"V_STAGES": config.v_stages}, config.spill, tiles | {"DQ": (block, block)},
    )  # fmt: skip
    tables, lines = (), ()
    if call.varlen:
        tables = (
            table_launch(call, block, together[0], kv=True, block_q=block),
            table_launch(call, rows, together[1], block_q=block),
        )
        lines = table_size(call, block, True), table_size(call, rows)
    plain = call.varlen and x.sinks is not None
    first = before(call, block, out, dout, DLSE=dlse, PLAIN=plain)
    return Launches(tables, first, keys, queries, lines, first.programs, plain)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, None (it takes no bias), dsinks."""
    dlse = None if dlse is None else dlse.contiguous()
    dout = dout if suits_tma(dout) else dout.contiguous()
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    plan = remembered(x, "deep", lambda: _launches(x, o, out, dout, dlse is not None))
    rows, delta = empty((2, plan.blocks * BLOCK.value), lse).unbind()
    plain = empty_like(lse) if plan.plain else None
    of_keys, of_queries = None, None
    if plan.tables:
        of_keys, of_queries = torch.empty(sum(plan.lines), dtype=torch.int32, device=lse.device).split(plan.lines)
        for table, lines in zip(plan.tables, (of_keys, of_queries)):
            table(lines, x.cu_seqlens_q, x.cu_seqlens_k)
    plan.before(out, dout, lse, dlse, rows, delta, plain, x.cu_seqlens_q)
    given = [sequences(t) for t in (x.q, x.k, x.v, dout)]
    plan.keys(*given, rows, delta, sequences(dk), sequences(dv), of_keys, x.kv_lens)
    plan.queries(*given, sequences(dq), rows, delta, of_queries, x.kv_lens)
    dsinks = None
    if x.sinks is not None:
        dsinks = sink_grad(x, lse, delta.view(*lse.shape[:2], -1)[..., : lse.shape[2]] if plain is None else plain)
    return dq, dk, dv, None, dsinks
