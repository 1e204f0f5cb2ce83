"""Attention backward on Hopper (Gluon): a producer warp feeds queries and dO to two consumer warpgroups by TMA.

    P = exp(S - lse);  dP = dO V^T;  dS = P (dP - delta);  delta = rowsum(dO O) - dlse
    dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO;  dsinks = -sum exp(sink - lse) delta

A program owns 128 keys, each consumer 64 of them, and walks over blocks of queries, of all heads that share the keys,
from the last to the first. S^T = K Q^T and dP^T = V dO^T are formed transposed, so that P^T and dS^T stay in registers
as left operands of dV and dK. dS also goes through shared memory: each consumer multiplies one half of dQ = dS K over
all 128 keys and adds it to a float32 sum in memory by TMA. A kernel ahead computes delta and clears the sum, one behind
rounds it to dQ (hopper_bwd_ends.py). Sources: Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608.

Programs add to dQ in whatever order they come to it. That order alone varies from run to run: dK and dV repeat bit for
bit, dQ but for rounding. ORDERED: at each block of queries they wait for the keys before (hopper_bwd_feed.py).
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_bwd_ends import blocks_of_head, ends
from adatom.ops.attention.hopper_bwd_feed import (
    BLOCK_N,
    HALF,
    adder,
    blocks_of,
    make_plan,
    number_of,
    producer,
    tile_of,
    tiles_in_all,
)
from adatom.ops.attention.hopper_packed import table_launch, table_size
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like
from adatom.ops.attention.triton_call import NO_SPECIALIZE, Call, remembered, sink_grad
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LOG2E,
    Launch,
    as_matrix,
    boxed,
    clear_rows,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    make_tiles,
    mbarrier,
    named_sync,
    release,
    slot,
    store_rows,
    store_tile,
    tanh_of_scores,
    tma,
    visible,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BOTH = gl.constexpr(8)  # number of the named barrier of the two consumers
_TOGETHER = 24  # heads in flight where programs wait for each other under a mask; measured, see docs/hopper.md
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


# (head_dim in memory, whether the work of programs is unequal) -> tile
CONFIGS: dict[tuple[int, bool], Config] = {
    (64, False): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic", spill=800),  # Triton 3.9's; 3.6: 412
    (64, True): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic", spill=800),
    (128, False): Config(64, 1, 2, 240, resident=False, late=False, tiles="static"),
    (128, True): Config(64, 1, 2, 240, resident=False, late=False, tiles="one"),
}


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
def _add_dq(dq, DQ, block, n, dq_s, bars, C: gl.constexpr, PLAN: gl.constexpr):
    """Begin to add piece n, a [64, 64] accumulator, to the sum in memory: as [32, 128], where a thread holds 16 bytes
    in a row and a warp 512, so that nothing moves between threads. ADDER: leave it to its warp."""
    _, _, _, _, _, _, _, _, dq_full, dq_empty = bars
    if PLAN.ADDER:
        mbarrier.wait(dq_empty.index(C), (n & 1) ^ 1)
    tma.store_wait(0)  # what was added or stored last has left shared memory
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([HALF // 2, 128])
    dq_s.index(C).store(dq)
    fence_async_shared()
    if PLAN.ADDER:
        mbarrier.arrive(dq_full.index(C), count=1)
    else:
        tma.async_atomic_add(DQ, [block * HALF + C * (HALF // 2), 0], dq_s.index(C))


@gluon.jit
def _walk(dk, dv, n, DQ, tiles, bars, place, span, sharing, scale, softcap, C: gl.constexpr, PLAN: gl.constexpr):
    """dK and dV of a consumer's keys, and its pieces of dQ, over all blocks of queries; also the uses of the rings.

    place: (first key, queries, keys, first block, blocks of a head) of `tile_of`, window. span: `blocks_of`. Comments
    at waits name the products under way, the eldest first.
    """
    D: gl.constexpr = PLAN.D
    SOFTCAP: gl.constexpr = PLAN.SOFTCAP
    LEFT: gl.constexpr = PLAN.LEFT
    RIGHT: gl.constexpr = PLAN.RIGHT
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    PARTS: gl.constexpr = PLAN.PARTS
    STAGES: gl.constexpr = PLAN.STAGES
    LATE: gl.constexpr = PLAN.LATE
    JUMPS: gl.constexpr = LEFT or RIGHT or PLAN.LENS or PLAN.VARLEN  # some blocks of a head do not see these keys
    n0, len_q, len_k, first, stride, left, right = place
    begin, whole_begin, whole_end, blocks = span
    PART: gl.constexpr = BLOCK_M // PARTS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    KEYS: gl.constexpr = gl.SliceLayout(1, S)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, _ = tiles
    _, _, _, q_full, q_empty, do_full, do_empty, ds_full, _, _ = bars
    k = k_s.index(0).slice(C * HALF, HALF, dim=0)
    v = v_s.index(0).slice(C * HALF, HALF, dim=0)
    if PLAN.RESIDENT:
        k = k.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=2))
        v = v.load(gl.DotOperandLayout(operand_index=0, parent=S, k_width=2))
    zeros = gl.zeros([HALF, PART], gl.float32, S)
    last = begin + blocks - 1
    keys = (n0 + C * HALF + gl.arange(0, HALF, layout=KEYS))[:, None]
    m = last
    block = first + (sharing - 1) * stride + last + 1
    if JUMPS:
        block += stride - blocks
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
                    _add_dq(dq, DQ, block, n - 1, dq_s, bars, C, PLAN)
            else:  # S, dP
                s = warpgroup_mma_wait(1, deps=(s,))
            if SOFTCAP:
                t = tanh_of_scores(s * (scale / softcap))
                s = t * (softcap * LOG2E) - lse[None, :]
            else:
                s = s * (scale * LOG2E) - lse[None, :]
            if LEFT or RIGHT or not PLAN.EVEN_N:
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
        block -= 1
        if JUMPS:
            if m == last:  # a head begins
                block -= stride - blocks
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
            _add_dq(dq, DQ, block, n, dq_s, bars, C, PLAN)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        release(q_empty, n, STAGES)
        n += 1
        if JUMPS:
            m = gl.where(m == begin, last, m - 1)
    if LATE:
        wait_full(ds_full, n - 1, 2)
        dq = warpgroup_mma_wait(0, deps=(_dq_product(ds_s.index((n + 1) & 1), k_s, C, D),))
        _add_dq(dq, DQ, block, n - 1, dq_s, bars, C, PLAN)
    return dk, dv, n


@gluon.jit
def _clear_keys(n0, len_k, tiles, C: gl.constexpr):
    """Zero this consumer's keys and values beyond the last, which may be NaN. All consumers read them later."""
    k_s, v_s, _, _, _, _, _, _, _ = tiles
    keys = len_k - n0 - C * HALF
    if keys < HALF:
        clear_rows(k_s.index(0).slice(C * HALF, HALF, dim=0), keys)
        clear_rows(v_s.index(0).slice(C * HALF, HALF, dim=0), keys)


@gluon.jit
def _store(X, Pointer, strides, x, tile, b, hk, start_k, row, len_k, PLAN: gl.constexpr, DIM: gl.constexpr):
    """Write the accumulator x to rows of a gradient, by way of a tile of shared memory."""
    tile.store(x.to(X.dtype))
    if PLAN.VARLEN:  # the rows after the last are the next sequence's
        stride_h, stride_n = strides
        store_rows(Pointer + hk.to(gl.int64) * stride_h, tile, start_k + row, len_k - row, stride_n, DIM)
    else:
        fence_async_shared()
        store_tile(X, b, hk, row, 0, tile)


@gluon.jit
def _consumer(DK, DV, DQ, DKPtr, DVPtr, Order, Lens, strides, tiles, bars, counts, scale, softcap, C: gl.constexpr,
              PLAN: gl.constexpr):
    """Multiplies what the producer loads."""
    heads, kv_heads, n_heads, group, most_q, most_k, left, right, _ = counts
    D: gl.constexpr = PLAN.D
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROOM: gl.constexpr = 128 // D  # for so many results
    _, _, _, _, _, _, _, dq_s, number_s = tiles
    k_full, v_full, kv_empty, _, _, _, _, _, _, dq_empty = bars
    stride_kh, stride_kn, stride_vh, stride_vn = strides
    result = dq_s.index(C).reinterpret(DV.dtype, [ROOM, HALF, D], as_matrix(DV.layout))
    sharing = heads // kv_heads
    n_tiles = tiles_in_all(Order, counts, PLAN)
    n = 0
    turn = 0
    t = gl.program_id(0)
    if PLAN.DYNAMIC and PLAN.ORDERED:
        wait_full(k_full, turn, 1)
        t = number_of(number_s, 4)
    while t < n_tiles:
        b, hk, n0, len_q, len_k, start_q, start_k, first, stride = tile_of(t, Order, Lens, counts, PLAN)
        span = blocks_of(n0, len_q, len_k, left, right, PLAN)
        place = (n0, len_q, len_k, first, stride, left, right)
        wait_full(k_full, turn, 1)
        wait_full(v_full, turn, 1)
        if PLAN.LENS or PLAN.VARLEN:
            _clear_keys(n0, len_k, tiles, C)
        dk = gl.zeros([HALF, D], gl.float32, LAYOUT)
        dv = gl.zeros([HALF, D], gl.float32, LAYOUT)
        dk, dv, n = _walk(dk, dv, n, DQ, tiles, bars, place, span, sharing, scale, softcap, C, PLAN)
        release(kv_empty, turn, 1)
        turn += 1
        if PLAN.ADDER:
            mbarrier.wait(dq_empty.index(C), (n & 1) ^ 1)
        tma.store_wait(0)
        row = n0 + C * HALF
        _store(DV, DVPtr, (stride_vh, stride_vn), dv, result.index(0), b, hk, start_k, row, len_k, PLAN,
               PLAN.HEAD_DIM_V)
        dk *= scale
        if ROOM == 1:
            tma.store_wait(0)
        _store(DK, DKPtr, (stride_kh, stride_kn), dk, result.index(ROOM - 1), b, hk, start_k, row, len_k, PLAN,
               PLAN.HEAD_DIM)
        if PLAN.DYNAMIC:
            wait_full(k_full, turn, 1)
            t = number_of(number_s, 4)
        else:
            t += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NO_SPECIALIZE, "n_tiles"])
def _bwd_kernel(Q, K, V, DOut, Lse, Delta, DK, DV, DQ, DKPtr, DVPtr, Order, Lens, Taken, Turns,
                stride_kh, stride_kn, stride_vh, stride_vn,
                heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles, scale, softcap,
                D: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, SOFTCAP: gl.constexpr,
                LEFT: gl.constexpr, RIGHT: gl.constexpr, EVEN_N: gl.constexpr, LENS: gl.constexpr,
                VARLEN: gl.constexpr, ADDER: gl.constexpr, ORDERED: gl.constexpr, EARLY: gl.constexpr,
                DYNAMIC: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
                RESIDENT: gl.constexpr, LATE: gl.constexpr, REGISTERS: gl.constexpr):
    """dK and dV of blocks of 128 keys; dQ, unscaled, is added to a float32 sum.

    Tensors come as descriptors. Lse, Delta: float32, one number for each query, the queries of each (batch, head)
    rounded up to BLOCK_M; Lse in log2 units, +inf where a query sees nothing or does not exist. DQ: float32 [-1, 128],
    the pieces of `_add_dq` by batch, head, block of queries and consumer. Turns: int32, for each such piece how many
    blocks of keys are through with it. DKPtr, DVPtr, Order: for packed sequences, which are one batch element here;
    then n_heads is their number.
    """
    PLAN: gl.constexpr = make_plan(D, HEAD_DIM, HEAD_DIM_V, SOFTCAP, LEFT, RIGHT, EVEN_N, LENS, VARLEN, ADDER, ORDERED,
                                   DYNAMIC, BLOCK_M, PARTS, STAGES, RESIDENT, LATE)
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
    kv_empty = make_barriers(1, 4 if ADDER and DYNAMIC else 2)
    q_full = make_barriers(STAGES, 1)
    q_empty = make_barriers(STAGES, 2)
    do_full = make_barriers(STAGES, 1)
    do_empty = make_barriers(STAGES, 2)
    ds_full = make_barriers(2, 2)
    if ADDER:
        dq_full = make_barriers(2, 1)
        dq_empty = make_barriers(2, 1)
    else:
        dq_full, dq_empty = ds_full, ds_full  # not looked at
    fence_async_shared()
    tiles = (k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, number_s)
    bars = (k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, dq_full, dq_empty)
    wait_for_previous(EARLY)
    let_next(EARLY)
    counts = (heads, kv_heads, n_heads, group, len_q, len_k, left, right, n_tiles)
    strides = (stride_kh, stride_kn, stride_vh, stride_vn)
    if ADDER:
        gl.warp_specialize([
            (_consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, strides, tiles, bars, counts, scale, softcap, 0, PLAN)),
            (_consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, strides, tiles, bars, counts, scale, softcap, 1, PLAN)),
            (producer, (Q, K, V, DOut, Lse, Delta, Taken, Order, Lens, tiles, bars, counts, PLAN)),
            (adder, (DQ, Turns, Order, Lens, tiles, bars, counts, 0, PLAN)),
            (adder, (DQ, Turns, Order, Lens, tiles, bars, counts, 1, PLAN)),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, strides, tiles, bars, counts, scale, softcap, 0, PLAN)),
            (_consumer, (DK, DV, DQ, DKPtr, DVPtr, Order, Lens, strides, tiles, bars, counts, scale, softcap, 1, PLAN)),
            (producer, (Q, K, V, DOut, Lse, Delta, Taken, Order, Lens, tiles, bars, counts, PLAN)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip


# -- launchers ---------------------------------------------------------------------------------------------------------


class Launches(NamedTuple):
    """The launches of one backward and the sizes of what they share: what follows from shapes and options."""

    table: launch.Launch | None  # of the tiles of packed sequences
    before: launch.Launch
    main: Launch
    behind: launch.Launch
    lines: int  # numbers of that table
    blocks: int  # of queries, of all heads
    block_m: int


def _launches(
    x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, grads: tuple[torch.Tensor, ...], dlse: bool,
    ordered: bool,
) -> Launches:  # fmt: skip
    call = Call(x, o)
    dim = 64 if max(call.head_dim, call.head_dim_v) <= 64 else 128
    left, right, lens = call.left >= 0, call.right >= 0, x.kv_lens is not None
    config = CONFIGS[dim, left or right or lens or call.varlen]
    if ordered and config.tiles == "static":  # a program must not wait for one that may not have begun
        config = config._replace(tiles="one")
    m, n = config.block_m, BLOCK_N.value
    n_m = blocks_of_head(call, m)
    before, behind = ends(call, dim, m, out, dout, grads[0], DLSE=dlse, ORDERED=ordered,
                          PLAIN=call.varlen and x.sinks is not None)  # fmt: skip
    n_tiles = call.programs(call.len_k, n, kv=True)
    n_heads = call.batch if call.varlen else call.batch * call.kv_heads
    sharing = call.heads // max(call.kv_heads, 1)
    together = _L2_BYTES // (sharing * dim * 8)  # rows whose queries, dO and sum of dQ lie in L2
    least = 1
    if ordered:  # so many heads that those who wait for each other do not fill the GPU
        together = max(together, 3 * call.device.sms * m // sharing)
        least = max(1, _TOGETHER // sharing) if right else 1
    group = max(1, min(n_heads, max(together // call.len_q, least)))
    scalars = (
        *call.strides(grads[1])[1:], *call.strides(grads[2])[1:], call.heads, call.kv_heads, n_heads, group, call.len_q,
        call.len_k, call.left, call.right, n_tiles, call.scale, o.softcap,
    )  # fmt: skip
    columns = (call.head_dim, call.head_dim_v) if call.varlen else (dim, dim)  # TMA knows them otherwise
    main = Launch(
        _bwd_kernel, n_tiles if config.tiles == "one" else min(n_tiles, call.device.sms), scalars,
        {
            "D": dim, "HEAD_DIM": columns[0], "HEAD_DIM_V": columns[1], "SOFTCAP": o.softcap > 0, "LEFT": left,
            "RIGHT": right, "EVEN_N": call.even(call.len_k, n), "LENS": lens, "VARLEN": call.varlen,
            "ADDER": ordered or call.varlen, "ORDERED": ordered, "EARLY": True,
            "DYNAMIC": config.tiles == "dynamic", "BLOCK_M": m,
            "PARTS": config.parts, "STAGES": config.stages, "RESIDENT": config.resident, "LATE": config.late,
            "REGISTERS": config.registers, "num_warps": 4, "launch_pdl": True,
        },
        config.spill,
        {
            "Q": (m, dim), "K": (n, dim), "V": (n, dim), "DOut": (m, dim), "Lse": (m,), "Delta": (m,),
            "DK": (n // 2, dim), "DV": (n // 2, dim), "DQ": (32, 128),
        },
    )  # fmt: skip
    table = table_launch(call, n, together, least, True, m) if call.varlen else None
    blocks = n_m * call.heads * (1 if call.varlen else call.batch)
    return Launches(table, before, main, behind, table_size(call, n, True), blocks, m)


def _backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    ordered: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    dlse = None if dlse is None else dlse.contiguous()
    if any(s * 2 % 16 or s <= 0 for s in dout.stride()[:-1]) or dout.data_ptr() % 16:
        dout = dout.contiguous()  # for TMA
    grads = dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    plan = remembered(x, "bwd", lambda: _launches(x, o, out, dout, grads, dlse is not None, ordered))
    rows, delta = empty((2, plan.blocks * plan.block_m), lse).unbind()
    total = empty((plan.blocks * 64, 128), lse)
    taken = torch.empty(1, dtype=torch.int32, device=lse.device)
    turns = torch.empty(2 * plan.blocks, dtype=torch.int32, device=lse.device) if ordered else None
    order = plain = None
    if plan.table is not None:
        order = torch.empty(plan.lines, dtype=torch.int32, device=lse.device)
        plan.table(order, x.cu_seqlens_q, x.cu_seqlens_k)
    if x.sinks is not None:
        plain = empty_like(lse) if plan.table is not None else delta.view(*lse.shape[:2], -1)[..., : lse.shape[2]]
    plan.before(out, dout, lse, dlse, rows, delta, total, taken, turns, plain, x.cu_seqlens_q)
    plan.main(
        boxed(x.q), boxed(x.k), boxed(x.v), boxed(dout), rows, delta, boxed(dk), boxed(dv), total, dk, dv, order,
        x.kv_lens, taken, turns,
    )  # fmt: skip
    plan.behind(total, dq, x.cu_seqlens_q)
    return dq, dk, dv, None, None if plain is None else sink_grad(x, lse, plain)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, None for dbias (there is no bias), dsinks. dq is summed in an order that varies from run to run."""
    return _backward(x, o, out, lse, dout, dlse, False)


def backward_ordered(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """As `backward`, bit for bit the same on every run."""
    return _backward(x, o, out, lse, dout, dlse, True)
