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

from adatom.ops.norm.triton_rows import offset_of
from adatom.tiles.triton import after_previous


class Share(NamedTuple):
    """What a program has of a row at most, its warps, how many programs share a multiprocessor, and how many rows are
    on their way at once."""

    columns: int
    num_warps: int
    per_sm: int
    num_stages: int


SHARES = {2: (Share(8192, 8, 1, 4), Share(4096, 4, 2, 3)), 4: (Share(4096, 8, 1, 5),)}  # by the bytes of an element
LARGEST = 16  # programs of a team
SPILL = 1024  # where columns do not come eight at a time
_READ = tl.constexpr("ld.relaxed.gpu.global.b64 $0, [$1];")
_WAIT = tl.constexpr("""{
.reg .pred missing;
mov.b64 $0, $1;
again: setp.eq.s64 missing, $0, 0;
@missing ld.relaxed.gpu.global.b64 $0, [$2];
@missing bra again;
}""")


def share_of(size: int, length: int, sms: int) -> Share | None:
    """How rows of so many elements of `size` bytes are shared out: the first of what leaves fewest columns idle. None
    where no team fits on so many multiprocessors; 0 is the interpreter, which runs one program at a time."""
    found = [s for s in SHARES[size] if -(-length // s.columns) <= min(LARGEST, max(1, s.per_sm * sms))]
    return min(found, key=lambda s: -length % s.columns, default=None)


@triton.jit
def _both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _leave(h, dy, w, mean, rstd, at, exists, CENTRED: tl.constexpr, WEIGHT: tl.constexpr):
    """Leave the note of a row, if there is one: the sums over these columns of u w dy and w dy as a word that is not 0.
    """
    u = h.to(tl.float32)
    g = dy.to(tl.float32)
    if CENTRED:
        u -= mean
    if WEIGHT:
        g *= w.to(tl.float32)
    if CENTRED:
        ug, g = tl.reduce((u * g, g), 0, _both)
    else:
        ug = tl.sum(u * g, 0)
        g = ug
    note = tl.cast(tl.cast(ug * rstd, tl.int32, bitcast=True), tl.int64) << 32
    note |= tl.cast(tl.cast(g, tl.int32, bitcast=True), tl.int64) & 0xFFFFFFFF | 1
    tl.atomic_xchg(at, note, mask=exists, sem="relaxed")


@triton.jit
def _read(at, TEAM: tl.constexpr, SPIN: tl.constexpr):
    """The notes of a row as they are now, some not there yet."""
    notes = ()
    for p in tl.static_range(TEAM):
        if SPIN:  # not tl.load, which would be sent ahead with the rows, long before there is a note
            notes += (tl.inline_asm_elementwise(_READ, "=l,l", [at + p], dtype=tl.int64, is_pure=False, pack=1),)
        else:
            notes += (tl.load(at + p, volatile=True),)
    return notes


@triton.jit
def _sums(notes, at, TEAM: tl.constexpr, SPIN: tl.constexpr):
    """Both sums over the row: the notes of the whole team in order, waited for where they were not there."""
    ug = 0.0
    g = 0.0
    for p in tl.static_range(TEAM):
        note = notes[p]
        if SPIN:  # a loop of Triton's would keep rows from being sent ahead
            note = tl.inline_asm_elementwise(_WAIT, "=&l,l,l", [note, at + p], dtype=tl.int64, is_pure=False, pack=1)
        ug += tl.cast(tl.cast(note >> 32, tl.int32), tl.float32, bitcast=True)
        g += tl.cast(tl.cast(note, tl.int32), tl.float32, bitcast=True)
    return ug, g


@triton.jit(do_not_specialize=["n1", "n2", "rows", "teams"])
def apart_kernel(H, Weight, Mean, Rstd, DY, DH, DX, SumsW, SumsB, Notes, h0, h1, h2, y0, y1, y2, d0, d1, d2, n1, n2,
                 rows, length, teams, width,
                 DIMS: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, HAS_DH: tl.constexpr,
                 DW: tl.constexpr, DB: tl.constexpr, EVEN_N: tl.constexpr, EARLY: tl.constexpr, SPIN: tl.constexpr,
                 TEAM: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr):
    """dx, and the sums over the rows of each team, whose programs have `width` columns each. Notes: TEAM for each row
    and the places drawn, all 0."""
    after_previous(EARLY)
    place = tl.cast(tl.atomic_add(Notes + tl.cast(rows, tl.int64) * TEAM, 1, sem="relaxed"), tl.int32)
    team = place // TEAM
    part = place % TEAM
    j = part * width + tl.arange(0, BLOCK_N)
    m_j = j < tl.minimum(length, (part + 1) * width) if not EVEN_N else tl.full((1,), True, tl.int1)
    w = tl.load(Weight + j, mask=m_j, other=0.0) if WEIGHT else 0.0
    sum_w = tl.zeros((BLOCK_N if DW else 1,), tl.float32)
    sum_b = tl.zeros((BLOCK_N if DB else 1,), tl.float32)
    i = tl.cast(team, tl.int64)
    h = tl.load(H + offset_of(i, n1, n2, h0, h1, h2, DIMS) + j, mask=m_j, other=0.0)
    dy = tl.load(DY + offset_of(i, n1, n2, y0, y1, y2, DIMS) + j, mask=m_j, other=0.0)
    mean = tl.load(Mean + i) if CENTRED else 0.0
    rstd = tl.load(Rstd + i)
    _leave(h, dy, w, mean, rstd, Notes + i * TEAM + part, i < rows, CENTRED, WEIGHT)
    for row in tl.range(team, rows, teams, num_stages=STAGES):
        i = tl.cast(row, tl.int64)
        later = tl.minimum(i + teams, rows - 1)
        at = Notes + i * TEAM
        notes = _read(at, TEAM, SPIN)
        next_mean = tl.load(Mean + later) if CENTRED else 0.0
        next_rstd = tl.load(Rstd + later)
        next_h = tl.load(H + offset_of(later, n1, n2, h0, h1, h2, DIMS) + j, mask=m_j, other=0.0)
        next_dy = tl.load(DY + offset_of(later, n1, n2, y0, y1, y2, DIMS) + j, mask=m_j, other=0.0)
        _leave(next_h, next_dy, w, next_mean, next_rstd, Notes + later * TEAM + part, i + teams < rows, CENTRED,
               WEIGHT)
        u = h.to(tl.float32)
        dx = dy.to(tl.float32)
        if CENTRED:
            u -= mean
        u *= rstd
        if DW:
            sum_w += dx * u
        if DB:
            sum_b += dx
        if WEIGHT:
            dx *= w.to(tl.float32)
        ug, g = _sums(notes, at, TEAM, SPIN)
        dx -= u * (ug / length)
        if CENTRED:
            dx -= g / length
        dx *= rstd
        if HAS_DH:
            dx += tl.load(DH + offset_of(i, n1, n2, d0, d1, d2, DIMS) + j, mask=m_j, other=0.0).to(tl.float32)
        tl.store(DX + i * length + j, dx.to(DX.dtype.element_ty), mask=m_j)
        h = next_h
        dy = next_dy
        mean = next_mean
        rstd = next_rstd
    at = tl.cast(team, tl.int64) * length
    if DW:
        tl.store(SumsW + at + j, sum_w, mask=m_j)
    if DB:
        tl.store(SumsB + at + j, sum_b, mask=m_j)
