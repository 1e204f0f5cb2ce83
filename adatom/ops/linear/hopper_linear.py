# mypy: ignore-errors
"""linear and gated on Hopper (Gluon): products with all that comes after them in their epilogues.

A producer warp feeds two consumer warpgroups by TMA; programs are persistent. A consumer converts its accumulator in
pieces of columns, and TMA stores them while it goes on.

The consumers share the tiles of B, yet one's epilogue runs under the products of the other: they are some tiles of k
apart. A sum does not mind where it begins. A program works on a run of tiles below each other, for which the tiles of B
come round again and again, in three blocks of k: U, S and W. The first consumer sums over W, S, U, the second over U,
S, W, and the ring carries

    W S | U S W S | U S W S | ... | U S W
    1 1   * 2 * 1   * 2 * 1         * 2 2

of which both consumers read what is marked *: only S, the solos, comes twice. While one consumer computes a solo, the
other is in its epilogue. The longer the epilogue, the longer S; with an empty S the ring alone lets one go ahead. W is
short: at the ends of a run one consumer waits while the other goes through W and S. A run of one tile has nothing but
U: the consumers go side by side.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from adatom.device import facts
from adatom.ops.linear import hopper_made
from adatom.ops.linear.hopper_made import CHUNK, await_made, maker
from adatom.ops.linear.problem import Inputs, Options, suits_tma
from adatom.ops.linear.torch_linear import products
from adatom.tiles.hopper import (
    fence_async_shared,
    gl,
    gluon,
    let_next,
    make_barriers,
    mbarrier,
    planner,
    slot,
    tma,
    wait_empty,
    wait_for_previous,
)
from adatom.tiles.hopper_gemm import (
    Launch,
    acc_layout,
    activation,
    begins_early,
    load_box,
    make_ring,
    multiply,
    raster,
    split_columns,
    value_and_slope,
)
from adatom.tiles.triton_dense import gradient, remembered

BLOCK_K = 64  # 128 bytes: the widest swizzle


class Config(NamedTuple):
    """How the kernel is tiled: two consumers of block_m rows each, block_n columns of the accumulator, a ring of
    `stages`, pieces of `piece` columns in `buffers` of each consumer; `group` runs below each other walked together;
    `longest` run."""

    block_m: int
    block_n: int
    stages: int
    piece: int
    buffers: int
    group: int = 16
    longest: int = 8


MAKE_FROM = 1536, 2048  # features in and out: with fewer, making dz takes longer than the product beside it
WIDE = Config(64, 256, 4, 64, 2)
NARROW = Config(64, 128, 6, 64, 2)


@dataclass(frozen=True)
class Plan:
    """The constexprs of a kernel, together: see `_kernel`."""

    ACT: str
    GATED: bool
    BIAS: bool
    KEEP: bool
    GRAD: bool
    ADD: bool
    MAKE: str
    A_COLS: bool
    B_COLS: bool
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    PIECE: int
    BUFFERS: int
    GROUP: int

    @property
    def OUT_N(self):
        return self.BLOCK_N // 2 if self.GATED else self.BLOCK_N


_plan = planner(Plan)


@gluon.jit
def _run(r, M, N, run, PLAN: gl.constexpr):
    """First row, number of tiles and first column of run r, of up to `run` tiles."""
    ROWS: gl.constexpr = 2 * PLAN.BLOCK_M
    COLUMNS: gl.constexpr = PLAN.OUT_N
    GROUP: gl.constexpr = PLAN.GROUP
    tiles = (M + ROWS - 1) // ROWS
    m, n = raster(r, (tiles + run - 1) // run, (N + COLUMNS - 1) // COLUMNS, GROUP)
    return m * run * ROWS, gl.minimum(tiles - m * run, run), n * COLUMNS


@gluon.jit
def _producer(A, B, Up, Counts, a_s, b_s, full, empty, M, N, k_tiles, u, solo, run, n_runs,
              PLAN: gl.constexpr):
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    A_COLS: gl.constexpr = PLAN.A_COLS
    B_COLS: gl.constexpr = PLAN.B_COLS
    PARTS: gl.constexpr = 2 if PLAN.GATED else 1
    BYTES: gl.constexpr = A.block_type.nbytes + PARTS * B.block_type.nbytes
    n = 0
    for r in range(gl.program_id(0), n_runs, gl.num_programs(0)):
        row, count, column = _run(r, M, N, run, PLAN)
        for block in range(2, 4 * count + 3):  # U, S, W, S of each turn, of which there is one more than tiles
            turn = block // 4
            which = block % 4
            begin = gl.where(which == 0, 0, gl.where(which == 2, u + solo, u))
            end = gl.where(which == 0, u, gl.where(which == 2, k_tiles, u + solo))
            first = (which != 1) & ((which == 0) | (turn < count))
            second = (which != 3) & (turn > 0)
            upper = row + gl.where(which == 0, turn - 1, turn) * (2 * BLOCK_M)
            lower = row + (turn - 1) * (2 * BLOCK_M) + BLOCK_M
            for k in range(begin, end):
                if PLAN.MAKE != "":
                    if (k % CHUNK == 0) | (k == begin):
                        chunks = (k_tiles + CHUNK - 1) // CHUNK
                        if first:
                            await_made(Counts, upper, k, chunks)
                        if second:
                            await_made(Counts, lower, k, chunks)
                wait_empty(empty, n, STAGES)
                i = slot(n, STAGES)
                bar = full.index(i)
                if first & second:
                    mbarrier.expect(bar, BYTES + A.block_type.nbytes)
                else:
                    mbarrier.expect(bar, BYTES)
                    mbarrier.arrive(empty.index(i), count=1)  # for the consumer that will not read it
                load_box(A, upper, k * 64, bar, a_s.index(2 * i), first, A_COLS)
                load_box(A, lower, k * 64, bar, a_s.index(2 * i + 1), second, A_COLS)
                load_box(B, column, k * 64, bar, b_s.index(PARTS * i), True, B_COLS)
                if PLAN.GATED:
                    load_box(Up, column, k * 64, bar, b_s.index(PARTS * i + 1), True, B_COLS)
                n += 1


@gluon.jit
def _emit(desc, x, row, column, c_s, C: gl.constexpr, NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Piece NUMBER of a tile: round it, and begin to store it."""
    buffer = c_s.index(C * PLAN.BUFFERS + NUMBER % PLAN.BUFFERS)
    tma.store_wait(PLAN.BUFFERS - 1)  # what lay there before has left
    gl.barrier()
    buffer.store(x.to(buffer.dtype))
    fence_async_shared()
    gl.barrier()
    if PLAN.ADD:
        tma.async_atomic_add(desc, [row, column], buffer)
    else:
        tma.async_store(desc, [row, column], buffer)


@gluon.jit
def _emit_two(desc, x, other, y, row, column, c_s, d_s, C: gl.constexpr):
    """A piece of x and the same piece of y: round them, and begin to store them, with half of the waiting."""
    first = c_s.index(C)
    second = d_s.index(C)
    tma.store_wait(0)
    gl.barrier()
    first.store(x.to(first.dtype))
    second.store(y.to(second.dtype))
    fence_async_shared()
    gl.barrier()
    tma.async_store(desc, [row, column], first)
    tma.async_store(other, [row, column], second)


@gluon.jit
def _prefetch(D, row, column, M, N, stride_d, PLAN: gl.constexpr):
    """Fetch the lines of a tile of D to L2."""
    LINES: gl.constexpr = PLAN.OUT_N // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [4, 1], [1, 0])
    i = gl.minimum(row + gl.arange(0, PLAN.BLOCK_M, layout=gl.SliceLayout(1, LAYOUT)), M - 1)
    j = gl.minimum(column + gl.arange(0, LINES, layout=gl.SliceLayout(0, LAYOUT)) * 64, N - 1)
    lines = D + ((i.to(gl.int64) * stride_d)[:, None] + j[None, :])
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=gl.int32, is_pure=False,
                              pack=1)


@gluon.jit
def _load(D, row, column, M, N, stride_d, PLAN: gl.constexpr):
    """A piece of D, in the registers of the accumulator."""
    LAYOUT: gl.constexpr = acc_layout(PLAN.PIECE)
    i = row + gl.arange(0, PLAN.BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    j = column + gl.arange(0, PLAN.PIECE, layout=gl.SliceLayout(0, LAYOUT))
    at = (i.to(gl.int64) * stride_d)[:, None] + j[None, :]
    return gl.load(D + at, mask=(i < M)[:, None] & (j < N)[None, :], other=0.0)


@gluon.jit
def _epilogue(acc, bias, Out, Pre, PreUp, D, c_s, d_s, bias_s, row, column, M, N, stride_d, C: gl.constexpr,
              PLAN: gl.constexpr):
    ACT: gl.constexpr = PLAN.ACT
    PIECE: gl.constexpr = PLAN.PIECE
    PIECES: gl.constexpr = PLAN.OUT_N // PIECE
    LAYOUT: gl.constexpr = acc_layout(PIECE)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if PLAN.GATED:
        gates, ups = split_columns(acc, 2)
        parts = split_columns(gates, PIECES)
        others = split_columns(ups, PIECES)
    else:
        parts = split_columns(acc, PIECES)
    if PLAN.BIAS:
        bias_s.index(C).store(bias)
    if PLAN.GRAD:
        ahead = _load(D, row, column, M, N, stride_d, PLAN)
    for p in gl.static_range(PIECES):
        z = parts[p]
        c = column + p * PIECE
        if PLAN.BIAS:
            z = z + bias_s.index(C).slice(p * PIECE, PIECE).load(COLUMNS)[None, :]
        if PLAN.GRAD:
            d = ahead.to(gl.float32)
            if p + 1 < PIECES:
                ahead = _load(D, row, c + PIECE, M, N, stride_d, PLAN)
            value, slope = value_and_slope(z, ACT)
            if PLAN.GATED:
                _emit(Pre, d * others[p] * slope, row, c, c_s, C, 2 * p, PLAN)
                _emit(PreUp, d * value, row, c, c_s, C, 2 * p + 1, PLAN)
            else:
                _emit(Out, d * slope, row, c, c_s, C, p, PLAN)
        elif PLAN.GATED:
            if PLAN.KEEP:
                _emit(Pre, z, row, c, c_s, C, 3 * p, PLAN)
                _emit(PreUp, others[p], row, c, c_s, C, 3 * p + 1, PLAN)
            _emit(Out, activation(z, ACT) * others[p], row, c, c_s, C, 3 * p + 2 if PLAN.KEEP else p, PLAN)
        else:
            if PLAN.KEEP:
                _emit_two(Pre, z, Out, activation(z, ACT), row, c, c_s, d_s, C)
            else:
                _emit(Out, activation(z, ACT), row, c, c_s, C, p, PLAN)


@gluon.jit
def _consumer(Out, Pre, PreUp, D, Bias, a_s, b_s, c_s, d_s, bias_s, full, empty, turns, M, N, k_tiles, u, solo,
              run, n_runs, stride_d, C: gl.constexpr, PLAN: gl.constexpr):
    A_COLS: gl.constexpr = PLAN.A_COLS
    B_COLS: gl.constexpr = PLAN.B_COLS
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    STAGES: gl.constexpr = PLAN.STAGES
    w = k_tiles - u - solo
    n = 0
    done = 0
    for r in range(gl.program_id(0), n_runs, gl.num_programs(0)):
        row, count, column = _run(r, M, N, run, PLAN)
        if C == 1:
            n += w + solo
        for tile in range(count):
            bias = 0.0
            if PLAN.BIAS:  # loaded before the products, one or two a thread
                j = column + gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([BLOCK_N // 128], [32], [4], [0]))
                bias = gl.load(Bias + j, mask=j < N, other=0.0).to(gl.float32)
            if PLAN.GRAD:
                _prefetch(D, row + (2 * tile + C) * BLOCK_M, column, M, N, stride_d, PLAN)
            # what lies before n in the ring has arrived: a wait for n by parity would take an older lap for it
            if C == 0:
                mbarrier.wait(turns.index(0), (done & 1) ^ 1)
                seen = gl.maximum(w + solo, 1)
            else:
                mbarrier.wait(turns.index(1), done & 1)
                seen = gl.where(tile == count - 1, k_tiles, gl.maximum(u + solo, 1))
            done += 1
            acc = multiply(a_s, b_s, full, empty, n, k_tiles, turns.index(1 - C), seen, C, 2, A_COLS, B_COLS, BLOCK_M,
                           BLOCK_N, STAGES)
            n += k_tiles + solo
            _epilogue(acc, bias, Out, Pre, PreUp, D, c_s, d_s, bias_s, row + (2 * tile + C) * BLOCK_M, column, M, N,
                      stride_d, C, PLAN)
        if C == 0:
            n += w
        else:
            n -= solo
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "k_tiles", "u", "solo", "run", "n_runs", "tiles", "chunks", "tasks_run",
                              "group", "n_tasks", "start"])
def _kernel(A, B, Up, Out, Pre, PreUp, D, Bias, Z, DZ, Sums, Counts, M, N, k_tiles, u, solo, run, n_runs, stride_d,
            K, stride_z, stride_dz, tiles, chunks, tasks_run, group, n_tasks, start,
            ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, KEEP: gl.constexpr, GRAD: gl.constexpr,
            ADD: gl.constexpr, MAKE: gl.constexpr, A_COLS: gl.constexpr, B_COLS: gl.constexpr, BLOCK_M: gl.constexpr,
            BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr,
            GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Out = act(A B^T + bias), (M, N). GATED: Out = act(A B^T) * (A Up^T).

    KEEP: also what act was given, to Pre, and A Up^T to PreUp. GRAD: instead of Out, the gradient of what act was
    given, from D, that of Out; gated: to Pre and PreUp. ADD: the result is added to what Out holds.
    MAKE: A, (M, K), is DZ, which `hopper_made.maker` makes of Z and D meanwhile, with the slope of this activation.
    A_COLS, B_COLS: the operand is given as its transpose.
    """
    PLAN: gl.constexpr = _plan(ACT, GATED, BIAS, KEEP, GRAD, ADD, MAKE, A_COLS, B_COLS, BLOCK_M, BLOCK_N, STAGES, PIECE,
                               BUFFERS, GROUP)
    a_s = make_ring(A, STAGES, 2)
    b_parts = make_ring(B, STAGES, 2 if GATED else 1)
    b_s = b_parts.reinterpret(B.dtype, [STAGES, BLOCK_N, 64], B.layout) if GATED else b_parts
    PAIRS: gl.constexpr = KEEP and not GATED  # two rings, so that stores to one do not wait for those to the other
    c_s = make_ring(Out, BUFFERS // 2 if PAIRS else BUFFERS, 2)
    d_s = make_ring(Out, BUFFERS // 2, 2) if PAIRS else c_s
    bias_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N if BIAS else 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    turns = make_barriers(2, 1)
    fence_async_shared()
    gl.barrier()
    let_next(True)
    wait_for_previous(True)
    if MAKE != "":
        gl.warp_specialize([
            (_consumer, (Out, Pre, PreUp, D, Bias, a_s, b_s, c_s, d_s, bias_s, full, empty, turns, M, N, k_tiles, u,
                         solo, run, n_runs, stride_d, 0, PLAN)),
            (_consumer, (Out, Pre, PreUp, D, Bias, a_s, b_s, c_s, d_s, bias_s, full, empty, turns, M, N, k_tiles, u,
                         solo, run, n_runs, stride_d, 1, PLAN)),
            (_producer, (A, B, Up, Counts, a_s, b_parts, full, empty, M, N, k_tiles, u, solo, run, n_runs, PLAN)),
            (maker, (Z, D, DZ, Sums, Counts, M, K, stride_z, stride_d, stride_dz, tiles, chunks, tasks_run, group,
                     n_tasks, start, MAKE, SUMS)),
            (maker, (Z, D, DZ, Sums, Counts, M, K, stride_z, stride_d, stride_dz, tiles, chunks, tasks_run, group,
                     n_tasks, start, MAKE, SUMS)),
            (maker, (Z, D, DZ, Sums, Counts, M, K, stride_z, stride_d, stride_dz, tiles, chunks, tasks_run, group,
                     n_tasks, start, MAKE, SUMS)),
        ], [4, 1, 1, 1, 1], [192, 120, 120, 120, 120])
    else:
        gl.warp_specialize([
            (_consumer, (Out, Pre, PreUp, D, Bias, a_s, b_s, c_s, d_s, bias_s, full, empty, turns, M, N, k_tiles, u,
                         solo, run, n_runs, stride_d, 0, PLAN)),
            (_consumer, (Out, Pre, PreUp, D, Bias, a_s, b_s, c_s, d_s, bias_s, full, empty, turns, M, N, k_tiles, u,
                         solo, run, n_runs, stride_d, 1, PLAN)),
            (_producer, (A, B, Up, Counts, a_s, b_parts, full, empty, M, N, k_tiles, u, solo, run, n_runs, PLAN)),
        ], [4, 1], [240, 24])


def _pick(rows: int, columns: int, sms: int) -> Config:
    """The tile that finishes first: the time of a wave is that of a tile, and narrow ones waste a tenth."""

    def waves(block: int) -> int:
        return -(-(-(-rows // 128) * -(-columns // block)) // sms)

    return WIDE if waves(256) * 256 <= 1.1 * waves(128) * 128 else NARROW


def _length(rows: int, columns: int, longest: int, sms: int, edge: float = 0.25) -> int:
    """How many of rows x columns tiles make a run: as long as possible, if no program works longer for it.

    edge: what a run takes beside its tiles, in tiles.
    """

    def time(length: int) -> float:
        runs = -(-rows // length)
        below = min(runs, WIDE.group)  # programs that read the same tiles of B
        reads = below + 2 * min(columns, -(-sms // below))  # of 128 rows, all at the same time
        # the memory keeps up with 75 of those
        return -(-runs * columns // sms) * (length + edge) * max(1.0, reads / 75)

    return min(range(1, longest + 1), key=time)


def _blocks(k_tiles: int, solo: int) -> tuple[int, int]:
    """Tiles of k in the blocks W and S of a run."""
    solo = min(k_tiles // 2, solo)
    return min((k_tiles - solo) // 2, max(4, min(8, k_tiles // 5))), solo


def _solo(act: str, keep: bool, gated: bool, grad: bool) -> int:
    """Tiles of k in a block S: about as long as the epilogue, less what the ring holds."""
    if grad:
        return 16
    if gated:  # half as many results
        return 6 if keep else 2
    return {"none": 0, "relu": 3, "silu": 4, "gelu_tanh": 4, "gelu": 4}[act] + (3 if keep else 0)


def _product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, pre: tuple[torch.Tensor, ...] = (), dout: torch.Tensor | None = None,
    act: str = "none", keep: bool = False, add: bool = False, cols: str = "",
    made: tuple[torch.Tensor | None, ...] = (None,) * 4,
) -> None:  # fmt: skip
    """Launch `_kernel`; cols names the operands, "a" and "b", that are given as their transposes. made: z, dz and what
    else `maker` writes to, if a, which is dz, is to be made with the slope of act."""
    tensors = (a, b, up, out, *(pre or (None, None)), dout, bias, *made)
    remembered(_launch, tensors, act, keep, add, cols)(*tensors)


def _launch(tensors: tuple, act: str, keep: bool, add: bool, cols: str) -> Launch:
    device = facts(tensors[0].device)
    a, b, up, out, pre, _, dout, bias, z, dz, sums, _ = tensors
    make, grad = z is not None, dout is not None and z is None
    k, rows = a.shape if "a" in cols else a.shape[::-1]
    columns = b.shape[1 if "b" in cols else 0]
    wide = columns * (1 if up is None else 2)
    config = _pick(rows, wide, device.sms)
    out_n = config.block_n // (1 if up is None else 2)
    piece = config.piece // 2 if add or grad else config.piece  # float32, or registers for D
    meta = dict(
        ACT="none" if make else act,
        GATED=up is not None,
        BIAS=bias is not None,
        KEEP=keep,
        GRAD=grad,
        ADD=add,
        MAKE=act if make else "",
        A_COLS="a" in cols,
        B_COLS="b" in cols,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        PIECE=piece,
        BUFFERS=config.buffers * config.piece // piece if grad else config.buffers,
        GROUP=config.group,
        SUMS=sums is not None,
        num_warps=4,
        launch_pdl=begins_early(2 * rows * wide * k),
    )
    result = (config.block_m, piece)
    blocks = {
        "A": (BLOCK_K, config.block_m) if "a" in cols else (config.block_m, BLOCK_K),
        "B": (BLOCK_K, out_n) if "b" in cols else (out_n, BLOCK_K),
        "Up": (out_n, BLOCK_K),
        "Out": result,
        "Pre": result,
        "PreUp": result,
    }
    tiles = -(-rows // (2 * config.block_m)), -(-columns // out_n)
    k_tiles = -(-k // BLOCK_K)
    w, solo = _blocks(k_tiles, _solo(meta["ACT"], keep, up is not None, grad))
    run = _length(*tiles, config.longest, device.sms, 0.75 * (w + solo) / k_tiles)
    n_runs = -(-tiles[0] // run) * tiles[1]
    w, solo = (w, solo) if run > 1 else (0, 0)
    strides = [0 if t is None else t.stride(0) for t in (dout, z, dz)]
    scalars = (rows, columns, k_tiles, k_tiles - w - solo, solo, run, n_runs, strides[0], k, *strides[1:])
    if make:
        together = -(-device.sms // (config.group * tiles[1])) * config.group  # runs that are worked on at a time
        scalars += hopper_made.numbers(z, run, together, (k_tiles - w) % k_tiles)
    else:
        scalars += (0,) * 6
    spill = 320 if grad else 72 if make else 0
    return Launch(_kernel, min(n_runs, device.sms), scalars, meta, spill, blocks)


def _weights(x: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight, and the other one if gated."""
    if o.gated and x.up is None:
        half = x.weight.shape[0] // 2
        return x.weight[:half], x.weight[half:]
    return x.weight, x.up


def forward(x: Inputs, o: Options, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, pre); the contract is in reference.py."""
    weight, up = _weights(x, o)
    rows, n = x.x.shape[0], weight.shape[0]
    out, pre = x.x.new_empty(rows, n), None
    if keep and o.keeps == "pre":
        pre = x.x.new_empty(rows, x.products)
    halves = () if pre is None else (pre[:, :n], pre[:, n:]) if o.gated else (pre, pre)
    _product(x.x, weight, out, up=up, bias=x.bias, pre=halves, act=o.activation, keep=pre is not None)
    return out, pre


def _dz(x: Inputs, o: Options, dout: torch.Tensor) -> torch.Tensor:
    """dz from the inputs alone."""
    weight, up = _weights(x, o)
    rows, n = x.x.shape[0], weight.shape[0]
    dz = x.x.new_empty(rows, x.products)
    halves = (dz[:, :n], dz[:, n:]) if o.gated else ()
    _product(x.x, weight, dz, up=up, bias=x.bias, pre=halves, dout=dout, act=o.activation)
    return dz


def _made(
    x: Inputs, o: Options, kept: torch.Tensor, dout: torch.Tensor, sums: bool, spend: bool
) -> tuple[torch.Tensor | None, ...]:
    """dz, dbias and dx by one kernel."""
    dz = kept if spend else kept.new_empty(kept.shape)
    parts = hopper_made.sums(dz) if sums else None
    dx = torch.empty_like(x.x, memory_format=torch.contiguous_format)
    made = (kept, dz, parts, hopper_made.counts(dz))
    _product(dz, x.weight, dx, dout=dout, act=o.activation, cols="b", made=made)
    return dz, None if parts is None else hopper_made.sum_rows(parts, dz.dtype), dx


def _makes(x: Inputs, o: Options) -> bool:
    """Whether dz is made beside the product for dx: its tiles must be wide, and it must take long enough."""
    wide = _pick(*x.x.shape, facts(x.x.device).sms) == WIDE
    return not o.gated and wide and x.x.shape[1] >= MAKE_FROM[0] and x.weight.shape[0] >= MAKE_FROM[1]


def backward(
    x: Inputs, o: Options, kept: torch.Tensor | None, dout: torch.Tensor, needs: tuple[bool, bool, bool],
    into: torch.Tensor | None = None, spend: bool = False,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """(dx, dweight, dup, dbias); the contract is in reference.py."""
    sums = needs[2] and x.bias is not None
    dx = dweight = dup = None
    if not o.keeps:
        dz, dbias = dout, dout.sum(0) if sums else None
    elif kept is None:
        dz = _dz(x, o, dout)
        dbias = dz.sum(0) if sums else None
    elif needs[0] and _makes(x, o):
        dz, dbias, dx = _made(x, o, kept, dout, sums, spend)
    else:
        dz, dbias = gradient(kept, dout, o.activation, o.gated, sums, spend)
    n = x.weight.shape[0]
    if needs[0] and dx is None:
        dx = torch.empty_like(x.x, memory_format=torch.contiguous_format)
        _product(dz[:, :n], x.weight, dx, cols="b")
        if x.up is not None:
            dx.addmm_(dz[:, n:], x.up)
    if needs[1] and into is not None and suits_tma(into):
        _product(dz, x.x, into, cols="ab", add=True)
    elif needs[1] and into is not None:
        products(x, dz, (False, True, False), into)
    elif needs[1]:
        dweight = x.weight.new_empty(x.weight.shape)
        _product(dz[:, :n], x.x, dweight, cols="ab")
        if x.up is not None:
            dup = x.up.new_empty(x.up.shape)
            _product(dz[:, n:], x.x, dup, cols="ab")
    return dx, dweight, dup, dbias
