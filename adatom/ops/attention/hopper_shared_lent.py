"""What the Hopper backward under a shared bias borrows from its own results: dK and dV, which its last kernel stores.

Its tiles come in units: those of all keys of a few sharers of a slice of the bias. Lines of E, which they read (of lse
and delta, hopper_shared_bwd.py), lie in the order of units at the end of dK or dV; the last ones, whose place would be
stored before they are read, in memory of their own. Tiles are counted by stretches as they are read, and one waits,
before it is stored, for the stretches whose lines lie there: always earlier ones, so that nothing waits for itself.
What the kernels before work with lies ahead of those lines, and at the end of the other result.
"""

from bisect import bisect_left
from typing import NamedTuple

import torch

from adatom.ops.attention.hopper_sharers import sharing
from adatom.ops.attention.problem import empty
from adatom.ops.attention.triton_call import Call
from adatom.tiles.hopper import gl

STRETCHES = gl.constexpr(128)  # so many are counted, at the most
COLUMNS = 8  # of a line of E, 16 bits each


class Units(NamedTuple):
    """How the (batch, head) that share slices of a bias are divided: into `n` units of `sharers` each."""

    n: int
    groups: int  # of a slice's sharers
    sharers: int


class Lines(NamedTuple):
    """Where lines of E lie, and what a tile waits for before it is stored: of stretch s, that the first
    min(s, steep s - less) stretches are read."""

    result: int  # which of the results lends
    held: int  # (batch, head) whose lines lie there
    rest: int  # the others
    padded: int  # lines of each
    stretch: int  # units of one
    steep: int
    less: int


def units_of(call: Call, bias: torch.Tensor) -> Units:
    slices, shared = sharing(call, bias)
    sharers = 3 if -(-shared // 3) * 3 <= 1.1 * shared else 2
    groups = -(-shared // sharers)
    return Units(slices * groups, groups, sharers)


class Lent:
    """The memory of 16-bit results, (batch, heads, length, dim) without gaps: the ends of it."""

    def __init__(self, *results: torch.Tensor) -> None:
        self.results = results
        self.whole = [t.numel() for t in results]  # where what is taken ends
        self.free = list(self.whole)  # where it begins

    def take(self, n: int) -> torch.Tensor:
        """n float32 numbers, in new memory where no result has room for them."""
        i = max(range(len(self.free)), key=self.free.__getitem__)
        t = self.results[i]
        if 2 * n > self.free[i]:
            return empty((n,), t, torch.float32)
        self.free[i] -= 2 * n
        return t.as_strided((2 * n,), (1,), self.free[i]).view(torch.float32)

    def take_lines(self, lines: Lines) -> tuple[torch.Tensor, torch.Tensor]:
        """The lines of E that are lent, (1, n, padded, COLUMNS) in bfloat16, and the others. The first to be taken."""
        t = self.results[lines.result]
        rest = empty((1, lines.rest, lines.padded, COLUMNS), t, torch.bfloat16)
        if not lines.held:
            return rest, rest
        size = lines.padded * COLUMNS
        self.whole[lines.result] -= lines.held * size
        self.free[lines.result] = begin = self.whole[lines.result]
        shape, strides = (1, lines.held, lines.padded, COLUMNS), (lines.held * size, size, COLUMNS, 1)
        return t.as_strided(shape, strides, begin).view(torch.bfloat16), rest

    def rooms(self) -> list[int]:
        """How many float32 numbers lie together, in each."""
        return [n // 2 for n in self.free]

    def first(self, call: Call, bias: torch.Tensor, units: Units) -> int:
        """The first unit that is stored where something was taken, but for lines of E."""
        firsts = [units.n]
        for t, begin, end in zip(self.results, self.free, self.whole):
            if begin < end:
                there = (_stored_to(t, call, bias, units) > begin).nonzero()
                firsts += there[:1].flatten().tolist()
        return min(firsts)

    def plan_lines(self, call: Call, bias: torch.Tensor, units: Units, padded: int) -> Lines:
        """As many lines as can be lent; of each (batch, head) there are `padded`."""
        stretch = -(-units.n // STRETCHES.value)
        _, shared = sharing(call, bias)
        first = torch.arange(units.n, device="cpu") // bias.shape[1] % units.groups * units.sharers
        lines = (shared - first).clamp(max=units.sharers).split(stretch)
        starts = [0, *torch.stack([x.sum() for x in lines]).cumsum(0).tolist()]  # of stretches, in (batch, head)
        best = Lines(0, 0, starts[-1], padded, stretch, 0, 0)
        for i, t in enumerate(self.results):
            ends = [x.max().item() for x in _stored_to(t, call, bias, units).split(stretch)]
            for n in range(len(lines) - 1, 0, -1):
                begin = t.numel() - starts[n] * padded * COLUMNS
                if starts[n] <= best.held or begin < 0:
                    continue
                needs = [bisect_left(starts, (end - begin) / (padded * COLUMNS), 0, n) for end in ends]
                if any(need > s for s, need in enumerate(needs)):
                    continue
                best = Lines(i, starts[n], starts[-1] - starts[n], padded, stretch, *_line_above(needs))
                break
        return best


def _line_above(needs: list[int]) -> tuple[int, int]:
    """(steep, less): of those with min(s, steep s - less) >= needs[s] wherever needs[s] > 0, the least in all."""
    waits = [(s, need) for s, need in enumerate(needs) if need]
    lines = [(steep, min((steep * s - need for s, need in waits), default=0)) for steep in range(33)]
    return min(lines, key=lambda line: sum(max(0, min(s, line[0] * s - line[1])) for s in range(len(needs))))


def _stored_to(t: torch.Tensor, call: Call, bias: torch.Tensor, units: Units) -> torch.Tensor:
    """Where in t, of dK or dV, what each unit stores ends, in elements."""
    _, shared = sharing(call, bias)
    heads = bias.shape[1]
    unit = torch.arange(units.n, device="cpu")
    block = unit // heads
    first = block // units.groups * call.repeats * (call.heads if heads < call.heads else 1)
    ends = torch.zeros_like(unit)
    for c in range(units.sharers):
        r = first + (block % units.groups * units.sharers + c).clamp(max=shared - 1)
        b, h = (r // call.heads, r % call.heads) if heads < call.heads else (r, unit % heads)
        ends = torch.maximum(ends, b * t.stride(0) + h * t.stride(1))
    return ends + (t.shape[2] - 1) * t.stride(2) + t.shape[3]
