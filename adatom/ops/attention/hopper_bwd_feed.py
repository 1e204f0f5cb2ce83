"""The warp of the Hopper backward that loads tiles, and what all warps agree on: which tile is whose, and which blocks
of queries it visits, in which order."""

from dataclasses import dataclass

from adatom.ops.attention.hopper_packed import HEADER
from adatom.tiles.hopper import (
    blocks_of_queries,
    gl,
    gluon,
    head_and_block,
    keys_of,
    load_tile,
    load_tile_and_numbers,
    mbarrier,
    planner,
    slot,
    wait_empty,
)

BLOCK_N = gl.constexpr(128)  # keys of a program
HALF = gl.constexpr(64)  # keys of a consumer; queries of the piece of dQ that it multiplies
NONE = gl.constexpr(0)  # what a bias depends on
KEY = gl.constexpr(1)
QUERY = gl.constexpr(2)
FULL = gl.constexpr(3)
APART = gl.constexpr(2)  # blocks of queries that tiles of a timetable begin apart, if there is room
AHEAD = gl.constexpr(2)  # visits of a tile that one warp which adds dQ may be ahead of the other
DS_WRITTEN = gl.constexpr(13)  # number of a named barrier: both consumers have written the first buffer of dS
ROWS_READ = gl.constexpr(9)  # number of a named barrier: consumers have read the first buffer of queries and dO


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for."""

    D: int  # head_dim in memory
    HEAD_DIM: int
    HEAD_DIM_V: int
    SOFTCAP: bool
    LEFT: bool  # windows
    RIGHT: bool
    EVEN_N: bool  # all blocks of keys are whole
    LENS: bool
    VARLEN: bool
    ORDERED: bool
    FIRST: bool  # the first piece of a sum of dQ is stored: nobody has cleared it
    CLAIM: bool  # beside it: that of the keys that come first, not of those that are first
    UP: bool  # tiles walk upwards: those that begin together are at different blocks of queries, or DESCENDING
    ABREAST: bool  # tiles visit a block of queries of all heads that share their keys, then the next block
    CHAINS: int  # in order: sums of dQ, each of every so manyth tile; the kernel behind adds them up
    CROSSED: bool  # in order, causal: every other tile walks upwards, the others downwards; CHAINS are even
    SHIFTED: bool  # in order, no mask: tiles that run together are at different blocks, and none waits for long
    THIRD: bool  # a third warpgroup multiplies dQ; it also loads tiles, and adds dQ to a sum that was cleared, but for
    # ORDERED, where other warps load and add
    ALONE: bool  # beside it, not ORDERED: no heads share their keys
    LOOPS: int  # over blocks of queries: 2, 3: those that need no mask have one of their own
    CUT: bool  # the last tiles are worked on in pieces, each by another program
    RANGES: bool  # ranges of a head's queries count as heads, which share its keys
    ONCE: bool  # a program has one tile
    DYNAMIC: bool
    BLOCK_M: int
    PARTS: int
    STAGES: int
    RESIDENT: bool
    LATE: bool
    BIAS: int  # what it depends on
    BIAS_STAGES: int  # buffers of a full bias, each for PART queries
    TILES: bool  # the gradient of the bias is stored tile by tile
    DQ_BEHIND: bool  # from these the kernel behind multiplies dQ: nobody sums it, and consumers need not meet
    SUMS: bool  # it is summed over queries
    WIDE: bool  # dK and dV are parts in float32, which float16 may not hold
    INSIDE: int  # a program has whole heads and sums their dQ, so many blocks of queries, in shared memory; or 0
    KV_STAGES: int

    @property
    def ADDER(self) -> bool:
        """Whether a warp for each half of dQ adds it."""
        return self.FIRST

    @property
    def DESCENDING(self) -> bool:
        """Whether keys, and sums of dQ in order, go from the last to the first: where all tiles walk upwards."""
        return self.ORDERED and self.UP

    @property
    def LEFT_TO_ADDER(self) -> bool:
        """Whether consumers, ahead of a piece of dQ, wait for the adder alone. They may, unless stores of their own
        leave by the same memory: of tiles of a bias's gradient or, in programs with several tiles beyond head_dim 64,
        of dK and dV. They do where that is faster: to head_dim 64, and in order without a mask."""
        masked = self.LEFT or self.RIGHT
        return self.ADDER and not self.TILES and (self.LATE or self.ONCE and self.ORDERED and not masked)

    @property
    def DENSE(self) -> bool:
        """Whether dV is multiplied behind dS, consumers free queries and dO at named barriers, and blocks are masked
        without a branch, all of them if there is one loop: what is fastest beyond head_dim 64 under a mask, and with a
        softcap."""
        right = self.RIGHT and (not self.LEFT or self.LOOPS > 1)
        return self.D > 64 and (right or self.SOFTCAP and not self.LEFT)


make_plan = planner(Plan)


@gluon.constexpr_function
def _come_to(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def come_to(number, KIND: gl.constexpr, THREADS: gl.constexpr):
    """Come to a named barrier of so many threads: "arrive", each warp for itself (for a barrier in memory they would
    first meet), or "sync", and wait. With a number known when compiling: `named_sync` (tiles/hopper.py)."""
    gl.inline_asm_elementwise(_come_to(KIND, THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rows_read(n, STAGES: gl.constexpr):
    """DENSE: say that this consumer has read queries and dO of visit n."""
    come_to(ROWS_READ + slot(n, STAGES), "arrive", 288)


@gluon.jit
def wait_rows_read(n, STAGES: gl.constexpr):
    """Wait until both consumers have read what lies where queries and dO of visit n will lie."""
    if n >= STAGES:
        come_to(ROWS_READ + slot(n, STAGES), "sync", 288)


@gluon.jit
def ds_written(n, PLAN: gl.constexpr):
    """THIRD: say that this consumer has written dS of visit n."""
    come_to(DS_WRITTEN + (n & 1), "arrive", 416 if PLAN.ADDER else 384)


@gluon.jit
def wait_ds_written(n, PLAN: gl.constexpr):
    """Wait until both consumers have written dS of visit n, and are done with queries and dO of the one before. Who
    waits for one visit waits for each."""
    come_to(DS_WRITTEN + (n & 1), "sync", 416 if PLAN.ADDER else 384)


@gluon.jit
def step(m, h, block, begin, blocks, stride, PLAN: gl.constexpr):
    """The next block of queries that a tile visits: (its place in the head, head, number among all blocks).

    All heads that share the keys, from the last to the first, and the blocks of each; the first step is from
    `before_first`."""
    new = m == begin
    m = gl.where(new, begin + blocks, m) - 1
    h -= gl.where(new, 1, 0)
    if PLAN.LEFT or PLAN.RIGHT or PLAN.LENS or PLAN.VARLEN:  # some blocks of a head do not see these keys
        return m, h, block - gl.where(new, stride - blocks + 1, 1)
    else:
        return m, h, block - 1


@gluon.jit
def before_first(hk, first, begin, sharing, stride):
    """What `step` makes the first visit of."""
    return begin, hk * sharing + sharing, first + sharing * stride + begin


@gluon.jit
def upwards(begin, PLAN: gl.constexpr):
    """CROSSED: whether a tile walks upwards, every other one, that of the first keys too; begin: its first block."""
    return begin // (BLOCK_N // PLAN.BLOCK_M) % 2 == 0


@gluon.jit
def own_ends(begin, blocks, PLAN: gl.constexpr):
    """The (first, last) block of queries that a tile visits in a head. CROSSED: upwards or downwards. SHIFTED: it goes
    round, from `begin` upwards and from block 0 to the one before `begin`."""
    if PLAN.CROSSED:
        last = begin + blocks - 1
        up = upwards(begin, PLAN)
        return gl.where(up, begin, last), gl.where(up, last, begin)
    else:
        return begin, gl.where(begin == 0, blocks, begin) - 1


@gluon.jit
def neighbours(n0, counts):
    """Of the tiles of a head that run together with that of the keys n0..: (number of the first, how many)."""
    len_k, together = counts[6], counts[-1][3]
    first = n0 // BLOCK_N // together * together
    return first, gl.minimum(together, (len_k + BLOCK_N - 1) // BLOCK_N - first)


@gluon.jit
def place_in_sum(m, n0, blocks, counts):
    """SHIFTED: how many tiles add to block m of queries ahead of the tile of keys n0..: those that come to it earlier
    by the timetable.

    Tiles of a head run together (`neighbours`), and begin APART blocks from each other, or as far as there is room:
    ahead of the one that begins at a block come none, behind it those that began before it, and so on round.
    """
    ahead, together = neighbours(n0, counts)
    begun = gl.maximum(((m + 1) * together - 1) // blocks, gl.minimum(m // APART, together - 1))  # the last so far
    behind = begun - (n0 // BLOCK_N - ahead)
    return ahead + behind + gl.where(behind < 0, together, 0)


@gluon.jit
def before_visits(hk, first, begin, blocks, sharing, stride, PLAN: gl.constexpr):
    """What `visit` makes the first visit of; ALONE: of the only head."""
    if PLAN.ALONE:
        before = begin - 1 if PLAN.UP else begin + blocks
        return before, hk, first + before
    elif PLAN.SHIFTED or PLAN.CROSSED:
        _, last = own_ends(begin, blocks, PLAN)
        return last, hk * sharing + sharing, first + sharing * stride + last
    elif PLAN.ABREAST:
        return begin + blocks, hk * sharing, first + begin + blocks
    elif PLAN.UP:
        last = begin + blocks - 1
        return last, hk * sharing + sharing, first + sharing * stride + last
    else:
        return before_first(hk, first, begin, sharing, stride)


@gluon.jit
def visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN: gl.constexpr):
    """The next block of queries that a tile visits, as `step` gives it; UP: in each head from the first to the last;
    ABREAST: of the next head, or, behind the first one, the block before of the last head; CROSSED, SHIFTED: as
    `own_ends` says."""
    if PLAN.ALONE:
        STEP: gl.constexpr = 1 if PLAN.UP else -1
        return m + STEP, h, block + STEP
    elif PLAN.SHIFTED or PLAN.CROSSED:
        begun_at, last = own_ends(begin, blocks, PLAN)
        new = m == last
        if PLAN.CROSSED:
            after = gl.where(new, begun_at, m + gl.where(upwards(begin, PLAN), 1, -1))
        else:
            after = gl.where(m + 1 == blocks, 0, m + 1)
        return after, h - gl.where(new, 1, 0), block + after - m - gl.where(new, stride, 0)
    elif PLAN.ABREAST:
        new = h == hk * sharing
        block += gl.where(new, (sharing - 1) * stride - 1, -stride)
        return m - gl.where(new, 1, 0), h + gl.where(new, sharing - 1, -1), block
    elif PLAN.UP:
        new = m == begin + blocks - 1
        block += gl.where(new, 1 - blocks - stride, 1)
        return gl.where(new, begin, m + 1), h - gl.where(new, 1, 0), block
    else:
        if PLAN.CUT:  # some blocks of a head are others'
            block -= gl.where(m == begin, stride - blocks, 0)
        return step(m, h, block, begin, blocks, stride, PLAN)


@gluon.jit
def range_of(h, counts, PLAN: gl.constexpr):
    """RANGES: (head, first block of queries, number of queries) of what counts as head h; the last may be shorter."""
    len_q, ranges = counts[5], counts[-1][4]
    blocks = (len_q + PLAN.BLOCK_M - 1) // PLAN.BLOCK_M
    each = (blocks + ranges - 1) // ranges
    begin = h % ranges * each
    return h // ranges, begin, gl.minimum(each * PLAN.BLOCK_M, len_q - begin * PLAN.BLOCK_M)


@gluon.jit
def rows_of(h, m, counts, PLAN: gl.constexpr):
    """(head, first row) of block m of queries of head h, or of what counts as that."""
    if PLAN.RANGES:
        h, begin, _ = range_of(h, counts, PLAN)
        return h, (begin + m) * PLAN.BLOCK_M
    else:
        return h, m * PLAN.BLOCK_M


@gluon.jit
def blocks_of(n0, len_q, len_k, left, right, PLAN: gl.constexpr):
    """Blocks of queries of the keys n0..: (first, first and end of those that need no mask, number).

    Neither the first nor the last ever decreases from one block of keys to the next. Keys that no query sees have one
    block, all of it masked.
    """
    begin, whole_begin, whole_end, end = blocks_of_queries(n0, len_k - len_q, len_q, left, right, PLAN.LEFT, PLAN.RIGHT,
                                                           PLAN.BLOCK_M, BLOCK_N)
    last = (gl.maximum(len_q, 1) - 1) // PLAN.BLOCK_M
    begin = gl.minimum(begin, last)
    if PLAN.LENS:
        begin = gl.where(n0 >= len_k, last, begin)
    return begin, whole_begin, whole_end, gl.maximum(end - begin, 1)


@gluon.jit
def piece_of(t, counts, PLAN: gl.constexpr):
    """(tile, piece of it) number t; CUT: tiles from number `whole` on have several."""
    if PLAN.CUT:
        whole, pieces = counts[-1][1], counts[-1][2]
        behind = gl.maximum(t - whole, 0)
        return gl.minimum(t, whole) + behind // pieces, behind % pieces
    else:
        return t, t * 0


@gluon.jit
def blocks_of_piece(t, n0, begin, blocks, counts, PLAN: gl.constexpr):
    """(first block of queries, number) of tile or piece t, of all those of its tile, whose first key is n0. SHIFTED:
    where it begins, and all blocks."""
    if PLAN.SHIFTED:
        ahead, together = neighbours(n0, counts)
        begin = gl.minimum((n0 // BLOCK_N - ahead) * blocks // together, (n0 // BLOCK_N - ahead) * APART)
    if PLAN.CUT:
        whole, pieces = counts[-1][1], counts[-1][2]
        if t >= whole:
            each = (blocks + pieces - 1) // pieces
            _, piece = piece_of(t, counts, PLAN)
            begin += piece * each
            blocks = gl.minimum(each, blocks - piece * each)
    return begin, blocks


@gluon.jit
def tile_at(b, hk, n0, Lens, counts, PLAN: gl.constexpr):
    """What `tile_of` says of the tile of keys n0.. of (b, hk)."""
    heads, kv_heads, n_heads, group, splits, len_q, len_k, left, right, _ = counts
    stride = (len_q + PLAN.BLOCK_M - 1) // PLAN.BLOCK_M
    len_k = keys_of(Lens, b, len_k, PLAN.LENS)
    first = (b * kv_heads + hk) * (heads // kv_heads) * stride
    if PLAN.RANGES:  # no heads share their keys
        _, begin, queries = range_of(hk, counts, PLAN)
        first = (b * kv_heads + hk) // counts[-1][4] * stride + begin
        len_q, stride = queries, (queries + PLAN.BLOCK_M - 1) // PLAN.BLOCK_M
    return b, hk, n0, len_q, len_k, b, b, first, stride


@gluon.jit
def tile_of(t, Order, Lens, counts, PLAN: gl.constexpr):
    """(batch, head of keys, first key, queries, keys, what `load_tile` takes for the batch of queries, and of keys,
    number of the first head's block 0 among all blocks of queries, blocks of a head) of tile t.

    Heads go in groups whose queries fit in L2. Under a causal mask the first keys, whose tiles are the longest, come
    first, but for DESCENDING; CROSSED: those that walk upwards, the last keys first, then the others, the first keys
    first. Packed tiles are listed in Order.
    """
    heads, kv_heads, n_heads, group, splits, len_q, len_k, left, right, _ = counts
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    if PLAN.VARLEN:
        row = Order + (t + 1).to(gl.int64) * HEADER
        hk = gl.load(row + 6)
        stride = len_q // BLOCK_M + n_heads
        first = gl.load(row + 5) + hk * (heads // kv_heads) * stride
        b_q, b_k = (gl.load(row + 1), gl.load(row + 3)), (gl.load(row + 2), gl.load(row + 4))
        return t * 0, hk, gl.load(row), b_q[1], b_k[1], b_q, b_k, first, stride
    else:
        t, _ = piece_of(t, counts, PLAN)
        n_blocks = (len_k + BLOCK_N - 1) // BLOCK_N
        bh, block = head_and_block(t, n_blocks, n_heads, group)
        if PLAN.DESCENDING:
            block = n_blocks - 1 - block
        if PLAN.CROSSED:
            half = (n_blocks + 1) // 2
            block = gl.where(block < half, 2 * (half - 1 - block), 2 * (block - half) + 1)
        b = bh // kv_heads
        return tile_at(b, bh - b * kv_heads, block * BLOCK_N, Lens, counts, PLAN)


@gluon.jit
def tell(t, b, hk, n0, number_s, turn, PLAN: gl.constexpr):
    """Leave the number of the tile that the program took, and where that is, for the other warps."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = slot(turn, PLAN.KV_STAGES) * 4
    number_s.index(i).store(gl.full([1], t, gl.int32, ONE))
    number_s.index(i + 1).store(gl.full([1], b, gl.int32, ONE))
    number_s.index(i + 2).store(gl.full([1], hk, gl.int32, ONE))
    number_s.index(i + 3).store(gl.full([1], n0, gl.int32, ONE))


@gluon.jit
def told(number_s, turn, WARPS: gl.constexpr, PLAN: gl.constexpr):
    """The number of the tile that the producer told."""
    return number_of(number_s.index(slot(turn, PLAN.KV_STAGES) * 4), WARPS)


@gluon.jit
def tile_told(t, number_s, turn, Order, Lens, counts, WARPS: gl.constexpr, PLAN: gl.constexpr):
    """`tile_of` for other warps: what it divides for the producer has told, if it tells anything."""
    if PLAN.VARLEN or not PLAN.DYNAMIC:
        return tile_of(t, Order, Lens, counts, PLAN)
    else:
        i = slot(turn, PLAN.KV_STAGES) * 4
        b = number_of(number_s.index(i + 1), WARPS)
        hk = number_of(number_s.index(i + 2), WARPS)
        return tile_at(b, hk, number_of(number_s.index(i + 3), WARPS), Lens, counts, PLAN)


@gluon.jit
def first_tile(n_blocks, PLAN: gl.constexpr):
    """The first tile that a program takes if nobody hands them out; a head has n_blocks."""
    if PLAN.INSIDE:
        return gl.program_id(0) * n_blocks
    else:
        return gl.program_id(0)


@gluon.jit
def tile_behind(t, n_tiles, n_blocks, PLAN: gl.constexpr):
    """The tile that a program takes after tile t if nobody hands them out: INSIDE, the next of the head."""
    if PLAN.ONCE:
        return n_tiles
    elif PLAN.INSIDE:
        return t + 1 + gl.where((t + 1) % n_blocks == 0, (gl.num_programs(0) - 1) * n_blocks, 0)
    else:
        return t + gl.num_programs(0)


@gluon.jit
def tiles_in_all(Order, counts, PLAN: gl.constexpr):
    """How many tiles there are."""
    if PLAN.VARLEN:
        return gl.load(Order)
    else:
        return counts[-1][0]


@gluon.jit
def number_of(number_s, WARPS: gl.constexpr):
    """The number of the tile that the producer took."""
    return gl.max(number_s.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def producer(Q, K, V, DOut, Lse, Delta, Bias, Taken, Order, Lens, tiles, bars, counts, bias_counts, PLAN: gl.constexpr):
    """Loads tiles for the consumers. DYNAMIC: takes the next tile that no program took, the first, too, so that only
    programs that run have tiles, and tells other warps."""
    heads, kv_heads, n_heads, group, splits, most_q, most_k, left, right, _ = counts
    k_s, v_s, q_s, do_s, lse_s, delta_s, _ds_s, _dq_s, number_s, bias_s, _ = tiles
    repeats, bias_b, bias_h = bias_counts
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    PARTS: gl.constexpr = PLAN.PARTS
    PART: gl.constexpr = BLOCK_M // PARTS
    BIAS_STAGES: gl.constexpr = PLAN.BIAS_STAGES
    k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, _, _, _, bias_full, bias_empty = bars
    sharing = heads // kv_heads
    n_tiles = tiles_in_all(Order, counts, PLAN)
    n_blocks = (most_k + BLOCK_N - 1) // BLOCK_N
    n = 0
    turn = 0
    t = first_tile(n_blocks, PLAN)
    if PLAN.DYNAMIC:  # not by the program's number: another may wait for the tile of one that has not begun
        t = gl.atomic_add(Taken, 1, sem="relaxed")
    while t < n_tiles:
        b, hk, n0, len_q, len_k, b_q, b_k, first, stride = tile_of(t, Order, Lens, counts, PLAN)
        begin, _first, _last, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
        begin, blocks = blocks_of_piece(t, n0, begin, blocks, counts, PLAN)
        i_kv = slot(turn, PLAN.KV_STAGES)
        wait_empty(kv_empty, turn, PLAN.KV_STAGES)
        if PLAN.DYNAMIC:
            tell(t, b, hk, n0, number_s, turn, PLAN)
        load_tile(K, b_k, hk // splits, n0, 0, k_full.index(i_kv), k_s.index(i_kv))
        m, h, block = before_visits(hk, first, begin, blocks, sharing, stride, PLAN)
        for j in range(blocks * sharing):
            m, h, block = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
            i = slot(n, STAGES)
            row = block * BLOCK_M
            if PLAN.THIRD:
                if j > 1:
                    wait_ds_written(n - 2, PLAN)
            elif PLAN.DENSE:
                wait_rows_read(n, STAGES)
            else:
                wait_empty(q_empty, n, STAGES)
            head, start = rows_of(h, m, counts, PLAN)
            load_tile_and_numbers(Q, b_q, head, start, Lse, row, q_full.index(i), q_s.index(i), lse_s.index(i))
            if j == 0:
                for c in gl.static_range(2):
                    load_tile(V, b_k, hk // splits, n0 + c * HALF, 0, v_full.index(i_kv), v_s.index(i_kv * 2 + c))
            if not (PLAN.DENSE or PLAN.THIRD):
                wait_empty(do_empty, n, STAGES)
            load_tile_and_numbers(DOut, b_q, head, start, Delta, row, do_full.index(i), do_s.index(i), delta_s.index(i))
            if PLAN.BIAS == FULL:
                for part in gl.static_range(PARTS):
                    use = n * PARTS + part
                    i_bias = slot(use, BIAS_STAGES)
                    wait_empty(bias_empty, use, BIAS_STAGES)
                    for c in gl.static_range(2):
                        load_tile(Bias, b // repeats * bias_b, h * bias_h, m * BLOCK_M + part * PART, n0 + c * HALF,
                                  bias_full.index(i_bias), bias_s.index(i_bias * 2 + c))
            n += 1
        if PLAN.THIRD:
            if blocks * sharing > 1:
                wait_ds_written(n - 2, PLAN)
            wait_ds_written(n - 1, PLAN)
        turn += 1
        if PLAN.DYNAMIC:  # not sooner: it is no program's as long as another may be free earlier
            t = gl.atomic_add(Taken, 1, sem="relaxed")
        else:
            t = tile_behind(t, n_tiles, n_blocks, PLAN)
    if PLAN.DYNAMIC:  # a number that is no tile's: the end
        i_kv = slot(turn, PLAN.KV_STAGES)
        wait_empty(kv_empty, turn, PLAN.KV_STAGES)
        tell(n_tiles, 0, 0, 0, number_s, turn, PLAN)
        mbarrier.arrive(k_full.index(i_kv), count=1)
