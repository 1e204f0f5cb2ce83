"""Attention forward on Hopper without maxima (Gluon), for bfloat16, whose exponents reach as far as float32's.

The schedule is that of `hopper_fwd`. But the softmax of a row is taken relative to one reference, the row's maximum
over the first keys that it sees: in the blocks of keys after, no maxima, no rescaling of what was summed, no exchange
between lanes. P and all sums then grow by 2^(score - reference), of which both dtypes hold 2^127. At the end of a tile
the sums tell whether that was enough; a consumer in whose tile it was not, for some row, computes it again, with
maxima, from memory.

SQUARE: under a causal mask whose diagonal ends where tiles end, only a tile's first block of keys is cut, and of that
the first consumer sees half. So it is in packed sequences whose queries and keys are the same tokens: what follows a
sequence lies beyond the diagonal. If 2, the right edge of a window cuts that block, whole blocks ahead of the diagonal,
unless the keys end before. The producer says which tile is next: where tiles are many, one that no program took.
"""

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
from adatom.ops.attention.hopper_fwd_tiles import (
    TURN,
    blocks_of,
    clear_padding,
    count_tiles,
    make_plan,
    make_rings,
    masked_scores,
    multiply_queries,
    nothing_seen,
    own_queries,
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
    load_tile,
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

TOLD = gl.constexpr(8)  # numbers that the producer says of a packed tile, at most


@gluon.jit
def _scores(s, n, first, n0, bounds, rings, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Wait for the scores of a tile's first block n, whose first key is n0, and mask them."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    len_q, len_k, left, right = bounds
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k_empty, n, PLAN.STAGES)
    if PLAN.MASK:
        i = gl.arange(0, PLAN.BLOCK_M, gl.SliceLayout(1, LAYOUT))
        j = gl.arange(0, PLAN.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        begin, end = keys_shared(first, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, PLAN.BLOCK_M)
        cut = (n0 < begin) | (n0 + PLAN.BLOCK_N > end)
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
    reference = finite(higher)
    alpha = gl.exp2(m - reference)
    return s, higher, reference, alpha, l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]


@gluon.jit
def _multiply_half(turn, n, rings, C: gl.constexpr, PLAN: gl.constexpr):
    """Begin s = q k^T for the half of the keys of block n that consumer C sees: the first consumer the first half where
    the diagonal cuts, the second consumer the second half where a window begins."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    HALF: gl.constexpr = PLAN.BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    k = k_s.index(slot(n, PLAN.STAGES)).slice(C * HALF, HALF, 0).permute((1, 0))
    zeros = gl.zeros([BLOCK_M, HALF], gl.float32, LAYOUT)
    return warpgroup_mma(q_s.index(own_queries(turn, C, PLAN)), k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _multiply_both(p, v, acc, turn, n, rings, HALF: gl.constexpr, HOLD: gl.constexpr, C: gl.constexpr,
                   PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """When it is this consumer's turn, s = q k^T for block n, or for the half of it that this consumer sees, and begin
    acc += p v for the block before: (s, acc).

    HOLD: the next consumer's turn comes when s has come, not as soon as all is begun. Else the products of two may run
    side by side, so that both have their scores late, and then no products under their exponentials."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    wait_full(k_full, n, PLAN.STAGES)
    named_sync(TURN + C, 256)
    if HALF:
        s = _multiply_half(turn, n, rings, C, PLAN)
    else:
        s = multiply_queries(turn, n, rings, C, PLAN, LAYOUT)
    wait_full(v_full, n - 1, PLAN.STAGES)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if HOLD:
        s = warpgroup_mma_wait(1, deps=(s,))
    named_arrive(TURN + (C + 1) % PLAN.CONSUMERS, 256)
    s = warpgroup_mma_wait(1, deps=(s,))  # once more, or ptxas passes the turn on after exponentials
    release(k_empty, n, PLAN.STAGES)
    return s, acc


@gluon.jit
def _pin(l):
    """What l is made of is computed before what follows: ptxas would move exponentials below the wait for P V."""
    asm: gl.constexpr = """
    {
        .reg .pred never;
        .reg .f32 t;
        add.f32 t, $4, $5;
        add.f32 t, t, $6;
        add.f32 t, t, $7;
        setp.lt.f32 never, t, 0f00000000;
        @never nanosleep.u32 1;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
    }
    """
    gl.inline_asm_elementwise(asm, "=r,=r,=r,=r,f,f,f,f", [l], dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _softmax(s, acc, l, reference, n, rings, unit, PIN: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr,
             P_LAYOUT: gl.constexpr):
    """(acc, l, p) of the scores s of block n, while P V of the block before is under way.

    Of three consumers, only until half of the exponentials are there: these are rounded under the other half, to where
    the p of the block before lay."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    if PLAN.CONSUMERS < 3:
        p = exponentials(s, reference, unit)
        l += in_lanes(p)
        if PIN:
            _pin(l)
        acc, p = settle(acc, p, n - 1, rings, PLAN, P_LAYOUT)
    else:
        HALF: gl.constexpr = PLAN.BLOCK_N // 2
        H_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        m = gl.convert_layout(reference, gl.SliceLayout(1, H_LAYOUT))
        low, high = gl.split(s.reshape([PLAN.BLOCK_M, 2, HALF]).permute((0, 2, 1)))
        low = exponentials(gl.convert_layout(low, H_LAYOUT, assert_trivial=True), m, unit)
        l += gl.convert_layout(in_lanes(low), l.type.layout, assert_trivial=True)
        if PIN:
            _pin(l)
        wait_full(v_full, n - 1, PLAN.STAGES)  # as in `settle`
        acc, low = warpgroup_mma_wait(0, deps=(acc, low))
        release(v_empty, n - 1, PLAN.STAGES)
        high = exponentials(gl.convert_layout(high, H_LAYOUT, assert_trivial=True), m, unit)
        l += gl.convert_layout(in_lanes(high), l.type.layout, assert_trivial=True)
        p = side_by_side(low, high, LAYOUT)
        p = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
    return acc, l, p


@gluon.jit
def _window_edge(s, acc, l, reference, n, shift, rings, unit, PLAN: gl.constexpr, LAYOUT: gl.constexpr,
                 S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr):
    """(acc, l, p) of the last block, which the left edge cuts as the diagonal cuts the first: of it, query i sees the
    keys from i + shift on. LAYOUT: of s, which may be of the block's second half alone; p is of all of it."""
    i = gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
    s = gl.where(j[None, :] >= i[:, None] + shift, s, float("-inf"))
    p = exponentials(s, gl.convert_layout(reference, gl.SliceLayout(1, LAYOUT)), unit)
    l += gl.convert_layout(in_lanes(p), l.type.layout, assert_trivial=True)
    _pin(l)
    if p.shape[1] < PLAN.BLOCK_N:
        p = side_by_side(gl.zeros_like(p), p, S_LAYOUT)
    acc, p = settle(acc, p, n - 1, rings, PLAN, P_LAYOUT)
    return acc, l, p


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
    begin, end = keys_seen(first, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK_M, KEYS)
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
def _tell(t, turn, numbers, rings, PLAN: gl.constexpr):
    """Say that tile t is that of this turn, as soon as there is room for its queries."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    CONSUMERS: gl.constexpr = PLAN.CONSUMERS
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(own_queries(turn, c, PLAN)), lap(turn, PLAN.Q_STAGES) ^ 1)
    say(t, 0, turn, numbers, PLAN.Q_STAGES)


@gluon.jit
def _told(turn, numbers, rings, C: gl.constexpr, PLAN: gl.constexpr):
    """The tile of this turn, once the queries of consumer C have come. The first that is none ends the program."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    mbarrier.wait(q_full.index(own_queries(turn, C, PLAN)), lap(turn, PLAN.Q_STAGES))
    return said(0, turn, numbers, PLAN.Q_STAGES)


@gluon.jit
def _producer(Q, K, V, Lens, Order, Taken, numbers, rings, sizes, n_tiles, SQUARE: gl.constexpr, COUNTED: gl.constexpr,
              PLAN: gl.constexpr):
    """Keeps the rings full, and says which tile is next, of packed ones all that there is to know. COUNTED: it is one
    that no program took yet; `Taken` counts those that were, beyond each program's first."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    CONSUMERS: gl.constexpr = PLAN.CONSUMERS
    STAGES: gl.constexpr = PLAN.STAGES
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    if PLAN.VARLEN:
        Taken = Order + 1
    n = 0
    turn = 0
    t = gl.program_id(0)
    while t < n_tiles:
        following = tile_number(turn + 1)
        if COUNTED:
            following = gl.num_programs(0) + gl.atomic_add(Taken, 1, sem="relaxed")
        b, h, m0, start_q, start_k, len_q, len_k = tile_of(t, Order, Lens, sizes, PLAN)
        begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
        hk = h // (heads // kv_heads)
        _tell(t, turn, numbers, rings, PLAN)
        if PLAN.VARLEN:
            say(h, 1, turn, numbers, PLAN.Q_STAGES)
            say(m0, 2, turn, numbers, PLAN.Q_STAGES)
            say(start_q, 3, turn, numbers, PLAN.Q_STAGES)
            say(len_q, 4, turn, numbers, PLAN.Q_STAGES)
            if not SQUARE:
                say(start_k, 5, turn, numbers, PLAN.Q_STAGES)
                say(len_k, 6, turn, numbers, PLAN.Q_STAGES)
        for c in gl.static_range(CONSUMERS):
            i = own_queries(turn, c, PLAN)
            load_tile(Q, b, h, start_q + m0 + c * PLAN.BLOCK_M, 0, q_full.index(i), q_s.index(i))
        n0 = begin + blocks * PLAN.BLOCK_N
        for _ in range(blocks):
            n0 -= PLAN.BLOCK_N
            i = slot(n, STAGES)
            wait_empty(k_empty, n, STAGES)
            load_tile(K, b, hk, start_k + n0, 0, k_full.index(i), k_s.index(i))
            wait_empty(v_empty, n, STAGES)
            load_tile(V, b, hk, start_k + n0, 0, v_full.index(i), v_s.index(i))
            n += 1
        turn += 1
        t = following
    _tell(n_tiles, turn, numbers, rings, PLAN)
    for c in gl.static_range(CONSUMERS):
        mbarrier.arrive(q_full.index(own_queries(turn, c, PLAN)), count=1)


@gluon.jit
def _consumer(results, given, keys, numbers, rings, sizes, n_tiles, scale, C: gl.constexpr, SQUARE: gl.constexpr,
              DIM: gl.constexpr, PLAN: gl.constexpr):
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
    H_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // 2, 16])
    AHEAD: gl.constexpr = SQUARE == 2
    HOLD: gl.constexpr = COLUMNS <= 64 and not PLAN.LEFT
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    i = C * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)
    unit = scale * LOG2E
    if C == PLAN.CONSUMERS - 1:
        named_arrive(TURN, 256)  # the first consumer begins

    n = 0  # blocks of keys begun
    turn = 0
    t = _told(turn, numbers, rings, C, PLAN)
    while t < n_tiles:
        q = own_queries(turn, C, PLAN)
        wait_full(k_full, n, STAGES)
        named_sync(TURN + C, 256)
        if SQUARE and C == 0 and not AHEAD:
            s = _multiply_half(turn, n, rings, C, PLAN)
        else:
            s = multiply_queries(turn, n, rings, C, PLAN, S_LAYOUT)
        named_arrive(TURN + (C + 1) % PLAN.CONSUMERS, 256)
        if PLAN.VARLEN:
            b, h, m0 = t * 0, said(1, turn, numbers, PLAN.Q_STAGES), said(2, turn, numbers, PLAN.Q_STAGES)
            start_q, len_q = said(3, turn, numbers, PLAN.Q_STAGES), said(4, turn, numbers, PLAN.Q_STAGES)
            start_k, len_k = start_q, len_q
            if not SQUARE:
                start_k, len_k = said(5, turn, numbers, PLAN.Q_STAGES), said(6, turn, numbers, PLAN.Q_STAGES)
        else:
            b, h, m0, start_q, start_k, len_q, len_k = tile_of(t, Order, Lens, sizes, PLAN)
        begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
        bounds = (len_q, len_k, left, right)
        first = m0 + C * BLOCK_M
        n0 = begin + (blocks - 1) * BLOCK_N
        acc = gl.zeros([BLOCK_M, COLUMNS], gl.float32, O_LAYOUT)
        if SQUARE:
            s = warpgroup_mma_wait(0, deps=(s,))
            release(k_empty, n, STAGES)
            if AHEAD:
                j = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
                s = gl.where(j[None, :] <= (m0 + i + (len_k - len_q + right))[:, None], s, float("-inf"))
                reference = gl.max(s, 1) * unit
                p = exponentials(s, reference, unit)
                l = in_lanes(p)
            else:
                p, reference, l = diagonal(s, unit, C, PLAN, S_LAYOUT)
            n += 1
            edge = n * 0  # whether the last block is cut, too
            if PLAN.LEFT:
                edge = gl.where(m0 + (BLOCK_N - 1) + len_k - len_q > left, 1, 0)
            rest = blocks - 1 - edge
            # ptxas may leave out what describes an operand to one of two branches that both multiply by it: no "else"
            if C == 0 and not AHEAD:  # half a block, then whole ones
                half = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
                p = side_by_side(p, gl.zeros_like(p), S_LAYOUT)
                p = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
                if not HOLD:  # of short products, half of one is not worth a branch
                    if rest > 0:
                        v = v_s.index(slot(n - 1, STAGES)).slice(0, BLOCK_N // 2, 0)
                        scores, acc = _multiply_both(half, v, acc, turn, n, rings, False, False, C, PLAN, S_LAYOUT)
                        acc, l, p = _softmax(scores, acc, l, reference, n, rings, unit, False, PLAN, S_LAYOUT, P_LAYOUT)
                        n += 1
                        rest -= 1
            else:
                p = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
            for _ in range(rest):
                v = v_s.index(slot(n - 1, STAGES))
                scores, acc = _multiply_both(p, v, acc, turn, n, rings, False, HOLD, C, PLAN, S_LAYOUT)
                acc, l, p = _softmax(scores, acc, l, reference, n, rings, unit, False, PLAN, S_LAYOUT, P_LAYOUT)
                n += 1
            if PLAN.LEFT:
                if edge != 0:
                    EDGE: gl.constexpr = S_LAYOUT if C == 0 else H_LAYOUT
                    v = v_s.index(slot(n - 1, STAGES))
                    scores, acc = _multiply_both(p, v, acc, turn, n, rings, C == 1, False, C, PLAN, S_LAYOUT)
                    shift = left & 1  # it lies at a multiple of 128, or at one less
                    acc, l, p = _window_edge(scores, acc, l, reference, n, shift, rings, unit, PLAN, EDGE, S_LAYOUT,
                                             P_LAYOUT)
                    n += 1
        else:
            s = _scores(s, n, first, n0, bounds, rings, PLAN, S_LAYOUT)
            m = gl.max(s, 1) * unit
            reference = finite(m)
            p = exponentials(s, reference, unit)
            l = in_lanes(p)
            p = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
            if PLAN.LENS or PLAN.VARLEN:
                clear_padding(v_s.index(slot(n, STAGES)), v_full, n, len_k - n0, PLAN)
            n += 1

            for _ in range(blocks - 1):
                n0 -= BLOCK_N
                v = v_s.index(slot(n - 1, STAGES))
                s, acc = _multiply_both(p, v, acc, turn, n, rings, False, False, C, PLAN, S_LAYOUT)
                alpha = m
                begin, end = keys_shared(first, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK_M)
                cut = n0 + BLOCK_N >= end
                if PLAN.RIGHT:  # the right edge may cut more blocks, in which rows may see the first of their keys
                    if cut:
                        s, m, reference, alpha, l = _cut(s, m, l, first, n0, bounds, unit, PLAN, S_LAYOUT)
                if PLAN.LEFT:
                    if (cut == 0) & (n0 < begin):
                        j = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
                        s = gl.where(j[None, :] >= (m0 + i + (len_k - len_q - left))[:, None], s, float("-inf"))
                acc, l, p = _softmax(s, acc, l, reference, n, rings, unit, PLAN.LEFT, PLAN, S_LAYOUT, P_LAYOUT)
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
        doubt = doubts(sums)
        worst = gl.max(gl.where(m0 + i < len_q, doubt, 0), 0)
        if SQUARE and PLAN.VARLEN:  # the next sequence's v, multiplied by 0, may have been NaN
            worst = gl.maximum(worst, gl.where((first < len_q) & (m0 + BLOCK_N > len_q), 1, 0))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(v_empty, n - 1, STAGES)
        tma.store_wait(0)  # the tile before has left
        gl.barrier()
        if worst > 0:
            if worst == 1:  # a large v may have overflowed, what is multiplied by 0 may be NaN
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
        turn += 1
        t = _told(turn, numbers, rings, C, PLAN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_heads", "group", "len_q", "len_k", "left", "right", "n_tiles"])
def _fast_kernel(Q, K, V, Sinks, Lens, Order, Taken, Out, KPtr, VPtr, OutPtr, Lse, stride_oh, stride_om,
                 stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm,
                 heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles, scale,
                 LEFT: gl.constexpr, RIGHT: gl.constexpr, MASK: gl.constexpr, SINKS: gl.constexpr, LENS: gl.constexpr,
                 VARLEN: gl.constexpr, SQUARE: gl.constexpr, COUNTED: gl.constexpr, HEAD_DIM: gl.constexpr,
                 HEAD_DIM_V: gl.constexpr, EARLY: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr,
                 BLOCK_N: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr):
    PLAN: gl.constexpr = make_plan(0, False, True, LEFT, RIGHT, MASK, SINKS, LENS, VARLEN, HEAD_DIM_V, CONSUMERS,
                                   BLOCK_M, BLOCK_N, Q_STAGES, STAGES, 1, False)
    rings = make_rings(Q, K, V, K, Out, PLAN)
    EACH: gl.constexpr = TOLD if VARLEN else 1
    numbers = gl.allocate_shared_memory(gl.int32, [Q_STAGES * EACH, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    let_next(EARLY)
    wait_for_previous(EARLY)
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    results = (Out, OutPtr, Lse, stride_oh, stride_om)
    given = (Sinks, Lens, Order)
    keys = (KPtr, VPtr, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (results, given, keys, numbers, rings, sizes, n_tiles, scale, 0, SQUARE, HEAD_DIM, PLAN)),
            (_producer, (Q, K, V, Lens, Order, Taken, numbers, rings, sizes, n_tiles, SQUARE, COUNTED, PLAN)),
        ], [1], [24])
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (results, given, keys, numbers, rings, sizes, n_tiles, scale, 0, SQUARE, HEAD_DIM, PLAN)),
            (_consumer, (results, given, keys, numbers, rings, sizes, n_tiles, scale, 1, SQUARE, HEAD_DIM, PLAN)),
            (_producer, (Q, K, V, Lens, Order, Taken, numbers, rings, sizes, n_tiles, SQUARE, COUNTED, PLAN)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consumer, (results, given, keys, numbers, rings, sizes, n_tiles, scale, 0, SQUARE, HEAD_DIM, PLAN)),
            (_consumer, (results, given, keys, numbers, rings, sizes, n_tiles, scale, 1, SQUARE, HEAD_DIM, PLAN)),
            (_consumer, (results, given, keys, numbers, rings, sizes, n_tiles, scale, 2, SQUARE, HEAD_DIM, PLAN)),
            (_producer, (Q, K, V, Lens, Order, Taken, numbers, rings, sizes, n_tiles, SQUARE, COUNTED, PLAN)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
