# mypy: ignore-errors
"""Normalisation backward for long rows in Triton: a row is shared out among programs that run at the same time.

The sums over rows of a long row's columns do not fit in one program. Here a program owns some columns: it keeps their
weights, and sums their gradients in registers. What it lacks are the two means over the whole row, so each program of
a team sums over its own columns, leaves both sums in memory as one word, a note, and collects those of the others
two rows later, by when they are there. Rows are read from memory once: the second reading is from the L1 cache.

Nobody waits for ever. Programs draw their places in the order in which they begin, team by team, and a team waits for
nobody but itself. So of all programs that run only those of the last team can lack somebody, and the others, which end,
make room for him. Any GPU on which a team fits finishes, whatever order programs are started in.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from adatom.ops.norm.triton_rows import offset_of, prefetch
from adatom.tiles.triton import after_previous


class Share(NamedTuple):
    """What a program has of a row, its warps, how many programs share a multiprocessor, how many rows later it collects
    the notes of a row, and how many rows ahead of that it brings rows into the L2 cache."""

    columns: int
    num_warps: int
    per_sm: int
    later: int = 2
    ahead: int = 1


SHARES = {2: Share(8192, 16, 1), 4: Share(4096, 16, 1)}  # by the bytes of an element
LARGEST = 16  # programs of a team


@triton.jit
def _both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _load(at, m):
    return tl.load(at, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _leave(H, DY, w, Mean, Rstd, at_note, row, rows, j, m_j, h0, h1, h2, y0, y1, y2, n1, n2,
           DIMS: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr):
    """Leave the note of a row: the sums over these columns of u w dy and w dy, one word that is not 0. The row may be
    beyond the last."""
    exists = row < rows
    i = tl.minimum(row, rows - 1)
    m = m_j & exists
    u = _load(H + offset_of(i, n1, n2, h0, h1, h2, DIMS) + j, m)
    g = _load(DY + offset_of(i, n1, n2, y0, y1, y2, DIMS) + j, m)
    if CENTRED:
        u -= tl.load(Mean + i)
    u *= tl.load(Rstd + i)
    if WEIGHT:
        g *= w.to(tl.float32)
    if CENTRED:
        ug, g = tl.reduce((u * g, g), 0, _both)
    else:
        ug = tl.sum(u * g, 0)
        g = ug
    note = tl.cast(tl.cast(ug, tl.int32, bitcast=True), tl.int64) << 32
    note |= tl.cast(tl.cast(g, tl.int32, bitcast=True), tl.int64) & 0xFFFFFFFF | 1
    tl.atomic_xchg(at_note, note, mask=exists, sem="relaxed")


@triton.jit
def _read(at, TEAM: tl.constexpr):
    notes = ()
    for p in tl.static_range(TEAM):
        notes += (tl.load(at + p, volatile=True),)
    return notes


@triton.jit
def _sums(notes, at, TEAM: tl.constexpr):
    """Both sums over the row: the notes of the whole team in order, waited for where they were not there."""
    ug = 0.0
    g = 0.0
    for p in tl.static_range(TEAM):
        note = notes[p]
        while note == 0:
            note = tl.load(at + p, volatile=True)
        ug += tl.cast(tl.cast(note >> 32, tl.int32), tl.float32, bitcast=True)
        g += tl.cast(tl.cast(note, tl.int32), tl.float32, bitcast=True)
    return ug, g


@triton.jit(do_not_specialize=["n1", "n2", "rows", "teams"])
def apart_kernel(H, Weight, Mean, Rstd, DY, DH, DX, SumsW, SumsB, Notes, h0, h1, h2, y0, y1, y2, d0, d1, d2, n1, n2,
                 rows, length, teams,
                 DIMS: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, HAS_DH: tl.constexpr,
                 DW: tl.constexpr, DB: tl.constexpr, EVEN_N: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
                 TEAM: tl.constexpr, LATER: tl.constexpr, FAR: tl.constexpr, BLOCK_N: tl.constexpr):
    """dx, and the sums over the rows of each team. Notes: TEAM for each row and the places drawn, all 0."""
    after_previous(EARLY)
    place = tl.cast(tl.atomic_add(Notes + tl.cast(rows, tl.int64) * TEAM, 1, sem="relaxed"), tl.int32)
    team = place // TEAM
    part = place % TEAM
    first = part * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    m_j = j < length if not EVEN_N else j >= 0
    w = tl.load(Weight + j, mask=m_j, other=0.0) if WEIGHT else 0.0
    sum_w = tl.zeros((BLOCK_N if DW else 1,), tl.float32)
    sum_b = tl.zeros((BLOCK_N if DB else 1,), tl.float32)
    row = tl.cast(team, tl.int64)
    for _ in tl.static_range(LATER):
        _leave(H, DY, w, Mean, Rstd, Notes + row * TEAM + part, row, rows, j, m_j, h0, h1, h2, y0, y1, y2, n1, n2,
               DIMS, CENTRED, WEIGHT)
        row += teams
    for later in range(row, rows + LATER * teams, teams):
        i = later - LATER * teams
        at = Notes + i * TEAM
        notes = _read(at, TEAM)
        if AHEAD:
            if later + FAR * teams < rows:
                size = tl.minimum(length - first, BLOCK_N) * AHEAD
                prefetch(H + offset_of(later + FAR * teams, n1, n2, h0, h1, h2, DIMS) + first, size)
                prefetch(DY + offset_of(later + FAR * teams, n1, n2, y0, y1, y2, DIMS) + first, size)
        _leave(H, DY, w, Mean, Rstd, Notes + later * TEAM + part, later, rows, j, m_j, h0, h1, h2, y0, y1, y2, n1, n2,
               DIMS, CENTRED, WEIGHT)
        u = _load(H + offset_of(i, n1, n2, h0, h1, h2, DIMS) + j, m_j)
        dy = _load(DY + offset_of(i, n1, n2, y0, y1, y2, DIMS) + j, m_j)
        rstd = tl.load(Rstd + i)
        if CENTRED:
            u -= tl.load(Mean + i)
        u *= rstd
        if DW:
            sum_w += dy * u
        if DB:
            sum_b += dy
        if WEIGHT:
            dy *= w.to(tl.float32)
        ug, g = _sums(notes, at, TEAM)
        dx = dy - u * (ug / length)
        if CENTRED:
            dx -= g / length
        dx *= rstd
        if HAS_DH:
            dx += _load(DH + offset_of(i, n1, n2, d0, d1, d2, DIMS) + j, m_j)
        tl.store(DX + i * length + j, dx.to(DX.dtype.element_ty), mask=m_j)
    at = tl.cast(team, tl.int64) * length
    if DW:
        tl.store(SumsW + at + j, sum_w, mask=m_j)
    if DB:
        tl.store(SumsB + at + j, sum_b, mask=m_j)
