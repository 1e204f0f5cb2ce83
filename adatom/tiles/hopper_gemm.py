# mypy: ignore-errors
"""Device code that matrix products on Hopper share (Gluon): operand tiles, the main loop, activations, their launch.

A product is acc = A B^T, A (rows, K) and B (columns, K), in tiles of 64 columns of both that a producer warp copies by
TMA into a ring of STAGES buffers. Consumer warpgroups own BLOCK_M rows of A each and share B. Either operand may also
lie in memory as its transpose, (K, rows): wgmma reads 16-bit tiles both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adatom.tiles import launch
from adatom.tiles.hopper import (
    _GLUON_DTYPES,
    gl,
    gluon,
    mbarrier,
    release,
    slot,
    tma,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)

# -- activations -------------------------------------------------------------------------------------------------------


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); 0 and 1 where exp overflows."""
    return _reciprocal(1.0 + _exp2(x * -LOG2E))


@gluon.jit
def _upper_tail(x):
    """(probability that a normal variable exceeds |x|, exp(-x^2 / 2)): Abramowitz and Stegun 7.1.25, to 1.3e-5, which
    float16 does not see; a quarter of the instructions of erf."""
    t = _reciprocal(1.0 + 0.33267252 * gl.abs(x))
    p = ((0.3739278 * t - 0.0479399) * t + 0.1740121) * t
    e = _exp2(x * x * -0.7213475204444817)
    return p * e, e


@gluon.jit
def activation(x, ACT: gl.constexpr):
    """a(x), for results of 16 bits; a sigmoid is (1 + tanh) / 2, which is one instruction of the slow unit, not two.

    gelu: x Phi(x) with Phi(x) = (1 + tanh(x (c0 + c1 x^2 + c2 x^4))) / 2 to 7e-5 / |x|, and to 6e-4 of Phi for x > -3:
    coefficients fitted by weighted least squares.
    """
    if ACT == "relu":
        x = gl.where(x < 0.0, 0.0, x)  # NaN stays
    elif ACT == "silu":
        h = 0.5 * x
        x = h * _tanh(h) + h
    elif ACT == "gelu_tanh":
        h = 0.5 * x
        x = h * _tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x)) + h
    elif ACT == "gelu":
        h = 0.5 * x
        y = gl.minimum(x * x, 40.0)  # beyond, tanh is 1
        x = h * _tanh(x * (0.7971112119926916 + y * (0.037307365293323805 - 0.0003917725446590703 * y))) + h
    return x


@gluon.jit
def value_and_slope(x, ACT: gl.constexpr):
    """(a(x), a'(x))."""
    if ACT == "relu":
        return gl.where(x < 0.0, 0.0, x), gl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "silu":
        s = sigmoid(x)
        a = x * s
        return a, s + a * (1.0 - s)
    elif ACT == "gelu_tanh":
        x2 = x * x
        s = sigmoid(x * (1.5957691216057308 + 0.07135481627159536 * x2))
        a = x * s
        return a, s + a * (1.0 - s) * (1.5957691216057308 + 0.21406444881478608 * x2)
    elif ACT == "gelu":
        q, e = _upper_tail(x)
        a = gl.maximum(x, 0.0) - gl.abs(x) * q
        return a, gl.where(x > 0.0, 1.0 - q, q) + 0.3989422804014327 * x * e
    else:
        return x, x * 0.0 + 1.0


# -- tiles -------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def acc_layout(columns):
    """The registers of an accumulator with that many columns, of a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def split_columns(x, PARTS: gl.constexpr):
    """The columns of an accumulator as a tuple of PARTS accumulators; nothing moves."""
    if PARTS == 1:
        return (x,)
    else:
        HALF: gl.constexpr = x.shape[1] // 2
        a, b = x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)).split()
        a = gl.convert_layout(a, acc_layout(HALF), assert_trivial=True)
        b = gl.convert_layout(b, acc_layout(HALF), assert_trivial=True)
        return split_columns(a, PARTS // 2) + split_columns(b, PARTS // 2)


@gluon.jit
def raster(t, rows, columns, GROUP: gl.constexpr):
    """(row, column) of tile t of rows x columns: GROUP rows are walked together, for L2."""
    width = GROUP * columns
    g = t // width
    first = g * GROUP
    size = gl.minimum(rows - first, GROUP)
    r = t - g * width
    return first + r % size, r // size


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Shared memory for a ring of STAGES buffers of PARTS boxes of a descriptor each."""
    return gl.allocate_shared_memory(desc.dtype, [STAGES * PARTS] + desc.block_type.shape, desc.layout)


@gluon.jit
def load_box(desc, row, column, full, box, wanted, COLS: gl.constexpr):
    """Begin to copy a box, if wanted; COLS: of the transpose of what lies in memory. Its bytes were expected."""
    if COLS:
        tma.async_load(desc, [column, row], full, box, wanted)
    else:
        tma.async_load(desc, [row, column], full, box, wanted)


# -- the main loop -----------------------------------------------------------------------------------------------------


@gluon.jit
def multiply(a_s, b_s, full, empty, n, k_tiles, turn, seen, C: gl.constexpr, PARTS: gl.constexpr, A_COLS: gl.constexpr,
             B_COLS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """The sum of k_tiles >= 1 products of uses n.. of the ring, for consumer C: [BLOCK_M, BLOCK_N], float32.

    a_s: boxes of this consumer at use * PARTS + C. One product is left under way while the next is issued. The barrier
    `turn`, unless None, is told when `seen` >= 1 of these uses have arrived.
    """
    wait_full(full, n, STAGES)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, acc_layout(BLOCK_N))
    acc = warpgroup_mma(_left(a_s, slot(n, STAGES) * PARTS + C, A_COLS), _right(b_s, slot(n, STAGES), B_COLS), zero,
                        use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    for k in range(n + 1, n + seen):
        acc = _add(acc, a_s, b_s, full, empty, k, C, PARTS, A_COLS, B_COLS, STAGES)
    if turn is not None:
        mbarrier.arrive(turn, count=1)
    for k in range(n + seen, n + k_tiles):
        acc = _add(acc, a_s, b_s, full, empty, k, C, PARTS, A_COLS, B_COLS, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty, n + k_tiles - 1, STAGES)
    return acc


@gluon.jit
def _add(acc, a_s, b_s, full, empty, k, C: gl.constexpr, PARTS: gl.constexpr, A_COLS: gl.constexpr,
         B_COLS: gl.constexpr, STAGES: gl.constexpr):
    wait_full(full, k, STAGES)
    acc = warpgroup_mma(_left(a_s, slot(k, STAGES) * PARTS + C, A_COLS), _right(b_s, slot(k, STAGES), B_COLS), acc,
                        is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    release(empty, k - 1, STAGES)
    return acc


@gluon.jit
def _left(a_s, i, COLS: gl.constexpr):
    if COLS:
        return a_s.index(i).permute((1, 0))
    else:
        return a_s.index(i)


@gluon.jit
def _right(b_s, i, COLS: gl.constexpr):
    if COLS:
        return b_s.index(i)
    else:
        return b_s.index(i).permute((1, 0))


# -- launch ------------------------------------------------------------------------------------------------------------

_LONG = 250e9  # operations: some 350 us


def begins_early(operations: float) -> bool:
    """Whether a product whose programs take their tiles in turn had better be launched before the kernel ahead of it
    has ended. Programs that read the same tiles of B at the same time come in pairs; they are faster on pairs of
    multiprocessors, which they do not always get of a GPU that falls free bit by bit. From docs/linear.md."""
    return operations < _LONG


class Launch(launch.Launch):
    """A Gluon kernel as `launch.Launch` holds one, its blocks boxes [rows, columns] of matrices."""

    @staticmethod
    def describe(x: torch.Tensor, block: tuple[int, ...]) -> Any:
        return matrix(x, block)


def matrix(x: torch.Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor of the matrix x, or of matrices (number, rows, columns), for boxes of that shape, swizzled in shared
    memory."""
    box = [1] * (x.dim() - 2) + list(block)
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[x.dtype])
    whole = (x.shape[-1] + 15) // 16 * 16  # of a single row or matrix strides may be anything
    strides = [s if n > 1 else whole for n, s in zip(x.shape[:-1], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], box, layout)
