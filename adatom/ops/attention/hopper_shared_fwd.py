"""Attention forward on Hopper (Gluon) to head_dim 32, where several (batch, head) share a full bias, as in triangle
attention.

Each of two consumers, of eight warps, owns the same 128 queries of a sharer of its own, so that a tile of the bias is
read once for two sharers, and one of keys and values for 128 queries. A producer warp brings them by TMA. To 512 keys
the bias of 128 queries stays in shared memory while a program goes from two sharers to the next two. At head_dim 32
there is more to do for exponentials than for products: with four warps for a scheduler, some exponentiate while others
wait for their products, without any order among them. Four consumers of four warps would have twice the code, which
short kernels wait for.

What is subtracted from all scores of a row is, in bfloat16, the largest bias of its first 64 keys, so that a bias is
ready before its products are; in float16, their largest score. So nothing need be scaled anew: P of 16 bits and float32
sums hold what is 2**15 (float16) or 2**100 (bfloat16) times larger. Where a sum says that they did not, or P V is not
finite, or a row saw nothing, its program does all of its tiles again with running maxima. Which of the two a row's
numbers come from does not vary from run to run.
"""

import torch

from adatom.ops.attention.hopper_shared_bias import DIM, widened
from adatom.ops.attention.hopper_sharers import BLOCK, HALF, several_of, sharer, sharing
from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles.hopper import (
    LN2,
    LOG2E,
    Launch,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    load_tile,
    make_barriers,
    make_tiles,
    named_sync,
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

SHARERS = gl.constexpr(2)  # that work beside each other
Q_STAGES = gl.constexpr(2)
ALL = gl.constexpr(8)  # named barrier of a program's consumers and its producer
STORED = gl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")  # what TMA stores is in memory
WARPS = gl.constexpr(8)  # of a consumer
FLAG = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_SPILL = 272  # Triton 3.6: to 104; 3.9: to 144


@gluon.jit
def _tile(t, counts, STAY: gl.constexpr):
    """(slice of the bias, first query, first sharer, pairs of sharers) of tile t: the queries of a range of sharers
    follow each other. Where no bias stays, a range is a pair."""
    heads, repeats, bias_heads, shared, ranges, len_q, len_k, n_tiles = counts
    n_m = (len_q + BLOCK - 1) // BLOCK
    group = t // n_m
    piece = group // ranges
    first = group - piece * ranges
    n = 1
    if STAY > 0:
        pairs = (shared + SHARERS - 1) // SHARERS
        share = (pairs + ranges - 1) // ranges
        first *= share
        n = gl.minimum(share, pairs - first)
    return piece, (t - group * n_m) * BLOCK, first * SHARERS, n


@gluon.jit
def _unfit(flags, N: gl.constexpr):
    """1 if a consumer of this program met a row whose first keys were no measure for the others. All warps meet here,
    N of them call."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [N], [0])
    gl.barrier()
    named_sync(ALL, 256 * SHARERS + 32)
    gl.barrier()
    some = flags.index(0).load(LAYOUT)
    for c in gl.static_range(1, SHARERS):
        some |= flags.index(c).load(LAYOUT)
    return gl.max(some, 0)


@gluon.jit
def _load_bias(Bias, several, piece, m0, n0, full, tile, counts):
    """Begin to copy the bias of BLOCK queries and keys."""
    bias_heads = counts[2]
    bias_b, bias_h = several
    load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, m0, n0, full, tile)


@gluon.jit
def _producer(Q, K, V, Bias, several, tiles, bars, counts, SHARED_HEADS: gl.constexpr, STAY: gl.constexpr,
              STAGES: gl.constexpr):
    """Keeps the rings full. Beyond the last sharer, the last one comes again."""
    q_s, k_s, v_s, bias_s, flags = tiles
    q_full, q_empty, full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, ranges, len_q, len_k, n_tiles = counts
    n = 0
    turn = 0
    walk = 0
    for again in range(2):
        if again > 0:
            n_tiles *= _unfit(flags, 1)
        for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
            piece, m0, first, pairs = _tile(t, counts, STAY)
            if STAY > 0:
                wait_empty(bias_empty, walk, 1)
                for m in gl.static_range(STAY):
                    _load_bias(Bias, several, piece, m0, m * BLOCK, bias_full.index(0), bias_s.index(m), counts)
            for pair in range(pairs):
                r = first + pair * SHARERS
                i_q = slot(turn, Q_STAGES)
                wait_empty(q_empty, turn, Q_STAGES)
                for c in gl.static_range(SHARERS):
                    b, h = sharer(gl.minimum(r + c, shared - 1), piece, counts, SHARED_HEADS)
                    load_tile(Q, b, h, m0, 0, q_full.index(i_q), q_s.index(i_q * SHARERS + c))
                for n0 in range(0, len_k, BLOCK):
                    i = slot(n, STAGES)
                    wait_empty(empty, n, STAGES)
                    for c in gl.static_range(SHARERS):
                        b, h = sharer(gl.minimum(r + c, shared - 1), piece, counts, SHARED_HEADS)
                        load_tile(K, b, h, n0, 0, full.index(i), k_s.index(i * SHARERS + c))
                        load_tile(V, b, h, n0, 0, full.index(i), v_s.index(i * SHARERS + c))
                    if STAY == 0:
                        _load_bias(Bias, several, piece, m0, n0, full.index(i), bias_s.index(i), counts)
                    n += 1
                turn += 1
            walk += 1


@gluon.jit
def _leave(q_empty, turn):
    """Leave the place of queries, when out has left it, to others."""
    tma.store_wait(0)
    gl.barrier()
    release(q_empty, turn, Q_STAGES)


@gluon.jit
def _sums(p):
    """By row, of what a thread holds."""
    return gl.sum(gl.sum(p.reshape([BLOCK, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _measure(s):
    """What may be subtracted from the scores of each row: the largest number of it."""
    m = gl.max(s, 1)
    return gl.where(gl.abs(m) < 1048576.0, m, 0.0)  # beyond, the product with log2(e) rounds too much; -inf: masked


@gluon.jit
def _approximately(TEXT: gl.constexpr, x):
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _write(Out, Lse, q, acc, l, m, r, row, piece, counts, SHARED_HEADS: gl.constexpr, O: gl.constexpr):
    """Divide by the sums and begin to write out, through the place of the queries, and lse. A row that saw nothing has
    the sum 0."""
    heads, _, _, shared, _, len_q, _, _ = counts
    parts = gl.where(l > 0.0, _approximately("rcp.approx.ftz.f32 $0, $1;", l), 0.0)
    q.store((acc * gl.convert_layout(parts, gl.SliceLayout(1, O))[:, None]).to(q.dtype))
    fence_async_shared()
    b, h = sharer(gl.minimum(r, shared - 1), piece, counts, SHARED_HEADS)
    store_tile(Out, b, h, row, 0, q)
    rows = row + gl.arange(0, BLOCK, l.type.layout)
    lse = m + _approximately("lg2.approx.ftz.f32 $0, $1;", l) * LN2
    gl.store(Lse + (b.to(gl.int64) * heads + h) * len_q + rows, lse, mask=rows < len_q)


@gluon.jit
def _consumer(Out, Lse, tiles, bars, counts, scale, C: gl.constexpr, SHARED_HEADS: gl.constexpr, EVEN_N: gl.constexpr,
              MOST: gl.constexpr, STAY: gl.constexpr, STAGES: gl.constexpr):
    """Computes BLOCK rows of out and lse of a sharer, tile after tile; once more with running maxima, if a row of the
    program wants it."""
    q_s, k_s, v_s, bias_s, flags = tiles
    q_full, q_empty, full, empty, bias_full, bias_empty = bars
    heads, repeats, bias_heads, shared, ranges, len_q, len_k, n_tiles = counts
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    zeros = gl.zeros([BLOCK, HALF], gl.float32, S)
    OF_SCORES: gl.constexpr = q_s.dtype == gl.float16
    LEAST: gl.constexpr = 0.5 if OF_SCORES else 1.0 / MOST
    unit = scale * LOG2E
    n = 0
    turn = 0
    walk = 0
    unfit = gl.full([BLOCK], 0, gl.int32, ROWS)
    for EXACT in gl.static_range(2):
        if EXACT:
            flags.index(C).store(gl.convert_layout(unfit, gl.BlockedLayout([1], [32], [WARPS], [0])))
            n_tiles *= _unfit(flags, WARPS)
            gl.inline_asm_elementwise(STORED, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
            piece, m0, first, pairs = _tile(t, counts, STAY)
            if STAY > 0:
                wait_full(bias_full, walk, 1)
                largest = _measure(widened(bias_s.index(0).slice(0, HALF, dim=1).load(S)))
            for pair in range(pairs):
                r = first + pair * SHARERS
                i_q = slot(turn, Q_STAGES)
                wait_full(q_full, turn, Q_STAGES)
                q = q_s.index(i_q * SHARERS + C)
                if EXACT or OF_SCORES:
                    m = gl.full([BLOCK], float("-inf") if EXACT else 0.0, gl.float32, ROWS)
                elif STAY > 0:
                    m = largest
                else:
                    wait_full(full, n, STAGES)
                    tile = bias_s.index(slot(n, STAGES))
                    m = _measure(widened(tile.slice(0, HALF, dim=1).load(S)))
                base = m * LOG2E
                l = _sums(zeros)
                acc = gl.zeros([BLOCK, DIM], gl.float32, O)
                for n0 in range(0, len_k, BLOCK):
                    i = slot(n, STAGES)
                    wait_full(full, n, STAGES)
                    tile = bias_s.index(n0 // BLOCK if STAY > 0 else i)
                    for part in gl.static_range(2):
                        k = k_s.index(i * SHARERS + C).slice(part * HALF, HALF, dim=0)
                        v = v_s.index(i * SHARERS + C).slice(part * HALF, HALF, dim=0)
                        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                        bias = widened(tile.slice(part * HALF, HALF, dim=1).load(S))
                        if not EXACT:
                            bias = bias * LOG2E
                            if not OF_SCORES:
                                bias -= base[:, None]
                        s, acc = warpgroup_mma_wait(0, deps=(s, acc))  # and P V of the part before
                        # a bias may be as large as -1e9: with running maxima, what is subtracted must be a score
                        s = s * (scale if EXACT else unit) + bias
                        if not EVEN_N:
                            if n0 + BLOCK > len_k:
                                columns = n0 + part * HALF + gl.arange(0, HALF, gl.SliceLayout(0, S))
                                s = gl.where(columns[None, :] < len_k, s, float("-inf"))
                        if EXACT:
                            m_new = gl.maximum(m, gl.max(s, 1))
                            base = gl.where(m_new == float("-inf"), 0.0, m_new)  # rows that have seen nothing yet
                            alpha = gl.exp2((m - base) * LOG2E)
                            m = m_new
                            factor = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
                            l = l * factor[:, None]
                            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
                            s = (s - base[:, None]) * LOG2E
                        elif OF_SCORES:
                            if part == 0:
                                if n0 == 0:
                                    base = _measure(s)
                                    m = base * LN2
                            s -= base[:, None]
                        p = gl.exp2(s)
                        l += _sums(p)
                        p16 = gl.convert_layout(p.to(v.dtype), OPERAND, assert_trivial=True)
                        acc = warpgroup_mma(p16, v, acc, is_async=True)
                    if STAY > 0:
                        if (n0 == 0) & (turn > 0):
                            _leave(q_empty, turn - 1)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    release(empty, n, STAGES)
                    n += 1
                if not EXACT and not OF_SCORES:  # P V of large values may be infinite where no sum is: then 0 * P V
                    l += gl.convert_layout(_sums(acc * 0.0), l.type.layout, assert_trivial=True)
                l = gl.convert_layout(gl.sum(l, 1), ROWS)
                if not EXACT:
                    unfit |= gl.where((l >= LEAST) & (l < MOST), 0, 1)
                _write(Out, Lse, q, acc, l, m, r + C, m0, piece, counts, SHARED_HEADS, O)
                if STAY == 0:
                    _leave(q_empty, turn)
                turn += 1
            if STAY > 0:
                release(bias_empty, walk, 1)
            walk += 1
    tma.store_wait(0)


_COUNTS = ["heads", "repeats", "bias_heads", "shared", "ranges", "len_q", "len_k", "n_tiles"]


@gluon.jit(do_not_specialize=_COUNTS)
def _fwd_kernel(Q, K, V, Bias, Out, Lse, bias_b, bias_h, heads, repeats, bias_heads, shared, ranges, len_q,
                len_k, n_tiles, scale, SHARED_HEADS: gl.constexpr, EVEN_N: gl.constexpr, MOST: gl.constexpr,
                STAY: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, REGISTERS: gl.constexpr):
    """out and lse of 128 queries of sharers, two at a time.

    Each slice of the bias serves `shared` (batch, head), of consecutive batch elements, `repeats` of them, in so many
    ranges; its number is multiplied by bias_b, that of its head by bias_h: 0 along expanded dimensions. STAY: so many
    tiles of 128 keys of the bias, all of them, stay in shared memory for a range.
    """
    q_s = make_tiles(Q, Q_STAGES * SHARERS)
    k_s = make_tiles(K, STAGES * SHARERS)
    v_s = make_tiles(V, STAGES * SHARERS)
    bias_s = make_tiles(Bias, STAY if STAY > 0 else STAGES)
    flags = gl.allocate_shared_memory(gl.int32, [SHARERS, BLOCK], FLAG)
    q_full = make_barriers(Q_STAGES, SHARERS)
    q_empty = make_barriers(Q_STAGES, SHARERS)
    full = make_barriers(STAGES, 2 * SHARERS + (0 if STAY > 0 else 1))
    empty = make_barriers(STAGES, SHARERS)
    bias_full = make_barriers(1, max(STAY, 1))
    bias_empty = make_barriers(1, SHARERS)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, v_s, bias_s, flags)
    bars = (q_full, q_empty, full, empty, bias_full, bias_empty)
    counts = (heads, repeats, bias_heads, shared, ranges, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (Out, Lse, tiles, bars, counts, scale, 0, SHARED_HEADS, EVEN_N, MOST, STAY, STAGES)),
        (_consumer, (Out, Lse, tiles, bars, counts, scale, 1, SHARED_HEADS, EVEN_N, MOST, STAY, STAGES)),
        (_producer, (Q, K, V, Bias, several, tiles, bars, counts, SHARED_HEADS, STAY, STAGES)),
    ], [WARPS, 1], [REGISTERS, 24])


def _buffers(call: Call) -> tuple[int, int]:
    """(tiles of a bias that stays in shared memory or 0, buffers of keys and values)."""
    kilobytes = call.device.shared_memory // 1024 - 2 * 16  # less queries; a tile of the bias has 32, of both sharers'
    stay = -(-call.len_k // BLOCK.value)  # keys and values too
    stages = min(4, kilobytes // 32 - stay)
    return (stay, stages) if stages >= 2 else (0, 3)


def _launch(x: Inputs, o: Options) -> Launch:
    call = Call(x, o)
    assert x.bias is not None
    n, dim = BLOCK.value, DIM.value
    slices, shared = sharing(call, x.bias)
    groups = -(-shared // SHARERS.value)
    tiles = -(-call.len_q // n) * slices
    stay, stages = _buffers(call)
    ranges = max(1, min(groups, call.device.sms // tiles)) if stay else groups
    n_tiles = tiles * ranges
    scalars = (
        *several_of(call), call.heads, call.repeats, x.bias.shape[1], shared, ranges, call.len_q, call.len_k, n_tiles,
        call.scale,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": x.bias.shape[1] < call.heads, "EVEN_N": call.even(call.len_k, n),
        "MOST": 2.0 ** (15 if x.q.dtype == torch.float16 else 100), "STAY": stay, "STAGES": stages, "EARLY": True,
        "REGISTERS": 112, "num_warps": WARPS.value, "launch_pdl": True,
    }  # fmt: skip
    blocks = {"Q": (n, dim), "K": (n, dim), "V": (n, dim), "Bias": (n, n), "Out": (n, dim)}
    programs = min(n_tiles, call.device.sms)
    return Launch(_fwd_kernel, programs, scalars, meta, _SPILL, blocks)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    remembered(x, "fwd", lambda: _launch(x, o))(x.q, x.k, x.v, x.bias, out, lse)
    return out, lse
