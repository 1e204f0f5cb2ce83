"""Attention backward on Hopper (Gluon) to head_dim 32, where many (batch, head) share a full bias whose gradient is
wanted, as in triangle attention.

    P = exp(S + bias - lse);  dS = P (dO V^T - delta);  dK = scale dS^T Q;  dV = P^T dO

This kernel gives dK and dV; another dQ and the gradient of the bias. Each of three consumer warpgroups (two, where that
leaves fewer places empty) owns 64 keys of a sharer of its own, and all of them walk over the same tiles of the bias, so
that a tile is read once for all. S^T and dP^T are formed transposed: P^T and dS^T stay in registers, and consumers
never meet. With three warps for a scheduler, one exponentiates while others wait for their products.

lse and delta are subtracted by products, too: of a matrix of -1 with E, which has three parts in bfloat16 of each, so
that no warp reads what lies along its columns. To 384 keys (of queries that are a multiple of 4 in number) dQ and the
gradient of the bias come first, from hopper_shared_rows.py, which writes E, too; consumers add its parts of that
gradient while their first tiles come. Elsewhere dQ comes first, too, but this kernel does not wait for it: it begins on
each multiprocessor that a program of that has left.

Most of E lies at the ends of dK and dV (hopper_shared_lent.py), and beyond 384 keys what the kernels ahead work with,
too. A tile is stored when the producer has announced the next, and that waits until what the kernels ahead worked with
there is used up; and when the lines of E that lie there have been read. Tiles are taken in order by programs that have
begun, and wait for earlier ones only.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_bwd_feed import number_of
from adatom.ops.attention.hopper_shared_bias import DIM, in_lines, store_sum, sums_launch, widened
from adatom.ops.attention.hopper_shared_ends import NUMBERS, ahead, divisor
from adatom.ops.attention.hopper_shared_lent import STRETCHES, Lent, Lines, units_of
from adatom.ops.attention.hopper_shared_rows import COUNTERS, rows_launch
from adatom.ops.attention.hopper_sharers import HALF, several_of, sharing
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like, suits_tma
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles import launch
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

BLOCK_M = gl.constexpr(128)  # queries of a block of E
PART = gl.constexpr(64)  # those worked on at a time
LINE = gl.constexpr(16)  # columns of E, the least of a product
KEYS = gl.constexpr(64)  # of a consumer
KV_STAGES = gl.constexpr(2)
NOWHERE = gl.constexpr(2**30)  # a coordinate of no element; TMA takes none below 0
# numbers that the producer tells: a tile, its first key, (batch, head) of each sharer, at most three; then
TOLD_STRETCH = gl.constexpr(8)  # the tile's stretch
TOLD_WAITS = gl.constexpr(9)  # how many stretches the tile before has to wait for
TOLD = gl.constexpr(16)  # all of them, a power of two
SHARES = (8, 16, 32)  # columns of 64 rows that a consumer adds at once
_SPILL = 16


@gluon.jit
def _tile(t, counts, SHARERS: gl.constexpr):
    """(batch and head of a slice of the bias, first key, first sharer, where its lines of E are among those of all) of
    tile t: the keys of a few sharers follow each other, then come those that share the other heads' slices."""
    heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles = counts
    n_n = (len_k + KEYS - 1) // KEYS
    unit = t // n_n
    block = unit // bias_heads
    batch = block // groups
    head = unit - block * bias_heads
    first = (block - batch * groups) * SHARERS
    at = (batch * shared + first) * bias_heads + head * gl.minimum(shared - first, SHARERS)
    return batch, head, (t - unit * n_n) * KEYS, first, at


@gluon.jit
def _sharer(r, batch, head, counts, SHARED_HEADS: gl.constexpr):
    """(batch, head) number r of those that share a slice of the bias; beyond the last none, of a far batch element."""
    heads, repeats, shared = counts[0], counts[1], counts[3]
    b = batch * repeats + (r // heads if SHARED_HEADS else r)
    h = r % heads if SHARED_HEADS else head
    return gl.where(r < shared, b, NOWHERE), h


@gluon.jit
def _tell(number_s, i, x):
    number_s.index(i).store(gl.full([1], x, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _read_counts(Taken, FRESH: gl.constexpr):
    """Where it is counted how many tiles of each stretch have been read."""
    if FRESH:
        return Taken + (COUNTERS - STRETCHES)
    else:
        return Taken + (NUMBERS - STRETCHES)


@gluon.jit
def _all_read(Read, stretches, tiles):
    """Of a warp: whether all tiles of the first so many stretches have been read, as far as is seen at once."""
    i = gl.arange(0, STRETCHES, gl.BlockedLayout([4], [32], [1], [0]))
    return gl.min(gl.load(Read + i, mask=i < stretches, other=tiles, cache_modifier=".cg"), 0) >= tiles


@gluon.jit
def _wait_read(Read, stretches, tiles):
    """Of a warpgroup: wait until all tiles of the first so many stretches have been read, each thread for one."""
    i = gl.arange(0, STRETCHES, gl.BlockedLayout([1], [32], [4], [0]))
    wait_turn(Read + gl.minimum(i, stretches - 1), tiles)
    gl.barrier()


@gluon.jit
def _producer(Q, K, V, DOut, E, Rest, Bias, Taken, several, lent, in_lent, stretches, tiles, bars, counts,
              SHARED_HEADS: gl.constexpr, SHARERS: gl.constexpr, STAGES: gl.constexpr, LOAD: gl.constexpr,
              EARLY: gl.constexpr, FRESH: gl.constexpr):
    """Keeps the rings full. Takes the next tile that no program took, and tells the consumers what it is, and what the
    tile before has still to wait for: it looks once, and does not wait. FRESH: of what it reads, E and Taken come from
    the kernel before."""
    q_s, k_s, do_s, v_s, e_s, ones_s, bias_s, number_s = tiles
    full, empty, kv_full, kv_empty = bars
    heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles = counts
    bias_b, bias_h = several
    stretch, steep, less = stretches
    n = 0
    turn = 0
    waits = 0
    if not FRESH:
        wait_turn(Taken + 1, 1)  # a program of the kernel before has begun, after what that waited for
    t = gl.atomic_add(Taken, 1, sem="relaxed")
    while t < n_tiles:
        following = t
        batch, head, n0, first, at = _tile(t, counts, SHARERS)
        i_kv = slot(turn, KV_STAGES)
        wait_empty(kv_empty, turn, KV_STAGES)
        told = i_kv * TOLD
        _tell(number_s, told, t)
        _tell(number_s, told + 1, n0)
        _tell(number_s, told + TOLD_STRETCH, t // stretch)
        _tell(number_s, told + TOLD_WAITS, waits)
        for c in gl.static_range(SHARERS):
            b, h = _sharer(first + c, batch, head, counts, SHARED_HEADS)
            _tell(number_s, told + 2 + 2 * c, b)
            _tell(number_s, told + 3 + 2 * c, h)
            load_tile(K, b, h, n0, 0, kv_full.index(i_kv), k_s.index(i_kv * SHARERS + c))
            load_tile(V, b, h, n0, 0, kv_full.index(i_kv), v_s.index(i_kv * SHARERS + c))
        for m0 in range(0, len_q, LOAD):
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_tile(Bias, batch * bias_b, head * bias_h, m0, n0, full.index(i), bias_s.index(i))
            for c in gl.static_range(SHARERS):
                b, h = _sharer(first + c, batch, head, counts, SHARED_HEADS)
                load_tile(Q, b, h, m0, 0, full.index(i), q_s.index(i * SHARERS + c))
                load_tile(DOut, b, h, m0, 0, full.index(i), do_s.index(i * SHARERS + c))
            if m0 == 0:
                following = gl.atomic_add(Taken, 1, sem="relaxed")
            if FRESH:
                if n == 0:
                    wait_for_previous(EARLY)
                    let_next(EARLY)  # which begins to read what was there before this kernel
            for c in gl.static_range(SHARERS):
                if at < in_lent:
                    load_tile(E, 0, at + c, m0, 0, full.index(i), e_s.index(i * SHARERS + c))
                else:
                    load_tile(Rest, 0, at - in_lent + c, m0, 0, full.index(i), e_s.index(i * SHARERS + c))
            n += 1
        if not FRESH:
            if t >= lent:  # where this tile is stored, the kernels ahead may still read
                wait_for_previous(EARLY)
                lent = n_tiles  # waited for
        waits = gl.minimum(t // stretch, t // stretch * steep - less)
        if waits > 0:
            if _all_read(_read_counts(Taken, FRESH), waits, stretch):
                waits = 0
        turn += 1
        t = following
    wait_empty(kv_empty, turn, KV_STAGES)
    _tell(number_s, slot(turn, KV_STAGES) * TOLD, n_tiles)  # no tile's: the end
    _tell(number_s, slot(turn, KV_STAGES) * TOLD + TOLD_WAITS, waits)
    mbarrier.arrive(kv_full.index(slot(turn, KV_STAGES)), count=2 * SHARERS)
    if not FRESH:
        wait_for_previous(EARLY)
        let_next(EARLY)


@gluon.jit
def _add_share(Parts, DBias, sums, share, len_q, len_k, ADD: gl.constexpr, PAIRS: gl.constexpr):
    """A share of the gradient of the bias, ADD columns of 64 rows: the sum of parts in order, which lie in memory as
    `in_rows` has them, 64 columns after the other of each tile of a part."""
    N: gl.constexpr = ADD // 8  # rows of a warp, which are together
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, N, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    parts, n_m, width, blocks, shares = sums
    size = blocks * (HALF * HALF)
    tile = share // (width // ADD)
    n0 = share % (width // ADD) * ADD
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    row = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    X = Parts + tile * (width * HALF) + n0 // HALF * (HALF * HALF) + n0 % HALF * 16 + (warp * 8 + row) * 128 + column
    x = gl.zeros([4, N, 128], gl.float32, LAYOUT)
    for part in range(0, parts, 4):  # so many under way at once
        x0 = gl.load(X)
        x1 = gl.load(X + size, mask=part + 1 < parts, other=0.0)
        x2 = gl.load(X + 2 * size, mask=part + 2 < parts, other=0.0)
        x3 = gl.load(X + 3 * size, mask=part + 3 < parts, other=0.0)
        X += 4 * size
        x += x0
        x += x1
        x += x2
        x += x3
    store_sum(DBias, tile // n_m, tile % n_m * HALF, n0, in_lines(x.reshape([4 * N, 128])), len_q, len_k, PAIRS)


@gluon.jit
def _scores(left, right, ones, lines):
    """Begin to multiply, [KEYS, PART], less what `ones` picks of lines of E."""
    zeros = gl.zeros([KEYS, PART], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16]))
    s = warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(ones, lines.permute((1, 0)), s, is_async=True)


@gluon.jit
def _consumer(DK, DV, Parts, DBias, Taken, sums, stretch, tiles, bars, counts, scale, C: gl.constexpr,
              SHARED_HEADS: gl.constexpr, SHARERS: gl.constexpr, STAGES: gl.constexpr, LOAD: gl.constexpr,
              ADD: gl.constexpr, PAIRS: gl.constexpr, EARLY: gl.constexpr, FRESH: gl.constexpr):
    """dK and dV of 64 keys of a sharer, tile after tile. Comments at waits name the products under way, the eldest
    first."""
    q_s, k_s, do_s, v_s, e_s, ones_s, bias_s, number_s = tiles
    full, empty, kv_full, kv_empty = bars
    heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles = counts
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    unit = scale * LOG2E
    n = 0
    turn = 0
    if ADD > 0:  # while the first tiles are on their way
        share = gl.atomic_add(Taken + 1, 1, sem="relaxed")
        wait_for_previous(EARLY)
        while share < sums[4]:  # what nobody took: programs that have not begun may be waiting for a multiprocessor
            following = gl.atomic_add(Taken + 1, 1, sem="relaxed")
            _add_share(Parts, DBias, sums, share, len_q, len_k, ADD, PAIRS)
            share = following
    wait_full(kv_full, turn, KV_STAGES)
    t = number_of(number_s.index(slot(turn, KV_STAGES) * TOLD), 4)
    while t < n_tiles:
        k_tile = k_s.index(slot(turn, KV_STAGES) * SHARERS + C)
        v_tile = v_s.index(slot(turn, KV_STAGES) * SHARERS + C)
        k = k_tile
        v = v_tile
        if SHARERS == 2 or LOAD == PART:  # there are registers for both
            k = k_tile.load(gl.DotOperandLayout(0, S, 2))
            v = v_tile.load(gl.DotOperandLayout(0, S, 2))
        dk = gl.zeros([KEYS, DIM], gl.float32, GRAD)
        dv = gl.zeros([KEYS, DIM], gl.float32, GRAD)
        for m0 in range(0, len_q, LOAD):
            i = slot(n, STAGES)
            wait_full(full, n, STAGES)
            for part in gl.static_range(LOAD // PART):
                q = q_s.index(i * SHARERS + C).slice(part * PART, PART, dim=0)
                do = do_s.index(i * SHARERS + C).slice(part * PART, PART, dim=0)
                lines = e_s.index(i * SHARERS + C).slice(part * PART, PART, dim=0)
                # ahead of the products: reads of shared memory queue behind them
                bias = bias_s.index(i).slice(part * PART, PART, dim=0).permute((1, 0)).load(S)
                s = _scores(k, q, ones_s.index(0), lines)
                dp = _scores(v, do, ones_s.index(1), lines)
                if part > 0:  # dV, dK, S twice, dP twice
                    s, dv, dk = warpgroup_mma_wait(2, deps=(s, dv, dk))
                else:  # S twice, dP twice
                    s = warpgroup_mma_wait(2, deps=(s,))
                p = gl.exp2(s * unit + widened(bias) * LOG2E)
                p16 = gl.convert_layout(p.to(do.dtype), OPERAND, assert_trivial=True)
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))  # dP twice, dV
                ds16 = gl.convert_layout((p * dp).to(q.dtype), OPERAND, assert_trivial=True)
                dk = warpgroup_mma(ds16, q, dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
            release(empty, n, STAGES)
            n += 1
            if (m0 == 0) & (turn > 0):  # the store of the tile before has had this long
                tma.store_wait(0)
                gl.barrier()
                release(kv_empty, turn - 1, KV_STAGES)
        Read = _read_counts(Taken, FRESH)
        told = slot(turn, KV_STAGES) * TOLD
        if C == 0:  # what was read has arrived: there is nothing to wait for
            gl.atomic_add(Read + number_of(number_s.index(told + TOLD_STRETCH), 4), 1, sem="relaxed")
        n0 = number_of(number_s.index(told + 1), 4)
        b = number_of(number_s.index(told + 2 + 2 * C), 4)
        h = number_of(number_s.index(told + 3 + 2 * C), 4)
        turn += 1
        wait_full(kv_full, turn, KV_STAGES)  # nobody wants any more what lies where this tile is stored, but for lines
        waits = number_of(number_s.index(slot(turn, KV_STAGES) * TOLD + TOLD_WAITS), 4)
        if waits > 0:
            _wait_read(Read, waits, stretch)
        k_tile.store((dk * scale).to(DK.dtype))
        v_tile.store(dv.to(DV.dtype))
        fence_async_shared()
        store_tile(DK, b, h, n0, 0, k_tile)
        store_tile(DV, b, h, n0, 0, v_tile)
        t = number_of(number_s.index(slot(turn, KV_STAGES) * TOLD), 4)
    tma.store_wait(0)


_COUNTS = [
    "parts", "n_m", "width", "blocks", "shares", "lent", "in_lent", "stretch", "steep", "less", "heads", "repeats",
    "bias_heads", "shared", "groups", "padded", "len_q", "len_k", "n_tiles",
]  # fmt: skip


@gluon.jit(do_not_specialize=_COUNTS)
def _keys_kernel(Q, K, V, DOut, E, Rest, Bias, DK, DV, Taken, Parts, DBias, bias_b, bias_h, parts, n_m, width, blocks,
                 shares, lent, in_lent, stretch, steep, less, heads, repeats, bias_heads, shared, groups, padded, len_q,
                 len_k, n_tiles, scale, SHARED_HEADS: gl.constexpr, SHARERS: gl.constexpr, STAGES: gl.constexpr,
                 LOAD: gl.constexpr, ADD: gl.constexpr, PAIRS: gl.constexpr, EARLY: gl.constexpr, FRESH: gl.constexpr,
                 REGISTERS: gl.constexpr):
    """dK and dV of tiles of 64 keys of a few sharers.

    Each slice of the bias serves `shared` (batch, head), of consecutive batch elements, `repeats` of them, in `groups`
    of SHARERS; its number is multiplied by bias_b, that of its head by bias_h: 0 along expanded dimensions. E: `padded`
    lines for each (batch, head) in the order of units (hopper_shared_lent.py), of eight columns: three parts of lse in
    units of a product, three of delta; those of the first in_lent, which lie in dK or dV. Rest: all others.
    Taken: int32, 0; tiles that are taken; where FRESH shares that are; at the end, of each stretch, how many tiles have
    been read. ADD, if not 0: DBias becomes the sum of so many parts, which the kernel before writes to Parts, in shares
    of ADD columns; a part has tiles of 64 rows and `width` columns, n_m for a slice, that is `blocks` of 64 x 64.
    FRESH: it writes E and Taken, too. lent: elsewhere, the first tile that is stored where the kernels before may still
    read. stretch: so many tiles are counted together; before one of stretch s is stored, those of the first
    min(s, steep s - less) stretches have been read.
    """
    q_s = make_tiles(Q, STAGES * SHARERS)
    k_s = make_tiles(K, KV_STAGES * SHARERS)
    do_s = make_tiles(DOut, STAGES * SHARERS)
    v_s = make_tiles(V, KV_STAGES * SHARERS)
    bias_s = make_tiles(Bias, STAGES)
    e_s = make_tiles(E, STAGES * SHARERS)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    column = gl.arange(0, LINE, gl.SliceLayout(0, FLAT))[None, :] + gl.zeros([KEYS, LINE], gl.int32, FLAT)
    ones_s = gl.allocate_shared_memory(E.dtype, [2, KEYS, LINE], gl.NVMMASharedLayout(32, 16, rank=2))
    ones_s.index(0).store(gl.where(column < 3, -1.0, 0.0).to(E.dtype))
    ones_s.index(1).store(gl.where(column >= 3, -1.0, 0.0).to(E.dtype))
    number_s = gl.allocate_shared_memory(gl.int32, [KV_STAGES * TOLD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = make_barriers(STAGES, 1 + 3 * SHARERS)
    empty = make_barriers(STAGES, SHARERS)
    kv_full = make_barriers(KV_STAGES, 2 * SHARERS)
    kv_empty = make_barriers(KV_STAGES, SHARERS)
    fence_async_shared()
    tiles = (q_s, k_s, do_s, v_s, e_s, ones_s, bias_s, number_s)
    bars = (full, empty, kv_full, kv_empty)
    counts = (heads, repeats, bias_heads, shared, groups, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    sums = (parts, n_m, width, blocks, shares)
    stretches = (stretch, steep, less)
    if SHARERS == 2:
        gl.warp_specialize([
            (_consumer, (DK, DV, Parts, DBias, Taken, sums, stretch, tiles, bars, counts, scale, 0,
                         SHARED_HEADS, SHARERS, STAGES, LOAD, ADD, PAIRS, EARLY, FRESH)),
            (_consumer, (DK, DV, Parts, DBias, Taken, sums, stretch, tiles, bars, counts, scale, 1,
                         SHARED_HEADS, SHARERS, STAGES, LOAD, ADD, PAIRS, EARLY, FRESH)),
            (_producer, (Q, K, V, DOut, E, Rest, Bias, Taken, several, lent, in_lent, stretches, tiles, bars, counts,
                         SHARED_HEADS, SHARERS, STAGES, LOAD, EARLY, FRESH)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (DK, DV, Parts, DBias, Taken, sums, stretch, tiles, bars, counts, scale, 0,
                         SHARED_HEADS, SHARERS, STAGES, LOAD, ADD, PAIRS, EARLY, FRESH)),
            (_consumer, (DK, DV, Parts, DBias, Taken, sums, stretch, tiles, bars, counts, scale, 1,
                         SHARED_HEADS, SHARERS, STAGES, LOAD, ADD, PAIRS, EARLY, FRESH)),
            (_consumer, (DK, DV, Parts, DBias, Taken, sums, stretch, tiles, bars, counts, scale, 2,
                         SHARED_HEADS, SHARERS, STAGES, LOAD, ADD, PAIRS, EARLY, FRESH)),
            (_producer, (Q, K, V, DOut, E, Rest, Bias, Taken, several, lent, in_lent, stretches, tiles, bars, counts,
                         SHARED_HEADS, SHARERS, STAGES, LOAD, EARLY, FRESH)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip


# -- launchers ---------------------------------------------------------------------------------------------------------


_WHOLE = 384  # keys, which a program of dQ takes all, if TMA can read lse: where rows begin at multiples of 16 bytes
CONFIGS = {2: (3, 240), 3: (2, 160)}  # sharers: buffers of 128 queries, registers


class Launches(NamedTuple):
    """The launches of one backward, and the sizes of what they share."""

    before: launch.Launch | None  # None: what gives dQ does its work
    keys: Launch
    sums: Launch
    lines: Lines
    parts: int  # float32 numbers of parts of dbias that the last kernel adds
    lent: tuple[int, ...]  # numbers that dK and dV lend, if they can: for the ring, parts, lse and delta


def _launches(
    x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, dlse: bool, lent: Lent
) -> Launches:  # fmt: skip
    call = Call(x, o)
    assert x.bias is not None
    m, n, dim, sms = BLOCK_M.value, KEYS.value, DIM.value, call.device.sms
    padded = -(-call.len_q // m) * m
    slices, shared = sharing(call, x.bias)
    units = units_of(call, x.bias)
    sharers = units.sharers
    lines = lent.plan_lines(call, x.bias, units, padded)
    lent.take_lines(lines)
    fresh = call.len_k <= _WHOLE and call.len_q % 4 == 0
    before, width = None, 0
    sizes: tuple[int, ...] = ()
    if fresh:
        sums, width = rows_launch(call, x.bias, units, lines.held, padded, dlse)
    else:
        before = ahead(call, m, x.bias, units, lines.held, out, dout, dlse)
        sums, ring, handed = sums_launch(call, x.bias, padded, max(lent.rooms()))
        sizes = ring, handed, 2 * padded * call.heads * call.batch  # the largest first, or tiles wait that need not
    for size in sizes:
        lent.take(size)
    stages, registers = CONFIGS[sharers]
    load = m // 2 if fresh else m  # queries of a buffer: few where heads are short
    n_n = -(-call.len_k // n)
    n_tiles = n_n * units.n
    programs = min(n_tiles, sms)
    tiles = slices * padded // HALF.value  # of a part
    add, shares = _shares(tiles, width, programs * sharers) if width else (0, 0)
    several_heads = x.bias.shape[1] < call.heads
    scalars = (
        *several_of(call), sums.parts, padded // HALF.value, width, tiles * width // HALF.value, shares,
        lent.first(call, x.bias, units) * n_n, lines.held, lines.stretch * n_n, lines.steep, lines.less, call.heads,
        call.repeats, x.bias.shape[1], shared, units.groups, padded, call.len_q, call.len_k, n_tiles, divisor(call),
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": several_heads, "SHARERS": sharers, "STAGES": stages * m // load, "LOAD": load, "ADD": add,
        "PAIRS": add > 0 and call.len_k % 2 == 0, "EARLY": True, "FRESH": fresh, "REGISTERS": registers,
        "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    blocks = {
        "Q": (load, dim), "K": (n, dim), "V": (n, dim), "DOut": (load, dim), "E": (load, LINE.value),
        "Rest": (load, LINE.value), "Bias": (load, n), "DK": (n, dim), "DV": (n, dim),
    }  # fmt: skip
    keys = Launch(_keys_kernel, programs, scalars, meta, _SPILL, blocks)
    return Launches(before, keys, sums, lines, sums.parts * tiles * HALF.value * width, sizes)


def _shares(tiles: int, width: int, consumers: int) -> tuple[int, int]:
    """(columns of a share, shares): at most one for each consumer, if that can be."""
    columns = next((n for n in SHARES if width // n * tiles <= consumers), SHARES[-1])
    return columns, width // columns * tiles


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbias, None, which repeat bit for bit."""
    bias = x.bias
    assert bias is not None and wanted
    dlse = None if dlse is None else dlse.contiguous()
    out, dout = (t if suits_tma(t) else t.contiguous() for t in (out, dout))
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    plan = remembered(x, "bwd", lambda: _launches(x, o, out, dout, dlse is not None, Lent(dk, dv)))
    numbers = empty((NUMBERS.value if plan.before else COUNTERS.value,), lse, torch.int32)
    dbias = empty(tuple(bias.shape), bias)
    lent = Lent(dk, dv)
    e, rest = lent.take_lines(plan.lines)
    parts = empty((plan.parts,), lse) if plan.parts else lse
    if plan.before is None:
        plan.sums(
            x.q, x.k, x.v, bias, out, dout, lse.view(-1), dlse, e.view(torch.int32), rest.view(torch.int32), numbers,
            dq, dbias, parts,
        )  # fmt: skip
    else:
        ring, handed, rows_and_delta = map(lent.take, plan.lent)
        rows, delta = rows_and_delta.view(2, -1).unbind()
        launch.take_turn(x.q.device)
        plan.before(out, dout, lse, dlse, rows, delta, e, rest, numbers)
        plan.sums(x.q, x.k, x.v, bias, dout, rows, delta, dq, ring.view(-1, 128), numbers, handed, dbias)
    plan.keys(x.q, x.k, x.v, dout, e, rest, bias, dk, dv, numbers, parts, dbias)
    return dq, dk, dv, dbias, None
