"""The last tiles of the Hopper backward, cut into pieces.

Programs that take tiles in turn all have as many, but for a few that have one more, while the others are idle: of 4,096
tiles on 132 multiprocessors 4 have 32 where 31.03 would do. So what is left of the last round is cut along the queries:
a piece is a tile of fewer blocks of queries, whose sums of dK and dV stay float32. A kernel behind adds them up.

Another adds up the parts of dK and dV of heads that are split (`splits_of` and `ranges_of`, hopper_bwd_ways.py): those
of a head lie side by side, in the dtype that programs store, unlike those of triton_sum.py, each of which is a whole
gradient in float32.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.hopper_bwd_feed import BLOCK_N
from adatom.ops.attention.triton_call import Call
from adatom.tiles import launch
from adatom.tiles.hopper import Launch, gl, gluon, head_and_block, wait_for_previous
from adatom.tiles.triton import after_previous, at

_MOST = 32  # pieces of a tile
_ROWS = gl.constexpr(4)  # keys of a program
_EACH = gl.constexpr(8)  # pieces that it reads at once
_ELEMENTS = 2048  # of dK or dV, that a program sums of parts
# in visits of a block of queries, as measured: what a tile costs beside them; what the kernel behind costs, and a piece
_TILE, _BEHIND, _PIECE = 2.5, 2.0, 0.05


def pieces_of(tiles: int, blocks: int, sharing: int, programs: int) -> int:
    """Into how many pieces each of the last `tiles` is cut, which visits so many blocks of queries of `sharing` heads.
    None is empty, and all are worked on at once: their sums take 128 KB each."""

    def visits(pieces: int) -> float:
        sums = _BEHIND + tiles * pieces * _PIECE if pieces > 1 else 0.0
        return -(-tiles * pieces // programs) * (-(-blocks // pieces) * sharing + _TILE) + sums

    even = (n for n in range(1, min(_MOST, blocks) + 1) if -(-blocks // -(-blocks // n)) == n)
    return min((n for n in even if n == 1 or tiles * n <= programs), key=visits) if tiles else 1


@gluon.jit(do_not_specialize=["kv_heads", "n_heads", "group", "len_k", "whole", "pieces"])
def _sum_kernel(Pieces, DV, DK, stride_vb, stride_vh, stride_vn, stride_kb, stride_kh, stride_kn, kv_heads, n_heads,
                group, len_k, whole, pieces, D: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """dV or dK of _ROWS keys of a cut tile: the sum of its pieces, in order."""
    wait_for_previous(True)
    CHUNKS: gl.constexpr = BLOCK_N // _ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 128 // D, D // 4], [1, 4, 1], [2, 1, 0])
    PAIR: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    tile = gl.program_id(0) // (2 * CHUNKS)
    which = gl.program_id(0) // CHUNKS % 2
    row = gl.program_id(0) % CHUNKS * _ROWS
    r = gl.arange(0, _ROWS, gl.SliceLayout(1, PAIR))
    d = gl.arange(0, D, gl.SliceLayout(0, PAIR))
    at = (row + r)[:, None] * D + d[None, :]
    number = gl.arange(0, _EACH, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    x = gl.zeros([_ROWS, D], gl.float32, PAIR)
    for first in range(0, pieces, _EACH):
        place = ((tile * pieces + first + number) * 2 + which) * (BLOCK_N * D)
        some = (first + number < pieces) & (at[None] >= 0)
        x += gl.sum(gl.load(Pieces + (place + at[None]), mask=some, other=0.0), 0)
    bh, block = head_and_block(whole + tile, (len_k + BLOCK_N - 1) // BLOCK_N, n_heads, group)
    b = (bh // kv_heads).to(gl.int64)
    h = (bh % kv_heads).to(gl.int64)
    key = block * BLOCK_N + row + r
    if which == 0:
        Sum = DV + b * stride_vb + h * stride_vh + key.to(gl.int64)[:, None] * stride_vn + d[None, :]
        gl.store(Sum, x.to(DV.dtype.element_ty), mask=(key < len_k)[:, None] & (d < HEAD_DIM_V)[None, :])
    else:
        Sum = DK + b * stride_kb + h * stride_kh + key.to(gl.int64)[:, None] * stride_kn + d[None, :]
        gl.store(Sum, x.to(DK.dtype.element_ty), mask=(key < len_k)[:, None] & (d < HEAD_DIM)[None, :])


def sum_of_pieces(
    call: Call, dim: int, tiles: int, pieces: int, whole: int, groups: tuple[int, int], dk: torch.Tensor,
    dv: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch that adds up dV and dK of the last `tiles`, those behind `whole` others. groups: how many heads of
    keys there are, and how many go together."""
    scalars = (*call.strides(dv), *call.strides(dk), call.kv_heads, *groups, call.len_k, whole, pieces)
    meta = {"D": dim, "HEAD_DIM": call.head_dim, "HEAD_DIM_V": call.head_dim_v, "num_warps": 4, "launch_pdl": True}
    return Launch(_sum_kernel, tiles * (2 * BLOCK_N.value // _ROWS.value), scalars, meta)


@triton.jit
def _sum_rows(Parts, Sum, stride_b, stride_h, stride_n, b, h, n0, heads, splits, length, DIM: tl.constexpr,
              D: tl.constexpr, VARLEN: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr):
    """Rows n0.. of head h: the sum of its parts, in order, four of which are read at once. Parts are contiguous."""
    row = (n0 + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    some = (row < length) & (d < DIM)
    first, step = row * heads * splits + h * splits, 1
    if not VARLEN:
        first, step = (tl.cast(b, tl.int64) * heads + h) * splits * length + row, length
    x = tl.zeros((ROWS, D), tl.float32)
    for part in range(0, splits, 4):
        for i in tl.static_range(4):
            place = (first + (part + i) * tl.cast(step, tl.int64)) * DIM + d
            x += tl.load(Parts + place, mask=some & (part + i < splits), other=0.0).to(tl.float32)
    rows = at(b, h, row, stride_b, stride_h, stride_n, PIECE)
    tl.store(Sum + rows + d, x.to(Sum.dtype.element_ty), mask=some)


@triton.jit(do_not_specialize=["heads", "splits", "length"])
def _parts_kernel(DKParts, DVParts, DK, DV, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, heads,
                  splits, length, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr,
                  VARLEN: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr):
    """dK or dV of ROWS keys of a head: the sum of its parts."""
    after_previous(EARLY)
    pid = tl.program_id(0) // 2
    n_blocks = tl.cdiv(length, ROWS)
    bh = pid // n_blocks
    n0 = (pid - bh * n_blocks) * ROWS
    b = bh // heads
    h = bh - b * heads
    if tl.program_id(0) % 2 == 0:
        _sum_rows(DVParts, DV, stride_vb, stride_vh, stride_vn, b, h, n0, heads, splits, length, HEAD_DIM_V, D, VARLEN,
                  PIECE, ROWS)
    else:
        _sum_rows(DKParts, DK, stride_kb, stride_kh, stride_kn, b, h, n0, heads, splits, length, HEAD_DIM, D, VARLEN,
                  PIECE, ROWS)


def sum_of_parts(call: Call, dim: int, splits: int, dk: torch.Tensor, dv: torch.Tensor) -> launch.Launch:
    """The launch that adds up the parts of dK and dV, `splits` of each head of the call, to dk and dv."""
    rows = _ELEMENTS // dim
    strides = (*call.strides(dk), *call.strides(dv))
    programs = 2 * -(-call.len_k // rows) * call.kv_heads * (1 if call.varlen else call.batch)
    return launch.Launch(
        _parts_kernel, programs, (*strides, call.kv_heads, splits, call.len_k),
        {
            "HEAD_DIM": call.head_dim, "HEAD_DIM_V": call.head_dim_v, "D": dim, "VARLEN": call.varlen, "EARLY": True,
            "PIECE": call.piece, "ROWS": rows, "num_warps": 4, "launch_pdl": True,
        },
    )  # fmt: skip
