# mypy: ignore-errors
"""The forward for a single token (Triton), for narrow experts, where what kernels cost besides reading weights shows.

Two kernels instead of four: each program of the first computes some gated values of one pair, and a few more order the
pairs; each of the second some columns of the sum over pairs. No tensor cores: a program loads all of its weights into
registers at once, the second kernel before the first has ended, since they depend on the indices alone.
"""

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.ops.moe.problem import Inputs, Options
from adatom.ops.moe.triton_order import few
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous
from adatom.tiles.triton_dense import remembered, value_and_slope

_GATE, _DOWN = 4, 8  # rows of a matrix, of a program of either kernel: a warp each
_CHUNK, _CHUNKS = 2048, 4  # columns of a row that are loaded together at most, and how often in the first kernel
_HELD = 8192  # elements of a row of a program that the second kernel holds at most
_ITEMS, _LOOK = 8, 256  # as in triton_order.py


@triton.jit
def _gate_kernel(X, W, Indices, A, Order, Offsets, Places, pairs, experts, K, N, stride_e, stride_j, ACT: tl.constexpr,
                 EARLY: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                 EVEN: tl.constexpr, ITEMS: tl.constexpr, LOOK: tl.constexpr):
    """A (pairs, N) = act(gate) * up of each pair, by its number; and what triton_order.py makes of the indices."""
    after_previous(EARLY)
    blocks = tl.cdiv(N, ROWS)
    pid = tl.program_id(0)
    if pid >= pairs * blocks:
        few(pid - pairs * blocks, Indices, Order, Offsets, Places, pairs, experts, ITEMS, LOOK)
    else:
        p = pid // blocks
        e = tl.load(Indices + p)
        if (e >= 0) & (e < experts):
            j = pid % blocks * ROWS + tl.arange(0, ROWS)
            rows = W + e.to(tl.int64) * stride_e + j.to(tl.int64)[:, None] * stride_j
            gate = tl.zeros([ROWS, CHUNK], tl.float32)
            up = tl.zeros([ROWS, CHUNK], tl.float32)
            for c in tl.static_range(CHUNKS):
                k = c * CHUNK + tl.arange(0, CHUNK)
                m = (j < N)[:, None] & (k < K)[None, :]
                if EVEN:
                    g = tl.load(rows + k[None, :])
                    u = tl.load(rows + tl.cast(N, tl.int64) * stride_j + k[None, :])
                    x = tl.load(X + k)
                else:
                    g = tl.load(rows + k[None, :], mask=m, other=0.0)
                    u = tl.load(rows + tl.cast(N, tl.int64) * stride_j + k[None, :], mask=m, other=0.0)
                    x = tl.load(X + k, mask=k < K, other=0.0)
                gate += g.to(tl.float32) * x.to(tl.float32)[None, :]
                up += u.to(tl.float32) * x.to(tl.float32)[None, :]
            value, _ = value_and_slope(tl.sum(gate, 1), ACT)
            a = value * tl.sum(up, 1)
            tl.store(A + p.to(tl.int64) * N + j, a.to(A.dtype.element_ty), mask=j < N)


@triton.jit
def _down_kernel(A, W, Indices, Weights, Out, experts, K, N, stride_e, stride_j, stride_w, EARLY: tl.constexpr,
                 PAIRS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                 EVEN: tl.constexpr):
    """Out (N,): the sum over pairs of weight * A W[e]^T, in order of the pairs; dropped ones add nothing."""
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = ()
    for p in tl.static_range(PAIRS):
        e = tl.load(Indices + p)
        present = (e >= 0) & (e < experts)
        rows = W + tl.where(present, e, 0).to(tl.int64) * stride_e + j.to(tl.int64)[:, None] * stride_j
        for c in tl.static_range(CHUNKS):
            k = c * CHUNK + tl.arange(0, CHUNK)
            if EVEN:
                held = held + (tl.load(rows + k[None, :]),)
            else:
                held = held + (tl.load(rows + k[None, :], mask=(j < N)[:, None] & (k < K)[None, :], other=0.0),)
    after_previous(EARLY)
    total = tl.zeros([ROWS], tl.float32)
    for p in tl.static_range(PAIRS):
        e = tl.load(Indices + p)
        present = (e >= 0) & (e < experts)
        y = tl.zeros([ROWS, CHUNK], tl.float32)
        for c in tl.static_range(CHUNKS):
            k = c * CHUNK + tl.arange(0, CHUNK)
            a = tl.load(A + p * K + k, mask=(k < K) & present, other=0.0).to(tl.float32)
            y += tl.where(present, held[p * CHUNKS + c].to(tl.float32), 0.0) * a[None, :]
        total += tl.sum(y, 1) * tl.load(Weights + p * stride_w, mask=present, other=0.0).to(tl.float32)
    tl.store(Out + j, total.to(Out.dtype.element_ty), mask=j < N)


def _chunk(n: int) -> int:
    """The largest power of two that divides n, within bounds, or what covers n if that is too small."""
    whole = n & -n
    return min(whole, _CHUNK) if whole >= 256 else min(_CHUNK, triton.next_power_of_2(n))


def fits(x: Inputs) -> bool:
    """Whether `forward` takes these inputs: one token, 16-bit floats, rows contiguous and short enough."""
    gate_up, down = x.w_gate_up, x.w_down
    return (
        x.x.shape[0] == 1
        and x.x.dtype in (torch.float16, torch.bfloat16)
        and gate_up.stride(2) == 1
        and down.stride(2) == 1
        and x.x.stride(1) == 1
        and -(-gate_up.shape[2] // _chunk(gate_up.shape[2])) <= _CHUNKS
        and x.pairs * -(-down.shape[2] // _chunk(down.shape[2])) * _chunk(down.shape[2]) <= _HELD
    )


def _rows(device, rows):
    early = facts(device).arch >= 90
    return {"EARLY": early, "ROWS": rows, "num_warps": rows} | ({"launch_pdl": True} if early else {})


def _gate(tensors, act):
    x, w, indices, a, *_ = tensors
    pairs, (experts, _, k), n = indices.numel(), w.shape, a.shape[1]
    chunk = _chunk(k)
    even = k % chunk == 0 and n % _GATE == 0
    meta = _rows(x.device, _GATE) | dict(
        ACT=act, CHUNK=chunk, CHUNKS=-(-k // chunk), EVEN=even, ITEMS=_ITEMS, LOOK=_LOOK
    )  # fmt: skip
    programs = pairs * -(-n // _GATE) + -(-(pairs + experts + 1) // _ITEMS)
    return Launch(_gate_kernel, programs, (pairs, experts, k, n, *w.stride()[:2]), meta)


def _down(tensors):
    a, w, indices, weights, _ = tensors
    experts, n, k = w.shape
    chunk, pairs = _chunk(k), indices.numel()
    even = k % chunk == 0 and n % _DOWN == 0
    meta = _rows(a.device, _DOWN) | dict(PAIRS=pairs, CHUNK=chunk, CHUNKS=-(-k // chunk), EVEN=even)
    return Launch(_down_kernel, -(-n // _DOWN), (experts, k, n, *w.stride()[:2], weights.stride(1)), meta)


def forward(x: Inputs, o: Options) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
    """(out, None, order, offsets) for inputs that `fits` takes."""
    indices, pairs, out = x.indices.contiguous(), x.pairs, x.x.new_empty(x.x.shape)
    order, offsets, places = (indices.new_empty(n, dtype=torch.int32) for n in (pairs, x.experts + 1, pairs))
    a = x.x.new_empty(pairs, x.w_down.shape[2])
    tensors = (x.x, x.w_gate_up, indices, a, order, offsets, places)
    remembered(_gate, tensors, o.activation)(*tensors)
    tensors = (a, x.w_down, indices, x.weights, out)
    remembered(_down, tensors)(*tensors)
    return out, None, order, offsets
