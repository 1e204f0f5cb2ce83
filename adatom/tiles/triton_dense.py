# mypy: ignore-errors
"""Device code that dense layers share (Triton): activations, their slopes, and the gradient of what one was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import adatom.tiles.compat  # noqa: F401  (levels Triton versions)
from adatom.device import facts
from adatom.tiles.launch import Launch


@triton.jit
def _normal(x):
    """The normal distribution's Phi(x), to float32 accuracy in both tails."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def value_and_slope(x, ACT: tl.constexpr):
    """(a(x), a'(x)) of a float32 x."""
    if ACT == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == "gelu_tanh":
        x2 = x * x
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627159536 * x2))
        a = x * s
        return a, s + a * (1.0 - s) * (1.5957691216057308 + 0.21406444881478608 * x2)
    elif ACT == "gelu":
        p = _normal(x)
        return x * p, p + x * tl.exp(x * x * -0.5) * 0.3989422804014327
    else:
        return x, x * 0.0 + 1.0


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _slope(x, ACT: tl.constexpr, SHORT: tl.constexpr):
    """(a(x), a'(x)). SHORT: to what numbers of 16 bits show; this many erfs would take longer than the memory does.

    gelu: by Abramowitz and Stegun 7.1.25, to 1.3e-5.
    """
    if SHORT and ACT == "gelu":
        t = _reciprocal(1.0 + 0.33267252 * tl.abs(x))
        e = tl.exp2(x * x * -0.7213475204444817)
        p = ((0.3739278 * t - 0.0479399) * t + 0.1740121) * t * e
        p = tl.where(x > 0.0, 1.0 - p, p)
        return x * p, p + x * e * 0.3989422804014327
    elif SHORT and (ACT == "gelu_tanh" or ACT == "silu"):
        x2 = x * x
        slope = 1.5957691216057308 + 0.21406444881478608 * x2 if ACT == "gelu_tanh" else 1.0
        y = x * (1.5957691216057308 + 0.07135481627159536 * x2) if ACT == "gelu_tanh" else x
        s = _reciprocal(1.0 + tl.exp2(y * -1.4426950408889634))
        a = x * s
        return a, s + a * (1.0 - s) * slope
    else:
        return value_and_slope(x, ACT)


@triton.jit
def _gradient_kernel(Z, D, DZ, Sums, M, N, stride_z, stride_d, stride_dz, ACT: tl.constexpr, GATED: tl.constexpr,
                     SUMS: tl.constexpr, SHORT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     STEPS: tl.constexpr):
    """dz from z, (M, N) or (M, 2 N) if GATED, and from D, the gradient of the result; a program takes BLOCK_N columns
    of STEPS * BLOCK_M rows. SUMS: over these rows, (programs of a column, N)."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(N, BLOCK_N)
    part = pid // blocks
    j = (pid % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        i = (part * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        m = (i < M)[:, None] & (j < N)[None, :]
        r = i.to(tl.int64)[:, None]
        z = tl.load(Z + r * stride_z + j[None, :], mask=m, other=0.0).to(tl.float32)
        d = tl.load(D + r * stride_d + j[None, :], mask=m, other=0.0).to(tl.float32)
        value, slope = _slope(z, ACT, SHORT)
        if GATED:
            up = tl.load(Z + r * stride_z + N + j[None, :], mask=m, other=0.0).to(tl.float32)
            tl.store(DZ + r * stride_dz + N + j[None, :], (d * value).to(DZ.dtype.element_ty), mask=m)
            d *= up
        dz = d * slope
        tl.store(DZ + r * stride_dz + j[None, :], dz.to(DZ.dtype.element_ty), mask=m)
        if SUMS:
            total += dz
    if SUMS:
        tl.store(Sums + part.to(tl.int64) * N + j, tl.sum(total, 0), mask=j < N)


_launches: dict[Any, Launch] = {}


def remembered(build: Callable[..., Launch], tensors: tuple[torch.Tensor | None, ...], *options: Any) -> Launch:
    """build(tensors, *options), or what it returned for tensors and options alike."""
    seen = tuple(
        None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16) for t in tensors
    )
    key = build, facts(tensors[0].device), seen, options
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= 4096:  # sizes that never repeat must not fill the memory
            _launches.clear()
        found = _launches[key] = build(tensors, *options)
    return found


@triton.jit
def _sums_kernel(Parts, Out, parts, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Out = the sum of the rows of Parts, (parts, N), in order, for BLOCK_N columns."""
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, parts, BLOCK_M):
        i = first + tl.arange(0, BLOCK_M)
        m = (i < parts)[:, None] & (j < N)[None, :]
        total += tl.load(Parts + i.to(tl.int64)[:, None] * N + j[None, :], mask=m, other=0.0)
    tl.store(Out + j, tl.sum(total, 0).to(Out.dtype.element_ty), mask=j < N)


def _gradient(tensors: tuple[torch.Tensor, ...], act: str, gated: bool, sums: bool) -> Launch:
    z, dout, dz, _ = tensors
    rows, n = dout.shape
    block_m, steps, block_n, warps = _tile(z, n, gated)
    meta = dict(
        ACT=act,
        GATED=gated,
        SUMS=sums,
        SHORT=facts(z.device).arch > 0 and z.dtype.itemsize == 2,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STEPS=steps,
        num_warps=warps,
    )
    scalars = (rows, n, z.stride(0), dout.stride(0), dz.stride(0))
    return Launch(_gradient_kernel, -(-rows // (block_m * steps)) * -(-n // block_n), scalars, meta)


def _sums(tensors: tuple[torch.Tensor, ...]) -> Launch:
    parts, n = tensors[0].shape
    return Launch(_sums_kernel, -(-n // 32), (parts, n), dict(BLOCK_M=64, BLOCK_N=32, num_warps=4))


def _tile(z: torch.Tensor, n: int, gated: bool) -> tuple[int, int, int, int]:
    """(rows of a block, blocks that a program takes one below the other, columns, warps)."""
    if gated or n < 1024:
        return 8, 8, 256, 4
    if z.shape[0] // 64 * (n // 2048) >= 3 * facts(z.device).sms:  # enough for all multiprocessors
        return 1, 64, 2048, 8
    return 1, 16, 1024, 4


def gradient(
    z: torch.Tensor, dout: torch.Tensor, act: str, gated: bool, sums: bool, spend: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dz (rows, out), or (rows, 2 * out) if gated, of a(z) or a(gate) * up, from z and dout; and the sums of its rows.

    The sums are in float32, of the rows of each program, then of those: the same bits on every run. spend: dz is
    written in the place of z.
    """
    rows, n = dout.shape
    block_m, steps = _tile(z, n, gated)[:2]
    parts = -(-rows // (block_m * steps))
    dz = z if spend else z.new_empty(z.shape)
    partial = z.new_empty(parts, n, dtype=torch.float32) if sums else None
    tensors = (z, dout, dz, partial)
    remembered(_gradient, tensors, act, gated, sums)(*tensors)
    if partial is None:
        return dz, None
    total = z.new_empty(n)
    remembered(_sums, (partial, total))(partial, total)
    return dz, total
