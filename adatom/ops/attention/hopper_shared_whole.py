"""dQ and the gradient of a full bias that many (batch, head) share, on Hopper (Gluon) to head_dim 32, of 256 keys.

As hopper_shared_bias.py, but a tile of 128 queries has all keys, 64 at a time. So dQ of a sharer is complete in
registers: nothing is cleared ahead, added in memory or converted behind, and results repeat bit for bit. The sum of dS
takes 128 of a consumer's 240 registers; none are left to make products of the next keys ahead.
"""

import torch

from adatom.ops.attention.hopper_shared_bias import BLOCK, DIM, HALF, SCORES, sharer, widened
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
    release,
    slot,
    store_tile,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(256)  # of a head: four parts
GRAD = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
STAGES = gl.constexpr(3)  # buffers of q, k, dO and v
_SPILL = 384  # Triton 3.6: 128; 3.9: 348


@gluon.jit
def _tile(t, slices, counts):
    """(slice of the bias, range of sharers, first query, first and end of the sharers) of tile t."""
    heads, repeats, bias_heads, shared, ranges, padded, len_q, _, n_tiles = counts
    n_m = padded // BLOCK
    piece = t // n_m
    place = piece // slices
    share = (shared + ranges - 1) // ranges
    first = place * share
    return piece - place * slices, place, t % n_m * BLOCK, first, gl.minimum(first + share, shared)


@gluon.jit
def _producer(Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, slices, counts, SHARED_HEADS: gl.constexpr):
    """Keeps the rings full."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, _ = tiles
    full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, ranges, padded, len_q, _, n_tiles = counts
    bias_b, bias_h = several
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, _place, m0, first, end = _tile(t, slices, counts)
        wait_empty(bias_empty, turn, 1)
        for c in gl.static_range(8):
            load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, m0 + c // 4 * HALF, c % 4 * HALF,
                      bias_full.index(0), bias_s.index(c))
        for r in range(first, end):
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            row = (b * heads + h) * padded + m0
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_tile_and_numbers(Q, b, h, m0, Lse, row, full.index(i), q_s.index(i), lse_s.index(i))
            load_tile_and_numbers(DOut, b, h, m0, Delta, row, full.index(i), do_s.index(i), delta_s.index(i))
            for j in gl.static_range(4):
                load_tile(K, b, h, j * HALF, 0, full.index(i), k_s.index(i * 4 + j))
                load_tile(V, b, h, j * HALF, 0, full.index(i), v_s.index(i * 4 + j))
            n += 1
        turn += 1


@gluon.jit
def _product(left, right, C: gl.constexpr):
    """Begin to multiply the queries' tile of this consumer by one of keys, [HALF, HALF]."""
    zeros = gl.zeros([HALF, HALF], gl.float32, SCORES)
    return warpgroup_mma(left.slice(C * HALF, HALF), right.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _part(total, dq, lse, delta, i, tiles, scale, C: gl.constexpr, J: gl.constexpr):
    """The sum of dS with that of part J of the keys in buffer i, and dQ with what follows from it, under way."""
    q_s, k_s, do_s, v_s, _, _, bias_s, _ = tiles
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    k = k_s.index(i * 4 + J)
    s = _product(q_s.index(i), k, C)
    dp = _product(do_s.index(i), v_s.index(i * 4 + J), C)
    if J > 0:  # dQ, S, dP
        s, dq = warpgroup_mma_wait(1, deps=(s, dq))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * (scale * LOG2E) + (widened(bias_s.index(C * 4 + J).load(SCORES)) * LOG2E - lse[:, None]))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = p * (dp - delta[:, None])
    ds16 = gl.convert_layout(ds.to(k.dtype), OPERAND, assert_trivial=True)
    return total + ds, warpgroup_mma(ds16, k, dq, use_acc=J > 0, is_async=True)


@gluon.jit
def _put(X, total, m0, len_q, J: gl.constexpr):
    """Write part J of HALF rows of dbias."""
    rows = m0 + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))[:, None]
    columns = J * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SCORES))[None, :]
    gl.store(X + (rows.to(gl.int64) * KEYS + columns), total.to(X.dtype.element_ty), mask=rows < len_q)


@gluon.jit
def _consumer(DBias, DQ, tiles, bars, slices, counts, scale, C: gl.constexpr, SHARED_HEADS: gl.constexpr):
    """Sums HALF rows of every tile."""
    _, _, _, _, lse_s, delta_s, _, dq_s = tiles
    full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, ranges, padded, len_q, _, n_tiles = counts
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([HALF, DIM], gl.float32, GRAD)
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, place, m0, first, end = _tile(t, slices, counts)
        m0 += C * HALF
        wait_full(bias_full, turn, 1)
        total_0 = gl.zeros([HALF, HALF], gl.float32, SCORES)
        total_1 = total_0
        total_2 = total_0
        total_3 = total_0
        for r in range(first, end):
            i = slot(n, STAGES)
            wait_full(full, n, STAGES)
            lse = lse_s.index(i).slice(C * HALF, HALF).load(ROWS)
            delta = delta_s.index(i).slice(C * HALF, HALF).load(ROWS)
            total_0, dq = _part(total_0, zeros, lse, delta, i, tiles, scale, C, 0)
            total_1, dq = _part(total_1, dq, lse, delta, i, tiles, scale, C, 1)
            total_2, dq = _part(total_2, dq, lse, delta, i, tiles, scale, C, 2)
            total_3, dq = _part(total_3, dq, lse, delta, i, tiles, scale, C, 3)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            release(empty, n, STAGES)
            b, h = sharer(r, piece, counts, SHARED_HEADS)
            tma.store_wait(0)  # what was there last has left shared memory
            dq_s.index(C).store((dq * scale).to(dq_s.dtype))
            fence_async_shared()
            store_tile(DQ, b, h, m0, 0, dq_s.index(C))
            n += 1
        X = DBias + (place * slices + piece).to(gl.int64) * len_q * KEYS
        _put(X, total_0, m0, len_q, 0)
        _put(X, total_1, m0, len_q, 1)
        _put(X, total_2, m0, len_q, 2)
        _put(X, total_3, m0, len_q, 3)
        release(bias_empty, turn, 1)
        turn += 1
    tma.store_wait(0)


_COUNTS = ["slices", "heads", "repeats", "bias_heads", "shared", "ranges", "padded", "len_q", "n_tiles"]


@gluon.jit(do_not_specialize=_COUNTS)
def _whole_kernel(Q, K, V, Bias, DOut, Lse, Delta, DQ, DBias, bias_b, bias_h, slices, heads, repeats, bias_heads,
                  shared, ranges, padded, len_q, n_tiles, scale, SHARED_HEADS: gl.constexpr, EARLY: gl.constexpr):
    """dQ, and tiles of dbias (ranges of sharers, slices of the bias, len_q, KEYS).

    Lse (in log2 units), Delta: float32, `padded` numbers for each (batch, head). Each slice of the bias serves `shared`
    (batch, head), of `repeats` consecutive batch elements; its number is multiplied by bias_b, that of its head by
    bias_h: 0 along expanded dimensions.
    """
    q_s = make_tiles(Q, STAGES)
    k_s = make_tiles(K, STAGES * 4)
    do_s = make_tiles(DOut, STAGES)
    v_s = make_tiles(V, STAGES * 4)
    bias_s = make_tiles(Bias, 8)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Delta.layout)
    dq_s = make_tiles(DQ, 2)
    full = make_barriers(STAGES, 10)
    empty = make_barriers(STAGES, 2)
    bias_full = make_barriers(1, 8)
    bias_empty = make_barriers(1, 2)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dq_s)
    bars = (full, empty, bias_full, bias_empty)
    counts = (heads, repeats, bias_heads, shared, ranges, padded, len_q, KEYS, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (DBias, DQ, tiles, bars, slices, counts, scale, 0, SHARED_HEADS)),
        (_consumer, (DBias, DQ, tiles, bars, slices, counts, scale, 1, SHARED_HEADS)),
        (_producer, (Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, slices, counts, SHARED_HEADS)),
    ], [4, 1], [240, 24])  # fmt: skip


def whole_launch(call: Call, bias: torch.Tensor, padded: int) -> Launch:
    """The launch for q, k, v, bias, dout, lse, delta, dQ, and dbias."""
    m, half, dim = BLOCK.value, HALF.value, DIM.value
    slices = bias.shape[0] * bias.shape[1]
    shared = call.batch * call.heads // slices
    tiles = padded // m * slices
    ranges = max(1, min(shared // 4, call.device.sms // tiles))
    ranges = -(-shared // -(-shared // ranges))  # each has something to add
    scalars = (
        *(int(stride > 0) for stride in call.bias_strides[:2]), slices, call.heads, call.repeats, bias.shape[1], shared,
        ranges, padded, call.len_q, tiles * ranges, call.scale,
    )  # fmt: skip
    meta = {"SHARED_HEADS": bias.shape[1] < call.heads, "EARLY": True, "num_warps": 4, "launch_pdl": True}
    blocks = {
        "Q": (m, dim), "K": (half, dim), "V": (half, dim), "DOut": (m, dim), "Lse": (m,), "Delta": (m,),
        "Bias": (half, half), "DQ": (half, dim),
    }  # fmt: skip
    return Launch(_whole_kernel, min(tiles * ranges, call.device.sms), scalars, meta, _SPILL, blocks, ranges)
