"""Device code that the Hopper kernels for float32 under a shared bias have in common (Gluon): tiles of two parts."""

from adatom.ops.attention.hopper_float_ends import DIM
from adatom.tiles.hopper import gl, gluon, load_tile, mbarrier, tma, warpgroup_mma


@gluon.jit
def split(x):
    """float32 below 2^15 as a sum of two float16, the larger first."""
    high = x.to(gl.float16)
    return high, (x - high.to(gl.float32)).to(gl.float16)


@gluon.jit
def tile_of(t, heads, length, BLOCK: gl.constexpr):
    """(batch, head, first row) of tile t of BLOCK rows: those of a head follow each other."""
    n = (length + BLOCK - 1) // BLOCK
    bh = t // n
    b = bh // heads
    return b, bh - b * heads, (t - bh * n) * BLOCK


@gluon.jit
def operands(x, LAYOUT: gl.constexpr):
    """The parts of what was computed, as left operands of a product."""
    high, low = split(x)
    return gl.convert_layout(high, LAYOUT, assert_trivial=True), gl.convert_layout(low, LAYOUT, assert_trivial=True)


@gluon.jit
def load_parts(desc, b, h, row, full, tiles, i):
    """Begin to copy rows row.. of both parts of (b, h) to the tiles 2 i and 2 i + 1."""
    load_tile(desc, b, h, row, 0, full, tiles.index(2 * i))
    load_tile(desc, b, h, row, DIM, full, tiles.index(2 * i + 1))


@gluon.jit
def load_numbers(desc, start, full, values):
    """Begin to copy elements start.. of a 1-D descriptor."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_load(desc, [start], full, values)


@gluon.jit
def parts_of(tiles, i, start, ROWS: gl.constexpr):
    """Rows start.. of both parts in the tiles 2 i and 2 i + 1."""
    return tiles.index(2 * i).slice(start, ROWS, dim=0), tiles.index(2 * i + 1).slice(start, ROWS, dim=0)


@gluon.jit
def turned(parts):
    """The transposes of parts in shared memory."""
    high, low = parts
    return high.permute((1, 0)), low.permute((1, 0))


@gluon.jit
def product(a, b, zeros):
    """Begin to multiply two operands in parts, small terms first: three products under way. A sum over blocks is added
    in registers, not to one of these: tensor cores cut off what they add (docs/hopper.md)."""
    a_high, a_low = a
    b_high, b_low = b
    acc = warpgroup_mma(a_low, b_high, zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(a_high, b_low, acc, is_async=True)
    return warpgroup_mma(a_high, b_high, acc, is_async=True)
