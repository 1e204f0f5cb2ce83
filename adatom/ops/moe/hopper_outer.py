# mypy: ignore-errors
"""Gradients of experts' matrices on Hopper (Gluon): out[e] = the sum of a[p] b[p]^T over the rows p of expert e.

The schedule is that of hopper_products.py, with sums over an expert's rows, as many as it has: an expert without rows
gets 0. The last 64 rows of a sum may be the next expert's, or have no values at all: both operands are zeroed there, in
shared memory. Both consumers zero those of B, which they share: they write the same.
"""

from typing import NamedTuple

import torch

from adatom.device import facts
from adatom.tiles.hopper import (
    as_matrix,
    clear_rows,
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from adatom.tiles.hopper_gemm import Launch, acc_layout, begins_early, raster, split_columns
from adatom.tiles.triton_dense import remembered


class Config(NamedTuple):
    """As in hopper_products.py."""

    block_n: int
    stages: int
    piece: int
    buffers: int
    group: int


# By the most rows that an expert may have on average: short sums wait for their results to leave.
CONFIGS = (
    (256, Config(256, 3, 64, 4, 16)),
    (1024, Config(256, 4, 64, 2, 4)),
    (None, Config(256, 4, 64, 2, 8)),
)


@gluon.jit
def _tile(t, Offsets, M, N, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """Expert, first row, number of rows, and where in the expert's result tile t lies."""
    down = (M + 127) // 128
    across = (N + BLOCK_N - 1) // BLOCK_N
    e = t // (down * across)
    m, n = raster(t - e * (down * across), down, across, GROUP)
    row = gl.load(Offsets + e)
    return e, row, gl.load(Offsets + e + 1) - row, m * 128, n * BLOCK_N


@gluon.jit
def _producer(A, B, Offsets, a_s, b_s, full, empty, M, N, n_tiles, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
              GROUP: gl.constexpr):
    n = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        _, row, rows, i, j = _tile(t, Offsets, M, N, BLOCK_N, GROUP)
        for k in range(0, rows, 64):
            wait_empty(empty, n, STAGES)
            s = slot(n, STAGES)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * A.block_type.nbytes + B.block_type.nbytes)
            tma.async_load(A, [row + k, i], bar, a_s.index(2 * s))
            tma.async_load(A, [row + k, i + 64], bar, a_s.index(2 * s + 1))
            tma.async_load(B, [row + k, j], bar, b_s.index(s))
            n += 1


@gluon.jit
def _add(acc, a_s, b_s, empty, k, held, C: gl.constexpr, STAGES: gl.constexpr):
    """acc and the product of use k, which is left under way; the use before it is released if it is held."""
    s = slot(k, STAGES)
    acc = warpgroup_mma(a_s.index(2 * s + C).permute((1, 0)), b_s.index(s), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index(slot(k + STAGES - 1, STAGES)), count=1, pred=held)
    return acc


@gluon.jit
def _consumer(Out, Offsets, a_s, b_s, c_s, full, empty, M, N, n_tiles, C: gl.constexpr, BLOCK_N: gl.constexpr,
              STAGES: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr):
    n = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        e, _, rows, i, j = _tile(t, Offsets, M, N, BLOCK_N, GROUP)
        acc = gl.zeros([64, BLOCK_N], gl.float32, acc_layout(BLOCK_N))
        last = n + (rows + 63) // 64 - 1
        if rows > 0:
            for k in range(n, last):
                wait_full(full, k, STAGES)
                acc = _add(acc, a_s, b_s, empty, k, k > n, C, STAGES)
            wait_full(full, last, STAGES)
            if rows % 64 != 0:
                clear_rows(a_s.index(slot(last, STAGES) * 2 + C), rows % 64)
                clear_rows(b_s.index(slot(last, STAGES)), rows % 64)
            acc = _add(acc, a_s, b_s, empty, last, last > n, C, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release(empty, last, STAGES)
        n = last + 1
        pieces = split_columns(acc, BLOCK_N // PIECE)
        for p in gl.static_range(BLOCK_N // PIECE):
            buffer = c_s.index(C * BUFFERS + p % BUFFERS)
            tma.store_wait(BUFFERS - 1)  # what lay there before has left
            gl.barrier()
            buffer.store(pieces[p].to(buffer.dtype))
            fence_async_shared()
            gl.barrier()
            tma.async_store(
                Out, [e, i + 64 * C, j + p * PIECE], buffer.reinterpret(Out.dtype, Out.block_type.shape, Out.layout)
            )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tiles"])
def _kernel(A, B, Out, Offsets, M, N, n_tiles, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr,
            BUFFERS: gl.constexpr, GROUP: gl.constexpr):
    """Out (experts, M, N) from A (rows, M) and B (rows, N)."""
    FLAT: gl.constexpr = as_matrix(Out.layout)
    a_s = gl.allocate_shared_memory(A.dtype, [2 * STAGES] + A.block_type.shape, A.layout)
    b_s = gl.allocate_shared_memory(B.dtype, [STAGES] + B.block_type.shape, B.layout)
    c_s = gl.allocate_shared_memory(Out.dtype, [2 * BUFFERS, 64, PIECE], FLAT)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    fence_async_shared()
    gl.barrier()
    let_next(True)
    wait_for_previous(True)
    gl.warp_specialize(
        [
            (_consumer,
             (Out, Offsets, a_s, b_s, c_s, full, empty, M, N, n_tiles, 0, BLOCK_N, STAGES, PIECE, BUFFERS, GROUP)),
            (_consumer,
             (Out, Offsets, a_s, b_s, c_s, full, empty, M, N, n_tiles, 1, BLOCK_N, STAGES, PIECE, BUFFERS, GROUP)),
            (_producer, (A, B, Offsets, a_s, b_s, full, empty, M, N, n_tiles, BLOCK_N, STAGES, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


def _launch(tensors: tuple) -> Launch:
    a, b, out, _ = tensors
    experts, m, n = out.shape
    c = next(config for rows, config in CONFIGS if rows is None or a.shape[0] <= rows * experts)
    n_tiles = experts * -(-m // 128) * -(-n // c.block_n)
    meta = dict(BLOCK_N=c.block_n, STAGES=c.stages, PIECE=c.piece, BUFFERS=c.buffers, GROUP=c.group, num_warps=4,
                launch_pdl=begins_early(2 * a.shape[0] * m * n))  # fmt: skip
    blocks = {"A": (64, 64), "B": (64, c.block_n), "Out": (64, c.piece)}
    return Launch(_kernel, min(n_tiles, facts(a.device).sms), (m, n, n_tiles), meta, 0, blocks)


def outer(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """a (pairs, M), b (pairs, N), offsets (experts + 1,) int32. Returns (experts, M, N)."""
    out = a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1])
    remembered(_launch, (a, b, out, offsets))(a, b, out, offsets)
    return out
