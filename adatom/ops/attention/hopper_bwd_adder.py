"""The warps of the Hopper backward that add dQ to its sum in memory, each one half of every piece.

The order of the sums: pieces of dQ of a block of queries are added by ascending keys. Each has a number in memory, that
of the blocks of keys that are through with it, and waits until it is that of the keys before, if those visit the block.
Every tile visits its blocks in one order, all heads from the last to the first, and the blocks of each (ABREAST: the
blocks, and all heads of each). A tile waits only for that of the keys before, which has a lower number, and tiles are
taken by number: whoever is waited for is running or done. The tile with the lowest number of those that run waits for
nobody, so that one always goes on. What runs beside it, and how many programs there are, does not matter. Where sums
need no order, all wait for the first keys that visit the block, and for nobody else; or, CLAIM, for whoever claimed its
piece, so that tiles may be taken in any order. Who adds to a sum that was cleared ahead needs none of this.

Under a causal mask or a window sums in order may go by descending keys, and tiles upwards (DESCENDING): the last keys
see the fewest queries and begin at the diagonal, where nobody was before them. The keys before begin no sooner, and one
or two blocks further down, so that they come to a block when the others have left it, and hardly ever wait. "Before"
means behind then, in all that was said.

SHIFTED, tiles that run together are at different blocks of queries, and add to each in the order in which they would
come to it if all began together and took as long for each visit (`place_in_sum`; Qiang et al., arXiv:2601.21824). So
hardly anybody waits, however few tiles there are. But tiles also wait for some of higher numbers, which may not have
begun: all that run together must find room on the GPU. By the timetable each visit waits for earlier ones alone, or, of
those at one time, for those of higher numbers: the first that is not made yet can always be made.

CHAINS: the sum of a block of queries is several, each of every so manyth tile of keys, and "before" means before in the
same sum. Of few heads many tiles run together, and each comes to a block behind the one before it, which costs a turn;
with two sums half as many. The kernel behind adds the sums, in one order.

CROSSED, under a causal mask: every other tile walks upwards, and its sums go by descending keys; those between walk
downwards, and sums of their own go by ascending keys. Tiles that walk upwards have the lower numbers, the last keys
first: each begins at its diagonal, two tiles' queries behind whom it waits for, which is done before it. Whoever ends
makes room for one of the others, the longest first, which come to the last block one behind the other. So hardly
anybody waits, though all of a head's tiles run together, and any two of a program see as many blocks as any other two.

Who claims ahead of having the piece may yet wait: its consumer goes with the other one, and the warp of that one may
wait for a piece that another program claimed. It is at most AHEAD visits behind. In one tile that is a block visited
before, and all who visit it go through its heads and blocks in one order: whoever is waited for is ahead of nobody at
the lowest block. In the tile before it could be any block, and two programs could wait for each other. So the first
AHEAD visits of a tile claim when they have the piece.
"""

from adatom.ops.attention.hopper_bwd_feed import (
    AHEAD,
    BLOCK_N,
    before_visits,
    blocks_of,
    blocks_of_piece,
    place_in_sum,
    tile_behind,
    tile_told,
    tiles_in_all,
    told,
    upwards,
    visit,
)
from adatom.tiles.hopper import (
    gl,
    gluon,
    mbarrier,
    pass_turn,
    pass_turn_and_look,
    release,
    tma,
    wait_full,
    wait_turn,
)

_CLAIM_TURN = gl.constexpr("""{
.reg .pred early; .reg .b32 lane, turn, now;
mov.u32 lane, %laneid;
mov.u32 turn, 0;
setp.eq.u32 early, lane, 0;
@early atom.acquire.gpu.global.cas.b32 turn, [$1], 0, -1;
shfl.sync.idx.b32 turn, turn, 0, 31, -1;
bar.warp.sync -1;
mov.u32 now, turn;
again: setp.eq.s32 early, now, -1;
@early ld.acquire.gpu.global.s32 now, [$1];
@early bra again;
fence.proxy.async.global;
mov.u32 $0, turn;
}""")


@gluon.jit
def claim_turn(turn):
    """Of a single warp: 0 if it is the first to ask, who then passes the turn on; else wait until that is done."""
    return gl.inline_asm_elementwise(_CLAIM_TURN, "=r,l", [turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def chain_of(n0, begin, len_k, PLAN: gl.constexpr):
    """(which sum of dQ of a block the tile of keys n0.. adds to, how many tiles are ahead there if all before it visit
    the block, first key of the one before)."""
    tile = n0 // BLOCK_N
    ahead, before = tile // PLAN.CHAINS, n0 - PLAN.CHAINS * BLOCK_N
    behind, after = ((len_k - 1) // BLOCK_N - tile) // PLAN.CHAINS, n0 + PLAN.CHAINS * BLOCK_N
    if PLAN.CROSSED:
        up = upwards(begin, PLAN)
        ahead, before = gl.where(up, behind, ahead), gl.where(up, after, before)
    elif PLAN.DESCENDING:
        ahead, before = behind, after
    return tile % PLAN.CHAINS, ahead, before


@gluon.jit
def is_first(m, ahead, begin, before_begin, before_blocks, PLAN: gl.constexpr):
    """Whether nobody adds to block m of queries before a tile whose first block is `begin`, in its sum."""
    first = ahead == 0
    if PLAN.CROSSED:
        first |= upwards(begin, PLAN) & (m < before_begin)
    elif PLAN.DESCENDING:
        first |= m < before_begin
    elif not PLAN.SHIFTED:
        first |= m >= before_begin + before_blocks
    return first


@gluon.jit
def adder(DQ, Turns, Order, Lens, tiles, bars, counts, C: gl.constexpr, PLAN: gl.constexpr):
    """Adds half C of the pieces of dQ to the sum: those of the first keys that visit a block are stored, and the
    others wait for them; CLAIM: those of who comes first; ORDERED: each waits for that of the keys before, SHIFTED: for
    that of who comes before by the timetable."""
    heads, kv_heads, n_heads, group, splits, most_q, most_k, left, right, _ = counts
    _, _, _, _, _, _, _, dq_s, number_s, _, _ = tiles
    k_full, _, kv_empty, _, _, _, _, _, dq_full, dq_empty, _, _ = bars
    gl.static_assert(PLAN.CHAINS == 1 or PLAN.ORDERED and not (PLAN.DESCENDING or PLAN.SHIFTED))
    # who walks upwards is told by the first block, which sum a tile adds to by its keys
    gl.static_assert(not PLAN.CROSSED or PLAN.CHAINS % 2 == 0 and PLAN.RIGHT and not (PLAN.LEFT or PLAN.LENS))
    gl.static_assert(not (PLAN.CROSSED and (PLAN.VARLEN or PLAN.SUMS)))
    WIDE: gl.constexpr = min(PLAN.D, 64)
    sharing = heads // kv_heads
    n_tiles = tiles_in_all(Order, counts, PLAN)
    n = 0
    turn = 0
    t = gl.program_id(0)
    if PLAN.DYNAMIC:
        wait_full(k_full, turn, PLAN.KV_STAGES)
        t = told(number_s, turn, 1, PLAN)
    while t < n_tiles:
        b, hk, n0, len_q, len_k, b_q, b_k, first, stride = tile_told(t, number_s, turn, Order, Lens, counts, 1, PLAN)
        if PLAN.DYNAMIC:
            release(kv_empty, turn, PLAN.KV_STAGES)
        begin, _first, _last, blocks = blocks_of(n0, len_q, len_k, left, right, PLAN)
        begin, blocks = blocks_of_piece(t, n0, begin, blocks, counts, PLAN)
        chain, ahead, before = chain_of(n0, begin, len_k, PLAN)
        before_begin, _first, _last, before_blocks = blocks_of(before, len_q, len_k, left, right, PLAN)
        m, h, block = before_visits(hk, first, begin, blocks, sharing, stride, PLAN)
        seen = 0
        for j in range(blocks * sharing):
            m, h, block = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
            if PLAN.SHIFTED:
                ahead = place_in_sum(m, n0, blocks, counts)
            place = block * PLAN.CHAINS + chain
            at = Turns + (place * 2 + C)
            first_keys = is_first(m, ahead, begin, before_begin, before_blocks, PLAN)
            if PLAN.CLAIM:
                if j >= AHEAD:
                    first_keys = claim_turn(at) == 0
            elif PLAN.ORDERED:
                number = gl.where(first_keys, 0, ahead)
                if seen < number:
                    wait_turn(at, number)
            else:
                wait_turn(at, gl.where(first_keys, 0, 1))
            mbarrier.wait(dq_full.index(C), n & 1)
            if PLAN.CLAIM:
                if j < AHEAD:
                    first_keys = claim_turn(at) == 0
            row = place * WIDE + C * (WIDE // 2)
            if first_keys:
                tma.async_store(DQ, [row, 0], dq_s.index(C))
            else:
                tma.async_atomic_add(DQ, [row, 0], dq_s.index(C))
            tma.store_wait(0)
            mbarrier.arrive(dq_empty.index(C), count=1)
            if PLAN.ORDERED:
                _m, _h, following = visit(m, h, block, hk, begin, blocks, sharing, stride, PLAN)
                following = gl.where(j + 1 < blocks * sharing, following, block)  # whose turn it may be by now
                following = following * PLAN.CHAINS + chain
                seen = pass_turn_and_look(at, ahead + 1, Turns + (following * 2 + C))
            elif first_keys:
                pass_turn(at, 1)
            n += 1
        turn += 1
        if PLAN.DYNAMIC:
            wait_full(k_full, turn, PLAN.KV_STAGES)
            t = told(number_s, turn, 1, PLAN)
        else:
            t = tile_behind(t, n_tiles, 1, PLAN)
