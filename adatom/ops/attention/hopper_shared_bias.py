"""dQ and the gradient of a full bias that many (batch, head) share, on Hopper (Gluon) to head_dim 32.

    dS = P (dO V^T - delta);  P = exp(S + bias - lse);  dbias = sum dS;  dQ = scale dS K

A tile of 128 queries and 128 keys has one owner, each of two consumer warpgroups half of its queries. The sum of dS
stays in registers while a producer warp brings q, k, dO and v of one sharer after the other; so does dS itself, as the
left operand of dQ.

The tiles of the same queries are a chain of programs, which run at once. Each adds its piece of dQ of a sharer to
what the one before it handed on in memory, and the last one writes dQ. TMA adds there, in turn, so that consumers wait
for the programs before only where they are the last one's, or a piece late. What is handed on goes round in a ring that
stays in L2: its first program waits for the last one to free places. So there is no sum of dQ in memory, and all
results repeat bit for bit. Programs are numbered as they begin, so that a kernel waits with one chain at the most for
multiprocessors that others have; `limits` allows no chain of more than a quarter of them. Where tiles are too few for
the GPU, several programs share the sum of dbias, each of them with one tile; the last waits for the others' parts.
"""

import torch
from triton.language.core import PropagateNan

from adatom.ops.attention.hopper_shared_ends import NUMBERS
from adatom.ops.attention.hopper_shared_lent import STRETCHES
from adatom.ops.attention.hopper_sharers import (
    BLOCK,
    HALF,
    load_bias,
    several_of,
    sharer,
    shares_of_sum,
    sharing,
    tile_of_sum,
)
from adatom.ops.attention.triton_call import Call
from adatom.tiles.hopper import (
    LOG2E,
    Launch,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    load_tile,
    load_tile_and_numbers,
    make_barriers,
    make_tiles,
    mbarrier,
    pass_turn,
    release,
    slot,
    store_tile,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    wait_turn,
    warpgroup_mma,
    warpgroup_mma_wait,
)

DIM = gl.constexpr(32)  # head_dim in memory
KEEP_NAN = gl.constexpr(PropagateNan.ALL)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
STAGES = gl.constexpr(3)  # buffers of q, k, dO and v
PASSERS = gl.constexpr(2)  # warps that hand it on in turn: it takes one longer than a sharer's products
LINKS = (4, 2)  # places of a chain's ring for each of its programs: fewer where memory is short
APART = gl.constexpr(8)  # words between the numbers of programs: 32 bytes
_SPILL = 16  # of numbers that are wanted before and after the loops


@gluon.jit
def widened(x, PURE: gl.constexpr = True):
    """A tile of 16 bits in float32. Of bfloat16, whose pairs the compiler takes apart in three steps, in two. Not
    PURE: where it is written, for what is kept in 16 bits must not be widened ahead of a loop."""
    if x.dtype == gl.bfloat16:
        bf16: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(bf16, "=f,=f,r", [x], dtype=gl.float32, is_pure=PURE, pack=2)
    elif PURE:
        return x.to(gl.float32)
    else:
        f16: gl.constexpr = "{.reg .b16 x, y; mov.b32 {x, y}, $2; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y;}"
        return gl.inline_asm_elementwise(f16, "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def _producer(Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, me, slices, counts,
              SHARED_HEADS: gl.constexpr, BIASES: gl.constexpr):
    """Keeps the rings full. Of the sharers every `parts`-th is a part's, so that all parts are near each other in
    memory, and near what is read beside them."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, _, _ = tiles
    full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    n = 0
    turn = 0
    for t in range(me, n_tiles, gl.num_programs(0)):
        piece, part, m0, n0 = tile_of_sum(t, slices, counts)
        i_bias = slot(turn, BIASES)
        wait_empty(bias_empty, turn, BIASES)
        load_bias(Bias, several, piece, m0, n0, bias_full.index(i_bias), bias_s, i_bias, counts)
        for r in range(part, shared, parts):
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            row = (b * heads + h) * padded + m0
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_tile_and_numbers(Q, b, h, m0, Lse, row, full.index(i), q_s.index(i), lse_s.index(i))
            load_tile(K, b, h, n0, 0, full.index(i), k_s.index(i))
            load_tile_and_numbers(DOut, b, h, m0, Delta, row, full.index(i), do_s.index(i), delta_s.index(i))
            load_tile(V, b, h, n0, 0, full.index(i), v_s.index(i))
            n += 1
        turn += 1


@gluon.jit
def _product(left, right, i, H: gl.constexpr, C: gl.constexpr):
    """Begin to multiply the queries' tile of this consumer by half H of the keys', [HALF, HALF], of buffer i."""
    zeros = gl.zeros([HALF, HALF], gl.float32, SCORES)
    x = left.index(i).slice(C * HALF, HALF, dim=0)
    y = right.index(i).slice(H * HALF, HALF, dim=0).permute((1, 0))
    return warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def _probabilities(s, bias, lse, unit, EVEN_N: gl.constexpr):
    """P from a product, a bias and lse in log2 units."""
    s = s * unit + (widened(bias, False) * LOG2E - lse[:, None])
    if not EVEN_N:  # keys beyond the last: 0, whose P must not become infinite
        s = gl.minimum(s, 0.0, propagate_nan=KEEP_NAN)
    return gl.exp2(s)


@gluon.jit
def in_rows(x):
    """A warpgroup's accumulator [64, N] as [N / 2, 128], the rows of a warp together: a thread holds 16 bytes in a row
    and a warp all 512 of it, so that nothing moves between threads."""
    BLOCKS: gl.constexpr = x.shape[1] // 8
    return x.reshape([4, 2, 8, BLOCKS, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([4 * BLOCKS, 128])


@gluon.jit
def in_lines(x):
    """What `in_rows` made, as it was."""
    BLOCKS: gl.constexpr = x.shape[0] // 4
    LINES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8 * BLOCKS, 16])
    x = x.reshape([4, BLOCKS, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([HALF, 8 * BLOCKS])
    return gl.convert_layout(x, LINES, assert_trivial=True)


@gluon.jit
def store_sum(DBias, piece, m0, n0, x, len_q, len_k, PAIRS: gl.constexpr):
    """Write an accumulator, in DBias' type, to (m0, n0) of a slice, what exists of it. PAIRS: len_k is even."""
    LAYOUT: gl.constexpr = x.type.layout
    width = len_k // 2 * 2 if PAIRS else len_k  # as the compiler may know: it writes pairs
    rows = m0 + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    columns = n0 + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    at = DBias + piece.to(gl.int64) * (len_q * width) + rows * width + columns
    gl.store(at, x.to(DBias.dtype.element_ty), mask=(rows < len_q) & (columns < width))


@gluon.jit
def _place_in_ring(n, me, chain, link):
    """(first row of the ring that use n of a chain of so many programs lies in, how many uses it holds)."""
    uses = chain * link
    return (me // chain * uses + n % uses) * DIM, uses


@gluon.jit
def _fetcher(Ring, Done, dq_s, bars, me, link, slices, counts, DQ_STAGES: gl.constexpr):
    """Says which places of dq_s are free; to the last program of a chain brings there what the others handed on."""
    dq_full, _, dq_empty, _ = bars
    _, _, _, shared, parts, _, _, len_k, n_tiles = counts
    chain = (len_k + BLOCK - 1) // BLOCK
    place = me % chain
    n = 0
    for t in range(me, n_tiles, gl.num_programs(0)):
        _piece, part, _m0, _n0 = tile_of_sum(t, slices, counts)
        for _ in range(part, shared, parts):
            i = slot(n, DQ_STAGES)
            wait_empty(dq_empty, n, DQ_STAGES)
            if (place > 0) & (place + 1 == chain):
                row, _uses = _place_in_ring(n, me, chain, link)
                wait_turn(Done + me * APART + n % PASSERS, n // PASSERS + 1)
                mbarrier.expect(dq_full.index(i), Ring.block_type.nbytes)
                tma.async_load(Ring, [row, 0], dq_full.index(i), dq_s.index(i))
            else:
                mbarrier.arrive(dq_full.index(i), count=1)
            n += 1


@gluon.jit
def _passer(DQ, Ring, Done, dq_s, out_s, bars, me, link, slices, counts, P: gl.constexpr, SHARED_HEADS: gl.constexpr,
            DQ_STAGES: gl.constexpr):
    """Hands on every other of what the consumers made of it: the first program of a chain writes it to the ring, where
    there is a place, others add to what lies there when it is their turn. The last one writes dQ."""
    _, dq_done, dq_empty, out_empty = bars
    _, _, _, shared, parts, _, _, len_k, n_tiles = counts
    chain = (len_k + BLOCK - 1) // BLOCK
    place = me % chain
    mine = Done + (me + 1) * APART + P
    before = Done + (me + gl.where(place == 0, chain, 0)) * APART + P
    n = 0
    for t in range(me, n_tiles, gl.num_programs(0)):
        piece, part, m0, _n0 = tile_of_sum(t, slices, counts)
        for r in range(part, shared, parts):
            if n % PASSERS == P:
                i = slot(n, DQ_STAGES)
                wait_full(dq_done, n, DQ_STAGES)
                if place + 1 < chain:
                    row, uses = _place_in_ring(n, me, chain, link)
                    wait_turn(before, (n + PASSERS - gl.where(place == 0, uses, 0)) // PASSERS)
                    if place == 0:
                        tma.async_store(Ring, [row, 0], dq_s.index(i))
                    else:
                        tma.async_atomic_add(Ring, [row, 0], dq_s.index(i))
                else:
                    b, h = sharer(r, piece, counts, SHARED_HEADS)
                    for c in gl.static_range(2):
                        store_tile(DQ, b, h, m0 + c * HALF, 0, out_s.index(c))
                tma.store_wait(0)
                release(dq_empty, n, DQ_STAGES)
                release(out_empty, n, 1)
                pass_turn(mine, n // PASSERS + 1)
            n += 1


@gluon.jit
def _sum_of_parts(Handed, Done, low, high, t, part, counts, C: gl.constexpr):
    """What a consumer of the last program of a tile has, with what the others wrote, in order; these write theirs."""
    parts, n_tiles = counts[4], counts[8]
    tiles = n_tiles // parts
    rows = gl.arange(0, HALF, gl.SliceLayout(1, SCORES))[:, None]
    at = rows * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SCORES))[None, :]
    if part + 1 < parts:
        X = Handed + (t * 2 + C) * (2 * HALF * HALF)
        gl.store(X + at, low)
        gl.store(X + HALF * HALF + at, high)
        gl.barrier()
        gl.atomic_add(Done + (t + 1) * APART + PASSERS + C, 1, sem="release")
    else:
        x = gl.zeros([HALF, HALF], gl.float32, SCORES)
        for other in range(t - part * tiles, t, tiles):
            wait_turn(Done + (other + 1) * APART + PASSERS + C, 1)
            x += gl.load(Handed + (other * 2 + C) * (2 * HALF * HALF) + at)
        low += x
        x = gl.zeros([HALF, HALF], gl.float32, SCORES)
        for other in range(t - part * tiles, t, tiles):
            x += gl.load(Handed + (other * 2 + C) * (2 * HALF * HALF) + HALF * HALF + at)
        high += x
    return low, high


@gluon.jit
def _consumer(DBias, Handed, Done, tiles, bars, dq_bars, me, slices, counts, scale, C: gl.constexpr,
              SHARED_HEADS: gl.constexpr, EVEN_N: gl.constexpr, PARTS: gl.constexpr, STAGED: gl.constexpr,
              BIASES: gl.constexpr, DQ_STAGES: gl.constexpr):
    """Sums HALF rows of every tile, one half of its columns after the other. The bias stays in registers, in 16 bits.
    Comments at waits name the products under way, the eldest first."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s, out_s = tiles
    full, empty, bias_full, bias_empty = bars
    dq_full, dq_done, _, out_empty = dq_bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([HALF, DIM], gl.float32, GRAD)
    unit = scale * LOG2E
    n = 0
    turn = 0
    for t in range(me, n_tiles, gl.num_programs(0)):
        piece, part, m0, n0 = tile_of_sum(t, slices, counts)
        tile = bias_s.index(slot(turn, BIASES) * 2 + C)
        wait_full(bias_full, turn, BIASES)
        bias_low = tile.slice(0, HALF, dim=1).load(SCORES)
        bias_high = tile.slice(HALF, HALF, dim=1).load(SCORES)
        low = gl.zeros([HALF, HALF], gl.float32, SCORES)
        high = gl.zeros([HALF, HALF], gl.float32, SCORES)
        for r in range(part, shared, parts):
            i = slot(n, STAGES)
            k = k_s.index(i)
            wait_full(full, n, STAGES)
            # ahead of the products: reads of shared memory queue behind them
            lse = lse_s.index(i).slice(C * HALF, HALF).load(ROWS)
            delta = delta_s.index(i).slice(C * HALF, HALF).load(ROWS)
            s = _product(q_s, k_s, i, 0, C)
            dp = _product(do_s, v_s, i, 0, C)
            s = warpgroup_mma_wait(1, deps=(s,))  # S, dP
            p = _probabilities(s, bias_low, lse, unit, EVEN_N)
            dp = warpgroup_mma_wait(0, deps=(dp,))  # dP
            ds = p * (dp - delta[:, None])
            low += ds
            ds16 = gl.convert_layout(ds.to(k.dtype), OPERAND, assert_trivial=True)
            s_high = _product(q_s, k_s, i, 1, C)
            dq = warpgroup_mma(ds16, k.slice(0, HALF, dim=0), zeros, use_acc=False, is_async=True)
            dp_high = _product(do_s, v_s, i, 1, C)
            s_high = warpgroup_mma_wait(2, deps=(s_high,))  # S, dQ, dP
            p = _probabilities(s_high, bias_high, lse, unit, EVEN_N)
            dp_high, dq = warpgroup_mma_wait(0, deps=(dp_high, dq))  # dQ, dP
            ds = p * (dp_high - delta[:, None])
            high += ds
            ds16 = gl.convert_layout(ds.to(k.dtype), OPERAND, assert_trivial=True)
            dq = warpgroup_mma(ds16, k.slice(HALF, HALF, dim=0), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            release(empty, n, STAGES)
            handed = dq_s.index(slot(n, DQ_STAGES)).slice(C * (DIM // 2), DIM // 2, dim=0)
            wait_full(dq_full, n, DQ_STAGES)
            x = in_rows(dq)
            before = handed.load(x.type.layout)
            x += gl.where((n0 > 0) & (n0 + BLOCK >= len_k), before, 0.0)
            handed.store(x)
            wait_empty(out_empty, n, 1)  # others than the last wait here, too, for their piece before: it helps
            out_s.index(C).store((in_lines(x) * scale).to(out_s.dtype))  # the last one's are dQ
            fence_async_shared()
            release(dq_done, n, DQ_STAGES)
            n += 1
        m0 += C * HALF
        if PARTS:
            low, high = _sum_of_parts(Handed, Done, low, high, t, part, counts, C)
        if part + 1 == parts:
            if STAGED:
                tile.slice(0, HALF, dim=1).store(low.to(tile.dtype))
                tile.slice(HALF, HALF, dim=1).store(high.to(tile.dtype))
                fence_async_shared()
                store_tile(DBias, piece // bias_heads, piece % bias_heads, m0, n0, tile)
                tma.store_wait(0)
                gl.barrier()
            else:
                X = DBias + piece.to(gl.int64) * len_q * len_k
                rows = m0 + gl.arange(0, HALF, ROWS)[:, None]
                columns = n0 + gl.arange(0, HALF, gl.SliceLayout(0, SCORES))[None, :]
                at = rows.to(gl.int64) * len_k + columns
                gl.store(X + at, low.to(DBias.dtype.element_ty), mask=(rows < len_q) & (columns < len_k))
                columns += HALF
                gl.store(X + at + HALF, high.to(DBias.dtype.element_ty), mask=(rows < len_q) & (columns < len_k))
        release(bias_empty, turn, BIASES)
        turn += 1
    tma.store_wait(0)


_COUNTS = [
    "link", "slices", "heads", "repeats", "bias_heads", "shared", "parts", "padded", "len_q", "len_k", "n_tiles",
]  # fmt: skip


@gluon.jit(do_not_specialize=_COUNTS)
def _sums_kernel(Q, K, V, Bias, DOut, Lse, Delta, DQ, Ring, Done, Handed, DBias, bias_b, bias_h, link, slices, heads,
                 repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles, scale, SHARED_HEADS: gl.constexpr,
                 EVEN_N: gl.constexpr, PARTS: gl.constexpr, STAGED: gl.constexpr, EARLY: gl.constexpr,
                 BIASES: gl.constexpr, DQ_STAGES: gl.constexpr):
    """Tiles of dbias (slices of the bias, len_q, len_k), and dQ. Programs: a multiple of the blocks of keys.

    Lse (in log2 units), Delta: float32, `padded` numbers for each (batch, head). Each slice of the bias serves `shared`
    (batch, head), of `repeats` consecutive batch elements; its number is multiplied by bias_b, that of its head by
    bias_h: 0 along expanded dimensions. Ring: float32, [32, 128] for each use of a chain's ring, `link` for each
    program. Done: int32, 0; number 1 becomes how many programs have begun, those from APART times (1 + program) on how
    many each of its PASSERS has handed on, then 1 where a consumer has written its part. PARTS: there are several
    `parts` of each tile of dbias; all but the last lie in Handed, float32, BLOCK times BLOCK numbers each.
    """
    q_s = make_tiles(Q, STAGES)
    k_s = make_tiles(K, STAGES)
    do_s = make_tiles(DOut, STAGES)
    v_s = make_tiles(V, STAGES)
    bias_s = make_tiles(Bias, 2 * BIASES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Delta.layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [DQ_STAGES, DIM, 128], Ring.layout)
    out_s = make_tiles(DQ, 2)
    full = make_barriers(STAGES, 4)
    empty = make_barriers(STAGES, 2)
    bias_full = make_barriers(BIASES, 2)
    bias_empty = make_barriers(BIASES, 2)
    dq_full = make_barriers(DQ_STAGES, 1)
    dq_done = make_barriers(DQ_STAGES, 2)
    dq_empty = make_barriers(DQ_STAGES, 1)
    out_empty = make_barriers(1, 1)
    fence_async_shared()
    wait_for_previous(EARLY)
    let_next(EARLY)
    me = gl.atomic_add(Done + 1, 1, sem="acq_rel")  # what the kernel behind reads is there once a program has begun
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s, out_s)
    bars = (full, empty, bias_full, bias_empty)
    dq_bars = (dq_full, dq_done, dq_empty, out_empty)
    counts = (heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (DBias, Handed, Done, tiles, bars, dq_bars, me, slices, counts, scale, 0, SHARED_HEADS, EVEN_N,
                     PARTS, STAGED, BIASES, DQ_STAGES)),
        (_consumer, (DBias, Handed, Done, tiles, bars, dq_bars, me, slices, counts, scale, 1, SHARED_HEADS, EVEN_N,
                     PARTS, STAGED, BIASES, DQ_STAGES)),
        (_producer, (Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, me, slices, counts, SHARED_HEADS, BIASES)),
        (_fetcher, (Ring, Done, dq_s, dq_bars, me, link, slices, counts, DQ_STAGES)),
        (_passer, (DQ, Ring, Done, dq_s, out_s, dq_bars, me, link, slices, counts, 0, SHARED_HEADS, DQ_STAGES)),
        (_passer, (DQ, Ring, Done, dq_s, out_s, dq_bars, me, link, slices, counts, 1, SHARED_HEADS, DQ_STAGES)),
    ], [4, 1, 1, 1, 1], [240, 24, 24, 24, 24])  # fmt: skip


def sums_launch(call: Call, bias: torch.Tensor, padded: int, room: int) -> tuple[Launch, int, int]:
    """The launch for q, k, v, bias, dout, lse, delta, dq, the ring, the numbers of programs, parts, and dbias; how many
    numbers its ring has, which shall be no more than `room` if that can be, and its parts."""
    n, dim = BLOCK.value, DIM.value
    chain = -(-call.len_k // n)
    programs = call.device.sms // chain * chain
    assert 0 < (programs + 1) * APART.value <= NUMBERS.value - STRETCHES.value  # those count what dK and dV read
    slices, shared = sharing(call, bias)
    tiles, parts = shares_of_sum(call, bias, programs)
    assert parts == 1 or tiles * parts <= programs
    programs = min(tiles * parts, programs)
    rings = [(link, programs * link * dim * 128) for link in LINKS]
    link, ring = next((r for r in rings if r[1] <= room), rings[-1])
    staged = call.len_k * bias.element_size() % 16 == 0
    biases, dq_stages = (2, 2) if chain <= 6 else (1, 4)  # buffers: in a long chain programs wait for many others
    scalars = (
        *several_of(call), link, slices, call.heads, call.repeats, bias.shape[1], shared, parts, padded, call.len_q,
        call.len_k, tiles * parts, call.scale,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": bias.shape[1] < call.heads, "EVEN_N": call.even(call.len_k, n), "PARTS": parts > 1,
        "STAGED": staged, "EARLY": True, "BIASES": biases, "DQ_STAGES": dq_stages, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    blocks = {
        "Q": (n, dim), "K": (n, dim), "V": (n, dim), "DOut": (n, dim), "Lse": (n,), "Delta": (n,),
        "Bias": (n // 2, n), "DQ": (n // 2, dim), "Ring": (dim, 128),
    }  # fmt: skip
    if staged:
        blocks["DBias"] = (n // 2, n)
    launch = Launch(_sums_kernel, programs, scalars, meta, _SPILL, blocks, parts)
    return launch, ring, (parts - 1) * tiles * n * n
