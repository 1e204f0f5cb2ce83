"""The consumers of the Hopper backward: they multiply what others load, each for 64 of a tile's 128 keys.

A full bias comes by tiles [queries, keys] that the producer brings along; they are read transposed. Where each tile of
its gradient has one owner, dS is transposed back on its way to shared memory, and stored from there as it is. The
gradient of a bias per key, dS summed over queries, is a product with ones.
"""

from triton.language.core import PropagateNan

from adatom.ops.attention.hopper_bwd_feed import (
    BLOCK_N,
    FULL,
    HALF,
    KEY,
    NONE,
    before_visits,
    blocks_of,
    blocks_of_piece,
    first_tile,
    rows_read,
    tile_behind,
    tile_of,
    tile_told,
    tiles_in_all,
    told,
    visit,
)
from adatom.ops.attention.hopper_bwd_third import walk_beside_third
from adatom.ops.attention.hopper_bwd_tiles import cuts_of, edges_of, in_rows, masked, visits_of
from adatom.tiles.hopper import (
    LOG2E,
    as_matrix,
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_sync,
    release,
    slot,
    store_tile,
    tanh_of_scores,
    tma,
    visible,
    wait_empty,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BOTH = gl.constexpr(8)  # number of the named barrier of the two consumers
KEEP_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def _dq_product(ds_s, n, k, C: gl.constexpr, PLAN: gl.constexpr):
    """Begin to multiply this consumer's piece of dQ = dS K of visit n, [64, 32 or 64]: its queries, or, if there
    are 64 in all, its columns."""
    WIDE: gl.constexpr = min(PLAN.D, 64)
    zeros = gl.zeros([HALF, WIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]))
    if PLAN.TILES:  # the tiles of both consumers side by side
        ds = ds_s.reinterpret(ds_s.dtype, [2, PLAN.BLOCK_M, BLOCK_N], ds_s.type.layout).index(n & 1)
    else:
        ds = ds_s.index(n & 1).permute((1, 0))
    if PLAN.D <= 64:
        ds = ds.slice(C * HALF, HALF, dim=0)
    else:
        k = k.slice(C * HALF, HALF, dim=1)
    return warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _keep_ds(ds, ds_s, n, part, C: gl.constexpr, PLAN: gl.constexpr):
    """Write a consumer's dS [keys, queries] to shared memory: transposed, if its tiles are those of the bias's
    gradient."""
    PART: gl.constexpr = ds.shape[1]
    if PLAN.TILES:
        ds_s.index((n & 1) * 2 + C).slice(part * PART, PART, dim=0).permute((1, 0)).store(ds)
    else:
        ds_s.index(n & 1).slice(C * HALF, HALF, dim=0).slice(part * PART, PART, dim=1).store(ds)


@gluon.jit
def _add_dq(dq, DQ, block, first, n, dq_s, bars, C: gl.constexpr, PLAN: gl.constexpr):
    """Begin to add piece n, an accumulator, to the sum in memory, in rows. ADDER: leave it to its warp. INSIDE: the sum
    is in shared memory, and each of its elements one thread's."""
    WIDE: gl.constexpr = dq.shape[1]
    _, _, _, _, _, _, _, _, dq_full, dq_empty, _, _ = bars
    dq = in_rows(dq)
    if PLAN.INSIDE:
        if PLAN.TILES:
            tma.store_wait(0)
        piece = dq_s.index((block - first) * 2 + C)
        piece.store(piece.load(dq.type.layout) + dq)
    else:
        if PLAN.ADDER:
            mbarrier.wait(dq_empty.index(C), (n & 1) ^ 1)
        if not PLAN.LEFT_TO_ADDER:
            tma.store_wait(0)  # what was added or stored last has left shared memory
        dq_s.index(C).store(dq)
        fence_async_shared()
        if PLAN.ADDER:
            mbarrier.arrive(dq_full.index(C), count=1)
        else:
            tma.async_atomic_add(DQ, [block * WIDE + C * (WIDE // 2), 0], dq_s.index(C))


@gluon.jit
def _nothing(D: gl.constexpr):
    """A piece of dQ of zeros, in rows."""
    return in_rows(gl.zeros([HALF, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])))


@gluon.jit
def _clear_sums(dq_s, C: gl.constexpr, PLAN: gl.constexpr):
    """Zero a consumer's pieces of dQ."""
    BLOCKS: gl.constexpr = PLAN.INSIDE
    zeros = _nothing(PLAN.D)
    for m in gl.static_range(BLOCKS):
        dq_s.index(m * 2 + C).store(zeros)


@gluon.jit
def _store_sums(DQ, b, h, scale, dq_s, C: gl.constexpr, PLAN: gl.constexpr):
    """Write a consumer's pieces of dQ, scaled: each by way of the shared memory that it lay in."""
    D: gl.constexpr = PLAN.D
    BLOCKS: gl.constexpr = PLAN.INSIDE
    like = _nothing(D)
    for m in gl.static_range(BLOCKS):
        piece = dq_s.index(m * 2 + C)
        dq = piece.load(like.type.layout).reshape([4, D // 8, 8, 4, 2, 2])
        dq = dq.permute((0, 4, 2, 1, 3, 5)).reshape([HALF, D])
        rows = piece.reinterpret(DQ.dtype, [2, HALF, D], as_matrix(DQ.layout)).index(0)
        rows.store((dq * scale).to(DQ.dtype))
        fence_async_shared()
        store_tile(DQ, b, h, m * PLAN.BLOCK_M + C * HALF, 0, rows)
    tma.store_wait(0)
    gl.barrier()


@gluon.jit
def _key_bias(given, b, h, n0, len_k, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Of a bias per key, that of the keys n0.., [HALF, 1]."""
    if PLAN.BIAS == KEY:
        Bias, strides, _, _, repeats = given
        stride_b, stride_h, stride_n = strides
        X = Bias + ((b // repeats).to(gl.int64) * stride_b + h.to(gl.int64) * stride_h + n0.to(gl.int64) * stride_n)
        key = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
        return gl.load(X + key * stride_n, mask=key < len_k - n0, other=0)[:, None]
    else:
        return 0.0


@gluon.jit
def _full_bias(key_bias, bias_s, bias_full, bias_empty, use, C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """What is added to the scores: of a full bias, its tile in use number `use` of the ring, as [keys, queries]."""
    if PLAN.BIAS == FULL:
        wait_full(bias_full, use, PLAN.BIAS_STAGES)
        bias = bias_s.index(slot(use, PLAN.BIAS_STAGES) * 2 + C).permute((1, 0)).load(LAYOUT)
        release(bias_empty, use, PLAN.BIAS_STAGES)
        return bias
    else:
        return key_bias


@gluon.jit
def _exponents(s, bias, lse, scale, softcap, PLAN: gl.constexpr):
    """(scores less lse in log2 units, slope of the softcap) from s = k q^T. lse: in log2 units; in natural ones beside
    a float bias, which may be as large as -1e9: then the difference of the two must be formed first."""
    if PLAN.SOFTCAP:
        t = tanh_of_scores(s * (scale / softcap))
        s = t * (softcap * LOG2E)
        slope = 1.0 - t * t
    else:
        s = s * (scale * LOG2E)
        slope = 1.0
    if PLAN.BIAS == KEY or PLAN.BIAS == FULL:
        if bias.dtype == gl.uint8:
            s = gl.where(bias != 0, s - lse[None, :], float("-inf"))
        else:
            s = s + (bias.to(gl.float32) - lse[None, :]) * LOG2E
    else:
        s = s - lse[None, :]
    return s, slope


@gluon.jit
def _walk(dk, dv, n, i_kv, DQ, given, tiles, bars, place, span, counts, scale, softcap, C: gl.constexpr,
          PLAN: gl.constexpr):
    """dK and dV of a consumer's keys, which lie in buffer i_kv, and its pieces of dQ, over all blocks of queries; also
    the uses of the rings.

    place: (batch, head of keys, first key, queries, keys, first block, blocks of a head) of `tile_of`. span:
    `blocks_of`. Comments at waits name the products under way, the eldest first.
    """
    LEFT: gl.constexpr = PLAN.LEFT
    RIGHT: gl.constexpr = PLAN.RIGHT
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    PARTS: gl.constexpr = PLAN.PARTS
    STAGES: gl.constexpr = PLAN.STAGES
    LATE: gl.constexpr = PLAN.LATE and not PLAN.DQ_BEHIND
    BIAS: gl.constexpr = PLAN.BIAS
    heads, kv_heads, n_heads, group, splits, most_q, most_k, left, right, _ = counts
    _, _, DBias, Sums, _ = given
    b, hk, n0, len_q, len_k, first, stride = place
    begin, whole_begin, whole_end, blocks = span
    sharing = heads // kv_heads
    PART: gl.constexpr = BLOCK_M // PARTS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    EIGHT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    KEYS: gl.constexpr = gl.SliceLayout(1, S)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, _, bias_s, ones_s = tiles
    _, _, _, q_full, q_empty, do_full, do_empty, ds_full, _, _, bias_full, bias_empty = bars
    all_k = k_s.index(i_kv)
    k = all_k.slice(C * HALF, HALF, dim=0)
    v = v_s.index(i_kv * 2 + C)
    if PLAN.RESIDENT:
        k = k.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=2))
        v = v.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=2))
    zeros = gl.zeros([HALF, PART], gl.float32, S)
    sums = gl.zeros([HALF, 8], gl.float32, EIGHT)
    keys = n0 + C * HALF + gl.arange(0, HALF, layout=KEYS)
    m, h, block = before_visits(hk, first, begin, blocks, sharing, stride, PLAN)
    edges = edges_of(n0, len_q, len_k, left, right, C)
    ragged = edges[0] < HALF
    LOOPS: gl.constexpr = PLAN.LOOPS
    start = n
    ONE_ROUND: gl.constexpr = LOOPS == 1 or PLAN.ABREAST  # of all heads, not one for each
    for _round in range(1 if ONE_ROUND else sharing):
        for kind in gl.static_range(LOOPS):
            visits = visits_of(kind, span, ragged, PLAN) if LOOPS > 1 else blocks
            for j in range(visits * sharing if ONE_ROUND else visits):
                begun = n > start if LOOPS > 1 else j > 0  # and dQ of the block before is still to be multiplied
                before = block
                m, h, block = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
                i = slot(n, STAGES)
                key_bias = _key_bias(given, b, h, n0 + C * HALF, len_k, PLAN, S)
                wait_full(q_full, n, STAGES)
                q = q_s.index(i).slice(0, PART, dim=0)
                s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                if LATE:  # in the first turn there is nothing to add yet
                    if begun:
                        wait_full(ds_full, n - 1, 2)
                    dq = _dq_product(ds_s, n + 1, all_k, C, PLAN)
                wait_full(do_full, n, STAGES)
                do = do_s.index(i).slice(0, PART, dim=0)
                dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                for part in gl.static_range(PARTS):
                    lse = lse_s.index(i).slice(part * PART, PART).load(QUERIES)
                    if part > 0:  # dV, S, dK, dP
                        s, dv = warpgroup_mma_wait(2, deps=(s, dv))
                    elif LATE:  # S, dQ, dP
                        s, dq = warpgroup_mma_wait(1, deps=(s, dq))
                        if begun:
                            _add_dq(dq, DQ, before, first, n - 1, dq_s, bars, C, PLAN)
                    else:  # S, dP
                        s = warpgroup_mma_wait(1, deps=(s,))
                    bias = _full_bias(key_bias, bias_s, bias_full, bias_empty, n * PARTS + part, C, PLAN, S)
                    s, slope = _exponents(s, bias, lse, scale, softcap, PLAN)
                    if PLAN.DENSE or LOOPS > 1:
                        s = masked(s, m * BLOCK_M + part * PART, edges, cuts_of(kind, PLAN), PLAN)
                    elif LEFT or RIGHT or not PLAN.EVEN_N:
                        cut = ragged
                        if RIGHT:
                            cut |= m < whole_begin
                        if LEFT:
                            cut |= m >= whole_end
                        if cut:
                            queries = (m * BLOCK_M + part * PART + gl.arange(0, PART, layout=QUERIES))[None, :]
                            seen = visible(queries, keys[:, None], len_k - len_q, len_k, left, right, LEFT, RIGHT)
                            s = gl.where(seen, s, float("-inf"))
                    if BIAS != NONE:  # of -1e9: lse is rounded by more than 1
                        s = gl.minimum(s, 0.0, propagate_nan=KEEP_NAN)
                    p = gl.exp2(s)
                    p16 = gl.convert_layout(p.to(do.dtype), OPERAND, assert_trivial=True)
                    if not PLAN.DENSE:
                        dv = warpgroup_mma(p16, do, dv, is_async=True)
                    delta = delta_s.index(i).slice(part * PART, PART).load(QUERIES)
                    if part + 1 < PARTS:  # dP, dV, S
                        q_next = q_s.index(i).slice(part * PART + PART, PART, dim=0)
                        s = warpgroup_mma(k, q_next.permute((1, 0)), zeros, use_acc=False, is_async=True)
                        dp = warpgroup_mma_wait(2, deps=(dp,))
                    elif PARTS > 1:  # dK, dP, dV
                        dp, dk = warpgroup_mma_wait(1, deps=(dp, dk))
                    elif PLAN.DENSE:
                        dp = warpgroup_mma_wait(0, deps=(dp,))
                    else:  # dP, dV
                        dp = warpgroup_mma_wait(1, deps=(dp,))
                    ds = p * (dp - delta[None, :])
                    dbias = ds.to(q.dtype)
                    if PLAN.SOFTCAP:
                        ds *= slope
                    ds = ds.to(q.dtype)
                    if PLAN.LATE and part == 0:
                        if not begun:  # dK and dV of the keys before have left it
                            tma.store_wait(0)
                    if PLAN.DQ_BEHIND and part == 0:
                        tma.store_wait(1)  # so has dS of the visit before the last
                    _keep_ds(ds, ds_s, n, part, C, PLAN)
                    ds16 = gl.convert_layout(ds, OPERAND, assert_trivial=True)
                    if PLAN.DENSE:  # not sooner: P and dS are then worked out together, in fewer registers
                        dv = warpgroup_mma(p16, do, dv, is_async=True)
                    if PLAN.SUMS:
                        dbias = gl.convert_layout(dbias, gl.DotOperandLayout(0, EIGHT, 2), assert_trivial=True)
                        sums = warpgroup_mma(dbias, ones_s.permute((1, 0)), sums, is_async=True)
                    if part + 1 < PARTS:  # dV, S, dK, dP
                        dk = warpgroup_mma(ds16, q, dk, is_async=True)
                        q = q_next
                        do = do_s.index(i).slice(part * PART + PART, PART, dim=0)
                        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                fence_async_shared()
                if LATE or PLAN.DQ_BEHIND:
                    dk = warpgroup_mma(ds16, q, dk, is_async=True)
                    if LATE:
                        mbarrier.arrive(ds_full.index(n & 1), count=1)
                    dv = warpgroup_mma_wait(1, deps=(dv,))
                    if not PLAN.DENSE:
                        release(do_empty, n, STAGES)
                else:
                    named_sync(BOTH, 256)  # dS of all 128 keys is in shared memory
                    dq = _dq_product(ds_s, n, all_k, C, PLAN)
                    dk = warpgroup_mma(ds16, q, dk, is_async=True)
                    dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))  # dV, dQ, dK
                    if not PLAN.DENSE:
                        release(do_empty, n, STAGES)
                    _add_dq(dq, DQ, block, first, n, dq_s, bars, C, PLAN)
                if PLAN.TILES:  # before this buffer is written again, this loop or `_add_dq` waits for the store
                    store_tile(DBias, b, h, m * BLOCK_M, n0 + C * HALF, ds_s.index((n & 1) * 2 + C))
                if PLAN.SUMS:
                    dk, sums = warpgroup_mma_wait(0, deps=(dk, sums))
                else:
                    dk = warpgroup_mma_wait(0, deps=(dk,))
                if PLAN.DENSE:
                    rows_read(n, STAGES)
                else:
                    release(q_empty, n, STAGES)
                n += 1
                if PLAN.SUMS:
                    if m == (begin + blocks - 1 if PLAN.UP else begin):  # the head's last block
                        row = Sums + (b.to(gl.int64) * heads + h) * most_k
                        key = n0 + C * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, EIGHT))
                        gl.store(row + key, gl.sum(sums, 1) * 0.125, mask=key < most_k)
                        sums = gl.zeros([HALF, 8], gl.float32, EIGHT)
    if LATE:
        wait_full(ds_full, n - 1, 2)
        dq = warpgroup_mma_wait(0, deps=(_dq_product(ds_s, n + 1, all_k, C, PLAN),))
        _add_dq(dq, DQ, block, first, n - 1, dq_s, bars, C, PLAN)
    return dk, dv, n


@gluon.jit
def _clear_keys(n0, len_k, i_kv, tiles, C: gl.constexpr):
    """Zero this consumer's keys and values beyond kv_lens, which may be NaN. The other may read them later."""
    k_s, v_s, _, _, _, _, _, _, _, _, _ = tiles
    keys = len_k - n0 - C * HALF
    if keys < HALF:
        clear_rows(k_s.index(i_kv).slice(C * HALF, HALF, dim=0), keys)
        clear_rows(v_s.index(i_kv * 2 + C), keys)


@gluon.jit
def _store(X, Pointer, x, tile, rows, counts, PLAN: gl.constexpr, DIM: gl.constexpr):
    """Write the accumulator x to rows (batch as of `load_tile`, head, first) of a gradient, by way of a tile of shared
    memory; WIDE: as it is, to rows of parts that lie without gaps."""
    b, hk, row = rows
    if PLAN.WIDE:
        i = gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout))[:, None]
        d = gl.arange(0, PLAN.D, gl.SliceLayout(0, x.type.layout))[None, :]
        kv_heads, most_k = counts[1], counts[6]
        if PLAN.VARLEN:
            start, length = b
            Pointer += ((start + row).to(gl.int64) * kv_heads + hk) * DIM
            step = kv_heads * DIM
        else:  # of keys beyond kv_lens, zeros
            length = most_k
            Pointer += ((b * kv_heads + hk).to(gl.int64) * most_k + row) * DIM
            step = DIM
        gl.store(Pointer + i * step + d, x, mask=(i < length - row) & (d < DIM))
    else:
        tile.store(x.to(X.dtype))
        fence_async_shared()
        store_tile(X, b, hk, row, 0, tile)


@gluon.jit
def _store_both(DK, DV, DKPtr, DVPtr, dk, dv, place_dk, place_dv, rows, counts, PLAN: gl.constexpr):
    """Write dV and dK; ahead of dK wait until dV has left, if it goes by way of the same memory."""
    _store(DV, DVPtr, dv, place_dv, rows, counts, PLAN, PLAN.HEAD_DIM_V)
    if not PLAN.LATE and PLAN.D > 64:
        tma.store_wait(1 if PLAN.ONCE else 0)
    _store(DK, DKPtr, dk, place_dk, rows, counts, PLAN, PLAN.HEAD_DIM)


@gluon.jit
def _keep_piece(Pieces, x, number, C: gl.constexpr, PLAN: gl.constexpr):
    """Write the accumulator x to a consumer's half of number `number` of the sums of pieces of tiles."""
    i = gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout))[:, None]
    d = gl.arange(0, PLAN.D, gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(Pieces + number * (BLOCK_N * PLAN.D) + (i + C * HALF) * PLAN.D + d, x)


@gluon.jit
def consumer(DK, DV, DQ, DKPtr, DVPtr, Order, Lens, given, tiles, bars, counts, factors, C: gl.constexpr,
             PLAN: gl.constexpr):
    """Multiplies what the producer or the third warpgroup loads."""
    heads, kv_heads, n_heads, group, splits, most_q, most_k, left, right, _ = counts
    scale, scale_log2, softcap = factors
    D: gl.constexpr = PLAN.D
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROOM: gl.constexpr = 128 // max(D, 64)  # for so many results
    k_s, v_s, _, _, _, _, ds_s, dq_s, number_s, _, _ = tiles
    k_full, v_full, kv_empty, _, _, _, _, ds_full, dq_full, dq_empty, _, _ = bars
    KV_STAGES: gl.constexpr = PLAN.KV_STAGES
    n_blocks = (most_k + BLOCK_N - 1) // BLOCK_N
    n_tiles = tiles_in_all(Order, counts, PLAN)
    n = 0
    turn = 0
    t = first_tile(n_blocks, PLAN)
    if PLAN.DYNAMIC:
        wait_full(k_full, turn, KV_STAGES)
        t = told(number_s, turn, 4, PLAN)
    while t < n_tiles:
        b, hk, n0, len_q, len_k, b_q, b_k, first, stride = tile_told(t, number_s, turn, Order, Lens, counts, 4, PLAN)
        begin, whole_begin, whole_end, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
        begin, blocks = blocks_of_piece(t, n0, begin, blocks, counts, PLAN)
        span = (begin, whole_begin, whole_end, blocks)
        place = (b, hk, n0, len_q, len_k, first, stride)
        i_kv = slot(turn, KV_STAGES)
        if PLAN.INSIDE:
            if n0 == 0:
                _clear_sums(dq_s, C, PLAN)
        wait_full(k_full, turn, KV_STAGES)
        wait_full(v_full, turn, KV_STAGES)
        if PLAN.LENS:
            _clear_keys(n0, len_k, i_kv, tiles, C)
        dk = gl.zeros([HALF, D], gl.float32, LAYOUT)
        dv = gl.zeros([HALF, D], gl.float32, LAYOUT)
        if PLAN.THIRD:
            if not PLAN.ONCE:
                tma.store_wait(0)  # dK and dV of the keys before have left dQ's memory
            # worked out here it has no register, and is worked out anew in each visit; under a mask that is faster
            log2_units = scale_log2 if PLAN.ADDER and not PLAN.RIGHT else scale * LOG2E
            dk, dv, n = walk_beside_third(dk, dv, n, i_kv, tiles, bars, place, span, counts, log2_units, C, PLAN)
        else:
            dk, dv, n = _walk(dk, dv, n, i_kv, DQ, given, tiles, bars, place, span, counts, scale, softcap, C, PLAN)
        release(kv_empty, turn, KV_STAGES)
        turn += 1
        if PLAN.LATE:  # this consumer's part of what both have read: dS of the visit before the last
            if PLAN.DQ_BEHIND:
                tma.store_wait(1)
            if PLAN.TILES:
                room = ds_s.index((n & 1) * 2 + C).reinterpret(DV.dtype, [128 // D, HALF, D], as_matrix(DV.layout))
                place_dv, place_dk = room.index(0), room.index(1)
            else:
                room = ds_s.index(n & 1).reinterpret(DV.dtype, [256 // D, HALF, D], as_matrix(DV.layout))
                place_dv, place_dk = room.index(C * (HALF // D)), room.index(BLOCK_N // D + C * (HALF // D))
        else:
            if PLAN.THIRD and PLAN.ADDER:  # the third warpgroup has read the keys for the last time
                wait_empty(ds_full, n + 1, 2)
            elif PLAN.THIRD:  # it has added all that it multiplied
                mbarrier.wait(dq_full.index(0), (turn & 1) ^ 1)
            elif PLAN.ADDER:
                mbarrier.wait(dq_empty.index(C), (n & 1) ^ 1)
            if not (PLAN.ONCE or PLAN.THIRD):
                tma.store_wait(0)
            room = dq_s.index(C).reinterpret(DV.dtype, [ROOM, HALF, D], as_matrix(DV.layout))
            place_dv, place_dk = room.index(0), room.index(ROOM - 1)
            if PLAN.ONCE:  # its values are wanted no more
                place_dv = v_s.index(i_kv * 2 + C).reinterpret(DV.dtype, [1, HALF, D], as_matrix(DV.layout)).index(0)
                if PLAN.THIRD and PLAN.ADDER:
                    place_dk = k_s.index(i_kv).reinterpret(DK.dtype, [2, HALF, D], as_matrix(DK.layout)).index(C)
        dk *= scale
        if PLAN.VARLEN and PLAN.ONCE:  # looked up again: in the loop over blocks they would take registers
            b, hk, n0, len_q, len_k, b_q, b_k, first, stride = tile_of(t, Order, Lens, counts, PLAN)
        rows = (b_k, hk, n0 + C * HALF)
        if PLAN.CUT:
            whole = counts[-1][1]
            if t >= whole:
                _keep_piece(DKPtr, dv, (t - whole) * 2, C, PLAN)
                _keep_piece(DKPtr, dk, (t - whole) * 2 + 1, C, PLAN)
            else:
                _store_both(DK, DV, DKPtr, DVPtr, dk, dv, place_dk, place_dv, rows, counts, PLAN)
        else:
            _store_both(DK, DV, DKPtr, DVPtr, dk, dv, place_dk, place_dv, rows, counts, PLAN)
        if PLAN.INSIDE:
            if n0 + BLOCK_N >= most_k:
                _store_sums(DQ, b, hk, scale, dq_s, C, PLAN)
        if PLAN.DYNAMIC:
            wait_full(k_full, turn, KV_STAGES)
            t = told(number_s, turn, 4, PLAN)
        else:
            t = tile_behind(t, n_tiles, n_blocks, PLAN)
    tma.store_wait(0)
