"""Attention forward in Triton, sm_80 and up: one program owns a block of queries and walks over the keys it can see.

Online softmax in base 2 (Dao, arXiv:2307.08691). Only blocks of keys that an edge of the mask cuts are masked.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty_lse, empty_out
from adatom.ops.attention.triton_call import LOW_TILES, Blocks, Call, Config, family, pick, remembered
from adatom.tiles.launch import Launch
from adatom.tiles.triton import (
    LN2,
    LOG2E,
    NONE,
    add_bias,
    after_previous,
    at,
    dot,
    keys_of,
    load_bias,
    load_bias_block,
    load_tile,
    locate,
    row_at,
    row_of_scores,
    store_tile,
    tanh,
    visible,
)

_NARROW = Config(64, 64, 4, 3, tma=True)
_WIDE = Config(64, 128, 4, 2, tma=True)  # by pointer it spills, and a mask cuts most of few blocks: see `_tile`
_SHORT = Config(64, 64, 4, 2, tma=True)  # four programs on a multiprocessor
_LOW = Config(64, 64, 4, 3, tma=True, registers=96)  # five programs on a multiprocessor
_TALL = Config(128, 64, 4, 3, tma=True)  # three, which take 1.2 times as long
# (kind of arithmetic, largest head_dim) -> tile, for each family of architectures; found by `adatom bench --tune`.
CONFIGS: dict[int, dict[tuple[str, int], Config]] = {
    90: {
        ("half bias", 32): _LOW,
        ("half", 32): _NARROW,
        ("half bias", 64): _NARROW,
        ("half packed", 64): _NARROW,
        ("half", 64): _WIDE,
        ("half bias", 128): Config(128, 64, 8, 3),
        ("half", 128): Config(128, 64, 4, 2, tma=True),
        ("half", 256): Config(128, 64, 8, 2, tma=True),
        ("tf32", 64): Config(128, 64, 8, 2, tma=True),
        ("tf32", 128): Config(64, 64, 4, 2, tma=True, spill=8192),
        ("tf32", 256): Config(128, 32, 8, 1, spill=32768),
        ("tf32x3 bias", 64): Config(128, 64, 8, 1),
        ("tf32x3", 64): Config(128, 64, 4, 1, spill=2048),
        ("tf32x3", 128): Config(128, 64, 8, 2, tma=True, spill=8192),
        ("tf32x3", 256): Config(128, 32, 8, 1, spill=32768),
        ("ieee", 64): Config(64, 32, 8, 1),
        ("ieee", 128): Config(32, 32, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 32, 8, 1, spill=32768),
    },
    80: {
        ("half", 64): Config(128, 64, 4, 3),
        ("half", 128): Config(128, 64, 8, 2),
        ("half", 256): Config(64, 32, 8, 2),
        ("tf32", 64): Config(64, 64, 4, 2),
        ("tf32", 128): Config(64, 32, 8, 2, spill=2048),
        ("tf32", 256): Config(32, 32, 8, 1, spill=32768),
        ("tf32x3", 64): Config(64, 32, 4, 2),
        ("tf32x3", 128): Config(32, 32, 8, 1, spill=2048),
        ("tf32x3", 256): Config(32, 16, 8, 1, spill=32768),
        ("ieee", 64): Config(64, 32, 8, 1),
        ("ieee", 128): Config(32, 32, 8, 1, spill=2048),
        ("ieee", 256): Config(16, 32, 8, 1, spill=32768),
    },
}
CONFIGS[100] = CONFIGS[90] | LOW_TILES | {
    ("half", 64): _NARROW,
    ("half bias", 128): Config(128, 64, 8, 3, spill=1024),
    ("tf32x3 bias", 64): LOW_TILES["tf32x3", 64],
}
CONFIGS[86] = CONFIGS[80] | {
    ("half", 64): Config(128, 64, 4, 2),
    ("half", 128): Config(64, 64, 4, 2),
    ("half", 256): Config(64, 32, 8, 1),
    ("tf32", 64): Config(64, 32, 4, 2),
    ("tf32", 128): Config(32, 32, 4, 1, spill=2048),
}


@triton.jit(do_not_specialize=["heads", "kv_heads", "repeats", "n_heads", "group", "left", "right", "len_q", "len_k"])
def _fwd_kernel(Q, K, V, Bias, Sinks, Lens, CuQ, CuK, Out, Lse,
                stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                stride_ob, stride_oh, stride_om, stride_bb, stride_bh, stride_bm, stride_bn,
                heads, kv_heads, repeats, n_heads, group, len_q, len_k, left, right, scale, softcap,
                HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FOLD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                SINKS: tl.constexpr, LENS: tl.constexpr, VARLEN: tl.constexpr, ALIGNED: tl.constexpr,
                EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                BIAS_TMA: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):
    after_previous(EARLY)
    row_length = len_q
    keys = row_of_scores(len_k, ALIGNED)
    b, h, tile, start_q, start_k, len_q, len_k = locate(tl.program_id(0), CuQ, CuQ, CuK, Lens, heads, n_heads, group,
                                                        len_q, len_q, len_k, LENS, VARLEN, True, BLOCK_M)
    if VARLEN:
        if tile * BLOCK_M >= len_q:
            return
    hk = h // (heads // kv_heads)
    Out += at(b, h, start_q, stride_ob, stride_oh, stride_om, PIECE)
    Lse += row_at(b, h, heads, start_q, row_length, VARLEN)
    if not TMA:
        Q += at(b, h, start_q, stride_qb, stride_qh, stride_qm, PIECE)
        K += at(b, hk, start_k, stride_kb, stride_kh, stride_kn, PIECE)
        V += at(b, hk, start_k, stride_vb, stride_vh, stride_vn, PIECE)
    if BIAS != NONE and not BIAS_TMA:
        Bias += at(b // repeats, h, 0, stride_bb, stride_bh, 0)
    m0 = tile * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    offset = len_k - len_q
    begin, whole_begin, whole_end, end = keys_of(m0, offset, len_k, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    q = load_tile(Q, b, h, m0, stride_qm, len_q, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_M, TMA, PIECE)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    if SINKS:  # a key with score sink and value 0
        sink = tl.load(Sinks + h).to(tl.float32) * (LOG2E if FOLD else 1.0)
        m = tl.zeros((BLOCK_M,), tl.float32) + sink
        l = tl.zeros((BLOCK_M,), tl.float32) + tl.where(sink == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)

    unit = scale * LOG2E
    for n0 in range(begin, end, BLOCK_N):
        if BIAS_TMA:
            bias = load_bias_block(Bias, b // repeats, h, m0, n0, stride_bb, stride_bh, BLOCK_M, BLOCK_N)
        else:
            bias = load_bias(Bias, i, j, m0, n0, stride_bm, stride_bn, len_q, keys, BIAS, EVEN_M, EVEN_N)
        k = load_tile(K, b, hk, n0, stride_kn, len_k, BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_N, TMA, PIECE)
        s = dot(q, k, None, PRECISION, True)
        if not FOLD:
            if SOFTCAP:
                s = softcap * tanh(s * (scale / softcap))
            else:
                s *= scale
            if BIAS != NONE:
                s = add_bias(s, bias)
        if LEFT or RIGHT or not EVEN_N:
            if (n0 < whole_begin) | (n0 >= whole_end):
                seen = visible(m0 + i, n0 + j, offset, len_k, left, right, LEFT, RIGHT)
                s = tl.where(seen, s, float("-inf"))
        if FOLD:  # nothing comes between q k^T and the softmax: the maximum is scaled, the rest is one FMA
            m_new = tl.maximum(m, tl.max(s, 1) * unit)
        else:  # a bias may be as large as -1e9: what is subtracted must be one of the scores, unrounded
            m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = m_new
        if BIAS != NONE or LEFT or RIGHT or not EVEN_N:  # rows that have seen nothing yet
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        if FOLD:
            p = tl.exp2(s * unit - m_safe[:, None])
            alpha = tl.exp2(m - m_safe)
        else:
            p = tl.exp2((s - m_safe[:, None]) * LOG2E)
            alpha = tl.exp2((m - m_safe) * LOG2E)
        m = m_new
        l = l * alpha + tl.sum(p, 1)
        v = load_tile(V, b, hk, n0, stride_vn, len_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, EVEN_N, TMA, PIECE)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION, UNIT=True)

    seen = l > 0.0
    l = tl.where(seen, l, 1.0)
    store_tile(Out, acc * (1.0 / l)[:, None], m0, stride_om, len_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, PIECE)
    lse = m * (LN2 if FOLD else 1.0) + tl.log2(l) * LN2
    tl.store(Lse + rows, tl.where(seen, lse, float("-inf")), mask=rows < len_q)


def _tile(call: Call) -> Config:
    """The configuration for a call."""
    config = pick("fwd", CONFIGS, call)
    if config is _LOW and call.left < 0 and call.right < 0 and call.x.kv_lens is None:
        low, tall = (
            -(-call.programs(call.len_q, c.block_m) // (each * call.device.sms)) for c, each in ((_LOW, 5), (_TALL, 3))
        )
        return _TALL if 6 * tall < 5 * low else _LOW
    if config is not _WIDE:
        return config
    if call.left >= 0 or not call.use_tma(config, call.x.q, call.x.k, call.x.v):
        return _NARROW
    return _SHORT if call.right >= 0 and call.len_k <= 1024 else _WIDE


def _counts(call: Call) -> tuple[int, ...]:
    """What `Call.counts` says, but a quarter of the heads in flight where that was measured as faster, on an H100: more
    than the keys and values at hand wants L2."""
    heads, kv_heads, repeats, n_heads, group, *rest = call.counts()
    plain = call.kind == "half" and call.x.bias is None and not call.varlen
    if plain and family(call.device.arch) == 90 and (call.head_dim <= 64 or call.right < 0):
        group = max(1, group // 4)
    return (heads, kv_heads, repeats, n_heads, group, *rest)


def _launch(x: Inputs, o: Options, out: torch.Tensor) -> Launch:
    call = Call(x, o)
    config = _tile(call)
    tma = call.use_tma(config, x.q, x.k, x.v)
    scalars = (
        *call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(out), *call.bias_strides,
        *_counts(call), call.scale, o.softcap,
    )  # fmt: skip
    bias_tma = call.bias_by_tma(tma)
    fold = o.scale > 0 and not call.generic
    meta = call.constexprs(config, FOLD=fold, SINKS=x.sinks is not None, TMA=tma, BIAS_TMA=bias_tma)
    blocks: Blocks = {"Q": config.block_m, "K": config.block_n, "V": config.block_n} if tma else {}
    if bias_tma:
        blocks["Bias"] = (config.block_m, config.block_n)
    return Launch(_fwd_kernel, call.programs(call.len_q, config.block_m), scalars, meta, config.spill, blocks)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    launch = remembered(x, "fwd", lambda: _launch(x, o, out))
    launch(x.q, x.k, x.v, x.bias, x.sinks, x.kv_lens, x.cu_seqlens_q, x.cu_seqlens_k, out, lse)
    return out, lse
