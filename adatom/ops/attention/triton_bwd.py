"""Attention backward in Triton, sm_80 and up.

    P = exp(S - lse);  dP = dO V^T;  dS = P (dP - delta);  delta = rowsum(dO O) - dlse
    dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO;  dbias = reduce(dS);  dsinks = -sum exp(sink - lse) delta

One kernel over query blocks (dQ, delta), one over key blocks (dK, dV), and, where one bias slice serves several (batch,
head), one over bias tiles: each sum has one owner, so nothing varies from run to run. Computing every tile once and
adding dQ by atomics was slower on an H100 (docs/tuning.md). Source: Dao, arXiv:2307.08691; docs/double_backward.md.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty_like
from adatom.ops.attention.triton_call import (
    LOW_TILES,
    NO_SPECIALIZE,
    Blocks,
    Call,
    Config,
    Configs,
    bias_grad,
    bias_tiles,
    column_sums,
    pick,
    plain,
    query_bias_grad,
    reduce_to,
    remembered,
    sink_grad,
)
from adatom.ops.attention.triton_sum import sum_of_parts
from adatom.tiles.launch import Launch
from adatom.tiles.triton import (
    FULL,
    KEY,
    NONE,
    QUERY,
    add,
    after_previous,
    at,
    dot,
    keys_of,
    load_bias,
    load_bias_block,
    load_lse,
    load_row,
    load_tile,
    locate,
    probabilities,
    queries_of,
    row_at,
    row_of_scores,
    sharer,
    store_scores,
    store_tile,
)

# (kind of arithmetic, largest head_dim) -> tile, for each family of architectures; found by `adatom bench --tune`.
Q_CONFIGS: Configs = {
    90: {
        ("half bias", 32): Config(64, 32, 4, 3),
        ("half", 64): Config(64, 64, 4, 3, tma=True),
        ("half wide bias", 128): Config(128, 64, 8, 2, tma=True),
        ("half", 128): Config(128, 64, 8, 3, tma=True),
        ("half", 256): Config(128, 64, 8, 1, tma=True, spill=640),
        ("tf32", 64): Config(64, 64, 4, 2, tma=True, spill=4096),
        ("tf32", 128): Config(128, 64, 8, 1, spill=8192),
        ("tf32", 256): Config(128, 32, 8, 1, spill=32768),
        ("tf32x3", 64): Config(64, 64, 4, 2, tma=True, spill=4096),
        ("tf32x3", 128): Config(128, 64, 8, 2, tma=True, spill=8192),
        ("tf32x3", 256): Config(64, 32, 4, 1, spill=32768),
        ("ieee", 64): Config(32, 32, 8, 1),
        ("ieee", 128): Config(16, 32, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 16, 8, 1, spill=32768),
    },
}
Q_CONFIGS[80] = plain(Q_CONFIGS[90]) | {
    ("tf32", 128): Config(64, 32, 8, 1, spill=2048),
    ("tf32", 256): Config(32, 32, 8, 1, spill=32768),
    ("tf32x3", 128): Config(64, 32, 4, 1, spill=2048),
    ("tf32x3", 256): Config(16, 16, 4, 1, spill=32768),
    ("tf32", 64): Config(64, 32, 4, 1),
    ("tf32x3", 64): Config(32, 32, 4, 1),
    ("half", 64): Config(64, 64, 4, 2),
    ("half", 128): Config(64, 32, 8, 2),
    ("half", 256): Config(32, 32, 8, 1),
}
Q_CONFIGS[86] = Q_CONFIGS[80]
Q_CONFIGS[100] = Q_CONFIGS[90] | LOW_TILES

KV_CONFIGS: Configs = {
    90: {
        ("half bias", 32): Config(64, 64, 4, 3, tma=True),
        ("half packed", 64): Config(32, 64, 4, 2),
        ("half", 64): Config(64, 64, 4, 3, tma=True),
        ("half", 128): Config(64, 64, 4, 2, tma=True, spill=1024),
        ("half", 256): Config(64, 64, 8, 2, tma=True, spill=640),
        ("tf32", 64): Config(64, 64, 4, 1, spill=4096),
        ("tf32", 128): Config(64, 128, 8, 1, spill=8192),
        ("tf32", 256): Config(32, 32, 8, 1, spill=32768),
        ("tf32x3", 64): Config(64, 64, 4, 2, tma=True, spill=4096),
        ("tf32x3", 128): Config(64, 128, 8, 1, spill=8192),
        ("tf32x3", 256): Config(32, 32, 8, 1, spill=32768),
        ("ieee", 64): Config(32, 32, 8, 1),
        ("ieee", 128): Config(16, 32, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 16, 8, 1, spill=32768),
    },
}
KV_CONFIGS[80] = plain(KV_CONFIGS[90]) | {
    ("tf32", 128): Config(32, 64, 8, 1, spill=2048),
    ("tf32", 256): Config(16, 32, 8, 1, spill=32768),
    ("tf32x3", 128): Config(32, 64, 8, 1, spill=2048),
    ("tf32x3", 256): Config(16, 16, 4, 1, spill=32768),
    ("tf32", 64): Config(32, 32, 4, 1),
    ("tf32x3", 64): Config(16, 32, 4, 1),
    ("half", 64): Config(32, 128, 8, 2),
    ("half", 128): Config(32, 64, 4, 2),
    ("half", 256): Config(16, 64, 8, 1),
}
KV_CONFIGS[86] = KV_CONFIGS[80] | {("tf32x3", 128): Config(16, 32, 4, 1, spill=8192)}
KV_CONFIGS[100] = KV_CONFIGS[90] | LOW_TILES | {
    ("half", 256): Config(32, 64, 8, 1, tma=True),
    ("half", 64): Config(64, 64, 8, 3, tma=True),
    ("half", 128): Config(64, 64, 8, 2, tma=True),
    ("half packed", 64): Config(32, 64, 4, 1),
}

BIAS_CONFIGS: Configs = {
    90: {
        ("half", 32): Config(64, 64, 4, 3, tma=True),
        ("half", 64): Config(64, 64, 4, 2, tma=True),
        ("half", 128): Config(64, 64, 4, 2),
        ("half", 256): Config(64, 32, 8, 1),
        ("tf32", 64): Config(64, 32, 4, 1),
        ("tf32", 128): Config(64, 32, 8, 1, spill=2048),
        ("tf32", 256): Config(32, 32, 8, 1, spill=32768),
        ("tf32x3", 64): Config(64, 32, 4, 1),
        ("tf32x3", 128): Config(32, 32, 4, 1, spill=2048),
        ("tf32x3", 256): Config(32, 16, 8, 1, spill=32768),
        ("ieee", 64): Config(32, 32, 8, 1),
        ("ieee", 128): Config(32, 32, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 16, 8, 1, spill=32768),
    },
}
BIAS_CONFIGS[80] = plain(BIAS_CONFIGS[90]) | {("half", 64): Config(64, 64, 8, 2)}
BIAS_CONFIGS[100] = BIAS_CONFIGS[90] | LOW_TILES
BIAS_CONFIGS[86] = BIAS_CONFIGS[80] | {("half", 128): Config(32, 32, 4, 2), ("half", 256): Config(32, 32, 8, 1)}


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def _q_kernel(Q, K, V, Bias, Lens, CuQ, CuK, Out, Lse, DOut, DLse, Delta, Lse2, DQ, DBias,
              stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
              stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, stride_dqb, stride_dqh, stride_dqm,
              stride_bb, stride_bh, stride_bm, stride_bn,
              heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right, scale, softcap,
              HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
              BIAS: tl.constexpr, DBIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              LENS: tl.constexpr, VARLEN: tl.constexpr, ALIGNED: tl.constexpr, DLSE: tl.constexpr, EVEN_M: tl.constexpr,
              EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, BIAS_TMA: tl.constexpr,
              EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dQ, delta and lse as `load_lse` gives it of a block of queries; also its tiles of an unshared dbias."""
    after_previous(EARLY)
    row_length = len_q
    keys = row_of_scores(len_k, ALIGNED)
    b, h, block, start_q, start_k, len_q, len_k = locate(tl.program_id(0), CuQ, CuQ, CuK, Lens, heads, n_heads, group,
                                                         len_q, len_q, len_k, LENS, VARLEN, True, BLOCK_M)
    if VARLEN:
        if block * BLOCK_M >= len_q:
            return
    hk = h // (heads // kv_heads)
    row = row_at(b, h, heads, start_q, row_length, VARLEN)
    Lse += row
    Delta += row
    DQ += at(b, h, start_q, stride_dqb, stride_dqh, stride_dqm, PIECE)
    Out += at(b, h, start_q, stride_ob, stride_oh, stride_om, PIECE)
    if not TMA:
        Q += at(b, h, start_q, stride_qb, stride_qh, stride_qm, PIECE)
        K += at(b, hk, start_k, stride_kb, stride_kh, stride_kn, PIECE)
        V += at(b, hk, start_k, stride_vb, stride_vh, stride_vn, PIECE)
        DOut += at(b, h, start_q, stride_gb, stride_gh, stride_gm, PIECE)
    if BIAS != NONE and not BIAS_TMA:
        Bias += at(b // repeats, h, 0, stride_bb, stride_bh, 0)
    if DBIAS:
        DBias += row * keys
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    offset = len_k - len_q
    begin, whole_begin, whole_end, end = keys_of(m0, offset, len_k, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)

    do = load_tile(DOut, b, h, m0, stride_gm, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, TMA, PIECE)
    o = load_tile(Out, b, h, m0, stride_om, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, False, PIECE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        delta -= load_row(DLse + row, b, h, m0, len_q, BLOCK_M, False)
    tl.store(Delta + rows, delta, mask=rows < len_q)
    q = load_tile(Q, b, h, m0, stride_qm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
    lse = load_lse(Lse, b, h, m0, len_q, BLOCK_M, BIAS, EVEN_M, False)
    tl.store(Lse2 + row + rows, lse, mask=rows < len_q)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        cut = (n0 < whole_begin) | (n0 >= whole_end)
        k = load_tile(K, b, hk, n0, stride_kn, len_k, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
        v = load_tile(V, b, hk, n0, stride_vn, len_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
        raw = dot(q, k, None, PRECISION, True)
        if BIAS_TMA:
            bias = load_bias_block(Bias, b // repeats, h, m0, n0, stride_bb, stride_bh, BLOCK_M, BLOCK_N)
        else:
            bias = load_bias(Bias, i, j, m0, n0, stride_bm, stride_bn, len_q, keys, BIAS, EVEN_M, EVEN_N)
        p, t = probabilities(raw, lse[:, None], bias, m0 + i, n0 + j, cut, len_k, offset, left, right, scale, softcap,
                             BIAS, SOFTCAP, LEFT, RIGHT, LEFT or RIGHT or not EVEN_N)
        ds = p * (dot(do, v, None, PRECISION, True) - delta[:, None])
        if DBIAS:
            store_scores(DBias, ds, i, j, m0, n0, len_q, keys, EVEN_M, EVEN_N)
        if SOFTCAP:
            ds *= 1.0 - t * t
        dq = dot(ds.to(k.dtype), k, dq, PRECISION)
    store_tile(DQ, dq * scale, m0, stride_dqm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, PIECE)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def _kv_kernel(Q, K, V, Bias, Lens, CuQ, CuK, Lse2, DOut, Delta, DK, DV, ColSum,
               stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
               stride_gb, stride_gh, stride_gm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
               stride_bb, stride_bh, stride_bm, stride_bn,
               heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right, scale, softcap,
               HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
               BIAS: tl.constexpr, COLSUM: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
               LENS: tl.constexpr, VARLEN: tl.constexpr, ALIGNED: tl.constexpr, EVEN_M: tl.constexpr,
               EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, BIAS_TMA: tl.constexpr,
               EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dK and dV of a block of keys, summed over the query heads that share them; also the column sums of dS.

    Tiles are transposed, keys x queries, so that P^T and dS^T are left operands.
    """
    after_previous(EARLY)
    row_length = len_q
    keys = row_of_scores(len_k, ALIGNED)
    b, hk, block, start_q, start_k, len_q, len_k = locate(tl.program_id(0), CuK, CuQ, CuK, Lens, kv_heads, n_heads,
                                                          group, len_k, len_q, len_k, LENS, VARLEN, False, BLOCK_N)
    if VARLEN:
        if block * BLOCK_N >= len_k:
            return
    K += at(b, hk, start_k, stride_kb, stride_kh, stride_kn, PIECE)
    V += at(b, hk, start_k, stride_vb, stride_vh, stride_vn, PIECE)
    DK += at(b, hk, start_k, stride_dkb, stride_dkh, stride_dkn, PIECE)
    DV += at(b, hk, start_k, stride_dvb, stride_dvh, stride_dvn, PIECE)
    n0 = block * BLOCK_N
    i = tl.arange(0, BLOCK_M)[None, :]
    j = tl.arange(0, BLOCK_N)[:, None]
    offset = len_k - len_q
    begin, whole_begin, whole_end, end = queries_of(n0, offset, len_q, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    if LENS:
        if n0 >= len_k:
            end = begin
    rows_k = keys if not VARLEN else len_k
    k = load_tile(K, 0, 0, n0, stride_kn, len_k, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, False, PIECE)
    v = load_tile(V, 0, 0, n0, stride_vn, len_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, False, PIECE)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    sharing = heads // kv_heads
    for h in range(hk * sharing, (hk + 1) * sharing):
        row = row_at(b, h, heads, start_q, row_length, VARLEN)
        colsum = tl.zeros((BLOCK_N,), tl.float32)
        Q_h = Q if TMA else Q + at(b, h, start_q, stride_qb, stride_qh, stride_qm, PIECE)
        DOut_h = DOut if TMA else DOut + at(b, h, start_q, stride_gb, stride_gh, stride_gm, PIECE)
        Lse_h = Lse2 if TMA else Lse2 + row
        Delta_h = Delta if TMA else Delta + row
        Bias_h = Bias
        if BIAS != NONE and not BIAS_TMA:
            Bias_h = Bias + at(b // repeats, h, 0, stride_bb, stride_bh, 0)
        for m0 in range(begin, end, BLOCK_M):
            cut = (m0 < whole_begin) | (m0 >= whole_end) | (n0 + BLOCK_N > len_k)
            q = load_tile(Q_h, b, h, m0, stride_qm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
            do = load_tile(DOut_h, b, h, m0, stride_gm, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, TMA, PIECE)
            lse = load_lse(Lse_h, b, h, m0, len_q, BLOCK_M, BIAS, EVEN_M, TMA, True)
            delta = load_row(Delta_h, b, h, m0, len_q, BLOCK_M, TMA)
            raw = dot(k, q, None, PRECISION, True)
            if BIAS_TMA:
                bias = load_bias_block(Bias, b // repeats, h, m0, n0, stride_bb, stride_bh, BLOCK_M, BLOCK_N).T
            else:
                bias = load_bias(Bias_h, i, j, m0, n0, stride_bm, stride_bn, len_q, keys, BIAS, EVEN_M, EVEN_N)
            p, t = probabilities(raw, lse[None, :], bias, m0 + i, n0 + j, cut, len_k, offset, left, right, scale,
                                 softcap, BIAS, SOFTCAP, LEFT, RIGHT, LEFT or RIGHT or not EVEN_N)
            dp = dot(v, do, None, PRECISION, True)
            dv = dot(p.to(do.dtype), do, dv, PRECISION, UNIT=True)
            ds = p * (dp - delta[None, :])
            if COLSUM:
                colsum += tl.sum(ds, 1)
            if SOFTCAP:
                ds *= 1.0 - t * t
            dk = dot(ds.to(q.dtype), q, dk, PRECISION)
        if COLSUM:
            cols = n0 + tl.arange(0, BLOCK_N)
            tl.store(ColSum + (tl.cast(b, tl.int64) * heads + h) * keys + cols, colsum, mask=cols < keys)
    store_tile(DK, dk * scale, n0, stride_dkn, rows_k, BLOCK_N, HEAD_DIM, BLOCK_D, PIECE)
    store_tile(DV, dv, n0, stride_dvn, rows_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, PIECE)


@triton.jit
def _rows(Lse2, Delta, b, h, heads, len_q, m0, BIAS: tl.constexpr, EVEN_M: tl.constexpr, BLOCK_M: tl.constexpr):
    row = (tl.cast(b, tl.int64) * heads + h) * len_q
    lse = load_lse(Lse2 + row, b, h, m0, len_q, BLOCK_M, BIAS, EVEN_M, False, True)
    return lse, load_row(Delta + row, b, h, m0, len_q, BLOCK_M, False)


@triton.jit(do_not_specialize=NO_SPECIALIZE + ["bias_batch", "bias_heads", "parts"])
def _bias_kernel(Q, K, V, Bias, Lens, Lse2, DOut, Delta, DBias,
                 stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                 stride_gb, stride_gh, stride_gm, stride_bb, stride_bh, stride_bm, stride_bn, bias_batch,
                 bias_heads, parts, heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right, scale, softcap,
                 HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                 BIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, LENS: tl.constexpr,
                 SHARED_HEADS: tl.constexpr, ALIGNED: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                 PRECISION: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of dbias (bias_batch, bias_heads, len_q, len_k), summed over the (batch, head) that share the slice.

    With several parts (parts, bias_batch, bias_heads, len_q, len_k), each the sum over its share of those.
    """
    after_previous(EARLY)
    keys = row_of_scores(len_k, ALIGNED)
    n_m = tl.cdiv(len_q, BLOCK_M)
    n_n = tl.cdiv(len_k, BLOCK_N)
    pid = tl.program_id(0)
    m0 = pid // n_n % n_m * BLOCK_M
    n0 = pid % n_n * BLOCK_N
    part = pid // (n_m * n_n) // (bias_batch * bias_heads)
    piece = pid // (n_m * n_n) % (bias_batch * bias_heads)
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    lost = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    Bias += at(piece // bias_heads, piece % bias_heads, 0, stride_bb, stride_bh, 0)
    bias = load_bias(Bias, i, j, m0, n0, stride_bm, stride_bn, len_q, keys, BIAS, EVEN_M, EVEN_N)
    shared = repeats * (heads // bias_heads)
    share = tl.cdiv(shared, parts)
    first = part * share
    last = tl.minimum(first + share, shared) - 1
    b, h = sharer(tl.minimum(first, last), piece, heads, repeats, bias_heads, SHARED_HEADS)
    lse, delta = _rows(Lse2, Delta, b, h, heads, len_q, m0, BIAS, EVEN_M, BLOCK_M)
    for r in range(first, last + 1):
        # no product depends on the rows, so Triton would not load them ahead
        b, h = sharer(tl.minimum(r + 1, last), piece, heads, repeats, bias_heads, SHARED_HEADS)
        next_rows = _rows(Lse2, Delta, b, h, heads, len_q, m0, BIAS, EVEN_M, BLOCK_M)
        b, h = sharer(r, piece, heads, repeats, bias_heads, SHARED_HEADS)
        hk = h // (heads // kv_heads)
        n_keys = len_k
        if LENS:
            n_keys = tl.minimum(tl.maximum(tl.load(Lens + b).to(tl.int32), 0), len_k)
        q = load_tile(Q if TMA else Q + at(b, h, 0, stride_qb, stride_qh, stride_qm, PIECE), b, h, m0, stride_qm, len_q,
                      BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
        k = load_tile(K if TMA else K + at(b, hk, 0, stride_kb, stride_kh, stride_kn, PIECE), b, hk, n0, stride_kn,
                      n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
        do = load_tile(DOut if TMA else DOut + at(b, h, 0, stride_gb, stride_gh, stride_gm, PIECE), b, h, m0, stride_gm,
                       len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, TMA, PIECE)
        v = load_tile(V if TMA else V + at(b, hk, 0, stride_vb, stride_vh, stride_vn, PIECE), b, hk, n0, stride_vn,
                      n_keys, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
        raw = dot(q, k, None, PRECISION, True)
        p, _ = probabilities(raw, lse[:, None], bias, m0 + i, n0 + j, True, n_keys, n_keys - len_q, left, right, scale,
                             softcap, BIAS, SOFTCAP, LEFT, RIGHT, LEFT or RIGHT or not EVEN_N)
        if q.dtype == tl.float32:
            acc, lost = add(acc, lost, p * (dot(do, v, None, PRECISION, True) - delta[:, None]))
        else:
            acc += p * (dot(do, v, None, PRECISION, True) - delta[:, None])
        lse, delta = next_rows
    piece += part * bias_batch * bias_heads
    store_scores(DBias + tl.cast(piece, tl.int64) * len_q * keys, acc, i, j, m0, n0, len_q, keys, EVEN_M, EVEN_N)


def _q_launch(
    x: Inputs, o: Options, out: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor, dlse: bool, dbias: bool
) -> Launch:
    call = Call(x, o)
    config = pick("bwd_q", Q_CONFIGS, call)
    tma = call.use_tma(config, x.q, x.k, x.v, dout)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(out), *call.strides(dout),
        *call.strides(dq), *call.bias_strides, *call.counts(), call.scale, o.softcap,
    )  # fmt: skip
    meta = call.constexprs(config, DBIAS=dbias, DLSE=dlse, TMA=tma, BIAS_TMA=(bias_tma := call.bias_by_tma(tma)))
    m, n = config.block_m, config.block_n
    blocks: Blocks = {"Q": m, "DOut": m, "K": n, "V": n} if tma else {}
    if bias_tma:
        blocks["Bias"] = (m, n)
    return Launch(_q_kernel, call.programs(call.len_q, m), scalars, meta, config.spill, blocks)


def _q_pass(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """dq, delta, lse in log2 units for the other passes, and an unshared dbias if wanted."""
    dq, delta, lse2, tiles = empty_like(x.q), empty_like(lse), empty_like(lse), bias_tiles(x, o, dbias)
    launch = remembered(x, "bwd_q", lambda: _q_launch(x, o, out, dout, dq, dlse is not None, dbias))
    launch(
        x.q, x.k, x.v, x.bias, x.kv_lens, x.cu_seqlens_q, x.cu_seqlens_k, out, lse, dout, dlse, delta, lse2,
        dq, tiles,
    )  # fmt: skip
    return dq, delta, lse2, tiles


def _kv_launch(x: Inputs, o: Options, dout: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, colsum: bool) -> Launch:
    call = Call(x, o)
    config = pick("bwd_kv", KV_CONFIGS, call)
    tma = call.use_tma(config, x.q, dout, keys=False) and call.len_q % 4 == 0
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(dout), *call.strides(dk),
        *call.strides(dv), *call.bias_strides, *call.counts(kv=True), call.scale, o.softcap,
    )  # fmt: skip
    meta = call.constexprs(config, COLSUM=colsum, TMA=tma, BIAS_TMA=(bias_tma := call.bias_by_tma(tma)))
    blocks: Blocks = dict.fromkeys(("Q", "DOut", "Lse2", "Delta"), config.block_m) if tma else {}
    if bias_tma:
        blocks["Bias"] = (config.block_m, config.block_n)
    return Launch(_kv_kernel, call.programs(call.len_k, config.block_n, kv=True), scalars, meta, config.spill, blocks)


def _kv_pass(
    x: Inputs, o: Options, lse2: torch.Tensor, dout: torch.Tensor, delta: torch.Tensor, colsum: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dk, dv and the column sums of dS."""
    dk, dv, sums = empty_like(x.k), empty_like(x.v), column_sums(x, colsum)
    launch = remembered(x, "bwd_kv", lambda: _kv_launch(x, o, dout, dk, dv, colsum))
    launch(x.q, x.k, x.v, x.bias, x.kv_lens, x.cu_seqlens_q, x.cu_seqlens_k, lse2, dout, delta, dk, dv, sums)
    return dk, dv, sums


def _bias_launch(x: Inputs, o: Options, dout: torch.Tensor, bias: torch.Tensor) -> Launch:
    call = Call(x, o)
    config = pick("bwd_bias", BIAS_CONFIGS, call)
    programs, parts = call.bias_programs(config, bias)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(dout), *call.bias_strides,
        *bias.shape[:2], parts, *call.counts(), call.scale, o.softcap,
    )  # fmt: skip
    tma = call.use_tma(config, x.q, x.k, x.v, dout)
    meta = call.constexprs(config, SHARED_HEADS=bias.shape[1] < call.heads, TMA=tma)
    del meta["VARLEN"]
    m, n = config.block_m, config.block_n
    blocks = {"Q": m, "DOut": m, "K": n, "V": n} if tma else {}
    return Launch(_bias_kernel, programs, scalars, meta, config.spill, blocks, parts)


def _bias_pass(
    x: Inputs, o: Options, bias: torch.Tensor, lse2: torch.Tensor, dout: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    """dbias of a full bias that several (batch, head) share."""
    launch = remembered(x, "bwd_bias", lambda: _bias_launch(x, o, dout, bias))
    if not x.q.numel():
        return torch.zeros_like(bias)
    return sum_of_parts(launch, bias, x.q, x.k, x.v, bias, x.kv_lens, lse2, dout, delta)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbias (if wanted), dsinks, bit for bit the same on every run."""
    dlse = None if dlse is None else dlse.contiguous()
    kind, shared = bias_grad(x, wanted)
    dq, delta, lse2, dbias = _q_pass(x, o, out, lse, dout, dlse, kind == FULL.value and not shared)
    if shared:  # before dk and dv take the memory that parts of its sum had
        dbias = _bias_pass(x, o, x.bias, lse2, dout, delta)  # type: ignore[arg-type]
    dk, dv, colsum = _kv_pass(x, o, lse2, dout, delta, kind == KEY.value)
    if kind == KEY.value:
        dbias = reduce_to(colsum, x.bias)  # type: ignore[arg-type]
    elif kind == QUERY.value:
        dbias = query_bias_grad(x, lse, delta, dlse)
    return dq, dk, dv, dbias, None if x.sinks is None else sink_grad(x, lse, delta)
