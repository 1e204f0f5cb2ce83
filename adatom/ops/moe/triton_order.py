# mypy: ignore-errors
"""The order of pairs by expert (Triton): a stable counting sort without atomics, and where each pair went.

Few pairs, one kernel: the place of a pair is the number of pairs before it, which it finds by looking at all of them.
More, three kernels: counts of the experts in each block of pairs; sums of these over the blocks before; places, from
the sums and from the pairs before in the same block.
"""

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous
from adatom.tiles.triton_dense import remembered

FEW = 4096  # pairs that one kernel orders
_ITEMS, _LOOK = 8, 256  # of the one kernel: items of a program, pairs it looks at together
_BLOCK, _COLUMNS, _ROWS = 256, 8, 512  # of the three: pairs of a block; experts of a program, blocks it adds together


@triton.jit
def _experts_of(Indices, p, pairs, experts):
    """The expert of each pair p; `experts` where its index names none, or there is no such pair."""
    e = tl.load(Indices + p, mask=p < pairs, other=-1)
    return tl.where((e >= 0) & (e < experts), e, experts).to(tl.int32)


@triton.jit
def few(pid, Indices, Order, Offsets, Places, pairs, experts, ITEMS: tl.constexpr, LOOK: tl.constexpr):
    """Everything, for few pairs, by program `pid` of as many as there are ITEMS. Items are pairs, then bounds: pair p
    of expert e has the number e * pairs + p, and the bound of e the number e * pairs; pairs with numbers below it are
    counted."""
    i = pid * ITEMS + tl.arange(0, ITEMS)
    number = tl.where(i < pairs, _experts_of(Indices, i, pairs, experts) * pairs + i, (i - pairs) * pairs)
    below = tl.zeros([ITEMS, LOOK], tl.int32)
    q = tl.arange(0, LOOK)
    e = _experts_of(Indices, q, pairs, experts)
    for _ in range(0, pairs, LOOK):
        other = tl.where(q < pairs, e * pairs + q, 0x7FFFFFFF)
        q += LOOK
        e = _experts_of(Indices, q, pairs, experts)  # of the next round, under way while this one is compared
        below += (other[None, :] < number[:, None]).to(tl.int32)
    place = tl.sum(below, 1)
    tl.store(Places + i, place, mask=i < pairs)
    tl.store(Order + place, i, mask=i < pairs)
    tl.store(Offsets + i - pairs, place, mask=(i >= pairs) & (i <= pairs + experts))


@triton.jit
def _few_kernel(Indices, Order, Offsets, Places, pairs, experts, EARLY: tl.constexpr, ITEMS: tl.constexpr, LOOK:
                tl.constexpr):
    after_previous(EARLY)
    few(tl.program_id(0), Indices, Order, Offsets, Places, pairs, experts, ITEMS, LOOK)


@triton.jit
def _count_kernel(Indices, Counts, pairs, experts, EARLY: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts (blocks, experts + 1): how many pairs of each block an expert has; in the last column the dropped ones."""
    after_previous(EARLY)
    block = tl.program_id(0)
    p = block * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(_experts_of(Indices, p, pairs, experts), BINS)
    e = tl.arange(0, BINS)
    tl.store(Counts + block.to(tl.int64) * (experts + 1) + e, counts, mask=e <= experts)


@triton.jit
def _sum_kernel(Counts, Totals, blocks, columns, EARLY: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Counts become sums over the blocks before; Totals (columns,), over all."""
    after_previous(EARLY)
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for b0 in range(0, blocks, ROWS):
        b = b0 + tl.arange(0, ROWS)
        at = Counts + b.to(tl.int64)[:, None] * columns + e[None, :]
        m = (b < blocks)[:, None] & (e < columns)[None, :]
        counts = tl.load(at, mask=m, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=m)
        total += tl.sum(counts, 0)
    tl.store(Totals + e, total, mask=e < columns)


@triton.jit
def _place_kernel(Indices, Counts, Totals, Order, Offsets, Places, pairs, experts, EARLY: tl.constexpr, BINS:
                  tl.constexpr, BLOCK: tl.constexpr, LOOK: tl.constexpr):
    """The place of each pair of a block: its expert's first, after those of the blocks before, after those before it
    in the block."""
    after_previous(EARLY)
    block = tl.program_id(0)
    bin = tl.arange(0, BINS)
    totals = tl.load(Totals + bin, mask=bin <= experts, other=0)
    first = tl.cumsum(totals, 0) - totals
    if block == 0:
        tl.store(Offsets + bin, first, mask=bin <= experts)
    first += tl.load(Counts + block.to(tl.int64) * (experts + 1) + bin, mask=bin <= experts, other=0)
    i = tl.arange(0, BLOCK)
    p = block * BLOCK + i
    e = _experts_of(Indices, p, pairs, experts)
    before = tl.zeros([BLOCK, LOOK], tl.int32)
    for q0 in range(0, BLOCK, LOOK):
        q = q0 + tl.arange(0, LOOK)
        other = _experts_of(Indices, block * BLOCK + q, pairs, experts)
        before += ((other[None, :] == e[:, None]) & (q[None, :] < i[:, None])).to(tl.int32)
    place = tl.gather(first, e, 0) + tl.sum(before, 1)
    tl.store(Places + p, place, mask=p < pairs)
    tl.store(Order + place, p, mask=p < pairs)


@triton.jit
def _inverse_kernel(Order, Places, pairs, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    after_previous(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Places + tl.load(Order + i, mask=i < pairs, other=0), i, mask=i < pairs)


def _meta(tensors, experts=None, **more):
    early = facts(tensors[0].device).arch >= 90
    bins = {} if experts is None else {"BINS": max(32, 1 << experts.bit_length())}  # at least experts + 1
    return {"EARLY": early, "num_warps": 4} | bins | more | ({"launch_pdl": True} if early else {})


def _few(tensors, experts):
    pairs = tensors[0].numel()
    meta = _meta(tensors, ITEMS=_ITEMS, LOOK=_LOOK)
    return Launch(_few_kernel, -(-(pairs + experts + 1) // _ITEMS), (pairs, experts), meta)


def _count(tensors, experts):
    pairs = tensors[0].numel()
    return Launch(_count_kernel, -(-pairs // _BLOCK), (pairs, experts), _meta(tensors, experts, BLOCK=_BLOCK))


def _sum(tensors):
    blocks, columns = tensors[0].shape
    meta = _meta(tensors, COLUMNS=_COLUMNS, ROWS=min(_ROWS, triton.next_power_of_2(blocks)))
    return Launch(_sum_kernel, -(-columns // _COLUMNS), (blocks, columns), meta)


def _place(tensors, experts):
    pairs = tensors[0].numel()
    meta = _meta(tensors, experts, BLOCK=_BLOCK, LOOK=32, num_warps=8)
    return Launch(_place_kernel, -(-pairs // _BLOCK), (pairs, experts), meta)


def order(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, offsets, places), int32: the first two as `problem.plan`, and the inverse of order.

    indices (tokens, top_k), int32 or int64; up to 4095 experts. No atomics, no host synchronisation.
    """
    indices = indices.contiguous()
    pairs = indices.numel()
    order, offsets, places = (indices.new_empty(n, dtype=torch.int32) for n in (pairs, experts + 1, pairs))
    if pairs <= FEW:
        tensors = (indices, order, offsets, places)
        remembered(_few, tensors, experts)(*tensors)
        return order, offsets, places
    counts = indices.new_empty(-(-pairs // _BLOCK), experts + 1, dtype=torch.int32)
    totals = indices.new_empty(experts + 1, dtype=torch.int32)
    tensors = (indices, counts, totals, order, offsets, places)
    remembered(_count, tensors[:2], experts)(*tensors[:2])
    remembered(_sum, tensors[1:3])(*tensors[1:3])
    remembered(_place, tensors, experts)(*tensors)
    return order, offsets, places


def _inverse(tensors):
    pairs = tensors[0].numel()
    return Launch(_inverse_kernel, -(-pairs // 1024), (pairs,), _meta(tensors, BLOCK=1024))


def places_of(order: torch.Tensor) -> torch.Tensor:
    """Where in `order` each pair is, int32."""
    places = torch.empty_like(order)
    remembered(_inverse, (order, places))(order, places)
    return places
