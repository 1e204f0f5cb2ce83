"""Attention forward on Hopper without maxima (Gluon), of columns that come in two halves: head_dim 72 to 96 and 136 to
256, for bfloat16.

The producer's copies and the order of products are those of `hopper_deep_fwd`, the softmax, relative to a maximum over
the first keys that a row sees, and the counter of tiles those of `hopper_fwd_fast`. Lengths are of whole batches, and
the only mask is the causal one where its diagonal ends with tiles (SQUARE). The consumer whose queries come first has
the later half of them where blocks are of 64 keys: the other half does not see the first block under that mask.

A program remembers its tiles: each has, in memory, the number of the one before. If some sum shows that a reference was
too low, the program does that tile once more, after all others and in the ordinary way.
"""

from adatom.ops.attention.hopper_deep_tiles import (
    FLAG,
    ROWS,
    TURN,
    begin_out,
    begin_scores,
    feed,
    feed_queries,
    first_columns,
    free_queries,
    make_plan,
    masked_block,
    ordinary_step,
    store_columns,
    unsure,
)
from adatom.ops.attention.hopper_fast_tiles import (
    diagonal,
    doubts,
    exponentials,
    finite,
    in_lanes,
    said,
    say,
    side_by_side,
)
from adatom.ops.attention.hopper_fwd_tiles import blocks_of, nothing_seen, softmax_step, tile_of
from adatom.tiles.hopper import (
    LN2,
    LOG2E,
    as_matrix,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    mbarrier,
    named_arrive,
    named_sync,
    release,
    slot,
    tile_number,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma_wait,
)


@gluon.jit
def _blocks(m0, len_q, len_k, left, right, SQUARE: gl.constexpr, PLAN: gl.constexpr):
    """`blocks_of`. SQUARE: the first to be visited holds the last query's diagonal, though keys may end before it."""
    MORE: gl.constexpr = 127 if SQUARE else 0
    return blocks_of(m0, len_q + MORE, len_k + MORE, left, right, PLAN)


@gluon.jit
def _doubted(tile, C: gl.constexpr, Taken, n_tiles):
    """Where consumer C says whether it doubts its half of a tile."""
    return Taken + 1 + n_tiles + 2 * tile + C


@gluon.jit
def _doubtful(tile, Taken, n_tiles):
    """The first tile that a consumer doubts of `tile` and those before it in this program; -1: none."""
    doubt = 0
    while (tile >= 0) & (doubt == 0):
        doubt = gl.load(_doubted(tile, 0, Taken, n_tiles)) | gl.load(_doubted(tile, 1, Taken, n_tiles))
        if doubt == 0:
            tile = gl.load(Taken + 1 + tile)
    return tile


# -- uses of slots -----------------------------------------------------------------------------------------------------
#
# Where blocks have as many keys as a consumer has queries, tiles of queries, keys and values are alike and share slots:
# those of a tile's queries stay, the others (PLAN.RING) go round. A use is a slot, below 8, and 8 times its parity;
# `ring` holds the next uses of what goes round, 4 bits each, the next one first. Between tiles, the next queries take
# slots that are free early; those of the queries before go round once out has left from there. Where PLAN.RING is 0,
# queries have slots of their own, and uses are counted.


@gluon.jit
def _begin_uses(PLAN: gl.constexpr):
    """(ring, uses of both consumers' queries) ahead of the first tile."""
    RING: gl.constexpr = PLAN.RING
    zero = gl.program_id(0) * 0
    if RING > 0:
        return zero + (0x543210 & ((1 << (4 * RING)) - 1)), zero + RING + 8, zero + RING + 9
    else:
        return zero, zero - 2, zero - 1


@gluon.jit
def _take(ring, PLAN: gl.constexpr):
    """(a use for keys or values, the ring after it)."""
    RING: gl.constexpr = PLAN.RING
    if RING > 0:
        return ring & 15, (ring >> 4) | (((ring & 15) ^ 8) << (4 * RING - 4))
    else:
        return ring, ring + 1


@gluon.jit
def _take_pair(ring, PLAN: gl.constexpr):
    """(uses for keys and for values, the ring after them)."""
    RING: gl.constexpr = PLAN.RING
    if RING > 0:
        return ring & 15, (ring >> 4) & 15, (ring >> 8) | (((ring & 255) ^ 0x88) << (4 * RING - 8))
    else:
        return ring, ring + 1, ring + 2


@gluon.jit
def _take_tile(ring, q0, q1, PLAN: gl.constexpr):
    """(uses for both consumers' queries, for a tile's first keys, the ring after them); q0, q1: of the tile before."""
    RING: gl.constexpr = PLAN.RING
    if RING > 0:
        k = (ring >> 4) & 15
        freed = ((q0 ^ 8) << (4 * RING - 12)) | ((q1 ^ 8) << (4 * RING - 8)) | ((k ^ 8) << (4 * RING - 4))
        return ring & 15, (ring >> 8) & 15, k, (ring >> 12) | freed
    else:
        return q0 + 2, q1 + 2, ring, ring + 1


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _tell(tile, u, numbers, bars, PLAN: gl.constexpr):
    """Say which tile the queries of use u are of, as soon as there is room for them."""
    q_full, q_empty, full, empty = bars
    wait_empty(q_empty, u, PLAN.Q_SLOTS)
    say(tile, 0, u, numbers, PLAN.Q_SLOTS)


@gluon.jit
def _feed_tile(Q, K, V, tile, q0, q1, ring, numbers, tiles, bars, sizes, SQUARE: gl.constexpr, PLAN: gl.constexpr):
    """Load all that a tile needs; the uses of queries and the ring after it."""
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile, None, None, sizes, PLAN)
    begin, blocks = _blocks(m0, len_q, len_k, left, right, SQUARE, PLAN)
    hk = h // (heads // kv_heads)
    n0 = begin + (blocks - 1) * BLOCK_N
    LATER: gl.constexpr = ROWS if BLOCK_N == ROWS else 0
    q0, q1, t, ring = _take_tile(ring, q0, q1, PLAN)
    _tell(tile, q0, numbers, bars, PLAN)
    feed_queries(Q, b, h, m0 + LATER, q0, tiles, bars, PLAN)
    feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
    _tell(tile, q1, numbers, bars, PLAN)
    feed_queries(Q, b, h, m0 + ROWS - LATER, q1, tiles, bars, PLAN)
    for _ in range(blocks - 1):
        n0 -= BLOCK_N
        t, v, ring = _take_pair(ring, PLAN)
        feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
        feed(V, b, hk, n0 + BLOCK_N, v, tiles, bars, PLAN.HV, PLAN)
    v, ring = _take(ring, PLAN)
    feed(V, b, hk, n0, v, tiles, bars, PLAN.HV, PLAN)
    return q0, q1, ring


@gluon.jit
def _producer(Q, K, V, Taken, numbers, tiles, bars, sizes, n_tiles, SQUARE: gl.constexpr, COUNTED: gl.constexpr,
              PLAN: gl.constexpr):
    """Keeps the slots full, and says which tile is next. COUNTED: one that no program took yet; the first number of
    `Taken` counts those that were, beyond each program's first. Then, of each tile, which one its program did before
    it; then, whether the consumers doubt it."""
    q_full, q_empty, full, empty = bars
    ring, q0, q1 = _begin_uses(PLAN)
    turn = 0
    tile = gl.program_id(0)
    before = tile * 0 - 1
    while tile < n_tiles:
        turn += 1
        following = tile_number(turn)
        if COUNTED:
            following = gl.num_programs(0) + gl.atomic_add(Taken, 1, sem="relaxed")
        gl.store(Taken + 1 + tile, before)
        q0, q1, ring = _feed_tile(Q, K, V, tile, q0, q1, ring, numbers, tiles, bars, sizes, SQUARE, PLAN)
        before = tile
        tile = following
    q0, q1, t, ring = _take_tile(ring, q0, q1, PLAN)
    _tell(n_tiles, q0, numbers, bars, PLAN)
    mbarrier.arrive(q_full.index(slot(q0, PLAN.Q_SLOTS)), count=1)
    wait_empty(empty, t, PLAN.LO_SLOTS)
    mbarrier.arrive(full.index(slot(t, PLAN.LO_SLOTS)), count=1)
    _tell(n_tiles, q1, numbers, bars, PLAN)
    mbarrier.arrive(q_full.index(slot(q1, PLAN.Q_SLOTS)), count=1)
    tile = _doubtful(gl.where(unsure(tiles, 1) > 0, before, -1), Taken, n_tiles)
    while tile >= 0:
        q0, q1, ring = _feed_tile(Q, K, V, tile, q0, q1, ring, numbers, tiles, bars, sizes, SQUARE, PLAN)
        tile = _doubtful(gl.load(Taken + 1 + tile), Taken, n_tiles)


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _turns(PLAN):
    """Whether consumers take turns at issuing products. Of 256 columns, whose products take longest, they need not."""
    return PLAN.HQ < 128


@gluon.jit
def _told(u, numbers, bars, PLAN: gl.constexpr):
    """The tile of the queries of use u, once these have come."""
    q_full, q_empty, full, empty = bars
    wait_full(q_full, u, PLAN.Q_SLOTS)
    return said(0, u, numbers, PLAN.Q_SLOTS)


@gluon.jit
def _sure_step(p, lo, hi, l, reference, u, t, v, tiles, bars, unit, C: gl.constexpr, PLAN: gl.constexpr,
               LAYOUT: gl.constexpr):
    """out += p v of the block before (use v), and p of the next block of keys (use t)."""
    q_full, q_empty, full, empty = bars
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    GROUPS: gl.constexpr = 2 if PLAN.HV > 0 else 1
    wait_full(full, t, LO_SLOTS)
    if _turns(PLAN):
        named_sync(TURN + C, 256)
    s = begin_scores(u, t, tiles, PLAN.BLOCK_N, PLAN, LAYOUT)
    wait_full(full, v, LO_SLOTS)
    lo, hi = begin_out(p, lo, hi, v, tiles, PLAN)
    if _turns(PLAN):
        named_arrive(TURN + (C + 1) % 2, 256)
    s = warpgroup_mma_wait(GROUPS, deps=(s,))
    release(empty, t, LO_SLOTS)
    pf = exponentials(s, reference, unit)
    l += in_lanes(pf)
    wait_full(full, v, LO_SLOTS)  # a branch, or ptxas moves the wait for products above the exponentials
    if PLAN.HV > 0:
        lo, hi, pf = warpgroup_mma_wait(0, deps=(lo, hi, pf))
    else:
        lo, pf = warpgroup_mma_wait(0, deps=(lo, pf))
    release(empty, v, LO_SLOTS)
    return gl.convert_layout(pf.to(p.dtype), p.type.layout, assert_trivial=True), lo, hi, l


@gluon.jit
def _finish(p, lo, hi, t, tiles, bars, PLAN: gl.constexpr):
    """out += p v of a tile's last block of keys, use t of the ring."""
    q_full, q_empty, full, empty = bars
    wait_full(full, t, PLAN.LO_SLOTS)
    lo, hi = begin_out(p, lo, hi, t, tiles, PLAN)
    if PLAN.HV > 0:
        lo, hi = warpgroup_mma_wait(0, deps=(lo, hi))
    else:
        lo = warpgroup_mma_wait(0, deps=(lo,))
    release(empty, t, PLAN.LO_SLOTS)
    return lo, hi


@gluon.jit
def _free(u, bars, PLAN: gl.constexpr):
    """Let others come to the slot of use u, this consumer's queries. Of a shared slot both consumers are to say so."""
    q_full, q_empty, full, empty = bars
    free_queries(u, bars, PLAN)
    if PLAN.RING > 0:
        release(q_empty, u, PLAN.Q_SLOTS)


@gluon.jit
def _write(results, lo, hi, m, l, b, h, first, heads, len_q, u, tiles, PLAN: gl.constexpr):
    """Write 64 rows of lse and out, by way of where their queries were, use u: m and sums l, in log2 units."""
    Out, OutHi, Lse = results
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    seen = l > 0.0
    l = gl.where(seen, l, 1.0)
    lse = gl.where(seen, m * LN2 + gl.log2(l) * LN2, float("-inf"))
    i = first + gl.arange(0, ROWS, l.type.layout)
    gl.store(Lse + (b.to(gl.int64) * heads + h) * len_q + i, lse, mask=i < len_q)
    lo = lo * gl.convert_layout(1.0 / l, gl.SliceLayout(1, lo.type.layout))[:, None]
    hi = hi * gl.convert_layout(1.0 / l, gl.SliceLayout(1, hi.type.layout))[:, None]
    o_lo = q_lo.index(slot(u, PLAN.Q_SLOTS))
    o_lo.store(lo.to(q_lo.dtype))
    if PLAN.HV > 0:
        o_hi = first_columns(q_hi.index(slot(u, PLAN.Q_SLOTS)), PLAN.HV)
        o_hi.store(hi.to(q_lo.dtype))
    fence_async_shared()
    store_columns(Out, b, h, first, 0, o_lo, PLAN.LO)
    if PLAN.HV > 0:
        store_columns(OutHi, b, h, first, PLAN.LO, o_hi, PLAN.HV)


@gluon.jit
def _consumer(results, Sinks, Taken, numbers, tiles, bars, sizes, n_tiles, scale, C: gl.constexpr,
              SQUARE: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of out and lse of every tile."""
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    LO: gl.constexpr = PLAN.LO
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    HV: gl.constexpr = PLAN.HV if PLAN.HV > 0 else 16
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    q_full, q_empty, full, empty = bars
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LO_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LO, 16])
    HI_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, LO_LAYOUT, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    PLACE: gl.constexpr = 1 - C if BLOCK_N == ROWS else C  # which half of a tile's queries
    SECOND: gl.constexpr = SQUARE and C == 1 and BLOCK_N == ROWS  # they see no key of the first block
    FIRST_TURN: gl.constexpr = _turns(PLAN) and (SECOND or BLOCK_N > ROWS)
    KEYS: gl.constexpr = BLOCK_N // 2 if SQUARE and C == 0 and BLOCK_N > ROWS else BLOCK_N
    F_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    unit = scale * LOG2E
    limits = (left, right, scale)
    if C == 1:
        named_arrive(TURN, 256)  # the first consumer begins

    ring, q0, q1 = _begin_uses(PLAN)
    q0, q1, t, ring = _take_tile(ring, q0, q1, PLAN)
    u = q1 if C == 1 else q0
    bad = 0
    before = gl.program_id(0) * 0 - 1
    out_left = before  # use of the queries whose slot the tile before was written from
    tile = _told(u, numbers, bars, PLAN)
    while tile < n_tiles:
        if SECOND:
            wait_full(full, t, LO_SLOTS)
            release(empty, t, LO_SLOTS)
            t, ring = _take(ring, PLAN)
        wait_full(full, t, LO_SLOTS)
        if FIRST_TURN:
            named_sync(TURN + C, 256)
        s = begin_scores(u, t, tiles, KEYS, PLAN, F_LAYOUT)
        if FIRST_TURN:
            named_arrive(TURN + (C + 1) % 2, 256)
        if before >= 0:
            _free(out_left, bars, PLAN)
        b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile, None, None, sizes, PLAN)
        begin, blocks = _blocks(m0, len_q, len_k, left, right, SQUARE, PLAN)
        first = m0 + PLACE * ROWS
        lo = gl.zeros([ROWS, LO], gl.float32, LO_LAYOUT)
        hi = gl.zeros([ROWS, HV], gl.float32, HI_LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
        release(empty, t, LO_SLOTS)
        rest = blocks - 1
        if SQUARE and BLOCK_N > ROWS:
            p, reference, l = diagonal(s, unit, C, PLAN, S_LAYOUT)
            if C == 0:
                p = side_by_side(p, gl.zeros_like(p), S_LAYOUT)
        else:
            if SQUARE:
                i = gl.arange(0, ROWS, OF_ROWS)
                j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
                s = gl.where(j[None, :] <= i[:, None], s, float("-inf"))
            else:
                s = masked_block(s, first, begin + rest * BLOCK_N, len_q, len_k, limits, PLAN, S_LAYOUT)
            reference = finite(gl.max(s, 1) * unit)
            p = exponentials(s, reference, unit)
            l = in_lanes(p)
        p = gl.convert_layout(p.to(q_lo.dtype), P_LAYOUT, assert_trivial=True)
        if SECOND:
            t, ring = _take(ring, PLAN)
            wait_full(full, t, LO_SLOTS)
            release(empty, t, LO_SLOTS)
            rest -= 1
        for _ in range(rest):
            t, v, ring = _take_pair(ring, PLAN)
            p, lo, hi, l = _sure_step(p, lo, hi, l, reference, u, t, v, tiles, bars, unit, C, PLAN, S_LAYOUT)

        t, ring = _take(ring, PLAN)
        lo, hi = _finish(p, lo, hi, t, tiles, bars, PLAN)
        sums = gl.convert_layout(gl.sum(l, 1), OF_ROWS)
        if PLAN.SINKS:
            sums += gl.exp2(gl.load(Sinks + h).to(gl.float32) * LOG2E - reference)
        doubt = doubts(sums)
        worst = gl.max(gl.where(first + gl.arange(0, ROWS, OF_ROWS) < len_q, doubt, 0), 0)
        if worst == 1:  # a large v may have overflowed
            total = gl.sum(lo * 0.0, 1)
            if PLAN.HV > 0:
                total += gl.convert_layout(gl.sum(hi * 0.0, 1), total.type.layout)
            worst = gl.max(gl.where(total == 0.0, 0, 2), 0)
        bad = gl.maximum(bad, worst)
        gl.store(_doubted(tile, C, Taken, n_tiles), worst)
        if worst == 0:
            _write(results, lo, hi, reference, sums, b, h, first, heads, len_q, u, tiles, PLAN)
        out_left = u
        before = tile
        q0, q1, t, ring = _take_tile(ring, q0, q1, PLAN)
        u = q1 if C == 1 else q0
        tile = _told(u, numbers, bars, PLAN)
    if before >= 0:
        _free(out_left, bars, PLAN)
    _free(u, bars, PLAN)
    wait_full(full, t, LO_SLOTS)
    release(empty, t, LO_SLOTS)

    flags.index(C).store(gl.full([ROWS], bad, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    tile = _doubtful(gl.where(unsure(tiles, 4) > 0, before, -1), Taken, n_tiles)
    while tile >= 0:
        q0, q1, t, ring = _take_tile(ring, q0, q1, PLAN)
        u = q1 if C == 1 else q0
        wait_full(q_full, u, PLAN.Q_SLOTS)
        b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile, None, None, sizes, PLAN)
        begin, blocks = _blocks(m0, len_q, len_k, left, right, SQUARE, PLAN)
        first = m0 + PLACE * ROWS
        n0 = begin + (blocks - 1) * BLOCK_N
        wait_full(full, t, LO_SLOTS)
        named_sync(TURN + C, 256)
        s = begin_scores(u, t, tiles, BLOCK_N, PLAN, S_LAYOUT)
        named_arrive(TURN + (C + 1) % 2, 256)
        m, l = nothing_seen(Sinks, h, OF_ROWS, PLAN)
        lo = gl.zeros([ROWS, LO], gl.float32, LO_LAYOUT)
        hi = gl.zeros([ROWS, HV], gl.float32, HI_LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
        release(empty, t, LO_SLOTS)
        s = masked_block(s, first, n0, len_q, len_k, limits, PLAN, S_LAYOUT)
        pf, alpha, m, l = softmax_step(s, m, l, scale, PLAN)
        p = pf.to(q_lo.dtype)
        for _ in range(blocks - 1):
            n0 -= BLOCK_N
            t, v, ring = _take_pair(ring, PLAN)
            p, lo, hi, m, l = ordinary_step(p, lo, hi, m, l, u, t, v, first, n0, len_q, len_k, limits, tiles, bars,
                                            False, C, PLAN, S_LAYOUT)
        t, ring = _take(ring, PLAN)
        lo, hi = _finish(p, lo, hi, t, tiles, bars, PLAN)
        if gl.load(_doubted(tile, C, Taken, n_tiles)) > 0:
            _write(results, lo, hi, m, l, b, h, first, heads, len_q, u, tiles, PLAN)
        _free(u, bars, PLAN)
        tile = _doubtful(gl.load(Taken + 1 + tile), Taken, n_tiles)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_heads", "group", "len_q", "len_k", "right", "n_tiles"])
def _deep_fast_kernel(Q, K, V, Out, QHi, KHi, VHi, OutHi, Sinks, Taken, Lse, heads, kv_heads, n_heads, group, len_q,
                      len_k, right, n_tiles, scale, RIGHT: gl.constexpr, MASK: gl.constexpr, SINKS: gl.constexpr,
                      SQUARE: gl.constexpr, COUNTED: gl.constexpr, EARLY: gl.constexpr,
                      BLOCK_N: gl.constexpr, LO: gl.constexpr, HQ: gl.constexpr, HV: gl.constexpr,
                      Q_SLOTS: gl.constexpr, LO_SLOTS: gl.constexpr, HI_SLOTS: gl.constexpr, REGISTERS: gl.constexpr):
    """Tensors come as descriptors, of 64 columns; those of the second columns, if these are fewer, by others."""
    ONE: gl.constexpr = BLOCK_N == 64  # queries share slots with keys and values
    PLAN: gl.constexpr = make_plan(0, False, True, False, RIGHT, MASK, SINKS, False, False, 0, 2, 64, BLOCK_N, LO, HQ,
                                   HV, 8 if ONE else Q_SLOTS, 8 if ONE else LO_SLOTS, 8 if ONE else HI_SLOTS, False,
                                   Q_SLOTS + LO_SLOTS - 2 if ONE else 0)
    if HQ >= 64:
        QHi, KHi, VHi, OutHi = Q, K, V, Out
    LO_LAYOUT: gl.constexpr = as_matrix(Q.layout)
    HI_LAYOUT: gl.constexpr = as_matrix(QHi.layout)
    MORE: gl.constexpr = Q_SLOTS if ONE else 0
    lo_s = gl.allocate_shared_memory(Q.dtype, [LO_SLOTS + MORE, BLOCK_N, LO], LO_LAYOUT)
    hi_s = gl.allocate_shared_memory(Q.dtype, [HI_SLOTS + MORE, BLOCK_N, HQ], HI_LAYOUT)
    full = make_barriers(LO_SLOTS + MORE, 1)
    empty = make_barriers(LO_SLOTS + MORE, 2)
    if ONE:
        q_lo, q_hi, q_full, q_empty = lo_s, hi_s, full, empty
    else:
        q_lo = gl.allocate_shared_memory(Q.dtype, [Q_SLOTS, ROWS, LO], LO_LAYOUT)
        q_hi = gl.allocate_shared_memory(Q.dtype, [Q_SLOTS, ROWS, HQ], HI_LAYOUT)
        q_full = make_barriers(Q_SLOTS, 1)
        q_empty = make_barriers(Q_SLOTS, 1)
    flags = gl.allocate_shared_memory(gl.int32, [2, ROWS], FLAG)
    numbers = gl.allocate_shared_memory(gl.int32, [PLAN.Q_SLOTS, 1], FLAG)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_lo, q_hi, lo_s, hi_s, flags)
    bars = (q_full, q_empty, full, empty)
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, 0, right)
    results = (Out, OutHi, Lse)
    gl.warp_specialize([
        (_consumer, (results, Sinks, Taken, numbers, tiles, bars, sizes, n_tiles, scale, 0, SQUARE, PLAN)),
        (_consumer, (results, Sinks, Taken, numbers, tiles, bars, sizes, n_tiles, scale, 1, SQUARE, PLAN)),
        (_producer, ((Q, QHi), (K, KHi), (V, VHi), Taken, numbers, tiles, bars, sizes, n_tiles, SQUARE,
                     COUNTED, PLAN)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
