"""Attention backward on Hopper (Gluon) to head_dim 32, where many (batch, head) share a full bias whose gradient is
wanted, as in triangle attention.

    P = exp(S + bias - lse);  dS = P (dO V^T - delta);  dK = scale dS^T Q;  dV = P^T dO

This kernel gives dK and dV; that of hopper_shared_bias.py dQ and the gradient of the bias. Each of three consumer
warpgroups owns 64 keys of a sharer of its own, and all of them walk over the same tiles of the bias, so that a tile is
read once for three. S^T and dP^T are formed transposed: P^T and dS^T stay in registers, and consumers never meet. With
three warps for a scheduler, one exponentiates while others wait for their products.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_bwd_ends import ends
from adatom.ops.attention.hopper_shared_bias import DIM, sharer, sums_launch, widened
from adatom.ops.attention.hopper_shared_ends import ahead
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like
from adatom.ops.attention.triton_call import Call, remembered
from adatom.ops.attention.triton_sum import sum_of_parts
from adatom.tiles import launch
from adatom.tiles.hopper import (
    LOG2E,
    Launch,
    fence_async_shared,
    gl,
    gluon,
    lap,
    let_next,
    load_tile,
    load_tile_and_numbers,
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_M = gl.constexpr(128)  # queries of which lse and delta are a whole number
PART = gl.constexpr(64)  # queries of a buffer
KEYS = gl.constexpr(64)  # of a consumer
SHARERS = gl.constexpr(3)  # that work beside each other
_SPILL = 0


@gluon.jit
def _tile(t, counts):
    """(slice of the bias, first key, first and end of the sharers) of tile t: programs beside each other have the same
    sharers."""
    heads, repeats, bias_heads, shared, ranges, padded, len_q, len_k, n_tiles = counts
    n_n = (len_k + KEYS - 1) // KEYS
    group = t // n_n
    piece = group // ranges
    share = (shared + ranges - 1) // ranges
    first = (group - piece * ranges) * share
    return piece, (t - group * n_n) * KEYS, first, gl.minimum(first + share, shared)


@gluon.jit
def _producer(Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, counts, SHARED_HEADS: gl.constexpr,
              SLAB: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr):
    """Keeps the rings full. Beyond the last sharer, the last one comes again."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s = tiles
    full, empty, kv_full, kv_empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, ranges, padded, len_q, len_k, n_tiles = counts
    bias_b, bias_h = several
    n = 0
    turn = 0
    walk = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, n0, first, end = _tile(t, counts)
        b_bias = piece // bias_heads * bias_b
        h_bias = piece % bias_heads * bias_h
        if SLAB > 0:
            wait_empty(bias_empty, walk, 1)
            for m in gl.static_range(SLAB):
                load_tile(Bias, b_bias, h_bias, m * PART, n0, bias_full.index(0), bias_s.index(m))
        for r in range(first, end, SHARERS):
            i_kv = slot(turn, KV_STAGES) * SHARERS
            for m0 in range(0, len_q, PART):
                i = slot(n, STAGES)
                wait_empty(empty, n, STAGES)
                if SLAB == 0:
                    load_tile(Bias, b_bias, h_bias, m0, n0, full.index(i), bias_s.index(i))
                for c in gl.static_range(SHARERS):
                    b, h = sharer(gl.minimum(r + c, shared - 1), piece, counts, SHARED_HEADS)
                    row = (b * heads + h) * padded + m0
                    load_tile_and_numbers(Q, b, h, m0, Lse, row, full.index(i), q_s.index(i * SHARERS + c),
                                          lse_s.index(i * SHARERS + c))
                    load_tile_and_numbers(DOut, b, h, m0, Delta, row, full.index(i), do_s.index(i * SHARERS + c),
                                          delta_s.index(i * SHARERS + c))
                if m0 == 0:
                    for c in gl.static_range(SHARERS):
                        b, h = sharer(gl.minimum(r + c, shared - 1), piece, counts, SHARED_HEADS)
                        mbarrier.wait(kv_empty.index(i_kv + c), lap(turn, KV_STAGES) ^ 1)
                        load_tile(K, b, h, n0, 0, kv_full.index(i_kv + c), k_s.index(i_kv + c))
                        load_tile(V, b, h, n0, 0, kv_full.index(i_kv + c), v_s.index(i_kv + c))
                n += 1
            turn += 1
        walk += 1


@gluon.jit
def _scores(k, q_s, i):
    """Begin to multiply S^T of the queries in buffer i."""
    zeros = gl.zeros([KEYS, PART], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16]))
    return warpgroup_mma(k, q_s.index(i).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _consumer(DK, DV, tiles, bars, counts, scale, C: gl.constexpr, SHARED_HEADS: gl.constexpr, SLAB: gl.constexpr,
              STAGES: gl.constexpr, KV_STAGES: gl.constexpr):
    """dK and dV of 64 keys of a sharer, one sharer after the other. Comments at waits name the products under way, the
    eldest first."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s = tiles
    full, empty, kv_full, kv_empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, ranges, padded, len_q, len_k, n_tiles = counts
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    zeros = gl.zeros([KEYS, PART], gl.float32, S)
    unit = scale * LOG2E
    blocks = gl.maximum((len_q + PART - 1) // PART, 1)
    n = 0
    turn = 0
    walk = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, n0, first, end = _tile(t, counts)
        if SLAB > 0:
            wait_full(bias_full, walk, 1)
        for r in range(first, end, SHARERS):
            i_kv = slot(turn, KV_STAGES) * SHARERS + C
            mbarrier.wait(kv_full.index(i_kv), lap(turn, KV_STAGES))
            k = k_s.index(i_kv)
            v = v_s.index(i_kv)
            dk = gl.zeros([KEYS, DIM], gl.float32, GRAD)
            dv = gl.zeros([KEYS, DIM], gl.float32, GRAD)
            wait_full(full, n, STAGES)
            s = _scores(k, q_s, slot(n, STAGES) * SHARERS + C)
            s = warpgroup_mma_wait(0, deps=(s,))
            for m in range(blocks):
                i = slot(n, STAGES)
                q = q_s.index(i * SHARERS + C)
                do = do_s.index(i * SHARERS + C)
                dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                bias = bias_s.index(m if SLAB > 0 else i).permute((1, 0)).load(S)
                lse = lse_s.index(i * SHARERS + C).load(QUERIES)
                p = gl.exp2(s * unit + (widened(bias) * LOG2E - lse[None, :]))
                p16 = gl.convert_layout(p.to(do.dtype), OPERAND, assert_trivial=True)
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                delta = delta_s.index(i * SHARERS + C).load(QUERIES)
                dp = warpgroup_mma_wait(1, deps=(dp,))  # dP, dV
                ds = p * (dp - delta[None, :])
                ds16 = gl.convert_layout(ds.to(q.dtype), OPERAND, assert_trivial=True)
                dk = warpgroup_mma(ds16, q, dk, is_async=True)
                if m + 1 < blocks:
                    wait_full(full, n + 1, STAGES)
                s = _scores(k, q_s, slot(n + 1, STAGES) * SHARERS + C)  # behind the last, of whatever lies there
                s, dv, dk = warpgroup_mma_wait(0, deps=(s, dv, dk))
                release(empty, n, STAGES)
                n += 1
            k.store((dk * scale).to(DK.dtype))
            v.store(dv.to(DV.dtype))
            fence_async_shared()
            b, h = sharer(gl.minimum(r + C, shared - 1), piece, counts, SHARED_HEADS)
            store_tile(DK, b, h, n0, 0, k)
            store_tile(DV, b, h, n0, 0, v)
            tma.store_wait(0)
            gl.barrier()
            mbarrier.arrive(kv_empty.index(i_kv), count=1)
            turn += 1
        if SLAB > 0:
            release(bias_empty, walk, 1)
        walk += 1


_COUNTS = ["heads", "repeats", "bias_heads", "shared", "ranges", "padded", "len_q", "len_k", "n_tiles"]


@gluon.jit(do_not_specialize=_COUNTS)
def _keys_kernel(Q, K, V, DOut, Lse, Delta, Bias, DK, DV, bias_b, bias_h, heads, repeats, bias_heads, shared, ranges,
                 padded, len_q, len_k, n_tiles, scale, SHARED_HEADS: gl.constexpr, SLAB: gl.constexpr,
                 STAGES: gl.constexpr, KV_STAGES: gl.constexpr, EARLY: gl.constexpr, REGISTERS: gl.constexpr):
    """dK and dV of 64 keys of sharers, three at a time.

    Lse (in log2 units), Delta: float32, `padded` numbers for each (batch, head). Each slice of the bias serves `shared`
    (batch, head), of consecutive batch elements, `repeats` of them, in so many ranges; its number is multiplied by
    bias_b, that of its head by bias_h: 0 along expanded dimensions. SLAB: so many tiles of 64 queries of the bias, all
    of them, stay in shared memory.
    """
    q_s = make_tiles(Q, STAGES * SHARERS)
    k_s = make_tiles(K, KV_STAGES * SHARERS)
    do_s = make_tiles(DOut, STAGES * SHARERS)
    v_s = make_tiles(V, KV_STAGES * SHARERS)
    bias_s = make_tiles(Bias, max(SLAB, STAGES) if SLAB == 0 else SLAB)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES * SHARERS, PART], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES * SHARERS, PART], Delta.layout)
    full = make_barriers(STAGES, 2 * SHARERS + (1 if SLAB == 0 else 0))
    empty = make_barriers(STAGES, SHARERS)
    kv_full = make_barriers(KV_STAGES * SHARERS, 2)
    kv_empty = make_barriers(KV_STAGES * SHARERS, 1)
    bias_full = make_barriers(1, max(SLAB, 1))
    bias_empty = make_barriers(1, SHARERS)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s)
    bars = (full, empty, kv_full, kv_empty, bias_full, bias_empty)
    counts = (heads, repeats, bias_heads, shared, ranges, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (DK, DV, tiles, bars, counts, scale, 0, SHARED_HEADS, SLAB, STAGES, KV_STAGES)),
        (_consumer, (DK, DV, tiles, bars, counts, scale, 1, SHARED_HEADS, SLAB, STAGES, KV_STAGES)),
        (_consumer, (DK, DV, tiles, bars, counts, scale, 2, SHARED_HEADS, SLAB, STAGES, KV_STAGES)),
        (_producer, (Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, counts, SHARED_HEADS, SLAB, STAGES,
                     KV_STAGES)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


# -- launchers ---------------------------------------------------------------------------------------------------------


class Launches(NamedTuple):
    """The launches of one backward, and the sizes of what they share."""

    before: launch.Launch
    keys: Launch
    sums: Launch
    behind: launch.Launch
    blocks: int  # of 128 queries, of all heads


def _buffers(call: Call) -> tuple[int, int, int]:
    """(tiles of a bias that stays in shared memory or 0, buffers of queries, of keys)."""
    free, tile = call.device.shared_memory - 1024, PART.value * KEYS.value * 2
    of_queries, of_keys = SHARERS.value * (2 * PART.value * DIM.value * 2 + 2 * PART.value * 4), SHARERS.value * 2 * 4096
    slab = -(-call.len_q // PART.value)
    for stages, kv_stages in ((4, 2), (3, 2), (2, 2), (2, 1)):
        if slab * tile + stages * of_queries + kv_stages * of_keys <= free:
            return slab, stages, kv_stages
    return 0, 4, 2


def _launches(
    x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor, dlse: bool
) -> Launches:  # fmt: skip
    call = Call(x, o)
    assert x.bias is not None
    m, n, dim = BLOCK_M.value, KEYS.value, DIM.value
    n_m = -(-call.len_q // m)
    before = ahead(call, dim, m, out, dout, dlse)
    _, behind = ends(call, dim, m, out, dout, dq)
    slices = x.bias.shape[0] * x.bias.shape[1]
    shared = call.batch * call.heads // slices
    tiles = -(-call.len_k // n) * slices
    ranges = max(1, min(-(-shared // SHARERS.value), call.device.sms // tiles))
    slab, stages, kv_stages = _buffers(call)
    scalars = (
        *(int(stride > 0) for stride in call.bias_strides[:2]), call.heads, call.repeats, x.bias.shape[1], shared,
        ranges, n_m * m, call.len_q, call.len_k, tiles * ranges, call.scale,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": x.bias.shape[1] < call.heads, "SLAB": slab, "STAGES": stages, "KV_STAGES": kv_stages,
        "EARLY": True, "REGISTERS": 160, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    part = PART.value
    blocks = {
        "Q": (part, dim), "K": (n, dim), "V": (n, dim), "DOut": (part, dim), "Lse": (part,), "Delta": (part,),
        "Bias": (part, n), "DK": (n, dim), "DV": (n, dim),
    }  # fmt: skip
    keys = Launch(_keys_kernel, min(tiles * ranges, call.device.sms), scalars, meta, _SPILL, blocks)
    n_blocks = n_m * call.heads * call.batch
    return Launches(before, keys, sums_launch(call, x.bias, n_m * m), behind, n_blocks)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbias, None. dq is summed in an order that varies from run to run."""
    bias = x.bias
    assert bias is not None and wanted
    dlse = None if dlse is None else dlse.contiguous()
    if any(s * 2 % 16 or s <= 0 for s in dout.stride()[:-1]) or dout.data_ptr() % 16:
        dout = dout.contiguous()  # for TMA
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    plan = remembered(x, "bwd", lambda: _launches(x, o, out, dout, dq, dlse is not None))
    rows, delta = empty((2, plan.blocks * BLOCK_M.value), lse).unbind()
    total = empty((plan.blocks * BLOCK_M.value * DIM.value // 128, 128), lse)
    plan.before(out, dout, lse, dlse, rows, delta, total)
    dbias = sum_of_parts(plan.sums, bias, x.q, x.k, x.v, bias, dout, rows, delta, total)
    plan.keys(x.q, x.k, x.v, dout, rows, delta, bias, dk, dv)
    plan.behind(total, dq, x.cu_seqlens_q)
    return dq, dk, dv, dbias, None
