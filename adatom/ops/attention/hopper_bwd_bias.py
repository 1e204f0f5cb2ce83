"""The gradient of a full bias on Hopper (Gluon), summed over the (batch, head) that share its slices.

    dbias = sum P (dO V^T - delta);  P = exp(S + bias - lse)

A tile of 128 queries and 128 keys has one owner, each of two consumer warpgroups half of its queries; the sum stays in
registers while a producer warp brings q, k, dO and v of one (batch, head) after the other. Two of the backward's five
products are repeated, but nothing is added in memory, so the bits do not vary. Tiles leave by the buffer that their
bias came in. Where tiles are too few for the GPU, several programs share the sum, and their parts are added afterwards.
"""

from dataclasses import dataclass

import torch
from triton.language.core import PropagateNan

from adatom.ops.attention.hopper_sharers import BLOCK, HALF, several_of, shares_of_sum, sharing
from adatom.ops.attention.problem import Inputs, Options
from adatom.ops.attention.triton_call import NO_SPECIALIZE, Call, remembered
from adatom.ops.attention.triton_sum import sum_of_parts
from adatom.tiles.hopper import (
    LOG2E,
    Launch,
    fence_async_shared,
    gl,
    gluon,
    keys_of,
    keys_of_query,
    keys_seen,
    keys_shared,
    let_next,
    load_tile,
    load_tile_and_numbers,
    make_barriers,
    make_tiles,
    planner,
    release,
    slot,
    store_tile,
    tanh_of_scores,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEEP_NAN = gl.constexpr(PropagateNan.ALL)
# (head_dim in memory, whether the bias is kept in float32): buffers of q, k, dO and v
CONFIGS = {(32, False): 4, (32, True): 3, (64, False): 2, (64, True): 2, (128, False): 1}
_MANY = 16  # sharers of a slice, for each of which its bias need not be widened again
_SPILL = 640  # under a mask, at head_dim 128


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for."""

    SHARED_HEADS: bool  # all heads share a slice
    SOFTCAP: bool
    LEFT: bool  # windows
    RIGHT: bool
    EVEN_N: bool  # all blocks of keys are whole
    LENS: bool
    STAGED: bool  # tiles leave by TMA
    WIDE: bool  # the bias, which many share, waits in float32 and in log2 units
    STAGES: int
    BIAS_STAGES: int


_plan = planner(Plan)


@gluon.jit
def _tile(t, counts, PLAN: gl.constexpr):
    """(slice of the bias, part, first query, first key, first and end of the sharers) of tile t."""
    heads, kv_heads, repeats, bias_heads, slices, parts, padded, len_q, len_k, left, right, _ = counts
    n_m = (len_q + BLOCK - 1) // BLOCK
    n_n = (len_k + BLOCK - 1) // BLOCK
    m0 = t // n_n % n_m * BLOCK
    n0 = t % n_n * BLOCK
    piece = t // (n_m * n_n)
    part = piece // slices
    shared = repeats * (heads // bias_heads)
    share = (shared + parts - 1) // parts
    first = part * share
    end = gl.minimum(first + share, shared)
    if (PLAN.LEFT or PLAN.RIGHT) and not PLAN.LENS:  # nobody sees a tile outside the window
        begin_k, end_k = keys_seen(m0, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, BLOCK, BLOCK)
        end = gl.where((n0 >= begin_k) & (n0 < end_k), end, first)
    return piece - part * slices, part, m0, n0, first, end


@gluon.jit
def _sharer(r, piece, counts, PLAN: gl.constexpr):
    """(batch, head) number r of those that share a slice of the bias."""
    heads, kv_heads, repeats, bias_heads, slices, parts, padded, len_q, len_k, left, right, _ = counts
    if PLAN.SHARED_HEADS:
        return piece * repeats + r // heads, r % heads
    else:
        return piece // bias_heads * repeats + r, piece % bias_heads


@gluon.jit
def _producer(Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, counts, PLAN: gl.constexpr):
    """Keeps the rings full."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, _ = tiles
    full, empty, bias_full, bias_empty = bars
    heads, kv_heads, repeats, bias_heads, slices, parts, padded, len_q, len_k, left, right, n_tiles = counts
    bias_b, bias_h = several
    STAGES: gl.constexpr = PLAN.STAGES
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, _part, m0, n0, first, end = _tile(t, counts, PLAN)
        i_bias = slot(turn, PLAN.BIAS_STAGES)
        wait_empty(bias_empty, turn, PLAN.BIAS_STAGES)
        for c in gl.static_range(2):
            load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, m0 + c * HALF, n0,
                      bias_full.index(i_bias), bias_s.index(i_bias * 2 + c))
        for r in range(first, end):
            b, h = _sharer(r, piece, counts, PLAN)
            hk = h // (heads // kv_heads)
            row = (b * heads + h) * padded + m0
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_tile_and_numbers(Q, b, h, m0, Lse, row, full.index(i), q_s.index(i), lse_s.index(i))
            load_tile(K, b, hk, n0, 0, full.index(i), k_s.index(i))
            load_tile_and_numbers(DOut, b, h, m0, Delta, row, full.index(i), do_s.index(i), delta_s.index(i))
            load_tile(V, b, hk, n0, 0, full.index(i), v_s.index(i))
            n += 1
        turn += 1


@gluon.jit
def _products(n, tiles, H: gl.constexpr, C: gl.constexpr, PLAN: gl.constexpr):
    """Begin to multiply S and dP, [HALF, HALF], of this consumer's queries and half H of the keys, in use n."""
    q_s, k_s, do_s, v_s, _, _, _, _ = tiles
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    i = slot(n, PLAN.STAGES)
    zeros = gl.zeros([HALF, HALF], gl.float32, S)
    k = k_s.index(i).slice(H * HALF, HALF, dim=0).permute((1, 0))
    v = v_s.index(i).slice(H * HALF, HALF, dim=0).permute((1, 0))
    s = warpgroup_mma(q_s.index(i).slice(C * HALF, HALF, dim=0), k, zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(do_s.index(i).slice(C * HALF, HALF, dim=0), v, zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _log2_units(x):
    """x / ln 2, rounded: never part of a fused multiply-add."""
    asm: gl.constexpr = "mul.rn.f32 $0, $1, 0f3FB8AA3B;"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _keep_wide(tile, wide_s, H: gl.constexpr, C: gl.constexpr):
    """Write a consumer's bias of half H of the keys, in float32 and in log2 units: as [32, 128], where a thread holds
    16 bytes in a row and a warp 512, so that nothing moves between threads."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    x = _log2_units(tile.slice(H * HALF, HALF, dim=1).load(S).to(gl.float32))
    wide_s.index(C * 2 + H).store(x.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([32, 128]))


@gluon.jit
def _bias_of(tile, wide_s, H: gl.constexpr, C: gl.constexpr, PLAN: gl.constexpr):
    """A consumer's bias of half H of the keys, [HALF, HALF], in float32 and in log2 units."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    if PLAN.WIDE:
        like = gl.zeros([HALF, HALF], gl.float32, S)
        like = like.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([32, 128])
        x = wide_s.index(C * 2 + H).load(like.type.layout)
        x = x.reshape([4, 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([HALF, HALF])
        return gl.convert_layout(x, S, assert_trivial=True)
    else:
        return _log2_units(tile.slice(H * HALF, HALF, dim=1).load(S).to(gl.float32))


@gluon.jit
def _summand(s, dp, lse, delta, bias, m0, n0, len_q, len_k, left, right, scale, softcap, PLAN: gl.constexpr):
    """dS of the queries m0.. and keys n0.. from both products, lse and their bias, both in log2 units. They are rounded
    alike, so that the difference of two that are as large as -1e9 is what it was before."""
    S: gl.constexpr = s.type.layout
    if PLAN.SOFTCAP:
        s = tanh_of_scores(s * (scale / softcap)) * (softcap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    s = s + (bias - lse[:, None])
    columns = n0 + gl.arange(0, HALF, gl.SliceLayout(0, S))
    begin, end = keys_shared(m0, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, HALF)
    cut = (n0 < begin) | (n0 + HALF > end)
    if PLAN.LEFT or PLAN.RIGHT or not PLAN.EVEN_N:
        if cut:
            rows = m0 + gl.arange(0, HALF, gl.SliceLayout(1, S))
            since, until = keys_of_query(rows, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT)
            seen = columns[None, :] <= until[:, None]
            if PLAN.LEFT:
                seen &= columns[None, :] >= since[:, None]
            s = gl.where(seen, s, float("-inf"))
    p = gl.exp2(gl.minimum(s, 0.0, propagate_nan=KEEP_NAN))  # a bias of -1e9: lse is rounded by more than 1
    ds = p * (dp - delta[:, None])
    if PLAN.LENS:  # values beyond may be NaN
        if cut:
            ds = gl.where(columns[None, :] < len_k, ds, 0.0)
    return ds


@gluon.jit
def _consumer(DBias, Lens, tiles, bars, counts, scale, softcap, C: gl.constexpr, PLAN: gl.constexpr):
    """Sums HALF rows of every tile. While one half of its columns is worked on, the products of the other, of this
    (batch, head) or the next, are made."""
    _, _, _, _, lse_s, delta_s, bias_s, wide_s = tiles
    full, empty, bias_full, bias_empty = bars
    heads, kv_heads, repeats, bias_heads, slices, parts, padded, len_q, most_k, left, right, n_tiles = counts
    STAGES: gl.constexpr = PLAN.STAGES
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, part, m0, n0, first, end = _tile(t, counts, PLAN)
        m0 += C * HALF
        tile = bias_s.index(slot(turn, PLAN.BIAS_STAGES) * 2 + C)
        wait_full(bias_full, turn, PLAN.BIAS_STAGES)
        if PLAN.WIDE:
            _keep_wide(tile, wide_s, 0, C)
            _keep_wide(tile, wide_s, 1, C)
        low = gl.zeros([HALF, HALF], gl.float32, S)
        high = gl.zeros([HALF, HALF], gl.float32, S)
        if first < end:
            wait_full(full, n, STAGES)
        s, dp = _products(n, tiles, 0, C, PLAN)  # of nothing, if nobody shares the tile
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        for r in range(first, end):
            s_high, dp_high = _products(n, tiles, 1, C, PLAN)
            i = slot(n, STAGES)
            lse = _log2_units(lse_s.index(i).slice(C * HALF, HALF).load(ROWS))
            delta = delta_s.index(i).slice(C * HALF, HALF).load(ROWS)
            len_k = most_k
            if PLAN.LENS:
                b, h = _sharer(r, piece, counts, PLAN)
                len_k = keys_of(Lens, b, most_k, PLAN.LENS)
            low += _summand(s, dp, lse, delta, _bias_of(tile, wide_s, 0, C, PLAN), m0, n0, len_q, len_k, left, right,
                            scale, softcap, PLAN)
            s_high, dp_high = warpgroup_mma_wait(0, deps=(s_high, dp_high))
            release(empty, n, STAGES)
            n += 1
            if r + 1 < end:
                wait_full(full, n, STAGES)
            s, dp = _products(n, tiles, 0, C, PLAN)  # behind the last, of whatever lies there
            high += _summand(s_high, dp_high, lse, delta, _bias_of(tile, wide_s, 1, C, PLAN), m0, n0 + HALF, len_q,
                             len_k, left, right, scale, softcap, PLAN)
            s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        if PLAN.STAGED:
            tile.slice(0, HALF, dim=1).store(low.to(tile.dtype))
            tile.slice(HALF, HALF, dim=1).store(high.to(tile.dtype))
            fence_async_shared()
            store_tile(DBias, piece // bias_heads, piece % bias_heads, m0, n0, tile)
            tma.store_wait(0)
            gl.barrier()
        else:
            X = DBias + (part * slices + piece).to(gl.int64) * len_q * most_k
            rows = m0 + gl.arange(0, HALF, ROWS)[:, None]
            columns = n0 + gl.arange(0, HALF, gl.SliceLayout(0, S))[None, :]
            at = rows.to(gl.int64) * most_k + columns
            gl.store(X + at, low.to(DBias.dtype.element_ty), mask=(rows < len_q) & (columns < most_k))
            columns += HALF
            gl.store(X + at + HALF, high.to(DBias.dtype.element_ty), mask=(rows < len_q) & (columns < most_k))
        release(bias_empty, turn, PLAN.BIAS_STAGES)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NO_SPECIALIZE, "bias_heads", "slices", "parts", "padded", "n_tiles"])
def _sum_kernel(Q, K, V, Bias, Lens, DOut, Lse, Delta, DBias, bias_b, bias_h,
                heads, kv_heads, repeats, bias_heads, slices, parts, padded, len_q, len_k, left, right, n_tiles, scale,
                softcap, SHARED_HEADS: gl.constexpr, SOFTCAP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
                EVEN_N: gl.constexpr, LENS: gl.constexpr, STAGED: gl.constexpr, WIDE: gl.constexpr, EARLY: gl.constexpr,
                STAGES: gl.constexpr, BIAS_STAGES: gl.constexpr):
    """Tiles of dbias (parts, slices of the bias, len_q, len_k).

    Lse, Delta: float32, one number for each query, `padded` of them for each (batch, head). repeats: consecutive batch
    elements share a slice, whose number is multiplied by bias_b, that of its head by bias_h: 0 along expanded ones.
    """
    PLAN: gl.constexpr = _plan(SHARED_HEADS, SOFTCAP, LEFT, RIGHT, EVEN_N, LENS, STAGED, WIDE, STAGES, BIAS_STAGES)
    q_s = make_tiles(Q, STAGES)
    k_s = make_tiles(K, STAGES)
    do_s = make_tiles(DOut, STAGES)
    v_s = make_tiles(V, STAGES)
    bias_s = make_tiles(Bias, BIAS_STAGES * 2)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], Delta.layout)
    full = make_barriers(STAGES, 4)
    empty = make_barriers(STAGES, 2)
    bias_full = make_barriers(BIAS_STAGES, 2)
    bias_empty = make_barriers(BIAS_STAGES, 2)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    wide_s = bias_s  # not looked at
    if WIDE:
        wide_s = gl.allocate_shared_memory(gl.float32, [4, HALF // 2, 128], gl.NVMMASharedLayout(0, 32, rank=2))
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, wide_s)
    bars = (full, empty, bias_full, bias_empty)
    counts = (heads, kv_heads, repeats, bias_heads, slices, parts, padded, len_q, len_k, left, right, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (DBias, Lens, tiles, bars, counts, scale, softcap, 0, PLAN)),
        (_consumer, (DBias, Lens, tiles, bars, counts, scale, softcap, 1, PLAN)),
        (_producer, (Q, K, V, DOut, Lse, Delta, Bias, several, tiles, bars, counts, PLAN)),
    ], [4, 1], [240, 24])  # fmt: skip


def _launch(x: Inputs, o: Options, bias: torch.Tensor, padded: int) -> Launch:
    call = Call(x, o)
    dim = next(d for d in (32, 64, 128) if max(call.head_dim, call.head_dim_v) <= d)
    n = BLOCK.value
    slices, shared = sharing(call, bias)
    tiles, parts = shares_of_sum(call, bias, call.device.sms)
    narrow = bias.element_size() == 2
    wide = narrow and (dim, True) in CONFIGS and shared // parts >= _MANY
    staged = parts == 1 and call.len_k * bias.element_size() % 16 == 0
    scalars = (
        *several_of(call), call.heads, call.kv_heads, call.repeats, bias.shape[1], slices, parts, padded, call.len_q,
        call.len_k, call.left, call.right, tiles * parts, call.scale, o.softcap,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": bias.shape[1] < call.heads, "SOFTCAP": o.softcap > 0, "LEFT": call.left >= 0,
        "RIGHT": call.right >= 0, "EVEN_N": call.even(call.len_k, n), "LENS": x.kv_lens is not None, "STAGED": staged,
        "WIDE": wide, "EARLY": True, "STAGES": CONFIGS[dim, wide], "BIAS_STAGES": 2 if narrow and not wide else 1,
        "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    blocks = {
        "Q": (n, dim), "K": (n, dim), "V": (n, dim), "DOut": (n, dim), "Lse": (n,), "Delta": (n,),
        "Bias": (n // 2, n),
    }  # fmt: skip
    if staged:
        blocks["DBias"] = (n // 2, n)
    return Launch(_sum_kernel, min(tiles * parts, call.device.sms), scalars, meta, _SPILL, blocks, parts)


def bias_pass(
    x: Inputs, o: Options, lse: torch.Tensor, delta: torch.Tensor, dout: torch.Tensor, padded: int
) -> torch.Tensor:
    """The gradient of a full float bias, as the bias. lse (natural) and delta: float32, `padded` numbers, a multiple of
    4, for each (batch, head)."""
    bias = x.bias
    assert bias is not None
    launch = remembered(x, "bwd_bias", lambda: _launch(x, o, bias, padded))
    return sum_of_parts(launch, bias, x.q, x.k, x.v, bias, x.kv_lens, dout, lse, delta)
