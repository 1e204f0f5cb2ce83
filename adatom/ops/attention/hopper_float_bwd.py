"""float32 attention backward on Hopper (Gluon) to head_dim 32, where several (batch, head) share a full bias whose
gradient is wanted, as in triangle attention.

    P = exp(S + bias - lse);  dS = P (dP - delta);  dK = scale dS^T Q;  dV = P^T dO

Operands are two float16 parts (hopper_float_ends.py), of which three products are summed. This kernel gives dK and dV;
that of hopper_float_bias.py dQ and the gradient of the bias. A program owns 128 keys, each of two consumer warpgroups
half of them, K and V in registers. S^T and dP^T are formed transposed, of a bias transposed beforehand: P^T and dS^T
stay in registers, and consumers never meet.
"""

from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_float_bias import sums_launch
from adatom.ops.attention.hopper_float_ends import DIM, OF_DK, OF_DP, OF_DV, OF_S, ahead, in_parts
from adatom.ops.attention.hopper_float_tiles import (
    load_numbers,
    load_parts,
    operands,
    parts_of,
    product,
    tile_of,
    turned,
)
from adatom.ops.attention.hopper_sharers import several_of
from adatom.ops.attention.problem import Inputs, Options, empty, empty_like
from adatom.ops.attention.triton_call import Call, remembered
from adatom.ops.attention.triton_sum import sum_of_parts
from adatom.tiles.hopper import (
    LOG2E,
    Launch,
    as_matrix,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    load_tile,
    make_barriers,
    make_tiles,
    release,
    slot,
    store_tile,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma_wait,
)

BLOCK = gl.constexpr(128)  # keys of a program; rows of a head are filled up to so many queries
KEYS = gl.constexpr(64)  # of a consumer
QUERIES = gl.constexpr(64)  # of a buffer
STAGES = gl.constexpr(3)  # buffers of queries, dO and bias
_SPILL = 0


@gluon.jit
def _producer(Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, counts):
    """Keeps the rings full."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, _dk, _dv = tiles
    full, empty, kv_full, kv_empty = bars
    heads, repeats, padded, len_q, len_k, n_tiles = counts
    bias_b, bias_h = several
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        b, h, n0 = tile_of(t, heads, len_k, BLOCK)
        wait_empty(kv_empty, turn, 1)
        for c in gl.static_range(2):
            load_parts(K, b, h, n0 + c * KEYS, kv_full.index(0), k_s, c)
            load_parts(V, b, h, n0 + c * KEYS, kv_full.index(0), v_s, c)
        for m0 in range(0, len_q, QUERIES):
            i = slot(n, STAGES)
            wait_empty(empty, n, STAGES)
            load_parts(Q, b, h, m0, full.index(i), q_s, i)
            load_parts(DOut, b, h, m0, full.index(i), do_s, i)
            row = (b * heads + h) * padded + m0
            load_numbers(Rows, row, full.index(i), lse_s.index(i))
            load_numbers(Delta, row, full.index(i), delta_s.index(i))
            for c in gl.static_range(2):
                load_tile(Bias, b // repeats * bias_b, h * bias_h, n0 + c * KEYS, m0, full.index(i),
                          bias_s.index(2 * i + c))
            n += 1
        turn += 1


@gluon.jit
def _consumer(DK, DV, Factors, tiles, bars, counts, n_heads, scale, C: gl.constexpr):
    """dK and dV of KEYS keys, tile after tile. Comments at waits name the products under way, the eldest first."""
    q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dk_s, dv_s = tiles
    full, empty, kv_full, kv_empty = bars
    heads, repeats, padded, len_q, len_k, n_tiles = counts
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    GRAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRAD, 2)
    ACROSS: gl.constexpr = gl.SliceLayout(0, S)
    zeros = gl.zeros([KEYS, QUERIES], gl.float32, S)
    nothing = gl.zeros([KEYS, DIM], gl.float32, GRAD)
    n = 0
    turn = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        b, h, n0 = tile_of(t, heads, len_k, BLOCK)
        F = Factors + b * heads + h
        unit = gl.load(F + OF_S * n_heads) * (scale * LOG2E)
        of_dp = gl.load(F + OF_DP * n_heads)
        wait_full(kv_full, turn, 1)
        k = k_s.index(2 * C).load(LEFT), k_s.index(2 * C + 1).load(LEFT)
        v = v_s.index(2 * C).load(LEFT), v_s.index(2 * C + 1).load(LEFT)
        dk = gl.zeros([KEYS, DIM], gl.float32, GRAD)
        dv = gl.zeros([KEYS, DIM], gl.float32, GRAD)
        for m0 in range(0, len_q, QUERIES):
            i = slot(n, STAGES)
            wait_full(full, n, STAGES)
            q = parts_of(q_s, i, 0, QUERIES)
            do = parts_of(do_s, i, 0, QUERIES)
            s = product(k, turned(q), zeros)
            dp = product(v, turned(do), zeros)
            s = warpgroup_mma_wait(3, deps=(s,))  # S, dP
            lse = lse_s.index(i).load(ACROSS)
            p = gl.exp2(s * unit + (bias_s.index(2 * i + C).load(S) * LOG2E - lse[None, :]))
            dv_part = product(operands(p, OPERAND), do, nothing)
            delta = delta_s.index(i).load(ACROSS)
            dp = warpgroup_mma_wait(3, deps=(dp,))  # dP, dV
            ds = p * (dp * of_dp - delta[None, :])
            dk_part = product(operands(ds, OPERAND), q, nothing)
            dv_part, dk_part = warpgroup_mma_wait(0, deps=(dv_part, dk_part))
            dv += dv_part
            dk += dk_part
            release(empty, n, STAGES)
            n += 1
        dk_s.index(C).store(dk * (gl.load(F + OF_DK * n_heads) * scale))
        dv_s.index(C).store(dv * gl.load(F + OF_DV * n_heads))
        fence_async_shared()
        store_tile(DK, b, h, n0 + C * KEYS, 0, dk_s.index(C))
        store_tile(DV, b, h, n0 + C * KEYS, 0, dv_s.index(C))
        tma.store_wait(0)
        gl.barrier()
        release(kv_empty, turn, 1)
        turn += 1


@gluon.jit(do_not_specialize=["n_heads", "heads", "repeats", "padded", "len_q", "len_k", "n_tiles"])
def _keys_kernel(Q, K, V, DOut, Rows, Delta, Factors, Bias, DK, DV, bias_b, bias_h, n_heads, heads, repeats, padded,
                 len_q, len_k, n_tiles, scale, EARLY: gl.constexpr):
    """dK and dV of tiles of 128 keys.

    q, k, v and dO in parts; Rows, Delta, `padded` for each (batch, head), and Factors, (6, n_heads), of `ahead`. The
    bias is transposed and has a slice for `repeats` consecutive batch elements; numbers of slices are multiplied by
    bias_b, those of heads by bias_h: 0 along expanded dimensions.
    """
    q_s = make_tiles(Q, STAGES * 2)
    dk_s = make_tiles(DK, 2)  # where K and V were
    dv_s = make_tiles(DV, 2)
    k_s = dk_s.reinterpret(K.dtype, [4, KEYS, DIM], as_matrix(K.layout))
    v_s = dv_s.reinterpret(V.dtype, [4, KEYS, DIM], as_matrix(V.layout))
    do_s = make_tiles(DOut, STAGES * 2)
    bias_s = make_tiles(Bias, STAGES * 2)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], Rows.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], Delta.layout)
    full = make_barriers(STAGES, 8)
    empty = make_barriers(STAGES, 2)
    kv_full = make_barriers(1, 8)
    kv_empty = make_barriers(1, 2)
    fence_async_shared()
    let_next(EARLY)
    wait_for_previous(EARLY)
    tiles = (q_s, k_s, do_s, v_s, lse_s, delta_s, bias_s, dk_s, dv_s)
    bars = (full, empty, kv_full, kv_empty)
    counts = (heads, repeats, padded, len_q, len_k, n_tiles)
    several = (bias_b, bias_h)
    gl.warp_specialize([
        (_consumer, (DK, DV, Factors, tiles, bars, counts, n_heads, scale, 0)),
        (_consumer, (DK, DV, Factors, tiles, bars, counts, n_heads, scale, 1)),
        (_producer, (Q, K, V, DOut, Rows, Delta, Bias, several, tiles, bars, counts)),
    ], [4, 1], [232, 24])  # fmt: skip


class Launches(NamedTuple):
    """The launches of one backward behind that of `ahead`."""

    keys: Launch
    sums: Launch


def _launches(x: Inputs, o: Options) -> Launches:
    call = Call(x, o)
    assert x.bias is not None
    n, m, dim = KEYS.value, QUERIES.value, DIM.value
    n_heads, padded = call.batch * call.heads, -(-call.len_q // BLOCK.value) * BLOCK.value
    n_tiles = -(-call.len_k // BLOCK.value) * n_heads
    scalars = (
        *several_of(call), n_heads, call.heads, call.repeats, padded, call.len_q, call.len_k, n_tiles, call.scale,
    )  # fmt: skip
    meta = {"EARLY": True, "num_warps": 4, "launch_pdl": True}
    blocks = {
        "Q": (m, dim), "K": (n, dim), "V": (n, dim), "DOut": (m, dim), "Rows": (m,), "Delta": (m,), "Bias": (n, m),
        "DK": (n, dim), "DV": (n, dim),
    }  # fmt: skip
    keys = Launch(_keys_kernel, min(n_tiles, call.device.sms), scalars, meta, _SPILL, blocks)
    return Launches(keys, sums_launch(call, x.bias, padded))


def _transposed(bias: torch.Tensor) -> torch.Tensor:
    """The bias with keys outside queries, which lie as TMA can read them."""
    *slices, len_q, len_k = bias.shape
    wide = empty((*slices, len_k, -(-len_q // 4) * 4), bias)
    return wide[..., :len_q].copy_(bias.transpose(2, 3))


def backward(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    wanted: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbias, None, which repeat bit for bit."""
    bias = x.bias
    assert bias is not None and wanted
    dlse = None if dlse is None else dlse.contiguous()
    plan = remembered(x, "bwd", lambda: _launches(x, o))
    q, k, v, units = in_parts(x, o)
    do, rows, delta, factors, numbers = ahead(x, o, out, lse, dout, dlse, units, BLOCK.value)
    over = _transposed(bias)
    dq, dk, dv = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    plan.keys(q, k, v, do, rows, delta, factors, over, dk, dv)
    del over  # its memory serves the sums
    dbias = sum_of_parts(plan.sums, bias, q, k, v, do, rows, delta, factors, bias, dq, numbers)
    return dq, dk, dv, dbias, None
