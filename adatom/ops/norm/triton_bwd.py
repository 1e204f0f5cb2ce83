# mypy: ignore-errors
"""Normalisation backward in Triton, sm_80 and up.

Programs stay: each takes every n-th tile of rows and sums the gradients of weight and bias over its tiles, in
registers. It writes these sums once, and a second kernel adds those of all programs, in order: the same bits each run.
Longer rows are shared out among programs (triton_bwd_apart.py); beyond the longest such row, the sums over rows are a
pass of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from adatom.device import Device, facts
from adatom.ops.norm.triton_bwd_apart import SPILL, Share, apart_kernel, share_of
from adatom.ops.norm.triton_rows import Config, Rows, mask_of, offset_of, remembered, tile_of
from adatom.tiles.launch import Launch, take_turn
from adatom.tiles.triton import after_previous

# (bytes of an element, largest length) -> tile
CONFIGS: dict[tuple[int, int], Config] = {
    (2, 128): Config(16, 4, 4),
    (2, 256): Config(8, 4, 4),
    (2, 512): Config(4, 4, 4),
    (2, 1024): Config(4, 4, 4),
    (2, 2048): Config(2, 4, 4),
    (2, 4096): Config(2, 16, 1, 4),
    (2, 8192): Config(1, 16, 1, 5),
    (4, 128): Config(16, 4, 4),
    (4, 256): Config(8, 4, 4),
    (4, 512): Config(4, 4, 4),
    (4, 1024): Config(2, 4, 4, 3),
    (4, 2048): Config(1, 4, 4, 3),
    (4, 4096): Config(1, 8, 2, 3),
    (4, 8192): Config(1, 16, 1, 3),
}
LONG = Config(1, 16)  # rows beyond all of these, and beyond those that programs share
LONG_BLOCK = 8192
COLUMNS = Config(16, 4, 4)  # sums over rows in a pass of their own
COLUMNS_BLOCK = 256
SUMS = Config(64, 4)  # the sums of programs, added
SUMS_BLOCK = 32


@triton.jit
def _load(at, m, POLICY: tl.constexpr):
    return tl.load(at, mask=m, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _scaled(at_dy, at_w, m, m_j, WEIGHT: tl.constexpr, POLICY: tl.constexpr):
    """dy and w dy."""
    dy = _load(at_dy, m, POLICY)
    if WEIGHT:
        return dy, dy * tl.load(at_w, mask=m_j, other=0.0).to(tl.float32)
    else:
        return dy, dy


@triton.jit
def _finish(at_dx, at_dh, u, g, mean_ug, mean_g, rstd, m, CENTRED: tl.constexpr, DH: tl.constexpr,
            POLICY: tl.constexpr):
    """Store dx = r (g - u mean(u g) - [mean(g)]) + dh."""
    dx = g - u * mean_ug
    if CENTRED:
        dx -= mean_g
    dx *= rstd
    if DH:
        dx += _load(at_dh, m, POLICY)
    tl.store(at_dx, dx.to(at_dx.dtype.element_ty), mask=m, eviction_policy=POLICY)


@triton.jit(do_not_specialize=["n1", "n2", "rows", "programs"])
def _bwd_kernel(H, Weight, Mean, Rstd, DY, DH, DX, SumsW, SumsB, h0, h1, h2, y0, y1, y2, d0, d1, d2, n1, n2, rows,
                length, programs,
                DIMS: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, HAS_DH: tl.constexpr,
                DW: tl.constexpr, DB: tl.constexpr, EVEN_R: tl.constexpr, EVEN_N: tl.constexpr,
                FLAT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, BLOCK_R: tl.constexpr,
                BLOCK_N: tl.constexpr):
    after_previous(EARLY)
    j = tl.arange(0, BLOCK_N)[None, :]
    pid = tl.program_id(0)
    tiles = tl.cdiv(rows, BLOCK_R)
    if WEIGHT:
        w = tl.load(Weight + j, mask=mask_of(0, j, 1, length, True, EVEN_N), other=0.0)
    SUM_ROWS: tl.constexpr = 1 if FLAT else BLOCK_R
    sums_w = tl.zeros((SUM_ROWS if DW else 1, BLOCK_N if DW else 1), tl.float32)
    sums_b = tl.zeros((SUM_ROWS if DB else 1, BLOCK_N if DB else 1), tl.float32)
    for tile in tl.range(pid, tiles, programs, num_stages=STAGES):
        i = tl.cast(tile, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        m_i = mask_of(i, 0, rows, 1, EVEN_R, True)
        at_h = H + offset_of(i, n1, n2, h0, h1, h2, DIMS)
        at_dy = DY + offset_of(i, n1, n2, y0, y1, y2, DIMS)
        at_dh = DH + offset_of(i, n1, n2, d0, d1, d2, DIMS)
        at_dx = DX + i * length
        rstd = tl.load(Rstd + i, mask=m_i, other=0.0)
        if CENTRED:
            mean = tl.load(Mean + i, mask=m_i, other=0.0)
        m = mask_of(i, j, rows, length, EVEN_R, EVEN_N)
        u = _load(at_h + j, m, "")
        dy = _load(at_dy + j, m, "")
        if CENTRED:
            u -= mean
        u *= rstd
        g = dy
        if WEIGHT:
            g = dy * w.to(tl.float32)
        mean_ug = tl.sum(u * g, 1, keep_dims=True) / length
        mean_g = mean_ug
        if CENTRED:
            mean_g = tl.sum(g, 1, keep_dims=True) / length
        if FLAT:
            if DW:
                sums_w += tl.sum(dy * u, 0, keep_dims=True)
            if DB:
                sums_b += tl.sum(dy, 0, keep_dims=True)
        else:
            if DW:
                sums_w += dy * u
            if DB:
                sums_b += dy
        _finish(at_dx + j, at_dh + j, u, g, mean_ug, mean_g, rstd, m, CENTRED, HAS_DH, "")
    at = tl.cast(pid, tl.int64) * length
    m_j = mask_of(0, j, 1, length, True, EVEN_N)
    if DW:
        tl.store(SumsW + at + j, tl.sum(sums_w, 0, keep_dims=True), mask=m_j)
    if DB:
        tl.store(SumsB + at + j, tl.sum(sums_b, 0, keep_dims=True), mask=m_j)


@triton.jit(do_not_specialize=["n1", "n2", "rows"])
def _bwd_long_kernel(H, Weight, Mean, Rstd, DY, DH, DX, h0, h1, h2, y0, y1, y2, d0, d1, d2, n1, n2, rows, length,
                     DIMS: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, HAS_DH: tl.constexpr,
                     EVEN_N: tl.constexpr, EARLY: tl.constexpr, BLOCK_N: tl.constexpr):
    """dx of one row, walked over twice."""
    after_previous(EARLY)
    j = tl.arange(0, BLOCK_N)
    i = tl.cast(tl.program_id(0), tl.int64)
    at_h = H + offset_of(i, n1, n2, h0, h1, h2, DIMS)
    at_dy = DY + offset_of(i, n1, n2, y0, y1, y2, DIMS)
    at_dh = DH + offset_of(i, n1, n2, d0, d1, d2, DIMS)
    at_dx = DX + i * length
    rstd = tl.load(Rstd + i)
    mean = tl.load(Mean + i) if CENTRED else 0.0
    ug = tl.zeros((BLOCK_N,), tl.float32)
    g_j = tl.zeros((BLOCK_N,), tl.float32)
    for n in range(0, length, BLOCK_N):
        m = (n + j < length) | EVEN_N
        u = _load(at_h + n + j, m, "") - mean
        dy, g = _scaled(at_dy + n + j, Weight + n + j, m, m, WEIGHT, "")
        ug += u * g
        g_j += g
    mean_ug = tl.sum(ug, 0) / length * rstd
    mean_g = tl.sum(g_j, 0) / length
    for n in range(0, length, BLOCK_N):
        m = (n + j < length) | EVEN_N
        u = (_load(at_h + n + j, m, "evict_first") - mean) * rstd
        dy, g = _scaled(at_dy + n + j, Weight + n + j, m, m, WEIGHT, "evict_first")
        _finish(at_dx + n + j, at_dh + n + j, u, g, mean_ug, mean_g, rstd, m, CENTRED, HAS_DH, "evict_first")


@triton.jit(do_not_specialize=["n1", "n2", "rows", "programs"])
def _columns_kernel(H, Mean, Rstd, DY, SumsW, SumsB, h0, h1, h2, y0, y1, y2, n1, n2, rows, length, programs,
                    DIMS: tl.constexpr, CENTRED: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
                    EVEN_R: tl.constexpr, EVEN_N: tl.constexpr, EARLY: tl.constexpr,
                    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums over every n-th tile of rows of some columns of dy u and dy."""
    after_previous(EARLY)
    part = tl.program_id(0) % programs
    j = tl.program_id(0) // programs * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sum_w = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    sum_b = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for tile in range(part, tl.cdiv(rows, BLOCK_R), programs):
        i = tl.cast(tile, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        m_i = mask_of(i, 0, rows, 1, EVEN_R, True)
        m = mask_of(i, j, rows, length, EVEN_R, EVEN_N)
        dy = _load(DY + offset_of(i, n1, n2, y0, y1, y2, DIMS) + j, m, "evict_first")
        if DW:
            u = _load(H + offset_of(i, n1, n2, h0, h1, h2, DIMS) + j, m, "evict_first")
            if CENTRED:
                u -= tl.load(Mean + i, mask=m_i, other=0.0)
            sum_w += dy * (u * tl.load(Rstd + i, mask=m_i, other=0.0))
        sum_b += dy
    at = tl.cast(part, tl.int64) * length + j
    m_j = mask_of(0, j, 1, length, True, EVEN_N)
    if DW:
        tl.store(SumsW + at, tl.sum(sum_w, 0, keep_dims=True), mask=m_j)
    if DB:
        tl.store(SumsB + at, tl.sum(sum_b, 0, keep_dims=True), mask=m_j)


@triton.jit(do_not_specialize=["parts_w", "parts_b"])
def _sums_kernel(Rstd, SumsW, SumsB, DWeight, DBias, length, parts_w, parts_b, DW: tl.constexpr, DB: tl.constexpr,
                 EVEN_N: tl.constexpr, EARLY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sums of all programs, added, for some columns of the gradient of the weight, then of the bias."""
    after_previous(EARLY)
    blocks = tl.cdiv(length, BLOCK_N)
    block = tl.program_id(0)
    if DW:
        if block < blocks:
            _add(SumsW, DWeight, block, length, parts_w, EVEN_N, BLOCK_R, BLOCK_N)
        block -= blocks
    if DB:
        if block >= 0:
            _add(SumsB, DBias, block, length, parts_b, EVEN_N, BLOCK_R, BLOCK_N)


@triton.jit
def _add(Sums, Out, block, length, parts, EVEN_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for p in range(0, parts, BLOCK_R):
        i = p + tl.arange(0, BLOCK_R)[:, None]
        m = mask_of(i, j, parts, length, False, EVEN_N)
        total += tl.load(Sums + tl.cast(i, tl.int64) * length + j, mask=m, other=0.0)
    m_j = mask_of(0, j, 1, length, True, EVEN_N)
    tl.store(Out + j, tl.sum(total, 0, keep_dims=True).to(Out.dtype.element_ty), mask=m_j)


def _stages(config: Config | Share, device: Device, loaded: int) -> int:
    """How many tiles of so many bytes to have on their way: as configured, if shared memory holds them."""
    room = (device.shared_memory - 8192) // max(config.per_sm, 1)
    return max(1, min(config.num_stages, 1 + room // loaded)) if device.shared_memory else config.num_stages


class _Plan:
    """The kernels of one backward, and the sums of programs that lie between them."""

    def __init__(self, r: Rows, weight: torch.Tensor | None, centred: bool, wants: tuple[bool, bool]) -> None:
        h, dy, dh = r.tensors
        assert h is not None and dy is not None
        device, length = facts(h.device), r.length
        size = max(h.element_size(), dy.element_size())
        found = next((c for (s, n), c in CONFIGS.items() if s == size and length <= n), None)
        config = found or LONG
        if centred and config.per_sm > 1:  # two sums for each column, not one
            config = config._replace(rows=max(1, config.rows // 2))
        share = None if found else share_of(size, length, device.sms)
        self.whole, self.length = found is not None or share is not None, length
        self.notes = 0
        block = share.columns if share else tile_of(length) if found else LONG_BLOCK
        tiles, early, sms = -(-r.count // config.rows), device.arch >= 90, device.sms or 2
        common = {"DIMS": r.dims, "CENTRED": centred, "EARLY": early, "launch_pdl": early}
        dx = common | {
            "WEIGHT": weight is not None,
            "HAS_DH": dh is not None,
            "EVEN_N": length % block == 0,
            "BLOCK_N": block,
            "num_warps": config.num_warps,
            # registers for all programs that are to share a multiprocessor
            "maxnreg": 65536 // (config.per_sm * config.num_warps * 32) if config.per_sm > 1 else None,
        }
        steps = (*r.strides, *r.sizes, r.count, length)
        dw, db = wants if self.whole else (False, False)
        if share is not None:
            team = -(-length // share.columns)
            programs = min(r.count, max(1, share.per_sm * sms // team))
            width = -(-length // (16 * team)) * 16
            loaded = share.columns * sum(t.element_size() for t in r.tensors if t is not None)
            tile = {
                "DW": dw,
                "DB": db,
                "SPIN": device.kind == "cuda",
                "TEAM": team,
                "STAGES": _stages(share, device, loaded),
                "EVEN_N": length == team * share.columns,
                "num_warps": share.num_warps,
                "maxnreg": 65536 // (share.per_sm * share.num_warps * 32) if share.per_sm > 1 else None,
            }
            self.notes = r.count * team + 1  # and the places drawn
            self.main = Launch(apart_kernel, programs * team, (*steps, programs, width), dx | tile, SPILL)
        elif self.whole:
            programs = min(tiles, config.per_sm * sms)
            loaded = config.rows * block * sum(t.element_size() for t in r.tensors if t is not None)
            tile = {
                "DW": dw,
                "DB": db,
                "EVEN_R": r.count % config.rows == 0,
                "FLAT": block >= config.num_warps * 256,
                "STAGES": _stages(config, device, loaded),
                "BLOCK_R": config.rows,
            }
            self.main = Launch(_bwd_kernel, programs, (*steps, programs), dx | tile, config.spill)
        else:
            programs = r.count
            self.main = Launch(_bwd_long_kernel, programs, steps, dx, config.spill)
        self.parts = [programs, programs]
        late = (False, False) if self.whole else wants
        self.columns = None
        if any(late):
            blocks = -(-length // COLUMNS_BLOCK)
            parts = min(-(-r.count // COLUMNS.rows), max(1, COLUMNS.per_sm * sms // blocks))
            self.parts = [parts if n else p for p, n in zip(self.parts, late)]
            tile = {
                "DW": late[0],
                "DB": late[1],
                "EVEN_R": r.count % COLUMNS.rows == 0,
                "EVEN_N": length % COLUMNS_BLOCK == 0,
                "BLOCK_R": COLUMNS.rows,
                "BLOCK_N": COLUMNS_BLOCK,
                "num_warps": COLUMNS.num_warps,
            }
            steps = (*r.strides[:6], *r.sizes, r.count, length, parts)
            self.columns = Launch(_columns_kernel, parts * blocks, steps, common | tile)
        tile = {
            "DW": wants[0],
            "DB": wants[1],
            "EVEN_N": length % SUMS_BLOCK == 0,
            "EARLY": early,
            "BLOCK_R": SUMS.rows,
            "BLOCK_N": SUMS_BLOCK,
            "num_warps": SUMS.num_warps,
            "launch_pdl": early,
        }
        self.sums = Launch(_sums_kernel, -(-length // SUMS_BLOCK) * sum(wants), (length, *self.parts), tile)

    def __call__(
        self, rows: Sequence[torch.Tensor | None], weight: torch.Tensor | None, mean: torch.Tensor | None,
        rstd: torch.Tensor, dx: torch.Tensor, dweight: torch.Tensor | None, dbias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        h, dy, dh = rows
        sums = [
            None if t is None else rstd.new_empty(n, self.length) for t, n in zip((dweight, dbias), self.parts)
        ]
        if self.notes:
            take_turn(rstd.device)
            sums.append(torch.zeros(self.notes, dtype=torch.int64, device=rstd.device))
        self.main(h, weight, mean, rstd, dy, dh, dx, *(sums if self.whole else ()))
        if self.columns is not None:
            self.columns(h, mean, rstd, dy, *sums)
        if dweight is not None or dbias is not None:
            self.sums(rstd, *sums[:2], dweight, dbias)


def backward(
    h: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor | None,
    rstd: torch.Tensor, dy: torch.Tensor, dh: torch.Tensor | None, eps: float, centred: bool, wants: tuple[bool, bool],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dx, dweight and dbias; the contract is that of reference.py."""
    wants = wants[0] and weight is not None, wants[1] and bias is not None
    dx = h.new_empty(h.shape)
    if h.numel() == 0:
        return dx, *(torch.zeros_like(t) if w and t is not None else None for t, w in zip((weight, bias), wants))
    dweight, dbias = (torch.empty_like(t) if w and t is not None else None for t, w in zip((weight, bias), wants))
    options = "bwd", centred, wants, facts(h.device)
    plan, rows = remembered(
        (h, dy, dh), (weight, bias, mean, rstd), options, lambda r: _Plan(r, weight, centred, wants)
    )
    plan(rows, weight, mean, rstd, dx, dweight, dbias)
    return dx, dweight, dbias
