"""Device code that the Triton kernels share: tiles of tensors, masks, scores, dots.

Score tiles come in two orientations, queries x keys and its transpose. Functions here take the index tensors `i` (of
queries) and `j` (of keys) already broadcast, [M, 1] and [1, N] or [1, M] and [N, 1], so that each serves both.
"""

import triton
import triton.language as tl

import adatom.tiles.compat  # noqa: F401  (levels Triton versions)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# what a bias tile depends on
NONE = tl.constexpr(0)
KEY = tl.constexpr(1)
QUERY = tl.constexpr(2)
FULL = tl.constexpr(3)


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """To be called first. EARLY: the kernel was launched before the one ahead of it in the stream has ended: wait for
    that here, and let the next kernel be launched as early (programmatic dependent launch, sm_90 and up)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def whole(x, PIECE: tl.constexpr):
    """x, a multiple of PIECE, as the compiler may know: addresses that it knows to be aligned allow wide accesses."""
    return x if PIECE == 1 else x // PIECE * PIECE


@triton.jit
def load_tile(X, b, h, start, stride, n_rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
              EVEN: tl.constexpr, TMA: tl.constexpr, PIECE: tl.constexpr = 1):
    """Rows start.. of one (batch, head), [BLOCK, BLOCK_DIM], zero outside n_rows x DIM.

    TMA: X is a descriptor of (batch, heads, length, dim). Otherwise X points at row 0 of (b, h) and rows are `stride`
    elements apart, a multiple of PIECE. EVEN: all rows of the block exist.
    """
    if TMA:
        return X.load([b, h, start, 0]).reshape(BLOCK, BLOCK_DIM)
    else:
        r = tl.arange(0, BLOCK)[:, None]
        d = tl.arange(0, BLOCK_DIM)[None, :]
        stride = whole(stride, PIECE)
        ptr = X + tl.cast(start, tl.int64) * stride + r * stride + d
        if EVEN:
            if DIM == BLOCK_DIM:
                return tl.load(ptr)
            else:
                return tl.load(ptr, mask=d < DIM, other=0.0)
        else:
            if DIM == BLOCK_DIM:
                return tl.load(ptr, mask=r < n_rows - start, other=0.0)
            else:
                return tl.load(ptr, mask=(r < n_rows - start) & (d < DIM), other=0.0)


@triton.jit
def store_tile(X, x, start, stride, n_rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
               PIECE: tl.constexpr = 1):
    """Write x [BLOCK, BLOCK_DIM] to rows start.. of the (batch, head) that X points at, where they exist.

    Rows are `stride` elements apart, a multiple of PIECE.
    """
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    stride = whole(stride, PIECE)
    ptr = X + tl.cast(start, tl.int64) * stride + r * stride + d
    tl.store(ptr, x.to(X.dtype.element_ty), mask=(r < n_rows - start) & (d < DIM))


@triton.jit
def load_row(X, b, h, start, n, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Elements start.. of one (batch, head) of a float32 (batch, heads, length), [BLOCK]; 0 from n on.

    TMA: X is a descriptor (in a loop, addresses in the layout of a product would fill the registers). Otherwise X
    points at the first element of (b, h).
    """
    if TMA:
        return X.load([b, h, start]).reshape(BLOCK)
    else:
        r = start + tl.arange(0, BLOCK)
        return tl.load(X + r, mask=r < n, other=0.0)


@triton.jit
def load_bias(X, i, j, i0, j0, stride_q, stride_k, n_i, n_j, KIND: tl.constexpr, EVEN_I: tl.constexpr,
              EVEN_J: tl.constexpr):
    """The bias tile at query i0, key j0 of the slice that X points at, to broadcast against the scores; 0 outside.

    i and j count from the tile's corner. EVEN_I, EVEN_J: all its queries, all its keys exist.
    """
    if KIND == NONE:
        return 0.0
    elif KIND == KEY:
        ptr = X + tl.cast(j0, tl.int64) * stride_k + j * stride_k
        if EVEN_J:
            return tl.load(ptr)
        else:
            return tl.load(ptr, mask=j < n_j - j0, other=0)
    elif KIND == QUERY:
        ptr = X + tl.cast(i0, tl.int64) * stride_q + i * stride_q
        if EVEN_I:
            return tl.load(ptr)
        else:
            return tl.load(ptr, mask=i < n_i - i0, other=0)
    else:
        ptr = X + tl.cast(i0, tl.int64) * stride_q + tl.cast(j0, tl.int64) * stride_k + (i * stride_q + j * stride_k)
        if EVEN_I and EVEN_J:
            return tl.load(ptr)
        elif EVEN_J:
            return tl.load(ptr, mask=i < n_i - i0, other=0)
        else:
            return tl.load(ptr, mask=(i < n_i - i0) & (j < n_j - j0), other=0)


@triton.jit
def load_bias_block(X, b, h, i0, j0, stride_b, stride_h, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bias tile [BLOCK_M, BLOCK_N] at query i0, key j0 of slice (b, h), by descriptor of a 4-D bias; slices are
    shared where a stride is 0."""
    return X.load([b * (stride_b > 0), h * (stride_h > 0), i0, j0]).reshape(BLOCK_M, BLOCK_N)


@triton.jit
def store_scores(X, x, i, j, i0, j0, n_i, n_j, EVEN_I: tl.constexpr, EVEN_J: tl.constexpr):
    """Write x, the tile at query i0, key j0 of a contiguous (n_i, n_j), which X points at, where it exists."""
    ptr = X + tl.cast(i0, tl.int64) * n_j + j0 + (i * n_j + j)
    x = x.to(X.dtype.element_ty)
    if EVEN_I and EVEN_J:
        tl.store(ptr, x)
    elif EVEN_J:
        tl.store(ptr, x, mask=i < n_i - i0)
    else:
        tl.store(ptr, x, mask=(i < n_i - i0) & (j < n_j - j0))


@triton.jit
def row_of_scores(len_k, ALIGNED: tl.constexpr):
    """len_k; ALIGNED: it is a multiple of 16, and the compiler may know, so that masks allow wide loads and stores."""
    return whole(len_k, 16 if ALIGNED else 1)


@triton.jit
def add_bias(s, bias):
    """Scores plus a bias; where a boolean bias is False, -inf."""
    if bias.dtype == tl.int1:
        return tl.where(bias, s, float("-inf"))
    else:
        return s + bias.to(tl.float32)


@triton.jit
def tanh(x):
    """tanh to float32 accuracy: an odd polynomial near 0, where the exponential form cancels."""
    x2 = x * x
    small = x * (1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854))))
    big = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(x2 < 0.04, small, big)


@triton.jit
def visible(i, j, offset, len_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether query i sees key j: j < len_k, i + offset - left <= j <= i + offset + right."""
    seen = j < len_k
    if LEFT:
        seen &= j >= i + offset - left
    if RIGHT:
        seen &= j <= i + offset + right
    return seen


@triton.jit
def load_lse(Lse, b, h, start, n, BLOCK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
             READY: tl.constexpr = False):
    """lse, [BLOCK], in log2 units: +inf, under which all probabilities are 0, for rows that see nothing or do not
    exist. EVEN: all rows of the block exist. READY: an earlier kernel wrote down what this gave it.

    Beyond 2^23 (a bias of -1e9) lse and scores are rounded by 1 and more: there lse is raised by as much, so that no
    probability is far above 1.
    """
    lse = load_row(Lse, b, h, start, n, BLOCK, TMA)
    if READY:
        return lse if EVEN else tl.where(start + tl.arange(0, BLOCK) >= n, float("inf"), lse)
    empty = lse == float("-inf") if BIAS == NONE else lse < -1e38
    if not EVEN:  # a bias could make their probabilities overflow
        empty |= start + tl.arange(0, BLOCK) >= n
    lse = tl.where(empty, float("inf"), lse)
    if BIAS != NONE:
        lse += tl.where(tl.abs(lse) > 8388608.0, tl.abs(lse) * (1.0 / 2097152.0), 0.0)
    return lse * LOG2E


@triton.jit
def probabilities(raw, lse, bias, i, j, cut, len_k, offset, left, right, scale, softcap, BIAS: tl.constexpr,
                  SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr):
    """(P, tanh) of a tile of queries i and keys j from raw = q k^T, lse of `load_lse` and bias, all broadcast alike.

    tanh is that of the softcap, 0 without one. MASK: some tiles are masked, and this one if `cut`.
    """
    unit: tl.constexpr = LOG2E if BIAS == NONE else 1.0  # of the scores
    if SOFTCAP:
        t = tanh(raw * (scale / softcap))
        s = (softcap * unit) * t
    else:
        t = 0.0
        s = raw * (scale * unit)
    if BIAS != NONE:
        s = add_bias(s, bias)
    if MASK:
        if cut:
            s = tl.where(visible(i, j, offset, len_k, left, right, LEFT, RIGHT), s, float("-inf"))
    return tl.exp2(s * (LOG2E / unit) - lse), t


@triton.jit
def scale_of(largest):
    """(power of two that brings numbers up to `largest` below 2^15, its inverse: NaN if `largest` is not finite)."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    e = tl.minimum(268 - exponent, 253)
    inverse = ((254 - e) << 23).to(tl.float32, bitcast=True)
    return (e << 23).to(tl.float32, bitcast=True), tl.where(exponent == 255, float("nan"), inverse)


@triton.jit
def product(a, b):
    """a * b, no larger than float32 holds: zeros times it stay zeros."""
    return tl.minimum(a * b, 3.4e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split(x):
    """float32 below 2^15 as a sum of two float16, the larger first: 22 bits of all above 2^-2."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False, UNIT: tl.constexpr = False):
    """acc + a @ b in float32, or a @ b^T if TRANSPOSED. UNIT: the elements of a lie between 0 and 1.

    PRECISION is how float32 operands are multiplied, on tensor cores but for "ieee"; 16-bit ones are exact. "fp16x3"
    sums three products of float16 parts, which reach 22 bits, "fp16" rounds the operands to float16, the 11 bits of
    TF32. Both bring the operands into float16's range first, by powers of two: one for b; one for a if TRANSPOSED,
    when both are loaded tiles, or for each of its rows, when it was computed. What several products need of one tile,
    or all iterations, is computed once: the compiler sees that it is the same.
    """
    if PRECISION == "fp16x3" or PRECISION == "fp16":
        scale_b, inverse = scale_of(tl.max(tl.abs(b)))
        b *= scale_b
        if UNIT:
            a *= 16384.0
            inverse *= 1.0 / 16384.0
        elif TRANSPOSED:
            scale_a, inverse_a = scale_of(tl.max(tl.abs(a)))
            a *= scale_a
            inverse = product(inverse, inverse_a)
        else:
            scale_a, inverse_a = scale_of(tl.max(tl.abs(a), 1))
            a *= scale_a[:, None]
            inverse = product(inverse, inverse_a)[:, None]
        if PRECISION == "fp16":
            b0 = b.to(tl.float16)
            r = tl.dot(a.to(tl.float16), b0.T if TRANSPOSED else b0)
        else:
            a0, a1 = split(a)
            b0, b1 = split(b)
            if TRANSPOSED:
                b0, b1 = b0.T, b1.T
            r = tl.dot(a0, b0, tl.dot(a0, b1, tl.dot(a1, b0)))
        return r * inverse if acc is None else acc + r * inverse
    else:
        return tl.dot(a, b.T if TRANSPOSED else b, acc, input_precision=PRECISION)


@triton.jit
def add(total, lost, x):
    """(total + x, what that addition rounded away), so that float32 sums of thousands of terms keep their accuracy."""
    x -= lost
    new = total + x
    return new, (new - total) - x


@triton.jit
def tangent_of(raw_tangent, t, ddbias, scale, SOFTCAP: tl.constexpr):
    """(G, tangent of scale q k^T) of a tile, from ddq k^T + q ddk^T, the softcap's tanh and the tangent of the bias."""
    raw_tangent *= scale
    G = raw_tangent
    if SOFTCAP:
        G = raw_tangent * (1.0 - t * t)
    return G + ddbias, raw_tangent


@triton.jit
def keys_of(m0, offset, len_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):
    """Key blocks of the queries m0.. as (begin, whole_begin, whole_end, end).

    Keys begin..end are seen by some query of the block; whole_begin..whole_end, in whole blocks, by all of them.
    """
    begin = tl.cast(0, tl.int32)
    whole_begin = tl.cast(0, tl.int32)
    end = tl.cast(len_k, tl.int32)
    whole_end = len_k // BLOCK_N * BLOCK_N
    if RIGHT:
        end = tl.maximum(tl.minimum(end, m0 + BLOCK_M + offset + right), 0)
        whole_end = tl.minimum(whole_end, tl.maximum(m0 + offset + right + 1, 0) // BLOCK_N * BLOCK_N)
    if LEFT:
        begin = tl.maximum(m0 + offset - left, 0) // BLOCK_N * BLOCK_N
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(m0 + BLOCK_M - 1 + offset - left, 0), BLOCK_N) * BLOCK_N, end)
        whole_end = tl.maximum(whole_end, whole_begin)
    return begin, whole_begin, whole_end, end


@triton.jit
def queries_of(n0, offset, len_q, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr):
    """Query blocks of the keys n0.. as (begin, whole_begin, whole_end, end), by windows alone."""
    begin = tl.cast(0, tl.int32)
    whole_begin = tl.cast(0, tl.int32)
    end = tl.cast(len_q, tl.int32)
    whole_end = tl.cast(len_q, tl.int32)
    if LEFT:
        end = tl.minimum(end, tl.maximum(n0 + BLOCK_N - offset + left, 0))
        whole_end = tl.minimum(end, tl.maximum(n0 + 1 - offset + left, 0)) // BLOCK_M * BLOCK_M
    if RIGHT:
        begin = tl.maximum(n0 - offset - right, 0) // BLOCK_M * BLOCK_M
        whole_begin = tl.cdiv(tl.maximum(n0 + BLOCK_N - 1 - offset - right, 0), BLOCK_M) * BLOCK_M
        whole_begin = tl.minimum(whole_begin, end)
        whole_end = tl.maximum(whole_end, whole_begin)
    return begin, whole_begin, whole_end, end


@triton.jit
def find_sequence(Cu, n_sequences, slot, BLOCK: tl.constexpr):
    """(sequence, block) of a tile slot in a packed batch, without knowing the lengths on the host.

    Sequence b owns the slots from Cu[b] // BLOCK + b: at least ceil(length / BLOCK) of them. Slots beyond its last
    block have a start past its end and do nothing. Binary search for the last b that begins at or before `slot`.
    """
    low = tl.cast(0, tl.int32)
    high = tl.cast(n_sequences, tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(Cu + middle).to(tl.int32) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle
    return low, slot - (tl.load(Cu + low).to(tl.int32) // BLOCK + low)


@triton.jit
def locate(pid, Cu, CuQ, CuK, Lens, heads, n_heads, group, length, len_q, len_k, LENS: tl.constexpr,
           VARLEN: tl.constexpr, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """What a program works on: (batch, head, block of `length`, first query token, first key token, len_q, len_k).

    heads is those of the tiled tensor, n_heads that times the batch, or the number of sequences when packed (then Cu
    is the tiled one of CuQ and CuK, the batch is 0, and a block may lie beyond its sequence). Heads go in groups whose
    keys and values fit in L2; blocks of queries go LAST_FIRST, since the last are the longest under a causal mask.
    """
    start_q = tl.cast(0, tl.int64)
    start_k = tl.cast(0, tl.int64)
    if VARLEN:
        h = pid % heads
        sequence, block = find_sequence(Cu, n_heads, pid // heads, BLOCK)
        start_q = tl.load(CuQ + sequence).to(tl.int64)
        start_k = tl.load(CuK + sequence).to(tl.int64)
        len_q = (tl.load(CuQ + sequence + 1) - start_q).to(tl.int32)
        len_k = (tl.load(CuK + sequence + 1) - start_k).to(tl.int32)
        b = 0
    else:
        n_blocks = tl.cdiv(length, BLOCK)
        first = pid // (group * n_blocks) * group
        size = tl.minimum(group, n_heads - first)
        r = pid - first * n_blocks
        block = n_blocks - 1 - r // size if LAST_FIRST else r // size
        bh = first + r % size
        b = bh // heads
        h = bh % heads
        if LENS:
            len_k = tl.minimum(tl.maximum(tl.load(Lens + b).to(tl.int32), 0), len_k)
    return b, h, block, start_q, start_k, len_q, len_k


@triton.jit
def sharer(r, piece, heads, repeats, bias_heads, SHARED_HEADS: tl.constexpr):
    """(batch, head) number r of those that share slice `piece` of a bias: `repeats` consecutive batch elements.
    SHARED_HEADS: all heads share one."""
    if SHARED_HEADS:
        return piece * repeats + r // heads, r % heads
    else:
        return piece // bias_heads * repeats + r, piece % bias_heads


@triton.jit
def at(b, h, start, stride_b, stride_h, stride_m, PIECE: tl.constexpr = 1):
    """Offset of a token of one (batch, head), in 64 bits, from strides that are multiples of PIECE."""
    stride_b, stride_h, stride_m = whole(stride_b, PIECE), whole(stride_h, PIECE), whole(stride_m, PIECE)
    return tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h + start * stride_m


@triton.jit
def row_at(b, h, heads, start, length, VARLEN: tl.constexpr):
    """Offset of a query in lse: (batch, heads, length), or (heads, tokens) with `length` tokens when packed."""
    if VARLEN:
        return tl.cast(h, tl.int64) * length + start
    else:
        return (tl.cast(b, tl.int64) * heads + h) * length
