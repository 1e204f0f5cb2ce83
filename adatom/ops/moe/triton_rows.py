# mypy: ignore-errors
"""What products on Hopper need around them (Triton): rows of x for the pairs, tables of experts' rows, and sums."""

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous
from adatom.tiles.triton_dense import remembered


def _meta(x, **more):
    early = facts(x.device).arch >= 90
    return {"EARLY": early, "num_warps": 4} | more | ({"launch_pdl": True} if early else {})


@triton.jit
def _lines_kernel(Offsets, Lines, Taken, experts, EARLY: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
                  BLOCK: tl.constexpr):
    """The lines of one expert."""
    after_previous(EARLY)
    e = tl.program_id(0)
    i = tl.arange(0, BINS)
    counts = tl.load(Offsets + i + 1, mask=i < experts, other=0) - tl.load(Offsets + i, mask=i < experts, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    at = 1 + tl.sum(tl.where(i < e, tiles, 0), 0)
    if e == 0:
        tl.store(Lines, tl.sum(tiles, 0))
        tl.store(Taken + tl.arange(0, 16), tl.zeros([16], tl.int32))
    row = tl.load(Offsets + e)
    end = tl.load(Offsets + e + 1)
    for first in range(0, (end - row + ROWS - 1) // ROWS, BLOCK):
        m = first + tl.arange(0, BLOCK)
        line = Lines + 4 * (at + m)
        mask = row + m * ROWS < end
        tl.store(line, e, mask=mask)
        tl.store(line + 1, row + m * ROWS, mask=mask)
        tl.store(line + 2, tl.minimum(row + (m + 1) * ROWS, end), mask=mask)


def _lines_launch(tensors, rows: int) -> Launch:
    experts = tensors[0].shape[0] - 1
    meta = _meta(tensors[0], ROWS=rows, BINS=max(32, triton.next_power_of_2(experts)), BLOCK=128)
    return Launch(_lines_kernel, experts, (experts,), meta)


def lines(offsets: torch.Tensor, pairs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(1 + n, 4) int32: how many lines follow; then for each up to `rows` rows of an expert: the expert, the first row
    and the end. n is what there may be at most. And (4, 4) int32, zeros. offsets: (experts + 1,) int32."""
    experts = offsets.shape[0] - 1
    table, taken = offsets.new_empty(1 + pairs // rows + min(experts, pairs), 4), offsets.new_empty(4, 4)
    remembered(_lines_launch, (offsets, table, taken), rows)(offsets, table, taken)
    return table, taken


@triton.jit
def _spread_kernel(X, Places, Offsets, Out, experts, top_k, N, stride, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of a token, to each of its pairs that has an expert."""
    after_previous(EARLY)
    blocks = tl.cdiv(N, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + token * stride + j, mask=j < N)
    end = tl.load(Offsets + experts)
    for k in range(top_k):
        place = tl.load(Places + token * top_k + k).to(tl.int64)
        tl.store(Out + place * N + j, x, mask=(j < N) & (place < end))


def _spread_launch(tensors) -> Launch:
    x, places, offsets, _ = tensors
    (tokens, n), block = x.shape, min(1024, max(128, triton.next_power_of_2(x.shape[1])))
    scalars = (offsets.shape[0] - 1, places.shape[0] // tokens, n, x.stride(0))
    return Launch(_spread_kernel, tokens * triton.cdiv(n, block), scalars, _meta(x, BLOCK=block))


def spread(x: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The row of each pair's token of x (tokens, columns), in the order of the pairs, (pairs, columns); rows of dropped
    pairs are left as they are in memory. places (pairs,): of triton_order."""
    out = x.new_empty(places.shape[0], x.shape[1])
    remembered(_spread_launch, (x, places, offsets, out))(x, places, offsets, out)
    return out


@triton.jit
def _clear_kernel(X, Offsets, rows, experts, N, EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rows of X that belong to no expert."""
    after_previous(EARLY)
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
    meta = _meta(x, ROWS=16, BLOCK=256)
    return Launch(_clear_kernel, triton.cdiv(x.shape[0], 16), (x.shape[0], offsets.shape[0] - 1, x.shape[1]), meta)


def clear_dropped(x: torch.Tensor, offsets: torch.Tensor) -> None:
    """Zero the rows of dropped pairs in x (pairs, columns)."""
    remembered(_clear_launch, (x, offsets))(x, offsets)


@triton.jit
def _dots_kernel(Dots, Places, Offsets, Out, pairs, experts, EARLY: tl.constexpr, PARTS: tl.constexpr,
                 BLOCK: tl.constexpr):
    """Sums over the parts of Dots (PARTS, pairs), where each pair went; 0 of dropped ones."""
    after_previous(EARLY)
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
    meta = _meta(dots, PARTS=parts, BLOCK=256)
    return Launch(_dots_kernel, triton.cdiv(pairs, 256), (pairs, offsets.shape[0] - 1), meta)


def at_places(dots: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """dots (parts, pairs) in the order of the pairs, float32, summed over parts: as `like`, 0 for dropped pairs."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    remembered(_dots_launch, (dots, places, offsets, out))(dots, places, offsets, out)
    return out
