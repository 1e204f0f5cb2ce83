# mypy: ignore-errors
"""dz made beside the product that needs it, dx = dz W, on Hopper (Gluon).

dz = dout * a'(z) is bound by memory, the product is not: three warps of each program make dz while the others multiply.
Tasks, ROWS rows of WIDTH columns, go to whoever asks next, in about the order in which the product wants them; a
producer waits until all tasks of 128 rows are done before it reads these columns. Only programs that run take tasks,
so nobody waits for a program that has not begun.
"""

import torch

from adatom.tiles.hopper import gl, gluon
from adatom.tiles.hopper_gemm import _exp2, _tanh, value_and_slope
from adatom.tiles.triton_dense import _sums, remembered

ROWS = gl.constexpr(16)
WIDTH = gl.constexpr(256)
STEP = gl.constexpr(2)  # rows at a time: 16 elements a thread
TASKS = gl.constexpr(8)  # tasks of 128 rows
CHUNK = gl.constexpr(4)  # tiles of k in WIDTH columns
_SHOW = gl.constexpr("fence.proxy.async.global; mov.u32 $0, 0;")
_FETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
# polls without acquiring, which would empty L1 every time
_AWAIT = gl.constexpr("""{
.reg .pred done; .reg .b32 count;
ld.acquire.gpu.global.s32 count, [$1];
setp.ge.s32 done, count, $2;
@done bra over;
again: nanosleep.u32 64;
ld.relaxed.gpu.global.s32 count, [$1];
setp.lt.s32 done, count, $2;
@done bra again;
ld.acquire.gpu.global.s32 count, [$1];
over: fence.proxy.async.global;
mov.u32 $0, 0;
}""")


@gluon.jit
def await_made(Counts, row, k, chunks):
    """Of a single warp: wait until tile k of the 128 rows from `row` on is made, for TMA to load it."""
    count = Counts + 1 + row // 128 * chunks + k // CHUNK
    gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [count, TASKS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _task(i, chunks, run, group, start, TASKS: gl.constexpr):
    """Tile of 128 rows, chunk of columns, and which ROWS of the tile, of task i: first the first tiles of `group` runs,
    from chunk `start` on, where the first consumers begin."""
    sub = i % TASKS
    i = i // TASKS
    g = i // (group * chunks * run)
    i = i - g * (group * chunks * run)
    m = g * group + i % group
    i = i // group
    return m * run + i // chunks, (i % chunks + start) % chunks, sub


@gluon.jit
def _slope(x, ACT: gl.constexpr):
    """a'(x), for results of 16 bits; no element waits for another, which predicates would bring about. For gelu's fit
    see `hopper_gemm.activation`."""
    if ACT == "gelu":
        y = x * x
        z = gl.minimum(y, 40.0)
        p = 0.5 * _tanh(x * (0.7971112119926916 + z * (0.037307365293323805 - 0.0003917725446590703 * z))) + 0.5
        return p + 0.3989422804014327 * x * _exp2(y * -0.7213475204444817)
    else:
        value, slope = value_and_slope(x, ACT)
        return slope


@gluon.jit
def _fetch(X, row, column, M, N, stride):
    """Fetch the lines of a task to L2."""
    LINES: gl.constexpr = WIDTH // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [1, 1], [1, 0])
    i = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), M - 1)
    j = gl.minimum(column + gl.arange(0, LINES, gl.SliceLayout(0, LAYOUT)) * 64, N - 1)
    lines = X + ((i.to(gl.int64) * stride)[:, None] + j[None, :])
    gl.inline_asm_elementwise(_FETCH, "=r,l", [lines], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def maker(Z, D, DZ, Sums, Counts, M, N, stride_z, stride_d, stride_dz, tiles, chunks, run, group, n_tasks, start,
          ACT: gl.constexpr, SUMS: gl.constexpr):
    """Of a single warp: dz from z, (M, N), and from D, the gradient of a(z). Sums: over the rows of each task,
    (tasks of a column, N).

    Counts: the number of the next task, and how many tasks of each tile and chunk are done; zeros at first.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    t = gl.atomic_add(Counts, 1, sem="relaxed")
    while t < n_tasks:
        tile, chunk, sub = _task(t, chunks, run, group, start, TASKS)
        row = tile * 128 + sub * ROWS
        column = chunk * WIDTH
        i = gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
        j = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        m = (i < M - row)[:, None] & (j < N - column)[None, :]
        to_z = Z + row.to(gl.int64) * stride_z + column + (i * stride_z)[:, None] + j[None, :]
        to_d = D + row.to(gl.int64) * stride_d + column + (i * stride_d)[:, None] + j[None, :]
        to_dz = DZ + row.to(gl.int64) * stride_dz + column + (i * stride_dz)[:, None] + j[None, :]
        z = gl.load(to_z, mask=m, other=0.0, eviction_policy="evict_first")
        d = gl.load(to_d, mask=m, other=0.0, eviction_policy="evict_first")
        following = gl.atomic_add(Counts, 1, sem="relaxed")
        next_tile, next_chunk, next_sub = _task(following, chunks, run, group, start, TASKS)
        if (following < n_tasks) & (next_tile < tiles):
            _fetch(Z, next_tile * 128 + next_sub * ROWS, next_chunk * WIDTH, M, N, stride_z)
            _fetch(D, next_tile * 128 + next_sub * ROWS, next_chunk * WIDTH, M, N, stride_d)
        if tile < tiles:
            total = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, LAYOUT))
            for first in range(STEP, ROWS + STEP, STEP):
                to_z += STEP * stride_z
                to_d += STEP * stride_d
                ahead = (i < gl.where(first < ROWS, M - row - first, 0))[:, None] & (j < N - column)[None, :]
                next_z = gl.load(to_z, mask=ahead, other=0.0, eviction_policy="evict_first")
                next_d = gl.load(to_d, mask=ahead, other=0.0, eviction_policy="evict_first")
                gl.barrier()  # or ptxas would put off the loads
                dz = d.to(gl.float32) * _slope(z.to(gl.float32), ACT)
                gl.store(to_dz, dz.to(DZ.dtype.element_ty), mask=m)
                if SUMS:
                    total += gl.sum(dz, 0)
                to_dz += STEP * stride_dz
                z = next_z
                d = next_d
                m = ahead
            if SUMS:
                gl.store(Sums + (tile * TASKS + sub).to(gl.int64) * N + column + j, total, mask=j < N - column)
            gl.inline_asm_elementwise(_SHOW, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.barrier()
            gl.atomic_add(Counts + 1 + tile * chunks + chunk, 1, sem="release")
        t = following


def _size(z: torch.Tensor) -> tuple[int, int]:
    """Tiles of 128 rows, and chunks of columns."""
    return -(-z.shape[0] // 128), -(-z.shape[1] // WIDTH.value)


def numbers(z: torch.Tensor, run: int, group: int, first: int) -> tuple[int, ...]:
    """The scalars of `maker` from `tiles` on, for a product in runs of `run` tiles, `group` of them at the same time,
    whose first consumers begin at tile `first` of k."""
    tiles, chunks = _size(z)
    runs = -(-tiles // run)
    group = min(group, runs)
    return tiles, chunks, run, group, -(-runs // group) * group * run * chunks * TASKS.value, first // CHUNK.value


def counts(z: torch.Tensor) -> torch.Tensor:
    """What `maker` counts with."""
    tiles, chunks = _size(z)
    return z.new_zeros(1 + tiles * chunks, dtype=torch.int32)


def sums(z: torch.Tensor) -> torch.Tensor:
    """Room for the sums of `maker`."""
    return z.new_empty(_size(z)[0] * TASKS.value, z.shape[1], dtype=torch.float32)


def sum_rows(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows of Sums, always in the same order."""
    total = parts.new_empty(parts.shape[1], dtype=dtype)
    remembered(_sums, (parts, total))(parts, total)
    return total
