"""Second derivative and forward mode of attention whose keys fit one tile (at most 128), in one launch each.

With cotangents ddq, ddk, ddv, ddbias of the first backward (docs/double_backward.md):

    G = scale (ddq K^T + Q ddk^T) + ddbias;  g = rowsum(P G);  W = P (G - g);  ddO = P ddv + W V
    H = dO ddv^T;  u = rowsum(dO ddO);  E = dS (G - g) + P (H - u)
    dQ2 = scale (E K + dS ddk);  dK2 = scale (E^T Q + dS^T ddq);  dV2 = W^T dO;  dbias2 = reduce(E)

A row of scores is whole, so g, delta and u are plain row sums: P, dP and G are computed once, and neither out nor lse
is read. The forward mode is the first line.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty_like, empty_lse, empty_out
from adatom.ops.attention.triton_call import Config, bias_grad, broadcast_strides, remembered
from adatom.ops.attention.triton_tile_call import (
    TILE_NO_SPECIALIZE,
    TileCall,
    TileConfigs,
    add_heads,
    of_each_head,
    piece,
    pieces,
    reduced,
    side_of,
    sink_rows,
    sink_sum,
    tables,
)
from adatom.tiles.launch import Launch
from adatom.tiles.triton import (
    FULL,
    KEY,
    QUERY,
    after_previous,
    at,
    load_bias,
    load_row,
    load_tile,
    row_at,
    row_of_scores,
    store_scores,
    store_tile,
    tangent_of,
)
from adatom.tiles.triton_tile import (
    bound,
    column_sums,
    largest,
    operand,
    place,
    softmax,
    sums,
    times,
    transposed,
    unit,
)

# keys up to which a tile serves -> queries in a block, -, warps, stages
CONFIGS: TileConfigs = tables(
    Config(16, 16, 1, 1, spill=1024),
    Config(32, 16, 2, 1, spill=1024),
    Config(64, 16, 4, 1, spill=2560),
    Config(128, 16, 8, 1, spill=2048),
)
CONFIGS[64][90] |= {
    ("half", 16): Config(64, 16, 4, 1, registers=128),
    ("tf32", 16): Config(16, 16, 1, 1),
    ("tf32x3", 16): Config(32, 16, 2, 1),
}


@triton.jit(do_not_specialize=TILE_NO_SPECIALIZE)
def _second_kernel(Q, K, V, Bias, Sinks, Lens, DOut, DLse, DDQ, DDK, DDV, DDBias, DDSinks, DQ, DK, DV, DBias, DSinks,
                   DDOut, DDLse,
                   stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                   stride_gb, stride_gh, stride_gm, stride_cqb, stride_cqh, stride_cqm, stride_ckb, stride_ckh,
                   stride_ckn, stride_cvb, stride_cvh, stride_cvn, stride_dqb, stride_dqh, stride_dqm,
                   stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, stride_ddb, stride_ddh,
                   stride_ddm, stride_bb, stride_bh, stride_bm, stride_bn, stride_cb, stride_ch, stride_cm, stride_cn,
                   heads, len_q, len_k, left, right, scale, softcap,
                   HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                   SECOND: tl.constexpr, HAS_DDQ: tl.constexpr, HAS_DDK: tl.constexpr, HAS_DDV: tl.constexpr,
                   BIAS: tl.constexpr, DDBIAS: tl.constexpr, DBIAS: tl.constexpr,
                   DLSE: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                   SINKS: tl.constexpr, DDSINKS: tl.constexpr, LENS: tl.constexpr, ALIGNED: tl.constexpr,
                   EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, CARRY: tl.constexpr,
                   EARLY: tl.constexpr, SHARING: tl.constexpr, STEPS: tl.constexpr, PIECE: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """ddO and ddlse, the tangents of out and lse, of one key head of one batch element, and of the query heads that
    share it. SECOND: dQ2, dK2 and dV2 too; DBias takes of E, and DSinks of each row, what the first backward's do.
    """
    after_previous(EARLY)
    keys = row_of_scores(len_k, ALIGNED)
    b, h, n_keys = place(tl.program_id(0), Lens, heads, len_k, LENS)
    hk = h // SHARING
    offset = n_keys - len_q
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    columns = tl.arange(0, BLOCK_N)
    k = load_tile(K + at(b, hk, 0, stride_kb, stride_kh, 0, PIECE), b, hk, 0, stride_kn, n_keys, BLOCK_N, HEAD_DIM,
                  BLOCK_D, EVEN_N, False, PIECE)
    v = load_tile(V + at(b, hk, 0, stride_vb, stride_vh, 0, PIECE), b, hk, 0, stride_vn, n_keys, BLOCK_N, HEAD_DIM_V,
                  BLOCK_DV, EVEN_N, False, PIECE)
    k_ = operand(k, k.dtype, PRECISION)
    v_ = operand(v, v.dtype, PRECISION)
    if HAS_DDK:
        ddk = load_tile(DDK + at(b, hk, 0, stride_ckb, stride_ckh, 0, PIECE), b, hk, 0, stride_ckn, n_keys, BLOCK_N,
                        HEAD_DIM, BLOCK_D, EVEN_N, False, PIECE)
        ddk_ = operand(ddk, k.dtype, PRECISION)
    if HAS_DDV:
        ddv = load_tile(DDV + at(b, hk, 0, stride_cvb, stride_cvh, 0, PIECE), b, hk, 0, stride_cvn, n_keys, BLOCK_N,
                        HEAD_DIM_V, BLOCK_DV, EVEN_N, False, PIECE)
        ddv_ = operand(ddv, v.dtype, PRECISION)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    row = row_at(b, h, heads, 0, len_q, False)
    sink = 0.0
    if SINKS:
        sink = tl.load(Sinks + h).to(tl.float32)
    ddsink = 0.0
    if DDSINKS:
        ddsink = tl.load(DDSinks + h).to(tl.float32)
    column_sum = tl.zeros((BLOCK_N, 8), tl.float32)
    for step in range(STEPS):
        m0 = step * BLOCK_M
        rows = m0 + tl.arange(0, BLOCK_M)
        bias = load_bias(Bias + at(b, h, 0, stride_bb, stride_bh, 0), i, j, m0, 0, stride_bm, stride_bn, len_q,
                         keys, BIAS, EVEN_M, EVEN_N)
        ddbias = load_bias(DDBias + at(b, h, 0, stride_cb, stride_ch, 0), i, j, m0, 0, stride_cm, stride_cn,
                           len_q, keys, DDBIAS, EVEN_M, EVEN_N)
        q = load_tile(Q + at(b, h, 0, stride_qb, stride_qh, 0, PIECE), b, h, m0, stride_qm, len_q, BLOCK_M, HEAD_DIM,
                      BLOCK_D, EVEN_M, False, PIECE)
        q_ = operand(q, q.dtype, PRECISION)
        s = times(q_, transposed(k_), scale, PRECISION)
        p, l, _, t, of_sink = softmax(s, bias, sink, m0 + i, j, offset, n_keys, left, right, softcap, BIAS,
                                      SOFTCAP, LEFT, RIGHT, SINKS, LEFT or RIGHT or not EVEN_N, CARRY)
        p *= (1.0 / l)[:, None]
        p_sink = of_sink / l
        # the tangent of scores, in a unit in which it stays below 1
        of_G = 0.0
        if DDBIAS:
            ddbias = ddbias.to(tl.float32)
            of_G += largest(ddbias)
        if DDSINKS:
            of_G += tl.abs(ddsink)
        if HAS_DDQ:
            ddq = load_tile(DDQ + at(b, h, 0, stride_cqb, stride_cqh, 0, PIECE), b, h, m0, stride_cqm, len_q, BLOCK_M,
                            HEAD_DIM, BLOCK_D, EVEN_M, False, PIECE)
            ddq_ = operand(ddq, q.dtype, PRECISION)
            of_G += tl.abs(scale) * bound(ddq_, k_, BLOCK_D)
        if HAS_DDK:
            of_G += tl.abs(scale) * bound(q_, ddk_, BLOCK_D)
        to_unit, from_unit = unit(of_G, PRECISION)
        if HAS_DDQ and HAS_DDK:
            raw_tangent = times(ddq_, transposed(k_), scale * to_unit, PRECISION)
            raw_tangent += times(q_, transposed(ddk_), scale * to_unit, PRECISION)
        elif HAS_DDQ:
            raw_tangent = times(ddq_, transposed(k_), scale * to_unit, PRECISION)
        elif HAS_DDK:
            raw_tangent = times(q_, transposed(ddk_), scale * to_unit, PRECISION)
        else:
            raw_tangent = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        G, raw_tangent = tangent_of(raw_tangent, t, ddbias * to_unit, 1.0, SOFTCAP)
        g = tl.sum(p * G, 1) * (1.0 / CARRY)
        if DDSINKS:
            g += p_sink * (ddsink * to_unit)
        G -= g[:, None]
        g *= from_unit
        p_ = operand(p, v.dtype, PRECISION, True)
        W_ = operand(p * G, v.dtype, PRECISION, True)
        ddo = times(W_, v_, from_unit / CARRY, PRECISION)
        if HAS_DDV:
            ddo += times(p_, ddv_, 1.0 / CARRY, PRECISION)
        store_tile(DDOut + at(b, h, 0, stride_ddb, stride_ddh, 0, PIECE), ddo, m0, stride_ddm, len_q, BLOCK_M,
                   HEAD_DIM_V, BLOCK_DV, PIECE)
        tl.store(DDLse + row + rows, g, mask=rows < len_q)
        if SECOND:
            do = load_tile(DOut + at(b, h, 0, stride_gb, stride_gh, 0, PIECE), b, h, m0, stride_gm, len_q, BLOCK_M,
                           HEAD_DIM_V, BLOCK_DV, EVEN_M, False, PIECE)
            do_ = operand(do, do.dtype, PRECISION)
            dv += sums(W_, do_, from_unit / CARRY, PRECISION)
            u = tl.sum(ddo * do.to(tl.float32), 1)
            delta = tl.sum(times(p_, v_, 1.0 / CARRY, PRECISION) * do.to(tl.float32), 1)
            of_dp = bound(do_, v_, BLOCK_DV)
            if DLSE:
                dlse = load_row(DLse + row, b, h, m0, len_q, BLOCK_M, False)
                delta -= dlse
                of_dp += tl.max(tl.abs(dlse), 0)
            to_unit_p, from_unit_p = unit(of_dp, PRECISION)
            ds = p * (times(do_, transposed(v_), to_unit_p, PRECISION) - (delta * to_unit_p)[:, None])
            E = ds * (G * (from_unit * from_unit_p))
            if HAS_DDV:
                E += p * (times(do_, transposed(ddv_), 1.0, PRECISION) - u[:, None])
            else:
                E -= p * u[:, None]
            if SINKS:
                tl.store(DSinks + row + rows, -p_sink * (delta * (ddsink - g) + u), mask=rows < len_q)
            if DBIAS == QUERY:
                tl.store(DBias + row + rows, tl.sum(E, 1) * (1.0 / CARRY), mask=rows < len_q)
            if DBIAS == FULL:
                store_scores(DBias + row * keys, E * (1.0 / CARRY), i, j, m0, 0, len_q, keys, EVEN_M, EVEN_N)
            of_bias = E
            if SOFTCAP:
                slope = 1.0 - t * t
                E = E * slope - ds * (2.0 / softcap * from_unit * from_unit_p) * t * slope * raw_tangent
                ds *= slope
            E_ = operand(E, q.dtype, PRECISION)
            if DBIAS == KEY:
                of_keys = operand(of_bias, q.dtype, PRECISION) if SOFTCAP else E_
                column_sum += column_sums(of_keys, BLOCK_M, 1.0 / CARRY, PRECISION)
            dk += sums(E_, q_, scale / CARRY, PRECISION)
            dq = times(E_, k_, scale / CARRY, PRECISION)
            if HAS_DDQ or HAS_DDK:
                ds_ = operand(ds, q.dtype, PRECISION, True)
                if HAS_DDQ:
                    dk += sums(ds_, ddq_, scale / CARRY * from_unit_p, PRECISION)
                if HAS_DDK:
                    dq += times(ds_, ddk_, scale / CARRY * from_unit_p, PRECISION)
            store_tile(DQ + at(b, h, 0, stride_dqb, stride_dqh, 0, PIECE), dq, m0, stride_dqm, len_q, BLOCK_M,
                       HEAD_DIM, BLOCK_D, PIECE)
    if DBIAS == KEY:
        of_head = DBias + (tl.cast(b, tl.int64) * heads + h) * keys + columns
        tl.store(of_head, (tl.sum(column_sum, 1) * 0.125).to(DBias.dtype.element_ty), mask=columns < keys)
    if SECOND:
        store_tile(DK + at(b, h, 0, stride_dkb, stride_dkh, 0, PIECE), dk, 0, stride_dkn, keys, BLOCK_N, HEAD_DIM,
                   BLOCK_D, PIECE)
        store_tile(DV + at(b, h, 0, stride_dvb, stride_dvh, 0, PIECE), dv, 0, stride_dvn, keys, BLOCK_N, HEAD_DIM_V,
                   BLOCK_DV, PIECE)


Given = tuple[torch.Tensor | None, ...]


def _launch(
    x: Inputs, o: Options, dd: Given, dout: torch.Tensor | None, dlse: bool, wanted: bool,
    grads: Given, ddout: torch.Tensor,
) -> Launch:  # fmt: skip
    second = dout is not None
    call = TileCall(x, o, "tile_second" if second else "tile_jvp", CONFIGS)
    strided = (x.q, x.k, x.v, dout, *dd[:3], *grads, ddout)
    scalars = (
        *(n for t in strided for n in call.strides(x.q if t is None else t)), *call.bias_strides,
        *broadcast_strides(dd[3]), *call.numbers(),
    )  # fmt: skip
    ddq, ddk, ddv, ddbias, ddsinks = (d is not None for d in dd)
    meta = call.constants(
        SECOND=second, HAS_DDQ=ddq, HAS_DDK=ddk, HAS_DDV=ddv, DDSINKS=ddsinks, DLSE=dlse,
        DDBIAS=call.meta["BIAS"] if ddbias else 0, DBIAS=bias_grad(x, wanted)[0],
    )  # fmt: skip
    return Launch(_second_kernel, call.program_count(), scalars, meta, call.config.spill)


def backward_backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    ddq: torch.Tensor | None, ddk: torch.Tensor | None, ddv: torch.Tensor | None, ddbias: torch.Tensor | None,
    ddsinks: torch.Tensor | None, wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq2, dk2, dv2, dbias2 (if wanted), dsinks2, ddout, ddlse, bit for bit the same on every run."""
    dlse = None if dlse is None else dlse.contiguous()
    dq, side, of_sinks = empty_like(x.q), side_of(x, wanted), sink_rows(x)
    ddout, ddlse = empty_out(x.q, x.v), empty_lse(x.q)
    dk, dv = empty_like(x.k), empty_like(x.v)
    for part, here in pieces(x):
        gk, gv = piece(dk, here), piece(dv, here)
        grads = piece(dq, here), *of_each_head(part, gk, gv)
        dd = *(piece(d, here) for d in (ddq, ddk, ddv, ddbias)), ddsinks
        launch = remembered(
            part, f"tile_second {len(part.q)}",
            lambda: _launch(part, o, dd, dout, dlse is not None, wanted, grads, ddout),
        )  # fmt: skip
        launch(
            part.q, part.k, part.v, part.bias, x.sinks, part.kv_lens, piece(dout, here), piece(dlse, here), *dd,
            *grads, piece(side, here), piece(of_sinks, here), piece(ddout, here), piece(ddlse, here),
        )  # fmt: skip
        add_heads(grads[1], gk)
        add_heads(grads[2], gv)
    return dq, dk, dv, reduced(side, x.bias), sink_sum(of_sinks, x), ddout, ddlse


def jvp(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, tq: torch.Tensor | None, tk: torch.Tensor | None,
    tv: torch.Tensor | None, tbias: torch.Tensor | None, tsinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tangents of out and lse along tangents of the inputs."""
    dd = (tq, tk, tv, tbias, tsinks)
    tout, tlse = empty_out(x.q, x.v), empty_lse(x.q)
    launch = remembered(x, "tile_jvp", lambda: _launch(x, o, dd, None, False, False, (None, None, None), tout))
    launch(x.q, x.k, x.v, x.bias, x.sinks, x.kv_lens, None, None, *dd, None, None, None, None, None, tout, tlse)
    return tout, tlse
