"""The kernels ahead of the Hopper backward and behind it: what is summed over rows, and dQ from its float32 sum, or
from dS, where that is stored as the gradient of the bias."""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous, at, find_sequence, keys_of, load_tile, store_tile, visible, whole


@triton.jit
def _block(pid, Cu, heads, len_q, n_m, n_sequences, VARLEN: tl.constexpr, BLOCK_M: tl.constexpr):
    """(batch, head, first query, queries, first token, offset of the first token in lse) of block number pid of all
    blocks of queries; n_m of them are one head's."""
    bh = pid // n_m
    block = pid - bh * n_m
    if VARLEN:
        sequence, block = find_sequence(Cu, n_sequences, block, BLOCK_M)
        start = tl.load(Cu + sequence).to(tl.int64)
        length = (tl.load(Cu + sequence + 1) - start).to(tl.int32)
        return bh * 0, bh, block * BLOCK_M, length, start, tl.cast(bh, tl.int64) * len_q + start
    else:
        b = bh // heads
        return b, bh - b * heads, block * BLOCK_M, len_q, tl.cast(0, tl.int64), tl.cast(bh, tl.int64) * len_q


@triton.jit(do_not_specialize=["repeats", "heads", "len_q", "n_m", "n_sequences"])
def _before_kernel(Out, DOut, Lse, DLse, Rows, Delta, DQ, Taken, Turns, Plain, Cu, Bias, stride_ob, stride_oh,
                   stride_om, stride_gb, stride_gh, stride_gm, stride_bb, stride_bh, stride_bm, repeats, heads, len_q,
                   n_m, n_sequences, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, D: tl.constexpr,
                   DLSE: tl.constexpr, SUM: tl.constexpr, TURNS: tl.constexpr, PLAIN: tl.constexpr,
                   NATURAL: tl.constexpr, BIAS: tl.constexpr, VARLEN: tl.constexpr, EARLY: tl.constexpr,
                   PIECE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a block of queries: delta, lse as the backward wants it (Rows), zeros for the SUM of dQ and TURNS zeros for
    the turns of its pieces. PLAIN: delta also as lse lies. NATURAL: lse in natural units, not log2. BIAS: less the bias
    per query."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what is wanted first is written last, and is in L2
    b, h, m0, length, start, row = _block(pid, Cu, heads, len_q, n_m, n_sequences, VARLEN, BLOCK_M)
    i = tl.arange(0, BLOCK_M)
    some = m0 + i < length
    at_q = row + m0 + i
    at_padded = tl.cast(pid, tl.int64) * BLOCK_M + i
    if pid == 0:
        tl.store(Taken, 0)
    if TURNS:
        tl.store(Turns + pid * TURNS + tl.arange(0, TURNS), tl.zeros((TURNS,), tl.int32))
    if SUM:
        zeros = tl.arange(0, BLOCK_M * D)
        tl.store(DQ + tl.cast(pid, tl.int64) * (BLOCK_M * D) + zeros, tl.zeros((BLOCK_M * D,), tl.float32))
    o = load_tile(Out + at(b, h, start, stride_ob, stride_oh, stride_om, PIECE), b, h, m0, stride_om, length, BLOCK_M,
                  HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    do = load_tile(DOut + at(b, h, start, stride_gb, stride_gh, stride_gm, PIECE), b, h, m0, stride_gm, length, BLOCK_M,
                   HEAD_DIM_V, BLOCK_DV, False, False, PIECE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(DLse + at_q, mask=some, other=0.0)
    lse = tl.load(Lse + at_q, mask=some, other=float("-inf"))
    lse = tl.where(lse < -2.3e38, float("inf"), lse)  # nothing seen, or what overflows in log2 units
    if BIAS:
        X = Bias + at(b // repeats, h, 0, stride_bb, stride_bh, 0)
        bias = tl.load(X + (m0 + i).to(tl.int64) * stride_bm, mask=some, other=0)
        if Bias.dtype.element_ty == tl.uint8:
            lse = tl.where(bias != 0, lse, float("inf"))
        else:
            lse -= bias.to(tl.float32)
    tl.store(Rows + at_padded, lse if NATURAL else lse * 1.4426950408889634)
    tl.store(Delta + at_padded, delta)
    if PLAIN:
        tl.store(Plain + at_q, delta, mask=some)


@triton.jit(do_not_specialize=["heads", "len_q", "n_m", "n_sequences"])
def _behind_kernel(Sum, DQ, Turns, Cu, stride_b, stride_h, stride_m, heads, len_q, n_m, n_sequences, scale,
                   HEAD_DIM: tl.constexpr, D: tl.constexpr, LOOK: tl.constexpr, CHAINS: tl.constexpr,
                   VARLEN: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr):
    """dQ of 64 queries and 32 or 64 columns: the sum, or CHAINS sums, from the order of the accumulators to that of
    rows, scaled. LOOK: a sum whose turn is still 0 nobody wrote; it is zero."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was written last is read first, from L2
    b, h, m0, length, start, row = _block(pid // 2, Cu, heads, len_q, n_m, n_sequences, VARLEN, BLOCK_M)
    WIDE: tl.constexpr = min(D, 64)
    col0 = 0
    if D == 128:
        col0 = pid % 2 * 64
    else:
        m0 += pid % 2 * 64
    x = tl.zeros((64 * WIDE,), tl.float32)
    for chain in tl.static_range(CHAINS):
        piece = (pid // 2 * CHAINS + chain) * 2 + pid % 2
        X = Sum + tl.cast(piece, tl.int64) * (64 * WIDE) + tl.arange(0, 64 * WIDE)
        if LOOK:
            x += tl.load(X, mask=tl.load(Turns + piece) != 0, other=0.0)
        else:
            x += tl.load(X)
    x *= scale
    x = tl.reshape(x, (4, WIDE // 8, 8, 4, 2, 2))
    x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), (64, WIDE))
    i = tl.arange(0, 64)[:, None]
    d = col0 + tl.arange(0, WIDE)[None, :]
    ptr = DQ + at(b, h, start + m0, stride_b, stride_h, stride_m, PIECE) + i * whole(stride_m, PIECE) + d
    tl.store(ptr, x.to(DQ.dtype.element_ty), mask=(m0 + i < length) & (d < HEAD_DIM))


@triton.jit
def _add_seen(dq, DS, K, b, h, hk, m0, n0, offset, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):
    """dq + dS K of the keys n0.., not all of which all queries see: of what they do not see nobody may have written dS,
    which becomes 0, and keys beyond kv_lens may be NaN."""
    i = m0 + tl.arange(0, BLOCK_M)[:, None]
    j = n0 + tl.arange(0, BLOCK_N)
    ds = DS.load([b, h, m0, n0]).reshape(BLOCK_M, BLOCK_N)
    ds = tl.where(visible(i, j[None, :], offset, keys, left, right, LEFT, RIGHT), ds, 0.0)
    DS.store([b, h, m0, n0], ds.reshape(1, 1, BLOCK_M, BLOCK_N))
    k = K.load([b, hk, n0, 0]).reshape(BLOCK_N, D)
    return tl.dot(ds, tl.where(j[:, None] < keys, k, 0.0), dq)


@triton.jit(do_not_specialize=["heads", "sharing", "len_q", "len_k", "left", "right", "n_m"])
def _dq_kernel(DS, K, DQ, Lens, stride_b, stride_h, stride_m, heads, sharing, len_q, len_k, left, right, n_m, scale,
               HEAD_DIM: tl.constexpr, D: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, LENS: tl.constexpr,
               EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dQ = scale dS K of a block of queries, and zeros for the dS of keys that these do not see. DS, K: descriptors."""
    after_previous(EARLY)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was written last is read first, from L2
    bh = pid // n_m
    m0 = (pid - bh * n_m) * BLOCK_M
    b = bh // heads
    h = bh - b * heads
    hk = h // sharing
    keys = len_k
    if LENS:
        keys = tl.minimum(tl.maximum(tl.load(Lens + b).to(tl.int32), 0), len_k)
    offset = keys - len_q
    CUT: tl.constexpr = LEFT or RIGHT or LENS
    begin, whole_begin, whole_end, end = keys_of(m0, offset, keys, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for n0 in range(whole_begin, whole_end if CUT else end, BLOCK_N):
        ds = DS.load([b, h, m0, n0]).reshape(BLOCK_M, BLOCK_N)
        dq = tl.dot(ds, K.load([b, hk, n0, 0]).reshape(BLOCK_N, D), dq)
    if CUT:
        zeros = tl.zeros((1, 1, BLOCK_M, BLOCK_N), DQ.dtype.element_ty)
        for n0 in range(whole_end, end, BLOCK_N):
            dq = _add_seen(dq, DS, K, b, h, hk, m0, n0, offset, keys, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N, D)
        for n0 in range(tl.cdiv(end, BLOCK_N) * BLOCK_N, len_k, BLOCK_N):
            DS.store([b, h, m0, n0], zeros)
        if LEFT:
            for n0 in range(begin, whole_begin, BLOCK_N):
                dq = _add_seen(dq, DS, K, b, h, hk, m0, n0, offset, keys, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N, D)
            for n0 in range(0, tl.minimum(begin, len_k), BLOCK_N):
                DS.store([b, h, m0, n0], zeros)
    X = DQ + at(b, h, 0, stride_b, stride_h, stride_m, PIECE)
    store_tile(X, dq * scale, m0, stride_m, len_q, BLOCK_M, HEAD_DIM, D, PIECE)


def blocks_of_head(call: Call, block_m: int) -> int:
    """Blocks of queries of one head: of one batch element, or of all packed sequences (some may be empty)."""
    return call.len_q // block_m + call.batch if call.varlen else -(-call.len_q // block_m)


def ends(
    call: Call, dim: int, block_m: int, out: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor, look: bool,
    chains: int, **meta: int,
) -> tuple[Launch, Launch]:  # fmt: skip
    """The launches (before, behind) for a float32 sum with `dim` columns in memory, in blocks of block_m queries; look:
    some sums nobody may have written; chains: sums of a block; meta: DLSE, SUM, TURNS, PLAIN, NATURAL and BIAS of the
    one before."""
    n_m = blocks_of_head(call, block_m)
    n_blocks = n_m * call.heads * (1 if call.varlen else call.batch)
    sizes = (call.heads, call.len_q, n_m, call.batch)
    strides_o, strides_g, strides_q = (call.strides(x) for x in (out, dout, dq))
    shared = {
        "D": dim, "VARLEN": call.varlen, "EARLY": True, "PIECE": call.piece, "BLOCK_M": block_m, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    before = Launch(
        _before_kernel, n_blocks, (*strides_o, *strides_g, *call.bias_strides[:3], call.repeats, *sizes),
        shared | meta | {"HEAD_DIM_V": call.head_dim_v, "BLOCK_DV": call.meta["BLOCK_DV"]},
    )  # fmt: skip
    behind = Launch(
        _behind_kernel, n_blocks * 2, (*strides_q, *sizes, call.scale),
        shared | {"HEAD_DIM": call.head_dim, "LOOK": look, "CHAINS": chains},
    )  # fmt: skip
    return before, behind


class _ByTma(Launch):
    """A Launch for tensors whose dimensions of size 1 may have strides that TMA does not take."""

    @staticmethod
    def describe(x: torch.Tensor, block: tuple[int, ...]) -> object:
        strides = [s if n > 1 else 16 for n, s in zip(x.shape[:-1], x.stride())]
        return Launch.describe(x.as_strided(x.shape, [*strides, 1]), block)


def dq_behind(call: Call, dim: int, dq: torch.Tensor) -> Launch:
    """The launch that multiplies dQ from dS; `dim` columns in memory."""
    n_m = -(-call.len_q // 128)
    sizes = (call.heads, call.heads // max(call.kv_heads, 1), call.len_q, call.len_k, call.left, call.right, n_m)
    return _ByTma(
        _dq_kernel, n_m * call.batch * call.heads, (*call.strides(dq), *sizes, call.scale),
        {
            "HEAD_DIM": call.head_dim, "D": dim, "LEFT": call.left >= 0, "RIGHT": call.right >= 0,
            "LENS": call.x.kv_lens is not None, "EARLY": True, "PIECE": call.piece, "BLOCK_M": 128, "BLOCK_N": 128,
            "num_warps": 8 if dim > 64 else 4, "num_stages": 3, "launch_pdl": True,
        },
        blocks={"DS": (128, 128), "K": (128, dim)},
    )  # fmt: skip
