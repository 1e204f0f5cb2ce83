"""Attention forward of few queries over many keys (decoding) in Triton, sm_80 and up: keys and values are read once.

A tile's rows are the (query, head) pairs that share keys: all query heads of one kv head, for some queries. Where such
tiles do not fill the GPU, each one's keys are split over programs, whose sums a second kernel adds in order: how many
follows from shapes, which splits have something to do from kv_lens (flash-decoding: Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty, empty_lse, empty_out
from adatom.ops.attention.triton_call import Blocks, Call, Config, Configs, pick, remembered
from adatom.tiles.launch import Launch
from adatom.tiles.triton import (
    LN2,
    LOG2E,
    NONE,
    add_bias,
    after_previous,
    at,
    dot,
    find_sequence,
    load_tile,
    tanh,
    visible,
    whole,
)

# (kind of arithmetic, largest head_dim) -> keys of a tile, warps, stages; the rows of a tile follow from the call
CONFIGS: Configs = {
    90: {
        ("half", 64): Config(64, 128, 4, 3),
        ("half", 128): Config(64, 64, 4, 3),
        ("half", 256): Config(64, 32, 4, 3),
        ("tf32", 64): Config(64, 64, 4, 2),
        ("tf32", 128): Config(64, 32, 4, 2, spill=2048),
        ("tf32", 256): Config(32, 32, 8, 1, spill=8192),
        ("tf32x3", 64): Config(64, 64, 4, 2, spill=2048),
        ("tf32x3", 128): Config(64, 32, 4, 2, spill=4096),
        ("tf32x3", 256): Config(32, 32, 8, 1, spill=16384),
        ("ieee", 64): Config(32, 32, 4, 1, spill=2048),
        ("ieee", 128): Config(16, 32, 4, 1, spill=4096),
        ("ieee", 256): Config(16, 32, 8, 1, spill=16384),
    },
}
CONFIGS[100] = CONFIGS[90] | {
    ("tf32", 64): Config(32, 32, 4, 1),
    ("tf32", 128): Config(32, 32, 4, 1, spill=2048),
    ("tf32x3", 64): Config(32, 32, 4, 1, spill=2048),
    ("tf32x3", 128): Config(32, 32, 4, 1, spill=4096),
}
CONFIGS[80] = CONFIGS[90] | {("half", 64): Config(64, 64, 4, 3), ("half", 128): Config(64, 64, 4, 2)}
CONFIGS[86] = CONFIGS[80] | {("half", 128): Config(64, 32, 4, 3), ("half", 256): Config(64, 32, 4, 2)}

MOST_ROWS = 64  # of a tile
MOST_SPLITS = 256
# of an H100: microseconds that a block of keys takes at least, and a second kernel; bytes that memory gives to each
# multiprocessor in a microsecond
_LATENCY, _COMBINE, _RATE = 0.8, 4.0, 21e3
# numbers that vary freely
_VARY = ["tiles", "splits", "least", "sums", "length", "len_q", "len_k", "left", "right"]


@triton.jit
def _span(tile, b, Lens, CuQ, CuK, tiles, len_q, len_k, left, right, splits, least, GROUP: tl.constexpr,
          LEFT: tl.constexpr, RIGHT: tl.constexpr, LENS: tl.constexpr, VARLEN: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr):
    """Of a tile: (first row, first query token, first key token, len_q, len_k, first key, end of the keys that it sees,
    blocks a split). VARLEN: tiles are of whole tokens; one may lie beyond its sequence."""
    start_q = tl.cast(0, tl.int64)
    start_k = tl.cast(0, tl.int64)
    first = tile * BLOCK_M
    if VARLEN:
        sequence, block = find_sequence(CuQ, len_q, tile, BLOCK_M // GROUP)  # len_q: how many there are
        start_q = tl.load(CuQ + sequence).to(tl.int64)
        start_k = tl.load(CuK + sequence).to(tl.int64)
        len_q = (tl.load(CuQ + sequence + 1) - start_q).to(tl.int32)
        len_k = (tl.load(CuK + sequence + 1) - start_k).to(tl.int32)
        first = block * (BLOCK_M // GROUP * GROUP)
    if LENS:
        len_k = tl.minimum(tl.maximum(tl.load(Lens + b).to(tl.int32), 0), len_k)
    offset = len_k - len_q
    begin = tl.cast(0, tl.int32)
    end = tl.cast(len_k, tl.int32)
    if RIGHT:
        last = tl.minimum((first + BLOCK_M - 1) // GROUP, len_q - 1)
        end = tl.maximum(tl.minimum(end, last + offset + right + 1), 0)
    if LEFT:
        begin = tl.maximum(first // GROUP + offset - left, 0) // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    return first, start_q, start_k, len_q, len_k, begin, end, tl.maximum(tl.cdiv(blocks, splits), least)


@triton.jit(do_not_specialize=["kv_heads", "repeats", *_VARY])
def _keys_kernel(Q, K, V, Bias, Sinks, Lens, CuQ, CuK, Out, Lse, Parts,
                 stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                 stride_ob, stride_oh, stride_om, stride_bb, stride_bh, stride_bm, stride_bn,
                 kv_heads, repeats, tiles, splits, least, sums, length, len_q, len_k, left, right, scale, softcap,
                 HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                 BIAS: tl.constexpr, SAME_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FOLD: tl.constexpr,
                 LEFT: tl.constexpr, RIGHT: tl.constexpr, SINKS: tl.constexpr, LENS: tl.constexpr,
                 VARLEN: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                 EARLY: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One split of one tile: out and lse, or if SPLIT its unscaled sums, and at `sums` beyond, maxima and denominators.

    length: of a row of lse. len_q: the number of sequences, if VARLEN. SAME_BIAS: the rows of a tile have one bias.
    """
    after_previous(EARLY)
    pid = tl.program_id(0)
    tile = pid % tiles
    hk = pid // tiles % kv_heads
    split = pid // tiles // kv_heads % splits
    b = pid // tiles // kv_heads // splits
    len_all = len_k
    first, start_q, start_k, len_q, len_k, begin, end, per = _span(
        tile, b, Lens, CuQ, CuK, tiles, len_q, len_k, left, right, splits, least, GROUP, LEFT, RIGHT, LENS, VARLEN,
        BLOCK_M, BLOCK_N)
    if VARLEN:
        if first >= len_q * GROUP:
            return
    start = begin + split * per * BLOCK_N
    if SPLIT:
        if (split > 0) & (start >= end):
            return
        end = tl.minimum(end, start + per * BLOCK_N)
    offset = len_k - len_q
    r = tl.arange(0, BLOCK_M)
    rows = first + r
    exists = rows < len_q * GROUP
    if VARLEN:
        exists &= r < BLOCK_M // GROUP * GROUP
    i = (rows // GROUP)[:, None]
    h = (hk * GROUP + rows % GROUP)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    q_rows = Q + at(b, 0, start_q, stride_qb, 0, stride_qm, PIECE) + h.to(tl.int64) * whole(stride_qh, PIECE)
    q_mask = exists[:, None] if HEAD_DIM == BLOCK_D else exists[:, None] & (d < HEAD_DIM)
    q = tl.load(q_rows + i.to(tl.int64) * whole(stride_qm, PIECE) + d, mask=q_mask, other=0.0)
    if not TMA:
        K += at(b, hk, start_k, stride_kb, stride_kh, stride_kn, PIECE)
        V += at(b, hk, start_k, stride_vb, stride_vh, stride_vn, PIECE)
    if BIAS != NONE:
        Bias += at(b // repeats, hk * GROUP if SAME_BIAS else 0, 0, stride_bb, stride_bh, 0)
        if not SAME_BIAS:
            bias_rows = Bias + h.to(tl.int64) * stride_bh + i.to(tl.int64) * stride_bm
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:  # a key with score sink and value 0
        if split == 0:
            m = tl.load(Sinks + hk * GROUP + rows % GROUP).to(tl.float32) * (LOG2E if FOLD else 1.0)
            l = tl.where(m == float("-inf"), 0.0, 1.0)

    unit = scale * LOG2E
    for n0 in range(start, end, BLOCK_N):
        if BIAS != NONE:
            along = tl.cast(n0, tl.int64) * stride_bn + j * stride_bn
            if SAME_BIAS and EVEN_N:
                bias = tl.load(Bias + along)
            elif SAME_BIAS:
                bias = tl.load(Bias + along, mask=j < len_all - n0, other=0)
            elif EVEN_N:
                bias = tl.load(bias_rows + along, mask=exists[:, None], other=0)
            else:
                bias = tl.load(bias_rows + along, mask=exists[:, None] & (j < len_all - n0), other=0)
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
            s = tl.where(visible(i, n0 + j, offset, len_k, left, right, LEFT, RIGHT), s, float("-inf"))
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

    dv = tl.arange(0, BLOCK_DV)[None, :]
    if SPLIT:
        slot = ((tl.cast(b, tl.int64) * kv_heads + hk) * tiles + tile) * splits + split
        tl.store(Parts + (slot * BLOCK_M + r[:, None]) * BLOCK_DV + dv, acc, mask=exists[:, None])
        Sums = Parts + sums + slot * (2 * BLOCK_M) + r
        tl.store(Sums, m, mask=exists)
        tl.store(Sums + BLOCK_M, l, mask=exists)
    else:
        seen = l > 0.0
        l = tl.where(seen, l, 1.0)
        o_rows = Out + at(b, 0, start_q, stride_ob, 0, stride_om, PIECE) + h.to(tl.int64) * whole(stride_oh, PIECE)
        o_mask = exists[:, None] if HEAD_DIM_V == BLOCK_DV else exists[:, None] & (dv < HEAD_DIM_V)
        out = (acc * (1.0 / l)[:, None]).to(Out.dtype.element_ty)
        tl.store(o_rows + i.to(tl.int64) * whole(stride_om, PIECE) + dv, out, mask=o_mask)
        lse = tl.where(seen, m * (LN2 if FOLD else 1.0) + tl.log2(l) * LN2, float("-inf"))
        head = tl.cast(b, tl.int64) * kv_heads * GROUP + hk * GROUP + rows % GROUP
        tl.store(Lse + head * length + start_q + rows // GROUP, lse, mask=exists)


@triton.jit(do_not_specialize=["heads", *_VARY])
def _combine_kernel(Parts, Lens, CuQ, CuK, Out, Lse, stride_ob, stride_oh, stride_om,
                    heads, tiles, splits, least, sums, length, len_q, len_k, left, right,
                    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, LEFT: tl.constexpr,
                    RIGHT: tl.constexpr, LENS: tl.constexpr, VARLEN: tl.constexpr, EARLY: tl.constexpr,
                    PIECE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr,
                    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """One row: the sums of its splits, in order. STEP: keys of a block. SPLITS: as many or more, a power of two."""
    after_previous(EARLY)
    pid = tl.program_id(0)
    if VARLEN:  # every row that a tile may have, of every tile
        ROWS: tl.constexpr = BLOCK_M // GROUP * GROUP
        b = 0
        tile = pid // ROWS % tiles
        h = pid // ROWS // tiles * GROUP + pid % GROUP
        r = pid % ROWS
    else:
        i = pid % len_q
        h = pid // len_q % heads
        b = pid // len_q // heads
        r = i * GROUP + h % GROUP
        tile = r // BLOCK_M
        r = r % BLOCK_M
    first, start_q, start_k, len_q, len_k, begin, end, per = _span(
        tile, b, Lens, CuQ, CuK, tiles, len_q, len_k, left, right, splits, least, GROUP, LEFT, RIGHT, LENS, VARLEN,
        BLOCK_M, STEP)
    if VARLEN:
        if first + r >= len_q * GROUP:
            return
    token = start_q + (first + r) // GROUP
    used = tl.maximum(tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), STEP), per), 1)
    slot = ((tl.cast(b, tl.int64) * (heads // GROUP) + h // GROUP) * tiles + tile) * splits
    Sums = Parts + sums + slot * (2 * BLOCK_M) + r
    Parts += (slot * BLOCK_M + r) * BLOCK_DV
    unit: tl.constexpr = 1.0 if FOLD else LOG2E
    every = tl.arange(0, SPLITS)
    top = tl.max(tl.load(Sums + every * (2 * BLOCK_M), mask=every < used, other=float("-inf")), 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    dv = tl.arange(0, BLOCK_DV)[None, :]
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    l = 0.0
    for s0 in range(0, used, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        m = tl.load(Sums + s * (2 * BLOCK_M), mask=s < used, other=float("-inf"))
        share = tl.exp2((m - safe) * unit)
        l += tl.sum(share * tl.load(Sums + s * (2 * BLOCK_M) + BLOCK_M, mask=s < used, other=0.0), 0)
        part = tl.load(Parts + s[:, None] * (BLOCK_M * BLOCK_DV) + dv, mask=(s < used)[:, None], other=0.0)
        acc += tl.sum(share[:, None] * part, 0)
    seen = l > 0.0
    l = tl.where(seen, l, 1.0)
    d = tl.arange(0, BLOCK_DV)
    tl.store(Out + at(b, h, token, stride_ob, stride_oh, stride_om, PIECE) + d,
             (acc / l).to(Out.dtype.element_ty), mask=d < HEAD_DIM_V)
    lse = top * (LN2 if FOLD else 1.0) + tl.log2(l) * LN2
    tl.store(Lse + (tl.cast(b, tl.int64) * heads + h) * length + token, tl.where(seen, lse, float("-inf")))


def splits_of(programs: int, blocks: int, block_bytes: int, sms: int, resident: int) -> int:
    """Over how many programs to split the `blocks` of keys of each of `programs` tiles, `resident` on a multiprocessor.

    The fastest by a model of waves of programs: a block takes its share of the memory's rate, at least its latency.
    """
    slots = sms * resident

    def wave(busy: int, per: int) -> float:
        shared = block_bytes * busy / (sms * _RATE)
        return (_LATENCY**4 + shared**4) ** 0.25 * (per + 2)

    best, fastest = 1, float("inf")
    for splits in range(1, min(blocks, MOST_SPLITS) + 1):
        per = -(-blocks // splits)
        if splits > 1 and per == -(-blocks // (splits - 1)):
            continue
        waves, rest = divmod(programs * splits, slots)
        total = waves * wave(slots, per) + (wave(rest, per) if rest else 0.0)
        total += _COMBINE + splits / 64 if splits > 1 else 0.0
        if total < 0.98 * fastest:
            best, fastest = splits, total
    return best


class _Short(Call):
    """One call as these kernels take it: `tiles` of a kv head (of all sequences when packed), each in `splits` of at
    least `least` blocks of keys."""

    def __init__(self, x: Inputs, o: Options) -> None:
        super().__init__(x, o)
        config = pick("short", CONFIGS, self)
        self.group = self.heads // self.kv_heads
        # queries and keys of a sequence, on average
        self.queries, self.keys = self.len_q, self.len_k
        if self.varlen:
            self.queries, self.keys = (max(1, -(-n // max(self.batch, 1))) for n in (self.len_q, self.len_k))
        rows = self.group * self.queries
        most = min(MOST_ROWS, config.block_m if self.kind != "half" else MOST_ROWS)
        self.config = config._replace(block_m=min(max(16, 1 << (rows - 1).bit_length()), most))
        if self.varlen:  # as many as a sequence may have, and one
            self.tiles = self.len_q // (self.config.block_m // self.group) + self.batch
        else:
            self.tiles = -(-rows // self.config.block_m)
        if self.len_q == 1 and self.right >= 0 and not self.varlen:  # the last query sees the last key
            self.right, self.meta["RIGHT"] = -1, False
        self.splits, self.least = self._splits()
        self._deepen()

    def _splits(self) -> tuple[int, int]:
        block, keys = self.config.block_n, self.keys
        if self.left >= 0 and (self.right >= 0 or self.queries == 1):  # those that a window lets a tile see
            span = (self.config.block_m - 1) // self.group + self.left + max(self.right, 0) + 1
            keys = min(keys, span + block - 1)
        tiles = self.batch * (-(-self.group * self.queries // self.config.block_m) if self.varlen else self.tiles)
        blocks, programs = -(-keys // block), tiles * self.kv_heads
        if not programs or blocks < 2:
            return 1, 1
        if self.device.arch == 0:
            return min(3, blocks), 1
        block_bytes = block * (self.meta["BLOCK_D"] + self.meta["BLOCK_DV"]) * self.x.k.element_size()
        room = self.device.shared_memory // (block_bytes * self.config.num_stages)
        each = max(1, min(room, 16 // self.config.num_warps))
        splits = splits_of(programs, blocks, block_bytes, self.device.sms, each)
        if self.x.kv_lens is None and not self.varlen:
            return splits, 1
        # of ragged sequences the long ones must not be left to few programs, nor short ones be cut to pieces
        least = min(blocks, max(1, (256 if programs < self.device.sms else 1024) // block))
        if self.varlen:  # some may be twice as long as the average, and more
            return min(max(splits, -(-keys // 1024), -(-8 * self.device.sms // programs)), MOST_SPLITS), least
        return min(max(splits, -(-keys // 2048)), MOST_SPLITS, -(-blocks // least)), least

    def _deepen(self) -> None:
        """Two programs on a multiprocessor in place of three, and a stage more, where each has much to do and is one of
        many: they come in whole waves more often."""
        deep = self.kind == "half" and 64 < max(self.head_dim, self.head_dim_v) <= 128 and self.config.num_stages == 3
        many = self.splits == 1 and self.batch * self.kv_heads * self.tiles > 3 * self.device.sms
        if deep and many and self.device.arch >= 90 and self.device.shared_memory > 2**17 and self.keys > 2048:
            self.config = self.config._replace(num_stages=4)


def _launches(x: Inputs, o: Options, out: torch.Tensor) -> tuple[Launch, Launch | None]:
    call = _Short(x, o)
    config = call.config
    strides = (*call.strides(x.q), *call.strides(x.k), *call.strides(x.v), *call.strides(out))
    tma = config.tma and x.kv_lens is None and not call.varlen
    fold = o.scale > 0 and not call.generic
    meta = call.constexprs(config, FOLD=fold, SINKS=x.sinks is not None, TMA=tma)
    for name in ("ALIGNED", "EVEN_M"):
        del meta[name]
    meta |= {
        "GROUP": call.group,
        "SPLIT": call.splits > 1,
        "SAME_BIAS": call.group == 1 and call.len_q == 1 or not (call.bias_strides[1] or call.bias_strides[2]),
    }
    units = call.kv_heads * call.tiles * (1 if call.varlen else call.batch)
    programs = units * call.splits
    rows = (call.len_q, call.batch if call.varlen else call.len_q, call.len_k, call.left, call.right)
    how = call.tiles, call.splits, call.least, programs * config.block_m * meta["BLOCK_DV"], *rows
    scalars = (*strides, *call.bias_strides, call.kv_heads, call.repeats, *how, call.scale, o.softcap)
    blocks: Blocks = {"K": config.block_n, "V": config.block_n} if tma else {}
    keys = Launch(_keys_kernel, programs, scalars, meta, config.spill, blocks, call.splits)
    if call.splits == 1:
        return keys, None
    splits = 1 << (call.splits - 1).bit_length()
    names = ("HEAD_DIM_V", "BLOCK_DV", "FOLD", "LEFT", "RIGHT", "LENS", "VARLEN", "EARLY", "PIECE", "GROUP", "BLOCK_M")
    combining = {name: meta[name] for name in (*names, "launch_pdl")}
    at_once = min(splits, 4096 // meta["BLOCK_DV"])
    combining |= {"STEP": config.block_n, "SPLITS": splits, "BLOCK_S": at_once, "num_warps": 4}
    scalars = (*strides[-3:], call.heads, *how)
    most = config.block_m // call.group * call.group
    results = units * most if call.varlen else call.batch * call.heads * call.len_q
    return keys, Launch(_combine_kernel, results, scalars, combining, 4)  # on sm_120, under Triton 3.9


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    keys, combine = remembered(x, "short", lambda: _launches(x, o, out))
    cu = x.cu_seqlens_q, x.cu_seqlens_k
    if combine is None:
        keys(x.q, x.k, x.v, x.bias, x.sinks, x.kv_lens, *cu, out, lse, None)
        return out, lse
    parts = empty((keys.programs * keys.meta["BLOCK_M"] * (keys.meta["BLOCK_DV"] + 2),), x.q, torch.float32)
    keys(x.q, x.k, x.v, x.bias, x.sinks, x.kv_lens, *cu, out, lse, parts)
    combine(parts, x.kv_lens, *cu, out, lse)
    return out, lse
