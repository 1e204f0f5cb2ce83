"""What the forwards of columns in two halves share (Gluon): their rings, what fills them, and the order of products."""

from dataclasses import dataclass

from adatom.ops.attention.hopper_fwd_tiles import masked_scores, softmax_step
from adatom.tiles.hopper import (
    LOG2E,
    as_box,
    as_matrix,
    gl,
    gluon,
    keys_shared,
    mbarrier,
    named_arrive,
    named_sync,
    planner,
    release,
    slot,
    tma,
    wait_empty,
    wait_full,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # queries of a consumer
TURN = gl.constexpr(8)  # named barrier of the first consumer's turn
ALL = gl.constexpr(10)  # named barrier of the consumers and the producer
FLAG = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for. The first fields are those of hopper_fwd_tiles.py."""

    BIAS: int
    SOFTCAP: bool
    FOLD: bool  # scale > 0
    LEFT: bool  # windows
    RIGHT: bool
    MASK: bool  # some blocks of keys are masked
    SINKS: bool
    LENS: bool
    VARLEN: bool
    HEAD_DIM_V: int
    CONSUMERS: int
    BLOCK_M: int
    BLOCK_N: int
    LO: int  # columns of the first half
    HQ: int  # columns of the second half of queries and keys
    HV: int  # of values, at most HQ; 0: there is none
    Q_SLOTS: int  # tiles of queries of one consumer
    LO_SLOTS: int  # tiles of keys and values: first halves
    HI_SLOTS: int  # second halves; at most as many
    SURE: bool
    RING: int = 0  # slots that queries, keys and values share, but for those of a tile's queries; 0: they do not


make_plan = planner(Plan)


@gluon.jit
def copy_columns(desc, b, h, row, column, full, tile, H: gl.constexpr):
    """Begin to copy columns column.. of rows row.. to the first H columns of a tile, a box at a time."""
    PIECE: gl.constexpr = desc.block_type.shape[3]
    pieces = tile.reinterpret(desc.dtype, [tile.shape[1] // PIECE, tile.shape[0], PIECE], as_matrix(desc.layout))
    for c in gl.static_range(H // PIECE):
        tma.async_load(desc, [b, h, row, column + c * PIECE], full, as_box(desc, pieces.index(c)))


@gluon.jit
def store_columns(desc, b, h, row, column, tile, H: gl.constexpr):
    """Begin to copy the first H columns of a tile to columns column.. of rows row.."""
    PIECE: gl.constexpr = desc.block_type.shape[3]
    pieces = tile.reinterpret(desc.dtype, [tile.shape[1] // PIECE, tile.shape[0], PIECE], as_matrix(desc.layout))
    for c in gl.static_range(H // PIECE):
        tma.async_store(desc, [b, h, row, column + c * PIECE], as_box(desc, pieces.index(c)))


@gluon.jit
def first_columns(tile, H: gl.constexpr):
    """The first H columns of a tile: all of them, or 64."""
    if tile.shape[1] == H:
        return tile
    else:
        return tile.reinterpret(tile.dtype, [tile.shape[1] // H, tile.shape[0], H], tile.layout).index(0)


@gluon.jit
def first_rows(tile, N: gl.constexpr):
    """The first N rows of a tile."""
    if tile.shape[0] == N:
        return tile
    else:
        return tile.slice(0, N, 0)


@gluon.jit
def feed_queries(Q, b, h, row, u, tiles, bars, PLAN: gl.constexpr):
    """Load use u of the slots of queries. Q: the descriptors of their first and second columns."""
    lo, hi = Q
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    q_full, q_empty, full, empty = bars
    i = slot(u, PLAN.Q_SLOTS)
    wait_empty(q_empty, u, PLAN.Q_SLOTS)
    mbarrier.expect(q_full.index(i), ROWS * (PLAN.LO + PLAN.HQ) * 2)
    copy_columns(lo, b, h, row, 0, q_full.index(i), q_lo.index(i), PLAN.LO)
    copy_columns(hi, b, h, row, PLAN.LO, q_full.index(i), q_hi.index(i), PLAN.HQ)


@gluon.jit
def feed(X, b, h, row, t, tiles, bars, H: gl.constexpr, PLAN: gl.constexpr):
    """Load use t of the ring of keys and values. X: the descriptors of their first and second columns."""
    lo, hi = X
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    q_full, q_empty, full, empty = bars
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    HI_SLOTS: gl.constexpr = PLAN.HI_SLOTS
    i = slot(t, LO_SLOTS)
    wait_empty(empty, t, LO_SLOTS)
    mbarrier.expect(full.index(i), PLAN.BLOCK_N * (PLAN.LO + H) * 2)
    copy_columns(lo, b, h, row, 0, full.index(i), lo_s.index(i), PLAN.LO)
    if H > 0:
        if HI_SLOTS < LO_SLOTS:  # where a second half lay before
            wait_empty(empty, t + (LO_SLOTS - HI_SLOTS), LO_SLOTS)
        copy_columns(hi, b, h, row, PLAN.LO, full.index(i), hi_s.index(slot(t, HI_SLOTS)), H)


@gluon.jit
def unsure(tiles, WARPS: gl.constexpr):
    """1 if some consumer wants all tiles done again. All warps meet here."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    gl.barrier()
    named_sync(ALL, 288)
    gl.barrier()
    return gl.max(gl.maximum(flags.index(0).load(LAYOUT), flags.index(1).load(LAYOUT)), 0)


@gluon.jit
def begin_scores(u, t, tiles, KEYS: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin s = q k^T of use u of the queries and the first KEYS keys of use t of the ring."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    i = slot(u, PLAN.Q_SLOTS)
    s = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
    k = first_rows(lo_s.index(slot(t, PLAN.LO_SLOTS)), KEYS).permute((1, 0))
    s = warpgroup_mma(q_lo.index(i), k, s, use_acc=False, is_async=True)
    k = first_rows(hi_s.index(slot(t, PLAN.HI_SLOTS)), KEYS).permute((1, 0))
    return warpgroup_mma(q_hi.index(i), k, s, is_async=True)


@gluon.jit
def begin_out(p, lo, hi, t, tiles, PLAN: gl.constexpr):
    """Begin out += p v of use t of the ring."""
    q_lo, q_hi, lo_s, hi_s, flags = tiles
    LEFT_LO: gl.constexpr = gl.DotOperandLayout(0, lo.type.layout, 2)
    LEFT_HI: gl.constexpr = gl.DotOperandLayout(0, hi.type.layout, 2)
    v = lo_s.index(slot(t, PLAN.LO_SLOTS))
    lo = warpgroup_mma(gl.convert_layout(p, LEFT_LO, assert_trivial=True), v, lo, is_async=True)
    if PLAN.HV > 0:
        v = first_columns(hi_s.index(slot(t, PLAN.HI_SLOTS)), PLAN.HV)
        hi = warpgroup_mma(gl.convert_layout(p, LEFT_HI, assert_trivial=True), v, hi, is_async=True)
    return lo, hi


@gluon.jit
def masked_block(s, first, n0, len_q, len_k, limits, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores s of queries first.. and keys n0.., without the scale if FOLD."""
    left, right, scale = limits
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    begin, end = keys_shared(first, len_k - len_q, len_k, left, right, PLAN.LEFT, PLAN.RIGHT, ROWS)
    cut = (n0 < begin) | (n0 + BLOCK_N > end)
    return masked_scores(s, 0.0, first + i, n0 + j, cut, len_q, len_k, left, right, scale, 0.0, PLAN)


@gluon.jit
def ordinary_step(p, lo, hi, m, l, u, t, v, first, n0, len_q, len_k, limits, tiles, bars, SURE: gl.constexpr,
                  C: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """out += p v of the block before (use v), and p of the block of keys n0.. (use t).

    SURE: m is what scores refer to and stays as it is, and so does what was added up."""
    q_full, q_empty, full, empty = bars
    GROUPS: gl.constexpr = 2 if PLAN.HV > 0 else 1
    LO_SLOTS: gl.constexpr = PLAN.LO_SLOTS
    left, right, scale = limits
    wait_full(full, t, LO_SLOTS)
    named_sync(TURN + C, 256)
    s = begin_scores(u, t, tiles, PLAN.BLOCK_N, PLAN, LAYOUT)
    wait_full(full, v, LO_SLOTS)
    lo, hi = begin_out(p, lo, hi, v, tiles, PLAN)
    named_arrive(TURN + (C + 1) % 2, 256)
    s = warpgroup_mma_wait(GROUPS, deps=(s,))
    release(empty, t, LO_SLOTS)
    wait_full(full, v, LO_SLOTS)  # a branch, or ptxas releases the keys among the exponentials
    s = masked_block(s, first, n0, len_q, len_k, limits, PLAN, LAYOUT)
    if SURE:
        pf = gl.exp2(s * (scale * LOG2E) - m[:, None])
        l = l + gl.sum(pf, 1)
    else:
        pf, alpha, m, l = softmax_step(s, m, l, scale, PLAN)
    # ptxas moves the wait for products above the softmax, unless another wait, a branch, comes before it
    wait_full(full, v, LO_SLOTS)
    if PLAN.HV > 0:
        lo, hi, pf = warpgroup_mma_wait(0, deps=(lo, hi, pf))
    else:
        lo, pf = warpgroup_mma_wait(0, deps=(lo, pf))
    release(empty, v, LO_SLOTS)
    if not SURE:
        lo = lo * gl.convert_layout(alpha, gl.SliceLayout(1, lo.type.layout))[:, None]
        if PLAN.HV > 0:
            hi = hi * gl.convert_layout(alpha, gl.SliceLayout(1, hi.type.layout))[:, None]
    return pf.to(p.dtype), lo, hi, m, l


@gluon.jit
def free_queries(u, bars, PLAN: gl.constexpr):
    """Let queries come to the slot of use u: what this consumer stored from there has been read."""
    q_full, q_empty, full, empty = bars
    tma.store_wait(0)
    gl.barrier()
    release(q_empty, u, PLAN.Q_SLOTS)
