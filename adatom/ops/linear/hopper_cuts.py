# mypy: ignore-errors
"""How a large product is divided among programs so that all end at about the same time (Gluon, and its plan).

Whole runs of tiles are seldom a multiple of the programs: in the last round some have none. Those help the others: of
the last tile of each run they multiply the first `cut` tiles of k, and write the sum for the owner of the tile to add.
All owners go through the same k at the same time, as before, which keeps what they share in L2; helpers go through few
tiles of k, again and again. Each tile has two parts at most, so its bits are the same on every run.

Helpers come before owners and wait for nobody. So an owner never waits for a program that has not begun, whatever else
runs on the GPU.
"""

import itertools
from typing import NamedTuple

import torch

from adatom.tiles.hopper import gl, gluon
from adatom.tiles.hopper_gemm import acc_layout, split_columns

SLOT = 2 * 64 * 256  # elements of a slot: a tile's sum
WRITE, MEND = 3, 12  # tiles of k that a program could multiply while it writes a sum; adds one, and is launched later


class Line(NamedTuple):
    """A run of `count` tiles, `step` rows from one to the next, over tiles 0..length of k; its last tile without the
    first `cut` of them.

    others: 1, to the sum of the last tile `slot` is added; -1, the sums are written to slots, from `slot` on; else 0.
    row, column: elements.
    """

    row: int
    step: int
    count: int
    column: int
    length: int
    cut: int = 0
    slot: int = 0
    others: int = 0


def divide(
    tiles: tuple[int, int], tile: tuple[int, int], k_tiles: int, programs: int, group: int, run: int, most: int
) -> tuple[list[list[Line]], int] | None:
    """The lines of each program, and the number of slots, for tiles[0] x tiles[1] tiles of tile[0] x tile[1] elements;
    None where that would not be faster than whole runs. group, run: as in `hopper_linear`; most: tiles of k that a last
    tile can leave out.
    """
    rounds, owners = divmod(tiles[0] // run * tiles[1], programs)
    helpers = programs - owners
    if tiles[0] % run or not owners or run < 2:
        return None
    each = -(-owners // helpers)  # tiles of a helper
    cut = min(most, (run * k_tiles - each * WRITE) // (each + 1))
    if cut < MEND + 0.004 * (rounds + 1) * run * k_tiles:
        return None
    runs = _runs(tiles, run, group)

    def line(r: int, **rest: int) -> Line:
        strip, row = runs[r]
        return Line(row * tile[0], tile[0], run, strip * tile[1], k_tiles, **rest)

    lines = [[line(r * programs + p) for r in range(rounds)] for p in range(programs)]
    first = rounds * programs
    for i in range(owners):
        lines[helpers + i].append(line(first + i, cut=cut, slot=i, others=1))
    for p in range(helpers):
        begin, end = (at * owners // helpers for at in (p, p + 1))
        lasts = [(strip, row + run - 1) for strip, row in runs[first + begin : first + end]]
        for at, some in _straight(lasts):
            step = some[1][1] - some[0][1] if len(some) > 1 else 1
            strip, row = some[0]
            lines[p].append(
                Line(row * tile[0], step * tile[0], len(some), strip * tile[1], cut, 0, begin + at, -1)
            )  # fmt: skip
    return lines, owners


def _runs(tiles: tuple[int, int], length: int, group: int) -> list[tuple[int, int]]:
    """(strip, first row) of all runs of that many tiles, as the kernel's raster orders them."""
    rows = tiles[0] // length
    out = []
    for first in range(0, rows, group):
        for strip in range(tiles[1]):
            out += [(strip, r * length) for r in range(first, min(first + group, rows))]
    return out


def _straight(tiles: list[tuple[int, int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Tiles (strip, row) as runs of one strip, downwards by equal steps; each with the number of its first tile."""
    runs: list[tuple[int, list[tuple[int, int]]]] = []
    for i, (strip, row) in enumerate(tiles):
        if runs:
            run = runs[-1][1]
            step = row - run[-1][1]
            if strip == run[-1][0] and step > 0 and (len(run) == 1 or step == run[1][1] - run[0][1]):
                run.append((strip, row))
                continue
        runs.append((i, [(strip, row)]))
    return runs


_tables: dict[tuple, tuple[torch.Tensor, int] | None] = {}


def table_of(
    a: torch.Tensor, tiles: tuple[int, int], tile: tuple[int, int], k_tiles: int, programs: int, group: int, run: int,
    most: int,
) -> tuple[torch.Tensor, int] | None:
    """What `divide` returns as the table that a kernel reads, on a's device, and the number of slots; or None.

    The table: all lines, then the number of each program's first and of one more.
    """
    stream = torch.cuda.current_stream(a.device).cuda_stream if a.is_cuda else 0  # its copy is ordered on one
    key = *tiles, *tile, k_tiles, programs, group, run, most, a.device, stream
    if key not in _tables:
        if a.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a copy from here is not to be captured
        if len(_tables) >= 1024:
            _tables.clear()
        found = divide(tiles, tile, k_tiles, programs, group, run, most)
        if found is not None:
            lines, slots = found
            numbers = [number for mine in lines for line in mine for number in line]
            starts = [0, *itertools.accumulate(map(len, lines))]
            table = torch.tensor(numbers + starts, dtype=torch.int32)
            table = table.pin_memory().to(a.device, non_blocking=True) if a.is_cuda else table
            found = table, slots
        _tables[key] = found
    return _tables[key]


# -- on the GPU --------------------------------------------------------------------------------------------------------


@gluon.jit
def _places(Work, slot, first, C: gl.constexpr, PLAN: gl.constexpr):
    """Where columns first.. first + PIECE of a sum of consumer C lie in a slot."""
    LAYOUT: gl.constexpr = acc_layout(PLAN.PIECE)
    i = gl.arange(0, PLAN.BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, PLAN.PIECE, layout=gl.SliceLayout(0, LAYOUT))
    base = Work + (2 * slot + C) * (PLAN.BLOCK_M * PLAN.BLOCK_N) + first
    return base + (i[:, None] * PLAN.BLOCK_N + j[None, :])


@gluon.jit
def give(acc, Work, Flags, slot, C: gl.constexpr, PLAN: gl.constexpr):
    """Write a sum to a slot, for another program to add."""
    PIECES: gl.constexpr = PLAN.BLOCK_N // PLAN.PIECE
    parts = split_columns(acc, PIECES)
    for p in gl.static_range(PIECES):
        gl.store(_places(Work, slot, p * PLAN.PIECE, C, PLAN), parts[p])
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.barrier()
    gl.inline_asm_elementwise("st.release.gpu.global.s32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [Flags + 2 * slot + C, 1],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def with_rest(z, Work, slot, mended, first, C: gl.constexpr, PLAN: gl.constexpr):
    """A piece of a sum with what another program wrote for it, if it did."""
    if PLAN.CUT:
        if mended:
            z += gl.load(_places(Work, slot, first, C, PLAN))
    return z
