# mypy: ignore-errors
"""The forward for a few tokens on Hopper (Gluon), where what kernels cost besides reading weights shows.

Two kernels. Programs of the first stream the rows of gate and up of each pair through a ring in shared memory; when
nearly all that they read is under way they let the second begin, whose programs copy all rows of w_down that they need
into shared memory while the first still computes: they depend on the indices alone. No tensor cores.
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

ROWS = 8  # of a matrix, of a program: a warp each
WIDE, STAGES = 512, 4  # columns of the ring's boxes, and how many of gate and up each
AHEAD = 4  # uses of the ring that are not under way yet when the second kernel may begin
PROGRAMS = 2  # of the first kernel on a multiprocessor
NARROW = 256  # columns of the second kernel's boxes


@gluon.jit
def _experts(Indices, experts, PAIRS: gl.constexpr):
    """The expert of each of so many pairs; -1 where its index names none."""
    found = ()
    for p in gl.static_range(PAIRS):
        e = gl.load(Indices + p)
        found = found + (gl.where((e >= 0) & (e < experts), e, -1).to(gl.int32),)
    return found


@gluon.jit
def _fetch(n, units, steps, blocks, W, Indices, gate_s, up_s, experts, K, N, stride_e, stride_j, WIDE: gl.constexpr,
           ROWS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy what this program's use n of the ring holds, if its pair has an expert."""
    u = gl.program_id(0) + n // steps * gl.num_programs(0)
    e = gl.load(Indices + gl.minimum(u, units - 1) // blocks)
    if (u < units) & (e >= 0) & (e < experts):
        j = u % blocks * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        k = n % steps * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
        at = gl.minimum(j, N - 1).to(gl.int64) * stride_j
        rows = W + e.to(gl.int64) * stride_e + at[:, None] + k[None, :]
        mask = (j < N)[:, None] & (k < K)[None, :]
        async_copy.async_load(gate_s.index(n % STAGES), rows, mask=mask)
        async_copy.async_load(up_s.index(n % STAGES), rows + N.to(gl.int64) * stride_j, mask=mask)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["experts"])
def _gate_kernel(X, W, Indices, A, experts, K, N, stride_x, stride_e, stride_j, ACT: gl.constexpr, PAIRS: gl.constexpr,
                 TOP_K: gl.constexpr, ROWS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
                 AHEAD: gl.constexpr):
    """A (pairs, N) = act(gate) * up of each pair that has an expert, by its number; anything
    of those that have none."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [ROWS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    gate_s = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, ROWS, WIDE], PLAIN)
    up_s = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, ROWS, WIDE], PLAIN)
    K = K // 8 * 8  # as they are: the compiler learns that 16 bytes of a row lie together
    stride_x = stride_x // 8 * 8
    stride_e = stride_e // 8 * 8
    stride_j = stride_j // 8 * 8
    wait_for_previous(True)
    blocks = (N + ROWS - 1) // ROWS
    steps = (K + WIDE - 1) // WIDE
    units = PAIRS * blocks
    for n in gl.static_range(STAGES - 1):
        _fetch(blocks * 0 + n, units, steps, blocks, W, Indices, gate_s, up_s, experts, K, N, stride_e, stride_j, WIDE,
               ROWS, STAGES, LAYOUT)
    n = blocks * 0
    last = (units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * steps - AHEAD - STAGES + 1
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        pair = u // blocks
        gates = gl.zeros([ROWS, WIDE], gl.float32, LAYOUT)
        ups = gl.zeros([ROWS, WIDE], gl.float32, LAYOUT)
        for step in range(steps):
            k = step * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
            x = gl.load(X + (pair // TOP_K).to(gl.int64) * stride_x + k, mask=k < K, other=0.0).to(gl.float32)[None, :]
            async_copy.wait_group(STAGES - 2)
            gates += gate_s.index(n % STAGES).load(LAYOUT).to(gl.float32) * x
            ups += up_s.index(n % STAGES).load(LAYOUT).to(gl.float32) * x
            _fetch(n + STAGES - 1, units, steps, blocks, W, Indices, gate_s, up_s, experts, K, N, stride_e, stride_j,
                   WIDE, ROWS, STAGES, LAYOUT)
            n += 1
            if n == last:  # nearly all that this program reads is under way
                let_next(True)
        value, _ = value_and_slope(gl.sum(gates, 1), ACT)
        a = value * gl.sum(ups, 1)
        j = u % blocks * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        gl.store(A + pair.to(gl.int64) * N + j, a.to(A.dtype.element_ty), mask=j < N)


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


@gluon.jit(do_not_specialize=["experts"])
def _down_kernel(A, W, Indices, Weights, Out, Order, Offsets, Places, experts, K, N, stride_e, stride_j, stride_t,
                 stride_w, PAIRS: gl.constexpr, TOP_K: gl.constexpr, ROWS: gl.constexpr, NARROW: gl.constexpr,
                 CHUNKS: gl.constexpr):
    """Out (tokens, N): the sum over a token's pairs of weight * A W[e]^T; dropped ones add nothing. The last program
    orders the pairs."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [ROWS, 1], [1, 0])
    w_s = gl.allocate_shared_memory(W.dtype.element_ty, [TOP_K * CHUNKS, ROWS, NARROW],
                                    gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    K = K // 8 * 8
    stride_e = stride_e // 8 * 8
    stride_j = stride_j // 8 * 8
    blocks = (N + ROWS - 1) // ROWS
    token = gl.program_id(0) // blocks
    if token * TOP_K >= PAIRS:
        let_next(True)
        wait_for_previous(True)
        _order(Order, Offsets, Places, _experts(Indices, experts, PAIRS), experts, PAIRS, 256, ROWS)
    else:
        found = _experts(Indices + token * TOP_K, experts, TOP_K)
        j = gl.program_id(0) % blocks * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        at = (gl.minimum(j, N - 1).to(gl.int64) * stride_j)[:, None]
        k = gl.arange(0, NARROW, gl.SliceLayout(0, LAYOUT))
        for p in gl.static_range(TOP_K):
            if found[p] >= 0:
                rows = W + found[p].to(gl.int64) * stride_e + at + k[None, :]
                for c in gl.static_range(CHUNKS):
                    async_copy.async_load(w_s.index(p * CHUNKS + c), rows + c * NARROW,
                                          mask=(j < N)[:, None] & (k + c * NARROW < K)[None, :])
            async_copy.commit_group()
        let_next(True)
        wait_for_previous(True)
        A += token * TOP_K * K
        Weights += token.to(gl.int64) * stride_t
        values = ()
        for p in gl.static_range(TOP_K):
            w = gl.load(Weights + p * stride_w).to(gl.float32)
            for c in gl.static_range(CHUNKS):
                m = (k + c * NARROW < K) & (found[p] >= 0)
                values = values + (gl.load(A + p * K + c * NARROW + k, mask=m, other=0.0),)
            values = values + (w,)
        total = gl.zeros([ROWS, NARROW], gl.float32, LAYOUT)
        for p in gl.static_range(TOP_K):
            async_copy.wait_group(TOP_K - 1 - p)
            if found[p] >= 0:
                y = gl.zeros([ROWS, NARROW], gl.float32, LAYOUT)
                for c in gl.static_range(CHUNKS):
                    a = values[p * (CHUNKS + 1) + c].to(gl.float32)
                    y += w_s.index(p * CHUNKS + c).load(LAYOUT).to(gl.float32) * a[None, :]
                total += y * values[p * (CHUNKS + 1) + CHUNKS]
        gl.store(Out + token * N + j, gl.sum(total, 1).to(Out.dtype.element_ty), mask=j < N)


def _gate(tensors, act):
    x, w, indices, a = tensors
    (experts, _, k), (pairs, n) = w.shape, a.shape
    meta = dict(ACT=act, PAIRS=pairs, TOP_K=indices.shape[1], ROWS=ROWS, WIDE=WIDE, STAGES=STAGES, AHEAD=AHEAD)
    programs = min(pairs * -(-n // ROWS), PROGRAMS * facts(x.device).sms)
    scalars = (experts, k, n, x.stride(0), *w.stride()[:2])
    return Launch(_gate_kernel, programs, scalars, meta | dict(num_warps=ROWS, launch_pdl=True), spill=16)


def _down(tensors):
    a, w, indices, weights, *_ = tensors
    (experts, n, k), (tokens, top_k) = w.shape, indices.shape
    meta = dict(PAIRS=tokens * top_k, TOP_K=top_k, ROWS=ROWS, NARROW=NARROW, CHUNKS=-(-k // NARROW))
    scalars = (experts, k, n, *w.stride()[:2], *weights.stride())
    return Launch(_down_kernel, tokens * -(-n // ROWS) + 1, scalars, meta | dict(num_warps=ROWS, launch_pdl=True))


def forward(x: Inputs, o: Options, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(out, pre, order, offsets) for a few tokens; the contract is in reference.py."""
    if keep:
        return triton_moe.forward(x, o, keep)
    indices, pairs, out = x.indices.contiguous(), x.pairs, x.x.new_empty(x.x.shape)
    order, offsets, places = (indices.new_empty(n, dtype=torch.int32) for n in (pairs, x.experts + 1, pairs))
    a = x.x.new_empty(pairs, x.w_down.shape[2])
    tensors = (x.x, x.w_gate_up, indices, a)
    remembered(_gate, tensors, o.activation)(*tensors)
    tensors = (a, x.w_down, indices, x.weights, out, order, offsets, places)
    remembered(_down, tensors)(*tensors)
    return out, None, order, offsets
