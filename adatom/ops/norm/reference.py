"""Normalisation of rows and its derivatives in plain PyTorch: the judge, and the documentation.

For each row h of N numbers (h = x + residual, rounded to its dtype),

    m = mean(h) in layer norm, 0 in RMS norm          r = 1 / sqrt(mean((h - m)^2) + eps)
    u = (h - m) r                                     y = u w + b

and P(v) = v - u mean(u v) - [mean(v) in layer norm], a symmetric matrix: the Jacobian of u is r P, and dr = -r^2 mean(u
dh). Everything below follows from these two. Sums are taken in float32, or float64 for float64. All steps are
differentiable, so derivatives of any order are.
"""

from __future__ import annotations

from typing import Any

import torch

from adatom.ops.norm.problem import Tensor, statistics_dtype, sum_dtype


def _wide(t: Tensor) -> Tensor:
    return t.to(statistics_dtype(t.dtype))


def _mean(v: Tensor) -> Tensor:
    return v.mean(-1, keepdim=True)


def _centre(u: Tensor, v: Tensor, centred: bool) -> Tensor:
    """P(v)."""
    v = v - u * _mean(u * v)
    return v - _mean(v) if centred else v


def _sum_rows(v: Tensor) -> Tensor:
    # a copy: the caller's gradient must not become a result
    return v.sum(tuple(range(v.dim() - 1))) if v.dim() > 1 else v.clone()


def normalised(h: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """u (rows, N), r (rows, 1) and m (rows, 1), None in RMS norm, differentiable, in float32 or float64."""
    h = _wide(h)
    m = _mean(h) if centred else None
    d = h if m is None else h - m
    r = torch.rsqrt(_mean(d * d) + eps)
    return d * r, r, m


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool,
    keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """y in x's dtype, h (None without a residual), m (None in RMS norm) and r, both of x's shape less the last.

    keep: whether a backward may follow, which wants m and r; without, both are None.
    """
    h = x if residual is None else x.to(sum_dtype(x, residual)) + residual
    y, r, m = normalised(h, eps, centred)
    if weight is not None:
        y = y * _wide(weight)
    if bias is not None:
        y = y + _wide(bias)
    kept = (None if m is None else m.squeeze(-1), r.squeeze(-1)) if keep else (None, None)
    return y.to(x.dtype), None if residual is None else h, *kept


def backward(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor | None, dy: Tensor,
    dh: Tensor | None, eps: float, centred: bool, wants: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """r P(w dy) + dh in h's dtype, and the sums over rows of dy u and dy in those of weight and bias, where wanted.

    mean and rstd are what the forward found; without rstd both are computed again, differentiably.
    """
    if rstd is None:
        u, r, _ = normalised(h, eps, centred)
    else:
        r = rstd.unsqueeze(-1)
        u = (_wide(h) if mean is None else _wide(h) - mean.unsqueeze(-1)) * r
    dy = _wide(dy)
    dx = r * _centre(u, dy if weight is None else dy * _wide(weight), centred)
    if dh is not None:
        dx = dx + dh
    return (
        dx.to(h.dtype),
        _sum_rows(dy * u).to(weight.dtype) if wants[0] and weight is not None else None,
        _sum_rows(dy).to(bias.dtype) if wants[1] and bias is not None else None,
    )


def backward_backward(
    h: Tensor, weight: Tensor | None, dy: Tensor, ddx: Tensor | None, ddw: Tensor | None, ddb: Tensor | None,
    eps: float, centred: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients by h, weight and dy of what `backward` returns, under the cotangents a = ddx, ddw and ddb.

    With g = w dy: dy gets w r P(a) + ddw u + ddb; w gets the sum over rows of dy r P(a); h gets
    r P(ddw dy - r (mean(u g) a + mean(u a) g)) - r^2 mean(a P(g)) u.
    """
    u, r, _ = normalised(h, eps, centred)
    v = _wide(dy)
    by_dy = torch.zeros_like(v) if ddb is None else _wide(ddb).expand_as(v)
    by_u, by_h, by_w = None, torch.zeros_like(u), None
    if ddw is not None:
        by_dy, by_u = by_dy + _wide(ddw) * u, _wide(ddw) * v
    if ddx is not None:
        a = _wide(ddx)
        w = 1.0 if weight is None else _wide(weight)
        g, moved = v * w, r * _centre(u, a, centred)
        by_dy = by_dy + w * moved
        by_w = None if weight is None else _sum_rows(v * moved).to(weight.dtype)
        turned = r * (_mean(u * g) * a + _mean(u * a) * g)
        by_u = -turned if by_u is None else by_u - turned
        by_h = -r * r * _mean(a * _centre(u, g, centred)) * u
    if by_u is not None:
        by_h = by_h + r * _centre(u, by_u, centred)
    return by_h.to(h.dtype), by_w, by_dy.to(dy.dtype)


def jvp(
    h: Tensor, weight: Tensor | None, eps: float, centred: bool, th: Tensor | None, tw: Tensor | None, tb: Tensor | None
) -> Tensor | float:
    """What y moves by along th, tw and tb: w r P(th) + u tw + tb, in float32 or float64; 0 where nothing moves."""
    u, r, _ = normalised(h, eps, centred)
    ty: Tensor | float = 0.0
    if th is not None:
        moved = r * _centre(u, _wide(th), centred)
        ty = moved if weight is None else moved * _wide(weight)
    if tw is not None:
        ty = ty + u * _wide(tw)
    if tb is not None:
        ty = ty + _wide(tb).expand_as(u)
    return ty
