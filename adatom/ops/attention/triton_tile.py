"""Attention whose keys fit one tile (at most 128), forward and backward in one launch each: neighbour attention.

    P = softmax(S);  dP = dO V^T;  dS = P (dP - delta);  delta = rowsum(P dP) - dlse
    dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO;  dbias = reduce(dS);  dsinks = -sum P_sink delta

A program owns a (batch, head), or two small ones, and walks over its queries in blocks. As a row of scores is whole,
softmax and delta are computed anew in registers: the backward reads neither out nor lse.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty_like, empty_lse, empty_out
from adatom.ops.attention.triton_call import Config, bias_grad, remembered
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
)
from adatom.tiles.triton_tile import bound, column_sums, operand, place, softmax, sums, times, transposed, unit

# keys up to which a tile serves -> queries in a block, -, warps, stages
CONFIGS: TileConfigs = tables(
    Config(16, 16, 1, 1), Config(32, 16, 2, 1), Config(64, 16, 4, 1), Config(128, 16, 8, 1)
)


@triton.jit(do_not_specialize=TILE_NO_SPECIALIZE)
def _fwd_kernel(Q, K, V, Bias, Sinks, Lens, Out, Lse,
                stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                stride_ob, stride_oh, stride_om, stride_bb, stride_bh, stride_bm, stride_bn,
                heads, len_q, len_k, left, right, scale, softcap,
                HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                BIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                SINKS: tl.constexpr, LENS: tl.constexpr, ALIGNED: tl.constexpr, EVEN_M: tl.constexpr,
                EVEN_N: tl.constexpr, PRECISION: tl.constexpr, CARRY: tl.constexpr, EARLY: tl.constexpr,
                SHARING: tl.constexpr, PER: tl.constexpr, STEPS: tl.constexpr, PIECE: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out and lse of PER (batch, head)."""
    after_previous(EARLY)
    keys = row_of_scores(len_k, ALIGNED)
    for problem in tl.range(0, PER, loop_unroll_factor=PER):
        b, h, n_keys = place(tl.program_id(0) * PER + problem, Lens, heads, len_k, LENS)
        hk = h // SHARING
        offset = n_keys - len_q
        i = tl.arange(0, BLOCK_M)[:, None]
        j = tl.arange(0, BLOCK_N)[None, :]
        k = load_tile(K + at(b, hk, 0, stride_kb, stride_kh, 0, PIECE), b, hk, 0, stride_kn, n_keys, BLOCK_N, HEAD_DIM,
                      BLOCK_D, EVEN_N, False, PIECE)
        v = load_tile(V + at(b, hk, 0, stride_vb, stride_vh, 0, PIECE), b, hk, 0, stride_vn, n_keys, BLOCK_N,
                      HEAD_DIM_V, BLOCK_DV, EVEN_N, False, PIECE)
        kT = transposed(operand(k, k.dtype, PRECISION))
        v_ = operand(v, v.dtype, PRECISION)
        row = row_at(b, h, heads, 0, len_q, False)
        sink = 0.0
        if SINKS:
            sink = tl.load(Sinks + h).to(tl.float32)
        for step in range(STEPS):
            m0 = step * BLOCK_M
            bias = load_bias(Bias + at(b, h, 0, stride_bb, stride_bh, 0), i, j, m0, 0, stride_bm, stride_bn, len_q,
                             keys, BIAS, EVEN_M, EVEN_N)
            q = load_tile(Q + at(b, h, 0, stride_qb, stride_qh, 0, PIECE), b, h, m0, stride_qm, len_q, BLOCK_M,
                          HEAD_DIM, BLOCK_D, EVEN_M, False, PIECE)
            s = times(operand(q, q.dtype, PRECISION), kT, scale, PRECISION)
            p, l, lse, _, _ = softmax(s, bias, sink, m0 + i, j, offset, n_keys, left, right, softcap, BIAS, SOFTCAP,
                                      LEFT, RIGHT, SINKS, LEFT or RIGHT or not EVEN_N, CARRY)
            out = times(operand(p, v.dtype, PRECISION, True), v_, 1.0 / CARRY, PRECISION) * (1.0 / l)[:, None]
            store_tile(Out + at(b, h, 0, stride_ob, stride_oh, 0, PIECE), out, m0, stride_om, len_q, BLOCK_M,
                       HEAD_DIM_V, BLOCK_DV, PIECE)
            rows = m0 + tl.arange(0, BLOCK_M)
            tl.store(Lse + row + rows, lse, mask=rows < len_q)


@triton.jit(do_not_specialize=TILE_NO_SPECIALIZE)
def _bwd_kernel(Q, K, V, Bias, Sinks, Lens, DOut, DLse, DQ, DK, DV, DBias, DSinks,
                stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                stride_gb, stride_gh, stride_gm, stride_dqb, stride_dqh, stride_dqm, stride_dkb, stride_dkh, stride_dkn,
                stride_dvb, stride_dvh, stride_dvn, stride_bb, stride_bh, stride_bm, stride_bn,
                heads, len_q, len_k, left, right, scale, softcap,
                HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                BIAS: tl.constexpr, DBIAS: tl.constexpr, DLSE: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
                RIGHT: tl.constexpr, SINKS: tl.constexpr, LENS: tl.constexpr, ALIGNED: tl.constexpr,
                EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, CARRY: tl.constexpr,
                EARLY: tl.constexpr, SHARING: tl.constexpr, PER: tl.constexpr, STEPS: tl.constexpr, PIECE: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dQ of PER (batch, head), and their part of dK and dV.

    DBias takes tiles of dS (DBIAS FULL), its row sums (QUERY), or its column sums (KEY). DSinks takes each row's share.
    """
    after_previous(EARLY)
    keys = row_of_scores(len_k, ALIGNED)
    for problem in tl.range(0, PER, loop_unroll_factor=PER):
        b, h, n_keys = place(tl.program_id(0) * PER + problem, Lens, heads, len_k, LENS)
        hk = h // SHARING
        offset = n_keys - len_q
        i = tl.arange(0, BLOCK_M)[:, None]
        j = tl.arange(0, BLOCK_N)[None, :]
        columns = tl.arange(0, BLOCK_N)
        k = load_tile(K + at(b, hk, 0, stride_kb, stride_kh, 0, PIECE), b, hk, 0, stride_kn, n_keys, BLOCK_N, HEAD_DIM,
                      BLOCK_D, EVEN_N, False, PIECE)
        v = load_tile(V + at(b, hk, 0, stride_vb, stride_vh, 0, PIECE), b, hk, 0, stride_vn, n_keys, BLOCK_N,
                      HEAD_DIM_V, BLOCK_DV, EVEN_N, False, PIECE)
        k_ = operand(k, k.dtype, PRECISION)
        v_ = operand(v, v.dtype, PRECISION)
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
        row = row_at(b, h, heads, 0, len_q, False)
        sink = 0.0
        if SINKS:
            sink = tl.load(Sinks + h).to(tl.float32)
        column_sum = tl.zeros((BLOCK_N, 8), tl.float32)
        for step in range(STEPS):
            m0 = step * BLOCK_M
            rows = m0 + tl.arange(0, BLOCK_M)
            bias = load_bias(Bias + at(b, h, 0, stride_bb, stride_bh, 0), i, j, m0, 0, stride_bm, stride_bn, len_q,
                             keys, BIAS, EVEN_M, EVEN_N)
            q = load_tile(Q + at(b, h, 0, stride_qb, stride_qh, 0, PIECE), b, h, m0, stride_qm, len_q, BLOCK_M,
                          HEAD_DIM, BLOCK_D, EVEN_M, False, PIECE)
            do = load_tile(DOut + at(b, h, 0, stride_gb, stride_gh, 0, PIECE), b, h, m0, stride_gm, len_q, BLOCK_M,
                           HEAD_DIM_V, BLOCK_DV, EVEN_M, False, PIECE)
            q_ = operand(q, q.dtype, PRECISION)
            do_ = operand(do, do.dtype, PRECISION)
            s = times(q_, transposed(k_), scale, PRECISION)
            p, l, _, t, of_sink = softmax(s, bias, sink, m0 + i, j, offset, n_keys, left, right, softcap, BIAS,
                                          SOFTCAP, LEFT, RIGHT, SINKS, LEFT or RIGHT or not EVEN_N, CARRY)
            p *= (1.0 / l)[:, None]
            p_ = operand(p, do.dtype, PRECISION, True)
            dv += sums(p_, do_, 1.0 / CARRY, PRECISION)
            delta = tl.sum(times(p_, v_, 1.0 / CARRY, PRECISION) * do.to(tl.float32), 1)
            of_dp = bound(do_, v_, BLOCK_DV)
            if DLSE:
                dlse = load_row(DLse + row, b, h, m0, len_q, BLOCK_M, False)
                delta -= dlse
                of_dp += tl.max(tl.abs(dlse), 0)
            to_unit, from_unit = unit(of_dp, PRECISION)
            ds = p * (times(do_, transposed(v_), to_unit, PRECISION) - (delta * to_unit)[:, None])
            from_unit *= 1.0 / CARRY
            if SINKS:
                tl.store(DSinks + row + rows, -(of_sink / l) * delta, mask=rows < len_q)
            if DBIAS == QUERY:
                tl.store(DBias + row + rows, tl.sum(ds, 1) * from_unit, mask=rows < len_q)
            if DBIAS == FULL:
                store_scores(DBias + row * keys, ds * from_unit, i, j, m0, 0, len_q, keys, EVEN_M, EVEN_N)
            of_bias = ds
            if SOFTCAP:
                ds *= 1.0 - t * t
            ds_ = operand(ds, q.dtype, PRECISION, True)
            if DBIAS == KEY:
                of_keys = operand(of_bias, q.dtype, PRECISION, True) if SOFTCAP else ds_
                column_sum += column_sums(of_keys, BLOCK_M, from_unit, PRECISION)
            dk += sums(ds_, q_, scale * from_unit, PRECISION)
            dq = times(ds_, k_, scale * from_unit, PRECISION)
            store_tile(DQ + at(b, h, 0, stride_dqb, stride_dqh, 0, PIECE), dq, m0, stride_dqm, len_q, BLOCK_M, HEAD_DIM,
                       BLOCK_D, PIECE)
        if DBIAS == KEY:
            of_head = DBias + (tl.cast(b, tl.int64) * heads + h) * keys + columns
            tl.store(of_head, (tl.sum(column_sum, 1) * 0.125).to(DBias.dtype.element_ty), mask=columns < keys)
        store_tile(DK + at(b, h, 0, stride_dkb, stride_dkh, 0, PIECE), dk, 0, stride_dkn, keys, BLOCK_N, HEAD_DIM,
                   BLOCK_D, PIECE)
        store_tile(DV + at(b, h, 0, stride_dvb, stride_dvh, 0, PIECE), dv, 0, stride_dvn, keys, BLOCK_N, HEAD_DIM_V,
                   BLOCK_DV, PIECE)


def _forward(x: Inputs, o: Options, out: torch.Tensor) -> Launch:
    call = TileCall(x, o, "tile_fwd", CONFIGS, 2)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(out), *call.bias_strides,
        *call.numbers(),
    )  # fmt: skip
    return Launch(_fwd_kernel, call.program_count(), scalars, call.constants(PER=call.per), call.config.spill)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    launch = remembered(x, "tile_fwd", lambda: _forward(x, o, out))
    launch(x.q, x.k, x.v, x.bias, x.sinks, x.kv_lens, out, lse)
    return out, lse


def _backward(
    x: Inputs, o: Options, dout: torch.Tensor, dlse: bool, wanted: bool, grads: tuple[torch.Tensor, ...]
) -> Launch:
    call = TileCall(x, o, "tile_bwd", CONFIGS, 2)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(dout),
        *(n for grad in grads for n in call.strides(grad)), *call.bias_strides, *call.numbers(),
    )  # fmt: skip
    meta = call.constants(DBIAS=bias_grad(x, wanted)[0], DLSE=dlse, PER=call.per)
    return Launch(_bwd_kernel, call.program_count(), scalars, meta, call.config.spill)


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbias (if wanted), dsinks, bit for bit the same on every run."""
    dlse = None if dlse is None else dlse.contiguous()
    dq, side, of_sinks = empty_like(x.q), side_of(x, wanted), sink_rows(x)
    dk, dv = empty_like(x.k), empty_like(x.v)
    for part, here in pieces(x):
        gk, gv = piece(dk, here), piece(dv, here)
        grads = piece(dq, here), *of_each_head(part, gk, gv)
        launch = remembered(
            part, f"tile_bwd {len(part.q)}", lambda: _backward(part, o, dout, dlse is not None, wanted, grads)
        )
        launch(
            part.q, part.k, part.v, part.bias, x.sinks, part.kv_lens, piece(dout, here), piece(dlse, here), *grads,
            piece(side, here), piece(of_sinks, here),
        )  # fmt: skip
        add_heads(grads[1], gk)
        add_heads(grads[2], gv)
    return dq, dk, dv, reduced(side, x.bias), sink_sum(of_sinks, x)
