"""Device code of the one-tile attention kernels: all keys of a (batch, head) lie in one tile.

A program owns one (batch, head). Score tiles are queries x keys. What a product needs of a
tile, an operand, is computed once and serves all products of that tile, transposed or not.
"""

import triton
import triton.language as tl

from adatom.tiles.triton import LN2, LOG2E, NONE, add_bias, product, scale_of, split, tanh, visible


@triton.jit
def operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr = False):
    """x as `times` takes it: (the larger part, the smaller part, inverse of the power of two that both carry).

    DTYPE: that of the inputs. UNIT: x are probabilities as `softmax` gives them, or those times
    numbers below 2: float16 holds them as they are. Parts are float16 under "fp16x3" and
    "fp16" (see `dot` in tiles/triton.py); otherwise x itself, in DTYPE, stands for both.
    """
    if PRECISION == "fp16x3" or PRECISION == "fp16":
        if UNIT:
            inverse = tl.full([], 1.0, tl.float32)
        else:
            scale, inverse = scale_of(largest(x))
            x *= scale
        if PRECISION == "fp16":
            high = x.to(tl.float16)
            return high, high, inverse
        else:
            high, low = split(x)
            return high, low, inverse
    else:
        x = x.to(DTYPE)
        return x, x, tl.full([], 1.0, tl.float32)


@triton.jit
def transposed(x):
    """The operand x^T."""
    return x[0].T, x[1].T, x[2]


@triton.jit
def times(a, b, scale, PRECISION: tl.constexpr):
    """scale * (a @ b) of two operands, in float32."""
    if PRECISION == "fp16x3":
        r = tl.dot(a[0], b[0], tl.dot(a[0], b[1], tl.dot(a[1], b[0])))
    elif PRECISION == "fp16":
        r = tl.dot(a[0], b[0])
    else:
        r = tl.dot(a[0], b[0], input_precision=PRECISION)
    return r * (product(a[2], b[2]) * scale)


@triton.jit
def largest(x):
    """The largest absolute value in a tile."""
    return tl.max(tl.abs(x))


@triton.jit
def bound(a, b, DIM: tl.constexpr):
    """What no element of a @ b exceeds, of two operands with parts in float16 below 2^15; DIM: their common length."""
    return product(a[2], b[2] * (1073741824.0 * DIM))


@triton.jit
def unit(largest, PRECISION: tl.constexpr):
    """(power of two that brings numbers up to `largest` below 1, its inverse), for parts in float16; otherwise 1."""
    if PRECISION == "fp16x3" or PRECISION == "fp16":
        scale, inverse = scale_of(largest)
        return scale * (1.0 / 32768.0), product(inverse, 32768.0)
    else:
        return 1.0, 1.0


@triton.jit
def sums(a, b, scale, PRECISION: tl.constexpr):
    """scale * (a^T @ b) of two operands, in float32: sums over queries."""
    return times(transposed(a), b, scale, PRECISION)


@triton.jit
def column_sums(a, rows: tl.constexpr, scale, PRECISION: tl.constexpr):
    """scale * (a^T @ ones), [columns, 8], of an operand with that many rows: in each column, the sums over queries.

    On tensor cores: columns of a tile lie across the lanes of a warp.
    """
    if a[0].dtype == tl.float32:
        return tl.broadcast_to((tl.sum(a[0], 0) * scale)[:, None], a[0].shape[1], 8)
    else:
        ones = tl.full((rows, 8), 1.0, tl.float32).to(a[0].dtype)
        if PRECISION == "fp16x3":
            r = tl.dot(a[0].T, ones, tl.dot(a[1].T, ones))
        else:
            r = tl.dot(a[0].T, ones)
        return r * (a[2] * scale)


@triton.jit
def place(pid, Lens, heads, len_k, LENS: tl.constexpr):
    """What a program owns: (batch element, head, the keys that exist there)."""
    b = pid // heads
    if LENS:
        len_k = tl.minimum(tl.maximum(tl.load(Lens + b).to(tl.int32), 0), len_k)
    return b, pid % heads, len_k


@triton.jit
def softmax(s, bias, sink, i, j, offset, len_k, left, right, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
            LEFT: tl.constexpr, RIGHT: tl.constexpr, SINKS: tl.constexpr, MASK: tl.constexpr, CARRY: tl.constexpr):
    """(CARRY p, row sums of p, lse, tanh of the softcap or 0, the sink's share of the row sum) from s = scale q k^T.

    p are the probabilities times their row sum, which is 1 for rows that see nothing (and have p = 0, lse = -inf).
    """
    LOG2_CARRY: tl.constexpr = 14.0 if CARRY > 1.0 else 0.0
    t = 0.0
    if SOFTCAP:
        t = tanh(s * (1.0 / softcap))
        s = softcap * t
    if BIAS != NONE:
        s = add_bias(s, bias)
    if MASK:
        s = tl.where(visible(i, j, offset, len_k, left, right, LEFT, RIGHT), s, float("-inf"))
    m = tl.max(s, 1)
    if SINKS:  # a key with score sink and value 0
        m = tl.maximum(m, sink)
    if BIAS != NONE or MASK or SINKS:
        m = tl.where(m == float("-inf"), 0.0, m)
    if BIAS == NONE:
        p = tl.exp2(s * LOG2E - (m * LOG2E - LOG2_CARRY)[:, None])
    else:  # under a bias of -1e9, scores are subtracted before anything is rounded
        p = tl.exp2((s - m[:, None]) * LOG2E + LOG2_CARRY)
    l = tl.sum(p, 1) * (1.0 / CARRY)
    of_sink = 0.0
    if SINKS:
        of_sink = tl.exp2((sink - m) * LOG2E)
        l += of_sink
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    return p, l, tl.where(empty, float("-inf"), m + tl.log2(l) * LN2), t, of_sink
