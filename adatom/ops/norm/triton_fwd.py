# mypy: ignore-errors
"""Normalisation forward in Triton, sm_80 and up: a program owns some rows, in registers where they fit.

Longer rows are read twice, the second time from caches. Each lane then sums what it sees less the first number it sees,
and these means and squares are merged (Chan, Golub, LeVeque, Am. Stat. 37, 1983).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adatom.device import facts
from adatom.ops.norm.problem import statistics_dtype, sum_dtype
from adatom.ops.norm.triton_rows import Config, Rows, mask_of, offset_of, remembered, tile_of
from adatom.tiles.launch import Launch
from adatom.tiles.triton import after_previous

# (bytes of an element, largest length) -> tile; per_sm for rows that are held in 16 bits
CONFIGS: dict[tuple[int, int], Config] = {
    (2, 128): Config(32, 4),
    (2, 256): Config(16, 4),
    (2, 512): Config(8, 4),
    (2, 1024): Config(4, 4),
    (2, 2048): Config(2, 4),
    (2, 4096): Config(1, 8),
    (2, 7168): Config(1, 8, 4),
    (2, 8192): Config(1, 16, 3),
    (2, 12288): Config(1, 16, chunks=4),
    (2, 16384): Config(1, 32, chunks=2),
    (2, 32768): Config(1, 32, chunks=4),
    (4, 128): Config(16, 4),
    (4, 256): Config(8, 4),
    (4, 512): Config(4, 4),
    (4, 1024): Config(2, 4),
    (4, 2048): Config(1, 4),
    (4, 4096): Config(1, 8),
    (4, 8192): Config(1, 16),
    (4, 16384): Config(1, 32, chunks=4),
}
LAYER = CONFIGS | {(2, 8192): Config(1, 8, 4), (2, 16384): Config(1, 16, 2)}
# with a residual, if the sum has 16 bits: to read two tensors again costs more than to hold their sum
_SUM = {(2, 12288): Config(1, 16, 2), (2, 16384): Config(1, 16, 2), (2, 32768): Config(1, 16, 1)}
RESIDUAL = CONFIGS | {(2, 1024): Config(2, 1), (2, 7168): Config(1, 4), (2, 8192): Config(1, 4)} | _SUM
LAYER_RESIDUAL = LAYER | _SUM
LONG = Config(1, 16, chunks=0)  # rows that no tile holds
LONG_BLOCK = 8192


@triton.jit
def _load_sum(at_x, at_r, m, H, RESIDUAL: tl.constexpr, POLICY: tl.constexpr):
    """x, or x + residual rounded to the dtype of H, in float32; 0 where m is False."""
    h = tl.load(at_x, mask=m, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if RESIDUAL:
        h += tl.load(at_r, mask=m, other=0.0, eviction_policy=POLICY).to(tl.float32)
        h = h.to(H.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def _again(x, HELD: tl.constexpr):
    """x. HELD: as something new to the compiler, which so keeps 16 bits of a number, not the float32 it was before."""
    if HELD:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit(do_not_specialize=["n1", "n2", "rows"])
def _fwd_kernel(X, Residual, Weight, Bias, Y, H, Mean, Rstd, x0, x1, x2, r0, r1, r2, n1, n2, rows, length,
                eps,
                DIMS: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
                RESIDUAL: tl.constexpr, EVEN_R: tl.constexpr, EVEN_N: tl.constexpr, WHOLE: tl.constexpr,
                HELD: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr, PIECE: tl.constexpr, BLOCK_R: tl.constexpr,
                BLOCK_N: tl.constexpr):
    after_previous(EARLY)
    j = tl.arange(0, BLOCK_N)[None, :]
    m_j = mask_of(0, j, 1, length, True, EVEN_N)
    LATE: tl.constexpr = HELD or CENTRED and BLOCK_N > 2048
    if WHOLE and not LATE:
        if WEIGHT:
            w = tl.load(Weight + j, mask=m_j, other=0.0)
        if BIAS:
            b = tl.load(Bias + j, mask=m_j, other=0.0)
    i = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    m_i = mask_of(i, 0, rows, 1, EVEN_R, True)
    at_x = X + offset_of(i, n1, n2, x0, x1, x2, DIMS)
    at_r = Residual + offset_of(i, n1, n2, r0, r1, r2, DIMS)
    at = i * length
    if WHOLE:
        m = mask_of(i, j, rows, length, EVEN_R, EVEN_N)
        x = _load_sum(at_x + j, at_r + j, m, H, RESIDUAL, "")
        if HELD:
            x = x.to(H.dtype.element_ty)
        if RESIDUAL:
            tl.store(H + at + j, x.to(H.dtype.element_ty), mask=m)
        h = x.to(tl.float32)
        if CENTRED:
            mean = tl.sum(h, 1, keep_dims=True) / length
            x = _again(x, HELD)
            h = x.to(tl.float32) - mean
            if not EVEN_N:
                h = tl.where(j < length, h, 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(h * h, 1, keep_dims=True) / length + eps)
        if HELD:
            h = _again(x, HELD).to(tl.float32)
            if CENTRED:
                h -= mean
        y = h * rstd
        if LATE:  # loaded late: two vectors beside the row cost half of the programs on a multiprocessor
            if WEIGHT:
                w = tl.load(Weight + j, mask=m_j, other=0.0)
            if BIAS:
                b = tl.load(Bias + j, mask=m_j, other=0.0)
        if WEIGHT:
            y *= w.to(tl.float32)
        if BIAS:
            y += b.to(tl.float32)
        tl.store(Y + at + j, y.to(Y.dtype.element_ty), mask=m)
    else:
        # each lane adds up what lies side by side: a few registers instead of a row's
        shift = tl.zeros((BLOCK_R, 1), tl.float32)
        sum_j = tl.zeros((BLOCK_R, BLOCK_N // PIECE), tl.float32)
        square_j = tl.zeros((BLOCK_R, BLOCK_N // PIECE), tl.float32)
        if CENTRED:
            m = mask_of(i, j, rows, length, EVEN_R, EVEN_N)
            h = _load_sum(at_x + j, at_r + j, m, H, RESIDUAL, "evict_last")
            shift = tl.sum(h, 1, keep_dims=True) / tl.minimum(length, BLOCK_N)
        for n in range(0, length, BLOCK_N):
            m = mask_of(i, n + j, rows, length, EVEN_R, EVEN_N)
            h = _load_sum(at_x + n + j, at_r + n + j, m, H, RESIDUAL, "evict_last")
            if RESIDUAL:
                tl.store(H + at + n + j, h.to(H.dtype.element_ty), mask=m)
            if CENTRED:
                h -= shift
                if not EVEN_N:
                    h = tl.where(n + j < length, h, 0.0)
                sum_j += tl.sum(tl.reshape(h, (BLOCK_R, BLOCK_N // PIECE, PIECE)), 2)
            square_j += tl.sum(tl.reshape(h * h, (BLOCK_R, BLOCK_N // PIECE, PIECE)), 2)
        if CENTRED:
            apart = tl.sum(sum_j, 1, keep_dims=True) / length
            mean = shift + apart
            square_j -= apart * apart * length / (BLOCK_N // PIECE)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(square_j, 1, keep_dims=True) / length + eps)
        for n in range(0, length, BLOCK_N):
            m = mask_of(i, n + j, rows, length, EVEN_R, EVEN_N)
            m_j = mask_of(0, n + j, 1, length, True, EVEN_N)
            h = _load_sum(at_x + n + j, at_r + n + j, m, H, RESIDUAL, "evict_first")
            if CENTRED:
                h -= mean
            y = h * rstd
            if WEIGHT:
                y *= tl.load(Weight + n + j, mask=m_j, other=0.0).to(tl.float32)
            if BIAS:
                y += tl.load(Bias + n + j, mask=m_j, other=0.0).to(tl.float32)
            tl.store(Y + at + n + j, y.to(Y.dtype.element_ty), mask=m, eviction_policy="evict_first")
    if KEEP:
        if CENTRED:
            tl.store(Mean + i, mean, mask=m_i)
        tl.store(Rstd + i, rstd, mask=m_i)


def _launch(
    r: Rows, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, centred: bool, keep: bool
) -> Launch:
    x, residual = r.tensors
    assert x is not None
    device, length, size = facts(x.device), r.length, x.element_size()
    kept = x.dtype if residual is None else sum_dtype(x, residual)
    summed = residual is not None and kept.itemsize == 2
    configs = (LAYER_RESIDUAL if summed else LAYER) if centred else RESIDUAL if summed else CONFIGS
    config = next((c for (s, n), c in configs.items() if s == size and length <= n), LONG)
    block = tile_of(length) // config.chunks if config.chunks else LONG_BLOCK
    scalars = (*r.strides, *r.sizes, r.count, length, eps)
    held = config.per_sm > 0 and kept.itemsize == 2 and device.kind == "cuda"
    meta = {
        "DIMS": r.dims,
        "CENTRED": centred,
        "WEIGHT": weight is not None,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "EVEN_R": r.count % config.rows == 0,
        "EVEN_N": length % block == 0,
        "WHOLE": config.chunks == 1,
        "HELD": held,
        "KEEP": keep,
        "EARLY": device.arch >= 90,
        "PIECE": 16 // size,
        "BLOCK_R": config.rows,
        "BLOCK_N": block,
        "num_warps": config.num_warps,
        "maxnreg": 65536 // (config.per_sm * config.num_warps * 32) if held else None,
        "launch_pdl": device.arch >= 90,
    }
    return Launch(_fwd_kernel, -(-r.count // config.rows), scalars, meta, config.spill)


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
    centred: bool, keep: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """y, h, mean and rstd; the contract is that of reference.py."""
    wide = statistics_dtype(x.dtype)
    y = x.new_empty(x.shape)
    h = None if residual is None else x.new_empty(x.shape, dtype=sum_dtype(x, residual))
    rstd = x.new_empty(x.shape[:-1], dtype=wide) if keep else None
    mean = torch.empty_like(rstd) if keep and centred else None
    if keep and x.shape[-1] == 0:
        rstd.fill_(float("nan"))
    if y.numel() == 0:
        return y, h, mean, rstd
    options = "fwd", eps, centred, keep, facts(x.device)
    launch, rows = remembered(
        (x, residual), (weight, bias), options, lambda r: _launch(r, weight, bias, eps, centred, keep)
    )
    launch(*rows, weight, bias, y, h, mean, rstd)
    return y, h, mean, rstd
