# mypy: ignore-errors
"""Products of each expert's rows with its matrix on Hopper (Gluon), with the gate, or its gradient, in the epilogue.

A program takes tiles of 128 rows of one expert. A producer warp feeds two consumer warpgroups, of 64 rows each, by TMA;
programs are persistent. Which rows a tile has is known on the device only: `triton_rows.lines` writes a table of them.
A tile at the end of an expert's rows also multiplies rows of the next one, and stores none of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from adatom.device import facts
from adatom.tiles.hopper import (
    as_box,
    as_matrix,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    mbarrier,
    release,
    slot,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
)
from adatom.tiles.hopper_gemm import Launch, acc_layout, activation, multiply, raster, split_columns, value_and_slope
from adatom.tiles.triton_dense import remembered

BLOCK_K = 64  # 128 bytes: the widest swizzle
ROWS = 128  # of a tile


class Config(NamedTuple):
    """How the kernel is tiled: block_n columns of the accumulator, a ring of `stages`, pieces of `piece` columns in
    `buffers` of each consumer; `group` tiles below each other walked together."""

    block_n: int
    stages: int
    piece: int
    buffers: int
    group: int


PLAIN = Config(256, 4, 64, 2, 16)
GATED = Config(256, 4, 64, 2, 16)
GRADIENT = Config(256, 4, 32, 4, 16)


@dataclass(frozen=True)
class Plan:
    """The constexprs of a kernel, together: see `_kernel`."""

    ACT: str
    GATED: bool
    KEEP: bool
    GRAD: bool
    COLS: bool
    BLOCK_N: int
    STAGES: int
    PIECE: int
    BUFFERS: int
    GROUP: int

    @property
    def PARTS(self):
        return 2 if self.GATED else 1

    @property
    def OUT_N(self):
        return self.BLOCK_N // self.PARTS


@gluon.constexpr_function
def _plan(*args):
    return Plan(*args)


@gluon.jit
def _tile(t, Lines, N, PLAN: gl.constexpr):
    """Expert, first row and end of the rows, and first column of tile t; and its number among the columns'."""
    OUT_N: gl.constexpr = PLAN.OUT_N
    GROUP: gl.constexpr = PLAN.GROUP
    m, n = raster(t, gl.load(Lines), (N + OUT_N - 1) // OUT_N, GROUP)
    at = Lines + 4 * (m + 1)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), n * OUT_N, n


@gluon.jit
def _tiles(Lines, N, PLAN: gl.constexpr):
    OUT_N: gl.constexpr = PLAN.OUT_N
    return gl.load(Lines) * ((N + OUT_N - 1) // OUT_N)


@gluon.jit
def _producer(A, B, Lines, a_s, b_s, full, empty, N, k_tiles, PLAN: gl.constexpr):
    STAGES: gl.constexpr = PLAN.STAGES
    PARTS: gl.constexpr = PLAN.PARTS
    BYTES: gl.constexpr = A.block_type.nbytes + PARTS * B.block_type.nbytes
    n = 0
    for t in range(gl.program_id(0), _tiles(Lines, N, PLAN), gl.num_programs(0)):
        e, row, end, column, _ = _tile(t, Lines, N, PLAN)
        both = row + 64 < end
        for k in range(k_tiles):
            wait_empty(empty, n, STAGES)
            i = slot(n, STAGES)
            bar = full.index(i)
            _expect(bar, both, BYTES, A.block_type.nbytes)
            tma.async_load(A, [row, k * 64], bar, a_s.index(2 * i))
            tma.async_load(A, [row + 64, k * 64], bar, a_s.index(2 * i + 1), both)
            for part in gl.static_range(PARTS):
                box = as_box(B, b_s.index(PARTS * i + part))
                if PLAN.COLS:
                    tma.async_load(B, [e, k * 64, column], bar, box)
                else:
                    tma.async_load(B, [e, part * N + column, k * 64], bar, box)
            n += 1


@gluon.jit
def _expect(bar, both, BYTES: gl.constexpr, MORE: gl.constexpr):
    if both:
        mbarrier.expect(bar, BYTES + MORE)
    else:
        mbarrier.expect(bar, BYTES)


@gluon.jit
def _emit(Out, desc, x, row, end, column, N, stride, c_s, C: gl.constexpr, NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Piece NUMBER of a tile: round it, and begin to store it: by TMA if all of its rows are this expert's."""
    BUFFERS: gl.constexpr = PLAN.BUFFERS
    LANES: gl.constexpr = PLAN.PIECE // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    buffer = c_s.index(C * BUFFERS + NUMBER % BUFFERS)
    whole = row + 64 <= end
    if whole:
        tma.store_wait(BUFFERS - 1)  # what lay there before has left
    else:
        tma.store_wait(0)
    gl.barrier()
    buffer.store(x.to(buffer.dtype))
    fence_async_shared()
    gl.barrier()
    if whole:
        tma.async_store(desc, [row, column], buffer)
    else:
        i = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        j = column + gl.arange(0, PLAN.PIECE, gl.SliceLayout(0, LAYOUT))
        at = Out + (i.to(gl.int64) * stride)[:, None] + j[None, :]
        gl.store(at, buffer.load(LAYOUT), mask=(i < end)[:, None] & (j < N)[None, :])


@gluon.jit
def _piece(Pre, row, end, column, N, stride, PIECE: gl.constexpr):
    """A piece of what the forward kept, in the registers of the accumulator."""
    LAYOUT: gl.constexpr = acc_layout(PIECE)
    i = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    j = column + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
    mask = (i < end)[:, None] & (j < N)[None, :]
    return gl.load(Pre + (i.to(gl.int64) * stride)[:, None] + j[None, :], mask=mask, other=0.0)


@gluon.jit
def _epilogue(acc, OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, c_s, row, end, column, number, N, pairs,
              C: gl.constexpr, PLAN: gl.constexpr):
    ACT: gl.constexpr = PLAN.ACT
    PIECE: gl.constexpr = PLAN.PIECE
    PIECES: gl.constexpr = PLAN.OUT_N // PIECE
    if PLAN.GRAD:
        parts = split_columns(acc, PIECES)
        i = row + gl.arange(0, 64, gl.SliceLayout(1, acc_layout(PIECE)))
        pair = gl.load(Order + i, mask=i < end, other=0)
        w = gl.load(Weights + pair, mask=i < end, other=0.0).to(gl.float32)[:, None]
        dots = gl.zeros([64], gl.float32, gl.SliceLayout(1, acc_layout(PIECE)))
        for p in gl.static_range(PIECES):
            c = column + p * PIECE
            gate = _piece(Pre, row, end, c, N, 2 * N, PIECE).to(gl.float32)
            up = _piece(Pre + N, row, end, c, N, 2 * N, PIECE).to(gl.float32)
            value, slope = value_and_slope(gate, ACT)
            a = value * up
            dots += gl.sum(a * parts[p], 1)
            v = parts[p] * w
            _emit(Into, PreD, v * up * slope, row, end, c, N, 2 * N, c_s, C, 3 * p, PLAN)
            _emit(Into + N, UpD, v * value, row, end, c, N, 2 * N, c_s, C, 3 * p + 1, PLAN)
            _emit(Out, OutD, a * w, row, end, c, N, N, c_s, C, 3 * p + 2, PLAN)
        gl.store(Dots + number.to(gl.int64) * pairs + i, dots, mask=i < end)
    elif PLAN.GATED:
        gates, ups = split_columns(acc, 2)
        gates = split_columns(gates, PIECES)
        ups = split_columns(ups, PIECES)
        for p in gl.static_range(PIECES):
            c = column + p * PIECE
            if PLAN.KEEP:
                _emit(Pre, PreD, gates[p], row, end, c, N, 2 * N, c_s, C, 3 * p, PLAN)
                _emit(Pre + N, UpD, ups[p], row, end, c, N, 2 * N, c_s, C, 3 * p + 1, PLAN)
            _emit(Out, OutD, activation(gates[p], ACT) * ups[p], row, end, c, N, N, c_s, C,
                  3 * p + 2 if PLAN.KEEP else p, PLAN)
    else:
        parts = split_columns(acc, PIECES)
        for p in gl.static_range(PIECES):
            _emit(Out, OutD, parts[p], row, end, column + p * PIECE, N, N, c_s, C, p, PLAN)


@gluon.jit
def _consumer(OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, full, empty, N, k_tiles,
              pairs, C: gl.constexpr, PLAN: gl.constexpr):
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    COLS: gl.constexpr = PLAN.COLS
    n = 0
    for t in range(gl.program_id(0), _tiles(Lines, N, PLAN), gl.num_programs(0)):
        _, row, end, column, number = _tile(t, Lines, N, PLAN)
        row += 64 * C
        if row < end:
            acc = multiply(a_s, b_s, full, empty, n, k_tiles, None, 1, C, 2, False, COLS, 64, BLOCK_N, STAGES)
            _epilogue(acc, OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, c_s, row, end, column, number, N,
                      pairs, C, PLAN)
        else:
            for k in range(n, n + k_tiles):
                wait_full(full, k, STAGES)
                release(empty, k, STAGES)
        n += k_tiles
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["k_tiles", "pairs"])
def _kernel(A, B, OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, N, k_tiles, pairs,
            ACT: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr, GRAD: gl.constexpr, COLS: gl.constexpr,
            BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr,
            GROUP: gl.constexpr):
    """Out[p] = A[p] B[e]^T for the rows p of each expert e; N columns. COLS: B holds transposes.

    GATED: B has a gate's rows before its up's, Out = act(gate) * up, and with KEEP both go to Pre.
    GRAD: the product is v, the gradient of act(gate) * up but for the weight w of the row; with the gate and up of Pre,
    their gradients go to Into, w act(gate) up to Out, and for each tile of columns the sum of v act(gate) up to Dots.
    """
    PLAN: gl.constexpr = _plan(ACT, GATED, KEEP, GRAD, COLS, BLOCK_N, STAGES, PIECE, BUFFERS, GROUP)
    PARTS: gl.constexpr = PLAN.PARTS
    SHAPE: gl.constexpr = B.block_type.shape
    FLAT: gl.constexpr = as_matrix(B.layout)
    a_s = gl.allocate_shared_memory(A.dtype, [2 * STAGES] + A.block_type.shape, A.layout)
    b_parts = gl.allocate_shared_memory(B.dtype, [PARTS * STAGES, SHAPE[1], SHAPE[2]], FLAT)
    b_s = b_parts.reinterpret(B.dtype, [STAGES, BLOCK_N, 64], FLAT) if GATED else b_parts
    c_s = gl.allocate_shared_memory(OutD.dtype, [2 * BUFFERS] + OutD.block_type.shape, OutD.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    fence_async_shared()
    gl.barrier()
    let_next(True)
    wait_for_previous(True)
    gl.warp_specialize([
        (_consumer, (OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, full, empty, N,
                     k_tiles, pairs, 0, PLAN)),
        (_consumer, (OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, full, empty, N,
                     k_tiles, pairs, 1, PLAN)),
        (_producer, (A, B, Lines, a_s, b_parts, full, empty, N, k_tiles, PLAN)),
    ], [4, 1], [240, 24])


def _launch(tensors: tuple, act: str, keep: bool, grad: bool, cols: bool, rows: int) -> Launch:
    a, b, out, *_, order, _, _, lines = tensors
    device, columns = facts(a.device), out.shape[1]
    gated = keep or (act != "" and not grad)
    config = GRADIENT if grad else GATED if gated else PLAIN
    out_n = config.block_n // (2 if gated else 1)
    meta = dict(
        ACT=act,
        GATED=gated,
        KEEP=keep,
        GRAD=grad,
        COLS=cols,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        PIECE=config.piece,
        BUFFERS=config.buffers,
        GROUP=config.group,
        num_warps=4,
        launch_pdl=True,
    )
    result = (64, config.piece)
    blocks = {
        "A": (64, BLOCK_K),
        "B": (BLOCK_K, out_n) if cols else (out_n, BLOCK_K),
        "OutD": result,
        "PreD": result,
        "UpD": result,
    }
    programs = min((lines.shape[0] - 1) * -(-columns // out_n), device.sms)
    return Launch(_kernel, programs, (columns, -(-a.shape[1] // BLOCK_K), rows), meta, 0, blocks)


def product(
    a: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor, lines: torch.Tensor, *, act: str = "",
    pre: torch.Tensor | None = None, into: torch.Tensor | None = None, order: torch.Tensor | None = None,
    weights: torch.Tensor | None = None, dots: torch.Tensor | None = None, cols: bool = False,
) -> None:  # fmt: skip
    """Launch `_kernel`: a (pairs, K) by matrices (experts, columns or twice as many, K), transposed with `cols`.

    act: gated, and `pre` (pairs, 2 * columns) kept if given. With `into`, like pre: the gradient of that from `pre`.
    """
    n, kept = out.shape[1], pre if into is None else into
    halves = (None, None) if kept is None else (kept[:, :n], kept[:, n:])
    tensors = (a, matrices, out, *halves, out, pre, into, order, weights, dots, lines)
    grad = into is not None
    remembered(_launch, tensors, act, pre is not None and not grad, grad, cols, a.shape[0])(*tensors)


def column_tiles(columns: int) -> int:
    """Rows of `dots`."""
    return -(-columns // GRADIENT.block_n)
