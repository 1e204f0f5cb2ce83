"""Second derivative of attention in Triton, sm_80 and up, and its forward mode, which is the first pass of it.

With cotangents ddq, ddk, ddv, ddbias of the first backward (docs/double_backward.md):

    G = scale (ddq K^T + Q ddk^T) + ddbias;  g = rowsum(P G);  H = dO ddv^T
    ddO = P ddv + (P G) V - g O;  u = rowsum(dO ddO);  E = dS (G - g) + P (H - u)
    dQ2 = scale (E K + dS ddk);  dK2 = scale (E^T Q + dS^T ddq);  dV2 = (P (G - g))^T dO;  dbias2 = reduce(E)

ddO, g and u come from the kernel of the jvp; a kernel over query blocks gives dQ2, one over key blocks dK2 and dV2,
one over bias tiles dbias2 where several (batch, head) share it. All deterministic.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty_like
from adatom.ops.attention.triton_call import (
    LOW_TILES,
    NO_SPECIALIZE,
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
    without_options,
)
from adatom.ops.attention.triton_jvp import Directions, tangent_pass
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
    tangent_of,
)

# (kind of arithmetic, largest head_dim) -> tile, for each family of architectures; found by `adatom bench --tune` and,
# on sm_90, by hand (docs/tuning.md).
Q_CONFIGS: Configs = {
    90: {
        ("half wide bias", 64): Config(64, 32, 4, 3, tma=True),
        ("half", 64): Config(128, 64, 8, 3, tma=True),
        ("half full bias", 128): Config(128, 32, 8, 2, tma=True),
        ("half", 128): Config(128, 64, 8, 2, tma=True),
        ("half", 256): Config(64, 16, 4, 3, tma=True, spill=2048),
        ("tf32", 64): Config(128, 64, 8, 2, tma=True, spill=4096),
        ("tf32", 128): Config(128, 32, 8, 2, tma=True, spill=8192),
        ("tf32", 256): Config(64, 32, 8, 1, spill=32768),
        ("tf32x3 bias", 64): Config(128, 32, 8, 2, tma=True, spill=4096),
        ("tf32x3", 64): Config(128, 64, 8, 2, tma=True, spill=4096),
        ("tf32x3", 128): Config(64, 32, 4, 1, spill=8192),
        ("tf32x3", 256): Config(16, 16, 8, 1, spill=32768),
        ("ieee", 64): Config(32, 16, 8, 1),
        ("ieee", 128): Config(16, 16, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 16, 8, 1, spill=32768),
    },
}
Q_CONFIGS[80] = plain(Q_CONFIGS[90]) | {
    ("tf32", 128): Config(32, 16, 8, 1, spill=2048),
    ("tf32", 256): Config(16, 16, 8, 1, spill=32768),
    ("tf32x3", 128): Config(16, 16, 4, 1, spill=8192),
    ("tf32x3", 256): Config(16, 16, 8, 1, spill=32768),
    ("tf32", 64): Config(32, 32, 4, 1),
    ("tf32x3", 64): Config(32, 32, 4, 1),
    ("half", 64): Config(64, 32, 4, 2),
    ("half", 128): Config(32, 32, 4, 1),
    ("half", 256): Config(16, 16, 4, 1),
}
Q_CONFIGS[86] = Q_CONFIGS[80]
Q_CONFIGS[100] = without_options(Q_CONFIGS[90]) | LOW_TILES | {
    ("half bias", 64): Config(64, 64, 8, 1, tma=True, spill=1024),
    ("half", 128): Config(64, 32, 4, 2, tma=True),
    ("half", 256): Config(64, 32, 4, 1, tma=True, spill=2048),
}

KV_CONFIGS: Configs = {
    90: {
        ("half bias", 64): Config(32, 64, 4, 2, tma=True),
        ("half softcap", 64): Config(32, 64, 4, 2, tma=True),
        ("half packed", 64): Config(32, 64, 4, 1),
        ("half", 64): Config(64, 64, 4, 2, tma=True),
        ("half full bias", 128): Config(16, 64, 4, 2, tma=True),
        ("half", 128): Config(32, 64, 4, 2, tma=True),
        ("half", 256): Config(16, 16, 4, 2, tma=True),
        ("tf32 bias", 64): Config(32, 64, 4, 2, tma=True),
        ("tf32", 64): Config(64, 128, 8, 2, tma=True, spill=4096),
        ("tf32", 128): Config(32, 128, 8, 1, spill=8192),
        ("tf32", 256): Config(16, 32, 4, 1, tma=True, spill=32768),
        ("tf32x3 bias", 64): Config(64, 128, 8, 1, spill=4096),
        ("tf32x3", 64): Config(64, 128, 8, 2, tma=True, spill=4096),
        ("tf32x3", 128): Config(32, 64, 4, 2, tma=True, spill=8192),
        ("tf32x3", 256): Config(16, 16, 4, 1, spill=32768),
        ("ieee", 64): Config(16, 32, 8, 1),
        ("ieee", 128): Config(16, 16, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 16, 8, 1, spill=32768),
    },
}
KV_CONFIGS[80] = plain(KV_CONFIGS[90]) | {
    ("tf32", 128): Config(16, 32, 8, 1, spill=2048),
    ("tf32", 256): Config(16, 16, 8, 1, spill=32768),
    ("tf32x3", 128): Config(16, 16, 4, 1, spill=2048),
    ("tf32x3", 256): Config(16, 16, 4, 1, spill=32768),
    ("tf32", 64): Config(32, 32, 4, 1),
    ("tf32x3", 64): Config(16, 32, 4, 1),
    ("half", 64): Config(32, 64, 8, 1),
    ("half", 128): Config(16, 64, 8, 1),
    ("half", 256): Config(16, 32, 8, 1),
}
KV_CONFIGS[86] = KV_CONFIGS[80]
KV_CONFIGS[100] = without_options(KV_CONFIGS[90]) | LOW_TILES | {
    ("half bias", 64): Config(64, 64, 8, 2, tma=True, spill=1024),
    ("half packed", 64): Config(32, 64, 4, 1),
    ("half", 64): Config(64, 64, 8, 2, tma=True),
    ("half", 128): Config(32, 64, 8, 1, tma=True, spill=1024),
    ("half", 256): Config(16, 32, 4, 1, tma=True),
}

BIAS_CONFIGS: Configs = {
    90: {
        ("half", 64): Config(64, 64, 4, 2, tma=True),
        ("half", 128): Config(64, 32, 4, 2, tma=True),
        ("half", 256): Config(64, 32, 4, 1, tma=True),
        ("tf32", 64): Config(64, 32, 4, 2, tma=True),
        ("tf32", 128): Config(128, 32, 8, 1, tma=True, spill=2048),
        ("tf32", 256): Config(16, 16, 8, 1, spill=32768),
        ("tf32x3", 64): Config(64, 32, 4, 2, tma=True),
        ("tf32x3", 128): Config(128, 32, 8, 1, tma=True, spill=2048),
        ("tf32x3", 256): Config(16, 16, 8, 1, spill=32768),
        ("ieee", 64): Config(32, 32, 8, 1),
        ("ieee", 128): Config(16, 16, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 16, 8, 1, spill=32768),
    },
}
BIAS_CONFIGS[80] = plain(BIAS_CONFIGS[90]) | {
    ("half", 64): Config(32, 64, 8, 1),
    ("half", 128): Config(64, 32, 8, 1, spill=2048),
    ("half", 256): Config(32, 32, 8, 1),
    ("tf32", 64): Config(32, 32, 4, 1),
    ("tf32", 128): Config(32, 32, 8, 1, spill=2048),
    ("tf32x3", 64): Config(32, 32, 4, 1),
    ("tf32x3", 128): Config(32, 16, 8, 1, spill=2048),
}
BIAS_CONFIGS[100] = BIAS_CONFIGS[90] | LOW_TILES | {
    ("half", 64): Config(64, 64, 8, 1),
    ("half", 128): Config(64, 32, 8, 1),
    ("half", 256): Config(32, 32, 8, 1),
}
BIAS_CONFIGS[86] = BIAS_CONFIGS[80] | {
    ("half", 64): Config(32, 32, 4, 1),
    ("half", 128): Config(32, 32, 8, 1, spill=2048),
}


@triton.jit
def _cotangents(p, t, G, raw_tangent, dp, H, delta, g, u, softcap, SOFTCAP: tl.constexpr):
    """(E, what multiplies K and Q, what multiplies ddk and ddq, W) of a tile."""
    ds = p * (dp - delta)
    W = G - g
    E = ds * W + p * (H - u)
    if SOFTCAP:
        slope = 1.0 - t * t
        return E, E * slope - ds * (2.0 / softcap) * t * slope * raw_tangent, ds * slope, p * W
    else:
        return E, E, ds, p * W


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def _q_kernel(Q, K, V, Bias, Lens, CuQ, CuK, Lse, DOut, DDQ, DDK, DDV, DDBias, G, U, Delta, DQ, DBias,
              stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
              stride_gb, stride_gh, stride_gm, stride_cqb, stride_cqh, stride_cqm, stride_ckb, stride_ckh, stride_ckn,
              stride_cvb, stride_cvh, stride_cvn, stride_dqb, stride_dqh, stride_dqm,
              stride_bb, stride_bh, stride_bm, stride_bn, stride_cb, stride_ch, stride_cm, stride_cn,
              heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right, scale, softcap,
              HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
              BIAS: tl.constexpr, DDBIAS: tl.constexpr, DBIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
              RIGHT: tl.constexpr, LENS: tl.constexpr, VARLEN: tl.constexpr, ALIGNED: tl.constexpr,
              EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
              EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dQ2 of a block of queries; also its tiles of an unshared dbias2, or its row sums of E."""
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
    DQ += at(b, h, start_q, stride_dqb, stride_dqh, stride_dqm, PIECE)
    if not TMA:
        Q += at(b, h, start_q, stride_qb, stride_qh, stride_qm, PIECE)
        DDQ += at(b, h, start_q, stride_cqb, stride_cqh, stride_cqm, PIECE)
        DOut += at(b, h, start_q, stride_gb, stride_gh, stride_gm, PIECE)
        K += at(b, hk, start_k, stride_kb, stride_kh, stride_kn, PIECE)
        V += at(b, hk, start_k, stride_vb, stride_vh, stride_vn, PIECE)
        DDK += at(b, hk, start_k, stride_ckb, stride_ckh, stride_ckn, PIECE)
        DDV += at(b, hk, start_k, stride_cvb, stride_cvh, stride_cvn, PIECE)
    if BIAS != NONE:
        Bias += at(b // repeats, h, 0, stride_bb, stride_bh, 0)
    if DDBIAS:
        DDBias += at(b // repeats, h, 0, stride_cb, stride_ch, 0)
    if DBIAS:
        DBias += row * keys
    m0 = block * BLOCK_M
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    offset = len_k - len_q
    begin, whole_begin, whole_end, end = keys_of(m0, offset, len_k, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    q = load_tile(Q, b, h, m0, stride_qm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
    ddq = load_tile(DDQ, b, h, m0, stride_cqm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
    do = load_tile(DOut, b, h, m0, stride_gm, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, TMA, PIECE)
    lse = load_lse(Lse + row, b, h, m0, len_q, BLOCK_M, BIAS, EVEN_M, False)
    delta = load_row(Delta + row, b, h, m0, len_q, BLOCK_M, False)
    g = load_row(G + row, b, h, m0, len_q, BLOCK_M, False)
    u = load_row(U + row, b, h, m0, len_q, BLOCK_M, False)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        cut = (n0 < whole_begin) | (n0 >= whole_end)
        k = load_tile(K, b, hk, n0, stride_kn, len_k, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
        ddk = load_tile(DDK, b, hk, n0, stride_ckn, len_k, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
        v = load_tile(V, b, hk, n0, stride_vn, len_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
        ddv = load_tile(DDV, b, hk, n0, stride_cvn, len_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
        raw = dot(q, k, None, PRECISION, True)
        bias = load_bias(Bias, i, j, m0, n0, stride_bm, stride_bn, len_q, keys, BIAS, EVEN_M, EVEN_N)
        p, t = probabilities(raw, lse[:, None], bias, m0 + i, n0 + j, cut, len_k, offset, left, right, scale, softcap,
                             BIAS, SOFTCAP, LEFT, RIGHT, LEFT or RIGHT or not EVEN_N)
        raw_tangent = dot(q, ddk, dot(ddq, k, None, PRECISION, True), PRECISION, True)
        ddbias = load_bias(DDBias, i, j, m0, n0, stride_cm, stride_cn, len_q, keys, DDBIAS, EVEN_M, EVEN_N)
        tangent, raw_tangent = tangent_of(raw_tangent, t, ddbias, scale, SOFTCAP)
        dp = dot(do, v, None, PRECISION, True)
        H = dot(do, ddv, None, PRECISION, True)
        E, to_k, to_ddk, _ = _cotangents(p, t, tangent, raw_tangent, dp, H, delta[:, None], g[:, None], u[:, None],
                                         softcap, SOFTCAP)
        if DBIAS:
            store_scores(DBias, E, i, j, m0, n0, len_q, keys, EVEN_M, EVEN_N)
        dq = dot(to_k.to(k.dtype), k, dq, PRECISION)
        dq = dot(to_ddk.to(k.dtype), ddk, dq, PRECISION)
    store_tile(DQ, dq * scale, m0, stride_dqm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, PIECE)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def _kv_kernel(Q, K, V, Bias, Lens, CuQ, CuK, Lse, DOut, DDQ, DDK, DDV, DDBias, G, U, Delta, DK, DV, ColSum,
               stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
               stride_gb, stride_gh, stride_gm, stride_cqb, stride_cqh, stride_cqm, stride_ckb, stride_ckh, stride_ckn,
               stride_cvb, stride_cvh, stride_cvn, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh,
               stride_dvn, stride_bb, stride_bh, stride_bm, stride_bn, stride_cb, stride_ch, stride_cm, stride_cn,
               heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right, scale, softcap,
               HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
               BIAS: tl.constexpr, DDBIAS: tl.constexpr, COLSUM: tl.constexpr, SOFTCAP: tl.constexpr,
               LEFT: tl.constexpr, RIGHT: tl.constexpr, LENS: tl.constexpr, VARLEN: tl.constexpr, ALIGNED: tl.constexpr,
               EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
               EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dK2 and dV2 of a block of keys, summed over the query heads that share them; also the column sums of E.

    Tiles are transposed, keys x queries.
    """
    after_previous(EARLY)
    row_length = len_q
    keys = row_of_scores(len_k, ALIGNED)
    b, hk, block, start_q, start_k, len_q, len_k = locate(tl.program_id(0), CuK, CuQ, CuK, Lens, kv_heads, n_heads,
                                                          group, len_k, len_q, len_k, LENS, VARLEN, False, BLOCK_N)
    if VARLEN:
        if block * BLOCK_N >= len_k:
            return
    n0 = block * BLOCK_N
    i = tl.arange(0, BLOCK_M)[None, :]
    j = tl.arange(0, BLOCK_N)[:, None]
    offset = len_k - len_q
    begin, whole_begin, whole_end, end = queries_of(n0, offset, len_q, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    if LENS:
        if n0 >= len_k:
            end = begin
    rows_k = keys if not VARLEN else len_k
    k = load_tile(K + at(b, hk, start_k, stride_kb, stride_kh, stride_kn, PIECE), 0, 0, n0, stride_kn, len_k, BLOCK_N,
                  HEAD_DIM, BLOCK_D, EVEN_N, False, PIECE)
    v = load_tile(V + at(b, hk, start_k, stride_vb, stride_vh, stride_vn, PIECE), 0, 0, n0, stride_vn, len_k, BLOCK_N,
                  HEAD_DIM_V, BLOCK_DV, EVEN_N, False, PIECE)
    ddk = load_tile(DDK + at(b, hk, start_k, stride_ckb, stride_ckh, stride_ckn, PIECE), 0, 0, n0, stride_ckn, len_k,
                    BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, False, PIECE)
    ddv = load_tile(DDV + at(b, hk, start_k, stride_cvb, stride_cvh, stride_cvn, PIECE), 0, 0, n0, stride_cvn, len_k,
                    BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, False, PIECE)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    sharing = heads // kv_heads
    for h in range(hk * sharing, (hk + 1) * sharing):
        row = row_at(b, h, heads, start_q, row_length, VARLEN)
        colsum = tl.zeros((BLOCK_N,), tl.float32)
        Q_h = Q if TMA else Q + at(b, h, start_q, stride_qb, stride_qh, stride_qm, PIECE)
        DDQ_h = DDQ if TMA else DDQ + at(b, h, start_q, stride_cqb, stride_cqh, stride_cqm, PIECE)
        DOut_h = DOut if TMA else DOut + at(b, h, start_q, stride_gb, stride_gh, stride_gm, PIECE)
        Lse_h = Lse if TMA else Lse + row
        Delta_h = Delta if TMA else Delta + row
        G_h = G if TMA else G + row
        U_h = U if TMA else U + row
        Bias_h = Bias
        DDBias_h = DDBias
        if BIAS != NONE:
            Bias_h = Bias + at(b // repeats, h, 0, stride_bb, stride_bh, 0)
        if DDBIAS:
            DDBias_h = DDBias + at(b // repeats, h, 0, stride_cb, stride_ch, 0)
        for m0 in range(begin, end, BLOCK_M):
            cut = (m0 < whole_begin) | (m0 >= whole_end) | (n0 + BLOCK_N > len_k)
            q = load_tile(Q_h, b, h, m0, stride_qm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
            ddq = load_tile(DDQ_h, b, h, m0, stride_cqm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
            do = load_tile(DOut_h, b, h, m0, stride_gm, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, TMA, PIECE)
            lse = load_lse(Lse_h, b, h, m0, len_q, BLOCK_M, BIAS, EVEN_M, TMA)[None, :]
            delta = load_row(Delta_h, b, h, m0, len_q, BLOCK_M, TMA)[None, :]
            g = load_row(G_h, b, h, m0, len_q, BLOCK_M, TMA)[None, :]
            u = load_row(U_h, b, h, m0, len_q, BLOCK_M, TMA)[None, :]
            raw = dot(k, q, None, PRECISION, True)
            bias = load_bias(Bias_h, i, j, m0, n0, stride_bm, stride_bn, len_q, keys, BIAS, EVEN_M, EVEN_N)
            p, t = probabilities(raw, lse, bias, m0 + i, n0 + j, cut, len_k, offset, left, right, scale, softcap, BIAS,
                                 SOFTCAP, LEFT, RIGHT, LEFT or RIGHT or not EVEN_N)
            raw_tangent = dot(ddk, q, dot(k, ddq, None, PRECISION, True), PRECISION, True)
            ddbias = load_bias(DDBias_h, i, j, m0, n0, stride_cm, stride_cn, len_q, keys, DDBIAS, EVEN_M, EVEN_N)
            tangent, raw_tangent = tangent_of(raw_tangent, t, ddbias, scale, SOFTCAP)
            dp = dot(v, do, None, PRECISION, True)
            H = dot(ddv, do, None, PRECISION, True)
            E, to_q, to_ddq, W = _cotangents(p, t, tangent, raw_tangent, dp, H, delta, g, u, softcap, SOFTCAP)
            if COLSUM:
                colsum += tl.sum(E, 1)
            dv = dot(W.to(do.dtype), do, dv, PRECISION)
            dk = dot(to_ddq.to(q.dtype), ddq, dk, PRECISION)
            dk = dot(to_q.to(q.dtype), q, dk, PRECISION)
        if COLSUM:
            cols = n0 + tl.arange(0, BLOCK_N)
            tl.store(ColSum + (tl.cast(b, tl.int64) * heads + h) * keys + cols, colsum, mask=cols < keys)
    store_tile(DK + at(b, hk, start_k, stride_dkb, stride_dkh, stride_dkn, PIECE), dk * scale, n0, stride_dkn, rows_k,
               BLOCK_N, HEAD_DIM, BLOCK_D, PIECE)
    store_tile(DV + at(b, hk, start_k, stride_dvb, stride_dvh, stride_dvn, PIECE), dv, n0, stride_dvn, rows_k, BLOCK_N,
               HEAD_DIM_V, BLOCK_DV, PIECE)


@triton.jit
def _rows(Lse, Delta, G, U, b, h, heads, len_q, m0, BIAS: tl.constexpr, EVEN_M: tl.constexpr, BLOCK_M: tl.constexpr):
    row = (tl.cast(b, tl.int64) * heads + h) * len_q
    lse = load_lse(Lse + row, b, h, m0, len_q, BLOCK_M, BIAS, EVEN_M, False)
    delta = load_row(Delta + row, b, h, m0, len_q, BLOCK_M, False)
    g = load_row(G + row, b, h, m0, len_q, BLOCK_M, False)
    return lse, delta, g, load_row(U + row, b, h, m0, len_q, BLOCK_M, False)


@triton.jit(do_not_specialize=NO_SPECIALIZE + ["bias_batch", "bias_heads", "parts"])
def _bias_kernel(Q, K, V, Bias, Lens, Lse, DOut, DDQ, DDK, DDV, DDBias, G, U, Delta, DBias,
                 stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                 stride_gb, stride_gh, stride_gm, stride_cqb, stride_cqh, stride_cqm, stride_ckb, stride_ckh,
                 stride_ckn, stride_cvb, stride_cvh, stride_cvn,
                 stride_bb, stride_bh, stride_bm, stride_bn, stride_cb, stride_ch, stride_cm, stride_cn,
                 bias_batch, bias_heads, parts, heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right,
                 scale, softcap,
                 HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                 BIAS: tl.constexpr, DDBIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
                 RIGHT: tl.constexpr, LENS: tl.constexpr, SHARED_HEADS: tl.constexpr, ALIGNED: tl.constexpr,
                 EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                 EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of dbias2 (bias_batch, bias_heads, len_q, len_k), summed over the (batch, head) that share the slice.

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
    DDBias += at(piece // bias_heads, piece % bias_heads, 0, stride_cb, stride_ch, 0)
    ddbias = load_bias(DDBias, i, j, m0, n0, stride_cm, stride_cn, len_q, keys, DDBIAS, EVEN_M, EVEN_N)
    shared = repeats * (heads // bias_heads)
    share = tl.cdiv(shared, parts)
    first = part * share
    last = tl.minimum(first + share, shared) - 1
    b, h = sharer(tl.minimum(first, last), piece, heads, repeats, bias_heads, SHARED_HEADS)
    lse, delta, g, u = _rows(Lse, Delta, G, U, b, h, heads, len_q, m0, BIAS, EVEN_M, BLOCK_M)
    for r in range(first, last + 1):
        # no product depends on the rows, so Triton would not load them ahead
        b, h = sharer(tl.minimum(r + 1, last), piece, heads, repeats, bias_heads, SHARED_HEADS)
        next_rows = _rows(Lse, Delta, G, U, b, h, heads, len_q, m0, BIAS, EVEN_M, BLOCK_M)
        b, h = sharer(r, piece, heads, repeats, bias_heads, SHARED_HEADS)
        hk = h // (heads // kv_heads)
        n_keys = len_k
        if LENS:
            n_keys = tl.minimum(tl.maximum(tl.load(Lens + b).to(tl.int32), 0), len_k)
        q = load_tile(Q if TMA else Q + at(b, h, 0, stride_qb, stride_qh, stride_qm, PIECE), b, h, m0, stride_qm, len_q,
                      BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
        k = load_tile(K if TMA else K + at(b, hk, 0, stride_kb, stride_kh, stride_kn, PIECE), b, hk, n0, stride_kn,
                      n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
        ddq = load_tile(DDQ if TMA else DDQ + at(b, h, 0, stride_cqb, stride_cqh, stride_cqm, PIECE), b, h, m0,
                        stride_cqm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
        ddk = load_tile(DDK if TMA else DDK + at(b, hk, 0, stride_ckb, stride_ckh, stride_ckn, PIECE), b, hk, n0,
                        stride_ckn, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
        do = load_tile(DOut if TMA else DOut + at(b, h, 0, stride_gb, stride_gh, stride_gm, PIECE), b, h, m0, stride_gm,
                       len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, TMA, PIECE)
        v = load_tile(V if TMA else V + at(b, hk, 0, stride_vb, stride_vh, stride_vn, PIECE), b, hk, n0, stride_vn,
                      n_keys, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
        ddv = load_tile(DDV if TMA else DDV + at(b, hk, 0, stride_cvb, stride_cvh, stride_cvn, PIECE), b, hk, n0,
                        stride_cvn, n_keys, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
        raw = dot(q, k, None, PRECISION, True)
        p, t = probabilities(raw, lse[:, None], bias, m0 + i, n0 + j, True, n_keys, n_keys - len_q, left, right, scale,
                             softcap, BIAS, SOFTCAP, LEFT, RIGHT, LEFT or RIGHT or not EVEN_N)
        raw_tangent = dot(q, ddk, dot(ddq, k, None, PRECISION, True), PRECISION, True)
        tangent, raw_tangent = tangent_of(raw_tangent, t, ddbias, scale, SOFTCAP)
        dp = dot(do, v, None, PRECISION, True)
        H = dot(do, ddv, None, PRECISION, True)
        E, _, _, _ = _cotangents(p, t, tangent, raw_tangent, dp, H, delta[:, None], g[:, None], u[:, None], softcap,
                                 SOFTCAP)
        if q.dtype == tl.float32:
            acc, lost = add(acc, lost, E)
        else:
            acc += E
        lse, delta, g, u = next_rows
    piece += part * bias_batch * bias_heads
    store_scores(DBias + tl.cast(piece, tl.int64) * len_q * keys, acc, i, j, m0, n0, len_q, keys, EVEN_M, EVEN_N)


def _q_launch(x: Inputs, o: Options, d: Directions, dout: torch.Tensor, dq: torch.Tensor, dbias: bool) -> Launch:
    call = Call(x, o)
    config = pick("bwd_bwd_q", Q_CONFIGS, call)
    tma = call.use_tma(config, x.q, x.k, x.v, dout, d.q, d.k, d.v)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(dout), *call.strides(d.q),
        *call.strides(d.k), *call.strides(d.v), *call.strides(dq), *call.bias_strides, *d.bias_strides,
        *call.counts(), call.scale, o.softcap,
    )  # fmt: skip
    meta = call.constexprs(config, DDBIAS=call.meta["BIAS"] if d.bias is not None else 0, DBIAS=dbias, TMA=tma)
    m, n = config.block_m, config.block_n
    blocks = {"Q": m, "DDQ": m, "DOut": m, "K": n, "V": n, "DDK": n, "DDV": n} if tma else {}
    return Launch(_q_kernel, call.programs(call.len_q, m), scalars, meta, config.spill, blocks)


def _q_pass(
    x: Inputs, o: Options, d: Directions, lse: torch.Tensor, dout: torch.Tensor, rows: tuple[torch.Tensor, ...],
    dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """dq2, and an unshared dbias2 if wanted."""
    dq, tiles = empty_like(x.q), bias_tiles(x, o, dbias)
    launch = remembered(x, "bwd_bwd_q", lambda: _q_launch(x, o, d, dout, dq, dbias))
    launch(
        x.q, x.k, x.v, x.bias, x.kv_lens, x.cu_seqlens_q, x.cu_seqlens_k, lse, dout, d.q, d.k, d.v, d.bias, *rows,
        dq, tiles,
    )  # fmt: skip
    return dq, tiles


def _kv_launch(
    x: Inputs, o: Options, d: Directions, dout: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, colsum: bool
) -> Launch:
    call = Call(x, o)
    config = pick("bwd_bwd_kv", KV_CONFIGS, call)
    tma = call.use_tma(config, x.q, dout, d.q, keys=False) and call.len_q % 4 == 0
    # TMA writes to multiples of 128 bytes; with more stages there are several buffers of a row, each as long as it is
    assert not tma or config.block_m >= 32 or config.num_stages <= 2
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(dout), *call.strides(d.q),
        *call.strides(d.k), *call.strides(d.v), *call.strides(dk), *call.strides(dv), *call.bias_strides,
        *d.bias_strides, *call.counts(kv=True), call.scale, o.softcap,
    )  # fmt: skip
    meta = call.constexprs(config, DDBIAS=call.meta["BIAS"] if d.bias is not None else 0, COLSUM=colsum, TMA=tma)
    blocks = dict.fromkeys(("Q", "DDQ", "DOut", "Lse", "G", "U", "Delta"), config.block_m) if tma else {}
    return Launch(_kv_kernel, call.programs(call.len_k, config.block_n, kv=True), scalars, meta, config.spill, blocks)


def _kv_pass(
    x: Inputs, o: Options, d: Directions, lse: torch.Tensor, dout: torch.Tensor, rows: tuple[torch.Tensor, ...],
    colsum: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """dk2, dv2 and the column sums of E."""
    dk, dv, sums = empty_like(x.k), empty_like(x.v), column_sums(x, colsum)
    launch = remembered(x, "bwd_bwd_kv", lambda: _kv_launch(x, o, d, dout, dk, dv, colsum))
    launch(
        x.q, x.k, x.v, x.bias, x.kv_lens, x.cu_seqlens_q, x.cu_seqlens_k, lse, dout, d.q, d.k, d.v, d.bias, *rows,
        dk, dv, sums,
    )  # fmt: skip
    return dk, dv, sums


def _bias_launch(x: Inputs, o: Options, d: Directions, dout: torch.Tensor, bias: torch.Tensor) -> Launch:
    call = Call(x, o)
    config = pick("bwd_bwd_bias", BIAS_CONFIGS, call)
    programs, parts = call.bias_programs(config, bias)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(dout), *call.strides(d.q),
        *call.strides(d.k), *call.strides(d.v), *call.bias_strides, *d.bias_strides, *bias.shape[:2],
        parts, *call.counts(), call.scale, o.softcap,
    )  # fmt: skip
    tma = call.use_tma(config, x.q, x.k, x.v, dout, d.q, d.k, d.v)
    meta = call.constexprs(
        config, DDBIAS=call.meta["BIAS"] if d.bias is not None else 0, SHARED_HEADS=bias.shape[1] < call.heads, TMA=tma
    )  # fmt: skip
    del meta["VARLEN"]
    m, n = config.block_m, config.block_n
    blocks = {"Q": m, "DDQ": m, "DOut": m, "K": n, "V": n, "DDK": n, "DDV": n} if tma else {}
    return Launch(_bias_kernel, programs, scalars, meta, config.spill, blocks, parts)


def _bias_pass(
    x: Inputs, o: Options, d: Directions, bias: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
) -> torch.Tensor:  # fmt: skip
    """dbias2 of a full bias that several (batch, head) share."""
    launch = remembered(x, "bwd_bwd_bias", lambda: _bias_launch(x, o, d, dout, bias))
    if not x.q.numel():
        return torch.zeros_like(bias)
    return sum_of_parts(launch, bias, x.q, x.k, x.v, bias, x.kv_lens, lse, dout, d.q, d.k, d.v, d.bias, *rows)


def backward_backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    ddq: torch.Tensor | None, ddk: torch.Tensor | None, ddv: torch.Tensor | None, ddbias: torch.Tensor | None,
    ddsinks: torch.Tensor | None, wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq2, dk2, dv2, dbias2 (if wanted), dsinks2, ddout, ddlse, bit for bit the same on every run."""
    d = Directions(x, ddq, ddk, ddv, ddbias, ddsinks)
    ddout, g, u, delta = tangent_pass(x, o, d, out, lse, dout, None if dlse is None else dlse.contiguous())
    rows = (g, u, delta)
    of_sinks = delta
    if x.sinks is not None:
        per_head = (-1, 1) if x.cu_seqlens_q is not None else (1, -1, 1)
        of_sinks = u - delta * (g if d.sinks is None else g - d.sinks.float().view(per_head))
    kind, shared = bias_grad(x, wanted)
    dq, dbias = _q_pass(x, o, d, lse, dout, rows, kind == FULL.value and not shared)
    dk, dv, colsum = _kv_pass(x, o, d, lse, dout, rows, kind == KEY.value)
    if shared:
        dbias = _bias_pass(x, o, d, x.bias, lse, dout, rows)  # type: ignore[arg-type]
    elif kind == KEY.value:
        dbias = reduce_to(colsum, x.bias)  # type: ignore[arg-type]
    elif kind == QUERY.value:
        dbias = query_bias_grad(x, lse, of_sinks)
    return dq, dk, dv, dbias, None if x.sinks is None else sink_grad(x, lse, of_sinks), ddout, g
