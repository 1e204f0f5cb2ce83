"""The warps of the Hopper kernel of dK and dV beyond head_dim 128: a producer, a consumer for dV and one for dK.

Columns of q and k come in two halves, of 128 and of HQ (64 or 128), those of v and dO in halves of 128 and of HV (0, 64
or 128): lo and hi. In shared memory a half is made of pieces of 64 columns, which is what TMA copies.

    of V's consumer                                of K's consumer
    S^T = K Q^T; P = exp(S - lse)                  dP^T = V dO^T
    dV += P^T dO                                   dS = P (dP - delta);  dK += dS^T Q

P, of a softcap times its slope, goes from one to the other through shared memory.
"""

from dataclasses import dataclass

from adatom.ops.attention.hopper_bwd_feed import before_first, step
from adatom.ops.attention.hopper_packed import HEADER
from adatom.tiles.hopper import (
    LOG2E,
    as_box,
    blocks_of_queries,
    box_at,
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    head_and_block,
    keys_of,
    mbarrier,
    planner,
    release,
    slot,
    tanh_of_scores,
    tma,
    visible,
    wait_empty,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK = gl.constexpr(64)  # keys of a program, queries of a block, columns of a piece
LO = gl.constexpr(128)  # columns of the first half
MATRIX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUERIES = gl.constexpr(gl.SliceLayout(0, SCORES.value))
STAGES = gl.constexpr(2)  # buffers of queries and of dO


@dataclass(frozen=True)
class Plan:
    """What the kernels are compiled for."""

    HQ: int  # columns of the second half of q and k
    HV: int  # of v; 0: there is none
    LEFT: bool  # windows
    RIGHT: bool
    EVEN_N: bool  # all blocks of keys are whole
    LENS: bool
    VARLEN: bool  # packed sequences
    SOFTCAP: bool


make_plan = planner(Plan)


# -- which tile, which blocks of queries -------------------------------------------------------------------------------


@gluon.jit
def blocks_of(n0, len_q, len_k, left, right, PLAN: gl.constexpr):
    """Blocks of queries of the keys n0..: (first, first and end of those that need no mask, number). Keys that no query
    sees have one block, all of it masked."""
    begin, whole_begin, whole_end, end = blocks_of_queries(n0, len_k - len_q, len_q, left, right, PLAN.LEFT, PLAN.RIGHT,
                                                           BLOCK, BLOCK)
    last = (gl.maximum(len_q, 1) - 1) // BLOCK
    begin = gl.minimum(begin, last)
    if PLAN.LENS:
        begin = gl.where(n0 >= len_k, last, begin)
    return begin, whole_begin, whole_end, gl.maximum(end - begin, 1)


@gluon.jit
def has_tile(Order, PLAN: gl.constexpr):
    """Whether this program has a tile: of packed sequences there may be fewer than programs."""
    if PLAN.VARLEN:
        return gl.program_id(0) < gl.load(Order)
    else:
        return True


@gluon.jit
def packed_tile(Order, counts):
    """The line of this program's tile: (sequence of its queries, of its keys, each as `box_at` takes it; head, first
    row, number of the sequence's block 0 of the first head among all blocks of queries, blocks of a head)."""
    n_sequences, len_q = counts[2], counts[4]
    row = Order + (gl.program_id(0) + 1) * HEADER  # below 2**31: no GPU holds more lines
    of_queries = gl.load(row + 1), gl.load(row + 3)
    of_keys = gl.load(row + 2), gl.load(row + 4)
    return of_queries, of_keys, gl.load(row + 6), gl.load(row), gl.load(row + 5), len_q // BLOCK + n_sequences


@gluon.jit
def tile_of(Order, Lens, counts, PLAN: gl.constexpr):
    """(batch of queries, of keys, head of keys, first key, queries, keys, number of the first head's block 0 among all
    blocks of queries, blocks of a head) of a program. Heads go in groups whose queries lie in L2; the first keys, the
    longest under a mask, first. Packed tiles are listed in Order; their batches are sequences, as `box_at` takes them.
    """
    heads, kv_heads, n_heads, group, len_q, len_k, left, right = counts
    if PLAN.VARLEN:
        of_queries, of_keys, hk, n0, first, stride = packed_tile(Order, counts)
        return of_queries, of_keys, hk, n0, of_queries[1], of_keys[1], first + hk * (heads // kv_heads) * stride, stride
    else:
        bh, block = head_and_block(gl.program_id(0), (len_k + BLOCK - 1) // BLOCK, n_heads, group)
        b = bh // kv_heads
        stride = (len_q + BLOCK - 1) // BLOCK
        len_k = keys_of(Lens, b, len_k, PLAN.LENS)
        return b, b, bh - b * kv_heads, block * BLOCK, len_q, len_k, bh * (heads // kv_heads) * stride, stride


# -- tiles -------------------------------------------------------------------------------------------------------------


@gluon.jit
def make_halves(desc, N: gl.constexpr, H: gl.constexpr):
    """Shared memory for N halves [64, H]."""
    return gl.allocate_shared_memory(desc.dtype, [N, BLOCK, H], MATRIX)


@gluon.jit
def load_half(desc, b, h, row, column, full, half, H: gl.constexpr):
    """Begin to copy columns column.. of rows row.. to a half."""
    pieces = half.reinterpret(desc.dtype, [H // BLOCK, BLOCK, BLOCK], MATRIX)
    for c in gl.static_range(H // BLOCK):
        tma.async_load(desc, box_at(desc, b, h, row, column + c * BLOCK), full, as_box(desc, pieces.index(c)))


@gluon.jit
def store_half(X, x, tile, b, h, row, column, H: gl.constexpr):
    """Write the accumulator x [64, H] to columns column.. of rows row.. of a gradient, by way of a tile [64, 128]."""
    tma.store_wait(0)
    pieces = tile.reinterpret(X.dtype, [LO // BLOCK, BLOCK, BLOCK], MATRIX)
    if H == LO:
        tile.store(x.to(X.dtype))
    else:
        pieces.index(0).store(x.to(X.dtype))
    fence_async_shared()
    for c in gl.static_range(H // BLOCK):
        tma.async_store(X, box_at(X, b, h, row, column + c * BLOCK), as_box(X, pieces.index(c)))


@gluon.jit
def _only(half, block):
    """The only tile of a half of k or v, at an index that the compiler does not know to be 0 (no block of queries has a
    negative number, and each turn of a loop another). It would keep what each product needs to know of the tile in
    registers, and spill."""
    return half.index(block >> 31)


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def producer(Q, K, V, DOut, Lse, Delta, Order, Lens, tiles, bars, counts, PLAN: gl.constexpr):
    """Loads tiles for the consumers."""
    if has_tile(Order, PLAN):
        _feed_queries(Q, K, V, DOut, Lse, Delta, Order, Lens, tiles, bars, counts, PLAN)


@gluon.jit
def _feed_queries(Q, K, V, DOut, Lse, Delta, Order, Lens, tiles, bars, counts, PLAN: gl.constexpr):
    heads, kv_heads, n_heads, group, _, _, left, right = counts
    k_lo, k_hi, v_lo, v_hi, q_lo, q_hi, do_lo, do_hi, lse_s, delta_s, _ = tiles
    k_full, v_full, q_full, q_empty, lo_full, lo_empty, hi_full, hi_empty, _, _ = bars
    HQ: gl.constexpr = PLAN.HQ
    HV: gl.constexpr = PLAN.HV
    sharing = heads // kv_heads
    bq, b, hk, n0, len_q, len_k, first, stride = tile_of(Order, Lens, counts, PLAN)
    begin, _first, _last, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
    mbarrier.expect(k_full.index(0), BLOCK * (LO + HQ) * 2)
    load_half(K, b, hk, n0, 0, k_full.index(0), k_lo.index(0), LO)
    load_half(K, b, hk, n0, LO, k_full.index(0), k_hi.index(0), HQ)
    m, h, block = before_first(hk, first, begin, sharing, stride)
    for n in range(blocks * sharing):
        m, h, block = step(m, h, block, begin, blocks, stride, PLAN)
        row = m * BLOCK
        i = slot(n, STAGES)
        wait_empty(q_empty, n, STAGES)
        mbarrier.expect(q_full.index(i), BLOCK * (LO + HQ) * 2 + 2 * BLOCK * 4)
        load_half(Q, bq, h, row, 0, q_full.index(i), q_lo.index(i), LO)
        load_half(Q, bq, h, row, LO, q_full.index(i), q_hi.index(i), HQ)
        tma.async_load(Lse, [block * BLOCK], q_full.index(i), lse_s.index(i))
        tma.async_load(Delta, [block * BLOCK], q_full.index(i), delta_s.index(i))
        if n == 0:
            mbarrier.expect(v_full.index(0), BLOCK * (LO + HV) * 2)
            load_half(V, b, hk, n0, 0, v_full.index(0), v_lo.index(0), LO)
            if HV > 0:
                load_half(V, b, hk, n0, LO, v_full.index(0), v_hi.index(0), HV)
        i = slot(n, STAGES)
        wait_empty(lo_empty, n, STAGES)
        mbarrier.expect(lo_full.index(i), BLOCK * LO * 2)
        load_half(DOut, bq, h, row, 0, lo_full.index(i), do_lo.index(i), LO)
        if HV > 0:
            i = slot(n, STAGES)
            wait_empty(hi_empty, n, STAGES)
            mbarrier.expect(hi_full.index(i), BLOCK * HV * 2)
            load_half(DOut, bq, h, row, LO, hi_full.index(i), do_hi.index(i), HV)


# -- consumer of dV ----------------------------------------------------------------------------------------------------


@gluon.jit
def _begin_scores(tiles, n, block):
    """Begin to multiply S^T of use n of the queries."""
    k_lo, k_hi, _, _, q_lo, q_hi, _, _, _, _, _ = tiles
    i = slot(n, STAGES)
    s = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    s = warpgroup_mma(_only(k_lo, block), q_lo.index(i).permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(_only(k_hi, block), q_hi.index(i).permute((1, 0)), s, is_async=True)


@gluon.jit
def exponents(s, lse, scales, PLAN: gl.constexpr):
    """(scores less lse in log2 units, slope of the softcap) from S. scales: that of S, and the softcap."""
    scale, softcap = scales
    if PLAN.SOFTCAP:
        t = tanh_of_scores(s * (scale / softcap))
        return t * (softcap * LOG2E) - lse, 1.0 - t * t
    else:
        return s * (scale * LOG2E) - lse, 1.0


@gluon.jit
def _probabilities(s, n, m, place, lse_s, counts, scales, TYPE: gl.constexpr, PLAN: gl.constexpr):
    """P^T of block m, and what K's consumer gets of it, rounded."""
    _, _, _, _, _, _, left, right = counts
    n0, len_q, len_k, whole_begin, whole_end = place
    LEFT: gl.constexpr = PLAN.LEFT
    RIGHT: gl.constexpr = PLAN.RIGHT
    lse = lse_s.index(slot(n, STAGES)).load(QUERIES)
    s, slope = exponents(s, lse[None, :], scales, PLAN)
    if LEFT or RIGHT or not PLAN.EVEN_N:
        cut = n0 + BLOCK > len_k
        if RIGHT:
            cut |= m < whole_begin
        if LEFT:
            cut |= m >= whole_end
        if cut:
            keys = n0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SCORES))
            queries = m * BLOCK + gl.arange(0, BLOCK, layout=QUERIES)
            seen = visible(queries[None, :], keys[:, None], len_k - len_q, len_k, left, right, LEFT, RIGHT)
            s = gl.where(seen, s, float("-inf"))
    p = gl.exp2(s)
    if PLAN.SOFTCAP:
        return p.to(TYPE), (p * slope).to(TYPE)
    else:
        p = p.to(TYPE)
        return p, p


@gluon.jit
def _value_step(p, dv_lo, dv_hi, n, m, block, place, tiles, bars, counts, scales, PLAN: gl.constexpr,
                LAST: gl.constexpr):
    """One block of queries: dV; then P^T of the next one, m, unless this is the last."""
    _, _, _, _, _, _, do_lo, do_hi, lse_s, _, p_s = tiles
    _, _, q_full, q_empty, lo_full, lo_empty, hi_full, hi_empty, p_full, p_empty = bars
    lo = gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=dv_lo.type.layout, k_width=2),
                           assert_trivial=True)
    hi = gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=dv_hi.type.layout, k_width=2),
                           assert_trivial=True)
    if PLAN.HV > 0:
        wait_full(hi_full, n, STAGES)
        dv_hi = warpgroup_mma(hi, do_hi.index(slot(n, STAGES)), dv_hi, is_async=True)
    wait_full(lo_full, n, STAGES)
    dv_lo = warpgroup_mma(lo, do_lo.index(slot(n, STAGES)), dv_lo, is_async=True)
    if not LAST:
        wait_full(q_full, n + 1, STAGES)
        s = _begin_scores(tiles, n + 1, block)
    dv_lo, dv_hi = warpgroup_mma_wait(0 if LAST else 2, deps=(dv_lo, dv_hi))
    if PLAN.HV > 0:
        release(hi_empty, n, STAGES)
    release(lo_empty, n, STAGES)
    if not LAST:
        s = warpgroup_mma_wait(0, deps=(s,))
        p, given = _probabilities(s, n + 1, m, place, lse_s, counts, scales, p_s.dtype, PLAN)
        release(q_empty, n + 1, STAGES)
        wait_full(p_empty, n, 1)
        p_s.store(given)
        mbarrier.arrive(p_full.index(0), count=1)
    return p, dv_lo, dv_hi


@gluon.jit
def value_consumer(DV, Order, Lens, tiles, bars, counts, scales, PLAN: gl.constexpr):
    """S^T, P^T and dV."""
    if has_tile(Order, PLAN):
        _value_tile(DV, Order, Lens, tiles, bars, counts, scales, PLAN)


@gluon.jit
def _value_tile(DV, Order, Lens, tiles, bars, counts, scales, PLAN: gl.constexpr):
    heads, kv_heads, n_heads, group, _, _, left, right = counts
    k_lo, k_hi, _, _, _, _, _, _, lse_s, _, p_s = tiles
    k_full, _, q_full, q_empty, _, _, _, _, p_full, _ = bars
    HV: gl.constexpr = PLAN.HV if PLAN.HV > 0 else BLOCK
    sharing = heads // kv_heads
    _, b, hk, n0, len_q, len_k, first, stride = tile_of(Order, Lens, counts, PLAN)
    begin, whole_begin, whole_end, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
    place = (n0, len_q, len_k, whole_begin, whole_end)
    dv_lo = gl.zeros([BLOCK, LO], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LO, 16]))
    dv_hi = gl.zeros([BLOCK, HV], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HV, 16]))
    m, h, block = before_first(hk, first, begin, sharing, stride)
    m, h, block = step(m, h, block, begin, blocks, stride, PLAN)
    wait_full(k_full, 0, 1)
    if PLAN.LENS:
        if n0 + BLOCK > len_k:  # keys beyond the last may be NaN
            clear_rows(k_lo.index(0), len_k - n0)
            clear_rows(k_hi.index(0), len_k - n0)
    wait_full(q_full, 0, STAGES)
    s = warpgroup_mma_wait(0, deps=(_begin_scores(tiles, m * 0, block),))
    p, given = _probabilities(s, 0, m, place, lse_s, counts, scales, p_s.dtype, PLAN)
    release(q_empty, 0, STAGES)
    p_s.store(given)
    mbarrier.arrive(p_full.index(0), count=1)
    last = blocks * sharing - 1
    for n in range(last):
        m, h, block = step(m, h, block, begin, blocks, stride, PLAN)
        p, dv_lo, dv_hi = _value_step(p, dv_lo, dv_hi, n, m, block, place, tiles, bars, counts, scales, PLAN, False)
    p, dv_lo, dv_hi = _value_step(p, dv_lo, dv_hi, last, m, block, place, tiles, bars, counts, scales, PLAN, True)
    store_half(DV, dv_lo, k_lo.index(0), b, hk, n0, 0, LO)  # nobody reads the keys any more
    if PLAN.HV > 0:
        store_half(DV, dv_hi, k_lo.index(0), b, hk, n0, LO, HV)
    tma.store_wait(0)


# -- consumer of dK ----------------------------------------------------------------------------------------------------


@gluon.jit
def _begin_dp(tiles, n, block, bars, PLAN: gl.constexpr):
    """Begin to multiply dP^T of use n of dO."""
    _, _, v_lo, v_hi, _, _, do_lo, do_hi, _, _, _ = tiles
    _, _, _, _, lo_full, _, hi_full, _, _, _ = bars
    wait_full(lo_full, n, STAGES)
    dp = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    do = do_lo.index(slot(n, STAGES))
    dp = warpgroup_mma(_only(v_lo, block), do.permute((1, 0)), dp, use_acc=False, is_async=True)
    if PLAN.HV > 0:
        wait_full(hi_full, n, STAGES)
        do = do_hi.index(slot(n, STAGES))
        dp = warpgroup_mma(_only(v_hi, block), do.permute((1, 0)), dp, is_async=True)
    return dp


@gluon.jit
def _end_dp(dp, n, bars, PLAN: gl.constexpr):
    """Wait for what `_begin_dp` began, and say that dO has been read."""
    _, _, _, _, _, lo_empty, _, hi_empty, _, _ = bars
    dp = warpgroup_mma_wait(0, deps=(dp,))
    release(lo_empty, n, STAGES)
    if PLAN.HV > 0:
        release(hi_empty, n, STAGES)
    return dp


@gluon.jit
def _key_step(dp, dk_lo, dk_hi, n, block, tiles, bars, PLAN: gl.constexpr, LAST: gl.constexpr):
    """One block of queries: dS and dK; then dP^T of the next one, unless this is the last."""
    _, _, _, _, q_lo, q_hi, _, _, _, delta_s, p_s = tiles
    _, _, q_full, q_empty, _, _, _, _, p_full, p_empty = bars
    i = slot(n, STAGES)
    wait_full(q_full, n, STAGES)
    delta = delta_s.index(i).load(QUERIES)
    wait_full(p_full, n, 1)
    ds = p_s.load(SCORES).to(gl.float32) * (dp - delta[None, :])
    mbarrier.arrive(p_empty.index(0), count=1)
    ds = ds.to(p_s.dtype)
    lo = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=dk_lo.type.layout, k_width=2),
                           assert_trivial=True)
    hi = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=dk_hi.type.layout, k_width=2),
                           assert_trivial=True)
    dk_lo = warpgroup_mma(lo, q_lo.index(i), dk_lo, is_async=True)
    dk_hi = warpgroup_mma(hi, q_hi.index(i), dk_hi, is_async=True)
    if LAST:
        dk_lo, dk_hi = warpgroup_mma_wait(0, deps=(dk_lo, dk_hi))
    else:
        dp = _begin_dp(tiles, n + 1, block, bars, PLAN)
        dk_lo, dk_hi = warpgroup_mma_wait(2 if PLAN.HV > 0 else 1, deps=(dk_lo, dk_hi))
        release(q_empty, n, STAGES)
        dp = _end_dp(dp, n + 1, bars, PLAN)
    return dp, dk_lo, dk_hi


@gluon.jit
def key_consumer(DK, Order, Lens, tiles, bars, counts, scale, PLAN: gl.constexpr):
    """dP^T, dS^T and dK."""
    if has_tile(Order, PLAN):
        _key_tile(DK, Order, Lens, tiles, bars, counts, scale, PLAN)


@gluon.jit
def _key_tile(DK, Order, Lens, tiles, bars, counts, scale, PLAN: gl.constexpr):
    heads, kv_heads, n_heads, group, _, _, left, right = counts
    _, _, v_lo, v_hi, _, _, _, _, _, _, _ = tiles
    _, v_full, _, _, _, _, _, _, _, _ = bars
    HQ: gl.constexpr = PLAN.HQ
    sharing = heads // kv_heads
    _, b, hk, n0, len_q, len_k, first, stride = tile_of(Order, Lens, counts, PLAN)
    begin, _first, _last, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
    dk_lo = gl.zeros([BLOCK, LO], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LO, 16]))
    dk_hi = gl.zeros([BLOCK, HQ], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HQ, 16]))
    m, h, block = before_first(hk, first, begin, sharing, stride)
    wait_full(v_full, 0, 1)
    if PLAN.LENS:
        if n0 + BLOCK > len_k:  # values beyond the last may be NaN
            clear_rows(v_lo.index(0), len_k - n0)
            if PLAN.HV > 0:
                clear_rows(v_hi.index(0), len_k - n0)
    dp = _end_dp(_begin_dp(tiles, m * 0, block, bars, PLAN), m * 0, bars, PLAN)
    last = blocks * sharing - 1
    for n in range(last):
        m, h, block = step(m, h, block, begin, blocks, stride, PLAN)
        dp, dk_lo, dk_hi = _key_step(dp, dk_lo, dk_hi, n, block, tiles, bars, PLAN, False)
    m, h, block = step(m, h, block, begin, blocks, stride, PLAN)
    dp, dk_lo, dk_hi = _key_step(dp, dk_lo, dk_hi, last, block, tiles, bars, PLAN, True)
    store_half(DK, dk_lo * scale, v_lo.index(0), b, hk, n0, 0, LO)
    store_half(DK, dk_hi * scale, v_lo.index(0), b, hk, n0, LO, HQ)
    tma.store_wait(0)
