"""Which way the Hopper backward goes: how its kernel is tiled, how programs come to their tiles, and which go together.

Rules follow what was measured: docs/hopper_backward.md and hopper_backward_bias.md have the cells, and what was tried.
"""

from copy import copy
from math import log2
from typing import NamedTuple

from adatom.ops.attention.hopper_bwd_ends import blocks_of_head
from adatom.ops.attention.hopper_bwd_feed import APART, BLOCK_N, FULL
from adatom.ops.attention.triton_call import Call

_UPWARDS = 4  # heads in flight at least where tiles walk upwards: those of one head that begin
# as others of it end come to the same queries at once, which the sum of dQ takes one after the other
_WAITING = 24  # heads in flight where programs wait for each other under a mask
_LONGEST_FIRST = 32  # the same under a causal mask where tiles walk downwards, but for packed sequences
_ABREAST = 12  # the same where tiles visit the heads that share their keys abreast
_AT_ONCE = 72  # heads in flight at least, times rounds of tiles, where programs of each start a block apart: in order,
# without a mask; beside a full bias, which passes through L2, too, half as many
_FEW = 8  # tiles a multiprocessor below which heads in order go the longest first, not upwards, or crossed, or by a
# timetable
_FEW_SHORT = 2  # the same, where queries are few, for tiles that cross, whose second sum takes longer than waiting of
# more tiles, and for a timetable at head_dim 64: programs with a tile each load nothing ahead for the next one
_CHAINED = 24  # heads up to which few tiles in order have several sums of dQ; beside a third warpgroup, or packed
# beyond head_dim 64, half as many
_CHAINED_TWICE = 4  # the same for four sums, beyond head_dim 64 without a mask
_FEW_SPLIT = 16  # tiles a multiprocessor, of all heads, below which none share their keys to head_dim 64, under a
# causal mask; at 64, out of order and not packed, only below _LONG queries; packed and in order always
_FEW_SPLIT_WIDE = 6  # the same beyond it, in order, not packed
_FEW_FULL = 4  # the same below which more heads go together beside a full bias
_BUSY = 0.93  # share of the GPU that is busy at least where tiles go by a timetable, or cross
_ROUNDS = 1.6  # tiles a multiprocessor that are left at least where heads share keys under a causal mask, if heads are
# enough; with kv_lens twice as many
_REPAYS = 0.9  # share of the visits below which heads are split without that mask, or in ranges of queries
_RANGES = 5  # tiles a multiprocessor at most of ranges of queries: each leaves parts of dK and dV
_RANGE = 256  # queries of a range at least
_RANGE_IN_ORDER = 1024  # the same where, in order, there are twice as many ranges as out of order
_CHAINS_OF_RANGES = 8  # sums of dQ at most where ranges of queries count as heads
_LONG = 4096  # queries from which on some ways are faster
_THIRD = 1024, 1536  # queries and keys, the fewer and the more, from which on, beyond head_dim 64, a third warpgroup
# repays that the sum of dQ is cleared; under a causal mask from _LONG on
_THIRD_SHARED = 3000  # the same under a causal mask where heads share keys
_THIRD_IN_ORDER = 1024, 2048  # the same in order, queries or keys, the fewer: without a mask, under a causal one
_INSIDE = 4  # blocks of queries whose sum of dQ fits in shared memory, at head_dim 32
_L2_BYTES = 24 * 2**20  # what the heads in flight read and add to: half of an H100's L2
_L2_SHIFTED = 36 * 2**20  # the same by a timetable, where parts of several heads go together


class Config(NamedTuple):
    """How the kernel is tiled: a block of queries, in how many `parts` it is worked on; `stages` buffers of queries and
    of dO; registers of a consumer's thread; resident: K and V stay in registers; late: dQ of a block is multiplied in
    the next one, so that consumers need not wait for each other; tiles: "one" a program, or as many programs as
    multiprocessors, which take tiles in turn ("static") or when they are free ("dynamic"); spill: bytes of registers it
    may spill (options cost registers)."""

    block_m: int
    parts: int
    stages: int
    registers: int
    resident: bool
    late: bool
    tiles: str
    spill: int = 512


def beside_third(config: Config, ordered: bool) -> Config:
    """How the kernel is tiled where a third warpgroup multiplies dQ (hopper_bwd_third.py)."""
    return config._replace(stages=3, registers=208 if ordered else 216)


# (head_dim in memory, whether the work of programs is unequal) -> tile
CONFIGS: dict[tuple[int, bool], Config] = {
    (32, False): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic"),
    (32, True): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic"),
    (64, False): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic", spill=800),  # Triton 3.6: 440
    (64, True): Config(128, 2, 2, 240, resident=True, late=True, tiles="dynamic", spill=800),
    (128, False): Config(64, 1, 2, 240, resident=False, late=False, tiles="static", spill=800),
    (128, True): Config(64, 1, 2, 240, resident=False, late=False, tiles="one", spill=800),
}


class Way(NamedTuple):
    """How programs come to their tiles (`Config.tiles`), and fields of the Plan."""

    tiles: str
    first: bool = False
    claim: bool = False
    up: bool = False
    abreast: bool = False
    timetable: tuple[int, int] | None = None  # SHIFTED: tiles of a head that run together, heads that do
    third: bool = False
    loops: int = 1
    cut: bool = False
    look: bool = False  # sums of dQ that no keys add to are not written
    chains: int = 1  # a power of two
    crossed: int = 0  # CROSSED: heads that run together


class Work(NamedTuple):
    """What a backward has to do, as far as its way depends on it."""

    call: Call
    dim: int  # head_dim in memory
    block_m: int
    tiles: str  # of the Config
    ordered: bool
    inside: bool  # programs have whole heads, and sum their dQ in shared memory
    summed: bool  # dQ is, in memory: neither there nor multiplied behind
    sums: bool  # dS is summed over queries
    n_heads: int  # of keys; packed: sequences
    n_tiles: int
    ranges: int = 1  # of a head's queries, which count as heads

    @property
    def full(self) -> bool:
        """Whether there is a bias, or mask, of each query and key."""
        return self.call.meta["BIAS"] == FULL.value

    @property
    def causal(self) -> bool:
        """Whether there is an edge to the right, and none to the left."""
        return self.call.right >= 0 > self.call.left

    @property
    def per_sm(self) -> float:
        return self.n_tiles / self.call.device.sms

    @property
    def per_head(self) -> int:
        return self.n_tiles // max(self.n_heads, 1)


def blocks_inside(call: Call, dim: int, block_m: int) -> int:
    """Blocks of queries of a head, if a program can have all of it and sum its dQ in shared memory, else 0."""
    n_m = blocks_of_head(call, block_m)
    return n_m if dim == 32 and n_m <= _INSIDE and not call.varlen and call.heads == call.kv_heads else 0


def from_tiles(call: Call, dim: int, ordered: bool) -> bool:
    """Whether dQ is rather multiplied from stored tiles of dS than summed by tiles of keys: beyond head_dim 64; under a
    mask, where what is not visited would have to be cleared; at head_dim 64 in order, with fewer than 2,048 keys, or
    where tiles of keys are fewer than half of the multiprocessors; at head_dim 32 in order, where these tiles are fewer
    than two for each multiprocessor."""
    if dim > 64 or call.left >= 0 or call.right >= 0 or call.x.kv_lens is not None:
        return True
    n_tiles, sms = call.programs(call.len_k, BLOCK_N.value, kv=True), call.device.sms
    if dim == 64:
        return ordered or call.len_k < 2048 or 2 * n_tiles < sms
    return ordered and n_tiles < 2 * sms


def splits_of(call: Call, dim: int, ordered: bool, block_m: int) -> int:
    """Into how many parts the heads that share keys are split. Not where keys are many more than queries: all parts of
    dK take no more memory than twice q, in float16, whose parts are float32, four times."""
    sharing = call.heads // max(call.kv_heads, 1)
    if sharing <= 1 or call.len_k > 2 * call.len_q:
        return 1
    sizes = [n for n in range(sharing, 0, -1) if sharing % n == 0]
    n_tiles = call.programs(call.len_k, BLOCK_N.value, kv=True) * sharing
    if call.right >= 0 > call.left:
        return sharing // _together_causal(call, dim, ordered, sizes, n_tiles)
    return sharing // _together_even(call, dim, ordered, sizes, n_tiles, block_m)


def _together_causal(call: Call, dim: int, ordered: bool, sizes: list[int], n_tiles: int) -> int:
    """How many of the heads that share keys a program takes under a causal mask; n_tiles: if it takes one. Programs
    drift apart in their heads, and what these read and add to lies in L2 no more: so they take few, and only if there
    are enough for each multiprocessor (_ROUNDS), for the longest tiles have twice the average. One where tiles are few,
    and to head_dim 64 of packed sequences in order: then they may cross, go the longest first, or have several sums."""
    per_sm, packed = n_tiles / call.device.sms, call.varlen
    if dim > 64:
        most = 1 if ordered and not packed and per_sm < _FEW_SPLIT_WIDE else 4
    elif packed:
        most = 1 if ordered or per_sm < _FEW_SPLIT else 4
    else:
        most = 1 if per_sm < _FEW_SPLIT and (ordered or dim == 32 or call.len_q < _LONG) else 2
    rounds = _ROUNDS * (2 if call.x.kv_lens is not None else 1)
    return max((n for n in sizes if n <= most and per_sm >= rounds * n), default=1)


def _together_even(call: Call, dim: int, ordered: bool, sizes: list[int], n_tiles: int, block_m: int) -> int:
    """The same without that mask: all of them, or, where that leaves much of the GPU idle, as many as end soonest, but
    one where, in order, several sums or a timetable of more heads are faster; of unequal lengths all, or one."""
    sms, n_m, sharing = call.device.sms, blocks_of_head(call, block_m), sizes[0]
    if call.x.kv_lens is not None:
        return sharing if n_tiles >= (4 if ordered or dim <= 64 else 2) * sharing * sms else 1
    if call.varlen:
        return sharing if n_tiles >= 2 * sharing * sms else 1
    best = _soonest({n: _visits(n_tiles // n, n * n_m, sms) + (n < sharing) for n in sizes})
    if best == sharing or _cuts(n_tiles // sharing, call, dim, ordered):
        return sharing
    return 1 if ordered and dim <= 64 and call.left < 0 and call.right < 0 else best


def _visits(n_tiles: int, each: int, sms: int) -> int:
    """How many visits of blocks of queries, one behind the other, all tiles take that make so many each, and one for
    what a tile costs beside them."""
    return -(-n_tiles // sms) * (each + 1)


def _soonest(visits: dict[int, int]) -> int:
    """The key of the fewest visits, if they are clearly fewer than the first's, else the first key."""
    first, best = next(iter(visits)), min(visits, key=visits.__getitem__)
    return best if visits[best] < _REPAYS * visits[first] else first


def _cuts(n_tiles: int, call: Call, dim: int, ordered: bool) -> bool:
    """Whether the tiles of the last round, behind others, are cut: if so many leave few for it."""
    few = n_tiles > call.device.sms and 2 * (n_tiles % call.device.sms) <= call.device.sms
    return few and not ordered and call.right < 0 and _third(call, dim, ordered)


def ranges_of(call: Call, dim: int, ordered: bool, splits: int, block_m: int) -> int:
    """Into how many ranges of queries each head is split, where these have no mask, no heads share keys any more, and
    tiles leave much of the GPU idle. They count as heads then, which share the head's keys, and none is empty. Twice as
    many in order, if they are long."""
    sms, n_m = call.device.sms, blocks_of_head(call, block_m)
    n_tiles = call.programs(call.len_k, BLOCK_N.value, kv=True) * splits
    options = call.varlen or call.x.kv_lens is not None or call.x.bias is not None
    if options or call.left >= 0 or call.right >= 0 or splits * call.kv_heads < call.heads:
        return 1
    most = min(_RANGES * sms // max(n_tiles, 1), call.len_q // _RANGE)
    sizes = [n for n in range(1, max(most, 1) + 1) if n_m > (n - 1) * -(-n_m // n)]
    if not sizes or _cuts(n_tiles, call, dim, ordered):
        return 1
    ranges = _soonest({n: _visits(n * n_tiles, -(-n_m // n), sms) + (n > 1) for n in sizes})
    long = ordered and 1 < ranges and 2 * ranges in sizes and call.len_q >= 2 * ranges * _RANGE_IN_ORDER
    return 2 * ranges if long else ranges


def in_parts(call: Call, splits: int, ranges: int, block_m: int) -> Call:
    """The call as the main kernel sees it: parts of heads that share keys are heads, and so are ranges of queries."""
    call = copy(call)
    call.kv_heads *= splits
    if ranges > 1:
        call.len_q = -(-blocks_of_head(call, block_m) // ranges) * block_m
        call.heads *= ranges
    return call


def way_of(work: Work) -> Way:
    """What was fastest. Nobody waits for the keys before but where tiles are taken by number: a program must not wait
    for one that may not have begun, but by a timetable. Whoever claims a piece waits for nobody that has not."""
    call, tiles = work.call, work.tiles
    edge, window = call.right >= 0, call.left >= 0
    causal, plain = work.causal, call.x.bias is None
    wide, long, shared = work.dim > 64, call.len_q >= _LONG, call.heads > call.kv_heads
    lens, softcap = call.x.kv_lens is not None, call.o.softcap > 0
    first = work.summed
    look = first and (lens or call.varlen or call.len_q > call.len_k and (edge or window))
    third = not look and _third(call, work.dim, work.ordered)
    loops = 1
    if plain and first:
        if softcap and (edge and window or work.dim == 64):
            loops = 1  # three would spill, and two under Triton 3.9
        elif edge and window:
            loops = 3
        elif causal and (not wide or long or third or not call.even(call.len_k, BLOCK_N.value)):
            loops = 2
    timetable = _timetable(work)
    if timetable is not None:
        return Way("one", first, timetable=timetable, third=third)
    tiles = "one" if tiles == "static" and work.ordered else tiles
    crossed = _crossed(work, third)
    if crossed:
        return Way(tiles, first, third=third, loops=3 if loops > 1 else 1, look=True, chains=2, crossed=crossed)
    if work.ordered:
        abreast = causal and wide and shared and not work.sums
        few = work.per_sm < _FEW
        longest_first = causal and not shared and (work.full or softcap or few)
        descend = first and not (look or abreast or longest_first)
        up = descend and (causal and work.dim > 32 or edge and window and wide)
        chains = _chains(work, third) if few and first and not (up or abreast or shared or window) else 1
        look |= chains > 1
        return Way(tiles, first, up=up, abreast=abreast, third=third, loops=loops, look=look, chains=chains)
    if third:
        return Way(tiles, third=True, up=edge, loops=loops, cut=not edge)
    if tiles == "static":
        first = first and (plain or work.full)
    up = first and causal and work.dim > 32 and (wide or not look) and (long or wide and not shared)
    claim = up or look or first and tiles != "dynamic"
    return Way(tiles, first, claim, up, loops=loops, look=look)


def _third(call: Call, dim: int, ordered: bool) -> bool:
    """Whether a third warpgroup multiplies dQ: where it can be had at all, if lengths are such that it is faster."""
    options = call.x.bias is not None or call.x.kv_lens is not None or call.o.softcap > 0 or call.varlen
    if dim <= 64 or options or call.left >= 0:
        return False
    edge = call.right >= 0
    fewer, more = sorted((call.len_q, call.len_k))
    if ordered:
        return fewer >= _THIRD_IN_ORDER[edge]
    if edge:
        return fewer >= (_THIRD_SHARED if call.heads > call.kv_heads else _LONG)
    return fewer >= _THIRD[0] and more >= _THIRD[1]


def _chains(work: Work, third: bool) -> int:
    """How many sums of dQ few long heads have whose tiles, in order, walk downwards. Each tile comes to a block a turn
    behind the one before it of its sum. Where all tiles find room at once, or nearly, four are not worth it. Not where
    queries are many more than keys: there is memory for each sum."""
    call, wide = work.call, work.dim > 64
    if call.len_q > 2 * call.len_k:
        return 1
    if work.ranges > 1:  # by how many tiles of a head run at once
        at_once = min(work.per_head, call.device.sms / work.n_heads)
        chains = at_once / 4 if wide else max(at_once / 2, min(work.per_head, 2))
        return min(2 ** int(log2(max(chains, 1))), _CHAINS_OF_RANGES)
    heads = call.kv_heads if call.varlen else work.n_heads
    if heads > (_CHAINED // 2 if third or wide and call.varlen else _CHAINED) or work.n_tiles < 8 * heads:
        return 1
    return 4 if heads <= _CHAINED_TWICE and work.per_sm >= 1.5 and not (wide and call.right >= 0) else 2


def _crossed(work: Work, third: bool) -> int:
    """How many heads go together where in order every other tile walks upwards, from the diagonal, and those between
    downwards, or 0: as many queries as keys, whose few tiles fill the GPU evenly, half of them at a time."""
    call, half, sms = work.call, -(-work.per_head // 2), work.call.device.sms
    square = work.causal and call.right == 0 and call.len_q == call.len_k and call.heads == call.kv_heads
    if not (work.ordered and square) or work.sums or call.varlen or call.x.kv_lens is not None:
        return 0
    few = _FEW if third or work.dim <= 64 and call.len_q >= _LONG else _FEW_SHORT
    if call.o.softcap > 0 and work.dim <= 64 or not 1 < work.per_sm < few or half > sms:
        return 0
    groups = -(-work.n_heads // (sms // half))
    return -(-work.n_heads // groups) if work.n_heads * half >= _BUSY * groups * sms else 0


def _timetable(work: Work) -> tuple[int, int] | None:
    """Whether tiles in order go by a timetable (`feed.place_in_sum`), where all that run together must be on the GPU:
    (tiles of a head that do, heads that do), or None. Where that was faster: where few tiles fill the GPU evenly.

    Without a mask a head's tiles run together, and heads behind each other; where these do not fill the GPU, or have no
    room to begin APART blocks from each other, a part of each of several heads, which lie in L2.
    """
    call, dim, n_heads, n_tiles, sms = work.call, work.dim, work.n_heads, work.n_tiles, work.call.device.sms
    few = _FEW_SHORT if dim == 64 and call.len_q < _LONG and not work.full else _FEW
    if not work.ordered or work.sums or work.ranges > 1 or dim < 64 or not 0 < n_tiles < few * sms:
        return None
    if call.varlen or call.x.kv_lens is not None or call.left >= 0 or call.right >= 0:
        return None
    tiles, n_m = n_tiles // n_heads, blocks_of_head(call, work.block_m)
    for parts in range(-(-tiles // sms), 5):
        each = -(-tiles // parts)
        if n_tiles > sms and n_m + 1 < APART.value * each:  # they would wait
            continue
        groups = -(-n_heads // (sms // each))
        heads = 1 if parts == 1 else -(-n_heads // groups)
        rounds, read = groups * parts, heads * call.heads // call.kv_heads * call.len_q * dim * 8
        busy = rounds == -(-n_tiles // sms) or n_tiles >= _BUSY * rounds * sms
        if busy and (parts == 1 or read <= _L2_SHIFTED):
            return each, heads
    return None


def _equal(heads: int, sizes: range) -> int:
    """The first of `sizes` of groups that divides `heads`, or, if none does, the first: of heads that are left over in
    a last group, all programs wait for the first keys."""
    return next((size for size in sizes if heads % size == 0), sizes[0])


def _evenly(heads: int, size: int) -> int:
    """The size of equal groups, as many as come nearest to such of `size`, the fewer of two: in a small last group,
    programs of few heads would wait for each other."""
    return max(-(-heads // max(-(-(2 * heads - size) // (2 * size)), 1)), 1)


def in_flight(work: Work, way: Way) -> tuple[int, int, int]:
    """Which heads of keys go together, before the next ones: of packed sequences, those of so many rows of queries, and
    at least so many; else so many of all n_heads."""
    call, n_heads, n_tiles, sms = work.call, work.n_heads, work.n_tiles, work.call.device.sms
    sharing, right = call.heads // max(call.kv_heads, 1), call.right >= 0
    rows = _L2_BYTES // (sharing * work.dim * 8)  # whose queries, dO and sum of dQ lie in L2
    if work.ordered and way.third and way.up:  # the more heads go together, the less they wait, L2 or not
        rows *= 2
    least = _UPWARDS if way.up and not work.ordered else 1
    if right and not call.varlen and work.per_sm < 3:  # so few that the longest of all heads must come first
        least = n_heads
    crowd = work.ordered and not way.up
    if crowd:  # so many heads that those who wait for each other do not fill the GPU
        rows = max(rows, 3 * sms * work.block_m // sharing)
        waiting = _ABREAST if way.abreast else _LONGEST_FIRST if work.causal and not call.varlen else _WAITING
        least = max(least, waiting // sharing, 1) if right else 1
    group = max(1, min(n_heads, max(rows // call.len_q, least)))
    if way.timetable is not None:
        group = way.timetable[1]
    elif way.crossed:
        group = way.crossed
    elif work.inside:
        group = 1
    elif way.abreast:
        least, group = _equal(call.kv_heads, range(least, 2 * least)), _equal(n_heads, range(group, 2 * group))
    else:
        if crowd and not (call.varlen or right or call.left >= 0 or work.full and work.per_sm >= _FEW_FULL):
            more = (_AT_ONCE // 2 if work.full else _AT_ONCE) * sms // max(n_tiles, 1)
            group = min(max(group, more), n_heads)
        if crowd and work.causal and not call.varlen:
            group = _evenly(n_heads, group)
        elif not call.varlen and (way.cut or right != crowd):
            group = _equal(n_heads, range(group, group // 2, -1))
    return rows, least, group
