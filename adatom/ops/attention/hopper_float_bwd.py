"""float32 attention backward on Hopper: draft."""

import os

import torch
import triton
import triton.language as tl

from adatom.ops.attention.hopper_float_fwd import load_parts, product, split
from adatom.ops.attention.hopper_float_parts import DIM as _DIM
from adatom.ops.attention.hopper_float_parts import _ROWS, empty_parts, parts_launch
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like
from adatom.ops.attention.triton_call import Call, remembered
from adatom.ops.attention.triton_sum import sum_of_parts
from adatom.tiles import launch
from adatom.tiles.hopper import (
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
    release,
    slot,
    store_tile,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from adatom.tiles.triton import after_previous, at, scale_of
from adatom.tiles.triton import load_tile as load_block
from adatom.tiles.triton import split as split_t

DIM = gl.constexpr(_DIM)
ROW = gl.constexpr(64)
FAR = tl.constexpr(1048576.0)
_SPILL = 64


@triton.jit(do_not_specialize=["heads", "length", "padded"])
def _ahead_kernel(Out, DOut, Lse, DLse, InverseV, NormV, Parts, Rows, Delta, Units, stride_ob, stride_oh, stride_om,
                  stride_gb, stride_gh, stride_gm, heads, length, padded, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr,
                  EVEN: tl.constexpr, DLSE: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Of a (batch, head): parts of dO; lse in log2 units less 14; delta, scaled; Units: what undoes the scale of dO,
    what scales dP, what undoes the scale of dS."""
    after_previous(EARLY)
    bh = tl.program_id(0)
    b = bh // heads
    h = bh - b * heads
    start = tl.cast(0, tl.int64)
    Out += at(b, h, start, stride_ob, stride_oh, stride_om, PIECE)
    DOut += at(b, h, start, stride_gb, stride_gh, stride_gm, PIECE)
    Parts += tl.cast(bh, tl.int64) * length * (2 * DIM)
    r = tl.arange(0, ROWS)
    most = tl.zeros((ROWS,), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    for m0 in range(0, length, ROWS):
        do = load_block(DOut, b, h, m0, stride_gm, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        most = tl.maximum(most, tl.max(tl.abs(do), 1))
        if DLSE:
            dlse = tl.load(DLse + tl.cast(bh, tl.int64) * length + m0 + r, mask=r < length - m0, other=0.0)
            norm = tl.maximum(norm, tl.abs(dlse))
    scale, inverse = scale_of(tl.max(most))
    dlse_most = tl.max(norm)
    norm = tl.zeros((ROWS,), tl.float32)
    for m0 in range(0, length, ROWS):
        do = load_block(DOut, b, h, m0, stride_gm, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        y = do * scale
        norm = tl.maximum(norm, tl.sum(y * y, 1))
    inverse_v = tl.load(InverseV + bh)
    scale_v = 1.0 / inverse_v
    bound = 2.0 * tl.sqrt(tl.max(norm)) * tl.load(NormV + bh) + dlse_most * scale * scale_v
    scale_s, inverse_s = scale_of(bound)
    tl.store(Units + bh, inverse)
    tl.store(Units + tl.num_programs(0) + bh, scale_s * (1.0 / 16384.0))
    tl.store(Units + 2 * tl.num_programs(0) + bh, inverse * inverse_v * inverse_s)
    i = r[:, None]
    d = tl.arange(0, DIM)[None, :]
    for m0 in range(0, padded, ROWS):
        do = load_block(DOut, b, h, m0, stride_gm, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        o = load_block(Out, b, h, m0, stride_om, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        delta = tl.sum(o * do, 1)
        at_q = tl.cast(bh, tl.int64) * length + m0 + r
        some = r < length - m0
        if DLSE:
            delta -= tl.load(DLse + at_q, mask=some, other=0.0)
        lse = tl.load(Lse + at_q, mask=some, other=float("-inf"))
        lse = tl.where(tl.abs(lse) > FAR, float("inf"), lse * 1.4426950408889634 - 14.0)
        high, low = split_t(do * scale)
        to = Parts + m0 * (2 * DIM) + (i * (2 * DIM) + d)
        tl.store(to, high, mask=i < length - m0)
        tl.store(to + DIM, low, mask=i < length - m0)
        at_p = tl.cast(bh, tl.int64) * padded + m0 + r
        tl.store(Rows + at_p, lse, mask=r < padded - m0)
        tl.store(Delta + at_p, delta * scale * scale_v * (scale_s * (1.0 / 16384.0)), mask=r < padded - m0)


@gluon.jit
def sharer(r, piece, counts, SHARED_HEADS: gl.constexpr):
    """(batch, head) number r of those that share a slice of the bias, or the last. SHARED_HEADS: it serves all heads.
    """
    heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles = counts
    r = gl.minimum(r, shared - 1)
    if SHARED_HEADS:
        return piece * repeats + r // heads, r % heads
    else:
        return piece // bias_heads * repeats + r, piece % bias_heads


@gluon.jit
def load_numbers(desc, start, full, values):
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_load(desc, [start], full, values)


@gluon.jit
def _tile(t, counts, PAIR: gl.constexpr, SHARERS: gl.constexpr):
    heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles = counts
    n_n = (len_k + ROW * PAIR - 1) // (ROW * PAIR)
    group = t // n_n
    piece = group // groups
    return piece, (t - group * n_n) * (ROW * PAIR), (group - piece * groups) * SHARERS


@gluon.jit
def _keys_producer(Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, counts, SHARED_HEADS: gl.constexpr,
                   PAIR: gl.constexpr, SHARERS: gl.constexpr, STAGES: gl.constexpr):
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s = tiles
    full, empty, kv_full, kv_empty = bars
    heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles = counts
    bias_b, bias_h = several
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, n0, first = _tile(t, counts, PAIR, SHARERS)
        wait_empty(kv_empty, turn, 1)
        for c in gl.static_range(SHARERS * PAIR):
            b, h = sharer(first + c // PAIR, piece, counts, SHARED_HEADS)
            load_parts(K, b, h, n0 + c % PAIR * ROW, kv_full.index(0), k_s, 2 * c)
            load_parts(V, b, h, n0 + c % PAIR * ROW, kv_full.index(0), v_s, 2 * c)
        for m0 in range(0, len_q, ROW):
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            for c in gl.static_range(PAIR):
                load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, n0 + c * ROW, m0,
                          full.index(i), bias_s.index(i * PAIR + c))
            for c in gl.static_range(SHARERS):
                b, h = sharer(first + c, piece, counts, SHARED_HEADS)
                row = (b * heads + h) * padded + m0
                load_parts(Q, b, h, m0, full.index(i), q_s, (i * SHARERS + c) * 2)
                load_parts(DOut, b, h, m0, full.index(i), do_s, (i * SHARERS + c) * 2)
                load_numbers(Rows, row, full.index(i), lse_s.index(i * SHARERS + c))
                load_numbers(Delta, row, full.index(i), delta_s.index(i * SHARERS + c))
            n += 1
        turn += 1


@gluon.jit
def _keys_consumer(DK, DV, Units, tiles, bars, counts, scale, C: gl.constexpr, SHARED_HEADS: gl.constexpr,
                   PAIR: gl.constexpr, SHARERS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
                   HELD: gl.constexpr, FRESH: gl.constexpr):
    """dK and dV of 64 keys of a sharer, tile after tile."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s = tiles
    full, empty, kv_full, kv_empty = bars
    heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles = counts
    unit_q, unit_k, units_do = Units
    PARTS: gl.constexpr = ROW // PART
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    zeros = gl.zeros([ROW, PART], gl.float32, S)
    none = gl.zeros([ROW, DIM], gl.float32, GRAD)
    several = heads * repeats * 0
    n = 0
    turn = 0
    all_heads = padded * 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, n0, first = _tile(t, counts, PAIR, SHARERS)
        b, h = sharer(first + C // PAIR, piece, counts, SHARED_HEADS)
        bh = b * heads + h
        u_q = gl.load(unit_q + bh)
        unit = scale * LOG2E * u_q * gl.load(unit_k + bh)
        u_do, u_dp, u_ds = units_do
        c_dp = gl.load(u_dp + bh)
        wait_full(kv_full, turn, 1)
        k = k_s.index(2 * C)
        k_low = k_s.index(2 * C + 1)
        v = v_s.index(2 * C)
        v_low = v_s.index(2 * C + 1)
        if HELD:
            k = k.load(gl.DotOperandLayout(0, S, 2))
            k_low = k_low.load(gl.DotOperandLayout(0, S, 2))
            v = v.load(gl.DotOperandLayout(0, S, 2))
            v_low = v_low.load(gl.DotOperandLayout(0, S, 2))
        dk = gl.zeros([ROW, DIM], gl.float32, GRAD)
        dv = gl.zeros([ROW, DIM], gl.float32, GRAD)
        for m0 in range(0, len_q, ROW):
            i = slot(n, STAGES)
            wait_full(full, n, STAGES)
            j = i * SHARERS + C // PAIR
            for part in gl.static_range(PARTS):
                q = q_s.index(2 * j).slice(part * PART, PART, dim=0)
                q_low = q_s.index(2 * j + 1).slice(part * PART, PART, dim=0)
                do = do_s.index(2 * j).slice(part * PART, PART, dim=0)
                do_low = do_s.index(2 * j + 1).slice(part * PART, PART, dim=0)
                s = product(k, k_low, q.permute((1, 0)), q_low.permute((1, 0)), zeros, True)
                dp = product(v, v_low, do.permute((1, 0)), do_low.permute((1, 0)), zeros, True)
                if FRESH:
                    if part > 0:
                        s, dv_new, dk_new = warpgroup_mma_wait(3, deps=(s, dv_new, dk_new))
                        dv += dv_new
                        dk += dk_new
                    else:
                        s = warpgroup_mma_wait(3, deps=(s,))
                elif part > 0:  # dV, dK, S, dP
                    s, dv, dk = warpgroup_mma_wait(3, deps=(s, dv, dk))
                else:  # S, dP
                    s = warpgroup_mma_wait(3, deps=(s,))
                bias = bias_s.index(i * PAIR + C % PAIR).slice(part * PART, PART, dim=1).load(S)
                lse = lse_s.index(j).slice(part * PART, PART).load(QUERIES)
                p = gl.exp2(s * unit + (bias - lse[None, :]))
                high, low = split(p)
                high = gl.convert_layout(high, OPERAND, assert_trivial=True)
                low = gl.convert_layout(low, OPERAND, assert_trivial=True)
                if FRESH:
                    dv_new = product(high, low, do, do_low, none, True)
                else:
                    dv = product(high, low, do, do_low, dv, False)
                delta = delta_s.index(j).slice(part * PART, PART).load(QUERIES)
                dp = warpgroup_mma_wait(3, deps=(dp,))  # dP, dV
                ds = p * (dp * c_dp - delta[None, :])
                high, low = split(ds)
                high = gl.convert_layout(high, OPERAND, assert_trivial=True)
                low = gl.convert_layout(low, OPERAND, assert_trivial=True)
                if FRESH:
                    dk_new = product(high, low, q, q_low, none, True)
                else:
                    dk = product(high, low, q, q_low, dk, False)
            if FRESH:
                dv_new, dk_new = warpgroup_mma_wait(0, deps=(dv_new, dk_new))
                dv += dv_new
                dk += dk_new
            else:
                dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
            release(empty, n, STAGES)
            n += 1
        F32: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
        k_tile = k_s.index(2 * C).reinterpret(gl.float32, [ROW, DIM], F32)
        v_tile = v_s.index(2 * C).reinterpret(gl.float32, [ROW, DIM], F32)
        gl.barrier()
        k_tile.store(dk * (scale * u_q * gl.load(u_ds + bh)))
        v_tile.store(dv * (gl.load(u_do + bh) * (1.0 / 16384.0)))
        fence_async_shared()
        store_tile(DK, b, h, n0 + C % PAIR * ROW, 0, k_tile)
        store_tile(DV, b, h, n0 + C % PAIR * ROW, 0, v_tile)
        tma.store_wait(0)
        gl.barrier()
        release(kv_empty, turn, 1)
        turn += 1


_COUNTS = ["heads", "repeats", "bias_heads", "shared", "groups", "padded", "len_q", "len_k", "n_tiles"]


@gluon.jit(do_not_specialize=_COUNTS)
def _keys_kernel(Q, K, V, DOut, Rows, Delta, Bias, UnitQ, UnitK, UnitDO, UnitDP, UnitDS, DK, DV, bias_b, bias_h, heads,
                 repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles, scale,
                 SHARED_HEADS: gl.constexpr, EARLY: gl.constexpr, REGISTERS: gl.constexpr, PAIR: gl.constexpr,
                 SHARERS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, HELD: gl.constexpr,
                 FRESH: gl.constexpr):
    """dK and dV of tiles of 64 PAIR keys of SHARERS sharers. Bias: transposed, in log2 units."""
    q_s = make_tiles(Q, STAGES * SHARERS * 2)
    k_s = make_tiles(K, SHARERS * PAIR * 2)
    do_s = make_tiles(DOut, STAGES * SHARERS * 2)
    v_s = make_tiles(V, SHARERS * PAIR * 2)
    bias_s = make_tiles(Bias, STAGES * PAIR)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES * SHARERS, ROW], Rows.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES * SHARERS, ROW], Delta.layout)
    full = make_barriers(STAGES, PAIR + 6 * SHARERS)
    empty = make_barriers(STAGES, SHARERS * PAIR)
    kv_full = make_barriers(1, 4 * SHARERS * PAIR)
    kv_empty = make_barriers(1, SHARERS * PAIR)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s)
    bars = (full, empty, kv_full, kv_empty)
    counts = (heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    Units = (UnitQ, UnitK, (UnitDO, UnitDP, UnitDS))
    if PAIR * SHARERS == 4:
        gl.warp_specialize([
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 0, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 1, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 2, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 3, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_producer, (Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, counts, SHARED_HEADS, PAIR, SHARERS, STAGES)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip
    elif PAIR * SHARERS == 3:
        gl.warp_specialize([
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 0, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 1, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 2, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_producer, (Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, counts, SHARED_HEADS, PAIR, SHARERS, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 0, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_consumer, (DK, DV, Units, tiles, bars, counts, scale, 1, SHARED_HEADS, PAIR, SHARERS, STAGES, PART, HELD, FRESH)),
            (_keys_producer, (Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, counts, SHARED_HEADS, PAIR, SHARERS, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- dQ and dbias ------------------------------------------------------------------------------------------------------

M = gl.constexpr(128)


@gluon.jit
def _sums_tile(t, slices, counts, N: gl.constexpr):
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    n_m = (len_q + M - 1) // M
    n_n = (len_k + N - 1) // N
    m0 = t // n_n % n_m * M
    n0 = t % n_n * N
    piece = t // (n_m * n_n)
    part = piece // slices
    share = (shared + parts - 1) // parts
    first = part * share
    return piece - part * slices, part, m0, n0, first, gl.minimum(first + share, shared)


@gluon.jit
def _sums_producer(Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, slices, counts, SHARED_HEADS: gl.constexpr,
                   N: gl.constexpr, STAGES: gl.constexpr):
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s = tiles
    full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    bias_b, bias_h = several
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, part, m0, n0, first, end = _sums_tile(t, slices, counts, N)
        wait_empty(bias_empty, turn, 1)
        for c in gl.static_range(2):
            load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, m0 + c * ROW, n0,
                      bias_full.index(0), bias_s.index(c))
        for r in range(first, end):
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            row = (b * heads + h) * padded + m0
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_parts(Q, b, h, m0, full.index(i), q_s, 2 * i)
            load_parts(K, b, h, n0, full.index(i), k_s, 2 * i)
            load_parts(DOut, b, h, m0, full.index(i), do_s, 2 * i)
            load_parts(V, b, h, n0, full.index(i), v_s, 2 * i)
            load_numbers(Rows, row, full.index(i), lse_s.index(i))
            load_numbers(Delta, row, full.index(i), delta_s.index(i))
            n += 1
        turn += 1


@gluon.jit
def _begin(left, right, i, part, C: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    zeros = gl.zeros([ROW, PART], gl.float32, S)
    x = left.index(2 * i).slice(C * ROW, ROW, dim=0)
    x_low = left.index(2 * i + 1).slice(C * ROW, ROW, dim=0)
    y = right.index(2 * i).slice(part * PART, PART, dim=0).permute((1, 0))
    y_low = right.index(2 * i + 1).slice(part * PART, PART, dim=0).permute((1, 0))
    return product(x, x_low, y, y_low, zeros, True)


@gluon.jit
def _sums_consumer(DBias, DQ, Units, tiles, bars, slices, counts, scale, C: gl.constexpr, SHARED_HEADS: gl.constexpr,
                   N: gl.constexpr, STAGES: gl.constexpr, EVEN_N: gl.constexpr):
    """Two halves of the columns are worked on in turn, of sums low and high."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s = tiles
    full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    unit_q, unit_k, unit_dp, unit_ds = Units
    PART: gl.constexpr = N // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    none = gl.zeros([ROW, DIM], gl.float32, GRAD)
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, part, m0, n0, first, end = _sums_tile(t, slices, counts, N)
        tile = bias_s.index(C)
        wait_full(bias_full, turn, 1)
        low = gl.zeros([ROW, PART], gl.float32, S)
        high = gl.zeros([ROW, PART], gl.float32, S)
        if first < end:
            wait_full(full, n, STAGES)
        s = _begin(q_s, k_s, slot(n, STAGES), 0, C, S, PART)
        s = warpgroup_mma_wait(0, deps=(s,))
        for r in range(first, end):
            i = slot(n, STAGES)
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            bh = b * heads + h
            u_k = gl.load(unit_k + bh)
            unit = scale * LOG2E * gl.load(unit_q + bh) * u_k
            c_dp = gl.load(unit_dp + bh)
            c_ds = gl.load(unit_ds + bh)
            k = k_s.index(2 * i)
            k_low = k_s.index(2 * i + 1)
            dp = _begin(do_s, v_s, i, 0, C, S, PART)
            lse = lse_s.index(i).slice(C * ROW, ROW).load(ROWS)
            delta = delta_s.index(i).slice(C * ROW, ROW).load(ROWS)
            x = s * unit + (tile.slice(0, PART, dim=1).load(S) - lse[:, None])
            if not EVEN_N:
                x = gl.minimum(x, 14.0)
            p = gl.exp2(x)
            s_high = _begin(q_s, k_s, i, 1, C, S, PART)
            dp = warpgroup_mma_wait(3, deps=(dp,))  # dP, S
            ds = p * (dp * c_dp - delta[:, None])
            low += ds * c_ds
            a, a_low = split(ds)
            a = gl.convert_layout(a, OPERAND, assert_trivial=True)
            a_low = gl.convert_layout(a_low, OPERAND, assert_trivial=True)
            dq = product(a, a_low, k.slice(0, PART, dim=0), k_low.slice(0, PART, dim=0), none, True)
            dp_high = _begin(do_s, v_s, i, 1, C, S, PART)
            s_high = warpgroup_mma_wait(6, deps=(s_high,))  # S, dQ, dP
            x = s_high * unit + (tile.slice(PART, PART, dim=1).load(S) - lse[:, None])
            if not EVEN_N:
                x = gl.minimum(x, 14.0)
            p = gl.exp2(x)
            if r + 1 < end:
                wait_full(full, n + 1, STAGES)
            dp_high, dq = warpgroup_mma_wait(0, deps=(dp_high, dq))  # dQ, dP
            s = _begin(q_s, k_s, slot(n + 1, STAGES), 0, C, S, PART)
            ds = p * (dp_high * c_dp - delta[:, None])
            high += ds * c_ds
            a, a_low = split(ds)
            a = gl.convert_layout(a, OPERAND, assert_trivial=True)
            a_low = gl.convert_layout(a_low, OPERAND, assert_trivial=True)
            dq2 = product(a, a_low, k.slice(PART, PART, dim=0), k_low.slice(PART, PART, dim=0), none, True)
            s, dq2 = warpgroup_mma_wait(0, deps=(s, dq2))  # S, dQ
            release(empty, n, STAGES)
            tma.store_wait(0)
            gl.barrier()
            dq_s.index(C).store((dq + dq2) * (c_ds * u_k * scale))
            fence_async_shared()
            tma.async_atomic_add(DQ, [b, h, m0 + C * ROW, 0], dq_s.index(C).reinterpret(gl.float32, [1, 1, ROW, DIM], DQ.layout))
            n += 1
        X = DBias + (part * slices + piece).to(gl.int64) * len_q * len_k
        rows = m0 + C * ROW + gl.arange(0, ROW, ROWS)[:, None]
        columns = n0 + gl.arange(0, PART, gl.SliceLayout(0, S))[None, :]
        at = rows.to(gl.int64) * len_k + columns
        gl.store(X + at, low, mask=(rows < len_q) & (columns < len_k))
        columns += PART
        gl.store(X + at + PART, high, mask=(rows < len_q) & (columns < len_k))
        release(bias_empty, turn, 1)
        turn += 1
    tma.store_wait(0)


_COUNTS2 = ["slices", "heads", "repeats", "bias_heads", "shared", "parts", "padded", "len_q", "len_k", "n_tiles"]


@gluon.jit(do_not_specialize=_COUNTS2)
def _sums_kernel(Q, K, V, DOut, Rows, Delta, Bias, UnitQ, UnitK, UnitDP, UnitDS, DQ, DBias, bias_b, bias_h, slices,
                 heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles, scale,
                 SHARED_HEADS: gl.constexpr, EVEN_N: gl.constexpr, EARLY: gl.constexpr, N: gl.constexpr,
                 STAGES: gl.constexpr):
    """dQ and dbias."""
    q_s = make_tiles(Q, STAGES * 2)
    k_s = make_tiles(K, STAGES * 2)
    do_s = make_tiles(DOut, STAGES * 2)
    v_s = make_tiles(V, STAGES * 2)
    bias_s = make_tiles(Bias, 2)
    dq_s = make_tiles(DQ, 2)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, M], Rows.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, M], Delta.layout)
    full = make_barriers(STAGES, 10)
    empty = make_barriers(STAGES, 2)
    bias_full = make_barriers(1, 2)
    bias_empty = make_barriers(1, 2)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s)
    bars = (full, empty, bias_full, bias_empty)
    counts = (heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    Units = (UnitQ, UnitK, UnitDP, UnitDS)
    gl.warp_specialize([
        (_sums_consumer, (DBias, DQ, Units, tiles, bars, slices, counts, scale, 0, SHARED_HEADS, N, STAGES, EVEN_N)),
        (_sums_consumer, (DBias, DQ, Units, tiles, bars, slices, counts, scale, 1, SHARED_HEADS, N, STAGES, EVEN_N)),
        (_sums_producer, (Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, slices, counts, SHARED_HEADS, N, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


# PAIR, SHARERS, STAGES, PART, HELD, FRESH, REGISTERS
KEYS_VARIANT = tuple(int(n) for n in os.environ.get("F32_KEYS", "1,3,2,64,0,0,160").split(","))
SUMS_VARIANT = tuple(int(n) for n in os.environ.get("F32_SUMS", "128,2").split(","))  # N, STAGES


def _ahead(call: Call, out: torch.Tensor, dout: torch.Tensor, padded: int, dlse: bool) -> launch.Launch:
    strides = *call.strides(out), *call.strides(dout)
    meta = {
        "HEAD_DIM": call.head_dim_v, "PIECE": call.piece, "EVEN": call.len_q % _ROWS == 0, "DLSE": dlse, "EARLY": True,
        "ROWS": _ROWS, "DIM": _DIM, "num_warps": 16, "launch_pdl": True,
    }  # fmt: skip
    return launch.Launch(_ahead_kernel, call.batch * call.heads, (*strides, call.heads, call.len_q, padded), meta)


def _keys(call: Call, bias: torch.Tensor, padded: int) -> Launch:
    pair, sharers, stages, part, held, fresh, registers = KEYS_VARIANT
    dim = _DIM
    slices = bias.shape[0] * bias.shape[1]
    shared = call.batch * call.heads // slices
    groups = -(-shared // sharers)
    n_tiles = -(-call.len_k // (64 * pair)) * slices * groups
    scalars = (
        *(int(stride > 0) for stride in call.bias_strides[:2]), call.heads, call.repeats, bias.shape[1], shared,
        groups, padded, call.len_q, call.len_k, n_tiles, call.scale,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": bias.shape[1] < call.heads, "EARLY": False, "REGISTERS": registers, "PAIR": pair,
        "SHARERS": sharers, "STAGES": stages, "PART": part, "HELD": bool(held), "FRESH": bool(fresh), "num_warps": 4,
        "launch_pdl": False,
    }  # fmt: skip
    blocks = {
        "Q": (64, dim), "K": (64, dim), "V": (64, dim), "DOut": (64, dim), "Rows": (64,), "Delta": (64,),
        "Bias": (64, 64), "DK": (64, dim), "DV": (64, dim),
    }  # fmt: skip
    return Launch(_keys_kernel, min(n_tiles, call.device.sms), scalars, meta, _SPILL, blocks)


def _sums(call: Call, bias: torch.Tensor, padded: int) -> Launch:
    n, stages = SUMS_VARIANT
    dim = _DIM
    slices = bias.shape[0] * bias.shape[1]
    shared = call.batch * call.heads // slices
    tiles = -(-call.len_q // 128) * -(-call.len_k // n) * slices
    parts = max(1, min(shared // 4, call.device.sms // tiles))
    parts = -(-shared // -(-shared // parts))  # each has something to add
    scalars = (
        *(int(stride > 0) for stride in call.bias_strides[:2]), slices, call.heads, call.repeats, bias.shape[1], shared,
        parts, padded, call.len_q, call.len_k, tiles * parts, call.scale,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": bias.shape[1] < call.heads, "EVEN_N": call.even(call.len_k, n), "EARLY": False, "N": n,
        "STAGES": stages, "num_warps": 4, "launch_pdl": False,
    }  # fmt: skip
    blocks = {
        "Q": (128, dim), "K": (n, dim), "V": (n, dim), "DOut": (128, dim), "Rows": (128,), "Delta": (128,),
        "Bias": (64, n), "DQ": (64, dim),
    }  # fmt: skip
    return Launch(_sums_kernel, min(tiles * parts, call.device.sms), scalars, meta, _SPILL, blocks, parts)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbias, None."""
    call = Call(x, o)
    parts = []
    for t in (x.q, x.k, x.v):
        p, unit, norm = empty_parts(t)
        remembered(x, f"parts {len(parts)}", lambda: parts_launch(call, t))(t, p, unit, norm)
        parts.append((p, unit, norm))
    (q, uq, _), (k, uk, _), (v, uv, nv) = parts
    padded = -(-call.len_q // 128) * 128
    do = empty_parts(dout)[0]
    n = call.batch * call.heads
    rows, delta = empty((2, n * padded), lse).unbind()
    units = empty((3, n), lse)
    u_do, u_dp, u_ds = units.unbind()
    ahead = remembered(x, "bwd ahead", lambda: _ahead(call, out, dout, padded, dlse is not None))
    ahead(out, dout, lse, dlse, uv, nv, do, rows, delta, units)
    bias = x.bias * 1.4426950408889634
    bias_t = bias.transpose(2, 3).contiguous()
    dq, dk, dv = torch.zeros_like(x.q), empty_like(x.k), empty_like(x.v)
    keys = remembered(x, "bwd keys", lambda: _keys(call, x.bias, padded))
    keys(q, k, v, do, rows, delta, bias_t, uq, uk, u_do, u_dp, u_ds, dk, dv)
    sums = remembered(x, "bwd sums", lambda: _sums(call, x.bias, padded))
    dbias = sum_of_parts(sums, x.bias, q, k, v, do, rows, delta, bias, uq, uk, u_dp, u_ds, dq)
    return dq, dk, dv, dbias, None
