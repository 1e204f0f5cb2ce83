"""Ahead of the Hopper kernels for float32 under a shared bias: operands as two float16 parts, and sums over rows.

A power of two for each (batch, head) brings its largest element below 2^15; two parts, h + l = x, then keep 22 bits of
all above 2^-17 of that (and above 1e-20 or so), and a product is h h' + h l' + l h' (docs/tuning.md, "float32"). dS
needs no look at its tiles: |P (dP - delta)| is at most twice the largest norm of a row of dO times that of a row of V,
and the largest |dlse|.
"""

import torch
import triton
import triton.language as tl

from adatom.ops.attention.hopper_shared_ends import FAR, NUMBERS
from adatom.ops.attention.problem import Inputs, Options, empty
from adatom.ops.attention.triton_call import Call, remembered
from adatom.tiles.launch import Launch
from adatom.tiles.triton import LOG2E, after_previous, at, load_tile, scale_of, split

DIM = tl.constexpr(32)  # columns of a part
HEIGHT, PEAK = tl.constexpr(14), tl.constexpr(16384.0)  # P is multiplied by 2^HEIGHT = PEAK
# rows of the numbers of the operands, a column for each (batch, head): what undoes scales, and the norms of rows
Q, K, V, NORMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# rows of the numbers of the backward: what products are multiplied by
OF_S, OF_DP, OF_DS, OF_DQ, OF_DK, OF_DV = (tl.constexpr(i) for i in range(6))
_ROWS = 512  # of a tensor that a program holds


@triton.jit
def _scale(largest):
    """scale_of, but at most 2^60, so that the product of two is finite, and 1 for zeros."""
    scale, inverse = scale_of(largest)
    most = tl.where(largest == 0.0, 1.0, 1152921504606846976.0)
    return tl.minimum(scale, most), tl.where(scale > most, 1.0 / most, inverse)


@triton.jit
def _store_parts(Parts, x, m0, length, ROWS: tl.constexpr):
    """Write the parts of rows m0.. of a (batch, head), which begins where Parts points."""
    i = m0 + tl.arange(0, ROWS)[:, None]
    to = Parts + i * (2 * DIM) + tl.arange(0, DIM)[None, :]
    high, low = split(x)
    tl.store(to, high, mask=i < length)
    tl.store(to + DIM, low, mask=i < length)


@triton.jit(do_not_specialize=["heads", "length"])
def _parts_kernel(X, Parts, Units, stride_b, stride_h, stride_m, heads, length, HEAD_DIM: tl.constexpr,
                  PIECE: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
                  ROWS: tl.constexpr):
    """Parts (batch, heads, length, 2 DIM) of a (batch, head), what undoes their scale, and, NORMS rows on, the largest
    norm of their rows. WHOLE: there are no more than ROWS."""
    after_previous(EARLY)
    bh = tl.program_id(0)
    b = bh // heads
    h = bh - b * heads
    X += at(b, h, tl.cast(0, tl.int64), stride_b, stride_h, stride_m, PIECE)
    Parts += tl.cast(bh, tl.int64) * length * (2 * DIM)
    if WHOLE:
        x = load_tile(X, b, h, 0, stride_m, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        largest = tl.max(tl.abs(x))
    else:
        most = tl.zeros((ROWS,), tl.float32)
        for m0 in range(0, length, ROWS):
            x = load_tile(X, b, h, m0, stride_m, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
            most = tl.maximum(most, tl.max(tl.abs(x), 1))
        largest = tl.max(most)
    scale, inverse = _scale(largest)
    squares = tl.zeros((ROWS,), tl.float32)
    for m0 in range(0, length, ROWS):
        if not WHOLE:
            x = load_tile(X, b, h, m0, stride_m, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        y = x * scale
        squares = tl.maximum(squares, tl.sum(y * y, 1))
        _store_parts(Parts, y, m0, length, ROWS)
    tl.store(Units + bh, inverse)
    tl.store(Units + NORMS * tl.num_programs(0) + bh, tl.sqrt(tl.max(squares)))


@triton.jit(do_not_specialize=["heads", "length", "padded"])
def _ahead_kernel(Out, DOut, Lse, DLse, Units, Parts, Rows, Delta, Factors, Done, stride_ob, stride_oh, stride_om,
                  stride_gb, stride_gh, stride_gm, heads, length, padded, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr,
                  EVEN: tl.constexpr, DLSE: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr):
    """Of a (batch, head): parts of dO; lse in log2 units less HEIGHT (Rows), +inf for a query that does not exist or
    sees nothing, and delta in the units of dP times OF_DP, both with `padded` rows; Factors. Done: NUMBERS times 0."""
    after_previous(EARLY)
    n = tl.num_programs(0)
    bh = tl.program_id(0)
    if bh == 0:
        tl.store(Done + tl.arange(0, NUMBERS), 0)
    b = bh // heads
    h = bh - b * heads
    start = tl.cast(0, tl.int64)
    Out += at(b, h, start, stride_ob, stride_oh, stride_om, PIECE)
    DOut += at(b, h, start, stride_gb, stride_gh, stride_gm, PIECE)
    Parts += tl.cast(bh, tl.int64) * length * (2 * DIM)
    at_row = tl.cast(bh, tl.int64) * length
    i = tl.arange(0, ROWS)
    most = tl.zeros((ROWS,), tl.float32)
    most_dlse = tl.zeros((ROWS,), tl.float32)
    for m0 in range(0, length, ROWS):
        do = load_tile(DOut, b, h, m0, stride_gm, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        most = tl.maximum(most, tl.max(tl.abs(do), 1))
        if DLSE:
            dlse = tl.load(DLse + at_row + m0 + i, mask=m0 + i < length, other=0.0)
            most_dlse = tl.maximum(most_dlse, tl.abs(dlse))
    scale, inverse = _scale(tl.max(most))
    squares = tl.zeros((ROWS,), tl.float32)
    for m0 in range(0, length, ROWS):
        do = load_tile(DOut, b, h, m0, stride_gm, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE) * scale
        squares = tl.maximum(squares, tl.sum(do * do, 1))
        _store_parts(Parts, do, m0, length, ROWS)
    inverse_q = tl.load(Units + Q * n + bh)
    inverse_k = tl.load(Units + K * n + bh)
    inverse_v = tl.load(Units + V * n + bh)
    to_dp = scale * (1.0 / inverse_v)
    norm = tl.sqrt(tl.max(squares)) * tl.load(Units + (NORMS + V) * n + bh)
    scale_s, inverse_s = scale_of(2.0 * norm + tl.max(most_dlse) * to_dp)
    factor = scale_s * (1.0 / PEAK)
    inverse_s *= inverse * inverse_v
    tl.store(Factors + OF_S * n + bh, inverse_q * inverse_k)
    tl.store(Factors + OF_DP * n + bh, factor)
    tl.store(Factors + OF_DS * n + bh, inverse_s)
    tl.store(Factors + OF_DQ * n + bh, inverse_s * inverse_k)
    tl.store(Factors + OF_DK * n + bh, inverse_s * inverse_q)
    tl.store(Factors + OF_DV * n + bh, inverse * (1.0 / PEAK))
    for m0 in range(0, padded, ROWS):
        do = load_tile(DOut, b, h, m0, stride_gm, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        o = load_tile(Out, b, h, m0, stride_om, length, ROWS, HEAD_DIM, DIM, EVEN, False, PIECE)
        some = m0 + i < length
        delta = tl.sum(o * do, 1)
        if DLSE:
            delta -= tl.load(DLse + at_row + m0 + i, mask=some, other=0.0)
        lse = tl.load(Lse + at_row + m0 + i, mask=some, other=float("-inf"))
        lse = tl.where(tl.abs(lse) > FAR, float("inf"), lse * LOG2E - HEIGHT)
        to = tl.cast(bh, tl.int64) * padded + m0 + i
        tl.store(Rows + to, lse, mask=m0 + i < padded)
        tl.store(Delta + to, delta * to_dp * factor, mask=m0 + i < padded)


def _parts_launch(call: Call, x: torch.Tensor) -> Launch:
    length, dim = x.shape[2:]
    strides = call.strides(x)
    meta = {
        "HEAD_DIM": dim, "PIECE": call.piece, "EVEN": length % _ROWS == 0, "WHOLE": length <= _ROWS, "EARLY": True,
        "ROWS": _ROWS, "num_warps": 8, "launch_pdl": True,
    }  # fmt: skip
    return Launch(_parts_kernel, x.shape[0] * x.shape[1], (*strides, x.shape[1], length), meta)


def _parts_like(x: torch.Tensor) -> torch.Tensor:
    return empty((*x.shape[:3], 2 * DIM.value), x, torch.float16)


def in_parts(x: Inputs, o: Options) -> tuple[torch.Tensor, ...]:
    """Parts of q, k and v, and float32 (6, batch * heads): what undoes their scales, and norms."""
    units = empty((6, x.q.shape[0] * x.q.shape[1]), x.q)
    found = []
    for i, t in enumerate(x[:3]):
        launch = remembered(x, f"parts {i}", lambda t=t: _parts_launch(Call(x, o), t))
        launch(t, parts := _parts_like(t), units[i])
        found.append(parts)
    return *found, units


def _ahead_launch(call: Call, out: torch.Tensor, dout: torch.Tensor, padded: int, dlse: bool) -> Launch:
    strides = *call.strides(out), *call.strides(dout)
    meta = {
        "HEAD_DIM": call.head_dim_v, "PIECE": call.piece, "EVEN": call.len_q % _ROWS == 0, "DLSE": dlse, "EARLY": True,
        "ROWS": _ROWS, "num_warps": 16, "launch_pdl": True,
    }  # fmt: skip
    return Launch(_ahead_kernel, call.batch * call.heads, (*strides, call.heads, call.len_q, padded), meta)


def ahead(
    x: Inputs, o: Options, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    units: torch.Tensor, block: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Parts of dout; rows of lse and of delta, in whole blocks for each (batch, head); factors, (6, batch * heads); and
    NUMBERS times 0, for programs of the kernels behind to count in."""
    heads, padded = lse.shape[0] * lse.shape[1], -(-lse.shape[2] // block) * block
    launch = remembered(x, "ahead", lambda: _ahead_launch(Call(x, o), out, dout, padded, dlse is not None))
    rows, delta = empty((2, heads * padded), lse).unbind()
    made = _parts_like(dout), rows, delta, empty((6, heads), lse), empty((NUMBERS.value,), lse, torch.int32)
    launch(out, dout, lse, dlse, units, *made)
    return made
