# mypy: ignore-errors
"""moe on any GPU from sm_80 (Triton): products of ragged groups of rows, with gathers and gates fused.

Forward: order of pairs; h = x W^T of gathered rows, whose epilogue is the gate; a V^T; sums of tokens. Backward: dout V
of gathered rows, whose epilogue writes dh, the weighted a, and what gradients of weights are summed from; dh W and sums
of tokens; two products whose sum runs over an expert's rows, for which rows of x and of dout are copied: loaded through
the order they cost these products a quarter. Operands have any strides. Rows of dropped pairs are never read.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.ops.moe import triton_one as one
from adatom.ops.moe.problem import Inputs, Options
from adatom.ops.moe.triton_combine import combine
from adatom.ops.moe.triton_order import order as order_of
from adatom.ops.moe.triton_order import places_of
from adatom.ops.moe.triton_rows import at_places, clear_dropped, spread
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous
from adatom.tiles.triton_dense import remembered, value_and_slope


class Config(NamedTuple):
    """How a product is tiled: block_m rows x block_n columns (gated: of the gate, and as many of up), block_k of the
    sum, warps, stages; spill: bytes of registers it may spill."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    spill: int = 0


# By shared memory (over 200 KB, or 99), product, and the most rows that an expert may have on average: the first that
# cuts the product into whole tiles serves.
LARGE = {
    "gate": (
        (8, Config(16, 32, 128, 4, 5)),
        (8, Config(16, 32, 64, 4, 6)),
        (32, Config(32, 64, 128, 4, 4)),
        (None, Config(128, 128, 64, 8, 4)),
        (None, Config(64, 64, 64, 4, 4)),
    ),
    "plain": (
        (8, Config(16, 64, 128, 4, 4)),
        (8, Config(16, 64, 64, 4, 6)),
        (32, Config(32, 64, 128, 4, 4)),
        (None, Config(128, 256, 64, 8, 4)),
        (None, Config(128, 128, 64, 4, 3)),
        (None, Config(128, 64, 64, 4, 4)),
    ),
    "grad": (
        (32, Config(32, 64, 128, 4, 4)),
        (None, Config(128, 256, 64, 8, 4, spill=64)),
        (None, Config(128, 128, 64, 8, 4)),
        (None, Config(64, 64, 64, 4, 4)),
    ),
    "outer": (
        (1024, Config(128, 128, 64, 4, 3)),
        (None, Config(128, 256, 64, 8, 4)),
        (None, Config(128, 128, 64, 4, 3)),
        (None, Config(64, 64, 64, 4, 3)),
    ),
}
SMALL = {
    "gate": ((8, Config(16, 32, 64, 4, 4)), (None, Config(128, 64, 32, 8, 3))),
    "plain": ((8, Config(16, 64, 64, 4, 4)), (None, Config(128, 128, 32, 8, 3)), (None, Config(128, 64, 32, 4, 3))),
    "grad": ((8, Config(16, 64, 64, 4, 4)), (None, Config(128, 128, 32, 8, 3)), (None, Config(128, 64, 32, 8, 3))),
    "outer": ((None, Config(128, 128, 32, 8, 3)), (None, Config(64, 64, 32, 4, 3))),
}
FLOAT32 = {
    "gate": Config(64, 32, 32, 4, 2),
    "plain": Config(64, 64, 32, 4, 2),
    "grad": Config(64, 32, 32, 4, 2),
    "outer": Config(64, 64, 32, 4, 2),
}
# where none does
UNEVEN = {
    "gate": Config(64, 32, 32, 4, 3),
    "plain": Config(64, 64, 32, 4, 3),
    "grad": Config(64, 32, 32, 4, 3),
    "outer": Config(64, 64, 32, 4, 3, spill=32),
}
PIECE = 32  # columns of a gradient's epilogue
_INTERPRETED = Config(16, 16, 32, 4, 1)


@triton.jit
def _expert_of(pid, Offsets, experts, columns, BINS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its first row, the row behind its last, tile among its tiles) of program `pid`.

    An expert has a program for `columns` columns of each BLOCK_M of its rows. Behind the last program it is `experts`
    or more.
    """
    bin = tl.arange(0, BINS)
    first = tl.load(Offsets + bin, mask=bin < experts, other=0)
    end = tl.load(Offsets + bin + 1, mask=bin < experts, other=0)
    programs = tl.cdiv(end - first, BLOCK_M) * columns
    ends = tl.cumsum(programs, 0)
    e = tl.sum((ends <= pid).to(tl.int32), 0)
    mine = bin == e
    tile = pid - tl.sum(tl.where(mine, ends - programs, 0), 0)
    return e, tl.sum(tl.where(mine, first, 0), 0), tl.sum(tl.where(mine, end, 0), 0), tile


@triton.jit
def _load_b(ptr, m_j, k, left, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=m_j[None, :] & (k < left)[:, None], other=0.0)


@triton.jit
def _gradients(v, w, Pre, Out, Scaled, row, i, m_i, j0, N, ACT: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """What "grad" writes of a tile v at (row, j0), PIECE columns at a time for want of registers; returns the sums of
    a v."""
    if COLUMNS > PIECE:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = v.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        dots = _gradients(left, w, Pre, Out, Scaled, row, i, m_i, j0, N, ACT, ROWS, HALF, PIECE)
        return dots + _gradients(right, w, Pre, Out, Scaled, row, i, m_i, j0 + HALF, N, ACT, ROWS, HALF, PIECE)
    j = j0 + tl.arange(0, COLUMNS)
    m = m_i[:, None] & (j < N)[None, :]
    near = i[:, None] * N + j[None, :]
    far = i[:, None] * (2 * N) + j[None, :]
    narrow = row.to(tl.int64) * N
    gate = tl.load(Pre + 2 * narrow + far, mask=m, other=0.0).to(tl.float32)
    up = tl.load(Pre + 2 * narrow + N + far, mask=m, other=0.0).to(tl.float32)
    value, slope = value_and_slope(gate, ACT)
    dots = tl.sum(value * up * v, 1)
    v *= w
    tl.store(Out + 2 * narrow + N + far, (v * value).to(Out.dtype.element_ty), mask=m)
    tl.store(Scaled + narrow + near, (w * value * up).to(Out.dtype.element_ty), mask=m)
    tl.store(Out + 2 * narrow + far, (v * up * slope).to(Out.dtype.element_ty), mask=m)
    return dots


@triton.jit
def _product_kernel(A, B, Order, Offsets, Out, Pre, Weights, Scaled, Dots, pairs, N, K, top_k, experts, stride_ai,
                    stride_ak, stride_be, stride_bj, stride_bk, stride_wt, stride_wk, KIND: tl.constexpr,
                    ACT: tl.constexpr, GATHER: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
                    EVEN: tl.constexpr, EARLY: tl.constexpr, SETTLED: tl.constexpr, BINS: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
                    PIECE: tl.constexpr):
    """Rows of A, or of the tokens of pairs if GATHER, times their expert's matrix B[e]^T.

    "plain": Out (pairs, N) is that. "gate": B has 2 N rows; Out (pairs, N) is act(gate) * up; KEEP: Pre (pairs, 2 N) is
    both. "grad": it is v; from Pre and the pairs' weights w, Out (pairs, 2 N) gets the gradient of Pre under w v,
    Scaled (pairs, N) w a, Dots (tiles of columns, pairs) the sums of a v over columns. SETTLED: Offsets were written
    before the kernel ahead began.
    """
    if not SETTLED:
        after_previous(EARLY)
    columns = tl.cdiv(N, BLOCK_N)
    e, first, end, tile = _expert_of(tl.program_id(0), Offsets, experts, columns, BINS, BLOCK_M)
    if SETTLED:
        after_previous(EARLY)
    if e < experts:
        rows = tl.cdiv(end - first, BLOCK_M)
        top = tile // (GROUP * columns) * GROUP
        size = tl.minimum(rows - top, GROUP)
        r = tile - top * columns
        column = r // size
        row = first + (top + r % size) * BLOCK_M
        i = tl.arange(0, BLOCK_M)
        j = column * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        m_i = i < end - row
        m_j = j < N
        source = tl.minimum(row + i, end - 1)
        if GATHER:
            source = tl.load(Order + source) // top_k
        a_ptr = A + source.to(tl.int64)[:, None] * stride_ai + k.to(tl.int64)[None, :] * stride_ak
        b_ptr = B + e.to(tl.int64) * stride_be + k.to(tl.int64)[:, None] * stride_bk
        b_ptr += j.to(tl.int64)[None, :] * stride_bj
        up_ptr = b_ptr + tl.cast(N, tl.int64) * stride_bj
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, K, BLOCK_K):
            if EVEN:
                a = tl.load(a_ptr)
            else:
                a = tl.load(a_ptr, mask=(k < K - k0)[None, :], other=0.0)
            acc = tl.dot(a, _load_b(b_ptr, m_j, k, K - k0, EVEN), acc, input_precision=PRECISION)
            if KIND == "gate":
                up = tl.dot(a, _load_b(up_ptr, m_j, k, K - k0, EVEN), up, input_precision=PRECISION)
                up_ptr += tl.cast(BLOCK_K, tl.int64) * stride_bk
            a_ptr += tl.cast(BLOCK_K, tl.int64) * stride_ak
            b_ptr += tl.cast(BLOCK_K, tl.int64) * stride_bk
        m = m_i[:, None] & m_j[None, :]
        narrow = row.to(tl.int64) * N  # where the tile's rows begin; from there on 32 bits suffice
        near = i[:, None] * N + j[None, :]
        far = i[:, None] * (2 * N) + j[None, :]
        if KIND == "plain":
            tl.store(Out + narrow + near, acc.to(Out.dtype.element_ty), mask=m)
        if KIND == "gate":
            if KEEP:
                tl.store(Pre + 2 * narrow + far, acc.to(Out.dtype.element_ty), mask=m)
                tl.store(Pre + 2 * narrow + N + far, up.to(Out.dtype.element_ty), mask=m)
            value, _ = value_and_slope(acc, ACT)
            tl.store(Out + narrow + near, (value * up).to(Out.dtype.element_ty), mask=m)
        if KIND == "grad":
            pair = tl.load(Order + row + i, mask=m_i, other=0)
            at = Weights + (pair // top_k).to(tl.int64) * stride_wt + (pair % top_k) * stride_wk
            w = tl.load(at, mask=m_i, other=0.0).to(tl.float32)[:, None]
            dots = _gradients(acc, w, Pre, Out, Scaled, row, i, m_i, column * BLOCK_N, N, ACT, BLOCK_M, BLOCK_N, PIECE)
            tl.store(Dots + column.to(tl.int64) * pairs + row + i, dots, mask=m_i)


@triton.jit
def _load_rows(X, p, end, j, n, stride_i, stride_j, EVEN: tl.constexpr):
    """Columns j of the rows p, [rows, columns]; 0 from row `end` on."""
    m = (p < end)[:, None]
    if not EVEN:
        m = m & (j < n)[None, :]
    return tl.load(X + p.to(tl.int64)[:, None] * stride_i + j.to(tl.int64)[None, :] * stride_j, mask=m, other=0.0)


@triton.jit
def _outer_kernel(A, B, Offsets, Out, M, N, stride_ai, stride_aj, stride_bi, stride_bj, PRECISION: tl.constexpr,
                  EVEN: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Out[e] (M, N): the sum over the rows p of expert e of A[p]^T B[p]; A (rows, M), B (rows, N)."""
    after_previous(EARLY)
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    e = pid // (rows * columns)
    tile = pid % (rows * columns)
    top = tile // (GROUP * columns) * GROUP
    size = tl.minimum(rows - top, GROUP)
    r = tile - top * columns
    i = (top + r % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = r // size * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(Offsets + e + 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for p0 in range(tl.load(Offsets + e), end, BLOCK_K):
        p = p0 + tl.arange(0, BLOCK_K)
        a = _load_rows(A, p, end, i, M, stride_ai, stride_aj, EVEN)
        b = _load_rows(B, p, end, j, N, stride_bi, stride_bj, EVEN)
        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
    at = Out + e.to(tl.int64) * M * N + i.to(tl.int64)[:, None] * N + j[None, :]
    tl.store(at, acc.to(Out.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])


def pick(a: torch.Tensor, kind: str, pairs: int, experts: int, n: int, m: int) -> Config:
    """The tiles of a product with n columns: "gate", "plain" or "grad", over m, or "outer", of m rows."""
    device = facts(a.device)
    if device.arch == 0:
        return _INTERPRETED
    if a.dtype == torch.float32:
        return FLOAT32[kind]
    table = (LARGE if device.shared_memory > 200_000 else SMALL)[kind]
    fit = (config for rows, config in table if rows is None or pairs <= rows * experts)
    return next((config for config in fit if _even(config, kind, n, m)), UNEVEN[kind])


def _even(config: Config, kind: str, n: int, m: int) -> bool:
    """Whether all tiles are whole."""
    return n % config.block_n == 0 and m % (config.block_m if kind == "outer" else config.block_k) == 0


def _meta(a, config):
    return dict(
        PRECISION="tf32x3" if a.dtype == torch.float32 else "ieee",
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _product(tensors, kind, act, gather, keep, settled, n, top_k):
    a, b, order, offsets, _, _, weights, _, _ = tensors
    pairs, experts, k = order.shape[0], b.shape[0], b.shape[2]
    config, early = pick(a, kind, pairs, experts, n, k), facts(a.device).arch >= 90
    meta = _meta(a, config) | dict(
        KIND=kind,
        ACT=act,
        GATHER=gather,
        KEEP=keep,
        EVEN=_even(config, kind, n, k),
        EARLY=early,
        SETTLED=settled,
        BINS=max(32, 1 << experts.bit_length()),
        GROUP=16,
        PIECE=PIECE,
    )
    tiles = pairs // config.block_m + min(experts, pairs)
    steps = (0, 0) if weights is None else weights.stride()
    scalars = (pairs, n, k, top_k, experts, *a.stride(), *b.stride(), *steps)
    pdl = {"launch_pdl": True} if early else {}
    return Launch(_product_kernel, tiles * -(-n // config.block_n), scalars, meta | pdl, config.spill)


def _multiply(
    kind, a, b, order, offsets, out, *, act="none", pre=None, weights=None, scaled=None, dots=None, top_k=0, keep=False,
    settled=False,
):
    """Launch `_product_kernel`. top_k: of the pairs whose tokens' rows A has; 0 if A has rows of pairs. settled: a
    kernel that waited for the one that wrote the offsets was launched since."""
    n = b.shape[1] // (2 if kind == "gate" else 1)
    tensors = (a, b, order, offsets, out, pre, weights, scaled, dots)
    top_k, gather = (1 if weights is None else weights.shape[1], False) if top_k == 0 else (top_k, True)
    remembered(_product, tensors, kind, act, gather, keep, settled, n, top_k)(*tensors)


def _outer(tensors):
    a, b, _, out = tensors
    experts, m, n = out.shape
    config, early = pick(a, "outer", a.shape[0], experts, n, m), facts(a.device).arch >= 90
    meta = _meta(a, config) | dict(EVEN=_even(config, "outer", n, m), EARLY=early, GROUP=8)
    programs = experts * -(-m // config.block_m) * -(-n // config.block_n)
    pdl = {"launch_pdl": True} if early else {}
    return Launch(_outer_kernel, programs, (m, n, *a.stride(), *b.stride()), meta | pdl, config.spill)


def _sums(a, b, offsets, like):
    """The sums over each expert's rows of a^T b, of the shape of `like`."""
    tensors = (a, b, offsets, like.new_empty(like.shape))
    remembered(_outer, tensors)(*tensors)
    return tensors[-1]


def _spread(x, places, offsets):
    return spread(x if x.stride(1) == 1 else x.contiguous(), places, offsets)


def forward(x: Inputs, o: Options, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(out, pre, order, offsets); the contract is in reference.py."""
    if not keep and one.fits(x):
        return one.forward(x, o)
    order, offsets, places = order_of(x.indices, x.experts)
    a = x.x.new_empty(x.pairs, x.w_down.shape[2])
    y = x.x.new_empty(x.pairs, x.x.shape[1])
    pre = x.x.new_empty(x.pairs, x.w_gate_up.shape[1]) if keep else None
    _multiply(
        "gate", x.x, x.w_gate_up, order, offsets, a, act=o.activation, pre=pre, top_k=x.top_k, keep=keep
    )  # fmt: skip
    if pre is not None:
        clear_dropped(pre, offsets)
    _multiply("plain", a, x.w_down, order, offsets, y, settled=True)
    return combine(y, places, x.top_k, x.weights, offsets=offsets), pre, order, offsets


def backward(
    x: Inputs, o: Options, pre: torch.Tensor | None, order: torch.Tensor, offsets: torch.Tensor, dout: torch.Tensor,
    needs: tuple[bool, bool, bool, bool], sums: Callable[..., torch.Tensor] = _sums,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """(dx, dweights, dw_gate_up, dw_down); the contract is in reference.py. sums: another kernel for `_sums`."""
    need_x, need_weights, need_gate_up, need_down = needs
    dx = dweights = dw_gate_up = dw_down = None
    wide = x.w_down.shape[2]
    if pre is None:
        pre = x.x.new_empty(x.pairs, 2 * wide)
        _multiply("plain", x.x, x.w_gate_up, order, offsets, pre, top_k=x.top_k)
    places = places_of(order)
    dh, scaled = x.x.new_empty(x.pairs, 2 * wide), x.x.new_empty(x.pairs, wide)
    parts = -(-wide // pick(x.x, "grad", x.pairs, x.experts, wide, x.x.shape[1]).block_n)
    dots = x.x.new_empty(parts, x.pairs, dtype=torch.float32)
    _multiply(
        "grad", dout, x.w_down.mT, order, offsets, dh, act=o.activation, pre=pre, weights=x.weights, scaled=scaled,
        dots=dots, top_k=x.top_k,
    )  # fmt: skip
    if need_weights:
        dweights = at_places(dots, places, offsets, x.weights)
    if need_down:
        dw_down = sums(_spread(dout, places, offsets), scaled, offsets, x.w_down)
    if need_gate_up:
        dw_gate_up = sums(dh, _spread(x.x, places, offsets), offsets, x.w_gate_up)
    if need_x:
        rows = x.x.new_empty(x.pairs, x.x.shape[1])
        _multiply("plain", dh, x.w_gate_up.mT, order, offsets, rows)
        dx = combine(rows, places, x.top_k, offsets=offsets)
    return dx, dweights, dw_gate_up, dw_down
