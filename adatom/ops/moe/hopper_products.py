# mypy: ignore-errors
"""Products of each expert's rows with its matrix on Hopper (Gluon), with the gate, or its gradient, in the epilogue.

A program takes tiles of 128 or 192 rows of one expert. A producer warp feeds two or three consumer warpgroups, of 64
rows each, by TMA, or four warps gather the rows by cp.async; programs are persistent. Which rows a tile has is known on
the device only: `triton_rows.lines` writes a table of them.
A tile at the end of an expert's rows also multiplies rows of the next one, and stores none of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy

from adatom.device import facts
from adatom.ops.moe.hopper_wide import Launch
from adatom.ops.moe.triton_rows import lines
from adatom.tiles.hopper import (
    _with,
    as_box,
    as_matrix,
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    mbarrier,
    planner,
    release,
    slot,
    tma,
    wait_empty,
    wait_for_previous,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from adatom.tiles.hopper_gemm import acc_layout, activation, multiply, raster, split_columns, value_and_slope
from adatom.tiles.triton_dense import remembered

async_copy = _with(_async_copy, async_load=getattr(_async_copy, "async_copy_global_to_shared", None))
BLOCK_K = 64  # 128 bytes: the widest swizzle


class Config(NamedTuple):
    """How the kernel is tiled: consumers of block_m rows each, block_n columns of the accumulator, a ring of `stages`,
    pieces of `piece` columns in `buffers` of each, so that a tile has a multiple of `buffers` pieces; `group` tiles
    below each other are walked together at most; `spill` bytes of registers it may spill."""

    consumers: int
    block_m: int
    block_n: int
    stages: int
    piece: int
    buffers: int
    group: int = 8
    spill: int = 0


PLAIN = Config(2, 64, 256, 4, 64, 2)
TALL = Config(3, 64, 256, 3, 64, 2, spill=16)
# what the forward kept comes through the ring; results leave from there
GRADIENT = Config(2, 64, 256, 4, 64, 1, spill=16)
WIDE = ("A", "B")  # descriptors that fetch 256 bytes
# rows of an expert, on average, from which on tiles are low, and consumers without rows multiply too: see `Plan.SKIP`
MANY = 1024


@dataclass(frozen=True)
class Plan:
    """The constexprs of a kernel, together: see `_kernel`.

    SKIP: a consumer without rows multiplies nothing. Where such tiles are few they had better take as long as others:
    programs that are out of step read the same weights at different times, and find them gone from L2.
    """

    ACT: str
    GATED: bool
    KEEP: bool
    GRAD: bool
    COLS: bool
    SKIP: bool
    GATHER: bool
    CONSUMERS: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    PIECE: int
    BUFFERS: int
    GROUP: int

    @property
    def HALVES(self):
        """Whether a consumer sums in two accumulators: with three of them ptxas knows no product as wide as a tile."""
        return self.CONSUMERS == 3

    @property
    def PARTS(self):
        """Boxes of B in a step."""
        return 2 if self.GATED or self.HALVES else 1

    @property
    def OUT_N(self):
        return self.BLOCK_N // 2 if self.GATED else self.BLOCK_N

    @property
    def MORE(self):
        """Uses of the ring behind a tile's sum."""
        return self.BLOCK_N // self.PIECE if self.GRAD else 0


_plan = planner(Plan)


@gluon.jit
def _tile(t, Lines, n_lines, N, PLAN: gl.constexpr):
    """Expert, first row and end of the rows, first column, and number among the columns, of tile t."""
    OUT_N: gl.constexpr = PLAN.OUT_N
    GROUP: gl.constexpr = PLAN.GROUP
    m, n = raster(t, n_lines, (N + OUT_N - 1) // OUT_N, GROUP)
    at = Lines + 4 * (m + 1)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), n * OUT_N, n


@gluon.jit
def _tiles(Lines, N, PLAN: gl.constexpr):
    """How many lines there are, and how many tiles."""
    OUT_N: gl.constexpr = PLAN.OUT_N
    n_lines = gl.load(Lines)
    return n_lines, n_lines * ((N + OUT_N - 1) // OUT_N)


@gluon.jit
def _tell(told, told_full, told_empty, turn, t, PLAN: gl.constexpr):
    """Tell the consumers the number of the next tile."""
    WARPS: gl.constexpr = 4 if PLAN.GATHER else 1
    wait_empty(told_empty, turn, 2)
    told.index(slot(turn, 2)).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(told_full.index(slot(turn, 2)), count=1)


@gluon.jit
def _hear(told, told_full, told_empty, turn):
    """The number of the next tile."""
    wait_full(told_full, turn, 2)
    t = gl.max(told.index(slot(turn, 2)).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    release(told_empty, turn, 2)
    return t


@gluon.jit
def _producer(A, B, GateD, RaisedD, Rows, Order, Lines, Taken, a_s, b_s, kept_s, told, bars, N, K, k_tiles, top_k,
              stride, PLAN: gl.constexpr):
    STAGES: gl.constexpr = PLAN.STAGES
    PARTS: gl.constexpr = PLAN.PARTS
    PIECE: gl.constexpr = PLAN.PIECE
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    MORE: gl.constexpr = PLAN.MORE
    CONSUMERS: gl.constexpr = PLAN.CONSUMERS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # of a gathered box
    BYTES: gl.constexpr = PARTS * B.block_type.nbytes
    full, empty, told_full, told_empty = bars
    n_lines, n_tiles = _tiles(Lines, N, PLAN)
    n = 0
    turn = 0
    t = gl.program_id(0)
    while t < n_tiles:
        following = gl.num_programs(0) + gl.atomic_add(Taken, 1, sem="relaxed")
        _tell(told, told_full, told_empty, turn, t, PLAN)
        e, row, end, column, _ = _tile(t, Lines, n_lines, N, PLAN)
        both = row + BLOCK_M < end
        busy = gl.minimum((end - row + BLOCK_M - 1) // BLOCK_M, CONSUMERS)  # consumers that have rows
        found = ()  # where rows to be gathered begin, in units of 8: 64 bits take too many registers
        if PLAN.GATHER:
            for c in gl.static_range(CONSUMERS):
                at = gl.minimum(row + c * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT)), end - 1)
                found = found + (gl.load(Order + at) // top_k * (stride // 8),)
        for k in range(k_tiles):
            wait_empty(empty, n, STAGES)
            i = slot(n, STAGES)
            bar = full.index(i)
            if PLAN.GATHER:
                mbarrier.expect(bar, BYTES)
            else:
                for c in gl.static_range(CONSUMERS):
                    mbarrier.expect(bar, BYTES + (c + 1) * A.block_type.nbytes, busy == c + 1)
                for c in gl.static_range(CONSUMERS):
                    tma.async_load(A, [row + c * BLOCK_M, k * 64], bar, a_s.index(CONSUMERS * i + c), c < busy)
            for part in gl.static_range(PARTS):
                box = as_box(B, b_s.index(PARTS * i + part))
                first = column + part * (N if PLAN.GATED else PLAN.BLOCK_N // 2)
                if PLAN.COLS:
                    tma.async_load(B, [e, k * 64, first], bar, box)
                else:
                    tma.async_load(B, [e, first, k * 64], bar, box)
            if PLAN.GATHER:
                j = k * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
                for c in gl.static_range(CONSUMERS):
                    if c < busy:
                        rows = (Rows + j)[None, :] + (found[c].to(gl.int64) * 8)[:, None]
                        async_copy.async_load(a_s.index(CONSUMERS * i + c), rows, mask=(j < K)[None, :])
                async_copy.mbarrier_arrive(bar, increment_count=False)  # of each thread, when its rows are there
            n += 1
        for p in gl.static_range(MORE):
            wait_empty(empty, n, STAGES)
            i = slot(n, STAGES)
            bar = full.index(i)
            if both:
                mbarrier.expect(bar, 4 * GateD.block_type.nbytes)
            else:
                mbarrier.expect(bar, 2 * GateD.block_type.nbytes)
            for c in gl.static_range(2):
                at = row + c * BLOCK_M
                wanted = both | (c == 0)
                tma.async_load(GateD, [at, column + p * PIECE], bar, kept_s.index(4 * i + 2 * c), wanted)
                tma.async_load(RaisedD, [at, column + p * PIECE], bar, kept_s.index(4 * i + 2 * c + 1), wanted)
            n += 1
        turn += 1
        t = following
    _tell(told, told_full, told_empty, turn, n_tiles, PLAN)


@gluon.jit
def _store(Out, desc, buffer, row, end, column, N, stride, PLAN: gl.constexpr):
    """Begin to store a piece that lies in shared memory: by TMA if all rows of the tile are this expert's."""
    LANES: gl.constexpr = PLAN.PIECE // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    if row + PLAN.BLOCK_M <= end:
        tma.async_store(desc, [row, column], buffer)
    else:
        i = row + gl.arange(0, PLAN.BLOCK_M, gl.SliceLayout(1, LAYOUT))
        j = column + gl.arange(0, PLAN.PIECE, gl.SliceLayout(0, LAYOUT))
        at = Out + (i.to(gl.int64) * stride)[:, None] + j[None, :]
        gl.store(at, buffer.load(LAYOUT), mask=(i < end)[:, None] & (j < N)[None, :])


@gluon.jit
def _emit(Out, desc, x, row, end, column, N, stride, c_s, C: gl.constexpr, NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Piece NUMBER of a tile: round it, and begin to store it."""
    BUFFERS: gl.constexpr = PLAN.BUFFERS
    buffer = c_s.index(C * BUFFERS + NUMBER % BUFFERS)
    if row + PLAN.BLOCK_M <= end:
        tma.store_wait(BUFFERS - 1)  # what lay there before has left
    else:
        tma.store_wait(0)
    gl.barrier()
    buffer.store(x.to(buffer.dtype))
    fence_async_shared()
    gl.barrier()
    _store(Out, desc, buffer, row, end, column, N, stride, PLAN)


@gluon.jit
def _prefetch(Pre, row, end, column, N, PLAN: gl.constexpr):
    """Fetch the lines of a tile of what the forward kept to L2."""
    LINES: gl.constexpr = PLAN.OUT_N // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [4, 1], [1, 0])
    i = gl.minimum(row + gl.arange(0, PLAN.BLOCK_M, gl.SliceLayout(1, LAYOUT)), end - 1)
    j = gl.minimum(column + gl.arange(0, LINES, gl.SliceLayout(0, LAYOUT)) * 64, N - 1)
    lines = Pre + ((i.to(gl.int64) * (2 * N))[:, None] + j[None, :])
    for half in gl.static_range(2):
        gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines + half * N],
                                  dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gradients(acc, OutD, PreD, UpD, Out, Into, Order, Weights, Dots, a_s, kept_s, full, empty, n, row, end, column,
               number, N, pairs, C: gl.constexpr, PLAN: gl.constexpr):
    """The epilogue of GRAD: pieces of what the forward kept come in uses n.. of the ring, results take their place."""
    ACT: gl.constexpr = PLAN.ACT
    PIECE: gl.constexpr = PLAN.PIECE
    STAGES: gl.constexpr = PLAN.STAGES
    MORE: gl.constexpr = PLAN.MORE
    ROWS: gl.constexpr = PLAN.BLOCK_M
    LAYOUT: gl.constexpr = acc_layout(PIECE)
    parts = split_columns(acc, MORE)
    i = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    pair = gl.load(Order + i, mask=i < end, other=0)
    w = gl.load(Weights + pair, mask=i < end, other=0.0).to(gl.float32)[:, None]
    dots = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    for p in gl.static_range(MORE):
        c = column + p * PIECE
        s = slot(n + p, STAGES)
        gate_s = kept_s.index(4 * s + 2 * C)
        up_s = kept_s.index(4 * s + 2 * C + 1)
        out_s = a_s.index(2 * s + C)
        wait_full(full, n + p, STAGES)
        gate = gate_s.load(LAYOUT).to(gl.float32)
        up = up_s.load(LAYOUT).to(gl.float32)
        value, slope = value_and_slope(gate, ACT)
        a = value * up
        dots += gl.sum(a * parts[p], 1)
        v = parts[p] * w
        gate_s.store((v * up * slope).to(gate_s.dtype))
        up_s.store((v * value).to(up_s.dtype))
        out_s.store((a * w).to(out_s.dtype))
        fence_async_shared()
        tma.store_wait(0)  # of the piece before
        gl.barrier()
        if p > 0:
            release(empty, n + p - 1, STAGES)
        _store(Into, PreD, gate_s, row, end, c, N, 2 * N, PLAN)
        _store(Into + N, UpD, up_s, row, end, c, N, 2 * N, PLAN)
        _store(Out, OutD, out_s, row, end, c, N, N, PLAN)
    gl.store(Dots + number.to(gl.int64) * pairs + i, dots, mask=i < end)
    tma.store_wait(0)
    gl.barrier()
    release(empty, n + MORE - 1, STAGES)


@gluon.jit
def _epilogue(accs, OutD, PreD, UpD, Out, Pre, c_s, row, end, column, N, C: gl.constexpr, PLAN: gl.constexpr):
    ACT: gl.constexpr = PLAN.ACT
    PIECE: gl.constexpr = PLAN.PIECE
    PIECES: gl.constexpr = PLAN.OUT_N // PIECE
    if PLAN.GATED:
        gates, ups = accs if PLAN.HALVES else split_columns(accs[0], 2)
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
        if PLAN.HALVES:
            parts = split_columns(accs[0], PIECES // 2) + split_columns(accs[1], PIECES // 2)
        else:
            parts = split_columns(accs[0], PIECES)
        for p in gl.static_range(PIECES):
            _emit(Out, OutD, parts[p], row, end, column + p * PIECE, N, N, c_s, C, p, PLAN)


@gluon.jit
def _half(acc, a, b, FIRST: gl.constexpr, COLS: gl.constexpr):
    if not COLS:
        b = b.permute((1, 0))
    if FIRST:
        acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    else:
        acc = warpgroup_mma(a, b, acc, is_async=True)
    return acc


@gluon.jit
def _halves(left, right, a_s, b_s, full, k, C: gl.constexpr, FIRST: gl.constexpr, PLAN: gl.constexpr):
    """The halves of an accumulator and the products of use k, which are left under way; those before them are not."""
    STAGES: gl.constexpr = PLAN.STAGES
    CONSUMERS: gl.constexpr = PLAN.CONSUMERS
    wait_full(full, k, STAGES)
    if PLAN.GATHER:
        fence_async_shared()
    s = slot(k, STAGES)
    a = a_s.index(CONSUMERS * s + C)
    left = _half(left, a, b_s.index(2 * s), FIRST, PLAN.COLS)
    right = _half(right, a, b_s.index(2 * s + 1), FIRST, PLAN.COLS)
    return warpgroup_mma_wait(2, deps=(left, right))


@gluon.jit
def _multiply(a_s, b_s, full, empty, n, k_tiles, C: gl.constexpr, PLAN: gl.constexpr):
    """`multiply` of hopper_gemm.py, in two accumulators of half the columns."""
    STAGES: gl.constexpr = PLAN.STAGES
    ROWS: gl.constexpr = PLAN.BLOCK_M
    HALF: gl.constexpr = PLAN.BLOCK_N // 2
    zero = gl.zeros([ROWS, HALF], gl.float32, acc_layout(HALF))
    left, right = _halves(zero, zero, a_s, b_s, full, n, C, True, PLAN)
    for k in range(n + 1, n + k_tiles):
        left, right = _halves(left, right, a_s, b_s, full, k, C, False, PLAN)
        release(empty, k - 1, STAGES)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    release(empty, n + k_tiles - 1, STAGES)
    return left, right


@gluon.jit
def _consumer(OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, kept_s, told, bars, N,
              k_tiles, pairs, C: gl.constexpr, PLAN: gl.constexpr):
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    COLS: gl.constexpr = PLAN.COLS
    MORE: gl.constexpr = PLAN.MORE
    full, empty, told_full, told_empty = bars
    n_lines, n_tiles = _tiles(Lines, N, PLAN)
    n = 0
    turn = 0
    t = _hear(told, told_full, told_empty, turn)
    while t < n_tiles:
        _, row, end, column, number = _tile(t, Lines, n_lines, N, PLAN)
        row += BLOCK_M * C
        passed = n
        n += k_tiles
        if (not PLAN.SKIP) | (row < end):
            if PLAN.GRAD:
                _prefetch(Pre, row, end, column, N, PLAN)
            if PLAN.HALVES:
                accs = _multiply(a_s, b_s, full, empty, passed, k_tiles, C, PLAN)
            else:
                accs = (multiply(a_s, b_s, full, empty, passed, k_tiles, None, 1, C, 2, False, COLS, BLOCK_M, BLOCK_N,
                                 STAGES),)
            passed = n
            if row < end:
                if PLAN.GRAD:
                    _gradients(accs[0], OutD, PreD, UpD, Out, Into, Order, Weights, Dots, a_s, kept_s, full, empty, n,
                               row, end, column, number, N, pairs, C, PLAN)
                    passed += MORE
                else:
                    _epilogue(accs, OutD, PreD, UpD, Out, Pre, c_s, row, end, column, N, C, PLAN)
        n += MORE
        for k in range(passed, n):  # what it does not use: a wait for a later use, by parity, would take an older lap
            wait_full(full, k, STAGES)
            release(empty, k, STAGES)
        turn += 1
        t = _hear(told, told_full, told_empty, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["k_tiles", "pairs"])
def _kernel(A, B, OutD, PreD, UpD, GateD, RaisedD, Out, Pre, Into, Order, Weights, Dots, Lines, Taken, Rows, N, k_tiles,
            pairs, K, top_k, stride, ACT: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr, GRAD: gl.constexpr,
            COLS: gl.constexpr, SKIP: gl.constexpr, GATHER: gl.constexpr, CONSUMERS: gl.constexpr,
            BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr,
            BUFFERS: gl.constexpr, GROUP: gl.constexpr):
    """Out[p] = A[p] B[e]^T for the rows p of each expert e; N columns. COLS: B holds transposes.

    GATED: B has a gate's rows before its up's, Out = act(gate) * up, and with KEEP both go to Pre.
    GATHER: A is the tokens' rows, Rows points at it, and row p is that of pair Order[p], of top_k of each token.
    GRAD: the product is v, the gradient of act(gate) * up but for the weight w of the row; with the gate and up of Pre,
    their gradients go to Into, w act(gate) up to Out, and for each tile of columns the sum of v act(gate) up to Dots.
    """
    PLAN: gl.constexpr = _plan(ACT, GATED, KEEP, GRAD, COLS, SKIP, GATHER, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, PIECE,
                               BUFFERS, GROUP)
    PARTS: gl.constexpr = PLAN.PARTS
    SHAPE: gl.constexpr = B.block_type.shape
    FLAT: gl.constexpr = as_matrix(B.layout)
    a_s = gl.allocate_shared_memory(A.dtype, [CONSUMERS * STAGES] + A.block_type.shape, A.layout)
    b_parts = gl.allocate_shared_memory(B.dtype, [PARTS * STAGES, SHAPE[1], SHAPE[2]], FLAT)
    b_s = b_parts.reinterpret(B.dtype, [STAGES, BLOCK_N, 64], FLAT) if GATED and not PLAN.HALVES else b_parts
    if GRAD:  # pieces of the gate and of up, of both consumers, where a step of B lies
        kept_s = b_parts.reinterpret(B.dtype, [4 * STAGES, BLOCK_M, PIECE], OutD.layout)
        c_s = kept_s
    else:
        kept_s = a_s
        c_s = gl.allocate_shared_memory(OutD.dtype, [CONSUMERS * BUFFERS] + OutD.block_type.shape, OutD.layout)
    told = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = (make_barriers(STAGES, 129 if GATHER else 1), make_barriers(STAGES, CONSUMERS), make_barriers(2, 1),
            make_barriers(2, CONSUMERS))
    fence_async_shared()
    gl.barrier()
    let_next(True)
    wait_for_previous(True)
    N = N // 8 * 8  # as they are: the compiler learns that 16 bytes of a row lie together
    K = K // 8 * 8
    stride = stride // 8 * 8
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consumer, (OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, kept_s, told,
                         bars, N, k_tiles, pairs, 0, PLAN)),
            (_consumer, (OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, kept_s, told,
                         bars, N, k_tiles, pairs, 1, PLAN)),
            (_consumer, (OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, kept_s, told,
                         bars, N, k_tiles, pairs, 2, PLAN)),
            (_producer, (A, B, GateD, RaisedD, Rows, Order, Lines, Taken, a_s, b_parts, kept_s, told, bars, N, K,
                         k_tiles, top_k, stride, PLAN)),
        ], [4, 4, 4 if GATHER else 1], [160, 160, 32] if GATHER else [160, 160, 24])
    else:
        gl.warp_specialize([
            (_consumer, (OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, kept_s, told,
                         bars, N, k_tiles, pairs, 0, PLAN)),
            (_consumer, (OutD, PreD, UpD, Out, Pre, Into, Order, Weights, Dots, Lines, a_s, b_s, c_s, kept_s, told,
                         bars, N, k_tiles, pairs, 1, PLAN)),
            (_producer, (A, B, GateD, RaisedD, Rows, Order, Lines, Taken, a_s, b_parts, kept_s, told, bars, N, K,
                         k_tiles, top_k, stride, PLAN)),
        ], [4, 1], [240, 24])


class Lines(NamedTuple):
    """Which rows make a tile, as `triton_rows.lines` tells; (4, 4) int32 zeros: a counter in each row, for the launches
    that use the table; and how many rows a whole tile has."""

    table: torch.Tensor
    taken: torch.Tensor
    rows: int


def _launch(tensors: tuple, act: str, keep: bool, grad: bool, cols: bool, rows: int, top_k: int) -> Launch:
    a, b, out, *_, table, _, _ = tensors
    k_tiles = -(-a.shape[1] // BLOCK_K)
    device, columns, pairs = facts(a.device), out.shape[1], out.shape[0]
    gated = keep or (act != "" and not grad)
    config = GRADIENT if grad else pick(rows)
    out_n = config.block_n // (2 if gated else 1)
    box, below = config.block_n // 2 if config.consumers == 3 else out_n, -(-pairs // (rows * b.shape[0]))
    meta = dict(
        ACT=act,
        GATED=gated,
        KEEP=keep,
        GRAD=grad,
        COLS=cols,
        SKIP=pairs < MANY * b.shape[0],
        GATHER=top_k > 0,
        CONSUMERS=config.consumers,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        PIECE=config.piece,
        BUFFERS=config.buffers,
        GROUP=min(config.group, below) if config.consumers == 3 else config.group,
        num_warps=4,
        launch_pdl=True,
    )
    result = (config.block_m, config.piece)
    blocks = {
        "A": (config.block_m, BLOCK_K),
        "B": (BLOCK_K, box) if cols else (box, BLOCK_K),
        "OutD": result,
        "PreD": result,
        "UpD": result,
        "GateD": result,
        "RaisedD": result,
    }
    programs = min((table.shape[0] - 1) * -(-columns // out_n), device.sms)
    scalars = (columns, k_tiles, pairs, a.shape[1], max(top_k, 1), a.stride(0))
    return Launch(_kernel, programs, scalars, meta, config.spill, blocks, wide=WIDE)


def product(
    a: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor, lines: Lines, which: int, *, act: str = "",
    pre: torch.Tensor | None = None, into: torch.Tensor | None = None, order: torch.Tensor | None = None,
    weights: torch.Tensor | None = None, dots: torch.Tensor | None = None, cols: bool = False, top_k: int = 0,
) -> None:  # fmt: skip
    """Launch `_kernel`: a (pairs, K) by matrices (experts, columns or twice as many, K), transposed with `cols`.

    act: gated, and `pre` (pairs, 2 * columns) kept if given. With `into`, like pre: the gradient of that from `pre`.
    top_k: if not 0, a has the rows of tokens, of so many pairs each, and these are gathered in `order`, in tall tiles.
    which: of the counters, one that no other launch takes.
    """
    n, grad = out.shape[1], into is not None
    halves = tuple(None if t is None else t[:, i : i + n] for t in (into if grad else pre, pre) for i in (0, n))
    tensors = (a, matrices, out, *halves, out, pre, into, order, weights, dots, lines.table, lines.taken[which], a)
    remembered(_launch, tensors, act, pre is not None and not grad, grad, cols, lines.rows, top_k)(*tensors)


def pick(rows: int) -> Config:
    """How products with tiles of that many rows are tiled, but for gradients of the gate."""
    return TALL if rows == TALL.consumers * TALL.block_m else PLAIN


def rows_of(pairs: int, experts: int) -> int:
    """Rows of a tile of a forward's products."""
    return 192 if pairs < MANY * experts else 128


def lines_of(offsets: torch.Tensor, pairs: int, rows: int = 128) -> Lines:
    """The tiles' rows for the products of one forward or backward. rows: of a tile, 128 or 192."""
    return Lines(*lines(offsets, pairs, rows), rows)


def column_tiles(columns: int) -> int:
    """Rows of `dots`."""
    return -(-columns // GRADIENT.block_n)
