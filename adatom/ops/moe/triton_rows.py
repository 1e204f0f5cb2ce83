# mypy: ignore-errors
"""What products on Hopper need ahead of them (Triton): the rows of x for the pairs, and a table of the experts' tiles."""

import torch
import triton
import triton.language as tl

from adatom.tiles.launch import Launch
from adatom.tiles.triton_dense import remembered


@triton.jit
def _lines_kernel(Offsets, Lines, experts, ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """The lines of one expert."""
    e = tl.program_id(0)
    i = tl.arange(0, BINS)
    counts = tl.load(Offsets + i + 1, mask=i < experts, other=0) - tl.load(Offsets + i, mask=i < experts, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    at = 1 + tl.sum(tl.where(i < e, tiles, 0), 0)
    if e == 0:
        tl.store(Lines, tl.sum(tiles, 0))
    row = tl.load(Offsets + e)
    end = tl.load(Offsets + e + 1)
    for first in range(0, (end - row + ROWS - 1) // ROWS, BLOCK):
        m = first + tl.arange(0, BLOCK)
        line = Lines + 4 * (at + m)
        mask = row + m * ROWS < end
        tl.store(line, e, mask=mask)
        tl.store(line + 1, row + m * ROWS, mask=mask)
        tl.store(line + 2, end, mask=mask)


def _lines_launch(tensors, rows: int) -> Launch:
    experts = tensors[0].shape[0] - 1
    meta = dict(ROWS=rows, BINS=max(32, triton.next_power_of_2(experts)), BLOCK=128, num_warps=4)
    return Launch(_lines_kernel, experts, (experts,), meta)


def lines(offsets: torch.Tensor, pairs: int, rows: int) -> torch.Tensor:
    """(1 + n, 4) int32: how many lines follow; each is a tile of up to `rows` rows: expert, first row, end of the
    expert's rows. n is what there may be at most. offsets: (experts + 1,) int32."""
    experts = offsets.shape[0] - 1
    table = offsets.new_empty(1 + pairs // rows + min(experts, pairs), 4)
    remembered(_lines_launch, (offsets, table), rows)(offsets, table)
    return table


@triton.jit
def _gather_kernel(X, Order, Offsets, Out, pairs, experts, top_k, N, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of X for pairs that have an expert."""
    blocks = tl.cdiv(N, BLOCK)
    i = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.load(Offsets + experts)
    row = tl.load(Order + i, mask=mask, other=0) // top_k
    m = mask[:, None] & (j < N)[None, :]
    x = tl.load(X + row.to(tl.int64)[:, None] * stride + j[None, :], mask=m)
    tl.store(Out + i.to(tl.int64)[:, None] * N + j[None, :], x, mask=m)


_ROWS, _BLOCK = 4, 1024


def _gather_launch(tensors, top_k: int) -> Launch:
    x, order, offsets, out = tensors
    (pairs, n), block = out.shape, min(_BLOCK, triton.next_power_of_2(x.shape[1]))
    scalars = (pairs, offsets.shape[0] - 1, top_k, n, x.stride(0))
    meta = dict(ROWS=_ROWS, BLOCK=block, num_warps=4)
    return Launch(_gather_kernel, triton.cdiv(pairs, _ROWS) * triton.cdiv(n, block), scalars, meta)


def gather(x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, top_k: int) -> torch.Tensor:
    """The rows of x (tokens, columns) of each pair's token, (pairs, columns), in the order of the pairs; rows of dropped
    pairs are left as they are in memory."""
    out = x.new_empty(order.shape[0], x.shape[1])
    remembered(_gather_launch, (x, order, offsets, out), top_k)(x, order, offsets, out)
    return out


@triton.jit
def _clear_kernel(X, Offsets, rows, experts, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rows of X that belong to no expert."""
    first = tl.program_id(0) * ROWS
    if first + ROWS > tl.load(Offsets + experts):
        i = first + tl.arange(0, ROWS)
        mask = (i >= tl.load(Offsets + experts)) & (i < rows)
        for j0 in range(0, N, BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            zero = tl.zeros([ROWS, BLOCK], X.dtype.element_ty)
            tl.store(X + i.to(tl.int64)[:, None] * N + j[None, :], zero, mask=mask[:, None] & (j < N)[None, :])


def _clear_launch(tensors) -> Launch:
    x, offsets = tensors
    meta = dict(ROWS=16, BLOCK=256, num_warps=4)
    return Launch(_clear_kernel, triton.cdiv(x.shape[0], 16), (x.shape[0], offsets.shape[0] - 1, x.shape[1]), meta)


def clear_dropped(x: torch.Tensor, offsets: torch.Tensor) -> None:
    """Zero the rows of dropped pairs in x (pairs, columns)."""
    remembered(_clear_launch, (x, offsets))(x, offsets)


@triton.jit
def _dots_kernel(Dots, Places, Offsets, Out, pairs, experts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the parts of Dots (PARTS, pairs), where each pair went; 0 of dropped ones."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(Places + p, mask=p < pairs, other=pairs)
    mask = place < tl.load(Offsets + experts)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(Dots + part * tl.cast(pairs, tl.int64) + place, mask=mask, other=0.0)
    tl.store(Out + p, total.to(Out.dtype.element_ty), mask=p < pairs)


def _dots_launch(tensors) -> Launch:
    dots, _, offsets, _ = tensors
    parts, pairs = dots.shape
    meta = dict(PARTS=parts, BLOCK=256, num_warps=4)
    return Launch(_dots_kernel, triton.cdiv(pairs, 256), (pairs, offsets.shape[0] - 1), meta)


def at_places(dots: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """dots (parts, pairs) in the order of the pairs, float32, summed over parts: as `like`, 0 for dropped pairs."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    remembered(_dots_launch, (dots, places, offsets, out))(dots, places, offsets, out)
    return out
