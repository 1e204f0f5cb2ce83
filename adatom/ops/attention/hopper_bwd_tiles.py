"""What a consumer of the Hopper backward does with a tile of scores, whoever multiplies dQ: its masks, and in which
loop over blocks of queries it needs which. Also where in its sum an element of dQ lies."""

from adatom.ops.attention.hopper_bwd_feed import HALF, upwards
from adatom.tiles.hopper import gl, gluon


@gluon.jit
def in_rows(x):
    """A [64, 32 or 64] accumulator as [16 or 32, 128], where a thread holds 16 bytes in a row and a warp 512, so that
    nothing moves between threads."""
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2])
    return x.permute((0, 3, 2, 4, 1, 5)).reshape([COLUMNS // 2, 128])


@gluon.jit
def edges_of(n0, len_q, len_k, left, right, C: gl.constexpr):
    """(end, high, low): query j sees key i of a consumer if i < end and j + low <= i <= j + high."""
    start = n0 + C * HALF
    diagonal = len_k - len_q - start
    return len_k - start, diagonal + right, diagonal - left


@gluon.jit
def masked(s, row, edges, CUTS: gl.constexpr, PLAN: gl.constexpr):
    """The scores [keys, queries] of queries row.., -inf where the query does not see the key, by what CUTS the loop's
    blocks. None of them is left out: a branch costs registers. A place j among the queries is a constant but for bits 1
    and 2, which are the thread's."""
    if CUTS != "none" and (PLAN.RIGHT or not PLAN.EVEN_N):
        end, high, low = edges
        i = gl.arange(0, HALF, layout=gl.SliceLayout(1, s.type.layout))[:, None]
        j = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        if CUTS == "left":
            seen = i - (row + low) - (j & 6) >= (j & ~6)
        else:
            seen = i < (HALF if PLAN.EVEN_N else end)
            if PLAN.RIGHT:
                seen = seen & (i - (row + high) - (j & 6) <= (j & ~6))
            if PLAN.LEFT:
                seen = seen & (i - (row + low) - (j & 6) >= (j & ~6))
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.constexpr_function
def cuts_of(kind, plan):
    """What cuts the blocks of loop number `kind`, of PLAN.LOOPS: "any" edge (there is one loop), the "right" one and,
    in a narrow window, both, "none", or the "left" one alone. UP in this order, else the other way round. Of keys the
    last of which do not exist all blocks count as cut by the "right" one."""
    if plan.LOOPS == 1:
        return "any"
    if plan.CROSSED:  # tiles that walk upwards have none in the last loop, the others in the first
        return ("right", "none", "right")[kind]
    return ("right", "none", "left")[kind if plan.UP else plan.LOOPS - 1 - kind]


@gluon.jit
def visits_of(kind: gl.constexpr, span, ragged, PLAN: gl.constexpr):
    """How many of a tile's blocks of queries loop number `kind` visits: those that `cuts_of` names."""
    CUTS: gl.constexpr = cuts_of(kind, PLAN)
    begin, whole_begin, whole_end, blocks = span
    right = gl.minimum(whole_begin - begin, blocks)
    if not PLAN.EVEN_N:  # of its keys the last do not exist
        right = gl.where(ragged, blocks, right)
    left = blocks * 0
    if PLAN.LEFT:
        left = gl.minimum(gl.maximum(begin + blocks - whole_end, 0), blocks - right)
    if PLAN.CROSSED and kind != 1:  # upwards first, downwards last
        return gl.where(upwards(begin, PLAN) == (kind == 0), right, 0)
    elif CUTS == "right":
        return right
    elif CUTS == "left":
        return left
    else:
        return blocks - right - left
