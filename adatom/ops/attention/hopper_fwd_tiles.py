"""What the Hopper forwards share (Gluon): which tile is whose, the producer, scores, and the order of products."""

from dataclasses import dataclass

from adatom.ops.attention.hopper_packed import HEADER
from adatom.tiles.hopper import (
    LOG2E,
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    head_and_block,
    keys_of,
    keys_of_query,
    keys_seen,
    lap,
    load_tile,
    make_barriers,
    make_tiles,
    mbarrier,
    named_arrive,
    named_sync,
    planner,
    release,
    slot,
    store_rows,
    store_tile,
    tanh,
    tile_number,
    tiles_of_program,
    wait_empty,
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


make_plan = planner(Plan)


@gluon.jit
def tile_of(t, Order, Lens, sizes, PLAN: gl.constexpr):
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
        bh, block = head_and_block(t, n_blocks, n_heads, group)
        if PLAN.RIGHT:
            block = n_blocks - 1 - block
        b = bh // heads
        len_k = keys_of(Lens, b, len_k, PLAN.LENS)
        return b, bh - b * heads, block * BLOCK_M, 0, 0, len_q, len_k


@gluon.jit
def count_tiles(Order, n_tiles, sizes, PLAN: gl.constexpr):
    """How many tiles there are."""
    if PLAN.VARLEN:
        return gl.load(Order)
    else:
        return n_tiles


@gluon.jit
def blocks_of(m0, len_q, len_k, left, right, PLAN: gl.constexpr):
    """(first key, blocks of keys) of the tile of queries m0... One that sees nothing has a block, all of it masked."""
    BLOCK_M: gl.constexpr = PLAN.CONSUMERS * PLAN.BLOCK_M
    begin, end = keys_seen(m0, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK_M, PLAN.BLOCK_N)
    return begin, gl.maximum((end - begin + PLAN.BLOCK_N - 1) // PLAN.BLOCK_N, 1)


@gluon.jit
def own_queries(turn, C: gl.constexpr, PLAN: gl.constexpr):
    """Where the queries of consumer C lie in the ring of queries."""
    return slot(turn, PLAN.Q_STAGES) * PLAN.CONSUMERS + C


@gluon.jit
def producer(Q, K, V, Bias, Lens, Order, bias_b, bias_h, rings, sizes, n_tiles, PLAN: gl.constexpr):
    """Keeps the rings full."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    heads, kv_heads, n_heads, group, most_q, most_k, left, right = sizes
    CONSUMERS: gl.constexpr = PLAN.CONSUMERS
    STAGES: gl.constexpr = PLAN.STAGES
    n_tiles = count_tiles(Order, n_tiles, sizes, PLAN)
    n = 0
    for turn in range(tiles_of_program(n_tiles)):
        b, h, m0, start_q, start_k, len_q, len_k = tile_of(tile_number(turn), Order, Lens, sizes, PLAN)
        begin, blocks = blocks_of(m0, len_q, len_k, left, right, PLAN)
        hk = h // (heads // kv_heads)
        for c in gl.static_range(CONSUMERS):
            i = own_queries(turn, c, PLAN)
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
def masked_scores(s, bias, i, j, cut, len_q, len_k, left, right, scale, softcap, PLAN: gl.constexpr):
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
def softmax_step(s, m, l, scale, PLAN: gl.constexpr):
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
def nothing_seen(Sinks, h, LAYOUT: gl.constexpr, PLAN: gl.constexpr):
    """(m, l) before the first block of keys. A sink is a key with that score and value 0."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    zero = gl.full([BLOCK_M], 0.0, gl.float32, LAYOUT)
    if PLAN.SINKS:
        sink = gl.load(Sinks + h).to(gl.float32)
        return zero + (sink * LOG2E if PLAN.FOLD else sink), zero + gl.where(sink == float("-inf"), 0.0, 1.0)
    else:
        return zero + float("-inf"), zero


@gluon.jit
def multiply_queries(turn, n, rings, C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin s = q k^T for block n, of the tile of this turn."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    k = k_s.index(slot(n, PLAN.STAGES)).permute((1, 0))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(q_s.index(own_queries(turn, C, PLAN)), k, zeros, use_acc=False, is_async=True)


@gluon.jit
def multiply_both(p, acc, turn, n, rings, C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """When it is this consumer's turn, begin s = q k^T for block n, and acc += p v for the block before."""
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    wait_full(k_full, n, PLAN.STAGES)
    named_sync(TURN + C, 256)
    s = multiply_queries(turn, n, rings, C, PLAN, LAYOUT)
    wait_full(v_full, n - 1, PLAN.STAGES)
    acc = warpgroup_mma(p, v_s.index(slot(n - 1, PLAN.STAGES)), acc, is_async=True)
    named_arrive(TURN + (C + 1) % PLAN.CONSUMERS, 256)
    return s, acc


@gluon.jit
def clear_padding(v, v_full, n, keys, PLAN: gl.constexpr):
    """Zero the values from row `keys` on, which may be NaN. All consumers do it, each before it multiplies by them."""
    if keys < PLAN.BLOCK_N:
        wait_full(v_full, n, PLAN.STAGES)
        clear_rows(v, keys)
        gl.barrier()


@gluon.jit
def settle(acc, p, n, rings, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Wait for acc += p v of block n, with the p of the block after at hand: (acc, that p as a left operand).

    ptxas moves the wait for products above the softmax, unless another wait, a branch, comes before it.
    """
    q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty = rings
    wait_full(v_full, n, PLAN.STAGES)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    release(v_empty, n, PLAN.STAGES)
    return acc, gl.convert_layout(p.to(o_s.dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def make_rings(Q, K, V, Bias, Out, PLAN: gl.constexpr):
    """Shared memory and its barriers."""
    CONSUMERS: gl.constexpr = PLAN.CONSUMERS
    q_s = make_tiles(Q, PLAN.Q_STAGES * CONSUMERS)
    k_s = make_tiles(K, PLAN.STAGES)
    v_s = make_tiles(V, PLAN.STAGES)
    o_s = q_s if PLAN.IN_PLACE else make_tiles(Out, CONSUMERS)
    q_full = make_barriers(PLAN.Q_STAGES * CONSUMERS, 1)
    q_empty = make_barriers(PLAN.Q_STAGES * CONSUMERS, 1)
    k_full = make_barriers(PLAN.STAGES, 1)
    k_empty = make_barriers(PLAN.STAGES, CONSUMERS)
    v_full = make_barriers(PLAN.STAGES, 1)
    v_empty = make_barriers(PLAN.STAGES, CONSUMERS)
    if PLAN.BIAS == FULL:
        bias_s = make_tiles(Bias, PLAN.BIAS_STAGES * CONSUMERS)
        bias_full = make_barriers(PLAN.BIAS_STAGES, CONSUMERS)
        bias_empty = make_barriers(PLAN.BIAS_STAGES, CONSUMERS)
    else:
        bias_s, bias_full, bias_empty = k_s, k_full, k_empty  # not looked at
    fence_async_shared()
    return q_s, k_s, v_s, bias_s, o_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, bias_full, bias_empty


@gluon.jit
def write_out(results, acc, o, b, h, first, start_q, len_q, PLAN: gl.constexpr):
    """Write rows first.. of out, which is acc, by way of `o` in shared memory, which is free."""
    Out, OutPtr, Lse, stride_oh, stride_om = results
    o.store(acc.to(o.dtype))
    if PLAN.VARLEN:
        if len_q - first < PLAN.BLOCK_M:  # the rows after the last are the next sequence's
            store_rows(OutPtr + h.to(gl.int64) * stride_oh, o, start_q + first, len_q - first, stride_om,
                       PLAN.HEAD_DIM_V)
        else:
            fence_async_shared()
            store_tile(Out, b, h, start_q + first, 0, o)
    else:
        fence_async_shared()
        store_tile(Out, b, h, first, 0, o)
