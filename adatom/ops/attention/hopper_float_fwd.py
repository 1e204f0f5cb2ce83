"""float32 attention forward on Hopper (Gluon) to head_dim 32, where several (batch, head) share a full bias.

Operands come as two float16 parts (hopper_float_parts.py), of which three products are summed. Each consumer warpgroup
owns 64 queries of a sharer; PAIR of them take the same sharer, and SHARERS sharers work beside each other, so that a
tile of the bias is read once for all of them. A producer warp brings tiles by TMA.
"""

import os

import torch

from adatom.ops.attention.hopper_float_parts import DIM as _DIM
from adatom.ops.attention.hopper_float_parts import empty_parts, parts_launch
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
    mbarrier,
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

DIM = gl.constexpr(_DIM)
QUERIES = gl.constexpr(64)  # of a consumer
_SPILL = 64


@gluon.jit
def split(x):
    """float32 below 2^15 as a sum of two float16, the larger first."""
    high = x.to(gl.float16)
    return high, (x - high.to(gl.float32)).to(gl.float16)


@gluon.jit
def load_parts(desc, b, h, row, full, tiles, i):
    """Begin to copy rows row.. of both parts of (b, h) to the tiles i and i + 1."""
    load_tile(desc, b, h, row, 0, full, tiles.index(i))
    load_tile(desc, b, h, row, DIM, full, tiles.index(i + 1))


@gluon.jit
def product(a, a_low, b, b_low, acc, FRESH: gl.constexpr):
    """Begin to add a b to acc, small terms first. FRESH: to nothing."""
    if FRESH:
        acc = warpgroup_mma(a_low, b, acc, use_acc=False, is_async=True)
    else:
        acc = warpgroup_mma(a_low, b, acc, is_async=True)
    acc = warpgroup_mma(a, b_low, acc, is_async=True)
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def _tile(t, counts, PAIR: gl.constexpr, SHARERS: gl.constexpr):
    """(slice of the bias, first query, first sharer) of tile t: the queries of a few sharers follow each other."""
    heads, repeats, bias_heads, shared, groups, len_q, len_k, n_tiles = counts
    n_m = (len_q + QUERIES * PAIR - 1) // (QUERIES * PAIR)
    group = t // n_m
    piece = group // groups
    return piece, (t - group * n_m) * (QUERIES * PAIR), (group - piece * groups) * SHARERS


@gluon.jit
def _sharer(r, piece, counts, SHARED_HEADS: gl.constexpr):
    """(batch, head) number r of those that share a slice of the bias, or the last. SHARED_HEADS: it serves all heads.
    """
    heads, repeats, bias_heads, shared, groups, len_q, len_k, n_tiles = counts
    r = gl.minimum(r, shared - 1)
    if SHARED_HEADS:
        return piece * repeats + r // heads, r % heads
    else:
        return piece // bias_heads * repeats + r, piece % bias_heads


@gluon.jit
def _producer(Q, K, V, Bias, several, tiles, bars, counts, SHARED_HEADS: gl.constexpr, PAIR: gl.constexpr,
              SHARERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    """Keeps the rings full."""
    q_s, k_s, v_s, bias_s = tiles
    q_full, q_empty, full, empty = bars
    heads, repeats, bias_heads, shared, groups, len_q, len_k, n_tiles = counts
    bias_b, bias_h = several
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, m0, first = _tile(t, counts, PAIR, SHARERS)
        wait_empty(q_empty, turn, 1)
        for c in gl.static_range(SHARERS * PAIR):
            b, h = _sharer(first + c // PAIR, piece, counts, SHARED_HEADS)
            load_parts(Q, b, h, m0 + c % PAIR * QUERIES, q_full.index(0), q_s, 2 * c)
        for n0 in range(0, len_k, KEYS):
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            for c in gl.static_range(SHARERS):
                b, h = _sharer(first + c, piece, counts, SHARED_HEADS)
                load_parts(K, b, h, n0, full.index(i), k_s, (i * SHARERS + c) * 2)
                load_parts(V, b, h, n0, full.index(i), v_s, (i * SHARERS + c) * 2)
            for c in gl.static_range(PAIR):
                load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, m0 + c * QUERIES, n0,
                          full.index(i), bias_s.index(i * PAIR + c))
            n += 1
        turn += 1


@gluon.jit
def _consumer(Out, Lse, Units, tiles, bars, counts, scale, C: gl.constexpr, SHARED_HEADS: gl.constexpr,
              EVEN_N: gl.constexpr, PAIR: gl.constexpr, SHARERS: gl.constexpr, KEYS: gl.constexpr,
              STAGES: gl.constexpr, PART: gl.constexpr, HELD: gl.constexpr):
    """Computes 64 rows of out and lse of a sharer, tile after tile. PART: keys worked on at a time. HELD: queries are
    kept in registers."""
    q_s, k_s, v_s, bias_s = tiles
    q_full, q_empty, full, empty = bars
    heads, repeats, bias_heads, shared, groups, len_q, len_k, n_tiles = counts
    unit_q, unit_k, unit_v = Units
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    zeros = gl.zeros([QUERIES, PART], gl.float32, S)
    none = gl.zeros([QUERIES, DIM], gl.float32, O)
    PARTS: gl.constexpr = KEYS // PART
    EIGHT: gl.constexpr = PART // 8
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        piece, m0, first = _tile(t, counts, PAIR, SHARERS)
        b, h = _sharer(first + C // PAIR, piece, counts, SHARED_HEADS)
        bh = b * heads + h
        unit = scale * LOG2E * gl.load(unit_q + bh) * gl.load(unit_k + bh)
        wait_full(q_full, turn, 1)
        q = q_s.index(2 * C)
        q_low = q_s.index(2 * C + 1)
        if HELD:
            q = q.load(gl.DotOperandLayout(0, S, 2))
            q_low = q_low.load(gl.DotOperandLayout(0, S, 2))
        m = gl.full([QUERIES], float("-inf"), gl.float32, ROWS)
        alpha = gl.full([QUERIES], 0.0, gl.float32, ROWS)
        l = gl.sum(gl.zeros([QUERIES, PART], gl.float32, S).reshape([QUERIES, EIGHT, 8]), 1)
        acc = gl.zeros([QUERIES, DIM], gl.float32, O)
        pv = none
        for n0 in range(0, len_k, KEYS):
            i = slot(n, STAGES)
            wait_full(full, n, STAGES)
            at = (i * SHARERS + C // PAIR) * 2
            for part in gl.static_range(PARTS):
                k = k_s.index(at).slice(part * PART, PART, dim=0).permute((1, 0))
                k_low = k_s.index(at + 1).slice(part * PART, PART, dim=0).permute((1, 0))
                v = v_s.index(at).slice(part * PART, PART, dim=0)
                v_low = v_s.index(at + 1).slice(part * PART, PART, dim=0)
                s = product(q, q_low, k, k_low, zeros, True)
                bias = bias_s.index(i * PAIR + C % PAIR).slice(part * PART, PART, dim=1).load(S)
                if part > 0:
                    s, pv = warpgroup_mma_wait(0, deps=(s, pv))  # and P V of the part before
                    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None] + pv
                else:
                    s = warpgroup_mma_wait(0, deps=(s,))
                s = s * unit + bias  # in log2 units
                if not EVEN_N:
                    if n0 + KEYS > len_k:
                        columns = n0 + part * PART + gl.arange(0, PART, gl.SliceLayout(0, S))
                        s = gl.where(columns[None, :] < len_k, s, float("-inf"))
                m_new = gl.maximum(m, gl.max(s, 1))
                base = gl.where(m_new == float("-inf"), 0.0, m_new)  # rows that have seen nothing yet
                alpha = gl.exp2(m - base)
                m = m_new
                base -= 14.0  # P times 2^14, in float16's range
                p = gl.exp2(s - base[:, None])
                l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None]
                l += gl.sum(p.reshape([QUERIES, EIGHT, 8]), 1)  # of what a thread holds
                high, low = split(p)
                high = gl.convert_layout(high, OPERAND, assert_trivial=True)
                low = gl.convert_layout(low, OPERAND, assert_trivial=True)
                pv = product(high, low, v, v_low, none, True)
            pv = warpgroup_mma_wait(0, deps=(pv,))
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None] + pv
            release(empty, n, STAGES)
            n += 1
        l = gl.convert_layout(gl.sum(l, 1), ROWS)
        seen = l > 0.0
        l = gl.where(seen, l, 1.0)
        acc = acc * gl.convert_layout(gl.load(unit_v + bh) / l, gl.SliceLayout(1, O))[:, None]
        out = q_s.index(2 * C).reinterpret(gl.float32, [QUERIES, DIM], gl.NVMMASharedLayout(128, 32, rank=2))
        out.store(acc)
        fence_async_shared()
        m0 += C % PAIR * QUERIES
        store_tile(Out, b, h, m0, 0, out)
        rows = m0 + gl.arange(0, QUERIES, ROWS)
        lse = gl.where(seen, (m + (gl.log2(l) - 14.0)) * LN2, float("-inf"))
        gl.store(Lse + bh.to(gl.int64) * len_q + rows, lse, mask=rows < len_q)
        tma.store_wait(0)
        gl.barrier()
        release(q_empty, turn, 1)
        turn += 1


_COUNTS = ["heads", "repeats", "bias_heads", "shared", "groups", "len_q", "len_k", "n_tiles"]


@gluon.jit(do_not_specialize=_COUNTS)
def _fwd_kernel(Q, K, V, Bias, Out, Lse, UnitQ, UnitK, UnitV, bias_b, bias_h, heads, repeats, bias_heads, shared,
                groups, len_q, len_k, n_tiles, scale, SHARED_HEADS: gl.constexpr, EVEN_N: gl.constexpr,
                EARLY: gl.constexpr, REGISTERS: gl.constexpr, PAIR: gl.constexpr, SHARERS: gl.constexpr,
                KEYS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, HELD: gl.constexpr):
    """out and lse of tiles of 64 PAIR queries of SHARERS sharers.

    Bias: in log2 units. UnitQ, UnitK, UnitV: what undoes the scales of parts. Each slice of the bias serves `shared`
    (batch, head), of consecutive batch elements, `repeats` of them, in `groups`; its number is multiplied by bias_b,
    that of its head by bias_h: 0 along expanded dimensions.
    """
    q_s = make_tiles(Q, SHARERS * PAIR * 2)
    k_s = make_tiles(K, STAGES * SHARERS * 2)
    v_s = make_tiles(V, STAGES * SHARERS * 2)
    bias_s = make_tiles(Bias, STAGES * PAIR)
    q_full = make_barriers(1, 2 * SHARERS * PAIR)
    q_empty = make_barriers(1, SHARERS * PAIR)
    full = make_barriers(STAGES, 4 * SHARERS + PAIR)
    empty = make_barriers(STAGES, SHARERS * PAIR)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, v_s, bias_s)
    bars = (q_full, q_empty, full, empty)
    counts = (heads, repeats, bias_heads, shared, groups, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    Units = (UnitQ, UnitK, UnitV)
    if PAIR * SHARERS == 4:
        gl.warp_specialize([
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 0, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 1, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 2, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 3, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_producer, (Q, K, V, Bias, several, tiles, bars, counts, SHARED_HEADS, PAIR, SHARERS, KEYS, STAGES)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip
    elif PAIR * SHARERS == 3:
        gl.warp_specialize([
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 0, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 1, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 2, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_producer, (Q, K, V, Bias, several, tiles, bars, counts, SHARED_HEADS, PAIR, SHARERS, KEYS, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 0, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_consumer, (Out, Lse, Units, tiles, bars, counts, scale, 1, SHARED_HEADS, EVEN_N, PAIR, SHARERS, KEYS, STAGES, PART, HELD)),
            (_producer, (Q, K, V, Bias, several, tiles, bars, counts, SHARED_HEADS, PAIR, SHARERS, KEYS, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip


# variants: PAIR, SHARERS, KEYS, STAGES, PART, HELD, REGISTERS
VARIANT = tuple(int(n) for n in os.environ.get("F32_FWD", "2,2,64,3,64,0,112").split(","))


def _launch(call: Call, bias: torch.Tensor) -> Launch:
    pair, sharers, keys, stages, part, held, registers = VARIANT
    dim = _DIM
    slices = bias.shape[0] * bias.shape[1]
    shared = call.batch * call.heads // slices
    groups = -(-shared // sharers)
    n_tiles = -(-call.len_q // (64 * pair)) * slices * groups
    scalars = (
        *(int(stride > 0) for stride in call.bias_strides[:2]), call.heads, call.repeats, bias.shape[1], shared,
        groups, call.len_q, call.len_k, n_tiles, call.scale,
    )  # fmt: skip
    meta = {
        "SHARED_HEADS": bias.shape[1] < call.heads, "EVEN_N": call.even(call.len_k, keys), "EARLY": False,
        "REGISTERS": registers, "PAIR": pair, "SHARERS": sharers, "KEYS": keys, "STAGES": stages, "PART": part,
        "HELD": bool(held), "num_warps": 4, "launch_pdl": False,
    }  # fmt: skip
    blocks = {"Q": (64, dim), "K": (keys, dim), "V": (keys, dim), "Bias": (64, keys), "Out": (64, dim)}
    programs = min(n_tiles, call.device.sms)
    return Launch(_fwd_kernel, programs, scalars, meta, _SPILL, blocks)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; the contract is in docs/design.md."""
    out, lse = empty_out(x.q, x.v), empty_lse(x.q)
    call = Call(x, o)
    parts = []
    for t in (x.q, x.k, x.v):
        p, unit, norm = empty_parts(t)
        remembered(x, f"parts {len(parts)}", lambda: parts_launch(call, t))(t, p, unit, norm)
        parts.append((p, unit))
    bias = x.bias * 1.4426950408889634
    (q, uq), (k, uk), (v, uv) = parts
    launch = remembered(x, "fwd", lambda: _launch(call, x.bias))
    launch(q, k, v, bias, out, lse, uq, uk, uv)
    return out, lse
