"""Attention backward on Hopper (Gluon): a producer warp feeds queries and dO to two consumer warpgroups by TMA.

    P = exp(S - lse);  dP = dO V^T;  dS = P (dP - delta);  delta = rowsum(dO O) - dlse
    dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO;  dsinks = -sum exp(sink - lse) delta

A program owns 128 keys, each consumer 64 of them, and walks over blocks of queries, of all heads that share the keys.
S^T = K Q^T and dP^T = V dO^T are formed transposed, so that P^T and dS^T stay in registers as left operands of dV and
dK. dS also goes through shared memory: each consumer multiplies one half of dQ = dS K over all 128 keys and adds it to
a float32 sum in memory by TMA, in whatever order programs come to it. That order alone varies from run to run: dK and
dV repeat bit for bit, dQ but for rounding. A kernel ahead computes delta and clears the sum, one behind rounds it to
dQ. Sources: Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty, empty_like
from adatom.ops.attention.triton_call import NO_SPECIALIZE, Call, remembered, sink_grad
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LOG2E,
    Launch,
    as_matrix,
    blocks_of_queries,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    load_tile,
    load_tile_and_numbers,
    make_barriers,
    make_tiles,
    mbarrier,
    named_sync,
    release,
    slot,
    store_tile,
    tanh_of_scores,
    tma,
    visible,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from adatom.tiles.triton import after_previous, at
from adatom.tiles.triton import load_tile as load_rows

BLOCK_N = gl.constexpr(128)  # keys of a program
HALF = gl.constexpr(64)  # keys of a consumer; rows and columns of the piece of dQ that it multiplies
BOTH = gl.constexpr(8)  # number of the named barrier of the two consumers
_L2_BYTES = 24 * 2**20  # what the heads in flight read and add to: half of an H100's L2


class Config(NamedTuple):
    """How the kernel is tiled: a block of queries, in how many `parts` it is worked on; `stages` buffers of queries and
    of dO; registers of a consumer's thread; resident: K and V stay in registers; late: dQ of a block is multiplied in
    the next one, so that consumers need not wait for each other; tiles: "one" a program, or as many programs as
    multiprocessors, which take tiles in turn ("static") or when they are free ("dynamic"); spill: bytes of registers it
    may spill (options cost registers)."""

    block_m: int
    parts: int
    stages: int
    registers: int
    resident: bool
    late: bool
    tiles: str
    spill: int = 512


# (head_dim in memory, whether a mask makes the work of programs unequal) -> tile
CONFIGS: dict[tuple[int, bool], Config] = {
    (64, False): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic", spill=800),  # Triton 3.9's; 3.6: 412
    (64, True): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic", spill=800),
    (128, False): Config(64, 1, 2, 240, resident=False, late=False, tiles="static"),
    (128, True): Config(64, 1, 2, 240, resident=False, late=False, tiles="one"),
}


# -- what producer and consumers agree on ------------------------------------------------------------------------------


@gluon.jit
def _tile(t, kv_heads, n_heads, group, len_q, len_k, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr,
          BLOCK_M: gl.constexpr):
    """(batch, head of keys, first key, first block of queries, first and last that need no mask, number) of tile t.

    Heads go in groups whose queries fit in L2. Under a causal mask the first keys, whose tiles are the longest, come
    first. A tile that no query sees has one block, all of it masked.
    """
    n_blocks = (len_k + BLOCK_N - 1) // BLOCK_N
    first = t // (group * n_blocks) * group
    size = gl.minimum(group, n_heads - first)
    r = t - first * n_blocks
    block = r // size
    bh = first + r - block * size
    b = bh // kv_heads
    n0 = block * BLOCK_N
    begin, whole_begin, whole_end, end = blocks_of_queries(n0, len_k - len_q, len_q, left, right, LEFT, RIGHT, BLOCK_M,
                                                           BLOCK_N)
    begin = gl.minimum(begin, (len_q - 1) // BLOCK_M)
    return b, bh - b * kv_heads, n0, begin, whole_begin, whole_end, gl.maximum(end - begin, 1)


@gluon.jit
def _producer(Q, K, V, DOut, Lse, Delta, Taken, tiles, bars, counts, LEFT: gl.constexpr, RIGHT: gl.constexpr,
              DYNAMIC: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Loads tiles for the consumers. DYNAMIC: takes the next tile that no program took, and tells them its number."""
    heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles = counts
    k_s, v_s, q_s, do_s, lse_s, delta_s, _ds_s, _dq_s, number_s = tiles
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, _ds_full = bars
    sharing = heads // kv_heads
    n_m = (len_q + BLOCK_M - 1) // BLOCK_M
    n = 0
    turn = 0
    t = gl.program_id(0)
    while t < n_tiles:
        following = t + gl.num_programs(0)
        if DYNAMIC:
            following = gl.num_programs(0) + gl.atomic_add(Taken, 1, sem="relaxed")
        b, hk, n0, begin, _first, _last, blocks = _tile(t, kv_heads, n_heads, group, len_q, len_k, left, right, LEFT,
                                                        RIGHT, BLOCK_M)
        wait_empty(kv_empty, turn, 1)
        if DYNAMIC:
            number_s.store(gl.full([1], t, gl.int32, ONE))
        load_tile(K, b, hk, n0, 0, k_full.index(0), k_s.index(0))
        m, h = begin, hk * sharing
        for j in range(blocks * sharing):
            i = slot(n, STAGES)
            row = ((b * heads + h) * n_m + m) * BLOCK_M
            wait_empty(q_empty, n, STAGES)
            load_tile_and_numbers(Q, b, h, m * BLOCK_M, Lse, row, q_full.index(i), q_s.index(i), lse_s.index(i))
            if j == 0:
                load_tile(V, b, hk, n0, 0, v_full.index(0), v_s.index(0))
            wait_empty(do_empty, n, STAGES)
            load_tile_and_numbers(DOut, b, h, m * BLOCK_M, Delta, row, do_full.index(i), do_s.index(i),
                                  delta_s.index(i))
            n += 1
            m += 1
            if m == begin + blocks:  # the next head that shares the keys
                m = begin
                h += 1
        turn += 1
        t = following
    if DYNAMIC:  # a number that is no tile's: the end
        wait_empty(kv_empty, turn, 1)
        number_s.store(gl.full([1], n_tiles, gl.int32, ONE))
        mbarrier.arrive(k_full.index(0), count=1)


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _dq_product(ds_i, k_s, C: gl.constexpr, D: gl.constexpr):
    """Begin to multiply this consumer's piece of dQ = dS K, [64, 64]: its queries, or, if there are 64, its columns."""
    zeros = gl.zeros([HALF, HALF], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16]))
    if D == HALF:
        ds_c = ds_i.slice(C * HALF, HALF, dim=1).permute((1, 0))
        return warpgroup_mma(ds_c, k_s.index(0), zeros, use_acc=False, is_async=True)
    else:
        k_c = k_s.index(0).slice(C * HALF, HALF, dim=1)
        return warpgroup_mma(ds_i.permute((1, 0)), k_c, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(dq, DQ, block, dq_s, C: gl.constexpr):
    """Begin to add a [64, 64] accumulator to the sum in memory: as [32, 128], where a thread holds 16 bytes in a row
    and a warp 512, so that nothing moves between threads."""
    tma.store_wait(0)  # what was added last has left shared memory
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([HALF // 2, 128])
    dq_s.index(C).store(dq)
    fence_async_shared()
    tma.async_atomic_add(DQ, [block * HALF + C * (HALF // 2), 0], dq_s.index(C))


@gluon.jit
def _walk(dk, dv, n, DQ, tiles, bars, first, n0, begin, whole_begin, whole_end, blocks, sharing, len_q, len_k, left,
          right, scale, softcap, C: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr, LEFT: gl.constexpr,
          RIGHT: gl.constexpr, EVEN_N: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
          RESIDENT: gl.constexpr, LATE: gl.constexpr):
    """dK and dV of a consumer's keys, and its pieces of dQ, over all blocks of queries; also the uses of the rings.

    first: number of the first head's block 0 among all blocks of queries. Comments at waits name the products under
    way, the eldest first.
    """
    PART: gl.constexpr = BLOCK_M // PARTS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    KEYS: gl.constexpr = gl.SliceLayout(1, S)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, _ = tiles
    _, _, _, q_full, q_empty, do_full, do_empty, ds_full = bars
    k = k_s.index(0).slice(C * HALF, HALF, dim=0)
    v = v_s.index(0).slice(C * HALF, HALF, dim=0)
    if RESIDENT:
        k = k.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=2))
        v = v.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=2))
    zeros = gl.zeros([HALF, PART], gl.float32, S)
    rest = (len_q + BLOCK_M - 1) // BLOCK_M - blocks  # blocks of a head that do not see these keys
    keys = (n0 + C * HALF + gl.arange(0, HALF, layout=KEYS))[:, None]
    m = begin
    block = first + begin - 1 - rest
    ragged = n0 + BLOCK_N > len_k
    for j in range(blocks * sharing):
        i = slot(n, STAGES)
        ds_i = ds_s.index(n & 1)
        wait_full(q_full, n, STAGES)
        q = q_s.index(i).slice(0, PART, dim=0)
        s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if LATE:  # in the first turn there is nothing to add yet
            if j > 0:
                wait_full(ds_full, n - 1, 2)
            dq = _dq_product(ds_s.index((n + 1) & 1), k_s, C, D)
        wait_full(do_full, n, STAGES)
        do = do_s.index(i).slice(0, PART, dim=0)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        for part in gl.static_range(PARTS):
            lse = lse_s.index(i).slice(part * PART, PART).load(QUERIES)
            if part > 0:  # dV, S, dK, dP
                s, dv = warpgroup_mma_wait(2, deps=(s, dv))
            elif LATE:  # S, dQ, dP
                s, dq = warpgroup_mma_wait(1, deps=(s, dq))
                if j > 0:
                    _add_dq(dq, DQ, block, dq_s, C)
            else:  # S, dP
                s = warpgroup_mma_wait(1, deps=(s,))
            if SOFTCAP:
                t = tanh_of_scores(s * (scale / softcap))
                s = t * (softcap * LOG2E) - lse[None, :]
            else:
                s = s * (scale * LOG2E) - lse[None, :]
            if LEFT or RIGHT or not EVEN_N:
                cut = ragged
                if RIGHT:
                    cut |= m < whole_begin
                if LEFT:
                    cut |= m >= whole_end
                if cut:
                    queries = (m * BLOCK_M + part * PART + gl.arange(0, PART, layout=QUERIES))[None, :]
                    seen = visible(queries, keys, len_k - len_q, len_k, left, right, LEFT, RIGHT)
                    s = gl.where(seen, s, float("-inf"))
            p = gl.exp2(s)
            p16 = gl.convert_layout(p.to(do.dtype), OPERAND, assert_trivial=True)
            dv = warpgroup_mma(p16, do, dv, is_async=True)
            delta = delta_s.index(i).slice(part * PART, PART).load(QUERIES)
            if part + 1 < PARTS:  # dP, dV, S
                q_next = q_s.index(i).slice(part * PART + PART, PART, dim=0)
                s = warpgroup_mma(k, q_next.permute((1, 0)), zeros, use_acc=False, is_async=True)
                dp = warpgroup_mma_wait(2, deps=(dp,))
            elif PARTS > 1:  # dK, dP, dV
                dp, dk = warpgroup_mma_wait(1, deps=(dp, dk))
            else:  # dP, dV
                dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = p * (dp - delta[None, :])
            if SOFTCAP:
                ds *= 1.0 - t * t
            ds = ds.to(q.dtype)
            ds_i.slice(C * HALF, HALF, dim=0).slice(part * PART, PART, dim=1).store(ds)
            ds16 = gl.convert_layout(ds, OPERAND, assert_trivial=True)
            if part + 1 < PARTS:  # dV, S, dK, dP
                dk = warpgroup_mma(ds16, q, dk, is_async=True)
                q = q_next
                do = do_s.index(i).slice(part * PART + PART, PART, dim=0)
                dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        fence_async_shared()
        block += 1
        if LEFT or RIGHT:
            if m == begin:  # a head begins
                block += rest
        if LATE:
            dk = warpgroup_mma(ds16, q, dk, is_async=True)
            mbarrier.arrive(ds_full.index(n & 1), count=1)
            dv = warpgroup_mma_wait(1, deps=(dv,))
            release(do_empty, n, STAGES)
        else:
            named_sync(BOTH, 256)  # dS of all 128 keys is in shared memory
            dq = _dq_product(ds_i, k_s, C, D)
            dk = warpgroup_mma(ds16, q, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))  # dV, dQ, dK
            release(do_empty, n, STAGES)
            _add_dq(dq, DQ, block, dq_s, C)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        release(q_empty, n, STAGES)
        n += 1
        if LEFT or RIGHT:
            m = gl.where(m + 1 == begin + blocks, begin, m + 1)
    if LATE:
        wait_full(ds_full, n - 1, 2)
        dq = warpgroup_mma_wait(0, deps=(_dq_product(ds_s.index((n + 1) & 1), k_s, C, D),))
        _add_dq(dq, DQ, block, dq_s, C)
    return dk, dv, n


@gluon.jit
def _consumer(DK, DV, DQ, tiles, bars, counts, scale, softcap, C: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr,
              LEFT: gl.constexpr, RIGHT: gl.constexpr, EVEN_N: gl.constexpr, DYNAMIC: gl.constexpr,
              BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
              LATE: gl.constexpr):
    """Multiplies what the producer loads."""
    heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles = counts
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROOM: gl.constexpr = 128 // D  # for so many results
    _, _, _, _, _, _, _, dq_s, number_s = tiles
    k_full, v_full, kv_empty, _, _, _, _, _ = bars
    result = dq_s.index(C).reinterpret(DV.dtype, [ROOM, HALF, D], as_matrix(DV.layout))
    sharing = heads // kv_heads
    n_m = (len_q + BLOCK_M - 1) // BLOCK_M
    n = 0
    turn = 0
    t = gl.program_id(0)
    while t < n_tiles:
        b, hk, n0, begin, whole_begin, whole_end, blocks = _tile(t, kv_heads, n_heads, group, len_q, len_k, left, right,
                                                                 LEFT, RIGHT, BLOCK_M)
        wait_full(k_full, turn, 1)
        wait_full(v_full, turn, 1)
        dk = gl.zeros([HALF, D], gl.float32, LAYOUT)
        dv = gl.zeros([HALF, D], gl.float32, LAYOUT)
        first = (b * heads + hk * sharing) * n_m
        dk, dv, n = _walk(dk, dv, n, DQ, tiles, bars, first, n0, begin, whole_begin, whole_end, blocks, sharing, len_q,
                          len_k, left, right, scale, softcap, C, D, SOFTCAP, LEFT, RIGHT, EVEN_N, BLOCK_M, PARTS,
                          STAGES, RESIDENT, LATE)
        release(kv_empty, turn, 1)
        turn += 1
        tma.store_wait(0)
        result.index(0).store(dv.to(DV.dtype))
        fence_async_shared()
        store_tile(DV, b, hk, n0 + C * HALF, 0, result.index(0))
        dk *= scale
        if ROOM == 1:
            tma.store_wait(0)
        result.index(ROOM - 1).store(dk.to(DK.dtype))
        fence_async_shared()
        store_tile(DK, b, hk, n0 + C * HALF, 0, result.index(ROOM - 1))
        if DYNAMIC:
            wait_full(k_full, turn, 1)
            t = gl.max(number_s.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        else:
            t += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NO_SPECIALIZE, "n_tiles"])
def _bwd_kernel(Q, K, V, DOut, Lse, Delta, DK, DV, DQ, Taken, heads, kv_heads, n_heads, group, len_q, len_k, left,
                right, n_tiles, scale, softcap, D: gl.constexpr, SOFTCAP: gl.constexpr, LEFT: gl.constexpr,
                RIGHT: gl.constexpr, EVEN_N: gl.constexpr, EARLY: gl.constexpr, DYNAMIC: gl.constexpr,
                BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
                LATE: gl.constexpr, REGISTERS: gl.constexpr):
    """dK and dV of blocks of 128 keys; dQ, unscaled, is added to a float32 sum.

    Tensors come as descriptors. Lse, Delta: float32, one number for each query, the queries of each (batch, head)
    rounded up to BLOCK_M; Lse in log2 units, +inf where a query sees nothing or does not exist. DQ: float32 [-1, 128],
    the pieces of `_add_dq` by batch, head, block of queries and consumer.
    """
    k_s = make_tiles(K, 1)
    v_s = make_tiles(V, 1)
    q_s = make_tiles(Q, STAGES)
    do_s = make_tiles(DOut, STAGES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], Delta.layout)
    ds_s = gl.allocate_shared_memory(Q.dtype, [2, BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_s = gl.allocate_shared_memory(gl.float32, [2, HALF // 2, 128], DQ.layout)
    number_s = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = make_barriers(1, 1)
    v_full = make_barriers(1, 1)
    kv_empty = make_barriers(1, 2)
    q_full = make_barriers(STAGES, 1)
    q_empty = make_barriers(STAGES, 2)
    do_full = make_barriers(STAGES, 1)
    do_empty = make_barriers(STAGES, 2)
    ds_full = make_barriers(2, 2)
    fence_async_shared()
    tiles = (k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, number_s)
    bars = (k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full)
    wait_for_previous(EARLY)
    let_next(EARLY)
    counts = (heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles)
    gl.warp_specialize([
        (_consumer, (DK, DV, DQ, tiles, bars, counts, scale, softcap, 0, D, SOFTCAP, LEFT, RIGHT, EVEN_N, DYNAMIC,
                     BLOCK_M, PARTS, STAGES, RESIDENT, LATE)),
        (_consumer, (DK, DV, DQ, tiles, bars, counts, scale, softcap, 1, D, SOFTCAP, LEFT, RIGHT, EVEN_N, DYNAMIC,
                     BLOCK_M, PARTS, STAGES, RESIDENT, LATE)),
        (_producer, (Q, K, V, DOut, Lse, Delta, Taken, tiles, bars, counts, LEFT, RIGHT, DYNAMIC, BLOCK_M, STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- before and behind -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["heads", "len_q", "n_m"])
def _before_kernel(Out, DOut, Lse, DLse, Rows, Delta, DQ, Taken, stride_ob, stride_oh, stride_om, stride_gb, stride_gh,
                   stride_gm, heads, len_q, n_m, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, D: tl.constexpr,
                   DLSE: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a block of queries: delta, lse as the backward wants it (Rows), and zeros for the sum of dQ."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what is wanted first is written last, and is in L2
    bh = pid // n_m
    m0 = (pid - bh * n_m) * BLOCK_M
    b = bh // heads
    h = bh - b * heads
    i = tl.arange(0, BLOCK_M)
    some = m0 + i < len_q
    at_q = tl.cast(bh, tl.int64) * len_q + m0 + i
    at_padded = tl.cast(pid, tl.int64) * BLOCK_M + i
    if pid == 0:
        tl.store(Taken, 0)
    zeros = tl.arange(0, BLOCK_M * D)
    tl.store(DQ + tl.cast(pid, tl.int64) * (BLOCK_M * D) + zeros, tl.zeros((BLOCK_M * D,), tl.float32))
    o = load_rows(Out + at(b, h, 0, stride_ob, stride_oh, stride_om), b, h, m0, stride_om, len_q, BLOCK_M, HEAD_DIM_V,
                  BLOCK_DV, False, False)
    do = load_rows(DOut + at(b, h, 0, stride_gb, stride_gh, stride_gm), b, h, m0, stride_gm, len_q, BLOCK_M, HEAD_DIM_V,
                   BLOCK_DV, False, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(DLse + at_q, mask=some, other=0.0)
    lse = tl.load(Lse + at_q, mask=some, other=float("-inf"))
    tl.store(Rows + at_padded, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
    tl.store(Delta + at_padded, delta)


@triton.jit(do_not_specialize=["heads", "len_q", "n_m"])
def _behind_kernel(Sum, DQ, stride_b, stride_h, stride_m, heads, len_q, n_m, scale, HEAD_DIM: tl.constexpr,
                   D: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr):
    """dQ of 64 queries and 64 columns: the sum, from the order of the accumulators to that of rows, scaled."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was written last is read first, from L2
    block = pid // 2
    bh = block // n_m
    m0 = (block - bh * n_m) * BLOCK_M
    col0 = 0
    if D == 128:
        col0 = pid % 2 * 64
    else:
        m0 += pid % 2 * 64
    x = tl.load(Sum + tl.cast(pid, tl.int64) * 4096 + tl.arange(0, 4096)) * scale
    x = tl.reshape(x, (4, 8, 8, 4, 2, 2))
    x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), (64, 64))
    i = m0 + tl.arange(0, 64)[:, None]
    d = col0 + tl.arange(0, 64)[None, :]
    b = bh // heads
    ptr = DQ + at(b, bh - b * heads, m0, stride_b, stride_h, stride_m) + (i - m0) * stride_m + d
    tl.store(ptr, x.to(DQ.dtype.element_ty), mask=(i < len_q) & (d < HEAD_DIM))


# -- launchers ---------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The launches of one backward, and the shape of its float32 sum of dQ: what follows from shapes and options."""

    before: launch.Launch
    main: Launch
    behind: launch.Launch
    padded: int  # queries of a (batch, head) in whole blocks
    dim: int


def _plan(x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor, dlse: bool) -> Plan:
    call = Call(x, o)
    dim = 64 if max(call.head_dim, call.head_dim_v) <= 64 else 128
    config = CONFIGS[dim, call.left >= 0 or call.right >= 0]
    m = config.block_m
    n_m = -(-call.len_q // m)
    n_tiles = call.programs(call.len_k, BLOCK_N.value, kv=True)
    early = {"EARLY": True, "launch_pdl": True, "num_warps": 4}
    before = launch.Launch(
        _before_kernel, call.batch * call.heads * n_m,
        (*call.strides(out), *call.strides(dout), call.heads, call.len_q, n_m),
        early | {
            "HEAD_DIM_V": call.head_dim_v, "BLOCK_DV": call.meta["BLOCK_DV"], "D": dim, "DLSE": dlse, "BLOCK_M": m
        },
    )  # fmt: skip
    n_heads = call.batch * call.kv_heads
    head_bytes = call.heads // max(call.kv_heads, 1) * call.len_q * dim * 8  # queries, dO and the sum of dQ
    group = max(1, min(n_heads, _L2_BYTES // head_bytes))
    counts = (
        call.heads, call.kv_heads, n_heads, group, call.len_q, call.len_k, call.left, call.right, n_tiles, call.scale,
        o.softcap,
    )  # fmt: skip
    main = Launch(
        _bwd_kernel, n_tiles if config.tiles == "one" else min(n_tiles, call.device.sms), counts,
        early | {
            "D": dim, "SOFTCAP": o.softcap > 0, "LEFT": call.left >= 0, "RIGHT": call.right >= 0,
            "EVEN_N": call.len_k % BLOCK_N.value == 0, "BLOCK_M": m, "PARTS": config.parts, "STAGES": config.stages,
            "RESIDENT": config.resident, "LATE": config.late, "DYNAMIC": config.tiles == "dynamic",
            "REGISTERS": config.registers,
        },
        config.spill,
        {
            "Q": (m, dim), "K": (128, dim), "V": (128, dim), "DOut": (m, dim), "Lse": (m,), "Delta": (m,),
            "DK": (64, dim), "DV": (64, dim), "DQ": (32, 128),
        },
    )  # fmt: skip
    behind = launch.Launch(
        _behind_kernel, call.batch * call.heads * n_m * 2,
        (*call.strides(dq), call.heads, call.len_q, n_m, call.scale),
        early | {"HEAD_DIM": call.head_dim, "D": dim, "BLOCK_M": m},
    )  # fmt: skip
    return Plan(before, main, behind, n_m * m, dim)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, None for dbias (there is no bias), dsinks. dq is summed in an order that varies from run to run."""
    dlse = None if dlse is None else dlse.contiguous()
    if any(s * 2 % 16 or s <= 0 for s in dout.stride()[:3]) or dout.data_ptr() % 16:
        dout = dout.contiguous()  # for TMA
    batch, heads, len_q, _ = x.q.shape
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    plan = remembered(x, "bwd", lambda: _plan(x, o, out, dout, dq, dlse is not None))
    rows, delta = empty((2, batch, heads, plan.padded), lse).unbind()
    total = empty((batch * heads * plan.padded * plan.dim // 128, 128), lse)
    taken = torch.empty(1, dtype=torch.int32, device=lse.device)
    plan.before(out, dout, lse, dlse, rows, delta, total, taken)
    plan.main(x.q, x.k, x.v, dout, rows.view(-1), delta.view(-1), dk, dv, total, taken)
    plan.behind(total, dq)
    return dq, dk, dv, None, None if x.sinks is None else sink_grad(x, lse, delta[..., :len_q])
