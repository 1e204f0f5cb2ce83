"""float32 attention forward on Hopper (Gluon) to head_dim 32, under a full bias that several (batch, head) share.

Operands are two float16 parts (hopper_float_ends.py), of which three products are summed. A program owns 128 queries,
each of two consumer warpgroups half of them, in registers; a producer warp brings keys, values and the bias by TMA.
While one half of a block of keys is exponentiated, the scores of the next are multiplied.
"""

import torch

from adatom.ops.attention.hopper_float_ends import DIM, HEIGHT, PEAK, K, Q, V, in_parts
from adatom.ops.attention.hopper_float_tiles import load_parts, operands, parts_of, product, tile_of, turned
from adatom.ops.attention.hopper_sharers import several_of
from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles.hopper import (
    LN2,
    LOG2E,
    Launch,
    as_matrix,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    load_tile,
    make_barriers,
    make_tiles,
    release,
    slot,
    store_tile,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma_wait,
)

BLOCK_M = gl.constexpr(128)  # queries of a program
HALF = gl.constexpr(64)  # queries of a consumer; keys that it works on at a time
STAGES = gl.constexpr(2)  # buffers of keys, values and bias
_SPILL = 0


@gluon.jit
def _producer(Q_, K_, V_, Bias, several, tiles, bars, counts, BLOCK_N: gl.constexpr):
    """Keeps the rings full."""
    q_s, k_s, v_s, bias_s, _out = tiles
    q_full, q_empty, full, empty = bars
    heads, repeats, len_q, len_k, n_tiles = counts
    bias_b, bias_h = several
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        b, h, m0 = tile_of(t, heads, len_q, BLOCK_M)
        wait_empty(q_empty, turn, 1)
        for c in gl.static_range(2):
            load_parts(Q_, b, h, m0 + c * HALF, q_full.index(0), q_s, c)
        for n0 in range(0, len_k, BLOCK_N):
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_parts(K_, b, h, n0, full.index(i), k_s, i)
            load_parts(V_, b, h, n0, full.index(i), v_s, i)
            for c in gl.static_range(2):
                load_tile(Bias, b // repeats * bias_b, h * bias_h, m0 + c * HALF, n0, full.index(i),
                          bias_s.index(2 * i + c))
            n += 1
        turn += 1


@gluon.jit
def _softmax(s, bias, m, l, unit, n0, len_k, EVEN_N: gl.constexpr):
    """(P times 2^HEIGHT, maxima, sums, factor of what was summed before) from a product and a bias, keys n0.. ."""
    s = s * unit + bias
    if not EVEN_N:
        if n0 + HALF > len_k:
            columns = n0 + gl.arange(0, HALF, gl.SliceLayout(0, s.type.layout))
            s = gl.where(columns[None, :] < len_k, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # rows that have seen nothing yet
    alpha = gl.exp2((m - base) * LOG2E)
    # a bias may be as large as -1e9: what is subtracted must be one of the scores
    p = gl.exp2((s - base[:, None]) * LOG2E + HEIGHT)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None]
    l += gl.sum(p.reshape([HALF, HALF // 8, 8]), 1)  # of what a thread holds
    return p, m_new, l, alpha


@gluon.jit
def _consumer(Out, Lse, Units, tiles, bars, counts, n_heads, scale, C: gl.constexpr, EVEN_N: gl.constexpr,
              BLOCK_N: gl.constexpr):
    """Computes HALF rows of out and lse, tile after tile. Comments at waits name the products under way, the eldest
    first."""
    q_s, k_s, v_s, bias_s, out_s = tiles
    q_full, q_empty, full, empty = bars
    heads, repeats, len_q, len_k, n_tiles = counts
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    WIDE: gl.constexpr = gl.SliceLayout(1, O)
    zeros = gl.zeros([HALF, HALF], gl.float32, S)
    nothing = gl.zeros([HALF, DIM], gl.float32, O)
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        b, h, m0 = tile_of(t, heads, len_q, BLOCK_M)
        bh = b * heads + h
        unit = scale * gl.load(Units + Q * n_heads + bh) * gl.load(Units + K * n_heads + bh)
        wait_full(q_full, turn, 1)
        q = q_s.index(2 * C).load(QUERIES), q_s.index(2 * C + 1).load(QUERIES)
        m = gl.full([HALF], float("-inf"), gl.float32, ROWS)
        l = gl.sum(gl.zeros([HALF, HALF], gl.float32, S).reshape([HALF, HALF // 8, 8]), 1)
        acc = gl.zeros([HALF, DIM], gl.float32, O)
        wait_full(full, n, STAGES)
        s = product(q, turned(parts_of(k_s, slot(n, STAGES), 0, HALF)), zeros)
        s = warpgroup_mma_wait(0, deps=(s,))
        for n0 in range(0, len_k, BLOCK_N):
            i = slot(n, STAGES)
            bias = bias_s.index(2 * i + C)
            s_high = product(q, turned(parts_of(k_s, i, HALF, HALF)), zeros)
            p, m, l, alpha = _softmax(s, bias.slice(0, HALF, dim=1).load(S), m, l, unit, n0, len_k, EVEN_N)
            acc = acc * gl.convert_layout(alpha, WIDE)[:, None]
            pv = product(operands(p, OPERAND), parts_of(v_s, i, 0, HALF), nothing)
            if n0 + BLOCK_N < len_k:
                wait_full(full, n + 1, STAGES)
            s = product(q, turned(parts_of(k_s, slot(n + 1, STAGES), 0, HALF)), zeros)  # behind the last, of anything
            s_high, pv = warpgroup_mma_wait(3, deps=(s_high, pv))  # S, P V, S
            acc += pv
            p, m, l, alpha = _softmax(s_high, bias.slice(HALF, HALF, dim=1).load(S), m, l, unit, n0 + HALF, len_k,
                                      EVEN_N)
            acc = acc * gl.convert_layout(alpha, WIDE)[:, None]
            pv = product(operands(p, OPERAND), parts_of(v_s, i, HALF, HALF), nothing)
            s, pv = warpgroup_mma_wait(0, deps=(s, pv))
            acc += pv
            release(empty, n, STAGES)
            n += 1
        l = gl.convert_layout(gl.sum(l, 1), ROWS)
        seen = l > 0.0
        l = gl.where(seen, l, 1.0)
        acc = acc * gl.convert_layout(gl.load(Units + V * n_heads + bh) / l, WIDE)[:, None]
        out = out_s.index(C)
        out.store(acc)
        fence_async_shared()
        m0 += C * HALF
        store_tile(Out, b, h, m0, 0, out)
        rows = m0 + gl.arange(0, HALF, ROWS)
        lse = gl.where(seen, m + gl.log2(l * (1.0 / PEAK)) * LN2, float("-inf"))
        gl.store(Lse + bh.to(gl.int64) * len_q + rows, lse, mask=rows < len_q)
        tma.store_wait(0)
        gl.barrier()
        release(q_empty, turn, 1)
        turn += 1


@gluon.jit(do_not_specialize=["n_heads", "heads", "repeats", "len_q", "len_k", "n_tiles"])
def _fwd_kernel(Q_, K_, V_, Bias, Out, Lse, Units, bias_b, bias_h, n_heads, heads, repeats, len_q, len_k, n_tiles,
                scale, EVEN_N: gl.constexpr, EARLY: gl.constexpr, BLOCK_N: gl.constexpr):
    """out and lse from q, k and v in parts, and Units, (6, n_heads), of `in_parts`.

    The bias has a slice for `repeats` consecutive batch elements; numbers of slices are multiplied by bias_b, those of
    heads by bias_h: 0 along expanded dimensions.
    """
    out_s = make_tiles(Out, 2)  # where the queries were
    q_s = out_s.reinterpret(Q_.dtype, [4, HALF, DIM], as_matrix(Q_.layout))
    k_s = make_tiles(K_, STAGES * 2)
    v_s = make_tiles(V_, STAGES * 2)
    bias_s = make_tiles(Bias, STAGES * 2)
    q_full = make_barriers(1, 4)
    q_empty = make_barriers(1, 2)
    full = make_barriers(STAGES, 6)
    empty = make_barriers(STAGES, 2)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, v_s, bias_s, out_s)
    bars = (q_full, q_empty, full, empty)
    counts = (heads, repeats, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (Out, Lse, Units, tiles, bars, counts, n_heads, scale, 0, EVEN_N, BLOCK_N)),
        (_consumer, (Out, Lse, Units, tiles, bars, counts, n_heads, scale, 1, EVEN_N, BLOCK_N)),
        (_producer, (Q_, K_, V_, Bias, several, tiles, bars, counts, BLOCK_N)),
    ], [4, 1], [232, 24])  # fmt: skip


def _launch(x: Inputs, o: Options) -> Launch:
    call = Call(x, o)
    m, n, dim = BLOCK_M.value, 2 * HALF.value, DIM.value
    n_heads = call.batch * call.heads
    n_tiles = -(-call.len_q // m) * n_heads
    counts = (n_heads, call.heads, call.repeats, call.len_q, call.len_k, n_tiles)
    scalars = (*several_of(call), *counts, call.scale)
    meta = {"EVEN_N": call.even(call.len_k, n), "EARLY": True, "BLOCK_N": n, "num_warps": 4, "launch_pdl": True}
    blocks = {"Q_": (m // 2, dim), "K_": (n, dim), "V_": (n, dim), "Bias": (m // 2, n), "Out": (m // 2, dim)}
    return Launch(_fwd_kernel, min(n_tiles, call.device.sms), scalars, meta, _SPILL, blocks)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    q, k, v, units = in_parts(x, o)
    remembered(x, "fwd", lambda: _launch(x, o))(q, k, v, x.bias, out, lse, units)
    return out, lse
