"""float32 operands of the Hopper kernels under a shared bias, as two float16 parts: h + l = x, scaled.

A power of two for each (batch, head) brings its largest element below 2^15; the parts keep 22 bits of all above 2^-17 of
that. A product of two operands is h h' + h l' + l h' (docs/tuning.md, "float32").
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.problem import empty
from adatom.ops.attention.triton_call import Call
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous, at, load_tile, scale_of, split

DIM = 32  # columns of a part
_ROWS = 512  # that a program holds


@triton.jit(do_not_specialize=["heads", "length"])
def _parts_kernel(X, Parts, Inverse, Norm, stride_b, stride_h, stride_m, heads, length, HEAD_DIM: tl.constexpr,
                  PIECE: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
                  ROWS: tl.constexpr, DIM: tl.constexpr):
    """Parts (batch, heads, length, 2 DIM) of a (batch, head), what undoes their scale, and their rows' largest norm.

    WHOLE: its rows are no more than ROWS.
    """
    after_previous(EARLY)
    bh = tl.program_id(0)
    b = bh // heads
    h = bh - b * heads
    start = tl.cast(0, tl.int64)
    X += at(b, h, start, stride_b, stride_h, stride_m, PIECE)
    Parts += tl.cast(bh, tl.int64) * length * (2 * DIM)
    if WHOLE:
        x = load_tile(X, b, h, 0, stride_m, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        largest = tl.max(tl.abs(x))
    else:
        most = tl.zeros((ROWS, DIM), tl.float32)
        for m0 in range(0, length, ROWS):
            x = load_tile(X, b, h, m0, stride_m, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
            most = tl.maximum(most, tl.abs(x))
        largest = tl.max(most)
    scale, inverse = scale_of(largest)
    tl.store(Inverse + bh, inverse)
    i = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, DIM)[None, :]
    norm = tl.zeros((ROWS,), tl.float32)
    for m0 in range(0, length, ROWS):
        if not WHOLE:
            x = load_tile(X, b, h, m0, stride_m, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        y = x * scale
        norm = tl.maximum(norm, tl.sum(y * y, 1))
        high, low = split(y)
        to = Parts + m0 * (2 * DIM) + (i * (2 * DIM) + d)
        tl.store(to, high, mask=i < length - m0)
        tl.store(to + DIM, low, mask=i < length - m0)
    tl.store(Norm + bh, tl.sqrt(tl.max(norm)))


def parts_launch(call: Call, x: torch.Tensor) -> Launch:
    """The launch for x, its parts, what undoes their scales, and their norms."""
    length, dim = x.shape[2:]
    strides = call.strides(x)
    meta = {
        "HEAD_DIM": dim, "PIECE": call.piece, "EARLY": True, "EVEN": length % _ROWS == 0, "WHOLE": length <= _ROWS,
        "ROWS": _ROWS, "DIM": DIM, "num_warps": 8, "launch_pdl": True,
    }  # fmt: skip
    return Launch(_parts_kernel, x.shape[0] * x.shape[1], (*strides, x.shape[1], length), meta)


def empty_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the parts of x go, what undoes their scales, and their norms."""
    b, h, length, _ = x.shape
    inverse, norm = empty((2, b * h), x, torch.float32).unbind()
    return empty((b, h, length, 2 * DIM), x, torch.float16), inverse, norm
