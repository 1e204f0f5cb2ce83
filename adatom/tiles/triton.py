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
def load_tile(X, b, h, start, stride, n_rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
              EVEN: tl.constexpr, TMA: tl.constexpr):
    """Rows start.. of one (batch, head), [BLOCK, BLOCK_DIM], zero outside n_rows x DIM.

    TMA: X is a descriptor of (batch, heads, length, dim). Otherwise X points at row 0 of (b, h) and rows are `stride`
    elements apart. EVEN: all rows of the block exist.
    """
    if TMA:
        return X.load([b, h, start, 0]).reshape(BLOCK, BLOCK_DIM)
    else:
        r = tl.arange(0, BLOCK)[:, None]
        d = tl.arange(0, BLOCK_DIM)[None, :]
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
def store_tile(X, x, start, stride, n_rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Write x [BLOCK, BLOCK_DIM] to rows start.. of the (batch, head) that X points at, where they exist."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    ptr = X + tl.cast(start, tl.int64) * stride + r * stride + d
    tl.store(ptr, x.to(X.dtype.element_ty), mask=(r < n_rows - start) & (d < DIM))


@triton.jit
def load_row(X, start, n, BLOCK: tl.constexpr, other: tl.constexpr):
    """Elements start.. of the float32 vector at X, [BLOCK]; `other` from n on."""
    r = start + tl.arange(0, BLOCK)
    return tl.load(X + r, mask=r < n, other=other)


@triton.jit
def bias_offset(i0, j0, stride_q, stride_k, KIND: tl.constexpr):
    """Where the tile at query i0, key j0 begins in a bias slice."""
    o = tl.cast(0, tl.int64)
    if KIND != KEY:
        o += tl.cast(i0, tl.int64) * stride_q
    if KIND != QUERY:
        o += tl.cast(j0, tl.int64) * stride_k
    return o


@triton.jit
def load_bias(X, i, j, stride_q, stride_k, n_i, n_j, KIND: tl.constexpr):
    """A bias tile, shaped to broadcast against the scores. X points at the tile, i and j count from it; zero outside."""
    if KIND == KEY:
        return tl.load(X + j * stride_k, mask=j < n_j, other=0)
    elif KIND == QUERY:
        return tl.load(X + i * stride_q, mask=i < n_i, other=0)
    else:
        return tl.load(X + (i * stride_q + j * stride_k), mask=(i < n_i) & (j < n_j), other=0)


@triton.jit
def add_bias(s, bias):
    """Scores in log2 units plus a bias in natural units; where a boolean bias is False, -inf."""
    if bias.dtype == tl.int1:
        return tl.where(bias, s, float("-inf"))
    else:
        return s + bias.to(tl.float32) * LOG2E


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
def to_tf32(x):
    """Half a unit of tf32's last place added, so that the tensor core's truncation rounds to nearest."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, LIKE, PRECISION: tl.constexpr):
    """A computed float32 tile as an operand of a dot with tiles of LIKE's dtype."""
    return x.to(LIKE.dtype)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32. PRECISION is how float32 operands are multiplied; 16-bit ones are exact."""
    if PRECISION == "tf32":
        return tl.dot(to_tf32(a), to_tf32(b), acc, input_precision="tf32")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


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
def tile_of(pid, n_tiles, n_heads, group):
    """(tile, head) of a program: heads in groups whose keys and values fit in L2, tiles of a group last to first.

    Under a causal mask the last tiles are the longest: started first, they leave no tail.
    """
    first = pid // (group * n_tiles) * group
    size = tl.minimum(group, n_heads - first)
    r = pid - first * n_tiles
    return n_tiles - 1 - r // size, first + r % size
