"""Attention forward on Hopper for head_dim 136 to 256 (Gluon), with the schedule of hopper_fwd.py.

Columns of queries, keys, values and out come in two halves, of 128 and of 64 or 128 (0 of values): lo and hi, so that
192 is 128 + 64 and not 256. Keys and values pass through one ring, in the order in which they are multiplied: k of
block 0, k of 1, v of 0, k of 2, v of 1 ... A ring of 4 lows and 3 highs is what fits beside 128 queries of 192 columns.
Out takes the place of its queries in shared memory; a third slot lets the next tile's queries come meanwhile.

SURE, for bfloat16, whose exponents are float32's: once every query of a tile has a score to refer to, blocks of keys
are taken without their maxima, p = exp2(s - m), and the accumulator is never rescaled. Sums may grow as they like up
to 2^64; a program of which one does not stay below, or whose out is not finite, does all its tiles once more in the
ordinary way.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from adatom.ops.attention.hopper_fwd_plan import balance
from adatom.ops.attention.hopper_fwd_tiles import (
    blocks_of,
    count_tiles,
    masked_scores,
    nothing_seen,
    softmax_step,
    tile_of,
)
from adatom.ops.attention.hopper_packed import table_launch, table_size
from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LN2,
    LOG2E,
    Launch,
    as_box,
    boxed,
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    keys_shared,
    let_next,
    make_barriers,
    mbarrier,
    named_arrive,
    named_sync,
    release,
    slot,
    store_rows,
    tile_number,
    tiles_of_program,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LO = gl.constexpr(128)  # columns of the first half
PIECE = gl.constexpr(64)  # columns that TMA copies at a time
ROWS = gl.constexpr(64)  # queries of a consumer
TURN = gl.constexpr(8)  # named barrier of the first consumer's turn
ALL = gl.constexpr(10)  # named barrier of the consumers and the producer
MATRIX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
FLAG = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MOST = gl.constexpr(2.0**64)  # sums of probabilities above it are not trusted


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for. The first fields are those of hopper_fwd_tiles.py."""

    BIAS: int
    SOFTCAP: bool
    FOLD: bool  # scale > 0
    LEFT: bool  # windows
    RIGHT: bool
    MASK: bool  # some blocks of keys are masked
    SINKS: bool
    LENS: bool
    VARLEN: bool
    HEAD_DIM_V: int
    CONSUMERS: int
    BLOCK_M: int
    BLOCK_N: int
    HQ: int  # columns of the second half of queries and keys
    HV: int  # of values, at most HQ; 0: there is none
    Q_SLOTS: int  # tiles of queries of one consumer
    LO_SLOTS: int  # tiles of keys and values: first halves
    HI_SLOTS: int  # second halves; at most as many
    SURE: bool


@gluon.constexpr_function
def _plan(*fields):
    return Plan(*fields)


@gluon.jit
def _copy(desc, b, h, row, column, full, tile, H: gl.constexpr):
    """Begin to copy columns column.. of rows row.. to the first H columns of a tile."""
    SHAPE: gl.constexpr = [tile.shape[1] // PIECE, tile.shape[0], PIECE]
    pieces = tile.reinterpret(desc.dtype, SHAPE, MATRIX)
    for c in gl.static_range(H // PIECE):
        tma.async_load(desc, [b, h, row, column + c * PIECE], full, as_box(desc, pieces.index(c)))


@gluon.jit
def _store(desc, b, h, row, column, tile, H: gl.constexpr):
    """Begin to copy the first H columns of a tile to columns column.. of rows row.."""
    SHAPE: gl.constexpr = [tile.shape[1] // PIECE, tile.shape[0], PIECE]
    pieces = tile.reinterpret(desc.dtype, SHAPE, MATRIX)
    for c in gl.static_range(H // PIECE):
        tma.async_store(desc, [b, h, row, column + c * PIECE], as_box(desc, pieces.index(c)))


@gluon.jit
def _columns(tile, H: gl.constexpr):
    """The first H columns of a tile: all of them, or 64."""
    if tile.shape[1] == H:
        return tile
    else:
        SHAPE: gl.constexpr = [tile.shape[1] // PIECE, tile.shape[0], PIECE]
        return tile.reinterpret(tile.dtype, SHAPE, MATRIX).index(0)


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _feed_queries(Q, b, h, row, u, tiles, bars, PLAN: gl.constexpr):
    """Load use u of the slots of queries."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    q_full, q_empty, full, empty = bars
    i = slot(u, PLAN.Q_SLOTS)
    wait_empty(q_empty, u, PLAN.Q_SLOTS)
    mbarrier.expect(q_full.index(i), ROWS * (LO + PLAN.HQ) * 2)
    _copy(Q, b, h, row, 0, q_full.index(i), q_lo.index(i), LO)
    _copy(Q, b, h, row, LO, q_full.index(i), q_hi.index(i), PLAN.HQ)


@gluon.jit
def _feed(X, b, h, row, t, tiles, bars, H: gl.constexpr, PLAN: gl.constexpr):
    """Load use t of the ring of keys and values."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    q_full, q_empty, full, empty = bars
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    HI_SLOTS: gl.constexpr = PLAN.HI_SLOTS
    i = slot(t, LO_SLOTS)
    wait_empty(empty, t, LO_SLOTS)
    mbarrier.expect(full.index(i), PLAN.BLOCK_N * (LO + H) * 2)
    _copy(X, b, h, row, 0, full.index(i), lo_s.index(i), LO)
    if H > 0:
        if HI_SLOTS < LO_SLOTS:  # where a second half lay before
            wait_empty(empty, t + (LO_SLOTS - HI_SLOTS), LO_SLOTS)
        _copy(X, b, h, row, LO, full.index(i), hi_s.index(slot(t, HI_SLOTS)), H)


@gluon.jit
def _producer(Q, K, V, Lens, Order, tiles, bars, sizes, n_tiles, PLAN: gl.constexpr):
    """Keeps the rings full."""
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    u = 0  # tiles of queries begun
    t = 0  # uses of the ring of keys and values
    for again in range(2 if PLAN.SURE else 1):
        count = tiles_of_program(n_tiles)
        if PLAN.SURE:
            if again > 0:
                count = count * _unsure(tiles, 1)
        for turn in range(count):
            b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
            begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
            hk = h // (heads // kv_heads)
            n0 = start_k + begin + (blocks - 1) * BLOCK_N
            if PLAN.Q_SLOTS > 2:
                _feed_queries(Q, b, h, start_q + m0, u, tiles, bars, PLAN)
                _feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
            else:
                _feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
                _feed_queries(Q, b, h, start_q + m0, u, tiles, bars, PLAN)
            _feed_queries(Q, b, h, start_q + m0 + ROWS, u + 1, tiles, bars, PLAN)
            u += 2
            t += 1
            for _ in range(blocks - 1):
                n0 -= BLOCK_N
                _feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
                _feed(V, b, hk, n0 + BLOCK_N, t + 1, tiles, bars, PLAN.HV, PLAN)
                t += 2
            _feed(V, b, hk, n0, t, tiles, bars, PLAN.HV, PLAN)
            t += 1


@gluon.jit
def _unsure(tiles, WARPS: gl.constexpr):
    """1 if some consumer wants all tiles done again. All warps meet here."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    gl.barrier()
    named_sync(ALL, 288)
    gl.barrier()
    return gl.max(gl.maximum(flags.index(0).load(LAYOUT), flags.index(1).load(LAYOUT)), 0)


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _begin_scores(u, t, tiles, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin s = q k^T of use u of the queries and use t of the ring."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    i = slot(u, PLAN.Q_SLOTS)
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    k = lo_s.index(slot(t, PLAN.LO_SLOTS)).permute((1, 0))
    s = warpgroup_mma(q_lo.index(i), k, s, use_acc=False, is_async=True)
    k = hi_s.index(slot(t, PLAN.HI_SLOTS)).permute((1, 0))
    return warpgroup_mma(q_hi.index(i), k, s, is_async=True)


@gluon.jit
def _begin_out(p, lo, hi, t, tiles, PLAN: gl.constexpr):
    """Begin out += p v of use t of the ring."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    LEFT_LO: gl.constexpr = gl.DotOperandLayout(0, lo.type.layout, 2)
    LEFT_HI: gl.constexpr = gl.DotOperandLayout(0, hi.type.layout, 2)
    v = lo_s.index(slot(t, PLAN.LO_SLOTS))
    lo = warpgroup_mma(gl.convert_layout(p, LEFT_LO, assert_trivial=True), v, lo, is_async=True)
    if PLAN.HV > 0:
        v = _columns(hi_s.index(slot(t, PLAN.HI_SLOTS)), PLAN.HV)
        hi = warpgroup_mma(gl.convert_layout(p, LEFT_HI, assert_trivial=True), v, hi, is_async=True)
    return lo, hi


@gluon.jit
def _masked(s, first, n0, len_q, len_k, limits, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores s of queries first.. and keys n0.., without the scale if FOLD."""
    left, right, scale = limits
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    begin, end = keys_shared(first, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, ROWS)
    cut = (n0 < begin) | (n0 + BLOCK_N > end)
    return masked_scores(s, 0.0, first + i, n0 + j, cut, len_q, len_k, left, right, scale, 0.0, PLAN)


@gluon.jit
def _step(p, lo, hi, m, l, u, t, first, n0, len_q, len_k, limits, tiles, bars, SURE: gl.constexpr, C: gl.constexpr,
          PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """out += p v of the block before (use t + 1 of the ring), and p of the block of keys n0.. (use t).

    SURE: m is what scores refer to and stays as it is, and so does what was added up."""
    q_full, q_empty, full, empty = bars
    GROUPS: gl.constexpr = 2 if PLAN.HV > 0 else 1
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    left, right, scale = limits
    wait_full(full, t, LO_SLOTS)
    named_sync(TURN + C, 256)
    s = _begin_scores(u, t, tiles, PLAN, LAYOUT)
    wait_full(full, t + 1, LO_SLOTS)
    lo, hi = _begin_out(p, lo, hi, t + 1, tiles, PLAN)
    named_arrive(TURN + (C + 1) % 2, 256)
    s = warpgroup_mma_wait(GROUPS, deps=(s,))
    release(empty, t, LO_SLOTS)
    wait_full(full, t + 1, LO_SLOTS)  # a branch, or ptxas releases the keys among the exponentials
    s = _masked(s, first, n0, len_q, len_k, limits, PLAN, LAYOUT)
    if SURE:
        pf = gl.exp2(s * (scale * LOG2E) - m[:, None])
        l = l + gl.sum(pf, 1)
    else:
        pf, alpha, m, l = softmax_step(s, m, l, scale, PLAN)
    # ptxas moves the wait for products above the softmax, unless another wait, a branch, comes before it
    wait_full(full, t + 1, LO_SLOTS)
    if PLAN.HV > 0:
        lo, hi, pf = warpgroup_mma_wait(0, deps=(lo, hi, pf))
    else:
        lo, pf = warpgroup_mma_wait(0, deps=(lo, pf))
    release(empty, t + 1, LO_SLOTS)
    if not SURE:
        lo = lo * gl.convert_layout(alpha, gl.SliceLayout(1, lo.type.layout))[:, None]
        if PLAN.HV > 0:
            hi = hi * gl.convert_layout(alpha, gl.SliceLayout(1, hi.type.layout))[:, None]
    return pf.to(p.dtype), lo, hi, m, l


@gluon.jit
def _free_queries(u, bars, PLAN: gl.constexpr):
    """Let queries come to the slot of use u: what this consumer stored from there has been read."""
    q_full, q_empty, full, empty = bars
    tma.store_wait(0)
    gl.barrier()
    release(q_empty, u, PLAN.Q_SLOTS)


@gluon.jit
def _consumer(results, given, tiles, bars, sizes, n_tiles, scale, C: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of out and lse of every tile."""
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    HV: gl.constexpr = PLAN.HV if PLAN.HV > 0 else 64
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    q_full, q_empty, full, empty = bars
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    Out, OutPtr, Lse, stride_oh, stride_om = results
    Sinks, Lens, Order = given
    limits = (left, right, scale)
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LO_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LO, 16])
    HI_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HV, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    FROM_SECOND: gl.constexpr = PLAN.RIGHT and C == 0 and BLOCK_N == 64
    if C == 1:
        named_arrive(TURN, 256)  # the first consumer begins

    u = C  # uses of the slots of queries, of which each consumer has every second
    t = 0  # uses of the ring of keys and values
    bad = gl.full([ROWS], 0, gl.int32, OF_ROWS)
    for again in range(2 if PLAN.SURE else 1):
        count = tiles_of_program(n_tiles)
        if PLAN.SURE:
            if again > 0:
                flags.index(C).store(gl.convert_layout(bad, gl.BlockedLayout([1], [32], [4], [0])))
                count = count * _unsure(tiles, 4)
        for turn in range(count):
            if FROM_SECOND:
                b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
                begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
                n0 = begin + (blocks - 1) * BLOCK_N
                hidden = (n0 > m0 + (ROWS - 1) + len_k - len_q + right) & (blocks > 1)
                if hidden:  # only the other consumer's queries see the first block
                    wait_full(full, t, LO_SLOTS)
                    named_sync(TURN + C, 256)
                    named_arrive(TURN + (C + 1) % 2, 256)
                    release(empty, t, LO_SLOTS)
                    t += 1
                    n0 -= BLOCK_N
                    blocks -= 1
                    if PLAN.Q_SLOTS > 2:  # the second block comes after the other consumer's queries
                        if u >= 2:
                            _free_queries(u - 2, bars, PLAN)
            wait_full(q_full, u, PLAN.Q_SLOTS)
            wait_full(full, t, LO_SLOTS)
            named_sync(TURN + C, 256)
            s = _begin_scores(u, t, tiles, PLAN, S_LAYOUT)
            named_arrive(TURN + (C + 1) % 2, 256)
            if PLAN.Q_SLOTS > 2:
                free = u >= 2
                if FROM_SECOND:
                    free = free & (hidden == 0)
                if free:
                    _free_queries(u - 2, bars, PLAN)
            if not FROM_SECOND:
                b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
                begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
                n0 = begin + (blocks - 1) * BLOCK_N
            first = m0 + C * ROWS
            m, l = nothing_seen(Sinks, h, OF_ROWS, PLAN)
            lo = gl.zeros([ROWS, LO], gl.float32, LO_LAYOUT)
            hi = gl.zeros([ROWS, HV], gl.float32, HI_LAYOUT)
            s = warpgroup_mma_wait(0, deps=(s,))
            release(empty, t, LO_SLOTS)
            s = _masked(s, first, n0, len_q, len_k, limits, PLAN, S_LAYOUT)
            pf, alpha, m, l = softmax_step(s, m, l, scale, PLAN)
            p = pf.to(q_lo.dtype)
            t += 1
            if FROM_SECOND:
                if hidden:
                    wait_full(full, t, LO_SLOTS)
                    release(empty, t, LO_SLOTS)
                    t += 1
            if PLAN.LENS or PLAN.VARLEN:
                if len_k - n0 < BLOCK_N:  # values beyond the last may be NaN; each consumer clears them for itself
                    v = t + gl.where(blocks > 1, 1, 0)
                    wait_full(full, v, LO_SLOTS)
                    clear_rows(lo_s.index(slot(v, LO_SLOTS)), len_k - n0)
                    if PLAN.HV > 0:
                        clear_rows(_columns(hi_s.index(slot(v, PLAN.HI_SLOTS)), PLAN.HV), len_k - n0)
                    gl.barrier()

            ordinary = blocks - 1
            if PLAN.SURE:
                if again == 0:
                    ordinary = blocks * 0
                    if PLAN.RIGHT:  # until the first query, hence all, has a score to refer to
                        end = gl.minimum(len_k, first + len_k - len_q + right + 1)
                        ordinary = gl.minimum(gl.maximum(n0 - end + BLOCK_N, 0) // BLOCK_N, blocks - 1)
            for _ in range(ordinary):
                n0 -= BLOCK_N
                p, lo, hi, m, l = _step(p, lo, hi, m, l, u, t, first, n0, len_q, len_k, limits, tiles, bars, False, C,
                                        PLAN, S_LAYOUT)
                t += 2
            if PLAN.SURE:
                m = gl.where(m == float("-inf"), 0.0, m)
                for _ in range(blocks - 1 - ordinary):
                    n0 -= BLOCK_N
                    p, lo, hi, m, l = _step(p, lo, hi, m, l, u, t, first, n0, len_q, len_k, limits, tiles, bars, True,
                                            C, PLAN, S_LAYOUT)
                    t += 2

            wait_full(full, t, LO_SLOTS)
            lo, hi = _begin_out(p, lo, hi, t, tiles, PLAN)
            seen = l > 0.0
            total = gl.where(seen, l, 1.0)
            lse = gl.where(seen, m * (LN2 if PLAN.FOLD else 1.0) + gl.log2(total) * LN2, float("-inf"))
            i = gl.arange(0, ROWS, OF_ROWS)
            row = (b.to(gl.int64) * heads + h) * most_q + start_q
            gl.store(Lse + row + first + i, lse, mask=first + i < len_q)
            inverse = 1.0 / total
            if PLAN.HV > 0:
                lo, hi = warpgroup_mma_wait(0, deps=(lo, hi))
            else:
                lo = warpgroup_mma_wait(0, deps=(lo,))
            release(empty, t, LO_SLOTS)
            t += 1
            lo = lo * gl.convert_layout(inverse, gl.SliceLayout(1, LO_LAYOUT))[:, None]
            hi = hi * gl.convert_layout(inverse, gl.SliceLayout(1, HI_LAYOUT))[:, None]
            if PLAN.SURE:  # a product with 0 is NaN for infinities and NaN
                rest = gl.convert_layout(gl.sum(lo * 0.0, 1), OF_ROWS)
                if PLAN.HV > 0:
                    rest += gl.convert_layout(gl.sum(hi * 0.0, 1), OF_ROWS)
                bad |= gl.where((total < MOST) & (rest == 0.0), 0, 1)
            o_lo = q_lo.index(slot(u, PLAN.Q_SLOTS))
            o_hi = _columns(q_hi.index(slot(u, PLAN.Q_SLOTS)), HV)
            o_lo.store(lo.to(q_lo.dtype))
            if PLAN.HV > 0:
                o_hi.store(hi.to(q_lo.dtype))
            if PLAN.VARLEN:  # the rows after the last are the next sequence's
                X = OutPtr + h.to(gl.int64) * stride_oh
                store_rows(X, o_lo, start_q + first, len_q - first, stride_om, min(PLAN.HEAD_DIM_V, 128))
                if PLAN.HV > 0:
                    store_rows(X + LO, o_hi, start_q + first, len_q - first, stride_om, PLAN.HEAD_DIM_V - LO)
                fence_async_shared()
            else:
                fence_async_shared()
                _store(Out, b, h, first, 0, o_lo, LO)
                if PLAN.HV > 0:
                    _store(Out, b, h, first, LO, o_hi, PLAN.HV)
            if PLAN.Q_SLOTS == 2:
                _free_queries(u, bars, PLAN)
            u += 2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_heads", "group", "len_q", "len_k", "left", "right", "n_tiles"])
def _deep_fwd_kernel(Q, K, V, Sinks, Lens, Order, Out, OutPtr, Lse, stride_oh, stride_om, heads, kv_heads, n_heads,
                     group, len_q, len_k, left, right, n_tiles, scale, FOLD: gl.constexpr, LEFT: gl.constexpr,
                     RIGHT: gl.constexpr, MASK: gl.constexpr, SINKS: gl.constexpr, LENS: gl.constexpr,
                     VARLEN: gl.constexpr, HEAD_DIM_V: gl.constexpr, EARLY: gl.constexpr, BLOCK_N: gl.constexpr,
                     HQ: gl.constexpr, HV: gl.constexpr, Q_SLOTS: gl.constexpr, LO_SLOTS: gl.constexpr,
                     HI_SLOTS: gl.constexpr, SURE: gl.constexpr, REGISTERS: gl.constexpr):
    """Tensors come as descriptors: tiles of 64 columns, of 64 rows of Q and Out, of BLOCK_N of K and V."""
    PLAN: gl.constexpr = _plan(0, False, FOLD, LEFT, RIGHT, MASK, SINKS, LENS, VARLEN, HEAD_DIM_V, 2, 64, BLOCK_N, HQ,
                               HV, Q_SLOTS, LO_SLOTS, HI_SLOTS, SURE)
    q_lo = gl.allocate_shared_memory(Q.dtype, [Q_SLOTS, ROWS, LO], MATRIX)
    q_hi = gl.allocate_shared_memory(Q.dtype, [Q_SLOTS, ROWS, HQ], MATRIX)
    lo_s = gl.allocate_shared_memory(Q.dtype, [LO_SLOTS, BLOCK_N, LO], MATRIX)
    hi_s = gl.allocate_shared_memory(Q.dtype, [HI_SLOTS, BLOCK_N, HQ], MATRIX)
    flags = gl.allocate_shared_memory(gl.int32, [2, ROWS], FLAG)
    q_full = make_barriers(Q_SLOTS, 1)
    q_empty = make_barriers(Q_SLOTS, 1)
    full = make_barriers(LO_SLOTS, 1)
    empty = make_barriers(LO_SLOTS, 2)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_lo, q_hi, lo_s, hi_s, flags)
    bars = (q_full, q_empty, full, empty)
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    results = (Out, OutPtr, Lse, stride_oh, stride_om)
    given = (Sinks, Lens, Order)
    gl.warp_specialize([
        (_consumer, (results, given, tiles, bars, sizes, n_tiles, scale, 0, PLAN)),
        (_consumer, (results, given, tiles, bars, sizes, n_tiles, scale, 1, PLAN)),
        (_producer, (Q, K, V, Lens, Order, tiles, bars, sizes, n_tiles, PLAN)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- launcher ----------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How the kernel is tiled: two consumers of 64 queries, block_n keys; slots of queries, of first and of second
    halves of keys and values; registers of a consumer's thread; persistent: as many programs as multiprocessors; spill:
    bytes of registers it may spill; sure: whether bfloat16 goes without maxima."""

    block_n: int
    q_slots: int
    lo_slots: int
    hi_slots: int
    persistent: bool
    registers: int = 240
    spill: int = 384
    sure: bool = True
    consumers: int = 2
    block_m: int = 64


_192 = Config(128, 2, 4, 3, True, sure=False)
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):  # whose descriptors of products leave no registers
    _192 = Config(64, 3, 6, 6, True)
_256 = Config(64, 3, 4, 4, True)
# (columns of q and k in memory, whether packed) -> queries (of packed sequences, on average) from which a tile serves:
# tile; see docs/hopper.md
CONFIGS: dict[tuple[int, bool], dict[int, Config]] = {
    (192, False): {0: _192, 16384: _192._replace(persistent=False)},
    (192, True): {0: _192._replace(persistent=False)},
    (256, False): {0: _256, 16384: _256._replace(persistent=False)},
    (256, True): {0: _256._replace(persistent=False)},
}


def pick(call: Call) -> Config:
    """The configuration for a call."""
    table = CONFIGS[192 if call.head_dim <= 192 else 256, call.varlen]
    length = call.len_q // max(call.batch, 1) if call.varlen else call.len_q
    return table[max(n for n in table if n <= length)]


class Launches(NamedTuple):
    """The launches of one forward: what follows from shapes and options."""

    table: launch.Launch | None  # of the tiles of packed sequences
    main: Launch
    lines: int  # numbers of that table


def _launches(x: Inputs, o: Options, out: torch.Tensor) -> Launches:
    call = Call(x, o)
    config, group = balance(pick(call), call)
    rows = config.consumers * config.block_m
    n_tiles = call.programs(call.len_q, rows)
    meta = dict(
        FOLD=o.scale > 0,
        LEFT=call.left >= 0,
        RIGHT=call.right >= 0,
        MASK=call.left >= 0 or call.right >= 0 or not call.even(call.len_k, config.block_n),
        SINKS=x.sinks is not None,
        LENS=x.kv_lens is not None,
        VARLEN=call.varlen,
        HEAD_DIM_V=call.head_dim_v if call.varlen else 0,  # TMA knows it otherwise
        EARLY=True,
        BLOCK_N=config.block_n,
        HQ=64 if call.head_dim <= 192 else 128,
        HV=next(h for h in (0, 64, 128) if call.head_dim_v <= 128 + h),
        Q_SLOTS=config.q_slots,
        LO_SLOTS=config.lo_slots,
        HI_SLOTS=config.hi_slots,
        SURE=config.sure and o.scale > 0 and x.q.dtype == torch.bfloat16,
        REGISTERS=config.registers,
        num_warps=4,
        launch_pdl=True,
    )
    blocks = {"Q": (64, 64), "K": (config.block_n, 64), "V": (config.block_n, 64), "Out": (64, 64)}
    heads, kv_heads, _, n_heads, _, *lengths = call.counts()
    scalars = (*call.strides(out)[1:], heads, kv_heads, n_heads, group, *lengths, n_tiles, call.scale)
    programs = min(n_tiles, call.device.sms) if config.persistent else n_tiles
    table = table_launch(call, rows, 3 * call.device.sms * rows // 2) if call.varlen else None
    return Launches(
        table, Launch(_deep_fwd_kernel, programs, scalars, meta, config.spill, blocks), table_size(call, rows)
    )


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    plan = remembered(x, "deep_fwd", lambda: _launches(x, o, out))
    order = None
    if plan.table is not None:
        order = torch.empty(plan.lines, dtype=torch.int32, device=lse.device)
        plan.table(order, x.cu_seqlens_q, x.cu_seqlens_k)
    plan.main(
        boxed(x.q), boxed(x.k), boxed(x.v), x.sinks, x.kv_lens, order, boxed(out), out, lse
    )
    return out, lse
