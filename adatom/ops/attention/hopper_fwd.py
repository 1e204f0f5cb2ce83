"""Attention forward on Hopper (Gluon): a producer warp feeds queries, keys and values to consumer warpgroups by TMA.

The schedule is FlashAttention-3's (Shah et al., arXiv:2407.08608). Each consumer owns BLOCK_M queries. It issues
Q K^T of one block of keys and P V of the block before together, and computes the softmax of the one while P V of the
other is under way: overlap within a warpgroup. Consumers take turns at issuing products, so that the softmax of one
runs under the products of another: ping-pong. P stays in registers, as the left operand of P V. Keys are walked from
the last to the first. A persistent program works on several tiles: one's epilogue runs under the loads of the next.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_fwd_plan import balance, in_place, pick, stages
from adatom.ops.attention.hopper_packed import HEADER, table_launch, table_size
from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LN2,
    LOG2E,
    Launch,
    boxed,
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    keys_of_query,
    keys_seen,
    keys_shared,
    lap,
    let_next,
    load_tile,
    make_barriers,
    make_tiles,
    mbarrier,
    named_arrive,
    named_sync,
    release,
    slot,
    store_rows,
    store_tile,
    tanh,
    tile_number,
    tiles_of_program,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

NONE = gl.constexpr(0)
KEY = gl.constexpr(1)
QUERY = gl.constexpr(2)
FULL = gl.constexpr(3)
TURN = gl.constexpr(8)  # named barrier of the first consumer's turn


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for."""

    BIAS: int  # what it depends on
    SOFTCAP: bool
    FOLD: bool  # nothing comes between q k^T and the softmax but masks
    LEFT: bool  # windows
    RIGHT: bool
    MASK: bool  # some blocks of keys are masked
    SINKS: bool
    LENS: bool
    VARLEN: bool
    HEAD_DIM_V: int
    CONSUMERS: int
    BLOCK_M: int  # queries of one consumer
    BLOCK_N: int
    Q_STAGES: int  # buffers of queries
    STAGES: int  # of keys and of values
    BIAS_STAGES: int
    IN_PLACE: bool  # out takes the place of the queries in shared memory


@gluon.constexpr_function
def _plan(*fields):
    return Plan(*fields)


@gluon.jit
def _tile(t, Order, Lens, sizes, PLAN: gl.constexpr):
    """(batch, head, first query, first tokens of queries and keys, queries, keys) of tile t.

    Heads go in groups of `group`. Under a causal mask the last queries of a group, whose tiles are the longest, come
    first. Packed tiles are listed in Order.
    """
    heads, kv_heads, n_heads, group, len_q, len_k, left, right = sizes
    BLOCK_M: gl.constexpr = PLAN.CONSUMERS * PLAN.BLOCK_M
    if PLAN.VARLEN:
        row = Order + (t + 1).to(gl.int64) * HEADER
        start_q, start_k = gl.load(row + 1), gl.load(row + 2)
        return t * 0, gl.load(row + 6), gl.load(row), start_q, start_k, gl.load(row + 3), gl.load(row + 4)
    else:
        n_blocks = (len_q + BLOCK_M - 1) // BLOCK_M
        first = t // (group * n_blocks) * group
        size = gl.minimum(group, n_heads - first)
        r = t - first * n_blocks
        block = r // size
        bh = first + r - block * size
        if PLAN.RIGHT:
            block = n_blocks - 1 - block
        b = bh // heads
        if PLAN.LENS:
            len_k = gl.minimum(gl.maximum(gl.load(Lens + b).to(gl.int32), 0), len_k)
        return b, bh - b * heads, block * BLOCK_M, 0, 0, len_q, len_k


@gluon.jit
def _n_tiles(Order, n_tiles, sizes, PLAN: gl.constexpr):
    """How many tiles there are."""
    if PLAN.VARLEN:
        return gl.load(Order)
    else:
        return n_tiles


@gluon.jit
def _blocks(m0, len_q, len_k, left, right, PLAN: gl.constexpr):
    """(first key, blocks of keys) of the tile of queries m0... One that sees nothing has a block, all of it masked."""
    BLOCK_M: gl.constexpr = PLAN.CONSUMERS * PLAN.BLOCK_M
    begin, end = keys_seen(m0, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK_M, PLAN.BLOCK_N)
    return begin, gl.maximum((end - begin + PLAN.BLOCK_N - 1) // PLAN.BLOCK_N, 1)


@gluon.jit
def _own(turn, C: gl.constexpr, PLAN: gl.constexpr):
    """Where the queries of consumer C lie in the ring of queries."""
    return slot(turn, PLAN.Q_STAGES) * PLAN.CONSUMERS + C


@gluon.jit
def _producer(Q, K, V, Bias, Lens, Order, bias_b, bias_h, rings, sizes, n_tiles, PLAN: gl.constexpr):
    """Keeps the rings full."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    CONSUMERS: gl.constexpr = PLAN.CONSUMERS
    STAGES: gl.constexpr = PLAN.STAGES
    n_tiles = _n_tiles(Order, n_tiles, sizes, PLAN)
    n = 0
    for turn in range(tiles_of_program(n_tiles)):
        b, h, m0, start_q, start_k, len_q, len_k = _tile(tile_number(turn), Order, Lens, sizes, PLAN)
        begin, blocks = _blocks(m0, len_q, len_k, left, right, PLAN)
        hk = h // (heads // kv_heads)
        for c in gl.static_range(CONSUMERS):
            i = _own(turn, c, PLAN)
            mbarrier.wait(q_empty.index(i), lap(turn, PLAN.Q_STAGES) ^ 1)
            load_tile(Q, b, h, start_q + m0 + c * PLAN.BLOCK_M, 0, q_full.index(i), q_s.index(i))
        n0 = begin + blocks * PLAN.BLOCK_N
        for _ in range(blocks):
            n0 -= PLAN.BLOCK_N
            i = slot(n, STAGES)
            wait_empty(k_empty, n, STAGES)
            load_tile(K, b, hk, start_k + n0, 0, k_full.index(i), k_s.index(i))
            if PLAN.BIAS == FULL:
                i_bias = slot(n, PLAN.BIAS_STAGES)
                wait_empty(bias_empty, n, PLAN.BIAS_STAGES)
                for c in gl.static_range(CONSUMERS):
                    load_tile(Bias, b * bias_b, h * bias_h, m0 + c * PLAN.BLOCK_M, n0, bias_full.index(i_bias),
                              bias_s.index(i_bias * CONSUMERS + c))
            wait_empty(v_empty, n, STAGES)
            load_tile(V, b, hk, start_k + n0, 0, v_full.index(i), v_s.index(i))
            n += 1


@gluon.jit
def _load_bias(Bias, bias_strides, bias_s, bias_full, bias_empty, n, b, h, m0, n0, i, len_q, len_k,
               C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """What is added to the scores of queries m0 + i and keys n0.., block n of the ring, to broadcast against them."""
    stride_b, stride_h, stride_m, stride_n = bias_strides
    if PLAN.BIAS == FULL:
        wait_full(bias_full, n, PLAN.BIAS_STAGES)
        bias = bias_s.index(slot(n, PLAN.BIAS_STAGES) * PLAN.CONSUMERS + C).load(LAYOUT)
        release(bias_empty, n, PLAN.BIAS_STAGES)
        return bias
    elif PLAN.BIAS == KEY:
        X = Bias + (b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h + n0.to(gl.int64) * stride_n)
        BLOCK_N: gl.constexpr = PLAN.BLOCK_N
        key = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))  # read once, then spread to all rows
        bias = gl.load(X + key * stride_n, mask=key < len_k - n0, other=0)
        return gl.convert_layout(bias, gl.SliceLayout(0, LAYOUT))[None, :]
    elif PLAN.BIAS == QUERY:
        X = Bias + (b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h + m0.to(gl.int64) * stride_m)
        return gl.load(X + i * stride_m, mask=i < len_q - m0, other=0)[:, None]
    else:
        return 0.0


@gluon.jit
def _scores(s, bias, i, j, cut, len_q, len_k, left, right, scale, softcap, PLAN: gl.constexpr):
    """Scores of queries i and keys j from s = q k^T; without the scale if FOLD. cut: the mask cuts this block."""
    if not PLAN.FOLD:
        if PLAN.SOFTCAP:
            s = softcap * tanh(s * (scale / softcap))
        else:
            s = s * scale
    if PLAN.BIAS != NONE:
        if bias.dtype == gl.uint8:
            s = gl.where(bias != 0, s, float("-inf"))
        else:
            s = s + bias.to(gl.float32)
    if PLAN.MASK:
        if cut:
            first, last = keys_of_query(i, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT)
            seen = j[None, :] <= last[:, None]
            if PLAN.LEFT:
                seen &= j[None, :] >= first[:, None]
            s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _softmax(s, m, l, scale, PLAN: gl.constexpr):
    """One step of the online softmax: (p in float32, factor of what was before, m, l).

    m, the maximum, is in the units of s, or in log2 units if FOLD; l is the sum of p."""
    unit = scale * LOG2E
    if PLAN.FOLD:
        m_new = gl.maximum(m, gl.max(s, 1) * unit)
    else:  # a bias may be as large as -1e9: what is subtracted must be one of the scores, unrounded
        m_new = gl.maximum(m, gl.max(s, 1))
    m_safe = m_new
    if PLAN.MASK or PLAN.BIAS != NONE:  # rows that have seen nothing yet
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    if PLAN.FOLD:
        p = gl.exp2(s * unit - m_safe[:, None])
        alpha = gl.exp2(m - m_safe)
    else:
        p = gl.exp2((s - m_safe[:, None]) * LOG2E)
        alpha = gl.exp2((m - m_safe) * LOG2E)
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def _nothing_seen(Sinks, h, LAYOUT: gl.constexpr, PLAN: gl.constexpr):
    """(m, l) before the first block of keys. A sink is a key with that score and value 0."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    zero = gl.full([BLOCK_M], 0.0, gl.float32, LAYOUT)
    if PLAN.SINKS:
        sink = gl.load(Sinks + h).to(gl.float32)
        return zero + (sink * LOG2E if PLAN.FOLD else sink), zero + gl.where(sink == float("-inf"), 0.0, 1.0)
    else:
        return zero + float("-inf"), zero


@gluon.jit
def _multiply_queries(turn, n, rings, C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin s = q k^T for block n, of the tile of this turn."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    k = k_s.index(slot(n, PLAN.STAGES)).permute((1, 0))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(q_s.index(_own(turn, C, PLAN)), k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _multiply_both(p, acc, turn, n, rings, C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """When it is this consumer's turn, begin s = q k^T for block n, and acc += p v for the block before."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    wait_full(k_full, n, PLAN.STAGES)
    named_sync(TURN + C, 256)
    s = _multiply_queries(turn, n, rings, C, PLAN, LAYOUT)
    wait_full(v_full, n - 1, PLAN.STAGES)
    acc = warpgroup_mma(p, v_s.index(slot(n - 1, PLAN.STAGES)), acc, is_async=True)
    named_arrive(TURN + (C + 1) % PLAN.CONSUMERS, 256)
    return s, acc


@gluon.jit
def _probabilities(s, m, l, n, b, h, m0, n0, len_q, len_k, options, rings, PENDING: gl.constexpr, C: gl.constexpr,
                   PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Wait for the scores of block n, whose first key is n0; then a step of the softmax: (p, alpha, m, l).

    PENDING: products begun later, which are left under way."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    Bias, bias_strides, left, right, scale, softcap = options
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    first = m0 + C * BLOCK_M
    i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    bias = _load_bias(Bias, bias_strides, bias_s, bias_full, bias_empty, n, b, h, first, n0, i, len_q,
                      len_k, C, PLAN, LAYOUT)
    s = warpgroup_mma_wait(PENDING, deps=(s,))
    release(k_empty, n, PLAN.STAGES)
    begin, end = keys_shared(first, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK_M)
    cut = (n0 < begin) | (n0 + BLOCK_N > end)
    s = _scores(s, bias, first + i, n0 + j, cut, len_q, len_k, left, right, scale, softcap, PLAN)
    return _softmax(s, m, l, scale, PLAN)


@gluon.jit
def _clear_padding(v, v_full, n, keys, PLAN: gl.constexpr):
    """Zero the values from row `keys` on, which may be NaN. All consumers do it, each before it multiplies by them."""
    if keys < PLAN.BLOCK_N:
        wait_full(v_full, n, PLAN.STAGES)
        clear_rows(v, keys)
        gl.barrier()


@gluon.jit
def _settle(acc, p, n, rings, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Wait for acc += p v of block n, with the p of the block after at hand: (acc, that p as a left operand).

    ptxas moves the wait for products above the softmax, unless another wait, a branch, comes before it.
    """
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    wait_full(v_full, n, PLAN.STAGES)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    release(v_empty, n, PLAN.STAGES)
    return acc, gl.convert_layout(p.to(o_s.dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def _consumer(results, given, bias_strides, rings, sizes, n_tiles, scale, softcap, C: gl.constexpr,
              PLAN: gl.constexpr):
    """Computes BLOCK_M rows of out and lse of every tile."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    STAGES: gl.constexpr = PLAN.STAGES
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    Out, OutPtr, Lse, stride_oh, stride_om = results
    Bias, Sinks, Lens, Order = given
    options = (Bias, bias_strides, left, right, scale, softcap)
    n_tiles = _n_tiles(Order, n_tiles, sizes, PLAN)
    DIM_V: gl.constexpr = o_s.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    i = C * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)
    if C == PLAN.CONSUMERS - 1:
        named_arrive(TURN, 256)  # the first consumer begins

    n = 0  # blocks of keys begun
    for turn in range(tiles_of_program(n_tiles)):
        mbarrier.wait(q_full.index(_own(turn, C, PLAN)), lap(turn, PLAN.Q_STAGES))
        wait_full(k_full, n, STAGES)
        named_sync(TURN + C, 256)
        s = _multiply_queries(turn, n, rings, C, PLAN, S_LAYOUT)
        named_arrive(TURN + (C + 1) % PLAN.CONSUMERS, 256)
        b, h, m0, start_q, start_k, len_q, len_k = _tile(tile_number(turn), Order, Lens, sizes, PLAN)
        begin, blocks = _blocks(m0, len_q, len_k, left, right, PLAN)
        n0 = begin + (blocks - 1) * BLOCK_N
        m, l = _nothing_seen(Sinks, h, ROWS, PLAN)
        acc = gl.zeros([BLOCK_M, DIM_V], gl.float32, O_LAYOUT)
        p, alpha, m, l = _probabilities(s, m, l, n, b, h, m0, n0, len_q, len_k, options, rings, 0, C, PLAN, S_LAYOUT)
        p = gl.convert_layout(p.to(o_s.dtype), P_LAYOUT, assert_trivial=True)
        if PLAN.LENS or PLAN.VARLEN:
            _clear_padding(v_s.index(slot(n, STAGES)), v_full, n, len_k - n0, PLAN)
        n += 1

        for _ in range(blocks - 1):
            n0 -= BLOCK_N
            s, acc = _multiply_both(p, acc, turn, n, rings, C, PLAN, S_LAYOUT)
            pf, alpha, m, l = _probabilities(s, m, l, n, b, h, m0, n0, len_q, len_k, options, rings, 1, C, PLAN,
                                             S_LAYOUT)
            acc, p = _settle(acc, pf, n - 1, rings, PLAN, P_LAYOUT)
            acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
            n += 1

        if not PLAN.IN_PLACE:
            mbarrier.arrive(q_empty.index(_own(turn, C, PLAN)), count=1)
        wait_full(v_full, n - 1, STAGES)
        acc = warpgroup_mma(p, v_s.index(slot(n - 1, STAGES)), acc, is_async=True)
        seen = l > 0.0
        l = gl.where(seen, l, 1.0)
        lse = gl.where(seen, m * (LN2 if PLAN.FOLD else 1.0) + gl.log2(l) * LN2, float("-inf"))
        row = (b.to(gl.int64) * heads + h) * most_q + start_q
        gl.store(Lse + row + m0 + i, lse, mask=m0 + i < len_q)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(v_empty, n - 1, STAGES)
        acc = acc * gl.convert_layout(1.0 / l, O_ROWS)[:, None]
        if PLAN.IN_PLACE:
            o = q_s.index(_own(turn, C, PLAN))
        else:
            o = o_s.index(C)
            tma.store_wait(0)  # the tile before has left
            gl.barrier()
        o.store(acc.to(o.dtype))
        first = m0 + C * BLOCK_M
        if PLAN.VARLEN:  # the rows after the last are the next sequence's
            store_rows(OutPtr + h.to(gl.int64) * stride_oh, o, start_q + first, len_q - first, stride_om,
                       PLAN.HEAD_DIM_V)
        else:
            fence_async_shared()
            store_tile(Out, b, h, first, 0, o)
        if PLAN.IN_PLACE:
            tma.store_wait(0)
            gl.barrier()
            mbarrier.arrive(q_empty.index(_own(turn, C, PLAN)), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_heads", "group", "len_q", "len_k", "left", "right", "n_tiles"])
def _fwd_kernel(Q, K, V, Bias, Sinks, Lens, Order, Out, OutPtr, Lse, stride_oh, stride_om,
                stride_bb, stride_bh, stride_bm, stride_bn, bias_b, bias_h, heads, kv_heads, n_heads, group, len_q,
                len_k, left, right, n_tiles, scale, softcap,
                BIAS: gl.constexpr, SOFTCAP: gl.constexpr, FOLD: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
                MASK: gl.constexpr, SINKS: gl.constexpr, LENS: gl.constexpr, VARLEN: gl.constexpr,
                HEAD_DIM_V: gl.constexpr, EARLY: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr,
                BLOCK_N: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr,
                REGISTERS: gl.constexpr, IN_PLACE: gl.constexpr):
    PLAN: gl.constexpr = _plan(BIAS, SOFTCAP, FOLD, LEFT, RIGHT, MASK, SINKS, LENS, VARLEN, HEAD_DIM_V, CONSUMERS,
                               BLOCK_M, BLOCK_N, Q_STAGES, STAGES, BIAS_STAGES, IN_PLACE)
    q_s = make_tiles(Q, Q_STAGES * CONSUMERS)
    k_s = make_tiles(K, STAGES)
    v_s = make_tiles(V, STAGES)
    o_s = q_s if IN_PLACE else make_tiles(Out, CONSUMERS)
    q_full = make_barriers(Q_STAGES * CONSUMERS, 1)
    q_empty = make_barriers(Q_STAGES * CONSUMERS, 1)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, CONSUMERS)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, CONSUMERS)
    if BIAS == FULL:
        bias_s = make_tiles(Bias, BIAS_STAGES * CONSUMERS)
        bias_full = make_barriers(BIAS_STAGES, CONSUMERS)
        bias_empty = make_barriers(BIAS_STAGES, CONSUMERS)
    else:
        bias_s, bias_full, bias_empty = k_s, k_full, k_empty  # not looked at
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    rings = (q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty)
    sizes = (heads, kv_heads, n_heads, group, len_q, len_k, left, right)
    strides = (stride_bb, stride_bh, stride_bm, stride_bn)
    results = (Out, OutPtr, Lse, stride_oh, stride_om)
    given = (Bias, Sinks, Lens, Order)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 0, PLAN)),
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 1, PLAN)),
            (_producer, (Q, K, V, Bias, Lens, Order, bias_b, bias_h, rings, sizes, n_tiles, PLAN)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 0, PLAN)),
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 1, PLAN)),
            (_consumer, (results, given, strides, rings, sizes, n_tiles, scale, softcap, 2, PLAN)),
            (_producer, (Q, K, V, Bias, Lens, Order, bias_b, bias_h, rings, sizes, n_tiles, PLAN)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])


class Launches(NamedTuple):
    """The launches of one forward: what follows from shapes and options."""

    table: launch.Launch | None  # of the tiles of packed sequences
    main: Launch
    lines: int  # numbers of that table


def _launches(x: Inputs, o: Options, out: torch.Tensor) -> Launches:
    call = Call(x, o)
    dims = call.meta["BLOCK_D"], call.meta["BLOCK_DV"]
    config, group = balance(pick(call, dims), call)
    q_stages, bias_stages = stages(config, call, dims)
    if not q_stages:
        config = config._replace(block_n=config.block_n // 2)
        q_stages, bias_stages = stages(config, call, dims)
    bias = x.bias
    masks = o.softcap == 0 and (bias is None or bias.dtype == torch.bool)
    rows = config.consumers * config.block_m
    n_tiles = call.programs(call.len_q, rows)
    meta = dict(
        BIAS=call.meta["BIAS"],
        SOFTCAP=o.softcap > 0,
        FOLD=o.scale > 0 and masks,
        LEFT=call.left >= 0,
        RIGHT=call.right >= 0,
        MASK=call.left >= 0 or call.right >= 0 or not call.even(call.len_k, config.block_n),
        SINKS=x.sinks is not None,
        LENS=x.kv_lens is not None,
        VARLEN=call.varlen,
        HEAD_DIM_V=call.head_dim_v if call.varlen else 0,  # TMA knows it otherwise
        EARLY=True,
        CONSUMERS=config.consumers,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        Q_STAGES=q_stages,
        STAGES=config.stages,
        BIAS_STAGES=bias_stages,
        REGISTERS=config.registers,
        IN_PLACE=in_place(dims),
        num_warps=4,
        launch_pdl=True,
    )
    blocks = {
        "Q": (config.block_m, dims[0]),
        "K": (config.block_n, dims[0]),
        "V": (config.block_n, dims[1]),
        "Out": (config.block_m, dims[1]),
    }
    if meta["BIAS"] == 3:
        blocks["Bias"] = (config.block_m, config.block_n)
    several = [int(stride > 0) for stride in call.bias_strides[:2]]
    heads, kv_heads, _, n_heads, _, *lengths = call.counts()
    sizes = (heads, kv_heads, n_heads, group, *lengths)
    scalars = (*call.strides(out)[1:], *call.bias_strides, *several, *sizes, n_tiles, call.scale, o.softcap)
    programs = min(n_tiles, call.device.sms) if config.persistent else n_tiles
    table = table_launch(call, rows, 3 * call.device.sms * rows // 2) if call.varlen else None
    return Launches(table, Launch(_fwd_kernel, programs, scalars, meta, config.spill, blocks), table_size(call, rows))


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    plan = remembered(x, "fwd", lambda: _launches(x, o, out))
    bias, order = x.bias, None
    if bias is not None and bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    if plan.table is not None:
        order = torch.empty(plan.lines, dtype=torch.int32, device=lse.device)
        plan.table(order, x.cu_seqlens_q, x.cu_seqlens_k)
    q, k, v = boxed(x.q), boxed(x.k), boxed(x.v)
    plan.main(q, k, v, bias, x.sinks, x.kv_lens, order, boxed(out), out, lse)
    return out, lse
