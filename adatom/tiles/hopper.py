"""Device code that the Hopper kernels share (Gluon): rings of barriers, TMA, named barriers, masks, and their launch.

A kernel is one producer warp, which only issues TMA copies, and consumer warpgroups, which multiply. They meet at rings
of barriers: use number n of a ring of STAGES buffers lies in slot n % STAGES; `full` barriers say that it has arrived,
`empty` ones that all consumers have read what was there before. Tensors are (batch, heads, length, dim); a tile is the
box [1, 1, rows, dim] of one, zero outside it (of packed ones: `box_at`), and a matrix [rows, dim] in shared memory.
"""

from __future__ import annotations

import hashlib
import inspect
from types import ModuleType
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as _gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper import tma as _tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adatom.tiles import launch

__all__ = ["gl", "gluon", "fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"]

# -- Triton 3.6 to 3.9: kernels use the names of 3.9 -------------------------------------------------------------------


@_core.builtin
def _async_atomic_add(tensor_desc, coord, src, _semantic=None):  # until 3.8 lowered, but without a name
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@_core.builtin
def _barrier(_semantic=None):  # 3.6 calls it thread_barrier
    _semantic.debug_barrier()


def _with(module: ModuleType, **missing: Any) -> Any:
    """The module with what it lacks; its name tells Triton that it is part of Triton."""
    overlay = ModuleType(module.__name__)
    overlay.__dict__.update({k: v for k, v in missing.items() if not hasattr(module, k)}, **vars(module))
    return overlay


gl = _with(_gl, barrier=_barrier)
tma = _with(
    _tma,
    async_load=_tma.async_copy_global_to_shared,
    async_store=_tma.async_copy_shared_to_global,
    async_atomic_add=_async_atomic_add,
)
if not hasattr(_core.shared_memory_descriptor, "reinterpret"):
    _core.shared_memory_descriptor.reinterpret = _core.shared_memory_descriptor._reinterpret

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
END = gl.constexpr(2**30)  # the end of the rows of packed tensors


def planner(plan: type) -> Any:
    """The constexpr function by which a kernel makes a `plan`, a class of constexprs, of its fields.

    Triton's cache knows a kernel by the text of the functions that it comes to, but of no class: it would go on with
    the kernel of before where nothing but a property has changed. So this function goes by the text of the class.
    """

    @gluon.constexpr_function
    def make(*fields):
        return plan(*fields)

    make.hash = hashlib.sha256(inspect.getsource(plan).encode()).hexdigest()
    return make


# -- barriers ----------------------------------------------------------------------------------------------------------


@gluon.jit
def slot(n, STAGES: gl.constexpr):
    """Which buffer of a ring use n lies in."""
    if STAGES & (STAGES - 1) == 0:
        return n & (STAGES - 1)
    else:
        return n % STAGES


@gluon.jit
def lap(n, STAGES: gl.constexpr):
    """Parity of how often the ring has gone round before use n."""
    if STAGES & (STAGES - 1) == 0:
        return (n // STAGES) & 1  # a shift: n is never negative
    else:
        return (n // STAGES) % 2


@gluon.jit
def make_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """A ring of barriers, each of which COUNT arrivals complete. Call fence_async_shared() after the last ring.

    Make none that nobody looks at: Triton gives its memory to what is allocated next, and the hardware may yet write it
    back there, as when another process takes the GPU (docs/hopper.md, "Barriers that nobody looks at").
    """
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def wait_full(full, n, STAGES: gl.constexpr):
    """Wait until use n of a ring has arrived."""
    mbarrier.wait(full.index(slot(n, STAGES)), lap(n, STAGES))


@gluon.jit
def wait_empty(empty, n, STAGES: gl.constexpr):
    """Wait until what lay where use n will lie has been read; at once on the first lap."""
    mbarrier.wait(empty.index(slot(n, STAGES)), lap(n, STAGES) ^ 1)


@gluon.jit
def release(empty, n, STAGES: gl.constexpr):
    """Say that this consumer has read use n."""
    mbarrier.arrive(empty.index(slot(n, STAGES)), count=1)


@gluon.constexpr_function
def _named_barrier(kind, number, threads):
    return f"bar.{kind} {number}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def _asm(TEXT: gl.constexpr):
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_sync(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Wait at the CTA's barrier NUMBER until THREADS threads came to it, those that only arrive included. Triton uses
    the numbers below 8."""
    _asm(_named_barrier("sync", NUMBER, THREADS))


@gluon.jit
def named_arrive(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Come to the CTA's barrier NUMBER without waiting."""
    _asm(_named_barrier("arrive", NUMBER, THREADS))


@gluon.jit
def wait_for_previous(EARLY: gl.constexpr):
    """EARLY: the kernel was launched before the one ahead of it in the stream has ended: wait for that here."""
    if EARLY:
        _asm("griddepcontrol.wait; mov.u32 $0, 0;")


@gluon.jit
def let_next(EARLY: gl.constexpr):
    """EARLY: the next kernel in the stream may be launched once all programs of this one came here."""
    if EARLY:
        _asm("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


# -- programs that wait for each other --------------------------------------------------------------------------------

_WAIT_TURN = gl.constexpr("""{
.reg .pred early; .reg .b32 turn;
again: ld.acquire.gpu.global.s32 turn, [$1];
setp.lt.s32 early, turn, $2;
@early bra again;
fence.proxy.async.global;
mov.u32 $0, 0;
}""")
_PASS_TURN = gl.constexpr("""cp.async.bulk.wait_group 0;
bar.warp.sync -1;
st.release.gpu.global.s32 [$1], $2;
mov.u32 $0, 0;""")
_PASS_TURN_AND_LOOK = gl.constexpr("""{
.reg .b32 seen;
ld.relaxed.gpu.global.s32 seen, [$3];
cp.async.bulk.wait_group 0;
bar.warp.sync -1;
fence.acq_rel.gpu;
st.relaxed.gpu.global.s32 [$1], $2;
fence.proxy.async.global;
mov.u32 $0, seen;
}""")


@gluon.jit
def wait_turn(turn, number):
    """Of a warp, or of threads that meet afterwards: wait until what `turn` points at, for each, is not below `number`.
    What TMA reads, stores or adds afterwards comes after what those who passed the turn on had stored or added."""
    gl.inline_asm_elementwise(_WAIT_TURN, "=r,l,r", [turn, number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(turn, number):
    """Of a single warp: wait until all that it stores or adds by TMA is in memory, then write the number."""
    gl.inline_asm_elementwise(_PASS_TURN, "=r,l,r", [turn, number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn_and_look(turn, number, following):
    """`pass_turn`, and meanwhile look at another turn, and tell it: who finds there what it would `wait_turn` for need
    not do that."""
    args = [turn, number, following]
    return gl.inline_asm_elementwise(_PASS_TURN_AND_LOOK, "=r,l,r,l", args, dtype=gl.int32, is_pure=False, pack=1)


# -- tiles of the result, one after the other -------------------------------------------------------------------------


@gluon.jit
def tiles_of_program(n_tiles):
    """How many of the tiles this program works on."""
    programs = gl.num_programs(0)
    whole = n_tiles // programs
    pid = gl.program_id(0)
    place = gl.where(whole & 1 != 0, programs - 1 - pid, pid)
    return whole + gl.where(place < n_tiles - whole * programs, 1, 0)


@gluon.jit
def tile_number(turn):
    """The tile of a turn. Turns go to and fro: where tiles get shorter, who had the longest of one has the shortest of
    the next."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return turn * programs + gl.where(turn & 1 != 0, programs - 1 - pid, pid)


@gluon.jit
def head_and_block(t, n_blocks, n_heads, group):
    """(head, number of one of its n_blocks blocks) of tile t, where heads go in groups: of a group, the first blocks of
    all heads, then the second ones."""
    first = t // (group * n_blocks) * group
    size = gl.minimum(group, n_heads - first)
    r = t - first * n_blocks
    block = r // size
    return first + r - block * size, block


@gluon.jit
def keys_of(Lens, b, len_k, LENS: gl.constexpr):
    """Keys of batch element b that exist: LENS: of its len_k, so many as it has."""
    if LENS:
        return gl.minimum(gl.maximum(gl.load(Lens + b).to(gl.int32), 0), len_k)
    else:
        return len_k


# -- tiles of tensors -------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def as_matrix(layout):
    """The shared-memory layout of a descriptor's box, for its last two dimensions."""
    return _gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


@gluon.jit
def make_tiles(desc, N: gl.constexpr):
    """Shared memory for N tiles [rows, dim] of a descriptor."""
    SHAPE: gl.constexpr = desc.block_type.shape
    LAYOUT: gl.constexpr = as_matrix(desc.layout)
    return gl.allocate_shared_memory(desc.dtype, [N, SHAPE[-2], SHAPE[-1]], LAYOUT)


@gluon.jit
def as_box(desc, tile):
    """A tile [rows, dim] in shared memory as the box of the descriptor."""
    return tile.reinterpret(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def box_at(desc, b, h, row, column):
    """The coordinates of the box at (row, column) of (b, h). Of a packed tensor (`descriptor`), b is a sequence: (its
    first token, its tokens), and rows beyond the last do not exist."""
    if len(desc.block_type.shape) == 5:
        start, length = b
        return END, start + length, h, END - length + row, column
    else:
        return b, h, row, column


@gluon.jit
def load_tile(desc, b, h, row, column, full, tile):
    """Begin to copy the box at (row, column) of (b, h) to a tile; `full` completes when all has arrived."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_load(desc, box_at(desc, b, h, row, column), full, as_box(desc, tile))


@gluon.jit
def store_tile(desc, b, h, row, column, tile):
    """Begin to copy a tile to (row, column) of (b, h), what exists of it. Its writers called fence_async_shared()."""
    tma.async_store(desc, box_at(desc, b, h, row, column), as_box(desc, tile))


@gluon.jit
def clear_rows(tile, rows):
    """Zero the rows of a tile of 16-bit numbers from row `rows` on, for products to read. One warpgroup does it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = tile.shape[0]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    x = tile.load(LAYOUT)
    tile.store(gl.where(row[:, None] < rows, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def store_rows(X, tile, start, rows, stride, DIM: gl.constexpr):
    """Write the first `rows` rows and DIM columns of a tile of 16-bit numbers to rows start.. of what X points at."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    gl.barrier()
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    X += start.to(gl.int64) * stride
    gl.store(X + i * stride + d, tile.load(LAYOUT), mask=(i < rows) & (d < DIM))


# -- scores ------------------------------------------------------------------------------------------------------------


@gluon.jit
def visible(i, j, offset, len_k, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Whether query i sees key j: j < len_k, i + offset - left <= j <= i + offset + right."""
    seen = j < len_k
    if LEFT:
        seen &= j >= i + offset - left
    if RIGHT:
        seen &= j <= i + offset + right
    return seen


@gluon.jit
def keys_of_query(i, offset, len_k, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """(first, last) key that query i sees; it may be that last < first."""
    first = i * 0
    last = first + (len_k - 1)
    if RIGHT:
        last = gl.minimum(last, i + (offset + right))
    if LEFT:
        first = i + (offset - left)
    return first, last


@gluon.jit
def keys_seen(m0, offset, len_k, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr,
              BLOCK_N: gl.constexpr):
    """(begin, end) of the keys that some query of m0.. sees; begin is a multiple of BLOCK_N, end may lie before it."""
    begin = m0 * 0
    end = len_k
    if RIGHT:
        end = gl.minimum(len_k, m0 + BLOCK_M + offset + right)
    if LEFT:
        begin = gl.maximum(m0 + offset - left, 0) // BLOCK_N * BLOCK_N
    return begin, end


@gluon.jit
def keys_shared(m0, offset, len_k, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr):
    """(begin, end) of the keys that every query of m0.. sees."""
    begin = m0 * 0
    end = len_k
    if RIGHT:
        end = gl.minimum(len_k, m0 + offset + right + 1)
    if LEFT:
        begin = m0 + BLOCK_M - 1 + offset - left
    return begin, end


@gluon.jit
def tanh(x):
    """tanh to float32 accuracy: an odd polynomial near 0, where the exponential form cancels."""
    x2 = x * x
    small = x * (1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854))))
    big = 1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return gl.where(x2 < 0.04, small, big)


# -- launch ------------------------------------------------------------------------------------------------------------

_GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.uint8: gl.uint8,
}


class Launch(launch.Launch):
    """A Gluon kernel as `launch.Launch` holds one. blocks: by name, the shape [rows, dim] of the tiles that the kernel
    reads or writes of each tensor, for which it takes a descriptor."""

    @staticmethod
    def describe(x: torch.Tensor, block: tuple[int, ...]) -> Any:
        return descriptor(x, block)


def boxed(x: torch.Tensor) -> torch.Tensor:
    """x (batch, heads, length, dim), or packed x (tokens, heads, dim) as one batch element."""
    return x if x.dim() == 4 else x.transpose(0, 1)[None]


def sequences(x: torch.Tensor) -> torch.Tensor:
    """Packed x (tokens, heads, dim) for a descriptor whose boxes end with a sequence; any other x as it is."""
    return x.transpose(0, 1) if x.dim() == 3 else x


def _packed_descriptor(x: torch.Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor of packed x (heads, tokens, dim) for boxes that end with a sequence (`box_at`).

    Its rows end at END, where a sequence is made to end by the place of its rows. Two dimensions more put the address
    right again: at END of the first, whose stride is 2**34 less a row, it is 2**64 elements less END rows, and
    addresses have 64 bits. After triton/tools/ragged_tma.py.
    """
    heads, _, dim = x.shape
    step, row = (stride if n > 1 else 16 for n, stride in zip(x.shape[:2], x.stride()))
    box = [1, 1, 1, *block]
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[x.dtype])
    far = 2**31 - 2**16
    return TensorDescriptor(x, [far, far, heads, END.value, dim], [2**34 - row, row, step, row, 1], box, layout)


def descriptor(x: torch.Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor of x for tiles of that shape: of x (batch, heads, length, dim) so many rows and columns, swizzled in
    shared memory; of packed x (heads, tokens, dim), those of a sequence; of an x with fewer dimensions as it lies. An
    expanded dimension has one element, at index 0."""
    if x.dim() == 3:
        return _packed_descriptor(x, block)
    box = [1] * (x.dim() - len(block)) + list(block)
    if x.dim() == 4:
        layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[x.dtype])
    else:
        layout = gl.NVMMASharedLayout(0, 8 * x.element_size(), x.dim())
    shape = [n if s else 1 for n, s in zip(x.shape, x.stride())]
    strides = [s if n > 1 else 16 for n, s in zip(shape[:-1], x.stride())]  # those of single elements may be anything
    return TensorDescriptor(x, shape, [*strides, 1], box, layout)


# -- what the backward adds ------------------------------------------------------------------------------------------


@gluon.jit
def load_tile_and_numbers(desc, b, h, row, numbers, start, full, tile, values):
    """Begin to copy rows row.. of (b, h) to a tile, and elements start.. of a 1-D descriptor to `values`."""
    mbarrier.expect(full, desc.block_type.nbytes + numbers.block_type.nbytes)
    tma.async_load(desc, box_at(desc, b, h, row, 0), full, as_box(desc, tile))
    tma.async_load(numbers, [start], full, values)


@gluon.jit
def blocks_of_queries(n0, offset, len_q, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr,
                      BLOCK_N: gl.constexpr):
    """Blocks of queries of the keys n0.. as (begin, whole_begin, whole_end, end).

    Blocks begin..end hold all queries that see some key of n0..n0 + BLOCK_N; of whole_begin..whole_end every query sees
    all of them. Ends of sequences do not count.
    """
    begin = n0 * 0
    whole_begin = begin
    end = (len_q + BLOCK_M - 1) // BLOCK_M + begin
    whole_end = end
    if LEFT:
        last = gl.maximum(n0 + BLOCK_N - offset + left, 0)  # queries from here on see no key
        end = gl.minimum(end, (last + BLOCK_M - 1) // BLOCK_M)
        whole_end = gl.minimum(end, gl.maximum(n0 + 1 - offset + left, 0) // BLOCK_M)
    if RIGHT:
        begin = gl.maximum(n0 - offset - right, 0) // BLOCK_M
        whole_begin = (gl.maximum(n0 + BLOCK_N - 1 - offset - right, 0) + BLOCK_M - 1) // BLOCK_M
    return begin, whole_begin, whole_end, end


@gluon.jit
def tanh_of_scores(x):
    """tanh to 1e-7, absolute: what scores of 16-bit operands need. Infinities of exp2 give 1."""
    e = gl.exp2(x * (2.0 * LOG2E)) + 1.0
    asm: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return 1.0 - 2.0 * gl.inline_asm_elementwise(asm, "=f,f", [e], dtype=gl.float32, is_pure=True, pack=1)
