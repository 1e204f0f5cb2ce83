"""What the Hopper forwards without maxima share (Gluon): exponentials relative to a reference, when to doubt sums, the
block of keys that the diagonal cuts, and what a producer tells of a tile."""

from adatom.tiles.hopper import gl, gluon, slot

LOW = gl.constexpr(0.5)  # a sum holds the exponential of its reference, 1 but for rounding
SAFE = gl.constexpr(2.0**20)  # as much as a million keys of ordinary softmax: no v overflows that did not there
HIGH = gl.constexpr(2.0**64)


@gluon.jit
def in_lanes(p):
    """Sums over the columns of p that a lane holds: [rows, 8], to be summed over columns."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def exponentials(s, m, unit):
    """exp2 of the scores in log2 units, relative to m."""
    return gl.exp2(s * unit - m[:, None])


@gluon.jit
def finite(m):
    """The reference: the maximum m, or 0 where there is none yet."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def side_by_side(low, high, LAYOUT: gl.constexpr):
    """Numbers of the first and of the second half of a block's keys as those of the block."""
    p = gl.join(low, high).permute((0, 2, 1)).reshape([low.shape[0], 2 * low.shape[1]])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True)


@gluon.jit
def diagonal(s, unit, C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """(p, reference, l) of the block that the diagonal cuts, of as many keys as there are queries in a tile. The first
    consumer's p is of the half of the keys that it sees."""
    M: gl.constexpr = PLAN.BLOCK_M
    HALF: gl.constexpr = PLAN.BLOCK_N // 2
    S_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    H_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    i = gl.arange(0, M, gl.SliceLayout(1, H_LAYOUT))
    j = gl.arange(0, HALF, gl.SliceLayout(0, H_LAYOUT))
    seen = j[None, :] <= i[:, None]
    if C == 0:
        s = gl.where(seen, s, float("-inf"))
        reference = gl.max(s, 1) * unit
        p = exponentials(s, reference, unit)
        l = in_lanes(p)
    else:
        low, high = gl.split(s.reshape([M, 2, HALF]).permute((0, 2, 1)))
        low = gl.convert_layout(low, H_LAYOUT, assert_trivial=True)
        high = gl.where(seen, gl.convert_layout(high, H_LAYOUT, assert_trivial=True), float("-inf"))
        reference = gl.max(low, 1) * unit
        low = exponentials(low, reference, unit)
        high = exponentials(high, reference, unit)
        l = in_lanes(low) + in_lanes(high)
        p = side_by_side(low, high, LAYOUT)
    wide = in_lanes(gl.zeros([M, 2 * HALF], gl.float32, LAYOUT))
    return p, gl.convert_layout(reference, S_ROWS), gl.convert_layout(l, wide.type.layout, assert_trivial=True)


@gluon.jit
def doubts(sums):
    """0 for a sum whose reference was good, 1 if v may have made its out overflow, 2 if it is to be computed again."""
    return gl.where((sums >= LOW) & (sums <= SAFE), 0, gl.where((sums >= LOW) & (sums <= HIGH), 1, 2))


@gluon.jit
def say(x, n, u, numbers, SLOTS: gl.constexpr):
    """Write x down as number n of those that go with use u of the slots of queries."""
    EACH: gl.constexpr = numbers.shape[0] // SLOTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(slot(u, SLOTS) * EACH + n).store(gl.full([1], x, gl.int32, LAYOUT))


@gluon.jit
def said(n, u, numbers, SLOTS: gl.constexpr):
    """Number n of those that go with use u of the slots of queries."""
    EACH: gl.constexpr = numbers.shape[0] // SLOTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(numbers.index(slot(u, SLOTS) * EACH + n).load(LAYOUT), 0)
