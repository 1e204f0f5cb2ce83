"""What the Hopper kernels under a full bias that several (batch, head) share have in common (Gluon): who shares what.

A slice serves `shared` (batch, head): all heads, or one, of `repeats` consecutive batch elements. Counts of those to
head_dim 32 begin with (heads, repeats, bias_heads, shared), of a sum over sharers they go on with (parts, padded,
len_q, len_k, n_tiles).
"""

import torch

from adatom.ops.attention.triton_call import Call
from adatom.tiles.hopper import gl, gluon, load_tile

BLOCK = gl.constexpr(128)  # queries and keys of a tile
HALF = gl.constexpr(64)  # queries of a consumer


@gluon.jit
def sharer(r, piece, counts, SHARED_HEADS: gl.constexpr):
    """(batch, head) number r of those that share a slice of the bias. SHARED_HEADS: it serves all heads."""
    heads, repeats, bias_heads = counts[0], counts[1], counts[2]
    if SHARED_HEADS:
        return piece * repeats + r // heads, r % heads
    else:
        return piece // bias_heads * repeats + r, piece % bias_heads


@gluon.jit
def tile_of_sum(t, slices, counts):
    """(slice of the bias, part, first query, first key) of tile t of a sum."""
    heads, repeats, bias_heads, shared, parts, padded, len_q, len_k, _ = counts
    n_m = (len_q + BLOCK - 1) // BLOCK
    n_n = (len_k + BLOCK - 1) // BLOCK
    m0 = t // n_n % n_m * BLOCK
    n0 = t % n_n * BLOCK
    piece = t // (n_m * n_n)
    part = piece // slices
    return piece - part * slices, part, m0, n0


@gluon.jit
def place_of(chunk, First, Second, held, size):
    """Where a chunk of so many numbers lies: the first `held` in one tensor, the rest in another."""
    in_first = chunk < held
    return gl.where(in_first, First, Second) + (chunk - gl.where(in_first, 0, held)).to(gl.int64) * size


@gluon.jit
def load_bias(Bias, several, piece, m0, n0, full, tiles, i, counts):
    """Begin to copy the bias of BLOCK queries and keys to the tiles 2 i and 2 i + 1. The number of its slice is
    multiplied by the first of `several`, that of its head by the second: 0 along expanded dimensions."""
    bias_heads = counts[2]
    bias_b, bias_h = several
    for c in gl.static_range(2):
        load_tile(Bias, piece // bias_heads * bias_b, piece % bias_heads * bias_h, m0 + c * HALF, n0, full,
                  tiles.index(i * 2 + c))


def several_of(call: Call) -> tuple[int, int]:
    """What a kernel multiplies the number of a slice by, and that of its head."""
    return int(call.bias_strides[0] > 0), int(call.bias_strides[1] > 0)


def sharing(call: Call, bias: torch.Tensor) -> tuple[int, int]:
    """(slices of the bias, (batch, head) that share each)."""
    slices = bias.shape[0] * bias.shape[1]
    return slices, call.batch * call.heads // slices


def shares_of_sum(call: Call, bias: torch.Tensor, programs: int) -> tuple[int, int]:
    """(tiles of a sum over sharers, how many of so many programs share each: several where tiles are few)."""
    slices, shared = sharing(call, bias)
    tiles = -(-call.len_q // BLOCK.value) * -(-call.len_k // BLOCK.value) * slices
    parts = max(1, min(shared // 4, programs // max(tiles, 1)))
    return tiles, -(-shared // -(-shared // parts))  # each has something to add
