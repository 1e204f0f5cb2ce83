"""The Hopper backward beside a third warpgroup, beyond head_dim 64.

The third warpgroup multiplies dQ = dS K from what both consumers leave in shared memory. So consumers never see dQ and
do not meet each other, and three warpgroups give the tensor cores something to do at any time. Queries and dO have
three buffers, dS has two.

Where the sum of dQ needs no order it was cleared ahead, and the third warpgroup has the place of the producer's four
warps (`third`): it also loads tiles, and adds dQ to the sum by TMA. In order it only multiplies (`third_in_order`). The
producer loads, and each half of dQ is left to a warp that waits for its turn (hopper_bwd_adder.py): the third
warpgroup waits for that no sooner than its next visit, and consumers two visits later.

A multiprocessor has 168 registers for each thread of three warpgroups, and 128 for four, which it takes in order. The
third one takes THIRD_REGISTERS, the fourth 24, one consumer what `Config.registers` says, the other 8 more. That is
just enough, so the order of what they do matters: consumers read lse ahead of S and, if they have the registers, delta,
begin dP behind the exponentials, at -delta, and round P behind dS; the third one multiplies 64 columns of dQ at a time.
Out of order it works out where operands lie for each product anew, in order consumers do.
"""

from adatom.ops.attention.hopper_bwd_feed import (
    BLOCK_N,
    HALF,
    before_visits,
    blocks_of,
    blocks_of_piece,
    ds_written,
    first_tile,
    rows_of,
    tile_behind,
    tile_of,
    tiles_in_all,
    visit,
    wait_ds_written,
)
from adatom.ops.attention.hopper_bwd_tiles import cuts_of, edges_of, in_rows, masked, visits_of
from adatom.tiles.hopper import (
    as_box,
    box_at,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    release,
    slot,
    tma,
    wait_empty,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

THIRD_REGISTERS = gl.constexpr(64)  # of each thread of the third warpgroup; 56 are too few for products of 64 columns


@gluon.jit
def walk_beside_third(dk, dv, n, i_kv, tiles, bars, place, span, counts, scale_log2, C: gl.constexpr,
                      PLAN: gl.constexpr):
    """dK and dV of a consumer's keys, which lie in buffer i_kv, over all blocks of queries; also the uses of the rings.
    It leaves dS of each visit to the third warpgroup. place, span: as `_walk` (hopper_bwd_walk.py) takes them."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    STAGES: gl.constexpr = PLAN.STAGES
    LOOPS: gl.constexpr = PLAN.LOOPS
    heads, kv_heads, n_heads, group, splits, most_q, most_k, left, right, _ = counts
    b, hk, n0, len_q, len_k, first, stride = place
    begin, whole_begin, whole_end, blocks = span
    sharing = 1 if PLAN.ALONE else heads // kv_heads
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, _, _, _, _ = tiles
    _, _, _, q_full, _, do_full, _, ds_empty, _, _, _, _ = bars
    k = k_s.index(i_kv).slice(C * HALF, HALF, dim=0)
    v = v_s.index(i_kv * 2 + C)
    zeros = gl.zeros([HALF, BLOCK_M], gl.float32, S)
    m, h, block = before_visits(hk, first, begin, blocks, sharing, stride, PLAN)
    edges = edges_of(n0, len_q, len_k, left, right, C)
    ONE_ROUND: gl.constexpr = LOOPS == 1 or PLAN.ABREAST  # of all heads, not one for each
    for _round in range(1 if ONE_ROUND else sharing):
        for kind in gl.static_range(LOOPS):
            visits = visits_of(kind, span, edges[0] < HALF, PLAN) if LOOPS > 1 else blocks
            for j in range(visits * sharing if ONE_ROUND else visits):
                m, h, block = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
                i = slot(n, STAGES)
                wait_full(q_full, n, STAGES)
                wait_full(do_full, n, STAGES)
                lse = lse_s.index(i).load(QUERIES)
                if PLAN.ADDER:
                    # 0, but the compiler doesn't know: else it works out ahead of all visits where operands lie, and
                    # spills that
                    zero = n >> 31
                    k = k_s.index(i_kv + zero).slice(C * HALF, HALF, dim=0)
                    v = v_s.index(i_kv * 2 + C + zero)
                else:
                    delta = delta_s.index(i).load(QUERIES)
                q = q_s.index(i)
                s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                do = do_s.index(i)
                s = warpgroup_mma_wait(0, deps=(s,))
                s = s * scale_log2 - lse[None, :]
                p = gl.exp2(masked(s, m * BLOCK_M, edges, cuts_of(kind, PLAN), PLAN))
                if PLAN.ADDER:  # not sooner: there are 8 registers fewer
                    delta = delta_s.index(i).load(QUERIES)
                dp = warpgroup_mma(v, do.permute((1, 0)), zeros - delta[None, :], is_async=True)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = (p * dp).to(q.dtype)
                wait_empty(ds_empty, n, 2)
                ds_s.index(n & 1).slice(C * HALF, HALF, dim=0).store(ds)
                ds = gl.convert_layout(ds, OPERAND, assert_trivial=True)
                p = gl.convert_layout(p.to(do.dtype), OPERAND, assert_trivial=True)
                dv = warpgroup_mma(p, do, dv, is_async=True)
                fence_async_shared()
                dk = warpgroup_mma(ds, q, dk, is_async=True)
                ds_written(n, PLAN)
                dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
                n += 1
    return dk, dv, n


@gluon.jit
def _load_rows(Q, DOut, Lse, Delta, b_q, h, m, block, n, tiles, bars, counts, PLAN: gl.constexpr):
    """Begin to load queries and dO of visit n. Triton puts fewer barriers between loads that have no barrier in common
    and follow each other."""
    _, _, q_s, do_s, lse_s, delta_s, _, _, _, _, _ = tiles
    _, _, _, q_full, _, do_full, _, _, _, _, _, _ = bars
    i = slot(n, PLAN.STAGES)
    h, row = rows_of(h, m, counts, PLAN)
    with_q, with_do = q_full.index(i), do_full.index(i)
    mbarrier.expect(with_q, Q.block_type.nbytes + Lse.block_type.nbytes)
    mbarrier.expect(with_do, DOut.block_type.nbytes + Delta.block_type.nbytes)
    tma.async_load(Q, box_at(Q, b_q, h, row, 0), with_q, as_box(Q, q_s.index(i)))
    tma.async_load(DOut, box_at(DOut, b_q, h, row, 0), with_do, as_box(DOut, do_s.index(i)))
    tma.async_load(Lse, [block * PLAN.BLOCK_M], with_q, lse_s.index(i))
    tma.async_load(Delta, [block * PLAN.BLOCK_M], with_do, delta_s.index(i))


@gluon.jit
def _half_of_dq(dq, ds_s, n, k, COLUMN: gl.constexpr):
    """Begin to multiply 64 columns of dQ = dS K of visit n, in the registers of dq, whose values are wanted no more."""
    ds = ds_s.index(n & 1).permute((1, 0))
    return warpgroup_mma(ds, k.slice(COLUMN, 64, dim=1), dq, use_acc=False, is_async=True)


@gluon.jit
def third(Q, K, V, DOut, Lse, Delta, DQ, Order, Lens, tiles, bars, counts, PLAN: gl.constexpr):
    """Loads tiles for the consumers, multiplies their dQ, and adds it to the sum.

    When both have written dS of a visit, the buffer of queries and dO of the one before takes those of the visit after
    the next. dK and dV leave by way of dQ's memory when all of a tile is `added`, and have left ahead of the next
    tile's first dS.
    """
    heads, kv_heads, n_heads, group, splits, most_q, most_k, left, right, _ = counts
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, _, _, _ = tiles
    k_full, v_full, kv_empty, q_full, _, do_full, _, ds_empty, added, _, _, _ = bars
    KV_STAGES: gl.constexpr = PLAN.KV_STAGES
    sharing = 1 if PLAN.ALONE else heads // kv_heads
    n_blocks = (most_k + BLOCK_N - 1) // BLOCK_N
    n_tiles = tiles_in_all(Order, counts, PLAN)
    dq = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    n = 0
    turn = 0
    t = first_tile(n_blocks, PLAN)
    while t < n_tiles:
        b, hk, n0, len_q, len_k, b_q, b_k, first, stride = tile_of(t, Order, Lens, counts, PLAN)
        begin, _first, _last, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
        begin, blocks = blocks_of_piece(t, n0, begin, blocks, counts, PLAN)
        visits = blocks * sharing
        i_kv = slot(turn, KV_STAGES)
        wait_empty(kv_empty, turn, KV_STAGES)
        load_tile(K, b_k, hk // splits, n0, 0, k_full.index(i_kv), k_s.index(i_kv))
        m, h, block = before_visits(hk, first, begin, blocks, sharing, stride, PLAN)
        m, h, block = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
        _load_rows(Q, DOut, Lse, Delta, b_q, h, m, block, n, tiles, bars, counts, PLAN)
        for c in gl.static_range(2):
            load_tile(V, b_k, hk // splits, n0 + c * HALF, 0, v_full.index(i_kv), v_s.index(i_kv * 2 + c))
        if visits > 1:
            m, h, block = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
            _load_rows(Q, DOut, Lse, Delta, b_q, h, m, block, n + 1, tiles, bars, counts, PLAN)
        here, head, now = before_visits(hk, first, begin, blocks, sharing, stride, PLAN)  # of what is multiplied
        for j in range(visits):
            here, head, now = visit(here, head, now, hk, begin, blocks, sharing, stride, PLAN)
            # `together`, which is 0 but the compiler doesn't know: else it works out ahead of all visits where operands
            # lie, and spills that
            zero = n * counts[-1][3]
            k = k_s.index(i_kv + zero)
            wait_ds_written(n, PLAN)
            dq = _half_of_dq(dq, ds_s, n, k, 0)
            if j + 2 < visits:
                m, h, block = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
                _load_rows(Q, DOut, Lse, Delta, b_q, h, m, block, n + 2, tiles, bars, counts, PLAN)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            tma.store_wait(1)  # what was added from this half of dQ's memory last has left it
            dq_s.index(0).store(in_rows(dq))
            dq = _half_of_dq(dq, ds_s, n + zero, k, 64)
            fence_async_shared()
            tma.async_atomic_add(DQ, [now * 64, 0], dq_s.index(0))
            dq = warpgroup_mma_wait(0, deps=(dq,))
            release(ds_empty, n, 2)
            tma.store_wait(1)
            dq_s.index(1).store(in_rows(dq))
            fence_async_shared()
            tma.async_atomic_add(DQ, [now * 64 + 32, 0], dq_s.index(1))
            n += 1
        tma.store_wait(0)
        mbarrier.arrive(added.index(0), count=1)
        turn += 1
        t = tile_behind(t, n_tiles, n_blocks, PLAN)


@gluon.jit
def third_in_order(Order, Lens, tiles, bars, counts, PLAN: gl.constexpr):
    """Multiplies dQ of a program's only tile, and leaves each half to the warp that adds it. dK and dV of that tile
    leave by way of the memory of its keys and values."""
    heads, kv_heads, n_heads, group, splits, most_q, most_k, left, right, _ = counts
    k_s, _, _, _, _, _, ds_s, dq_s, _, _, _ = tiles
    _, _, _, _, _, _, _, ds_empty, dq_full, dq_empty, _, _ = bars
    b, hk, n0, len_q, len_k, b_q, b_k, first, stride = tile_of(gl.program_id(0), Order, Lens, counts, PLAN)
    begin, _first, _last, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
    dq = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    k = k_s.index(0)
    for n in range(blocks * (heads // kv_heads)):
        wait_ds_written(n, PLAN)
        dq = _half_of_dq(dq, ds_s, n, k, 0)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.wait(dq_empty.index(0), (n & 1) ^ 1)
        dq_s.index(0).store(in_rows(dq))
        dq = _half_of_dq(dq, ds_s, n, k, 64)
        fence_async_shared()
        mbarrier.arrive(dq_full.index(0), count=1)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        release(ds_empty, n, 2)
        mbarrier.wait(dq_empty.index(1), (n & 1) ^ 1)
        dq_s.index(1).store(in_rows(dq))
        fence_async_shared()
        mbarrier.arrive(dq_full.index(1), count=1)
