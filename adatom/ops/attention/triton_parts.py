"""Float32 keys and values as two float16 parts, made once for all queries (Triton, sm_90).

A power of two for each tile brings its largest element below 2^15; two parts, h + l = x, then keep 22 bits, and a
product is h h' + h l' + l h' (docs/tuning.md, "float32"). Kernels that split tiles as they pass do it again for each
block of queries, between products, in registers; parts come by TMA, and nothing lies between two products.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import Inputs, Options, empty
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous, at, load_tile, scale_of, split


@triton.jit
def in_parts(x):
    """((h, l), their unit) of a tile."""
    scale, unit = scale_of(tl.max(tl.abs(x)))
    return split(x * scale), unit


@triton.jit
def unit_of(a, b):
    """The unit of a product, from those of its operands; small enough to be scaled: where it is not so, nothing but
    numbers beyond float32 and zeros come out."""
    return tl.minimum(a * b, 1.2676506002282294e30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_parts(Parts, which, bh, n0, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """(h, l) of the tile at row n0 of tensor `which`, by descriptor; "fp16" has h alone."""
    high = Parts.load([which, bh, n0, 0]).reshape(BLOCK, BLOCK_D)
    if PRECISION == "fp16":
        return high, high
    else:
        return high, Parts.load([which, bh, n0, BLOCK_D]).reshape(BLOCK, BLOCK_D)


@triton.jit
def dot_parts(a, b, PRECISION: tl.constexpr):
    """The product of two operands in parts, in their units, small terms first."""
    if PRECISION == "fp16":
        return tl.dot(a[0], b[0])
    else:
        return tl.dot(a[0], b[0], tl.dot(a[0], b[1], tl.dot(a[1], b[0])))


@triton.jit
def turned(parts):
    """The transposes of parts."""
    return parts[0].T, parts[1].T


@triton.jit
def _write(X, Parts, Units, which, bh, b, h, tile, n_heads, tiles, stride_b, stride_h, stride_n, length,
           DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PIECE: tl.constexpr,
           COUNT: tl.constexpr):
    X += at(b, h, tl.cast(0, tl.int64), stride_b, stride_h, stride_n, PIECE)
    x = load_tile(X, b, h, tile * BLOCK, stride_n, length, BLOCK, DIM, BLOCK_D, EVEN, False, PIECE)
    parts, unit = in_parts(x)
    at_tile = (which * n_heads + bh) * tiles + tile
    i = tl.arange(0, BLOCK)[:, None]
    to = Parts + tl.cast(at_tile, tl.int64) * (BLOCK * BLOCK_D * COUNT) + i * (BLOCK_D * COUNT)
    to += tl.arange(0, BLOCK_D)[None, :]
    tl.store(to, parts[0])
    if COUNT == 2:
        tl.store(to + BLOCK_D, parts[1])
    tl.store(Units + at_tile, unit)


@triton.jit(do_not_specialize=["heads", "n_heads", "tiles", "length"])
def _parts_kernel(K, DDK, V, DDV, Parts, Units, stride_kb, stride_kh, stride_kn, stride_ckb, stride_ckh, stride_ckn,
                  stride_vb, stride_vh, stride_vn, stride_cvb, stride_cvh, stride_cvn, heads, n_heads, tiles, length,
                  HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
                  EVEN: tl.constexpr, PIECE: tl.constexpr, COUNT: tl.constexpr, EARLY: tl.constexpr):
    """Parts (4, n_heads, tiles BLOCK, COUNT BLOCK_D) of a tile of each, zeros beyond them, and what undoes their
    scales, (4, n_heads, tiles)."""
    after_previous(EARLY)
    pid = tl.program_id(0)
    bh = pid // tiles
    tile = pid - bh * tiles
    b = bh // heads
    h = bh - b * heads
    _write(K, Parts, Units, 0, bh, b, h, tile, n_heads, tiles, stride_kb, stride_kh, stride_kn, length, HEAD_DIM,
           BLOCK_D, BLOCK, EVEN, PIECE, COUNT)
    _write(DDK, Parts, Units, 1, bh, b, h, tile, n_heads, tiles, stride_ckb, stride_ckh, stride_ckn, length, HEAD_DIM,
           BLOCK_D, BLOCK, EVEN, PIECE, COUNT)
    _write(V, Parts, Units, 2, bh, b, h, tile, n_heads, tiles, stride_vb, stride_vh, stride_vn, length, HEAD_DIM_V,
           BLOCK_D, BLOCK, EVEN, PIECE, COUNT)
    _write(DDV, Parts, Units, 3, bh, b, h, tile, n_heads, tiles, stride_cvb, stride_cvh, stride_cvn, length,
           HEAD_DIM_V, BLOCK_D, BLOCK, EVEN, PIECE, COUNT)


def pay(call: Call, tma: bool) -> bool:
    """Whether parts of keys and values are worth making: float32 by TMA to 64 columns, under enough queries."""
    sharing = call.heads // max(call.kv_heads, 1)
    return (
        tma
        and call.kind in ("tf32x3", "tf32")
        and call.meta["BLOCK_D"] == call.meta["BLOCK_DV"] <= 64
        and call.len_q * sharing >= 512
    )


def _launch(x: Inputs, o: Options, ddk: torch.Tensor, ddv: torch.Tensor, block: int) -> Launch:
    call = Call(x, o)
    early = call.device.arch >= 90
    n_heads, tiles = call.batch * call.kv_heads, -(-call.len_k // block)
    strides = [s for t in (x.k, ddk, x.v, ddv) for s in call.strides(t)]
    meta = {
        "HEAD_DIM": call.head_dim, "HEAD_DIM_V": call.head_dim_v, "BLOCK_D": call.meta["BLOCK_D"], "BLOCK": block,
        "EVEN": call.even(call.len_k, block), "PIECE": call.piece, "COUNT": 1 if call.kind == "tf32" else 2,
        "EARLY": early, "num_warps": 4, "launch_pdl": early,
    }  # fmt: skip
    return Launch(_parts_kernel, n_heads * tiles, (*strides, call.kv_heads, n_heads, tiles, call.len_k), meta)


def in_tiles(
    x: Inputs, o: Options, ddk: torch.Tensor, ddv: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(parts, units) of k, ddk, v, ddv in tiles of `block` keys."""
    launch = remembered(x, "parts", lambda: _launch(x, o, ddk, ddv, block))
    n_heads, tiles = x.k.shape[0] * x.k.shape[1], -(-x.k.shape[2] // block)
    columns = launch.meta["COUNT"] * launch.meta["BLOCK_D"]
    parts = empty((4, n_heads, tiles * block, columns), x.k, torch.float16)
    units = empty((4, n_heads, tiles), x.k)
    launch(x.k, ddk, x.v, ddv, parts, units)
    return parts, units
