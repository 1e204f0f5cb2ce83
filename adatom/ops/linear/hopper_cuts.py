# mypy: ignore-errors
"""How the tiles of a large product are divided among programs so that all end at the same time.

A product of T tiles gives each of P programs T // P of them, whole, in runs below each other. What is left, less than a
tile each, is a line of tiles times k that the programs divide evenly: most tiles of it are cut along k. Who holds the
end of a tile owns it: it adds what the others write for it, in the order of k, so the result is the same on every run.

A program waits only for programs before it, and writes what others wait for before it waits itself. So nobody waits in
a circle, and nobody for a program that has not begun, whatever else runs on the GPU.
"""

import itertools
from typing import NamedTuple

import torch

from adatom.tiles.hopper import gl, gluon
from adatom.tiles.hopper_gemm import acc_layout, split_columns

MOST = 8  # programs that divide one tile
SHORT = 4  # tiles of k: no piece is shorter
SLOT = 2 * 64 * 256  # elements of a slot: a tile's sum
MEND = 14  # tiles of k that a program could multiply while it writes or adds a piece, and begins a run


class Line(NamedTuple):
    """A run of `count` tiles, `step` rows from one to the next, over tiles begin..end of k.

    others: -1, the sum is written to `slot`; else so many sums, from `slot` on, are added to it. row, column: elements.
    """

    row: int
    step: int
    count: int
    column: int
    begin: int
    end: int
    slot: int = 0
    others: int = 0


class Tile(NamedTuple):
    strip: int
    row: int


def divide(
    tiles: tuple[int, int], tile: tuple[int, int], k_tiles: int, programs: int, group: int, longest: int
) -> tuple[list[list[Line]], int] | None:
    """The lines of each program, and the number of slots, for tiles[0] x tiles[1] tiles of tile[0] x tile[1] elements;
    None where that would not be faster than whole tiles. group, longest: as in `hopper_linear.Config`.
    """
    total = tiles[0] * tiles[1]
    share, rest = divmod(total, programs)
    workers = min(programs, rest * MOST)
    if share == 0 or rest == 0 or k_tiles * (1 - rest / workers) < MEND + 0.005 * total / programs * k_tiles:
        return None
    length = min(
        (n for n in range(1, min(longest, share) + 1) if tiles[0] // n * tiles[1] >= share // n * programs),
        key=lambda n: (-(-share // n), -(share % n or n)),  # few runs, none of them short
    )
    rounds, more = divmod(share, length)
    whole = _runs(tiles, length, group)

    def line(run: list[Tile]) -> Line:
        step = (run[1].row - run[0].row) * tile[0] if len(run) > 1 else tile[0]
        return Line(run[0].row * tile[0], step, len(run), run[0].strip * tile[1], 0, k_tiles)

    lines = [[line(whole[r * programs + p]) for r in range(rounds)] for p in range(programs)]
    shares, left = _shares(tiles, whole[: rounds * programs], whole[rounds * programs :], more, programs)
    for mine, runs in zip(lines, shares):
        mine += [line(run) for run in runs]
    busy = sorted(range(programs), key=lambda p: (len(lines[p]), p))[:workers]
    slots = _cut(lines, sorted(busy), left, tile, k_tiles)
    return lines, slots


def _runs(tiles: tuple[int, int], length: int, group: int) -> list[list[Tile]]:
    """All whole runs of that length, as the kernel's raster orders them."""
    rows = tiles[0] // length
    out = []
    for first in range(0, rows, group):
        for strip in range(tiles[1]):
            for r in range(first, min(first + group, rows)):
                out.append([Tile(strip, r * length + i) for i in range(length)])
    return out


def _shares(
    tiles: tuple[int, int], taken: list[list[Tile]], order: list[list[Tile]], more: int, programs: int
) -> tuple[list[list[list[Tile]]], list[Tile]]:
    """`more` tiles for each program, in few runs, of those that nobody has taken; and the tiles left then.

    order: runs that hold most of them, those to be taken first ahead.
    """
    gone = {t for run in taken for t in run}
    pool = [t for run in order for t in run]
    seen = gone | set(pool)
    pool += [t for s in range(tiles[1]) for r in range(tiles[0]) if (t := Tile(s, r)) not in seen]
    if not more:
        return [[] for _ in range(programs)], pool
    shares: list[list[list[Tile]]] = []
    rest: list[Tile] = []
    for piece in _straight(pool):
        at = 0
        while len(shares) < programs and len(piece) - at >= more:
            shares.append([piece[at : at + more]])
            at += more
        rest += piece[at:]
    by_strip: dict[int, list[Tile]] = {}
    for t in rest:
        by_strip.setdefault(t.strip, []).append(t)
    loose = []
    for strip in by_strip.values():
        while len(shares) < programs and len(strip) >= more:
            shares.append(_straight(strip[:more]))
            strip = strip[more:]
        loose += strip
    while len(shares) < programs:
        shares.append(_straight(loose[:more]))
        loose = loose[more:]
    return shares, loose


def _straight(tiles: list[Tile]) -> list[list[Tile]]:
    """Tiles as runs: of one strip, downwards, by equal steps."""
    runs: list[list[Tile]] = []
    for t in tiles:
        if runs:
            run = runs[-1]
            step = t.row - run[-1].row
            if t.strip == run[-1].strip and step > 0 and (len(run) == 1 or step == run[1].row - run[0].row):
                run.append(t)
                continue
        runs.append([t])
    return runs


def _cut(lines: list[list[Line]], workers: list[int], left: list[Tile], tile: tuple[int, int], k_tiles: int) -> int:
    """Add to the lines of the workers, ascending, their parts of the tiles left; returns the number of slots."""
    bounds = []
    for i in range(len(workers) + 1):
        at = i * len(left) * k_tiles // len(workers)
        inside = at % k_tiles
        if inside < SHORT:
            at -= inside
        elif k_tiles - inside < SHORT:
            at += k_tiles - inside
        bounds.append(at)
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in left]  # (worker, begin, end) of each tile
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        while begin < end:
            n = begin // k_tiles
            stop = min(end, (n + 1) * k_tiles)
            pieces[n].append((i, begin - n * k_tiles, stop - n * k_tiles))
            begin = stop
    slot = 0
    given: list[list[Line]] = [[] for _ in workers]
    owned: list[list[Line]] = [[] for _ in workers]
    for t, parts in zip(left, pieces):
        *others, (owner, begin, end) = parts
        at = (t.row * tile[0], tile[0], 1, t.strip * tile[1])
        for n, (i, b, e) in enumerate(others):
            given[i].append(Line(*at, b, e, slot + n, -1))
        owned[owner].append(Line(*at, begin, end, slot, len(others)))
        slot += len(others)
    for i, p in enumerate(workers):
        lines[p] += given[i] + owned[i]
    return slot


_tables: dict[tuple, tuple[torch.Tensor, int] | None] = {}


def table_of(
    a: torch.Tensor, tiles: tuple[int, int], tile: tuple[int, int], k_tiles: int, programs: int, group: int,
    longest: int,
) -> tuple[torch.Tensor, int] | None:
    """What `divide` returns as the table that a kernel reads, on a's device, and the number of slots; or None.

    The table: all lines, then the number of each program's first and of one more.
    """
    stream = torch.cuda.current_stream(a.device).cuda_stream if a.is_cuda else 0  # its copy is ordered on one
    key = *tiles, *tile, k_tiles, programs, group, longest, a.device, stream
    if key not in _tables:
        if a.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a copy from here is not to be captured
        if len(_tables) >= 1024:
            _tables.clear()
        found = divide(tiles, tile, k_tiles, programs, group, longest)
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
def with_others(z, Work, slot, others, first, C: gl.constexpr, PLAN: gl.constexpr):
    """A piece of a sum, and what other programs wrote for it."""
    if PLAN.CUT:
        for s in range(slot, slot + others):
            z += gl.load(_places(Work, s, first, C, PLAN))
    return z
