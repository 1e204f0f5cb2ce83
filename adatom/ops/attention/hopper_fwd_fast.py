"""Attention forward on Hopper without maxima (Gluon), for bfloat16, whose exponents reach as far as float32's.

The schedule is that of `hopper_fwd`. But the softmax of a row is taken relative to one reference, the row's maximum
over the first keys that it sees: in the blocks of keys after, no maxima, no rescaling of what was summed, no exchange
between lanes. P and all sums then grow by 2^(score - reference), of which both dtypes hold 2^127. At the end of a tile
the sums tell whether that was enough; a consumer in whose tile it was not, for some row, computes it again, with
maxima, from memory.
"""

from adatom.ops.attention.hopper_fwd_tiles import (
    TURN,
    blocks_of,
    clear_padding,
    count_tiles,
    make_plan,
    make_rings,
    masked_scores,
    multiply_both,
    multiply_queries,
    nothing_seen,
    own_queries,
    producer,
    settle,
    softmax_step,
    tile_of,
    write_out,
)
from adatom.tiles.hopper import (
    LN2,
    LOG2E,
    fence_async_shared,
    gl,
    gluon,
    keys_seen,
    keys_shared,
    lap,
    let_next,
    mbarrier,
    named_arrive,
    named_sync,
    release,
    slot,
    tile_number,
    tiles_of_program,
    tma,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOW = gl.constexpr(0.5)  # a sum holds the exponential of its reference, 1 but for rounding
SAFE = gl.constexpr(2.0**20)  # as much as a million keys of ordinary softmax: no v overflows that did not there
HIGH = gl.constexpr(2.0**64)


@gluon.jit
def _in_lanes(p):
    """Sums over the columns of p that a lane holds: [rows, 8], to be summed over columns."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def _exponentials(s, m, unit):
    """exp2 of the scores in log2 units, relative to m."""
    return gl.exp2(s * unit - m[:, None])


@gluon.jit
def _finite(m):
    """The reference: the maximum m, or 0 where there is none yet."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def _scores(s, n, first, n0, bounds, rings, PENDING: gl.constexpr, MASK: gl.constexpr, PLAN: gl.constexpr,
            LAYOUT: gl.constexpr):
    """Wait for the scores of block n, whose first key is n0, and mask them. PENDING: products left under way."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    len_q, len_k, left, right = bounds
    s = warpgroup_mma_wait(PENDING, deps=(s,))
    release(k_empty, n, PLAN.STAGES)
    if MASK:
        i = gl.arange(0, PLAN.BLOCK_M, gl.SliceLayout(1, LAYOUT))
        j = gl.arange(0, PLAN.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        begin, end = keys_shared(first, len_k - len_q, len_k, left, right, False, PLAN.RIGHT, PLAN.BLOCK_M)
        cut = n0 + PLAN.BLOCK_N > end
        s = masked_scores(s, 0.0, first + i, n0 + j, cut, len_q, len_k, left, right, 1.0, 0.0, PLAN)
    return s


@gluon.jit
def _cut(s, m, l, first, n0, bounds, unit, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of a block that an edge cuts, with a new maximum: (s, m, reference, factor of what was before, l)."""
    len_q, len_k, left, right = bounds
    i = gl.arange(0, PLAN.BLOCK_M, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, PLAN.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    s = masked_scores(s, 0.0, first + i, n0 + j, True, len_q, len_k, left, right, 1.0, 0.0, PLAN)
    higher = gl.maximum(m, gl.max(s, 1) * unit)
    reference = _finite(higher)
    alpha = gl.exp2(m - reference)
    return s, higher, reference, alpha, l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]


@gluon.jit
def _load_rows(X, stride, rows, tile, DIM: gl.constexpr):
    """Copy the first `rows` rows of DIM numbers that X points at to a tile, zeros elsewhere, for products to read."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    x = gl.load(X + i * stride + d, mask=(i < rows) & (d < DIM), other=0.0)
    gl.barrier()  # what was there has been read
    tile.store(x)
    fence_async_shared()
    gl.barrier()


@gluon.jit
def _again(q, tile, X, Sinks, h, first, bounds, scale, DIM: gl.constexpr, PLAN: gl.constexpr,
           ROWS: gl.constexpr, O_LAYOUT: gl.constexpr):
    """(acc, m, l) of the queries q, the first of which is `first`, by the softmax with maxima: 64 keys at a time are
    loaded to `tile`, in shared memory, by pointers."""
    K, V, stride_k, stride_v = X
    len_q, len_k, left, right = bounds
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    KEYS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    i = first + gl.arange(0, BLOCK_M, S_ROWS)
    j = gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
    begin, end = keys_seen(first, len_k - len_q, len_k, left, right, False, PLAN.RIGHT, BLOCK_M, KEYS)
    m, l = nothing_seen(Sinks, h, S_ROWS, PLAN)
    acc = gl.zeros([BLOCK_M, COLUMNS], gl.float32, O_LAYOUT)
    for n0 in range(begin, end, KEYS):
        _load_rows(K + n0.to(gl.int64) * stride_k, stride_k, len_k - n0, tile, DIM)
        zeros = gl.zeros([BLOCK_M, KEYS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = masked_scores(s, 0.0, i, n0 + j, True, len_q, len_k, left, right, 1.0, 0.0, PLAN)
        p, alpha, m, l = softmax_step(s, m, l, scale, PLAN)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        _load_rows(V + n0.to(gl.int64) * stride_v, stride_v, len_k - n0, tile, PLAN.HEAD_DIM_V)
        p = gl.convert_layout(p.to(tile.dtype), P_LAYOUT, assert_trivial=True)
        acc = warpgroup_mma(p, tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, gl.convert_layout(m, ROWS), gl.convert_layout(l, ROWS)


@gluon.jit
def _consumer(results, given, keys, rings, sizes, n_tiles, scale, C: gl.constexpr, DIM: gl.constexpr,
              PLAN: gl.constexpr):
    """Computes BLOCK_M rows of out and lse of every tile."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    STAGES: gl.constexpr = PLAN.STAGES
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    Out, OutPtr, Lse, stride_oh, stride_om = results
    Sinks, Lens, Order = given
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    COLUMNS: gl.constexpr = o_s.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    i = C * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)
    unit = scale * LOG2E
    if C == PLAN.CONSUMERS - 1:
        named_arrive(TURN, 256)  # the first consumer begins

    n = 0  # blocks of keys begun
    for turn in range(tiles_of_program(n_tiles)):
        q = own_queries(turn, C, PLAN)
        mbarrier.wait(q_full.index(q), lap(turn, PLAN.Q_STAGES))
        wait_full(k_full, n, STAGES)
        named_sync(TURN + C, 256)
        s = multiply_queries(turn, n, rings, C, PLAN, S_LAYOUT)
        named_arrive(TURN + (C + 1) % PLAN.CONSUMERS, 256)
        b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
        begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
        bounds = (len_q, len_k, left, right)
        first = m0 + C * BLOCK_M
        n0 = begin + (blocks - 1) * BLOCK_N
        acc = gl.zeros([BLOCK_M, COLUMNS], gl.float32, O_LAYOUT)
        s = _scores(s, n, first, n0, bounds, rings, 0, PLAN.MASK, PLAN, S_LAYOUT)
        m = gl.max(s, 1) * unit
        reference = _finite(m)
        p = _exponentials(s, reference, unit)
        l = _in_lanes(p)
        p = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
        if PLAN.LENS or PLAN.VARLEN:
            clear_padding(v_s.index(slot(n, STAGES)), v_full, n, len_k - n0, PLAN)
        n += 1

        for _ in range(blocks - 1):
            n0 -= BLOCK_N
            s, acc = multiply_both(p, acc, turn, n, rings, C, PLAN, S_LAYOUT)
            s = _scores(s, n, first, n0, bounds, rings, 1, False, PLAN, S_LAYOUT)
            alpha = m
            if PLAN.RIGHT:  # the right edge may cut more blocks, in which rows may see the first of their keys
                begin, end = keys_shared(first, len_k - len_q, len_k, left, right, False, True, BLOCK_M)
                cut = n0 + BLOCK_N > end
                if cut:
                    s, m, reference, alpha, l = _cut(s, m, l, first, n0, bounds, unit, PLAN, S_LAYOUT)
            pf = _exponentials(s, reference, unit)
            l += _in_lanes(pf)
            acc, p = settle(acc, pf, n - 1, rings, PLAN, P_LAYOUT)
            if PLAN.RIGHT:
                if cut:
                    acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
            n += 1

        wait_full(v_full, n - 1, STAGES)
        acc = warpgroup_mma(p, v_s.index(slot(n - 1, STAGES)), acc, is_async=True)
        m = reference
        sums = gl.convert_layout(gl.sum(l, 1), ROWS)
        if PLAN.SINKS:
            sums += gl.exp2(gl.load(Sinks + h).to(gl.float32) * LOG2E - m)
        doubt = gl.where((sums >= LOW) & (sums <= SAFE), 0, gl.where((sums >= LOW) & (sums <= HIGH), 1, 2))
        worst = gl.max(gl.where(m0 + i < len_q, doubt, 0), 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(v_empty, n - 1, STAGES)
        tma.store_wait(0)  # the tile before has left
        gl.barrier()
        if worst > 0:
            if worst == 1:  # a large v may have overflowed
                worst = gl.max(gl.where(gl.sum(acc * 0.0, 1) == 0.0, 0, 2), 0)
            if worst == 2:
                K, V, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm = keys
                b_, h_, start = b.to(gl.int64), (h // (heads // kv_heads)).to(gl.int64), (h * 0 + start_k).to(gl.int64)
                K += b_ * stride_kb + h_ * stride_kh + start * stride_km
                V += b_ * stride_vb + h_ * stride_vh + start * stride_vm
                X = (K, V, stride_km, stride_vm)
                acc, m, sums = _again(q_s.index(q), o_s.index(C), X, Sinks, h, first, bounds, scale, DIM, PLAN, ROWS,
                                      O_LAYOUT)
                gl.barrier()  # all have read the last values
        mbarrier.arrive(q_empty.index(q), count=1)
        seen = sums > 0.0
        sums = gl.where(seen, sums, 1.0)
        lse = gl.where(seen, m * LN2 + gl.log2(sums) * LN2, float("-inf"))
        row = (b.to(gl.int64) * heads + h) * most_q + start_q
        gl.store(Lse + row + m0 + i, lse, mask=m0 + i < len_q)
        acc = acc * gl.convert_layout(1.0 / sums, O_ROWS)[:, None]
        write_out(results, acc, o_s.index(C), b, h, first, start_q, len_q, PLAN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_heads", "group", "len_q", "len_k", "left", "right", "n_tiles"])
def _fast_kernel(Q, K, V, Sinks, Lens, Order, Out, KPtr, VPtr, OutPtr, Lse, stride_oh, stride_om,
                 stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm,
                 heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles, scale,
                 RIGHT: gl.constexpr, MASK: gl.constexpr, SINKS: gl.constexpr, LENS: gl.constexpr, VARLEN: gl.constexpr,
                 HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, EARLY: gl.constexpr, CONSUMERS: gl.constexpr,
                 BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
                 REGISTERS: gl.constexpr):
    PLAN: gl.constexpr = make_plan(0, False, True, False, RIGHT, MASK, SINKS, LENS, VARLEN, HEAD_DIM_V, CONSUMERS,
                                   BLOCK_M, BLOCK_N, Q_STAGES, STAGES, 1, False)
    rings = make_rings(Q, K, V, K, Out, PLAN)
    let_next(EARLY)
    wait_for_previous(EARLY)
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    results = (Out, OutPtr, Lse, stride_oh, stride_om)
    given = (Sinks, Lens, Order)
    keys = (KPtr, VPtr, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (results, given, keys, rings, sizes, n_tiles, scale, 0, HEAD_DIM, PLAN)),
            (_consumer, (results, given, keys, rings, sizes, n_tiles, scale, 1, HEAD_DIM, PLAN)),
            (producer, (Q, K, V, K, Lens, Order, 0, 0, rings, sizes, n_tiles, PLAN)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consumer, (results, given, keys, rings, sizes, n_tiles, scale, 0, HEAD_DIM, PLAN)),
            (_consumer, (results, given, keys, rings, sizes, n_tiles, scale, 1, HEAD_DIM, PLAN)),
            (_consumer, (results, given, keys, rings, sizes, n_tiles, scale, 2, HEAD_DIM, PLAN)),
            (producer, (Q, K, V, K, Lens, Order, 0, 0, rings, sizes, n_tiles, PLAN)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
