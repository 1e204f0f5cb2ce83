"""Attention forward on Hopper for head_dim 136 to 256 (Gluon), with the schedule of hopper_fwd.py.

Columns of queries, keys, values and out come in two halves, of 128 and of 64 or 128 (0 of values): lo and hi, so that
192 is 128 + 64 and not 256. Keys and values pass through one ring, in the order in which they are multiplied: k of
block 0, k of 1, v of 0, k of 2, v of 1 ... A ring of 4 lows and 3 highs is what fits beside 128 queries of 192 columns.
Out takes the place of its queries in shared memory; a third slot lets the next tile's queries come meanwhile.

SURE, for bfloat16, whose exponents are float32's: once every query of a tile has a score to refer to, blocks of keys
are taken without their maxima, p = exp2(s - m), and the accumulator is never rescaled. Sums may grow as they like up
to 2^64; a program of which one does not stay below, or whose out is not finite, does all its tiles once more in the
ordinary way.
"""

from typing import NamedTuple

import torch
import triton

from adatom.ops.attention.hopper_deep_fast import _deep_fast_kernel
from adatom.ops.attention.hopper_deep_tiles import (
    FLAG,
    ROWS,
    TURN,
    begin_out,
    begin_scores,
    feed,
    feed_queries,
    first_columns,
    free_queries,
    make_plan,
    masked_block,
    ordinary_step,
    store_columns,
    unsure,
)
from adatom.ops.attention.hopper_fwd_plan import balance, counted, square
from adatom.ops.attention.hopper_fwd_tiles import (
    blocks_of,
    count_tiles,
    nothing_seen,
    softmax_step,
    tile_of,
)
from adatom.ops.attention.hopper_packed import table_launch, table_size
from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LN2,
    Launch,
    as_matrix,
    boxed,
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    named_arrive,
    named_sync,
    release,
    slot,
    store_rows,
    tile_number,
    tiles_of_program,
    tma,
    wait_for_previous,
    wait_full,
    warpgroup_mma_wait,
)

# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _producer(Q, K, V, Lens, Order, tiles, bars, sizes, n_tiles, PLAN: gl.constexpr):
    """Keeps the rings full."""
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    u = 0  # tiles of queries begun
    t = 0  # uses of the ring of keys and values
    for again in range(2 if PLAN.SURE else 1):
        count = tiles_of_program(n_tiles)
        if PLAN.SURE:
            if again > 0:
                count = count * unsure(tiles, 1)
        for turn in range(count):
            b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
            begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
            hk = h // (heads // kv_heads)
            n0 = start_k + begin + (blocks - 1) * BLOCK_N
            if PLAN.Q_SLOTS > 2:
                feed_queries(Q, b, h, start_q + m0, u, tiles, bars, PLAN)
                feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
            else:
                feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
                feed_queries(Q, b, h, start_q + m0, u, tiles, bars, PLAN)
            feed_queries(Q, b, h, start_q + m0 + ROWS, u + 1, tiles, bars, PLAN)
            u += 2
            t += 1
            for _ in range(blocks - 1):
                n0 -= BLOCK_N
                feed(K, b, hk, n0, t, tiles, bars, PLAN.HQ, PLAN)
                feed(V, b, hk, n0 + BLOCK_N, t + 1, tiles, bars, PLAN.HV, PLAN)
                t += 2
            feed(V, b, hk, n0, t, tiles, bars, PLAN.HV, PLAN)
            t += 1


# -- consumers ---------------------------------------------------------------------------------------------------------


MOST = gl.constexpr(2.0**64)  # sums of probabilities above it are not trusted


@gluon.jit
def _consumer(results, given, tiles, bars, sizes, n_tiles, scale, C: gl.constexpr, PLAN: gl.constexpr):
    """Computes 64 rows of out and lse of every tile."""
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    LO: gl.constexpr = PLAN.LO
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    HV: gl.constexpr = PLAN.HV if PLAN.HV > 0 else 64
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    q_full, q_empty, full, empty = bars
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    Out, OutPtr, Lse, stride_oh, stride_om = results
    Sinks, Lens, Order = given
    limits = (left, right, scale)
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LO_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LO, 16])
    HI_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HV, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    FROM_SECOND: gl.constexpr = PLAN.RIGHT and C == 0 and BLOCK_N == 64
    if C == 1:
        named_arrive(TURN, 256)  # the first consumer begins

    u = C  # uses of the slots of queries, of which each consumer has every second
    t = 0  # uses of the ring of keys and values
    bad = gl.full([ROWS], 0, gl.int32, OF_ROWS)
    for again in range(2 if PLAN.SURE else 1):
        count = tiles_of_program(n_tiles)
        if PLAN.SURE:
            if again > 0:
                flags.index(C).store(gl.convert_layout(bad, gl.BlockedLayout([1], [32], [4], [0])))
                count = count * unsure(tiles, 4)
        for turn in range(count):
            if FROM_SECOND:
                b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
                begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
                n0 = begin + (blocks - 1) * BLOCK_N
                hidden = (n0 > m0 + (ROWS - 1) + len_k - len_q + right) & (blocks > 1)
                if hidden:  # only the other consumer's queries see the first block
                    wait_full(full, t, LO_SLOTS)
                    named_sync(TURN + C, 256)
                    named_arrive(TURN + (C + 1) % 2, 256)
                    release(empty, t, LO_SLOTS)
                    t += 1
                    n0 -= BLOCK_N
                    blocks -= 1
                    if PLAN.Q_SLOTS > 2:  # the second block comes after the other consumer's queries
                        if u >= 2:
                            free_queries(u - 2, bars, PLAN)
            wait_full(q_full, u, PLAN.Q_SLOTS)
            wait_full(full, t, LO_SLOTS)
            named_sync(TURN + C, 256)
            s = begin_scores(u, t, tiles, PLAN.BLOCK_N, PLAN, S_LAYOUT)
            named_arrive(TURN + (C + 1) % 2, 256)
            if PLAN.Q_SLOTS > 2:
                free = u >= 2
                if FROM_SECOND:
                    free = free & (hidden == 0)
                if free:
                    free_queries(u - 2, bars, PLAN)
            if not FROM_SECOND:
                b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
                begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
                n0 = begin + (blocks - 1) * BLOCK_N
            first = m0 + C * ROWS
            m, l = nothing_seen(Sinks, h, OF_ROWS, PLAN)
            lo = gl.zeros([ROWS, LO], gl.float32, LO_LAYOUT)
            hi = gl.zeros([ROWS, HV], gl.float32, HI_LAYOUT)
            s = warpgroup_mma_wait(0, deps=(s,))
            release(empty, t, LO_SLOTS)
            s = masked_block(s, first, n0, len_q, len_k, limits, PLAN, S_LAYOUT)
            pf, alpha, m, l = softmax_step(s, m, l, scale, PLAN)
            p = pf.to(q_lo.dtype)
            t += 1
            if FROM_SECOND:
                if hidden:
                    wait_full(full, t, LO_SLOTS)
                    release(empty, t, LO_SLOTS)
                    t += 1
            if PLAN.LENS or PLAN.VARLEN:
                if len_k - n0 < BLOCK_N:  # values beyond the last may be NaN; each consumer clears them for itself
                    v = t + gl.where(blocks > 1, 1, 0)
                    wait_full(full, v, LO_SLOTS)
                    clear_rows(lo_s.index(slot(v, LO_SLOTS)), len_k - n0)
                    if PLAN.HV > 0:
                        clear_rows(first_columns(hi_s.index(slot(v, PLAN.HI_SLOTS)), PLAN.HV), len_k - n0)
                    gl.barrier()

            ordinary = blocks - 1
            if PLAN.SURE:
                if again == 0:
                    ordinary = blocks * 0
                    if PLAN.RIGHT:  # until the first query, hence all, has a score to refer to
                        end = gl.minimum(len_k, first + len_k - len_q + right + 1)
                        ordinary = gl.minimum(gl.maximum(n0 - end + BLOCK_N, 0) // BLOCK_N, blocks - 1)
            for _ in range(ordinary):
                n0 -= BLOCK_N
                p, lo, hi, m, l = ordinary_step(p, lo, hi, m, l, u, t, t + 1, first, n0, len_q, len_k, limits, tiles,
                                                bars, False, C, PLAN, S_LAYOUT)
                t += 2
            if PLAN.SURE:
                m = gl.where(m == float("-inf"), 0.0, m)
                for _ in range(blocks - 1 - ordinary):
                    n0 -= BLOCK_N
                    p, lo, hi, m, l = ordinary_step(p, lo, hi, m, l, u, t, t + 1, first, n0, len_q, len_k, limits,
                                                    tiles, bars, True, C, PLAN, S_LAYOUT)
                    t += 2

            wait_full(full, t, LO_SLOTS)
            lo, hi = begin_out(p, lo, hi, t, tiles, PLAN)
            seen = l > 0.0
            total = gl.where(seen, l, 1.0)
            lse = gl.where(seen, m * (LN2 if PLAN.FOLD else 1.0) + gl.log2(total) * LN2, float("-inf"))
            i = gl.arange(0, ROWS, OF_ROWS)
            row = (b.to(gl.int64) * heads + h) * most_q + start_q
            gl.store(Lse + row + first + i, lse, mask=first + i < len_q)
            inverse = 1.0 / total
            if PLAN.HV > 0:
                lo, hi = warpgroup_mma_wait(0, deps=(lo, hi))
            else:
                lo = warpgroup_mma_wait(0, deps=(lo,))
            release(empty, t, LO_SLOTS)
            t += 1
            lo = lo * gl.convert_layout(inverse, gl.SliceLayout(1, LO_LAYOUT))[:, None]
            hi = hi * gl.convert_layout(inverse, gl.SliceLayout(1, HI_LAYOUT))[:, None]
            if PLAN.SURE:  # a product with 0 is NaN for infinities and NaN
                rest = gl.convert_layout(gl.sum(lo * 0.0, 1), OF_ROWS)
                if PLAN.HV > 0:
                    rest += gl.convert_layout(gl.sum(hi * 0.0, 1), OF_ROWS)
                bad |= gl.where((total < MOST) & (rest == 0.0), 0, 1)
            o_lo = q_lo.index(slot(u, PLAN.Q_SLOTS))
            o_hi = first_columns(q_hi.index(slot(u, PLAN.Q_SLOTS)), HV)
            o_lo.store(lo.to(q_lo.dtype))
            if PLAN.HV > 0:
                o_hi.store(hi.to(q_lo.dtype))
            if PLAN.VARLEN:  # the rows after the last are the next sequence's
                X = OutPtr + h.to(gl.int64) * stride_oh
                store_rows(X, o_lo, start_q + first, len_q - first, stride_om, min(PLAN.HEAD_DIM_V, 128))
                if PLAN.HV > 0:
                    store_rows(X + LO, o_hi, start_q + first, len_q - first, stride_om, PLAN.HEAD_DIM_V - LO)
                fence_async_shared()
            else:
                fence_async_shared()
                store_columns(Out, b, h, first, 0, o_lo, LO)
                if PLAN.HV > 0:
                    store_columns(Out, b, h, first, LO, o_hi, PLAN.HV)
            if PLAN.Q_SLOTS == 2:
                free_queries(u, bars, PLAN)
            u += 2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_heads", "group", "len_q", "len_k", "left", "right", "n_tiles"])
def _deep_fwd_kernel(Q, K, V, Sinks, Lens, Order, Out, OutPtr, Lse, stride_oh, stride_om, heads, kv_heads, n_heads,
                     group, len_q, len_k, left, right, n_tiles, scale, FOLD: gl.constexpr, LEFT: gl.constexpr,
                     RIGHT: gl.constexpr, MASK: gl.constexpr, SINKS: gl.constexpr, LENS: gl.constexpr,
                     VARLEN: gl.constexpr, HEAD_DIM_V: gl.constexpr, EARLY: gl.constexpr, BLOCK_N: gl.constexpr,
                     HQ: gl.constexpr, HV: gl.constexpr, Q_SLOTS: gl.constexpr, LO_SLOTS: gl.constexpr,
                     HI_SLOTS: gl.constexpr, SURE: gl.constexpr, REGISTERS: gl.constexpr):
    """Tensors come as descriptors: tiles of 64 columns, of 64 rows of Q and Out, of BLOCK_N of K and V."""
    LO: gl.constexpr = 128  # columns of the first half
    PLAN: gl.constexpr = make_plan(0, False, FOLD, LEFT, RIGHT, MASK, SINKS, LENS, VARLEN, HEAD_DIM_V, 2, 64, BLOCK_N,
                                   LO, HQ, HV, Q_SLOTS, LO_SLOTS, HI_SLOTS, SURE)
    LAYOUT: gl.constexpr = as_matrix(Q.layout)
    q_lo = gl.allocate_shared_memory(Q.dtype, [Q_SLOTS, ROWS, LO], LAYOUT)
    q_hi = gl.allocate_shared_memory(Q.dtype, [Q_SLOTS, ROWS, HQ], LAYOUT)
    lo_s = gl.allocate_shared_memory(Q.dtype, [LO_SLOTS, BLOCK_N, LO], LAYOUT)
    hi_s = gl.allocate_shared_memory(Q.dtype, [HI_SLOTS, BLOCK_N, HQ], LAYOUT)
    flags = gl.allocate_shared_memory(gl.int32, [2, ROWS], FLAG)
    q_full = make_barriers(Q_SLOTS, 1)
    q_empty = make_barriers(Q_SLOTS, 1)
    full = make_barriers(LO_SLOTS, 1)
    empty = make_barriers(LO_SLOTS, 2)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_lo, q_hi, lo_s, hi_s, flags)
    bars = (q_full, q_empty, full, empty)
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    results = (Out, OutPtr, Lse, stride_oh, stride_om)
    given = (Sinks, Lens, Order)
    gl.warp_specialize([
        (_consumer, (results, given, tiles, bars, sizes, n_tiles, scale, 0, PLAN)),
        (_consumer, (results, given, tiles, bars, sizes, n_tiles, scale, 1, PLAN)),
        (_producer, ((Q, Q), (K, K), (V, V), Lens, Order, tiles, bars, sizes, n_tiles, PLAN)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- launcher ----------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How the kernel is tiled: two consumers of 64 queries, block_n keys; slots of queries, of first and of second
    halves of keys and values; registers of a consumer's thread; persistent: as many programs as multiprocessors; spill:
    bytes of registers it may spill; sure: whether bfloat16 goes without maxima."""

    block_n: int
    q_slots: int
    lo_slots: int
    hi_slots: int
    persistent: bool
    registers: int = 240
    spill: int = 384
    sure: bool = True
    consumers: int = 2
    block_m: int = 64


_192_FAST = Config(64, 3, 6, 6, True)
_192 = Config(128, 2, 4, 3, True, sure=False)
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):  # whose descriptors of products leave no registers
    _192 = _192_FAST
_256 = Config(64, 3, 4, 4, True)
# (columns of q and k in memory, whether packed) -> queries (of packed sequences, on average) from which a tile serves:
# tile; see docs/hopper.md
CONFIGS: dict[tuple[int, bool], dict[int, Config]] = {
    (192, False): {0: _192, 16384: _192._replace(persistent=False)},
    (192, True): {0: _192._replace(persistent=False)},
    (256, False): {0: _256, 16384: _256._replace(persistent=False)},
    (256, True): {0: _256._replace(persistent=False)},
}


def pick(call: Call) -> Config:
    """The configuration for a call."""
    table = CONFIGS[192 if call.head_dim <= 192 else 256, call.varlen]
    length = call.len_q // max(call.batch, 1) if call.varlen else call.len_q
    return table[max(n for n in table if n <= length)]


# columns of the widest of q, k and v -> tile of the kernel without maxima, which serves from 1024 keys on
FAST = {96: Config(128, 4, 4, 4, True), 192: Config(64, 2, 6, 6, True), 256: Config(64, 2, 5, 5, True)}


class Launches(NamedTuple):
    """The launches of one forward: what follows from shapes and options."""

    table: launch.Launch | None  # of the tiles of packed sequences
    main: Launch
    lines: int  # numbers of that table


def without_maxima(call: Call) -> Config | None:
    """The configuration of the kernel without maxima, where that serves."""
    plain = call.x.q.dtype == torch.bfloat16 and call.o.scale > 0 and not call.generic
    plain = plain and not call.varlen and call.x.kv_lens is None and call.left < 0
    plain = plain and call.len_k >= 1024 and (call.right < 0 or square(call))
    widest = max(call.head_dim, call.head_dim_v)
    if not plain or call.head_dim <= 64 or 96 < widest <= 128 or call.head_dim <= 96 < widest:
        return None
    return FAST[next(d for d in FAST if widest <= d)]


class Fast(NamedTuple):
    """The launch of the kernel without maxima."""

    main: Launch
    tiles: int
    counted: bool

    def __call__(self, x: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        new = torch.zeros if self.counted else torch.empty
        taken = new(1 + 3 * self.tiles, dtype=torch.int32, device=lse.device)
        given = boxed(x.q), boxed(x.k), boxed(x.v), boxed(out)
        self.main(*given, *given, x.sinks, taken, lse)


def fast_launch(call: Call, config: Config) -> Fast:
    """The launch of the kernel without maxima, for a call that it serves."""
    takes = counted(config, call)
    group = balance(config, call, takes)[1]
    if takes and call.right >= 0 and config.block_n == 64 and call.len_q <= 4096:
        group = min(2 * group, call.batch * call.heads)  # few tiles of a length: as many more even out the last ones
    low = 128 if call.head_dim > 128 else 64
    n_tiles = call.programs(call.len_q, 128)
    meta = dict(
        RIGHT=call.right >= 0,
        MASK=call.right >= 0 or not call.even(call.len_k, config.block_n),
        SINKS=call.x.sinks is not None,
        SQUARE=call.right >= 0,
        COUNTED=takes,
        EARLY=True,
        BLOCK_N=config.block_n,
        LO=low,
        HQ=next(h for h in (low // 2, low) if call.head_dim <= low + h),
        HV=next(h for h in (0, low // 2, low) if call.head_dim_v <= low + h),
        Q_SLOTS=config.q_slots,
        LO_SLOTS=config.lo_slots,
        HI_SLOTS=config.hi_slots,
        REGISTERS=config.registers,
        num_warps=4,
        launch_pdl=True,
    )
    rows = {"Q": 64, "K": config.block_n, "V": config.block_n, "Out": 64}
    blocks = {name: (n, 64) for name, n in rows.items()}
    if low == 64:
        blocks |= {name + "Hi": (n, meta["HQ"]) for name, n in rows.items()}
    heads, kv_heads, _, n_heads, _, len_q, len_k, *_ = call.counts()
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, call.right, n_tiles, call.scale)
    programs = min(n_tiles, call.device.sms)
    return Fast(Launch(_deep_fast_kernel, programs, sizes, meta, config.spill, blocks), n_tiles, takes)


def _launches(x: Inputs, o: Options, out: torch.Tensor) -> Launches | Fast:
    call = Call(x, o)
    without = without_maxima(call)
    if without is not None:
        return fast_launch(call, without)
    config, group = balance(pick(call), call)
    rows = config.consumers * config.block_m
    n_tiles = call.programs(call.len_q, rows)
    meta = dict(
        FOLD=o.scale > 0,
        LEFT=call.left >= 0,
        RIGHT=call.right >= 0,
        MASK=call.left >= 0 or call.right >= 0 or not call.even(call.len_k, config.block_n),
        SINKS=x.sinks is not None,
        LENS=x.kv_lens is not None,
        VARLEN=call.varlen,
        HEAD_DIM_V=call.head_dim_v if call.varlen else 0,  # TMA knows it otherwise
        EARLY=True,
        BLOCK_N=config.block_n,
        HQ=64 if call.head_dim <= 192 else 128,
        HV=next(h for h in (0, 64, 128) if call.head_dim_v <= 128 + h),
        Q_SLOTS=config.q_slots,
        LO_SLOTS=config.lo_slots,
        HI_SLOTS=config.hi_slots,
        SURE=config.sure and o.scale > 0 and x.q.dtype == torch.bfloat16,
        REGISTERS=config.registers,
        num_warps=4,
        launch_pdl=True,
    )
    blocks = {"Q": (64, 64), "K": (config.block_n, 64), "V": (config.block_n, 64), "Out": (64, 64)}
    heads, kv_heads, _, n_heads, _, *lengths = call.counts()
    scalars = (*call.strides(out)[1:], heads, kv_heads, n_heads, group, *lengths, n_tiles, call.scale)
    programs = min(n_tiles, call.device.sms) if config.persistent else n_tiles
    table = table_launch(call, rows, 3 * call.device.sms * rows // 2) if call.varlen else None
    return Launches(
        table, Launch(_deep_fwd_kernel, programs, scalars, meta, config.spill, blocks), table_size(call, rows)
    )


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    plan = remembered(x, "deep_fwd", lambda: _launches(x, o, out))
    if isinstance(plan, Fast):
        plan(x, out, lse)
        return out, lse
    order = None
    if plan.table is not None:
        order = torch.empty(plan.lines, dtype=torch.int32, device=lse.device)
        plan.table(order, x.cu_seqlens_q, x.cu_seqlens_k)
    plan.main(
        boxed(x.q), boxed(x.k), boxed(x.v), x.sinks, x.kv_lens, order, boxed(out), out, lse
    )
    return out, lse
