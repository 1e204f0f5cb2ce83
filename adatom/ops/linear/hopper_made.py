# mypy: ignore-errors
"""dz made beside the product that needs it, dx = dz W, on Hopper (Gluon).

dz = dout * a'(z) is bound by memory, the product is not: two warps of each program make dz while the others
multiply. Tasks, ROWS rows of WIDTH columns, go to whoever asks next, in about the order in which the product wants
them; a producer waits until all tasks of 128 rows are done before it reads these columns. Only programs that run take
tasks, so nobody waits for a program that has not begun.
"""

import torch

from adatom.tiles.hopper import gl, gluon
from adatom.tiles.hopper_gemm import value_and_slope
from adatom.tiles.triton_dense import _sums, remembered

ROWS = gl.constexpr(16)
WIDTH = gl.constexpr(1024)
WARPS = gl.constexpr(2)
TASKS = gl.constexpr(8)  # tasks of 128 rows
_PUBLISH = gl.constexpr("fence.proxy.async.global; fence.acq_rel.gpu; mov.u32 $0, 0;")
_PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@gluon.jit
def _task(i, tiles, chunks, run, group):
    """Tile of 128 rows, columns' chunk, and which ROWS of the tile, of task i: first the first tiles of `group` runs,
    from the middle of the columns on, where the first consumers begin."""
    sub = i % TASKS
    j = i // TASKS
    of_group = group * chunks * run
    g = j // of_group
    j = j - g * of_group
    m = g * group + j % group
    j = j // group
    chunk = j % chunks + chunks // 2
    return m * run + j // chunks, gl.where(chunk >= chunks, chunk - chunks, chunk), sub


@gluon.jit
def _fetch(X, row, column, M, N, stride):
    """Fetch the lines of a task to L2."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    i = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), M - 1)
    j = gl.minimum(column + gl.arange(0, WIDTH // 64, gl.SliceLayout(0, LAYOUT)) * 64, N - 1)
    lines = X + ((i.to(gl.int64) * stride)[:, None] + j[None, :])
    gl.inline_asm_elementwise(_PREFETCH, "=r,l", [lines], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def maker(Z, D, DZ, Sums, Made, M, N, stride_z, stride_d, stride_dz, tiles, chunks, run, group, n_tasks,
          ACT: gl.constexpr, SUMS: gl.constexpr, STEP: gl.constexpr):
    """dz from z, (M, N), and from D, the gradient of a(z); Sums: over the rows of each task, (tiles * TASKS, N).

    Made: the number of the next task, and how many tasks of each tile and chunk are done; zeros at first.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    t = gl.atomic_add(Made, 1, sem="relaxed")
    while t < n_tasks:
        following = gl.atomic_add(Made, 1, sem="relaxed")
        tile, chunk, sub = _task(following, tiles, chunks, run, group)
        if (following < n_tasks) & (tile < tiles):
            _fetch(Z, tile * 128 + sub * ROWS, chunk * WIDTH, M, N, stride_z)
            _fetch(D, tile * 128 + sub * ROWS, chunk * WIDTH, M, N, stride_d)
        tile, chunk, sub = _task(t, tiles, chunks, run, group)
        if tile < tiles:
            row = tile * 128 + sub * ROWS
            j = chunk * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
            total = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, LAYOUT))
            for first in range(0, ROWS, STEP):
                i = row + first + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
                m = (i < M)[:, None] & (j < N)[None, :]
                r = i.to(gl.int64)[:, None]
                z = gl.load(Z + r * stride_z + j[None, :], mask=m, other=0.0)
                d = gl.load(D + r * stride_d + j[None, :], mask=m, other=0.0)
                _, slope = value_and_slope(z.to(gl.float32), ACT)
                dz = d.to(gl.float32) * slope
                gl.store(DZ + r * stride_dz + j[None, :], dz.to(DZ.dtype.element_ty), mask=m)
                if SUMS:
                    total += gl.sum(dz, 0)
            if SUMS:
                gl.store(Sums + (tile * TASKS + sub).to(gl.int64) * N + j, total, mask=j < N)
            gl.inline_asm_elementwise(_PUBLISH, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.barrier()
            gl.atomic_add(Made + 1 + tile * chunks + chunk, 1, sem="release")
        t = following


def counts(rows: int, columns: int) -> tuple[int, int]:
    """Tiles of 128 rows, and chunks of columns."""
    return -(-rows // 128), -(-columns // WIDTH.value)


def numbers(rows: int, columns: int, run: int, group: int) -> tuple[int, int, int, int, int]:
    """The scalars of `maker` from `tiles` on, for runs of `run` tiles, `group` of which are walked together."""
    tiles, chunks = counts(rows, columns)
    runs = -(-tiles // run)
    group = min(group, runs)
    return tiles, chunks, run, group, -(-runs // group) * group * run * chunks * TASKS.value


def parts(rows: int) -> int:
    """Rows of Sums."""
    return counts(rows, 1)[0] * TASKS.value


def made(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What `maker` counts with."""
    tiles, chunks = counts(rows, columns)
    return like.new_zeros(1 + tiles * chunks, dtype=torch.int32)


def sum_rows(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows of Sums, always in the same order."""
    total = sums.new_empty(sums.shape[1], dtype=dtype)
    remembered(_sums, (sums, total))(sums, total)
    return total
