"""dQ and the gradient of a full bias that many (batch, head) share, on Hopper (Gluon) to head_dim 32, for
256 to 384 keys.

    dS = P (dO V^T - delta);  P = exp(S + bias - lse);  dbias = sum dS;  dQ = scale dS K

A program owns 64 queries and all keys, each of two consumer warpgroups half of the keys. The sum of dS stays in
registers while a producer warp brings what belongs to one sharer after the other. A query comes once, so that delta is
summed here, and what the kernel of dK and dV wants of lse and delta is written here, and dQ is complete: one consumer
gives the other what it has of it, which adds that when it has begun with the next sharer. Where tiles are too few for
the GPU, several programs share the sum of dbias, each of them with one tile, and the kernel of dK and dV adds their
parts, which lie in memory as threads hold them: 98 KB for a program at the most. All results repeat bit for bit.
"""

import torch

from adatom.ops.attention.hopper_shared_bias import DIM, KEEP_NAN, SCORES, in_lines, in_rows, store_sum, widened
from adatom.ops.attention.hopper_shared_ends import FAR, LARGEST, divisor
from adatom.ops.attention.hopper_shared_lent import STRETCHES, Units
from adatom.ops.attention.hopper_sharers import BLOCK, HALF, place_of, several_of, sharer, sharing
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

# words of lines of E, four threads for one, which are those that have its row of scores
WORDS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
_SPILL = 20  # Triton 3.6: 0 to 16, none of it in the loop; 3.9: to 80


@gluon.jit
def _tile(t, slices, counts):
    """(slice of the bias, part, first query) of tile t."""
    n_m = counts[5] // HALF
    piece = t // n_m
    part = piece // slices
    return piece - part * slices, part, t % n_m * HALF


@gluon.jit
def _sharer(r, batch, head, counts, SHARED_HEADS: gl.constexpr):
    """`sharer`, of the slice of a batch element and head of the bias: no division where heads do not share it."""
    heads, repeats = counts[0], counts[1]
    if SHARED_HEADS:
        return batch * repeats + r // heads, r % heads
    else:
        return batch * repeats + r, head


@gluon.jit
def _load_bias(Bias, several, piece, m0, bias_full, bias_s, counts, PIECES: gl.constexpr):
    """Begin to copy the bias of a tile."""
    bias_heads = counts[2]
    bias_b, bias_h = several
    for c in gl.static_range(PIECES):
        load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, m0, c * BLOCK, bias_full.index(0),
                  bias_s.index(c))


@gluon.jit
def _load_sharer(Q, K, V, Out, DOut, Lse, i, r, piece, m0, full, tiles, counts, SHARED_HEADS: gl.constexpr,
                 PIECES: gl.constexpr):
    """Begin to copy what belongs to a sharer."""
    q_s, k_s, v_s, o_s, do_s, lse_s, _, _, _ = tiles
    b, h = sharer(r, piece, counts, SHARED_HEADS)
    heads, len_q = counts[0], counts[6]
    load_tile(Q, b, h, m0, 0, full.index(i), q_s.index(i))
    for c in gl.static_range(PIECES):
        load_tile(K, b, h, c * BLOCK, 0, full.index(i), k_s.index(i * PIECES + c))
    load_tile_and_numbers(DOut, b, h, m0, Lse, (b * heads + h) * len_q + m0, full.index(i), do_s.index(i),
                          lse_s.index(i))
    load_tile(Out, b, h, m0, 0, full.index(i), o_s.index(i))
    for c in gl.static_range(PIECES):
        load_tile(V, b, h, c * BLOCK, 0, full.index(i), v_s.index(i * PIECES + c))


@gluon.jit
def _producer(Q, K, V, Out, DOut, Lse, Bias, Taken, several, tiles, bars, slices, counts, SHARED_HEADS: gl.constexpr,
              EARLY: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr):
    """Keeps the rings full, from their second places on. That of program 0 clears Taken, and then only may the next
    kernel begin, which takes a tile before it waits for this one."""
    q_s, k_s, v_s, o_s, do_s, lse_s, bias_s, _, _ = tiles
    full, empty, bias_full, bias_empty, _, _ = bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, part, m0 = _tile(t, slices, counts)
        if turn > 0:
            wait_empty(bias_empty, turn, 1)
            _load_bias(Bias, several, piece, m0, bias_full, bias_s, counts, PIECES)
        for r in range(part, shared, parts):
            if n > 0:
                wait_empty(empty, n, STAGES)
                _load_sharer(Q, K, V, Out, DOut, Lse, slot(n, STAGES), r, piece, m0, full, tiles, counts, SHARED_HEADS,
                             PIECES)
            n += 1
        turn += 1
    if gl.program_id(0) == 0:
        i = gl.arange(0, 256, gl.BlockedLayout([1], [32], [1], [0]))
        gl.store(Taken + i, 0, mask=i < COUNTERS)
        gl.barrier()
        gl.atomic_add(Taken + (COUNTERS - STRETCHES - 1), 0, sem="release")  # they are 0 for all from here on
        let_next(EARLY)


@gluon.jit
def _piece_of(tiles, first, J: gl.constexpr):
    """Number J of 64 keys, of tiles of 128 from number `first` on."""
    return tiles.index(first + J // 2).slice(J % 2 * HALF, HALF, dim=0)


@gluon.jit
def _bias_of(tiles, J: gl.constexpr):
    """The bias of 64 keys, number J: a tile of 128 columns is two of 64, one after the other. No slice: what is stored
    as a box (`as_box`) must not be one under Triton 3.8."""
    return tiles.reinterpret(tiles.dtype, [2 * tiles.shape[0], HALF, HALF], tiles.layout).index(J)


@gluon.jit
def _product(x, y):
    """Begin to multiply, [HALF, HALF]."""
    zeros = gl.zeros([HALF, HALF], gl.float32, SCORES)
    return warpgroup_mma(x, y.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _write_dq(DQ, dq, b, h, m0, n, scale, tiles, bars):
    """Begin to write dQ of use n, the sum of what both consumers have of it."""
    _, _, _, _, _, _, _, dq_s, sum_s = tiles
    _, _, _, _, dq_full, dq_empty = bars
    wait_full(dq_full, n, 1)
    dq += in_lines(sum_s.load(in_rows(dq).type.layout))
    tma.store_wait(0)  # what was there last has left shared memory
    gl.barrier()
    release(dq_empty, n, 1)
    dq_s.store((dq * scale).to(dq_s.dtype))
    fence_async_shared()
    store_tile(DQ, b, h, m0, 0, dq_s)


@gluon.jit
def _cut(x):
    """x to 8 bits, those of a bfloat16 in the upper half of a word; what is left."""
    bits = x.to(gl.int32, bitcast=True) & -65536
    return bits, x - bits.to(gl.float32, bitcast=True)


@gluon.jit
def _lower(bits):
    return (bits >> 16) & 65535


@gluon.jit
def _in_row(x):
    """Numbers of rows, as threads hold them beside scores, to be spread over words."""
    return gl.convert_layout(x, gl.SliceLayout(1, WORDS), assert_trivial=True)[:, None]


@gluon.jit
def _place_of_lines(E, Rest, r, batch, head, in_lent, counts, SHARERS: gl.constexpr):
    """Where lines of E (as int32) of sharer r of a slice lie: in the order of units (hopper_shared_lent.py)."""
    bias_heads, shared, padded = counts[2], counts[3], counts[5]
    first = r // SHARERS * SHARERS
    at = (batch * shared + first) * bias_heads + head * gl.minimum(shared - first, SHARERS) + r - first
    return place_of(at, E, Rest, in_lent, padded * 4)


@gluon.jit
def _write_lines(E, m0, lse, delta, inverse):
    """HALF lines of E: three parts of lse in units of a product, three of delta. Four threads have a row, and each of
    them writes a word of it."""
    x = gl.maximum(gl.minimum(lse * inverse, LARGEST, propagate_nan=KEEP_NAN), -LARGEST, propagate_nan=KEEP_NAN)
    x0, x = _cut(x)
    x1, x = _cut(x)
    x2, x = _cut(x)
    y0, y = _cut(delta)
    y1, y = _cut(y)
    y2, y = _cut(y)
    word = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    lines = gl.where(word == 0, _in_row(_lower(x0) | x1), gl.where(word == 1, _in_row(_lower(x2) | y0), gl.where(
        word == 2, _in_row(_lower(y1) | y2), 0)))
    rows = m0 + gl.arange(0, HALF, gl.SliceLayout(1, WORDS))[:, None]
    gl.store(E + rows * 4 + word, lines)


@gluon.jit
def _store_staged(D, b, h, m0, n0, x, tile):
    """Begin to write 16-bit numbers [HALF, HALF] from shared memory, where nothing is read any more."""
    tile.store(x)
    fence_async_shared()
    store_tile(D, b, h, m0, n0, tile)


@gluon.jit
def _store_part(Parts, number, x):
    """Write 64 x 64 numbers of a part as threads hold them."""
    x = in_rows(x)
    LAYOUT: gl.constexpr = x.type.layout
    row = gl.arange(0, HALF // 2, gl.SliceLayout(1, LAYOUT))[:, None]
    gl.store(Parts + number * (HALF * HALF) + row * 128 + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :], x)


@gluon.jit
def _consumer(DLse, E, Rest, DBias, Parts, DQ, tiles, bars, slices, in_lent, counts, scale, inverse, C: gl.constexpr,
              SHARED_HEADS: gl.constexpr, SHARERS: gl.constexpr, EVEN_N: gl.constexpr, PARTS: gl.constexpr,
              STAGED: gl.constexpr, PAIRS: gl.constexpr, DLSE: gl.constexpr, PIECES: gl.constexpr,
              STAGES: gl.constexpr):
    """Sums half of the columns of every tile. Comments at waits name the products under way, the eldest first."""
    q_s, k_s, v_s, o_s, do_s, lse_s, bias_s, dq_s, sum_s = tiles
    full, empty, bias_full, bias_empty, dq_full, dq_empty = bars
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles = counts
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    HELD: gl.constexpr = PIECES == 2
    FIRST: gl.constexpr = C * PIECES  # of the keys' pieces, this consumer's first
    zeros = gl.zeros([HALF, DIM], gl.float32, GRAD)
    unit = scale * LOG2E
    dq = zeros
    n = 0
    turn = 0
    b = turn
    h = turn
    written = turn
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, part, m0 = _tile(t, slices, counts)
        slice_batch = piece // bias_heads
        slice_head = piece - slice_batch * bias_heads
        wait_full(bias_full, turn, 1)
        if HELD:
            bias_low = _bias_of(bias_s, FIRST).load(SCORES)
            bias_high = _bias_of(bias_s, FIRST + 1).load(SCORES)
        low = gl.zeros([HALF, HALF], gl.float32, SCORES)
        high = gl.zeros([HALF, HALF], gl.float32, SCORES)
        top = gl.zeros([HALF, HALF], gl.float32, SCORES)
        for r in range(part, shared, parts):
            i = slot(n, STAGES)
            first = i * PIECES
            wait_full(full, n, STAGES)
            q = q_s.index(i)
            do = do_s.index(i)
            lse = lse_s.index(i).load(ROWS)  # ahead of the products: reads of shared memory queue behind them
            o16 = o_s.index(i).load(GRAD)
            do16 = do.load(GRAD)
            s = _product(q, _piece_of(k_s, first, FIRST))
            dp = _product(do, _piece_of(v_s, first, FIRST))
            if C == 0:
                if n > 0:  # dQ of the sharer before: the other consumer need not be waited for any more
                    _write_dq(DQ, dq, b, h, written, n - 1, scale, tiles, bars)
            written = m0
            b, h = _sharer(r, slice_batch, slice_head, counts, SHARED_HEADS)
            head = b * heads + h
            rows = m0 + gl.arange(0, HALF, ROWS)
            lse = gl.where((rows >= len_q) | (gl.maximum(lse, -lse) > FAR), float("inf"), lse * LOG2E)
            delta = gl.sum(widened(o16, False) * widened(do16, False), 1)
            delta = gl.convert_layout(delta, ROWS)
            if DLSE:
                delta -= gl.load(DLse + head.to(gl.int64) * len_q + rows, mask=rows < len_q, other=0.0)
            if C == 1:
                X = _place_of_lines(E, Rest, r, slice_batch, slice_head, in_lent, counts, SHARERS)
                _write_lines(X, m0, lse, delta, inverse)
            for j in gl.static_range(PIECES):
                if j == 0:  # S, dP
                    s = warpgroup_mma_wait(1, deps=(s,))
                else:  # S, dP, dQ
                    s = warpgroup_mma_wait(2, deps=(s,))
                if HELD:
                    if j == 0:
                        bias = bias_low
                    else:
                        bias = bias_high
                else:
                    bias = _bias_of(bias_s, FIRST + j).load(SCORES)
                s = s * unit + (widened(bias, False) * LOG2E - lse[:, None])
                if not EVEN_N:  # keys beyond the last: 0, whose P must not become infinite
                    s = gl.minimum(s, 0.0, propagate_nan=KEEP_NAN)
                p = gl.exp2(s)
                if j == 0:
                    dp = warpgroup_mma_wait(0, deps=(dp,))
                else:
                    dp, dq = warpgroup_mma_wait(0, deps=(dp, dq))
                ds = p * (dp - delta[:, None])
                if j == 0:
                    low += ds
                elif j == 1:
                    high += ds
                else:
                    top += ds
                ds16 = gl.convert_layout(ds.to(q.dtype), OPERAND, assert_trivial=True)
                if j + 1 < PIECES:  # ahead of dQ: the assembler begins both while dS is not yet complete
                    s = _product(q, _piece_of(k_s, first, FIRST + j + 1))
                    dp = _product(do, _piece_of(v_s, first, FIRST + j + 1))
                dq = warpgroup_mma(ds16, _piece_of(k_s, first, FIRST + j), dq, use_acc=j > 0, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            release(empty, n, STAGES)
            if C == 1:
                wait_empty(dq_empty, n, 1)
                sum_s.store(in_rows(dq))
                gl.barrier()
                release(dq_full, n, 1)
            n += 1
        sums = (low, high, top)
        for j in gl.static_range(PIECES):
            n0 = (FIRST + j) * HALF
            if PARTS:
                _store_part(Parts, t * (2 * PIECES) + FIRST + j, sums[j])
            elif STAGED:
                tile = _bias_of(bias_s, FIRST + j)
                _store_staged(DBias, slice_batch, slice_head, m0, n0, sums[j].to(tile.dtype), tile)
            else:
                store_sum(DBias, piece, m0, n0, sums[j], len_q, len_k, PAIRS)
        if STAGED:
            tma.store_wait(0)
            gl.barrier()
        release(bias_empty, turn, 1)
        turn += 1
    if C == 0:
        if n > 0:
            _write_dq(DQ, dq, b, h, written, n - 1, scale, tiles, bars)
    tma.store_wait(0)


COUNTERS = gl.constexpr(4 + STRETCHES.value)
_COUNTS = [
    "slices", "in_lent", "heads", "repeats", "bias_heads", "shared", "parts", "padded", "len_q", "len_k", "n_tiles",
]  # fmt: skip


@gluon.jit(do_not_specialize=_COUNTS)
def _rows_kernel(Q, K, V, Bias, Out, DOut, Lse, DLse, E, Rest, Taken, DQ, DBias, Parts, bias_b, bias_h, slices, in_lent,
                 heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles, scale, inverse,
                 SHARED_HEADS: gl.constexpr, SHARERS: gl.constexpr, EVEN_N: gl.constexpr, PARTS: gl.constexpr,
                 STAGED: gl.constexpr, PAIRS: gl.constexpr, DLSE: gl.constexpr, EARLY: gl.constexpr,
                 PIECES: gl.constexpr, STAGES: gl.constexpr):
    """Tiles of dbias (slices of the bias, len_q, len_k), dQ, and E and Rest (hopper_shared_bwd.py) as int32.

    PARTS: there are several `parts` of dbias, in Parts: 64 x 64 numbers, `in_rows`, for each 64 keys of a program's.
    Taken: COUNTERS of them become 0. Lse: (batch, heads, len_q). Each slice of the bias serves `shared` (batch, head),
    of `repeats` consecutive batch elements; its number is multiplied by bias_b, that of its head by bias_h: 0 along
    expanded dimensions.
    """
    q_s = make_tiles(Q, STAGES)
    k_s = make_tiles(K, STAGES * PIECES)
    v_s = make_tiles(V, STAGES * PIECES)
    o_s = make_tiles(Out, STAGES)
    do_s = make_tiles(DOut, STAGES)
    bias_s = make_tiles(Bias, PIECES)
    dq_s = make_tiles(DQ, 1)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, HALF], Lse.layout)
    sum_s = gl.allocate_shared_memory(gl.float32, [DIM // 2, 2 * HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = make_barriers(STAGES, 3 + 2 * PIECES)
    empty = make_barriers(STAGES, 2)
    bias_full = make_barriers(1, PIECES)
    bias_empty = make_barriers(1, 2)
    dq_full = make_barriers(1, 1)
    dq_empty = make_barriers(1, 1)
    fence_async_shared()
    wait_for_previous(EARLY)
    if gl.program_id(0) > 0:
        let_next(EARLY)  # which begins to read what was there before this kernel
    tiles = (q_s, k_s, v_s, o_s, do_s, lse_s, bias_s, dq_s.index(0), sum_s)
    bars = (full, empty, bias_full, bias_empty, dq_full, dq_empty)
    counts = (heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    piece, part, m0 = _tile(gl.program_id(0), slices, counts)  # first, ahead of the producer, whose code is to come yet
    _load_bias(Bias, several, piece, m0, bias_full, bias_s, counts, PIECES)
    _load_sharer(Q, K, V, Out, DOut, Lse, 0, part, piece, m0, full, tiles, counts, SHARED_HEADS, PIECES)
    gl.warp_specialize([
        (_consumer, (DLse, E, Rest, DBias, Parts, DQ, tiles, bars, slices, in_lent, counts, scale, inverse, 0,
                     SHARED_HEADS, SHARERS, EVEN_N, PARTS, STAGED, PAIRS, DLSE, PIECES, STAGES)),
        (_consumer, (DLse, E, Rest, DBias, Parts, DQ, tiles, bars, slices, in_lent, counts, scale, inverse, 1,
                     SHARED_HEADS, SHARERS, EVEN_N, PARTS, STAGED, PAIRS, DLSE, PIECES, STAGES)),
        (_producer, (Q, K, V, Out, DOut, Lse, Bias, Taken, several, tiles, bars, slices, counts, SHARED_HEADS, EARLY,
                     PIECES, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


def rows_launch(
    call: Call, bias: torch.Tensor, units: Units, in_lent: int, padded: int, dlse: bool
) -> tuple[Launch, int]:  # fmt: skip
    """The launch for q, k, v, bias, out, dout, lse, dlse, E in two places, counters, dQ, dbias and its parts, and how
    many columns their tiles have, of which each program writes one: 0 where there is but one part."""
    n, dim, scale = HALF.value, DIM.value, divisor(call)
    slices, shared = sharing(call, bias)
    pieces = -(-call.len_k // (2 * n))
    tiles = padded // n * slices
    parts = max(1, min(shared // 4, call.device.sms // tiles))
    parts = -(-shared // -(-shared // parts))  # each has something to add
    staged = parts == 1 and call.len_k * bias.element_size() % 16 == 0  # TMA
    scalars = (
        *several_of(call), slices, in_lent, call.heads, call.repeats, bias.shape[1], shared, parts, padded,
        call.len_q, call.len_k, tiles * parts, scale, 1 / (scale * LOG2E.value),
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": bias.shape[1] < call.heads, "SHARERS": units.sharers, "EVEN_N": call.even(call.len_k, 2 * n),
        "PARTS": parts > 1, "STAGED": staged, "PAIRS": call.len_k % 2 == 0, "DLSE": dlse,
        "EARLY": True, "PIECES": pieces, "STAGES": 4 if pieces == 2 else 2, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    tile = (n, dim)
    blocks = {name: tile for name in ("Q", "Out", "DOut", "DQ")} | {"Lse": (n,), "Bias": (n, BLOCK.value)}
    blocks |= {"K": (BLOCK.value, dim), "V": (BLOCK.value, dim)}
    if staged:
        blocks["DBias"] = (n, n)
    launch = Launch(_rows_kernel, min(tiles * parts, call.device.sms), scalars, meta, _SPILL, blocks, parts)
    return launch, 2 * n * pieces if parts > 1 else 0
