"""Products of ragged groups of rows with a matrix each, by PyTorch and without host synchronisation.

Three ways. "loop": each group by itself; on a CPU, where its bounds are at hand. "grouped_mm": PyTorch's grouped
kernel; bfloat16 on sm_90: for other dtypes it reads the bounds on the host, and on sm_100 it has left gradients of
empty groups unwritten (pytorch#172439). "blocks": everywhere else, and in forward mode, since it writes nothing in
place; groups are cut into blocks of equal length, the last of each padded with zeros, and each block is multiplied with
a copy of its group's matrix. There are at most twice as many blocks as groups, so this costs at most twice the
products.
"""

from __future__ import annotations

import torch

from adatom.device import facts
from adatom.ops.moe.problem import Tensor, aligned

_COPIES = 2**28  # bytes of matrices copied at once


def way(*tensors: Tensor) -> str:
    """How these are best multiplied: rows (rows, columns), and rows or matrices (groups, rows, columns)."""
    here = facts(tensors[0].device)
    if here.kind != "cuda":
        return "loop"
    eights = all(n % 8 == 0 for t in tensors for n in t.shape[1:])  # or rows of the result would lie apart
    suits = here.arch == 90 and tensors[0].dtype == torch.bfloat16 and eights
    return "grouped_mm" if suits and aligned(*(_rows_contiguous(t) for t in tensors)) else "blocks"


def _rows_contiguous(t: Tensor) -> Tensor:
    """A matrix stored by columns as the one stored by rows."""
    return t.mT if t.stride(-1) != 1 and t.stride(-2) == 1 else t


def grouped(x: Tensor, weight: Tensor, offsets: Tensor, how: str | None = None) -> Tensor:
    """x[p] weight[e]^T for the rows p from offsets[e] to offsets[e + 1]; 0 for the rows after those.

    x (rows, in), weight (groups, out, in), offsets (groups + 1,) int32. Returns (rows, out).
    """
    rows, out = x.shape[0], weight.shape[1]
    if not (rows and out and x.shape[1] and weight.shape[0]):
        return x.new_zeros(rows, out)
    how = way(x, weight) if how is None else how
    if how == "grouped_mm":
        y = torch._grouped_mm(x, weight.mT, offs=offsets[1:])
        return y.masked_fill_((torch.arange(rows, device=x.device) >= offsets[-1])[:, None], 0)
    if how == "loop":
        y, bounds = x.new_zeros(rows, out), offsets.tolist()
        for matrix, start, end in zip(weight, bounds, bounds[1:]):
            if end > start:
                torch.mm(x[start:end], matrix.mT, out=y[start:end])
        return y
    blocks = _Blocks(rows, offsets)
    cut, step = blocks.cut(x), max(1, _COPIES // (weight[0].numel() * weight.element_size()))
    parts = [
        torch.bmm(cut[i : i + step], weight.index_select(0, blocks.group[i : i + step]).mT).flatten(0, 1)
        for i in range(0, blocks.count, step)
    ]
    return torch.cat((*parts, x.new_zeros(1, out))).index_select(0, blocks.slot)


def outer(a: Tensor, b: Tensor, offsets: Tensor, how: str | None = None) -> Tensor:
    """The sum of a[p] b[p]^T over the rows p of each group. a (rows, m), b (rows, n); returns (groups, m, n)."""
    groups, rows = offsets.shape[0] - 1, a.shape[0]
    shape = (groups, a.shape[1], b.shape[1])
    if not (rows and groups and shape[1] and shape[2]):
        return a.new_zeros(shape)
    how = way(a, b) if how is None else how
    if how == "grouped_mm":
        return torch._grouped_mm(a.mT, b, offs=offsets[1:])
    if how == "loop":
        sums, bounds = a.new_zeros(shape), offsets.tolist()
        for into, start, end in zip(sums, bounds, bounds[1:]):
            if end > start:
                torch.mm(a[start:end].mT, b[start:end], out=into)
        return sums
    blocks = _Blocks(rows, offsets)
    a, b = blocks.cut(a), blocks.cut(b)
    wide = a.new_zeros(shape, dtype=torch.promote_types(a.dtype, torch.float32))
    for i in range(blocks.count):  # one after the other: several of one group must add in the same order each time
        wide.index_add_(0, blocks.group[i : i + 1], torch.mm(a[i].mT, b[i]).to(wide.dtype)[None])
    return wide.to(a.dtype)


class _Blocks:
    """Groups cut into `count` blocks of `length` rows: group (count,) of each, slot (rows,) of each row among their
    rows; rows of no group share a slot behind the last block."""

    def __init__(self, rows: int, offsets: Tensor) -> None:
        groups, device = offsets.shape[0] - 1, offsets.device
        self.length = -(-rows // groups)
        full = min(groups, rows)  # groups that can have rows
        self.count = (rows + full * (self.length - 1)) // self.length
        offsets = offsets.long()
        blocks = (offsets.diff() + self.length - 1) // self.length
        first = torch.cat((offsets.new_zeros(1), blocks.cumsum(0)))  # out= is lost by torch.func.linearize
        block = torch.searchsorted(first[1:], torch.arange(self.count, device=device), right=True)
        self.group = block.clamp(max=groups - 1)  # blocks that hold nothing
        row = torch.arange(rows, device=device)
        of = torch.searchsorted(offsets[1:], row, right=True)
        slot = first.index_select(0, of) * self.length + row - offsets.index_select(0, of)
        self.slot = torch.where(of < groups, slot, self.count * self.length)

    def cut(self, x: Tensor) -> Tensor:
        """The rows of x as (count, length, columns)."""
        padded = x.new_zeros(self.count * self.length + 1, x.shape[1]).index_copy(0, self.slot, x)
        return padded[:-1].view(self.count, self.length, x.shape[1])
