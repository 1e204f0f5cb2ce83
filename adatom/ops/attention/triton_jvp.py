"""Forward mode of attention in Triton, sm_80 and up: the tangents of out and lse, in one pass over query blocks.

    G = scale (tq K^T + Q tk^T) + tbias;  g = rowsum(P G) = tangent of lse;  tangent of out = P tv + (P G) V - g O

The second derivative begins with the same pass, its cotangents in the place of tangents (docs/double_backward.md).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.ops.attention.problem import Inputs, Options, Remembered, empty_like, empty_lse, empty_out
from adatom.ops.attention.triton_call import (
    LEAST_BY_TMA,
    LOW_TILES,
    NO_SPECIALIZE,
    Blocks,
    Call,
    Config,
    Configs,
    broadcast_strides,
    pick,
    plain,
    remembered,
    without_options,
)
from adatom.ops.attention.triton_parts import dot_parts, in_parts, in_tiles, load_parts, pay, turned, unit_of
from adatom.tiles.launch import Launch
from adatom.tiles.triton import (
    LOG2E,
    NONE,
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
    product,
    row_at,
    row_of_scores,
    scale_of,
    split,
    store_tile,
    tangent_of,
)

# (kind of arithmetic, largest head_dim) -> tile, for each family of architectures; found by `adatom bench --tune`.
TANGENT_CONFIGS: Configs = {
    90: {
        ("half full bias", 64): Config(64, 32, 4, 3, tma=True),
        ("half", 64): Config(64, 64, 4, 3, tma=True),
        ("half wide bias", 128): Config(128, 32, 8, 2, tma=True),
        ("half ragged bias", 128): Config(64, 32, 4, 2, tma=True),
        ("half", 128): Config(128, 64, 8, 2, tma=True),
        ("half", 256): Config(64, 32, 4, 1, tma=True, spill=3072),
        ("tf32", 64): Config(64, 64, 4, 2, tma=True, spill=4096),
        ("tf32", 128): Config(128, 64, 8, 2, tma=True, spill=8192),
        ("tf32", 256): Config(64, 32, 8, 2, tma=True, spill=32768),
        ("tf32x3", 64): Config(128, 64, 8, 2, tma=True, spill=4096),
        ("tf32x3", 128): Config(128, 64, 8, 2, tma=True, spill=8192),
        ("tf32x3", 256): Config(64, 32, 4, 1, spill=32768),
        ("ieee", 64): Config(32, 16, 8, 1),
        ("ieee", 128): Config(16, 16, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 16, 8, 1, spill=32768),
    },
}
TANGENT_CONFIGS[80] = plain(TANGENT_CONFIGS[90]) | {
    ("tf32", 128): Config(64, 32, 8, 1, spill=2048),
    ("tf32", 256): Config(16, 16, 4, 1, spill=32768),
    ("tf32x3", 128): Config(64, 16, 4, 1, spill=2048),
    ("tf32x3", 256): Config(16, 16, 4, 1, spill=32768),
    ("tf32", 64): Config(64, 32, 4, 1),
    ("tf32x3", 64): Config(32, 32, 4, 1),
    ("half", 64): Config(64, 32, 4, 2),
    ("half", 128): Config(32, 32, 4, 2),
    ("half", 256): Config(32, 16, 8, 1),
}
TANGENT_CONFIGS[86] = TANGENT_CONFIGS[80]
TANGENT_CONFIGS[100] = without_options(TANGENT_CONFIGS[90]) | LOW_TILES | {
    ("half", 128): Config(64, 64, 4, 2, tma=True, spill=2048),
}
# Where keys and values come in parts (triton_parts.py).
PARTS_CONFIGS: Configs = {
    90: {
        ("tf32 bias", 64): Config(64, 64, 4, 2, tma=True),
        ("tf32", 64): Config(64, 64, 4, 3, tma=True),
        ("tf32x3 bias", 64): Config(128, 64, 8, 2, tma=True),
        ("tf32x3", 64): Config(128, 64, 8, 3, tma=True),
    },
}


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def _tangent_kernel(Q, K, V, Bias, Sinks, Lens, CuQ, CuK, Out, Lse, DOut, DLse, DDQ, DDK, DDV, DDBias, DDSinks,
                    Parts, Units, DDOut, G, U, Delta,
                    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
                    stride_cqb, stride_cqh, stride_cqm, stride_ckb, stride_ckh, stride_ckn,
                    stride_cvb, stride_cvh, stride_cvn, stride_ddb, stride_ddh, stride_ddm,
                    stride_bb, stride_bh, stride_bm, stride_bn, stride_cb, stride_ch, stride_cm, stride_cn,
                    heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right, scale, softcap,
                    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                    BIAS: tl.constexpr, DDBIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
                    RIGHT: tl.constexpr, SINKS: tl.constexpr, DDSINKS: tl.constexpr, LENS: tl.constexpr,
                    VARLEN: tl.constexpr, ALIGNED: tl.constexpr, SECOND: tl.constexpr, DLSE: tl.constexpr,
                    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                    PARTS: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_N: tl.constexpr):
    """ddO and g of a block of queries: the tangents of out and lse. SECOND: also u and delta, for the other passes.
    PARTS: keys, values and their tangents come in parts (triton_parts.py)."""
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
    Out += at(b, h, start_q, stride_ob, stride_oh, stride_om, PIECE)
    DDOut += at(b, h, start_q, stride_ddb, stride_ddh, stride_ddm, PIECE)
    if not TMA:
        Q += at(b, h, start_q, stride_qb, stride_qh, stride_qm, PIECE)
        DDQ += at(b, h, start_q, stride_cqb, stride_cqh, stride_cqm, PIECE)
        K += at(b, hk, start_k, stride_kb, stride_kh, stride_kn, PIECE)
        V += at(b, hk, start_k, stride_vb, stride_vh, stride_vn, PIECE)
        DDK += at(b, hk, start_k, stride_ckb, stride_ckh, stride_ckn, PIECE)
        DDV += at(b, hk, start_k, stride_cvb, stride_cvh, stride_cvn, PIECE)
    if BIAS != NONE:
        Bias += at(b // repeats, h, 0, stride_bb, stride_bh, 0)
    if DDBIAS:
        DDBias += at(b // repeats, h, 0, stride_cb, stride_ch, 0)
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    offset = len_k - len_q
    begin, whole_begin, whole_end, end = keys_of(m0, offset, len_k, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    q = load_tile(Q, b, h, m0, stride_qm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
    ddq = load_tile(DDQ, b, h, m0, stride_cqm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
    lse = load_lse(Lse + row, b, h, m0, len_q, BLOCK_M, BIAS, EVEN_M, False)
    if PARTS:
        lse -= 14.0  # P is multiplied by 2^14, which fills float16, and divided by its sum
        q_parts, q_unit = in_parts(q)
        ddq_parts, ddq_unit = in_parts(ddq)
        n_blocks = tl.cdiv(len_k, BLOCK_N)
        bhk = b * kv_heads + hk
        Units += bhk * n_blocks
        n_units = n_heads // heads * kv_heads * n_blocks  # of each tensor
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    g = tl.zeros((BLOCK_M,), tl.float32)
    gr = tl.zeros((BLOCK_M,), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        sink = tl.load(Sinks + h).to(tl.float32)
        p_sink = tl.exp2(sink * LOG2E - lse)
        l += p_sink
        if DDSINKS:
            of_sink = p_sink * tl.load(DDSinks + h).to(tl.float32)
            g += of_sink
            gr += of_sink
    for n0 in range(begin, end, BLOCK_N):
        cut = (n0 < whole_begin) | (n0 >= whole_end)
        if PARTS:
            at_tile = Units + n0 // BLOCK_N
            k_unit = tl.load(at_tile)
            ddk_unit = tl.load(at_tile + n_units)
            v_unit = tl.load(at_tile + 2 * n_units)
            ddv_unit = tl.load(at_tile + 3 * n_units)
            k = turned(load_parts(Parts, 0, bhk, n0, BLOCK_N, BLOCK_D, PRECISION))
            ddk = turned(load_parts(Parts, 1, bhk, n0, BLOCK_N, BLOCK_D, PRECISION))
            raw = dot_parts(q_parts, k, PRECISION)
            raw_unit = unit_of(q_unit, k_unit) * scale
            raw_tangent = dot_parts(ddq_parts, k, PRECISION) * (unit_of(ddq_unit, k_unit) * scale)
            raw_tangent += dot_parts(q_parts, ddk, PRECISION) * (unit_of(q_unit, ddk_unit) * scale)
            tangent_unit = 1.0
        else:
            k = load_tile(K, b, hk, n0, stride_kn, len_k, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
            ddk = load_tile(DDK, b, hk, n0, stride_ckn, len_k, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
            raw = dot(q, k, None, PRECISION, True)
            raw_tangent = dot(q, ddk, dot(ddq, k, None, PRECISION, True), PRECISION, True)
            raw_unit = scale
            tangent_unit = scale
        bias = load_bias(Bias, i, j, m0, n0, stride_bm, stride_bn, len_q, keys, BIAS, EVEN_M, EVEN_N)
        p, t = probabilities(raw, lse[:, None], bias, m0 + i, n0 + j, cut, len_k, offset, left, right, raw_unit,
                             softcap, BIAS, SOFTCAP, LEFT, RIGHT, LEFT or RIGHT or not EVEN_N)
        if DDBIAS != NONE or SOFTCAP:
            ddbias = load_bias(DDBias, i, j, m0, n0, stride_cm, stride_cn, len_q, keys, DDBIAS, EVEN_M, EVEN_N)
            tangent, _ = tangent_of(raw_tangent, t, ddbias, tangent_unit, SOFTCAP)
        else:
            tangent = raw_tangent * tangent_unit
        pg = p * tangent
        g += tl.sum(pg, 1)
        l += tl.sum(p, 1)
        if PARTS:
            ddv = load_parts(Parts, 3, bhk, n0, BLOCK_N, BLOCK_DV, PRECISION)
            acc += dot_parts(split(p), ddv, PRECISION) * ddv_unit
            scale_pg, pg_unit = scale_of(tl.max(tl.abs(pg), 1))
            v = load_parts(Parts, 2, bhk, n0, BLOCK_N, BLOCK_DV, PRECISION)
            acc += dot_parts(split(pg * scale_pg[:, None]), v, PRECISION) * product(pg_unit, v_unit)[:, None]
        else:
            v = load_tile(V, b, hk, n0, stride_vn, len_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
            ddv = load_tile(DDV, b, hk, n0, stride_cvn, len_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
            acc = dot(p.to(v.dtype), ddv, acc, PRECISION, UNIT=True)
            pg = pg.to(v.dtype)
            if v.dtype != tl.float32:  # what the product below sums: it cancels against g O where one key has it all
                gr += tl.sum(pg.to(tl.float32), 1)
            acc = dot(pg, v, acc, PRECISION)
    o = load_tile(Out, b, h, m0, stride_om, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, False, PIECE).to(tl.float32)
    l = tl.where(l == 0.0, 1.0, l)
    g = g / l
    if q.dtype != tl.float32:
        ddo = acc / l[:, None] - (gr / l)[:, None] * o
    else:
        ddo = acc / l[:, None] - g[:, None] * o
    store_tile(DDOut, ddo, m0, stride_ddm, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, PIECE)
    tl.store(G + row + rows, g, mask=rows < len_q)
    if SECOND:
        DOut += at(b, h, start_q, stride_gb, stride_gh, stride_gm, PIECE)
        do = load_tile(DOut, b, h, m0, stride_gm, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, EVEN_M, False,
                       PIECE).to(tl.float32)
        delta = tl.sum(o * do, 1)
        if DLSE:
            delta -= load_row(DLse + row, b, h, m0, len_q, BLOCK_M, False)
        tl.store(U + row + rows, tl.sum(ddo * do, 1), mask=rows < len_q)
        tl.store(Delta + row + rows, delta, mask=rows < len_q)


class Directions:
    """The cotangents of the first backward, or tangents of the inputs, as the kernels take them: absent ones are 0."""

    def __init__(self, x: Inputs, *given: torch.Tensor | None) -> None:
        self.q, self.k, self.v = (torch.zeros_like(t) if d is None else d for d, t in zip(given[:3], x[:3]))
        self.bias, self.sinks = given[3:]
        self.bias_strides = broadcast_strides(self.bias)


def _launch(
    x: Inputs, o: Options, d: Directions, out: torch.Tensor, dout: torch.Tensor | None, dlse: bool,
    ddout: torch.Tensor,
) -> Launch:  # fmt: skip
    call = Call(x, o)
    config = pick("tangent", TANGENT_CONFIGS, call)
    tma = call.use_tma(config, x.q, x.k, x.v, d.q, d.k, d.v)
    parts = pay(call, tma)
    if parts:
        config = pick("tangent of parts", PARTS_CONFIGS, call)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(out),
        *call.strides(out if dout is None else dout), *call.strides(d.q), *call.strides(d.k), *call.strides(d.v),
        *call.strides(ddout), *call.bias_strides, *d.bias_strides, *call.counts(), call.scale, o.softcap,
    )  # fmt: skip
    meta = call.constexprs(
        config, DDBIAS=call.meta["BIAS"] if d.bias is not None else 0, SINKS=x.sinks is not None,
        DDSINKS=d.sinks is not None, SECOND=dout is not None, DLSE=dlse, TMA=tma, PARTS=parts,
    )  # fmt: skip
    m, n = config.block_m, config.block_n
    blocks: Blocks = {"Q": m, "DDQ": m} if tma else {}
    if parts:
        blocks["Parts"] = n, call.meta["BLOCK_D"]
    elif tma:
        blocks |= {"K": n, "V": n, "DDK": n, "DDV": n}
    return Launch(_tangent_kernel, call.programs(call.len_q, m), scalars, meta, config.spill, blocks)


def _halves_cost_nothing(x: Inputs, launch: Launch, sms: int) -> bool:
    """Whether each operand comes in two parts, as it would in halves, and half of the programs, one of them on a
    multiprocessor at a time and twice or more in turn, take half of the turns."""
    if not launch.meta["PARTS"] or launch.meta["PRECISION"] != "fp16x3":
        return False
    if x.q.numel() * x.k.shape[2] < 2 * LEAST_BY_TMA:
        return False
    turns, of_half = (-(-programs // sms) for programs in (launch.programs, launch.programs // 2))
    return 4 <= 2 * of_half <= turns


def _halves(
    x: Inputs, d: Directions, rows: Iterable[torch.Tensor | None]
) -> Iterator[tuple[Inputs, Directions, Iterable[torch.Tensor | None]]]:
    """(inputs, directions, rows) of a call in two halves, of its batch or of the heads of one element. Keys and values
    in parts are as large as they and their directions together, the peak of the memory: of a half, half of that. Whole
    where there is nothing to halve, or halves lie between multiples of 16 bytes."""
    dim = int(len(x.q) == 1)
    tensors: list[Any] = [x.q, x.k, x.v, x.bias, d.q, d.k, d.v, d.bias, *rows]
    cut = [t for t in tensors if t is not None and t.shape[dim] > 1]
    if (
        x.k.shape[dim] == 1
        or (dim == 1 and x.sinks is not None)
        or any(t.shape[dim] % 2 or t.shape[dim] // 2 * t.stride(dim) * t.element_size() % 16 for t in cut)
    ):
        yield x, d, rows
        return
    for i in (0, 1):
        q, k, v, bias, *rest = (t if t is None or t.shape[dim] == 1 else t.chunk(2, dim)[i] for t in tensors)
        half = Inputs(q, k, v, bias, x.sinks)
        of = Directions(half, *rest[:4], d.sinks)
        yield Remembered.of(half, x.memo) if isinstance(x, Remembered) else half, of, rest[4:]


def tangent_pass(
    x: Inputs, o: Options, d: Directions, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """ddO, g; with dout also u and delta."""
    ddout, g = empty_out(x.q, x.v), empty_lse(x.q)
    u, delta = (g, g) if dout is None else (empty_like(lse), empty_like(lse))
    launch = remembered(x, "tangent", lambda: _launch(x, o, d, out, dout, dlse is not None, ddout))
    rows: Any = out, lse, dout, dlse, ddout, g, u, delta
    halved = _halves_cost_nothing(x, launch, facts(x.q.device).sms)
    for part, of, some in _halves(x, d, rows) if halved else ((x, d, rows),):
        _tangents(part, o, of, launch if part is x else None, *some)
    return ddout, g, u, delta


def _tangents(
    x: Inputs, o: Options, d: Directions, launch: Launch | None, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor | None, dlse: torch.Tensor | None, ddout: torch.Tensor, *rows: torch.Tensor,
) -> None:  # fmt: skip
    """Write ddO and g, u, delta of the whole call, by the Launch given, or of half of it."""
    if launch is None:
        launch = remembered(x, "half tangent", lambda: _launch(x, o, d, out, dout, dlse is not None, ddout))
    parts, units = in_tiles(x, o, d.k, d.v, launch.meta["BLOCK_N"]) if launch.meta["PARTS"] else (None, None)
    launch(
        x.q, x.k, x.v, x.bias, x.sinks, x.kv_lens, x.cu_seqlens_q, x.cu_seqlens_k, out, lse, dout, dlse,
        d.q, d.k, d.v, d.bias, d.sinks, parts, units, ddout, *rows,
    )  # fmt: skip


def jvp(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, tq: torch.Tensor | None, tk: torch.Tensor | None,
    tv: torch.Tensor | None, tbias: torch.Tensor | None, tsinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tangents of out and lse along tangents of the inputs."""
    ddout, g, _, _ = tangent_pass(x, o, Directions(x, tq, tk, tv, tbias, tsinks), out, lse, None, None)
    return ddout, g
