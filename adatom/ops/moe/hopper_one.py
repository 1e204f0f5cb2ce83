# mypy: ignore-errors
"""The forward for a few tokens on Hopper (Gluon), where what kernels cost besides reading weights shows.

Two kernels. Programs of the first stream the rows of gate and up of each pair through a ring in shared memory. The
second begins beside it: its programs copy all rows of w_down that they need into shared memory, which depends on the
indices alone, one on a multiprocessor while the first kernel computes, others when programs of the first end. No tensor
cores. Code too is read from memory before it runs, so there is little of it: shapes are constants, loops stay loops,
and each of two numbers in 32 bits becomes float32 by one instruction. What a multiprocessor asks for comes in order, so
the second kernel does not ask for all rows before it asks for what they are multiplied by.
"""

import torch
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy

from adatom.device import facts
from adatom.ops.moe import triton_moe
from adatom.ops.moe.problem import Inputs, Options
from adatom.tiles.hopper import _with, gl, gluon, let_next, wait_for_previous
from adatom.tiles.hopper_gemm import value_and_slope
from adatom.tiles.launch import Launch
from adatom.tiles.triton_dense import remembered

async_copy = _with(_async_copy, async_load=getattr(_async_copy, "async_copy_global_to_shared", None))

ROWS = 4  # of a matrix, of a program
WIDE, STAGES = 512, 4  # columns of the ring's boxes, and how many of gate and up each
PROGRAMS, WARPS = 4, 2  # of the first kernel on a multiprocessor, and of each of them
NARROW = 256  # columns of the second kernel's boxes
TURN = 4  # boxes that the second kernel multiplies at once: a warp each
EARLY = 4  # turns of boxes that it asks for before the first kernel has ended


@gluon.jit
def _halves(x, like):
    """Both numbers of each 32 bits, of like's dtype, in float32."""
    if like.dtype.element_ty == gl.bfloat16:
        return (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)
    else:
        low, high = x.to(gl.int16), (x >> 16).to(gl.int16)
        return (low.to(gl.float16, bitcast=True).to(gl.float32), high.to(gl.float16, bitcast=True).to(gl.float32))


@gluon.jit
def _experts(Indices, experts, PAIRS: gl.constexpr):
    """The expert of each of so many pairs; -1 where its index names none."""
    found = ()
    for p in gl.static_range(PAIRS):
        e = gl.load(Indices + p)
        found = found + (gl.where((e >= 0) & (e < experts), e, -1).to(gl.int32),)
    return found


@gluon.jit
def _fetch(n, W, Indices, gate_s, up_s, experts, stride_e, stride_j, K: gl.constexpr, N: gl.constexpr,
           PAIRS: gl.constexpr, ROWS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy what this program's use n of the ring holds, if its pair has an expert."""
    BLOCKS: gl.constexpr = (N + ROWS - 1) // ROWS
    STEPS: gl.constexpr = (K + WIDE - 1) // WIDE
    u = gl.program_id(0) + n // STEPS * gl.num_programs(0)
    e = gl.load(Indices + gl.minimum(u, PAIRS * BLOCKS - 1) // BLOCKS)
    if (u < PAIRS * BLOCKS) & (e >= 0) & (e < experts):
        j = u % BLOCKS * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        k = n % STEPS * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
        at = gl.minimum(j, N - 1).to(gl.int64) * stride_j
        rows = W + e.to(gl.int64) * stride_e + at[:, None] + k[None, :]
        mask = (j < N)[:, None] & (k < K)[None, :]
        async_copy.async_load(gate_s.index(n % STAGES), rows, mask=mask)
        async_copy.async_load(up_s.index(n % STAGES), rows + N * stride_j.to(gl.int64), mask=mask)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["experts"])
def _gate_kernel(X, W, Indices, A, experts, stride_x, stride_e, stride_j, K: gl.constexpr, N: gl.constexpr,
                 LONG: gl.constexpr, ACT: gl.constexpr, PAIRS: gl.constexpr, TOP_K: gl.constexpr, ROWS: gl.constexpr,
                 WIDE: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """A (pairs, LONG), its first N columns: act(gate) * up of each pair, by its number; anything if it is dropped."""
    COPIES: gl.constexpr = gl.BlockedLayout([ROWS // WARPS, 8], [1, 32], [WARPS, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([ROWS // WARPS, 4], [1, 32], [WARPS, 1], [1, 0])  # of two numbers each
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BLOCKS: gl.constexpr = (N + ROWS - 1) // ROWS
    gate_s = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, ROWS, WIDE], PLAIN)
    up_s = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, ROWS, WIDE], PLAIN)
    gates_s = gate_s.reinterpret(gl.int32, [STAGES, ROWS, WIDE // 2], PLAIN)
    ups_s = up_s.reinterpret(gl.int32, [STAGES, ROWS, WIDE // 2], PLAIN)
    stride_x = stride_x // 8 * 8  # as they are: the compiler learns that 16 bytes of a row lie together
    stride_e = stride_e // 8 * 8
    stride_j = stride_j // 8 * 8
    wait_for_previous(True)
    let_next(True)
    for n in gl.static_range(STAGES - 1):
        _fetch(n, W, Indices, gate_s, up_s, experts, stride_e, stride_j, K, N, PAIRS, ROWS, WIDE, STAGES, COPIES)
    n = gl.program_id(0) * 0
    for u in range(gl.program_id(0), PAIRS * BLOCKS, gl.num_programs(0)):
        pair = u // BLOCKS
        token = pair // TOP_K
        row = (X + token.to(gl.int64) * stride_x).to(gl.pointer_type(gl.int32), bitcast=True)
        gates = gl.zeros([ROWS, WIDE // 2], gl.float32, LAYOUT)
        ups = gl.zeros([ROWS, WIDE // 2], gl.float32, LAYOUT)
        for step in range((K + WIDE - 1) // WIDE):
            k = step * (WIDE // 2) + gl.arange(0, WIDE // 2, gl.SliceLayout(0, LAYOUT))
            x0, x1 = _halves(gl.load(row + k, mask=k < K // 2, other=0)[None, :], X)
            async_copy.wait_group(STAGES - 2)
            w0, w1 = _halves(gates_s.index(n % STAGES).load(LAYOUT), W)
            gates += w0 * x0 + w1 * x1
            w0, w1 = _halves(ups_s.index(n % STAGES).load(LAYOUT), W)
            ups += w0 * x0 + w1 * x1
            _fetch(n + STAGES - 1, W, Indices, gate_s, up_s, experts, stride_e, stride_j, K, N, PAIRS, ROWS, WIDE,
                   STAGES, COPIES)
            n += 1
        value, _ = value_and_slope(gl.sum(gates, 1), ACT)
        a = value * gl.sum(ups, 1)
        j = u % BLOCKS * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        gl.store(A + pair * LONG + j, a.to(A.dtype.element_ty), mask=j < N)


@gluon.jit
def _order(Order, Offsets, Places, found, experts, PAIRS: gl.constexpr, ITEMS: gl.constexpr,
           WARPS: gl.constexpr):
    """The order of the pairs, as in triton_order.py: items are pairs, then bounds of experts; pair p of expert e has
    the number e * PAIRS + p, the bound of e the number e * PAIRS, and the pairs with lower numbers are counted."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    for first in range(0, PAIRS + experts + 1, ITEMS):
        i = first + gl.arange(0, ITEMS, LAYOUT)
        number = (i - PAIRS) * PAIRS
        for p in gl.static_range(PAIRS):
            number = gl.where(i == p, gl.where(found[p] >= 0, found[p], experts) * PAIRS + p, number)
        place = gl.zeros([ITEMS], gl.int32, LAYOUT)
        for p in gl.static_range(PAIRS):
            other = gl.where(found[p] >= 0, found[p], experts) * PAIRS + p
            place += (other < number).to(gl.int32)
        gl.store(Places + i, place, mask=i < PAIRS)
        gl.store(Order + place, i, mask=i < PAIRS)
        gl.store(Offsets + i - PAIRS, place, mask=(i >= PAIRS) & (i <= PAIRS + experts))


@gluon.jit
def _copy(w_s, rows, Indices, experts, stride_e, j, k, begin, end, K: gl.constexpr, N: gl.constexpr,
          TOP_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy the boxes of turns begin..end, which are zeros where there is no pair or no expert."""
    TURN: gl.constexpr = w_s.shape[1]
    NARROW: gl.constexpr = w_s.shape[3]
    CHUNKS: gl.constexpr = (K + NARROW - 1) // NARROW
    for t in range(begin, end):
        box = t * TURN + gl.arange(0, TURN, LAYOUT)
        e = gl.load(Indices + gl.minimum(box // CHUNKS, TOP_K - 1))
        there = (box < TOP_K * CHUNKS) & (e >= 0) & (e < experts)
        column = box % CHUNKS * NARROW
        at = (gl.where(there, e, 0).to(gl.int64) * stride_e + column)[:, None, None]
        mask = there[:, None, None] & (j < N) & (column[:, None, None] + k < K)
        async_copy.async_load(w_s.index(t), rows + at, mask=mask)
        async_copy.commit_group()


@gluon.jit(do_not_specialize=["experts", "early", "turns"])
def _down_kernel(A, W, Indices, Weights, Out, Order, Offsets, Places, experts, stride_e, stride_j, stride_t, stride_w,
                 early, turns, K: gl.constexpr, N: gl.constexpr, PAIRS: gl.constexpr, TOP_K: gl.constexpr,
                 ROWS: gl.constexpr, NARROW: gl.constexpr, TURN: gl.constexpr):
    """Out (tokens, N): the sum over a token's pairs of weight * A W[e]^T; dropped ones add nothing. The last program
    orders the pairs.

    A box holds some columns of a pair's rows; in a turn, each of TURN warps copies and multiplies one. turns: how many
    there are, of which `early` are asked for first; not constants, so that loops stay loops.
    """
    COPIES: gl.constexpr = gl.BlockedLayout([1, ROWS, 8], [1, 1, 32], [TURN, 1, 1], [2, 1, 0])
    COPIED: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, COPIES))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, ROWS, 4], [1, 1, 32], [TURN, 1, 1], [2, 1, 0])  # of two numbers each
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    BLOCKS: gl.constexpr = (N + ROWS - 1) // ROWS
    CHUNKS: gl.constexpr = (K + NARROW - 1) // NARROW
    TURNS: gl.constexpr = (TOP_K * CHUNKS + TURN - 1) // TURN
    w_s = gl.allocate_shared_memory(W.dtype.element_ty, [TURNS, TURN, ROWS, NARROW], PLAIN)
    stride_e = stride_e // 8 * 8
    stride_j = stride_j // 8 * 8
    token = gl.program_id(0) // BLOCKS
    if token * TOP_K >= PAIRS:
        let_next(True)
        _order(Order, Offsets, Places, _experts(Indices, experts, PAIRS), experts, PAIRS, 256, TURN)
    else:
        Indices += token * TOP_K
        first = gl.program_id(0) % BLOCKS * ROWS
        j = first + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, COPIES)))[None, :, None]
        k = gl.arange(0, NARROW, gl.SliceLayout(0, gl.SliceLayout(1, COPIES)))[None, None, :]
        rows = W + gl.minimum(j, N - 1).to(gl.int64) * stride_j + k
        _copy(w_s, rows, Indices, experts, stride_e, j, k, 0, early, K, N, TOP_K, COPIED)
        let_next(True)
        box = gl.arange(0, TURN, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT)))[:, None]
        weights = ()  # of each turn's boxes, and whether these are of a pair that has an expert
        for t in gl.static_range(TURNS):
            pair = gl.minimum((t * TURN + box) // CHUNKS, TOP_K - 1)
            e = gl.load(Indices + pair)
            there = (t * TURN + box < TOP_K * CHUNKS) & (e >= 0) & (e < experts)
            weight = gl.load(Weights + token.to(gl.int64) * stride_t + pair * stride_w, mask=there, other=0.0)
            weights = weights + (weight.to(gl.float32), there)
        wait_for_previous(True)
        words = (A + token * (TOP_K * CHUNKS * NARROW)).to(gl.pointer_type(gl.int32), bitcast=True)
        column = gl.arange(0, NARROW // 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :]
        values = ()
        for t in gl.static_range(TURNS):
            boxes = t * TURN + box
            mask = weights[2 * t + 1]
            if K % NARROW != 0:
                mask &= boxes % CHUNKS * (NARROW // 2) + column < K // 2
            values = values + (gl.load(words + (boxes * (NARROW // 2) + column), mask=mask, other=0),)
        _copy(w_s, rows, Indices, experts, stride_e, j, k, early, turns, K, N, TOP_K, COPIED)
        boxes_s = w_s.reinterpret(gl.int32, [TURNS, TURN, ROWS, NARROW // 2], PLAIN)
        total = gl.zeros([TURN, ROWS, NARROW // 2], gl.float32, LAYOUT)
        for t in gl.static_range(TURNS):
            async_copy.wait_group(TURNS - 1 - t)
            a0, a1 = _halves(values[t], W)
            w0, w1 = _halves(boxes_s.index(t).load(LAYOUT), W)
            total += w0 * gl.expand_dims(a0 * weights[2 * t], 1)
            total += w1 * gl.expand_dims(a1 * weights[2 * t], 1)
        y = gl.sum(gl.sum(total, 2), 0)
        j = first + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        gl.store(Out + token * N + j, y.to(Out.dtype.element_ty), mask=j < N)


def _gate(tensors, act):
    x, w, indices, a = tensors
    (experts, n, k), (pairs, long) = w.shape, a.shape
    n //= 2
    shape = dict(K=k, N=n, LONG=long, ACT=act, PAIRS=pairs, TOP_K=indices.shape[1])
    meta = shape | dict(ROWS=ROWS, WIDE=WIDE, STAGES=STAGES, WARPS=WARPS, num_warps=WARPS, launch_pdl=True)
    units = pairs * -(-n // ROWS)
    programs = -(-units // -(-units // (PROGRAMS * facts(x.device).sms)))  # that get equally many units
    return Launch(_gate_kernel, programs, (experts, x.stride(0), *w.stride()[:2]), meta)


def _down(tensors):
    _, w, indices, weights, *_ = tensors
    (experts, n, k), (tokens, top_k) = w.shape, indices.shape
    turns = -(-top_k * -(-k // NARROW) // TURN)
    meta = dict(K=k, N=n, PAIRS=tokens * top_k, TOP_K=top_k, ROWS=ROWS, NARROW=NARROW, TURN=TURN)
    scalars = (experts, *w.stride()[:2], *weights.stride(), min(EARLY, turns), turns)
    return Launch(_down_kernel, tokens * -(-n // ROWS) + 1, scalars, meta | dict(num_warps=TURN, launch_pdl=True))


def forward(x: Inputs, o: Options, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(out, pre, order, offsets) for a few tokens; the contract is in reference.py."""
    if keep:
        return triton_moe.forward(x, o, keep)
    indices, pairs, out = x.indices.contiguous(), x.pairs, x.x.new_empty(x.x.shape)
    order, offsets, places = (indices.new_empty(n, dtype=torch.int32) for n in (pairs, x.experts + 1, pairs))
    a = x.x.new_empty(pairs, -(-x.w_down.shape[2] // NARROW) * NARROW)
    tensors = (x.x, x.w_gate_up, indices, a)
    remembered(_gate, tensors, o.activation)(*tensors)
    tensors = (a, x.w_down, indices, x.weights, out, order, offsets, places)
    remembered(_down, tensors)(*tensors)
    return out, None, order, offsets
