"""dQ and the gradient of a full bias that several (batch, head) share, float32 on Hopper (Gluon) to head_dim 32.

    dS = P (dO V^T - delta);  P = exp(S + bias - lse);  dbias = sum dS;  dQ = scale dS K

As hopper_shared_bias.py, with operands in two float16 parts (hopper_float_ends.py): a program owns a tile of 128
queries and 128 keys, each of two consumer warpgroups half of its queries. The sum of dS stays in registers while a
producer warp brings q, k, dO and v of one sharer after the other. Where tiles are too few for the GPU, several programs
share that sum, and their parts are added afterwards.

The tiles of the same queries are a chain of programs, which run at once. Of each sharer the first one writes its piece
of dQ, each of the others adds its own to what the one before it left there, from L2, and hands it on: so dQ is its own
sum, which nobody clears, and all results repeat bit for bit. Programs are numbered as they begin, and wait for none but
the one before them, which has begun: whatever other kernels do, the first of those that have not ended does not wait.
"""

import torch
from triton.language.core import PropagateNan

from adatom.ops.attention.hopper_float_ends import DIM, HEIGHT, OF_DP, OF_DQ, OF_DS, OF_S
from adatom.ops.attention.hopper_float_tiles import load_numbers, load_parts, operands, parts_of, product, turned
from adatom.ops.attention.hopper_shared_ends import NUMBERS
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
    warpgroup_mma_wait,
)

STAGES = gl.constexpr(2)  # buffers of q, k, dO and v
RUN = gl.constexpr(128)  # sharers whose sum is kept in registers: longer float32 sums lose accuracy
KEEP_NAN = gl.constexpr(PropagateNan.ALL)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
DQ_STAGES = gl.constexpr(2)  # buffers of dQ
APART = gl.constexpr(8)  # words between the numbers of programs: 32 bytes
_SPILL = 192  # 52 under Triton 3.6


@gluon.jit
def _turns(me, counts):
    """How many runs of sharers a program adds, one tile after the other: as many as the others of its chain."""
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    tiles = (n_tiles - me + gl.num_programs(0) - 1) // gl.num_programs(0)
    return tiles * _runs(shared, parts)


@gluon.jit
def _runs(shared, parts):
    """Of a tile."""
    return ((shared + parts - 1) // parts + RUN - 1) // RUN


@gluon.jit
def _tile(turn, me, slices, counts):
    """(slice of the bias, part, first query, first key, run, first and end of its sharers) of a turn."""
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    runs = _runs(shared, parts)
    run = turn % runs
    t = me + turn // runs * gl.num_programs(0)
    piece, part, m0, n0 = tile_of_sum(t, slices, counts)
    share = (shared + parts - 1) // parts
    end = gl.minimum(part * share + share, shared)
    first = gl.minimum(part * share + run * RUN, end)
    return piece, part, m0, n0, run, first, gl.minimum(first + RUN, end)


@gluon.jit
def _producer(Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, me, slices, counts,
              SHARED_HEADS: gl.constexpr):
    """Keeps the rings full."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s = tiles
    full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    n = 0
    for turn in range(_turns(me, counts)):
        piece, _part, m0, n0, _run, first, end = _tile(turn, me, slices, counts)
        wait_empty(bias_empty, turn, 1)
        load_bias(Bias, several, piece, m0, n0, bias_full.index(0), bias_s, 0, counts)
        for r in range(first, end):
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            row = (b * heads + h) * padded + m0
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_parts(Q, b, h, m0, full.index(i), q_s, i)
            load_parts(K, b, h, n0, full.index(i), k_s, i)
            load_numbers(Rows, row, full.index(i), lse_s.index(i))
            load_parts(DOut, b, h, m0, full.index(i), do_s, i)
            load_parts(V, b, h, n0, full.index(i), v_s, i)
            load_numbers(Delta, row, full.index(i), delta_s.index(i))
            n += 1


@gluon.jit
def _fetcher(DQ, Done, dq_s, bars, me, slices, counts, SHARED_HEADS: gl.constexpr):
    """Brings what the programs before made of dQ. For a chain's first one, buffers may hold anything."""
    dq_full, _, dq_empty = bars
    before = Done + me * APART
    n = 0
    for turn in range(_turns(me, counts)):
        piece, _part, m0, n0, _run, first, end = _tile(turn, me, slices, counts)
        for r in range(first, end):
            i = slot(n, DQ_STAGES)
            wait_empty(dq_empty, n, DQ_STAGES)
            if n0 > 0:
                b, h = sharer(r, piece, counts, SHARED_HEADS)
                wait_turn(before, n + 1)
                load_tile(DQ, b, h, m0, 0, dq_full.index(i), dq_s.index(i))
            else:
                mbarrier.arrive(dq_full.index(i), count=1)
            n += 1


@gluon.jit
def _passer(DQ, Done, dq_s, bars, me, slices, counts, SHARED_HEADS: gl.constexpr):
    """Writes what the consumers made of it, and says so."""
    _, dq_done, dq_empty = bars
    mine = Done + (me + 1) * APART
    n = 0
    for turn in range(_turns(me, counts)):
        piece, _part, m0, _n0, _run, first, end = _tile(turn, me, slices, counts)
        for r in range(first, end):
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            wait_full(dq_done, n, DQ_STAGES)
            store_tile(DQ, b, h, m0, 0, dq_s.index(slot(n, DQ_STAGES)))
            tma.store_wait(0)
            release(dq_empty, n, DQ_STAGES)
            pass_turn(mine, n + 1)
            n += 1


@gluon.jit
def _product(left, right, i, H: gl.constexpr, C: gl.constexpr):
    """Begin to multiply the queries' tile of this consumer by half H of the keys', [HALF, HALF], of buffer i."""
    zeros = gl.zeros([HALF, HALF], gl.float32, SCORES)
    return product(parts_of(left, i, C * HALF, HALF), turned(parts_of(right, i, H * HALF, HALF)), zeros)


@gluon.jit
def _probabilities(s, bias, lse, unit, EVEN_N: gl.constexpr):
    """P times 2^HEIGHT from a product, a bias and Rows."""
    s = s * unit + (bias * LOG2E - lse[:, None])
    if not EVEN_N:  # keys beyond the last: as large as P may be, for they must not become infinite
        s = gl.minimum(s, 1.0 * HEIGHT, propagate_nan=KEEP_NAN)
    return gl.exp2(s)


@gluon.jit
def _add(X, x, run, mask):
    """Write x, or add it to what the runs before wrote."""
    if run > 0:
        x += gl.load(X, mask=mask, other=0.0)
    gl.store(X, x, mask=mask)


@gluon.jit
def _consumer(DBias, Factors, tiles, bars, dq_bars, me, slices, counts, n_heads, scale, C: gl.constexpr,
              SHARED_HEADS: gl.constexpr, EVEN_N: gl.constexpr):
    """Sums HALF rows of every tile. While one half of its columns is worked on, products of the other, of this sharer
    or the next, are made. Comments at waits name the products under way, the eldest first."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s = tiles
    full, empty, bias_full, bias_empty = bars
    dq_full, dq_done, _ = dq_bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    nothing = gl.zeros([HALF, DIM], gl.float32, GRAD)
    n = 0
    for turn in range(_turns(me, counts)):
        piece, part, m0, n0, run, first, end = _tile(turn, me, slices, counts)
        m0 += C * HALF
        tile = bias_s.index(C)
        wait_full(bias_full, turn, 1)
        low = gl.zeros([HALF, HALF], gl.float32, SCORES)
        high = gl.zeros([HALF, HALF], gl.float32, SCORES)
        if first < end:
            wait_full(full, n, STAGES)
        s = _product(q_s, k_s, slot(n, STAGES), 0, C)  # of nothing, if nobody is left
        s = warpgroup_mma_wait(0, deps=(s,))
        for r in range(first, end):
            i = slot(n, STAGES)
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            F = Factors + b * heads + h
            unit = gl.load(F + OF_S * n_heads) * (scale * LOG2E)
            of_dp = gl.load(F + OF_DP * n_heads)
            of_ds = gl.load(F + OF_DS * n_heads)
            of_dq = gl.load(F + OF_DQ * n_heads) * scale
            dp = _product(do_s, v_s, i, 0, C)
            lse = lse_s.index(i).slice(C * HALF, HALF).load(ROWS)
            delta = delta_s.index(i).slice(C * HALF, HALF).load(ROWS)
            p = _probabilities(s, tile.slice(0, HALF, dim=1).load(SCORES), lse, unit, EVEN_N)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = p * (dp * of_dp - delta[:, None])
            low += ds * of_ds
            dq = product(operands(ds, OPERAND), parts_of(k_s, i, 0, HALF), nothing)
            s_high = _product(q_s, k_s, i, 1, C)
            dp_high = _product(do_s, v_s, i, 1, C)
            s_high, dq = warpgroup_mma_wait(3, deps=(s_high, dq))  # dQ, S, dP
            p = _probabilities(s_high, tile.slice(HALF, HALF, dim=1).load(SCORES), lse, unit, EVEN_N)
            if r + 1 < end:
                wait_full(full, n + 1, STAGES)
            dp_high = warpgroup_mma_wait(0, deps=(dp_high,))
            s = _product(q_s, k_s, slot(n + 1, STAGES), 0, C)  # behind the last, of whatever lies there
            ds = p * (dp_high * of_dp - delta[:, None])
            high += ds * of_ds
            dq_high = product(operands(ds, OPERAND), parts_of(k_s, i, HALF, HALF), nothing)
            s, dq_high = warpgroup_mma_wait(0, deps=(s, dq_high))  # S, dQ
            release(empty, n, STAGES)
            handed = dq_s.index(slot(n, DQ_STAGES)).slice(C * HALF, HALF, dim=0)
            wait_full(dq_full, n, DQ_STAGES)
            before = handed.load(GRAD)
            handed.store(gl.where(n0 > 0, before, 0.0) + (dq + dq_high) * of_dq)
            fence_async_shared()
            release(dq_done, n, DQ_STAGES)
            n += 1
        release(bias_empty, turn, 1)
        X = DBias + (part * slices + piece).to(gl.int64) * len_q * len_k
        rows = m0 + gl.arange(0, HALF, ROWS)[:, None]
        columns = n0 + gl.arange(0, HALF, gl.SliceLayout(0, SCORES))[None, :]
        X += rows.to(gl.int64) * len_k + columns
        _add(X, low, run, (rows < len_q) & (columns < len_k))
        _add(X + HALF, high, run, (rows < len_q) & (columns + HALF < len_k))


_COUNTS = ["n_heads", "slices", "heads", "repeats", "bias_heads", "shared", "parts", "padded", "len_q", "len_k"]


@gluon.jit(do_not_specialize=[*_COUNTS, "n_tiles"])
def _sums_kernel(Q, K, V, DOut, Rows, Delta, Factors, Bias, DQ, Done, DBias, bias_b, bias_h, n_heads, slices, heads,
                 repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles, scale, SHARED_HEADS: gl.constexpr,
                 EVEN_N: gl.constexpr, EARLY: gl.constexpr):
    """Tiles of dbias (parts, slices of the bias, len_q, len_k), and dQ. Programs: a multiple of the blocks of keys.

    q, k, v and dO in parts; Rows, Delta, `padded` for each (batch, head), and Factors, (6, n_heads), of `ahead`. Each
    slice of the bias serves `shared` (batch, head), of `repeats` consecutive batch elements; its number is multiplied
    by bias_b, that of its head by bias_h: 0 along expanded dimensions. Done: int32, 0; number 0 becomes how many
    programs have begun, those from APART times (1 + program) on how many pieces of dQ each has handed on.
    """
    q_s = make_tiles(Q, STAGES * 2)
    k_s = make_tiles(K, STAGES * 2)
    do_s = make_tiles(DOut, STAGES * 2)
    v_s = make_tiles(V, STAGES * 2)
    bias_s = make_tiles(Bias, 2)
    dq_s = make_tiles(DQ, DQ_STAGES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Rows.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Delta.layout)
    full = make_barriers(STAGES, 10)
    empty = make_barriers(STAGES, 2)
    bias_full = make_barriers(1, 2)
    bias_empty = make_barriers(1, 2)
    dq_full = make_barriers(DQ_STAGES, 1)
    dq_done = make_barriers(DQ_STAGES, 2)
    dq_empty = make_barriers(DQ_STAGES, 1)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    me = gl.atomic_add(Done, 1, sem="relaxed")
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s)
    bars = (full, empty, bias_full, bias_empty)
    dq_bars = (dq_full, dq_done, dq_empty)
    counts = (heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (DBias, Factors, tiles, bars, dq_bars, me, slices, counts, n_heads, scale, 0, SHARED_HEADS,
                     EVEN_N)),
        (_consumer, (DBias, Factors, tiles, bars, dq_bars, me, slices, counts, n_heads, scale, 1, SHARED_HEADS,
                     EVEN_N)),
        (_producer, (Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, me, slices, counts, SHARED_HEADS)),
        (_fetcher, (DQ, Done, dq_s, dq_bars, me, slices, counts, SHARED_HEADS)),
        (_passer, (DQ, Done, dq_s, dq_bars, me, slices, counts, SHARED_HEADS)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


def sums_launch(call: Call, bias: torch.Tensor, padded: int) -> Launch:
    """The launch for q, k, v and dout in parts, rows, delta, factors, bias, dq, the numbers of programs, and dbias."""
    n, dim = BLOCK.value, DIM.value
    chain = -(-call.len_k // n)
    programs = call.device.sms // chain * chain
    assert 0 < (programs + 1) * APART.value <= NUMBERS.value
    slices, shared = sharing(call, bias)
    tiles, parts = shares_of_sum(call, bias, programs)
    scalars = (
        *several_of(call), call.batch * call.heads, slices, call.heads, call.repeats, bias.shape[1], shared, parts,
        padded, call.len_q, call.len_k, tiles * parts, call.scale,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": bias.shape[1] < call.heads, "EVEN_N": call.even(call.len_k, n), "EARLY": True, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    blocks = {
        "Q": (n, dim), "K": (n, dim), "V": (n, dim), "DOut": (n, dim), "Rows": (n,), "Delta": (n,), "Bias": (n // 2, n),
        "DQ": (n, dim),
    }  # fmt: skip
    return Launch(_sums_kernel, min(tiles * parts, programs), scalars, meta, _SPILL, blocks, parts)
