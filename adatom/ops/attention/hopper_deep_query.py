"""dQ of the Hopper backward beyond head_dim 128, by a kernel of its own (Gluon).

    dQ = scale dS K;  dS = P (dO V^T - delta);  P = exp(Q K^T - lse)

A program owns 128 queries, each of two consumer warpgroups 64 of them, and walks over blocks of 64 keys, from the last
to the first. Two of the three products are those of the kernel for dK and dV, computed again: nothing is added in
memory. Tiles come in halves of columns, as in hopper_deep_walk.py. Products of a block of keys run under the
exponentials of the next.
"""

from adatom.ops.attention.hopper_deep_walk import (
    BLOCK,
    LO,
    SCORES,
    exponents,
    has_tile,
    load_half,
    make_halves,
    make_plan,
    packed_tile,
    store_half,
)
from adatom.ops.attention.triton_call import NO_SPECIALIZE
from adatom.tiles.hopper import (
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    head_and_block,
    keys_of,
    keys_seen,
    keys_shared,
    let_next,
    make_barriers,
    mbarrier,
    named_sync,
    release,
    slot,
    tma,
    visible,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BOTH = gl.constexpr(8)  # number of the named barrier of the two consumers
ROWS = gl.constexpr(128)  # queries of a program
K_STAGES = gl.constexpr(2)
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))


@gluon.jit
def query_tile(Order, Lens, counts, PLAN: gl.constexpr):
    """(batch of queries, of keys, head, first query, queries, keys, place of the head's first row in Rows and Delta) of
    a program. Heads go in groups whose keys lie in L2; under a causal mask the last queries, which see the most keys,
    first. Packed tiles are listed in Order; their batches are sequences, as `box_at` takes them."""
    heads, kv_heads, n_heads, group, len_q, len_k, left, right = counts
    if PLAN.VARLEN:
        of_queries, of_keys, h, m0, first, stride = packed_tile(Order, counts)
        return of_queries, of_keys, h, m0, of_queries[1], of_keys[1], (first + h * stride) * BLOCK
    else:
        n_blocks = (len_q + ROWS - 1) // ROWS
        bh, block = head_and_block(gl.program_id(0), n_blocks, n_heads, group)
        if PLAN.RIGHT:
            block = n_blocks - 1 - block
        b = bh // heads
        len_k = keys_of(Lens, b, len_k, PLAN.LENS)
        return b, b, bh - b * heads, block * ROWS, len_q, len_k, bh * padded(len_q)


@gluon.jit
def padded(len_q):
    """Rows that so many queries have in Rows and Delta."""
    return (len_q + BLOCK - 1) // BLOCK * BLOCK


@gluon.jit
def keys_visited(m0, len_q, len_k, counts, PLAN: gl.constexpr):
    """(first key, blocks of keys) of queries m0..; at least one block."""
    _, _, _, _, _, _, left, right = counts
    begin, end = keys_seen(m0, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, ROWS, BLOCK)
    return begin, gl.maximum((end - begin + BLOCK - 1) // BLOCK, 1)


@gluon.jit
def key_producer(Q, K, V, DOut, Order, Lens, tiles, bars, counts, V_STAGES: gl.constexpr, PLAN: gl.constexpr):
    """Loads tiles for the consumers."""
    if has_tile(Order, PLAN):
        _feed_keys(Q, K, V, DOut, Order, Lens, tiles, bars, counts, V_STAGES, PLAN)


@gluon.jit
def _feed_keys(Q, K, V, DOut, Order, Lens, tiles, bars, counts, V_STAGES: gl.constexpr, PLAN: gl.constexpr):
    heads, kv_heads, _, _, _, _, _, _ = counts
    HQ: gl.constexpr = PLAN.HQ
    HV: gl.constexpr = PLAN.HV
    q_lo, q_hi, do_lo, do_hi, k_lo, k_hi, v_lo, v_hi = tiles
    q_full, do_full, k_full, k_empty, v_full, v_empty = bars
    bq, b, h, m0, len_q, len_k, _ = query_tile(Order, Lens, counts, PLAN)
    begin, blocks = keys_visited(m0, len_q, len_k, counts, PLAN)
    hk = h // (heads // kv_heads)
    mbarrier.expect(q_full.index(0), ROWS * (LO + HQ) * 2)
    for c in gl.static_range(2):
        load_half(Q, bq, h, m0 + c * BLOCK, 0, q_full.index(0), q_lo.index(c), LO)
        load_half(Q, bq, h, m0 + c * BLOCK, LO, q_full.index(0), q_hi.index(c), HQ)
    for n in range(blocks):
        n0 = begin + (blocks - 1 - n) * BLOCK
        i = slot(n, K_STAGES)
        wait_empty(k_empty, n, K_STAGES)
        mbarrier.expect(k_full.index(i), BLOCK * (LO + HQ) * 2)
        load_half(K, b, hk, n0, 0, k_full.index(i), k_lo.index(i), LO)
        load_half(K, b, hk, n0, LO, k_full.index(i), k_hi.index(i), HQ)
        if n == 0:
            mbarrier.expect(do_full.index(0), ROWS * (LO + HV) * 2)
            for c in gl.static_range(2):
                load_half(DOut, bq, h, m0 + c * BLOCK, 0, do_full.index(0), do_lo.index(c), LO)
                if HV > 0:
                    load_half(DOut, bq, h, m0 + c * BLOCK, LO, do_full.index(0), do_hi.index(c), HV)
        i = slot(n, V_STAGES)
        wait_empty(v_empty, n, V_STAGES)
        mbarrier.expect(v_full.index(i), BLOCK * (LO + HV) * 2)
        load_half(V, b, hk, n0, 0, v_full.index(i), v_lo.index(i), LO)
        if HV > 0:
            load_half(V, b, hk, n0, LO, v_full.index(i), v_hi.index(i), HV)


@gluon.jit
def _product(lo, hi, other_lo, other_hi, H: gl.constexpr):
    """Begin to multiply the rows of two halves by those of two others; H: columns of the second half, 0 if there is
    none."""
    x = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    x = warpgroup_mma(lo, other_lo.permute((1, 0)), x, use_acc=False, is_async=True)
    if H > 0:
        x = warpgroup_mma(hi, other_hi.permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def _row_probabilities(s, n0, lse, queries, place, counts, scales, PLAN: gl.constexpr):
    """P of the keys n0.., of a softcap times its slope."""
    _, _, _, _, _, _, left, right = counts
    len_q, len_k, whole_begin, whole_end = place
    LEFT: gl.constexpr = PLAN.LEFT
    RIGHT: gl.constexpr = PLAN.RIGHT
    s, slope = exponents(s, lse[:, None], scales, PLAN)
    if LEFT or RIGHT or not PLAN.EVEN_N:
        cut = n0 + BLOCK > whole_end
        if LEFT:
            cut |= n0 < whole_begin
        if cut:
            keys = n0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
            seen = visible(queries[:, None], keys[None, :], len_k - len_q, len_k, left, right, LEFT, RIGHT)
            s = gl.where(seen, s, float("-inf"))
    return gl.exp2(s) * slope if PLAN.SOFTCAP else gl.exp2(s)


@gluon.jit
def _add_product(ds, dq_lo, dq_hi, k_lo, k_hi):
    """Begin to add dS K."""
    lo = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=dq_lo.type.layout, k_width=2),
                           assert_trivial=True)
    hi = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=dq_hi.type.layout, k_width=2),
                           assert_trivial=True)
    return warpgroup_mma(lo, k_lo, dq_lo, is_async=True), warpgroup_mma(hi, k_hi, dq_hi, is_async=True)


@gluon.jit
def query_consumer(DQ, Rows, Delta, Order, Lens, tiles, bars, counts, scales, C: gl.constexpr, V_STAGES: gl.constexpr,
                   PLAN: gl.constexpr):
    """dQ of 64 queries."""
    if has_tile(Order, PLAN):
        _query_tile(DQ, Rows, Delta, Order, Lens, tiles, bars, counts, scales, C, V_STAGES, PLAN)


@gluon.jit
def _query_tile(DQ, Rows, Delta, Order, Lens, tiles, bars, counts, scales, C: gl.constexpr, V_STAGES: gl.constexpr,
                PLAN: gl.constexpr):
    _, _, _, _, _, _, left, right = counts
    q_lo, q_hi, do_lo, do_hi, k_lo, k_hi, v_lo, v_hi = tiles
    q_full, do_full, k_full, k_empty, v_full, v_empty = bars
    HQ: gl.constexpr = PLAN.HQ
    HV: gl.constexpr = PLAN.HV
    b, _, h, m0, len_q, len_k, first = query_tile(Order, Lens, counts, PLAN)
    begin, blocks = keys_visited(m0, len_q, len_k, counts, PLAN)
    m0 += C * BLOCK
    whole_begin, whole_end = keys_shared(m0, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK)
    place = (len_q, len_k, whole_begin, whole_end)
    queries = m0 + gl.arange(0, BLOCK, layout=ROW)
    at = first + queries  # below 2**31: no GPU holds the queries of more
    lse = gl.load(Rows + at, mask=queries < padded(len_q), other=float("inf"))
    delta = gl.load(Delta + at, mask=queries < padded(len_q), other=0.0)
    dq_lo = gl.zeros([BLOCK, LO], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LO, 16]))
    dq_hi = gl.zeros([BLOCK, HQ], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HQ, 16]))
    n0 = begin + (blocks - 1) * BLOCK
    wait_full(q_full, 0, 1)
    wait_full(k_full, 0, K_STAGES)
    if PLAN.LENS:  # keys and values beyond the last may be NaN, and both consumers read them
        wait_full(v_full, 0, V_STAGES)
        if n0 + BLOCK > len_k:
            if C == 0:
                clear_rows(k_lo.index(0), len_k - n0)
                clear_rows(k_hi.index(0), len_k - n0)
            else:
                clear_rows(v_lo.index(0), len_k - n0)
                if HV > 0:
                    clear_rows(v_hi.index(0), len_k - n0)
        named_sync(BOTH, 256)
    s = _product(q_lo.index(C), q_hi.index(C), k_lo.index(0), k_hi.index(0), HQ)
    wait_full(do_full, 0, 1)
    wait_full(v_full, 0, V_STAGES)
    dp = _product(do_lo.index(C), do_hi.index(C), v_lo.index(0), v_hi.index(0), HV)
    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    release(v_empty, 0, V_STAGES)
    p = _row_probabilities(s, n0, lse, queries, place, counts, scales, PLAN)
    ds = (p * (dp - delta[:, None])).to(DQ.dtype)
    for n in range(blocks - 1):
        n0 -= BLOCK
        mine = C + ((h + n) >> 31)  # C, which the compiler does not know (see `_only`)
        i = slot(n + 1, K_STAGES)
        wait_full(k_full, n + 1, K_STAGES)
        s = _product(q_lo.index(mine), q_hi.index(mine), k_lo.index(i), k_hi.index(i), HQ)
        dq_lo, dq_hi = _add_product(ds, dq_lo, dq_hi, k_lo.index(slot(n, K_STAGES)), k_hi.index(slot(n, K_STAGES)))
        s = warpgroup_mma_wait(2, deps=(s,))
        p = _row_probabilities(s, n0, lse, queries, place, counts, scales, PLAN)
        i = slot(n + 1, V_STAGES)
        wait_full(v_full, n + 1, V_STAGES)
        dp = _product(do_lo.index(mine), do_hi.index(mine), v_lo.index(i), v_hi.index(i), HV)
        dq_lo, dq_hi = warpgroup_mma_wait(2 if HV > 0 else 1, deps=(dq_lo, dq_hi))
        release(k_empty, n, K_STAGES)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        release(v_empty, n + 1, V_STAGES)
        ds = (p * (dp - delta[:, None])).to(DQ.dtype)
    i = slot(blocks - 1, K_STAGES)
    dq_lo, dq_hi = _add_product(ds, dq_lo, dq_hi, k_lo.index(i), k_hi.index(i))
    dq_lo, dq_hi = warpgroup_mma_wait(0, deps=(dq_lo, dq_hi))
    store_half(DQ, dq_lo * scales[0], q_lo.index(C), b, h, m0, 0, LO)
    store_half(DQ, dq_hi * scales[0], q_lo.index(C), b, h, m0, LO, HQ)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NO_SPECIALIZE)
def _query_kernel(Q, K, V, DOut, DQ, Rows, Delta, Order, Lens, heads, kv_heads, n_heads, group, len_q, len_k, left,
                  right, scale, softcap, HQ: gl.constexpr, HV: gl.constexpr, V_STAGES: gl.constexpr, LEFT: gl.constexpr,
                  RIGHT: gl.constexpr, EVEN_N: gl.constexpr, LENS: gl.constexpr, VARLEN: gl.constexpr,
                  SOFTCAP: gl.constexpr, EARLY: gl.constexpr, REGISTERS: gl.constexpr):
    """dQ. Tensors come as descriptors, their tiles [64, 64]; Rows and Delta as in `_deep_kernel`, as pointers."""
    PLAN: gl.constexpr = make_plan(HQ, HV, LEFT, RIGHT, EVEN_N, LENS, VARLEN, SOFTCAP)
    q_lo = make_halves(Q, 2, LO)
    q_hi = make_halves(Q, 2, HQ)
    do_lo = make_halves(DOut, 2, LO)
    k_lo = make_halves(K, K_STAGES, LO)
    k_hi = make_halves(K, K_STAGES, HQ)
    v_lo = make_halves(V, V_STAGES, LO)
    do_hi, v_hi = do_lo, v_lo
    if HV > 0:
        do_hi = make_halves(DOut, 2, HV)
        v_hi = make_halves(V, V_STAGES, HV)
    q_full = make_barriers(1, 1)
    do_full = make_barriers(1, 1)
    k_full = make_barriers(K_STAGES, 1)
    k_empty = make_barriers(K_STAGES, 2)
    v_full = make_barriers(V_STAGES, 1)
    v_empty = make_barriers(V_STAGES, 2)
    fence_async_shared()
    tiles = (q_lo, q_hi, do_lo, do_hi, k_lo, k_hi, v_lo, v_hi)
    bars = (q_full, do_full, k_full, k_empty, v_full, v_empty)
    wait_for_previous(EARLY)
    let_next(EARLY)
    counts = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    gl.warp_specialize([
        (query_consumer, (DQ, Rows, Delta, Order, Lens, tiles, bars, counts, (scale, softcap), 0, V_STAGES, PLAN)),
        (query_consumer, (DQ, Rows, Delta, Order, Lens, tiles, bars, counts, (scale, softcap), 1, V_STAGES, PLAN)),
        (key_producer, (Q, K, V, DOut, Order, Lens, tiles, bars, counts, V_STAGES, PLAN)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
